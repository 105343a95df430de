// SPDX-License-Identifier: Apache-2.0

package controller

// PortConfig is what a port is made of.
type PortConfig struct {
	ID uint16 // names the port to hosts; unique in a Target

	// Where discovery says that the port is; empty: what the listener says, and
	// for a listener on all addresses, the one that the asking host came to.
	Address, Service string
}

// ANAState says how a namespace group is reached through a port (Base 2.0, 8.1).
type ANAState uint8

// The states.
const (
	ANAOptimized      ANAState = 0x1
	ANANonOptimized   ANAState = 0x2
	ANAInaccessible   ANAState = 0x3
	ANAPersistentLoss ANAState = 0x4
	ANAChange         ANAState = 0xf
)

// Port is a listener and what is reached through it.
// All methods may be called from any goroutine.
type Port struct{}

// Link lets hosts reach s through the port; again is no error.
func (p *Port) Link(s *Subsystem) error { panic("soon") }

// Unlink ends that and kills the controllers of s that came through the port. It
// does not wait for their commands: see Subsystem.Close and RemoveNamespace.
func (p *Port) Unlink(s *Subsystem) { panic("soon") }

// SetANA sets the state of a namespace group as seen through the port; hosts
// are told. A group that was never set is optimized.
func (p *Port) SetANA(group uint32, state ANAState) error { panic("soon") }

// Close closes the listener and kills all controllers that came through it.
func (p *Port) Close() error { panic("soon") }

// Secret is a key that no log shows.
type Secret string

// String hides the secret.
func (Secret) String() string { return "[redacted]" }

// GoString hides the secret.
func (Secret) GoString() string { return "[redacted]" }

type door struct{}

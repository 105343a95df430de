// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	"weft.dev/weft/proto/block"
)

// Host is who may connect to a subsystem.
type Host struct {
	NQN block.NQN
	// HostKey is the DH-HMAC-CHAP secret (DHHC-1:…) with which the host must
	// prove itself; empty: it need not.
	HostKey Secret
	// ControllerKey is the secret with which the controller proves itself, if
	// the host asks for it.
	ControllerKey Secret
}

// SubsystemConfig is what a subsystem is made of.
type SubsystemConfig struct {
	NQN      block.NQN
	Serial   string // up to 20 printable ASCII characters
	Model    string // up to 40; empty: "Weft"
	Firmware string // up to 8; empty: "1"

	// Controllers get ids from CntlidMin to CntlidMax; 0, 0 means 1 to 65519.
	// Two targets that serve one NQN must have ranges that do not meet.
	CntlidMin, CntlidMax uint16

	Hosts        []Host // who may connect; empty: nobody
	AllowAnyHost bool   // anybody may, without proof

	// OnePerHost: when a host connects a new admin queue, its older controllers
	// of the subsystem are killed, and their commands have left the Devices,
	// before the host gets its answer. A write that was delayed on an old
	// connection can then not land after its retry on the new one.
	OnePerHost bool
}

// NamespaceConfig is what a namespace is made of.
type NamespaceConfig struct {
	NSID     uint32 // 1 to 0xfffffffe
	UUID     block.UUID
	NGUID    [16]byte // zero: none
	Device   block.Device
	ANAGroup uint32 // 0 means 1
	ReadOnly bool
}

// ControllerInfo tells of one association with a host.
type ControllerInfo struct {
	ID      uint16
	Host    block.Host
	Port    uint16    // id of the port that it came through
	Address string    // of the host
	Since   time.Time // when it connected
	Queues  int       // I/O queues that are connected
}

// Subsystem is what a host connects to: namespaces, and who may use them.
// All methods may be called from any goroutine.
type Subsystem struct{}

// NQN is the subsystem's name.
func (s *Subsystem) NQN() block.NQN { panic("soon") }

// SetHosts replaces the hosts that may connect. Controllers of hosts that may no
// longer are killed (but not waited for: see Close and RemoveNamespace).
func (s *Subsystem) SetHosts(hosts []Host, allowAny bool) error { panic("soon") }

// AddNamespace adds a namespace; hosts are told. ErrExists if the NSID is taken.
func (s *Subsystem) AddNamespace(c NamespaceConfig) error { panic("soon") }

// RemoveNamespace removes a namespace and returns when no command that came
// through it is in its Device. It does not wait for hosts, only for the Device.
// If ctx ends before, the namespace is removed, and not yet drained: call again.
func (s *Subsystem) RemoveNamespace(ctx context.Context, nsid uint32) error { panic("soon") }

// ResizeNamespace reads the Device's geometry again and tells the hosts.
func (s *Subsystem) ResizeNamespace(nsid uint32) error { panic("soon") }

// SetANAGroup moves a namespace to another group; hosts are told.
func (s *Subsystem) SetANAGroup(nsid, group uint32) error { panic("soon") }

// Controllers lists the associations there are.
func (s *Subsystem) Controllers() []ControllerInfo { panic("soon") }

// Close removes the subsystem, kills its connections, and returns when every
// command that came through it has left its Devices: nothing of any host can
// reach the medium any more. If ctx ends before, that is not so yet (the error
// wraps ctx's): nobody can connect any more, and Close may be called again.
func (s *Subsystem) Close(ctx context.Context) error { panic("soon") }

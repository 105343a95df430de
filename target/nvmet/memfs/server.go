// SPDX-License-Identifier: Apache-2.0

package memfs

import "weft.dev/weft/proto/block"

// Server serves what the tree says. An error is what the file operation fails
// with. FS makes no two calls at once about one namespace, or one link.
type Server interface {
	// AddSubsystem comes before all else about a subsystem.
	AddSubsystem(Subsystem) error
	// SetHosts says who may connect from now on; it disconnects nobody.
	SetHosts(nqn string, hosts []block.NQN, anyHost bool) error
	AddNamespace(nqn string, ns Namespace) error
	// ResizeNamespace has the size of the namespace's device read again.
	ResizeNamespace(nqn string, nsid uint32) error
	// RemoveNamespace returns when no command is left in the namespace's device.
	RemoveNamespace(nqn string, nsid uint32) error
	// RemoveSubsystem returns when nothing that came through the subsystem can
	// reach a device any more: it is the fence.
	RemoveSubsystem(nqn string) error
	// Link offers a subsystem on a port, which listens while it has any.
	Link(p Port, nqn string) error
	// Unlink ends the connections to the subsystem that came through the port.
	Unlink(port uint16, nqn string) error
}

// Subsystem is what a host sees of a subsystem.
type Subsystem struct {
	NQN       block.NQN
	Serial    string
	Model     string
	CntlidMin uint16
	CntlidMax uint16
}

// Namespace is an enabled namespace.
type Namespace struct {
	NSID   uint32
	Device string // path
	UUID   block.UUID
	NGUID  block.UUID
}

// Port is where hosts come in.
type Port struct {
	ID     uint16
	Portal block.Portal
}

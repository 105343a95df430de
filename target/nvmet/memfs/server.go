// SPDX-License-Identifier: Apache-2.0

package memfs

import (
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// Server serves the content of the tree. The file operation fails with the error that the call
// returns. FS never makes two calls at once for the same namespace or link.
type Server interface {
	// AddSubsystem is the first call for a subsystem.
	AddSubsystem(Subsystem) error
	// SetHosts sets who may connect from now on; it disconnects no host.
	SetHosts(nqn string, hosts []Host, anyHost bool) error
	AddNamespace(nqn string, ns Namespace) error
	// ResizeNamespace reads the size of the namespace's device again.
	ResizeNamespace(nqn string, nsid uint32) error
	// RemoveNamespace returns when no command for the namespace is left in its device.
	RemoveNamespace(nqn string, nsid uint32) error
	// RemoveSubsystem is the fence: it returns when nothing that came through the subsystem can
	// reach a device any more.
	RemoveSubsystem(nqn string) error
	// Link offers a subsystem on a port, which listens while it has at least one.
	Link(p Port, nqn string) error
	// Unlink ends the connections to the subsystem that came through the port.
	Unlink(port uint16, nqn string) error
}

// Host is a host that may connect.
type Host struct {
	NQN block.NQN
	// HostKey is what it has to prove to know, ControllerKey what the controller proves to know; the
	// zero keys: nothing.
	HostKey, ControllerKey dhchap.Key
}

// Subsystem is a subsystem as hosts see it.
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

// Port is a portal through which hosts connect.
type Port struct {
	ID     uint16
	Portal block.Portal
}

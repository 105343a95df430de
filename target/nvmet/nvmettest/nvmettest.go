// SPDX-License-Identifier: Apache-2.0

// Package nvmettest is an nvmet for tests: its configfs in memory (package memfs), without a
// server.
package nvmettest

import (
	"slices"

	"golang.org/x/sys/unix"

	"weft.dev/weft/target/nvmet/memfs"
)

// Root is the path at which the tree appears to be.
const Root = memfs.Root

// FS implements nvmet.Files for nvmet.OpenOn.
type FS struct {
	*memfs.FS
	// Exists reports whether enable=1 can open a device.
	Exists func(device string) bool
	// Drain is called when an enabled namespace is disabled or removed, and delays that as long as
	// it likes. Set the functions before the first use.
	Drain func(subsystem string)
	// Listen is called when a subsystem is linked to a port, which fails with its error.
	Listen func(memfs.Port) error
	// Resize is called when the size of a namespace's device is read again.
	Resize func(subsystem string, nsid uint32)
}

// New returns an nvmet without exports, which can export the given devices.
func New(devices ...string) *FS {
	f := &FS{
		Exists: func(device string) bool { return slices.Contains(devices, device) },
		Drain:  func(string) {},
		Listen: func(memfs.Port) error { return nil },
		Resize: func(string, uint32) {},
	}
	f.FS = memfs.New(server{f})
	return f
}

type server struct{ fs *FS }

func (s server) AddNamespace(_ string, ns memfs.Namespace) error {
	if !s.fs.Exists(ns.Device) {
		return unix.ENOENT
	}
	return nil
}

func (s server) RemoveNamespace(nqn string, _ uint32) error {
	s.fs.Drain(nqn)
	return nil
}

func (s server) ResizeNamespace(nqn string, nsid uint32) error {
	s.fs.Resize(nqn, nsid)
	return nil
}

func (server) AddSubsystem(memfs.Subsystem) error        { return nil }
func (server) SetHosts(string, []memfs.Host, bool) error { return nil }
func (server) RemoveSubsystem(string) error              { return nil }
func (s server) Link(p memfs.Port, _ string) error       { return s.fs.Listen(p) }
func (server) Unlink(uint16, string) error               { return nil }

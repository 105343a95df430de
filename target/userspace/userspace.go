// SPDX-License-Identifier: Apache-2.0

// Package userspace is what the target agent works with where the kernel has no
// nvmet and no device-mapper, or may not be asked: the same drives, labels, legs
// and exports, served by this process over NVMe/TCP.
//
//	 agent's plan       kernel                     here
//	------------------------------------------------------------------------
//	 drives             /dev nodes, O_EXCL         Drives: also regular files, locked
//	 legs               dm-linear                  Legs: segments over a drive's device
//	 stable names       symlinks                   Legs: a map
//	 nvmet's configfs   nvmet                      Exports over proto/nvmetcp/controller
//
// The agent's planning, and the order of its steps, are the same for both; so is
// all that a host or a drive's label shows: a volume can be served by one today
// and by the other tomorrow.
//
// What differs: exports live and die with the process. The agent makes them
// anew when the manager has told it what is wanted. Nothing that was acknowledged
// is lost with a process that is killed, since it is in the drive or in the
// kernel's page cache; so the boot that is reported is the machine's, and the
// manager gives up copies when the machine, and not when the process, starts
// anew. A write that was under way when the process was killed may still reach
// the drive for as long as its system call lasts. The lock on the drive lasts as
// long: whoever gets it, and so this process, begins after the last such write.
package userspace

import (
	"context"
	"errors"
	"log/slog"
	"net"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/backend"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/nvmet/memfs"
)

// Config says what a Machine is made of.
type Config struct {
	Root      string   // holds sys, proc and dev; empty means "/"
	Files     []string // regular files that are taken for drives; absolute paths
	FilesOnly bool     // leave the machine's block devices alone
	// Listen opens a portal; nil means TCP.
	Listen func(block.Portal) (net.Listener, error)
	// Medium stands between legs and the data of a drive, so that tests can let it
	// fail; nil means that nothing does.
	Medium func(path string, data block.Device) block.Device
	// Calls stands between a drive's data and the kernel, below what the process
	// itself does to make it durable; for tests too, and nil means the kernel.
	Calls func(path string, kernel Calls) Calls
	// Label stands between a drive's label and the drive, as Calls does for its data.
	Label func(path string, m drive.Medium) drive.Medium
	Log   *slog.Logger // nil discards
}

// Calls are the system calls that are made on a drive.
type Calls = backend.Calls

// Machine is all that an agent needs of a machine.
type Machine struct {
	Drives  *Drives
	Legs    *Legs
	Exports *Exports
}

// New makes a Machine that serves nothing yet. It starts nothing.
func New(c Config) (*Machine, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	drives := newDrives(c)
	legs := NewLegs(drives.Device)
	exports, err := NewExports(c.Log, c.Listen, legs.Device)
	if err != nil {
		return nil, err
	}
	return &Machine{Drives: drives, Legs: legs, Exports: exports}, nil
}

// Close ends all exports, then lets go of the legs' drives. If ctx ends before
// the I/O under way, they are not let go of.
func (m *Machine) Close(ctx context.Context) error {
	if err := m.Exports.Close(ctx); err != nil {
		return err
	}
	return m.Legs.Close()
}

// OpenTree is the target's configfs, for the agent to read and change.
func (e *Exports) OpenTree() (*nvmet.Tree, error) { return nvmet.OpenOn(memfs.Root, e.FS) }

var errNoDevice = errors.New("no leg is mapped there")

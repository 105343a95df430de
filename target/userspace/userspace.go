// SPDX-License-Identifier: Apache-2.0

// Package userspace serves the target agent where the kernel's nvmet and device-mapper are missing
// or off limits: the same drives, labels, legs and exports, served by this process over NVMe/TCP.
//
//	 agent's plan       kernel                     here
//	------------------------------------------------------------------------
//	 drives             /dev nodes, O_EXCL         Drives: also regular files, locked
//	 legs               dm-linear                  Legs: segments over a drive's device,
//	                                               or a leg in a tree (package target/mapped)
//	 stable names       symlinks                   Legs: a map
//	 nvmet's configfs   nvmet                      Exports over proto/nvmetcp/controller
//
// The agent's plans and the order of its steps are the same for both, and so is everything that
// hosts see or labels record: a volume can be served by one today and by the other tomorrow.
//
// The difference: exports live and die with the process. The agent makes them again once the
// manager has told it the wanted state, or the process before it: see handover.go. A killed process loses no acknowledged write, since these
// are on the drive or in the kernel's page cache. So the reported boot is the machine's: the
// manager distrusts copies after a restart of the machine, not of the process. A write that was
// under way when the process was killed may still reach the drive as long as its system call lasts.
// The lock on the drive lasts as long, so the next holder of the lock begins after the last such
// write.
package userspace

import (
	"context"
	"errors"
	"log/slog"
	"net"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/backend"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/nvmet/memfs"
)

// Config says what a Machine is built from.
type Config struct {
	Root      string   // holds sys, proc and dev; empty means "/"
	Files     []string // regular files used as drives; absolute paths
	FilesOnly bool     // leave the machine's block devices alone
	// Locks is the directory of the locks on block devices. Where it cannot be written, and where it is empty,
	// there are none, and a drive is only held exclusively.
	Locks string
	// Shared: the kernel maps legs on the same drives, which keeps them from being held exclusively.
	Shared bool
	// Listen opens a portal; nil means TCP.
	Listen func(block.Portal) (net.Listener, error)
	// Medium wraps the data of a drive below its legs, so that tests can make it fail; nil means no
	// wrapper.
	Medium func(path string, data block.Device) block.Device
	// Calls wraps the system calls on a drive's data, below this process's own work for durability.
	// It is also for tests; nil means the kernel.
	Calls func(path string, kernel Calls) Calls
	// Label wraps the medium of a drive's label, as Calls does for its data.
	Label func(path string, m drive.Medium) drive.Medium
	// LossDir keeps the notes that a drive has lost acknowledged writes, until its label records
	// that. Its file system must outlive the process, and may be lost at boot. Empty: no notes.
	LossDir string
	// Hungry is called when a write waits for space that its tree does not have; see Disk.GrowTree.
	Hungry func()
	Log    *slog.Logger // nil discards
}

// Calls are the system calls made on a drive.
type Calls = backend.Calls

// Machine is everything that an agent needs of a machine.
type Machine struct {
	Drives  *Drives
	Legs    *Legs
	Exports *Exports
}

// New returns a Machine without exports. It starts nothing.
func New(c Config) (*Machine, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	drives := newDrives(c)
	legs := NewLegs(drives.Device)
	legs.mappedLeg = drives.leg
	exports, err := NewExports(c.Log, c.Listen, legs.Device)
	if err != nil {
		return nil, err
	}
	return &Machine{Drives: drives, Legs: legs, Exports: exports}, nil
}

// Close ends all exports, then releases the legs' drives. If ctx ends while I/O is under way, it
// returns an error, and drives are released as their I/O ends.
func (m *Machine) Close(ctx context.Context) error {
	m.Drives.end.Do(m.Drives.stop)
	rest := func() error {
		return errors.Join(m.Legs.Close(ctx), m.Drives.finish(ctx), m.Drives.leaveTrees(ctx))
	}
	if err := m.Exports.Close(ctx); err != nil {
		go rest() //nolint:errcheck // the drives that hang say so where they are used
		return err
	}
	return rest()
}

// OpenTree opens the target's configfs, for the agent to read and change.
func (e *Exports) OpenTree() (*nvmet.Tree, error) { return nvmet.OpenOn(memfs.Root, e.FS) }

var errNoDevice = errors.New("no leg is mapped there")

// SPDX-License-Identifier: Apache-2.0

// Package waltest is a disk in memory for tests of the log. It forgets what was not synced:
// a cut leaves, of each file, what was synced and any part of what was written since, and of
// the names any prefix of the changes since the directory was synced. Reads see what was
// written in any case, as from a page cache.
package waltest

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"slices"

	"weft.dev/weft/volmgr/quorum/wal"
)

// Errors of a Disk whose power is cut, and of one that fails.
var (
	ErrCut    = errors.New("the power is cut")
	ErrFailed = errors.New("input/output error")
)

// Disk is a wal.Directory. Its zero value is not usable: see New.
type Disk struct {
	files map[string]*inode
	names []map[string]*inode // after the last Sync, and after each change since
	ops   int

	// CutAt is the operation, counted from 1 over those that change anything, in the middle of
	// which the power is cut; 0 means none.
	CutAt int
	// FailSync makes every Sync of a file fail, as a drive does that cannot write. A later Sync does
	// not write that data either, as on Linux.
	FailSync bool
}

type inode struct {
	data   []byte   // as a reader finds it
	synced []byte   // as the drive has it
	dirty  int      // where what the next Sync writes begins
	lost   [][2]int // from, to: what a Sync has failed to write
}

// written is the file with zeroes in place of the data that a Sync has failed to write.
func (f *inode) written() []byte {
	data := slices.Clone(f.data)
	for _, l := range f.lost {
		clear(data[l[0]:l[1]])
	}
	return data
}

// New returns an empty disk.
func New() *Disk {
	return &Disk{files: map[string]*inode{}, names: []map[string]*inode{{}}}
}

// Ops is how many operations have changed anything so far.
func (d *Disk) Ops() int { return d.ops }

// begin counts an operation. It returns ErrCut from the one on that the power is cut in.
func (d *Disk) begin() error {
	d.ops++
	if d.CutAt > 0 && d.ops >= d.CutAt {
		return ErrCut
	}
	return nil
}

// AfterCut returns what a machine finds after a power cut, one of the many possibilities.
func (d *Disk) AfterCut(random *rand.Rand) *Disk {
	after := New()
	found := map[*inode]*inode{}
	names := d.names[random.IntN(len(d.names))]
	for _, name := range slices.Sorted(maps.Keys(names)) { // so that one seed gives one outcome
		file := names[name]
		if found[file] == nil {
			data := file.remains(random)
			found[file] = durable(data)
		}
		after.files[name] = found[file]
	}
	after.names = []map[string]*inode{maps.Clone(after.files)}
	return after
}

// durable is a file of which all was synced.
func durable(data []byte) *inode {
	return &inode{data: slices.Clone(data), synced: slices.Clone(data), dirty: len(data)}
}

// remains is the file after a power cut. The synced part is there. Of the rest there is nothing, all
// of it, or some of its blocks, with zeroes in place of the others.
func (f *inode) remains(random *rand.Rand) []byte {
	written, same := f.written(), len(f.synced)
	data := written[:same+random.IntN(len(written)-same+1)]
	const sector = 16 // small, so that short frames are torn too
	for at := same; at < len(data); at += sector {
		if random.IntN(3) == 0 {
			clear(data[at:min(at+sector, len(data))])
		}
	}
	return data
}

// Copy returns a copy of all that is on the disk, as of a backup of a running machine.
func (d *Disk) Copy() *Disk {
	c := New()
	for name, f := range d.files {
		c.Put(name, f.data)
	}
	return c
}

// Put places a durable file.
func (d *Disk) Put(name string, data []byte) {
	d.files[name] = durable(data)
	d.names = []map[string]*inode{maps.Clone(d.files)}
}

// List is part of wal.Directory.
func (d *Disk) List() ([]string, error) { return slices.Sorted(maps.Keys(d.files)), nil }

// Read is part of wal.Directory.
func (d *Disk) Read(name string) ([]byte, error) {
	f, err := d.find(name)
	if err != nil {
		return nil, err
	}
	return slices.Clone(f.data), nil
}

func (d *Disk) find(name string) (*inode, error) {
	if f := d.files[name]; f != nil {
		return f, nil
	}
	return nil, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
}

func (d *Disk) changed() { d.names = append(d.names, maps.Clone(d.files)) }

// Create is part of wal.Directory.
func (d *Disk) Create(name string) (wal.File, error) {
	if err := d.begin(); err != nil {
		return nil, err
	}
	f := &inode{}
	d.files[name] = f
	d.changed()
	return &handle{d, f}, nil
}

// Rename is part of wal.Directory.
func (d *Disk) Rename(from, to string) error {
	if err := d.begin(); err != nil {
		return err
	}
	f, err := d.find(from)
	if err != nil {
		return err
	}
	delete(d.files, from)
	d.files[to] = f
	d.changed()
	return nil
}

// Remove is part of wal.Directory.
func (d *Disk) Remove(name string) error {
	if err := d.begin(); err != nil {
		return err
	}
	if _, err := d.find(name); err != nil {
		return err
	}
	delete(d.files, name)
	d.changed()
	return nil
}

// Sync is part of wal.Directory.
func (d *Disk) Sync() error {
	if err := d.begin(); err != nil {
		return err
	}
	d.names = []map[string]*inode{maps.Clone(d.files)}
	return nil
}

type handle struct {
	disk *Disk
	file *inode
}

func (h *handle) Write(p []byte) (int, error) {
	cut := h.disk.begin() // what is cut may be there all the same: it is not synced
	h.file.data = append(h.file.data, p...)
	return len(p), cut
}

func (h *handle) Sync() error {
	if err := h.disk.begin(); err != nil {
		return err
	}
	f := h.file
	if h.disk.FailSync {
		f.lost = append(f.lost, [2]int{f.dirty, len(f.data)})
		f.dirty = len(f.data)
		return ErrFailed
	}
	f.synced, f.dirty = f.written(), len(f.data)
	return nil
}

func (h *handle) Close() error { return nil }

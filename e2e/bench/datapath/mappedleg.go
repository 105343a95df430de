// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/backend"
	"weft.dev/weft/target/mapped"
)

// treeExtents has room for all states: twice the device, and a chunk for each grain between snapshots.
const (
	treeExtents = 10
	treeFirst   = 8 * block.MiB
	treeSize    = treeFirst + treeExtents*256*block.MiB
)

// tree is a mapped leg on a device, with its snapshots.
type tree struct {
	*mapped.Tree
	leg  *mapped.Leg
	data []byte
}

// newTree formats a tree with one leg on a device.
func newTree(d block.Device) (*tree, error) {
	place := mapped.Place{Device: d, First: treeFirst, Tree: block.UUID{1}, Drive: block.UUID{2}}
	for n := range uint32(treeExtents) {
		place.Extents = append(place.Extents, n)
	}
	t, err := mapped.Format(place, legID, deviceSize, nil)
	if err != nil {
		return nil, err
	}
	leg, err := t.Leg(legID)
	if err != nil {
		return nil, err
	}
	return &tree{t, leg, someData(1 << 20)}, nil
}

var legID = block.UUID{3}

// someData is n bytes that are not zeroes: a mapped leg takes no space for zeroes.
func someData(n int) []byte {
	p := backend.Aligned(n)
	for i := range p {
		p[i] = byte(i*7) | 1
	}
	return p
}

// snapshotID and cloneID are the objects of the tree beside its leg.
func snapshotID(n int) block.UUID { return block.UUID{4, byte(n), byte(n >> 8)} }
func cloneID(n int) block.UUID    { return block.UUID{5, byte(n), byte(n >> 8)} }

func (t *tree) write(off, n int64) error { return block.WriteAt(t.leg, t.data[:n], off) }

func (t *tree) snapshot(n int) error { return t.Freeze(legID, snapshotID(n), nil) }

func (t *tree) close() {
	t.leg.Close()
	t.Close()
}

// treeUsed is how much of the drive first writes and what is there before them use at most.
const treeUsed = treeFirst + 3*256*block.MiB

// mappedLeg is a leg in a state, on a new file. Its blocks are all there, as those of a drive are and
// those of the plain file: else first writes would also measure how the file system takes memory.
func mappedLeg(file string, s state) (*tree, error) {
	d, err := newFile(file, treeSize)
	if err == nil {
		err = fill(plainDevice{d}, int64(treeUsed))
	}
	if err != nil {
		return nil, err
	}
	t, err := newTree(d)
	if err == nil {
		err = prepare(t, s, int64(deviceSize))
	}
	return t, err
}

// newFile opens a new file of zeroes.
func newFile(path string, size block.Size) (*backend.File, error) {
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, int64(size))); err != nil {
		return nil, err
	}
	return backend.Open(path, backend.Options{})
}

// treeLife is a tree whose snapshots come and go. It counts what is written to its drive.
type treeLife struct {
	*tree
	file string
	sum  atomic.Int64
}

func newTreeLife(dir string) *treeLife { return &treeLife{file: filepath.Join(dir, "life")} }

func (t *treeLife) name() string { return "mapped leg" }

func (t *treeLife) begin() error {
	d, err := newFile(t.file, treeSize)
	if err != nil {
		return err
	}
	t.tree, err = newTree(writesCounted{d, &t.sum})
	return err
}

func (t *treeLife) clone(n int) error { return t.Clone(snapshotID(n), cloneID(n), deviceSize, nil) }

// remove deletes a snapshot or a clone of it, and gives its space back.
func (t *treeLife) remove(n int, clone bool) error {
	object := snapshotID(n)
	if clone {
		object = cloneID(n)
	}
	if err := t.Delete(object); err != nil {
		return err
	}
	return t.Reclaim(context.Background())
}

func (t *treeLife) written() (int64, error) { return t.sum.Load(), nil }

func (t *treeLife) end() {
	if t.tree != nil {
		t.tree.close()
	}
}

// writesCounted counts the bytes that are written to a device.
type writesCounted struct {
	block.Device
	sum *atomic.Int64
}

func (d writesCounted) Submit(io *block.IO) {
	if io.Op == block.OpWrite {
		d.sum.Add(io.Len)
	}
	d.Device.Submit(io)
}

// serveMapped is the role of a server that has a mapped leg; see serve.
func serveMapped(args []string) (block.Device, error) {
	if len(args) != 2 {
		return nil, fmt.Errorf("mapped: want a file and a state, have %q", args)
	}
	t, err := mappedLeg(args[0], state(args[1]))
	if err != nil {
		return nil, err
	}
	return t.leg, nil
}

// plainDevice has no snapshots.
type plainDevice struct{ block.Device }

func (d plainDevice) write(off, n int64) error {
	return block.WriteAt(d, someData(int(n)), off)
}

func (plainDevice) snapshot(int) error { return errors.ErrUnsupported }

// SPDX-License-Identifier: Apache-2.0

// Package drive knows the block devices of a node: which exist, what they carry, which of them are
// Weft's drives, and how a drive is divided into legs.
//
// A drive belongs to Weft alone. It is divided into extents of 256 MiB, with a label at both ends:
//
//	0        4 MiB    8 MiB                                   tail     +4 MiB   +8 MiB
//	| slot A | slot B | extent 0 | extent 1 | ...  | (rest)    | slot A | slot B | (< 1 MiB) |
//
// The label says which cluster and drive this is, and which legs its extents hold, each with its
// volume's definition: enough to rebuild the manager's store. Each change is one durable write of a
// whole new label: a cut at any point leaves the old one or the new one.
//
// The content of a device decides what may be done with it. A device that carries anything becomes
// a drive only if the caller names that content exactly. A drive of another cluster, of another
// size, of a newer format, or one that another program has written to, is not opened.
//
// The device itself is reached through [Medium]; device_linux.go is the one file with system calls.
// The package does not decide where legs go (the volume manager does), and does not map or export
// them.
package drive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Drive is a labelled device. Its methods may be called concurrently; label changes happen one
// after another, each durable when it returns.
type Drive struct {
	medium Medium
	label  atomic.Pointer[Label] // never changed once stored; readable while a write hangs

	mu       lock   // held while the label is written
	complete bool   // both ends hold label
	unsure   bool   // a write failed: the content of the device is unknown
	tried    uint64 // highest generation with which a write was begun
	zeroing  map[block.LegID]bool
}

// lock is a mutex made of a channel of capacity one. A waiter may wait for a device that hangs; in
// a test with virtual time (testing/synctest) time goes on meanwhile, which it does not while a
// goroutine waits for a sync.Mutex.
type lock chan struct{}

func (l lock) Lock()   { l <- struct{}{} }
func (l lock) Unlock() { <-l }

// Open reads the label of a drive and refuses one that cannot be used:
// [ErrNoLabel], [ErrCorrupt], [ErrNewer], [ErrOtherSize], [ErrUnfinished],
// [ErrOverwritten], and [ErrOtherCluster] unless cluster is zero, which accepts
// any. On success the drive owns m. Nothing is written.
func Open(m Medium, cluster block.ClusterID) (*Drive, error) {
	d := &Drive{medium: m, mu: make(lock, 1), zeroing: map[block.LegID]bool{}}
	if err := d.load(); err != nil {
		return nil, fmt.Errorf("open drive: %w", err)
	}
	if l := d.label.Load(); !cluster.IsZero() && l.Cluster != cluster {
		return nil, fmt.Errorf("open drive %v: %w: %v", l.Drive, ErrOtherCluster, l.Cluster)
	}
	return d, nil
}

// Resume is Open, whatever the cluster, of a drive that the previous process of this agent has held until
// now. It looks at the label alone and not for signatures of others: that takes longer than the rest, and
// hosts wait. If somebody else has written to the drive just now, the next scan finds that out, or the next
// write of the label.
func Resume(m Medium) (*Drive, error) {
	d := &Drive{medium: m, mu: make(lock, 1), zeroing: map[block.LegID]bool{}}
	c, label, err := readLabel(m, m.Size())
	if err == nil {
		err = d.begin(label, c)
	}
	if err != nil {
		return nil, fmt.Errorf("resume drive: %w", err)
	}
	return d, nil
}

// OpenPath is Open on the device at path. It is not an exclusive open: the
// device-mapper devices over the drive's legs hold it.
func OpenPath(path string, cluster block.ClusterID) (*Drive, error) {
	m, err := OpenDevice(path, ReadWrite)
	if err != nil {
		return nil, err
	}
	d, err := Open(m, cluster)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, errors.Join(err, m.Close()))
	}
	return d, nil
}

// load reads the label from the device.
func (d *Drive) load() error {
	c, err := examine(d.medium, d.medium.Size())
	if err != nil {
		return err
	}
	if c.err != nil {
		return c.err
	}
	if len(c.foreign) > 0 {
		return fmt.Errorf("drive %v: %w: it carries %s", c.label.Drive, ErrOverwritten, strings.Join(c.foreign, ", "))
	}
	return d.begin(c.label, c.copies)
}

// begin takes over what the copies of the label hold. It flushes after the read: if the process that wrote the
// label was killed before its own flush, the label may only be in the device's volatile cache.
func (d *Drive) begin(label *Label, c copies) error {
	if err := d.medium.Flush(); err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	d.label.Store(label)
	d.complete = c.complete(label.Generation)
	return nil
}

// ID identifies the drive.
func (d *Drive) ID() block.DriveID { return d.label.Load().Drive }

// Label returns a copy of the label as last read or written. It does not wait for the device.
func (d *Drive) Label() *Label { return d.label.Load().clone() }

// Update changes the label in one durable write. If change fails, or changes nothing, nothing is
// written. After a device error the device holds either the old or the new label; the next call
// reads which.
func (d *Drive) Update(change func(*Label) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.updateLocked(change); err != nil {
		return fmt.Errorf("update label of drive %v: %w", d.ID(), err)
	}
	return nil
}

func (d *Drive) updateLocked(change func(*Label) error) error {
	if d.unsure {
		if err := d.load(); err != nil {
			return err
		}
		d.complete = false // what a failed flush left behind is written again
	}
	last := d.label.Load()
	next := last.clone()
	if err := change(next); err != nil {
		return err
	}
	if !next.sameIdentity(last) {
		return errors.New("its cluster, id and size cannot change")
	}
	if err := next.settle(); err != nil {
		return err
	}
	if err := next.checkRoom(last); err != nil {
		return err
	}
	for id := range d.zeroing {
		if leg := next.Leg(id); leg == nil || !ImageOf(leg).Extends(ImageOf(last.Leg(id))) {
			return fmt.Errorf("leg %v: %w", id, ErrZeroing)
		}
	}
	if next.equal(last) && d.complete {
		return nil
	}
	return d.writeLocked(last, next)
}

// writeLocked replaces last by next, under a generation that no earlier write used: the copy of a
// failed write may be on the medium all the same.
func (d *Drive) writeLocked(last, next *Label) error {
	c := readCopies(d.medium, d.medium.Size())
	there, err := c.newest()
	if err != nil {
		return err
	}
	if there.Generation != last.Generation || !there.equal(last) {
		return fmt.Errorf("%w: generation %d is there, %d was left", ErrOverwritten, there.Generation, last.Generation)
	}
	next.Generation = max(last.Generation, d.tried) + 1
	d.tried = next.Generation
	d.unsure = true
	if err := writeLabel(d.medium, &c, next); err != nil {
		return err
	}
	d.label.Store(next)
	d.complete, d.unsure = true, false
	return nil
}

// Rewrite writes the label again as it is: a drive that can do so can be read and written.
func (d *Drive) Rewrite() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.complete = false
	if err := d.updateLocked(func(*Label) error { return nil }); err != nil {
		return fmt.Errorf("write the label of drive %v again: %w", d.ID(), err)
	}
	return nil
}

// PutLeg is Update with [Label.PutLeg].
func (d *Drive) PutLeg(record *pb.LegLabel) error {
	return d.Update(func(l *Label) error { return l.PutLeg(record) })
}

// RemoveLeg is Update with [Label.RemoveLeg].
func (d *Drive) RemoveLeg(id block.LegID) error {
	return d.Update(func(l *Label) error { return l.RemoveLeg(id) })
}

// Admit is Update with [Label.Admit].
func (d *Drive) Admit(volume block.VolumeID, epoch block.Epoch) error {
	return d.Update(func(l *Label) error { l.Admit(volume, epoch); return nil })
}

// SetVolume is Update with [Label.SetVolume].
func (d *Drive) SetVolume(volume *pb.VolumeLabel) error {
	return d.Update(func(l *Label) error { return l.SetVolume(volume) })
}

// ErrZeroing means that a leg is being zeroed: until that ends, it cannot be removed or zeroed
// again. Otherwise its extents might belong to another leg, or hold data, when the zeroes land.
var ErrZeroing = errors.New("is being zeroed")

// ZeroLeg zeroes the part of a leg that is not recorded as zeroed, and then records it; both are
// durable when it returns. The part recorded as zeroed is left alone: it may hold data. It can take
// minutes: progress (may be nil) is told how much of the leg is done, and ctx is checked between
// chunks of 64 MiB.
func (d *Drive) ZeroLeg(ctx context.Context, id block.LegID, progress func(done block.Size)) error {
	leg, err := d.beginZero(id)
	if err != nil {
		return fmt.Errorf("zero leg %v of drive %v: %w", id, d.ID(), err)
	}
	defer d.endZero(id)
	if Whole(leg) {
		return nil
	}
	if err := d.zero(ctx, leg, progress); err != nil {
		return fmt.Errorf("zero leg %v of drive %v: %w", id, d.ID(), err)
	}
	done := CountExtents(leg.Extents) // the leg may have grown further meanwhile
	return d.Update(func(l *Label) error { setZeroed(l.Leg(id), done); return nil })
}

func (d *Drive) beginZero(id block.LegID) (*pb.LegLabel, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	leg := d.label.Load().Leg(id)
	switch {
	case leg == nil:
		return nil, errors.New("not there")
	case Mapped(leg):
		return nil, errors.New("it is found through a map")
	case d.zeroing[id]:
		return nil, ErrZeroing
	}
	d.zeroing[id] = true
	return leg, nil
}

func (d *Drive) endZero(id block.LegID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.zeroing, id)
}

func (d *Drive) zero(ctx context.Context, leg *pb.LegLabel, progress func(done block.Size)) error {
	before := block.Size(zeroedExtents(leg)) * block.ExtentSize
	tell := func(n block.Size) {
		if progress != nil {
			progress(before + n)
		}
	}
	for _, s := range behind(ImageOf(leg).Segments(0), before) {
		if err := d.medium.Zero(ctx, s.Offset, s.Length, tell); err != nil {
			return err
		}
		before += s.Length
	}
	return nil
}

// behind returns what follows the first skip bytes of segments.
func behind(segments []Segment, skip block.Size) (rest []Segment) {
	for _, s := range segments {
		n := min(skip, s.Length)
		skip -= n
		if n < s.Length {
			rest = append(rest, Segment{s.Offset + n, s.Length - n})
		}
	}
	return rest
}

// Erase removes the label: all copies, the older ones first, so that a power cut never brings back
// an old label. A drive that holds legs is refused. Afterwards the drive can only be closed. A cut
// inside the very last sector leaves a corrupt label.
func (d *Drive) Erase() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.label.Load().Legs); n > 0 {
		return fmt.Errorf("erase drive %v: holds %d legs", d.ID(), n)
	}
	if err := markErased(d.medium); err != nil {
		return fmt.Errorf("erase drive %v: %w", d.ID(), err)
	}
	c := readCopies(d.medium, d.medium.Size())
	slices.SortStableFunc(c[:], func(a, b slotCopy) int { return compareAge(a.label, b.label) })
	for _, slot := range c {
		if err := d.medium.Zero(context.Background(), slot.offset, slotSize-copyUnit, nil); err != nil {
			return fmt.Errorf("erase drive %v: %w", d.ID(), err)
		}
	}
	return nil
}

// compareAge orders slots without a good copy first, then by generation.
func compareAge(a, b *Label) int {
	generation := func(l *Label) uint64 {
		if l == nil {
			return 0
		}
		return l.Generation
	}
	return cmp.Compare(generation(a), generation(b))
}

// Close closes the device.
func (d *Drive) Close() error { return d.medium.Close() }

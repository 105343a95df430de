// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/treecheck"
)

// plantedDrive is a drive with one leg in a tree of one extent, and two more in its reserve.
type plantedDrive struct {
	machine *Machine
	disk    *Disk
	path    string
	table   dm.Table
	size    block.Size // of legs; 0: 1 GiB
	leg     block.Device
	medium  func(path string, data block.Device) block.Device
	kernel  *fakeMapper // maps legs as well; nil: there is none
	rows    *Rows
}

// prepare prepares a leg at the revision that its record has.
func (p *plantedDrive) prepare(id block.LegID, size block.Size, from Origin) error {
	return p.disk.Prepare(id, p.disk.Label().Leg(id).GetRevision(), size, from)
}

func newPlanted(t *testing.T) *plantedDrive {
	t.Helper()
	return newPlantedOn(t, nil)
}

// newPlantedOn wraps the drive's data.
func newPlantedOn(t *testing.T, medium func(path string, data block.Device) block.Device) *plantedDrive {
	t.Helper()
	p := &plantedDrive{medium: medium}
	_, p.path = newFiles(t)
	p.start(t)
	must(t, p.machine.Drives.Format(p.path, cluster, driveA, ""))
	p.open(t)
	must(t, p.disk.Update(func(l *drive.Label) error {
		return errors.Join(l.SetGrant([]*pb.Extent{{Start: 0, Count: 3}}), l.PutLeg(&pb.LegLabel{
			LegId: leg.String(), TreeId: leg.String(), Image: pb.ImageKind_IMAGE_KIND_MAPPED, Revision: 1, Volume: &pb.VolumeLabel{VolumeId: leg.String()},
		}))
	}))
	must(t, p.prepare(leg, block.GiB, Origin{}))
	p.serve(t)
	return p
}

// start begins a process.
func (p *plantedDrive) start(t *testing.T) {
	t.Helper()
	var err error
	p.machine, err = New(Config{Files: []string{p.path}, FilesOnly: true, Medium: p.medium})
	must(t, err)
	if p.kernel != nil {
		p.rows = p.kernel.under(p.machine.Drives)
	}
}

func (p *plantedDrive) open(t *testing.T) {
	t.Helper()
	var err error
	p.disk, err = p.machine.Drives.Open(p.path)
	must(t, err)
}

func (p *plantedDrive) serve(t *testing.T) {
	t.Helper()
	n, err := p.machine.Drives.Number(p.path)
	must(t, err)
	p.table = MappedTable(n, leg.String(), leg, block.GiB)
	p.leg = mapLeg(t, p.machine.Legs, p.table)
}

// end ends the process in order.
func (p *plantedDrive) end(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	must(t, errors.Join(p.machine.Close(ctx), p.disk.Close()))
}

// fill writes to new chunks until the tree has none left, and returns the write that waits.
func (p *plantedDrive) fill(t *testing.T) <-chan error {
	t.Helper()
	chunk := int64(0)
	for ; p.disk.Trees()[leg.String()].Free > 0; chunk++ {
		must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{1}, 4096), chunk<<20))
	}
	waits := make(chan error, 1)
	go func() { waits <- block.WriteAt(p.leg, bytes.Repeat([]byte{2}, 4096), chunk<<20) }()
	for !p.disk.Trees()[leg.String()].Full {
		time.Sleep(time.Millisecond)
	}
	return waits
}

// What was a tree must not pass for one: its extents go to others.
func TestAFreedTreeLeavesNothing(t *testing.T) {
	p := newPlanted(t)
	must(t, errors.Join(block.WriteAt(p.leg, bytes.Repeat([]byte{1}, 4096), 0), p.disk.GrowTree(leg.String(), 1)))
	trees := func() []treecheck.Tree {
		t.Helper()
		f, err := os.Open(p.path)
		must(t, err)
		defer f.Close()
		report, err := treecheck.Check(f, int64(block.GiB), treecheck.FirstExtent)
		must(t, err)
		return report.Trees
	}
	if all := trees(); len(all) != 1 || all[0].Damaged() || len(all[0].Extents) != 2 {
		t.Fatalf("the checker finds %+v, want a tree of two extents", all)
	}
	if err := p.disk.FreeLeg(leg); err == nil {
		t.Error("a leg is freed that is in use")
	}
	must(t, errors.Join(p.machine.Legs.Do(step(dm.OpRemove, nil)), p.disk.FreeLeg(leg)))
	if l := p.disk.Label(); len(l.Trees)+len(l.Legs) > 0 || len(drive.ExtentNumbers(l.Reserve)) != 3 {
		t.Errorf("the label has trees %v, legs %v and the reserve %v; want a reserve of three extents alone", l.Trees, l.Legs, l.Reserve)
	}
	if all := trees(); len(all) > 0 {
		t.Errorf("the checker finds %+v", all)
	}
	p.end(t)
}

// onLabel finds writes to extents that the label of a drive does not give to a tree.
type onLabel struct {
	block.Device
	drive *atomic.Pointer[Disk] // nil: nothing is looked at yet
	wrong *atomic.Int64
	wrote *atomic.Uint32 // the highest extent
}

func (o onLabel) Submit(io *block.IO) {
	if d := o.drive.Load(); d != nil && io.Op == block.OpWrite {
		e := uint32((io.Off - int64(drive.FirstExtent)) / int64(block.ExtentSize))
		if !slices.Contains(drive.ExtentNumbers(d.Label().Tree(leg.String()).GetExtents()), e) {
			o.wrong.Add(1)
		}
		o.wrote.Store(max(e, o.wrote.Load()))
	}
	o.Device.Submit(io)
}

// A tree uses an extent of the reserve only once the label on the drive says that it is the tree's: after a power
// cut in between, the manager could give it to another leg.
func TestAnExtentIsATreesByTheLabelBeforeItIsUsed(t *testing.T) {
	o := onLabel{drive: &atomic.Pointer[Disk]{}, wrong: &atomic.Int64{}, wrote: &atomic.Uint32{}}
	p := newPlantedOn(t, func(_ string, data block.Device) block.Device { o.Device = data; return o })
	o.drive.Store(p.disk)
	waits := p.fill(t)
	must(t, p.disk.GrowTree(leg.String(), 1))
	must(t, <-waits)
	if o.wrote.Load() != 1 || o.wrong.Load() > 0 {
		t.Errorf("the tree has written up to extent %d, want 1, and %d times to what the label does not give it", o.wrote.Load(), o.wrong.Load())
	}
	o.drive.Store(nil)
	p.end(t)
}

// A write that waits for space does not keep the next process waiting, which knows that the tree is full
// and serves what was written.
func TestAFullTreeGoesToTheNextProcess(t *testing.T) {
	p := newPlanted(t)
	p.machine.Drives.fullFor = time.Hour
	waits := p.fill(t)
	p.end(t)
	if err := <-waits; !errors.Is(err, block.ErrFull) && !errors.Is(err, block.ErrGone) {
		t.Errorf("the write that waited: %v", err)
	}
	p.start(t)
	p.open(t)
	p.serve(t)
	if seen := p.disk.Trees()[leg.String()]; !seen.Full || seen.Free != 0 {
		t.Errorf("the next process sees %+v, want a full tree", seen)
	}
	got := make([]byte, 4096)
	if err := block.ReadAt(p.leg, got, 0); err != nil || !bytes.Equal(got, bytes.Repeat([]byte{1}, 4096)) {
		t.Errorf("it reads %x…, %v", got[:4], err)
	}
	must(t, p.disk.GrowTree(leg.String(), 1))
	must(t, block.WriteAt(p.leg, got, 300<<20))
	if p.disk.Trees()[leg.String()].Full {
		t.Error("the tree has grown, and is full")
	}
	p.end(t)
}

// The end of a process is bounded, whatever is done to a tree. The drive stays locked until that is done.
func TestTheEndDoesNotWaitForATree(t *testing.T) {
	p := newPlanted(t)
	p.disk.held.trees.turn <- struct{}{}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- p.machine.Close(ctx) }()
	select {
	case err := <-ended:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("closed while something is done to a tree: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("it does not end")
	}
	must(t, p.disk.Close())
	next := newDrives(Config{Files: []string{p.path}, FilesOnly: true})
	if _, err := next.Open(p.path); err == nil {
		t.Error("the next process opens the drive, and the tree is still in use")
	}
	<-p.disk.held.trees.turn
	for {
		disk, err := next.Open(p.path)
		if err == nil {
			must(t, disk.Close())
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// A leg in a tree leaves its drive before it is opened on another one.
func TestALegInATreeIsOnOneDrive(t *testing.T) {
	on := &table{below: &mappedLeg{}, number: one}
	if on.otherDrive(MappedTable(one, "tree", leg, block.GiB)) || !on.otherDrive(MappedTable(two, "tree", leg, block.GiB)) {
		t.Error("a leg stays on one drive and moves to another: not told apart")
	}
}

// Space comes free in small portions, less than the writers need. A write is not held for longer because
// others were faster.
func TestAWriteIsNotHeldAgainAndAgain(t *testing.T) {
	p := newPlanted(t)
	p.machine.Drives.fullFor = 200 * time.Millisecond
	<-p.fill(t) // the last write has waited, and its host was told
	const writers = 60
	took := make(chan time.Duration, writers)
	for i := range int64(writers) {
		go func() {
			began := time.Now()
			_ = block.WriteAt(p.leg, bytes.Repeat([]byte{1}, 4096), (600+i)<<20)
			took <- time.Since(began)
		}()
	}
	for i := range int64(8) {
		time.Sleep(50 * time.Millisecond)
		must(t, errors.Join(block.Do(p.leg, &block.IO{Op: block.OpDiscard, Off: i << 20, Len: 1 << 20}), block.Flush(p.leg)))
	}
	for range writers {
		if d := <-took; d > 400*time.Millisecond {
			t.Errorf("a write was held for %v", d)
		}
	}
}

// The error of a write that waits in vain says for how long there has been no space, which decides when its
// host repeats it: not for how long that write has waited. Space in between is a new beginning once
// it is seen.
func TestAFullTreeSaysSinceWhen(t *testing.T) {
	p := newPlanted(t)
	p.machine.Drives.fullFor = 20 * time.Millisecond
	lack := func(err error) time.Duration {
		t.Helper()
		full, ok := errors.AsType[*block.FullError](err)
		if !ok || !errors.Is(err, block.ErrFull) {
			t.Fatalf("a write without space: %v, want a FullError", err)
		}
		return full.For
	}
	began := time.Now()
	first := lack(<-p.fill(t))
	if first < 20*time.Millisecond || first > time.Since(began) {
		t.Errorf("the first write says that there has been no space for %v", first)
	}
	time.Sleep(300 * time.Millisecond)
	write := func(chunk int64) error { return block.WriteAt(p.leg, bytes.Repeat([]byte{1}, 4096), chunk<<20) }
	if second := lack(write(900)); second < first+300*time.Millisecond {
		t.Errorf("300 ms later, the next one says %v after %v", second, first)
	}
	must(t, errors.Join(block.Do(p.leg, &block.IO{Op: block.OpDiscard, Off: 0, Len: 1 << 20}), block.Flush(p.leg)))
	if p.disk.Trees()[leg.String()].Full {
		t.Error("a tree with space is said to have none")
	}
	must(t, write(900))
	again := time.Now()
	if third := lack(write(901)); third > time.Since(again) {
		t.Errorf("there was space %v ago, and a write says that there has been none for %v", time.Since(again), third)
	}
}

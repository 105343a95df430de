// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

const plainSize = 200 * block.MiB

var legB = block.LegID{UUID: block.UUID{0x0b, 1}}

// newPlain is a drive with one plain leg, in use, and two extents for trees.
func newPlain(t *testing.T) *plantedDrive {
	t.Helper()
	p := &plantedDrive{size: plainSize}
	_, p.path = newFiles(t)
	p.start(t)
	must(t, p.machine.Drives.Format(p.path, cluster, driveA, ""))
	p.open(t)
	must(t, p.disk.Update(func(l *drive.Label) error {
		return errors.Join(l.SetGrant([]*pb.Extent{{Start: 1, Count: 2}}), l.PutLeg(&pb.LegLabel{
			LegId: leg.String(), Extents: []*pb.Extent{{Start: 0, Count: 1}}, Image: pb.ImageKind_IMAGE_KIND_PLAIN, Revision: 1, Zeroed: true,
			Volume: &pb.VolumeLabel{VolumeId: leg.String()},
		}))
	}))
	p.leg = mapLeg(t, p.machine.Legs, p.tableOf(t))
	return p
}

// tableOf is the leg's table by the label.
func (p *plantedDrive) tableOf(t *testing.T) dm.Table {
	t.Helper()
	n, err := p.machine.Drives.Number(p.path)
	must(t, err)
	if drive.Based(p.disk.Label().Leg(leg)) {
		return MappedTable(n, leg.String(), leg, plainSize)
	}
	return dm.Table{{Length: plainSize, Target: dm.Linear{Device: dm.RefTo(n), Offset: drive.FirstExtent}}}
}

// swap gives the leg the table that its label says.
func (p *plantedDrive) swap(t *testing.T) {
	t.Helper()
	must(t, p.machine.Legs.Do(step(dm.OpReload, p.tableOf(t))))
}

// settled waits until all of the leg is in its extents.
func (p *plantedDrive) settled(t *testing.T) {
	t.Helper()
	for p.disk.Trees()[leg.String()].Busy || !p.disk.Trees()[leg.String()].Settling.Plain {
		must(t, p.disk.Settle(leg, block.GiB))
		time.Sleep(time.Millisecond)
	}
}

// A plain leg gets a tree and loses it, again and again, while a host writes and reads all the time. Each
// snapshot holds what was acknowledged when it was taken.
func TestAPlainLegGetsATreeAndLosesItInUse(t *testing.T) {
	p := newPlain(t)
	const chunks = 5
	var mu sync.Mutex // held while a snapshot is taken, as a host holds its I/O
	var now [chunks]struct {
		at int64
		is byte
	}
	ctx, stop := context.WithCancel(t.Context())
	var host sync.WaitGroup
	host.Go(func() {
		for n := 1; ctx.Err() == nil; n++ {
			mu.Lock()
			c, b := n%chunks, byte(n%250+1)
			at := int64(c)<<20 + int64(n/chunks%3)*4096
			if err := block.WriteAt(p.leg, bytes.Repeat([]byte{b}, 8192), at); err != nil {
				t.Errorf("write %d: %v", n, err)
			}
			got := make([]byte, 4096)
			if err := block.ReadAt(p.leg, got, at); err != nil || got[0] != b || got[4095] != b {
				t.Errorf("read %d: %v, %d, want %d", n, err, got[0], b)
			}
			now[c].at, now[c].is = at, b
			mu.Unlock()
		}
	})
	for round := range 6 {
		must(t, p.disk.Plant(leg, leg.String(), plainSize))
		must(t, p.disk.Plant(leg, leg.String(), plainSize)) // again, as after a lost answer
		p.carve(t, legB)
		if err := p.prepare(legB, plainSize, freezeOf(leg)); err == nil {
			t.Fatal("a leg was frozen that is not used through its tree")
		}
		p.swap(t)
		mu.Lock()
		must(t, p.prepare(legB, plainSize, freezeOf(leg)))
		frozen := now
		mu.Unlock()
		time.Sleep(20 * time.Millisecond)
		if err := p.disk.Unbase(leg); err == nil {
			t.Fatal("a leg with a snapshot was made plain")
		}
		if err := p.disk.FreeLeg(leg); err == nil {
			t.Fatal("a leg was freed that a snapshot needs")
		}
		p.use(t, legB, func(d Device) {
			for c, want := range frozen {
				got := make([]byte, 4096)
				if err := block.ReadAt(d, got, want.at); err != nil || got[0] != want.is {
					t.Errorf("round %d: the snapshot has %d in chunk %d, want %d: %v", round, got[0], c, want.is, err)
				}
			}
		})
		must(t, p.disk.FreeLeg(legB))
		p.settled(t)
		must(t, p.disk.Unbase(leg))
		if err := p.disk.Plant(leg, leg.String(), plainSize); err == nil {
			t.Fatal("a tree was made over a leg that is in use through an earlier one")
		}
		p.swap(t)
		p.machine.Drives.background.Wait()
		must(t, p.disk.Fell(leg))
		if l := p.disk.Label(); len(l.Trees) != 0 || drive.CountExtents(l.Reserve) != 2 || l.Leg(leg).GetTreeId() != "" {
			t.Fatalf("the label is %+v", l)
		}
	}
	stop()
	host.Wait()
	p.end(t)
	p.start(t)
	p.open(t)
	p.leg = mapLeg(t, p.machine.Legs, p.tableOf(t))
	for c, want := range now {
		got := make([]byte, 4096)
		must(t, block.ReadAt(p.leg, got, want.at))
		if got[0] != want.is {
			t.Errorf("chunk %d has %d, want %d", c, got[0], want.is)
		}
	}
	p.end(t)
}

// A process that ends anywhere on the way leaves a leg that reads the same, and the next one goes on.
func TestTheWayToATreeAndBackGoesOnInTheNextProcess(t *testing.T) {
	p := newPlain(t)
	write := func(c byte, at int64) { must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{c}, 4096), at<<20)) }
	again := func(what string) {
		t.Helper()
		p.end(t)
		p.start(t)
		p.open(t)
		p.leg = mapLeg(t, p.machine.Legs, p.tableOf(t))
		for at, want := range "abc" {
			b := make([]byte, 4096)
			must(t, block.ReadAt(p.leg, b, int64(at)<<20))
			if b[0] != byte(want) {
				t.Errorf("%s: MiB %d has %c, want %c", what, at, b[0], want)
			}
		}
	}
	write('a', 0)
	write('b', 1)
	write('c', 2)
	must(t, p.disk.Update(func(l *drive.Label) error { return l.BeginBase(leg, leg.String()) }))
	again("a leg that names a tree")
	must(t, p.disk.Plant(leg, leg.String(), plainSize))
	again("a tree over the leg")
	write('x', 1)
	p.carve(t, legB)
	must(t, p.prepare(legB, plainSize, freezeOf(leg)))
	write('b', 1)
	again("a snapshot")
	p.holds(t, legB, "axc")
	must(t, p.disk.FreeLeg(legB))
	again("no snapshot any more")
	p.settled(t)
	again("all in its extents")
	p.settled(t)
	must(t, p.disk.Unbase(leg))
	again("plain, with a tree")
	must(t, p.disk.Fell(leg))
	again("plain")
	p.end(t)
}

// A leg with a tree over it goes back to a snapshot, open or not, and again if its record was not written.
// Until then its record says so, in whatever process, and it stays what its snapshots need: neither made
// plain nor zeroed. Without its snapshots it is plain again, and holds what the snapshot did.
func TestAPlainLegGoesBackToASnapshot(t *testing.T) {
	p := newPlain(t)
	write := func(c byte, at int64) { must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{c}, 4096), at<<20)) }
	reads := func(want string) {
		t.Helper()
		for at, c := range want {
			b := make([]byte, 4096)
			must(t, block.ReadAt(p.leg, b, int64(at)<<20))
			if b[0] != byte(c) {
				t.Errorf("MiB %d has %c, want %c", at, b[0], c)
			}
		}
	}
	turnsBack := func() {
		must(t, p.disk.Update(func(l *drive.Label) error { return l.Unprepared(leg) }))
	}
	freed := func(id block.LegID) {
		must(t, p.disk.FreeLeg(id))
		p.machine.Drives.background.Wait()
	}
	write('a', 0)
	write('b', 1)
	must(t, p.disk.Plant(leg, leg.String(), plainSize))
	p.swap(t)
	p.carve(t, monday, tuesday)
	must(t, p.prepare(monday, plainSize, freezeOf(leg)))
	write('x', 1)
	must(t, p.prepare(tuesday, plainSize, freezeOf(leg)))
	write('y', 0)
	must(t, p.prepare(leg, plainSize, backTo(monday))) // its record does not say that it is to
	reads("yx")
	for range 2 {
		turnsBack()
		if l := p.disk.Label().Leg(leg); drive.Ready(l) || !drive.Whole(l) {
			t.Fatalf("its record is %v", l)
		}
		must(t, p.prepare(leg, plainSize, backTo(monday)))
		reads("ab")
	}
	write('z', 1)
	turnsBack()
	must(t, p.disk.Update(func(l *drive.Label) error { // the volume's definition changes meanwhile
		r := l.Leg(leg)
		return l.PutLeg(&pb.LegLabel{
			LegId: leg.String(), Extents: r.Extents, Image: r.Image, TreeId: r.TreeId, Revision: r.Revision + 1, Zeroed: true, Volume: r.Volume,
		})
	}))
	if err := p.prepare(leg, plainSize, backTo(copied)); !errors.Is(err, mapped.ErrUnknown) || drive.Ready(p.disk.Label().Leg(leg)) {
		t.Errorf("back to a snapshot that is not there: %v", err)
	}
	p.end(t)
	p.start(t)
	p.open(t)
	if drive.Ready(p.disk.Label().Leg(leg)) {
		t.Error("the next process takes it for ready")
	}
	must(t, p.prepare(leg, plainSize, backTo(tuesday)))
	p.leg = mapLeg(t, p.machine.Legs, p.tableOf(t))
	reads("ax")
	p.holds(t, monday, "ab")
	turnsBack()
	must(t, p.prepare(leg, plainSize, Origin{})) // it is not to any more
	reads("ax")
	freed(tuesday)
	freed(monday)
	turnsBack()
	p.settled(t)
	if err := p.disk.Unbase(leg); err == nil {
		t.Error("a leg that is going back was made plain")
	}
	must(t, p.prepare(leg, plainSize, Origin{}))
	p.settled(t)
	must(t, p.disk.Unbase(leg))
	p.swap(t)
	p.machine.Drives.background.Wait()
	must(t, p.disk.Fell(leg))
	reads("ax")
	p.end(t)
}

// Without an extent for the tree nothing changes.
func TestATreeNeedsAnExtent(t *testing.T) {
	p := newPlain(t)
	must(t, p.disk.Update(func(l *drive.Label) error { return l.SetGrant(nil) }))
	if err := p.disk.Plant(leg, leg.String(), plainSize); !errors.Is(err, drive.ErrNoReserve) {
		t.Errorf("Plant = %v, want ErrNoReserve", err)
	}
	if l := p.disk.Label().Leg(leg); drive.Based(l) || l.GetTreeId() != "" {
		t.Errorf("the leg is %v", l)
	}
	p.end(t)
}

// A leg grows while it is copied back. The order to map all of it through its tree runs after the leg was
// made plain: it is refused, since what would be written to the new part is in no base, and the tree goes.
func TestAGrownLegIsNotMappedThroughATreeThatIsGone(t *testing.T) {
	p := newPlain(t)
	must(t, p.disk.Plant(leg, leg.String(), plainSize))
	p.swap(t)
	must(t, p.disk.Update(func(l *drive.Label) error { return l.SetGrant([]*pb.Extent{{Start: 1, Count: 1}}) }))
	must(t, p.disk.Update(func(l *drive.Label) error {
		r := l.Leg(leg)
		return l.PutLeg(&pb.LegLabel{
			LegId: leg.String(), Extents: []*pb.Extent{{Start: 0, Count: 1}, {Start: 2, Count: 1}}, Image: r.Image, TreeId: r.TreeId, Revision: 2, Zeroed: true,
			Volume: &pb.VolumeLabel{VolumeId: leg.String()},
		})
	}))
	p.settled(t)
	must(t, p.disk.Unbase(leg))
	n, err := p.machine.Drives.Number(p.path)
	must(t, err)
	if err := p.machine.Legs.Do(step(dm.OpReload, MappedTable(n, leg.String(), leg, 400*block.MiB))); !errors.Is(err, mapped.ErrState) {
		t.Errorf("the grown leg is mapped through its tree: %v", err)
	}
	p.end(t)
}

// A leg in a damaged tree is served also if it was to grow when its tree is opened next: what it has grown by reads as
// zeroes, and nothing is written to the tree.
func TestALegOfADamagedTreeIsServedThoughItWasToGrow(t *testing.T) {
	for name, c := range map[string]struct {
		make func(*testing.T) *plantedDrive
		to   block.Size
	}{
		"over its extents": {func(t *testing.T) *plantedDrive {
			p := newPlain(t)
			must(t, p.disk.Plant(leg, leg.String(), plainSize))
			return p
		}, 400 * block.MiB},
		"in a tree": {newPlanted, 2 * block.GiB},
	} {
		t.Run(name, func(t *testing.T) {
			p := c.make(t)
			p.write(t, leg, 'a', 0)
			p.carve(t, legB)
			p.use(t, leg, func(Device) { must(t, p.prepare(legB, cmp.Or(p.size, block.GiB), freezeOf(leg))) })
			p.write(t, leg, 'b', 0)
			p.stop(t)
			p.loseRecord(t, 200)
			was := p.size
			if p.size = c.to; was != 0 { // the label has grown, and its tree has not
				must(t, p.disk.Update(func(l *drive.Label) error {
					if err := l.SetGrant([]*pb.Extent{{Start: 1, Count: 1}}); err != nil {
						return err
					}
					r := l.Leg(leg)
					r.Extents = []*pb.Extent{{Start: 0, Count: 1}, {Start: 2, Count: 1}}
					return nil
				}))
			}
			before := p.metadata(t)
			p.serve(t)
			p.use(t, leg, func(d Device) {
				b := make([]byte, 4096)
				if err := block.ReadAt(d, b, 0); err != nil || b[0] != 'b' {
					t.Errorf("chunk 0 is %q, %v", b[:1], err)
				}
				if err := block.ReadAt(d, b, int64(c.to)-4096); err != nil || !block.AllZero(b) {
					t.Errorf("what it was to grow by is %q, %v", b[:1], err)
				}
				if err := block.WriteAt(d, b, int64(c.to)-4096); !errors.Is(err, block.ErrMedium) {
					t.Errorf("write: %v", err)
				}
				if err := block.ReadAt(d, b, 5<<20); !errors.Is(err, block.ErrMedium) {
					t.Errorf("read what is unknown: %v", err)
				}
			})
			if err := p.prepare(leg, c.to+block.GiB, Origin{}); was == 0 && !errors.Is(err, mapped.ErrDamaged) {
				t.Errorf("it is said to be larger: %v", err)
			}
			if !bytes.Equal(before, p.metadata(t)) {
				t.Error("the tree was written to")
			}
			p.end(t)
		})
	}
}

// metadata is what the tree has in its home extent but for data.
func (p *plantedDrive) metadata(t *testing.T) []byte {
	t.Helper()
	f, err := os.Open(p.path)
	must(t, err)
	defer f.Close() //nolint:errcheck // it was read
	b := make([]byte, 3<<20)
	_, err = f.ReadAt(b, p.home())
	must(t, err)
	return b
}

// Why a leg is not copied back is seen until it is. What ends with the process did not fail.
func TestWhyALegIsNotCopiedBackIsSeen(t *testing.T) {
	var tree openTree
	bad := errors.New("a bad sector")
	over, end := context.WithCancel(t.Context())
	end()
	if tree.settled(over, bad) || tree.settled(t.Context(), block.ErrGone) || tree.unsettled.Load() != nil {
		t.Errorf("what was cut off has failed: %v", tree.unsettled.Load())
	}
	if !tree.settled(t.Context(), bad) || tree.unsettled.Load() == nil || *tree.unsettled.Load() != bad.Error() {
		t.Errorf("a bad sector: %v", tree.unsettled.Load())
	}
	if tree.settled(t.Context(), nil) || tree.unsettled.Load() != nil {
		t.Errorf("after it was copied: %v", tree.unsettled.Load())
	}
}

// A leg under the tree of others goes as soon as none of them needs what is in its extents: a clone that was
// flattened does not. The tree stays, and its extents are another leg's then.
func TestALegGoesFromUnderAFlattenedClone(t *testing.T) {
	p := newPlain(t)
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{'a'}, 4<<20), 0))
	must(t, p.disk.Plant(leg, leg.String(), plainSize))
	p.swap(t)
	p.carveSnapshot(t, monday, leg)
	must(t, p.prepare(monday, plainSize, freezeOf(leg)))
	p.carve(t, copied)
	must(t, p.prepare(copied, plainSize, cloneOf(monday)))
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{'b'}, 4096), 0))
	p.write(t, copied, 'c', 1)
	must(t, p.machine.Legs.Do(step(dm.OpRemove, nil)))
	needed := func(by string) {
		t.Helper()
		if err := p.disk.FreeLeg(leg); !errors.Is(err, drive.ErrNeeded) || p.disk.Label().Leg(leg) == nil {
			t.Fatalf("it was freed while %s needs it: %v", by, err)
		}
	}
	needed("a snapshot")
	must(t, p.disk.FreeLeg(monday))
	needed("a clone")
	p.use(t, copied, func(Device) {
		must(t, p.disk.Flatten(cloned, leg.String(), block.GiB))
		p.flat(t)
		for p.disk.FreeLeg(leg) != nil {
			time.Sleep(time.Millisecond) // what is deleted comes free in the background
		}
		must(t, p.disk.FreeLeg(leg))
	})
	l := p.disk.Label()
	if l.Leg(leg) != nil || l.Tree(leg.String()) == nil || len(l.Legs) != 1 {
		t.Fatalf("the label is %+v", l)
	}
	must(t, p.disk.Update(func(l *drive.Label) error {
		return l.PutLeg(&pb.LegLabel{
			LegId: legB.String(), Extents: []*pb.Extent{{Start: 0, Count: 1}}, Image: pb.ImageKind_IMAGE_KIND_PLAIN, Revision: 1, Zeroed: true,
			Volume: &pb.VolumeLabel{VolumeId: legB.String()},
		})
	}))
	n, err := p.machine.Drives.Number(p.path)
	must(t, err)
	other := mapLeg(t, p.machine.Legs, dm.Table{{Length: plainSize, Target: dm.Linear{Device: dm.RefTo(n), Offset: drive.FirstExtent}}})
	must(t, block.WriteAt(other, bytes.Repeat([]byte{'x'}, 4<<20), 0))
	p.holds(t, copied, "acaa")
	p.end(t)
	p.start(t)
	p.open(t)
	p.holds(t, copied, "acaa")
	p.machine.Drives.background.Wait()
	must(t, p.disk.FreeLeg(copied))
	if l := p.disk.Label(); len(l.Trees) != 0 || drive.CountExtents(l.Reserve) != 2 {
		t.Errorf("after the clone the label is %+v", l)
	}
	p.end(t)
}

// A process that ends while a leg goes from under others leaves that to the next one.
func TestTheNextProcessFreesALegThatNobodyNeeds(t *testing.T) {
	p := newPlain(t)
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{'a'}, 4096), 0))
	must(t, p.disk.Plant(leg, leg.String(), plainSize))
	p.swap(t)
	p.carveSnapshot(t, monday, leg)
	must(t, p.prepare(monday, plainSize, freezeOf(leg)))
	p.carve(t, copied)
	must(t, p.prepare(copied, plainSize, cloneOf(monday)))
	must(t, p.disk.Flatten(cloned, leg.String(), block.GiB))
	p.flat(t)
	must(t, p.disk.FreeLeg(monday))
	if err := p.disk.FreeLeg(leg); !errors.Is(err, mapped.ErrInUse) {
		t.Fatalf("it was freed in use: %v", err)
	}
	must(t, p.machine.Legs.Do(step(dm.OpRemove, nil)))
	p.use(t, copied, func(Device) {
		tree := p.disk.held.trees.get(leg.String())
		if needed, err := tree.LeaveBase(leg.UUID); needed || err != nil { // it ends here
			t.Fatalf("the leg is needed: %v, %v", needed, err)
		}
	})
	p.end(t)
	p.start(t)
	p.open(t)
	for p.disk.FreeLeg(leg) != nil {
		time.Sleep(time.Millisecond)
	}
	p.holds(t, copied, "a")
	if l := p.disk.Label(); l.Leg(leg) != nil || len(l.Legs) != 1 {
		t.Errorf("the label is %+v", l)
	}
	p.end(t)
}

// A leg that changes its table has lost nothing by it: whatever the drive has lost before, and whether the leg has gone
// back to a snapshot, hosts that have it flush it and take checkpoints before and after.
func TestFlushesGoOnWhenALegChangesItsTable(t *testing.T) {
	p := newPlain(t)
	if err := p.disk.held.file.Lose(errors.New("long ago")); err == nil {
		t.Fatal("nothing is lost")
	}
	use := func(e *exported, when string) {
		t.Helper()
		if err := block.Flush(e); err != nil {
			t.Errorf("a flush, %s: %v", when, err)
		}
		e.take(t, 1)
	}
	plain := export(t, p.machine.Legs)
	use(plain, "of a plain leg")
	must(t, p.disk.Plant(leg, leg.String(), plainSize))
	p.swap(t)
	use(plain, "through a tree now")
	plain.closed()
	p.carve(t, legB)
	must(t, p.prepare(legB, plainSize, freezeOf(leg)))
	must(t, p.disk.held.within(leg.String(), func(o *openTree) error { return o.Restore(leg.UUID, legB.UUID) }))
	restored := export(t, p.machine.Legs)
	use(restored, "of a leg that has gone back")
	must(t, p.disk.FreeLeg(legB))
	p.settled(t)
	must(t, p.disk.Unbase(leg))
	p.swap(t)
	use(restored, "in its own place again")
	restored.closed()
	p.end(t)
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

var (
	monday  = block.LegID{UUID: block.UUIDFromRandom([16]byte{21})}
	tuesday = block.LegID{UUID: block.UUIDFromRandom([16]byte{22})}
	copied  = block.LegID{UUID: block.UUIDFromRandom([16]byte{23})}
)

func freezeOf(id block.LegID) Origin {
	return Origin{Leg: id, Kind: pb.LegOriginKind_LEG_ORIGIN_KIND_FREEZE}
}

func cloneOf(id block.LegID) Origin {
	return Origin{Leg: id, Kind: pb.LegOriginKind_LEG_ORIGIN_KIND_CLONE}
}

func backTo(id block.LegID) Origin {
	return Origin{Leg: id, Kind: pb.LegOriginKind_LEG_ORIGIN_KIND_RESTORE}
}

// carve makes the record of another leg in the tree.
func (p *plantedDrive) carve(t *testing.T, ids ...block.LegID) {
	t.Helper()
	for _, id := range ids {
		must(t, p.disk.Update(func(l *drive.Label) error {
			return l.PutLeg(&pb.LegLabel{
				LegId: id.String(), TreeId: leg.String(), Image: pb.ImageKind_IMAGE_KIND_MAPPED, Revision: 1, Volume: &pb.VolumeLabel{VolumeId: id.String()},
			})
		}))
	}
}

// stop unmaps the leg, so that its tree is closed.
func (p *plantedDrive) stop(t *testing.T) {
	t.Helper()
	must(t, p.machine.Legs.Do(step(dm.OpRemove, nil)))
	if len(p.disk.Trees()) > 0 {
		t.Fatal("the tree is still open")
	}
}

// use opens a leg of the tree.
func (p *plantedDrive) use(t *testing.T, id block.LegID, do func(Device)) {
	t.Helper()
	n, err := p.machine.Drives.Number(p.path)
	must(t, err)
	d, err := p.machine.Drives.leg(n, leg.String(), id, cmp.Or(p.size, block.GiB))
	if err != nil {
		t.Fatalf("open leg %v: %v", id, err)
	}
	do(d)
	must(t, d.Close())
}

func (p *plantedDrive) write(t *testing.T, id block.LegID, c byte, chunks ...int64) {
	t.Helper()
	p.use(t, id, func(d Device) {
		for _, chunk := range chunks {
			must(t, block.WriteAt(d, bytes.Repeat([]byte{c}, 4096), chunk<<20))
		}
	})
}

// holds checks the first bytes of the first chunks.
func (p *plantedDrive) holds(t *testing.T, id block.LegID, want string) {
	t.Helper()
	p.use(t, id, func(d Device) {
		got := make([]byte, len(want))
		for i := range got {
			b := make([]byte, 4096)
			must(t, block.ReadAt(d, b, int64(i)<<20))
			if got[i] = b[0]; got[i] == 0 {
				got[i] = '-'
			}
		}
		if string(got) != want {
			t.Errorf("leg %v holds %s, want %s", id, got, want)
		}
	})
}

// forgetPrepared makes the label what it is if the process ends between the tree and the label.
func (p *plantedDrive) forgetPrepared(t *testing.T, id block.LegID) {
	t.Helper()
	must(t, p.disk.Update(func(l *drive.Label) error {
		l.Leg(id).Zeroed, l.Leg(id).ZeroedExtents = false, 0
		return nil
	}))
}

// A snapshot has what was acknowledged before, whether the tree is open or not, and never changes; also
// not if the order is given again after the label was not written.
func TestASnapshotIsTakenOfALeg(t *testing.T) {
	for _, open := range []bool{true, false} {
		t.Run(fmt.Sprint("open ", open), func(t *testing.T) {
			p := newPlanted(t)
			must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("a"), 4096), 0))
			var acknowledged atomic.Uint32
			stop, ended := make(chan struct{}), make(chan struct{})
			if open {
				go func() {
					defer close(ended)
					for n := uint32(1); ; n++ {
						select {
						case <-stop:
							return
						default:
						}
						if err := block.WriteAt(p.leg, bytes.Repeat([]byte{byte(n), byte(n >> 8)}, 2048), 5<<20); err != nil {
							t.Error(err)
							return
						}
						acknowledged.Store(n)
					}
				}()
				for acknowledged.Load() < 10 {
					time.Sleep(time.Millisecond)
				}
			} else {
				p.stop(t)
				close(ended)
			}
			p.carve(t, monday, tuesday)
			before := acknowledged.Load()
			must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
			after := acknowledged.Load()
			close(stop)
			<-ended
			if open {
				must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("b"), 4096), 0))
				p.use(t, monday, func(d Device) {
					b := make([]byte, 4096)
					must(t, block.ReadAt(d, b, 5<<20))
					if n := uint32(b[0]) | uint32(b[1])<<8; n < before || n > after+1 {
						t.Errorf("the snapshot has write %d; %d was acknowledged before, and %d when it was taken", n, before, after)
					}
				})
			} else {
				p.write(t, leg, 'b', 0)
			}
			must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
			p.holds(t, monday, "a-")
			must(t, p.prepare(tuesday, block.GiB, freezeOf(leg)))
			p.forgetPrepared(t, monday)
			must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
			p.holds(t, monday, "a-")
			p.holds(t, tuesday, "b-")
			p.use(t, monday, func(d Device) {
				if err := block.WriteAt(d, make([]byte, 4096), 0); err == nil || !d.Geometry().ReadOnly {
					t.Errorf("a snapshot is written to: %v", err)
				}
			})
			if open {
				must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("c"), 4096), 0))
			}
			for _, id := range []block.LegID{monday, tuesday} {
				if !p.disk.Label().Leg(id).GetZeroed() {
					t.Errorf("leg %v is not recorded as prepared", id)
				}
			}
			p.end(t)
		})
	}
}

// A snapshot's leg can be larger than its volume: an expansion had reached the leg, and was not complete
// when the manager's store was lost. A clone of the volume's size begins all the same.
func TestACloneIsNoSmallerThanItsSnapshotsLeg(t *testing.T) {
	p := newPlanted(t)
	p.stop(t)
	p.write(t, leg, 'a', 0)
	must(t, p.prepare(leg, 2*block.GiB, Origin{}))
	p.carve(t, monday, copied)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, p.prepare(copied, block.GiB, cloneOf(monday)))
	p.write(t, copied, 'c', 1)
	p.holds(t, monday, "a-")
	p.holds(t, copied, "ac")
	p.end(t)
}

func TestACloneIsALegOfItsOwn(t *testing.T) {
	p := newPlanted(t)
	p.stop(t)
	p.write(t, leg, 'a', 0, 1)
	p.carve(t, monday, copied)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, p.prepare(copied, 2*block.GiB, cloneOf(monday)))
	p.forgetPrepared(t, copied)
	p.write(t, copied, 'c', 0)
	must(t, p.prepare(copied, 2*block.GiB, cloneOf(monday))) // again
	must(t, p.prepare(copied, 3*block.GiB, Origin{}))
	p.write(t, copied, 'd', 2)
	p.write(t, leg, 'b', 1)
	p.holds(t, leg, "ab-")
	p.holds(t, monday, "aa-")
	p.holds(t, copied, "cad")
	p.use(t, copied, func(d Device) {
		if size := d.Geometry().Size; size != 3*block.GiB {
			t.Errorf("the clone has %v, want 3GiB", size)
		}
		p.disk.held.trees.get(leg.String()).toldAt = time.Time{}
		used := p.disk.Trees()[leg.String()].UsedBy
		if used[leg.UUID] != 1<<20 || used[monday.UUID] != 2<<20 || used[copied.UUID] != 2<<20 {
			t.Errorf("the space of the legs is %v, want 1MiB, 2MiB and 2MiB", used)
		}
	})
	p.end(t)
}

// Whatever is missing, no empty leg is made in place of a snapshot or a clone.
func TestNoEmptyLegPassesForASnapshot(t *testing.T) {
	p := newPlanted(t)
	p.stop(t)
	p.carve(t, monday, tuesday, copied)
	refused := func(what string, want error, id block.LegID, size block.Size, from Origin) {
		t.Helper()
		if err := p.prepare(id, size, from); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
		must(t, p.disk.held.within(leg.String(), func(o *openTree) error {
			if l, there := o.Layer(id.UUID); there {
				t.Errorf("%s: it is there: %+v", what, l)
			}
			return nil
		}))
	}
	refused("a snapshot of nothing", mapped.ErrUnknown, monday, block.GiB, freezeOf(tuesday))
	refused("a clone of nothing", mapped.ErrUnknown, monday, block.GiB, cloneOf(tuesday))
	refused("a clone of a leg", mapped.ErrState, monday, block.GiB, cloneOf(leg))
	refused("an origin of an unknown kind", block.ErrUnsupported, monday, block.GiB, Origin{Leg: leg, Kind: 9})
	refused("an origin without a kind", block.ErrUnsupported, monday, block.GiB, Origin{Leg: leg})
	refused("a snapshot larger than the leg", block.ErrRange, monday, 2*block.GiB, freezeOf(leg))
	if p.disk.Label().Leg(monday).GetZeroed() {
		t.Error("the label says that it is prepared")
	}
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, p.disk.held.within(leg.String(), func(o *openTree) error { return o.Delete(monday.UUID) }))
	for _, from := range []Origin{{}, freezeOf(leg)} {
		refused("a snapshot that was prepared and is lost", mapped.ErrUnknown, monday, block.GiB, from)
	}
	must(t, p.disk.Update(func(l *drive.Label) error { l.Tree(leg.String()).Formatted = false; return nil }))
	if err := p.prepare(tuesday, block.GiB, freezeOf(leg)); !errors.Is(err, mapped.ErrUnknown) || p.disk.Label().Tree(leg.String()).GetFormatted() {
		t.Errorf("a snapshot in a tree that was never formatted: %v", err)
	}
	p.end(t)
}

// A leg goes back to a snapshot, whether it is open or not, and again if the label was not written. Once
// it is recorded as prepared, the order does nothing.
func TestALegGoesBackToASnapshot(t *testing.T) {
	for _, open := range []bool{true, false} {
		p := newPlanted(t)
		must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("a"), 4096), 0))
		p.carve(t, monday, tuesday)
		must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
		must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("b"), 4096), 0))
		must(t, p.prepare(tuesday, block.GiB, freezeOf(leg)))
		must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("c"), 4096), 1<<20))
		check := func(want string) {
			t.Helper()
			if !open {
				p.holds(t, leg, want)
				return
			}
			got := make([]byte, 2)
			for i := range got {
				b := make([]byte, 4096)
				must(t, block.ReadAt(p.leg, b, int64(i)<<20))
				if got[i] = b[0]; got[i] == 0 {
					got[i] = '-'
				}
			}
			if string(got) != want {
				t.Errorf("open %v: the leg holds %s, want %s", open, got, want)
			}
		}
		if !open {
			p.stop(t)
		}
		must(t, p.prepare(leg, block.GiB, backTo(monday))) // it is prepared
		check("bc")
		for range 2 {
			p.forgetPrepared(t, leg)
			must(t, p.prepare(leg, block.GiB, backTo(monday)))
			check("a-")
		}
		p.forgetPrepared(t, leg)
		must(t, p.prepare(leg, block.GiB, backTo(tuesday)))
		check("b-")
		p.holds(t, monday, "a-")
		p.forgetPrepared(t, leg)
		if err := p.prepare(leg, block.GiB, backTo(copied)); !errors.Is(err, mapped.ErrUnknown) || p.disk.Label().Leg(leg).GetZeroed() {
			t.Errorf("back to a snapshot that is not there: %v", err)
		}
		if err := p.prepare(monday, block.GiB, backTo(tuesday)); err != nil { // it is prepared
			t.Error(err)
		}
		p.forgetPrepared(t, monday)
		if err := p.prepare(monday, block.GiB, backTo(tuesday)); !errors.Is(err, mapped.ErrState) {
			t.Errorf("a snapshot goes back: %v", err)
		}
		p.end(t)
	}
}

// What a leg held before it went back comes free, also while its tree stays open.
func TestWhatALegHeldBeforeItWentBackComesFree(t *testing.T) {
	p := newPlanted(t)
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("a"), 4096), 0))
	p.carve(t, monday)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	for c := range int64(50) {
		must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("b"), 4096), c<<20))
	}
	p.forgetPrepared(t, leg)
	must(t, p.prepare(leg, block.GiB, backTo(monday)))
	p.machine.Drives.background.Wait()
	p.idle(t)
}

// Once a leg has gone back, the list of what was written to it since a checkpoint does not hold.
func TestAListDoesNotOutliveThatALegGoesBack(t *testing.T) {
	p := newPlanted(t)
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("a"), 4096), 0))
	p.carve(t, monday)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("b"), 4096), 20<<20))
	e := export(t, p.machine.Legs)
	e.take(t, 1)
	e.closed() // the volume is detached
	p.forgetPrepared(t, leg)
	must(t, p.prepare(leg, block.GiB, backTo(monday))) // changes what is at 20 MiB
	next := export(t, p.machine.Legs)
	if got := listed(t, next); got != nil {
		t.Errorf("the leg says that only %v was written since checkpoint 1", got)
	}
}

// A leg is filled with what is elsewhere, over a snapshot, and is one itself only when all of it is there,
// wherever an attempt is cut off.
func TestALegIsFilledFromElsewhere(t *testing.T) {
	p := newPlanted(t)
	p.stop(t)
	p.carve(t, monday)
	p.write(t, leg, 'a', 0, 1)
	must(t, p.disk.Prepare(monday, 1, block.GiB, freezeOf(leg)))
	p.write(t, leg, 'x', 0, 1, 2)
	p.carve(t, tuesday)
	state := func() mapped.State {
		for _, l := range treeLayers(t, p) {
			if l.Object == tuesday.UUID && l.State != mapped.StateDoomed {
				return l.State
			}
		}
		return 0
	}
	prepared := func() bool { return p.disk.Label().Leg(tuesday).GetZeroed() }
	cut := errors.New("cut")
	err := p.disk.Copy(tuesday, 1, block.GiB, block.LegID{}, func(to block.Device, room func() block.Size) error {
		must(t, block.WriteAt(to, bytes.Repeat([]byte{'q'}, 4096), 3<<20)) // over nothing: what it begins as changes
		if free := p.disk.Trees()[leg.String()].Free; room() != free {
			t.Errorf("there is room for %v, and its tree has %v free", room(), free)
		}
		return cut
	})
	if !errors.Is(err, cut) || state() != mapped.StateOpen || prepared() {
		t.Fatalf("cut off: %v, state %v, prepared %v", err, state(), prepared())
	}
	fill := func(to block.Device, _ func() block.Size) error {
		return errors.Join(block.WriteAt(to, bytes.Repeat([]byte{'b'}, 4096), 1<<20), block.Do(to, &block.IO{Op: block.OpWriteZeroes, Unmap: true, Len: 1 << 20}))
	}
	must(t, p.disk.Copy(tuesday, 1, block.GiB, monday, fill))
	if state() != mapped.StateFrozen || !prepared() {
		t.Errorf("filled: state %v, prepared %v", state(), prepared())
	}
	p.holds(t, tuesday, "-b--")
	p.holds(t, monday, "aa--")
	p.holds(t, leg, "xxx-")
	p.forgetPrepared(t, tuesday) // the process ended before the label was written
	must(t, p.disk.Copy(tuesday, 1, block.GiB, monday, func(block.Device, func() block.Size) error {
		t.Error("a leg that is complete is filled again")
		return nil
	}))
	p.holds(t, tuesday, "-b--")
	p.carve(t, copied)
	full := fmt.Errorf("it takes more: %w", block.ErrFull)
	if err := p.disk.Copy(copied, 1, block.GiB, monday, func(block.Device, func() block.Size) error { return full }); !errors.Is(err, block.ErrFull) {
		t.Errorf("without space: %v", err)
	}
	for _, l := range treeLayers(t, p) {
		if l.Object == copied.UUID && l.State != mapped.StateDoomed {
			t.Errorf("without space the leg keeps what it took: %+v", l)
		}
	}
}

// The snapshot as which a copy begins may be larger in its tree than its volume was: its leg had grown already, in
// an expansion that was not complete.
func TestACopyBeginsAsASnapshotThatIsLargerInItsTree(t *testing.T) {
	p := newPlanted(t)
	p.stop(t)
	must(t, p.disk.Prepare(leg, 1, 2*block.GiB, Origin{}))
	p.carve(t, monday)
	p.write(t, leg, 'a', 0)
	must(t, p.disk.Prepare(monday, 1, block.GiB, freezeOf(leg)))
	p.carve(t, tuesday)
	must(t, p.disk.Copy(tuesday, 1, block.GiB, monday, func(to block.Device, _ func() block.Size) error {
		return block.WriteAt(to, bytes.Repeat([]byte{'b'}, 4096), 1<<20)
	}))
	p.holds(t, tuesday, "ab--")
}

// A copy that is the first of its tree makes that, and makes it again if it was cut off before the label said
// so. Nothing begins as what a tree without a word on the label may have.
func TestACopyMakesATreeOfItsOwn(t *testing.T) {
	p := newPlanted(t)
	p.stop(t)
	for _, id := range []block.LegID{monday, tuesday} {
		must(t, p.disk.Update(func(l *drive.Label) error {
			return l.PutLeg(&pb.LegLabel{
				LegId: id.String(), TreeId: monday.String(), Image: pb.ImageKind_IMAGE_KIND_MAPPED, Revision: 1, Volume: &pb.VolumeLabel{VolumeId: id.String()},
			})
		}))
	}
	fill := func(c byte, err error) func(block.Device, func() block.Size) error {
		return func(to block.Device, _ func() block.Size) error {
			return errors.Join(block.WriteAt(to, bytes.Repeat([]byte{c}, 4096), 1<<20), err)
		}
	}
	if err := p.disk.Copy(tuesday, 1, block.GiB, monday, fill('x', nil)); !errors.Is(err, mapped.ErrUnknown) {
		t.Errorf("a copy that begins as what is not there: %v", err)
	}
	cut := errors.New("cut")
	if err := p.disk.Copy(monday, 1, block.GiB, block.LegID{}, fill('x', cut)); !errors.Is(err, cut) || !p.disk.Label().Tree(monday.String()).GetFormatted() {
		t.Fatalf("cut off: %v, %v", err, p.disk.Label().Trees)
	}
	must(t, p.disk.Update(func(l *drive.Label) error { l.Tree(monday.String()).Formatted = false; return nil }))
	must(t, p.disk.Copy(monday, 1, block.GiB, block.LegID{}, fill('m', nil)))
	must(t, p.disk.Copy(tuesday, 1, block.GiB, monday, fill('t', nil)))
	n, err := p.machine.Drives.Number(p.path)
	must(t, err)
	for id, want := range map[block.LegID]byte{monday: 'm', tuesday: 't'} {
		d, err := p.machine.Drives.leg(n, monday.String(), id, block.GiB)
		must(t, err)
		got := make([]byte, 4096)
		must(t, block.ReadAt(d, got, 1<<20))
		must(t, d.Close())
		if got[0] != want || !p.disk.Label().Leg(id).GetZeroed() {
			t.Errorf("leg %v holds %q", id, got[0])
		}
	}
}

// permute calls f with each order of list.
func permute[T any](list []T, f func([]T)) {
	if len(list) == 0 {
		f(nil)
		return
	}
	for i, first := range list {
		permute(slices.Concat(list[:i], list[i+1:]), func(rest []T) { f(append([]T{first}, rest...)) })
	}
}

// idle waits until nothing is done in the background, and checks that all space has an owner.
func (p *plantedDrive) idle(t *testing.T) {
	t.Helper()
	p.machine.Drives.background.Wait()
	must(t, p.disk.held.within(leg.String(), func(o *openTree) error {
		if o.Reclaimable() {
			t.Error("there is space to give back, and nobody does")
		}
		used, doomed := block.Size(0), false
		for _, u := range o.Used() {
			used += u
		}
		for _, l := range o.Layers() {
			doomed = doomed || l.State == mapped.StateDoomed
		}
		if s := o.Space(); !doomed && s.Total-s.Free-s.Pending != used {
			t.Errorf("%v are used, the legs have %v", s.Total-s.Free-s.Pending, used)
		}
		return nil
	}))
	p.machine.Drives.background.Wait()
}

// Legs and snapshots of a tree go in any order, each twice, between two processes. What stays is as it
// was, the space of what goes comes free, and the tree goes with the last one.
func TestLegsOfATreeGoInAnyOrder(t *testing.T) {
	holds := map[block.LegID]string{leg: "cba-", monday: "aaa-", tuesday: "bba-", copied: "aada"}
	permute([]block.LegID{leg, monday, tuesday, copied}, func(order []block.LegID) {
		p := newPlanted(t)
		p.stop(t)
		p.carve(t, monday, tuesday, copied)
		p.write(t, leg, 'a', 0, 1, 2)
		must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
		p.write(t, leg, 'b', 0, 1)
		must(t, p.prepare(tuesday, block.GiB, freezeOf(leg)))
		p.write(t, leg, 'c', 0)
		must(t, p.prepare(copied, block.GiB, cloneOf(monday)))
		p.write(t, copied, 'd', 2)
		p.write(t, copied, 'a', 3)
		for i, id := range order {
			if open := i%2 == 0 && i+1 < len(order); open { // with the tree in use by another leg
				p.use(t, order[i+1], func(Device) { must(t, p.disk.FreeLeg(id)) })
			} else {
				must(t, p.disk.FreeLeg(id))
			}
			must(t, p.disk.FreeLeg(id))
			if p.disk.Label().Leg(id) != nil {
				t.Error("the label still has it")
			}
			if i == 1 {
				p.end(t)
				p.start(t)
				p.open(t)
			}
			for _, other := range order[i+1:] {
				p.holds(t, other, holds[other])
			}
			if i+1 < len(order) {
				p.idle(t)
			}
		}
		if l := p.disk.Label(); len(l.Trees)+len(l.Legs) > 0 || len(drive.ExtentNumbers(l.Reserve)) != 3 {
			t.Errorf("the label has trees %v, legs %v and the reserve %v; want a reserve of three extents alone", l.Trees, l.Legs, l.Reserve)
		}
		p.end(t)
	})
}

// switchable is a drive whose writes can fail, or take time.
type switchable struct {
	block.Device
	broken *atomic.Bool
	slow   *atomic.Int64
}

func (s switchable) Submit(io *block.IO) {
	switch {
	case io.Op == block.OpWrite && s.broken.Load():
		io.Complete(block.ErrMedium)
	case io.Op == block.OpWrite && s.slow.Load() > 0:
		time.AfterFunc(time.Duration(s.slow.Load()), func() { s.Device.Submit(io) })
	default:
		s.Device.Submit(io)
	}
}

// The label forgets a leg only when its layer is deleted: else nobody would ever free that.
func TestALegLeavesItsTreeBeforeTheLabel(t *testing.T) {
	var broken atomic.Bool
	p := newPlantedOn(t, func(_ string, data block.Device) block.Device { return switchable{data, &broken, new(atomic.Int64)} })
	p.stop(t)
	p.carve(t, monday)
	p.write(t, leg, 'a', 0)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	broken.Store(true)
	if err := p.disk.FreeLeg(monday); err == nil || p.disk.Label().Leg(monday) == nil {
		t.Errorf("freed with a tree that cannot be written: %v", err)
	}
	broken.Store(false)
	// The process ends between the tree and the label.
	must(t, p.disk.held.within(leg.String(), func(o *openTree) error { return o.Delete(monday.UUID) }))
	p.end(t)
	p.start(t)
	p.open(t)
	must(t, p.disk.FreeLeg(monday))
	p.idle(t)
	if p.disk.Label().Leg(monday) != nil {
		t.Error("the label still has it")
	}
	p.holds(t, leg, "a-")
	p.end(t)
}

// A leg that is in use is not deleted.
func TestALegInUseIsNotFreed(t *testing.T) {
	p := newPlanted(t)
	p.carve(t, monday)
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("a"), 4096), 0))
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	if err := p.disk.FreeLeg(leg); !errors.Is(err, mapped.ErrInUse) || p.disk.Label().Leg(leg) == nil {
		t.Errorf("a leg in use is freed: %v", err)
	}
	must(t, p.disk.FreeLeg(monday))
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("b"), 4096), 0))
	p.end(t)
}

// The end of a process does not wait until all space has come free, and the next one goes on.
func TestTheNextProcessGoesOnGivingBackSpace(t *testing.T) {
	var slow atomic.Int64
	p := newPlantedOn(t, func(_ string, data block.Device) block.Device { return switchable{data, new(atomic.Bool), &slow} })
	p.carve(t, monday)
	const chunks = 60
	for c := range int64(chunks) {
		must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("a"), 4096), c<<20))
	}
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	for c := range int64(chunks) {
		must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("b"), 4096), c<<20+512<<10))
	}
	slow.Store(int64(50 * time.Millisecond))
	must(t, p.disk.FreeLeg(monday))
	began := time.Now()
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte("c"), 4096), 0)) // goes on meanwhile
	p.end(t)
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("the process ended after %v", took)
	}
	p.start(t)
	p.open(t)
	slow.Store(0)
	if l := treeLayers(t, p); len(l) != 2 {
		t.Errorf("the next process finds %+v, want two layers of which one is doomed", l)
	}
	p.holds(t, leg, "ca")
	p.idle(t)
	if l := treeLayers(t, p); len(l) != 1 {
		t.Errorf("the next process leaves %+v, want the leg alone", l)
	}
	p.holds(t, leg, "ca")
	p.end(t)
}

func treeLayers(t *testing.T, p *plantedDrive) (all []mapped.Layer) {
	t.Helper()
	device, err := p.machine.Drives.Device(p.disk.held.number)
	must(t, err)
	place, err := p.disk.held.place(p.disk.Label(), leg.String(), device)
	must(t, err)
	tree, err := mapped.Open(place)
	must(t, err)
	all = tree.Layers()
	tree.Close()
	must(t, device.Close())
	return all
}

// A tree that nobody can open any more does not keep its legs for ever.
func TestLegsOfADamagedTreeCanGo(t *testing.T) {
	p := newPlanted(t)
	p.stop(t)
	p.carve(t, monday)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	f, err := os.OpenFile(p.path, os.O_WRONLY, 0)
	must(t, err)
	for _, at := range []int64{1 << 20, 2 << 20} {
		_, err := f.WriteAt(bytes.Repeat([]byte{0xff}, 4096), int64(drive.FirstExtent)+at)
		must(t, err)
	}
	must(t, f.Close())
	must(t, errors.Join(p.disk.FreeLeg(leg), p.disk.FreeLeg(monday)))
	if l := p.disk.Label(); len(l.Trees)+len(l.Legs) > 0 {
		t.Errorf("the label has trees %v and legs %v", l.Trees, l.Legs)
	}
	p.end(t)
}

// A tree with lost records is read as far as it is known, and takes nothing. Its legs can go, and it goes with the
// last one.
func TestATreeWithLostRecordsIsRead(t *testing.T) {
	p := newPlanted(t)
	p.carve(t, monday)
	p.write(t, leg, 'a', 0, 1)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	p.write(t, leg, 'b', 1)
	p.stop(t)
	p.loseRecord(t, 3) // the first slot of the tree has monday's chunk 0
	p.serve(t)
	seen := p.disk.Trees()[leg.String()]
	if !strings.Contains(seen.Damage, "the records 3 of extent 0") || seen.Unknown[leg.UUID] == 0 || seen.Unknown[monday.UUID] == 0 || seen.Full || seen.Err != "" || seen.Unreclaimed != "" {
		t.Errorf("the tree is seen as %+v", seen)
	}
	p.use(t, leg, func(d Device) {
		b := make([]byte, 4096)
		if err := block.ReadAt(d, b, 1<<20); err != nil || b[0] != 'b' {
			t.Errorf("chunk 1 is %q, %v", b[:1], err)
		}
		if err := block.ReadAt(d, b, 0); !errors.Is(err, block.ErrMedium) {
			t.Errorf("read what is unknown: %v", err)
		}
		if err := block.WriteAt(d, b, 1<<20); !errors.Is(err, block.ErrMedium) {
			t.Errorf("write: %v", err)
		}
	})
	p.carve(t, tuesday)
	if err := p.prepare(tuesday, block.GiB, freezeOf(leg)); !errors.Is(err, mapped.ErrDamaged) {
		t.Errorf("a snapshot of it: %v", err)
	}
	must(t, p.disk.ShrinkTree(leg.String(), 0))
	must(t, errors.Join(p.disk.FreeLeg(monday), p.disk.FreeLeg(tuesday)))
	p.idle(t)
	p.stop(t)
	must(t, p.disk.FreeLeg(leg))
	if l := p.disk.Label(); len(l.Trees)+len(l.Legs) > 0 {
		t.Errorf("the label has trees %v and legs %v", l.Trees, l.Legs)
	}
	p.end(t)
}

// home is where the tree's home extent is on the drive.
func (p *plantedDrive) home() int64 {
	return int64(drive.FirstExtent) + int64(p.disk.Label().Tree(leg.String()).GetExtents()[0].GetStart())*int64(block.ExtentSize)
}

// loseRecord makes both copies of a record of the tree's home extent bad.
func (p *plantedDrive) loseRecord(t *testing.T, slot int64) {
	t.Helper()
	home := p.home()
	f, err := os.OpenFile(p.path, os.O_WRONLY, 0)
	must(t, err)
	for _, at := range []int64{64 << 10, 512 << 10} {
		_, err := f.WriteAt(bytes.Repeat([]byte{0x5a}, 64), home+at+slot*64)
		must(t, err)
	}
	must(t, f.Close())
}

// What stops giving back space is bounded by who waits for it.
func TestTheEndOfTheBackgroundIsBounded(t *testing.T) {
	d := newDrives(Config{})
	if !d.begin() {
		t.Fatal("nothing begins")
	}
	d.stop()
	if d.begin() {
		t.Error("more begins after the end")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := d.finish(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("finish = %v, want %v", err, context.DeadlineExceeded)
	}
	d.background.Done()
	must(t, d.finish(t.Context()))
}

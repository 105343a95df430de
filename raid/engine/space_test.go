// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
)

// roomy is a leg that takes space for data by the unit, as a target does: a write that finds none is
// answered only after some time.
type roomy struct {
	*memory
	space sync.Mutex
	room  int // units left
	taken map[int64]bool
	wrote int64          // bytes
	full  int            // writes that found no space
	late  map[int64]bool // what is written here waits until it is let go
	held  []*block.IO
}

const (
	roomUnit = int64(64 << 10)
	toldFull = 500 * time.Millisecond
)

func newRoomy(size block.Size, room int) *roomy {
	return &roomy{memory: newMemory(size), room: room, taken: map[int64]bool{}}
}

func (l *roomy) give(units int) {
	l.space.Lock()
	defer l.space.Unlock()
	l.room += units
}

// lacked is how often a write has found no space.
func (l *roomy) lacked() int {
	l.space.Lock()
	defer l.space.Unlock()
	return l.full
}

// left is for how many units it has space.
func (l *roomy) left() int {
	l.space.Lock()
	defer l.space.Unlock()
	return l.room
}

// keeps is how many writes are kept.
func (l *roomy) keeps() int {
	l.space.Lock()
	defer l.space.Unlock()
	return len(l.held)
}

func (l *roomy) Submit(io *block.IO) {
	if l.takes(io) {
		l.memory.Submit(io)
	}
}

// takes takes the space for an IO, or gives back what it frees; false: the IO is not to be done now.
func (l *roomy) takes(io *block.IO) bool {
	l.space.Lock()
	defer l.space.Unlock()
	first, end := io.Off/roomUnit, (io.Off+io.Len+roomUnit-1)/roomUnit
	switch io.Op {
	case block.OpWrite:
		if l.late[io.Off] {
			l.held = append(l.held, io)
			return false
		}
		for u := first; u < end; u++ {
			if l.taken[u] {
				continue
			}
			if l.room == 0 {
				l.full++
				time.AfterFunc(toldFull, func() { io.Complete(block.ErrFull) })
				return false
			}
			l.room--
			l.taken[u] = true
		}
		l.wrote += io.Len
	case block.OpWriteZeroes, block.OpDiscard:
		for u := first; u < end; u++ {
			if l.taken[u] && u*roomUnit >= io.Off && (u+1)*roomUnit <= io.Off+io.Len {
				delete(l.taken, u)
				l.room++
			}
		}
	}
	return true
}

// letGo has the leg take what it has kept.
func (l *roomy) letGo() {
	l.space.Lock()
	held := l.held
	l.held, l.late = nil, nil
	l.space.Unlock()
	for _, io := range held {
		l.Submit(io)
	}
}

// holding puts data on the leg, which takes space.
func (l *roomy) holding(off int64, data []byte) {
	copy(l.data[off:], data)
	for u := off / roomUnit; u*roomUnit < off+int64(len(data)); u++ {
		l.taken[u] = true
	}
}

const plenty = 1 << 20

// roomyPair is a mirror of legs with so much space, in a bubble of virtual time. No event may happen
// that blames a leg.
func roomyPair(t *testing.T, room ...int) (*Volume, []*roomy) {
	t.Helper()
	cfg := Config{Layout: layout(1, len(room), block.DefaultChunk), Size: 4 * block.MiB, Region: 256 * block.KiB, Thin: true}
	cfg.OnEvent = func(e Event) {
		if e.Kind != LegCaughtUp {
			t.Errorf("%v %d.%d: %v", e.Kind, e.Column, e.Copy, e.Err)
		}
	}
	var legs []*roomy
	var all []block.Device
	for _, n := range room {
		l := newRoomy(cfg.Size, n)
		legs, all = append(legs, l), append(all, l)
	}
	v := volume(t, cfg, all...)
	v.copyUnit = 64 << 10
	return v, legs
}

// rebuilding is a pair whose second leg is copied to, whole.
func rebuilding(t *testing.T, v *Volume, legs []*roomy) {
	t.Helper()
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	if err := v.Add(0, 1, legs[1], Rebuilding, true); err != nil {
		t.Fatal(err)
	}
}

func same(t *testing.T, legs []*roomy) {
	t.Helper()
	for i, l := range legs[1:] {
		if !bytes.Equal(legs[0].data, l.data) {
			t.Errorf("leg %d differs from leg 0 from byte %d on", i+1, diffAt(legs[0].data, l.data))
		}
	}
}

func TestARebuildWaitsForSpaceAndKeepsWhatItHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := roomyPair(t, plenty, 20)
		legs[0].holding(0, fill(4<<20, 1))
		rebuilding(t, v, legs)
		for range 3 {
			time.Sleep(10 * time.Minute)
			if s := v.Status().Legs[0][1]; s.State != Rebuilding || !s.Short || s.Err != nil {
				t.Fatalf("without space, the leg is %v, short: %v, error %v; want one that waits for space", s.State, s.Short, s.Err)
			}
		}
		if n := legs[1].lacked(); n > 4*1800 {
			t.Errorf("in half an hour without space, it was asked for %d times", n)
		}
		before := v.Status().Legs[0][1].Dirty
		legs[1].give(4) // a region
		time.Sleep(time.Minute)
		if s := v.Status().Legs[0][1]; s.Dirty >= before || s.State != Rebuilding || !s.Short {
			t.Errorf("with space for one more region, it misses %d regions after %d, is %v, short: %v", s.Dirty, before, s.State, s.Short)
		}
		legs[1].give(plenty)
		began := time.Now()
		for v.Status().Legs[0][1].State != CaughtUp && time.Since(began) < time.Minute {
			time.Sleep(10 * time.Millisecond)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("with space, the copy took %v", took)
		}
		if s := v.Status().Legs[0][1]; s.Short {
			t.Error("a leg that has everything still waits for space")
		}
		if n := legs[1].wrote; n > 4<<20+256<<10 {
			t.Errorf("%d bytes were written, of 4 MiB", n)
		}
		same(t, legs)
	})
}

// Users must not wait for a leg that nothing is read from yet.
func TestUsersDoNotWaitForALegThatIsCopiedToAndHasNoSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := roomyPair(t, plenty, 8)
		legs[0].holding(0, fill(1<<20, 1))
		rebuilding(t, v, legs)
		time.Sleep(10 * time.Second)
		for i := range int64(64) { // all of it: what is copied, what waits and what was never written
			began := time.Now()
			if err := block.WriteAt(v, fill(4096, uint64(i)), i*64<<10+8192); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > toldFull { // a copy of the range may be under way
				t.Errorf("a write at %d KiB took %v", i*64, took)
			}
			time.Sleep(200 * time.Millisecond)
		}
		// What the leg has is copied again and again, which needs no space and says nothing of that.
		took := time.Duration(0)
		for i := range int64(30) {
			if err := block.WriteAt(v, fill(4096, uint64(100+i)), 0); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Second)
			began := time.Now()
			if err := block.WriteAt(v, fill(4096, uint64(200+i)), 3<<20+i*8192); err != nil {
				t.Fatal(err)
			}
			took += time.Since(began)
		}
		if took > 6*toldFull { // those of a range that a copy may just be trying
			t.Errorf("30 writes took %v", took)
		}
		legs[1].give(plenty)
		time.Sleep(time.Minute)
		if s := v.Status().Legs[0][1]; s.State != CaughtUp {
			t.Fatalf("with space, the leg is %v and misses %d regions", s.State, s.Dirty)
		}
		same(t, legs)
	})
}

// A user's write that is the first to find no space on a leg that is copied to goes on without it.
func TestAWriteGoesOnWithoutALegThatIsCopiedTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := roomyPair(t, plenty, 0)
		legs[1].holding(0, fill(64<<10, 1))
		legs[0].holding(0, fill(64<<10, 2))
		legs[1].late = map[int64]bool{0: true} // the only copy is under way
		rebuilding(t, v, legs)
		time.Sleep(time.Second)
		began := time.Now()
		if err := block.WriteAt(v, fill(4096, 3), 2<<20); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took != toldFull {
			t.Errorf("a write took %v, want as long as the leg took to answer", took)
		}
		legs[1].letGo()
		time.Sleep(time.Minute)
		if s := v.Status().Legs[0][1]; s.State != Rebuilding || s.Dirty != 1 {
			t.Errorf("the leg is %v and misses %d regions, want only the one that was written", s.State, s.Dirty)
		}
		legs[1].give(1)
		time.Sleep(time.Minute)
		if s := v.Status().Legs[0][1]; s.State != CaughtUp {
			t.Errorf("with space, the leg is %v", s.State)
		}
		same(t, legs)
	})
}

// A lane has passed the place of a write that its leg is not given. It must not end the region.
func TestWhatALegWithoutSpaceIsNotGivenIsCopiedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := roomyPair(t, plenty, 4)
		legs[0].holding(0, fill(512<<10, 1))
		legs[1].late = map[int64]bool{192 << 10: true} // the last copy of the first region
		for i := range int64(4) {
			legs[1].taken[i] = true
		}
		legs[1].room = 0
		rebuilding(t, v, legs)
		time.Sleep(10 * time.Second)
		if !v.Status().Legs[0][1].Short || legs[1].keeps() != 1 {
			t.Fatal("the second region does not wait for space while the first is copied")
		}
		if err := block.WriteAt(v, fill(4096, 7), 0); err != nil {
			t.Fatal(err)
		}
		legs[1].letGo()
		time.Sleep(10 * time.Second)
		legs[1].give(plenty)
		time.Sleep(time.Minute)
		if s := v.Status().Legs[0][1]; s.State != CaughtUp {
			t.Fatalf("the leg is %v", s.State)
		}
		same(t, legs)
	})
}

// A region was put back at its second unit for lack of space, and then its first one is written without the
// leg. The copy must not go on at the second one.
func TestACopyDoesNotGoOnBehindWhatItsLegWasNotGiven(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := roomyPair(t, plenty, 0)
		legs[0].holding(0, fill(128<<10, 1))
		legs[1].taken[0] = true
		rebuilding(t, v, legs)
		time.Sleep(10 * time.Second)
		for i := range uint64(8) { // while the copy is tried, and while it is not
			time.Sleep(300 * time.Millisecond)
			if err := block.WriteAt(v, fill(4096, 10+i), 0); err != nil {
				t.Fatal(err)
			}
		}
		legs[1].give(plenty)
		time.Sleep(time.Minute)
		if s := v.Status().Legs[0][1]; s.State != CaughtUp {
			t.Fatalf("the leg is %v", s.State)
		}
		same(t, legs)
	})
}

// A leg may have itself the space that it lacks: under what was deleted while it was away, or is now.
func TestALegGetsSpaceFromWhatWasDeleted(t *testing.T) {
	for name, deleted := range map[string]func(*testing.T, *Volume){
		"while it was away": func(*testing.T, *Volume) {},
		"meanwhile": func(t *testing.T, v *Volume) {
			for _, at := range []int64{1 << 20, 3 << 20} {
				if err := block.WriteAt(v, fill(1<<20, 9), at); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(time.Minute)
			if s := v.Status().Legs[0][1]; s.State != Rebuilding || !s.Short {
				t.Fatalf("the leg is %v, short: %v", s.State, s.Short)
			}
			if err := block.Do(v, &block.IO{Op: block.OpDiscard, Off: 1 << 20, Len: 1 << 20}); err != nil {
				t.Fatal(err)
			}
			if err := block.Do(v, &block.IO{Op: block.OpDiscard, Off: 3 << 20, Len: 1 << 20}); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v, legs := roomyPair(t, plenty, 0)
				legs[0].holding(0, fill(1<<20, 1))
				legs[1].holding(2<<20, fill(1<<20, 2))
				rebuilding(t, v, legs)
				deleted(t, v)
				time.Sleep(10 * time.Minute)
				if s := v.Status().Legs[0][1]; s.State != CaughtUp {
					t.Fatalf("the leg is %v and misses %d regions", s.State, s.Dirty)
				}
				same(t, legs)
			})
		})
	}
}

// What users delete frees space at once: the copy might come there only after all that it lacks space for.
func TestDiscardsReachALegThatWaitsForSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := roomyPair(t, plenty, 0)
		legs[0].holding(0, fill(2<<20, 1))
		legs[1].holding(0, fill(1<<20, 2))
		rebuilding(t, v, legs)
		time.Sleep(time.Minute)
		if s := v.Status().Legs[0][1]; s.State != Rebuilding || !s.Short || legs[1].left() > 0 {
			t.Fatalf("the leg is %v, short: %v, and has space for %d units", s.State, s.Short, legs[1].left())
		}
		if err := block.Do(v, &block.IO{Op: block.OpDiscard, Off: 0, Len: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		if n := legs[1].left(); n != 16 {
			t.Errorf("after a discard of 16 units, the leg has space for %d", n)
		}
		time.Sleep(time.Minute)
		if s := v.Status().Legs[0][1]; s.State != CaughtUp {
			t.Errorf("the leg is %v and misses %d regions", s.State, s.Dirty)
		}
		same(t, legs)
	})
}

func TestWhatWaitsForSpaceEndsAtOnce(t *testing.T) {
	for name, end := range map[string]func(*Volume) error{
		"dropped":  func(v *Volume) error { return v.Drop(0, 1) },
		"detached": func(v *Volume) error { return v.Close(context.Background()) },
		"given up": func(v *Volume) error { v.Abort(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v, legs := roomyPair(t, plenty, 0)
				legs[0].holding(0, fill(1<<20, 1))
				rebuilding(t, v, legs)
				time.Sleep(time.Minute)
				began := time.Now()
				if err := end(v); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); took > toldFull { // a copy that the leg has not answered
					t.Errorf("it took %v", took)
				}
				time.Sleep(toldFull)
				tried := legs[1].lacked()
				time.Sleep(time.Minute)
				if legs[1].lacked() != tried {
					t.Errorf("it was tried %d times more", legs[1].lacked()-tried)
				}
			})
		})
	}
}

// Copies differ only in writes that had not ended, so either may be the right one, and the one that has
// space for both is made equal to the other.
func TestCopiesAreMadeEqualWithoutSpace(t *testing.T) {
	for name, copies := range map[string]struct{ with, copies int }{
		"the first has it": {0, 2}, "the second has it": {1, 2}, "the last of three has it": {2, 3}, "the first of three has it": {0, 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v, legs := roomyPair(t, make([]int, copies.copies)...)
				legs[copies.with].holding(1<<20, fill(256<<10, 1))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				began := time.Now()
				if err := v.Equalize(ctx); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); took > 5*time.Second {
					t.Errorf("it took %v", took)
				}
				same(t, legs)
			})
		})
	}
}

// unequalBothWays is a pair of full legs, each of which has data in one unit where the other has none.
func unequalBothWays(t *testing.T) (*Volume, []*roomy) {
	v, legs := roomyPair(t, 0, 0)
	v.copyUnit = 128 << 10
	legs[0].holding(0, fill(64<<10, 1))
	legs[1].holding(64<<10, fill(64<<10, 2))
	return v, legs
}

func TestMakingCopiesEqualWaitsForSpaceIfEachLacksSome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := unequalBothWays(t)
		done := make(chan error, 1)
		go func() { done <- v.Equalize(t.Context()) }()
		time.Sleep(10 * time.Minute)
		s := v.Status()
		if a, b := s.Legs[0][0], s.Legs[0][1]; !s.Equalizing || !a.Short || !b.Short || a.State != InSync || b.State != InSync {
			t.Errorf("equalizing %v; the legs are %v, short: %v, and %v, short: %v", s.Equalizing, a.State, a.Short, b.State, b.Short)
		}
		if s.Equalized.Done != s.Equalized.Total-128*block.KiB {
			t.Errorf("%v of %v are equal, want all but what waits for space", s.Equalized.Done, s.Equalized.Total)
		}
		if n := legs[0].lacked() + legs[1].lacked(); n > 600 {
			t.Errorf("in ten minutes without space, it was asked for %d times", n)
		}
		legs[1].give(1)
		began := time.Now()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("with space, it took %v", took)
		}
		if v.Status().Legs[0][1].Short {
			t.Error("the leg is equal and still waits for space")
		}
		same(t, legs)
	})
}

func TestMakingCopiesEqualEndsWhileItWaitsForSpace(t *testing.T) {
	for name, end := range map[string]func(*Volume, context.CancelFunc){
		"cancelled": func(_ *Volume, cancel context.CancelFunc) { cancel() },
		"detached":  func(v *Volume, _ context.CancelFunc) { go v.Close(context.Background()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v, _ := unequalBothWays(t)
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- v.Equalize(ctx) }()
				time.Sleep(time.Minute)
				began := time.Now()
				end(v, cancel)
				if err := <-done; err == nil || time.Since(began) > 0 {
					t.Errorf("it ended after %v: %v", time.Since(began), err)
				}
				cancel()
				time.Sleep(time.Minute)
			})
		})
	}
}

// It can be begun anew while the former attempt's pause lasts, and goes on when a leg is dropped.
func TestMakingCopiesEqualGoesOnWithoutALegThatIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, _ := unequalBothWays(t)
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second+100*time.Millisecond)
			if err := v.Equalize(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("without space: %v", err)
			}
			cancel()
		}
		done := make(chan error, 1)
		go func() { done <- v.Equalize(t.Context()) }()
		time.Sleep(time.Minute)
		began := time.Now()
		if err := v.Drop(0, 1); err != nil {
			t.Fatal(err)
		}
		<-done // it may have waited for the leg's answer
		if err := v.Equalize(t.Context()); err != nil || time.Since(began) > toldFull+lastRetry {
			t.Errorf("without the other copy, it ended after %v: %v", time.Since(began), err)
		}
	})
}

func TestARepairWithoutSpaceBlamesNoLeg(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := roomyPair(t, plenty, 0)
		legs[0].holding(0, fill(4096, 1))
		var outcome Outcome
		var why error
		s := v.NewScrub(ScrubConfig{Repair: &Repair{Named: []int{0}, Ended: func(_ Finding, o Outcome, err error) { outcome, why = o, err }}})
		if err := s.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l := v.Status().Legs[0][1]; outcome != NotRepaired || why == nil || l.State != InSync || l.Err != nil {
			t.Errorf("it is %v: %v; the leg is %v, with %v", outcome, why, l.State, l.Err)
		}
	})
}

// A leg that has caught up stays, too, but what it lacks then was not repaired.
func TestARepairWithoutSpaceOnALegThatHasCaughtUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, legs := roomyPair(t, plenty, plenty, 0)
		if err := v.Drop(0, 2); err != nil {
			t.Fatal(err)
		}
		if err := v.Add(0, 2, legs[2], Rebuilding, true); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		legs[0].holding(0, fill(4096, 1))
		var outcome Outcome
		s := v.NewScrub(ScrubConfig{Repair: &Repair{Named: []int{0}, Ended: func(_ Finding, o Outcome, _ error) { outcome = o }}})
		if err := s.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l := v.Status().Legs[0][2]; outcome != NotRepaired || l.State != CaughtUp || l.Err != nil {
			t.Errorf("it is %v; the leg is %v, with %v", outcome, l.State, l.Err)
		}
	})
}

// ---- random histories ----

// fill has a leg have no space, or some again.
func (w *world) fill() {
	k := w.fills.IntN(len(w.legs))
	l := w.legs[k][w.fills.IntN(len(w.legs[k]))]
	if l.full = !l.full; l.full && w.fills.IntN(2) == 0 {
		l.own = map[int]bool{}
	}
}

func (w *world) filling(seed uint64) {
	w.fills = rand.New(rand.NewPCG(seed, 79))
	for _, copies := range w.legs {
		for _, l := range copies {
			l.fills = w.fills
			l.told = func(o *simOp) {
				switch o.orig.Owner.(*legIO).p.kind {
				case kindCopy:
					w.starved++
				case kindEqual:
					w.unequal++
				}
			}
		}
	}
}

// playFull runs one random history of a thin volume whose legs have no space now and then, and of which
// checkpoints are taken if the seed is odd.
func playFull(seed uint64, weak guards) (string, *world) {
	w := newWorld(seed, weak, errant{})
	w.thin(seed)
	w.filling(seed)
	if seed%2 == 1 {
		w.marks = &simCheckpoints{r: rand.New(rand.NewPCG(seed, 80))}
		for _, copies := range w.legs {
			for _, l := range copies {
				l.track()
			}
		}
	}
	return w.play(seed), w
}

func TestRandomHistoriesOfFullLegs(t *testing.T) {
	seeds := *histories
	if testing.Short() || raced { // it is one goroutine
		seeds = min(seeds, 60)
	}
	var sum world
	for seed := *firstSeed; seed < *firstSeed+seeds; seed++ {
		bad, w := playFull(seed, guards{})
		if bad != "" {
			t.Fatalf("%s\nreproduce: go test -run HistoriesOfFullLegs -seed %d -histories 1", bad, seed)
		}
		sum.acks += w.acks
		sum.rebuilds += w.rebuilds
		sum.crashes += w.crashes
		sum.starved += w.starved
		sum.unequal += w.unequal
	}
	t.Logf("%d histories: %d writes acknowledged, %d legs rebuilt, %d crashes; %d times a rebuild had no space, and %d times copies could not be made equal one way",
		seeds, sum.acks, sum.rebuilds, sum.crashes, sum.starved, sum.unequal)
	if n := int(seeds); sum.acks < 15*n || sum.rebuilds < n || sum.starved < n/2 || sum.unequal < n/100 {
		t.Error("too little happened")
	}
}

func TestEachRuleOfFullLegsIsNeeded(t *testing.T) {
	if raced {
		t.Skip("one goroutine has no races; run it without the detector")
	}
	for name, weak := range map[string]guards{
		"what a leg has no space for is copied": {endsAnyway: true},
	} {
		t.Run(name, func(t *testing.T) {
			const most = 3000
			for seed := range uint64(most) {
				if bad, _ := playFull(seed, weak); bad != "" {
					t.Log(bad)
					return
				}
			}
			t.Errorf("no violation in %d histories", most)
		})
	}
}

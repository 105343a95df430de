// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
)

// simCheckpoints are a world's checkpoints. They have a random source of their own.
type simCheckpoints struct {
	r       *rand.Rand
	early   bool // commit without waiting for the writes
	always  bool // also while the copies are unequal
	hasty   bool // a leg that is copied to is said to lack nothing
	of      *Volume
	under   []simTaking         // by column
	lists   [][]checkpoint.List // of the legs in sync, by column, when the engine began
	taken   int
	resumed int      // copies of legs that went on after a crash
	compare [2]int64 // bytes that clients after a crash compared, and all
}

// simTaking is a checkpoint that is under way, like checkpoint.Take.
type simTaking struct {
	token   checkpoint.Token // 0: none
	members []checkpoint.Member
	order   []checkpoint.Member // those that are copied to first
	begun   int
	settle  *settling
	settled bool
	commit  int
}

// checkpoint takes a checkpoint one step further.
func (w *world) checkpoint() {
	s := w.marks
	if s.of != w.v {
		s.of, s.under = w.v, make([]simTaking, len(w.legs))
	}
	k := s.r.IntN(len(w.legs))
	t := &s.under[k]
	if !w.step(k, t) {
		*t = simTaking{}
	}
}

// step returns false if the checkpoint is over.
func (w *world) step(k int, t *simTaking) bool {
	switch {
	case t.token == 0:
		t.token = checkpoint.Token(w.marks.r.Uint64() | 1)
		t.members = w.v.Members(k)
		t.order = slices.Clone(t.members)
		slices.SortStableFunc(t.order, func(a, b checkpoint.Member) int {
			switch {
			case a.Copying == b.Copying:
				return 0
			case a.Copying:
				return -1
			}
			return 1
		})
	case t.begun < len(t.order):
		m := t.order[t.begun]
		l := w.legs[k][m.Copy]
		t.begun++
		return l.tell(func() { l.tracker.Begin(t.token, m.Copying) }) || m.Copying
	case t.settle == nil:
		t.settle = w.v.beginSettle(k)
	case !t.settled:
		settled, err := t.settle.done()
		t.settled = settled || w.marks.early
		return err == nil
	case t.commit == 0 && !slices.Equal(t.members, w.v.Members(k)):
		return false
	case t.commit < len(t.order):
		m := t.order[t.commit]
		l := w.legs[k][m.Copy]
		t.commit++
		var behind *checkpoint.Behind
		if m.Copying && !w.marks.hasty {
			lacks, given := w.v.Behind(k, m.Copy, 1+w.marks.r.IntN(4))
			if !given {
				return true
			}
			behind = &checkpoint.Behind{Ranges: lacks}
		}
		return l.tell(func() { _ = l.tracker.Commit(t.token, behind) }) || m.Copying
	default:
		w.marks.taken++
		return false
	}
	return true
}

// tell reports whether the leg's target can be reached and does what it is told.
func (l *simLeg) tell(do func()) bool {
	if l.dev == nil || l.dev.silent || l.dev.cut || !l.alive {
		return false
	}
	do()
	return true
}

// parts are what the targets' lists say of each column; nil without checkpoints.
func (w *world) parts() (all []Part) {
	if w.marks == nil {
		return nil
	}
	for _, copies := range w.legs {
		var lists []checkpoint.List
		for _, l := range copies {
			if l.inSync {
				lists = append(lists, l.tracker.List())
			}
		}
		ranges, err := checkpoint.Unequal(lists)
		all = append(all, Part{Known: err == nil, Ranges: ranges})
		leg := w.v.plan.legSize(w.v.size.Load())
		w.marks.compare[1] += leg
		for _, r := range ranges {
			w.marks.compare[0] += min(r.End, leg) - r.Off
		}
		if err != nil {
			w.marks.compare[0] += leg
		}
	}
	return all
}

// keepLists notes what the targets list when an engine begins.
func (w *world) keepLists() {
	if w.marks == nil {
		return
	}
	w.marks.lists = make([][]checkpoint.List, len(w.legs))
	for k, copies := range w.legs {
		for _, l := range copies {
			if l.inSync {
				w.marks.lists[k] = append(w.marks.lists[k], l.tracker.List())
			}
		}
	}
}

// behind returns what the targets know of what a leg lacks.
func (w *world) behind(k int, l *simLeg) (lacks []checkpoint.Range, known bool) {
	if w.marks == nil {
		return nil, false
	}
	lacks, err := checkpoint.Lacks(l.tracker.List(), w.marks.lists[k])
	return lacks, err == nil
}

// checkEqual requires that the copies in sync are equal.
func (w *world) checkEqual() {
	if w.marks == nil {
		return
	}
	for k, copies := range w.legs {
		var first *simLeg
		for i, l := range copies {
			if !l.inSync || l.rebooted || l.lostCache || w.v.columns[k].legs[i].state != InSync {
				continue
			}
			if first == nil {
				first = l
			}
			for s := range w.v.columns[k].size / sector {
				if l.tags[s] != first.tags[s] {
					w.fail("after the copies of column %d were made equal, sector %d differs: %d and %d", k, s, first.tags[s], l.tags[s])
					return
				}
			}
		}
	}
}

// playCheckpoints runs one random history with checkpoints.
func playCheckpoints(seed uint64, marks *simCheckpoints) *world {
	w := newWorld(seed, guards{}, errant{})
	marks.r = rand.New(rand.NewPCG(seed, 78))
	w.marks = marks
	for _, copies := range w.legs {
		for _, l := range copies {
			l.track()
		}
	}
	for range historySteps {
		if w.act(); w.bad != nil {
			return w
		}
	}
	w.finish()
	return w
}

func TestRandomHistoriesWithCheckpoints(t *testing.T) {
	seeds := *histories
	if testing.Short() || raced {
		seeds = min(seeds, 60)
	}
	var taken, crashes, resumed int
	var compared, all int64
	for seed := *firstSeed; seed < *firstSeed+seeds; seed++ {
		w := playCheckpoints(seed, &simCheckpoints{})
		if w.bad != nil {
			t.Fatalf("seed %d: %v", seed, w.bad)
		}
		taken, crashes, resumed = taken+w.marks.taken, crashes+w.crashes, resumed+w.marks.resumed
		compared, all = compared+w.marks.compare[0], all+w.marks.compare[1]
	}
	t.Logf("%d checkpoints, %d crashes; clients after a crash compared %d of %d MiB and went on with %d copies", taken, crashes, compared>>20, all>>20, resumed)
	if n := int(seeds); taken < 8*n || crashes < n || compared > all*9/10 || resumed < n/10 {
		t.Error("too little happened")
	}
}

func TestACheckpointMustWaitForWrites(t *testing.T) {
	if raced {
		t.Skip("one goroutine has no races; run it without the detector")
	}
	for seed := range uint64(3000) {
		if w := playCheckpoints(seed, &simCheckpoints{early: true}); w.bad != nil {
			t.Logf("seed %d: %v", seed, w.bad)
			return
		}
	}
	t.Error("no violation")
}

func TestALegThatIsCopiedToMustSayWhatItLacks(t *testing.T) {
	if raced {
		t.Skip("one goroutine has no races; run it without the detector")
	}
	for seed := range uint64(3000) {
		if w := playCheckpoints(seed, &simCheckpoints{hasty: true}); w.bad != nil {
			t.Logf("seed %d: %v", seed, w.bad)
			return
		}
	}
	t.Error("no violation")
}

// Its owner may try; the engine refuses.
func TestNoCheckpointIsTakenWhileCopiesAreUnequal(t *testing.T) {
	if raced {
		t.Skip("one goroutine has no races; run it without the detector")
	}
	for seed := *firstSeed; seed < *firstSeed+*histories; seed++ {
		if w := playCheckpoints(seed, &simCheckpoints{always: true}); w.bad != nil {
			t.Fatalf("seed %d: %v", seed, w.bad)
		}
	}
}

// A write given up at the end of a volume may be on one copy only.
func TestAVolumeThatGaveUpWritesDoesNotSettle(t *testing.T) {
	v, err := New(Config{Layout: block.Layout{Stripes: 1, Copies: 2, Chunk: 64 * block.KiB}, Size: block.MiB})
	if err != nil {
		t.Fatal(err)
	}
	v.Submit(&block.IO{Op: block.OpWrite, Len: 4096, Data: make([]byte, 4096), Done: func(*block.IO) {}})
	for range 2 { // the second must not forget what the first waited for
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if err := v.Settle(ctx, 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Settle with a write that waits for a leg: %v, want a timeout", err)
		}
	}
	if got := v.Written(0); got != uint64(checkpoint.Region) {
		t.Errorf("Written after a write of 4 KiB: %d, want one region", got)
	}
	v.Abort()
	if err := v.Settle(t.Context(), 0); err == nil {
		t.Error("Settle after Abort: no error")
	}
}

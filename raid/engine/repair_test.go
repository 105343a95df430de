// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

// repairs runs a scrub that repairs, and returns what became of what it found.
type repairs struct {
	v        *Volume
	s        *Scrub
	cfg      ScrubConfig
	found    []Finding
	outcomes []string
}

func newRepairs(v *Volume, r Repair) *repairs {
	x := &repairs{v: v}
	r.Ended = func(f Finding, o Outcome, err error) {
		x.outcomes = append(x.outcomes, fmt.Sprintf("%d at %d: %v", f.Column, f.Off, o))
	}
	x.cfg = ScrubConfig{Found: func(f Finding) { x.found = append(x.found, f) }, Repair: &r}
	x.s = v.NewScrub(x.cfg)
	return x
}

// became compares what has become of the findings.
func (x *repairs) became(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, x.outcomes); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}
	if len(x.found) != len(x.outcomes) {
		t.Errorf("%d findings have %d outcomes: %+v", len(x.found), len(x.outcomes), x.found)
	}
}

// filled writes a column's worth of random data to a volume.
func filled(t *testing.T, v *Volume) {
	t.Helper()
	for off := int64(0); off < int64(v.Geometry().Size); off += 128 << 10 {
		if err := wait(t, start(v, write(off, fill(128<<10, uint64(off>>17)+1)))); err != nil {
			t.Fatal(err)
		}
	}
}

func TestThreeCopiesAreRepairedByTheirMajority(t *testing.T) {
	v, legs, _, _ := scrubbed(t, 2, 3)
	filled(t, v)
	before := [][]byte{bytes.Clone(legs[0][0].data), bytes.Clone(legs[1][0].data)}
	legs[0][0].data[0] ^= 0x80
	legs[1][2].data[2<<20+5000] ^= 1
	legs[1][1].data[2<<20+9000] ^= 1 // the next block of another copy
	x := newRepairs(v, Repair{Named: []int{0, 2}})
	if err := x.s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.became(t, "0 at 0: repaired", fmt.Sprintf("1 at %d: repaired", 2<<20+4096), fmt.Sprintf("1 at %d: repaired", 2<<20+8192))
	for column := range legs {
		for copy, leg := range legs[column] {
			if !bytes.Equal(leg.data, before[column]) {
				t.Errorf("leg %d.%d is not as it was written", column, copy)
			}
		}
	}
	if got, want := x.s.Position(), (ScrubPosition{Column: 1, Off: 3 * block.MiB}); got != want {
		t.Errorf("position %+v at the end, want %+v", got, want)
	}
}

func TestOfTwoCopiesThatDifferTheNamedOneWins(t *testing.T) {
	v, legs, _, _ := scrubbed(t, 1, 2)
	filled(t, v)
	legs[0][0].data[5000] ^= 1
	rotten := bytes.Clone(legs[0][0].data)
	right := bytes.Clone(legs[0][1].data)
	x := newRepairs(v, Repair{})
	if err := x.s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.became(t, "0 at 4096: not known")
	if !bytes.Equal(legs[0][0].data, rotten) || !bytes.Equal(legs[0][1].data, right) {
		t.Error("a copy was written though none is known to be right")
	}
	x = newRepairs(v, Repair{Named: []int{1}})
	if err := x.s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.became(t, "0 at 4096: repaired")
	if !bytes.Equal(legs[0][0].data, right) || !bytes.Equal(legs[0][1].data, right) {
		t.Error("the copies are not those of the named one")
	}
}

// Only the block that cannot be read is written. Its leg stays in use.
func TestAnUnreadableBlockIsWrittenAgain(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 2 * block.MiB}
	events := make(chan Event, 10)
	cfg.OnEvent = func(e Event) { events <- e }
	legs := memories(cfg)
	s := &scratched{memory: legs[0].(*memory), at: 600 << 10}
	v := volume(t, cfg, s, legs[1])
	filled(t, v)
	s.healed.Store(false)
	right := bytes.Clone(s.data)
	s.data[s.at] ^= 1
	ios := s.ios.Load()
	x := newRepairs(v, Repair{})
	if err := x.s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.became(t, fmt.Sprintf("0 at %d: repaired", s.at))
	want := Finding{Off: block.Size(s.at), Length: 4096, Copies: [][]int{{1}}, Unreadable: []int{0}, Right: 1}
	if diff := cmp.Diff([]Finding{want}, x.found); diff != "" {
		t.Errorf("found (-want +got):\n%s", diff)
	}
	if !s.healed.Load() || !bytes.Equal(s.data, right) {
		t.Error("the block is not as it was written")
	}
	if len(events) > 0 || v.Status().Legs[0][0].State != InSync {
		t.Errorf("the leg is %v, event %+v", v.Status().Legs[0][0].State, <-events)
	}
	t.Logf("%d IOs", s.ios.Load()-ios)
}

// answers answers n rounds of IOs, each once some leg has one.
func answers(t *testing.T, legs []*slow, n int) {
	t.Helper()
	for range n {
		until(t, func() bool { return legs[1].holds() > 0 }) // the last of the legs that a repair turns to
		answerAll(legs)
	}
}

// A leg that cannot be written either has failed, as after any other write.
func TestALegThatCannotBeRepairedHasFailed(t *testing.T) {
	v, legs, events := mirrorOf(t, 2)
	legs[1].data[100] = 7
	x := newRepairs(v, Repair{Named: []int{0}})
	if _, err := x.s.run(); err != nil {
		t.Fatal(err)
	}
	answers(t, legs, 3) // the comparison, twice; the repair reads
	if legs[0].holds() != 0 || legs[1].holds() != 1 {
		t.Fatalf("the legs hold %d and %d IOs, want one write", legs[0].holds(), legs[1].holds())
	}
	legs[1].answer(errDisk)
	if e := wait(t, events); e.Kind != LegFailed || e.Copy != 1 {
		t.Errorf("event %+v", e)
	}
	answers(t, legs, 1) // it reads again
	x.s.stop(errImpatient)
	x.became(t, "0 at 0: not repaired")
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	if dirty := v.Status().Legs[0][1].Dirty; dirty == 0 {
		t.Error("the leg does not miss the range")
	}
	until(t, func() bool { answerAll(legs); return v.Status().InFlight == 0 })
}

// A copy that is dropped after it was found wrong is not said to be equal.
func TestOneCopyIsNotEqualToAnother(t *testing.T) {
	v, legs, _, _ := scrubbed(t, 1, 2)
	legs[0][1].data[0] ^= 1
	x := newRepairs(v, Repair{Named: []int{0}, Ask: true})
	ended := make(chan error, 1)
	go func() { ended <- x.s.Run(context.Background()) }()
	until(t, x.s.Asks)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	x.s.Proceed()
	if err := wait(t, ended); err != nil {
		t.Fatal(err)
	}
	x.became(t, "0 at 0: not repaired")
}

// Between a finding and its repair users may write. The repair reads again, and leaves what they
// have written.
func TestARepairKeepsWhatWasWrittenSince(t *testing.T) {
	v, legs, _, _ := scrubbed(t, 1, 2)
	filled(t, v)
	for off := int64(0); off < 3<<20; off += 512 << 10 {
		legs[0][1].data[off] ^= 1
	}
	x := newRepairs(v, Repair{Named: []int{0}, Ask: true})
	ended := make(chan error, 1)
	go func() { ended <- x.s.Run(context.Background()) }()
	for off := int64(0); off < 3<<20; off += 512 << 10 {
		until(t, x.s.Asks)
		if err := wait(t, start(v, write(off, fill(4096, 99)))); err != nil {
			t.Fatal(err)
		}
		x.s.Proceed()
	}
	if err := wait(t, ended); err != nil {
		t.Fatal(err)
	}
	for i, o := range x.outcomes {
		if o != fmt.Sprintf("0 at %d: gone", i<<19) {
			t.Errorf("outcome %q", o)
		}
	}
	for off := int64(0); off < 3<<20; off += 512 << 10 {
		for copy, leg := range legs[0] {
			if !bytes.Equal(leg.data[off:off+4096], fill(4096, 99)) {
				t.Errorf("copy %d at %d has lost an acknowledged write", copy, off)
			}
		}
	}
}

// While a repair is under way, writes and reads of its range wait, and it waits for them.
func TestARepairAndUsersWaitForOneAnother(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	legs[1].data[100] = 7
	x := newRepairs(v, Repair{Named: []int{0}})
	if _, err := x.s.run(); err != nil {
		t.Fatal(err)
	}
	answers(t, legs, 2) // the difference is told; the repair reads
	until(t, func() bool { return legs[1].holds() > 0 })
	w, r := start(v, write(0, fill(4096, 1))), start(v, read(0, make([]byte, 512)))
	for _, what := range []string{"reads", "writes", "reads again"} {
		for i, l := range legs {
			if n := l.holds(); n > 1 {
				t.Errorf("while the repair %s, leg %d holds %d IOs", what, i, n)
			}
		}
		answerAll(legs)
	}
	x.s.stop(errImpatient)
	x.became(t, "0 at 0: repaired")
	until(t, func() bool { answerAll(legs); return !open(w) && !open(r) })
	if !bytes.Equal(legs[0].data[:4096], fill(4096, 1)) || !bytes.Equal(legs[1].data[:4096], fill(4096, 1)) {
		t.Error("the write is lost")
	}
	until(t, func() bool { answerAll(legs); return v.Status().InFlight == 0 })
}

// A leg that is being rebuilt may have been copied from the wrong copy, and a dropped one may be as
// wrong as any.
func TestARepairReachesLegsThatAreNotInSync(t *testing.T) {
	v, legs, _ := mirrorOf(t, 3)
	if err := v.Drop(0, 2); err != nil {
		t.Fatal(err)
	}
	legs[1].data[100] = 7
	x := newRepairs(v, Repair{Named: []int{0}})
	if _, err := x.s.run(); err != nil {
		t.Fatal(err)
	}
	for len(x.outcomes) == 0 {
		answerAll(legs)
	}
	x.s.stop(errImpatient)
	x.became(t, "0 at 0: repaired")
	if dirty := v.Status().Legs[0][2].Dirty; dirty == 0 {
		t.Error("the dropped leg does not miss the range")
	}
	until(t, func() bool { answerAll(legs); return v.Status().InFlight == 0 })
}

func TestARepairThatIsSuspendedGoesOn(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	legs[1].data[100] = 7
	x := newRepairs(v, Repair{Named: []int{0}})
	if _, err := x.s.run(); err != nil {
		t.Fatal(err)
	}
	answers(t, legs, 3) // it writes
	v.Suspend()
	answerAll(legs)
	if legs[0].holds()+legs[1].holds() > 0 {
		t.Error("it goes on while the volume is suspended")
	}
	v.Resume()
	answers(t, legs, 1)
	x.s.stop(errImpatient)
	x.became(t, "0 at 0: repaired")
	until(t, func() bool { answerAll(legs); return v.Status().InFlight == 0 })
}

// Where another host may have written, nothing is repaired.
func TestARepairEndsWithTheLease(t *testing.T) {
	lapsed := false
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 2 * block.MiB, Current: func() bool { return !lapsed }}
	legs := memories(cfg)
	v := volume(t, cfg, legs...)
	legs[1].(*memory).data[100] = 7
	x := newRepairs(v, Repair{Named: []int{0}, Ask: true})
	if _, err := x.s.run(); err != nil {
		t.Fatal(err)
	}
	until(t, x.s.Asks)
	lapsed = true
	x.s.Proceed()
	if x.s.stop(errImpatient); len(x.outcomes) > 0 || legs[1].(*memory).data[100] != 7 {
		t.Errorf("outcomes %v, though another host may have written", x.outcomes)
	}
}

func TestAScrubGoesOnWhereItWasLeft(t *testing.T) {
	v, legs, found, _ := scrubbed(t, 2, 2)
	legs[0][0].data[100] ^= 1
	legs[1][1].data[2<<20] ^= 1
	s := v.NewScrub(ScrubConfig{From: ScrubPosition{1, block.MiB}, Found: func(f Finding) { *found = append(*found, f) }})
	if done, _ := s.Progress(); done.Done != 4*block.MiB {
		t.Errorf("progress %v before it begins, want what is left out", done)
	}
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(*found) != 1 || (*found)[0].Column != 1 {
		t.Errorf("found %+v, want what is behind its beginning", *found)
	}
	if done, _ := s.Progress(); done.Done != done.Total {
		t.Errorf("progress %v at the end", done)
	}
}

func TestTheRateOfAScrubCanChange(t *testing.T) {
	v, _, _, _ := scrubbed(t, 1, 2)
	s := v.NewScrub(ScrubConfig{Rate: 1})
	s.SetRate(0)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
}

// Users write while bits flip and scrubs repair them. No acknowledged write may be lost, and in the
// end all copies are equal. It is meant for the race detector.
func TestRepairsWhileUsersWrite(t *testing.T) {
	cfg := Config{Layout: layout(2, 3, 64*block.KiB), Size: 2 * block.MiB, Region: 64 * block.KiB}
	mediums, legs := make([]*memory, 6), make([]block.Device, 6)
	for i := range legs {
		mediums[i] = newMemory(cfg.Layout.LegSize(cfg.Size))
		legs[i] = newRemote(t, mediums[i])
	}
	v := volume(t, cfg, legs...)
	const users, blocks = 4, 512
	last := make([]uint64, blocks)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var all sync.WaitGroup
	for user := range users {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(user), 7))
			for i := uint64(1); ctx.Err() == nil; i++ {
				b := r.IntN(blocks/users)*users + user
				if err := block.WriteAt(v, fill(4096, i), int64(b)*4096); err != nil {
					t.Error(err)
				}
				last[b] = i
			}
		})
	}
	r, repaired := rand.New(rand.NewPCG(1, 8)), map[Outcome]int{}
	began := time.Now()
	for n := 0; n < 12 || repaired[Repaired] < 20 && time.Since(began) < 20*time.Second; n++ {
		for range 8 {
			m := mediums[r.IntN(6)]
			m.mu.Lock()
			m.data[r.IntN(1<<20)] ^= 1 << r.IntN(8)
			m.mu.Unlock()
		}
		s := v.NewScrub(ScrubConfig{Repair: &Repair{Ended: func(f Finding, o Outcome, err error) {
			if repaired[o]++; o != Repaired && o != Gone && o != NotKnown {
				t.Errorf("%+v: %v: %v", f, o, err)
			}
		}}})
		if err := s.Run(ctx); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	all.Wait()
	end := v.NewScrub(ScrubConfig{Repair: &Repair{Named: []int{0, 0}}})
	if err := end.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("repairs: %v", repaired)
	got := make([]byte, 4096)
	for b, i := range last {
		if i == 0 {
			continue
		}
		if err := block.ReadAt(v, got, int64(b)*4096); err != nil || !bytes.Equal(got, fill(4096, i)) {
			t.Errorf("block %d has lost an acknowledged write (%v)", b, err)
		}
	}
	for i, m := range mediums {
		if !bytes.Equal(m.data, mediums[i/3*3].data) {
			t.Errorf("leg %d differs", i)
		}
	}
	if err := v.Close(t.Context()); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

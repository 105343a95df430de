// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

// scrubbed is a mirror of legs in memory, and what scrubs of it have found.
func scrubbed(t *testing.T, stripes, copies int) (v *Volume, legs [][]*memory, found *[]Finding, s *Scrub) {
	t.Helper()
	cfg := Config{Layout: layout(stripes, copies, 64*block.KiB), Size: block.Size(stripes) * 3 * block.MiB}
	var all []block.Device
	for range stripes {
		var column []*memory
		for range copies {
			m := newMemory(cfg.Layout.LegSize(cfg.Size))
			column, all = append(column, m), append(all, m)
		}
		legs = append(legs, column)
	}
	v = volume(t, cfg, all...)
	found = &[]Finding{}
	s = v.NewScrub(ScrubConfig{Found: func(f Finding) { *found = append(*found, f) }})
	return v, legs, found, s
}

func TestAScrubFindsWhatDiffersAndChangesNothing(t *testing.T) {
	v, legs, found, s := scrubbed(t, 2, 3)
	for off := int64(0); off < int64(v.Geometry().Size); off += 128 << 10 {
		if err := wait(t, start(v, write(off, fill(128<<10, uint64(off>>17)+1)))); err != nil {
			t.Fatal(err)
		}
	}
	legs[1][2].data[2<<20+5000] ^= 1 // bit rot
	legs[1][2].data[2<<20+9000] ^= 1
	legs[0][0].data[0] ^= 0x80
	before := append([]byte(nil), legs[1][2].data...)
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []Finding{
		{Column: 0, Off: 0, Length: 4096, Copies: [][]int{{0}, {1, 2}}, Right: -1},
		{Column: 1, Off: 2<<20 + 4096, Length: 8192, Copies: [][]int{{0, 1}, {2}}, Right: -1},
	}
	if diff := cmp.Diff(want, *found); diff != "" {
		t.Errorf("found (-want +got):\n%s", diff)
	}
	if done, alone := s.Progress(); done.Done != 6*block.MiB || done.Total != 6*block.MiB || alone != 0 {
		t.Errorf("progress %v, alone %v; want 3 MiB of each of 2 columns", done, alone)
	}
	if diff := cmp.Diff(before, legs[1][2].data); diff != "" {
		t.Error("the scrub has changed a copy")
	}
}

func TestAScrubSaysWhatItCannotCompare(t *testing.T) {
	v, legs, found, s := scrubbed(t, 1, 3)
	legs[0][1].failing(block.ErrMedium)
	if err := v.Drop(0, 2); err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if done, alone := s.Progress(); alone != 3*block.MiB || done.Done != done.Total {
		t.Errorf("progress %v, alone %v; want all of it done, and nothing compared", done, alone)
	}
	var total block.Size
	for _, f := range *found {
		total += f.Length
		if diff := cmp.Diff([]int{1}, f.Unreadable); diff != "" || len(f.Copies) != 1 {
			t.Errorf("finding %+v, want that copy 1 cannot be read", f)
		}
	}
	if total != 3*block.MiB {
		t.Errorf("%v are found unreadable, want 3MiB", total)
	}
	if s := v.Status(); s.Legs[0][1].Err == nil {
		t.Error("the leg's owner does not learn of its error")
	}

	one, _, found, s := scrubbed(t, 2, 1)
	if err := s.Run(t.Context()); err != nil || len(*found) > 0 || one.Status().InFlight != 0 {
		t.Errorf("a scrub of a volume of one copy = %v, found %v", err, *found)
	}
}

// slowly has a mirror of slow legs whose scrub has begun.
func slowly(t *testing.T) (v *Volume, legs []*slow, s *Scrub, found *[]Finding) {
	t.Helper()
	v, legs, _ = mirrorOf(t, 2)
	found = &[]Finding{}
	s = v.NewScrub(ScrubConfig{Found: func(f Finding) { *found = append(*found, f) }})
	if _, err := s.run(); err != nil {
		t.Fatal(err)
	}
	return v, legs, s, found
}

func TestAScrubAndAWriteWaitForOneAnother(t *testing.T) {
	v, legs, s, found := slowly(t)
	done := start(v, write(4096, fill(4096, 1)))
	if legs[0].holds() != 1 || legs[1].holds() != 1 {
		t.Fatalf("the legs hold %d and %d IOs, want only the scrub's reads", legs[0].holds(), legs[1].holds())
	}
	s.stop(errImpatient)
	answerAll(legs) // the scrub's reads: the write may go
	legs[0].answer(nil)
	if !open(done) {
		t.Fatal("the write was acknowledged by one leg")
	}
	again := make(chan error, 1)
	go func() { again <- s.Run(context.Background()) }()
	until(t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.running })
	legs[1].answer(nil)
	if err := wait(t, done); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool {
		answerAll(legs)
		return len(again) == 1
	})
	if err := wait(t, again); err != nil || len(*found) > 0 {
		t.Errorf("the scrub = %v, found %v; want that the write is no difference", err, *found)
	}
}

func TestADifferenceIsReadTwice(t *testing.T) {
	v, legs, s, found := slowly(t)
	legs[1].data[100] = 7
	answerAll(legs)
	if len(*found) != 0 || legs[1].holds() != 1 {
		t.Fatalf("found %v at once, %d reads under way", *found, legs[1].holds())
	}
	legs[1].data[100] = 0 // the medium had erred
	answerAll(legs)
	if s.stop(errImpatient); len(*found) != 0 {
		t.Errorf("found %v, though the copies are equal", *found)
	}
	until(t, func() bool { answerAll(legs); return v.Status().InFlight == 0 })
}

func TestAScrubStopsAndContinuesAndEnds(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	s := v.NewScrub(ScrubConfig{})
	ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Millisecond, errImpatient)
	defer cancel()
	if err := s.Run(ctx); !errors.Is(err, errImpatient) {
		t.Fatalf("a scrub of silent legs = %v", err)
	}
	answerAll(legs)
	if done, _ := s.Progress(); done.Done != copyUnit {
		t.Errorf("progress %v, want the one range that was compared", done)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(context.Background()) }()
	until(t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.running })
	if err := s.Run(t.Context()); err == nil {
		t.Error("a second Run at the same time was accepted")
	}
	v.Suspend()
	answerAll(legs)
	if legs[0].holds() > 0 {
		t.Error("the scrub reads while the volume is suspended")
	}
	v.Resume()
	until(t, func() bool { return legs[0].holds() > 0 })
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	answerAll(legs)
	until(t, func() bool { return legs[0].holds() > 0 })
	v.Abort()
	answerAll(legs)
	if err := wait(t, ended); !errors.Is(err, block.ErrGone) {
		t.Errorf("a scrub of a volume that is given up = %v", err)
	}
}

// The rate holds for each leg. The scrub waits for it, and Close does not wait for the scrub.
func TestAScrubKeepsItsRate(t *testing.T) {
	v, _, _, _ := scrubbed(t, 1, 2)
	s := v.NewScrub(ScrubConfig{Rate: 20 * block.MiB})
	began := time.Now()
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < 100*time.Millisecond {
		t.Errorf("3 MiB at 20 MiB/s took %v", took)
	}
	slow := v.NewScrub(ScrubConfig{Rate: 1})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := slow.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a scrub at 1 byte/s = %v", err)
	}
	if err := v.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// scrubs plays random histories with a scrub always under way, and returns the first violation.
// A difference is one.
func scrubs(from, most uint64, weak guards) (violation string, compared block.Size, outcomes map[Outcome]int) {
	outcomes = map[Outcome]int{}
	for seed := from; seed < from+most; seed++ {
		w := newWorld(seed, weak, errant{})
		var s *Scrub
		end := func() {
			if s != nil {
				done, alone := s.Progress()
				compared += done.Done - alone
				s.stop(nil)
			}
			s = nil
		}
		for range historySteps {
			w.act()
			if s != nil && (s.v != w.v || !s.busyOrRunning()) {
				end()
			}
			if s == nil && w.v != nil && w.serving {
				cfg := ScrubConfig{Found: func(f Finding) {
					if len(f.Copies) > 1 {
						w.fail("the scrub found %+v", f)
					}
				}}
				if seed%2 == 1 { // what has a medium error is written again
					cfg.Repair = &Repair{Ended: func(_ Finding, o Outcome, _ error) { outcomes[o]++ }}
				}
				s = w.v.NewScrub(cfg)
				if _, err := s.run(); err != nil {
					w.fail("scrub: %w", err)
				}
			}
			if w.bad != nil {
				return fmt.Sprintf("seed %d: %v", seed, w.bad), compared, outcomes
			}
		}
		end()
		if w.finish(); w.bad != nil {
			return fmt.Sprintf("seed %d after healing: %v", seed, w.bad), compared, outcomes
		}
	}
	return "", compared, outcomes
}

func (s *Scrub) busyOrRunning() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.busy || s.running
}

func TestAScrubOfRandomHistoriesFindsNoDifference(t *testing.T) {
	most, whole := uint64(1500), true
	if testing.Short() || raced {
		most, whole = 60, false
	}
	bad, compared, outcomes := scrubs(0, most, guards{})
	if bad != "" {
		t.Fatal(bad)
	}
	if compared < block.Size(most)*40*block.KiB { // pauses for users leave time for one range or two
		t.Errorf("only %v were compared", compared)
	}
	if whole && outcomes[Repaired] == 0 { // it is rare
		t.Error("nothing was repaired")
	}
	t.Logf("%v were compared; repairs: %v", compared, outcomes)
}

func TestAScrubThatPassesWritesSeesDifferences(t *testing.T) {
	if raced {
		t.Skip("one goroutine has no races; run it without the detector")
	}
	bad, _, _ := scrubs(0, 300, guards{scrubPasses: true})
	if bad == "" {
		t.Error("no difference in 300 histories")
	}
	t.Log(bad)
}

// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"weft.dev/weft/proto/block"
)

// onePart is Parts of a node whose kernel serves everything.
func onePart(block.NQN) (has, wanted block.ServedBy) { return }

// asking has an export replaced, and returns where the answer comes.
func asking(ctx context.Context, r *Replacements, n block.NQN) <-chan error {
	answer := make(chan error, 1)
	go func() { answer <- r.Ask(ctx, n, block.SamePart) }()
	synctest.Wait()
	return answer
}

func answered(answer <-chan error) bool {
	synctest.Wait()
	return len(answer) > 0
}

// Until its successor is linked no host has connected to it, so one replacement answers all who ask. Who asks later
// may have: another one begins.
func TestAReplacementAnswersThoseWhoAskedBeforeItsSuccessorWasLinked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewReplacements(func() {})
		old := place{}.config(sub(1, 1, 1, "/dev/x")).withPortIDs()
		n := old.Subsystems[0].NQN
		first := asking(t.Context(), r, n)
		ids := r.Begin(old, onePart)[n].IDs
		want := place{}.config(sub(1, 1, 1, "/dev/x")).withPortIDs()
		want.Subsystems[0].CntlidMin, want.Subsystems[0].CntlidMax = ids.Min, ids.Max
		r.Settle(old, want, Diff(old, want), nil)
		second := asking(t.Context(), r, n)
		none := portsOf(old)
		r.Settle(none, want, Diff(none, want), nil) // these steps link it
		third := asking(t.Context(), r, n)
		if answered(first) || answered(second) {
			t.Fatal("they are answered before it is replaced")
		}
		r.Settle(want, want, nil, nil)
		if !answered(first) || !answered(second) || answered(third) {
			t.Fatalf("answered are %v, %v and %v, want the first two", answered(first), answered(second), answered(third))
		}
		if err := errors.Join(<-first, <-second); err != nil {
			t.Error(err)
		}
		if next := r.Begin(want, onePart)[n].IDs; next == ids || !next.Successor() {
			t.Errorf("the next one has ids %v, want others than %v", next, ids)
		}
		if r.None() {
			t.Error("nothing is being replaced, though somebody waits")
		}
	})
}

// Whoever waits no more may have connected in another way: a replacement that begins then would cut that off.
func TestNoReplacementBeginsForAHostThatWaitsNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewReplacements(func() {})
		got := place{}.config(sub(1, 1, 1, "/dev/x")).withPortIDs()
		n := got.Subsystems[0].NQN
		ctx, leave := context.WithCancel(t.Context())
		asking(ctx, r, n)
		leave()
		synctest.Wait()
		if begun := r.Begin(got, onePart); len(begun) > 0 || !r.None() {
			t.Errorf("%v begins for a host that has left before", begun)
		}
		first := asking(t.Context(), r, n)
		ids := r.Begin(got, onePart)[n].IDs
		want := place{}.config(sub(1, 1, 1, "/dev/x")).withPortIDs()
		want.Subsystems[0].CntlidMin, want.Subsystems[0].CntlidMax = ids.Min, ids.Max
		r.Settle(want, want, Diff(place{}.config(), want), nil) // it is linked
		ctx, leave = context.WithCancel(t.Context())
		asking(ctx, r, n)
		leave()
		synctest.Wait()
		r.Settle(want, want, nil, nil)
		if !answered(first) || !r.None() {
			t.Error("another one begins for a host that has left during the first")
		}
	})
}

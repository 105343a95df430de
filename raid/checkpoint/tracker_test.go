// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"reflect"
	"sync"
	"testing"

	"weft.dev/weft/proto/block"
)

const kib = int64(block.KiB)

func TestARangeIsListedWhole(t *testing.T) {
	for _, test := range []struct {
		off, length int64
		want        []Range
	}{
		{0, 1, []Range{{0, 64 * kib}}},
		{64*kib - 1, 2, []Range{{0, 128 * kib}}},
		{63 * 64 * kib, 130 * 64 * kib, []Range{{63 * 64 * kib, 193 * 64 * kib}}},
		{0, 200 * 64 * kib, []Range{{0, 200 * 64 * kib}}},
		{5, 0, nil},
	} {
		tracker := NewTracker(200 * Region)
		tracker.Begin(1, false)
		if err := tracker.Commit(1, nil); err != nil {
			t.Fatal(err)
		}
		tracker.Mark(test.off, test.length)
		got, err := Unequal([]List{tracker.List()})
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("Mark(%d, %d): unequal in %v, %v; want %v", test.off, test.length, got, err, test.want)
		}
	}
}

func TestATrackerWithoutACheckpointKnowsNothing(t *testing.T) {
	tracker := NewTracker(Region)
	tracker.Begin(7, false)
	if _, err := Unequal([]List{tracker.List()}); !errors.Is(err, ErrNoList) {
		t.Errorf("Unequal without a committed checkpoint: %v, want %v", err, ErrNoList)
	}
	if _, err := Unequal(nil); !errors.Is(err, ErrNoList) {
		t.Errorf("Unequal(nil): %v, want %v", err, ErrNoList)
	}
}

func TestOnlyTheLastCheckpointIsCommitted(t *testing.T) {
	tracker := NewTracker(Region)
	if err := tracker.Commit(1, nil); !errors.Is(err, ErrNotBegun) {
		t.Errorf("Commit(1) before Begin: %v, want %v", err, ErrNotBegun)
	}
	if err := tracker.Commit(0, nil); !errors.Is(err, ErrNotBegun) {
		t.Errorf("Commit(0): %v, want %v", err, ErrNotBegun)
	}
	tracker.Begin(1, false)
	tracker.Begin(2, false)
	if err := tracker.Commit(1, nil); !errors.Is(err, ErrNotBegun) {
		t.Errorf("Commit(1) after Begin(2): %v, want %v", err, ErrNotBegun)
	}
	for range 2 {
		if err := tracker.Commit(2, nil); err != nil {
			t.Errorf("Commit(2): %v", err)
		}
	}
}

// A host repeats Begin after it has lost the answer to the first.
func TestARepeatedBeginKeepsWhatWasWrittenSince(t *testing.T) {
	tracker := NewTracker(2 * Region)
	tracker.Begin(1, false)
	tracker.Mark(0, 1)
	tracker.Begin(1, false)
	if err := tracker.Commit(1, nil); err != nil {
		t.Fatal(err)
	}
	if got := tracker.List().Words[0]; got != 1 {
		t.Errorf("listed %b, want region 0", got)
	}
}

func TestListsOfDifferentShapesAreNotUnited(t *testing.T) {
	a, b := NewTracker(64*Region), NewTracker(65*Region)
	for _, tracker := range []*Tracker{a, b} {
		tracker.Begin(1, false)
		if err := tracker.Commit(1, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Unequal([]List{a.List(), b.List()}); !errors.Is(err, ErrShape) {
		t.Errorf("Unequal of legs of two sizes: %v, want %v", err, ErrShape)
	}
}

// Marks race with checkpoints; none may be lost while its checkpoint is not committed.
func TestNoMarkIsLost(t *testing.T) {
	tracker := NewTracker(64 * 64 * Region)
	var marks sync.WaitGroup
	for g := range int64(4) {
		marks.Go(func() {
			for i := range int64(1024) {
				tracker.Mark((i*4+g)*int64(Region), 1)
			}
		})
	}
	marks.Go(func() {
		for token := range Token(200) {
			tracker.Begin(token+1, false)
		}
	})
	marks.Wait()
	for i, w := range tracker.List().Words {
		if w != ^uint64(0) {
			t.Fatalf("word %d of the list is %x: marks are missing", i, w)
		}
	}
}

func BenchmarkMark(b *testing.B) {
	tracker := NewTracker(256 * block.GiB)
	for i := 0; b.Loop(); i++ {
		tracker.Mark(int64(uint64(i)*0x9e3779b97f4a7c15%uint64(256*block.GiB-4096)), 4096)
	}
}

// BenchmarkCheckpoint is what a target does for one checkpoint of a leg of 256 GiB to which
// 4000 random places were written.
func BenchmarkCheckpoint(b *testing.B) {
	tracker := NewTracker(256 * block.GiB)
	for i := Token(1); b.Loop(); i++ {
		for j := range uint64(4000) {
			tracker.Mark(int64((uint64(i)*4000+j)*0x9e3779b97f4a7c15%uint64(256*block.GiB-4096)), 4096)
		}
		tracker.Begin(i, false)
		if err := tracker.Commit(i, nil); err != nil {
			b.Fatal(err)
		}
	}
}

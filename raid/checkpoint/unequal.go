// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"math"
	"math/bits"
	"slices"

	"weft.dev/weft/proto/block"
)

// List is what a Tracker has listed: the regions written since the checkpoint Committed
// began.
type List struct {
	Committed Token // 0: nothing is known of what was written
	Begun     Token // a checkpoint that has begun since, with the leg in sync; 0: none
	Region    block.Size
	Words     []uint64 // a bit for each region
	Behind    *Behind  // what the leg lacked at Committed; nil: nothing
}

// Behind is what a leg that is copied to lacked at a checkpoint.
type Behind struct {
	// Since is the revision of the leg's record at which the copy of all of it began; 0: not all
	// of it is copied.
	Since  uint64
	Ranges []Range
}

// Range is a part of a leg, in bytes.
type Range struct{ Off, End int64 }

// The reasons to compare a column whole.
var (
	ErrNoList    = errors.New("a target has no complete list of writes: it has started since the last checkpoint")
	ErrUnrelated = errors.New("the targets' lists of writes begin at different checkpoints")
	ErrShape     = errors.New("the targets' lists of writes have different regions")
)

// Unequal returns the ranges in which the legs of a column may differ, in order, from the
// lists of all its legs in sync. An error means that they may differ anywhere.
func Unequal(lists []List) ([]Range, error) {
	for i, l := range lists {
		for _, other := range lists[:i] {
			if !related(l, other) {
				return nil, ErrUnrelated
			}
		}
	}
	return union(lists)
}

// Lacks returns the ranges in which a stale leg may lack data, in order, from its list and those of
// all legs in sync. An error means that it may lack everything.
func Lacks(leg List, inSync []List) ([]Range, error) {
	if _, err := Unequal(inSync); err != nil {
		return nil, err
	}
	for _, l := range inSync {
		// The others list everything since a checkpoint that the leg took part in to its end.
		if leg.Committed != l.Committed && leg.Committed != l.Begun {
			return nil, ErrUnrelated
		}
	}
	return union(append([]List{leg}, inSync...))
}

// union returns what any of the lists names.
func union(lists []List) ([]Range, error) {
	var all []uint64
	for _, l := range lists {
		switch {
		case l.Committed == 0:
			return nil, ErrNoList
		case l.Region != lists[0].Region || len(l.Words) != len(lists[0].Words):
			return nil, ErrShape
		}
		if all == nil {
			all = make([]uint64, len(l.Words))
		}
		for w := range l.Words {
			all[w] |= l.Words[w]
		}
		if l.Behind != nil {
			for _, r := range l.Behind.Ranges {
				mark(all, r, int64(l.Region))
			}
		}
	}
	if all == nil {
		return nil, ErrNoList
	}
	return Ranges(all, int64(lists[0].Region), math.MaxInt/2), nil
}

// mark adds the regions of a range to a set, as far as the set reaches.
func mark(words []uint64, r Range, region int64) {
	last := min((r.End-1)/region, int64(len(words))*64-1)
	for i := max(r.Off, 0) / region; i <= last; i++ {
		words[i/64] |= 1 << (i % 64)
	}
}

// related reports whether two legs were both in sync at a checkpoint from which both list
// everything. The host may have crashed after only one of them had heard of the commit.
func related(a, b List) bool {
	return a.Committed == b.Committed || a.Committed == b.Begun || a.Begun == b.Committed
}

// Ranges turns a set of regions into ranges, in order. Where these would be more than most, those
// with the least between them become one; most must be positive.
func Ranges(words []uint64, region int64, most int) (all []Range) {
	for i, w := range words {
		for w != 0 {
			first := bits.TrailingZeros64(w)
			n := bits.TrailingZeros64(^(w >> first))
			off := (int64(i)*64 + int64(first)) * region
			if last := len(all) - 1; last >= 0 && all[last].End == off {
				all[last].End += int64(n) * region
			} else {
				all = append(all, Range{off, off + int64(n)*region})
			}
			if first+n >= 64 {
				break
			}
			w &^= 1<<(first+n) - 1
		}
		if len(all) >= 2*most {
			all = few(all, most)
		}
	}
	return few(all, most)
}

// few closes the smallest gaps, so that at most so many ranges are left.
func few(all []Range, most int) []Range {
	if len(all) <= most {
		return all
	}
	gaps := make([]int64, len(all)-1)
	for i := range gaps {
		gaps[i] = all[i+1].Off - all[i].End
	}
	slices.Sort(gaps)
	closed := gaps[len(all)-most-1]
	left := all[:1]
	for _, r := range all[1:] {
		if last := &left[len(left)-1]; r.Off-last.End <= closed {
			last.End = r.End
		} else {
			left = append(left, r)
		}
	}
	return left
}

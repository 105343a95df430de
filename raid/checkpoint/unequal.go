// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"math/bits"

	"weft.dev/weft/proto/block"
)

// List is what a Tracker has listed: the regions written since the checkpoint Committed
// began.
type List struct {
	Committed Token // 0: nothing is known of what was written
	Begun     Token // a checkpoint that has begun since; 0: none
	Region    block.Size
	Words     []uint64 // a bit for each region
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
	var union []uint64
	for i, l := range lists {
		switch {
		case l.Committed == 0:
			return nil, ErrNoList
		case l.Region != lists[0].Region || len(l.Words) != len(lists[0].Words):
			return nil, ErrShape
		}
		for _, other := range lists[:i] {
			if !related(l, other) {
				return nil, ErrUnrelated
			}
		}
		if union == nil {
			union = make([]uint64, len(l.Words))
		}
		for w := range l.Words {
			union[w] |= l.Words[w]
		}
	}
	if union == nil {
		return nil, ErrNoList
	}
	return ranges(union, int64(lists[0].Region)), nil
}

// related reports whether two legs were both in sync at a checkpoint from which both list
// everything. The host may have crashed after only one of them had heard of the commit.
func related(a, b List) bool {
	return a.Committed == b.Committed || a.Committed == b.Begun || a.Begun == b.Committed
}

// ranges turns a set of regions into ranges, as few as possible.
func ranges(words []uint64, region int64) (all []Range) {
	for i, w := range words {
		for ; w != 0; w &= w - 1 {
			off := (int64(i)*64 + int64(bits.TrailingZeros64(w))) * region
			if n := len(all); n > 0 && all[n-1].End == off {
				all[n-1].End += region
				continue
			}
			all = append(all, Range{off, off + region})
		}
	}
	return all
}

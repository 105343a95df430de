// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"math/bits"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
)

// Token identifies a checkpoint of a column. Hosts choose it at random; 0 is none.
type Token uint64

// Region is the size of the regions of legs up to a TiB. It bounds what a crash makes the
// next host compare: one region for each write to a random place.
const Region = 64 * block.KiB

// mostRegions limits the memory of a Tracker to 4 MiB.
const mostRegions = 1 << 24

// RegionOf returns the size of the regions of a leg.
func RegionOf(leg block.Size) block.Size {
	r := Region
	for leg > mostRegions*r {
		r *= 2
	}
	return r
}

// ErrNotBegun is returned if another checkpoint than the one that is committed was begun
// last, or none.
var ErrNotBegun = errors.New("this checkpoint was not the last to begin")

// Tracker lists the regions of a leg that are written. Mark may be called concurrently with
// all methods.
type Tracker struct {
	shift uint
	now   []atomic.Uint64 // written since the last checkpoint began; a bit for each region

	mu        sync.Mutex
	before    []uint64 // written before that, and not known to be equal
	committed Token    // the last; 0: the lists are not complete
	begun     Token    // 0: none since committed
	copying   bool     // the leg is copied to, at begun
	behind    *Behind  // what the leg lacked at the last; nil: nothing
}

// NewTracker returns a Tracker for a leg about which nothing is known.
func NewTracker(leg block.Size) *Tracker { return NewTrackerIn(leg, make([]atomic.Uint64, Words(leg))) }

// NewTrackerIn returns a Tracker for a leg about which nothing is known, in memory of Words(leg) words
// in which something else marks the regions that are written, as Mark does.
func NewTrackerIn(leg block.Size, words []atomic.Uint64) *Tracker {
	return &Tracker{shift: uint(bits.TrailingZeros64(uint64(RegionOf(leg)))), now: words, before: make([]uint64, len(words))}
}

// Words is the number of words with a bit for each region of a leg.
func Words(leg block.Size) int {
	region := RegionOf(leg)
	return int((uint64((leg+region-1)/region) + 63) / 64)
}

// Mark lists the regions of a range. Call it for a write, discard or write of zeroes before
// any of it can reach the drive. The range must lie in the leg.
func (t *Tracker) Mark(off, length int64) {
	if length <= 0 {
		return
	}
	first, last := uint64(off)>>t.shift, uint64(off+length-1)>>t.shift
	for i := first / 64; i <= last/64; i++ {
		if mask := raid.WordMask(i, first, last); t.now[i].Load()&mask != mask {
			t.now[i].Or(mask)
		}
	}
}

// Begin begins a checkpoint. A checkpoint that was begun before and not committed is given
// up: what was written before it stays listed. A repeated Begin has no effect, since the
// host may have acted on the first. copying: the leg is copied to, and not in sync.
func (t *Tracker) Begin(token Token, copying bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.begun == token {
		return
	}
	t.begun, t.copying = token, copying
	for i := range t.now {
		if t.now[i].Load() != 0 {
			t.before[i] |= t.now[i].Swap(0)
		}
	}
}

// Commit forgets what was written before the checkpoint began. The host must know that all
// legs in sync have it, and this leg too, except in what behind names; nil: the leg is in sync.
// Commit returns ErrNotBegun if another checkpoint has begun since; a repeated Commit has no
// effect.
func (t *Tracker) Commit(token Token, behind *Behind) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.begun == token && token != 0:
	case t.begun == 0 && t.committed == token && token != 0:
		return nil
	default:
		return ErrNotBegun
	}
	t.committed, t.begun, t.behind = token, 0, behind
	clear(t.before)
	return nil
}

// Forget makes the list worthless until the next checkpoint: the leg may lack data that is
// listed no more.
func (t *Tracker) Forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.committed, t.begun, t.behind = 0, 0, nil
}

// List returns what is listed.
func (t *Tracker) List() List {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := List{Committed: t.committed, Region: 1 << t.shift, Words: make([]uint64, len(t.now)), Behind: t.behind}
	if !t.copying {
		l.Begun = t.begun
	}
	for i := range t.now {
		l.Words[i] = t.before[i] | t.now[i].Load()
	}
	return l
}

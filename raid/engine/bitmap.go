// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math/bits"
	"sync/atomic"

	"weft.dev/weft/raid"
	"weft.dev/weft/raid/checkpoint"
)

// bitmap is a set of regions. Bits may be set and cleared concurrently; grow and
// merge need the bitmap for themselves.
type bitmap struct {
	n     uint64
	words []atomic.Uint64
	// sum has a bit for each word that may be nonzero, so that walking a sparse set is
	// fast.
	sum   []atomic.Uint64
	count atomic.Int64
}

func newBitmap(n uint64) *bitmap {
	b := &bitmap{}
	b.grow(n)
	return b
}

// grow makes room for n regions. The new ones are not in the set.
func (b *bitmap) grow(n uint64) {
	b.n = n
	b.words = grown(b.words, (n+63)/64)
	b.sum = grown(b.sum, (n+4095)/4096)
}

func grown(old []atomic.Uint64, n uint64) []atomic.Uint64 {
	words := make([]atomic.Uint64, n)
	for i := range old {
		words[i].Store(old[i].Load())
	}
	return words
}

// set puts the regions from first to last into the set.
func (b *bitmap) set(first, last uint64) {
	for i := first / 64; i <= last/64; i++ {
		b.or(i, raid.WordMask(i, first, last))
	}
}

func (b *bitmap) or(word, mask uint64) {
	if b.words[word].Load()&mask == mask {
		return
	}
	old := b.words[word].Or(mask)
	b.count.Add(int64(bits.OnesCount64(mask &^ old)))
	b.sum[word/64].Or(1 << (word % 64))
}

func (b *bitmap) setAll() {
	if b.n > 0 {
		b.set(0, b.n-1)
	}
}

// setBytes puts the regions of a range of bytes into the set, as far as it reaches; a region has
// 1<<shift bytes.
func (b *bitmap) setBytes(r checkpoint.Range, shift uint) {
	if b.n > 0 && r.End > r.Off && uint64(r.Off)>>shift < b.n {
		b.set(uint64(r.Off)>>shift, min(uint64(r.End-1)>>shift, b.n-1))
	}
}

func (b *bitmap) has(i uint64) bool { return b.words[i/64].Load()>>(i%64)&1 == 1 }

// copied returns a copy of the set, a bit for each region.
func (b *bitmap) copied() []uint64 {
	words := make([]uint64, len(b.words))
	for i := range words {
		words[i] = b.words[i].Load()
	}
	return words
}

// unset removes one region from the set, and reports whether it was there.
func (b *bitmap) unset(i uint64) (was bool) {
	if was = b.words[i/64].And(^(uint64(1)<<(i%64)))>>(i%64)&1 == 1; was {
		b.count.Add(-1)
	}
	return was
}

// moveTo moves all regions from b to another bitmap, or removes them if to is nil. A
// region that is set in b at the same time may stay.
func (b *bitmap) moveTo(to *bitmap) {
	for i := range b.sum {
		for s := b.sum[i].Swap(0); s != 0; s &= s - 1 {
			word := uint64(i)*64 + uint64(bits.TrailingZeros64(s))
			w := b.words[word].Swap(0)
			if w == 0 {
				continue
			}
			b.count.Add(-int64(bits.OnesCount64(w)))
			if to != nil {
				to.or(word, w)
			}
		}
	}
}

// clear empties the set.
func (b *bitmap) clear() { b.moveTo(nil) }

// next returns the first region of the set from i on.
func (b *bitmap) next(i uint64) (uint64, bool) {
	if i >= b.n {
		return 0, false
	}
	if w := b.words[i/64].Load() >> (i % 64); w != 0 {
		return i + uint64(bits.TrailingZeros64(w)), true
	}
	for word := i/64 + 1; word < uint64(len(b.words)); {
		s := b.sum[word/64].Load() >> (word % 64)
		if s == 0 {
			word = (word/64 + 1) * 64
			continue
		}
		word += uint64(bits.TrailingZeros64(s))
		if w := b.words[word].Load(); w != 0 {
			return word*64 + uint64(bits.TrailingZeros64(w)), true
		}
		word++
	}
	return 0, false
}

func (b *bitmap) len() uint64 { return uint64(b.count.Load()) }

// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"math/bits"
	"slices"
	"time"
)

// A histogram counts durations in buckets at most an eighth wide. Once made, it allocates
// nothing.
type histogram [8 * 48]uint32

func (h *histogram) add(d time.Duration) { h[bucket(uint64(max(d, 0)))]++ }

// bucket is the number of n's bucket: n's highest bit and the three bits after it.
func bucket(n uint64) int {
	if n < 8 {
		return int(n)
	}
	e := bits.Len64(n) - 4
	return min(8*e+int(n>>e), len(histogram{})-1)
}

// floor is the smallest n of a bucket.
func floor(bucket int) uint64 {
	if bucket < 16 {
		return uint64(bucket)
	}
	e := bucket/8 - 1
	return uint64(bucket-8*e) << e
}

func middle(bucket int) time.Duration { return time.Duration(floor(bucket)+floor(bucket+1)) / 2 }

func (h *histogram) merge(o *histogram) {
	for i, n := range o {
		h[i] += n
	}
}

func (h *histogram) count() (n uint64) {
	for _, c := range h {
		n += uint64(c)
	}
	return n
}

// most is the longest duration, exact to an eighth.
func (h *histogram) most() time.Duration {
	for i, c := range slices.Backward(h[:]) {
		if c > 0 {
			return middle(i)
		}
	}
	return 0
}

// quantile is a duration that a share q of all durations does not exceed, exact to an
// eighth.
func (h *histogram) quantile(q float64) time.Duration {
	left := uint64(q * float64(h.count()))
	for i, c := range h {
		if uint64(c) > left {
			return middle(i)
		}
		left -= uint64(c)
	}
	return 0
}

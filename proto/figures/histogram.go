// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"math"
	"time"
)

// The buckets of a Histogram. The first one has all that is shorter than Least. Above it, bucket i
// has what is shorter than Bound(i), down to Bound(i-1); the last one has all that is longer, too.
const (
	perDoubling = 8
	leastPower  = -20 // Least is 2^-20 s
	mostPower   = 6   // the last bucket ends at 64 s
	Buckets     = 1 + (mostPower-leastPower)*perDoubling
)

// Schema is that of Prometheus' native histograms with the same bounds.
const Schema = 3

// Histogram is the number of I/Os in each bucket; nil if there are none.
type Histogram []uint64

// bounds are the upper bounds of the buckets, in seconds.
var bounds = func() (b [Buckets]float64) {
	for i := range b {
		b[i] = math.Exp2(leastPower + float64(i)/perDoubling)
	}
	return b
}()

// A mantissa is looked up by its first four bits. Each of these cells has at most one bound in it.
var cells = func() (c [16]struct {
	below uint8   // the sub-bucket at the beginning of the cell
	bound float64 // from here on it is the next one
}) {
	for i := range c {
		from, to := 1+float64(i)/16, 1+float64(i+1)/16
		c[i].bound = math.Inf(1)
		for k := 1; k < perDoubling; k++ {
			switch b := math.Exp2(float64(k) / perDoubling); {
			case b <= from:
				c[i].below = uint8(k)
			case b < to:
				c[i].bound = b
			}
		}
	}
	return c
}()

// Bucket is the bucket of a latency.
func Bucket(took time.Duration) int {
	seconds := float64(took) * 1e-9
	if seconds < bounds[0] {
		return 0
	}
	bits := math.Float64bits(seconds)
	power := int(bits>>52) - 1023
	if power >= mostPower {
		return Buckets - 1
	}
	mantissa := math.Float64frombits(bits&(1<<52-1) | 1023<<52)
	cell := &cells[bits>>48&15]
	sub := int(cell.below)
	if mantissa >= cell.bound {
		sub++
	}
	return 1 + (power-leastPower)*perDoubling + sub
}

// Bound is the upper bound of a bucket.
func Bound(i int) time.Duration { return time.Duration(bounds[i] * 1e9) }

// NativeIndex is the index that a bucket above the first has in a native histogram.
func NativeIndex(i int) int { return i + leastPower*perDoubling }

// Native returns the buckets of a native histogram.
func (h Histogram) Native() (positive map[int]int64, zero uint64) {
	positive = map[int]int64{}
	for i, n := range h {
		switch {
		case i == 0:
			zero = n
		case n > 0:
			positive[NativeIndex(i)] = int64(n)
		}
	}
	return positive, zero
}

// Least is the upper bound of the first bucket.
func Least() time.Duration { return Bound(0) }

// Add adds the counts of another histogram.
func (h *Histogram) Add(o Histogram) {
	if o == nil {
		return
	}
	if *h == nil {
		*h = make(Histogram, Buckets)
	}
	for i, n := range o {
		(*h)[i] += n
	}
}

// Since returns what was counted after an earlier reading; ok is false if that is not one.
func (h Histogram) Since(earlier Histogram) (d Histogram, ok bool) {
	if h == nil {
		return nil, earlier.Count() == 0
	}
	d = make(Histogram, Buckets)
	copy(d, h)
	for i, n := range earlier {
		if d[i] < n {
			return nil, false
		}
		d[i] -= n
	}
	return d, true
}

// Count is the number of I/Os.
func (h Histogram) Count() (n uint64) {
	for _, c := range h {
		n += c
	}
	return n
}

// Quantile is the latency that a part q of the I/Os did not exceed; 0 if there are none. It is the
// middle of the bucket in which that I/O is.
func (h Histogram) Quantile(q float64) time.Duration {
	all := h.Count()
	if all == 0 {
		return 0
	}
	rank := max(1, uint64(math.Ceil(q*float64(all))))
	for i, n := range h {
		if n < rank {
			rank -= n
			continue
		}
		if i == 0 {
			return Least()
		}
		return time.Duration(math.Sqrt(bounds[i-1]*bounds[i]) * 1e9)
	}
	return Bound(Buckets - 1)
}

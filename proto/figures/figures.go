// SPDX-License-Identifier: Apache-2.0

// Package figures counts I/O: how many operations, how many bytes, how many errors, and how long
// they took. What it counts is cumulative, so the figures of any stretch of time are the
// difference of two readings, and those of a group are the sum of its members'.
//
// Latencies go into buckets of fixed bounds, eight for each power of two: a percentile that is
// read from them is wrong by at most 4.5 %. The bounds are those of Prometheus' native histograms
// of schema 3, so that they can be exported as they are.
//
//	Tally     what one place of the data path counts under its own lock, in little memory
//	Meter     a Tally for places without a lock of their own
//	Figures   the counts of one object since they began
package figures

import "time"

// Op is a kind of I/O.
type Op uint8

// The kinds of I/O that are counted apart. Writing zeroes counts as writing.
const (
	Read Op = iota
	Write
	Flush
	Discard
	// Any has latencies that are not counted apart, and nothing else.
	Any
)

// Ops is the number of kinds.
const Ops = 5

func (o Op) String() string { return [Ops]string{"read", "write", "flush", "discard", "any"}[o] }

// Count is the I/O of one kind.
type Count struct {
	IOs, Bytes, Errors uint64
	Took               time.Duration // all I/Os together
	Latency            Histogram     // of all I/Os, failed ones too
}

// Figures are the counts of one object since they began. The zero value has counted nothing.
type Figures [Ops]Count

// Add adds the counts of another object, or of another time.
func (f *Figures) Add(o *Figures) {
	for op := range f {
		c, d := &f[op], &o[op]
		c.IOs += d.IOs
		c.Bytes += d.Bytes
		c.Errors += d.Errors
		c.Took += d.Took
		c.Latency.Add(d.Latency)
	}
}

// Since returns what was counted after an earlier reading of the same object. Ok is false if the
// earlier reading is not one: a count of it is larger.
func (f *Figures) Since(earlier *Figures) (d Figures, ok bool) {
	for op := range f {
		now, was := &f[op], &earlier[op]
		if now.IOs < was.IOs || now.Bytes < was.Bytes || now.Errors < was.Errors || now.Took < was.Took {
			return Figures{}, false
		}
		latency, ok := now.Latency.Since(was.Latency)
		if !ok {
			return Figures{}, false
		}
		d[op] = Count{IOs: now.IOs - was.IOs, Bytes: now.Bytes - was.Bytes, Errors: now.Errors - was.Errors, Took: now.Took - was.Took, Latency: latency}
	}
	return d, true
}

// Clone returns a copy that shares nothing.
func (f *Figures) Clone() (c Figures) {
	c.Add(f)
	return c
}

// IOs is the number of I/Os of all kinds.
func (f *Figures) IOs() (n uint64) {
	for op := range f {
		n += f[op].IOs
	}
	return n
}

// Sum is the I/O of all kinds together.
func (f *Figures) Sum() (all Count) {
	for op := range f {
		all.IOs, all.Bytes, all.Errors, all.Took = all.IOs+f[op].IOs, all.Bytes+f[op].Bytes, all.Errors+f[op].Errors, all.Took+f[op].Took
	}
	all.Latency = f.Latency()
	return all
}

// Latency is the histogram of all kinds together.
func (f *Figures) Latency() (all Histogram) {
	for op := range f {
		all.Add(f[op].Latency)
	}
	return all
}

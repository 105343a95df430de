// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"time"
)

// job is one run of one workload on one server, as sent to the client process.
type job struct {
	Kind    string // see client.go
	Form    form
	Address string
	Export  string // of NBD
	Write   bool
	Size    int     // bytes of each IO
	Depth   int     // IOs in flight
	Random  bool    // otherwise sequential
	Span    int64   // bytes of the device that the job uses
	Seconds float64 // how long, at most

	FUA    bool  // writes are durable, with what is needed to find them, before they are answered
	Stride int64 // if not 0: each place that is a multiple of it, once, and then the end

	Stripes, Copies int // of a volume
}

func (j job) duration() time.Duration { return time.Duration(j.Seconds * float64(time.Second)) }

// result is the client process's answer.
type result struct {
	IOPS     float64
	IOs      uint64 // how many there were
	P50, P99 time.Duration
	P999     time.Duration // of 99.9 %
	Mallocs  float64       // of the client, per IO
	CPU      float64       // of the client, microseconds per IO
	Err      string

	Latencies *histogram `json:",omitempty"` // nil: unknown
}

func (r *result) fill(h *histogram, d time.Duration) {
	r.IOs = h.count()
	r.IOPS = float64(r.IOs) / d.Seconds()
	r.P50, r.P99, r.P999 = h.quantile(0.50), h.quantile(0.99), h.quantile(0.999)
	r.Latencies = h
}

// took is how long a job counts that began at some time: it ends when its time is up, or when it has
// been at each place once.
func (j job) took(began time.Time) time.Duration {
	if j.Stride > 0 {
		return time.Since(began)
	}
	return j.duration()
}

// offsets chooses the place of each IO.
type offsets struct {
	size, blocks int64
	random       bool
	once         bool
	at           uint64
	step         uint64 // with once: how many there are of these, each with places of its own
}

func newOffsets(j job) *offsets {
	if j.Stride > 0 {
		return &offsets{size: j.Stride, blocks: j.Span / j.Stride, once: true, step: 1}
	}
	return &offsets{size: int64(j.Size), blocks: j.Span / int64(j.Size), random: j.Random, at: 88172645463325252}
}

// share returns the offsets of one of several slots.
func (o *offsets) share(slot, slots int) *offsets {
	switch {
	case o.once:
		o.at, o.step = uint64(slot), uint64(slots)
	case o.random:
		o.at += uint64(slot) * 0x9e3779b97f4a7c15
	default:
		o.at = uint64(slot) * uint64(o.blocks/int64(slots))
	}
	return o
}

// next returns the next place, or false if each has had its turn.
func (o *offsets) next() (int64, bool) {
	if o.once {
		// The factor is prime, and larger than the number of places: each comes once, not in order.
		off := int64(o.at*2654435761%uint64(o.blocks)) * o.size
		more := o.at < uint64(o.blocks)
		o.at += o.step
		return off, more
	}
	if !o.random {
		o.at++
		return int64(o.at%uint64(o.blocks)) * o.size, true
	}
	o.at ^= o.at << 13 // xorshift64
	o.at ^= o.at >> 7
	o.at ^= o.at << 17
	return int64(o.at%uint64(o.blocks)) * o.size, true
}

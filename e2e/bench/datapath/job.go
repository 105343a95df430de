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
	Seconds float64 // how long

	Stripes, Copies int // of a volume
}

func (j job) duration() time.Duration { return time.Duration(j.Seconds * float64(time.Second)) }

// result is the client process's answer.
type result struct {
	IOPS     float64
	P50, P99 time.Duration
	Mallocs  float64 // of the client, per IO
	CPU      float64 // of the client, microseconds per IO
	Err      string
}

func (r *result) fill(h *histogram, d time.Duration) {
	r.IOPS = float64(h.count()) / d.Seconds()
	r.P50, r.P99 = h.quantile(0.50), h.quantile(0.99)
}

// offsets chooses the place of each IO.
type offsets struct {
	size, blocks int64
	random       bool
	at           uint64
}

func newOffsets(j job) *offsets {
	return &offsets{size: int64(j.Size), blocks: j.Span / int64(j.Size), random: j.Random, at: 88172645463325252}
}

func (o *offsets) next() int64 {
	if !o.random {
		o.at++
		return int64(o.at%uint64(o.blocks)) * o.size
	}
	o.at ^= o.at << 13 // xorshift64
	o.at ^= o.at >> 7
	o.at ^= o.at << 17
	return int64(o.at%uint64(o.blocks)) * o.size
}

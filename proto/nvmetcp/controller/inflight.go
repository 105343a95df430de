// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"sync/atomic"
)

// inflight counts the commands inside a Device. drain waits until every command that was inside
// when it was called has left, while new ones may come and go.
//
// There are two counts, and new commands enter the current one. drain makes the other one
// current and waits for the first to reach zero. It works as a fence because of the order.
// The side that fences first sets its flag and then drains; a command first enters and then
// checks the flag. So a command either sees the flag or is waited for.
type inflight struct {
	turn    atomic.Uint32 // its lowest bit selects the current count
	waiting atomic.Int32  // the number of drains
	counts  [2]padded
	turning chan struct{} // holds a token while no drain runs
	left    chan struct{} // signaled by the last to leave
}

// padded keeps each count on a cache line of its own.
type padded struct {
	n atomic.Int64
	_ [56]byte
}

func newInflight() *inflight {
	f := &inflight{turning: make(chan struct{}, 1), left: make(chan struct{}, 1)}
	f.turning <- struct{}{}
	return f
}

// enter returns the argument for leave.
func (f *inflight) enter() uint32 {
	side := f.turn.Load() & 1
	f.counts[side].n.Add(1)
	return side
}

func (f *inflight) leave(side uint32) {
	if f.counts[side].n.Add(-1) == 0 && f.waiting.Load() > 0 {
		select {
		case f.left <- struct{}{}:
		default:
		}
	}
}

// drain returns when all that were inside when it was called have left, or with ctx's
// error.
func (f *inflight) drain(ctx context.Context) error {
	select {
	case <-f.turning:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { f.turning <- struct{}{} }()
	f.waiting.Add(1)
	defer f.waiting.Add(-1)
	// An earlier drain whose ctx ended may have left commands on the other side.
	if err := f.wait(ctx, f.turn.Load()&1^1); err != nil {
		return err
	}
	return f.wait(ctx, (f.turn.Add(1)-1)&1)
}

func (f *inflight) wait(ctx context.Context, side uint32) error {
	for f.counts[side].n.Load() != 0 {
		select {
		case <-f.left:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"sync/atomic"
)

// gate counts who is inside, and lets others wait until all who were inside
// when they came have left, while new ones come and go. It is how the target
// knows that a command has left a Device.
//
// There are two counts, and newcomers use the current one. drain makes the
// other one current, and waits for the first to reach zero. The order that
// makes it a fence: the one who drains first closes what shall be closed and
// then turns; a newcomer first enters and then looks whether it is closed. So a
// newcomer either sees it closed, or is waited for.
type gate struct {
	turn    atomic.Uint32 // its last bit says which count is current
	waiting atomic.Int32  // how many drain
	inside  [2]padded
	turning chan struct{} // holds a token while nobody drains
	left    chan struct{} // somebody was the last to leave
}

// padded keeps the counts on cache lines of their own.
type padded struct {
	n atomic.Int64
	_ [56]byte
}

func newGate() *gate {
	g := &gate{turning: make(chan struct{}, 1), left: make(chan struct{}, 1)}
	g.turning <- struct{}{}
	return g
}

// enter returns what leave wants.
func (g *gate) enter() uint32 {
	side := g.turn.Load() & 1
	g.inside[side].n.Add(1)
	return side
}

func (g *gate) leave(side uint32) {
	if g.inside[side].n.Add(-1) == 0 && g.waiting.Load() > 0 {
		select {
		case g.left <- struct{}{}:
		default:
		}
	}
}

// drain returns when all who were inside when it was called have left, or with
// ctx's error.
func (g *gate) drain(ctx context.Context) error {
	select {
	case <-g.turning:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { g.turning <- struct{}{} }()
	g.waiting.Add(1)
	defer g.waiting.Add(-1)
	// An earlier drain that gave up may have left some on the other side.
	if err := g.wait(ctx, g.turn.Load()&1^1); err != nil {
		return err
	}
	return g.wait(ctx, (g.turn.Add(1)-1)&1)
}

func (g *gate) wait(ctx context.Context, side uint32) error {
	for g.inside[side].n.Load() != 0 {
		select {
		case <-g.left:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/compare"
	"weft.dev/weft/initiator/volume"
)

// This file lets a scrub repair what it has found. device-mapper has no lock for a range, so the I/O of users is held
// for the whole volume, as for a snapshot: until no write is under way, and then for as long as it takes to read the
// copies of a few blocks, write them, and read them once more.
//
// What is written goes through the column's device, below the one that is held. dm-mirror treats it like a write of
// users: each leg gets it, the log says so meanwhile, and a leg that fails it is given up while it waits. So nothing else
// has to know of a repair, and I/O is resumed only after it has ended: an agent that is killed stays, as a process, until
// its write has ended, and so does its lock.

// repair asks to have the volume to itself.
type repair struct {
	column int
	state  atomic.Int32
	turn   chan repairTurn // of one; it has the answer if the state is answered
	began  time.Time       // of the keeper's goroutine: when it got the volume to itself
}

// The states of a repair that asks: it waits for an answer, has got one, or waits no longer.
const (
	repairWaits = iota
	repairAnswered
	repairLeft
)

// repairTurn is the answer: the column, in which nobody else writes until done is called; or err.
type repairTurn struct {
	column compare.Column
	err    error
	done   func()
}

var (
	errUnsettled = errors.New("a leg of the column has failed, or its tables are about to change")
	errNoTurn    = errors.New("I/O was not held in time")
)

// alone implements compare.Repair.Alone.
func (k *kernelKeeper) alone(ctx context.Context, column int, do func(compare.Column)) error {
	r := &repair{column: column, turn: make(chan repairTurn, 1)}
	k.Tell(func() { k.repair = r }) // no other has the volume: no scrub begins while I/O is held
	defer k.Tell(func() {
		if k.repair == r {
			k.repair = nil
		}
	})
	ctx, cancel := context.WithTimeout(ctx, holdFor)
	defer cancel()
	select {
	case t := <-r.turn:
		return t.take(do)
	case <-ctx.Done():
	}
	if r.state.CompareAndSwap(repairWaits, repairLeft) {
		return errNoTurn
	}
	return (<-r.turn).take(do)
}

func (t repairTurn) take(do func(compare.Column)) error {
	if t.err != nil {
		return t.err
	}
	defer t.done()
	do(t.column)
	return nil
}

// repairs reports whether a repair has the volume to itself, or had it when the device was removed.
func (k *kernelKeeper) repairs() bool {
	return k.repair != nil && k.repair.state.Load() == repairAnswered
}

// letRepair holds I/O for a repair, and gives it the volume once nothing is under way.
func (k *kernelKeeper) letRepair(ctx context.Context, s *seen) {
	r := k.repair
	switch {
	case r == nil || r.state.Load() == repairLeft:
		return
	case k.repairs(): // until it has ended
	case k.suspends || k.Busy(growDevice) || k.Busy(volume.ResumeIO{}.String()): // I/O may be resumed at any moment
		return
	case !s.Held:
		k.holdOnce(ctx, s)
		return
	default:
		k.answer(r, s)
	}
	if k.repairs() && s.Held {
		s.Repairing, s.Quiet = r.began, false
	}
}

// answer gives a repair its column, or says why not.
func (k *kernelKeeper) answer(r *repair, s *seen) {
	t := repairTurn{err: errUnsettled}
	copies, settled := k.copiesToCompare(r.column)
	if c := k.columnDevice(s, r.column); settled && c != "" && s.Quiet {
		t = repairTurn{done: k.draining.Done, column: compare.Column{Copies: copies, Write: func(p []byte, off int64) error { return k.kernel.dm.Write(c, p, off) }}}
	}
	if !r.state.CompareAndSwap(repairWaits, repairAnswered) {
		return
	}
	if t.err == nil {
		k.draining.Add(1)
		r.began = s.Now
	} else {
		k.repair = nil
	}
	r.turn <- t
}

// columnDevice is the name of a column's device; empty: it has none that can be written now.
func (k *kernelKeeper) columnDevice(s *seen, column int) string {
	if column >= len(s.columns) || k.changes[column] != nil {
		return ""
	}
	for _, d := range s.columns[column].devices {
		if d.Name == s.columns[column].name && d.Live && !d.Suspended && !fails(d.Table) {
			return d.Name
		}
	}
	return ""
}

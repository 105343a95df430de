// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/compare"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// This file lets a scrub repair what it has found. device-mapper has no lock for a range, so the I/O of users is held
// for the whole volume, as for a snapshot: until no write is under way, and then for as long as it takes to read the
// copies of a few blocks, write them, and read them once more.
//
// What is written goes through the column's device, below the one that is held. dm-mirror treats it like a write of
// users: each leg gets it, the log says so meanwhile, and a leg that fails it is given up while it waits.
//
// I/O may be resumed, and the tables of another grant built, only when nothing is written any more. An agent that is
// killed, or stops, may leave a write in the kernel. So a repair has a file locked, from before it reads until its write
// has returned; the kernel unlocks it for a process that is killed when the last call of that has returned.

// repair asks to have the volume to itself.
type repair struct {
	column int
	state  atomic.Int32
	turn   chan repairTurn // of one; it has the answer if the state is answered
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

var errNoTurn = errors.New("I/O could not be held: writes of users never rest, or a leg of the column does not answer or has failed")

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

// letRepair holds I/O for a repair, and gives it the volume once nothing is under way.
func (k *kernelKeeper) letRepair(ctx context.Context, s *seen) {
	if s.Held && k.kernel.repairing(k.volume) {
		if k.repairs.IsZero() {
			k.repairs = s.Now
		}
		s.Repairing, s.Quiet = k.repairs, false
		return
	}
	k.repairs = time.Time{}
	r := k.repair
	if r == nil || r.state.Load() != repairWaits || !k.mayRepair(s, r.column) {
		return
	}
	switch {
	case s.Held && k.drains.Load(): // and for nothing else
		k.answer(r, s)
	case !s.Held && k.compares.Load().rest(): // or it would wait with a write that waits, as for space
		k.holdOnce(ctx, s)
	}
}

// mayRepair reports whether a column can be repaired once I/O is held.
func (k *kernelKeeper) mayRepair(s *seen, column int) bool {
	_, settled := k.copiesToCompare(column)
	return s.Holdable && !k.suspends && !k.resumes() && settled && k.columnDevice(s, column) != "" && k.allAnswer(s)
}

// resumes reports whether a call is under way that ends with I/O resumed.
func (k *kernelKeeper) resumes() bool {
	return k.Busy(growDevice) || k.Busy(changeDiscards) || k.Busy(volume.ResumeIO{}.String())
}

// allAnswer reports whether all legs in use answer.
func (k *kernelKeeper) allAnswer(s *seen) bool {
	for _, column := range s.Columns {
		for _, c := range column.Copies {
			if l := s.Legs[c.Leg]; c.State.InUse() && (!l.Live || l.Silence(s.Now) > 0) {
				return false
			}
		}
	}
	return true
}

// answer gives a repair its column.
func (k *kernelKeeper) answer(r *repair, s *seen) {
	if !r.state.CompareAndSwap(repairWaits, repairAnswered) {
		return
	}
	unlock, err := k.kernel.lockRepair(k.volume)
	if err != nil {
		r.turn <- repairTurn{err: err}
		return
	}
	k.repairs = s.Now
	s.Repairing, s.Quiet = s.Now, false
	k.draining.Add(1)
	copies, _ := k.copiesToCompare(r.column)
	device := k.columnDevice(s, r.column)
	r.turn <- repairTurn{
		column: compare.Column{Copies: copies, Write: func(p []byte, off int64) error { return k.kernel.dm.Write(device, p, off) }},
		done:   func() { unlock(); k.draining.Done() },
	}
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

// repairFile is locked while a repair has a volume to itself.
func (k *kernel) repairFile(v block.VolumeID) string {
	return filepath.Join(k.runDir, v.String()+".repair")
}

func (k *kernel) lockRepair(v block.VolumeID) (unlock func(), err error) {
	if err := os.MkdirAll(k.runDir, 0o700); err != nil {
		return nil, fmt.Errorf("lock the repairs of volume %s: %w", v, err)
	}
	f, err := os.OpenFile(k.repairFile(v), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the repairs of volume %s: %w", v, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock the repairs of volume %s: %w", v, errors.Join(err, f.Close()))
	}
	return func() { f.Close() }, nil
}

// repairing reports whether a repair of a volume has not ended, perhaps of another agent. If that cannot be found out, it
// may be so.
func (k *kernel) repairing(v block.VolumeID) bool {
	f, err := os.Open(k.repairFile(v))
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil
}

// forgetRepairs removes the file. One that is locked stays.
func (k *kernel) forgetRepairs(v block.VolumeID) error {
	if k.repairing(v) {
		return nil
	}
	return remove(k.repairFile(v))
}

var errRepairing = errors.New("a repair of copies that differ has not ended")

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/compare"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/agentlock"
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
	column   int
	turn     chan repairTurn // who waits no longer takes none
	answered bool            // of the keeper's goroutine
}

// repairTurn is the answer: the column, in which nobody else writes until done is called; or err.
type repairTurn struct {
	column compare.Column
	err    error
	done   func()
}

var errNoTurn = errors.New("I/O could not be held: writes of users never rest, or a leg of the column does not answer or has failed")

// alone implements compare.Repair.Alone.
func (k *kernelKeeper) alone(ctx context.Context, column int, do func(compare.Column)) error {
	r := &repair{column: column, turn: make(chan repairTurn)}
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
		if t.err != nil {
			return t.err
		}
		defer t.done()
		do(t.column)
		return nil
	case <-ctx.Done():
		return errNoTurn
	}
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
	if r == nil || r.answered || !k.mayRepair(s, r.column) {
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

// answer gives a repair its column, or says why not.
func (k *kernelKeeper) answer(r *repair, s *seen) {
	copies, _ := k.copiesToCompare(r.column)
	device := k.columnDevice(s, r.column)
	unlock, err := k.kernel.lockRepair(k.volume)
	t := repairTurn{err: err}
	if err == nil {
		k.draining.Add(1)
		t.done = func() { unlock(); k.draining.Done() }
		t.column = compare.Column{Copies: copies, Write: func(p []byte, off int64) error { return k.kernel.dm.Write(device, p, off) }}
	}
	select {
	case r.turn <- t:
		r.answered = true
	default: // nobody waits
		if err == nil {
			t.done()
		}
		return
	}
	if err == nil {
		k.repairs = s.Now
		s.Repairing, s.Quiet = s.Now, false
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
	f, err := agentlock.Take(k.repairFile(v), os.O_RDWR|os.O_CREATE, 0o600, unix.LOCK_EX)
	if err != nil {
		return nil, fmt.Errorf("lock the repairs of volume %s: %w", v, err)
	}
	return func() { f.Close() }, nil
}

// repairing reports whether a repair of a volume has not ended, perhaps of another agent. If that cannot be found out, it
// may be so.
func (k *kernel) repairing(v block.VolumeID) bool {
	f, err := agentlock.Take(k.repairFile(v), os.O_RDONLY, 0, unix.LOCK_SH)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	f.Close()
	return false
}

// forgetRepairs removes the file. One that is locked stays.
func (k *kernel) forgetRepairs(v block.VolumeID) error {
	if k.repairing(v) {
		return nil
	}
	return remove(k.repairFile(v))
}

var errRepairing = errors.New("a repair of copies that differ has not ended")

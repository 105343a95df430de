// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/proto/block"
)

// recordStale tells the manager of lost legs and returns when it is durable.
// Until then nothing may be acknowledged that they miss.
func (k *kernelKeeper) recordStale(ctx context.Context, o order) error {
	if !k.recorder.Due() {
		return errLater
	}
	return k.ask(ctx, k.recorder.Stale(k.memory.Epoch, k.memory.records, o.legs))
}

// recordInSync tells the manager that legs have caught up; until its answer they
// count as stale. What was copied to them is flushed first: a leg in sync has
// everything that the volume's user has flushed, also after it lost its power.
func (k *kernelKeeper) recordInSync(ctx context.Context, s *seen, o order) error {
	if !k.recorder.Due() || k.busy[asking] {
		return errLater
	}
	for _, l := range o.legs {
		h := s.legs[l.Leg].head()
		// Apart from the asking: the flush of a leg that hangs ends only when it is
		// recorded stale.
		flush := func() error { return k.m.host.Flush(h) }
		if err := k.apart(ctx, "flush "+h.Name, attachment.Patience, flush, func(err error) error { return err }); err != nil {
			return err
		}
	}
	return k.ask(ctx, k.recorder.InSync(k.memory.Epoch, k.memory.records, o.legs))
}

// flushEqualized has the copies that were made equal flushed before the device is
// there for anybody: what they hold by the record must outlive their power.
func (k *kernelKeeper) flushEqualized(w *attachment.Wanted, s *seen) error {
	if !w.Equalize || w.Layout.Copies == 1 {
		return nil
	}
	for _, id := range slices.SortedFunc(maps.Keys(s.legs), func(a, b block.LegID) int { return bytes.Compare(a.UUID[:], b.UUID[:]) }) {
		l := s.legs[id]
		if l.live && slices.ContainsFunc(s.columns, func(c columnSeen) bool { return c.has(l.device) }) {
			if err := k.m.host.Flush(l.head()); err != nil {
				return err
			}
		}
	}
	return nil
}

// note writes down which legs are in sync, and returns when that is durable. A disk
// that hangs is waited for apart: the lease ends meanwhile.
func (k *kernelKeeper) note(ctx context.Context, n evidence.Note) error {
	if time.Now().Before(k.noteAgain) {
		return errLater
	}
	book := k.agent.evidence
	write := func() error { return book.Write(k.volume, n) }
	return k.apart(ctx, "note which legs are in sync", attachment.Patience, write, func(err error) error {
		k.noteError = ""
		if err != nil {
			k.noteError = err.Error()
		}
		if k.noted = book.Of(k.volume); !k.noted.Equal(n) {
			k.noteAgain = time.Now().Add(evidence.Again)
		}
		return err
	})
}

const asking = "ask the volume manager for a record"

// ask asks the manager for a record, one at a time: the order of its answers is
// then that of its records. A manager that does not answer is waited for apart,
// since the lease ends meanwhile.
func (k *kernelKeeper) ask(ctx context.Context, r attachment.Request) error {
	if k.busy[asking] {
		return errLater
	}
	return k.apart(ctx, asking, attachment.Patience, func() error {
		ctx, cancel := context.WithTimeout(ctx, attachment.RecordTimeout)
		defer cancel()
		return r.Send(ctx)
	}, r.Done)
}

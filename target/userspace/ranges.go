// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io/fs"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

// Allocated implements controller.Mapper: a leg that is not in a tree holds data everywhere.
func (e *exported) Allocated(off, end int64, most int) (found []block.Range, next int64, err error) {
	err = e.linear.withMap(func(m *mappedLeg) error {
		if m == nil {
			found, next = []block.Range{{Off: off, End: end}}, end
			return nil
		}
		found, next, err = m.Leg.Allocated(off, end, most)
		return err
	})
	return found, next, err
}

// Differing implements controller.Mapper: it compares a leg in a tree with a snapshot of the same tree.
func (e *exported) Differing(since block.UUID, off, end int64, most int) (found []block.Range, next int64, err error) {
	err = e.linear.withMap(func(m *mappedLeg) error {
		if m == nil {
			return fmt.Errorf("compare with snapshot %v, on a leg that is in no tree: %w", since, block.ErrUnsupported)
		}
		found, next, err = m.Leg.Differing(since, off, end, most)
		if errors.Is(err, mapped.ErrUnknown) || errors.Is(err, mapped.ErrState) {
			err = fmt.Errorf("%w: %w", err, fs.ErrNotExist)
		}
		return err
	})
	return found, next, err
}

// withMap calls do with the leg in a tree that this is, or with nil if it is none. The tree stays open
// meanwhile.
func (l *linear) withMap(do func(*mappedLeg) error) error {
	t := l.take()
	if t == nil {
		return fmt.Errorf("ask where a leg has data: %w", block.ErrGone)
	}
	defer t.release()
	m, _ := t.below.(*mappedLeg)
	return do(m)
}

// Ranges returns where a snapshot's leg holds data, or where it differs from another snapshot's if that is
// not zero. The legs need not be mapped. fs.ErrNotExist: one of them is not on the drive, or no snapshot.
func (d *Disk) Ranges(id, since block.LegID, off, end int64, most int) (found []block.Range, next int64, err error) {
	err = d.inTurn(func() error {
		label := d.Label()
		leg := label.Leg(id)
		if leg == nil || !drive.Mapped(leg) {
			return fmt.Errorf("leg %v: %w", id, fs.ErrNotExist)
		}
		return d.held.within(leg.GetTreeId(), func(t *openTree) error {
			found, next, err = t.Ranges(id.UUID, since.UUID, off, end, most)
			if errors.Is(err, mapped.ErrUnknown) || errors.Is(err, mapped.ErrState) {
				err = fmt.Errorf("%w: %w", err, fs.ErrNotExist)
			}
			return err
		})
	})
	return found, next, err
}

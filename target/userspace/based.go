// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

// A plain leg gets a tree when a snapshot of it is to be taken, and is plain again when nothing else is
// in the tree. The leg may be in use all the time:
//
//	Plant    label: plain, names its tree ──► the tree is made over it ──► label: based
//	(the leg's table becomes one that goes through the tree: its planner's business)
//	Settle   in the background: what the leg has elsewhere in the tree is copied to its own extents
//	Unbase   label: plain, names its tree
//	(the leg's table becomes a plain one)
//	Fell     the tree is wiped ──► label: names none
//
// Between "based" and the change of the table, and between "plain" and the change back, writes reach the
// same bytes in both ways, because no snapshot is in the tree: Freeze refuses a leg that is not in use
// through the tree.

// Plant makes a tree over a plain leg. drive.ErrNoReserve: the drive has no extent for it.
func (d *Disk) Plant(id block.LegID, tree string, size block.Size) error {
	return d.inTurn(func() error {
		if err := d.plant(id, tree, size); err != nil {
			return fmt.Errorf("plant tree %s over leg %v: %w", tree, id, err)
		}
		return nil
	})
}

func (d *Disk) plant(id block.LegID, tree string, size block.Size) error {
	label, err := certain(d.Drive)
	if err != nil {
		return err
	}
	switch leg := label.Leg(id); {
	case leg == nil:
		return fs.ErrNotExist
	case drive.Based(leg) && leg.GetTreeId() == tree:
		return nil
	case d.held.trees.get(tree) != nil:
		return errors.New("the leg has not left an earlier one yet")
	}
	if err := d.Drive.Update(func(l *drive.Label) error { return l.BeginBase(id, tree) }); err != nil {
		return err
	}
	device, err := d.held.drives.Device(d.held.number)
	if err != nil {
		return err
	}
	defer device.Close() //nolint:errcheck // the disk is open, so this is not its last user
	place, err := d.held.place(d.Label(), tree, device)
	if err != nil {
		return err
	}
	place.Base = baseOf(d.Label().Leg(id))
	made, err := mapped.FormatOver(place, id.UUID, size, nil)
	if err != nil {
		return err
	}
	made.Close()
	return d.Drive.Update(func(l *drive.Label) error { return l.Base(id) })
}

// baseOf is the extents of a leg that hold its data, or zeroes.
func baseOf(leg *pb.LegLabel) []uint32 {
	all := drive.ExtentNumbers(leg.GetExtents())
	return all[:min(uint64(len(all)), uint64(drive.Zeroed(leg)/block.ExtentSize))]
}

// Settle begins to copy what a based leg has elsewhere in its tree to its own extents, if it has the tree
// to itself. It goes on in the background, at most rate bytes a second, until that is done or a snapshot
// is taken; Trees tells how far it is.
func (d *Disk) Settle(id block.LegID, rate block.Size) error {
	return d.inTurn(func() error {
		label, err := certain(d.Drive)
		if err != nil {
			return fmt.Errorf("settle leg %v: %w", id, err)
		}
		leg := label.Leg(id)
		if leg == nil || !drive.Based(leg) {
			return fmt.Errorf("settle leg %v: %w", id, fs.ErrNotExist)
		}
		return d.held.within(leg.GetTreeId(), func(t *openTree) error {
			t.settle, t.settleRate = id, rate
			d.held.reclaim(leg.GetTreeId(), t)
			return nil
		})
	})
}

// settleNow is Settle's work. It ends when a snapshot is in the tree, which is no error.
func (h *held) settleNow(ctx context.Context, t *openTree, id block.LegID, rate block.Size) error {
	err := t.Tree.Settle(ctx, id.UUID, func(ctx context.Context, n int64) error { return h.copying.wait(ctx, n, rate) })
	if errors.Is(err, mapped.ErrState) {
		return nil
	}
	return err
}

// settled notes how settleNow ended, for Trees, and reports whether it failed. One that the end of the
// process, or of the tree, has cut off did not.
func (t *openTree) settled(ctx context.Context, err error) (failed bool) {
	if err == nil {
		t.unsettled.Store(nil)
	}
	if err == nil || ctx.Err() != nil || errors.Is(err, block.ErrGone) {
		return false
	}
	why := err.Error()
	t.unsettled.Store(&why)
	return true
}

// Unbase makes a based leg plain that is in its own extents, according to Trees.
func (d *Disk) Unbase(id block.LegID) error {
	return d.inTurn(func() error {
		label, err := certain(d.Drive)
		if err != nil {
			return fmt.Errorf("make leg %v plain: %w", id, err)
		}
		leg := label.Leg(id)
		if leg == nil || !drive.Based(leg) {
			return nil
		}
		open := d.held.trees.get(leg.GetTreeId())
		if open == nil || !open.Settling(id.UUID).Plain {
			return fmt.Errorf("make leg %v plain: not all of it is in its extents", id)
		}
		if err := open.flushed(); err != nil {
			return fmt.Errorf("make leg %v plain: %w", id, err)
		}
		return d.Drive.Update(func(l *drive.Label) error { return l.Unbase(id) })
	})
}

// flushed reports whether the tree works and what it holds is durable.
func (t *openTree) flushed() error {
	if err := t.Err(); err != nil {
		return err
	}
	return block.Flush(t.device)
}

// Fell removes the tree that a plain leg names, of which there is nothing in the leg.
func (d *Disk) Fell(id block.LegID) error {
	return d.inTurn(func() error {
		label, err := certain(d.Drive)
		if err != nil {
			return fmt.Errorf("fell the tree of leg %v: %w", id, err)
		}
		leg := label.Leg(id)
		if leg == nil || drive.InTree(leg) || leg.GetTreeId() == "" {
			return nil
		}
		if err := d.held.fell(label, leg.GetTreeId()); err != nil {
			return fmt.Errorf("fell the tree of leg %v: %w", id, err)
		}
		return d.Drive.Update(func(l *drive.Label) error { return l.EndBase(id) })
	})
}

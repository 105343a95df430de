// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

// What the kernel reads of a tree (see Rows) is pinned there, and the drive's label says that the kernel reads
// something. Both follow from the kernel's devices. These are made and removed in the drive's turn, in which a tree
// is opened, too.

// Keep opens a tree of which the kernel has legs, so that its space is known and given back where that can be. It
// stays open until it has none.
func (d *Disk) Keep(tree string) error {
	return d.inTurn(func() error { return d.held.within(tree, func(*openTree) error { return nil }) })
}

// leaveTrees closes the trees that are kept, side by side. The process ends, and no leg is in use any more. When ctx
// ends, those on drives that hang go on being closed.
func (d *Drives) leaveTrees(ctx context.Context) error {
	d.mu.Lock()
	all := slices.Collect(maps.Values(d.held))
	d.mu.Unlock()
	ends := make(chan error, len(all))
	for _, h := range all {
		go func() { ends <- h.leaveKept() }()
	}
	var errs []error
	for range all {
		select {
		case err := <-ends:
			errs = append(errs, err)
		case <-ctx.Done():
			return errors.Join(append(errs, fmt.Errorf("a tree is still open: %w", context.Cause(ctx)))...)
		}
	}
	return errors.Join(errs...)
}

// leaveKept closes the trees that are open for their pins alone.
func (h *held) leaveKept() error {
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	h.trees.mu.Lock()
	open := maps.Clone(h.trees.open)
	h.trees.mu.Unlock()
	var errs []error
	for name, t := range open {
		if len(t.legs) == 0 && !t.reclaiming {
			errs = append(errs, h.shut(name, t))
		}
	}
	return errors.Join(errs...)
}

// pin has a leg's data stay where it is, finds out where that is, and has that made known to the kernel. If that
// fails, there is no pin, unless the kernel knows of it all the same.
func (d *Drives) pin(n block.DeviceNumber, id string, leg block.LegID, size block.Size, most int, tell func([]mapped.Row) error) (retErr error) {
	device, err := d.Device(n)
	if err != nil {
		return err
	}
	h := device.(*lent).held
	defer func() { retErr = errors.Join(retErr, device.Close()) }() // the tree has its own
	t, err := h.beginPin(id, leg)
	if err != nil {
		return err
	}
	rows, err := t.Rows(leg.UUID, size, most) // looks at all of the leg, so others have their turn meanwhile
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	switch {
	case h.trees.get(id) != t || !slices.Contains(t.Pinned(), leg.UUID):
		return cmp.Or(err, errors.New("its tree was closed meanwhile"))
	case err == nil:
		if err = h.mark(true); err == nil {
			err = tell(rows)
		}
	}
	if err != nil {
		err = errors.Join(err, h.keepPins(id, t))
	}
	return errors.Join(err, h.closeTree(id))
}

// beginPin opens a tree for a pin, which keeps it open.
func (h *held) beginPin(id string, leg block.LegID) (*openTree, error) {
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	t, err := h.openTree(id)
	if err != nil {
		return nil, err
	}
	if err := t.Pin(leg.UUID); err != nil {
		return nil, errors.Join(err, h.closeTree(id))
	}
	return t, nil
}

// mark has the drive's label say whether the kernel may read its trees. It writes nothing if the label says so.
func (h *held) mark(pinned bool) error {
	label := h.label.Load()
	if label == nil {
		return fs.ErrClosed
	}
	if !pinned && !label.Label().Pinned { // if it does say so on the drive, that does no harm
		return nil
	}
	return label.Update(func(l *drive.Label) error { l.Pinned = pinned; return nil })
}

// markAs is mark, if these are the trees of the legs in the kernel. That the label says so without need is no error.
func (h *held) markAs(trees map[block.LegID]string) error {
	err := h.mark(len(trees) > 0)
	if err != nil && len(trees) == 0 {
		h.drives.log.Warn("the label still says that the kernel reads the drive's trees", "err", err)
		return nil
	}
	return err
}

// unpin calls forget, which removes the devices of a leg, and then lets the leg go. What was deleted meanwhile is
// given back.
func (d *Drives) unpin(n block.DeviceNumber, id string, leg block.LegID, forget func() error) error {
	d.mu.Lock()
	h := d.held[n]
	d.mu.Unlock()
	if h == nil {
		return forget()
	}
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	if err := forget(); err != nil {
		return err
	}
	var err error
	if t := h.trees.get(id); t != nil {
		t.Unpin(leg.UUID)
		if t.Reclaimable() {
			h.reclaim(id, t)
		}
		err = h.closeTree(id)
	}
	trees, why := h.inKernel()
	if why == nil {
		why = h.markAs(trees)
	}
	if err = errors.Join(err, why); err != nil {
		h.drives.log.Warn("what the kernel has read is not let go of", "leg", leg, "tree", id, "err", err)
	}
	return nil
}

// keepPins has those legs of an open tree pinned of which the kernel has rows, and no others, and has the label say
// so. The caller has the turn.
func (h *held) keepPins(name string, t *openTree) error {
	trees, err := h.inKernel()
	for _, object := range t.Pinned() {
		if err == nil && trees[block.LegID{UUID: object}] != name {
			t.Unpin(object)
		}
	}
	for leg, in := range trees {
		if in == name {
			err = cmp.Or(err, t.Pin(leg.UUID))
		}
	}
	if err == nil {
		err = h.markAs(trees)
	}
	if err != nil {
		return fmt.Errorf("legs of tree %s in the kernel: %w", name, err)
	}
	if h.trees.get(name) == t && t.Reclaimable() {
		h.reclaim(name, t)
	}
	return nil
}

// inKernel lists the legs on the drive of which the kernel has rows, and their trees. The caller has the turn.
func (h *held) inKernel() (map[block.LegID]string, error) {
	if h.drives.rows == nil { // the drive is held exclusively, so the kernel has no device on it
		return nil, nil
	}
	return h.drives.rows.of(h.number)
}

// kernelHas reports whether the kernel has legs of a tree. The caller has the turn.
func (h *held) kernelHas(name string) (bool, error) {
	trees, err := h.inKernel()
	return slices.Contains(slices.Collect(maps.Values(trees)), name), err
}

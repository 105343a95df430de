// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

// The legs of a volume that began as a snapshot are flattened in the background, while hosts use them; see
// package mapped. Nothing is noted on the label: the layers say how far that is, and who is told again goes
// on from there. It ends with the last leg of the tree that is in use, and with the process.

const (
	// flattenSpare is what flattening leaves free in a tree for those who write. It is less than what a
	// tree has when it gets an extent of the reserve, so flattening alone makes a tree grow.
	flattenSpare = spareSpace / 2
	// roomEvery is how often flattening without space looks for some.
	roomEvery = 200 * time.Millisecond
)

// Flattening says how far the legs of a volume in a tree are from needing nothing of others.
type Flattening struct {
	Left  block.Size // that has not been looked at; at first it is not known, and 0
	Waits string     // what it waits for, or why it was given up; empty: it goes on
	Busy  bool       // it has not been given up
}

// flattening is the work for one volume in a tree.
type flattening struct {
	now    Flattening // guarded by trees.mu
	cancel context.CancelFunc
}

// Flatten begins to make the legs of a volume in a tree independent of those of others, at most rate
// bytes a second. It goes on in the background; Trees tells how far it is.
func (d *Disk) Flatten(volume block.VolumeID, tree string, rate block.Size) error {
	return d.inTurn(func() error {
		open := d.held.trees.get(tree)
		if open == nil {
			return fmt.Errorf("flatten volume %v in tree %s: %w", volume, tree, fs.ErrNotExist)
		}
		d.held.flatten(tree, open, volume, rate)
		return nil
	})
}

// StopFlattening ends what Flatten began. What is copied stays.
func (d *Disk) StopFlattening(volume block.VolumeID, tree string) error {
	return d.inTurn(func() error {
		t := &d.held.trees
		t.mu.Lock()
		defer t.mu.Unlock()
		if open := t.open[tree]; open != nil && open.flattening[volume] != nil {
			open.flattening[volume].cancel()
		}
		return nil
	})
}

// flatten is Flatten. The caller has the turn.
func (h *held) flatten(name string, t *openTree, volume block.VolumeID, rate block.Size) {
	h.trees.mu.Lock()
	defer h.trees.mu.Unlock()
	if f := t.flattening[volume]; f != nil && f.now.Busy || !h.drives.begin() {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	if t.flattening == nil {
		t.flattening = map[block.VolumeID]*flattening{}
	}
	f := &flattening{Flattening{Busy: true}, cancel}
	t.flattening[volume] = f
	go func() {
		defer h.drives.background.Done()
		defer cancel()
		go func() {
			select {
			case <-h.drives.ending:
				cancel()
			case <-ctx.Done():
			}
		}()
		h.flattened(ctx, name, t, volume, f, h.flattenAll(ctx, t, volume, f, rate))
	}()
}

// flattenAll is the work. A tree that is full is waited for.
func (h *held) flattenAll(ctx context.Context, t *openTree, volume block.VolumeID, f *flattening, rate block.Size) error {
	begun, done := time.Now(), int64(0)
	pace := func(ctx context.Context, n, left int64) error {
		for {
			if err := t.Err(); err != nil {
				return err
			}
			room := t.Space().Free >= flattenSpare
			h.tell(f, func(now *Flattening) {
				if now.Left, now.Waits = block.Size(left), ""; !room {
					now.Waits = noRoom
				}
			})
			if room {
				break
			}
			if err := sleep(ctx, roomEvery); err != nil {
				return err
			}
		}
		wait := time.Duration(done*int64(time.Second)/int64(max(rate, 1))) - time.Since(begun)
		done += n
		return sleep(ctx, wait)
	}
	for {
		err := t.Tree.Flatten(ctx, h.ownedBy(volume), pace)
		if !errors.Is(err, block.ErrFull) {
			return err
		}
		h.tell(f, func(now *Flattening) { now.Waits = noRoom })
		if err := sleep(ctx, roomEvery); err != nil {
			return err
		}
	}
}

const noRoom = "space: what is left on the drive is kept for what hosts write"

// sleep waits, unless ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// tell changes what Trees says of a flattening.
func (h *held) tell(f *flattening, change func(*Flattening)) {
	h.trees.mu.Lock()
	defer h.trees.mu.Unlock()
	change(&f.now)
}

// flattened ends the flattening of a volume. What nobody needs any more comes free.
func (h *held) flattened(ctx context.Context, name string, t *openTree, volume block.VolumeID, f *flattening, err error) {
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	h.tell(f, func(now *Flattening) {
		now.Busy, now.Waits = false, ""
		if err != nil && ctx.Err() == nil && !errors.Is(err, block.ErrGone) {
			now.Waits = err.Error()
		}
	})
	if err == nil {
		h.trees.mu.Lock()
		delete(t.flattening, volume)
		h.trees.mu.Unlock()
	}
	if h.trees.get(name) == t && t.Reclaimable() {
		h.reclaim(name, t)
	}
}

// ownedBy is OwnedBy of the drive's label as it is. One that the label does not have belongs to nobody.
func (h *held) ownedBy(volume block.VolumeID) func() func(block.UUID) bool {
	return func() func(block.UUID) bool {
		if opened := h.label.Load(); opened != nil {
			return OwnedBy(opened.Label(), volume)
		}
		return func(block.UUID) bool { return false }
	}
}

// OwnedBy says which legs belong to a volume or to a snapshot of it, by a drive's label.
func OwnedBy(l *drive.Label, volume block.VolumeID) func(block.UUID) bool {
	own := map[string]bool{}
	for _, leg := range l.Legs {
		v := leg.GetVolume()
		own[leg.GetLegId()] = v.GetVolumeId() == volume.String() || v.GetSnapshot().GetVolumeId() == volume.String()
	}
	return func(object block.UUID) bool { return own[block.LegID{UUID: object}.String()] }
}

// Flat reports whether a leg in a tree, and those of its volume and of its volume's snapshots there, need
// nothing of others', by the drive's label.
func (s TreeSeen) Flat(l *drive.Label, volume block.VolumeID, leg block.LegID) bool {
	there := slices.ContainsFunc(s.Layers, func(x mapped.Layer) bool { return x.Object == leg.UUID && x.State != mapped.StateDoomed })
	return there && mapped.Inheriting(s.Layers, OwnedBy(l, volume)) == 0
}

// flatteningNow is what Trees says. The caller holds trees.mu.
func (t *openTree) flatteningNow() map[block.VolumeID]Flattening {
	if len(t.flattening) == 0 {
		return nil
	}
	all := map[block.VolumeID]Flattening{}
	for volume, f := range t.flattening {
		all[volume] = f.now
	}
	return all
}

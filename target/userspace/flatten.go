// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

// The legs of a volume that began as a snapshot are flattened in the background, while hosts use them; see
// package mapped. Nothing is noted on the label: the layers say how far that is, and who is told again goes
// on from there. It ends with the last leg of the tree that is in use, and with the process.

const (
	// FlattenSpare is what flattening, and copies of snapshots, leave free in a tree for those who write. It is more than a tree has
	// that gets an extent of the reserve for them, so flattening alone never makes it get one.
	FlattenSpare = 96 * block.MiB
	// roomEvery is how often flattening without space looks for some.
	roomEvery = 200 * time.Millisecond
	// tryAgain is how long flattening pauses that could not copy all; each time twice as long, up to
	// tryAgainMost.
	tryAgain     = 10 * time.Second
	tryAgainMost = time.Minute
)

// Flattening says how far the legs of a volume in a tree are from needing nothing of others.
type Flattening struct {
	Left  block.Size // that has not been looked at; at first it is not known, and 0
	Waits string     // what it waits for, or what it could not copy; empty: it goes on
	Full  bool       // it waits for space
	Busy  bool       // it has not ended
}

// flattening is the work for one volume in a tree.
type flattening struct {
	now    Flattening // guarded by trees.mu
	cancel context.CancelFunc
}

// Flatten begins to make the legs of a volume in a tree independent of those of others. All that is copied in
// the background on the drive is at most rate bytes a second. It goes on until it is done or stopped; Trees
// tells how far it is.
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
	if t.flattening[volume] != nil || !h.drives.begin() {
		return
	}
	ctx, cancel := h.drives.untilStop()
	if t.flattening == nil {
		t.flattening = map[block.VolumeID]*flattening{}
	}
	f := &flattening{Flattening{Busy: true}, cancel}
	t.flattening[volume] = f
	go func() {
		defer h.drives.background.Done()
		defer cancel()
		if err := h.flattenAll(ctx, t, volume, f, rate); err != nil && ctx.Err() == nil && !errors.Is(err, block.ErrGone) {
			h.drives.log.Warn("flattening has ended early; it begins again when its tree is open again", "volume", volume, "tree", name, "err", err)
		}
		h.flattened(name, t, volume)
	}()
}

// flattenAll is the work. Space is waited for. What cannot be copied is tried again now and then: a host may
// write it anew, or discard it.
func (h *held) flattenAll(ctx context.Context, t *openTree, volume block.VolumeID, f *flattening, rate block.Size) error {
	failed := "" // why the last round was
	pace := func(ctx context.Context, n, left int64) error {
		if err := h.findRoom(ctx, t, f, block.Size(left), failed); err != nil {
			return err
		}
		return h.copying.wait(ctx, n, rate)
	}
	for pause := tryAgain; ; {
		err := t.Tree.Flatten(ctx, h.ownedBy(volume), pace)
		wait := roomEvery
		switch {
		case err == nil || ctx.Err() != nil || t.Err() != nil || errors.Is(err, block.ErrGone):
			return err
		case errors.Is(err, mapped.ErrPinned):
			h.tell(f, func(now *Flattening) { now.Waits, now.Full = kernelReads, false })
			wait = lookAgain
		case errors.Is(err, block.ErrFull):
			h.tell(f, func(now *Flattening) { now.Waits, now.Full = noRoom, true })
		default:
			failed = err.Error()
			h.tell(f, func(now *Flattening) { now.Waits, now.Full = failed, false })
			wait, pause = pause, min(2*pause, tryAgainMost)
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// findRoom waits until a tree has more than what is left to those who write.
func (h *held) findRoom(ctx context.Context, t *openTree, f *flattening, left block.Size, failed string) error {
	for {
		if err := t.Err(); err != nil {
			return err
		}
		free, err := t.Room(FlattenSpare)
		if err != nil {
			return err
		}
		full := free < FlattenSpare
		h.tell(f, func(now *Flattening) {
			if now.Left, now.Waits, now.Full = left, failed, full; full {
				now.Waits = noRoom
			}
		})
		if !full {
			return nil
		}
		if err := sleep(ctx, roomEvery); err != nil {
			return err
		}
	}
}

// pace bounds what is copied in the background on a drive, whoever copies. Time in which nothing is copied is
// not made up for.
type pace struct {
	mu     sync.Mutex
	copied int64 // what was copied last
	at     time.Time
}

// paceSlack is how much a copy that is late may be made up for.
const paceSlack = 100 * time.Millisecond

// wait returns when n more bytes may be copied, so that they are rate bytes a second at most.
func (p *pace) wait(ctx context.Context, n int64, rate block.Size) error {
	for {
		wait := p.take(n, rate)
		if err := sleep(ctx, wait); err != nil || wait <= 0 {
			return err
		}
	}
}

// take takes the right to copy n bytes, or says for how long nobody has it.
func (p *pace) take(n int64, rate block.Size) (wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	next := p.at.Add(time.Duration(p.copied * int64(time.Second) / int64(max(rate, 1))))
	if next.After(now) {
		return next.Sub(now)
	}
	if earliest := now.Add(-paceSlack); next.Before(earliest) {
		next = earliest
	}
	p.at, p.copied = next, n
	return 0
}

const (
	// kernelReads: the kernel has a leg of the volume, or of one of its snapshots. Flattening looks again every lookAgain.
	kernelReads = "hosts that read it, or a snapshot of it, to let go of that: the kernel serves them"
	lookAgain   = 2 * time.Second
)

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
func (h *held) flattened(name string, t *openTree, volume block.VolumeID) {
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	h.trees.mu.Lock()
	delete(t.flattening, volume) // if the tree has stopped, that says why
	h.trees.mu.Unlock()
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

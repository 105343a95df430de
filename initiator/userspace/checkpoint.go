// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/engine"
)

// The targets' lists of writes are what the next host compares if this one crashes. A
// checkpoint shortens them: once a second while there are writes, or sooner if these have
// touched checkpointSize of a column.
const (
	checkpointEvery = time.Second
	checkpointSize  = 256 * block.MiB
	checkpointIdle  = 10 * time.Second // without writes: a target may have begun a new list
	checkpointRetry = time.Second
	refusedRetry    = time.Minute // a target may be upgraded

	lookBusy = 50 * time.Millisecond // how often a column with writes is looked at
	lookIdle = 250 * time.Millisecond

	targetTimeout = 2 * time.Second // for an answer about a leg's list
	listTimeout   = 5 * time.Second // for a leg's list
)

// tracking is a leg whose target lists what is written to it.
type tracking interface {
	Checkpoint(ctx context.Context, commit bool, token uint64) error
	CheckpointBehind(ctx context.Context, commit bool, token uint64, behind nvmetcp.Behind) error
	Written(ctx context.Context) (nvmetcp.WrittenLog, error)
}

// tracking returns the leg behind the keeper's wrappers, or an error if its target keeps no
// list.
func trackingOf(d block.Device) (tracking, error) {
	if leg, ok := d.(device); ok {
		d = leg.Device
	}
	if leg, ok := d.(legDevice); ok {
		d = leg.Device
	}
	if t, ok := d.(tracking); ok {
		return t, nil
	}
	return nil, fmt.Errorf("list the writes to a leg: %w", block.ErrUnsupported)
}

// startCheckpoints begins to take checkpoints. The copies must be equal.
func (k *Keeper) startCheckpoints(ctx context.Context) {
	st := k.stack
	if st.wanted.ReadOnly || st.wanted.Layout.Copies == 1 {
		return
	}
	ctx, st.stopCheckpoints = context.WithCancel(ctx)
	for column := range st.wanted.Layout.Stripes {
		c := &checkpoints{volume: st.volume, column: column, since: st.since[column], log: k.log}
		if incomplete(st, column) {
			st.listed[column] = &columnLists{}
			c.first = func() { k.keepLists(ctx, st, column) }
		}
		go c.run(ctx)
	}
}

// columnLists are the lists of a column's legs in sync, from before the first checkpoint of this
// volume. With them, and with its own, it is known what a stale leg lacks.
type columnLists struct {
	known bool // otherwise the targets are being asked
	lists []checkpoint.List
	err   error
}

// incomplete reports whether a column has a leg that is not in sync. A leg that no host can be
// given at present is not among the links.
func incomplete(st *stack, column int) bool {
	inSync := membersInSync(st.volume, column)
	return len(inSync) < st.wanted.Layout.Copies || slices.ContainsFunc(st.wanted.Links, func(l volume.Link) bool {
		return l.Column == column && !slices.ContainsFunc(inSync, func(m checkpoint.Member) bool { return m.Copy == l.Copy })
	})
}

// keepLists asks for the lists of a column, and tells the keeper.
func (k *Keeper) keepLists(ctx context.Context, st *stack, column int) {
	lists, err := listsOf(ctx, st.volume, column)
	k.Tell(func() { st.listed[column] = &columnLists{known: true, lists: lists, err: err} })
}

// checkpoints takes the checkpoints of a column.
type checkpoints struct {
	volume *engine.Volume
	column int
	since  []atomic.Uint64 // see checkpoint.Behind, by copy
	first  func()          // to be done before the first checkpoint; nil: nothing
	log    *slog.Logger

	last    moment    // of the last checkpoint
	seen    uint64    // written, at the last look
	next    time.Time // after a failure
	refused bool      // the last one was
}

// moment is the state of a column when a checkpoint began.
type moment struct {
	at      time.Time
	written uint64
	members []checkpoint.Member
}

func (c *checkpoints) run(ctx context.Context) {
	if c.first != nil {
		c.first()
	}
	look := time.NewTimer(0)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		now := moment{time.Now(), c.volume.Written(c.column), c.volume.Members(c.column)}
		if c.due(now) {
			c.take(ctx, now)
		}
		pause := lookIdle
		if now.written != c.seen {
			pause = lookBusy
		}
		c.seen = now.written
		look.Reset(beat.Pause(pause))
	}
}

// due reports whether a checkpoint should be taken.
func (c *checkpoints) due(now moment) bool {
	since := now.at.Sub(c.last.at)
	switch {
	case len(now.members) < 2: // a single copy differs from no other
		return false
	case now.at.Before(c.next):
		return false
	case !slices.Equal(now.members, c.last.members):
		return true
	case now.written-c.last.written >= uint64(checkpointSize):
		return true
	case now.written != c.last.written:
		return since >= checkpointEvery
	}
	return since >= checkpointIdle
}

func (c *checkpoints) take(ctx context.Context, now moment) {
	members, err := checkpoint.Take(ctx, c, checkpoint.Token(rand.Uint64()|1))
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, block.ErrUnsupported):
		if c.next = time.Now().Add(refusedRetry); !c.refused {
			c.log.Info("no checkpoints are taken: a leg's target keeps no list of writes for this host; after a crash the copies will be compared whole", "column", c.column, "err", err)
		}
		c.refused = true
	case err != nil:
		c.next = time.Now().Add(checkpointRetry)
		c.log.Debug("checkpoint not taken", "column", c.column, "err", err)
	default:
		c.last, c.refused = now, false
		c.last.members = members
	}
}

// Members implements checkpoint.Column.
func (c *checkpoints) Members() []checkpoint.Member { return c.volume.Members(c.column) }

// Settle implements checkpoint.Column.
func (c *checkpoints) Settle(ctx context.Context) error { return c.volume.Settle(ctx, c.column) }

// Begin implements checkpoint.Column.
func (c *checkpoints) Begin(ctx context.Context, m checkpoint.Member, token checkpoint.Token) error {
	return c.tell(ctx, m, false, token, nvmetcp.Behind{})
}

// Commit implements checkpoint.Column.
func (c *checkpoints) Commit(ctx context.Context, m checkpoint.Member, token checkpoint.Token) error {
	behind := nvmetcp.Behind{Since: c.since[m.Copy].Load()}
	if m.Copying {
		lacks, given := c.volume.Behind(c.column, m.Copy, nvmetcp.MostBehind)
		if !given {
			return checkpoint.ErrChanged
		}
		for _, r := range lacks {
			behind.Ranges = append(behind.Ranges, [2]int64{r.Off, r.End})
		}
	}
	return c.tell(ctx, m, true, token, behind)
}

func (c *checkpoints) tell(ctx context.Context, m checkpoint.Member, commit bool, token checkpoint.Token, behind nvmetcp.Behind) error {
	t, err := trackingOf(c.volume.Device(c.column, m.Copy))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, targetTimeout)
	defer cancel()
	if m.Copying {
		err := t.CheckpointBehind(ctx, commit, uint64(token), behind)
		if err != nil { // a checkpoint does not fail because of it
			c.log.Debug("a target was not told what a leg lacks", "column", c.column, "copy", m.Copy, "err", err)
		}
		return err
	}
	return t.Checkpoint(ctx, commit, uint64(token))
}

// unequal finds the parts of each column in which the copies may differ. The second result
// says why some are to be compared whole; empty: none is. An error means that a target has
// not answered, and may yet.
func unequal(ctx context.Context, v *engine.Volume, columns int) (parts []engine.Part, whole string, err error) {
	for column := range columns {
		lists, err := listsOf(ctx, v, column)
		var status nvmetcp.Status
		switch {
		case errors.Is(err, block.ErrUnsupported), errors.As(err, &status):
			err = fmt.Errorf("a target keeps no list of writes: %w", err)
		case err != nil:
			return nil, "", err
		default:
			var ranges []checkpoint.Range
			if ranges, err = checkpoint.Unequal(lists); err == nil {
				parts = append(parts, engine.Part{Known: true, Ranges: ranges})
				continue
			}
		}
		parts = append(parts, engine.Part{})
		if whole == "" {
			whole = err.Error()
		}
	}
	return parts, whole, nil
}

// listsOf asks all targets of a column's legs in sync at once.
func listsOf(ctx context.Context, v *engine.Volume, column int) ([]checkpoint.List, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	members := membersInSync(v, column)
	lists, errs := make([]checkpoint.List, len(members)), make(chan error, len(members))
	for i, m := range members {
		go func() {
			var err error
			lists[i], err = listOf(ctx, v.Device(column, m.Copy))
			errs <- err
		}()
	}
	var failed error
	for range members {
		failed = errors.Join(failed, <-errs)
	}
	return lists, failed
}

// membersInSync are the legs of a column that are in sync.
func membersInSync(v *engine.Volume, column int) []checkpoint.Member {
	return slices.DeleteFunc(v.Members(column), func(m checkpoint.Member) bool { return m.Copying })
}

func listOf(ctx context.Context, d block.Device) (checkpoint.List, error) {
	t, err := trackingOf(d)
	if err != nil {
		return checkpoint.List{}, err
	}
	l, err := t.Written(ctx)
	if err != nil {
		return checkpoint.List{}, err
	}
	list := checkpoint.List{Committed: checkpoint.Token(l.Committed), Begun: checkpoint.Token(l.Begun), Region: block.Size(l.Region), Words: l.Regions}
	if l.Behind != nil {
		list.Behind = &checkpoint.Behind{Since: l.Behind.Since}
		for _, r := range l.Behind.Ranges {
			list.Behind.Ranges = append(list.Behind.Ranges, checkpoint.Range{Off: r[0], End: r[1]})
		}
	}
	return list, nil
}

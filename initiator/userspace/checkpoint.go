// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/engine"
)

// trackingOf returns the leg behind the keeper's wrappers, or an error if its target keeps no list.
func trackingOf(d block.Device) (lists.Leg, error) {
	if leg, ok := d.(device); ok {
		d = leg.Device
	}
	if leg, ok := d.(legDevice); ok {
		if leg.lists != nil {
			return leg.lists, nil
		}
		d = leg.Device
	}
	if t, ok := d.(lists.Leg); ok {
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
		c := &checkpoints{volume: st.volume, column: column, since: st.since[column], pace: lists.Pace{Log: k.log.With("column", column)}}
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
	all, err := listsOf(ctx, st.volume, column)
	k.Tell(func() { st.listed[column] = &columnLists{known: true, lists: all, err: err} })
}

// checkpoints takes the checkpoints of a column.
type checkpoints struct {
	volume *engine.Volume
	column int
	since  []atomic.Uint64 // see checkpoint.Behind, by copy
	first  func()          // to be done before the first checkpoint; nil: nothing
	pace   lists.Pace
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
		now := lists.Moment{At: time.Now(), Written: c.volume.Written(c.column), Members: c.volume.Members(c.column)}
		look.Reset(beat.Pause(c.pace.Look(ctx, now, c)))
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
		behind = lists.Behind(behind.Since, lacks)
	}
	return c.tell(ctx, m, true, token, behind)
}

func (c *checkpoints) tell(ctx context.Context, m checkpoint.Member, commit bool, token checkpoint.Token, behind nvmetcp.Behind) error {
	t, err := trackingOf(c.volume.Device(c.column, m.Copy))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, lists.TargetTimeout)
	defer cancel()
	if m.Copying {
		err := t.CheckpointBehind(ctx, commit, uint64(token), behind)
		if err != nil { // a checkpoint does not fail because of it
			c.pace.Log.Debug("a target was not told what a leg lacks", "copy", m.Copy, "err", err)
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
		all, err := listsOf(ctx, v, column)
		switch {
		case lists.None(err):
			err = fmt.Errorf("a target keeps no list of writes: %w", err)
		case err != nil:
			return nil, "", err
		default:
			var ranges []checkpoint.Range
			if ranges, err = checkpoint.Unequal(all); err == nil {
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
	ctx, cancel := context.WithTimeout(ctx, lists.ListTimeout)
	defer cancel()
	var legs []lists.Leg
	for _, m := range membersInSync(v, column) {
		leg, err := trackingOf(v.Device(column, m.Copy))
		if err != nil {
			return nil, err
		}
		legs = append(legs, leg)
	}
	return lists.OfAll(ctx, legs)
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
	return lists.Of(ctx, t)
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"fmt"
	"time"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm/mirror"
)

// This file makes the copies of a column equal after a client's crash, before its tables exist: only where
// the targets say that something was written since the last checkpoint. If they do not know, the tables do
// it, and copy everything.

// madeEqual is an attempt to make the copies of a column equal.
type madeEqual struct {
	of     string // the legs, as they are attached now
	under  bool
	failed int
	again  time.Time
	done   bool
	whole  string // why all of it has to be copied; empty: the copies are equal
}

// readyToBuild makes the copies of a column equal if it is to be built from copies that may differ, and
// returns volume.ErrLater until that has been done or given up.
func (k *kernelKeeper) readyToBuild(ctx context.Context, s *seen, o volume.SetColumn) error {
	if !o.Want.Equalize || s.columns[o.Column].Kind != mirror.ShapeNothing {
		return nil
	}
	legs, heads, of := k.legsToEqualize(s, o)
	e := k.lists.equal[o.Column]
	if e == nil || e.of != of && !e.under {
		e = &madeEqual{of: of}
		k.lists.equal[o.Column] = e
	}
	switch {
	case e.under, e.of != of, !e.done && s.Now.Before(e.again):
		return volume.ErrLater
	case e.done:
		return nil
	}
	e.under = true
	last, size := e.failed >= lists.Attempts-1, int64(o.Want.Size)
	go func() {
		whole, compared, err := k.makeEqual(ctx, legs, heads, size)
		k.Tell(func() {
			e.under = false
			switch {
			case ctx.Err() != nil:
				return
			case err != nil && !last:
				e.failed, e.again = e.failed+1, time.Now().Add(keeper.RetryInterval)
				k.log.Warn("copies could not be made equal; trying again", "column", o.Column, "err", err)
			case err != nil:
				whole = err.Error()
				fallthrough
			default:
				e.done, e.whole = true, whole
				k.log.Info("copies compared", "column", o.Column, "read", compared.Read, "copied", compared.Copied, "whole_because", whole)
			}
			k.Poke()
		})
	}()
	return volume.ErrLater
}

// legsToEqualize are the copies in sync from which a column is to be built.
func (k *kernelKeeper) legsToEqualize(s *seen, o volume.SetColumn) (legs []lists.Leg, heads []fabrics.Head, of string) {
	for copy, want := range o.Want.Copies {
		l := k.link(o.Column, copy)
		if want.State != volume.InSync || l == nil {
			continue
		}
		leg := s.legs[l.Leg]
		legs, heads = append(legs, k.listsOfLeg(l)), append(heads, leg.head)
		of += fmt.Sprintf("%v on %s, ", l.UUID, leg.device)
	}
	return legs, heads, of
}

// makeEqual asks the targets where copies may differ, and makes them equal there. The result says why
// everything has to be copied instead; an error, that it may be tried again.
func (k *kernelKeeper) makeEqual(ctx context.Context, legs []lists.Leg, heads []fabrics.Head, size int64) (whole string, done fabrics.Compared, err error) {
	if len(legs) < 2 {
		return "", done, nil
	}
	asking, cancel := context.WithTimeout(ctx, lists.ListTimeout)
	defer cancel()
	all, err := lists.OfAll(asking, legs)
	switch {
	case lists.None(err):
		return "a target keeps no list of writes: " + err.Error(), done, nil
	case err != nil:
		return "", done, fmt.Errorf("ask the targets what was written: %w", err)
	}
	ranges, err := checkpoint.Unequal(all)
	if err != nil {
		return err.Error(), done, nil
	}
	var within [][2]int64
	for _, r := range ranges {
		if r.Off < size {
			within = append(within, [2]int64{r.Off, min(r.End, size)})
		}
	}
	done, err = k.kernel.host.MakeEqual(ctx, heads, within)
	return "", done, err
}

// madeEqual reports whether the copies from which a column is to be built are equal already.
func (k *kernelKeeper) madeEqual(column int) bool {
	e := k.lists.equal[column]
	return e != nil && e.done && e.whole == ""
}

// wholeBecause says why columns that are made equal now are copied whole.
func (k *kernelKeeper) wholeBecause() string {
	for _, e := range k.lists.equal {
		if e.done && e.whole != "" {
			return e.whole
		}
	}
	return ""
}

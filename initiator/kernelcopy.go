// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// This file finds out what a leg lacks where the log of its column does not know, so that the mirror need not
// copy all of it:
//
//  1. Unless the column has a log already, that begins clean, and has what the leg misses from now on
//     (mirror.Column.FromNow). The leg has no slot in the notes meanwhile, so nobody takes that for all that it lacks.
//  2. The targets are asked what it lacked before: for their lists of writes (package raid/checkpoint), and for
//     where a thin leg has data.
//  3. The agent copies that to the leg (kernelahead.go).
//  4. If the log has much by then, another one begins, and the agent copies what the first one has (kernelbehind.go).
//  5. The leg joins, with a log that has the last one and what is left (mirror.Column.Lacked).
//
// What is asked after the log has begun cannot miss a write: one from before is on the legs in sync, and in their
// lists, and a later one is in the log. The answer counts only for this log, until its tables change. Whatever is not
// found out leads to a copy of everything.

// askFor bounds how long targets are asked, and askForEach how much longer for each TiB. Until then the leg waits, and
// users do not.
const (
	askFor     = 30 * time.Second
	askForEach = 30 * time.Second
)

// What a copy waits for before it begins.
const (
	discardsToEnd = "users' discards under way to end; they can begin no others until it has all data"
	targetsToSay  = "targets to say what it lacks; if they do not, all of it is copied"
)

// awaits says what a copy was waiting for when its column was planned last.
type awaits struct {
	leg  block.LegID
	what string // for people
	at   time.Time
}

// of says what the copy to a leg waits for; empty: nothing, or that is not known.
func (a awaits) of(l *volume.Link, now time.Time) string {
	if l == nil || !l.Rebuilding || l.Leg != a.leg || now.Sub(a.at) > awaitsFor {
		return ""
	}
	return a.what
}

// awaitsFor is how long that counts. A column is planned at each look, as long as nothing is in its way.
const awaitsFor = 5 * time.Second

// copyBegin is how a copy to a leg begins.
type copyBegin struct {
	copy     int
	waits    string           // for what, for people; nothing else that the column needs waits for that. Empty: it begins
	begun    bool             // the log has what the leg misses since some time
	logged   bool             // it has all writes that the leg misses, but not what was discarded meanwhile
	asks     bool             // the targets are asked what it lacks beside that
	all      bool             // everything is copied, whatever the log has
	track    bool             // first, the log begins with what the leg misses from now on
	anew     bool             // first, another log begins with that, and what the leg lacks beside it is known
	lacked   *mirror.LogImage // what it lacked before; nil: the log has it, or it lacks everything
	revision uint64           // with anew: the leg's
	log      dm.Ref           // with anew: the log that begins; with lacked: the one that gets both
	before   block.Size       // how much was copied before it joins; with anew: how much the log has
	ahead    bool             // that is under way, so it waits
	whole    uint64           // as in volume.CopySeen
	what     string           // what is copied, for people
	data     string           // the same if that is where there is data
}

// apply changes a wanted column, and what is remembered of its copies, to what begins.
func (b *copyBegin) apply(t *mirror.Column, slots []slot) {
	switch {
	case b == nil || b.waiting():
		return
	case b.track:
		t.Legs[b.copy].State, t.FromNow, t.Full = mirror.Tracked, true, false
		slots[b.copy] = slot{}
		return
	case b.anew:
		t.Legs[b.copy].State, t.FromNow, t.Full, t.Log = mirror.Tracked, true, false, b.log
		slots[b.copy].More, slots[b.copy].Dirty, slots[b.copy].Begun = true, b.before, b.revision
	case b.lacked != nil:
		t.Lacked, t.Log, t.Full = b.lacked, b.log, false
	case b.all:
		t.Full = true
	}
	slots[b.copy].Whole, slots[b.copy].What = b.whole, b.what
}

// waiting reports whether it does not begin yet.
func (b *copyBegin) waiting() bool { return b != nil && (b.waits != "" || b.ahead) }

// logs are those of a column with the one that is written.
func (b *copyBegin) logs(l logs) logs {
	if b != nil && b.log != "" {
		l.spare.device = b.log
	}
	return l
}

// joins is the copy to which a column is to be copied, and is not yet; nil if there is none.
func (k *kernelKeeper) joins(s *seen, o volume.SetColumn) (copy int, l *volume.Link) {
	copy = slices.IndexFunc(o.Want.Copies, func(c volume.Copy) bool { return c.State == volume.Rebuilding })
	if copy < 0 || o.Retry {
		return copy, nil
	}
	want, seen := o.Want.Copies[copy], s.Columns[o.Column].Copies[copy]
	if l = k.link(o.Column, copy); l == nil || l.Leg != want.Leg || seen.State.InUse() && !want.Anew {
		return copy, nil
	}
	return copy, l
}

// beginCopy says how the copy to a leg begins, nil if none does. It waits until it is known what the leg lacks, or that
// this cannot be known.
func (k *kernelKeeper) beginCopy(ctx context.Context, w *volume.Wanted, s *seen, o volume.SetColumn) *copyBegin {
	copy, l := k.joins(s, o)
	if l == nil {
		return nil
	}
	why, c := o.Want.Copies[copy].Whole, &s.columns[o.Column]
	b := &copyBegin{copy: copy, what: l.Copied(why), whole: l.Revision, data: "what holds data, because " + why}
	b.begun = c.Kind == mirror.ShapeTracked && c.Copy == copy && c.Log == c.log.device // perhaps for another leg: then it has more
	if b.logged = !o.Want.Full; b.logged {
		b.whole = s.Columns[o.Column].Copies[copy].Whole
	}
	b.asks = !b.logged || w.Thin && b.begun && k.discarded()
	switch {
	case w.Thin && !k.noDiscards: // the log would not have those from now on
		if b.waits = discardsToEnd; k.discardsOff {
			k.holdOnce(ctx, s)
		}
	case b.asks || b.begun:
		k.beginKnown(ctx, w, s, o, b, l)
	}
	return k.notBeside(b, o, s.Now)
}

// beginKnown has a copy begin when it is known what the leg lacks.
func (k *kernelKeeper) beginKnown(ctx context.Context, w *volume.Wanted, s *seen, o volume.SetColumn, b *copyBegin, l *volume.Link) {
	switch {
	case b.asks && s.columns[o.Column].ill(): // its errors are to be cleared, which waits for this
		b.everything(l)
	case w.Thin && !b.begun:
		b.track = true
	default:
		k.beginWith(ctx, w, s, o, k.ask(ctx, w, s, o, l, b), b, l)
	}
}

// notBeside has a leg join only when nothing can be written to it beside the tables.
func (k *kernelKeeper) notBeside(b *copyBegin, o volume.SetColumn, now time.Time) *copyBegin {
	if !b.waiting() && !b.track && !k.lastEnded(o.Column, now) {
		b.waits = lastCopyToEnd
	}
	return b
}

// beginWith has a copy begin with what the targets have answered.
func (k *kernelKeeper) beginWith(ctx context.Context, w *volume.Wanted, s *seen, o volume.SetColumn, a *asking, b *copyBegin, l *volume.Link) {
	switch {
	case !a.done:
		b.waits = targetsToSay
		return
	case !b.begun:
		b.track = true
		return
	}
	if a.err != nil {
		k.log.Info("all of a leg is copied", "leg", l.Leg.String(), "why", a.err)
		a.lacked, a.all = lacked{image: mirror.DirtyLog(s.columns[o.Column].Regions()), since: l.Revision, what: b.what}, true
	}
	b.logged = b.logged && !a.all
	left, ended := a.image, true
	if !s.columns[o.Column].ill() { // else its errors are to be cleared, which waits for this
		left, ended = k.copyAhead(ctx, s, o, l, b, a)
	}
	if b.ahead = !ended; b.ahead {
		return
	}
	h := k.lists.ahead[o.Column]
	copied := h != nil && h.of == a
	if k.beginAnew(w, s, o, b, a, left) || b.logged && left.AllClean() && !copied {
		return // in the second case, the log has all
	}
	log, err := k.kernel.makeLog(s.columns[o.Column].spare.file)
	if err != nil {
		k.log.Info("all of a leg is copied", "leg", l.Leg.String(), "why", err)
		b.everything(l)
		return
	}
	if copied {
		b.before, _, _ = h.Progress()
	}
	b.join(a, left, dm.RefTo(log.Number))
}

// join has a leg join with what it lacks.
func (b *copyBegin) join(a *asking, left mirror.LogImage, log dm.Ref) {
	b.lacked, b.log = &left, log
	b.whole, b.what = b.told(a)
}

// told is since when all of a leg is copied that joins with an answer, and what is copied.
func (b *copyBegin) told(a *asking) (since uint64, what string) {
	if b.logged {
		return b.whole, b.what
	}
	return a.since, cmp.Or(a.what, b.data)
}

// everything has all of the leg copied.
func (b *copyBegin) everything(l *volume.Link) {
	b.all, b.whole = true, l.Revision
}

// noteBegin notes, before the log of a column begins clean, that it does not have all that the leg lacks.
func (k *kernelKeeper) noteBegin(column int, b *copyBegin, slots []slot) error {
	if b == nil || !b.track && !b.anew {
		return nil
	}
	was := k.memory.slot(column, b.copy)
	if b.track {
		k.memory.forget(column, b.copy)
		return k.kernel.note(k.volume, k.memory)
	}
	k.memory.setSlot(column, b.copy, slots[b.copy])
	err := k.kernel.note(k.volume, k.memory)
	if err != nil {
		k.memory.setSlot(column, b.copy, was)
	}
	return err
}

// asking is an attempt to find out what a leg lacks.
type asking struct {
	of     string // the leg as it is attached now, and the tables
	giveUp func() // ends it
	done   bool
	all    bool // nobody knows what it lacks: everything is copied
	lacked
}

// lacked is the targets' answer: what a leg lacked when they were asked.
type lacked struct {
	image mirror.LogImage
	since uint64 // see checkpoint.Behind
	what  string // for people; empty: what holds data
	err   error  // why it is not known
}

// ask asks what a leg lacks, unless that is under way or done.
func (k *kernelKeeper) ask(ctx context.Context, w *volume.Wanted, s *seen, o volume.SetColumn, l *volume.Link, b *copyBegin) *asking {
	leg := s.legs[l.Leg]
	of := fmt.Sprintf("%v at %d on %s, log begun %v, logged %v, change %d, %d", l.Leg, l.Revision, leg.device, b.begun, b.logged, k.lists.column(o.Column).changed, k.discardsOn)
	if a := k.lists.asked[o.Column]; a != nil && a.of == of {
		return a
	} else if a != nil {
		a.giveUp() // or it would be in the way of this one
	}
	c, link := &s.columns[o.Column], *l
	t := mirror.Column{Size: c.Size, Region: c.Region}
	q := question{logged: b.logged, leg: k.listsOfLeg(l), believes: link.Believes, revision: l.Revision, host: k.kernel.host, size: int64(c.Size), region: int64(t.RegionSize()), regions: t.Regions()}
	for other, want := range o.Want.Copies {
		source := k.link(o.Column, other)
		if want.State != volume.InSync || source == nil {
			continue
		}
		q.inSync = append(q.inSync, k.listsOfLeg(source))
		if from := s.legs[source.Leg]; w.Thin && (from.fit || q.heads == nil) {
			q.heads = []legSeen{from, leg} // of those in sync, any says it
		}
	}
	a := &asking{of: of, giveUp: func() {}}
	k.lists.asked[o.Column] = a
	behind := mirror.CleanLog(q.regions)
	if b.logged {
		behind, a.err = k.behind(c, o.Column, b.copy)
	}
	if a.image = behind; !b.asks || a.err != nil {
		a.done = true
		return a
	}
	ctx, a.giveUp = context.WithTimeout(ctx, askFor+time.Duration(c.Size/(block.TiB/64))*askForEach/64)
	go func() {
		defer a.giveUp()
		found := q.answer(ctx)
		if found.err == nil {
			found.image, found.err = found.image.Merge(behind)
		}
		k.Tell(func() { a.done, a.lacked = true, found })
		k.Poke()
	}()
	return a
}

// question has whom to ask what a leg lacks, and in which regions the answer is told.
type question struct {
	logged   bool // only what was discarded is to be found out
	leg      lists.Leg
	inSync   []lists.Leg
	believes func(since uint64) bool
	heads    []legSeen // of a leg in sync and of this one, if they know where they have data
	host     host
	revision uint64
	size     int64 // of the column
	region   int64
	regions  uint64
}

// answer asks all who may know, and takes what each of them leaves.
func (q *question) answer(ctx context.Context) lacked {
	found, err := q.listed(ctx)
	if len(q.heads) == 0 || ctx.Err() != nil {
		found.err = err
		return found
	}
	data, dataErr := q.withData(ctx)
	switch {
	case dataErr != nil:
		found.err = err
	case err != nil:
		found = lacked{image: data, since: q.revision}
	default:
		found.image, found.err = found.image.Both(data)
	}
	return found
}

// listed asks for the lists of writes. Where the log has all writes, those of the legs in sync have what was discarded
// since the leg was lost: no checkpoint was taken without it.
func (q *question) listed(ctx context.Context) (found lacked, err error) {
	ctx, cancel := context.WithTimeout(ctx, lists.ListTimeout)
	defer cancel()
	legs := q.inSync
	if !q.logged {
		legs = append(slices.Clip(legs), q.leg)
	}
	var all []checkpoint.List
	err = patiently(ctx, func() (err error) {
		all, err = lists.OfAll(ctx, legs)
		return err
	})
	if err != nil {
		return found, err
	}
	behind := &checkpoint.Behind{}
	if q.logged {
		behind.Ranges, err = checkpoint.Unequal(all)
	} else {
		last := len(all) - 1
		behind, err = lists.Lacks(all[last], all[:last], q.believes)
	}
	if err != nil {
		return found, err
	}
	image := mirror.CleanLog(q.regions)
	for _, r := range behind.Ranges {
		q.mark(image, r.Off, r.End)
	}
	return lacked{image: image, since: behind.Since, what: lists.CopiesOn}, nil
}

// withData asks where a leg in sync or this one has data. Elsewhere both read as zeroes.
func (q *question) withData(ctx context.Context) (mirror.LogImage, error) {
	image := mirror.CleanLog(q.regions)
	for _, leg := range q.heads {
		for at := int64(0); at < q.size; {
			var found []block.Range
			next := at
			err := patiently(ctx, func() error {
				c, err := liveController(q.host, leg.nqn)
				if err == nil {
					found, next, err = q.host.Allocated(ctx, c, leg.head, at)
				}
				return err
			})
			if err != nil {
				return image, err
			}
			for _, r := range found {
				q.mark(image, r.Off, r.End)
			}
			at = next
		}
	}
	return image, nil
}

// patiently repeats what another command to the same controller is in the way of, and what needs a connection that is
// lost.
func patiently(ctx context.Context, do func() error) (err error) {
	poll(ctx, 100*time.Millisecond, func() bool {
		err = do()
		return !errors.Is(err, fabrics.ErrBusy) && !errors.Is(err, errNotConnected)
	})
	return err
}

// mark marks the regions of a range dirty.
func (q *question) mark(image mirror.LogImage, off, end int64) {
	for r := off / q.region; r*q.region < min(end, q.size); r++ {
		image.Mark(uint64(r))
	}
}

// liveController returns a controller through which a subsystem can be asked.
func liveController(h nvmeHost, n block.NQN) (fabrics.Controller, error) {
	all, err := h.Controllers(func(of block.NQN) bool { return of == n })
	if err != nil {
		return fabrics.Controller{}, err
	}
	for _, c := range all {
		if c.State == fabrics.Live {
			return c, nil
		}
	}
	return fabrics.Controller{}, fmt.Errorf("ask %s: %w", n, errNotConnected)
}

var errNotConnected = errors.New("not connected")

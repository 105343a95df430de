// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
)

const (
	modelRegions = 20
	modelLeg     = modelRegions * Region
)

var errCrashed = errors.New("the host has crashed")

// world is a column of a volume: its legs, the host that writes to it, and the host's crash.
type world struct {
	r       *rand.Rand
	legs    []*modelLegs
	lists   []List // of the legs in sync, before the host's first checkpoint
	copied  int    // regions
	avoided int    // regions that were not copied because a target knew that they need not be
	flight  []*modelWrite
	next    int
	crashed bool
	token   Token
}

// modelLegs is one leg on its target.
type modelLegs struct {
	data    [modelRegions]int
	tracker *Tracker
	inSync  bool
	stay    uint64

	copying bool               // it is given all writes, and copied to
	known   bool               // the host knows what it lacks
	lacks   [modelRegions]bool // as far as the host knows
}

// modelWrite is a write that the host has accepted and not completed.
type modelWrite struct {
	region, value int
	marked, on    [3]bool // by leg
}

func newWorld(r *rand.Rand) *world {
	w := &world{r: r}
	for range 2 + r.IntN(2) {
		w.legs = append(w.legs, &modelLegs{tracker: NewTracker(modelLeg), inSync: true, known: true})
	}
	return w
}

func (w *world) inSync() (all []int) {
	for i, l := range w.legs {
		if l.inSync {
			all = append(all, i)
		}
	}
	return all
}

// given returns the legs that are given writes.
func (w *world) given() (all []int) {
	for i, l := range w.legs {
		if l.inSync || l.copying {
			all = append(all, i)
		}
	}
	return all
}

// churn lets the host and the targets do a few things, and may crash the host.
func (w *world) churn() error {
	for range w.r.IntN(8) {
		if w.crashed {
			return errCrashed
		}
		w.step()
	}
	if w.crashed {
		return errCrashed
	}
	return nil
}

func (w *world) step() {
	switch n := w.r.IntN(1000); {
	case n < 150:
		w.accept()
	case n < 900:
		w.progress()
	case n < 915:
		w.leave()
	case n < 925:
		w.rejoin()
	case n < 947:
		w.copy()
	case n < 950:
		w.promote()
	case n < 953:
		w.legs[w.r.IntN(len(w.legs))].tracker = NewTracker(modelLeg) // its target restarts
	case n < 960:
		w.crashed = true
	}
}

func (w *world) accept() {
	region := w.r.IntN(modelRegions)
	for _, f := range w.flight {
		if f.region == region {
			return // the engine lets writes that overlap wait for each other
		}
	}
	w.next++
	w.flight = append(w.flight, &modelWrite{region: region, value: w.next})
}

// progress takes one write a step further on one leg.
func (w *world) progress() {
	if len(w.flight) == 0 {
		return
	}
	at := w.r.IntN(len(w.flight))
	f := w.flight[at]
	legs := w.given()
	i := legs[w.r.IntN(len(legs))]
	switch {
	case !f.marked[i]:
		w.legs[i].tracker.Mark(int64(f.region)*int64(Region)+512, 512)
		f.marked[i] = true
	case !f.on[i]:
		w.legs[i].data[f.region] = f.value
		f.on[i] = true
	}
	for _, i := range legs {
		if !f.on[i] {
			return
		}
	}
	w.flight = append(w.flight[:at], w.flight[at+1:]...)
	for _, l := range w.legs {
		l.lacks[f.region] = l.lacks[f.region] || !l.inSync && !l.copying
	}
}

// leave makes a leg stale: from now on writes do without it.
func (w *world) leave() {
	legs := w.given()
	i := legs[w.r.IntN(len(legs))]
	l := w.legs[i]
	if l.inSync && len(w.inSync()) == 1 {
		return
	}
	l.inSync, l.copying = false, false
	l.stay++
	for _, f := range w.flight {
		l.lacks[f.region] = l.lacks[f.region] || !f.on[i]
	}
}

// rejoin begins to copy to a leg.
func (w *world) rejoin() {
	if len(w.flight) > 0 {
		return
	}
	for _, l := range w.legs {
		if l.inSync || l.copying {
			continue
		}
		if !l.known {
			w.find(l)
		}
		l.copying, l.known = true, true
		l.stay++
		return
	}
}

// find asks the targets what a leg lacks.
func (w *world) find(l *modelLegs) {
	ranges, err := Lacks(l.tracker.List(), w.lists)
	if err != nil {
		ranges = []Range{{0, int64(modelLeg)}}
	}
	w.avoided += modelRegions
	for _, r := range ranges {
		for region := r.Off / int64(Region); region < r.End/int64(Region); region++ {
			l.lacks[region] = true
			w.avoided--
		}
	}
}

// copy copies one region that a leg lacks.
func (w *world) copy() {
	from := w.legs[w.inSync()[0]]
	for _, l := range w.legs {
		for region := range l.data {
			busy := slices.ContainsFunc(w.flight, func(f *modelWrite) bool { return f.region == region })
			if l.copying && l.lacks[region] && !busy {
				l.tracker.Mark(int64(region)*int64(Region), int64(Region))
				l.data[region], l.lacks[region] = from.data[region], false
				w.copied++
				return
			}
		}
	}
}

// promote makes a leg that was copied a leg in sync.
func (w *world) promote() {
	for _, l := range w.legs {
		if l.copying && !slices.Contains(l.lacks[:], true) {
			l.copying, l.inSync = false, true
			return
		}
	}
}

func (w *world) Members() (all []Member) {
	for _, i := range w.given() {
		all = append(all, Member{Copy: i, Stay: w.legs[i].stay, Copying: w.legs[i].copying})
	}
	return all
}

func (w *world) Settle(context.Context) error {
	before := append([]*modelWrite(nil), w.flight...)
	for {
		if err := w.churn(); err != nil {
			return err
		}
		left := false
		for _, f := range w.flight {
			for _, b := range before {
				left = left || f == b
			}
		}
		if !left {
			return nil
		}
	}
}

func (w *world) Begin(_ context.Context, m Member, token Token) error {
	if err := w.churn(); err != nil {
		return err
	}
	w.legs[m.Copy].tracker.Begin(token, m.Copying)
	return w.churn()
}

func (w *world) Commit(_ context.Context, m Member, token Token) error {
	if err := w.churn(); err != nil {
		return err
	}
	var behind *Behind
	if l := w.legs[m.Copy]; m.Copying {
		var words [1]uint64
		for region, lacks := range l.lacks {
			if lacks {
				words[0] |= 1 << region
			}
		}
		behind = &Behind{Ranges: Ranges(words[:], int64(Region), 3)}
	}
	if err := w.churn(); err != nil { // the message is on its way
		return err
	}
	if m.Copying && w.r.IntN(20) == 0 {
		return errors.New("lost")
	}
	if err := w.legs[m.Copy].tracker.Commit(token, behind); err != nil {
		return err
	}
	return w.churn()
}

// live uses the column, with checkpoints, until the host crashes.
func (w *world) live() {
	w.crashed, w.flight = false, nil
	for _, l := range w.legs {
		l.known, l.copying, l.lacks = l.inSync, false, [modelRegions]bool{}
	}
	for w.churn() == nil {
		w.token++
		_, _ = Take(context.Background(), w, w.token*0x9e3779b97f4a7c15)
	}
}

// recoverColumn makes the legs equal as the next host does, which may crash at it. It
// returns how much was compared.
func (w *world) recoverColumn() (compared int64, done bool) {
	var lists []List
	legs := w.inSync()
	for _, i := range legs {
		lists = append(lists, w.legs[i].tracker.List())
	}
	w.lists = lists
	parts, err := Unequal(lists)
	if err != nil {
		parts = []Range{{0, int64(modelLeg)}}
	}
	from := w.legs[legs[w.r.IntN(len(legs))]]
	for _, part := range parts {
		for off := part.Off; off < part.End; off += int64(Region) {
			compared++
			region := off / int64(Region)
			for _, i := range legs {
				if l := w.legs[i]; l.data[region] != from.data[region] {
					l.tracker.Mark(off, int64(Region))
					l.data[region] = from.data[region]
				}
			}
			if w.r.IntN(40) == 0 {
				return compared, false
			}
		}
	}
	return compared, true
}

// believe makes the record of the legs in sync wrong, as that of a restored backup may be.
func (w *world) believe() {
	for _, l := range w.legs {
		l.inSync, l.copying = true, false
	}
}

func (w *world) equal(t *testing.T) bool {
	t.Helper()
	legs := w.inSync()
	for _, i := range legs {
		if w.legs[i].data != w.legs[legs[0]].data {
			t.Errorf("after the copies were made equal, leg %d has %v and leg %d %v", legs[0], w.legs[legs[0]].data, i, w.legs[i].data)
			return false
		}
	}
	return true
}

// A host crashes at any moment, with any of its writes on any of the legs.
func TestCopiesAreEqualAfterTheListedRegionsWereCopied(t *testing.T) {
	var compared, whole int64
	var copied, avoided int
	for seed := range uint64(6000) {
		w := newWorld(rand.New(rand.NewPCG(seed, 1)))
		for range 6 {
			w.live()
			if w.r.IntN(8) == 0 {
				w.believe()
			}
			for {
				n, done := w.recoverColumn()
				compared, whole = compared+n, whole+modelRegions
				if done {
					break
				}
			}
			if !w.equal(t) {
				t.Fatalf("seed %d", seed)
			}
		}
		copied, avoided = copied+w.copied, avoided+w.avoided
	}
	t.Logf("copied %d regions, and need not have copied %d to legs of which the host knew nothing", copied, avoided)
	if avoided < 3_000 {
		t.Error("too few copies go on")
	}
	t.Logf("compared %d of %d regions", compared, whole)
	if compared > whole*3/4 {
		t.Errorf("compared %d of %d regions: checkpoints have no effect", compared, whole)
	}
}

func TestRegionsGrowWithTheLeg(t *testing.T) {
	for leg, want := range map[block.Size]block.Size{
		block.MiB: 64 * block.KiB, 256 * block.GiB: 64 * block.KiB, block.TiB: 64 * block.KiB,
		block.TiB + block.GiB: 128 * block.KiB, 16 * block.TiB: block.MiB,
	} {
		if got := RegionOf(leg); got != want {
			t.Errorf("RegionOf(%v) = %v, want %v", leg, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"errors"
	"math/rand/v2"
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
}

// modelWrite is a write that the host has accepted and not completed.
type modelWrite struct {
	region, value int
	marked, on    [3]bool // by leg
}

func newWorld(r *rand.Rand) *world {
	w := &world{r: r}
	for range 2 + r.IntN(2) {
		w.legs = append(w.legs, &modelLegs{tracker: NewTracker(modelLeg), inSync: true})
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
	case n < 950:
		w.comeBack()
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
	legs := w.inSync()
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
}

// leave makes a leg stale: from now on writes do without it.
func (w *world) leave() {
	if legs := w.inSync(); len(legs) > 1 {
		l := w.legs[legs[w.r.IntN(len(legs))]]
		l.inSync = false
		l.stay++
	}
}

// comeBack rebuilds a leg.
func (w *world) comeBack() {
	if len(w.flight) > 0 {
		return
	}
	from := w.legs[w.inSync()[0]]
	for _, l := range w.legs {
		if l.inSync {
			continue
		}
		for region := range l.data {
			if l.data[region] != from.data[region] {
				l.tracker.Mark(int64(region)*int64(Region), int64(Region))
				l.data[region] = from.data[region]
			}
		}
		l.inSync = true
		l.stay++
		return
	}
}

func (w *world) Members() (all []Member) {
	for _, i := range w.inSync() {
		all = append(all, Member{Copy: i, Stay: w.legs[i].stay})
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
	w.legs[m.Copy].tracker.Begin(token)
	return w.churn()
}

func (w *world) Commit(_ context.Context, m Member, token Token) error {
	if err := w.churn(); err != nil {
		return err
	}
	if err := w.legs[m.Copy].tracker.Commit(token); err != nil {
		return err
	}
	return w.churn()
}

// live uses the column, with checkpoints, until the host crashes.
func (w *world) live() {
	w.crashed, w.flight = false, nil
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
		l.inSync = true
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

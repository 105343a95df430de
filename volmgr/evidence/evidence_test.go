// SPDX-License-Identifier: Apache-2.0

package evidence

import (
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/image"
)

// leg is the id of copy n of the only column.
func leg(n int) block.LegID { return block.LegID{UUID: block.UUID{byte(n + 1)}} }

// mirror is the evidence of two labels that both list both copies, as written at an epoch in
// which host c1 has the volume.
func mirror(change ...func(*Found)) *Inquiry {
	q := New(nil)
	for n := range 2 {
		f := Found{LegLabel: LegLabel{
			Leg: leg(n), Copy: n, Revision: 1, AdmittedEpoch: 3, Incarnation: "i1",
			Volume: VolumeLabel{
				ID: block.VolumeID{UUID: block.UUID{9}}, Layout: block.Layout{Stripes: 1, Copies: 2}, Epoch: 3, Generation: 5,
				InSync: []block.LegID{leg(0), leg(1)}, Writer: "c1",
			},
		}, Volatile: true}
		for _, c := range change {
			c(&f)
		}
		q.Add(f)
	}
	return q
}

func note(epoch block.Epoch, legs ...NotedLeg) Note { return Note{Epoch: epoch, Legs: legs} }

func quiet(f *Found) { f.Volume.Quiet = true }

func TestACopyIsBelievedOnProofAlone(t *testing.T) {
	alive := func(block.NodeName) bool { return false }
	layout := block.Layout{Stripes: 1, Copies: 2}
	for name, c := range map[string]struct {
		q      *Inquiry
		notes  map[block.NodeName]Note
		good   [2]bool
		why    string // of the first that is not good
		awaits block.NodeName
	}{
		"labels of a volume in use":    {q: mirror(), why: "host c1 has not reported", awaits: "c1"},
		"labels of a quiet volume":     {q: mirror(quiet), good: [2]bool{true, true}},
		"a later epoch was admitted":   {q: mirror(quiet, func(f *Found) { f.AdmittedEpoch = 4 }), why: "has not reported", awaits: "c1"},
		"the last host names both":     {q: mirror(), notes: map[block.NodeName]Note{"c1": note(3, NotedLeg{leg(0), 1}, NotedLeg{leg(1), 1})}, good: [2]bool{true, true}},
		"the last host names one":      {q: mirror(), notes: map[block.NodeName]Note{"c1": note(3, NotedLeg{leg(1), 1})}, good: [2]bool{false, true}, why: "noted at epoch 3 that it is not in sync"},
		"the note is of an old host":   {q: mirror(), notes: map[block.NodeName]Note{"c1": note(2, NotedLeg{leg(0), 1})}, why: "has no note of it"},
		"two hosts claim the epoch":    {q: mirror(), notes: map[block.NodeName]Note{"c1": note(3, NotedLeg{leg(0), 1}), "c2": note(3, NotedLeg{leg(1), 1})}, why: "both claim to have had epoch 3"},
		"the note is of old revisions": {q: mirror(func(f *Found) { f.Revision = 2 }), notes: map[block.NodeName]Note{"c1": note(3, NotedLeg{leg(0), 1}, NotedLeg{leg(1), 1})}, why: "matches no copy in its present state"},
	} {
		t.Run(name, func(t *testing.T) {
			c.q.Expect(layout)
			for host, n := range c.notes {
				c.q.Hear(host, nil, []Note{n})
			}
			why := ""
			for n := range 2 {
				v := c.q.Judge(leg(n), 0)
				if v.Good != c.good[n] {
					t.Errorf("copy %d is good: %v (%s), want %v", n, v.Good, v.Why, c.good[n])
				}
				if why == "" {
					why = v.Why
				}
			}
			if !strings.Contains(why, c.why) {
				t.Errorf("the reason is %q, want %q in it", why, c.why)
			}
			if got := c.q.Awaits(alive); got != c.awaits {
				t.Errorf("it awaits %q, want %q", got, c.awaits)
			}
		})
	}
}

func TestAColumnWithoutAllItsLabelsProvesNothing(t *testing.T) {
	q := mirror(quiet)
	q.Expect(block.Layout{Stripes: 1, Copies: 3})
	if v := q.Judge(leg(0), 0); v.Good || !q.Absent(0) || !strings.Contains(v.Why, "label of another leg") {
		t.Errorf("with two labels of three: %+v", v)
	}
}

func TestAnExpansionIsProvenByAllLegsThatHaveGrown(t *testing.T) {
	for _, grown := range []uint32{4, 8} {
		q := mirror(quiet, func(f *Found) {
			f.Volume.Size, f.Volume.ExpandingTo, f.Zeroed, f.ZeroedExtents = block.GiB, 2*block.GiB, true, 8
			if f.Copy == 1 {
				f.ZeroedExtents = grown
			}
		})
		want := map[uint32]block.Size{4: block.GiB, 8: 2 * block.GiB}[grown]
		if size, proven := q.Size(); size != want || !proven {
			t.Errorf("with %d of 8 extents zeroed on one leg the size is %v, %v; want %v", grown, size, proven, want)
		}
	}
}

// A leg that is going back to a snapshot keeps its extents, although it is not reported as zeroed.
func TestALegThatGoesBackKeepsItsExtents(t *testing.T) {
	extents := image.Of([]image.Extent{{Start: 3, Count: 4}})
	for _, c := range []struct {
		label LegLabel
		want  uint32
	}{
		{LegLabel{Image: extents}, 0},
		{LegLabel{Image: extents, Zeroed: true}, 4},
		{LegLabel{Image: extents, GoingBack: true}, 4},
		{LegLabel{Image: extents, GoingBack: true, ZeroedExtents: 3}, 3},
	} {
		if got := c.label.ZeroedSoFar(); got != c.want {
			t.Errorf("%+v: %d, want %d", c.label, got, c.want)
		}
	}
}

// A leg has nothing against it but a missing label only if one is missing, and if the newest label names the leg.
func TestALegWithAMissingPeerIsUnopposed(t *testing.T) {
	layout := block.Layout{Stripes: 1, Copies: 2}
	all := mirror(quiet)
	all.Expect(layout)
	if all.Unopposed(leg(0), 0) {
		t.Error("no label is missing")
	}
	for _, listed := range []bool{true, false} {
		q, from := New(nil), mirror(quiet)
		f := from.Legs[leg(0)]
		if !listed {
			f.Volume.InSync, f.Volume.Others, f.Volume.ListsAll = []block.LegID{leg(1)}, []block.LegID{leg(0)}, true
		}
		q.Add(f)
		q.Expect(layout)
		if q.Unopposed(leg(0), 0) != listed {
			t.Errorf("the newest label lists it as in sync: %v", listed)
		}
	}
}

// A snapshot is called clean from its beginning, so that does not end a suspicion. A volume that is clean was
// flushed after all that its host wrote.
func TestASnapshotThatIsCleanMayHaveSuspects(t *testing.T) {
	for _, snapshot := range []bool{true, false} {
		q := mirror(quiet, func(f *Found) {
			f.Volume.Clean, f.Volume.InSync, f.Volume.Suspect = true, []block.LegID{leg(0)}, []block.LegID{leg(1)}
			if snapshot {
				f.Volume.Snapshot.Volume = block.VolumeID{UUID: block.UUID{8}}
			}
		})
		q.Expect(block.Layout{Stripes: 1, Copies: 2})
		if v := q.Judge(leg(1), 0); !v.Good || v.Suspect != snapshot {
			t.Errorf("of a snapshot %v: %+v", snapshot, v)
		}
		if v := q.Judge(leg(0), 0); !v.Good || v.Suspect {
			t.Errorf("of a snapshot %v, in sync: %+v", snapshot, v)
		}
	}
}

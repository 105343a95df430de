// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

// spoil has the target of a leg say that the leg's tree is damaged, and with it all legs in it; so much of each may
// be lost.
func (w *snapWorld) spoil(l Leg, unknown block.Size) {
	in := map[block.LegID]bool{}
	for _, v := range w.s.volumes.All() {
		for _, o := range v.Legs {
			in[o.ID] = in[o.ID] || o.Drive == l.Drive && o.tree() == l.tree()
		}
	}
	w.targets[l.Node].says = func(r *TargetReport) {
		for i := range r.Legs {
			if x := &r.Legs[i]; in[x.Leg] {
				x.Damage, x.Unknown = "both copies of some records are bad", unknown
			}
		}
	}
	w.settle()
}

func (w *snapWorld) explained(name string) string {
	w.t.Helper()
	e, err := w.s.Explain(name)
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.Join(slices.Concat(e.Facts, e.Waits, e.Actions), "\n")
}

// The legs in a damaged tree are made again elsewhere, those of snapshots as well, from copies that are whole: no
// column has fewer good copies meanwhile. Then they go.
func TestLegsInADamagedTreeAreMadeAgainElsewhere(t *testing.T) {
	for _, unknown := range []block.Size{0, block.MiB} {
		w := newSnapWorld(t, 1)
		if err := w.take("mon", "db1"); err != nil {
			t.Fatal(err)
		}
		w.settle()
		bad := w.volume("db1").Legs[0]
		w.spoil(bad, unknown)
		if text := w.explained("db1"); !strings.Contains(text, "takes no writes") || strings.Contains(text, "up to 1MiB of it may be lost") != (unknown > 0) {
			t.Errorf("while it is copied, db1 is explained as\n%s", text)
		}
		w.look(20, "db1")
		for _, name := range []string{"db1", "db1@mon"} {
			w.bothCopies(name, bad.Drive)
		}
	}
}

// A leg in a damaged tree would fail each write, so nothing is copied to it, also if there is no other place.
func TestNothingIsCopiedToALegInADamagedTree(t *testing.T) {
	w := newSnapWorld(t, 1)
	v := w.volume("db1")
	for _, x := range w.targets {
		x.down = !slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == x.name })
		if x.down {
			w.must(TargetLost{Session: 1, Node: x.name})
		}
	}
	bad := v.Legs[0]
	w.spoil(bad, 0)
	w.must(RecordStale{Node: v.Attachment.Node, Volume: v.ID, Epoch: v.Epoch, Legs: []block.LegID{bad.ID}, Revisions: map[block.LegID]uint64{bad.ID: bad.Revision}, Reason: "write failed"})
	w.look(3)
	if l := w.volume("db1").leg(bad.ID); l.State != LegStale {
		t.Errorf("it is %+v", l)
	}
	if text := w.explained("db1"); !strings.Contains(text, "its tree is damaged") || !strings.Contains(text, "a place for another copy") {
		t.Errorf("it is explained as\n%s", text)
	}
	w.targets[bad.Node].says = nil // its records could be read again
	w.look(3, "db1")
	if l := w.volume("db1").leg(bad.ID); l == nil || !l.trusted() {
		t.Errorf("after its records could be read again it is %+v", l)
	}
}

// What has a single copy stays where it is, and is served. It takes no snapshot, nothing begins as one in it, and
// it does not go back to one.
func TestTheOnlyCopyInADamagedTreeIsServed(t *testing.T) {
	for _, unknown := range []block.Size{0, block.MiB} {
		w := newSnapWorld(t, 1)
		w.must(CreateVolume{Name: "one", Size: block.GiB, Copies: 1, Stripes: 1, Thin: true, Seed: w.seed()})
		w.settle()
		if err := w.take("mon", "one"); err != nil {
			t.Fatal(err)
		}
		w.settle()
		was := w.volume("one").Legs[0]
		w.spoil(was, unknown)
		w.look(3)
		v := w.volume("one")
		if len(v.Legs) != 1 || v.Legs[0].ID != was.ID || !w.s.servable(&v.Legs[0]) {
			t.Errorf("its legs are %+v", v.Legs)
		}
		cure := map[bool]string{true: "copy what can be read", false: "--copies 2"}[unknown > 0]
		if text := w.explained("one"); !strings.Contains(text, cure) {
			t.Errorf("%v are unknown, and it is explained as\n%s", unknown, text)
		}
		if err := w.take("tue", "one"); !isReason(err, ReasonNoInSyncLeg) {
			t.Errorf("a snapshot of it: %v", err)
		}
		if err := w.step(CreateVolume{Name: "clone", From: "one@mon", Size: block.GiB, Thin: true, Seed: w.seed()}); !isReason(err, ReasonNoInSyncLeg) {
			t.Errorf("a clone of its snapshot: %v", err)
		}
		if err := w.step(RestoreVolume{Volume: "one", Snapshot: "one@mon"}); !isReason(err, ReasonNoInSyncLeg) {
			t.Errorf("it goes back to its snapshot: %v", err)
		}
		w.must(Attach{Volume: "one", Node: "c1"})
		w.look(3)
		if v := w.volume("one"); v.Attachment == nil || v.Attachment.State != Attached {
			t.Errorf("its attachment is %+v", v.Attachment)
		}
	}
}

// A copy of a snapshot is made of a leg that is known as a whole, and in a tree that takes it.
func TestASnapshotIsNotCopiedOfWhatIsUnknown(t *testing.T) {
	w, from, _ := newCopyWorld(t)
	for unknown, may := range map[block.Size]bool{0: true, block.MiB: false} {
		w.spoil(*from, unknown)
		tx := newTx(w.s, w.now)
		_, to, err := tx.planCopy(w.volume("db1@mon"), 0, tx.newCopyLook())
		if (err == nil) != may || err != nil && !strings.Contains(err.Error(), "its tree is damaged") {
			t.Errorf("with %v unknown: %v", unknown, err)
		}
		if to.Drive == from.Drive {
			t.Errorf("it would be copied to the damaged tree: %+v", to)
		}
	}
}

// A snapshot is taken of the copies that are whole.
func TestASnapshotIsTakenOfTheCopyThatIsWhole(t *testing.T) {
	w := newSnapWorld(t, 1)
	bad := w.volume("db1").Legs[0]
	w.spoil(bad, 0)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	v := w.volume("db1@mon")
	if v.State != VolumeReady || slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Origin == bad.ID || l.Drive == bad.Drive }) {
		t.Errorf("it is %v, with legs %+v", v.State, v.Legs)
	}
}

// A copy of a snapshot goes to no tree that takes nothing.
func TestNoCopyIsMadeInADamagedTree(t *testing.T) {
	w, _, to := newCopyWorld(t)
	tx := newTx(w.s, w.now)
	has := func() bool {
		return slices.ContainsFunc(tx.treesOf(w.volume("db1@mon"), 0), func(l Leg) bool { return l.Drive == to.Drive })
	}
	if !has() {
		t.Fatal("the tree of the leg that misses the snapshot is none to copy to")
	}
	if w.spoil(*to, 0); has() {
		t.Error("a copy would be made in the damaged tree")
	}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

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

// twins is a world with a volume, attached, whose first leg is in a damaged tree, with so much lost. Its other leg is
// whole. No other target is there.
func twins(t *testing.T, unknown block.Size) (w *snapWorld, bad, whole *Leg) {
	t.Helper()
	w = newSnapWorld(t, 1)
	v := w.volume("db1")
	for _, x := range w.targets {
		if x.down = !slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == x.name }); x.down {
			w.must(TargetLost{Session: 1, Node: x.name})
		}
	}
	w.spoil(v.Legs[0], unknown)
	return w, w.leg(0), w.leg(1)
}

// leg returns a leg of db1.
func (w *snapWorld) leg(n int) *Leg { return &w.volume("db1").Legs[n] }

// away has the target of a leg go, or come back.
func (w *snapWorld) away(l *Leg, yes bool) {
	w.t.Helper()
	if w.targets[l.Node].down = yes; yes {
		w.must(TargetLost{Session: 1, Node: l.Node})
	}
	w.settle()
}

// records has the host of db1 report legs as lost.
func (w *snapWorld) records(legs ...*Leg) error {
	v := w.volume("db1")
	in := RecordStale{Node: v.Attachment.Node, Volume: v.ID, Epoch: v.Epoch, Revisions: map[block.LegID]uint64{}, Reason: "write failed"}
	for _, l := range legs {
		in.Legs, in.Revisions[l.ID] = append(in.Legs, l.ID), l.Revision
	}
	return w.step(in)
}

// A host may not go on without a whole leg for the sake of one in a damaged tree, which takes no writes. If the node
// of the whole one is dead, the damaged one is what is left, and is not given up.
func TestAHostDoesNotGiveUpAWholeLegForADamagedOne(t *testing.T) {
	for _, unknown := range []block.Size{0, block.MiB} {
		w, bad, whole := twins(t, unknown)
		w.away(whole, true)
		for _, legs := range [][]*Leg{{whole}, {bad, whole}} {
			if err := w.records(legs...); !isReason(err, ReasonLastLeg) {
				t.Errorf("%v are lost: %v", legs, err)
			}
		}
		if text := w.explained("db1"); !strings.Contains(text, "writes wait") || !strings.Contains(text, "bring target "+string(whole.Node)) || !strings.Contains(text, "confirm-dead "+string(whole.Node)) {
			t.Errorf("it is explained as\n%s", text)
		}
		w.away(whole, false)
		if err := w.records(bad); err != nil {
			t.Errorf("the damaged one is lost: %v", err)
		}

		w, bad, whole = twins(t, unknown)
		w.away(whole, true)
		w.must(ConfirmNodeDead{whole.Node})
		if err := w.records(whole); err != nil {
			t.Errorf("the whole one is lost for good: %v", err)
		}
		if err := w.records(bad); !isReason(err, ReasonLastLeg) {
			t.Errorf("the damaged one is the last, and lost: %v", err)
		}
		w.settle()
		if l := w.volume("db1").leg(bad.ID); !l.trusted() || !w.s.servable(l) {
			t.Errorf("the last one is %+v", l)
		}
		if text := w.explained("db1"); !strings.Contains(text, "writes wait") || strings.Contains(text, "copy what can be read") != (unknown > 0) {
			t.Errorf("it is explained as\n%s", text)
		}
	}
}

// While the target of the other leg has not mapped it, it is not known whether that is damaged. A leg that is itself
// not mapped may be recorded.
func TestAHostDoesNotGiveUpALegForOneThatIsNotMapped(t *testing.T) {
	w, bad, whole := twins(t, block.MiB)
	w.targets[bad.Node].says = func(r *TargetReport) {
		for i := range r.Legs {
			r.Legs[i].Ready = false
		}
	}
	w.settle()
	w.away(whole, true)
	if err := w.records(whole); !isReason(err, ReasonLastLeg) || !strings.Contains(err.Error(), "has not mapped "+bad.String()) {
		t.Errorf("the other leg is not mapped, and the host records its loss: %v", err)
	}
	w.spoil(*bad, block.MiB)
	if err := w.records(whole); !isReason(err, ReasonLastLeg) {
		t.Errorf("the other leg is damaged, and the host records its loss: %v", err)
	}
	w.targets[bad.Node].says = nil
	w.settle()
	if err := w.records(whole); err != nil {
		t.Errorf("the other leg is whole, and the host records its loss: %v", err)
	}

	w, bad, whole = twins(t, 0)
	w.targets[bad.Node].says = func(r *TargetReport) {
		for i := range r.Legs {
			r.Legs[i].Ready = false
		}
	}
	w.settle()
	if err := w.records(bad); err != nil {
		t.Errorf("the host records the loss of the leg that is not mapped: %v", err)
	}
	if l := w.volume("db1").leg(whole.ID); !l.trusted() {
		t.Errorf("the other one is %+v", l)
	}
}

// third adds a leg in sync to db1, as one that was made again elsewhere.
func (w *snapWorld) third() (v *Volume) {
	w.t.Helper()
	v = w.volume("db1").clone()
	for name, x := range w.targets {
		if !slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == name }) {
			x.down = false
			l := v.Legs[1]
			l.ID, l.Copy, l.Node = block.LegID{UUID: block.UUID{7, 7}}, 2, name
			for id := range w.s.drivesOn[name] {
				l.Drive = id
			}
			v.Legs = append(v.Legs, l)
		}
	}
	w.settle()
	return v
}

// Of a leg too many it is the damaged one that goes, also if all leave; a whole one does not go while a damaged one is
// among those that stay for it. Of two damaged ones one goes once there is a whole one.
func TestTheDamagedLegIsTheOneTooMany(t *testing.T) {
	for _, unknown := range []block.Size{0, block.MiB} {
		w, bad, whole := twins(t, unknown)
		w.must(DrainDrive{Drive: whole.Drive})
		v := w.third()
		tx := newTx(w.s, w.now)
		if l, why := tx.superfluous(v, 0); l == nil || l.ID != bad.ID {
			t.Errorf("with a third leg in sync %v is given up: %s", l, why)
		}
		if _, needless := tx.needless(v, v.leg(whole.ID), true); needless {
			t.Error("the whole one could be given up")
		}
		v.leg(block.LegID{UUID: block.UUID{7, 7}}).State = LegRebuilding
		if l, why := tx.superfluous(v, 0); l != nil {
			t.Errorf("before the third leg is in sync %v is given up: %s", l, why)
		}

		w, _, whole = twins(t, unknown)
		w.spoil(*whole, unknown)
		v = w.third()
		tx = newTx(w.s, w.now)
		if l, why := tx.superfluous(v, 0); l == nil || l.Copy == 2 {
			t.Errorf("of two damaged legs and a whole one %v is given up: %s", l, why)
		}
		w.damages(&v.Legs[0], 2*block.MiB)
		if l, why := tx.superfluous(v, 0); l == nil || l.Copy != 0 && unknown == 0 {
			t.Errorf("of two damaged legs, of which the first has lost something, %v is given up: %s", l, why)
		}
		w.damages(&v.Legs[2], unknown)
		if l, why := tx.superfluous(v, 0); l != nil {
			t.Errorf("of three damaged legs %v is given up: %s", l, why)
		}
	}
}

// damages has the state know that a leg is in a damaged tree, until its target reports again.
func (w *snapWorld) damages(l *Leg, unknown block.Size) {
	on := w.s.targets[l.Node]
	on.noteDamage(l.ID, true)
	on.legs.Set(on.by, l.ID, LegReport{Leg: l.ID, Damage: "both copies of some records are bad", Unknown: unknown})
}

// A host that attaches the volume gets it with the whole leg, or waits for it: without, the leg would be given up.
func TestAnAttachmentWaitsForTheWholeLeg(t *testing.T) {
	for _, dead := range []bool{false, true} {
		w, bad, whole := twins(t, block.MiB)
		w.must(Detach{Volume: "db1"})
		w.settle()
		w.away(whole, true)
		if dead {
			w.must(ConfirmNodeDead{whole.Node})
		}
		w.must(Attach{Volume: "db1", Node: "c1"})
		w.look(20)
		v := w.volume("db1")
		if got := v.Attachment.State == Attached; got != dead || v.leg(bad.ID).State != LegInSync || dead != (v.leg(whole.ID).State == LegStale) {
			t.Errorf("dead %v: the attachment is %+v, with legs %+v", dead, v.Attachment, v.Legs)
		}
		if dead {
			continue
		}
		if text := w.explained("db1"); !strings.Contains(text, bad.String()+" is in a damaged tree") || !strings.Contains(text, "confirm-dead") {
			t.Errorf("it is explained as\n%s", text)
		}
		w.away(whole, false)
		if v := w.volume("db1"); v.Attachment.State != Attached || !v.leg(whole.ID).trusted() {
			t.Errorf("the leg is back, and it is %+v, with legs %+v", v.Attachment, v.Legs)
		}
	}
}

// Whether a tree is damaged is known once its target has mapped the leg. No other leg is given up for it before.
func TestAnAttachmentWaitsUntilItIsKnownWhetherATreeIsDamaged(t *testing.T) {
	w, bad, whole := twins(t, 0)
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.targets[bad.Node].says = func(r *TargetReport) {
		for i := range r.Legs {
			r.Legs[i].Ready = false
		}
	}
	w.settle()
	w.away(whole, true)
	w.must(Attach{Volume: "db1", Node: "c1"})
	w.look(20)
	if l := w.volume("db1").leg(whole.ID); l.State != LegInSync {
		t.Errorf("it was given up: %+v", l)
	}
	if text := w.explained("db1"); !strings.Contains(text, "has not mapped "+bad.String()) || strings.Contains(text, "is in a damaged tree") {
		t.Errorf("it is explained as\n%s", text)
	}
	w.targets[bad.Node].says = nil
	w.look(20)
	if v := w.volume("db1"); v.Attachment.State != Attached || v.leg(whole.ID).State != LegStale {
		t.Errorf("no tree is damaged, and the attachment is %+v, with legs %+v", v.Attachment, v.Legs)
	}
}

// A leg that may have lost cached writes is not given up for one of which a part is lost. An operator may choose it.
func TestASuspectLegIsNotGivenUpForADamagedOne(t *testing.T) {
	for unknown, stays := range map[block.Size]bool{0: false, block.MiB: true} {
		w, bad, whole := twins(t, unknown)
		w.must(Detach{Volume: "db1"})
		w.settle()
		tx := newTx(w.s, w.now)
		v := tx.volume(w.volume("db1").ID)
		tx.suspectLeg(v, whole.ID)
		v.leg(whole.ID).SuspectAt = 0
		tx.settleSuspect(v.ID, v.leg(whole.ID))
		if now := tx.peek(v.ID).leg(whole.ID); now.Suspect != stays {
			t.Errorf("with %v unknown it is %+v", unknown, now)
		}
		if !stays {
			continue
		}
		w.s.volumes.Set(w.s.by, v.ID, tx.peek(v.ID))
		if text := w.explained("db1"); !strings.Contains(text, "weft volume promote-stale db1 0.1") {
			t.Errorf("it is explained as\n%s", text)
		}
		w.must(PromoteStaleLeg{Volume: "db1", Leg: whole.ID, AcceptDataLoss: true})
		if v := w.volume("db1"); !v.leg(whole.ID).trusted() || v.leg(bad.ID).State != LegStale {
			t.Errorf("it was promoted, and the legs are %+v", v.Legs)
		}
	}
	w, bad, whole := twins(t, block.MiB)
	for _, l := range []*Leg{bad, whole} {
		l.Suspect = true
	}
	if best := w.s.bestSuspect(w.volume("db1"), 0); best != whole.ID {
		t.Errorf("of two suspect legs, one of them damaged, %v is believed", best)
	}
}

// Nothing is copied of a leg of which a part is lost, and no leg is made for that. It is said what can be done.
func TestNoLegIsMadeOfADamagedOne(t *testing.T) {
	for unknown, made := range map[block.Size]bool{0: true, block.MiB: false} {
		w, bad, whole := twins(t, unknown)
		w.away(whole, true)
		w.must(ConfirmNodeDead{whole.Node})
		if err := w.records(whole); err != nil {
			t.Fatal(err)
		}
		for _, x := range w.targets {
			x.down = x.name == whole.Node
		}
		w.look(5)
		v := w.volume("db1")
		if got := slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node != bad.Node && l.Node != whole.Node }); got != made {
			t.Errorf("with %v unknown the legs are %+v", unknown, v.Legs)
		}
		if h := w.s.health(v); h != Degraded && h != Rebuilding || w.s.copiesLeft(v) != 1 {
			t.Errorf("it is %v, with %d copies", h, w.s.copiesLeft(v))
		}
	}
}

// fails has the target of a leg report an error: of its drive, or of the leg alone, which it cannot open then.
func (w *snapWorld) fails(l *Leg, drive bool) {
	says := w.targets[l.Node].says
	w.targets[l.Node].says = func(r *TargetReport) {
		if says != nil {
			says(r)
		}
		for i := range r.Drives {
			if drive && r.Drives[i].Drive == l.Drive {
				r.Drives[i].Error = "I/O error"
			}
		}
		for i := range r.Legs {
			if x := &r.Legs[i]; !drive && x.Leg == l.ID {
				x.Error, x.Ready = "open tree: both copies of its superblock are damaged", false
			}
		}
	}
	w.settle()
}

// lostTwin is twins with the other leg lost, by itself or with its drive; with both it was damaged as well before.
type lostTwin struct {
	unknown     block.Size
	drive, both bool
}

// everyLostTwin runs a test for each of them.
func everyLostTwin(t *testing.T, test func(*testing.T, lostTwin)) {
	for _, unknown := range []block.Size{0, block.MiB} {
		for _, drive := range []bool{true, false} {
			for _, both := range []bool{false, true} {
				x := lostTwin{unknown, drive, both}
				t.Run(fmt.Sprintf("%+v", x), func(t *testing.T) { test(t, x) })
			}
		}
	}
}

func (x lostTwin) world(t *testing.T, attached bool) (w *snapWorld, bad, lost *Leg) {
	t.Helper()
	w, bad, lost = twins(t, x.unknown)
	if x.both {
		w.spoil(*lost, x.unknown)
	}
	if !attached {
		w.must(Detach{Volume: "db1"})
		w.settle()
	}
	w.fails(lost, x.drive)
	return w, bad, lost
}

// The whole leg's drive has failed, or its tree cannot be opened, and its node is alive. An eviction of the drive ends
// the wait of the host: the damaged leg is what is left, and serves the rest. A drain or a move of the leg is refused.
// A lost leg that was damaged itself can be evicted as well.
func TestAHostGoesOnWithADamagedLegAfterAnEviction(t *testing.T) {
	everyLostTwin(t, func(t *testing.T, x lostTwin) {
		w, bad, lost := x.world(t, true)
		if err := w.records(lost); !x.both && !isReason(err, ReasonLastLeg) {
			t.Errorf("before the eviction the host records its loss: %v", err)
		}
		if text := w.explained("db1"); !x.both && (!strings.Contains(text, "writes wait") || !strings.Contains(text, "weft drive evict "+lost.Drive.String())) {
			t.Errorf("before the eviction it is explained as\n%s", text)
		}
		for _, in := range []Input{DrainDrive{Drive: lost.Drive}, MoveLeg{Volume: "db1", Column: lost.Column, Copy: lost.Copy}} {
			if err := w.step(in); !x.both && x.unknown > 0 && !isReason(err, ReasonDriveInUse) {
				t.Errorf("%T: %v", in, err)
			}
		}
		if err := w.step(EvictDrive{Drive: lost.Drive}); err != nil {
			t.Fatal(err)
		}
		w.look(3)
		if err := w.records(lost); err != nil {
			t.Errorf("after it the host records its loss: %v", err)
		}
		if err := w.records(bad); !isReason(err, ReasonLastLeg) {
			t.Errorf("the host records the leg that is left: %v", err)
		}
	})
}

// An attachment waits for the same leg, and goes on after the eviction.
func TestAnAttachmentGoesOnWithADamagedLegAfterAnEviction(t *testing.T) {
	everyLostTwin(t, func(t *testing.T, x lostTwin) {
		w, bad, lost := x.world(t, false)
		w.must(Attach{Volume: "db1", Node: "c1"})
		w.look(20)
		if v := w.volume("db1"); !x.both && (v.Attachment.State != Granting || !v.leg(lost.ID).trusted()) {
			t.Errorf("before the eviction the attachment is %+v, with legs %+v", v.Attachment, v.Legs)
		}
		if text := w.explained("db1"); !x.both && !strings.Contains(text, "weft drive evict "+lost.Drive.String()) {
			t.Errorf("before the eviction it is explained as\n%s", text)
		}
		if err := w.step(EvictDrive{Drive: lost.Drive}); err != nil {
			t.Fatal(err)
		}
		w.look(20)
		if v := w.volume("db1"); v.Attachment.State != Attached || !v.leg(bad.ID).trusted() || v.leg(lost.ID).State != LegStale {
			t.Errorf("after it the attachment is %+v, with legs %+v", v.Attachment, v.Legs)
		}
	})
}

// The drive of the whole leg works when it is evicted. The leg is waited for while its target is away, since it may
// come back; it is given up if the drive fails after all.
func TestAnEvictedDriveThatWorkedIsWaitedFor(t *testing.T) {
	w, bad, whole := twins(t, block.MiB)
	w.must(EvictDrive{Drive: whole.Drive})
	w.away(whole, true)
	if err := w.records(whole); !isReason(err, ReasonLastLeg) {
		t.Errorf("its target is away, and the host records its loss: %v", err)
	}
	w.away(whole, false)
	w.fails(whole, true)
	if err := w.records(whole); err != nil {
		t.Errorf("its drive has failed, and the host records its loss: %v", err)
	}
	if l := w.volume("db1").leg(bad.ID); !l.trusted() {
		t.Errorf("the leg that is left is %+v", l)
	}
}

// The drive of a leg of a snapshot can be evicted as well, if the only other leg is damaged.
func TestAnEvictionLeavesTheDamagedLegOfASnapshot(t *testing.T) {
	for _, works := range []bool{true, false} {
		w := newSnapWorld(t, 1)
		if err := w.take("mon", "db1"); err != nil {
			t.Fatal(err)
		}
		w.settle()
		v := w.volume("db1@mon")
		w.spoil(v.Legs[0], block.MiB)
		whole := &w.volume("db1@mon").Legs[1]
		if works {
			w.away(whole, true)
		} else {
			w.fails(whole, true)
		}
		err := w.step(EvictDrive{Drive: whole.Drive})
		if works && !isReason(err, ReasonDriveInUse) || !works && err != nil {
			t.Errorf("the drive works %v: %v", works, err)
		}
	}
}

// What people order, and what nodes do, leaves the whole leg in place.
func TestNoOrderGivesUpTheWholeLeg(t *testing.T) {
	w, bad, whole := twins(t, block.MiB)
	v := w.volume("db1")
	if h := w.s.health(v); h != Degraded || w.s.copiesLeft(v) != 1 {
		t.Errorf("it is %v, with %d copies", h, w.s.copiesLeft(v))
	}
	if err := w.step(MaintainNode{Node: whole.Node, For: time.Hour}); !isReason(err, ReasonNodeInUse) || !strings.Contains(err.Error(), "damaged trees") {
		t.Errorf("maintenance of the node of the whole leg: %v", err)
	}
	if err := w.step(MaintainNode{Node: whole.Node, For: time.Hour, Force: true}); err != nil {
		t.Fatal(err)
	}
	w.settle()
	if ask := w.s.asked[v.ID]; len(ask) > 0 {
		t.Errorf("its host is asked to leave out %v", ask)
	}
	one := v.Layout
	one.Copies = 1
	if keep := w.s.keepers(v.column(0), one); slices.ContainsFunc(keep, func(l *Leg) bool { return l.ID == bad.ID }) {
		t.Errorf("with one copy it would keep %v", keep)
	}
	if c, err := w.s.WhatIf(Loss{Nodes: []block.NodeName{whole.Node}}); err != nil || len(c.Volumes) == 0 || !c.Volumes[0].DataLost {
		t.Errorf("if its node were lost: %+v, %v", c, err)
	}
	w.away(whole, true)
	if err := w.step(EvictDrive{Drive: whole.Drive}); !isReason(err, ReasonDriveInUse) {
		t.Errorf("an eviction of its drive while it is away: %v", err)
	}
}

// A leg of a snapshot that is not known to be right stays while the only other one is not known as a whole: an
// operator may choose it.
func TestASnapshotKeepsALegWhileTheOtherIsDamaged(t *testing.T) {
	for unknown, stays := range map[block.Size]bool{0: false, block.MiB: true} {
		w := newSnapWorld(t, 1)
		if err := w.take("mon", "db1"); err != nil {
			t.Fatal(err)
		}
		w.settle()
		v := w.volume("db1@mon")
		w.spoil(v.Legs[0], unknown)
		tx := newTx(w.s, w.now)
		next := tx.volume(v.ID)
		next.Legs[1].State = LegStale
		tx.loseLegs(v.ID, 0)
		if l := tx.peek(v.ID).Legs[1]; l.member() != stays {
			t.Errorf("with %v unknown it is %+v", unknown, l)
		}
	}
}

// A host that heals a detached volume may have a damaged leg recorded, which cannot be made equal to the others.
func TestAHealingGoesOnWithoutADamagedLeg(t *testing.T) {
	w, bad, whole := twins(t, block.MiB)
	v := w.volume("db1").clone()
	v.Heal = &Attachment{}
	in := RecordStale{Legs: []block.LegID{bad.ID}}
	if err := in.healing(w.s, v, map[block.LegID]bool{bad.ID: true}); err != nil {
		t.Errorf("the damaged leg is lost: %v", err)
	}
	in.Legs = []block.LegID{whole.ID}
	if err := in.healing(w.s, v, map[block.LegID]bool{whole.ID: true}); !isReason(err, ReasonReadOnly) {
		t.Errorf("the whole leg is lost: %v", err)
	}
}

// What was observed says which legs are damaged, also once it is loaded from a support bundle.
func TestASupportBundleKnowsOfDamage(t *testing.T) {
	w, _, _ := twins(t, block.MiB)
	text, err := w.s.Observed()
	if err != nil {
		t.Fatal(err)
	}
	s, err := LoadObserved(w.s.Records(), text)
	if err != nil {
		t.Fatal(err)
	}
	v := s.volumes.Get(w.volume("db1").ID)
	if h, was := s.health(v), w.s.health(w.volume("db1")); h != was {
		t.Errorf("it was %v, and is %v in the bundle", was, h)
	}
	e, err := s.Explain("db1")
	if was := w.explained("db1"); err != nil || strings.Join(slices.Concat(e.Facts, e.Waits, e.Actions), "\n") != was {
		t.Errorf("it was explained as\n%s\nand in the bundle as %+v, %v", was, e, err)
	}
}

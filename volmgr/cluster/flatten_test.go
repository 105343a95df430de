// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
)

// copies is how many times a target has to go on before a leg is flat.
const copies = 3

// flatten copies some of what a leg shares with others, as its target is told.
func (w *snapWorld) flatten(t *snapTarget, l WantedLeg) {
	if l.Flatten && !l.FlattenWait && t.level >= flattenLevel && t.ready[l.Leg] && w.flat[l.Leg] < copies {
		w.flat[l.Leg]++
	}
}

// isFlat reports whether a leg needs nothing of others, or is one of a snapshot of a volume whose leg there does not.
func (w *snapWorld) isFlat(t *snapTarget, l WantedLeg) bool {
	for id, o := range t.legs {
		if w.flat[id] >= copies && o.Tree == l.Tree && (id == l.Leg || o.Volume.ID == l.Volume.Snapshot.Volume) {
			return true
		}
	}
	return false
}

// checkFlat finds a volume that is said to need nothing of others, and has a leg that does.
func (w *snapWorld) checkFlat(v *Volume) {
	w.t.Helper()
	if v.Flatten == nil || v.Flatten.Ended.IsZero() {
		return
	}
	for _, l := range v.Legs {
		if l.State != LegDeleting && !l.Tree.IsZero() && w.flat[l.ID] < copies {
			w.t.Fatalf("%s is flattened, and %v is not", v.object(), &l)
		}
	}
}

// clones makes, flattens, or deletes a clone, or takes a snapshot of one.
func (w *snapWorld) clones() {
	all := []*Volume{}
	for _, v := range w.s.volumes.All() {
		if v.CloneOf != "" {
			all = append(all, v)
		}
	}
	slices.SortFunc(all, func(a, b *Volume) int { return strings.Compare(string(a.Name), string(b.Name)) })
	if len(all) < 2 {
		for _, v := range w.s.volumes.All() {
			if v.IsSnapshot() && v.State == VolumeReady && len(all) < 2 {
				w.refusable(w.step(CreateVolume{Name: block.VolumeName(fmt.Sprintf("c%d", w.seeds)), From: string(v.Name), Seed: w.seed()}))
				return
			}
		}
		return
	}
	v := all[w.rng.IntN(len(all))]
	switch w.rng.IntN(5) {
	case 0:
		w.refusable(w.take(fmt.Sprintf("s%d", w.seeds), string(v.Name)))
	case 1:
		if v.Flatten != nil && !v.flattening() {
			w.flattened++
			w.refusable(w.step(DeleteVolume{Volume: v.ID.String()}))
		}
	default:
		w.refusable(w.step(FlattenVolume{Volume: v.ID.String()}))
	}
}

// withClone has a clone c of db1@mon.
func withClone(t *testing.T, thin bool) *snapWorld {
	t.Helper()
	w := newSnapWorldOf(t, 1, thin)
	w.writes(w.hosts["c1"])
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	w.must(CreateVolume{Name: "c", From: "db1@mon", Seed: w.seed()})
	w.settle()
	return w
}

func explained(t *testing.T, w *snapWorld, name string) (all string, e Explanation) {
	t.Helper()
	e, err := w.s.Explain(name)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(append(append([]string{e.Summary}, e.Facts...), e.Waits...), "\n"), e
}

// A clone is flattened when all its legs are, also one that is away meanwhile, and whoever leads by then.
func TestACloneIsFlattened(t *testing.T) {
	w := withClone(t, true)
	c := w.volume("c")
	away := w.targets[c.Legs[0].Node]
	away.down = true
	w.must(TargetLost{Node: away.name, Session: 1})
	w.must(FlattenVolume{Volume: "c"})
	since := w.volume("c").Flatten.Since
	w.now = w.now.Add(time.Second)
	w.must(FlattenVolume{Volume: "c"})
	if x := w.volume("c").Flatten; !x.Since.Equal(since) || !x.Ended.IsZero() {
		t.Errorf("asked for again: %+v", x)
	}
	for range 2 {
		w.nextManager()
		w.settle()
		if !w.volume("c").flattening() {
			t.Fatal("it is flattened, and a leg is away")
		}
		if text, _ := explained(t, w, "c"); !strings.Contains(text, "flattening of leg 0.0 on "+string(away.name)+": target "+string(away.name)+" is offline") {
			t.Errorf("explained as\n%s", text)
		}
	}
	away.down = false
	w.targetActs(away)
	view, err := w.s.Volume("c")
	if err != nil || view.Flatten.Left != (copies-1)*block.GiB || len(view.Flatten.Waits) != 0 {
		t.Errorf("shown as %+v, %v", view.Flatten, err)
	}
	if text, _ := explained(t, w, "c"); !strings.Contains(text, "it is being flattened: what it shares with other volumes is copied, 2GiB are left") || strings.Contains(text, "shares what neither") != true {
		t.Errorf("explained as\n%s", text)
	}
	w.settle()
	c = w.volume("c")
	if c.flattening() || c.Flatten.Ended.IsZero() || !c.Flatten.Since.Equal(since) || c.CloneOf != "db1@mon" {
		t.Fatalf("it is %+v", c.Flatten)
	}
	if text, _ := explained(t, w, "c"); !strings.Contains(text, "it needs no snapshot of another volume") || strings.Contains(text, "shares") {
		t.Errorf("explained as\n%s", text)
	}
	for _, target := range w.targets {
		for _, l := range w.s.WantedTarget(target.name).Legs {
			if l.Flatten {
				t.Errorf("leg %v of %s is to be flattened still", l.Leg, l.Volume.Name)
			}
		}
	}
	w.must(FlattenVolume{Volume: "c"})
	if w.volume("c").flattening() {
		t.Error("it is flattened again")
	}
	w.must(DeleteVolume{Volume: "db1@mon"})
	w.settle()
}

// A volume that began as nothing is flat at once, as one whose record was lost with the store may be.
func TestAThinVolumeThatIsNoCloneIsFlatAtOnce(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.must(FlattenVolume{Volume: "db1"})
	if v := w.volume("db1"); v.Flatten == nil || v.flattening() {
		t.Errorf("it is %+v", v.Flatten)
	}
}

func TestWhatCannotBeFlattened(t *testing.T) {
	w := withClone(t, true)
	refuse := func(what, volume string, reason, hint string) {
		t.Helper()
		err := w.step(FlattenVolume{Volume: volume})
		if !isReason(err, reason) || !strings.Contains(err.(*Error).Hint, hint) {
			t.Errorf("%s: %v", what, err)
		}
	}
	refuse("a snapshot", "db1@mon", ReasonReadOnly, "`weft volume flatten db1`")
	w.s.level = flattenLevel - 1
	refuse("below its level", "c", ReasonOldParts, "weft upgrade")
	w.s.level = flattenLevel
	w.must(CreateVolume{Name: "d", From: "db1@mon", Seed: w.seed()})
	refuse("one that is being created", "d", ReasonNotReady, "weft explain")

	w = withClone(t, false)
	refuse("one that is not thin", "db1", "", "nothing has to be done")
}

// A clone of a volume that is not thin needs nothing of its extents once it is flattened: they come free with
// the volume, also if that was deleted before.
func TestAFlattenedCloneNeedsNoExtentsOfAnother(t *testing.T) {
	for _, before := range []bool{false, true} {
		w := withClone(t, false)
		w.listed = true
		w.must(Detach{Volume: "db1"})
		w.settle()
		remove := func() {
			w.must(DeleteVolume{Volume: "db1@mon"})
			w.must(DeleteVolume{Volume: "db1"})
			w.settle()
		}
		if before {
			remove()
			v := w.volume("db1")
			if v == nil || len(v.Legs) != 2 || !strings.Contains(w.s.volumeView(v).Legs[0].Reason, "c to be deleted or flattened") {
				t.Fatalf("the volume whose extents a clone needs is %+v", v)
			}
		}
		w.must(FlattenVolume{Volume: "c"})
		w.settle()
		if w.volume("c").flattening() {
			t.Fatal("it is not flattened")
		}
		if !before {
			if text, _ := explained(t, w, "db1"); !strings.Contains(text, "db1@mon") || strings.Contains(text, "need: c") {
				t.Errorf("explained as\n%s", text)
			}
			remove()
		}
		if v := w.volume("db1"); v != nil {
			t.Errorf("deleted before: %v: what nobody needs is %+v, %s", before, v, w.s.volumeView(v).Legs[0].Reason)
		}
		if err := w.take("tue", "c"); err != nil {
			t.Fatal(err)
		}
		w.settle()
		if x := w.volume("c@tue"); x == nil || x.State != VolumeReady {
			t.Errorf("a snapshot of the clone is %+v", x)
		}
	}
}

// What is left over the extents of a volume that is not thin names nobody that needs them, if nobody does.
func TestAnOtherThatNeedsNothingIsNotSaidToNeedIt(t *testing.T) {
	w := withClone(t, false)
	w.must(FlattenVolume{Volume: "c"})
	w.must(DeleteVolume{Volume: "db1@mon"})
	w.settle()
	for _, r := range w.s.volumeView(w.volume("db1")).Legs {
		if !strings.Contains(r.Reason, "do not need what it holds: c") {
			t.Errorf("leg %v: %q", r.ID, r.Reason)
		}
	}
	w.must(DeleteVolume{Volume: "c"})
	w.settle()
	for _, l := range w.volume("db1").Legs {
		if l.Based {
			t.Errorf("alone in its tree, a leg is %+v", l)
		}
	}
}

// A volume that is being deleted is not flattened any more, and nobody is told that it is.
func TestADeletedVolumeIsNotFlattened(t *testing.T) {
	w := withClone(t, true)
	w.must(FlattenVolume{Volume: "c"})
	w.must(DeleteVolume{Volume: "c"})
	if err := w.step(FlattenVolume{Volume: "c"}); !isReason(err, ReasonNotReady) {
		t.Errorf("asked for again: %v", err)
	}
	if view, _ := w.s.Volume("c"); view.Flatten != nil {
		t.Errorf("shown as %+v", view.Flatten)
	}
	if text, _ := explained(t, w, "c"); strings.Contains(text, "flatten") {
		t.Errorf("explained as\n%s", text)
	}
	for name := range w.targets {
		for _, l := range w.s.WantedTarget(name).Legs {
			if l.Flatten {
				t.Errorf("%s is told to flatten %v", name, l.Leg)
			}
		}
	}
}

// A drive whose reserve is a single extent gets a second one while something is flattened there, since that
// leaves the last one to hosts.
func TestASmallDriveHasAReserveForFlattening(t *testing.T) {
	for extents, want := range map[uint32][2]uint32{smallDrive - 1: {1, 1}, smallDrive: {1, 2}, 31: {1, 2}, 64: {4, 4}} {
		x := newThinTarget(t, extents)
		x.must(CreateVolume{Name: "c", Size: block.GiB, Copies: 1, Stripes: 1, Thin: true, Seed: testSeed(1)})
		for range 3 {
			x.hears()
			x.acts()
			x.report()
		}
		before, v := image.Count(x.reserve), x.s.volumes.Get(x.s.idOf("c"))
		v.Legs[0].Tree = v.Legs[0].ID.UUID // as that of a clone
		x.must(FlattenVolume{Volume: "c"})
		x.hears()
		x.acts()
		if got := [2]uint32{before, image.Count(x.reserve)}; got != want {
			t.Errorf("a drive of %d extents has a reserve of %d before and while c is flattened, want %d", extents, got, want)
		}
	}
}

// A target of an earlier version does nothing, and it is said why the volume waits. Once it is upgraded it
// does what it is told.
func TestAnOlderTargetIsWaitedFor(t *testing.T) {
	w := withClone(t, true)
	old := w.targets[w.volume("c").Legs[1].Node]
	old.level = flattenLevel - 1
	w.settle()
	w.must(FlattenVolume{Volume: "c"})
	w.settle()
	if text, _ := explained(t, w, "c"); !w.volume("c").flattening() || !strings.Contains(text, "target "+string(old.name)+" is of an earlier version, which does not flatten") {
		t.Errorf("%+v, explained as\n%s", w.volume("c").Flatten, text)
	}
	old.level = flattenLevel
	w.settle()
	if w.volume("c").flattening() {
		t.Error("it still waits")
	}
}

// What is left on a drive that is nearly full is kept for what hosts write: nothing is copied there until
// there is room. Whether a leg is flat already is heard all the same.
func TestFlatteningDoesNotFillADrive(t *testing.T) {
	for _, done := range []bool{false, true} {
		w := withClone(t, true)
		l := w.volume("c").Legs[0]
		// The mark is looked at now and then; see noteFull.
		w.s.drives[l.Drive].Full = fullTrouble
		w.s.lookedAtSpace = w.now.Add(time.Hour)
		if done {
			w.flat[l.ID] = copies
		}
		w.must(FlattenVolume{Volume: "c"})
		w.settle()
		if text, e := explained(t, w, "c"); done != !w.volume("c").flattening() || !done && (!strings.Contains(text, "is nearly full, and what is left is kept") || !slices.ContainsFunc(e.Actions, func(a string) bool { return strings.Contains(a, "weft leg move c 0.0") })) {
			t.Errorf("flat before: %v; explained as\n%s\n%v", done, text, e.Actions)
		}
		w.s.drives[l.Drive].Full = 0
		w.settle()
		if w.volume("c").flattening() {
			t.Error("it still waits")
		}
	}
}

// What a target says it waits for is told.
func TestWhatATargetWaitsForIsTold(t *testing.T) {
	w := withClone(t, true)
	l := w.volume("c").Legs[0]
	w.must(FlattenVolume{Volume: "c"})
	r := w.targetReport(w.targets[l.Node])
	for i := range r.Legs {
		if r.Legs[i].Leg == l.ID {
			r.Legs[i].FlatWaits = "space"
		}
	}
	w.must(TargetReported{Session: 1, Report: r})
	if view, _ := w.s.Volume("c"); !slices.ContainsFunc(view.Flatten.Waits, func(x string) bool { return strings.HasSuffix(x, "target "+string(l.Node)+": space") }) {
		t.Errorf("it waits for %q", view.Flatten.Waits)
	}
	if _, e := explained(t, w, "c"); !slices.ContainsFunc(e.Actions, func(a string) bool { return strings.HasSuffix(a, "`weft leg move c 0.0`") }) {
		t.Errorf("to be done: %q", e.Actions)
	}
}

// The history says when it began and when it was over.
func TestFlatteningIsInTheHistory(t *testing.T) {
	w := withClone(t, true)
	out, err := w.s.Step(w.now, FlattenVolume{Volume: "c"})
	if err != nil || !slices.ContainsFunc(out.Events, func(e event.Event) bool { return e.Kind == event.VolumeFlattening }) {
		t.Errorf("%v, %+v", err, out.Events)
	}
	for _, l := range w.volume("c").Legs {
		w.flat[l.ID] = copies
	}
	ended := false
	for range 3 {
		for _, x := range w.targets {
			w.targetObeys(x, w.s.WantedTarget(x.name))
			out, err := w.s.Step(w.now, TargetReported{Session: 1, Report: w.targetReport(x)})
			if err != nil {
				t.Fatal(err)
			}
			ended = ended || slices.ContainsFunc(out.Events, func(e event.Event) bool { return e.Kind == event.VolumeFlattened })
		}
	}
	if !ended {
		t.Error("no event says that it was flattened")
	}
}

// Whatever else is asked for and fails meanwhile, a volume that is said to be flattened has no leg that needs
// others.
func TestHistoriesOfClonesThatAreFlattened(t *testing.T) {
	flattened := 0
	for seed := range uint64(16) {
		w := newSnapWorldOf(t, seed, seed%4 != 3)
		w.cloning = true
		w.slow, w.pace = []int{0, 30, 60}[seed%3], []time.Duration{4 * time.Millisecond, 100 * time.Millisecond, 400 * time.Millisecond, time.Second}[seed%4]
		for range 800 {
			w.act()
		}
		flattened += w.flattened
	}
	if flattened == 0 {
		t.Error("no clone was flattened")
	}
}

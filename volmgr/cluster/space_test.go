// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// thinTarget is a target with one drive, as far as space is concerned. It acts on what the manager
// wants whenever the test says so, and gives extents to its trees by itself.
type thinTarget struct {
	t      *testing.T
	s      *State
	node   block.NodeName
	drive  *Drive
	wanted TargetWanted

	legs       map[block.LegID]WantedLeg // on the label
	trees      map[block.UUID][]image.Extent
	reserve    []image.Extent
	generation uint64
	begins     bool        // it has just started, and has not opened its trees
	full       bool        // writes wait
	stray      block.LegID // of no record: the manager keeps its extents from others
}

func newThinTarget(t *testing.T, extents uint32) *thinTarget {
	s := grid(1, 1, 1, fixed(extents))
	x := &thinTarget{t: t, s: s, node: "r0-n0", legs: map[block.LegID]WantedLeg{}, trees: map[block.UUID][]image.Extent{}}
	for _, d := range s.drives {
		x.drive = d
	}
	x.report()
	return x
}

func (x *thinTarget) step(in Input) error {
	_, err := x.s.Step(t0.Add(time.Duration(x.s.Generation())*time.Millisecond), in)
	x.check()
	return err
}

func (x *thinTarget) must(in Input) {
	x.t.Helper()
	if err := x.step(in); err != nil {
		x.t.Fatal(err)
	}
}

// hears takes what the manager wants now; it acts on that later.
func (x *thinTarget) hears() { x.wanted = x.s.WantedTarget(x.node) }

func (x *thinTarget) inTrees() (all []image.Extent) {
	for _, extents := range x.trees {
		all = append(all, extents...)
	}
	return image.Union(all, nil)
}

// acts does what it has heard, as package target does.
func (x *thinTarget) acts() {
	var granted []image.Extent
	for _, w := range x.wanted.Space {
		granted = w.Extents
	}
	x.reserve = image.Minus(granted, image.Union(x.inTrees(), x.legs[x.stray].Extents))
	for _, w := range x.wanted.Legs {
		_, there := x.legs[w.Leg]
		switch {
		case w.Remove:
			delete(x.legs, w.Leg)
			if extents := x.trees[w.Tree]; !w.Tree.IsZero() {
				x.reserve = image.Union(x.reserve, extents)
				delete(x.trees, w.Tree)
			}
		case there:
			x.legs[w.Leg] = w
		case w.Tree.IsZero():
			x.legs[w.Leg] = w
		case len(x.reserve) > 0:
			x.legs[w.Leg], x.trees[w.Tree] = w, nil
			x.grows(w.Tree)
		}
	}
	x.generation = x.wanted.Generation
	x.check()
}

func (x *thinTarget) grows(tree block.UUID) {
	more := image.First(x.reserve, 1, false)
	x.reserve = image.Minus(x.reserve, more)
	x.trees[tree] = image.Union(x.trees[tree], more)
	x.check()
}

// shrinks returns what a tree has beyond one extent.
func (x *thinTarget) shrinks(tree block.UUID) {
	back := image.First(x.trees[tree], image.Count(x.trees[tree])-1, true)
	x.trees[tree] = image.Minus(x.trees[tree], back)
	x.reserve = image.Union(x.reserve, back)
	x.check()
}

func (x *thinTarget) report() {
	d := DriveReport{Drive: x.drive.ID, Cluster: x.s.ClusterID(), Device: x.drive.Device, Extents: x.drive.Extents, Reserve: x.reserve}
	r := TargetReport{Node: x.node, BootID: "1", Level: block.KnownLevel, ClusterID: x.s.ClusterID(), Generation: x.generation, Thin: true}
	for tree, extents := range x.trees {
		d.Trees = append(d.Trees, TreeReport{tree, extents})
	}
	for id, w := range x.legs {
		d.Legs = append(d.Legs, evidence.LegLabel{Leg: id, Image: w.Image, Zeroed: true, Volume: w.Volume})
		r.Legs = append(r.Legs, LegReport{Leg: id, Ready: !x.begins, Zeroed: w.Size, Size: w.Size, Full: x.full})
	}
	r.Drives = []DriveReport{d}
	x.must(TargetReported{Session: 1, Report: r})
}

// check finds an extent that has two owners, and one that the label has and the manager could give
// away.
func (x *thinTarget) check() {
	x.t.Helper()
	d := x.s.drives[x.drive.ID]
	count := func(lists ...[]image.Extent) (n uint32) {
		for _, l := range lists {
			n += image.Count(l)
		}
		return n
	}
	label := image.Union(x.inTrees(), x.reserve)
	var legs []image.Extent
	for _, v := range x.s.volumes.All() {
		legs = append(legs, v.extentsOn(d.ID)...)
	}
	for id, w := range x.legs {
		if _, recorded := x.s.onDrive[d.ID][id]; !recorded && id != x.stray && image.Count(w.Extents) > 0 {
			x.t.Fatalf("leg %v is on the label and not in the records: its extents could be given away", id)
		}
	}
	switch {
	case count(image.Minus(label, nil)) != count(x.reserve)+func() (n uint32) {
		for _, extents := range x.trees {
			n += image.Count(extents)
		}
		return n
	}():
		x.t.Fatal("two trees have an extent")
	case count(image.Minus(label, d.spaceTaken())) > 0:
		x.t.Fatalf("the label has %v, and only %v and %v are recorded", label, d.Space, d.Returning)
	case count(image.Minus(legs, d.spaceTaken())) != count(legs):
		x.t.Fatalf("legs have %v, and %v are granted, %v coming back", legs, d.Space, d.Returning)
	}
}

func (x *thinTarget) create(name string, thin bool, size block.Size, seed int) error {
	return x.step(CreateVolume{Name: block.VolumeName(name), Size: size, Copies: 1, Stripes: 1, Thin: thin, Seed: testSeed(seed)})
}

// settles lets both ends go on until nothing changes.
func (x *thinTarget) settles() {
	for range 6 {
		x.hears()
		x.acts()
		x.report()
	}
}

func TestADriveHasAReserveAsLongAsItHasThinLegs(t *testing.T) {
	x := newThinTarget(t, 100)
	x.settles()
	if n := image.Count(x.reserve); n != 0 {
		t.Errorf("without thin legs the reserve is %d extents", n)
	}
	if err := x.create("thin", true, 200*block.GiB, 1); err != nil { // more than the drive has
		t.Fatal(err)
	}
	x.settles()
	v, err := x.s.Volume("thin")
	if err != nil || v.State != VolumeReady || len(x.trees) != 1 {
		t.Fatalf("the volume is %v, %v, with %d trees", v.State, err, len(x.trees))
	}
	if n := image.Count(x.reserve); n < 3 || n > 8 {
		t.Errorf("the reserve is %d extents, want about four", n)
	}
	var tree block.UUID
	for tree = range x.trees {
	}
	for range 40 {
		x.grows(tree)
		x.settles()
	}
	if got := image.Count(x.trees[tree]); got != 41 {
		t.Errorf("the tree has %d extents", got)
	}
	x.shrinks(tree)
	x.settles()
	for _, d := range x.s.DrivesAfter(x.node, "") {
		if d.Thin > 10*block.ExtentSize || d.ThinUsed != block.ExtentSize || d.Promised != 200*block.GiB || d.Allocated != d.Thin {
			t.Errorf("after it shrank, the drive is %v allocated, %v thin, %v used, %v promised", d.Allocated, d.Thin, d.ThinUsed, d.Promised)
		}
	}
	x.must(DeleteVolume{Volume: "thin"})
	x.settles()
	if d := x.s.drives[x.drive.ID]; len(d.Space)+len(d.Returning)+len(x.reserve) > 0 {
		t.Errorf("after the last thin leg went, %v and %v are recorded, %v is on the label", d.Space, d.Returning, x.reserve)
	}
}

// A target may report its lists before it says, in a report that repeats them, that it has acted on what
// was taken back.
func TestSpaceIsFreeWhenARepeatedReportSaysThatItCameBack(t *testing.T) {
	x := newThinTarget(t, 100)
	if err := x.create("thin", true, block.GiB, 1); err != nil {
		t.Fatal(err)
	}
	x.settles()
	x.must(DeleteVolume{Volume: "thin"})
	for len(x.s.drives[x.drive.ID].Returning) == 0 {
		x.hears()
		x.acts()
		x.report()
	}
	before := x.generation
	x.hears()
	x.acts()
	now := x.generation
	x.generation = before
	x.report()
	x.must(TargetRepeated{1, x.node, now})
	for _, d := range x.s.DrivesAfter(x.node, "") {
		if d.Allocated != 0 {
			t.Errorf("the drive's only volume is deleted, and %v are allocated", d.Allocated)
		}
	}
}

// A full drive gives a thin volume what another volume leaves, in the step that frees it.
func TestWhatAVolumeLeavesGoesToThinOnesThatNeedIt(t *testing.T) {
	x := newThinTarget(t, 16)
	if err := x.create("thin", true, 20*block.GiB, 1); err != nil {
		t.Fatal(err)
	}
	x.settles()
	if err := x.create("plain", false, block.Size(x.s.free(x.drive.ID))*block.ExtentSize, 2); err != nil {
		t.Fatal(err)
	}
	x.settles()
	for tree := range x.trees {
		for len(x.reserve) > 0 {
			x.grows(tree)
		}
	}
	x.settles()
	if err := x.create("another", true, block.GiB, 3); err == nil || !strings.Contains(err.Error(), "no space") {
		t.Errorf("a thin volume on a drive without a free extent: %v", err)
	}
	x.must(DeleteVolume{Volume: "plain"})
	x.settles()
	if len(x.reserve) == 0 {
		t.Error("the drive has room, and its trees have no reserve")
	}
}

func TestADrivePromisesTenTimesItsSize(t *testing.T) {
	x := newThinTarget(t, 100)
	if err := x.create("large", true, 240*block.GiB, 1); err != nil {
		t.Fatal(err)
	}
	x.settles()
	if err := x.create("more", true, 20*block.GiB, 2); err == nil {
		t.Error("a drive of 25 GiB promised 260 GiB")
	}
	if err := x.step(ExpandVolume{Volume: "large", Size: 260 * block.GiB}); err == nil || !strings.Contains(err.Error(), "10 times its size") {
		t.Errorf("expanded beyond what the drive may promise: %v", err)
	}
	x.must(ExpandVolume{Volume: "large", Size: 245 * block.GiB})
	x.settles()
	if v, err := x.s.Volume("large"); err != nil || v.Size != 245*block.GiB {
		t.Errorf("after the expansion: %v, %v", v.Size, err)
	}
}

// An operator says how much drives may promise. What was promised before stays so.
func TestHowMuchDrivesMayPromiseIsAPolicy(t *testing.T) {
	x := newThinTarget(t, 100)
	if err := x.create("first", true, 20*block.GiB, 1); err != nil {
		t.Fatal(err)
	}
	x.settles()
	for i, c := range []struct {
		overcommit  float64
		size        block.Size
		fits        bool
		left        block.Size
		description string
	}{
		{1, 5 * block.GiB, true, 0, "a drive of 25 GiB promises 25 GiB"},
		{1, block.GiB, false, 0, "and no more"},
		{0.5, block.GiB, false, 0, "nor if it has promised more than it may"},
		{1.5, 10 * block.GiB, true, 2*block.GiB + 512*block.MiB, "half as much again"},
	} {
		x.s.SetPolicy(Policy{Overcommit: c.overcommit})
		kinds := []bool{true}
		if !c.fits { // what is refused is refused to any volume
			kinds = []bool{true, false}
		}
		for _, thin := range kinds {
			if err := x.create(fmt.Sprintf("v%d", i), thin, c.size, 2+i); (err == nil) != c.fits {
				t.Errorf("%s: thin %v: %v", c.description, thin, err)
			}
		}
		x.settles()
		if got, err := x.s.Capacity(CreateVolume{Copies: 1, Stripes: 1, Thin: true}); err != nil || got.Available != c.left {
			t.Errorf("%s: %v are left, %v; want %v", c.description, got.Available, err, c.left)
		}
	}
	x.s.SetPolicy(Policy{Overcommit: 1})
	for again, want := range map[bool]bool{false: false, true: true} {
		at := x.s.candidate(x.s.drives[x.s.sortedDrives()[0]], "", 0, CreateVolume{Thin: true, again: again})
		if got := at.Free() > 0; got != want {
			t.Errorf("a leg has a place on a drive that has promised more than it may: %v, if it is made again: %v", got, again)
		}
	}
}

// Kubernetes is told what may be promised: the drive has less.
func TestTheCapacityForThinVolumesIsWhatMayBePromised(t *testing.T) {
	x := newThinTarget(t, 100)
	if err := x.create("thin", true, 40*block.GiB, 1); err != nil {
		t.Fatal(err)
	}
	x.settles()
	c, err := x.s.Capacity(CreateVolume{Copies: 1, Stripes: 1, Thin: true})
	if want := 210 * block.GiB; err != nil || c.Available != want || c.Maximum != want {
		t.Errorf("for thin volumes: %v, at most %v, %v; want %v", c.Available, c.Maximum, err, want)
	}
	if c, err := x.s.Capacity(CreateVolume{Copies: 1, Stripes: 1}); err != nil || c.Available >= 25*block.GiB {
		t.Errorf("for other volumes: %v, %v; want less than the drive has", c.Available, err)
	}
}

// A volume tells once that its writes wait and once that they go on, also if its target begins anew
// meanwhile; before that it says that its drive is nearly full.
func TestAFullDriveIsToldOnce(t *testing.T) {
	x := newThinTarget(t, 100)
	if err := x.create("thin", true, 100*block.GiB, 1); err != nil {
		t.Fatal(err)
	}
	x.settles()
	told := func(want ...string) {
		t.Helper()
		x.report()
		var got []string
		for _, e := range x.s.Events("volume thin", 0, 100) {
			if e.Kind == event.VolumeFull || e.Kind == event.VolumeRoom {
				got = append(got, e.Kind)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("events %v, want %v", got, want)
		}
	}
	explained := func(want string) {
		t.Helper()
		e, err := x.s.Explain("thin")
		if text := fmt.Sprint(e); err != nil || !strings.Contains(text, want) {
			t.Errorf("explained as %s, %v; want %q", text, err, want)
		}
	}
	for tree := range x.trees {
		for range 82 {
			x.grows(tree)
			x.settles()
		}
	}
	x.must(Tick{}) // notices it
	explained("is nearly full")
	told()
	x.full = true
	told(event.VolumeFull)
	explained("space for leg 0.0")
	if wrong := strings.Join(x.s.Status().Wrong, "\n"); !strings.Contains(wrong, "volume thin waits for space for leg 0.0") {
		t.Errorf("status says %q", wrong)
	}
	if v, err := x.s.Volume("thin"); err != nil || !strings.Contains(v.Legs[0].Reason, "its drive is full") || v.Health != Healthy {
		t.Errorf("the leg says %q, and the volume is %v, %v", v.Legs[0].Reason, v.Health, err)
	}
	x.begins, x.full = true, false
	told(event.VolumeFull)
	x.begins, x.full = false, true
	told(event.VolumeFull)
	x.full = false
	told(event.VolumeFull, event.VolumeRoom)
}

func TestThinLegsGoWhereTheyAreServed(t *testing.T) {
	x := newThinTarget(t, 100)
	x.s.targets[x.node].report.Thin = false
	if err := x.create("thin", true, block.GiB, 1); err == nil || !strings.Contains(err.Error(), "serves no thin volumes") {
		t.Errorf("placed on a target that serves no thin legs: %v", err)
	}
}

// Whatever is late, no extent has two owners, and none that the label has is free by the records. The
// manager restarts, and goes on with a store that is older than the labels.
func TestNoExtentIsGivenAwayTwice(t *testing.T) {
	for seed := range uint64(600) {
		r := rand.New(rand.NewPCG(seed, 1))
		x := newThinTarget(t, 24)
		names := map[string]bool{}
		for i := range 150 {
			trees := slices.Collect(func(yield func(block.UUID) bool) {
				for _, d := range x.s.WantedTarget(x.node).Legs {
					if _, there := x.trees[d.Tree]; there && !yield(d.Tree) {
						return
					}
				}
			})
			switch r.IntN(9) {
			case 0:
				name := fmt.Sprintf("v%d", i)
				if x.create(name, r.IntN(3) > 0, block.Size(1+r.IntN(6))*block.ExtentSize, int(seed)*1000+i) == nil {
					names[name] = true
				}
			case 1:
				for name := range names {
					x.must(DeleteVolume{Volume: name})
					delete(names, name)
					break
				}
			case 2, 3:
				x.hears()
			case 4:
				if x.wanted.Generation > 0 {
					x.acts()
				}
			case 5, 6:
				x.report()
			case 7:
				if len(trees) > 0 && len(x.reserve) > 0 {
					x.grows(trees[r.IntN(len(trees))])
				}
			case 8:
				if len(trees) > 0 {
					x.shrinks(trees[r.IntN(len(trees))])
				}
			}
		}
		for name := range names {
			x.must(DeleteVolume{Volume: name})
		}
		x.settles()
		x.settles()
		if d := x.s.drives[x.drive.ID]; len(d.Space)+len(d.Returning)+len(x.reserve)+len(x.trees) > 0 || x.s.free(d.ID) != 24 {
			t.Fatalf("seed %d: everything is deleted, and %v and %v are recorded, %v is on the label, %d extents are free", seed, d.Space, d.Returning, x.reserve, x.s.free(d.ID))
		}
	}
}

// A restored store grants what it gave to another volume later. The drive's space goes on without that.
func TestSpaceThatALegOnTheLabelHasIsNotGranted(t *testing.T) {
	x := newThinTarget(t, 100)
	if err := x.create("thin", true, 10*block.GiB, 1); err != nil {
		t.Fatal(err)
	}
	x.settles()
	stray := WantedLeg{Leg: block.LegID{UUID: block.UUID{0xaa}}, Image: image.Image{Extents: []image.Extent{{Start: 40, Count: 5}}}}
	x.legs[stray.Leg], x.stray = stray, stray.Leg
	d := *x.s.drives[x.drive.ID]
	d.Space = image.Union(d.Space, stray.Extents)
	x.s.drives[d.ID] = &d
	x.settles()
	if got := x.s.drives[d.ID].Space; image.Count(got) == 0 || image.Count(image.Minus(stray.Extents, got)) < 5 {
		t.Errorf("%v is granted, and a leg has %v", got, stray.Extents)
	}
	for tree := range x.trees {
		x.grows(tree)
	}
	before := image.Count(x.s.drives[d.ID].Space)
	x.settles()
	if image.Count(x.s.drives[d.ID].Space) < before {
		t.Error("trees get no more")
	}
}

// A store without a record of a drive's space, as after a restore, takes it from the label.
func TestSpaceIsTakenFromTheLabel(t *testing.T) {
	x := newThinTarget(t, 100)
	if err := x.create("thin", true, 10*block.GiB, 1); err != nil {
		t.Fatal(err)
	}
	x.settles()
	for tree := range x.trees {
		x.grows(tree)
	}
	had := image.Union(x.inTrees(), x.reserve)
	d := *x.s.drives[x.drive.ID]
	d.Space = nil
	x.s.drives[d.ID] = &d
	x.report()
	if got := x.s.drives[d.ID].Space; image.Count(image.Minus(had, got)) > 0 {
		t.Errorf("the label has %v, and %v is recorded", had, got)
	}
}

func TestAThinVolumeWithChecksumsIsRefused(t *testing.T) {
	x := newThinTarget(t, 100)
	_, err := x.s.Step(t0, CreateVolume{Name: "db1", Size: block.GiB, Thin: true, Integrity: true, Seed: testSeed(9)})
	var e *Error
	if !errors.As(err, &e) || e.Kind != Unimplemented || e.Field != "thin" || !strings.Contains(e.Hint, "`--thin`") {
		t.Fatalf("thin with checksums: %v", err)
	}
	if _, there := x.s.byName.Find("db1"); there {
		t.Error("the volume is there")
	}
}

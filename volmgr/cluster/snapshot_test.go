// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/placement"
)

// snapWorld is volumes with snapshots: targets that keep what was written to each leg and freeze it when
// they are told to, and hosts that write to all legs in sync and hold that when they are told to. Messages
// may take any time, in order. A write is a number, higher than all before it; the hosts of all volumes
// know all numbers that were acknowledged, as users that talk to one another do.
type snapWorld struct {
	t   *testing.T
	rng *rand.Rand
	s   *State
	now time.Time

	targets map[block.NodeName]*snapTarget
	hosts   map[block.NodeName]*snapHost
	legs    map[block.LegID]int // what each leg holds; of a frozen one for ever
	frozen  map[block.LegID]bool
	numbers int
	// Of each volume: the newest number that was acknowledged, and that was begun.
	acked, begun map[block.VolumeID]int
	history      map[block.VolumeID][]snapAck
	// asked is, by snapshot, what was acknowledged of its origin when it was asked for.
	asked map[block.VolumeID]int
	taken map[block.VolumeID]bool // that were complete
	// back has volumes that are going back: true if targets may have begun. whole are legs that have to be
	// copied whole, since their volume went back without them, and returned counts those that arrived.
	back     map[block.VolumeID]bool
	whole    map[block.LegID]bool
	returned int
	// flat has legs that need nothing of others, and flattened counts the volumes that became so.
	flat         map[block.LegID]int
	flattened    int
	copied       int // legs of snapshots
	cloning      bool
	slow         int           // per cent of messages that wait
	pace         time.Duration // the most that passes between two things that happen
	seeds, steps int
	listed       bool // see listedEvery
}

type snapTarget struct {
	name       block.NodeName
	wanted     []TargetWanted
	said       []TargetReport
	legs       map[block.LegID]WantedLeg
	ready      map[block.LegID]bool
	admitted   map[block.VolumeID]block.Epoch
	generation uint64
	down       bool
	level      block.Level
	noTrees    bool   // it does not get to make trees over plain legs
	copyFails  string // why it cannot copy legs of snapshots; empty: it can
	failed     map[block.LegID]time.Time
	says       func(*TargetReport) // changes what it reports; nil: nothing does
}

type snapHost struct {
	name       block.NodeName
	wanted     []InitiatorWanted
	said       []InitiatorReport
	generation uint64
	boot       int
	volumes    map[block.VolumeID]WantedAttachment
	holds      map[string]time.Time // since when
	writing    map[block.VolumeID]*snapWrite
	old        bool   // its agent cannot freeze file systems
	thaws      bool   // they are thawed again before I/O is held
	cannot     string // why they cannot be frozen
	told       []WantedHold
}

// snapWrite is a write under way: to the legs in to it has not come yet.
type snapWrite struct {
	number int
	to     []block.LegID
}

func newSnapWorld(t *testing.T, seed uint64) *snapWorld { return newSnapWorldOf(t, seed, true) }

// newSnapWorldOf is newSnapWorld with volumes that are thin or not.
func newSnapWorldOf(t *testing.T, seed uint64, thin bool) *snapWorld {
	w := &snapWorld{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), s: grid(3, 1, 1, fixed(100)), now: t0,
		targets: map[block.NodeName]*snapTarget{}, hosts: map[block.NodeName]*snapHost{}, legs: map[block.LegID]int{}, frozen: map[block.LegID]bool{},
		history: map[block.VolumeID][]snapAck{},
		acked:   map[block.VolumeID]int{}, begun: map[block.VolumeID]int{}, asked: map[block.VolumeID]int{}, taken: map[block.VolumeID]bool{},
		back: map[block.VolumeID]bool{}, whole: map[block.LegID]bool{}, flat: map[block.LegID]int{},
	}
	for name := range w.s.nodes {
		w.targets[name] = &snapTarget{name: name, level: block.KnownLevel, legs: map[block.LegID]WantedLeg{}, ready: map[block.LegID]bool{}, admitted: map[block.VolumeID]block.Epoch{}}
	}
	for _, name := range []block.NodeName{"c1", "c2"} {
		w.hosts[name] = &snapHost{name: name, boot: 1, volumes: map[block.VolumeID]WantedAttachment{}, holds: map[string]time.Time{}, writing: map[block.VolumeID]*snapWrite{}}
	}
	w.settle()
	for i, host := range []block.NodeName{"c1", "c2"} {
		name := block.VolumeName(fmt.Sprintf("db%d", i+1))
		w.must(CreateVolume{Name: name, Size: block.GiB, Copies: 2, Stripes: 1, Thin: thin, Seed: w.seed()})
		w.settle()
		w.must(Attach{Volume: string(name), Node: host})
	}
	w.settle()
	return w
}

func (w *snapWorld) seed() Seed { w.seeds++; return testSeed(1000 + w.seeds) }

func (w *snapWorld) step(in Input) error {
	was := map[block.NodeName]told{}
	if w.steps++; w.listed || w.steps%listedEvery == 0 {
		for name := range w.targets {
			was[name] = toldBy(w.s, name)
		}
	}
	out, err := w.s.Step(w.now, in)
	for name, was := range was {
		if changed, woken := out.Changed[name]; !woken || changed != nil {
			is := toldBy(w.s, name)
			for id := range is.target {
				if _, there := was.target[id]; there && !changed[id] && !reflect.DeepEqual(is.target[id], was.target[id]) {
					w.t.Fatalf("%T changes what %s is told of %s, and does not list it:\n%+v\nwas\n%+v", in, name, w.s.volumes.Get(id).Name, is.target[id].Legs, was.target[id].Legs)
				}
			}
		}
	}
	w.check()
	return err
}

// listedEvery is in how many steps one is checked to list what it changes of what targets are told, which takes
// three times as long as all else; with listed each is.
const listedEvery = 4

func (w *snapWorld) must(in Input) {
	w.t.Helper()
	if err := w.step(in); err != nil {
		w.t.Fatalf("%T: %v", in, err)
	}
}

func (w *snapWorld) volume(name string) *Volume {
	return w.s.volumes.Get(w.s.idOf(block.VolumeName(name)))
}

// take asks for snapshots of db1, db2 or both.
func (w *snapWorld) take(name string, of ...string) error {
	in := CreateSnapshots{Seed: w.seed()}
	for _, v := range of {
		in.Snapshots = append(in.Snapshots, NewSnapshot{Volume: v, Name: name})
	}
	before := maps.Clone(w.acked)
	err := w.step(in)
	for _, v := range of {
		if x := w.volume(v + "@" + name); err == nil && x != nil {
			if _, known := w.asked[x.ID]; !known {
				w.asked[x.ID] = before[x.Snapshot.Volume]
			}
		}
	}
	return err
}

// settle lets everything go on until nothing is on its way.
func (w *snapWorld) settle() { w.goOn(40) }

// goOn lets everybody act and be told some times, without delay.
func (w *snapWorld) goOn(times int) {
	slow := w.slow
	w.slow = 0
	for range times {
		w.now = w.now.Add(20 * time.Millisecond)
		for _, name := range slices.Sorted(maps.Keys(w.targets)) {
			w.targetActs(w.targets[name])
		}
		for _, name := range slices.Sorted(maps.Keys(w.hosts)) {
			h := w.hosts[name]
			w.hostActs(h)
			if len(h.writing) > 0 {
				w.writes(h)
			}
		}
		w.must(Tick{})
	}
	w.slow = slow
}

func (w *snapWorld) late() bool { return w.rng.IntN(100) < w.slow }

func (w *snapWorld) targetActs(t *snapTarget) {
	if t.down {
		return
	}
	t.wanted = append(t.wanted, w.s.WantedTarget(t.name))
	for len(t.wanted) > 0 && !w.late() {
		w.targetObeys(t, t.wanted[0])
		t.wanted = t.wanted[1:]
	}
	t.said = append(t.said, w.targetReport(t))
	for len(t.said) > 0 && !w.late() {
		w.must(TargetReported{Session: 1, Report: t.said[0]})
		t.said = t.said[1:]
	}
}

func (w *snapWorld) targetObeys(t *snapTarget, wanted TargetWanted) {
	for _, a := range wanted.Admissions {
		t.admitted[a.Volume] = max(t.admitted[a.Volume], a.Epoch)
	}
	for _, l := range wanted.Legs {
		w.checkBase(t, l)
		if l.Remove {
			delete(t.legs, l.Leg)
			delete(t.ready, l.Leg)
			continue
		}
		was := t.legs[l.Leg]
		t.legs[l.Leg] = l
		w.flatten(t, l)
		if l.Origin.Restore {
			if was.Revision < l.Revision { // its label is not prepared
				t.ready[l.Leg] = false
			} else if !t.ready[l.Leg] {
				w.goBack(t, l)
			}
			continue
		}
		if l.Origin.Copy != nil {
			w.copies(t, l)
			continue
		}
		from, freezes := l.Origin.Leg, !l.Origin.Leg.IsZero()
		switch {
		case t.ready[l.Leg] || l.Origin.Wait:
		case freezes && !t.ready[from]:
			w.t.Fatalf("leg %v is to be made of %v, which %s has not", l.Leg, from, t.name)
		case freezes:
			w.legs[l.Leg], t.ready[l.Leg], w.frozen[l.Leg] = w.legs[from], true, !l.Origin.Clone
		default:
			t.ready[l.Leg] = true
		}
	}
	t.generation = wanted.Generation
}

// checkBase finds a leg that is told to go while others need its extents, or to lose its tree while others are in
// it, and one that is to be frozen before there is a tree over it.
func (w *snapWorld) checkBase(t *snapTarget, l WantedLeg) {
	was := t.legs[l.Leg]
	if was.Kind == image.Based && l.Kind != image.Based || l.Remove && was.Kind == image.Based {
		for id, o := range t.legs {
			if id != l.Leg && o.Tree == was.Tree && !(l.Remove && w.isFlat(t, o)) {
				w.t.Fatalf("leg %v of %s is to lose its tree, in which leg %v of %s is", l.Leg, was.Volume.Name, id, o.Volume.Name)
			}
		}
	}
	from, there := t.legs[l.Origin.Leg]
	if there && !l.Origin.Wait && from.Kind == image.Plain {
		w.t.Fatalf("leg %v is to be made of %v, which has no tree", l.Leg, l.Origin.Leg)
	}
}

// copies makes a leg what another one holds, if that is exported to its target and it does not take longer.
func (w *snapWorld) copies(t *snapTarget, l WantedLeg) {
	source := l.Origin.Copy
	if t.ready[l.Leg] || l.Origin.Wait || w.rng.IntN(3) == 0 {
		return
	}
	if t.copyFails != "" {
		if t.failed == nil {
			t.failed = map[block.LegID]time.Time{}
		}
		if t.failed[l.Leg].IsZero() {
			t.failed[l.Leg] = w.now
		}
		return
	}
	for _, on := range w.targets {
		for _, x := range w.s.WantedTarget(on.name).Exports {
			if on.down || x.NQN != source.NQN || x.Host != source.Host || !x.ReadOnly || x.Namespaces[0].UUID != source.UUID {
				continue
			}
			from, base := x.Namespaces[0].Leg, l.Origin.Leg
			if !on.ready[from] || !w.frozen[from] {
				w.t.Fatalf("leg %v is to be copied of %v, which is no snapshot on %s", l.Leg, from, on.name)
			}
			if !base.IsZero() {
				if !t.ready[base] || !on.ready[source.Since] {
					return // one was deleted meanwhile: the target finds out
				}
				if !w.frozen[base] || w.legs[base] != w.legs[source.Since] {
					w.t.Fatalf("leg %v begins as %v, which is not what %v is", l.Leg, base, source.Since)
				}
			}
			w.legs[l.Leg], w.frozen[l.Leg], t.ready[l.Leg] = w.legs[from], true, true
			w.copied++
			return
		}
	}
}

// goBack makes a leg what a snapshot's leg holds. If the store were lost now, the labels of all legs in
// sync would have to say that some may have done so.
func (w *snapWorld) goBack(t *snapTarget, l WantedLeg) {
	w.legs[l.Leg], t.ready[l.Leg] = w.legs[l.Origin.Leg], true
	for _, h := range w.hosts {
		a := h.volumes[l.Volume.ID]
		released := a.Detach && h.writing[a.Volume] == nil // and its agent has said so, and not heard yet that it is over
		if a.Volume == l.Volume.ID && a.Epoch >= l.Volume.Epoch && !released {
			w.t.Fatalf("a leg of volume %s goes back while %s has it", l.Volume.Name, h.name)
		}
	}
	for _, x := range w.targets {
		for id, o := range x.legs {
			if slices.Contains(l.Volume.InSync, id) && o.Volume.RestoringTo != l.Volume.RestoringTo {
				w.t.Fatalf("leg %v goes back before the label of %v says so", l.Leg, id)
			}
		}
	}
}

func (w *snapWorld) targetReport(t *snapTarget) TargetReport {
	var d *Drive
	for id := range w.s.drivesOn[t.name] {
		d = w.s.drives[id]
	}
	report := DriveReport{Drive: d.ID, Cluster: w.s.ClusterID(), Device: d.Device, Extents: d.Extents, Reserve: d.Space}
	r := TargetReport{Node: t.name, BootID: "1", Level: t.level, ClusterID: w.s.ClusterID(), Generation: t.generation, Thin: true, Snapshots: true, PlainSnapshots: true, Copies: t.level >= copiesLevel}
	for _, id := range sorted(t.legs) {
		l := t.legs[id]
		img, based := l.Image, l.Kind == image.Based && !t.noTrees
		if img.Kind == image.Based {
			img.Kind = image.Plain
		}
		report.Legs = append(report.Legs, evidence.LegLabel{Leg: id, Column: l.Column, Copy: l.Copy, Image: img, Based: based, Tree: l.Tree, Zeroed: t.ready[id] || based, GoingBack: based && !t.ready[id], ZeroedExtents: 8, Volume: l.Volume, Revision: l.Revision, Boot: "1"})
		made := LegReport{Leg: id, Ready: t.ready[id], Size: l.Size}
		if made.Ready {
			made.Zeroed = l.Size
		}
		if l.Flatten && t.level >= flattenLevel {
			if made.Flat = w.flat[id] >= copies; !made.Flat {
				made.FlatLeft = block.Size(copies-w.flat[id]) * block.GiB
			}
		}
		r.Legs = append(r.Legs, made)
	}
	for _, id := range sorted(t.failed) {
		since := t.failed[id]
		if _, there := t.legs[id]; there && !t.ready[id] {
			r.Problems = append(r.Problems, Problem{Object: "leg " + id.String(), Doing: "copy to leg", Cause: t.copyFails, Since: since})
		}
	}
	for _, v := range sorted(t.admitted) {
		r.Admissions = append(r.Admissions, Admission{v, t.admitted[v]})
	}
	r.Drives = []DriveReport{report}
	if t.says != nil {
		t.says(&r)
	}
	return r
}

func (w *snapWorld) hostActs(h *snapHost) {
	h.wanted = append(h.wanted, w.s.WantedInitiator(h.name))
	for len(h.wanted) > 0 && !w.late() {
		w.hostObeys(h, h.wanted[0])
		h.wanted = h.wanted[1:]
	}
	h.said = append(h.said, w.hostReport(h))
	for len(h.said) > 0 && !w.late() {
		w.must(InitiatorReported{1, h.said[0]})
		h.said = h.said[1:]
	}
}

func (w *snapWorld) hostObeys(h *snapHost, wanted InitiatorWanted) {
	holds, volumes := map[string]time.Time{}, map[block.VolumeID]WantedAttachment{}
	for _, a := range wanted.Attachments {
		if a.BootID != h.bootID() {
			continue
		}
		if was := h.volumes[a.Volume]; was.Epoch < a.Epoch && a.Equalize {
			w.equalize(a)
		}
		volumes[a.Volume] = a
		h.told = append(h.told, a.Holds...)
		for _, x := range a.Holds {
			if x.Prepare { // nothing is held
				continue
			}
			if holds[x.ID] = w.now; !h.holds[x.ID].IsZero() {
				holds[x.ID] = h.holds[x.ID]
			}
		}
	}
	h.holds, h.volumes, h.generation = holds, volumes, wanted.Generation
	for v := range h.writing {
		if _, ok := volumes[v]; !ok {
			delete(h.writing, v)
		}
	}
}

// equalize makes the legs in sync of a volume equal, which a host may have written to one after the other.
func (w *snapWorld) equalize(a WantedAttachment) {
	from := -1
	for _, l := range a.Legs {
		switch now := w.s.volumes.Get(a.Volume).leg(l.Leg); {
		case l.State != LegInSync || now == nil || now.State != LegInSync:
		case from < 0:
			from = w.legs[l.Leg]
		default:
			w.legs[l.Leg] = from
		}
	}
}

func (h *snapHost) bootID() string { return fmt.Sprintf("%s-boot-%d", h.name, h.boot) }

// holding reports whether a volume's writes are held.
func (w *snapWorld) holding(h *snapHost, v block.VolumeID) bool {
	return slices.ContainsFunc(h.volumes[v].Holds, func(x WantedHold) bool { return !x.Prepare && w.now.Sub(h.holds[x.ID]) < x.Limit })
}

func (w *snapWorld) hostReport(h *snapHost) InitiatorReport {
	r := InitiatorReport{Node: h.name, BootID: h.bootID(), Generation: h.generation, Host: hostOf(string(h.name)), Level: block.KnownLevel, Freezes: !h.old, SeveralPaths: !h.old}
	for _, id := range sorted(h.volumes) {
		v := h.volumes[id]
		a := AttachmentReport{Volume: id, Epoch: v.Epoch, Grant: v.Grant, Phase: PhaseServing, Tells: true, Holds: map[string]HoldState{}, Freezes: map[string]FreezeReport{}}
		for _, x := range v.Holds {
			a.Freezes[x.ID] = FreezeReport{Error: h.cannot}
			switch {
			case h.cannot != "":
				a.Holds[x.ID] = HoldEnded
			case x.Prepare:
				a.Holds[x.ID] = HoldPrepared
			case w.now.Sub(h.holds[x.ID]) >= x.Limit:
				a.Holds[x.ID] = HoldEnded
			case h.writing[id] != nil:
				a.Holds[x.ID] = HoldPending
			default:
				a.Holds[x.ID], a.Freezes[x.ID] = HoldHeld, FreezeReport{Frozen: x.Freeze && !h.thaws}
			}
		}
		for _, l := range v.Legs {
			a.InUse = append(a.InUse, l.Leg)
		}
		if v.Detach && h.writing[id] == nil {
			a.Phase = PhaseDetachedClean
		}
		r.Attachments = append(r.Attachments, a)
	}
	return r
}

// writes begins a write of a host, or goes on with it.
func (w *snapWorld) writes(h *snapHost) {
	for _, id := range sorted(h.volumes) {
		v, x := h.volumes[id], h.writing[id]
		if x == nil {
			if !w.holding(h, id) && !v.Detach && v.Mode != AttachSharedReadOnly {
				w.numbers++
				x = &snapWrite{number: w.numbers}
				for _, l := range v.Legs {
					if l.State == LegInSync || l.State == LegRebuilding {
						x.to = append(x.to, l.Leg)
					}
				}
				w.rng.Shuffle(len(x.to), func(i, j int) { x.to[i], x.to[j] = x.to[j], x.to[i] })
				h.writing[id], w.begun[id] = x, x.number
			}
			continue
		}
		if len(x.to) > 0 { // one leg after the other, in any order
			leg := x.to[0]
			x.to = x.to[1:]
			if now := w.s.volumes.Get(id).leg(leg); now == nil || now.State != LegInSync && now.State != LegRebuilding {
				continue // it is recorded stale
			}
			if w.fenced(leg, id, v.Epoch) {
				delete(h.writing, id) // its device fails
				continue
			}
			if w.frozen[leg] {
				w.t.Fatalf("a host writes to the frozen leg %v", leg)
			}
			w.legs[leg] = x.number
			continue
		}
		w.acked[id] = x.number
		w.history[id] = append(w.history[id], snapAck{x.number, w.numbers})
		delete(h.writing, id)
	}
}

// checkBack finds a volume that went back to a snapshot and holds something else.
func (w *snapWorld) checkBack(v *Volume) {
	w.t.Helper()
	if x := v.Restoring; x != nil {
		if v.users() != "" {
			w.t.Fatalf("%s is attached to %s while it goes back", v.object(), v.users())
		}
		w.back[v.ID] = x.Switching || w.back[v.ID]
		return
	}
	began, was := w.back[v.ID]
	delete(w.back, v.ID)
	if !was || !began || v.State != VolumeReady {
		return
	}
	content := -1
	for i := range v.Legs {
		switch l := &v.Legs[i]; {
		case l.State != LegInSync:
			w.whole[l.ID] = true
		case content >= 0 && content != w.legs[l.ID]:
			w.t.Fatalf("%s went back, and its copies hold %d and %d", v.object(), content, w.legs[l.ID])
		default:
			content = w.legs[l.ID]
		}
	}
	w.returned++
	w.acked[v.ID], w.begun[v.ID] = content, content
	w.history[v.ID] = slices.DeleteFunc(w.history[v.ID], func(a snapAck) bool { return a.number > content })
}

// fenced reports whether a leg's target refuses what hosts write at an epoch.
func (w *snapWorld) fenced(leg block.LegID, id block.VolumeID, epoch block.Epoch) bool {
	for _, t := range w.targets {
		if _, has := t.legs[leg]; has && t.admitted[id] > epoch {
			return true
		}
	}
	return false
}

// check finds a complete snapshot that is not what its volume was at one moment.
func (w *snapWorld) check() {
	w.t.Helper()
	for _, v := range w.s.volumes.All() {
		w.checkBack(v)
		w.checkFlat(v)
	}
	groups := map[string]map[block.VolumeID]int{}
	for id, v := range w.s.volumes.All() {
		if !v.IsSnapshot() || v.State != VolumeReady {
			continue
		}
		content := -1
		for i := range v.Legs {
			l := &v.Legs[i]
			if !l.trusted() {
				continue
			}
			if !w.frozen[l.ID] {
				w.t.Fatalf("%s is ready, and its %v is not frozen", v.object(), l)
			}
			if got := w.legs[l.ID]; content >= 0 && got != content {
				w.t.Fatalf("%s: its copies hold %d and %d", v.object(), content, got)
			} else {
				content = got
			}
		}
		if content < 0 {
			w.t.Fatalf("%s is ready without a leg", v.object())
		}
		if !w.taken[id] {
			w.taken[id] = true
			if least := w.asked[id]; content < least {
				w.t.Fatalf("%s holds %d, and %d was acknowledged before it was asked for", v.object(), content, least)
			}
		}
		if g := v.Snapshot.Group; g != "" {
			if groups[g] == nil {
				groups[g] = map[block.VolumeID]int{}
			}
			groups[g][v.Snapshot.Volume] = content
		}
	}
	w.checkGroups(groups)
}

// checkGroups finds a number in one snapshot that is higher than one which another volume of the group had
// acknowledged before that number was drawn, and that its snapshot lacks.
func (w *snapWorld) checkGroups(groups map[string]map[block.VolumeID]int) {
	w.t.Helper()
	for _, contents := range groups {
		for a, x := range contents {
			for b, y := range contents {
				if a != b && w.ackedBefore(b, x) > y {
					w.t.Fatalf("snapshots of one moment hold %d and %d, and %d was acknowledged before %d was written", x, y, w.ackedBefore(b, x), x)
				}
			}
		}
	}
}

// snapAck is a number that was acknowledged before any above at was drawn.
type snapAck struct{ number, at int }

// ackedBefore is the newest number of a volume that was acknowledged before x was drawn.
func (w *snapWorld) ackedBefore(v block.VolumeID, x int) (newest int) {
	for _, a := range w.history[v] {
		if a.at < x {
			newest = max(newest, a.number)
		}
	}
	return newest
}

// act does one thing at random.
func (w *snapWorld) act() {
	if w.cloning && w.rng.IntN(50) == 0 {
		w.clones()
		return
	}
	volume := []string{"db1", "db2"}[w.rng.IntN(2)]
	host := w.hosts[[]block.NodeName{"c1", "c2"}[w.rng.IntN(2)]]
	target := w.targets[slices.Sorted(maps.Keys(w.targets))[w.rng.IntN(3)]]
	switch w.rng.IntN(100) {
	case 0, 1:
		w.refusable(w.take(fmt.Sprintf("s%d", w.seeds), volume))
	case 2, 3:
		w.refusable(w.take(fmt.Sprintf("s%d", w.seeds), "db1", "db2"))
	case 4:
		w.refusable(w.step(Detach{Volume: volume, Force: w.rng.IntN(3) == 0}))
	case 5, 6:
		w.refusable(w.step(Attach{Volume: volume, Node: host.name}))
	case 7:
		w.loseLeg(volume)
	case 8:
		w.recover(volume)
	case 9:
		if target.down = !target.down && w.rng.IntN(4) == 0; target.down {
			target.wanted, target.said = nil, nil
			w.must(TargetLost{Node: target.name, Session: 1})
		}
	case 10:
		w.now = w.now.Add(time.Duration(w.rng.IntN(2500)) * time.Millisecond)
	case 11:
		for _, v := range w.s.volumes.All() {
			if v.IsSnapshot() && w.rng.IntN(3) == 0 {
				w.refusable(w.step(DeleteVolume{Volume: v.ID.String()}))
				break
			}
		}
	case 12:
		if w.rng.IntN(4) == 0 {
			w.now = w.now.Add(copiesLook)
		}
		w.must(Tick{})
	case 13, 14:
		for _, v := range w.s.volumes.All() {
			if v.IsSnapshot() && v.State == VolumeReady && w.rng.IntN(3) == 0 {
				if w.rng.IntN(2) == 0 {
					w.refusable(w.step(Detach{Volume: v.Snapshot.Volume.String()}))
				}
				w.refusable(w.step(RestoreVolume{Volume: v.Snapshot.Volume.String(), Snapshot: v.ID.String()}))
				break
			}
		}
	case 15:
		if w.rng.IntN(2) == 0 {
			w.nextManager()
		}
	case 16, 17:
		for _, v := range w.s.volumes.All() {
			if !v.IsSnapshot() || v.State != VolumeReady || w.rng.IntN(3) > 0 {
				continue
			}
			if o := w.s.volumes.Get(v.Snapshot.Volume); o != nil && o.users() == "" { // mostly somebody has it
				w.refusable(w.step(RestoreVolume{Volume: o.ID.String(), Snapshot: v.ID.String()}))
				break
			}
		}
	default:
		w.now = w.now.Add(time.Duration(w.rng.Int64N(int64(w.pace))))
		if w.rng.IntN(2) == 0 {
			w.writes(host)
		} else if w.rng.IntN(2) == 0 {
			w.targetActs(target)
		} else {
			w.hostActs(host)
		}
	}
}

// nextManager has another manager go on with the records. What was under way to and from the last one is
// lost, and nobody has said anything to this one.
func (w *snapWorld) nextManager() {
	w.t.Helper()
	next, err := Load(w.s.Records())
	if err != nil {
		w.t.Fatal(err)
	}
	w.s = next
	for _, x := range w.targets {
		x.wanted, x.said = nil, nil
	}
	for _, h := range w.hosts {
		h.wanted, h.said = nil, nil
	}
	w.must(Tick{})
}

// refusable fails the test if a request failed in another way than to be refused.
func (w *snapWorld) refusable(err error) {
	w.t.Helper()
	if e := new(Error); err != nil && !errors.As(err, &e) {
		w.t.Fatal(err)
	}
}

// loseLeg has a volume's host give up a leg.
func (w *snapWorld) loseLeg(volume string) {
	v := w.volume(volume)
	if v.Attachment == nil || v.Attachment.State != Attached {
		return
	}
	l := &v.Legs[w.rng.IntN(len(v.Legs))]
	w.refusable(w.step(RecordStale{Node: v.Attachment.Node, Volume: v.ID, Epoch: v.Epoch, Legs: []block.LegID{l.ID}, Revisions: map[block.LegID]uint64{l.ID: l.Revision}}))
}

// recover has a volume's host make a leg equal, while it does not write.
func (w *snapWorld) recover(volume string) {
	v := w.volume(volume)
	if v.Attachment == nil || w.hosts[v.Attachment.Node].writing[v.ID] != nil {
		return
	}
	has := w.hosts[v.Attachment.Node].volumes[v.ID]
	for _, l := range has.Legs {
		now := v.leg(l.Leg)
		if l.State != LegRebuilding || now == nil || now.State != LegRebuilding || now.Revision != l.Revision {
			continue
		}
		if w.whole[l.Leg] && !l.CopyAll {
			w.t.Fatalf("leg %v did not go back with its volume, and only what a host noted is copied to it", l.Leg)
		}
		delete(w.whole, l.Leg)
		for i := range v.Legs {
			if v.Legs[i].trusted() {
				w.legs[l.Leg] = w.legs[v.Legs[i].ID]
			}
		}
		w.refusable(w.step(RecordInSync{Node: v.Attachment.Node, Volume: v.ID, Epoch: v.Epoch, Legs: []RebuiltLeg{{Leg: l.Leg, Revision: l.Revision}}}))
	}
}

// Whatever is asked for and fails meanwhile, a complete snapshot is its volume as it was at one moment, the
// same on each leg and the same for all volumes of a group, and what was acknowledged before it was asked
// for is in it.
func TestASnapshotIsTheVolumeAtOneMoment(t *testing.T) {
	complete, groups, returned, copied := 0, 0, 0, 0
	for seed := range uint64(48) {
		w := newSnapWorld(t, seed)
		w.slow, w.pace = []int{0, 30, 60}[seed%3], []time.Duration{4 * time.Millisecond, 100 * time.Millisecond, 400 * time.Millisecond, time.Second}[seed%4]
		for range 1500 {
			w.act()
		}
		if seed%16 == 0 { // the slowest part
			w.copyAll()
		}
		complete += len(w.taken)
		returned += w.returned
		copied += w.copied
		for id := range w.taken {
			if v := w.s.volumes.Get(id); v != nil && v.Snapshot.Group != "" {
				groups++
			}
		}
	}
	if complete < 60 || groups < 10 || returned < 5 || copied < 5 {
		t.Errorf("%d snapshots were complete, %d of groups at the end, %d volumes went back, %d copies: too few to tell anything", complete, groups, returned, copied)
	}
	t.Logf("%d snapshots were complete, %d of groups at the end, %d volumes went back, %d copies were made", complete, groups, returned, copied)
}

// A snapshot of a volume in use is complete as soon as all have done their part, and hosts go on then.
func TestASnapshotOfAVolumeInUse(t *testing.T) {
	w := newSnapWorld(t, 1)
	for range 10 {
		w.writes(w.hosts["c1"])
	}
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	v := w.volume("db1@mon")
	if v == nil || v.State != VolumeReady || len(v.Legs) != 2 {
		t.Fatalf("the snapshot is %+v", v)
	}
	if got, want := w.legs[v.Legs[0].ID], w.acked[v.Snapshot.Volume]; got != want {
		t.Errorf("it holds %d, want %d", got, want)
	}
	if held := w.s.WantedInitiator("c1").Attachments[0].Holds; len(held) > 0 {
		t.Errorf("the host still has %v", held)
	}
	before := w.acked[v.Snapshot.Volume]
	for range 10 {
		w.writes(w.hosts["c1"])
	}
	if w.acked[v.Snapshot.Volume] == before {
		t.Error("the host does not go on")
	}
	if st := w.s.Status(); st.Volumes != 2 || len(w.s.Volumes()) != 2 {
		t.Errorf("there are %d volumes, and %d are listed", st.Volumes, len(w.s.Volumes()))
	}
	if err := w.take("mon", "db1"); err != nil {
		t.Errorf("the same again: %v", err)
	}
	if again := w.volume("db1@mon"); again.ID != v.ID {
		t.Error("it was taken again")
	}
	if again, err := Load(w.s.Records()); err != nil || again.snapshots.Get(v.Snapshot.Volume) != 1 {
		t.Errorf("the records say otherwise: %v", err)
	}
}

// What a host says before it knows that all legs are frozen does not complete a snapshot, however late it
// arrives: its hold may have ended before they were.
func TestWhatAHostSaidBeforeTheLegsWereFrozenConfirmsNothing(t *testing.T) {
	w := newSnapWorld(t, 1)
	host := w.hosts["c1"]
	phase := func() TakingPhase { return w.volume("db1@mon").taking().Phase }
	w.mustBe(w.take("mon", "db1"))
	for range 20 {
		for _, x := range w.targets {
			w.targetActs(x)
		}
		if phase() == Confirming {
			break
		}
		w.hostActs(host)
	}
	for range 3 {
		w.must(InitiatorReported{1, w.hostReport(host)})
		w.must(Tick{})
	}
	if v := w.volume("db1@mon"); v.State != VolumeCreating || phase() != Confirming {
		t.Fatalf("the snapshot is %v, %+v", v.State, v.taking())
	}
	w.hostActs(host)
	w.must(Tick{})
	if v := w.volume("db1@mon"); v.State != VolumeReady {
		t.Errorf("the snapshot is %v, %+v", v.State, v.taking())
	}
}

// All copies of a volume in use may have lost their caches, and none can be served: the manager waits, and
// writes nothing meanwhile. Each record would be a new state that targets report to have, and so on without
// end.
func TestNothingIsWrittenWhileNoSuspectCopyCanBeServed(t *testing.T) {
	w := newSnapWorld(t, 1)
	report := func() (records []Record) {
		for _, x := range w.targets { // none of them finds its drive
			x.generation = w.s.WantedTarget(x.name).Generation
			r := w.targetReport(x)
			r.Drives, r.Legs = nil, nil
			out, err := w.s.Step(w.now, TargetReported{Session: 1, Report: r})
			if err != nil {
				t.Fatal(err)
			}
			records = append(records, out.Records...)
		}
		return records
	}
	report()
	v := w.volume("db1")
	for i := range v.Legs {
		v.Legs[i].Suspect = true
	}
	w.s.unsettled[v.ID] = true
	for range 3 {
		if slices.ContainsFunc(report(), func(r Record) bool { return r.Key == volumeKey(v.ID) }) {
			t.Error("a report that changes nothing writes the volume")
		}
	}
	if v := w.volume("db1"); !v.Legs[0].Suspect || !v.Legs[1].Suspect {
		t.Errorf("a leg is believed: %+v", v.Legs)
	}
}

// A host that does not hold its I/O gets no snapshot taken of its volume, and the reason is told.
func TestASnapshotThatCannotBeTakenIsGivenUp(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.writes(w.hosts["c1"])
	hung := w.hosts["c1"].writing[w.volume("db1").ID]
	hung.to = append(hung.to, block.LegID{}) // it never ends
	if err := w.take("mon", "db1", "db2"); err != nil {
		t.Fatal(err)
	}
	last := ""
	for range 200 {
		w.now = w.now.Add(500 * time.Millisecond)
		for _, x := range w.targets {
			w.targetActs(x)
		}
		for _, h := range w.hosts {
			w.hostActs(h)
		}
		w.must(Tick{})
		if v := w.volume("db1@mon"); v != nil && v.State == VolumeDeleting {
			last = v.Failed
		}
	}
	if w.volume("db1@mon") != nil || w.volume("db2@mon") != nil {
		t.Fatalf("it is still there")
	}
	if !strings.Contains(last, "hosts hold their I/O for 2s at most, and in that time not all I/O that was under way ended") {
		t.Errorf("the reason is %q", last)
	}
	for _, x := range w.targets {
		if len(x.legs) > 2 {
			t.Errorf("%s keeps %d legs", x.name, len(x.legs))
		}
	}
}

// A leg that goes stale and comes back while a snapshot is taken may have been frozen in between: it is left out.
func TestALegThatWasStaleWhileASnapshotWasTakenIsLeftOut(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.mustBe(w.take("mon", "db1", "db2"))
	origin, legs := w.volume("db1").Legs[0], len(w.volume("db1").Legs)
	taking := func() *Taking { return w.volume("db1@mon").taking() }
	withoutC2 := func(until func() bool) { // for which the snapshot waits
		t.Helper()
		for range 90 {
			if until() {
				return
			}
			w.now = w.now.Add(20 * time.Millisecond)
			for _, name := range slices.Sorted(maps.Keys(w.targets)) {
				w.targetActs(w.targets[name])
			}
			w.hostActs(w.hosts["c1"])
			w.recover("db1")
			w.must(Tick{})
		}
		t.Fatalf("the snapshot is %+v, and the leg %+v", taking(), w.volume("db1").leg(origin.ID))
	}
	withoutC2(func() bool { return taking().Phase == Holding })
	v := w.volume("db1")
	w.must(RecordStale{Node: "c1", Volume: v.ID, Epoch: v.Epoch, Legs: []block.LegID{origin.ID}, Revisions: map[block.LegID]uint64{origin.ID: origin.Revision}})
	withoutC2(func() bool { return w.volume("db1").leg(origin.ID).trusted() })
	if taking() == nil || taking().Attempt != 1 {
		t.Fatalf("the snapshot is %+v", taking())
	}
	w.settle()
	x := w.volume("db1@mon")
	if x.State != VolumeReady || len(x.Legs) != legs-1 || slices.ContainsFunc(x.Legs, func(l Leg) bool { return l.Drive == origin.Drive }) {
		t.Errorf("the snapshot is %s, with the legs %+v; want one without that of drive %v", x.State, x.Legs, origin.Drive)
	}
}

// What is late of one attempt means nothing in the next: each has holds and legs of its own.
func TestEachAttemptHasHoldsAndLegsOfItsOwn(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.writes(w.hosts["c1"])
	hung := w.hosts["c1"].writing[w.volume("db1").ID]
	hung.to = append(hung.to, block.LegID{}) // it never ends
	w.mustBe(w.take("mon", "db1"))
	attempts, of := map[int]bool{}, map[string]int{}
	for w.volume("db1@mon").taking() != nil {
		x := w.volume("db1@mon").taking()
		attempts[x.Attempt] = true
		names := []string{x.Hold}
		for _, f := range x.Frozen {
			names = append(names, f.Leg.String())
		}
		for _, name := range names {
			if first, known := of[name]; known && first != x.Attempt {
				t.Fatalf("attempt %d has %s, which attempt %d had", x.Attempt, name, first)
			}
			of[name] = x.Attempt
		}
		w.now = w.now.Add(500 * time.Millisecond)
		for _, x := range w.targets {
			w.targetActs(x)
		}
		for _, h := range w.hosts {
			w.hostActs(h)
		}
		w.must(Tick{})
	}
	if len(attempts) != maxAttempts {
		t.Errorf("there were %d attempts, want %d", len(attempts), maxAttempts)
	}
}

// A manager whose clock is hours behind that of the last one begins to lead while a host does not answer: the
// snapshot must not wait for the time that its record names.
func TestASnapshotIsGivenUpAlthoughTheClockWasSetBack(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.mustBe(w.take("mon", "db1"))
	w.hostsAreSilent(5 * time.Second)
	w.now = w.now.Add(-9 * time.Hour)
	w.nextManager()
	w.hostsAreSilent(takeFor + prepareFor + 5*time.Second)
	if v := w.volume("db1@mon"); v != nil && v.State == VolumeCreating {
		t.Errorf("after %v it is in attempt %d, %s since %v, and it is %v", takeFor+prepareFor, v.taking().Attempt, v.taking().Phase, v.taking().Since, w.now)
	}
}

// A manager that begins to lead while a snapshot is taken waits for targets that have said nothing to it yet.
func TestTheNextManagerWaitsForLegsToBeFrozen(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.must(Detach{Volume: "db1"})
	w.settle()
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		w.nextManager()
	}
	if v := w.volume("db1@mon"); v.State != VolumeCreating || v.taking().Phase != Preparing {
		t.Errorf("the snapshot is %v, %+v", v.State, v.taking())
	}
	w.settle()
	if v := w.volume("db1@mon"); v == nil || v.State != VolumeReady || len(v.Legs) != 2 {
		t.Errorf("the snapshot is %+v", v)
	}
}

// A clone begins as its snapshot, on the same drives, and the snapshot cannot be deleted before.
func TestACloneBeginsAsItsSnapshot(t *testing.T) {
	w := newSnapWorld(t, 1)
	for range 10 {
		w.writes(w.hosts["c1"])
	}
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	for range 10 {
		w.writes(w.hosts["c1"])
	}
	w.must(CreateVolume{Name: "c", From: "db1@mon", Size: 2 * block.GiB, Seed: w.seed()})
	if err := w.step(DeleteVolume{Volume: "db1@mon"}); err == nil {
		t.Error("the snapshot of a volume that is being created can be deleted")
	}
	w.settle()
	c, snap := w.volume("c"), w.volume("db1@mon")
	if c.State != VolumeReady || c.Size != 2*block.GiB || w.legs[c.Legs[0].ID] != w.legs[snap.Legs[0].ID] || c.Legs[0].Drive != snap.Legs[0].Drive {
		t.Errorf("the clone is %+v", c)
	}
	for name, in := range map[string]Input{
		"a clone with another layout": CreateVolume{Name: "d", From: "db1@mon", Copies: 1, Seed: w.seed()},
		"a smaller clone":             CreateVolume{Name: "d", From: "db1@mon", Size: block.MiB, Seed: w.seed()},
		"a clone of a volume":         CreateVolume{Name: "d", From: "db1", Seed: w.seed()},
		"a snapshot of a snapshot":    CreateSnapshots{Snapshots: []NewSnapshot{{Volume: "db1@mon", Name: "x"}}, Seed: w.seed()},
		"a snapshot that is written":  Attach{Volume: "db1@mon", Node: "c2", Mode: AttachExclusive},
		"a larger snapshot":           ExpandVolume{Volume: "db1@mon", Size: 4 * block.GiB},
		"more copies of a snapshot":   UpdateVolume{Volume: "db1@mon", Copies: 3},
	} {
		if err := w.step(in); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	w.must(Attach{Volume: "db1@mon", Node: "c2"})
	w.settle()
	if a := w.volume("db1@mon").Shared; len(a) != 1 || a[0].Mode != AttachSharedReadOnly || a[0].State != Attached {
		t.Errorf("the snapshot is attached as %+v", a)
	}
}

// reports are what all targets say now.
func (w *snapWorld) reports() (all []TargetReport) {
	for _, name := range slices.Sorted(maps.Keys(w.targets)) {
		all = append(all, w.targetReport(w.targets[name]))
	}
	return all
}

// A store that is rebuilt from the drives has the snapshots that were complete, which hosts can read at
// once. One that was not is deleted: the store knew what its legs were to begin as.
func TestASnapshotAfterTheLossOfTheStore(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	if err := w.take("tue", "db1"); err != nil {
		t.Fatal(err)
	}
	for range 3 { // its legs are on the labels, and not frozen
		for _, x := range w.targets {
			w.targetActs(x)
		}
	}
	s, text, err := Rebuild(w.now, w.reports(), nil)
	if err != nil {
		t.Fatal(err)
	}
	mon, tue := s.volumes.Get(s.idOf("db1@mon")), s.volumes.Get(s.idOf("db1@tue"))
	switch {
	case mon == nil || mon.State != VolumeReady || !mon.equal() || mon.Snapshot == nil || mon.Snapshot.Volume != s.idOf("db1") || legsIn(mon.inSync()) != 2:
		t.Errorf("db1@mon is %+v", mon)
	case mon.Legs[0].Tree.IsZero():
		t.Error("nobody knows the tree of its legs")
	case tue == nil || tue.State != VolumeDeleting:
		t.Errorf("db1@tue is %+v", tue)
	}
	if !strings.Contains(text, "db1@tue was not complete: it is deleted") {
		t.Errorf("the text is\n%s", text)
	}
}

// A store that was restored from a backup does not complete a snapshot that was being taken then: its legs
// may have been frozen long ago.
func TestASnapshotAfterARestore(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		for _, x := range w.targets {
			w.targetActs(x)
		}
	}
	v := w.volume("db1@mon")
	if v.taking() == nil {
		t.Fatal("it is complete already")
	}
	w.s.volumes.Set(w.s.by, v.ID, func() *Volume { c := v.clone(); newTx(w.s, w.now).restored(c); c.Restored = false; return c }())
	w.settle()
	if v := w.volume("db1@mon"); v != nil && v.State == VolumeReady {
		t.Error("it is complete")
	}
}

// A drive that is lost can be removed although a snapshot has a copy there, if it has another one. One that
// can be read stays as long as the snapshot does.
func TestASnapshotOnADriveThatIsRemoved(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	for _, v := range []string{"db1", "db2"} {
		w.must(Detach{Volume: v})
		w.settle()
		w.must(DeleteVolume{Volume: v})
		w.settle()
	}
	snap := w.volume("db1@mon")
	lost := snap.Legs[0]
	w.targets[lost.Node].down = true
	w.must(TargetLost{Node: lost.Node, Session: 1})
	w.must(ConfirmNodeDead{lost.Node})
	w.must(EvictDrive{lost.Drive})
	w.settle()
	w.now = w.now.Add(awayLook)
	w.settle()
	if w.s.drives[lost.Drive] != nil {
		t.Errorf("the drive is %+v", w.s.drives[lost.Drive])
	}
	w.look(3)
	w.bothCopies("db1@mon", lost.Drive)
}

// copyAll lets all targets and hosts go on for a while, in which snapshots are copied.
func (w *snapWorld) copyAll() {
	w.t.Helper()
	for _, x := range w.targets {
		x.down = false
	}
	for range 15 {
		w.now = w.now.Add(copiesLook)
		w.settle()
		for _, v := range []string{"db1", "db2"} {
			if w.volume(v).users() == "" {
				w.refusable(w.step(Attach{Volume: v, Node: "c1"}))
			}
			w.recover(v)
		}
	}
	w.check()
}

// A leg that was away while snapshots were taken gets copies of them, the oldest first, once it is in sync;
// each begins as the one before it. What is lost meanwhile makes a copy begin anew.
func TestSnapshotsAreCopiedToALegThatWasAway(t *testing.T) {
	w := newSnapWorld(t, 1)
	take := func(name string) {
		t.Helper()
		if err := w.take(name, "db1"); err != nil {
			t.Fatal(err)
		}
		w.settle()
	}
	take("mon")
	w.loseLeg("db1")
	w.settle()
	away := w.volume("db1").Legs[0]
	if away.State == LegInSync {
		away = w.volume("db1").Legs[1]
	}
	take("tue")
	take("wed")
	if n := len(w.volume("db1@wed").Legs); n != 1 {
		t.Fatalf("the snapshot has %d legs, want 1", n)
	}
	look := func() { // at what lacks copies, without a word of the targets
		w.now = w.now.Add(copiesLook)
		w.must(Tick{})
	}
	if look(); len(w.volume("db1@tue").Legs) != 1 {
		t.Fatal("a snapshot is copied beside a leg that is not in sync")
	}
	for range 5 {
		w.recover("db1")
		w.settle()
	}
	look()
	if n, later := len(w.volume("db1@tue").Legs), len(w.volume("db1@wed").Legs); n != 2 || later != 1 {
		t.Fatalf("%d and %d legs, want 2 and 1: the oldest comes first, alone", n, later)
	}
	var l *Leg
	copying := func(name string) *Leg {
		t.Helper()
		v := w.volume(name)
		for i := range v.Legs {
			if v.Legs[i].Copying != nil {
				return &v.Legs[i]
			}
		}
		t.Fatalf("no leg of %s is being copied: %+v", name, v.Legs)
		return nil
	}
	l = copying("db1@tue")
	if mon := w.volume("db1@mon"); l.Drive != away.Drive || l.Tree != away.tree() || l.Copying.Of != mon.ID || mon.leg(l.Copying.Base).Drive != away.Drive || mon.leg(l.Copying.Since).Drive == away.Drive {
		t.Errorf("the copy is %+v of %+v", l, l.Copying)
	}
	if e, err := w.s.Explain("db1@tue"); err != nil || !strings.Contains(strings.Join(e.Waits, "\n"), "to be copied: 0B copied from "+string(w.volume("db1@tue").leg(l.Copying.From).Node)+", up to") {
		t.Errorf("it is explained as %+v, %v", e, err)
	}
	w.must(DeleteVolume{Volume: "db1@mon"}) // as which it begins
	if was := l.ID; w.volume("db1@tue").leg(was) != nil && w.volume("db1@tue").leg(was).Copying != nil {
		w.must(Tick{})
		if again := w.volume("db1@tue").leg(was); again != nil && again.State != LegDeleting {
			t.Errorf("the copy is %+v, want it freed", again)
		}
	}
	for range 40 {
		w.settle()
		look()
	}
	for _, name := range []string{"db1@tue", "db1@wed"} {
		v := w.volume(name)
		if len(v.Legs) != 2 || !v.Legs[0].trusted() || !v.Legs[1].trusted() || v.Legs[0].Copying != nil || v.Legs[1].Copying != nil || v.Legs[0].Blank || v.Legs[1].Blank {
			t.Errorf("%s is %+v", name, v)
		}
	}
	w.check()
}

// look lets the manager look for snapshots that lack copies, and everything go on then.
func (w *snapWorld) look(times int, volumes ...string) {
	w.t.Helper()
	for range times {
		w.now = w.now.Add(copiesLook)
		w.must(Tick{})
		for range 4 {
			for _, name := range slices.Sorted(maps.Keys(w.targets)) {
				w.targetActs(w.targets[name])
			}
			for _, name := range slices.Sorted(maps.Keys(w.hosts)) {
				w.hostActs(w.hosts[name])
			}
			for _, v := range volumes {
				if w.volume(v) != nil {
					w.recover(v)
				}
			}
		}
	}
}

// missed takes a snapshot of a volume while one of its legs is away, which then comes back.
func (w *snapWorld) missed(of, name string) {
	w.t.Helper()
	w.loseLeg(of)
	w.settle()
	if err := w.take(name, of); err != nil {
		w.t.Fatal(err)
	}
	w.settle()
	taken := slices.DeleteFunc(slices.Clone(w.volume(of+"@"+name).Legs), func(l Leg) bool { return l.Copying != nil || !l.Rebuilt.IsZero() })
	if len(taken) != 1 {
		w.t.Fatalf("%s has legs %+v, want one", name, taken)
	}
	for range 5 {
		w.recover(of)
		w.settle()
	}
	if v := w.volume(of); !v.Legs[0].trusted() || !v.Legs[1].trusted() {
		w.t.Fatalf("the volume is %+v", v)
	}
}

// bothCopies checks that a snapshot has two legs in sync, on two nodes, none of them on a drive.
func (w *snapWorld) bothCopies(name string, not block.DriveID) *Volume {
	w.t.Helper()
	v := w.volume(name)
	if len(v.Legs) != 2 || !v.Legs[0].trusted() || !v.Legs[1].trusted() || v.Legs[0].Node == v.Legs[1].Node || v.Legs[0].Drive == not || v.Legs[1].Drive == not {
		e, err := w.s.Explain(name)
		w.t.Errorf("%s is explained as %+v, %v, and is %+v", name, e.Waits, err, v.Legs)
	}
	return v
}

// Before their level nothing is copied, which is said.
func TestSnapshotsAreNotCopiedBeforeTheirLevel(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.s.level = copiesLevel - 1
	w.missed("db1", "mon")
	w.look(3)
	v := w.volume("db1@mon")
	if len(v.Legs) != 1 {
		t.Errorf("it has legs %+v, want one", v.Legs)
	}
	if e, err := w.s.Explain("db1@mon"); err != nil || !strings.Contains(strings.Join(e.Actions, "\n"), "weft upgrade finish") {
		t.Errorf("it is explained as %+v, %v", e, err)
	}
	if wrong := strings.Join(w.s.Status().Wrong, "\n"); !strings.Contains(wrong, "snapshot db1@mon is degraded") {
		t.Errorf("status says %q", wrong)
	}
	if err := w.step(DrainDrive{Drive: v.Legs[0].Drive}); !isReason(err, ReasonDriveInUse) {
		t.Errorf("a drain of its drive: %v", err)
	}
}

// A snapshot of a volume that is not thin is copied to a tree of its own, since one over the volume's leg
// would keep that from being plain again.
func TestASnapshotOfAPlainVolumeIsCopiedToATreeOfItsOwn(t *testing.T) {
	w := newSnapWorldOf(t, 1, false)
	if err := w.take("sun", "db1"); err != nil { // both legs have trees
		t.Fatal(err)
	}
	w.settle()
	w.missed("db1", "mon")
	w.look(4)
	v := w.bothCopies("db1@mon", block.DriveID{})
	i := slices.IndexFunc(v.Legs, func(l Leg) bool { return !l.Rebuilt.IsZero() })
	if i < 0 {
		t.Fatalf("no leg was copied: %+v", v.Legs)
	}
	if l := v.Legs[i]; !l.Tree.IsZero() {
		t.Errorf("the copy is in tree %v", l.Tree)
	}
}

// A drive that is drained loses its copies of snapshots only when they have been made elsewhere: beside the
// volume's leg or, once the volume is gone, in a tree of their own, which all its snapshots share.
func TestADriveWithCopiesOfSnapshotsIsDrained(t *testing.T) {
	w := newSnapWorld(t, 1)
	for _, name := range []string{"mon", "tue"} {
		if err := w.take(name, "db1"); err != nil {
			t.Fatal(err)
		}
		w.settle()
	}
	drained := func(d block.DriveID) {
		t.Helper()
		w.must(DrainDrive{Drive: d})
		for i := 0; i < 60 && len(w.s.usersOf(w.s.drives[d], true)) > 0; i++ {
			w.look(1, "db1", "db2")
			for _, name := range []string{"db1@mon", "db1@tue"} {
				if n := w.s.serving(w.volume(name))[0].Len(); n < 2 {
					t.Fatalf("%s has %d copies in sync on the way", name, n)
				}
			}
		}
		if left := w.s.usersOf(w.s.drives[d], true); len(left) > 0 {
			e, err := w.s.Explain("db1@mon")
			t.Fatalf("left on the drive: %v; %+v, %v", left, e, err)
		}
		w.must(DrainDrive{Drive: d, Cancel: true})
	}
	first := w.volume("db1").Legs[0].Drive
	drained(first)
	for _, name := range []string{"db1@mon", "db1@tue"} {
		v := w.bothCopies(name, first)
		for _, l := range v.Legs {
			if !slices.ContainsFunc(w.volume("db1").Legs, func(o Leg) bool { return o.Drive == l.Drive && o.tree() == l.Tree }) {
				t.Errorf("%v of %s is in tree %v, with no leg of the volume", &l, name, l.Tree)
			}
		}
	}
	w.must(Detach{Volume: "db1", Node: "c1"})
	w.settle()
	w.must(DeleteVolume{Volume: "db1"})
	w.settle()
	second := w.volume("db1@mon").Legs[0].Drive
	drained(second)
	mon, tue := w.bothCopies("db1@mon", second), w.bothCopies("db1@tue", second)
	for i := range mon.Legs {
		if mon.Legs[i].Drive == first && (!mon.Legs[i].Tree.IsZero() || tue.inTree(&mon.Legs[i]) == nil) {
			t.Errorf("the copies are %+v and %+v, want one tree of their own", mon.Legs, tue.Legs)
		}
	}
}

// A copy that fails gives way to others after a while, and why is said.
func TestACopyThatFailsIsGivenUpAndTriedAgain(t *testing.T) {
	w := newSnapWorld(t, 1)
	for _, x := range w.targets {
		x.copyFails = "read the copy's source: medium error"
	}
	w.missed("db1", "mon")
	w.look(3)
	v := w.volume("db1@mon")
	if len(v.Legs) != 2 {
		t.Fatalf("no copy was begun: %+v", v.Legs)
	}
	if e, err := w.s.Explain("db1@mon"); err != nil || !strings.Contains(strings.Join(e.Waits, "\n"), "medium error") {
		t.Errorf("it is explained as %+v, %v", e, err)
	}
	w.now = w.now.Add(copyFails)
	w.look(3)
	if v = w.volume("db1@mon"); len(v.Legs) != 1 {
		t.Errorf("the copy that fails is not given up: %+v", v.Legs)
	}
	if e, err := w.s.Explain("db1@mon"); err != nil || !strings.Contains(strings.Join(e.Waits, "\n"), "the last attempt failed: target "+string(w.volume("db1").Legs[1].Node)) && !strings.Contains(strings.Join(e.Waits, "\n"), "the last attempt failed: target "+string(w.volume("db1").Legs[0].Node)) {
		t.Errorf("it is explained as %+v, %v", e, err)
	}
	for _, x := range w.targets {
		x.copyFails, x.failed = "", nil
	}
	w.now = w.now.Add(copyAgain)
	w.look(8)
	w.bothCopies("db1@mon", block.DriveID{})
}

// A leg of a snapshot that no record has is freed: a target has made it for a manager whose store was lost
// then. One that is complete stays if no other can be read.
func TestALegOfASnapshotThatNoRecordHasIsFreed(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	v := w.volume("db1@mon")
	var spare *snapTarget
	for name, x := range w.targets {
		if !slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == name }) {
			spare = x
		}
	}
	of := w.targets[v.Legs[0].Node].legs[v.Legs[0].ID]
	for i, ready := range []bool{false, true} {
		stray := of
		stray.Leg, stray.Tree, stray.Remove = block.LegID{UUID: block.UUID{9, byte(i)}}, block.UUID{9, byte(i)}, false
		spare.legs[stray.Leg], spare.ready[stray.Leg], w.frozen[stray.Leg] = stray, ready, true
		w.targetActs(spare)
		if ready {
			for _, l := range w.volume("db1@mon").Legs {
				w.targets[l.Node].down = true
				w.must(TargetLost{Session: 1, Node: l.Node})
			}
			w.look(2)
			if _, there := spare.legs[stray.Leg]; !there {
				t.Error("a complete leg is freed although no other can be read")
			}
			for _, x := range w.targets {
				x.down = false
			}
			w.settle()
		}
		w.look(3)
		if _, there := spare.legs[stray.Leg]; there || len(w.volume("db1@mon").Legs) != 2 {
			t.Errorf("ready %v: there %v, legs %+v", ready, there, w.volume("db1@mon").Legs)
		}
	}
}

// A leg that no record has goes with its volume, also from a target that is away meanwhile.
func TestALegThatNoRecordHasGoesWithItsVolume(t *testing.T) {
	for _, thin := range []bool{false, true} {
		for _, name := range []string{"db1", "db1@mon"} {
			w := newSnapWorldOf(t, 1, thin)
			if err := w.take("mon", "db1"); err != nil {
				t.Fatal(err)
			}
			w.must(Detach{Volume: "db1"})
			w.settle()
			v := w.volume(name)
			of := w.targets[v.Legs[0].Node].legs[v.Legs[0].ID]
			for _, spare := range w.targets {
				if slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == spare.name }) {
					continue
				}
				stray := of
				stray.Leg, stray.Tree, stray.Origin = block.LegID{UUID: block.UUID{9}}, block.UUID{9}, LegOrigin{}
				if stray.Kind != image.Mapped {
					stray.Image, stray.Tree = image.Image{Kind: image.Plain, Extents: []image.Extent{{Start: 9, Count: image.Count(of.Extents)}}}, block.UUID{}
				}
				spare.legs[stray.Leg], spare.ready[stray.Leg], w.frozen[stray.Leg] = stray, true, true
				w.must(TargetReported{Session: 1, Report: w.targetReport(spare)})
				spare.down = true
				w.must(TargetLost{Session: 1, Node: spare.name})
				if name == "db1" {
					w.must(DeleteVolume{Volume: "db1@mon"})
				}
				w.must(DeleteVolume{Volume: name})
				w.settle()
				if v := w.volume(name); v == nil || v.leg(stray.Leg) == nil {
					t.Fatalf("thin %v: %s, of which %s has a leg, is %+v", thin, name, spare.name, v)
				}
				spare.down = false
				w.settle()
				if _, there := spare.legs[stray.Leg]; there || w.volume(name) != nil || len(w.s.Status().Wrong) > 0 {
					t.Errorf("thin %v: %s: there %v, %+v, %q", thin, name, there, w.volume(name), w.s.Status().Wrong)
				}
				break
			}
		}
	}
}

// A target is never told to make a leg that is to be copied of nothing, and nothing is copied by targets or
// from targets that cannot.
func TestWhatIsCopiedNeverBeginsAsNothing(t *testing.T) {
	v := &Volume{State: VolumeReady, Snapshot: &SnapshotOf{}, Legs: []Leg{{ID: block.LegID{UUID: block.UUID{1}}, State: LegStale, Blank: true, Copying: &LegCopy{From: block.LegID{UUID: block.UUID{2}}}}}}
	if o := empty().originOf(v, &v.Legs[0]); !o.Wait || o.Copy == nil {
		t.Errorf("without its source the origin is %+v, want one to wait for", o)
	}
}

// A volume goes back to its snapshot, on all of its legs or, after a while, without those that cannot be
// reached, which are copied whole then.
func TestAVolumeGoesBackToItsSnapshot(t *testing.T) {
	for _, thin := range []bool{true, false} {
		t.Run(fmt.Sprint("thin ", thin), func(t *testing.T) { goesBackToItsSnapshot(t, newSnapWorldOf(t, 1, thin)) })
	}
}

func goesBackToItsSnapshot(t *testing.T, w *snapWorld) {
	write := func() {
		for range 10 {
			w.writes(w.hosts["c1"])
		}
	}
	write()
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	write()
	held := w.legs[w.volume("db1@mon").Legs[0].ID]
	for name, in := range map[string]RestoreVolume{
		"a volume in use":              {Volume: "db1", Snapshot: "db1@mon"},
		"a snapshot of another volume": {Volume: "db2", Snapshot: "db1@mon"},
		"to a volume":                  {Volume: "db1", Snapshot: "db2"},
		"a snapshot":                   {Volume: "db1@mon", Snapshot: "db1@mon"},
		"to a snapshot that is not":    {Volume: "db1", Snapshot: "db1@tue"},
		"a volume that is not":         {Volume: "db9", Snapshot: "db1@mon"},
	} {
		if err := w.step(in); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	w.must(Detach{Volume: "db1"})
	w.settle()
	if err := w.step(RestoreVolume{Volume: "db1", Snapshot: "db1@mon", IfGeneration: w.volume("db1").Generation + 1}); err == nil {
		t.Error("a volume that has changed since: accepted")
	}
	w.must(UpdateVolume{Volume: "db1", SetLabels: map[string]string{block.ImportLabel: "complete x 1", "a": "b"}})
	w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon", IfGeneration: w.volume("db1").Generation, IfEpoch: w.volume("db1").Epoch})
	if got := w.volume("db1").Labels; len(got) != 1 {
		t.Errorf("its labels are %v: what was imported is not what it holds", got)
	}
	for name, in := range map[string]Input{
		"attached":             Attach{Volume: "db1", Node: "c1"},
		"expanded":             ExpandVolume{Volume: "db1", Size: 2 * block.GiB},
		"more copies":          UpdateVolume{Volume: "db1", Copies: 3},
		"another snapshot":     CreateSnapshots{Snapshots: []NewSnapshot{{Volume: "db1", Name: "x"}}, Seed: w.seed()},
		"without its snapshot": DeleteVolume{Volume: "db1@mon"},
	} {
		if err := w.step(in); err == nil || !strings.Contains(err.Error(), "going back to db1@mon") && !strings.Contains(err.Error(), "goes back to it") {
			t.Errorf("%s while it goes back: %v", name, err)
		}
	}
	w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"}) // under way already
	if e, err := w.s.Explain("db1"); err != nil || !strings.Contains(e.Summary, "going back to db1@mon") || len(e.Waits) == 0 {
		t.Errorf("it is explained as %+v, %v", e, err)
	}
	w.settle()
	v := w.volume("db1")
	if v.Restoring != nil || w.returned != 1 || w.acked[v.ID] != held || !v.Clean || legsIn(v.inSync()) != 2 {
		t.Fatalf("it is %+v and holds %d, want %d", v, w.acked[v.ID], held)
	}
	w.must(Attach{Volume: "db1", Node: "c2"})
	w.settle()
	for range 10 {
		w.writes(w.hosts["c2"])
	}
	w.must(Detach{Volume: "db1"})
	w.settle()

	away := v.Legs[0].Node
	w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"})
	w.targets[away].down = true
	w.must(TargetLost{Node: away, Session: 1})
	w.now = w.now.Add(restoreAwait)
	w.settle()
	if v = w.volume("db1"); v.Restoring != nil || w.returned != 2 || v.Legs[0].State != LegStale || !v.Legs[0].CopyAll || w.legs[v.Legs[1].ID] != held {
		t.Errorf("without one target it is %+v", v)
	}
}

// A clone that begins while there is room for one of its two legs gets the other one when there is room for it.
func TestACloneGetsTheLegsForWhichThereWasNoRoom(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.mustBe(w.take("mon", "db1"))
	w.settle()
	stays := w.volume("db1@mon").Legs[0].Node
	for _, x := range w.targets {
		if x.name != stays {
			x.down = true
			w.must(TargetLost{Node: x.name, Session: 1})
		}
	}
	w.must(CreateVolume{Name: "c", From: "db1@mon", Seed: w.seed()})
	w.settle()
	if v := w.volume("c"); v.State != VolumeReady || len(v.Legs) != 1 {
		t.Fatalf("with one target it is %s, %+v", v.State, v.Legs)
	}
	for _, x := range w.targets {
		x.down = false
	}
	for range 5 {
		w.now = w.now.Add(awayLook)
		w.settle()
	}
	if v := w.volume("c"); len(v.Legs) != 2 {
		t.Errorf("with all targets it has the legs %+v", v.Legs)
	}
}

// A volume whose labels cannot be written is left as it was.
func TestAVolumeThatCannotGoBackIsLeftAsItWas(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"})
	for _, x := range w.targets {
		x.down = true
		w.must(TargetLost{Node: x.name, Session: 1})
	}
	for range 80 {
		w.now = w.now.Add(time.Second)
		w.must(Tick{})
	}
	if v := w.volume("db1"); v.Restoring != nil || w.returned != 0 || !v.Clean || legsIn(v.inSync()) != 2 || !strings.Contains(v.Failed, "did not go back to db1@mon") {
		t.Errorf("it is %+v", v)
	}
}

// Wherever the store is lost while a volume goes back, the store that replaces it, made from the drives or
// from a backup of any moment, has all legs that it trusts hold the same: what the volume held before, or
// what the snapshot holds.
func TestAVolumeThatGoesBackAfterTheLossOfTheStore(t *testing.T) {
	again := 0
	for moment := range 20 {
		for i, kind := range []string{"drives", "new backup", "old backup"} {
			w, before, held := newBackWorldOf(t, uint64(moment), (moment+i)%2 == 0)
			records := w.s.Records()
			w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"})
			for range moment {
				w.targetActs(w.targets[slices.Sorted(maps.Keys(w.targets))[w.rng.IntN(3)]])
			}
			if kind == "new backup" {
				records = w.s.Records()
			}
			was := w.volume("db1").Restoring
			clear(w.back)
			w.lose(kind, records)
			for range 5 {
				w.must(Tick{})
				for _, x := range w.targets {
					w.targetActs(x)
				}
				if x := w.volume("db1").Restoring; x != nil && x.Again {
					again++
					break
				}
			}
			w.settle()
			v := w.volume("db1")
			if v.Restoring != nil || v.State != VolumeReady || legsIn(v.inSync()) != 2 {
				e, _ := w.s.Explain("db1")
				t.Fatalf("moment %d, %s: it is not usable: %+v", moment, kind, e)
			}
			a, b := w.legs[v.Legs[0].ID], w.legs[v.Legs[1].ID]
			if a != b || a != before && a != held {
				t.Fatalf("moment %d, %s: its copies hold %d and %d, want %d or %d", moment, kind, a, b, before, held)
			}
			if was == nil && a != held && kind != "old backup" {
				t.Fatalf("moment %d, %s: it had gone back, and holds %d, not %d", moment, kind, a, held)
			}
		}
	}
	if again < 10 {
		t.Errorf("%d volumes went back again: too few to tell anything", again)
	}
}

// lose puts another store in the place of the present one.
func (w *snapWorld) lose(kind string, records []Record) {
	w.t.Helper()
	var err error
	if kind == "drives" {
		w.s, _, err = Rebuild(w.now, w.reports(), nil)
	} else if records, err = Restored(w.now, records); err == nil {
		w.s, err = Load(records)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	for _, x := range w.targets {
		x.wanted, x.said = nil, nil
	}
	for _, h := range w.hosts {
		h.wanted, h.said, h.generation, h.volumes = nil, nil, 0, map[block.VolumeID]WantedAttachment{}
	}
}

// A volume that is not thin has snapshots, too. Its legs get trees for that, and lose them with the last
// snapshot or clone; a leg that goes before stays on its drive until then, and says for what.
func TestASnapshotOfAVolumeThatIsNotThin(t *testing.T) {
	w := newSnapWorldOf(t, 1, false)
	based := func() (n int) {
		for _, l := range w.volume("db1").Legs {
			if l.Based {
				n++
			}
		}
		return n
	}
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	snap := w.volume("db1@mon")
	if snap.State != VolumeReady || len(snap.Legs) != 2 || based() != 2 {
		t.Fatalf("the snapshot is %+v, %d legs of its volume have a tree", snap, based())
	}
	if v := w.volume("db1"); v.Thin || v.Legs[0].Kind != image.Plain || snap.Legs[0].tree() != v.Legs[0].tree() && snap.Legs[0].tree() != v.Legs[1].tree() {
		t.Errorf("the volume is %+v, the snapshot %+v", v, snap)
	}
	for _, r := range w.s.volumeView(w.volume("db1")).Legs {
		if !strings.Contains(r.Reason, "db1@mon") {
			t.Errorf("leg %v: %q does not name what needs its extents", r.ID, r.Reason)
		}
	}
	if e, err := w.s.Explain("db1"); err != nil || !slices.ContainsFunc(e.Facts, func(f string) bool { return strings.Contains(f, "db1@mon") }) {
		t.Errorf("explain = %+v, %v", e, err)
	}
	if again, err := Load(w.s.Records()); err != nil || !again.volumes.Get(w.volume("db1").ID).Legs[0].Based {
		t.Errorf("the records say otherwise: %v", err)
	}
	w.must(CreateVolume{Name: "c", From: "db1@mon", Seed: w.seed()})
	w.settle()
	w.must(DeleteVolume{Volume: "db1@mon"})
	w.settle()
	if w.volume("db1@mon") != nil || based() != 2 {
		t.Errorf("the snapshot is %v, %d legs have a tree, which a clone needs", w.volume("db1@mon"), based())
	}
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.must(DeleteVolume{Volume: "db1"})
	w.settle()
	v := w.volume("db1")
	if v == nil || v.State != VolumeDeleting || len(v.Legs) != 2 || !strings.Contains(w.s.volumeView(v).Legs[0].Reason, "c to be deleted") {
		t.Fatalf("the volume whose extents a clone needs is %+v", v)
	}
	w.must(DeleteVolume{Volume: "c"})
	w.settle()
	if w.volume("c") != nil || w.volume("db1") != nil {
		t.Errorf("the clone is %v, the volume %v: want none", w.volume("c"), w.volume("db1"))
	}
	if err := w.take("tue", "db2"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	w.must(DeleteVolume{Volume: "db2@tue"})
	w.settle()
	for _, l := range w.volume("db2").Legs {
		if l.Based || l.Returning || l.State != LegInSync {
			t.Errorf("after the last snapshot a leg is %+v", l)
		}
	}
}

// After its host was forced off, a volume with one copy in sync is not frozen before a host has it or heals it, and
// none heals it while a snapshot of it is taken: so none is begun.
func TestNoSnapshotWaitsForAHostThatWasForcedOff(t *testing.T) {
	w := newSnapWorld(t, 1)
	v := w.volume("db1")
	for i := range v.Legs[1:] { // as after a rebuild that was cut short
		v.Legs[1+i].State, v.Legs[1+i].Revision = LegRebuilding, v.Legs[1+i].Revision+1
	}
	w.must(Detach{Volume: "db1", Force: true})
	if v := w.volume("db1"); v.Holder == "" || !v.equal() {
		t.Fatalf("held by %q, copies equal %v", v.Holder, v.equal())
	}
	if err := w.take("mon", "db1"); !isReason(err, ReasonCopiesDiffer) || !strings.Contains(err.(*Error).Hint, "weft attach db1") {
		t.Errorf("a snapshot is taken: %v", err)
	}
}

// A snapshot that cannot be taken is given up after a minute, whatever the clock is set to meanwhile: not hours
// later, and not at once.
func TestASnapshotIsGivenUpInTimeWhenTheClockIsSet(t *testing.T) {
	for _, set := range []time.Duration{-15 * time.Hour, 0, 15 * time.Hour} {
		w := newSnapWorld(t, 1)
		for _, x := range w.targets {
			x.down = true
			w.must(TargetLost{Session: 1, Node: x.name})
		}
		began := w.now
		at := func(passed, set time.Duration) { w.now = stepped(began.Add(passed), set) }
		at(0, 0)
		if err := w.take("mon", "db1"); err != nil {
			t.Fatal(err)
		}
		for passed := time.Second; passed < 2*takeFor; passed += time.Second {
			at(passed, set)
			w.must(Tick{})
			v := w.volume("db1@mon")
			if goesOn := v != nil && v.State == VolumeCreating; goesOn != (passed <= takeFor) {
				t.Errorf("the clock is set by %v: after %v it goes on: %v", set, passed, goesOn)
				break
			}
		}
	}
}

// stepped is a time as read after the clock was set by some time: the difference between two of them does not
// change. Package time offers no way to make one; it holds a flag, 33 bits of seconds since 1885 and 30 bits of
// nanoseconds in its first word, and the reading that is never set in the second.
func stepped(t time.Time, by time.Duration) time.Time {
	wall := t.Add(by).Sub(time.Date(1885, 1, 1, 0, 0, 0, 0, time.UTC))
	words := (*[2]uint64)(unsafe.Pointer(&t))
	reading := uint64(t.Sub(time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC)))
	words[0] = 1<<63 | uint64(wall/time.Second)<<30 | uint64(wall%time.Second)
	words[1] = reading
	return t
}

func TestASnapshotIsGivenUpAsItsVolumeIsDeleted(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.must(Detach{Volume: "db1"})
	w.settle()
	if err := w.take("mon", "db1"); err != nil || w.volume("db1@mon").State != VolumeCreating {
		t.Fatalf("the snapshot is %s, %v", w.volume("db1@mon").State, err)
	}
	w.must(DeleteVolume{Volume: "db1"})
	for _, name := range slices.Sorted(maps.Keys(w.targets)) {
		for _, l := range w.s.WantedTarget(name).Legs {
			if !l.Origin.Leg.IsZero() && !l.Remove {
				t.Errorf("%s is told to make leg %v of one that it is told to remove", name, l.Leg)
			}
		}
	}
	if got := w.volume("db1@mon").Failed; got != "volume db1 was deleted" {
		t.Errorf("the snapshot: %q", got)
	}
}

// Its legs stay for the clone alone. A store that is rebuilt from the drives does not make a volume of them.
func TestADeletedVolumeThatSnapshotsNeedStaysDeletedInARebuiltStore(t *testing.T) {
	w := newSnapWorldOf(t, 1, false)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.must(DeleteVolume{Volume: "db1"})
	w.settle()
	if v := w.volume("db1"); v == nil || v.State != VolumeDeleting || len(v.Legs) != 2 {
		t.Fatalf("the volume whose extents a snapshot needs is %+v", v)
	}
	w.lose("drives", nil)
	w.settle()
	if v := w.volume("db1"); v == nil || v.State != VolumeDeleting || len(v.Legs) != 2 {
		t.Fatalf("in the rebuilt store it is %+v", v)
	}
	w.must(DeleteVolume{Volume: "db1@mon"})
	w.settle()
	if w.volume("db1") != nil || w.volume("db1@mon") != nil {
		t.Errorf("the volume is %+v, the snapshot %+v: want none", w.volume("db1"), w.volume("db1@mon"))
	}
}

// What a leg with a tree looks at does not grow with the volumes of its node.
func TestALegWithATreeLooksAtFewVolumes(t *testing.T) {
	w := newSnapWorldOf(t, 1, false)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	v := w.volume("db1")
	for i := range 1000 {
		other := &Volume{ID: block.VolumeID{UUID: block.UUID{0xff, byte(i >> 8), byte(i)}}, Name: block.VolumeName(fmt.Sprintf("other-%d", i)), Layout: v.Layout, Size: v.Size, State: VolumeReady}
		for _, l := range v.Legs {
			l.ID.UUID[0], l.ID.UUID[1], l.ID.UUID[2] = 0xff, byte(i>>8), byte(i)
			l.Image, l.Based = image.Image{Kind: image.Plain}, false
			other.Legs = append(other.Legs, l)
		}
		w.s.volumes.Set(w.s.by, other.ID, other)
		w.s.index(nil, other)
	}
	x, looked := newTx(w.s, w.now), 0
	below := x.volumes.below
	x.volumes.below = func(id block.VolumeID) *Volume { looked++; return below(id) }
	if x.settleBases(v.ID); looked > 20 {
		t.Errorf("it looks at %d volumes", looked)
	}
}

// The same as for thin volumes holds whatever is asked for and fails meanwhile.
func TestASnapshotOfAVolumeThatIsNotThinIsTheVolumeAtOneMoment(t *testing.T) {
	complete, returned := 0, 0
	for seed := range uint64(32) {
		w := newSnapWorldOf(t, seed, false)
		w.slow, w.pace = []int{0, 30, 60}[seed%3], []time.Duration{4 * time.Millisecond, 100 * time.Millisecond, 400 * time.Millisecond}[seed%3]
		for range 1500 {
			w.act()
		}
		complete += len(w.taken)
		returned += w.returned
	}
	if complete < 20 || returned < 10 {
		t.Errorf("%d snapshots were complete, and %d volumes went back: too few to tell anything", complete, returned)
	}
	t.Logf("%d snapshots were complete, and %d volumes went back", complete, returned)
}

// A volume that is not thin goes back from level 6 on, and only on targets that know it.
func TestAVolumeThatIsNotThinGoesBackFromItsLevelOn(t *testing.T) {
	w, _, _ := newBackWorldOf(t, 1, false)
	w.s.level = plainRestoreLevel - 1
	var e *Error
	if err := w.step(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"}); !errors.As(err, &e) || e.Reason != ReasonOldParts {
		t.Errorf("before its level = %v", err)
	}
	w.s.level = plainRestoreLevel
	for _, on := range w.s.targets {
		on.status.Level = plainRestoreLevel - 1
	}
	if err := w.step(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"}); !errors.As(err, &e) || e.Reason != ReasonOldTarget || !strings.Contains(e.Text, "earlier version") || !strings.Contains(e.Hint, "upgrade") || !strings.Contains(e.Hint, "--from db1@mon") {
		t.Errorf("on targets that do not know it = %v, want that it says so, and a hint at a clone", err)
	}
}

// Where no target can, the first snapshot is refused, and says what to do.
func TestASnapshotOfAVolumeThatIsNotThinIsRefused(t *testing.T) {
	w := newSnapWorldOf(t, 1, false)
	for _, on := range w.s.targets {
		on.report.PlainSnapshots = false
	}
	var e *Error
	if err := w.take("mon", "db1"); !errors.As(err, &e) || e.Reason != ReasonOldTarget || !strings.Contains(e.Text, "earlier version") || !strings.Contains(e.Hint, "--datapath user") {
		t.Errorf("on targets of an earlier version = %v", err)
	}
	for _, on := range w.s.targets {
		on.report.PlainSnapshots, on.status.Online = true, false
	}
	if err := w.take("mon", "db1"); !errors.As(err, &e) || e.Reason != ReasonNoInSyncLeg || !strings.Contains(e.Text, "cannot be reached") {
		t.Errorf("on targets that are down = %v", err)
	}
	w = newSnapWorldOf(t, 1, false)
	for _, d := range w.s.drives {
		w.s.used.Set(w.s.by, d.ID, d.Extents)
	}
	if err := w.take("mon", "db1"); !errors.As(err, &e) || !strings.Contains(e.Text, "no free extent") {
		t.Errorf("on full drives = %v", err)
	}
}

// Hosts are not held before all legs have their trees: that may take longer than they hold.
func TestHostsAreNotHeldWhileTreesAreMade(t *testing.T) {
	w := newSnapWorldOf(t, 1, false)
	for _, x := range w.targets {
		x.noTrees = true
	}
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	x := w.volume("db1@mon").taking()
	if x == nil || x.Phase != Preparing || len(w.s.WantedInitiator("c1").Attachments[0].Holds) > 0 {
		t.Fatalf("it is %+v, want PREPARING and no hold", x)
	}
	if why := w.s.takingWaits(w.volume("db1@mon")); !strings.Contains(why, "target") {
		t.Errorf("it waits for %q", why)
	}
	for _, x := range w.targets {
		x.noTrees = false
	}
	w.settle()
	if v := w.volume("db1@mon"); v.State != VolumeReady {
		t.Errorf("the snapshot is %v", v.State)
	}
}

// A column without a copy in sync may have one again: its target is not old.
func TestASnapshotOfAColumnWithoutACopyInSyncIsNotRefusedForOldTargets(t *testing.T) {
	w := newSnapWorldOf(t, 1, false)
	for i := range w.volume("db1").Legs {
		w.volume("db1").Legs[i].Suspect = true
	}
	var e *Error
	if _, err := w.s.Step(w.now, CreateSnapshots{Snapshots: []NewSnapshot{{Volume: "db1", Name: "x"}}, Seed: w.seed()}); !errors.As(err, &e) || e.Reason == ReasonOldTarget {
		t.Errorf("without a copy in sync: reason %v: %v", e.Reason, err)
	}
}

// What a leg waits for that is going back is not that it is zeroed.
func TestALegThatGoesBackIsNotSaidToBeZeroed(t *testing.T) {
	w, _, _ := newBackWorldOf(t, 1, false)
	w.toSwitching()
	for _, x := range w.targets {
		w.targetActs(x) // its label says that it is going back
	}
	e, err := w.s.Explain("db1")
	if err != nil || w.volume("db1").Restoring == nil {
		t.Fatal(err, w.volume("db1").Restoring)
	}
	for _, why := range e.Waits {
		if strings.Contains(why, "zeroed") {
			t.Errorf("it waits for %q", why)
		}
	}
}

// A snapshot is not copied to a node that has its other copy, also if its volume has a leg there.
func TestASnapshotIsNotCopiedBesideItsOtherCopy(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.missed("db1", "mon")
	v := w.volume("db1@mon").clone()
	v.Legs = slices.DeleteFunc(v.Legs, func(l Leg) bool { return l.Copying != nil || !l.Rebuilt.IsZero() })
	o := w.volume("db1")
	other := o.Legs[slices.IndexFunc(o.Legs, func(l Leg) bool { return l.Node != v.Legs[0].Node })]
	tx := newTx(w.s, w.now)
	if !tx.takesCopy(v, &other) {
		t.Fatalf("%v takes no copy", &other)
	}
	v.Legs[0].Drive, v.Legs[0].Node = block.DriveID{UUID: block.UUID{7}}, other.Node // another drive of that node
	w.s.drives[v.Legs[0].Drive] = &Drive{ID: v.Legs[0].Drive, Node: other.Node, State: DriveReady}
	if tx.takesCopy(v, &other) {
		t.Error("both copies are on one node")
	}
	elsewhere := placement.Drive{ID: other.Drive, Node: other.Node, Domain: "a rack of its own"}
	if why := w.s.besides(v, 0, &elsewhere, w.s.lookup()); !strings.Contains(why, "its node holds") {
		t.Errorf("beside a copy on the same node: %q", why)
	}
}

// What a host reports of a volume beside what its I/O waits for is told, too: a call that does not return, for
// example.
func TestWhatAHostReportsOfAVolumeIsTold(t *testing.T) {
	w := newSnapWorld(t, 1)
	v, h := w.volume("db1"), w.hosts["c1"]
	r := w.hostReport(h)
	for i := range r.Attachments {
		if r.Attachments[i].Volume == v.ID {
			r.Attachments[i].Phase, r.Attachments[i].WaitingFor = PhaseStalled, "all legs to answer"
		}
	}
	r.Problems = append(r.Problems, Problem{Object: "attachment " + v.ID.String(), Doing: "keep the volume", Cause: "flush has not returned yet"})
	w.must(InitiatorReported{Session: 1, Report: r})
	text, _ := explained(t, w, "db1")
	if !strings.Contains(text, "all legs to answer") || !strings.Contains(text, "host c1 reports: flush has not returned yet") {
		t.Errorf("explained as\n%s", text)
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
	"weft.dev/weft/target/userspace"
)

var treeID = uid('7', 1).String()

const thinSize = 300 * block.MiB

// thin makes the legs mapped ones of one tree, on a drive with three extents for it.
func (w wish) thin() wish {
	for _, l := range w.Legs {
		l.Image, l.Extents, l.TreeId = pb.ImageKind_IMAGE_KIND_MAPPED, nil, treeID
	}
	w.Space = []*pb.WantedSpace{{DriveId: driveID(1).String(), Extents: []*pb.Extent{{Start: 0, Count: 3}}}}
	return w.sized(thinSize)
}

// from gives the last leg an origin.
func (w wish) from(n byte, kind pb.LegOriginKind, wait bool) wish {
	w.Legs[len(w.Legs)-1].Origin = &pb.LegOrigin{LegId: legID(n).String(), Kind: kind, Wait: wait}
	return w
}

func (w wish) removed(n byte) wish {
	for _, l := range w.Legs {
		if l.GetLegId() == legID(n).String() {
			l.Remove = true
		}
	}
	return w
}

const (
	freeze = pb.LegOriginKind_LEG_ORIGIN_KIND_FREEZE
	clone  = pb.LegOriginKind_LEG_ORIGIN_KIND_CLONE
	back   = pb.LegOriginKind_LEG_ORIGIN_KIND_RESTORE
)

// ---- plans ----

// planned returns the orders for the last leg, its report, and the problems.
func planned(w wish, legs []*pb.LegLabel, trees map[string]userspace.TreeSeen) (orders []order, report *pb.LegReport, problems []problem) {
	l := &drive.Label{Cluster: cluster, Drive: driveID(1), Size: block.GiB, Legs: legs}
	if len(legs) > 0 {
		l.Trees = []*pb.TreeLabel{{TreeId: treeID, Extents: []*pb.Extent{{Start: 0, Count: 1}}, Formatted: true}}
	}
	l.Reserve = []*pb.Extent{{Start: 1, Count: 2}}
	if trees == nil {
		trees = map[string]userspace.TreeSeen{}
	}
	s := seen{drives: map[block.DriveID]driveSeen{driveID(1): {label: l, trees: trees}}}
	p := makePlan(s, parseWanted(w.TargetWanted), "/dev/weft/leg", nil)
	last := w.Legs[len(w.Legs)-1].GetLegId()
	for _, o := range p.orders {
		if o.about() == "leg "+last {
			orders = append(orders, o)
		}
	}
	for _, r := range p.legs {
		if r.GetLegId() == last {
			report = r
		}
	}
	return orders, report, p.problems
}

// recorded is the record of the n-th wanted leg.
func (w wish) recorded(i int, prepared bool) *pb.LegLabel {
	l := w.Legs[i]
	r := &pb.LegLabel{LegId: l.GetLegId(), TreeId: l.GetTreeId(), Image: l.GetImage(), Revision: l.GetRevision(), Volume: l.GetVolume(), Zeroed: prepared}
	if prepared {
		r.ZeroedExtents = 2
	}
	return r
}

func TestALegWithAnOriginIsPlanned(t *testing.T) {
	two := func() wish { return want().leg(1, 1, 1, 0).leg(2, 1, 0, 0).thin() }
	for name, c := range map[string]struct {
		wait, carved, prepared bool
		kind                   pb.LegOriginKind
		want                   string // a part of the only order; empty: none
	}{
		"it waits":               {wait: true, kind: freeze, want: "carve leg"},
		"it waits, carved":       {wait: true, carved: true, kind: freeze},
		"at once":                {kind: freeze, want: "carve leg"},
		"its moment":             {carved: true, kind: freeze, want: "as freeze of leg " + legID(1).String()},
		"a clone":                {carved: true, kind: clone, want: "as clone of leg " + legID(1).String()},
		"done":                   {carved: true, prepared: true, kind: freeze},
		"done, and told to wait": {wait: true, carved: true, prepared: true, kind: freeze},
	} {
		w := two().from(1, c.kind, c.wait)
		legs := []*pb.LegLabel{w.recorded(0, true)}
		if c.carved {
			legs = append(legs, w.recorded(1, c.prepared))
		}
		orders, report, problems := planned(w, legs, nil)
		if c.want == "" && len(orders) > 0 || c.want != "" && (len(orders) != 1 || !strings.Contains(orders[0].String(), c.want)) {
			t.Errorf("%s: orders %v, want %q", name, orders, c.want)
		}
		if report.GetReady() || report.GetError() != "" || len(problems) > 0 {
			t.Errorf("%s: reported as %v, with problems %v", name, report, problems)
		}
	}
}

// A leg goes back to a snapshot once for each revision: first its record says that it is not prepared.
func TestALegThatGoesBackIsPlanned(t *testing.T) {
	w := want().leg(1, 1, 1, 0).leg(2, 1, 0, 3).thin().from(1, back, false)
	record := w.recorded(1, true)
	for name, c := range map[string]struct {
		revision uint64
		prepared bool
		want     string // a part of the only order; empty: none
		ready    bool
	}{
		"its turn":       {2, true, "revision 3 of leg", false},
		"was cut off":    {2, false, "revision 3 of leg", false},
		"its moment":     {3, false, "what leg " + legID(1).String() + " holds", false},
		"it has":         {3, true, "", true},
		"it is newer":    {4, true, "", false},
		"newer, not yet": {4, false, "", false},
	} {
		record.Revision, record.Zeroed = c.revision, c.prepared
		orders, report, _ := planned(w, []*pb.LegLabel{w.recorded(0, true), record}, nil)
		var about []string
		for _, o := range orders {
			if _, maps := o.(mapLeg); !maps {
				about = append(about, o.String())
			}
		}
		if c.want == "" && len(about) > 0 || c.want != "" && !slices.ContainsFunc(about, func(o string) bool { return strings.Contains(o, c.want) }) {
			t.Errorf("%s: orders %v, want %q", name, about, c.want)
		}
		if report.GetReady() && !c.ready {
			t.Errorf("%s: it is ready", name)
		}
	}
}

// A leg that still has to grow is not recorded as prepared by that, beside the order that says it is not.
func TestALegThatGoesBackIsNotGrownMeanwhile(t *testing.T) {
	w := want().leg(1, 1, 1, 0).leg(2, 1, 0, 3).thin().from(1, back, false)
	record := w.recorded(1, true)
	record.Revision, record.ZeroedExtents = 2, 1
	orders, _, _ := planned(w, []*pb.LegLabel{w.recorded(0, true), record}, nil)
	for _, o := range orders {
		if p, ok := o.(prepareLeg); ok {
			t.Errorf("order %v runs beside the one that makes it unprepared", p)
		}
	}
}

// Without the tree of its origin a leg would get one of its own, and be empty.
func TestALegIsNotCarvedWithoutItsOriginsTree(t *testing.T) {
	w := want().leg(2, 1, 0, 0).thin().from(1, freeze, true)
	orders, report, _ := planned(w, nil, nil)
	if len(orders) > 0 || !strings.Contains(report.GetError(), "does not have tree "+treeID) {
		t.Errorf("orders %v, reported as %v", orders, report)
	}
	l := &drive.Label{Cluster: cluster, Drive: driveID(1), Size: block.GiB, Reserve: []*pb.Extent{{Start: 0, Count: 3}}}
	if cause := unrooted(parseWanted(w.TargetWanted).legs[0], l); cause == "" {
		t.Error("an order that was made earlier carves it")
	}
	w.Legs[0].Origin = nil
	if orders, report, _ := planned(w, nil, nil); len(orders) != 1 || report.GetError() != "" {
		t.Errorf("without an origin: orders %v, reported as %v", orders, report)
	}
}

func TestAnOriginIsChecked(t *testing.T) {
	for name, spoil := range map[string]func(*pb.WantedLeg){
		"a kind that is not known": func(l *pb.WantedLeg) { l.Origin.Kind = 9 },
		"no kind":                  func(l *pb.WantedLeg) { l.Origin.Kind = 0 },
		"itself":                   func(l *pb.WantedLeg) { l.Origin.LegId = l.LegId },
		"no leg":                   func(l *pb.WantedLeg) { l.Origin.LegId = "" },
		"not in a tree": func(l *pb.WantedLeg) {
			l.Image, l.TreeId, l.Extents = pb.ImageKind_IMAGE_KIND_PLAIN, "", []*pb.Extent{{Start: 0, Count: 2}}
		},
		"of a leg that was there before its tree": func(l *pb.WantedLeg) {
			l.Image, l.Extents = pb.ImageKind_IMAGE_KIND_BASED, []*pb.Extent{{Start: 0, Count: 2}}
		},
	} {
		w := want().leg(2, 1, 0, 0).thin().from(1, freeze, false)
		if got := parseWanted(w.TargetWanted); len(got.legs) != 1 || len(got.problems) > 0 {
			t.Fatalf("a good one: %v", got.problems)
		}
		spoil(w.Legs[0])
		if got := parseWanted(w.TargetWanted); len(got.legs) != 0 || len(got.problems) != 1 {
			t.Errorf("%s: %d legs, problems %v", name, len(got.legs), got.problems)
		}
	}
}

func TestLegsThatShareATreeReportTheirOwnSpace(t *testing.T) {
	w := want().leg(1, 1, 1, 0).leg(2, 1, 0, 0).thin().from(1, freeze, false)
	legs := []*pb.LegLabel{w.recorded(0, true), w.recorded(1, true)}
	tree := userspace.TreeSeen{Free: block.GiB, Used: 8 * block.MiB, UsedBy: map[block.UUID]block.Size{legID(1).UUID: 5 * block.MiB, legID(2).UUID: 2 * block.MiB}}
	if _, r, _ := planned(w, legs, map[string]userspace.TreeSeen{treeID: tree}); r.GetUsedBytes() != uint64(2*block.MiB) {
		t.Errorf("%v used, want 2MiB", block.Size(r.GetUsedBytes()))
	}
	tree.UsedBy = map[block.UUID]block.Size{legID(2).UUID: 2 * block.MiB}
	if _, r, _ := planned(w, legs, map[string]userspace.TreeSeen{treeID: tree}); r.GetUsedBytes() != uint64(8*block.MiB) {
		t.Errorf("the only leg of a tree: %v used, want all 8MiB", block.Size(r.GetUsedBytes()))
	}
}

// A leg in a damaged tree is served, and says so. The tree gets no space, whatever is free in it.
func TestALegInADamagedTreeIsServedAndSaysSo(t *testing.T) {
	w := want().leg(1, 1, 1, 0).leg(2, 1, 0, 0).thin().from(1, freeze, false)
	legs := []*pb.LegLabel{w.recorded(0, true), w.recorded(1, true)}
	tree := userspace.TreeSeen{Damage: "records are lost", Unknown: map[block.UUID]block.Size{legID(2).UUID: block.MiB}}
	_, r, problems := planned(w, legs, map[string]userspace.TreeSeen{treeID: tree})
	if r.GetDamage() != tree.Damage || r.GetUnknownBytes() != uint64(block.MiB) || r.GetError() != "" || r.GetFull() || len(problems) > 0 {
		t.Errorf("report %v, problems %v", r, problems)
	}
	grows := func() []string { return ordersOf[growTree](flatteningPlan(tree, 2, func(wish, []*pb.LegLabel) {})) }
	if orders := grows(); len(orders) > 0 {
		t.Errorf("it gets space: %v", orders)
	}
	if tree.Damage = ""; len(grows()) == 0 {
		t.Error("a tree without damage gets none")
	}
}

// ---- an agent ----

// onFiles is a world whose agent serves a file as its drive, in real time.
func onFiles(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	file := filepath.Join(w.root, "drive")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, int64(block.GiB)); err != nil {
		t.Fatal(err)
	}
	w.labels = func() []*drive.Label {
		m, err := drive.OpenDevice(file, drive.ReadOnly)
		if err != nil {
			t.Error(err)
			return nil
		}
		defer m.Close() //nolint:errcheck // only read
		if l, err := drive.ReadLabel(m, m.Size()); err == nil {
			return []*drive.Label{l}
		}
		return nil
	}
	w.gate = &gate{left: -1}
	return w
}

func (w *world) serveFiles() {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	a, err := New(Config{
		Node: "t1", Manager: &w.manager, Version: "test", Root: w.root, Datapath: User, Files: []string{"/drive"}, FilesOnly: true,
		Portals: []block.Portal{{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}}, Listen: w.listen,
	})
	if err != nil {
		cancel()
		w.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = a.Run(ctx) }() //nolint:errcheck // it ends when it is told to
	w.stop = func() { cancel(); <-ended }
}

func wholeDrive(w wish) *pb.TargetWanted {
	w.Drives = []*pb.WantedDrive{{DriveId: driveID(1).String(), Device: "/drive"}}
	return proto.CloneOf(w.TargetWanted)
}

func isRecorded(n byte) func(*pb.TargetReport) bool {
	return func(r *pb.TargetReport) bool {
		for _, d := range r.GetDrives() {
			for _, l := range d.GetLegs() {
				if l.GetLegId() == legID(n).String() {
					return true
				}
			}
		}
		return false
	}
}

// A host reads in the snapshot what the volume was when it was taken, while another one writes.
func TestAHostReadsASnapshot(t *testing.T) {
	w := onFiles(t)
	w.serveFiles()
	defer func() { w.stop() }()
	origin := func() wish { return want().volume(1, 1, 1) }
	w.manager.set(wholeDrive(origin().thin()))
	if r := w.until("the origin", exportsReady(1)); !r.GetSnapshots() {
		t.Error("the target does not say that it makes snapshots")
	}
	c, leg := w.leg(1, 1, 0)
	defer func() { c.Cut() }()
	write := func(letter string) {
		t.Helper()
		if err := block.WriteAt(leg, bytes.Repeat([]byte(letter), 4096), 0); err != nil {
			t.Fatal(err)
		}
	}
	read := func(from block.Device, want string) {
		t.Helper()
		got := make([]byte, 4096)
		if err := block.ReadAt(from, got, 0); err != nil || got[0] != want[0] {
			t.Errorf("a host reads %q…, %v; want %s", got[:4], err, want)
		}
	}
	write("a")
	w.manager.set(wholeDrive(origin().leg(2, 1, 0, 0).thin().from(1, freeze, true)))
	w.until("the snapshot's record", isRecorded(2))
	write("b")
	time.Sleep(time.Second)
	r := w.until("a report", func(*pb.TargetReport) bool { return true })
	if l := legReport(r, 2); l.GetReady() || l.GetError() != "" || w.record(legID(2).String()).GetZeroed() {
		t.Errorf("while it waits the snapshot is %v", l)
	}
	write("c")
	snapshot := func() wish { return origin().volume(2, 1, 1).thin().from(1, freeze, false) }
	taken := snapshot()
	taken.Exports[1].ReadOnly = true
	w.manager.set(wholeDrive(taken))
	w.until("both exports", exportsReady(2))
	write("d")
	s, frozen := w.leg(2, 1, 0)
	read(frozen, "c")
	read(leg, "d")
	if err := block.WriteAt(frozen, make([]byte, 4096), 0); err == nil {
		t.Error("a host has written to a snapshot")
	}
	w.until("the space of both", func(r *pb.TargetReport) bool {
		return legReport(r, 1).GetUsedBytes() == uint64(block.MiB) && legReport(r, 2).GetUsedBytes() == uint64(block.MiB)
	})
	each := &pb.LegSpace{ReferencedBytes: 16 << 10, FreedBytes: uint64(block.MiB)} // the head has the chunk, too
	r = w.until("what each reads, and frees", func(r *pb.TargetReport) bool {
		return proto.Equal(legReport(r, 1).GetSpace(), each) && proto.Equal(legReport(r, 2).GetSpace(), each)
	})
	if len(r.GetProblems()) > 0 {
		t.Errorf("problems: %v", r.GetProblems())
	}

	s.Cut()
	w.stop()
	w.serveFiles()
	w.until("both exports of the next agent", exportsReady(2))
	c.Cut()
	c, leg = w.leg(1, 1, 0)
	s, frozen = w.leg(2, 1, 0)
	read(frozen, "c")

	s.Cut()
	c.Cut()
	goesBack := func() wish { return want().leg(2, 1, 0, 0).leg(1, 1, 2, 1).admit(1, 2) }
	w.manager.set(wholeDrive(goesBack().thin().from(2, back, false)))
	isBack := func(*pb.TargetReport) bool {
		l := w.record(legID(1).String())
		return l.GetRevision() == 1 && l.GetZeroed()
	}
	w.until("the origin back at its snapshot", isBack)
	w.manager.set(wholeDrive(goesBack().export(1, 2, 1).thin()))
	w.until("its export", exportsReady(1))
	c, leg = w.leg(1, 2, 1)
	read(leg, "c")
	write("e")
	c.Cut()
	w.stop()
	w.serveFiles()
	w.manager.set(wholeDrive(goesBack().export(1, 2, 1).thin().from(2, back, false))) // late, and to another process
	w.until("its export again", exportsReady(1))
	c, leg = w.leg(1, 2, 1)
	read(leg, "e")

	w.manager.set(wholeDrive(goesBack().export(1, 2, 1).thin().removed(2)))
	w.until("the snapshot gone", func(r *pb.TargetReport) bool { return !isRecorded(2)(r) && exportsReady(1)(r) })
	read(leg, "e")
	c.Cut()
	w.manager.set(wholeDrive(want().leg(1, 1, 2, 1).thin().removed(1)))
	w.until("the tree gone", func(r *pb.TargetReport) bool {
		return len(r.GetDrives()) == 1 && len(r.GetDrives()[0].GetTrees()) == 0 && !isRecorded(1)(r)
	})
}

// An origin that is lost is a problem that the manager hears of.
func TestASnapshotOfNothingIsAProblem(t *testing.T) {
	w := onFiles(t)
	w.serveFiles()
	defer func() { w.stop() }()
	w.manager.set(wholeDrive(want().volume(1, 1, 1).thin()))
	w.until("a tree", exportsReady(1))
	w.manager.set(wholeDrive(want().volume(1, 1, 1).leg(2, 1, 0, 0).thin().from(3, freeze, false)))
	r := w.until("the problem", problemWith("leg "+legID(2).String()+" prepare leg"))
	if legReport(r, 2).GetReady() || w.record(legID(2).String()).GetZeroed() {
		t.Errorf("it is reported as %v", legReport(r, 2))
	}
}

// A plain leg gets a tree and loses it step by step. The table that goes the other way serves it meanwhile,
// and it stays ready; no leg is frozen before hosts use it through its tree.
func TestAPlainLegThatGetsATreeIsPlanned(t *testing.T) {
	const size = 200 * block.MiB
	run := []*pb.Extent{{Start: 3, Count: 1}}
	tree := legID(1).String()
	settling := func(s mapped.Settling) *userspace.TreeSeen { return &userspace.TreeSeen{Settling: s} }
	for name, c := range map[string]struct {
		wanted, image pb.ImageKind
		names         bool // the label names the tree
		open          *userspace.TreeSeen
		through       bool // the table goes through the tree
		want          string
		problem       string
	}{
		"plain":                  {wanted: plainKind},
		"it gets a tree":         {wanted: basedKind, want: "make a tree over leg"},
		"its making was cut off": {wanted: basedKind, names: true, want: "make a tree over leg"},
		"its table changes":      {wanted: basedKind, image: basedKind, names: true, want: "reload"},
		"it has one":             {wanted: basedKind, image: basedKind, names: true, open: settling(mapped.Settling{Alone: true}), through: true},
		"it waits for others":    {wanted: plainKind, image: basedKind, names: true, open: settling(mapped.Settling{}), through: true},
		"it is to be copied":     {wanted: plainKind, image: basedKind, names: true, open: settling(mapped.Settling{Alone: true, Left: 1}), through: true, want: "begin to copy"},
		"it was not copied":      {wanted: plainKind, image: basedKind, names: true, open: &userspace.TreeSeen{Settling: mapped.Settling{Alone: true, Left: 1}, Unsettled: "a bad sector"}, through: true, want: "begin to copy", problem: "a bad sector"},
		"space is kept":          {wanted: plainKind, image: basedKind, names: true, open: &userspace.TreeSeen{Unreclaimed: "a bad sector"}, through: true, problem: "a bad sector"},
		"it is copied":           {wanted: plainKind, image: basedKind, names: true, open: settling(mapped.Settling{Alone: true, Plain: true}), through: true, want: "make plain"},
		"its table changes back": {wanted: plainKind, names: true, open: settling(mapped.Settling{Alone: true, Plain: true}), through: true, want: "reload"},
		"it was wanted again":    {wanted: basedKind, names: true, open: settling(mapped.Settling{Alone: true, Plain: true}), through: true, want: "reload"},
		"its tree goes":          {wanted: plainKind, names: true, want: "remove the tree of"},
	} {
		w := want().leg(1, 1, 1, 0).sized(size)
		l := w.Legs[0]
		l.Image, l.Extents, l.TreeId, l.SizeBytes, l.Volume.SizeBytes = c.wanted, run, tree, uint64(size), uint64(size)
		record := &pb.LegLabel{LegId: tree, Image: c.image, Extents: run, Revision: l.GetRevision(), Volume: l.GetVolume(), Zeroed: true}
		label := &drive.Label{Cluster: cluster, Drive: driveID(1), Size: 2 * block.GiB, Legs: []*pb.LegLabel{record}, Reserve: []*pb.Extent{{Start: 1, Count: 2}}}
		if c.names {
			record.TreeId = tree
			label.Trees = []*pb.TreeLabel{{TreeId: tree, Extents: []*pb.Extent{{Start: 0, Count: 1}}, Formatted: drive.Based(record)}}
		}
		trees := map[string]userspace.TreeSeen{}
		if c.open != nil {
			trees[tree] = *c.open
		}
		n := block.DeviceNumber{Major: 7, Minor: 1}
		table := legTable(n, legID(1), drive.ImageOf(record), size)
		if c.through {
			table = userspace.MappedTable(n, tree, legID(1), size)
		}
		device := dm.Info{Name: dmPrefix + tree, UUID: dmPrefix + tree, Number: block.DeviceNumber{Major: 9, Minor: 1}, Live: true}
		s := seen{
			drives: map[block.DriveID]driveSeen{driveID(1): {label: label, trees: trees, number: n}},
			mapped: map[block.LegID]dm.State{legID(1): {Info: device, Table: table}},
			names:  map[block.LegID]string{legID(1): dm.NodePath(device.Number)},
		}
		p := makePlan(s, parseWanted(w.TargetWanted), "/dev/weft/leg", nil)
		var orders []string
		for _, o := range p.orders {
			if o.about() == "leg "+tree {
				orders = append(orders, o.String())
			}
		}
		if c.want == "" && len(orders) > 0 || c.want != "" && (len(orders) != 1 || !strings.Contains(orders[0], c.want)) {
			t.Errorf("%s: orders %q, want %q", name, orders, c.want)
		}
		if len(p.legs) != 1 || !p.legs[0].GetReady() {
			t.Errorf("%s: reported as %v, %v", name, p.legs, p.problems)
		}
		told := slices.ContainsFunc(p.problems, func(x problem) bool { return x.object == "leg "+tree && x.cause == c.problem })
		if c.problem != "" && !told || c.problem == "" && len(p.problems) > 0 {
			t.Errorf("%s: its problems are %v, want %q", name, p.problems, c.problem)
		}
	}
}

// A leg with a tree over it goes back to a snapshot as a mapped one does: once for each revision, and first its
// record says that it is to. Until it has, it is neither ready nor made plain. If it is not to go back any
// more, its record is to say so.
func TestAPlainLegThatGoesBackIsPlanned(t *testing.T) {
	run := []*pb.Extent{{Start: 3, Count: 1}}
	for name, c := range map[string]struct {
		wanted, revision uint64
		to               pb.LegOriginKind // 0: to nothing
		image            pb.ImageKind
		going            bool
		want             string // a part of the only order but those that map it; empty: none
		ready            bool
	}{
		"its turn":                 {wanted: 3, revision: 2, to: back, image: basedKind, want: "revision 3 of leg"},
		"was cut off":              {wanted: 3, revision: 2, to: back, image: basedKind, going: true, want: "revision 3 of leg"},
		"its moment":               {wanted: 3, revision: 3, to: back, image: basedKind, going: true, want: "what leg " + legID(2).String() + " holds"},
		"it has":                   {wanted: 3, revision: 3, to: back, image: basedKind, ready: true},
		"it is newer":              {wanted: 3, revision: 4, to: back, image: basedKind},
		"left behind":              {wanted: 4, revision: 4, image: basedKind, going: true, want: "prepare leg"},
		"left behind, to be plain": {wanted: 4, revision: 4, image: plainKind, going: true, want: "prepare leg"},
	} {
		w := want().leg(1, 1, 1, c.wanted).sized(200 * block.MiB)
		l := w.Legs[0]
		l.Image, l.Extents, l.TreeId, l.SizeBytes, l.Volume.SizeBytes = c.image, run, treeID, uint64(200*block.MiB), uint64(200*block.MiB)
		if c.to != 0 {
			w = w.from(2, c.to, false)
		}
		record := w.recorded(0, true)
		record.Image, record.TreeId, record.Extents, record.ZeroedExtents, record.Revision, record.GoingBack = basedKind, treeID, run, 0, c.revision, c.going
		trees := map[string]userspace.TreeSeen{treeID: {Settling: mapped.Settling{Alone: true, Plain: true}}}
		orders, report, _ := planned(w, []*pb.LegLabel{record}, trees)
		var about []string
		for _, o := range orders {
			if _, maps := o.(mapLeg); !maps {
				about = append(about, o.String())
			}
		}
		if c.want == "" && len(about) > 0 || c.want != "" && (len(about) != 1 || !strings.Contains(about[0], c.want)) {
			t.Errorf("%s: orders %q, want %q", name, about, c.want)
		}
		if report.GetReady() && !c.ready {
			t.Errorf("%s: it is ready", name)
		}
	}
}

const (
	plainKind = pb.ImageKind_IMAGE_KIND_PLAIN
	basedKind = pb.ImageKind_IMAGE_KIND_BASED
)

// flatteningPlan is the plan for a tree with the legs of volumes 1 and 2, on a drive of 1 GiB.
func flatteningPlan(tree userspace.TreeSeen, reserve uint32, change func(w wish, legs []*pb.LegLabel)) plan {
	w := want().leg(1, 1, 1, 1).leg(2, 1, 1, 2).thin()
	legs := []*pb.LegLabel{w.recorded(0, true), w.recorded(1, true)}
	change(w, legs)
	l := &drive.Label{Cluster: cluster, Drive: driveID(1), Size: block.GiB, Legs: legs, Trees: []*pb.TreeLabel{{TreeId: treeID, Extents: []*pb.Extent{{Start: 0, Count: 1}}, Formatted: true}}}
	if reserve > 0 {
		l.Reserve = []*pb.Extent{{Start: 1, Count: reserve}}
	}
	trees := map[string]userspace.TreeSeen{treeID: tree}
	return makePlan(seen{drives: map[block.DriveID]driveSeen{driveID(1): {label: l, trees: trees}}}, parseWanted(w.TargetWanted), "/dev/weft/leg", nil)
}

// ordersOf is the orders of one kind.
func ordersOf[T order](p plan) (all []string) {
	for _, o := range p.orders {
		if _, ok := o.(T); ok {
			all = append(all, o.String())
		}
	}
	return all
}

// A leg that is to be flattened is reported as flat when neither it nor a snapshot of its volume is over
// another's layer in its tree; until then its target is at it, unless it is told to wait.
func TestALegThatIsFlattenedIsPlanned(t *testing.T) {
	over := []mapped.Layer{{ID: 1, Object: legID(1).UUID, State: mapped.StateFrozen}, {ID: 2, Parent: 1, Object: legID(2).UUID, State: mapped.StateOpen}}
	alone := []mapped.Layer{{ID: 1, Object: legID(1).UUID, State: mapped.StateFrozen}, {ID: 2, Object: legID(2).UUID, State: mapped.StateOpen}}
	busy := userspace.Flattening{Busy: true, Left: block.MiB}
	for name, c := range map[string]struct {
		flatten, wait, old bool
		layers             []mapped.Layer
		now                userspace.Flattening
		want               string // a part of the only order; empty: none
		flat               bool
	}{
		"not told":            {layers: over},
		"told":                {flatten: true, layers: over, want: "flatten volume"},
		"under way":           {flatten: true, layers: over, now: busy},
		"failed":              {flatten: true, layers: over, now: userspace.Flattening{Waits: "a bad sector"}, want: "flatten volume"},
		"told to wait":        {flatten: true, wait: true, layers: over, now: busy, want: "stop flattening"},
		"waits":               {flatten: true, wait: true, layers: over},
		"not told any more":   {layers: over, now: busy, want: "stop flattening"},
		"flat":                {flatten: true, layers: alone, flat: true},
		"flat, told to wait":  {flatten: true, wait: true, layers: alone, flat: true},
		"not in its tree":     {flatten: true, layers: alone[:1], want: "flatten volume"},
		"of another revision": {flatten: true, old: true, layers: alone},
	} {
		tree := userspace.TreeSeen{Free: block.GiB, Layers: c.layers, Flattening: map[block.VolumeID]userspace.Flattening{volumeID(2): c.now}}
		p := flatteningPlan(tree, 2, func(w wish, legs []*pb.LegLabel) {
			if w.Legs[1].Flatten, w.Legs[1].FlattenWait = c.flatten, c.wait; c.old {
				legs[1].Revision--
			}
		})
		orders := ordersOf[flattenLegs](p)
		r := p.legs[len(p.legs)-1]
		if c.want == "" && len(orders) > 0 || c.want != "" && (len(orders) != 1 || !strings.HasPrefix(orders[0], c.want)) || r.GetFlat() != c.flat {
			t.Errorf("%s: orders %q, want %q; %v", name, orders, c.want, r)
		}
		if c.flatten && !c.flat && !c.old && (r.GetFlatteningBytes() != uint64(c.now.Left) || r.GetFlatteningWaitsFor() != c.now.Waits) {
			t.Errorf("%s: reported as %v", name, r)
		}
	}
}

// What is being flattened is stopped when no leg of its volume is to be flattened in that tree any more: the
// volume was deleted and its snapshots are still there, or its leg has moved away.
func TestAFlatteningThatNobodyWantsIsStopped(t *testing.T) {
	busy := userspace.Flattening{Busy: true, Left: block.TiB}
	for name, c := range map[string]struct {
		volume  block.VolumeID
		now     userspace.Flattening
		removed bool
		stopped int
	}{
		"wanted":                      {volumeID(2), busy, false, 0},
		"its leg is being removed":    {volumeID(2), busy, true, 1},
		"the volume has no leg":       {volumeID(9), busy, false, 1},
		"the volume has no leg, over": {volumeID(9), userspace.Flattening{}, false, 0},
	} {
		layers := []mapped.Layer{{ID: 1, Object: legID(1).UUID, State: mapped.StateFrozen}, {ID: 2, Parent: 1, Object: legID(2).UUID, State: mapped.StateOpen}}
		tree := userspace.TreeSeen{Free: block.GiB, Layers: layers, Flattening: map[block.VolumeID]userspace.Flattening{volumeID(2): busy, c.volume: c.now}}
		p := flatteningPlan(tree, 2, func(w wish, _ []*pb.LegLabel) { w.Legs[1].Flatten, w.Legs[1].Remove = true, c.removed })
		if orders := ordersOf[flattenLegs](p); len(orders) != c.stopped || len(orders) == 1 && orders[0] != "stop flattening volume "+c.volume.String()+" in tree "+treeID {
			t.Errorf("%s: %q", name, orders)
		}
	}
}

// Hosts get the last of a drive's reserve, flattening and copies of snapshots do not. What flattening leaves in a tree by itself
// gives nobody more.
func TestFlatteningLeavesTheReserveToHosts(t *testing.T) {
	waits, goesOn := userspace.Flattening{Busy: true, Full: true}, userspace.Flattening{Busy: true}
	for name, c := range map[string]struct {
		free    block.Size
		now     userspace.Flattening
		reserve uint32
		grows   bool
	}{
		"flattening waits, and there is enough": {userspace.FlattenSpare - block.MiB, waits, 2, true},
		"flattening waits for the last":         {userspace.FlattenSpare - block.MiB, waits, 1, false},
		"it waits no longer":                    {userspace.FlattenSpare - block.MiB, goesOn, 2, false},
		"it was given up":                       {userspace.FlattenSpare - block.MiB, userspace.Flattening{Full: true}, 2, false},
		"hosts write":                           {lowSpace - block.MiB, waits, 1, true},
		"hosts write, and nothing is left":      {lowSpace - block.MiB, waits, 0, false},
	} {
		tree := userspace.TreeSeen{Free: c.free, Flattening: map[block.VolumeID]userspace.Flattening{volumeID(2): c.now}}
		p := flatteningPlan(tree, c.reserve, func(w wish, _ []*pb.LegLabel) { w.Legs[1].Flatten = true })
		if orders := ordersOf[growTree](p); (len(orders) == 1) != c.grows {
			t.Errorf("%s: %q", name, orders)
		}
	}
	for reserve, grows := range map[uint32]bool{1: false, 2: true} {
		p := flatteningPlan(userspace.TreeSeen{Free: userspace.FlattenSpare - block.MiB, CopyWaits: true}, reserve, func(wish, []*pb.LegLabel) {})
		if orders := ordersOf[growTree](p); (len(orders) == 1) != grows {
			t.Errorf("a copy waits, with a reserve of %d: %q", reserve, orders)
		}
	}
	for size, left := range map[block.Size]uint64{block.GiB: 1, 10 * block.GiB: 1, 20 * block.GiB: 2, block.TiB: 20} {
		if got := hostsReserve(&drive.Label{Size: size}); got != left {
			t.Errorf("of a drive of %v it leaves %d extents", size, got)
		}
	}
}

// copied makes the last leg a copy that begins as another leg, or as zeroes.
func (w wish) copied(base string, wait bool) wish {
	o := &pb.LegOrigin{LegId: base, Kind: pb.LegOriginKind_LEG_ORIGIN_KIND_COPY, Wait: wait}
	if !wait {
		o.Source = &pb.CopySource{
			Portals: []*pb.Portal{{Transport: pb.Transport_TRANSPORT_RDMA, Address: "192.0.2.1", Port: 4420}, {Transport: pb.Transport_TRANSPORT_TCP, Address: "192.0.2.1", Port: 4421}},
			Nqn:     string(block.SubsystemNQN(volumeID(1), 1, block.HostFromID(legID(9).UUID), "t2")), Host: &pb.Host{Nqn: "nqn.2014-08.org.nvmexpress:uuid:" + legID(9).String(), Id: legID(9).String()},
			Nsid: 2, Uuid: legID(8).String(),
		}
		if base != "" {
			o.Source.SinceLegId = legID(7).String()
		}
	}
	w.Legs[len(w.Legs)-1].Origin = o
	return w
}

// A leg that is copied is never prepared in another way, and not before its source is known.
func TestALegThatIsCopiedIsNotMadeOfNothing(t *testing.T) {
	for name, c := range map[string]struct {
		base string
		wait bool
	}{"of a snapshot": {base: legID(1).String()}, "of nothing": {}, "that waits": {wait: true}} {
		w := want().leg(1, 1, 1, 0).leg(2, 1, 0, 0).thin().copied(c.base, c.wait)
		orders, report, problems := planned(w, []*pb.LegLabel{w.recorded(0, true), w.recorded(1, false)}, nil)
		copies := 0
		for _, o := range orders {
			switch o := o.(type) {
			case copyLeg:
				copies++
				if o.from.portals[0] != "192.0.2.1:4421" || len(o.from.portals) != 1 || o.from.since.IsZero() != (c.base == "") {
					t.Errorf("%s: the source is %+v", name, o.from)
				}
			case prepareLeg:
				t.Errorf("%s: the order is %v", name, o)
			}
		}
		if (copies == 1) == c.wait || report.GetReady() || len(problems) > 0 {
			t.Errorf("%s: %d copies, report %v, problems %v", name, copies, report, problems)
		}
	}
	w := want().leg(1, 1, 1, 0).leg(2, 1, 0, 0).thin().copied(legID(1).String(), false)
	w.Legs[1].Origin.Source.SinceLegId = ""
	if bad := parseWanted(w.TargetWanted); len(bad.legs) != 1 || len(bad.problems) != 1 {
		t.Errorf("what differs from a leg that is known at one end alone: %d legs, problems %v", len(bad.legs), bad.problems)
	}
}

// A leg of a snapshot that is not prepared is never made of zeroes: its label would say that it is the snapshot.
func TestALegOfASnapshotIsNeverMadeOfZeroes(t *testing.T) {
	for _, snapshot := range []bool{true, false} {
		w := want().leg(1, 1, 1, 0).leg(2, 1, 0, 0).thin()
		if snapshot {
			w.Legs[1].Volume.Snapshot = &pb.SnapshotOf{VolumeId: volumeID(9).String()}
		}
		orders, report, _ := planned(w, []*pb.LegLabel{w.recorded(0, true), w.recorded(1, false)}, nil)
		made := slices.ContainsFunc(orders, func(o order) bool {
			p, is := o.(prepareLeg)
			return is && p.leg == legID(2)
		})
		if made == snapshot || strings.Contains(report.GetError(), "zeroes") != snapshot {
			t.Errorf("of a snapshot %v: the orders are %v, the report %v", snapshot, orders, report)
		}
	}
}

// A copy makes its tree if that is its own. Without another tree that it is to be in, it is lost.
func TestACopyMayMakeATreeOfItsOwn(t *testing.T) {
	for tree, may := range map[block.LegID]bool{legID(2): true, legID(1): false} {
		w := wantedLeg{origin: userspace.Origin{Kind: pb.LegOriginKind_LEG_ORIGIN_KIND_COPY}, WantedLeg: &pb.WantedLeg{LegId: legID(2).String(), TreeId: tree.String()}}
		if cause := unrooted(w, &drive.Label{}); (cause == "") != may {
			t.Errorf("in tree %v: %q", tree, cause)
		}
	}
}

// A tree that has stopped is opened again when all its legs have left it, also those that cannot be served now.
func TestALegLeavesATreeThatHasStoppedWhateverKeepsItFromBeingServed(t *testing.T) {
	tree := legID(9).String()
	n := block.DeviceNumber{Major: 8}
	run := []*pb.Extent{{Start: 0, Count: 1}}
	for name, c := range map[string]struct {
		stopped string
		wanted  func(*pb.WantedLeg, *pb.LegLabel)
		gone    bool // nobody wants it
		want    bool
	}{
		"it works":                       {wanted: func(*pb.WantedLeg, *pb.LegLabel) {}},
		"it has stopped":                 {stopped: "lost", wanted: func(*pb.WantedLeg, *pb.LegLabel) {}, want: true},
		"the manager has not judged yet": {stopped: "lost", wanted: func(l *pb.WantedLeg, _ *pb.LegLabel) { l.Incarnation = "7" }, want: true},
		"its record is not prepared":     {stopped: "lost", wanted: func(_ *pb.WantedLeg, r *pb.LegLabel) { r.Zeroed = false }, want: true},
		"nobody wants it":                {stopped: "lost", wanted: func(*pb.WantedLeg, *pb.LegLabel) {}, gone: true, want: true},
	} {
		w := want().leg(1, 1, 1, 0).sized(256 * block.MiB)
		l := w.Legs[0]
		l.Image, l.TreeId, l.SizeBytes = pb.ImageKind_IMAGE_KIND_MAPPED, tree, uint64(256*block.MiB)
		record := &pb.LegLabel{LegId: legID(1).String(), Image: l.Image, TreeId: tree, Revision: l.GetRevision(), Volume: l.GetVolume(), Zeroed: true}
		c.wanted(l, record)
		if c.gone {
			w.Legs = nil
		}
		label := &drive.Label{Cluster: cluster, Drive: driveID(1), Size: 2 * block.GiB, Legs: []*pb.LegLabel{record}, Trees: []*pb.TreeLabel{{TreeId: tree, Extents: run, Formatted: true}}}
		name1 := dmPrefix + legID(1).String()
		s := seen{
			drives: map[block.DriveID]driveSeen{driveID(1): {label: label, number: n, trees: map[string]userspace.TreeSeen{tree: {Err: c.stopped}}}},
			mapped: map[block.LegID]dm.State{legID(1): {
				Info:  dm.Info{Name: name1, UUID: name1, Number: block.DeviceNumber{Major: 9, Minor: 1}, Live: true},
				Table: userspace.MappedTable(n, tree, legID(1), 256*block.MiB),
			}},
			names: map[block.LegID]string{legID(1): dm.NodePath(block.DeviceNumber{Major: 9, Minor: 1})},
		}
		reloads := 0
		for _, o := range makePlan(s, parseWanted(w.TargetWanted), "/dev/weft/leg", nil).orders {
			if m, ok := o.(mapLeg); ok && m.step.Op == dm.OpReload {
				reloads++
			}
		}
		if c.want != (reloads == 1) || reloads > 1 {
			t.Errorf("%s: %d orders to reload its device, want one: %t", name, reloads, c.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package console

import (
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/pb"
)

var update = flag.Bool("update", false, "write the drawings to testdata")

func TestAVolumeIsDrawnAsItIs(t *testing.T) {
	m := newManager()
	got := string(mapOf(m.volume, m.nodes, m.drives, figuresOf(m)).svg())
	got = strings.ReplaceAll(got, "><", ">\n<") + "\n"
	const golden = "testdata/map.svg"
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the map is not the one in %s: look at both, and run the test with -update\n%s", golden, got)
	}
	for _, text := range []string{"25% 100MiB/s", ">1500/s<", ">2500/s<", ">9.8MiB/s<", ">1500/s 480µs<", ">1690/s 600µs<", ">3190/s 300µs<", "1 of 2 legs", ">rack<"} {
		if !strings.Contains(got, text) {
			t.Errorf("the map does not have %q", text)
		}
	}
	wellFormed(t, got)
}

// figuresOf are the figures that the manager of a test has for its volume's map.
func figuresOf(m *manager) (f figures) {
	byID := func(of pb.FiguresOf) rates {
		all := rates{}
		for _, one := range m.figures[of] {
			all[one.GetId()] = one
		}
		return all
	}
	return figures{m.figures[pb.FiguresOf_FIGURES_OF_VOLUMES][0], byID(pb.FiguresOf_FIGURES_OF_LEGS), byID(pb.FiguresOf_FIGURES_OF_DRIVES)}
}

// A read goes to one copy, a write to all: a host asks its column for less than its legs do together.
func TestAColumnCountsEachWriteOnce(t *testing.T) {
	legs := []*pb.Leg{{Id: "a", State: pb.LegState_LEG_STATE_IN_SYNC}, {Id: "b", State: pb.LegState_LEG_STATE_IN_SYNC}, {Id: "c", State: pb.LegState_LEG_STATE_REBUILDING}}
	of := rates{"a": doing(&pb.Figures{}, 100, 50, 0), "b": doing(&pb.Figures{}, 200, 49, 0), "c": doing(&pb.Figures{}, 0, 9000, 0)}
	if got := loadOf(columnFigures(legs, of)); got != (load{"350", "1.4MiB/s", ""}) {
		t.Errorf("the column does %+v, want 300 reads and 50 writes", got)
	}
	if got := loadOf(columnFigures(legs, nil)); got != (load{}) {
		t.Errorf("a column of which nothing is known does %+v", got)
	}
}

func TestWhatAHostAsksIsShownIfItIsTheOnlyOne(t *testing.T) {
	m := newManager()
	m.volume.Attachments = []*pb.Attachment{{Node: "gpu1"}, {Node: "gpu2"}}
	for _, e := range mapOf(m.volume, m.nodes, m.drives, figuresOf(m)).edges {
		if e.from.layer == layerHost && len(e.figures) > 0 {
			t.Errorf("on the way from %s to %s stands %v, which all hosts do together", e.from.title, e.to.title, e.figures)
		}
	}
}

func wellFormed(t *testing.T, text string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(text)); ; {
		if _, err := d.Token(); err == io.EOF {
			return
		} else if err != nil {
			t.Fatalf("the drawing is no XML: %v\n%s", err, text)
		}
	}
}

// randomVolume is a volume of any layout on any drives.
func randomVolume(r *rand.Rand) (*pb.Volume, []*pb.Node, []*pb.Drive) {
	v := &pb.Volume{Name: "v"}
	var nodes []*pb.Node
	var drives []*pb.Drive
	for i := range 1 + r.IntN(8) {
		n := &pb.Node{Name: fmt.Sprintf("t%d", i), Target: &pb.AgentStatus{Known: true, Online: r.IntN(4) > 0}}
		if r.IntN(3) > 0 {
			n.Labels = map[string]string{"rack": fmt.Sprintf("r%d", r.IntN(3))}
		}
		nodes = append(nodes, n)
		for d := range 1 + r.IntN(3) {
			drives = append(drives, &pb.Drive{Id: fmt.Sprintf("%d%d-drive", i, d), Node: n.GetName()})
		}
	}
	copies := 1 + r.IntN(3)
	for column := range r.IntN(9) {
		for copy := range copies {
			d := drives[r.IntN(len(drives))]
			v.Legs = append(v.Legs, &pb.Leg{Id: fmt.Sprintf("%d.%d", column, copy), Column: uint32(column), Copy: uint32(copy), DriveId: d.GetId(), Node: d.GetNode(), State: pb.LegState(r.IntN(6))})
		}
	}
	for i := range r.IntN(4) {
		v.Attachments = append(v.Attachments, &pb.Attachment{Node: fmt.Sprintf("h%d", i)})
	}
	r.Shuffle(len(v.Legs), func(i, j int) { v.Legs[i], v.Legs[j] = v.Legs[j], v.Legs[i] })
	return v, nodes, drives
}

func TestBoxesNeverOverlapAndEverythingIsConnected(t *testing.T) {
	for seed := range uint64(500) {
		v, nodes, drives := randomVolume(rand.New(rand.NewPCG(seed, 1)))
		m := mapOf(v, nodes, drives, figures{})
		if len(m.boxes[layerLeg]) != len(v.GetLegs()) {
			t.Fatalf("seed %d: %d legs are drawn of %d", seed, len(m.boxes[layerLeg]), len(v.GetLegs()))
		}
		for layer, boxes := range m.boxes {
			heights := []float64{}
			for _, b := range boxes {
				heights = append(heights, b.y)
				if b.y < headHeight-0.01 || b.y+boxHeight > m.height {
					t.Fatalf("seed %d: %s is outside: at %v of %v", seed, b.title, b.y, m.height)
				}
				if !slices.ContainsFunc(m.edges, func(e edge) bool { return e.from == b || e.to == b }) && len(v.GetLegs()) > 0 {
					t.Fatalf("seed %d: %s is connected with nothing", seed, b.title)
				}
			}
			slices.Sort(heights)
			for i := 1; i < len(heights); i++ {
				if heights[i]-heights[i-1] < boxHeight {
					t.Fatalf("seed %d: boxes of layer %d overlap: %v", seed, layer, heights)
				}
			}
		}
		wellFormed(t, string(m.svg()))
	}
}

func TestALegWhoseTargetIsAwayIsNotShownAsGood(t *testing.T) {
	v := &pb.Volume{Legs: []*pb.Leg{{Node: "t1", State: pb.LegState_LEG_STATE_IN_SYNC}, {Copy: 1, Node: "t2", State: pb.LegState_LEG_STATE_IN_SYNC}}}
	answers := reachOf([]*pb.Node{{Name: "t1", Target: &pb.AgentStatus{Online: true}}, {Name: "t2", Target: &pb.AgentStatus{}}})
	if got := answers.present(v); got != "1 of 2" {
		t.Errorf("%s legs can be used, want 1 of 2", got)
	}
	if answers.tone(v.Legs[0]) != good || answers.tone(v.Legs[1]) == good || answers.word(v.Legs[1]) == "in sync" {
		t.Errorf("the leg is shown as %s, %s", answers.tone(v.Legs[1]), answers.word(v.Legs[1]))
	}
}

func TestTheLargestDomainIsLost(t *testing.T) {
	nodes := []*pb.Node{{Name: "t1", Labels: map[string]string{"rack": "r1"}}, {Name: "t2", Labels: map[string]string{"rack": "r1"}}, {Name: "t3", Labels: map[string]string{"rack": "r2"}}, {Name: "t4"}}
	drive := func(node string, capacity, allocated uint64) *pb.Drive {
		return &pb.Drive{Node: node, CapacityBytes: capacity, AllocatedBytes: allocated}
	}
	for _, test := range []struct {
		drives []*pb.Drive
		want   *domainLoss
	}{
		{nil, nil},
		{[]*pb.Drive{drive("t1", 10, 1), drive("t2", 10, 1)}, nil}, // all in one rack
		{[]*pb.Drive{drive("t1", 10, 1), drive("t2", 10, 1), drive("t3", 15, 4)}, &domainLoss{"rack", "r1", 9, 0}},
		{[]*pb.Drive{drive("t1", 10, 8), drive("t3", 10, 8), drive("t4", 30, 9)}, &domainLoss{"node", "t4", 0, 5}},
	} {
		got := largestDomain(nodes, test.drives)
		if (got == nil) != (test.want == nil) || got != nil && *got != *test.want {
			t.Errorf("largestDomain(%v) = %+v, want %+v", test.drives, got, test.want)
		}
	}
}

func TestAClusterIsNeverBetterThanItsCounts(t *testing.T) {
	for _, test := range []struct {
		status *pb.Status
		want   string
	}{
		{&pb.Status{}, good},
		{&pb.Status{VolumesDegraded: 1}, warn},
		{&pb.Status{NodesOffline: 1}, warn},
		{&pb.Status{DrivesNotReady: 1}, warn},
		{&pb.Status{Wrong: []string{"the store is nearly full"}}, warn},
		{&pb.Status{VolumesUnavailable: 1}, bad},
	} {
		if got := verdictOf(test.status); got.Tone != test.want {
			t.Errorf("verdictOf(%v) = %+v, want %s", test.status, got, test.want)
		}
	}
}

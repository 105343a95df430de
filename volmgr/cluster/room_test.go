// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// wide is a volume of so many legs that a few such volumes fill a drive's label.
func wide(i int) CreateVolume {
	return CreateVolume{
		Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: 64 * block.ExtentSize, Stripes: 64, Copies: 1, Seed: testSeed(i),
		Labels: notes("note", 8),
	}
}

// labelMustHold checks for every drive that the room reserved on its label is what its legs
// can take, and fits.
func labelMustHold(t *testing.T, s *State) {
	t.Helper()
	want := map[block.DriveID]block.Size{}
	for _, v := range s.volumes.All() {
		for i := range v.Legs {
			want[v.Legs[i].Drive] += v.record(&v.Legs[i]).Size()
		}
	}
	for id, n := range want {
		if n > block.LabelRoom || n != s.recorded.Get(id) {
			t.Fatalf("the legs of drive %v can take %v of its label, %v are reserved, of %v", id, n, s.recorded.Get(id), block.LabelRoom)
		}
	}
}

func fillLabels(t *testing.T, s *State) (volumes int, err error) {
	t.Helper()
	for ; err == nil; volumes++ {
		_, err = s.Step(t0, wide(volumes))
		labelMustHold(t, s)
	}
	return volumes - 1, err
}

func TestALabelThatIsFullTakesNoMoreLegs(t *testing.T) {
	s := grid(1, 1, 2, fixed(100_000))
	n, err := fillLabels(t, s)
	var e *Error
	if !errors.As(err, &e) || e.Kind != ResourceExhausted || !strings.Contains(e.Text, "room on its label for 25 of 64 legs besides the 576") {
		t.Fatalf("after %d volumes: %v, want it refused for want of room on labels", n, err)
	}
	if c, err := s.Capacity(wide(n)); err != nil || c.Maximum != 0 {
		t.Errorf("Capacity = %+v, %v, want no volume of 64 legs where labels are full", c, err)
	}
	// A third drive has room.
	id := block.DriveID{UUID: testSeed(9).id(7)}
	s.drives[id] = &Drive{ID: id, Node: "r0-n0", Device: "/dev/d9", State: DriveReady, Extents: 100_000}
	s.indexDrive(nil, s.drives[id])
	in := wide(n)
	if _, err := s.Step(t0, in); err != nil {
		t.Fatal(err)
	}
	for _, l := range s.volumes.Get(s.idOf(in.Name)).Legs {
		if l.Drive != id && s.labelRoom(s.drives[l.Drive]) > block.LabelRoom {
			t.Errorf("%v is on a drive whose label is full", &l)
		}
	}
	labelMustHold(t, s)
}

// notes are labels of some 250 bytes each.
func notes(name string, n int) map[string]string {
	labels := map[string]string{}
	for i := range n {
		labels[fmt.Sprintf("%s%d", name, i)] = strings.Repeat("x", 245)
	}
	return labels
}

// Room for what a volume gets later is reserved then, and refused if there is none.
func TestWhatAVolumeGetsLaterNeedsRoomOnLabels(t *testing.T) {
	s := grid(1, 1, 1, fixed(100_000))
	if _, err := fillLabels(t, s); err == nil {
		t.Fatal("the label is never full")
	}
	for _, v := range s.volumes.All() {
		v.State = VolumeReady
	}
	refuses := func(in Input) {
		t.Helper()
		var e *Error
		if _, err := s.Step(t0, in); !errors.As(err, &e) || e.Kind != ResourceExhausted || !strings.Contains(e.Text, "has no room for this change") {
			t.Errorf("%T = %v, want it refused for want of room on the label", in, err)
		}
		labelMustHold(t, s)
	}
	refuses(UpdateVolume{Volume: "v0", SetLabels: notes("more", 24)})
	if _, err := s.Step(t0, UpdateVolume{Volume: "v0", RemoveLabels: []string{"*"}}); err != nil {
		t.Fatal(err)
	}
	labelMustHold(t, s)
	if _, err := s.Step(t0, UpdateVolume{Volume: "v0", SetLabels: notes("more", 7)}); err != nil {
		t.Errorf("labels that take the place of larger ones: %v", err)
	}
	labelMustHold(t, s)
}

// On a fragmented drive each leg has as many pieces as extents.
func TestALegInManyPiecesTakesMoreOfALabel(t *testing.T) {
	const extents = 400_000
	crumbs := func() *State {
		s := grid(1, 1, 2, fixed(extents))
		other := &Volume{ID: block.VolumeID{UUID: testSeed(99).id(0)}, Name: "other", Layout: block.Layout{Stripes: 1, Copies: 1, Chunk: block.DefaultChunk}, State: VolumeReady}
		var every []image.Extent
		for i := uint32(0); i < extents; i += 2 {
			every = append(every, image.Extent{Start: i, Count: 1})
		}
		other.Legs = []Leg{{ID: block.LegID{UUID: testSeed(99).id(1)}, Drive: s.sortedDrives()[0], Node: "r0-n0", Image: image.Of(every), State: LegInSync}}
		s.volumes.Set(s.by, other.ID, other)
		s.index(nil, other)
		return s
	}
	s := crumbs()
	first, second := s.sortedDrives()[0], s.sortedDrives()[1]
	s.drives[second].Extents = 150_000
	// The first drive has space, in 200 000 pieces of one extent, but its label has no room.
	if got := s.recorded.Get(first); got < 2*block.MiB {
		t.Fatalf("the crumbs take %v of the label", got)
	}
	if _, err := s.Step(t0, CreateVolume{Name: "a", Size: 100_000 * block.ExtentSize, Stripes: 1, Copies: 1, Seed: testSeed(1)}); err != nil {
		t.Fatal(err)
	}
	if l := s.volumes.Get(s.idOf("a")).Legs[0]; l.Drive != second || len(l.Extents) != 1 {
		t.Errorf("the leg is on %v in %d pieces, want it in one on the other drive", l.Drive, len(l.Extents))
	}
	if _, err := s.Step(t0, CreateVolume{Name: "b", Size: 100_000 * block.ExtentSize, Stripes: 1, Copies: 1, Seed: testSeed(2)}); err == nil {
		t.Error("a leg in 100 000 pieces was placed where the label has no room for them")
	}
	// A leg does not grow into pieces for which the label has no room either.
	v := s.volumes.Get(s.idOf("other"))
	v.Size = block.Size(extents/2) * block.ExtentSize
	var e *Error
	_, err := s.Step(t0, ExpandVolume{Volume: "other", Size: block.Size(extents-10) * block.ExtentSize})
	if !errors.As(err, &e) || e.Field != "size_bytes" || !strings.Contains(e.Text, "has no room for this change") {
		t.Errorf("ExpandVolume = %v, want it refused for want of room on the label", err)
	}
}

// Legs without a record, as after a restore, take room on the label all the same.
func TestStrayLegsTakeRoomOnTheLabel(t *testing.T) {
	s := grid(1, 1, 1, fixed(100_000))
	id := s.sortedDrives()[0]
	var strays []evidence.LegLabel
	for i := range 600 {
		strays = append(strays, evidence.LegLabel{
			Leg: block.LegID{UUID: testSeed(i).id(1)}, Image: image.Of([]image.Extent{{Start: uint32(i), Count: 1}}),
			Volume: evidence.VolumeLabel{ID: block.VolumeID{UUID: testSeed(i).id(0)}, Layout: block.Layout{Stripes: 64, Copies: 2}},
		})
	}
	if _, err := s.Step(t0, TargetReported{Report: TargetReport{Node: "r0-n0", BootID: "1", Drives: []DriveReport{{Drive: id, Device: "/dev/d9", Extents: 100_000, Legs: strays}}}}); err != nil {
		t.Fatal(err)
	}
	var e *Error
	if _, err := s.Step(t0, wide(0)); !errors.As(err, &e) || !strings.Contains(e.Text, "room on its label for") {
		t.Errorf("a volume beside 600 stray legs: %v, want it refused for want of room on the label", err)
	}
}

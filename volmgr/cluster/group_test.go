// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// codeRequest asks for columns of 4+2, spread over racks.
func codeRequest() CreateVolume {
	return CreateVolume{Name: "wide", Size: block.GiB, Data: 4, Parity: 2, Stripes: 2, Spread: "rack", Seed: testSeed(77)}
}

// codeVolume is a ready volume of that kind on a grid of racks. All its drives have reported.
func codeVolume(t *testing.T, racks int) (*State, *Volume) {
	t.Helper()
	s := grid(racks, 1, 1, fixed(64))
	in, err := codeRequest().normal()
	if err != nil {
		t.Fatal(err)
	}
	step := newTx(s, time.Unix(1, 0))
	if _, err := in.create(step); err != nil {
		t.Fatal(err)
	}
	step.commit()
	v := s.volumes.Get(s.idOf("wide")).clone()
	v.State, v.Epoch = VolumeReady, 1
	for i := range v.Legs {
		v.Legs[i].State = LegInSync
	}
	for _, d := range s.drives {
		s.targets[d.Node].drives = map[block.DriveID]DriveReport{d.ID: {Drive: d.ID}}
	}
	s.index(s.volumes.Get(v.ID), v)
	s.volumes.Set(s.by, v.ID, v)
	return s, v
}

func TestACodeIsPlacedWithItsMembersApart(t *testing.T) {
	s, v := codeVolume(t, 7)
	mustHold(t, s)
	if len(v.Legs) != 12 || v.Layout.LegSize(v.Size) != v.Size/8 {
		t.Errorf("%d legs of %v, want 12 of an eighth of %v", len(v.Legs), v.Layout.LegSize(v.Size), v.Size)
	}
	if records := s.Records(); loadedLayout(t, records) != v.Layout {
		t.Errorf("the store has layout %v, want %v", loadedLayout(t, records), v.Layout)
	}
	few := grid(5, 1, 1, fixed(64))
	in, _ := codeRequest().normal()
	_, err := in.create(newTx(few, time.Unix(1, 0)))
	if err == nil || !strings.Contains(err.Error(), `4+2 members need drives on nodes with 6 different values of label "rack", and pool default has them on 5`) {
		t.Errorf("in five racks: %v", err)
	}
	c, err := s.Capacity(CreateVolume{Data: 4, Parity: 2, Stripes: 2, Spread: "rack"})
	if free := block.Size(7*64-12) * block.ExtentSize; err != nil || c.Available == 0 || c.Available > free*4/6 {
		t.Errorf("capacity %v of %v free extents, %v", c.Available, free, err)
	}
}

func loadedLayout(t *testing.T, records []Record) block.Layout {
	t.Helper()
	s, err := Load(records)
	if err != nil {
		t.Fatal(err)
	}
	return s.volumes.Get(s.idOf("wide")).Layout
}

// The test takes down each set of racks, and compares the volume's conditions with a count
// of the members that are left.
func TestACodeSurvivesTheLossOfAsManyRacksAsItHasParity(t *testing.T) {
	s, v := codeVolume(t, 6)
	health := []Health{Healthy, Degraded, Degraded, Unavailable}
	words := []string{
		"column 0 is whole: 6 of its 6 members can be read and 4 are needed, so it survives the loss of 2 more",
		"column 0 is degraded: 5 of its 6 members can be read and 4 are needed, so it survives the loss of 1 more",
		"column 0 is critical: 4 of its 6 members can be read and 4 are needed, so it survives the loss of 0 more",
		"column 0 is lost: 3 of its 6 members can be read and 4 are needed",
	}
	for down := range 1 << 6 {
		lost := 0
		for rack := range 6 {
			off := down>>rack&1 == 1
			s.targets[block.NodeName(fmt.Sprintf("r%d-n0", rack))].status.Online = !off
			if off {
				lost++
			}
		}
		if got, want := s.health(v), health[min(lost, 3)]; got != want {
			t.Errorf("%d racks down: %v, want %v", lost, got, want)
		}
		if lost > 3 {
			continue
		}
		e, err := s.Explain("wide")
		if err != nil || !slices.Contains(e.Facts, words[lost]) {
			t.Errorf("%d racks down: explain %q, want %q: %v", lost, e.Facts, words[lost], err)
		}
		if without := slices.Contains(e.Facts, "column 1 has fewer than 4 in-sync legs that can be reached"); without != (lost > 2) {
			t.Errorf("%d racks down: explain %q", lost, e.Facts)
		}
		if err := s.attachable(v); (err == nil) != (lost <= 2) {
			t.Errorf("%d racks down: attachable: %v", lost, err)
		}
	}
}

func TestACodeKeepsAsManyMembersInSyncAsItNeeds(t *testing.T) {
	s, v := codeVolume(t, 6)
	v.Attachment = &Attachment{Node: "r0-n0", Epoch: v.Epoch, State: Attached, Mode: AttachExclusive}
	lose := func(n int) error {
		_, err := s.Step(time.Unix(2, 0), RecordStale{Node: "r0-n0", Volume: v.ID, Epoch: v.Epoch, Legs: []block.LegID{v.column(0)[n].ID}})
		return err
	}
	for n := range 2 {
		if err := lose(n); err != nil {
			t.Fatal(err)
		}
	}
	var refused *Error
	if err := lose(2); !errors.As(err, &refused) || refused.Reason != ReasonLastLeg || !strings.Contains(err.Error(), "column 0 would be left without 4 in-sync legs") {
		t.Errorf("the third of a 4+2 column: %v", err)
	}
	if now := s.volumes.Get(v.ID); now.dispensable(now.column(0)[2]) || !now.dispensable(now.column(1)[2]) {
		t.Errorf("column 0 is said to spare a member more, or column 1 none")
	}
}

func TestARequestForACodeIsRefused(t *testing.T) {
	s := grid(6, 1, 1, fixed(64))
	_, err := s.Step(time.Unix(1, 0), codeRequest())
	var e *Error
	if !errors.As(err, &e) || e.Kind != Unimplemented || e.Text != "volume wide: columns of 4+2 members are not supported yet: this version offers mirrors only" {
		t.Errorf("create: %v", err)
	}
	if s.volumes.Len() != 0 {
		t.Errorf("a refused request made %d volumes", s.volumes.Len())
	}
	both := codeRequest()
	both.Copies = 2
	if _, err := s.Step(time.Unix(1, 0), both); !errors.As(err, &e) || e.Kind != InvalidArgument {
		t.Errorf("create with copies and parity: %v", err)
	}
}

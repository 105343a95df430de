// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"testing"

	"weft.dev/weft/proto/block"
)

// People know a leg by its volume and place, and a drive by its device: ids say nothing to them.
func TestProblemsNameWhatPeopleKnow(t *testing.T) {
	s := newScript(t)
	for _, command := range []string{"target t1 drives=10GiB", "create db1 size=1GiB copies=1 stripes=1", "comply", "host c1", "attach db1 c1", "comply"} {
		s.run(command)
	}
	v, err := s.state.Volume("db1")
	if err != nil {
		t.Fatal(err)
	}
	unknown := block.LegID{UUID: testSeed(77).id(0)}
	for object, want := range map[string]string{
		"leg " + v.Legs[0].ID.String():                                "leg 0.0 on t1 of volume db1",
		"drive " + v.Legs[0].Drive.String():                           "drive /dev/nvme0n1 on t1",
		"export " + string(s.state.WantedTarget("t1").Exports[0].NQN): "export of volume db1",
		"attachment " + v.ID.String():                                 "volume db1",
		"leg " + unknown.String():                                     "leg " + unknown.String(), // a leg that the store lost
		"report":                                                      "report",
		fmt.Sprintf("drive %v", block.DriveID{UUID: testSeed(78).id(0)}) + " old": fmt.Sprintf("drive %v old", block.DriveID{UUID: testSeed(78).id(0)}),
	} {
		reported := []Problem{{Object: object, Doing: "map it", Cause: "busy"}}
		s.state.targets["t1"].status.Problems = reported
		n, err := s.state.Node("t1")
		if err != nil || len(n.Target.Problems) != 1 || n.Target.Problems[0].Object != want {
			t.Errorf("a problem with %s is shown as %v, %v; want %q", object, n.Target.Problems, err, want)
		}
		if reported[0].Object != object {
			t.Errorf("the report itself was changed to %q", reported[0].Object)
		}
	}
}

// What a request leaves open is filled in from the table of properties.
func TestAVolumeGetsTheDefaultsOfTheTable(t *testing.T) {
	in, err := CreateVolume{Name: "db1", Size: block.GiB}.normal()
	if err != nil {
		t.Fatal(err)
	}
	for p, got := range map[block.Property]any{
		block.PropertyCopies: in.Copies, block.PropertyStripes: in.Stripes, block.PropertyChunk: in.Chunk,
		block.PropertyPool: in.Pool, block.PropertySpread: in.Spread,
	} {
		if fmt.Sprint(got) != p.Default {
			t.Errorf("%s: default %v, the table says %s", p.Field, got, p.Default)
		}
	}
	for _, p := range block.Properties() {
		if p.Most == 0 {
			continue
		}
		in := CreateVolume{Name: "db1", Size: block.GiB}
		switch p {
		case block.PropertyCopies:
			in.Copies = int(p.Most) + 1
		case block.PropertyStripes:
			in.Stripes = int(p.Most) + 1
		default:
			t.Errorf("the bounds of %s are not tested", p.Field)
		}
		if _, err := in.normal(); !refusesField(err, p.Field) {
			t.Errorf("%s above %d: %v, want it refused by name", p.Field, p.Most, err)
		}
	}
}

func refusesField(err error, field string) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Kind == InvalidArgument && e.Field == field
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// wanted is an attachment of a volume with one leg.
func wanted() *pb.WantedAttachment {
	layout := block.Layout{Stripes: 1, Copies: 1, Chunk: block.DefaultChunk}
	return &pb.WantedAttachment{
		VolumeId: block.VolumeID{}.String(), VolumeName: "db1", Epoch: 1, SizeBytes: uint64(block.GiB), LegSizeBytes: uint64(layout.LegSize(block.GiB)),
		Layout: &pb.Layout{Stripes: 1, Copies: 1, ChunkBytes: uint64(block.DefaultChunk)},
		Legs: []*pb.WantedLink{{
			LegId: legID(0, 0).String(), Nqn: "nqn.2026-11.dev.weft:x", Uuid: block.UUID{}.String(), State: pb.LegState_LEG_STATE_IN_SYNC,
			Portals: []*pb.Portal{{Transport: pb.Transport_TRANSPORT_TCP, Address: "192.0.2.1"}},
		}},
	}
}

func TestHoldsNeedAnIDAndALimit(t *testing.T) {
	hold := func(id string, limit time.Duration) *pb.Hold { return &pb.Hold{Id: id, Limit: durationpb.New(limit)} }
	for _, c := range []struct {
		holds []*pb.Hold
		want  []volume.Hold
		err   string
	}{
		{holds: []*pb.Hold{hold("s1", time.Second), hold("s2", time.Minute)}, want: []volume.Hold{{ID: "s1", Limit: time.Second}, {ID: "s2", Limit: time.Minute}}},
		{holds: []*pb.Hold{hold("", time.Second)}, err: "no id"},
		{holds: []*pb.Hold{{Id: "s1"}}, err: "limit 0s"},
		{holds: []*pb.Hold{hold("s1", time.Hour)}, err: "at most 1m0s"},
		{holds: []*pb.Hold{hold("s1", time.Second), hold("s1", time.Second)}, err: "listed twice"},
	} {
		p := wanted()
		p.Holds = c.holds
		switch w, err := Parse(p); {
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("Parse(holds %v) = %v, want an error with %q", c.holds, err, c.err)
		case c.err == "" && err != nil:
			t.Errorf("Parse(holds %v) = %v", c.holds, err)
		case c.err == "" && !cmp.Equal(w.Holds, c.want):
			t.Errorf("Parse(holds %v) has holds %v, want %v", c.holds, w.Holds, c.want)
		}
	}
}

// A newer manager may send values that this version does not know.
func TestUnknownValuesAreNotTakenForOthers(t *testing.T) {
	p := wanted()
	p.Legs[0].Portals = append([]*pb.Portal{{Transport: 77, Address: "192.0.2.9"}}, p.Legs[0].Portals...)
	w, err := Parse(p)
	if err != nil || len(w.Links[0].Portals) != 1 || w.Links[0].Portals[0].Address != "192.0.2.1" {
		t.Errorf("Parse = %v, %v; want the portal of an unknown transport left out", w, err)
	}
	for what, change := range map[string]func(*pb.WantedAttachment){
		"mode":       func(p *pb.WantedAttachment) { p.Mode = 77 },
		"leg state":  func(p *pb.WantedAttachment) { p.Legs[0].State = 77 },
		"transports": func(p *pb.WantedAttachment) { p.Legs[0].Portals[0].Transport = 77 },
	} {
		p := wanted()
		change(p)
		if _, err := Parse(p); err == nil {
			t.Errorf("Parse accepts an unknown %s", what)
		}
	}
}

func TestAScrubNeedsAnID(t *testing.T) {
	p := wanted()
	p.Layout.Copies = 2
	p.Scrub = &pb.Scrub{
		Id: "s1", BytesPerSecond: 1 << 20, Repair: true, From: []*pb.Place{{Copy: 1}}, Begin: &pb.ScrubPosition{Offset: 8192}, Run: "r", Recorded: 3,
	}
	want := &volume.Scrub{ID: "s1", Rate: 1 << 20, Repair: true, From: []volume.Place{{Column: 0, Copy: 1}}, Begin: volume.ScrubPosition{Off: 8192}, Run: "r", Recorded: 3}
	w, err := Parse(p)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, w.Scrub); diff != "" {
		t.Errorf("scrub (-want +got):\n%s", diff)
	}
	for what, change := range map[string]func(*pb.Scrub){
		"column behind the last": func(s *pb.Scrub) { s.Begin.Column = 99 },
		"half a block":           func(s *pb.Scrub) { s.Begin.Offset = 512 },
		"offset that overflows":  func(s *pb.Scrub) { s.Begin.Offset = 1 << 63 },
		"copy that is not there": func(s *pb.Scrub) { s.From[0].Copy = 99 },
		"copy of no column":      func(s *pb.Scrub) { s.From[0].Column = 99 },
	} {
		bad := proto.CloneOf(p)
		change(bad.Scrub)
		if w, err := Parse(bad); err == nil {
			t.Errorf("%s: Parse(%v) = %+v", what, bad.Scrub, w.Scrub)
		}
	}
	p.Scrub = &pb.Scrub{}
	if _, err := Parse(p); err == nil {
		t.Error("a scrub without an id was accepted")
	}
}

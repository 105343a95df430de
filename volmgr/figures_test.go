// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"weft.dev/weft/proto/pb"
)

// reported sends reports of an agent, and waits until the manager has them.
func (r *rig) reported(node string, source pb.FiguresSource, reports ...*pb.FiguresReport) {
	r.t.Helper()
	stream, err := r.agents.Figures(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, m := range reports {
		m.Node, m.Source, m.Nanoseconds = node, source, 2e9
		if err := stream.Send(m); err != nil {
			r.t.Fatal(err)
		}
	}
	if _, err := stream.CloseAndRecv(); err != nil && !errors.Is(err, io.EOF) {
		r.t.Fatal(err)
	}
}

func (r *rig) figures(q *pb.GetFiguresRequest) []*pb.Figures {
	r.t.Helper()
	answer, err := r.GetFigures(r.t.Context(), q)
	if err != nil {
		r.t.Fatal(err)
	}
	return answer.Figures
}

func TestTheFiguresOfVolumesHostsLegsAndDrivesAreServed(t *testing.T) {
	r := newRig(t)
	r.withAgents(t.Context(), "t1", "t2")
	r.attachNew(t.Context(), "db1")
	r.attachNew(t.Context(), "idle")
	if _, err := r.CreateVolume(t.Context(), &pb.CreateVolumeRequest{Name: "loose", SizeBytes: 1 << 30}); err != nil {
		t.Fatal(err)
	}
	if f := r.figures(&pb.GetFiguresRequest{}); len(f) != 3 || f[0].Nanoseconds != 0 {
		t.Errorf("without reports: %v", f)
	}
	v := r.volume("db1")
	reads := func(n uint64) *pb.OperationFigures {
		return &pb.OperationFigures{Ios: n, Bytes: n * 4096, TookNanoseconds: n * 1e6, FirstBucket: 80, Buckets: []uint64{n}} // about 1 ms
	}
	r.reported("c1", pb.FiguresSource_FIGURES_SOURCE_INITIATOR,
		&pb.FiguresReport{Objects: []*pb.ObjectFigures{{VolumeId: v.Id, Read: reads(1000)}}},
		&pb.FiguresReport{Objects: []*pb.ObjectFigures{
			{VolumeId: v.Id, Read: reads(10), Write: reads(5), HeldNanoseconds: 5e8}, {LegId: v.Legs[1].Id, Read: reads(7)},
		}})
	r.reported("t1", pb.FiguresSource_FIGURES_SOURCE_TARGET, &pb.FiguresReport{Objects: []*pb.ObjectFigures{{DriveId: v.Legs[0].DriveId, Write: reads(3)}}})
	last := durationpb.New(2 * time.Second)

	volumes := r.figures(&pb.GetFiguresRequest{Window: last})
	if len(volumes) != 3 {
		t.Fatalf("%d volumes, want 3", len(volumes))
	}
	db1, idle, loose := volumes[0], volumes[1], volumes[2]
	if db1.Name != "db1" || db1.Node != "c1" || db1.Nanoseconds != 2e9 || db1.Read.Ios != 10 || db1.Write.Ios != 5 || db1.All.Ios != 15 || db1.HeldNanoseconds != 5e8 {
		t.Errorf("db1: %v", db1)
	}
	if p := time.Duration(db1.All.P99Nanoseconds); p < 900*time.Microsecond || p > 1100*time.Microsecond || db1.All.MeanNanoseconds != 1e6 {
		t.Errorf("db1: p99 %v, mean %v; want 1ms", p, db1.All.MeanNanoseconds)
	}
	if idle.Name != "idle" || idle.Nanoseconds != 2e9 || idle.All.Ios != 0 || loose.Name != "loose" || loose.Nanoseconds != 0 {
		t.Errorf("a volume without I/O: %v; one that is not attached: %v", idle, loose)
	}
	for _, of := range []string{"idle", idle.Id} {
		if one := r.figures(&pb.GetFiguresRequest{Volume: of}); len(one) != 1 || one[0].Name != "idle" {
			t.Errorf("of volume %s alone: %v", of, one)
		}
	}
	if all := r.figures(&pb.GetFiguresRequest{}); all[0].Read.Ios != 1010 || all[0].Nanoseconds != 4e9 {
		t.Errorf("in 10 s: %v", all[0])
	}
	if hosts := r.figures(&pb.GetFiguresRequest{Of: pb.FiguresOf_FIGURES_OF_HOSTS, Window: last}); len(hosts) != 1 || hosts[0].Name != "c1" || hosts[0].All.Ios != 15 {
		t.Errorf("hosts: %v", hosts)
	}
	if legs := r.figures(&pb.GetFiguresRequest{Of: pb.FiguresOf_FIGURES_OF_LEGS, Volume: "db1", Window: last}); len(legs) != 2 || legs[0].Name != "0.0" || legs[0].All.Ios != 0 || legs[1].All.Ios != 7 || legs[1].Node != v.Legs[1].Node {
		t.Errorf("legs: %v", legs)
	}
	drives := r.figures(&pb.GetFiguresRequest{Of: pb.FiguresOf_FIGURES_OF_DRIVES, Window: last})
	if len(drives) != 2 {
		t.Fatalf("%d drives, want 2", len(drives))
	}
	for _, d := range drives {
		if want := map[bool]uint64{true: 3}[d.Id == v.Legs[0].DriveId && d.Node == "t1"]; d.Write.Ios != want {
			t.Errorf("drive %s on %s: %v", d.Id, d.Node, d)
		}
	}
}

func TestBadRequestsAndReportsOfFiguresAreRefused(t *testing.T) {
	r := newRig(t)
	for what, q := range map[string]*pb.GetFiguresRequest{
		"too far back": {Window: durationpb.New(time.Hour)}, "the future": {Window: durationpb.New(-1)}, "of what": {Of: 99},
	} {
		if _, err := r.GetFigures(t.Context(), q); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v, want INVALID_ARGUMENT", what, err)
		}
	}
	for _, of := range []pb.FiguresOf{pb.FiguresOf_FIGURES_OF_LEGS, pb.FiguresOf_FIGURES_OF_VOLUMES} {
		if _, err := r.GetFigures(t.Context(), &pb.GetFiguresRequest{Of: of, Volume: "none"}); status.Code(err) != codes.NotFound {
			t.Errorf("%v of no volume: %v", of, err)
		}
	}
	stream, err := r.agents.Figures(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.FiguresReport{Node: "c1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.CloseAndRecv(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a report without a source: %v", err)
	}
}

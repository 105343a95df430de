// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// stub is a manager with volumes. A snapshot that it takes becomes what next says, one at each GetVolume.
type stub struct {
	pb.ManagerClient
	volumes []*pb.Volume
	next    []*pb.Volume // nil: not found
	refusal error
	created *pb.CreateSnapshotsRequest
	listed  *pb.ListVolumesRequest
	deleted []string
	freezes bool
	events  []*pb.Event

	restored *pb.RestoreVolumeRequest
	back     []*pb.Volume // what RestoreVolume answers, and then GetVolume
}

func (s *stub) RestoreVolume(_ context.Context, r *pb.RestoreVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	if s.restored = r; s.refusal != nil {
		return nil, s.refusal
	}
	s.volumes, s.next = nil, s.back[1:]
	return s.back[0], nil
}

func (s *stub) ExplainVolume(context.Context, *pb.ExplainVolumeRequest, ...grpc.CallOption) (*pb.Explanation, error) {
	return &pb.Explanation{Waits: []string{"a target"}}, nil
}

func (s *stub) CreateSnapshots(_ context.Context, r *pb.CreateSnapshotsRequest, _ ...grpc.CallOption) (*pb.CreateSnapshotsResponse, error) {
	s.created = r
	if s.refusal != nil {
		return nil, s.refusal
	}
	answer := &pb.CreateSnapshotsResponse{}
	for _, n := range r.GetSnapshots() {
		answer.Snapshots = append(answer.Snapshots, snapshotOf(n.GetVolume(), n.GetName(), pb.VolumeState_VOLUME_STATE_CREATING))
		answer.Snapshots[len(answer.Snapshots)-1].Snapshot.Freezes = r.GetFreeze() && s.freezes
	}
	return answer, nil
}

func (s *stub) ListEvents(_ context.Context, r *pb.ListEventsRequest, _ ...grpc.CallOption) (*pb.ListEventsResponse, error) {
	reply := &pb.ListEventsResponse{}
	for _, e := range s.events {
		if e.GetObject() == r.GetObject() {
			reply.Events = append(reply.Events, e)
		}
	}
	return reply, nil
}

func (s *stub) GetVolume(_ context.Context, r *pb.GetVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	for _, v := range s.volumes {
		if v.GetName() == r.GetVolume() || v.GetId() == r.GetVolume() {
			return v, nil
		}
	}
	if len(s.next) == 0 {
		return nil, status.Errorf(codes.NotFound, "volume %s: not found", r.GetVolume())
	}
	now := s.next[0]
	s.next = s.next[1:]
	if now == nil {
		return nil, status.Errorf(codes.NotFound, "volume %s: not found", r.GetVolume())
	}
	return now, nil
}

func (s *stub) ListVolumes(_ context.Context, r *pb.ListVolumesRequest, _ ...grpc.CallOption) (*pb.ListVolumesResponse, error) {
	s.listed = r
	return &pb.ListVolumesResponse{Volumes: s.volumes}, nil
}

func (s *stub) DeleteVolume(_ context.Context, r *pb.DeleteVolumeRequest, _ ...grpc.CallOption) (*pb.DeleteVolumeResponse, error) {
	s.deleted = append(s.deleted, r.GetVolume())
	return &pb.DeleteVolumeResponse{}, nil
}

// snapshotOf has two columns of two copies.
func snapshotOf(volume, name string, state pb.VolumeState) *pb.Volume {
	v := &pb.Volume{
		Id: "id of " + volume + "@" + name, Name: volume + "@" + name, SizeBytes: 10 << 30, UsedBytes: 3 << 30, State: state, Thin: true,
		Layout: &pb.Layout{Stripes: 2, Copies: 2}, Snapshot: &pb.SnapshotOf{VolumeName: volume, VolumeId: "id of " + volume},
	}
	leg := pb.LegState_LEG_STATE_CREATING
	if state == pb.VolumeState_VOLUME_STATE_READY {
		leg, v.Snapshot.Taken = pb.LegState_LEG_STATE_IN_SYNC, timestamppb.New(noon.Add(-3*time.Hour))
	}
	for column := range uint32(2) {
		for c := range uint32(2) {
			v.Legs = append(v.Legs, &pb.Leg{Column: column, Copy: c, State: leg})
		}
	}
	return v
}

func failed(volume, name, why string) *pb.Volume {
	v := snapshotOf(volume, name, pb.VolumeState_VOLUME_STATE_DELETING)
	v.Failed = why
	return v
}

func output(f cli.Format) (out *cli.Output, stdout, stderr *bytes.Buffer) {
	stdout, stderr = &bytes.Buffer{}, &bytes.Buffer{}
	return &cli.Output{Format: f, Stdout: stdout, Stderr: stderr, Now: func() time.Time { return noon }}, stdout, stderr
}

func TestSnapshotsAreAskedForTogether(t *testing.T) {
	gold := map[string]string{"tier": "gold"}
	for name, c := range map[string]struct {
		options createOptions
		want    []*pb.NewSnapshot
	}{
		"one":         {createOptions{snapshots: []string{"db1@mon"}}, []*pb.NewSnapshot{{Volume: "db1", Name: "mon"}}},
		"several":     {createOptions{snapshots: []string{"db1@mon", "log1@m2"}}, []*pb.NewSnapshot{{Volume: "db1", Name: "mon"}, {Volume: "log1", Name: "m2"}}},
		"short form":  {createOptions{snapshots: []string{"db1", "db2"}, name: "nightly"}, []*pb.NewSnapshot{{Volume: "db1", Name: "nightly"}, {Volume: "db2", Name: "nightly"}}},
		"with labels": {createOptions{snapshots: []string{"db1"}, name: "n", labels: []string{"tier=gold"}}, []*pb.NewSnapshot{{Volume: "db1", Name: "n", Labels: gold}}},
	} {
		api := &stub{}
		out, stdout, stderr := output(cli.FormatTable)
		if err := runCreate(t.Context(), api, c.options, out); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(&pb.CreateSnapshotsRequest{Snapshots: c.want}, api.created, protocmp.Transform()); diff != "" {
			t.Errorf("%s: request (-want +got):\n%s", name, diff)
		}
		if stdout.Len()+stderr.Len() > 0 {
			t.Errorf("%s, without waiting, prints %q and %q", name, stdout, stderr)
		}
	}
}

func TestNamesOfNewSnapshotsAreChecked(t *testing.T) {
	for name, c := range map[string]struct {
		options createOptions
		want    string
	}{
		"no name":    {createOptions{snapshots: []string{"db1"}}, "has no name"},
		"two names":  {createOptions{snapshots: []string{"db1@a"}, name: "b"}, "so has --name b"},
		"two signs":  {createOptions{snapshots: []string{"db1@a@b"}}, "must not contain '@'"},
		"empty":      {createOptions{snapshots: []string{"db1@"}}, "snapshot name"},
		"no volume":  {createOptions{snapshots: []string{"@mon"}}, "volume name"},
		"bad letter": {createOptions{snapshots: []string{"db1"}, name: "Mon"}, "must not contain 'M'"},
		"bad label":  {createOptions{snapshots: []string{"db1@a"}, labels: []string{"x"}}, "KEY=VALUE"},
	} {
		api := &stub{}
		out, _, _ := output(cli.FormatTable)
		err := runCreate(t.Context(), api, c.options, out)
		if err == nil || !strings.Contains(err.Error(), c.want) || cli.ExitCode(err) != cli.ExitUsage || api.created != nil {
			t.Errorf("%s: %v (asked for %v), want wrong usage: %s", name, err, api.created, c.want)
		}
	}
}

func TestCreateWaitsUntilAllAreTaken(t *testing.T) {
	ready, creating := pb.VolumeState_VOLUME_STATE_READY, pb.VolumeState_VOLUME_STATE_CREATING
	for name, c := range map[string]struct {
		next []*pb.Volume
		said string
		err  string
	}{
		"taken": {
			[]*pb.Volume{snapshotOf("db1", "a", creating), snapshotOf("log1", "a", ready), snapshotOf("db1", "a", ready)},
			"weft: snapshot log1@a is taken: 10GiB\nweft: waiting for snapshot db1@a to be taken\nweft: snapshot db1@a is taken: 10GiB\n", "",
		},
		"failed": {
			[]*pb.Volume{snapshotOf("db1", "a", creating), failed("log1", "a", "t2 did not answer in time")},
			"", "snapshot log1@a was not taken: t2 did not answer in time",
		},
		"gone": {[]*pb.Volume{nil}, "", "snapshot db1@a: it was deleted before it was taken"},
	} {
		synctest.Test(t, func(t *testing.T) {
			out, stdout, stderr := output(cli.FormatTable)
			err := runCreate(t.Context(), &stub{next: c.next}, createOptions{snapshots: []string{"db1", "log1"}, name: "a", wait: true}, out)
			if c.err == "" {
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			} else if got := cli.NewReport(err); got.Error != c.err || len(got.Hints) != 1 || got.Code != cli.ExitFailed {
				t.Errorf("%s: %+v, want %q", name, got, c.err)
			}
			if stderr.String() != c.said || stdout.Len() > 0 {
				t.Errorf("%s: prints %q and %q, want %q", name, stdout, stderr, c.said)
			}
		})
	}
}

func TestCreatePrintsSnapshotsAsTheyAreThen(t *testing.T) {
	out, stdout, _ := output(cli.FormatJSON)
	ready := snapshotOf("db1", "a", pb.VolumeState_VOLUME_STATE_READY)
	if err := runCreate(t.Context(), &stub{next: []*pb.Volume{ready}}, createOptions{snapshots: []string{"db1@a"}, wait: true}, out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"snapshots": [`, `"name": "db1@a"`, `"state": "ready"`, `"taken": "2026-11-21T09:00:00Z"`} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("create prints %s, want %s", stdout, want)
		}
	}
}

// A snapshot can be gone before the command has looked at it. The history says why.
func TestTheReasonOfASnapshotThatIsGone(t *testing.T) {
	event := func(id, why string) *pb.Event {
		return &pb.Event{Kind: "snapshot.failed", Object: "volume db1@a", Text: "the snapshot was not taken: " + why, Attributes: map[string]string{"volume_id": id}}
	}
	api := &stub{next: []*pb.Volume{nil}, events: []*pb.Event{event("id of db1@a", "host h1 has nothing mounted"), event("of an earlier one", "another reason")}}
	out, _, _ := output(cli.FormatTable)
	err := runCreate(t.Context(), api, createOptions{snapshots: []string{"db1@a"}, wait: true}, out)
	if err == nil || err.Error() != "snapshot db1@a was not taken: host h1 has nothing mounted" {
		t.Errorf("runCreate = %v", err)
	}
}

// A manager that does not know --freeze answers with snapshots for which nothing is frozen.
func TestCreateWithFrozenFileSystems(t *testing.T) {
	for _, old := range []bool{false, true} {
		out, _, _ := output(cli.FormatTable)
		api := &stub{freezes: !old}
		err := runCreate(t.Context(), api, createOptions{snapshots: []string{"db1@a"}, freeze: true}, out)
		if !api.created.GetFreeze() || (err != nil) != old {
			t.Errorf("an old manager %v: asked for %v, error %v", old, api.created, err)
		}
	}
}

func TestAManagerOfAnOlderVersionTakesNone(t *testing.T) {
	out, _, _ := output(cli.FormatTable)
	err := runCreate(t.Context(), &stub{refusal: status.Error(codes.Unimplemented, "unknown method CreateSnapshots")}, createOptions{snapshots: []string{"db1@a"}}, out)
	if err == nil || !strings.Contains(err.Error(), "its version has none") {
		t.Errorf("runCreate = %v", err)
	}
	api := &stub{volumes: []*pb.Volume{{Name: "db1"}}}
	out, stdout, _ := output(cli.FormatTable)
	if err := runList(t.Context(), api, nil, out); err != nil || stdout.String() != "NAME  SIZE  USED  REFERENCED  FREES  COPIES  TAKEN  FROZEN  STATE\n" {
		t.Errorf("runList prints %q, %v, want no volumes", stdout, err)
	}
}

func TestListShowsHowGoodSnapshotsAre(t *testing.T) {
	lost, half := snapshotOf("db1", "mon", pb.VolumeState_VOLUME_STATE_READY), snapshotOf("db1", "tue", pb.VolumeState_VOLUME_STATE_READY)
	half.Snapshot.FsFrozen = true
	half.Legs[3].State = pb.LegState_LEG_STATE_STALE
	lost.Legs[0].State, lost.Legs[1].State = pb.LegState_LEG_STATE_STALE, pb.LegState_LEG_STATE_STALE
	bare := failed("db1", "wed", "t2 did not answer in time")
	bare.Legs, bare.UsedBytes = nil, 0
	half.Space = &pb.LegSpace{ReferencedBytes: 8 << 30, FreedBytes: 1 << 30}
	api := &stub{volumes: []*pb.Volume{lost, half, bare, snapshotOf("db1", "thu", pb.VolumeState_VOLUME_STATE_READY)}}
	out, stdout, _ := output(cli.FormatTable)
	if err := runList(t.Context(), api, []string{"db1"}, out); err != nil {
		t.Fatal(err)
	}
	want := `NAME     SIZE   USED  REFERENCED  FREES  COPIES  TAKEN  FROZEN  STATE
db1@mon  10GiB  3GiB  -           -      0/2     3h     no      ready
db1@tue  10GiB  3GiB  8GiB        1GiB   1/2     3h     yes     ready
db1@wed  10GiB  0B    -           -      0/2     -      no      deleting: not taken: t2 did not answer in time
db1@thu  10GiB  3GiB  -           -      2/2     3h     no      ready
`
	if diff := cmp.Diff(want, stdout.String()); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
	if asked := (&pb.ListVolumesRequest{Snapshots: true, Of: "db1"}); !proto.Equal(api.listed, asked) {
		t.Errorf("asked for %v, want %v", api.listed, asked)
	}
}

func TestDeleteTakesSnapshotsAlone(t *testing.T) {
	for names, want := range map[string]string{
		"db1@mon":           "weft: snapshot db1@mon is being deleted\n",
		"id of db1@mon":     "weft: snapshot id of db1@mon is being deleted\n",
		"db1@mon,db1@other": "weft: snapshot db1@mon is being deleted\nweft: snapshot db1@other does not exist: nothing to delete\n",
		"db1@mon,db1":       "", // refused
	} {
		api := &stub{volumes: []*pb.Volume{{Id: "id", Name: "db1"}, snapshotOf("db1", "mon", pb.VolumeState_VOLUME_STATE_READY)}}
		out, _, stderr := output(cli.FormatTable)
		err := runDelete(t.Context(), api, strings.Split(names, ","), out)
		if stderr.String() != want {
			t.Errorf("delete %s says %q, want %q", names, stderr, want)
		}
		if want != "" {
			if err != nil || strings.Join(api.deleted, ",") != names {
				t.Errorf("delete %s = %v, and deletes %q", names, err, api.deleted)
			}
			continue
		}
		if r := cli.NewReport(err); r.Code != cli.ExitUsage || !strings.Contains(r.Hints[0], "weft volume delete db1") || len(api.deleted) > 0 {
			t.Errorf("delete %s = %+v, and deletes %q", names, r, api.deleted)
		}
	}
}

// Going back keeps what was written since, or is told to let it go. The volume must not have changed since
// the command looked at it.
func TestAVolumeGoesBack(t *testing.T) {
	db1 := func(generation uint64, restoring, why string) *pb.Volume {
		return &pb.Volume{Id: "id of db1", Name: "db1", Generation: generation, RestoringTo: restoring, Failed: why}
	}
	attached := db1(7, "", "")
	attached.Attachment = &pb.Attachment{Node: "gpu1"}
	mon, before := snapshotOf("db1", "mon", pb.VolumeState_VOLUME_STATE_READY), snapshotOf("db1", "before", pb.VolumeState_VOLUME_STATE_READY)
	let := restoreOptions{volume: "db1", to: "db1@mon", acceptDataLoss: true, wait: true}
	keep := restoreOptions{volume: "db1", to: "db1@mon", keep: "before", wait: true}
	under, done := db1(8, "db1@mon", ""), db1(9, "", "")
	for name, c := range map[string]struct {
		o       restoreOptions
		api     stub
		wantErr string
		said    string
	}{
		"let go":             {let, stub{volumes: []*pb.Volume{db1(7, "", "")}, back: []*pb.Volume{under, done}}, "", "weft: volume db1 goes back to db1@mon\nweft: volume db1 holds what db1@mon does\n"},
		"given up":           {let, stub{volumes: []*pb.Volume{db1(7, "", "")}, back: []*pb.Volume{under, db1(9, "", "it did not go back")}}, "volume db1: it did not go back", ""},
		"an older manager":   {let, stub{volumes: []*pb.Volume{db1(7, "", "")}, refusal: status.Error(codes.Unimplemented, "unknown method")}, "its version cannot", ""},
		"no such volume":     {let, stub{}, "not found", ""},
		"without a snapshot": {restoreOptions{volume: "db1", keep: "before"}, stub{}, "--to: missing", ""},
		"without a word":     {restoreOptions{volume: "db1", to: "db1@mon"}, stub{}, "would be gone", ""},
		"both":               {restoreOptions{volume: "db1", to: "db1@mon", keep: "before", acceptDataLoss: true}, stub{}, "--keep keeps", ""},
		"kept, in use":       {keep, stub{volumes: []*pb.Volume{attached, mon}}, "attached to gpu1", ""},
		"kept already":       {keep, stub{volumes: []*pb.Volume{db1(7, "", ""), mon, before}}, "exists, and may not hold", ""},
		"kept, to another's": {restoreOptions{volume: "db1", to: "db2@mon", keep: "before"}, stub{volumes: []*pb.Volume{db1(7, "", ""), snapshotOf("db2", "mon", pb.VolumeState_VOLUME_STATE_READY)}}, "--to: db2@mon is no snapshot of volume db1", ""},
		"kept, to a volume":  {restoreOptions{volume: "db1", to: "db1", keep: "before"}, stub{volumes: []*pb.Volume{db1(7, "", "")}}, "--to: db1 is no snapshot of volume db1", ""},
		"kept, to nothing":   {keep, stub{volumes: []*pb.Volume{db1(7, "", "")}}, "not found", ""},
	} {
		out, _, stderr := output(cli.FormatTable)
		err := runRestore(t.Context(), &c.api, c.o, out)
		if c.wantErr == "" && err != nil || c.wantErr != "" && (err == nil || !strings.Contains(err.Error(), c.wantErr)) {
			t.Errorf("%s: %v, want %q", name, err, c.wantErr)
		}
		if c.said != "" && !strings.Contains(stderr.String(), c.said) {
			t.Errorf("%s: says %q, want %q", name, stderr, c.said)
		}
		if c.wantErr == "" && c.api.restored.GetIfGeneration() != 7 {
			t.Errorf("%s: asked for %v", name, c.api.restored)
		}
	}
}

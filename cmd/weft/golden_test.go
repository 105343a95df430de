// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/explain"
	"weft.dev/weft/proto/pb"
)

var update = flag.Bool("update", false, "write what the commands print to testdata/golden")

// noon is when everything in these tests happens.
var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(noon.Add(-d)) }

// stub answers with its content; other calls are a nil dereference.
type stub struct {
	pb.ManagerClient
	status *pb.Status
	volume *pb.Volume
	drives []*pb.Drive
	nodes  []*pb.Node
}

func (s *stub) GetStatus(context.Context, *pb.GetStatusRequest, ...grpc.CallOption) (*pb.Status, error) {
	return s.status, nil
}

func (s *stub) GetVolume(context.Context, *pb.GetVolumeRequest, ...grpc.CallOption) (*pb.Volume, error) {
	return s.volume, nil
}

func (s *stub) ListVolumes(context.Context, *pb.ListVolumesRequest, ...grpc.CallOption) (*pb.ListVolumesResponse, error) {
	return &pb.ListVolumesResponse{Volumes: []*pb.Volume{s.volume}}, nil
}

func (s *stub) ListDrives(context.Context, *pb.ListDrivesRequest, ...grpc.CallOption) (*pb.ListDrivesResponse, error) {
	return &pb.ListDrivesResponse{Drives: s.drives}, nil
}

func (s *stub) ListNodes(context.Context, *pb.ListNodesRequest, ...grpc.CallOption) (*pb.ListNodesResponse, error) {
	return &pb.ListNodesResponse{Nodes: s.nodes}, nil
}

func (s *stub) ListDevices(context.Context, *pb.ListDevicesRequest, ...grpc.CallOption) (*pb.ListDevicesResponse, error) {
	return &pb.ListDevicesResponse{Devices: []*pb.Device{
		{Path: "/dev/nvme0n1", Model: "P4510", Serial: "S1", SizeBytes: 2 << 40, DriveId: s.drives[0].GetId()},
		{Path: "/dev/sda", SizeBytes: 20 << 30, Signatures: []string{"gpt"}, Holders: []string{"mounted on /"}, Refused: "it is in use"},
	}}, nil
}

func (s *stub) ListPools(context.Context, *pb.ListPoolsRequest, ...grpc.CallOption) (*pb.ListPoolsResponse, error) {
	return &pb.ListPoolsResponse{Pools: []*pb.Pool{
		{Name: "default", CapacityBytes: 4 << 40, AllocatedBytes: 1 << 40, Drives: 3, Rebalance: &pb.PoolRebalance{Began: ago(time.Hour), Moves: 5, Moving: 2}},
		{Name: "fast", Selector: map[string]string{"tier": "1", "class": "nvme"}},
	}}, nil
}

func (s *stub) RebalancePool(context.Context, *pb.RebalancePoolRequest, ...grpc.CallOption) (*pb.RebalancePoolResponse, error) {
	l := s.volume.GetLegs()[0]
	return &pb.RebalancePoolResponse{Moves: []*pb.PlannedMove{
		{Volume: "db1", Column: 0, Copy: 1, SizeBytes: 40 << 30, FromNode: "t1", FromDriveId: l.GetDriveId(), ToNode: "t4", ToDriveId: s.volume.GetLegs()[1].GetDriveId()},
	}}, nil
}

func (s *stub) ListAttachments(context.Context, *pb.ListAttachmentsRequest, ...grpc.CallOption) (*pb.ListAttachmentsResponse, error) {
	return &pb.ListAttachmentsResponse{Attachments: []*pb.Attachment{s.volume.GetAttachment()}}, nil
}

func (s *stub) ListEvents(context.Context, *pb.ListEventsRequest, ...grpc.CallOption) (*pb.ListEventsResponse, error) {
	return &pb.ListEventsResponse{Events: []*pb.Event{
		{Seq: 7, Time: ago(time.Hour), Severity: pb.Severity_SEVERITY_INFO, Kind: "volume.created", Object: "volume db1", Text: "10GiB, 2×2"},
		{Seq: 8, Time: ago(time.Minute), Severity: pb.Severity_SEVERITY_WARNING, Kind: "leg.stale", Object: "volume db1", Text: "leg 0/1 on t2: no answer for 2s", Attributes: map[string]string{"leg": "x"}},
	}}, nil
}

func (s *stub) ExplainVolume(context.Context, *pb.ExplainVolumeRequest, ...grpc.CallOption) (*pb.Explanation, error) {
	return &pb.Explanation{
		Object: "volume db1", Summary: "volume db1 is degraded: 3 of 4 legs are in sync and every column can be served",
		Facts: []string{"leg 0/1 on t2 is stale since 1m"}, Waits: []string{"the target agent on t2"}, Actions: []string{"bring t2 back"},
	}, nil
}

func (s *stub) WhatIf(_ context.Context, r *pb.WhatIfRequest, _ ...grpc.CallOption) (*pb.WhatIfResponse, error) {
	leg := func(copy uint32, to, why string) *pb.LegLoss {
		l := &pb.LegLoss{Copy: copy, Node: "t1", DriveId: s.drives[0].GetId(), State: pb.LegState_LEG_STATE_IN_SYNC, SizeBytes: 5 << 30, To: to, Why: why}
		if to != "" {
			l.ToDriveId = s.drives[1].GetId()
		}
		return l
	}
	return &pb.WhatIfResponse{
		Nodes: r.GetNodes(), DriveIds: []string{s.drives[0].GetId()}, ReplaceAfter: durationpb.New(15 * time.Minute),
		VolumesLosingData: 1, VolumesDegraded: 1, LegsLost: 3, LegsWithoutPlace: 2, CopiedBytes: 5 << 30,
		Volumes: []*pb.VolumeLoss{
			{VolumeId: s.volume.GetId(), VolumeName: "scratch", SizeBytes: 5 << 30, Before: pb.Health_HEALTH_HEALTHY, After: pb.Health_HEALTH_UNAVAILABLE, DataLost: true, CopyWaitsFor: "the volume to be attached", Legs: []*pb.LegLoss{leg(0, "", "the volume has a single copy")}},
			{VolumeId: s.volume.GetId(), VolumeName: "db1", SizeBytes: 10 << 30, Before: pb.Health_HEALTH_HEALTHY, After: pb.Health_HEALTH_DEGRADED, Hosts: "gpu1", Legs: []*pb.LegLoss{leg(0, "t3", ""), leg(1, "", "no place for another copy of column 1, which takes 5GiB: drive /dev/nvme0n1 on t2: 1GiB free")}},
		},
		Attachments: []*pb.Attachment{{VolumeName: "web", Node: "t1"}},
	}, nil
}

// db1 is a volume that lost a leg while attached.
func db1() *stub {
	const id, driveA, driveB = "0b5e2f7e-1c1d-4a3e-9a52-6f7c1a2b3c4d", "4f1c22aa-0000-4000-8000-000000000001", "9c01aa37-0000-4000-8000-000000000002"
	leg := func(n string, column, copy uint32, drive, node string) *pb.Leg {
		return &pb.Leg{Id: n + "0000000-0000-4000-8000-00000000000" + n, VolumeId: id, Column: column, Copy: copy, DriveId: drive, Node: node, State: pb.LegState_LEG_STATE_IN_SYNC, Extents: []*pb.Extent{{Start: 4, Count: 20}}}
	}
	stale := leg("b", 0, 1, driveB, "t2")
	stale.State, stale.Revision, stale.StaleSince, stale.Reason = pb.LegState_LEG_STATE_STALE, 1, ago(time.Minute), "no answer for 2s"
	return &stub{
		volume: &pb.Volume{
			Id: id, Name: "db1", SizeBytes: 10 << 30, Layout: &pb.Layout{Stripes: 2, Copies: 2, ChunkBytes: 128 << 10},
			Pool: "default", Spread: "node", Authentication: "prefer", Labels: map[string]string{"app": "db"}, State: pb.VolumeState_VOLUME_STATE_READY,
			Health: pb.Health_HEALTH_DEGRADED, Epoch: 3, Generation: 5, Created: ago(72 * time.Hour),
			Legs: []*pb.Leg{leg("a", 0, 0, driveA, "t1"), stale, leg("c", 1, 0, driveB, "t2"), leg("d", 1, 1, driveA, "t1")},
			Attachment: &pb.Attachment{
				VolumeId: id, VolumeName: "db1", Node: "gpu1", Mode: pb.AttachMode_ATTACH_MODE_EXCLUSIVE, Epoch: 3,
				State: pb.AttachmentState_ATTACHMENT_STATE_ATTACHED, Device: "/dev/weft/db1", AuthenticatesWith: []string{"t1", "t2"}, Since: ago(3 * time.Hour),
				WaitingFor: "node t2 to come back", ResyncDoneBytes: 1 << 30, ResyncTotalBytes: 4 << 30,
			},
		},
		drives: []*pb.Drive{
			{Id: driveA, Node: "t1", Device: "/dev/nvme0n1", Model: "P4510", SizeBytes: 2 << 40, State: pb.DriveState_DRIVE_STATE_READY, CapacityBytes: 2 << 40, AllocatedBytes: 512 << 30, Labels: map[string]string{"class": "fast"}},
			{Id: driveB, Node: "t2", Device: "/dev/nvme0n1", SizeBytes: 2 << 40, State: pb.DriveState_DRIVE_STATE_MISSING, CapacityBytes: 2 << 40, AllocatedBytes: 512 << 30, Reason: "not seen since the node came back"},
		},
		nodes: []*pb.Node{
			{Name: "gpu1", Initiator: &pb.AgentStatus{Known: true, Online: true}, Labels: map[string]string{"rack": "r9"}},
			{Name: "gpu9", Initiator: &pb.AgentStatus{Refused: "belongs to cluster 0b3c9f00, not to this one"}},
			{Name: "t1", Target: &pb.AgentStatus{Known: true, Online: true}, Portals: []*pb.Portal{{Transport: pb.Transport_TRANSPORT_TCP, Address: "192.0.2.11", Port: 4420}, {Transport: pb.Transport_TRANSPORT_RDMA, Address: "2001:db8::11", Rail: "r0"}}},
			{Name: "t2", Target: &pb.AgentStatus{Known: true, Seen: ago(90 * time.Second), Problems: []*pb.Problem{{Object: "drive 9c01aa37", Doing: "read the label", Cause: "input/output error"}, {}}}},
		},
		status: &pb.Status{
			ClusterId: "11111111-2222-4333-8444-555555555555", Version: "v0.1.0", CapacityBytes: 4 << 40, AllocatedBytes: 1 << 40,
			Nodes: 3, NodesOffline: 1, Drives: 2, DrivesNotReady: 1, Volumes: 3, VolumesDegraded: 1, VolumesUnavailable: 1, Attachments: 1,
			Wrong: []string{"volume db2 cannot be served: see `weft explain volume db2`", "node t2: target offline for 90s", "volume db1 waits for node t2", "drive 9c01aa37 (/dev/nvme0n1 on t2) is missing", "the store is nearly full"},
		},
	}
}

func TestTablesAndJSONStayAsTheyAre(t *testing.T) {
	runs := map[string]func(context.Context, pb.ManagerClient, *cli.Output) error{
		"status": runStatus,
		"nodes":  runNodeList,
		"devices": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			return runDriveDevices(ctx, api, "t1", out)
		},
		"drives": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			return runDriveList(ctx, api, driveListOptions{}, out)
		},
		"pools": runPoolList,
		"moves": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			return runPoolRebalance(ctx, api, poolRebalanceOptions{pool: "default", dryRun: true}, out)
		},
		"volumes": runVolumeList,
		"volume": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			return runVolumeDescribe(ctx, api, "db1", out)
		},
		"scrubs": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			v := api.(*stub).volume
			v.ScrubEverySeconds, v.ScrubBytesPerSecond = 7*24*3600, 50<<20
			v.Scrub = &pb.VolumeScrub{Began: ago(time.Hour), Repair: true, From: []*pb.Place{{Copy: 1}}, DoneBytes: 2 << 30, TotalBytes: 10 << 30, Found: 3, Repaired: 2, Paused: true}
			v.PastScrubs = []*pb.VolumeScrub{
				{Began: ago(9 * time.Hour), Ended: ago(8 * time.Hour), Scheduled: true, DoneBytes: 10 << 30, Found: 3},
				{Began: ago(99 * time.Hour), Ended: ago(98 * time.Hour), Stopped: true, DoneBytes: 1 << 30},
			}
			return runVolumeDescribe(ctx, api, "db1", out)
		},
		"rebuilds": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			v := api.(*stub).volume
			v.RebuildBytesPerSecond = 500 << 20
			v.Rebuilds = []*pb.Rebuild{
				{LegId: v.Legs[0].Id, Copy: 2, Node: "t4", Replaces: "t2", Began: ago(time.Minute), DoneBytes: 12 << 30, TotalBytes: 40 << 30, BytesPerSecond: 210 << 20, Left: durationpb.New(137 * time.Second)},
				{LegId: v.Legs[0].Id, Copy: 1, Node: "t2", Began: ago(3 * time.Hour), Ended: ago(2 * time.Hour), DoneBytes: 3 << 30, TotalBytes: 3 << 30},
				{LegId: v.Legs[0].Id, Copy: 1, Node: "t2", Began: ago(5 * time.Hour), Ended: ago(4 * time.Hour), Failed: "no answer for 2s", DoneBytes: 1 << 30, TotalBytes: 3 << 30},
			}
			return runVolumeDescribe(ctx, api, "db1", out)
		},
		"shared": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			s := api.(*stub)
			first, second := s.volume.GetAttachment(), proto.CloneOf(s.volume.GetAttachment())
			first.Mode, second.Mode = pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY, pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY
			second.Node, second.State, second.Device = "gpu2", pb.AttachmentState_ATTACHMENT_STATE_GRANTED, ""
			s.volume.Attachments = []*pb.Attachment{first, second}
			return errors.Join(runVolumeList(ctx, api, out), runVolumeDescribe(ctx, api, "db1", out))
		},
		"snapshot": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			v := api.(*stub).volume
			v.Name, v.Thin, v.UsedBytes, v.Attachment, v.Epoch = "db1@mon", true, 3<<30, nil, 0
			v.Snapshot = &pb.SnapshotOf{VolumeId: v.Legs[0].Id, VolumeName: "db1", Taken: ago(3 * time.Hour), GroupId: v.Legs[1].Id}
			return runVolumeDescribe(ctx, api, "db1@mon", out)
		},
		"clone": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			v := api.(*stub).volume
			v.Name, v.Thin, v.UsedBytes, v.Attachment, v.CloneOf = "c1", true, 1<<30, nil, "db1@mon"
			v.Flattening = &pb.Flattening{LeftBytes: 12 << 30, WaitsFor: []string{"leg 0.1 on t2: target t2 is offline"}}
			return runVolumeDescribe(ctx, api, "c1", out)
		},
		"attachments": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			return runAttachmentList(ctx, api, attachmentListOptions{}, out)
		},
		"events": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			return runEventList(ctx, api, eventListOptions{}, out)
		},
		"explain": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			x, err := api.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: "db1"})
			if err != nil {
				return err
			}
			return explain.Print(x, out)
		},
		"what-if": func(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
			return runWhatIfLose(ctx, api, []string{"node", "t1"}, nil, out)
		},
	}
	for name, run := range runs {
		for _, f := range []cli.Format{cli.FormatTable, cli.FormatJSON, cli.FormatYAML} {
			var stdout, stderr bytes.Buffer
			out := &cli.Output{Format: f, Stdout: &stdout, Stderr: &stderr, Now: func() time.Time { return noon }}
			if err := run(t.Context(), db1(), out); err != nil {
				t.Errorf("%s as %s: %v", name, f.String(), err)
			}
			golden(t, name+"."+f.String(), stdout.Bytes())
			if stderr.Len() > 0 {
				t.Errorf("%s as %s wrote %q to stderr, want nothing", name, f.String(), stderr.String())
			}
		}
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", "golden", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func TestPlacesOfLegs(t *testing.T) {
	if got, err := parsePlace("3.1"); err != nil || got.GetColumn() != 3 || got.GetCopy() != 1 {
		t.Errorf("parsePlace(3.1) = %v, %v", got, err)
	}
	for _, text := range []string{"", "1", "1.", ".1", "-1.0", "1.2.3", "a.b"} {
		if got, err := parsePlace(text); err == nil {
			t.Errorf("parsePlace(%q) = %v", text, got)
		}
	}
}

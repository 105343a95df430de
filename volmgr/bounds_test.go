// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/pb"
)

func TestRequestsBeyondTheBoundsAreRefusedByField(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	long := strings.Repeat("x", textMost+1)
	for field, call := range map[string]func() error{
		"volume": func() error { _, err := r.GetVolume(ctx, &pb.GetVolumeRequest{Volume: long}); return err },
		"object": func() error { _, err := r.ListEvents(ctx, &pb.ListEventsRequest{Object: long}); return err },
		"device": func() error { _, err := r.AddDrive(ctx, &pb.AddDriveRequest{Node: "t1", Device: long}); return err },
		"leg_ids": func() error {
			_, err := r.agents.RecordStale(ctx, &pb.RecordStaleRequest{LegIds: []string{long}})
			return err
		},
		"legs": func() error {
			_, err := r.agents.RecordInSync(ctx, &pb.RecordInSyncRequest{Legs: make([]*pb.RebuiltLeg, listMost+1)})
			return err
		},
		"leg_id": func() error {
			_, err := r.agents.RecordInSync(ctx, &pb.RecordInSyncRequest{Legs: []*pb.RebuiltLeg{{LegId: long}}})
			return err
		},
		"topology": func() error {
			_, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Topology: make([]*pb.Segment, listMost+1)})
			return err
		},
		"force_erase": func() error {
			_, err := r.AddDrive(ctx, &pb.AddDriveRequest{ForceErase: strings.Repeat("x", eraseMost+1)})
			return err
		},
		"labels": func() error {
			_, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "a", SizeBytes: 1 << 30, Labels: map[string]string{"a": long}})
			return err
		},
	} {
		err := call()
		if status.Code(err) != codes.InvalidArgument || !carries(err, field) || !strings.Contains(err.Error(), "are allowed") {
			t.Errorf("a request with too much in %s = %v, want INVALID_ARGUMENT that names it", field, err)
		}
	}
	_, err := r.AddDrive(ctx, &pb.AddDriveRequest{Node: "t1", Device: "/dev/x", ForceErase: long})
	if status.Code(err) != codes.NotFound {
		t.Errorf("a force_erase of %d bytes = %v, want it taken", len(long), err)
	}
}

// A report is cut to the bounds, and a problem of the agent names them.
func TestAnAgentThatSaysTooMuchStopsNothing(t *testing.T) {
	r := newRig(t)
	long := strings.Repeat("é", 50<<10)
	report := &pb.TargetReport{Node: "t1", BootId: "1", Version: long, Kernel: long, Labels: map[string]string{"rack": "r1", "zz": long}}
	for i := range 20_000 {
		report.Labels[fmt.Sprintf("s%d", i)] = "v"
	}
	for i := range 1000 {
		report.Portals = append(report.Portals, &pb.Portal{Address: "192.0.2.1", Port: uint32(i + 1)})
	}
	for i := range 300 {
		report.Problems = append(report.Problems, &pb.Problem{Object: fmt.Sprintf("leg %d", i), Doing: "carve", Cause: strings.Repeat("because ", 1000)})
	}
	report.Devices = append(report.Devices, &pb.Device{Path: "/dev/a", Model: long, Signatures: slices.Repeat([]string{"ext4"}, 1000)})
	if size := proto.Size(report); size > 4<<20 {
		t.Fatalf("the report has %d bytes", size)
	}
	stream, err := r.agents.Target(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(report); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	nodes, err := r.ListNodes(t.Context(), &pb.ListNodesRequest{})
	if err != nil || len(nodes.Nodes) != 1 {
		t.Fatalf("ListNodes = %v, %v", nodes, err)
	}
	n := nodes.Nodes[0]
	if size := proto.Size(n); size > 400<<10 {
		t.Errorf("the node is shown in %d bytes", size)
	}
	if n.Labels["rack"] != "r1" || n.Labels["node"] != "t1" || len(n.Labels) > 70 || len(n.Portals) != portalsMost {
		t.Errorf("the node has %d labels, rack %q, and %d portals", len(n.Labels), n.Labels["rack"], len(n.Portals))
	}
	var told []string
	for _, p := range n.Target.Problems {
		if p.Object == "report" {
			told = append(told, strings.Fields(p.Cause)[0])
		}
	}
	if want := []string{"labels:", "portals:", "signatures", "problems:"}; !slices.Equal(told, want) {
		t.Errorf("left out, as the node's problems tell: %v, want %v", told, want)
	}
	devices, err := r.ListDevices(t.Context(), &pb.ListDevicesRequest{Node: "t1"})
	if err != nil || proto.Size(devices) > 4<<10 {
		t.Errorf("the device is shown in %d bytes, %v", proto.Size(devices), err)
	}
}

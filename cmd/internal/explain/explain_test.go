// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// lists answers with its content.
type lists struct {
	pb.ManagerClient
	drives  []*pb.Drive
	pools   []*pb.Pool
	nodes   []*pb.Node
	volumes []*pb.Volume
	wrong   []string
}

func (l lists) ListDrives(context.Context, *pb.ListDrivesRequest, ...grpc.CallOption) (*pb.ListDrivesResponse, error) {
	return &pb.ListDrivesResponse{Drives: l.drives}, nil
}

func (l lists) ListPools(context.Context, *pb.ListPoolsRequest, ...grpc.CallOption) (*pb.ListPoolsResponse, error) {
	return &pb.ListPoolsResponse{Pools: l.pools}, nil
}

func (l lists) ListNodes(context.Context, *pb.ListNodesRequest, ...grpc.CallOption) (*pb.ListNodesResponse, error) {
	return &pb.ListNodesResponse{Nodes: l.nodes}, nil
}

func (l lists) ListVolumes(context.Context, *pb.ListVolumesRequest, ...grpc.CallOption) (*pb.ListVolumesResponse, error) {
	return &pb.ListVolumesResponse{Volumes: l.volumes}, nil
}

func (l lists) GetStatus(context.Context, *pb.GetStatusRequest, ...grpc.CallOption) (*pb.Status, error) {
	return &pb.Status{ClusterId: "c", Wrong: l.wrong}, nil
}

const aDrive = "4f1c22aa-0000-4000-8000-000000000001"

func seeVolume(string) string { return "weft explain volume db1" }

func TestExplainNamesTheCauseAndTheNextCommand(t *testing.T) {
	l := lists{
		drives: []*pb.Drive{{Id: aDrive, Node: "t1", Device: "/dev/nvme0n1", State: pb.DriveState_DRIVE_STATE_SUSPECT, Reason: "it says so", AllocatedBytes: 96, CapacityBytes: 100}},
		pools:  []*pb.Pool{{Name: "fast", Drives: 1, AllocatedBytes: 96, CapacityBytes: 100}, {Name: "empty"}},
		nodes: []*pb.Node{{Name: "t1", Target: &pb.AgentStatus{Known: true, Online: true, Version: "v1",
			Problems: []*pb.Problem{{Object: "export x", Doing: "create", Cause: "no space"}}}}, {Name: "h1", Stock: true, Host: &pb.Host{Nqn: "nqn.2014-08.org.nvmexpress:uuid:1"}}},
		volumes: []*pb.Volume{{Name: "db1", Health: pb.Health_HEALTH_DEGRADED, Legs: []*pb.Leg{{DriveId: aDrive, Node: "t1"}},
			Attachments: []*pb.Attachment{{Node: "h1", State: pb.AttachmentState_ATTACHMENT_STATE_ATTACHED}}}},
		wrong: []string{"volume db1 is degraded: see it"},
	}
	for what, want := range map[string][]string{
		"drive":   {"is suspect: it says so", "nearly full", "copies of 1 volume", "weft drive evict 4f1c22aa", "weft explain volume db1"},
		"node":    {"node t1 is online", "version v1", "cannot create of export x: no space", "drive 4f1c22aa (/dev/nvme0n1) is suspect", "weft explain drive 4f1c22aa", "weft explain volume db1"},
		"stock":   {"node h1 is a host without Weft's agent", "with Linux's own NVMe tools, as host nqn.2014-08.org.nvmexpress:uuid:1", "it has volume db1 (attached)"},
		"pool":    {"pool fast has 1 drive", "nearly full: 96%", "weft drive add", "weft pool rebalance fast"},
		"empty":   {"pool empty has 0 drives", "weft drive add"},
		"cluster": {"2 problems in the cluster", "volume db1 is degraded", "weft explain volume db1", "pool fast is nearly full: 96%", "weft explain pool fast"},
	} {
		explain := map[string]func() (*pb.Explanation, error){
			"drive":   func() (*pb.Explanation, error) { return ofDrive(t.Context(), l, aDrive) },
			"node":    func() (*pb.Explanation, error) { return ofNode(t.Context(), l, "t1") },
			"stock":   func() (*pb.Explanation, error) { return ofNode(t.Context(), l, "h1") },
			"pool":    func() (*pb.Explanation, error) { return ofPool(t.Context(), l, "fast") },
			"empty":   func() (*pb.Explanation, error) { return ofPool(t.Context(), l, "empty") },
			"cluster": func() (*pb.Explanation, error) { return ofCluster(t.Context(), l, seeVolume) },
		}[what]
		x, err := explain()
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		said := strings.Join(slices.Concat([]string{x.GetSummary()}, x.GetFacts(), x.GetWaits(), x.GetActions()), "\n")
		for _, part := range want {
			if !strings.Contains(said, part) {
				t.Errorf("the explanation of %s lacks %q:\n%s", what, part, said)
			}
		}
	}
	if x, err := ofCluster(t.Context(), lists{}, seeVolume); err != nil || x.GetSummary() != "nothing is wrong in the cluster" || len(x.GetActions()) > 0 {
		t.Errorf("of a healthy cluster: %v, %v", x, err)
	}
	if _, err := ofNode(t.Context(), l, "t9"); status.Code(err) != codes.NotFound {
		t.Errorf("of a node that is not there: %v", err)
	}
}

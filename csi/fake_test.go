// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/pb"
)

// fate says which messages of a call the network loses.
type fate int

const (
	delivered fate = iota
	requestLost
	replyLost // the request is carried out
)

// fakeManager is a volume manager in a map. Each look at a volume advances its agents by one step,
// so that every wait occurs.
type fakeManager struct {
	events           []*pb.Event
	old              bool // it knows nothing of file systems that are frozen
	pb.ManagerClient      // nil: only the methods below are called

	mu      sync.Mutex
	volumes map[string]*pb.Volume // by id
	nodes   []*pb.Node
	pools   []*pb.Pool
	made    int      // volumes, ever
	forced  int      // detaches
	calls   []string // methods, in order
	stuck   bool     // nodes do not release volumes, and targets do not answer
	broken  string   // why no snapshot can be taken; empty: they can
	keeps   bool     // what is deleted stays, since a target is down

	fate func(call int, method string) fate // nil: delivered
	fail func(method string) error          // nil, or returning nil: the call is carried out
}

func newFakeManager() *fakeManager {
	online := &pb.AgentStatus{Known: true, Online: true}
	return &fakeManager{
		volumes: map[string]*pb.Volume{},
		nodes:   []*pb.Node{{Name: "n1", Initiator: online}, {Name: "n2", Initiator: online}},
		pools:   []*pb.Pool{{Name: "default", CapacityBytes: 100 << 30}},
	}
}

// called carries out a call; do is its effect.
func called[P any](m *fakeManager, method string, do func() (P, error)) (P, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var none P
	m.calls = append(m.calls, method)
	lost := status.Error(codes.Unavailable, "connection reset")
	f := delivered
	if m.fate != nil {
		f = m.fate(len(m.calls), method)
	}
	if f == requestLost {
		return none, lost
	}
	if m.fail != nil {
		if err := m.fail(method); err != nil {
			return none, err
		}
	}
	reply, err := do()
	if f == replyLost {
		return none, lost
	}
	return reply, err
}

func (m *fakeManager) find(nameOrID string) (*pb.Volume, error) {
	for _, v := range m.volumes {
		if v.Name == nameOrID || v.Id == nameOrID {
			return v, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "volume %s: not found", nameOrID)
}

func refusedFor(reason, text string) error {
	return withDetail(codes.FailedPrecondition, text, reason, "")
}

// step lets the agents act once on a volume.
func (m *fakeManager) step(v *pb.Volume) {
	switch a := v.Attachment; {
	case m.stuck:
	case v.State == pb.VolumeState_VOLUME_STATE_CREATING && v.Snapshot != nil && m.broken != "":
		v.State, v.Failed = pb.VolumeState_VOLUME_STATE_DELETING, m.broken
	case v.State == pb.VolumeState_VOLUME_STATE_CREATING:
		v.State = pb.VolumeState_VOLUME_STATE_READY
		if v.Snapshot != nil {
			v.Snapshot.Taken = &timestamppb.Timestamp{Seconds: v.Created.Seconds, Nanos: 1}
		}
	case v.State == pb.VolumeState_VOLUME_STATE_DELETING && m.keeps:
	case v.State == pb.VolumeState_VOLUME_STATE_DELETING:
		delete(m.volumes, v.Id)
	case v.ExpandingToBytes != 0:
		v.SizeBytes, v.ExpandingToBytes = v.ExpandingToBytes, 0
	case a == nil:
		v.FenceWaitsFor = nil
	case a.State == pb.AttachmentState_ATTACHMENT_STATE_GRANTING:
		a.State = pb.AttachmentState_ATTACHMENT_STATE_GRANTED
	case a.State == pb.AttachmentState_ATTACHMENT_STATE_GRANTED:
		a.State = pb.AttachmentState_ATTACHMENT_STATE_ATTACHED
	case a.State == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED:
		a.SizeBytes = v.SizeBytes
	case m.online(a.Node):
		v.Attachment, v.FenceWaitsFor = nil, []string{"target t1 to remove its export"}
	}
}

func (m *fakeManager) online(node string) bool {
	return slices.ContainsFunc(m.nodes, func(n *pb.Node) bool { return n.Name == node && n.Initiator.GetOnline() })
}

func (m *fakeManager) GetStatus(context.Context, *pb.GetStatusRequest, ...grpc.CallOption) (*pb.Status, error) {
	return called(m, "GetStatus", func() (*pb.Status, error) { return &pb.Status{ClusterId: "c1"}, nil })
}

func (m *fakeManager) ListNodes(context.Context, *pb.ListNodesRequest, ...grpc.CallOption) (*pb.ListNodesResponse, error) {
	return called(m, "ListNodes", func() (*pb.ListNodesResponse, error) { return &pb.ListNodesResponse{Nodes: m.nodes}, nil })
}

func (m *fakeManager) ListPools(context.Context, *pb.ListPoolsRequest, ...grpc.CallOption) (*pb.ListPoolsResponse, error) {
	return called(m, "ListPools", func() (*pb.ListPoolsResponse, error) { return &pb.ListPoolsResponse{Pools: m.pools}, nil })
}

func (m *fakeManager) GetCapacity(_ context.Context, r *pb.GetCapacityRequest, _ ...grpc.CallOption) (*pb.Capacity, error) {
	return called(m, "GetCapacity", func() (*pb.Capacity, error) {
		if r.GetThin() {
			return &pb.Capacity{AvailableBytes: 500 << 30}, nil
		}
		return &pb.Capacity{AvailableBytes: 50 << 30, MaximumVolumeBytes: 20 << 30, MinimumVolumeBytes: 1 << 20}, nil
	})
}

func (m *fakeManager) GetVolume(_ context.Context, r *pb.GetVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	return called(m, "GetVolume", func() (*pb.Volume, error) {
		if v, err := m.find(r.Volume); err == nil {
			m.step(v)
		}
		v, err := m.find(r.Volume)
		if err != nil {
			return nil, err
		}
		return proto.CloneOf(v), nil
	})
}

func (m *fakeManager) ListVolumes(_ context.Context, r *pb.ListVolumesRequest, _ ...grpc.CallOption) (*pb.ListVolumesResponse, error) {
	return called(m, "ListVolumes", func() (*pb.ListVolumesResponse, error) {
		reply := &pb.ListVolumesResponse{}
		for _, v := range m.volumes {
			if (v.Snapshot != nil) != r.Snapshots || r.Of != "" && v.Snapshot.VolumeId != r.Of {
				continue
			}
			reply.Volumes = append(reply.Volumes, proto.CloneOf(v))
		}
		return reply, nil
	})
}

func (m *fakeManager) CreateVolume(_ context.Context, r *pb.CreateVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	return called(m, "CreateVolume", func() (*pb.Volume, error) {
		if v, err := m.find(r.Name); err == nil {
			return proto.CloneOf(v), nil
		}
		if r.From != "" {
			return m.clone(r)
		}
		if r.SizeBytes*uint64(r.Copies) > 60<<30 {
			return nil, withDetail(codes.ResourceExhausted, "volume "+r.Name+": no space", "NO_SPACE", "")
		}
		if r.Spread != "node" {
			return nil, withDetail(codes.ResourceExhausted, "volume "+r.Name+": copies need different values of a label", "NO_SPACE", "copies")
		}
		if r.Pool != "default" {
			return nil, withDetail(codes.NotFound, fmt.Sprintf("pool %s: not found", r.Pool), pb.ReasonNoPool, "")
		}
		return m.add(&pb.Volume{
			Name: r.Name, SizeBytes: r.SizeBytes, Labels: maps.Clone(r.Labels), Thin: r.Thin,
			Layout: &pb.Layout{Stripes: max(1, r.Stripes), Copies: r.Copies, ChunkBytes: r.ChunkBytes}, Pool: r.Pool, Spread: r.Spread,
			Legs: []*pb.Leg{{Node: "n1"}},
		}), nil
	})
}

// add adds a volume that is being created.
func (m *fakeManager) add(v *pb.Volume) *pb.Volume {
	m.made++
	v.Id, v.Created = fmt.Sprintf("00000000-0000-4000-8000-%012d", m.made), &timestamppb.Timestamp{Seconds: int64(m.made)}
	v.State, v.Health = pb.VolumeState_VOLUME_STATE_CREATING, pb.Health_HEALTH_HEALTHY
	m.volumes[v.Id] = v
	return proto.CloneOf(v)
}

// like is a volume with the layout and place of another one.
func like(o *pb.Volume) *pb.Volume {
	return proto.CloneOf(&pb.Volume{
		SizeBytes: o.SizeBytes, Layout: o.Layout, Pool: o.Pool, Spread: o.Spread, Formatted: o.Formatted, Legs: o.Legs,
		Authentication: o.Authentication, Thin: true,
	})
}

func (m *fakeManager) clone(r *pb.CreateVolumeRequest) (*pb.Volume, error) {
	from, err := m.find(r.From)
	switch {
	case err != nil:
		return nil, err
	case from.State != pb.VolumeState_VOLUME_STATE_READY:
		return nil, refusedFor("NOT_READY", "snapshot "+from.Name+": not ready")
	case from.Snapshot == nil || r.Copies+r.Stripes > 0 || r.ChunkBytes > 0 || r.Pool+r.Spread != "" || r.Integrity || r.SizeBytes < from.SizeBytes:
		return nil, withDetail(codes.InvalidArgument, "a clone has the layout and the place of its snapshot", "", "from")
	case r.SizeBytes > 60<<30:
		return nil, withDetail(codes.ResourceExhausted, "volume "+r.Name+": no space", "NO_SPACE", "")
	}
	v := like(from)
	v.Name, v.SizeBytes, v.Labels, v.Authentication, v.CloneOf = r.Name, r.SizeBytes, maps.Clone(r.Labels), r.Authentication, from.Name
	return m.add(v), nil
}

func (m *fakeManager) CreateSnapshots(_ context.Context, r *pb.CreateSnapshotsRequest, _ ...grpc.CallOption) (*pb.CreateSnapshotsResponse, error) {
	return called(m, "CreateSnapshots", func() (*pb.CreateSnapshotsResponse, error) {
		reply := &pb.CreateSnapshotsResponse{}
		for _, one := range r.Snapshots {
			origin, err := m.find(one.Volume)
			if err != nil {
				return nil, err
			}
			name := origin.Name + "@" + one.Name
			v, err := m.find(name)
			switch {
			case err == nil && v.State == pb.VolumeState_VOLUME_STATE_DELETING:
				return nil, refusedFor("DELETING", "snapshot "+name+": is being deleted")
			case err != nil:
				v = like(origin)
				v.Name, v.Labels, v.Snapshot = name, maps.Clone(one.Labels), &pb.SnapshotOf{VolumeId: origin.Id, VolumeName: origin.Name, FsFrozen: r.Freeze && !m.old}
				v = m.add(v)
			}
			reply.Snapshots = append(reply.Snapshots, proto.CloneOf(v))
		}
		return reply, nil
	})
}

func (m *fakeManager) ListEvents(_ context.Context, r *pb.ListEventsRequest, _ ...grpc.CallOption) (*pb.ListEventsResponse, error) {
	return called(m, "ListEvents", func() (*pb.ListEventsResponse, error) {
		reply := &pb.ListEventsResponse{}
		for _, e := range m.events {
			if e.GetObject() == r.GetObject() {
				reply.Events = append(reply.Events, e)
			}
		}
		return reply, nil
	})
}

func (m *fakeManager) DeleteVolume(_ context.Context, r *pb.DeleteVolumeRequest, _ ...grpc.CallOption) (*pb.DeleteVolumeResponse, error) {
	return called(m, "DeleteVolume", func() (*pb.DeleteVolumeResponse, error) {
		v, err := m.find(r.Volume)
		switch {
		case err != nil:
			return &pb.DeleteVolumeResponse{}, nil
		case v.Attachment != nil:
			return nil, refusedFor("ATTACHED", "volume "+v.Name+": attached to "+v.Attachment.Node)
		case slices.ContainsFunc(slices.Collect(maps.Values(m.volumes)), func(c *pb.Volume) bool {
			return c.CloneOf == v.Name && c.State == pb.VolumeState_VOLUME_STATE_CREATING
		}):
			return nil, refusedFor("NOT_READY", "snapshot "+v.Name+": a clone is being created")
		}
		v.State = pb.VolumeState_VOLUME_STATE_DELETING
		return &pb.DeleteVolumeResponse{}, nil
	})
}

func (m *fakeManager) ExpandVolume(_ context.Context, r *pb.ExpandVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	return called(m, "ExpandVolume", func() (*pb.Volume, error) {
		v, err := m.find(r.Volume)
		switch {
		case err != nil:
			return nil, err
		case r.SizeBytes*uint64(v.Layout.Copies) > 60<<30:
			return nil, withDetail(codes.ResourceExhausted, "volume "+v.Name+": no space", "NO_SPACE", "")
		}
		v.ExpandingToBytes = r.SizeBytes
		return proto.CloneOf(v), nil
	})
}

func (m *fakeManager) UpdateVolume(_ context.Context, r *pb.UpdateVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	return called(m, "UpdateVolume", func() (*pb.Volume, error) {
		v, err := m.find(r.Volume)
		if err != nil {
			return nil, err
		}
		maps.Copy(v.Labels, r.SetLabels)
		for _, key := range r.RemoveLabels {
			delete(v.Labels, key)
		}
		v.Layout.Copies = cmp.Or(r.Copies, v.Layout.Copies)
		v.Authentication = cmp.Or(r.Authentication, v.Authentication)
		if r.RebuildBytesPerSecond != nil {
			v.RebuildBytesPerSecond = *r.RebuildBytesPerSecond
		}
		if r.ScrubEverySeconds != nil {
			v.ScrubEverySeconds = *r.ScrubEverySeconds
		}
		return proto.CloneOf(v), nil
	})
}

func (m *fakeManager) Attach(_ context.Context, r *pb.AttachRequest, _ ...grpc.CallOption) (*pb.Attachment, error) {
	return called(m, "Attach", func() (*pb.Attachment, error) {
		v, err := m.find(r.Volume)
		switch {
		case err != nil:
			return nil, err
		case strings.Contains(r.Node, " "):
			return nil, withDetail(codes.InvalidArgument, "node: no name", "", "node")
		case !slices.ContainsFunc(m.nodes, func(n *pb.Node) bool { return n.Name == r.Node }):
			return nil, status.Errorf(codes.NotFound, "node %s: not found", r.Node)
		case v.Attachment != nil && v.Attachment.Node != r.Node:
			return nil, refusedFor("ATTACHED_ELSEWHERE", "volume "+v.Name+": attached to "+v.Attachment.Node)
		}
		if v.Attachment == nil {
			v.Epoch++
			v.Attachment = &pb.Attachment{
				VolumeId: v.Id, VolumeName: v.Name, Node: r.Node, Mode: r.Mode, Epoch: v.Epoch,
				State: pb.AttachmentState_ATTACHMENT_STATE_GRANTING, WaitingFor: "target t1 to fence epochs below it",
			}
		}
		return proto.CloneOf(v.Attachment), nil
	})
}

func (m *fakeManager) Detach(_ context.Context, r *pb.DetachRequest, _ ...grpc.CallOption) (*pb.DetachResponse, error) {
	return called(m, "Detach", func() (*pb.DetachResponse, error) {
		v, err := m.find(r.Volume)
		if err != nil {
			return nil, err
		}
		if v.Attachment == nil || r.Node != "" && r.Node != v.Attachment.Node {
			return &pb.DetachResponse{}, nil
		}
		v.Attachment.State, v.Attachment.WaitingFor = pb.AttachmentState_ATTACHMENT_STATE_DETACHING, "host n1 to release it"
		if r.Force {
			m.forced++
			v.Epoch++
			v.Attachment, v.FenceWaitsFor = nil, []string{"target t1 to fence older epochs"}
		}
		return &pb.DetachResponse{}, nil
	})
}

func (m *fakeManager) ListAttachments(_ context.Context, r *pb.ListAttachmentsRequest, _ ...grpc.CallOption) (*pb.ListAttachmentsResponse, error) {
	return called(m, "ListAttachments", func() (*pb.ListAttachmentsResponse, error) {
		reply := &pb.ListAttachmentsResponse{}
		for _, v := range m.volumes {
			if v.Attachment != nil && (r.Node == "" || r.Node == v.Attachment.Node) {
				reply.Attachments = append(reply.Attachments, proto.CloneOf(v.Attachment))
			}
		}
		return reply, nil
	})
}

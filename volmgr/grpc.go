// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/drivepolicy"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/quorum"
)

// domain is the domain of the ErrorInfo details.
const domain = "weft.dev"

// codeOf maps kinds of refusals to gRPC codes. There is no other such table.
var codeOf = map[cluster.Kind]codes.Code{
	cluster.InvalidArgument:    codes.InvalidArgument,
	cluster.NotFound:           codes.NotFound,
	cluster.AlreadyExists:      codes.AlreadyExists,
	cluster.FailedPrecondition: codes.FailedPrecondition,
	cluster.ResourceExhausted:  codes.ResourceExhausted,
	cluster.Unimplemented:      codes.Unimplemented,
}

// toStatus converts an error for gRPC: with a field violation if a field is wrong, and an
// ErrorInfo with reason, object and hint.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	var e *cluster.Error
	var led notLeading
	switch {
	case errors.As(err, &e):
		return refusal(e)
	case errors.Is(err, ErrOutcomeUnknown):
		return detailed(codes.Unavailable, &cluster.Error{Reason: pb.ReasonOutcomeUnknown, Text: err.Error(), Hint: "repeat the command"})
	case errors.As(err, &led):
		return detailed(codes.Unavailable, led.refusal())
	case errors.Is(err, ErrStopped):
		return status.Error(codes.Unavailable, err.Error())
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	return status.Error(codes.Internal, err.Error())
}

func refusal(e *cluster.Error) error { return detailed(codeOf[e.Kind], e) }

func detailed(code codes.Code, e *cluster.Error) error {
	s := status.New(code, e.Error())
	var details []protoadapt.MessageV1
	if e.Field != "" {
		details = append(details, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
			{Field: e.Field, Description: e.Text, Reason: e.Reason},
		}})
	}
	info := &errdetails.ErrorInfo{Domain: domain, Reason: e.Reason, Metadata: maps.Clone(e.Metadata)}
	for key, value := range map[string]string{"object": e.Object, "hint": e.Hint} {
		if value != "" {
			if info.Metadata == nil {
				info.Metadata = map[string]string{}
			}
			info.Metadata[key] = value
		}
	}
	if info.Reason != "" || len(info.Metadata) > 0 {
		details = append(details, info)
	}
	with, err := s.WithDetails(details...)
	if err != nil {
		return s.Err()
	}
	return with.Err()
}

// call steps through an input and converts its result.
func call[T any, P any](ctx context.Context, m *Manager, in cluster.Input, convert func(T) P) (P, error) {
	var none P
	result, err := m.step(ctx, in)
	if err != nil {
		return none, toStatus(err)
	}
	value, ok := result.(T)
	if !ok {
		return none, status.Errorf(codes.Internal, "%T gave %T", in, result)
	}
	return convert(value), nil
}

// do steps through an input that has no result.
func do[P any](ctx context.Context, m *Manager, in cluster.Input) (*P, error) {
	if _, err := m.step(ctx, in); err != nil {
		return nil, toStatus(err)
	}
	return new(P), nil
}

// read gets a value from the state and converts it.
func read[T any, P any](ctx context.Context, m *Manager, get func(*cluster.State) (T, error), convert func(T) P) (p P, err error) {
	state, err := m.read(ctx)
	if err != nil {
		return p, toStatus(err)
	}
	value, err := get(state)
	if err != nil {
		return p, toStatus(err)
	}
	return convert(value), nil
}

// read is snapshot for a request that may ask for a consistency in its metadata. What the manager
// that leads answers meets both kinds.
func (m *Manager) read(ctx context.Context) (*cluster.State, error) {
	stale := false
	for _, how := range metadata.ValueFromIncomingContext(ctx, pb.ReadKey) {
		if how != pb.ReadLinearizable && how != pb.ReadStale {
			return nil, &cluster.Error{Kind: cluster.InvalidArgument, Field: pb.ReadKey,
				Text: fmt.Sprintf("%s: %q is neither %s nor %s", pb.ReadKey, how, pb.ReadLinearizable, pb.ReadStale)}
		}
		stale = how == pb.ReadStale
	}
	if stale && m.quorum != nil && m.quorum.Status().Role != quorum.Leader {
		return m.readStale(ctx)
	}
	return m.snapshot(ctx)
}

// field parses a field of a request; an error names it.
func field[T any](name, text string, parse func(string) (T, error)) (T, error) {
	value, err := parse(text)
	if err != nil {
		return value, toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: name, Text: name + ": " + err.Error()})
	}
	return value, nil
}

func always[T any](get func(*cluster.State) T) func(*cluster.State) (T, error) {
	return func(s *cluster.State) (T, error) { return get(s), nil }
}

// GetStatus summarizes the cluster.
func (m *Manager) GetStatus(ctx context.Context, _ *pb.GetStatusRequest) (*pb.Status, error) {
	return read(ctx, m, always((*cluster.State).Status), func(s cluster.Status) *pb.Status {
		status := pbStatus(s, m.cfg.Version)
		if m.quorum != nil {
			status.Wrong = append(m.quorum.wrong(), status.Wrong...)
		}
		return status
	})
}

// ListNodes lists the nodes.
func (m *Manager) ListNodes(ctx context.Context, r *pb.ListNodesRequest) (*pb.ListNodesResponse, error) {
	entries := func(s *cluster.State, after string) (iter.Seq2[string, cluster.Node], error) {
		return s.NodesAfter(after), nil
	}
	page, next, err := page(ctx, m, "nodes", r, entries, pbNode)
	if err != nil {
		return nil, err
	}
	return &pb.ListNodesResponse{Nodes: page, NextPageToken: next}, nil
}

// SetNodeLabels replaces the labels that an operator gave a node.
func (m *Manager) SetNodeLabels(ctx context.Context, r *pb.SetNodeLabelsRequest) (*pb.Node, error) {
	return call(ctx, m, cluster.SetNodeLabels{Node: block.NodeName(r.Node), Labels: r.Labels}, pbNode)
}

// ConfirmNodeDead records that a machine is off.
func (m *Manager) ConfirmNodeDead(ctx context.Context, r *pb.ConfirmNodeDeadRequest) (*pb.Node, error) {
	return call(ctx, m, cluster.ConfirmNodeDead{Node: block.NodeName(r.Node)}, pbNode)
}

// RemoveNode forgets a node.
func (m *Manager) RemoveNode(ctx context.Context, r *pb.RemoveNodeRequest) (*pb.RemoveNodeResponse, error) {
	return do[pb.RemoveNodeResponse](ctx, m, cluster.RemoveNode{Node: block.NodeName(r.Node)})
}

// ListDevices lists a node's inventory.
func (m *Manager) ListDevices(ctx context.Context, r *pb.ListDevicesRequest) (*pb.ListDevicesResponse, error) {
	entries := func(s *cluster.State, after string) (iter.Seq2[string, cluster.Device], error) {
		return s.DevicesAfter(block.NodeName(r.Node), after)
	}
	page, next, err := page(ctx, m, "devices", r, entries, pbDevice)
	if err != nil {
		return nil, err
	}
	return &pb.ListDevicesResponse{Devices: page, NextPageToken: next}, nil
}

// ListDrives lists drives.
func (m *Manager) ListDrives(ctx context.Context, r *pb.ListDrivesRequest) (*pb.ListDrivesResponse, error) {
	entries := func(s *cluster.State, after string) (iter.Seq2[string, cluster.Drive], error) {
		return s.DrivesAfter(block.NodeName(r.Node), after), nil
	}
	page, next, err := page(ctx, m, "drives", r, entries, pbDrive)
	if err != nil {
		return nil, err
	}
	return &pb.ListDrivesResponse{Drives: page, NextPageToken: next}, nil
}

// AddDrive adds a device as a drive.
func (m *Manager) AddDrive(ctx context.Context, r *pb.AddDriveRequest) (*pb.Drive, error) {
	in := cluster.AddDrive{Node: block.NodeName(r.Node), Device: r.Device, Labels: r.Labels, ForceErase: r.ForceErase, Seed: newSeed()}
	return call(ctx, m, in, pbDrive)
}

// SetDriveLabels replaces the labels of a drive.
func (m *Manager) SetDriveLabels(ctx context.Context, r *pb.SetDriveLabelsRequest) (*pb.Drive, error) {
	id, err := field("drive_id", r.DriveId, block.ParseDriveID)
	if err != nil {
		return nil, err
	}
	return call(ctx, m, cluster.SetDriveLabels{Drive: id, Labels: r.Labels}, pbDrive)
}

// EvictDrive removes a drive.
func (m *Manager) EvictDrive(ctx context.Context, r *pb.EvictDriveRequest) (*pb.EvictDriveResponse, error) {
	id, err := field("drive_id", r.DriveId, block.ParseDriveID)
	if err != nil {
		return nil, err
	}
	return do[pb.EvictDriveResponse](ctx, m, cluster.EvictDrive{Drive: id})
}

// DrainDrive empties a drive, or ends that.
func (m *Manager) DrainDrive(ctx context.Context, r *pb.DrainDriveRequest) (*pb.Drive, error) {
	id, err := field("drive_id", r.DriveId, block.ParseDriveID)
	if err != nil {
		return nil, err
	}
	return call(ctx, m, cluster.DrainDrive{Drive: id, Cancel: r.Cancel}, pbDrive)
}

// CordonNode keeps new legs away from a node, and can drain it.
func (m *Manager) CordonNode(ctx context.Context, r *pb.CordonNodeRequest) (*pb.Node, error) {
	return call(ctx, m, cluster.CordonNode{Node: block.NodeName(r.Node), Drain: r.Drain}, pbNode)
}

// UncordonNode ends a cordon, a drain and a maintenance.
func (m *Manager) UncordonNode(ctx context.Context, r *pb.UncordonNodeRequest) (*pb.Node, error) {
	return call(ctx, m, cluster.UncordonNode{Node: block.NodeName(r.Node)}, pbNode)
}

// MaintainNode announces that a node is switched off for a while.
func (m *Manager) MaintainNode(ctx context.Context, r *pb.MaintainNodeRequest) (*pb.Node, error) {
	return call(ctx, m, cluster.MaintainNode{Node: block.NodeName(r.Node), For: time.Duration(r.Seconds) * time.Second, Force: r.Force}, pbNode)
}

// GetDependents says which volumes in use would stop without some nodes.
func (m *Manager) GetDependents(ctx context.Context, r *pb.GetDependentsRequest) (*pb.GetDependentsResponse, error) {
	nodes := list(r.Nodes, func(name string) block.NodeName { return block.NodeName(name) })
	return read(ctx, m, func(s *cluster.State) ([]string, error) { return s.Dependents(nodes...), nil },
		func(volumes []string) *pb.GetDependentsResponse { return &pb.GetDependentsResponse{Volumes: volumes} })
}

// MoveLeg has one leg made again elsewhere.
func (m *Manager) MoveLeg(ctx context.Context, r *pb.MoveLegRequest) (*pb.Volume, error) {
	return call(ctx, m, cluster.MoveLeg{Volume: r.Volume, Column: int(r.Column), Copy: int(r.Copy), To: block.NodeName(r.To)}, pbVolume)
}

// WhatIf says what a loss would lead to. It works on a snapshot, beside the loop.
func (m *Manager) WhatIf(ctx context.Context, r *pb.WhatIfRequest) (*pb.WhatIfResponse, error) {
	loss := cluster.Loss{Labels: r.Labels}
	for _, name := range r.Nodes {
		loss.Nodes = append(loss.Nodes, block.NodeName(name))
	}
	var err error
	if loss.Drives, err = listErr(r.DriveIds, func(id string) (block.DriveID, error) { return field("drive_ids", id, block.ParseDriveID) }); err != nil {
		return nil, err
	}
	return read(ctx, m, func(s *cluster.State) (cluster.Consequences, error) { return s.WhatIf(loss) }, pbConsequences)
}

// RebalancePool begins to rebalance a pool, ends that, or says what it would do.
func (m *Manager) RebalancePool(ctx context.Context, r *pb.RebalancePoolRequest) (*pb.RebalancePoolResponse, error) {
	if r.DryRun {
		return read(ctx, m, func(s *cluster.State) ([]cluster.PlannedMove, error) { return s.PlanRebalance(r.Pool, int(r.MaxMoves)) },
			func(plan []cluster.PlannedMove) *pb.RebalancePoolResponse {
				return &pb.RebalancePoolResponse{Moves: list(plan, pbPlannedMove)}
			})
	}
	return call(ctx, m, cluster.RebalancePool{Pool: r.Pool, Stop: r.Stop, MaxMoves: int(r.MaxMoves)}, func(p cluster.Pool) *pb.RebalancePoolResponse {
		return &pb.RebalancePoolResponse{Pool: pbPool(p)}
	})
}

// CreateDrivePolicy lets devices become drives by themselves.
func (m *Manager) CreateDrivePolicy(ctx context.Context, r *pb.CreateDrivePolicyRequest) (*pb.DrivePolicy, error) {
	return call(ctx, m, cluster.CreateDrivePolicy{Policy: fromDrivePolicy(r.GetPolicy())}, pbDrivePolicy)
}

// ListDrivePolicies lists the policies, which are few.
func (m *Manager) ListDrivePolicies(ctx context.Context, _ *pb.ListDrivePoliciesRequest) (*pb.ListDrivePoliciesResponse, error) {
	return read(ctx, m, always((*cluster.State).DrivePolicies), func(all []drivepolicy.Policy) *pb.ListDrivePoliciesResponse {
		return &pb.ListDrivePoliciesResponse{Policies: list(all, pbDrivePolicy)}
	})
}

// DeleteDrivePolicy ends a policy.
func (m *Manager) DeleteDrivePolicy(ctx context.Context, r *pb.DeleteDrivePolicyRequest) (*pb.DeleteDrivePolicyResponse, error) {
	return do[pb.DeleteDrivePolicyResponse](ctx, m, cluster.DeleteDrivePolicy{Name: r.Name})
}

// CreatePool names a set of drives.
func (m *Manager) CreatePool(ctx context.Context, r *pb.CreatePoolRequest) (*pb.Pool, error) {
	return call(ctx, m, cluster.CreatePool{Name: r.Name, Selector: r.Selector}, pbPool)
}

// ListPools lists the pools.
func (m *Manager) ListPools(ctx context.Context, r *pb.ListPoolsRequest) (*pb.ListPoolsResponse, error) {
	entries := func(s *cluster.State, after string) (iter.Seq2[string, cluster.Pool], error) {
		return s.PoolsAfter(after), nil
	}
	page, next, err := page(ctx, m, "pools", r, entries, pbPool)
	if err != nil {
		return nil, err
	}
	return &pb.ListPoolsResponse{Pools: page, NextPageToken: next}, nil
}

// DeletePool forgets a pool.
func (m *Manager) DeletePool(ctx context.Context, r *pb.DeletePoolRequest) (*pb.DeletePoolResponse, error) {
	return do[pb.DeletePoolResponse](ctx, m, cluster.DeletePool{Name: r.Name})
}

// CreateVolume places a volume.
func (m *Manager) CreateVolume(ctx context.Context, r *pb.CreateVolumeRequest) (*pb.Volume, error) {
	name, err := field("name", r.Name, block.ParseVolumeName)
	if err != nil {
		return nil, err
	}
	in := cluster.CreateVolume{
		Name: name, Size: block.Size(r.SizeBytes), Copies: int(r.Copies), Stripes: int(r.Stripes), Chunk: block.Size(r.ChunkBytes),
		Pool: r.Pool, Spread: r.Spread, Labels: r.Labels, Seed: newSeed(),
		Topology: list(r.Topology, fromSegment), Preferred: list(r.Preferred, fromSegment), Data: int(r.Data), Parity: int(r.Parity),
		Authentication: r.Authentication, Integrity: r.Integrity, Thin: r.Thin, From: r.From,
	}
	return call(ctx, m, in, pbVolume)
}

// RestoreVolume makes a volume what one of its snapshots holds.
func (m *Manager) RestoreVolume(ctx context.Context, r *pb.RestoreVolumeRequest) (*pb.Volume, error) {
	return call(ctx, m, cluster.RestoreVolume{Volume: r.Volume, Snapshot: r.Snapshot, IfGeneration: r.IfGeneration, IfEpoch: block.Epoch(r.IfEpoch)}, pbVolume)
}

// FlattenVolume makes a volume independent of the snapshot as which it began.
func (m *Manager) FlattenVolume(ctx context.Context, r *pb.FlattenVolumeRequest) (*pb.Volume, error) {
	return call(ctx, m, cluster.FlattenVolume{Volume: r.Volume}, pbVolume)
}

// SealVolume makes a volume one that no host writes any more.
func (m *Manager) SealVolume(ctx context.Context, r *pb.SealVolumeRequest) (*pb.Volume, error) {
	return call(ctx, m, cluster.SealVolume{Volume: r.Volume}, pbVolume)
}

// CreateSnapshots takes snapshots at one moment.
func (m *Manager) CreateSnapshots(ctx context.Context, r *pb.CreateSnapshotsRequest) (*pb.CreateSnapshotsResponse, error) {
	in := cluster.CreateSnapshots{Seed: newSeed(), Freeze: r.Freeze, Snapshots: list(r.Snapshots, func(s *pb.NewSnapshot) cluster.NewSnapshot {
		return cluster.NewSnapshot{Volume: s.GetVolume(), Name: s.GetName(), Labels: s.GetLabels()}
	})}
	return call(ctx, m, in, func(all []cluster.Volume) *pb.CreateSnapshotsResponse {
		return &pb.CreateSnapshotsResponse{Snapshots: list(all, pbVolume)}
	})
}

func fromSegment(g *pb.Segment) cluster.Segment { return g.GetLabels() }

// GetCapacity returns the space for volumes of one kind.
func (m *Manager) GetCapacity(ctx context.Context, r *pb.GetCapacityRequest) (*pb.Capacity, error) {
	in := cluster.CreateVolume{
		Copies: int(r.Copies), Stripes: int(r.Stripes), Pool: r.Pool, Spread: r.Spread, Topology: list(r.Topology, fromSegment), Integrity: r.Integrity, Thin: r.Thin,
	}
	return read(ctx, m, func(s *cluster.State) (cluster.Capacity, error) { return s.Capacity(in) }, func(c cluster.Capacity) *pb.Capacity {
		return &pb.Capacity{
			AvailableBytes: uint64(c.Available), MaximumVolumeBytes: uint64(c.Maximum), MinimumVolumeBytes: uint64(c.Minimum),
		}
	})
}

// ExpandVolume makes a volume larger, in use or not.
func (m *Manager) ExpandVolume(ctx context.Context, r *pb.ExpandVolumeRequest) (*pb.Volume, error) {
	return call(ctx, m, cluster.ExpandVolume{Volume: r.Volume, Size: block.Size(r.SizeBytes)}, pbVolume)
}

// ScrubVolume begins to compare the copies of a volume, or pauses or stops that.
func (m *Manager) ScrubVolume(ctx context.Context, r *pb.ScrubVolumeRequest) (*pb.Volume, error) {
	return call(ctx, m, fromScrubRequest(r), pbVolume)
}

// UpdateVolume changes the properties that may change while a volume is in use.
func (m *Manager) UpdateVolume(ctx context.Context, r *pb.UpdateVolumeRequest) (*pb.Volume, error) {
	in := cluster.UpdateVolume{Volume: r.Volume, SetLabels: r.SetLabels, RemoveLabels: r.RemoveLabels, Formatted: r.Formatted, Copies: int(r.Copies), Authentication: r.Authentication,
		Paths: int(min(r.Paths, math.MaxInt32)), LateWrites: r.AcceptLateWrites}
	if r.ScrubEverySeconds != nil {
		every := time.Duration(min(*r.ScrubEverySeconds, math.MaxInt64/uint64(time.Second))) * time.Second
		in.ScrubEvery = &every
	}
	if r.ScrubBytesPerSecond != nil {
		rate := block.Size(*r.ScrubBytesPerSecond)
		in.ScrubRate = &rate
	}
	if r.RebuildBytesPerSecond != nil {
		rate := block.Size(*r.RebuildBytesPerSecond)
		in.RebuildRate = &rate
	}
	return call(ctx, m, in, pbVolume)
}

// GetVolume returns one volume.
func (m *Manager) GetVolume(ctx context.Context, r *pb.GetVolumeRequest) (*pb.Volume, error) {
	return read(ctx, m, func(s *cluster.State) (cluster.Volume, error) { return s.Volume(r.Volume) }, pbVolume)
}

// ListVolumes lists the volumes, or the snapshots.
func (m *Manager) ListVolumes(ctx context.Context, r *pb.ListVolumesRequest) (*pb.ListVolumesResponse, error) {
	entries := func(s *cluster.State, after string) (iter.Seq2[string, cluster.Volume], error) {
		if r.GetSnapshots() {
			return s.SnapshotsAfter(r.GetOf(), after)
		}
		return s.VolumesAfter(after), nil
	}
	page, next, err := page(ctx, m, "volumes", r, entries, pbVolume)
	if err != nil {
		return nil, err
	}
	return &pb.ListVolumesResponse{Volumes: page, NextPageToken: next}, nil
}

// DeleteVolume deletes a volume.
func (m *Manager) DeleteVolume(ctx context.Context, r *pb.DeleteVolumeRequest) (*pb.DeleteVolumeResponse, error) {
	return do[pb.DeleteVolumeResponse](ctx, m, cluster.DeleteVolume{Volume: r.Volume})
}

// ExplainVolume says why a volume is in its state.
func (m *Manager) ExplainVolume(ctx context.Context, r *pb.ExplainVolumeRequest) (*pb.Explanation, error) {
	return read(ctx, m, func(s *cluster.State) (cluster.Explanation, error) { return s.Explain(r.Volume) }, pbExplanation)
}

// PromoteStaleLeg makes a stale leg the only good one of its column.
func (m *Manager) PromoteStaleLeg(ctx context.Context, r *pb.PromoteStaleLegRequest) (*pb.Volume, error) {
	leg, err := field("leg_id", r.LegId, block.ParseLegID)
	if err != nil {
		return nil, err
	}
	return call(ctx, m, cluster.PromoteStaleLeg{Volume: r.Volume, Leg: leg, AcceptDataLoss: r.AcceptDataLoss}, pbVolume)
}

// Attach attaches a volume to a host.
func (m *Manager) Attach(ctx context.Context, r *pb.AttachRequest) (*pb.Attachment, error) {
	in := cluster.Attach{
		Volume: r.Volume, Node: block.NodeName(r.Node), Mode: fromEnum[cluster.AttachMode](r.Mode, attachModePrefix), KeepsRecord: r.KeepsRecord,
		Prefers: cluster.Preference{Rail: r.Rail, GPU: r.NearGpu},
	}
	return call(ctx, m, in, pbAttachment)
}

// Detach detaches a volume from its host, or cancels a detach.
func (m *Manager) Detach(ctx context.Context, r *pb.DetachRequest) (*pb.DetachResponse, error) {
	if r.Cancel && r.Force {
		return nil, status.Error(codes.InvalidArgument, "cancel: cannot be combined with force")
	}
	if r.Cancel {
		return do[pb.DetachResponse](ctx, m, cluster.CancelDetach{Volume: r.Volume, Node: block.NodeName(r.Node)})
	}
	return do[pb.DetachResponse](ctx, m, cluster.Detach{Volume: r.Volume, Node: block.NodeName(r.Node), Force: r.Force})
}

// ListAttachments lists attachments.
func (m *Manager) ListAttachments(ctx context.Context, r *pb.ListAttachmentsRequest) (*pb.ListAttachmentsResponse, error) {
	entries := func(s *cluster.State, after string) (iter.Seq2[string, cluster.Attachment], error) {
		return s.AttachmentsAfter(block.NodeName(r.Node), after), nil
	}
	page, next, err := page(ctx, m, "attachments", r, entries, pbAttachment)
	if err != nil {
		return nil, err
	}
	return &pb.ListAttachmentsResponse{Attachments: page, NextPageToken: next}, nil
}

// ListEvents lists events.
func (m *Manager) ListEvents(ctx context.Context, r *pb.ListEventsRequest) (*pb.ListEventsResponse, error) {
	entries := func(s *cluster.State, after string) (iter.Seq2[string, event.Event], error) {
		return s.EventsAfter(r.Object, r.AfterSeq, int(r.Limit), after), nil
	}
	page, next, err := page(ctx, m, "events", r, entries, pbEvent)
	if err != nil {
		return nil, err
	}
	return &pb.ListEventsResponse{Events: page, NextPageToken: next}, nil
}

// RecordStale removes legs from the in-sync sets; that is durable when it answers.
func (m *Manager) RecordStale(ctx context.Context, r *pb.RecordStaleRequest) (*pb.RecordStaleResponse, error) {
	if err := m.speaks(ctx, access.Initiator, block.NodeName(r.Node)); err != nil {
		return nil, err
	}
	volume, err := field("volume_id", r.VolumeId, block.ParseVolumeID)
	if err != nil {
		return nil, err
	}
	in := cluster.RecordStale{Node: block.NodeName(r.Node), Volume: volume, Epoch: block.Epoch(r.Epoch), Reason: r.Reason, Number: r.Number, Term: r.Term}
	if in.Legs, in.Reasons, err = staleLegs(r); err != nil {
		return nil, err
	}
	in.Revisions = staleRevisions(r)
	return call(ctx, m, in, func(r cluster.Recorded) *pb.RecordStaleResponse {
		return &pb.RecordStaleResponse{Recorded: pbTime(r.Time), EventSeq: r.EventSeq, Term: r.Term, Generation: r.Generation}
	})
}

// staleLegs returns the legs of a request, and the reasons that it gives. Hosts of older
// versions list only ids.
func staleLegs(r *pb.RecordStaleRequest) (legs []block.LegID, why map[block.LegID]cluster.StaleReason, err error) {
	if legs, err = listErr(r.LegIds, func(id string) (block.LegID, error) { return field("leg_ids", id, block.ParseLegID) }); err != nil {
		return nil, nil, err
	}
	why = map[block.LegID]cluster.StaleReason{}
	for _, l := range r.Legs {
		leg, err := field("legs.leg_id", l.LegId, block.ParseLegID)
		if err != nil {
			return nil, nil, err
		}
		if !slices.Contains(legs, leg) {
			legs = append(legs, leg)
		}
		why[leg] = cluster.StaleReason{Text: l.Text}
		if l.Reason != pb.StaleReason_STALE_REASON_UNSPECIFIED {
			why[leg] = cluster.StaleReason{Word: pb.Word(l.Reason), Text: l.Text}
		}
	}
	return legs, why, nil
}

// staleRevisions returns the revisions that a request tells, whose legs staleLegs has checked.
func staleRevisions(r *pb.RecordStaleRequest) map[block.LegID]uint64 {
	told := map[block.LegID]uint64{}
	for _, l := range r.Legs {
		if leg, err := block.ParseLegID(l.LegId); err == nil && l.Revision != 0 {
			told[leg] = l.Revision
		}
	}
	return told
}

// RecordInSync returns rebuilt legs to the in-sync sets; that is durable when it answers.
func (m *Manager) RecordInSync(ctx context.Context, r *pb.RecordInSyncRequest) (*pb.RecordInSyncResponse, error) {
	if err := m.speaks(ctx, access.Initiator, block.NodeName(r.Node)); err != nil {
		return nil, err
	}
	volume, err := field("volume_id", r.VolumeId, block.ParseVolumeID)
	if err != nil {
		return nil, err
	}
	in := cluster.RecordInSync{Node: block.NodeName(r.Node), Volume: volume, Epoch: block.Epoch(r.Epoch)}
	for _, l := range r.Legs {
		leg, err := field("legs", l.LegId, block.ParseLegID)
		if err != nil {
			return nil, err
		}
		in.Legs = append(in.Legs, cluster.RebuiltLeg{Leg: leg, Revision: l.Revision, Copied: block.Size(l.BytesCopied), What: l.What})
	}
	return call(ctx, m, in, func(r cluster.Recorded) *pb.RecordInSyncResponse {
		return &pb.RecordInSyncResponse{EventSeq: r.EventSeq, Term: r.Term, Generation: r.Generation}
	})
}

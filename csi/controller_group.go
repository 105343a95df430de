// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// A CO's group of snapshots is snapshots that Weft took at one moment, each with the CO's name of the
// group as a label. Weft itself has no groups: the group's id is made of that name, and the group is
// what has the label. Its snapshots cannot be deleted one by one, except with Weft's own commands.

// groupKeys are the parameters that the snapshotter's --extra-create-metadata sets.
var groupKeys = []string{
	provisionerPrefix + "volumegroupsnapshot/name", provisionerPrefix + "volumegroupsnapshot/namespace", provisionerPrefix + "volumegroupsnapshotcontent/name",
}

// GroupControllerGetCapabilities lists the capabilities.
func (s *controllerServer) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{{
		Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
			Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
		}},
	}}}, nil
}

// groupOf is the id of the group that a snapshot belongs to; empty if to none.
func groupOf(v *pb.Volume) string {
	name, ok := v.GetLabels()[labelGroup]
	if !ok {
		return ""
	}
	return wantedSnapshot{label: labelGroup, name: name}.weftName(1)
}

// members finds the snapshots of a group.
func (s *controllerServer) members(ctx context.Context, id string) (members, all []*pb.Volume, err error) {
	list, err := s.cfg.Manager.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true})
	if err != nil {
		return nil, nil, fromManager("group of snapshots "+id, err)
	}
	for _, v := range list.GetVolumes() {
		if groupOf(v) == id && v.State != pb.VolumeState_VOLUME_STATE_DELETING {
			members = append(members, v)
		}
	}
	return members, list.GetVolumes(), nil
}

func csiGroup(id string, members []*pb.Volume) *csi.VolumeGroupSnapshot {
	g := &csi.VolumeGroupSnapshot{GroupSnapshotId: id, ReadyToUse: true}
	for _, v := range members {
		one := csiSnapshot(v)
		g.Snapshots, g.CreationTime = append(g.Snapshots, one), one.CreationTime
		g.ReadyToUse = g.ReadyToUse && one.ReadyToUse
	}
	return g
}

// CreateVolumeGroupSnapshot answers when all snapshots are complete.
func (s *controllerServer) CreateVolumeGroupSnapshot(ctx context.Context, r *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	of := slices.Compact(slices.Sorted(slices.Values(r.GetSourceVolumeIds())))
	switch {
	case r.GetName() == "":
		return nil, status.Error(codes.InvalidArgument, "name: missing")
	case len(of) == 0 || of[0] == "":
		return nil, status.Error(codes.InvalidArgument, "source_volume_ids: missing")
	}
	w, err := wantedSnapshot{label: labelGroup, name: r.GetName()}.with(r.GetParameters(), groupKeys)
	if err != nil {
		return nil, err
	}
	end, err := s.ops.start("group "+w.weftName(1), "CreateVolumeGroupSnapshot")
	if err != nil {
		return nil, err
	}
	defer end()
	group, err := s.group(ctx, w, of)
	if err != nil {
		return nil, err
	}
	for i := range group {
		if err := w.frozen(group[i]); err != nil {
			return nil, err
		}
		if group[i], err = s.taken(ctx, group[i]); err != nil {
			return nil, err
		}
	}
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: csiGroup(w.weftName(1), group)}, nil
}

// group finds or begins a group of snapshots of these volumes.
func (s *controllerServer) group(ctx context.Context, w wantedSnapshot, of []string) ([]*pb.Volume, error) {
	members, all, err := s.members(ctx, w.weftName(1))
	if err != nil {
		return nil, err
	}
	if len(members) > 0 {
		var has []string
		for _, v := range members {
			has = append(has, v.GetSnapshot().GetVolumeId())
		}
		if slices.Sort(has); !slices.Equal(has, of) {
			return nil, status.Errorf(codes.AlreadyExists, "%s: it exists, of volumes %v, requested of %v", w.doing(), has, of)
		}
		return members, nil
	}
	var sources []*pb.Volume
	for _, id := range of {
		source, err := s.volume(ctx, id)
		if err != nil {
			return nil, err
		}
		if err := canHaveSnapshots(source, w.doing()); err != nil {
			return nil, err
		}
		sources = append(sources, source)
	}
	return s.beginSnapshots(ctx, sources, w, all)
}

// asListed returns the snapshots of a group, of which a CO has a list. That may be empty, and name some
// that are gone.
func (s *controllerServer) asListed(ctx context.Context, id string, listed []string) ([]*pb.Volume, error) {
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "group_snapshot_id: missing")
	}
	members, all, err := s.members(ctx, id)
	if err != nil || len(listed) == 0 {
		return members, err
	}
	for _, v := range members {
		if !slices.Contains(listed, v.Id) {
			return nil, status.Errorf(codes.InvalidArgument, "snapshot_ids: %s (%s) belongs to the group %s and is not among them", v.Id, v.Name, id)
		}
	}
	for _, v := range all {
		if slices.Contains(listed, v.Id) && groupOf(v) != id {
			return nil, status.Errorf(codes.InvalidArgument, "snapshot_ids: %s (%s) does not belong to the group %s", v.Id, v.Name, id)
		}
	}
	return members, nil
}

// DeleteVolumeGroupSnapshot deletes all snapshots of a group. If one is in use, a repeated call deletes
// those that are left.
func (s *controllerServer) DeleteVolumeGroupSnapshot(ctx context.Context, r *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	id := r.GetGroupSnapshotId()
	end, err := s.ops.start("group "+id, "DeleteVolumeGroupSnapshot")
	if err != nil {
		return nil, err
	}
	defer end()
	members, err := s.asListed(ctx, id, r.GetSnapshotIds())
	if err != nil {
		return nil, err
	}
	for _, v := range members {
		if _, err := s.cfg.Manager.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v.Id}); err != nil && status.Code(err) != codes.NotFound {
			return nil, fromManager("delete snapshot "+v.Id+" of the group "+id, err)
		}
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}

// GetVolumeGroupSnapshot says what a group has.
func (s *controllerServer) GetVolumeGroupSnapshot(ctx context.Context, r *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	id := r.GetGroupSnapshotId()
	members, err := s.asListed(ctx, id, r.GetSnapshotIds())
	if err != nil {
		return nil, err
	}
	if len(members) == 0 {
		return nil, status.Errorf(codes.NotFound, "group of snapshots %s: not found", id)
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: csiGroup(id, members)}, nil
}

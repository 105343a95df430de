// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// A CO's snapshot is a snapshot of Weft with the CO's name as a label. Its id is the one that Weft
// gave it: names of snapshots hold the name of their volume, and may be used again.
//
// CSI would let a driver answer before a snapshot can be used, once it is cut. A snapshot that Weft
// is still taking is not cut: each attempt to take it has another moment. So CreateSnapshot answers
// when it is complete. The manager gives up after a minute.

// wantedSnapshot is a snapshot that the driver takes, or finds.
type wantedSnapshot struct {
	of    string            // id of the volume
	label string            // labelName, labelClone or labelGroup
	name  string            // the label's value
	about map[string]string // further labels
	// freeze: hosts freeze the file systems that they have mounted from its volume.
	freeze bool
}

func (w wantedSnapshot) doing() string {
	switch w.label {
	case labelClone:
		return "take a snapshot for volume " + w.name
	case labelGroup:
		return "create group of snapshots " + w.name
	}
	return "create snapshot " + w.name
}

// weftName is the n-th name that the snapshot can have, without its volume's. One that failed keeps
// its name until its space is freed, which can wait for a target that is down. A CO's names have no
// zero bytes, so none of them becomes the same.
func (w wantedSnapshot) weftName(n int) string {
	name := w.name
	switch w.label {
	case labelClone:
		name = "clone\x00" + name
	case labelGroup:
		name = "group\x00" + name
	}
	if n > 1 {
		name = fmt.Sprintf("%s\x00%d", name, n)
	}
	return string(volumeName(name))
}

// is reports whether a snapshot is the wanted one, of whatever volume.
func (w wantedSnapshot) is(v *pb.Volume) bool {
	return v.Snapshot != nil && v.Labels[w.label] == w.name && v.State != pb.VolumeState_VOLUME_STATE_DELETING
}

// snapshot finds or begins a snapshot, which is then in whatever state but DELETING.
func (s *controllerServer) snapshot(ctx context.Context, w wantedSnapshot) (*pb.Volume, error) {
	source, missing := s.volume(ctx, w.of)
	if missing != nil && status.Code(missing) != codes.NotFound {
		return nil, missing
	}
	if source != nil {
		switch v, err := s.cfg.Manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: source.Name + "@" + w.weftName(1)}); {
		case err == nil && w.is(v) && v.Snapshot.VolumeId == w.of:
			return v, nil
		case err != nil && status.Code(err) != codes.NotFound:
			return nil, fromManager(w.doing(), err)
		}
	}
	all, err := s.cfg.Manager.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true})
	if err != nil {
		return nil, fromManager(w.doing(), err)
	}
	if v, err := w.among(all.GetVolumes()); v != nil || err != nil {
		return v, err
	}
	if missing != nil {
		return nil, missing // only now: a snapshot outlives its volume
	}
	if err := canHaveSnapshots(source, w.doing()); err != nil {
		return nil, err
	}
	if w.label == labelClone {
		s.sweep(ctx, all.GetVolumes(), w.of, s.now().Add(-leftoverAge))
	}
	return s.beginSnapshot(ctx, source, w, all.GetVolumes())
}

// among finds the wanted snapshot. A CO's name is unique among all its snapshots.
func (w wantedSnapshot) among(all []*pb.Volume) (*pb.Volume, error) {
	var other *pb.Volume
	for _, v := range all {
		switch {
		case !w.is(v):
		case v.Snapshot.VolumeId == w.of:
			return v, nil
		default:
			other = v
		}
	}
	if other == nil || w.label == labelClone {
		return nil, nil
	}
	return nil, status.Errorf(codes.AlreadyExists, "%s: it exists, of volume %s, requested of %s", w.doing(), other.Snapshot.VolumeId, w.of)
}

// canHaveSnapshots refuses a volume of which there can never be a snapshot. The manager refuses one whose
// targets cannot take it, and says what to do.
func canHaveSnapshots(v *pb.Volume, doing string) error {
	switch {
	case v.Snapshot != nil:
		return status.Errorf(codes.InvalidArgument, "%s: %s (%s) is a snapshot itself: create a volume from it instead", doing, v.Id, v.Name)
	case v.GetLayout().GetIntegrity():
		return status.Errorf(codes.FailedPrecondition, "%s: volume %s (%s) has checksums, and such volumes have no snapshots and clones: copy its data to a volume of a StorageClass without parameter %s",
			doing, v.Id, v.Name, paramIntegrity)
	}
	return nil
}

// beginSnapshot begins to take the snapshot of one volume.
func (s *controllerServer) beginSnapshot(ctx context.Context, source *pb.Volume, w wantedSnapshot, all []*pb.Volume) (*pb.Volume, error) {
	begun, err := s.beginSnapshots(ctx, []*pb.Volume{source}, w, all)
	if err != nil {
		return nil, err
	}
	return begun[0], nil
}

// beginSnapshots begins to take snapshots of volumes at one moment, under the first name that is free
// for all.
func (s *controllerServer) beginSnapshots(ctx context.Context, sources []*pb.Volume, w wantedSnapshot, all []*pb.Volume) ([]*pb.Volume, error) {
	name := w.weftName(1)
	for n := 2; slices.ContainsFunc(all, func(v *pb.Volume) bool {
		return slices.ContainsFunc(sources, func(source *pb.Volume) bool { return v.Name == source.Name+"@"+name })
	}); n++ {
		name = w.weftName(n)
	}
	labels := map[string]string{w.label: w.name}
	maps.Copy(labels, w.about)
	r := &pb.CreateSnapshotsRequest{Freeze: w.freeze}
	for _, source := range sources {
		r.Snapshots = append(r.Snapshots, &pb.NewSnapshot{Volume: source.Id, Name: name, Labels: labels})
	}
	reply, err := s.cfg.Manager.CreateSnapshots(ctx, r)
	if status.Code(err) == codes.AlreadyExists {
		return nil, status.Errorf(codes.Aborted, "%s: %s", w.doing(), status.Convert(err).Message()) // begun meanwhile; found the next time
	}
	if err != nil {
		return nil, fromManager(w.doing(), err)
	}
	for i, v := range reply.GetSnapshots() {
		if !w.is(v) || v.GetSnapshot().GetVolumeId() != sources[i].Id {
			return nil, status.Errorf(codes.Aborted, "%s: %s was taken by another meanwhile", w.doing(), v.Name)
		}
	}
	return reply.GetSnapshots(), nil
}

// taken waits until a snapshot is complete. The answer for one that could not be taken is not
// final: the CO repeats its call, which begins another one.
func (s *controllerServer) taken(ctx context.Context, v *pb.Volume) (*pb.Volume, error) {
	id, doing := v.Id, volumeDoing("take snapshot", v)
	err := await(ctx, doing, func() (string, error) {
		if v.State == pb.VolumeState_VOLUME_STATE_READY {
			return "", nil
		}
		now, err := s.cfg.Manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: id})
		switch {
		case status.Code(err) == codes.NotFound:
			return "", status.Errorf(codes.Aborted, "%s: %s", doing, s.whyGone(ctx, v))
		case err != nil:
			return "", fromManager(doing, err)
		case now.State == pb.VolumeState_VOLUME_STATE_DELETING:
			return "", status.Errorf(codes.Aborted, "%s: %s", doing, cmp.Or(now.Failed, "it was deleted meanwhile"))
		case now.State == pb.VolumeState_VOLUME_STATE_READY:
			v = now
			return "", nil
		}
		return "its volume's hosts and targets to take it", nil
	})
	return v, err
}

// whyGone is why a snapshot is gone that was to be taken, by the manager's history.
func (s *controllerServer) whyGone(ctx context.Context, v *pb.Volume) string {
	if reply, err := s.cfg.Manager.ListEvents(ctx, &pb.ListEventsRequest{Object: "volume " + v.Name, Limit: 20}); err == nil {
		for _, e := range slices.Backward(reply.GetEvents()) {
			if e.GetKind() == "snapshot.failed" && e.GetAttributes()["volume_id"] == v.Id {
				return e.GetText()
			}
		}
	}
	return "it was not taken, or was deleted meanwhile; `weft event list` says why"
}

// snapshotKeys are the parameters that the snapshotter's --extra-create-metadata sets.
var snapshotKeys = []string{
	provisionerPrefix + "volumesnapshot/name", provisionerPrefix + "volumesnapshot/namespace", provisionerPrefix + "volumesnapshotcontent/name",
}

const (
	// paramFreeze is the one parameter of classes of snapshots.
	paramFreeze = "freeze"
	// paramDeletionPolicy repeats the field deletionPolicy of a VolumeGroupSnapshotClass. Kubernetes' own
	// storage suite sets both, and so may classes that were copied from there. The snapshot-controller acts on
	// the field; the parameter changes nothing. Classes of single snapshots never have it.
	paramDeletionPolicy = "deletionPolicy"
)

// with returns what the parameters of a class ask for. Those that sidecars set become labels.
func (w wantedSnapshot) with(given map[string]string, sidecars []string) (wantedSnapshot, error) {
	w.about = map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		value := given[key]
		switch {
		case key == paramFreeze:
			if err := oneOf(value, "true", "false"); err != nil {
				return w, status.Errorf(codes.InvalidArgument, "parameters: %s: %v", key, err)
			}
			w.freeze = value == "true"
		case key == paramDeletionPolicy && w.label == labelGroup:
			if err := oneOf(value, "Delete", "Retain"); err != nil {
				return w, status.Errorf(codes.InvalidArgument, "parameters: %s: %v", key, err)
			}
		case slices.Contains(sidecars, key):
			w.about[key] = value
		default:
			return w, status.Errorf(codes.InvalidArgument, "parameters: %s: not known; a class of snapshots of this driver can have %s", key, paramFreeze)
		}
	}
	return w, nil
}

// frozen refuses a snapshot for which hosts do not freeze file systems although that is wanted.
func (w wantedSnapshot) frozen(v *pb.Volume) error {
	if !w.freeze || v.GetSnapshot().GetFreezes() || v.GetSnapshot().GetFsFrozen() {
		return nil
	}
	return status.Errorf(codes.AlreadyExists, "%s: %s exists, and was taken without freezing file systems", w.doing(), v.Name)
}

// CreateSnapshot answers when the snapshot is complete.
func (s *controllerServer) CreateSnapshot(ctx context.Context, r *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	name := r.GetName()
	switch {
	case r.GetSourceVolumeId() == "":
		return nil, status.Error(codes.InvalidArgument, "source_volume_id: missing")
	case name == "":
		return nil, status.Error(codes.InvalidArgument, "name: missing")
	}
	w, err := wantedSnapshot{of: r.GetSourceVolumeId(), label: labelName, name: name}.with(r.GetParameters(), snapshotKeys)
	if err != nil {
		return nil, err
	}
	end, err := s.ops.start("snapshot "+name, "CreateSnapshot")
	if err != nil {
		return nil, err
	}
	defer end()
	v, err := s.snapshot(ctx, w)
	if err != nil {
		return nil, err
	}
	if err := w.frozen(v); err != nil {
		return nil, err
	}
	if v, err = s.taken(ctx, v); err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: csiSnapshot(v)}, nil
}

func csiSnapshot(v *pb.Volume) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: v.Id, SourceVolumeId: v.GetSnapshot().GetVolumeId(), SizeBytes: int64(v.SizeBytes),
		CreationTime: cmp.Or(v.GetSnapshot().GetTaken(), v.GetCreated()),
		ReadyToUse:   v.State == pb.VolumeState_VOLUME_STATE_READY, GroupSnapshotId: groupOf(v),
	}
}

// DeleteSnapshot deletes a snapshot, and never a volume whose id it is given.
func (s *controllerServer) DeleteSnapshot(ctx context.Context, r *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	id := r.GetSnapshotId()
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "snapshot_id: missing")
	}
	end, err := s.ops.start(id, "DeleteSnapshot")
	if err != nil {
		return nil, err
	}
	defer end()
	switch v, err := s.volume(ctx, id); {
	case status.Code(err) == codes.NotFound:
		return &csi.DeleteSnapshotResponse{}, nil
	case err != nil:
		return nil, err
	case v.Snapshot == nil:
		return nil, status.Errorf(codes.InvalidArgument, "snapshot_id: %s (%s) is a volume and no snapshot", id, v.Name)
	case groupOf(v) != "":
		return nil, status.Errorf(codes.InvalidArgument, "snapshot_id: %s (%s) belongs to the group %s, and is deleted with it", id, v.Name, groupOf(v))
	}
	if _, err := s.cfg.Manager.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: id}); err != nil && status.Code(err) != codes.NotFound {
		return nil, fromManager("delete snapshot "+id, err)
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// GetSnapshot returns one entry of the list.
func (s *controllerServer) GetSnapshot(ctx context.Context, r *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	id := r.GetSnapshotId()
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "snapshot_id: missing")
	}
	v, err := s.volume(ctx, id)
	switch {
	case status.Code(err) == codes.NotFound, err == nil && v.Snapshot == nil:
		return nil, status.Errorf(codes.NotFound, "snapshot %s: not found", id)
	case err != nil:
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: csiSnapshot(v)}, nil
}

// ListSnapshots lists the cluster's snapshots, including those that the driver did not take, but not
// those that it takes for clones and deletes again. An id that is not known gives an empty list.
func (s *controllerServer) ListSnapshots(ctx context.Context, r *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	id, of := r.GetSnapshotId(), r.GetSourceVolumeId()
	page, next, err := s.listed(ctx, &pb.ListVolumesRequest{Snapshots: true}, r.GetMaxEntries(), r.GetStartingToken(), func(v *pb.Volume) bool {
		_, clones := v.Labels[labelClone]
		return (id == "" || v.Id == id) && (of == "" || v.GetSnapshot().GetVolumeId() == of) && !(clones && id == "")
	})
	if err != nil {
		return nil, err
	}
	reply := &csi.ListSnapshotsResponse{NextToken: next}
	for _, v := range page {
		reply.Entries = append(reply.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: csiSnapshot(v)})
	}
	return reply, nil
}

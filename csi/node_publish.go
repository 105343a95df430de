// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
)

// publishing is a request to publish a volume.
type publishing struct {
	staging
	target string
	staged staging // how the staging path is staged: a pod that only reads changes nothing of that
}

// NodePublishVolume binds the staged file system, or the device's node, to the
// target path.
func (s *nodeServer) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	req, err := s.parsePublishing(r)
	if err != nil {
		return nil, err
	}
	err = s.run(ctx, req.volume, "NodePublishVolume", func(ctx context.Context, t *task) error {
		return s.publish(ctx, t, req)
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (s *nodeServer) parsePublishing(r *csi.NodePublishVolumeRequest) (req publishing, err error) {
	if err = missingID(r.GetVolumeId()); err != nil {
		return req, err
	}
	if err = s.checkPath("target_path", r.GetTargetPath()); err != nil {
		return req, err
	}
	if r.GetVolumeCapability() == nil {
		return req, status.Error(codes.InvalidArgument, "volume_capability: missing")
	}
	if r.GetStagingTargetPath() == "" {
		return req, status.Error(codes.FailedPrecondition, "staging_target_path: missing: stage the volume first")
	}
	req.target = r.GetTargetPath()
	req.staging, err = s.parseStaging(&csi.NodeStageVolumeRequest{
		VolumeId: r.GetVolumeId(), StagingTargetPath: r.GetStagingTargetPath(), PublishContext: r.GetPublishContext(),
		VolumeCapability: r.GetVolumeCapability(), VolumeContext: r.GetVolumeContext(),
	})
	if err == nil && req.sealed && !r.GetReadonly() && !onlyReads([]*csi.VolumeCapability{r.GetVolumeCapability()}) {
		return req, status.Errorf(codes.FailedPrecondition,
			"readonly: volume %s is sealed, so that no host writes it any more: mount it with readOnly: true in the pod's persistentVolumeClaim, or write to a clone of it", req.volume)
	}
	req.staged = req.staging
	req.readOnly = req.readOnly || r.GetReadonly()
	return req, err
}

func (s *nodeServer) publish(ctx context.Context, t *task, req publishing) error {
	a, err := s.attached(ctx, t, req.volume, req.publication)
	if err != nil {
		return err
	}
	if req.path, err = s.kernel.Resolve(req.path); err != nil {
		return unavailable(a, err)
	}
	if req.target, err = s.kernel.Resolve(req.target); err != nil {
		return unavailable(a, err)
	}
	all, err := s.stageAnew(ctx, t, a, req)
	if err != nil {
		return err
	}
	if err := s.checkStaged(a, req, all); err != nil {
		return err
	}
	m, published, err := s.current(ctx, t, a, req.target)
	if err != nil {
		return err
	}
	if published {
		return publishedAlready(a, req, m)
	}
	if err := s.checkAlone(a, req, all); err != nil {
		return err
	}
	if req.block {
		if err := s.recordRaw(ctx, a, req.wanted); err != nil {
			return err
		}
		return s.bindDevice(ctx, t, a, req)
	}
	if err := t.next(ctx, "bind %s to %s", req.path, req.target); err != nil {
		return err
	}
	if err := s.kernel.MakeDir(req.target); err != nil {
		return noPlace(a, err)
	}
	return notOurs(a, s.kernel.Bind(a.number, req.path, req.target, req.readOnly))
}

// stageAnew stages the volume again if it is staged from an attachment that has ended, or if an attempt to do so
// has failed half way, so that nothing is mounted. The kubelet does that only when no pod of the node wants the
// volume any more, and a pod's successor may be there before the pod is gone. It returns what is mounted then.
func (s *nodeServer) stageAnew(ctx context.Context, t *task, a attachment, req publishing) (mount.Table, error) {
	all, err := s.kernel.Mounts()
	if err != nil || req.block {
		return all, unavailable(a, err)
	}
	if m, mounted := all.At(req.path); mounted && s.deviceOf(m) == a.number {
		return all, nil
	}
	if err := s.stage(ctx, t, req.staged); err != nil {
		return nil, err
	}
	all, err = s.kernel.Mounts()
	return all, unavailable(a, err)
}

// notOurs recognizes the error for a device that has changed since it was checked.
func notOurs(a attachment, err error) error {
	if errors.Is(err, unix.ESTALE) {
		return status.Errorf(codes.FailedPrecondition, "volume %s: %v", a.volume.Name, err)
	}
	return unavailable(a, err)
}

// checkStaged checks that the file system at the staging path is on the volume's current device: it
// may belong to an attachment that has ended.
func (s *nodeServer) checkStaged(a attachment, req publishing, all mount.Table) error {
	if req.block {
		return nil
	}
	refuse := func(format string, args ...any) error {
		args = append([]any{a.volume.Name, req.path}, args...)
		return status.Errorf(codes.FailedPrecondition, "volume %s: staging path %s: "+format, args...)
	}
	m, mounted := all.At(req.path)
	switch {
	case !mounted:
		return refuse("nothing is mounted there: it is not staged")
	case m.Device != a.number:
		return refuse("device %s is mounted there, but the volume's is %s: unstage and stage it again", m.Device, a.number)
	case req.fsType != "" && m.FSType != req.fsType:
		return refuse("%s is mounted there, not %s as requested", m.FSType, req.fsType)
	case m.ReadOnly() && !req.readOnly:
		return refuse("it is mounted read-only there")
	}
	return nil
}

// publishedAlready answers for a target that already has the volume.
func publishedAlready(a attachment, req publishing, m mount.Mount) error {
	isNode := m.Device != a.number
	switch {
	case isNode != req.block || !req.block && m.Root != "/":
		return status.Errorf(codes.AlreadyExists, "volume %s: it is already published at %s in another way than requested", a.volume.Name, req.target)
	case m.ReadOnly() != req.readOnly:
		return status.Errorf(codes.AlreadyExists, "volume %s: it is already published at %s with read-only %v instead of %v", a.volume.Name, req.target, m.ReadOnly(), req.readOnly)
	}
	return nil
}

// checkAlone checks that a volume for a single writer is at one target only. It looks at mounts, so
// the rule survives a restart. The kubelet binds a raw device once more for itself, after the
// target and for the same pod; a second pod's target is published before its own such bind, and
// finds both mounts of the first.
func (s *nodeServer) checkAlone(a attachment, req publishing, all mount.Table) error {
	if !req.alone {
		return nil
	}
	var others mount.Table
	if req.block {
		others = s.nodesOf(all, a.number)
	} else {
		var staged []mount.Place
		if m, ok := all.At(req.path); ok {
			staged = append(staged, all.Place(m))
		}
		others = all.FileSystemOn(a.number, staged...)
	}
	if len(others) > 0 {
		return status.Errorf(codes.FailedPrecondition, "volume %s: it has a single writer, and it is mounted on %s", a.volume.Name, others.Points())
	}
	return nil
}

// bindDevice binds the device's node to the target file while holding the device open.
func (s *nodeServer) bindDevice(ctx context.Context, t *task, a attachment, req publishing) error {
	if err := t.next(ctx, "bind %s to %s", a.Device, req.target); err != nil {
		return err
	}
	d, err := s.open(ctx, a)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := s.kernel.MakeFile(req.target); err != nil {
		return noPlace(a, err)
	}
	return notOurs(a, s.kernel.BindDisk(d, req.target, req.readOnly))
}

// NodeUnpublishVolume removes the target.
func (s *nodeServer) NodeUnpublishVolume(ctx context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	id, target := r.GetVolumeId(), r.GetTargetPath()
	if err := missingID(id); err != nil {
		return nil, err
	}
	if err := s.checkPath("target_path", target); err != nil {
		return nil, err
	}
	err := s.run(ctx, id, "NodeUnpublishVolume", func(ctx context.Context, t *task) error {
		return s.unpublish(ctx, t, id, target)
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (s *nodeServer) unpublish(ctx context.Context, t *task, id, target string) error {
	target, err := s.kernel.Resolve(target)
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	if _, err := s.unmountAll(ctx, t, id, target, func(mount.Table, mount.Mount) error { return nil }); err != nil {
		return err
	}
	if err := s.kernel.Remove(target); err != nil {
		return status.Errorf(codes.Internal, "volume %s: unmounted, but the mount point could not be removed: %v", id, err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// creation is a CreateVolumeRequest after parsing.
type creation struct {
	name    string // the name given by the CO
	sizes   sizeRange
	size    block.Size // the size of a new volume
	params  parameters
	place   placement
	mutable *pb.UpdateVolumeRequest
	source  contentSource

	class        map[string]string // the parameters as given
	capabilities []*csi.VolumeCapability
	text         string // the parameters, with what the request says of them alone
}

// parseCreate checks everything that can be checked without the manager.
func parseCreate(r *csi.CreateVolumeRequest, clusterID string) (c creation, err error) {
	c.name, c.class, c.capabilities = r.GetName(), r.GetParameters(), r.GetVolumeCapabilities()
	if c.name == "" {
		return c, status.Error(codes.InvalidArgument, "name: missing")
	}
	if c.source, err = parseSource(r.GetVolumeContentSource()); err != nil {
		return c, err
	}
	if c.params, err = parseParameters(r.GetParameters()); err != nil {
		return c, err
	}
	if c.mutable, err = parseMutable(r.GetMutableParameters()); err != nil {
		return c, err
	}
	// A VolumeAttributesClass says more of a volume than its StorageClass.
	c.params.copies = cmp.Or(c.mutable.Copies, c.params.copies)
	c.params.authentication = cmp.Or(c.mutable.Authentication, c.params.authentication)
	copies := c.params.copies
	if c.source.kind != "" {
		copies = 1 // are those of the source: see like
	}
	if err := checkCapabilities(c.capabilities, copies, c.params.fsType); err != nil {
		return c, err
	}
	if c.sizes, err = parseRange(r.GetCapacityRange()); err != nil {
		return c, err
	}
	if c.size, err = c.sizes.choose(); err != nil {
		return c, err
	}
	c.place, err = parseTopology(clusterID, r.GetAccessibilityRequirements())
	c.text = c.params.text(c.place)
	return c, err
}

func (c creation) doing() string { return "create volume " + c.name }

// request is the request to the manager.
func (c creation) request() *pb.CreateVolumeRequest {
	labels := map[string]string{labelName: c.name, labelParameters: c.text}
	if c.source.kind != "" {
		labels[labelSource] = c.source.text()
	}
	maps.Copy(labels, c.params.about)
	maps.Copy(labels, c.mutable.SetLabels)
	return &pb.CreateVolumeRequest{
		Name: string(volumeName(c.name)), SizeBytes: uint64(c.size),
		Copies: c.params.copies, Stripes: c.params.stripes, ChunkBytes: uint64(c.params.chunk),
		Pool: c.params.pool, Spread: c.params.spread, Labels: labels,
		Authentication: c.params.authentication, Integrity: c.params.integrity, Thin: c.params.thin,
		Topology: c.place.required, Preferred: c.place.preferred,
	}
}

// differs compares the request with the volume of its name.
func (c creation) differs(v *pb.Volume) error {
	conflict := func(format string, args ...any) error {
		return status.Errorf(codes.AlreadyExists, "%s: volume %s exists, %s", c.doing(), v.Id, fmt.Sprintf(format, args...))
	}
	have, want := v.Labels[labelParameters], c.text
	switch {
	case v.Labels[labelName] != c.name:
		return conflict("but was not created by this driver for this name")
	case sourceOf(v) != c.source:
		return conflict("created from %q, requested from %q", sourceOf(v).text(), c.source.text())
	case have != want:
		return conflict("created with %s, requested with %s", have, want)
	case !c.sizes.holds(block.Size(v.SizeBytes)):
		return conflict("with %d bytes, requested with %d to %d", v.SizeBytes, uint64(c.sizes.required), uint64(c.sizes.limit))
	}
	return nil
}

// CreateVolume answers when the volume is ready: every leg is allocated and zeroed.
func (s *controllerServer) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	clusterID, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	c, err := parseCreate(r, clusterID)
	if err != nil {
		return nil, err
	}
	end, err := s.ops.start(c.name, "CreateVolume")
	if err != nil {
		return nil, err
	}
	defer end()
	v, err := s.findOrCreate(ctx, c)
	if err != nil {
		return nil, err
	}
	if v, err = s.scheduled(ctx, v, c); err != nil {
		return nil, err
	}
	if v, err = s.created(ctx, v); err != nil {
		return nil, err
	}
	if err := s.dropOf(ctx, v); err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId: v.Id, ContentSource: c.source.csi(), CapacityBytes: int64(v.SizeBytes), VolumeContext: c.params.volumeContext(),
		AccessibleTopology: c.place.accessible(clusterID),
	}}, nil
}

// scheduled gives a volume what its VolumeAttributesClass says of rebuilds and scrubs, which a
// volume has not from its creation on. It may be repeated.
func (s *controllerServer) scheduled(ctx context.Context, v *pb.Volume, c creation) (*pb.Volume, error) {
	u := &pb.UpdateVolumeRequest{
		Volume: v.Id, RebuildBytesPerSecond: c.mutable.RebuildBytesPerSecond,
		ScrubEverySeconds: c.mutable.ScrubEverySeconds, ScrubBytesPerSecond: c.mutable.ScrubBytesPerSecond,
	}
	if u.RebuildBytesPerSecond == nil && u.ScrubEverySeconds == nil && u.ScrubBytesPerSecond == nil {
		return v, nil
	}
	v, err := s.cfg.Manager.UpdateVolume(ctx, u)
	if err != nil {
		return nil, fromManager(c.doing(), err)
	}
	return v, nil
}

// findOrCreate returns the volume of a request, in whatever state. It searches before it creates: a
// volume that has since grown or got other labels is still the requested one.
func (s *controllerServer) findOrCreate(ctx context.Context, c creation) (*pb.Volume, error) {
	v, err := s.cfg.Manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: string(volumeName(c.name))})
	switch {
	case status.Code(err) == codes.NotFound:
		if v, err = s.create(ctx, c); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, fromManager(c.doing(), err)
	}
	logVolume(ctx, v.Id)
	if v.State == pb.VolumeState_VOLUME_STATE_DELETING {
		return nil, status.Errorf(codes.Aborted, "%s: volume %s, which had the name, is being deleted", c.doing(), v.Id)
	}
	return v, c.differs(v)
}

// create creates the volume of a request.
func (s *controllerServer) create(ctx context.Context, c creation) (*pb.Volume, error) {
	if c.source.kind != "" {
		return s.clone(ctx, c)
	}
	if err := c.checkSchedule(); err != nil {
		return nil, err
	}
	v, err := s.cfg.Manager.CreateVolume(ctx, c.request())
	if err != nil {
		return nil, s.creationRefused(ctx, c, err)
	}
	return v, nil
}

// checkSchedule refuses what the manager would refuse once the volume is there: then nobody would delete the
// volume, since the CO takes such an answer for one after which there is none.
func (c creation) checkSchedule() error {
	if every := c.mutable.ScrubEverySeconds; every == nil || *every == 0 || c.params.copies > 1 {
		return nil
	}
	return status.Errorf(codes.InvalidArgument, "mutable_parameters: %s: the volume has one copy: there is nothing to compare it with", paramScrubEvery)
}

// creationRefused adds the distinctions that the manager's answer does not make.
func (s *controllerServer) creationRefused(ctx context.Context, c creation, err error) error {
	switch st := status.Convert(err); {
	case infoOf(st).GetReason() == pb.ReasonNoPool:
		return status.Errorf(codes.InvalidArgument, "parameters: %s: %s", paramPool, st.Message())
	case st.Code() == codes.AlreadyExists:
		// Another process was faster; a repeated request finds the volume that it created.
		return status.Errorf(codes.Aborted, "%s: %s", c.doing(), st.Message())
	case st.Code() == codes.ResourceExhausted && fieldOf(st) == block.PropertyCopies.Field:
		// Too few nodes have the class's label, or have different values of it. Nodes may get the
		// label later, so the request is not at fault.
		return status.Errorf(codes.ResourceExhausted, "parameters: %s=%s, %s=%d: %s: %s", paramSpread, c.params.spread, paramCopies, c.params.copies, c.doing(), st.Message())
	case st.Code() == codes.ResourceExhausted:
		if whole, ok := s.wholePool(ctx, c.params); ok && c.size > whole {
			return status.Errorf(codes.OutOfRange, "%s: %d bytes in %d copies do not fit on pool %s even when it is empty: %d bytes at most",
				c.doing(), uint64(c.size), c.params.copies, c.params.pool, uint64(whole))
		}
	}
	return fromManager(c.doing(), err)
}

// wholePool is the total size of volumes with this many copies that a pool could hold if it were
// empty.
func (s *controllerServer) wholePool(ctx context.Context, p parameters) (block.Size, bool) {
	all, err := s.cfg.Manager.ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil {
		return 0, false
	}
	for _, pool := range all.GetPools() {
		if pool.Name == p.pool {
			return block.Size(pool.CapacityBytes / uint64(p.copies)), true
		}
	}
	return 0, false
}

// created waits until a volume is ready.
func (s *controllerServer) created(ctx context.Context, v *pb.Volume) (*pb.Volume, error) {
	id, doing := v.Id, volumeDoing("create", v)
	err := await(ctx, doing, func() (string, error) {
		if v.State == pb.VolumeState_VOLUME_STATE_READY {
			return "", nil
		}
		now, err := s.volume(ctx, id)
		if status.Code(err) == codes.NotFound {
			return "", status.Errorf(codes.Aborted, "%s: it was deleted meanwhile", doing)
		}
		if err != nil {
			return "", err
		}
		v = now
		return creatingWaits(v), nil
	})
	return v, err
}

// creatingWaits says what a volume waits for; empty once it is ready.
func creatingWaits(v *pb.Volume) string {
	if v.State == pb.VolumeState_VOLUME_STATE_READY {
		return ""
	}
	for _, l := range v.Legs {
		if l.Reason != "" {
			return l.Reason
		}
	}
	return "its legs to be zeroed"
}

// DeleteVolume answers when the deletion is recorded. The manager frees the extents afterwards; for
// those on a target that is down, this waits until the target is up again.
func (s *controllerServer) DeleteVolume(ctx context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id := r.GetVolumeId()
	end, err := s.ops.start(id, "DeleteVolume")
	if err != nil {
		return nil, err
	}
	defer end()
	v, err := s.found(ctx, id)
	switch {
	case status.Code(err) == codes.NotFound:
		return &csi.DeleteVolumeResponse{}, nil
	case err != nil:
		return nil, err
	case v.Snapshot != nil:
		return nil, status.Errorf(codes.InvalidArgument, "volume_id: %s (%s) is a snapshot and no volume", id, v.Name)
	}
	if v.State != pb.VolumeState_VOLUME_STATE_DELETING {
		if err := s.deleteWhole(ctx, v); err != nil {
			return nil, err
		}
	}
	// The manager keeps the snapshot of a clone that is being created, until now.
	if err := s.dropOf(ctx, v); err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// deleteWhole deletes a volume, and what clones of it left: nobody looks for that any more.
func (s *controllerServer) deleteWhole(ctx context.Context, v *pb.Volume) error {
	doing := "delete volume " + v.Id
	if !v.GetLayout().GetIntegrity() {
		all, err := s.cfg.Manager.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true, Of: v.Id})
		if err != nil && status.Code(err) != codes.NotFound {
			return fromManager(doing, err)
		}
		s.sweep(ctx, all.GetVolumes(), v.Id, s.now())
	}
	if _, err := s.cfg.Manager.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v.Id}); err != nil && status.Code(err) != codes.NotFound {
		return fromManager(doing, err)
	}
	return nil
}

// ValidateVolumeCapabilities confirms what the volume supports, whatever it was created for.
func (s *controllerServer) ValidateVolumeCapabilities(ctx context.Context, r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if len(r.GetVolumeCapabilities()) == 0 {
		return nil, cmp.Or(missingID(r.GetVolumeId()), status.Error(codes.InvalidArgument, "volume_capabilities: missing"))
	}
	v, err := s.volume(ctx, r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	why := ""
	if err := checkCapabilities(r.GetVolumeCapabilities(), v.GetLayout().GetCopies(), r.GetVolumeContext()[contextFSType]); err != nil {
		why = status.Convert(err).Message()
	} else if _, err := parseParameters(r.GetParameters()); err != nil {
		why = status.Convert(err).Message()
	} else if _, err := parseMutable(r.GetMutableParameters()); err != nil {
		why = status.Convert(err).Message()
	} else if v.GetSealed() != nil && !onlyReads(r.GetVolumeCapabilities()) {
		why = "volume_capabilities: the volume is sealed, and no host writes it any more"
	}
	if why != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: why}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: r.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(),
		Parameters: r.GetParameters(), MutableParameters: r.GetMutableParameters(),
	}}, nil
}

func missingID(id string) error {
	if id == "" {
		return status.Error(codes.InvalidArgument, "volume_id: missing")
	}
	return nil
}

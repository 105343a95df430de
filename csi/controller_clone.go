// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// A volume that begins as a snapshot is a clone of it, for Weft too. One that begins as a volume is a
// clone of a snapshot that the driver takes for it:
//
//	take snapshot  ──►  create clone  ──►  clone READY  ──►  delete snapshot
//
// The snapshot has the clone's name as a label, so a call that was cut goes on where it was. It is
// left over if the CO gives up in between and never deletes the clone. Then it goes with the next
// clone of its volume, a while later, or with the volume.
//
// A clone has the layout and the place of its snapshot. A parameter of its StorageClass that says
// otherwise is refused, since what it promises would not be kept; one that is not given is that of the
// snapshot. Only copies may be more than the class says: an operator may have added some, and a class
// with just as many would have to be made before anything could be restored.

const (
	kindSnapshot = "snapshot"
	kindVolume   = "volume"
	// leftoverAge is how old a snapshot for a clone is that nobody comes back for.
	leftoverAge = time.Hour
)

// contentSource is what a new volume begins as; the zero value: as zeroes.
type contentSource struct {
	kind string
	id   string
}

// parseSource checks a CO's source.
func parseSource(r *csi.VolumeContentSource) (contentSource, error) {
	if r == nil {
		return contentSource{}, nil
	}
	c := contentSource{kindSnapshot, r.GetSnapshot().GetSnapshotId()}
	if r.GetVolume() != nil {
		c = contentSource{kindVolume, r.GetVolume().GetVolumeId()}
	}
	switch {
	case r.GetType() == nil:
		return c, status.Error(codes.InvalidArgument, "volume_content_source: must be a snapshot or a volume")
	case c.id == "":
		return c, status.Errorf(codes.InvalidArgument, "volume_content_source: %s_id: missing", c.kind)
	}
	return c, nil
}

// text is the value of a volume's label; empty for a volume that began as zeroes.
func (c contentSource) text() string {
	if c.kind == "" {
		return ""
	}
	return c.kind + ":" + c.id
}

// csi is the inverse of parseSource.
func (c contentSource) csi() *csi.VolumeContentSource {
	switch c.kind {
	case kindSnapshot:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: c.id}}}
	case kindVolume:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: c.id}}}
	}
	return nil
}

// sourceOf is the source that a volume was created with.
func sourceOf(v *pb.Volume) contentSource {
	kind, id, _ := strings.Cut(v.GetLabels()[labelSource], ":")
	return contentSource{kind, id}
}

// origin finds the source of a new volume, and returns the request made to fit it.
func (s *controllerServer) origin(ctx context.Context, c creation) (*pb.Volume, creation, error) {
	v, err := s.volume(ctx, c.source.id)
	if status.Code(err) == codes.NotFound {
		return nil, c, status.Errorf(codes.NotFound, "volume_content_source: %s %s: not found", c.source.kind, c.source.id)
	}
	if err != nil {
		return nil, c, err
	}
	if c.source.kind == kindSnapshot && v.Snapshot == nil {
		return nil, c, status.Errorf(codes.InvalidArgument, "volume_content_source: %s (%s) is no snapshot", v.Id, v.Name)
	}
	if c.source.kind == kindVolume {
		if err := canHaveSnapshots(v, c.doing()); err != nil {
			return nil, c, status.Errorf(codes.InvalidArgument, "volume_content_source: %s", status.Convert(err).Message())
		}
	}
	if c, err = c.like(v); err != nil {
		return nil, c, err
	}
	return v, c, s.inPlace(ctx, c, v)
}

// like returns the request with what a clone has of its source; an error is InvalidArgument, or
// OutOfRange if the volume would have to be smaller.
func (c creation) like(v *pb.Volume) (creation, error) {
	if err := c.contradicts(v); err != nil {
		return c, err
	}
	l := v.GetLayout()
	c.params.copies, c.params.stripes, c.params.chunk = l.GetCopies(), l.GetStripes(), block.Size(l.GetChunkBytes())
	c.params.pool, c.params.spread, c.params.thin = v.Pool, v.Spread, true
	if !c.given(paramAuthentication) && c.mutable.Authentication == "" {
		c.params.authentication = v.Authentication
	}
	if err := checkCapabilities(c.capabilities, c.params.copies, c.params.fsType); err != nil {
		return c, err
	}
	if c.size = block.Size(v.SizeBytes); c.sizes.limit != 0 && c.sizes.limit < c.size {
		return c, status.Errorf(codes.OutOfRange, "capacity_range: limit_bytes %d is below %d, the size of %s", uint64(c.sizes.limit), v.SizeBytes, v.Name)
	}
	if c.sizes.required <= c.size {
		return c, nil
	}
	var err error
	c.size, err = c.sizes.choose()
	return c, err
}

func (c creation) given(parameter string) bool { _, ok := c.class[parameter]; return ok }

// contradicts refuses parameters that a clone cannot have.
//
// Branches: one for each parameter.
func (c creation) contradicts(v *pb.Volume) error {
	differs := func(parameter string, asked, is any) error {
		return status.Errorf(codes.InvalidArgument, "parameters: %s: %v, but %s (%s) has %v, and a volume that begins as it has its layout and place: use a StorageClass that says so or does not say",
			parameter, asked, v.Id, v.Name, is)
	}
	p, l := c.params, v.GetLayout()
	switch {
	case (c.given(paramCopies) || c.mutable.Copies != 0) && p.copies > l.GetCopies():
		return differs(paramCopies, p.copies, l.GetCopies())
	case p.stripes != 0 && p.stripes != l.GetStripes():
		return differs(paramStripes, p.stripes, l.GetStripes())
	case c.given(paramChunk) && uint64(p.chunk) != l.GetChunkBytes():
		return differs(paramChunk, p.chunk, block.Size(l.GetChunkBytes()))
	case c.given(paramPool) && p.pool != v.Pool:
		return differs(paramPool, p.pool, v.Pool)
	case c.given(paramSpread) && p.spread != v.Spread:
		return differs(paramSpread, p.spread, v.Spread)
	case p.integrity != l.GetIntegrity():
		return differs(paramIntegrity, p.integrity, l.GetIntegrity())
	case c.given(paramThin) && !p.thin:
		return differs(paramThin, p.thin, true)
	}
	return c.otherFileSystem(v)
}

// otherFileSystem refuses a file system other than the one that the source is known to have: the
// node would refuse to mount it.
func (c creation) otherFileSystem(v *pb.Volume) error {
	if !slices.Contains(fileSystems, v.Formatted) {
		return nil
	}
	for _, r := range c.capabilities {
		if fs := cmp.Or(r.GetMount().GetFsType(), c.params.fsType); r.GetMount() != nil && fs != "" && fs != v.Formatted {
			return status.Errorf(codes.InvalidArgument, "volume_capability: fs_type: %s, but %s (%s) has %s: use a StorageClass with %sfstype: %s",
				fs, v.Id, v.Name, v.Formatted, provisionerPrefix, v.Formatted)
		}
	}
	return nil
}

// inPlace refuses a source whose legs are not where the legs of the volume must be: those of a clone
// are there. A snapshot that is taken for it has those in sync.
func (s *controllerServer) inPlace(ctx context.Context, c creation, v *pb.Volume) error {
	if len(c.place.required) == 0 {
		return nil
	}
	all, err := s.cfg.Manager.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return fromManager(c.doing(), err)
	}
	within := map[string]bool{}
	for _, n := range all.GetNodes() {
		within[n.Name] = slices.ContainsFunc(c.place.required, func(s *pb.Segment) bool {
			for label, value := range s.Labels {
				if n.Labels[label] != value && (label != nodeLabel || n.Name != value) {
					return false
				}
			}
			return true
		})
	}
	for _, l := range v.Legs {
		if l.State == pb.LegState_LEG_STATE_DELETING || c.source.kind == kindVolume && l.State != pb.LegState_LEG_STATE_IN_SYNC {
			continue
		}
		if !within[l.Node] {
			return status.Errorf(codes.ResourceExhausted, "accessibility_requirements: %s: %s (%s) has a leg on %s, which is elsewhere, and a volume that begins as it is in the same place", c.doing(), v.Id, v.Name, l.Node)
		}
	}
	return nil
}

// clone creates the volume of a request that has a source.
func (s *controllerServer) clone(ctx context.Context, c creation) (*pb.Volume, error) {
	from, c, err := s.origin(ctx, c)
	if err == nil {
		err = c.checkSchedule()
	}
	if err != nil {
		return nil, err
	}
	if c.source.kind == kindVolume {
		if from, err = s.snapshot(ctx, wantedSnapshot{of: c.source.id, label: labelClone, name: c.name}); err != nil {
			return nil, err
		}
		if from, err = s.taken(ctx, from); err != nil {
			return nil, err
		}
	}
	v, err := s.cfg.Manager.CreateVolume(ctx, c.requestFrom(from))
	if err == nil {
		return v, nil
	}
	err = s.creationRefused(ctx, c, err)
	if c.source.kind == kindVolume && !mayGoOn(err) {
		if left := s.drop(ctx, c.name, from.Id); left != nil {
			logOf(ctx).Warn("the snapshot for a clone is left", "snapshot", from.Name, "err", left)
		}
	}
	return nil, err
}

// requestFrom is request for a clone.
func (c creation) requestFrom(snapshot *pb.Volume) *pb.CreateVolumeRequest {
	r := c.request()
	return &pb.CreateVolumeRequest{Name: r.Name, SizeBytes: r.SizeBytes, Labels: r.Labels, Authentication: r.Authentication, From: snapshot.Id}
}

// mayGoOn reports whether, after this answer, the CO repeats the call soon, and what it began may
// still take effect.
func mayGoOn(err error) bool {
	return slices.Contains([]codes.Code{codes.Unavailable, codes.Aborted, codes.Canceled, codes.DeadlineExceeded}, status.Code(err))
}

// dropOf deletes the snapshot that was taken for a clone, if it is still there. Somebody who uses it
// keeps it: the clone is whole without.
func (s *controllerServer) dropOf(ctx context.Context, clone *pb.Volume) error {
	if sourceOf(clone).kind != kindVolume || clone.CloneOf == "" {
		return nil
	}
	err := s.drop(ctx, clone.Labels[labelName], clone.CloneOf)
	if err == nil || mayGoOn(err) {
		return err
	}
	logOf(ctx).Warn("the snapshot for a clone is left", "snapshot", clone.CloneOf, "err", err)
	return nil
}

// drop deletes a snapshot if it was taken for the clone of this name.
func (s *controllerServer) drop(ctx context.Context, clone, snapshot string) error {
	doing := fmt.Sprintf("delete the snapshot %s, taken for volume %s", snapshot, clone)
	v, err := s.cfg.Manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: snapshot})
	switch {
	case status.Code(err) == codes.NotFound:
		return nil
	case err != nil:
		return fromManager(doing, err)
	case !(wantedSnapshot{label: labelClone, name: clone}).is(v):
		return nil
	}
	if _, err = s.cfg.Manager.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v.Id}); status.Code(err) == codes.NotFound {
		return nil
	}
	return fromManager(doing, err)
}

// sweep deletes the snapshots that clones left, of one volume and from before a time. Those of clones
// under way stay: of this driver it knows them, and the manager keeps one whose clone is being created.
func (s *controllerServer) sweep(ctx context.Context, all []*pb.Volume, of string, before time.Time) {
	for _, v := range all {
		name, ok := v.Labels[labelClone]
		if !ok || v.GetSnapshot().GetVolumeId() != of || v.GetCreated().AsTime().After(before) {
			continue
		}
		end, err := s.ops.start(name, "delete a snapshot that is left over")
		if err == nil {
			err = s.drop(ctx, name, v.Id)
			end()
		}
		if err != nil {
			logOf(ctx).Debug("a snapshot for a clone stays", "snapshot", v.Name, "err", err)
		}
	}
}

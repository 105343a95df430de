// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// cursor is a place in the list of volumes, which is sorted by time of creation. So a volume
// created between two pages comes on the last page, and deleting one, even the cursor's own, makes
// no other volume appear twice or not at all.
type cursor struct {
	created time.Time
	id      block.VolumeID
}

func cursorOf(v *pb.Volume) (cursor, error) {
	id, err := block.ParseVolumeID(v.Id)
	return cursor{v.GetCreated().AsTime(), id}, err
}

func (c cursor) compare(o cursor) int {
	return cmp.Or(c.created.Compare(o.created), bytes.Compare(c.id.UUID[:], o.id.UUID[:]))
}

func (c cursor) token() string { return fmt.Sprintf("%d.%s", c.created.UnixNano(), c.id) }

// parseToken is the inverse of token; an error is Aborted.
func parseToken(token string) (cursor, error) {
	nanos, id, _ := strings.Cut(token, ".")
	n, err := strconv.ParseInt(nanos, 10, 64)
	volume, idErr := block.ParseVolumeID(id)
	c := cursor{time.Unix(0, n), volume}
	if err != nil || idErr != nil || c.token() != token {
		return c, status.Errorf(codes.Aborted, "starting_token: %q was not issued by this driver: start again", token)
	}
	return c, nil
}

// listed returns the volumes of one page, and the token of the next. It omits volumes that are
// being deleted, which no longer exist for a CO, and those that keep rejects.
func (s *controllerServer) listed(ctx context.Context, what *pb.ListVolumesRequest, most int32, token string, keep func(*pb.Volume) bool) (page []*pb.Volume, next string, err error) {
	if most < 0 {
		return nil, "", status.Errorf(codes.InvalidArgument, "max_entries: %d is negative", most)
	}
	after := cursor{created: time.Unix(0, math.MinInt64)}
	if token != "" {
		if after, err = parseToken(token); err != nil {
			return nil, "", err
		}
	}
	all, err := s.cfg.Manager.ListVolumes(ctx, what)
	if err != nil {
		return nil, "", fromManager("list volumes", err)
	}
	page, cursors, err := sortedVolumes(all.GetVolumes(), after, keep)
	if err != nil {
		return nil, "", status.Errorf(codes.Unavailable, "list volumes: %v", err)
	}
	if n := int(most); n > 0 && len(page) > n {
		return page[:n], cursors[page[n-1]].token(), nil
	}
	return page, "", nil
}

func sortedVolumes(all []*pb.Volume, after cursor, keep func(*pb.Volume) bool) ([]*pb.Volume, map[*pb.Volume]cursor, error) {
	cursors := map[*pb.Volume]cursor{}
	var kept []*pb.Volume
	for _, v := range all {
		c, err := cursorOf(v)
		if err != nil {
			return nil, nil, err
		}
		if v.State != pb.VolumeState_VOLUME_STATE_DELETING && c.compare(after) > 0 && keep(v) {
			cursors[v] = c
			kept = append(kept, v)
		}
	}
	slices.SortFunc(kept, func(a, b *pb.Volume) int { return cursors[a].compare(cursors[b]) })
	return kept, cursors, nil
}

// ListVolumes lists the cluster's volumes, including those that the driver did not create.
func (s *controllerServer) ListVolumes(ctx context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	page, next, err := s.listed(ctx, &pb.ListVolumesRequest{}, r.GetMaxEntries(), r.GetStartingToken(), func(*pb.Volume) bool { return true })
	if err != nil {
		return nil, err
	}
	reply := &csi.ListVolumesResponse{NextToken: next}
	for _, v := range page {
		reply.Entries = append(reply.Entries, &csi.ListVolumesResponse_Entry{
			Volume: csiVolume(v), Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: publishedNodes(v)},
		})
	}
	return reply, nil
}

func csiVolume(v *pb.Volume) *csi.Volume {
	return &csi.Volume{VolumeId: v.Id, CapacityBytes: int64(v.SizeBytes), ContentSource: sourceOf(v).csi()}
}

// publishedNodes lists all nodes that may have the volume, including those that are releasing it.
func publishedNodes(v *pb.Volume) []string {
	var nodes []string
	for _, a := range attachments(v) {
		nodes = append(nodes, a.Node)
	}
	slices.Sort(nodes)
	return nodes
}

// ControllerGetVolume returns one entry of the list.
func (s *controllerServer) ControllerGetVolume(ctx context.Context, r *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	v, err := s.volume(ctx, r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{
		Volume: csiVolume(v), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: publishedNodes(v)},
	}, nil
}

// GetCapacity returns the total size of volumes of a class that could be created in a segment.
func (s *controllerServer) GetCapacity(ctx context.Context, r *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	p, err := parseParameters(classParameters(r.GetParameters()))
	if err != nil {
		return nil, err
	}
	none := &csi.GetCapacityResponse{MaximumVolumeSize: wrap(0)}
	if caps := r.GetVolumeCapabilities(); len(caps) > 0 && checkCapabilities(caps, p.copies, p.fsType) != nil {
		return none, nil
	}
	clusterID, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	ask := &pb.GetCapacityRequest{Copies: p.copies, Stripes: p.stripes, Pool: p.pool, Spread: p.spread, Integrity: p.integrity, Thin: p.thin}
	if t := r.GetAccessibleTopology(); t != nil {
		segment, own, here, err := parseSegments(clusterID, t)
		switch {
		case err != nil:
			return nil, err
		case !here:
			return none, nil
		case !own && len(segment.Labels) > 0:
			// As in CreateVolume, a node's own segment does not restrict the place.
			ask.Topology = []*pb.Segment{segment}
		}
	}
	c, err := s.cfg.Manager.GetCapacity(ctx, ask)
	if status.Code(err) == codes.NotFound {
		return nil, status.Errorf(codes.InvalidArgument, "parameters: %s: %s", paramPool, status.Convert(err).Message())
	}
	if err != nil {
		return nil, fromManager("ask for the capacity", err)
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: clamp(c.AvailableBytes), MaximumVolumeSize: wrap(clamp(c.MaximumVolumeBytes)),
		MinimumVolumeSize: wrap(clamp(c.MinimumVolumeBytes)),
	}, nil
}

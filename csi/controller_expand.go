// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// ControllerExpandVolume answers when the volume has grown: its legs and, for a raw block volume in
// use, the device on each node, since a CO does not ask the node again then. For a file system, the
// node service waits for its device itself.
func (s *controllerServer) ControllerExpandVolume(ctx context.Context, r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	id := r.GetVolumeId()
	switch {
	case id == "":
		return nil, missingID(id)
	case r.GetCapacityRange() == nil:
		return nil, status.Error(codes.InvalidArgument, "capacity_range: missing")
	}
	sizes, err := parseRange(r.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	end, err := s.ops.start(id, "ControllerExpandVolume")
	if err != nil {
		return nil, err
	}
	defer end()
	v, err := s.volume(ctx, id)
	if err != nil {
		return nil, err
	}
	if r.GetVolumeCapability() != nil {
		if _, err := attachMode(r.GetVolumeCapability(), v.GetLayout().GetCopies()); err != nil {
			return nil, err
		}
	}
	raw := r.GetVolumeCapability().GetBlock() != nil
	if v, err = s.expand(ctx, v, sizes); err != nil {
		return nil, err
	}
	end() // the wait keeps no node from letting the volume go, which may be what it waits for
	if v, err = s.grown(ctx, v, raw); err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: int64(v.SizeBytes), NodeExpansionRequired: !raw}, nil
}

// expand asks for a size, unless the volume has it or is growing to it.
func (s *controllerServer) expand(ctx context.Context, v *pb.Volume, sizes sizeRange) (*pb.Volume, error) {
	doing := volumeDoing("expand", v)
	becomes := block.Size(max(v.SizeBytes, v.ExpandingToBytes))
	switch {
	case sizes.holds(becomes):
		return v, nil
	case sizes.required <= becomes: // so the limit is below this
		return nil, status.Errorf(codes.OutOfRange, "%s: it has %d bytes, more than limit_bytes %d: volumes cannot shrink", doing, uint64(becomes), uint64(sizes.limit))
	}
	size, err := sizes.choose()
	if err != nil {
		return nil, err
	}
	grown, err := s.cfg.Manager.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: v.Id, SizeBytes: uint64(size)})
	if status.Code(err) == codes.ResourceExhausted {
		p := parameters{pool: v.Pool, copies: max(1, v.GetLayout().GetCopies())}
		if whole, ok := s.wholePool(ctx, p); ok && size > whole {
			return nil, status.Errorf(codes.OutOfRange, "%s: %d bytes do not fit on pool %s even when it is empty: %d bytes at most", doing, uint64(size), v.Pool, uint64(whole))
		}
	}
	return grown, fromManager(doing, err)
}

// grown waits until a volume has grown and, if devices is set, until the devices of its hosts have
// too.
func (s *controllerServer) grown(ctx context.Context, v *pb.Volume, devices bool) (*pb.Volume, error) {
	doing, size := volumeDoing("expand", v), max(v.SizeBytes, v.ExpandingToBytes)
	err := await(ctx, doing, func() (string, error) {
		if waits := growingWaits(v, size, devices); waits == "" {
			return "", nil
		}
		now, err := s.volume(ctx, v.Id)
		if err != nil {
			return "", err
		}
		v = now
		return growingWaits(v, size, devices), nil
	})
	return v, err
}

// growingWaits says what a growing volume waits for; empty once it has grown.
func growingWaits(v *pb.Volume, size uint64, devices bool) string {
	if v.SizeBytes < size {
		return fmt.Sprintf("its legs to grow to %d bytes", size)
	}
	for _, a := range attachments(v) {
		// An attachment that is not complete yet will get the new size.
		if devices && a.State == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED && a.SizeBytes < size {
			return fmt.Sprintf("the device of node %s to grow to %d bytes: %s", a.Node, size, cmp.Or(a.WaitingFor, "it has "+fmt.Sprint(a.SizeBytes)))
		}
	}
	return ""
}

// ControllerModifyVolume changes the copies, labels, authentication, rebuilds or scrubs of a volume,
// in use or not. It answers when the decision is durable; new copies are made after that.
func (s *controllerServer) ControllerModifyVolume(ctx context.Context, r *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	id := r.GetVolumeId()
	if err := missingID(id); err != nil {
		return nil, err
	}
	update, err := parseMutable(r.GetMutableParameters())
	if err != nil {
		return nil, err
	}
	end, err := s.ops.start(id, "ControllerModifyVolume")
	if err != nil {
		return nil, err
	}
	defer end()
	if _, err := s.volume(ctx, id); err != nil {
		return nil, err
	}
	update.Volume = id
	if _, err := s.cfg.Manager.UpdateVolume(ctx, update); err != nil {
		return nil, fromManager("modify volume "+id, err)
	}
	return &csi.ControllerModifyVolumeResponse{}, nil
}

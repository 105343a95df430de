// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// A tool for backups asks which ranges of a snapshot hold data, and which differ from an earlier snapshot
// of the same volume, so that it reads no others (CSI's service SnapshotMetadata). Ranges have any length,
// in multiples of 4 KiB. A range that is not named is zero, or the same in both. One that is named may be, too.

// mostRanges is how many ranges one message has at most, if the CO does not ask for fewer.
const mostRanges = 4096

// rangesQuestion is what a CO asks.
type rangesQuestion struct {
	snapshot, base string // ids; base empty: none
	offset         int64
	most           int32
}

func (q rangesQuestion) doing() string {
	if q.base == "" {
		return "list the data of snapshot " + q.snapshot
	}
	return fmt.Sprintf("list what differs between snapshots %s and %s", q.base, q.snapshot)
}

func (q rangesQuestion) check() error {
	switch {
	case q.offset < 0:
		return status.Errorf(codes.OutOfRange, "starting_offset %d: below 0", q.offset)
	case q.most < 0:
		return status.Errorf(codes.InvalidArgument, "max_results %d: below 0", q.most)
	}
	return nil
}

// GetMetadataAllocated streams the ranges of a snapshot that hold data.
func (s *controllerServer) GetMetadataAllocated(r *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	if r.GetSnapshotId() == "" {
		return status.Error(codes.InvalidArgument, "snapshot_id: missing")
	}
	q := rangesQuestion{snapshot: r.GetSnapshotId(), offset: r.GetStartingOffset(), most: r.GetMaxResults()}
	return s.ranges(stream.Context(), q, func(size int64, some []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: size, BlockMetadata: some})
	})
}

// GetMetadataDelta streams the ranges in which a snapshot may differ from another one of the same volume.
// If that is deleted it is not found, and the CO takes a whole backup.
func (s *controllerServer) GetMetadataDelta(r *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	switch {
	case r.GetBaseSnapshotId() == "":
		return status.Error(codes.InvalidArgument, "base_snapshot_id: missing")
	case r.GetTargetSnapshotId() == "":
		return status.Error(codes.InvalidArgument, "target_snapshot_id: missing")
	}
	q := rangesQuestion{snapshot: r.GetTargetSnapshotId(), base: r.GetBaseSnapshotId(), offset: r.GetStartingOffset(), most: r.GetMaxResults()}
	return s.ranges(stream.Context(), q, func(size int64, some []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataDeltaResponse{BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: size, BlockMetadata: some})
	})
}

// readable finds a snapshot that is complete.
func (s *controllerServer) readable(ctx context.Context, id string) (*pb.Volume, error) {
	v, err := s.volume(ctx, id)
	switch {
	case status.Code(err) == codes.NotFound:
		return nil, status.Errorf(codes.NotFound, "snapshot %s: not found", id)
	case err != nil:
		return nil, err
	case v.Snapshot == nil:
		return nil, status.Errorf(codes.NotFound, "snapshot %s: it is volume %s and no snapshot", id, v.Name)
	case v.State != pb.VolumeState_VOLUME_STATE_READY:
		return nil, status.Errorf(codes.FailedPrecondition, "snapshot %s: it is not complete yet", id)
	}
	return v, nil
}

// ranges asks the manager, part by part, and sends what it answers. A stream without ranges has one
// message, which tells the size.
func (s *controllerServer) ranges(ctx context.Context, q rangesQuestion, send func(size int64, some []*csi.BlockMetadata) error) error {
	if err := s.answerable(ctx, q); err != nil {
		return err
	}
	most, sent := int(q.most), false
	if most == 0 || most > mostRanges {
		most = mostRanges
	}
	at := uint64(q.offset) / uint64(block.MapUnit) * uint64(block.MapUnit) // a range that is named again is read again
	for {
		answer, err := s.cfg.Manager.GetSnapshotRanges(ctx, &pb.GetSnapshotRangesRequest{Snapshot: q.snapshot, Since: q.base, Offset: at})
		if err != nil {
			return fromManager(q.doing(), err)
		}
		some, end := q.after(answer.GetRanges()), answer.GetNextOffset() >= answer.GetSizeBytes()
		for len(some) > 0 || end && !sent {
			n := min(len(some), most)
			if err := send(int64(answer.GetSizeBytes()), some[:n]); err != nil {
				return err
			}
			some, sent = some[n:], true
		}
		switch {
		case end:
			return nil
		case answer.GetNextOffset() <= at:
			return status.Errorf(codes.Unavailable, "%s: the manager does not get beyond byte %d", q.doing(), at)
		}
		at = answer.GetNextOffset()
	}
}

// answerable refuses a question that has no answer.
func (s *controllerServer) answerable(ctx context.Context, q rangesQuestion) error {
	if err := q.check(); err != nil {
		return err
	}
	of, err := s.readable(ctx, q.snapshot)
	if err == nil && q.base != "" {
		_, err = s.readable(ctx, q.base)
	}
	if err == nil && uint64(q.offset) > of.SizeBytes {
		err = status.Errorf(codes.OutOfRange, "starting_offset %d: the snapshot has %d bytes", q.offset, of.SizeBytes)
	}
	return err
}

// after are the ranges that do not end before the question's offset.
func (q rangesQuestion) after(all []*pb.ByteRange) (some []*csi.BlockMetadata) {
	for _, x := range all {
		if int64(x.GetOffset()+x.GetBytes()) > q.offset {
			some = append(some, &csi.BlockMetadata{ByteOffset: int64(x.GetOffset()), SizeBytes: int64(x.GetBytes())})
		}
	}
	return some
}

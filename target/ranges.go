// SPDX-License-Identifier: Apache-2.0

package target

import (
	"fmt"
	"math"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// rangesMost is how many ranges an answer has at most: some 100 KiB.
const rangesMost = 8192

// rangesOf answers where a leg of a snapshot holds data, or differs from another one.
func rangesOf(drives *openDrives, q *pb.RangesQuestion) *pb.RangesAnswer {
	answer, err := findRanges(drives, q)
	if err != nil {
		return &pb.RangesAnswer{Failed: err.Error()}
	}
	return answer
}

func findRanges(drives *openDrives, q *pb.RangesQuestion) (*pb.RangesAnswer, error) {
	on, err := block.ParseDriveID(q.GetDriveId())
	if err != nil {
		return nil, err
	}
	leg, err := block.ParseLegID(q.GetLegId())
	if err != nil {
		return nil, err
	}
	var since block.LegID
	if q.GetSinceLegId() != "" {
		if since, err = block.ParseLegID(q.GetSinceLegId()); err != nil {
			return nil, err
		}
	}
	if q.GetOffset() > q.GetEndOffset() || q.GetEndOffset() > math.MaxInt64 {
		return nil, fmt.Errorf("%d to %d: %w", q.GetOffset(), q.GetEndOffset(), block.ErrRange)
	}
	d, release, err := drives.take(on)
	if err != nil {
		return nil, err
	}
	defer release()
	p, ok := d.(planted)
	if !ok {
		return nil, errNoTrees
	}
	found, next, err := p.Ranges(leg, since, int64(q.GetOffset()), int64(q.GetEndOffset()), int(min(q.GetMost(), rangesMost)))
	if err != nil {
		return nil, err
	}
	answer := &pb.RangesAnswer{NextOffset: uint64(next)}
	for _, r := range found {
		answer.Ranges = append(answer.Ranges, &pb.ByteRange{Offset: uint64(r.Off), Bytes: uint64(r.End - r.Off)})
	}
	return answer, nil
}

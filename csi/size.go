// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
)

const (
	minSize     = block.MiB // the manager's smallest volume
	roundSize   = block.MiB
	sizeUnit    = 4 * block.KiB // the manager accepts no other sizes
	defaultSize = block.GiB     // if a CO asks for no size
)

// sizeRange is the size that a CO asks for; limit 0 means no limit.
type sizeRange struct {
	required, limit block.Size
}

// parseRange checks a range; an error is InvalidArgument, or OutOfRange if no volume can have such
// a size.
func parseRange(r *csi.CapacityRange) (sizeRange, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return sizeRange{}, status.Errorf(codes.InvalidArgument, "capacity_range: %d to %d bytes: must not be negative", required, limit)
	case limit > 0 && limit < required:
		return sizeRange{}, status.Errorf(codes.InvalidArgument, "capacity_range: limit_bytes %d is below required_bytes %d", limit, required)
	case required > math.MaxInt64-int64(roundSize):
		return sizeRange{}, status.Errorf(codes.OutOfRange, "capacity_range: required_bytes %d is more than a volume can have", required)
	}
	return sizeRange{block.Size(required), block.Size(limit)}, nil
}

// choose returns the size of a new volume for this range: the required one, or else the default,
// rounded up to whole MiB, or to a smaller unit if the limit is close.
func (r sizeRange) choose() (block.Size, error) {
	want := r.required
	if want == 0 {
		want = defaultSize
		if r.limit > 0 {
			want = min(want, r.limit/sizeUnit*sizeUnit)
		}
	}
	want = max(want, minSize)
	for _, unit := range []block.Size{roundSize, sizeUnit} {
		if size := want.RoundUp(unit); r.limit == 0 || size <= r.limit {
			return size, nil
		}
	}
	return 0, status.Errorf(codes.OutOfRange, "capacity_range: no size from %d to %d bytes is possible: sizes are multiples of %v, and at least %v",
		uint64(r.required), uint64(r.limit), sizeUnit, minSize)
}

// holds reports whether a volume of this size satisfies the range.
func (r sizeRange) holds(size block.Size) bool {
	return size >= r.required && (r.limit == 0 || size <= r.limit)
}

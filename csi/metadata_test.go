// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// mappedManager is a manager whose snapshot has 4 KiB of data in each MiB of its first ten, except the third. It
// tells of three MiB at a time. Since another snapshot, the seventh MiB differs.
type mappedManager struct {
	*fakeManager
	stands bool // it does not get on
}

func (m mappedManager) GetSnapshotRanges(_ context.Context, r *pb.GetSnapshotRangesRequest, _ ...grpc.CallOption) (*pb.GetSnapshotRangesResponse, error) {
	v, err := m.find(r.GetSnapshot())
	if err != nil {
		return nil, err
	}
	end := min(v.SizeBytes, r.GetOffset()/mib*mib+3*mib)
	answer := &pb.GetSnapshotRangesResponse{NextOffset: end, SizeBytes: v.SizeBytes}
	if m.stands {
		answer.NextOffset = r.GetOffset()
	}
	for at := r.GetOffset() / mib * mib; at < end; at += mib {
		if n := at / mib; n < 10 && n != 2 && (r.GetSince() == "" || n == 6) && at+4096 > r.GetOffset() {
			answer.Ranges = append(answer.Ranges, &pb.ByteRange{Offset: at, Bytes: 4096})
		}
	}
	return answer, nil
}

// collected is what a stream was sent.
type collected[M any] struct {
	grpc.ServerStream
	ctx  context.Context
	all  []M
	fail error
}

func (c *collected[M]) Context() context.Context { return c.ctx }
func (c *collected[M]) Send(m M) error {
	c.all = append(c.all, m)
	return c.fail
}

func TestASnapshotsDataIsListed(t *testing.T) {
	m := mappedManager{fakeManager: newFakeManager()}
	d, err := New(Config{Manager: m, Mode: ModeController})
	if err != nil {
		t.Fatal(err)
	}
	id := func(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }
	snapshot := func(n int) {
		m.volumes[id(n)] = &pb.Volume{Id: id(n), Name: fmt.Sprintf("db1@s%d", n), SizeBytes: 16 * mib, State: pb.VolumeState_VOLUME_STATE_READY, Snapshot: &pb.SnapshotOf{VolumeId: id(9)}}
	}
	snapshot(1)
	snapshot(2)
	m.volumes[id(9)] = &pb.Volume{Id: id(9), Name: "db1", SizeBytes: 16 * mib, State: pb.VolumeState_VOLUME_STATE_READY}

	allocated := func(r *csi.GetMetadataAllocatedRequest) (at []int64, longest int, err error) {
		c := &collected[*csi.GetMetadataAllocatedResponse]{ctx: t.Context()}
		err = d.controller.GetMetadataAllocated(r, c)
		for _, x := range c.all {
			if x.GetVolumeCapacityBytes() != 16*mib || x.GetBlockMetadataType() != csi.BlockMetadataType_VARIABLE_LENGTH {
				t.Errorf("a message is %v", x)
			}
			longest = max(longest, len(x.GetBlockMetadata()))
			for _, b := range x.GetBlockMetadata() {
				at = append(at, b.GetByteOffset()/mib)
			}
		}
		return at, longest, err
	}
	for name, c := range map[string]struct {
		offset  int64
		most    int32
		want    string
		longest int
	}{
		"all":                {0, 0, "[0 1 3 4 5 6 7 8 9]", 3},
		"two at a time":      {0, 2, "[0 1 3 4 5 6 7 8 9]", 2},
		"from a range on":    {4 * mib, 0, "[4 5 6 7 8 9]", 3},
		"from within one":    {4*mib + 1, 0, "[4 5 6 7 8 9]", 3},
		"from the end of it": {4*mib + 4096, 0, "[5 6 7 8 9]", 3},
		"behind the last":    {12 * mib, 0, "[]", 0},
		"at the end":         {16 * mib, 0, "[]", 0},
	} {
		at, longest, err := allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: id(1), StartingOffset: c.offset, MaxResults: c.most})
		if err != nil || fmt.Sprint(at) != c.want || longest > max(c.longest, 0) {
			t.Errorf("%s: data in MiB %v, at most %d in a message, %v; want %s and %d", name, at, longest, err, c.want, c.longest)
		}
	}
	for name, c := range map[string]struct {
		r    *csi.GetMetadataAllocatedRequest
		want codes.Code
	}{
		"no id":             {&csi.GetMetadataAllocatedRequest{}, codes.InvalidArgument},
		"no such snapshot":  {&csi.GetMetadataAllocatedRequest{SnapshotId: id(7)}, codes.NotFound},
		"no id of Weft":     {&csi.GetMetadataAllocatedRequest{SnapshotId: "x"}, codes.NotFound},
		"a volume":          {&csi.GetMetadataAllocatedRequest{SnapshotId: id(9)}, codes.NotFound},
		"before the start":  {&csi.GetMetadataAllocatedRequest{SnapshotId: id(1), StartingOffset: -1}, codes.OutOfRange},
		"beyond the end":    {&csi.GetMetadataAllocatedRequest{SnapshotId: id(1), StartingOffset: 16*mib + 1}, codes.OutOfRange},
		"fewer than nobody": {&csi.GetMetadataAllocatedRequest{SnapshotId: id(1), MaxResults: -1}, codes.InvalidArgument},
	} {
		if _, _, err := allocated(c.r); status.Code(err) != c.want {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}

	delta := &collected[*csi.GetMetadataDeltaResponse]{ctx: t.Context()}
	if err := d.controller.GetMetadataDelta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: id(1), TargetSnapshotId: id(2)}, delta); err != nil || len(delta.all) != 1 || delta.all[0].GetBlockMetadata()[0].GetByteOffset() != 6*mib {
		t.Errorf("the difference is %v, %v", delta.all, err)
	}
	for name, r := range map[string]*csi.GetMetadataDeltaRequest{
		"no base": {TargetSnapshotId: id(2)}, "no target": {BaseSnapshotId: id(1)}, "a base that is gone": {BaseSnapshotId: id(7), TargetSnapshotId: id(2)},
	} {
		if err := d.controller.GetMetadataDelta(r, delta); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	broken := &collected[*csi.GetMetadataDeltaResponse]{ctx: t.Context(), fail: errors.New("the CO has gone")}
	if err := d.controller.GetMetadataDelta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: id(1), TargetSnapshotId: id(2)}, broken); err == nil || len(broken.all) != 1 {
		t.Errorf("after the CO has gone: %v, %d messages", err, len(broken.all))
	}

	d, err = New(Config{Manager: mappedManager{m.fakeManager, true}, Mode: ModeController})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: id(1)}); status.Code(err) != codes.Unavailable {
		t.Errorf("a manager that does not get on: %v", err)
	}
}

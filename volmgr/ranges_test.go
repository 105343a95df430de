// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"math/rand/v2"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/support"
	"weft.dev/weft/raid"
	"weft.dev/weft/volmgr/cluster"
)

// Each unit of a volume is set by a coin. The ranges of its columns, in answers of any length, give it
// back.
func TestRangesOfColumnsAreThoseOfTheVolume(t *testing.T) {
	const unit = 16 * block.KiB
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		l := block.Layout{Stripes: 1 + r.IntN(4), Copies: 1, Chunk: 64 * block.KiB << r.IntN(3)}
		size := block.Size(1+r.IntN(300)) * unit
		want := make([]bool, size/unit)
		for i := range want {
			want[i] = r.IntN(3) == 0
		}
		got := make([]bool, len(want))
		last := int64(0)
		for offset := block.Size(0); offset < size; {
			var columns []columnRanges
			for k := range l.Stripes {
				columns = append(columns, columnOf(r, l, size, k, offset, want))
			}
			found, next := ofVolume(l, size, offset, columns)
			if block.Size(next) <= offset || next > int64(size) {
				t.Fatalf("%v of %v: from %v on the answer ends at %d", size, l, offset, next)
			}
			for _, one := range found {
				if one.Off < last || one.End <= one.Off || one.End > next {
					t.Fatalf("%v of %v: %v after %d, up to %d", size, l, one, last, next)
				}
				for at := one.Off; at < one.End; at += int64(unit) {
					got[at/int64(unit)] = true
				}
				last = one.End
			}
			offset = block.Size(next)
		}
		for i := range want {
			if want[i] != got[i] {
				t.Fatalf("%v of %v: unit %d is named: %v, want %v", size, l, i, got[i], want[i])
			}
		}
	}
}

// columnOf is an answer about a column, with some ranges.
func columnOf(r *rand.Rand, l block.Layout, size block.Size, column int, offset block.Size, set []bool) (c columnRanges) {
	const unit = int64(16 * block.KiB)
	most := 1 + r.IntN(8)
	for at := inColumn(l, column, offset); at < int64(l.LegSize(size)); at += unit {
		in := raid.Offset(l, raid.Place{Column: column, Offset: block.Size(at)})
		if in >= size || !set[in/block.Size(unit)] {
			continue
		}
		if n := len(c.found); n > 0 && c.found[n-1].End == at {
			c.found[n-1].End += unit
			continue
		}
		if len(c.found) == most {
			c.next = at
			return c
		}
		c.found = append(c.found, block.Range{Off: at, End: at + unit})
	}
	c.next = int64(l.LegSize(size))
	return c
}

func TestATargetSaysWhereALegHasData(t *testing.T) {
	r := &rig{t: t, dir: initialized(t)}
	r.adjust = func(m *Manager) { r.manager = m }
	r.start()
	defer func() { r.stop() }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	about := &pb.RangesQuestion{LegId: "leg", Offset: 4096, EndOffset: 1 << 20, Most: 3}
	ask := func() (*pb.RangesAnswer, error) {
		return r.manager.support.askRanges(ctx, agentName{"t1", targetWord}, cluster.AgentStatus{}, about)
	}
	if _, err := ask(); err == nil || !strings.Contains(err.Error(), "away") {
		t.Errorf("without an agent: %v", err)
	}
	old, stop := context.WithCancel(ctx)
	r.answers(old, "t1", support.File{Name: "a.txt"}) // an agent of an earlier version
	if _, err := ask(); err == nil || !strings.Contains(err.Error(), "earlier version") {
		t.Errorf("of an earlier agent: %v", err)
	}
	stop()
	failed := ""
	a := &support.Agent{Manager: r.agents, Node: "t1", Source: pb.SupportSource_SUPPORT_SOURCE_TARGET, Ranges: func(_ context.Context, q *pb.RangesQuestion) *pb.RangesAnswer {
		return &pb.RangesAnswer{Ranges: []*pb.ByteRange{{Offset: q.GetOffset(), Bytes: uint64(q.GetMost())}}, NextOffset: q.GetEndOffset(), Failed: failed}
	}}
	go a.Run(ctx)
	var answer *pb.RangesAnswer
	var err error
	eventually(t, "the agent answers", func() bool {
		answer, err = ask()
		return err == nil
	})
	if len(answer.GetRanges()) != 1 || answer.GetRanges()[0].GetOffset() != 4096 || answer.GetRanges()[0].GetBytes() != 3 || answer.GetNextOffset() != 1<<20 {
		t.Errorf("the answer is %v", answer)
	}
}

func TestRangesThatAreRefused(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	r.attachNew(ctx, "db1")
	for _, c := range []struct {
		ask  *pb.GetSnapshotRangesRequest
		want codes.Code
	}{{&pb.GetSnapshotRangesRequest{Snapshot: "db1@mon"}, codes.NotFound}, {&pb.GetSnapshotRangesRequest{Snapshot: "db1"}, codes.InvalidArgument}, {&pb.GetSnapshotRangesRequest{}, codes.NotFound}} {
		if _, err := r.GetSnapshotRanges(ctx, c.ask); status.Code(err) != c.want {
			t.Errorf("GetSnapshotRanges(%v): %v, want %v", c.ask, err, c.want)
		}
	}
}

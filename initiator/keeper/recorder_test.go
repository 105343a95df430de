// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// clerk is a manager that records, or answers err.
type clerk struct {
	pb.AgentsClient
	err    error
	stale  []*pb.RecordStaleRequest
	inSync []*pb.RecordInSyncRequest
}

func (c *clerk) RecordStale(_ context.Context, r *pb.RecordStaleRequest, _ ...grpc.CallOption) (*pb.RecordStaleResponse, error) {
	c.stale = append(c.stale, r)
	return nil, c.err
}

func (c *clerk) RecordInSync(_ context.Context, r *pb.RecordInSyncRequest, _ ...grpc.CallOption) (*pb.RecordInSyncResponse, error) {
	c.inSync = append(c.inSync, r)
	return nil, c.err
}

// tally is a Meter that remembers.
type tally struct {
	lost     int
	resynced block.Size
	stalls   [][3]time.Duration
}

func (m *tally) LegLost()              { m.lost++ }
func (m *tally) Resynced(n block.Size) { m.resynced += n }
func (m *tally) Stalled(detect, record, release time.Duration) {
	m.stalls = append(m.stalls, [3]time.Duration{detect, record, release})
}

func newTestRecorder(manager pb.AgentsClient, m Meter) *Recorder {
	return NewRecorder("c1", block.VolumeID{}, manager, m, slog.New(slog.DiscardHandler))
}

func legID(column, copy int) block.LegID {
	return block.LegID{UUID: block.UUIDFromRandom([16]byte{1, byte(column), byte(copy)})}
}

func do(r Request) error { return r.Done(r.Send(context.Background())) }

// A lost leg is counted once, however often the manager is asked, and the steps of its stall
// are reported when the writes continue.
func TestALossIsTimedFromSilenceToRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		manager, meter := &clerk{err: status.Error(codes.Unavailable, "no quorum")}, &tally{}
		r, records := newTestRecorder(manager, meter), volume.NewRecords()
		leg := volume.Change{Leg: legID(1, 0), Revision: 7, Column: 1, Why: volume.Loss{Reason: volume.NoAnswer, Text: "silent"}, Since: time.Now()}
		time.Sleep(2 * time.Second)
		if err := do(r.Stale(3, records, []volume.Change{leg})); err == nil || r.Refusal() != "no quorum" || r.Due() {
			t.Errorf("refused: %v, refusal %q, due %v; want an error, its words, and not due", err, r.Refusal(), r.Due())
		}
		r.ReleasedColumn(1)
		if len(meter.stalls) > 0 || records.Stale(&volume.Link{Leg: leg.Leg, Revision: 7}) {
			t.Errorf("a loss that was not recorded counts as recorded")
		}
		time.Sleep(RetryInterval)
		if !r.Due() {
			t.Errorf("not due %v after a refusal", RetryInterval)
		}
		manager.err = nil
		if err := do(r.Stale(3, records, []volume.Change{leg})); err != nil || r.Refusal() != "" || !records.Stale(&volume.Link{Leg: leg.Leg, Revision: 7}) {
			t.Errorf("recorded: %v, refusal %q; want neither, and the leg stale", err, r.Refusal())
		}
		time.Sleep(time.Second)
		r.ReleasedColumn(0) // another column
		r.ReleasedColumn(1)
		r.Released(leg.Leg) // it is reported only once
		want := &tally{lost: 1, stalls: [][3]time.Duration{{2 * time.Second, RetryInterval, time.Second}}}
		if d := cmp.Diff(want, meter, cmp.AllowUnexported(tally{})); d != "" {
			t.Errorf("the meter is off (-want +got):\n%s", d)
		}
		request := &pb.RecordStaleRequest{Node: "c1", VolumeId: block.VolumeID{}.String(), Epoch: 3, LegIds: []string{leg.Leg.String()}, Reason: "silent",
			Legs: []*pb.StaleLeg{{LegId: leg.Leg.String(), Reason: pb.StaleReason_STALE_REASON_NO_ANSWER, Text: "silent", Revision: leg.Revision}}}
		if d := cmp.Diff([]*pb.RecordStaleRequest{request, request}, manager.stale, protocmp.Transform()); d != "" {
			t.Errorf("requests (-want +got):\n%s", d)
		}
	})
}

func TestALossIsForgottenWithItsEpoch(t *testing.T) {
	meter := &tally{}
	r := newTestRecorder(&clerk{}, meter)
	leg := volume.Change{Leg: legID(0, 1), Why: volume.Loss{Reason: volume.IOError, Text: "error"}}
	if err := do(r.Stale(3, volume.NewRecords(), []volume.Change{leg})); err != nil {
		t.Fatal(err)
	}
	r.Forget()
	if r.Released(leg.Leg); len(meter.stalls) > 0 {
		t.Error("a loss of an epoch that has ended is released")
	}
}

func TestALegThatCaughtUpCountsOnceItIsRecorded(t *testing.T) {
	manager, meter := &clerk{err: status.Error(codes.Aborted, "wrong revision")}, &tally{}
	r, records := newTestRecorder(manager, meter), volume.NewRecords()
	leg := volume.Change{Leg: legID(0, 1), Revision: 8, Copied: block.MiB}
	link := &volume.Link{Leg: leg.Leg, Revision: 8, Rebuilding: true}
	if err := do(r.InSync(3, records, []volume.Change{leg})); err == nil || meter.resynced > 0 || records.InSync(link) {
		t.Errorf("refused: %v, %v resynced, in sync %v", err, meter.resynced, records.InSync(link))
	}
	manager.err = nil
	if err := do(r.InSync(3, records, []volume.Change{leg})); err != nil || meter.resynced != block.MiB || !records.InSync(link) {
		t.Errorf("recorded: %v, %v resynced, in sync %v; want 1MiB, and in sync", err, meter.resynced, records.InSync(link))
	}
	request := &pb.RecordInSyncRequest{Node: "c1", VolumeId: block.VolumeID{}.String(), Epoch: 3,
		Legs: []*pb.RebuiltLeg{{LegId: leg.Leg.String(), Revision: 8, BytesCopied: uint64(block.MiB)}}}
	if d := cmp.Diff(request, manager.inSync[1], protocmp.Transform()); d != "" {
		t.Errorf("request (-want +got):\n%s", d)
	}
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/pb"
)

// storyteller is a manager with one volume and its events.
type storyteller struct {
	pb.ManagerClient
	events []*pb.Event
	after  []uint64 // of each WatchEvents
	first  uint64   // those before it are gone
	ended  func()   // when all was sent, and there is no more
}

func (m *storyteller) ListEvents(context.Context, *pb.ListEventsRequest, ...grpc.CallOption) (*pb.ListEventsResponse, error) {
	return &pb.ListEventsResponse{Events: m.events}, nil
}

func (m *storyteller) GetVolume(_ context.Context, r *pb.GetVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	switch r.Volume {
	case "db1":
		return &pb.Volume{Name: "db1", Labels: map[string]string{
			provisionerPrefix + "pvc/namespace": "team", provisionerPrefix + "pvc/name": "data",
			provisionerPrefix + "pv/name": "pvc-0b0e6c2f-5d0f-4b60-9b8d-0a3d9c2f1e11",
		}}, nil
	case "by-hand":
		return &pb.Volume{Name: "by-hand"}, nil
	}
	return nil, errors.New("not found")
}

// WatchEvents sends two at a time, and then breaks.
func (m *storyteller) WatchEvents(ctx context.Context, r *pb.WatchEventsRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[pb.Event], error) {
	m.after = append(m.after, r.AfterSeq)
	s := &storyStream{ends: io.ErrUnexpectedEOF}
	if r.AfterSeq+1 < m.first {
		gone, err := status.New(codes.FailedPrecondition, "events are gone").WithDetails(
			&errdetails.ErrorInfo{Reason: "EVENTS_GONE", Metadata: map[string]string{"first_seq": strconv.FormatUint(m.first, 10)}})
		if s.ends = err; err == nil {
			s.ends = gone.Err()
		}
		return s, nil
	}
	for _, e := range m.events {
		if e.Seq > r.AfterSeq && len(s.events) < 2 {
			s.events = append(s.events, e)
		}
	}
	if len(s.events) == 0 {
		m.ended()
	}
	return s, nil
}

type storyStream struct {
	grpc.ClientStream
	events []*pb.Event
	ends   error
}

func (s *storyStream) Recv() (*pb.Event, error) {
	if len(s.events) == 0 {
		return nil, s.ends
	}
	e := s.events[0]
	s.events = s.events[1:]
	return e, nil
}

type board struct {
	refuses string // the claim's reason that cannot be posted
	posted  []ClaimEvent
}

func (b *board) PostClaimEvent(_ context.Context, e ClaimEvent) error {
	if e.Reason == b.refuses {
		return errors.New("namespaces \"team\" is being terminated")
	}
	b.posted = append(b.posted, e)
	return nil
}

// A claim's user sees each threat to the volume and each recovery once, even if the manager is lost
// in between; other users' volumes and old events are left out.
func TestAClaimIsToldOfWhatHappensToItsVolume(t *testing.T) {
	synctest.Test(t, aClaimIsTold)
}

func aClaimIsTold(t *testing.T) {
	now := time.Now().Truncate(time.Second).UTC()
	event := func(seq uint64, ago time.Duration, severity pb.Severity, kind, object, text string) *pb.Event {
		return &pb.Event{Seq: seq, Time: timestamppb.New(now.Add(-ago)), Severity: severity, Kind: kind, Object: object, Text: text}
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	m := &storyteller{ended: stop, first: 5, events: []*pb.Event{
		event(1, time.Hour, pb.Severity_SEVERITY_WARNING, "leg.stale", "volume db1", "an old one"),
		event(7, time.Minute, pb.Severity_SEVERITY_WARNING, "leg.stale", "volume db1", "leg 0.1 on t2: no answer for more than 2s"),
		event(8, time.Minute, pb.Severity_SEVERITY_WARNING, "leg.stale", "volume by-hand", "leg 0.1 on t2: no answer for more than 2s"),
		event(9, time.Minute, pb.Severity_SEVERITY_WARNING, "leg.suspect", "volume db1", "which Kubernetes refuses"),
		event(10, time.Minute, pb.Severity_SEVERITY_WARNING, "target.offline", "node t2", "its stream closed"),
		event(11, time.Minute, pb.Severity_SEVERITY_INFO, "volume.detached", "volume db1", "from n1, clean"),
		event(12, time.Minute, pb.Severity_SEVERITY_WARNING, "volume.detached", "volume gone", "from n1, forced: fenced by epoch 3"),
		event(17, time.Minute, pb.Severity_SEVERITY_WARNING, "volume.detached", "volume db1", "from n1, forced: fenced by epoch 3"),
		event(18, 0, pb.Severity_SEVERITY_INFO, "leg.in-sync", "volume db1", "leg 0.1 on t2: 8MiB copied"),
	}}
	b := &board{refuses: "CopySuspect"}
	d, err := New(Config{Manager: m, Mode: ModeController, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.ServeClaimEvents(ctx, b); !errors.Is(err, context.Canceled) {
		t.Errorf("ServeClaimEvents = %v", err)
	}
	want := func(name string, ago time.Duration, warning bool, reason, message string) ClaimEvent {
		return ClaimEvent{
			Namespace: "team", Claim: "data", UID: "0b0e6c2f-5d0f-4b60-9b8d-0a3d9c2f1e11", Name: name,
			Time: now.Add(-ago), Warning: warning, Reason: reason, Message: message + " (weft explain volume db1)",
		}
	}
	if diff := cmp.Diff([]ClaimEvent{
		want("data.weft-7", time.Minute, true, "CopyLost", "leg 0.1 on t2: no answer for more than 2s"),
		want("data.weft-11", time.Minute, true, "Fenced", "from n1, forced: fenced by epoch 3"),
		want("data.weft-12", 0, false, "CopyRebuilt", "leg 0.1 on t2: 8MiB copied"),
	}, b.posted); diff != "" {
		t.Errorf("posted (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]uint64{1, 4, 8, 10, 12, 18}, m.after); diff != "" {
		t.Errorf("events were asked for after (-want +got):\n%s", diff)
	}
}

func TestWhatAnOperatorSeesIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := []string{"csi_plugin_operations_seconds", "weft_csi_node_step_seconds"}
	for _, row := range slices.AppendSeq(rows, maps.Values(claimReasons)) {
		if !strings.Contains(string(text), "\n| `"+row+"`") {
			t.Errorf("no table of docs/kubernetes.md has a row for %s", row)
		}
	}
}

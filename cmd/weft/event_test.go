// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// breakingWatch is a manager whose watches deliver the events after a number, and end.
type breakingWatch struct {
	pb.ManagerClient
	after []uint64
	ends  []error // of each watch
	stop  func()  // after the last one
}

func (m *breakingWatch) WatchEvents(_ context.Context, r *pb.WatchEventsRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[pb.Event], error) {
	m.after = append(m.after, r.AfterSeq)
	if len(m.ends) == 0 {
		m.stop()
		return nil, context.Canceled
	}
	s := &brokenStream{ends: m.ends[0]}
	if r.AfterSeq >= 9 {
		s.event = &pb.Event{Seq: r.AfterSeq + 1, Object: "volume db1"}
	}
	m.ends = m.ends[1:]
	return s, nil
}

type brokenStream struct {
	grpc.ClientStream
	event *pb.Event
	ends  error
}

func (s *brokenStream) Recv() (*pb.Event, error) {
	if e := s.event; e != nil {
		s.event = nil
		return e, nil
	}
	return nil, s.ends
}

// A watch that ends is continued after the last event. If the next events are gone by then, the
// output says so.
func TestFollowingEventsGoesOn(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	gone, err := status.New(codes.FailedPrecondition, "events 4 to 9 are gone").WithDetails(
		&errdetails.ErrorInfo{Reason: "EVENTS_GONE", Metadata: map[string]string{"first_seq": "10"}})
	if err != nil {
		t.Fatal(err)
	}
	m := &breakingWatch{stop: stop, ends: []error{gone.Err(), status.Error(codes.Aborted, "no event was read"), status.Error(codes.Unavailable, "restart")}}
	var stdout, stderr bytes.Buffer
	err = followEvents(ctx, m, "", 3, &cli.Output{Stdout: &stdout, Stderr: &stderr})
	if !errors.Is(err, context.Canceled) || !slices.Equal(m.after, []uint64{3, 9, 10, 11}) {
		t.Errorf("events were asked for after %v, and then %v; want 3, 9, 10, 11", m.after, err)
	}
	if !strings.Contains(stderr.String(), "events 4 to 9 are no longer kept") || strings.Count(stdout.String(), "volume db1") != 2 {
		t.Errorf("printed:\n%s%s", stdout.String(), stderr.String())
	}
	m = &breakingWatch{stop: stop, ends: []error{status.Error(codes.ResourceExhausted, "too many")}}
	if err := followEvents(t.Context(), m, "", 3, &cli.Output{Stdout: &stdout, Stderr: &stderr}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a watch that is refused = %v", err)
	}
}

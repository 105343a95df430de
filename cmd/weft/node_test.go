// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// seenNode is a cluster of one node whose target was last seen some time ago.
type seenNode struct {
	pb.ManagerClient
	ago       time.Duration
	online    bool
	confirmed bool
}

func (s *seenNode) ListNodes(context.Context, *pb.ListNodesRequest, ...grpc.CallOption) (*pb.ListNodesResponse, error) {
	return &pb.ListNodesResponse{Nodes: []*pb.Node{{Name: "t1", Target: &pb.AgentStatus{Known: true, Online: s.online, Seen: ago(s.ago)}}}}, nil
}

func (s *seenNode) ConfirmNodeDead(context.Context, *pb.ConfirmNodeDeadRequest, ...grpc.CallOption) (*pb.Node, error) {
	s.confirmed = true
	return &pb.Node{Name: "t1"}, nil
}

// A machine that spoke a moment ago is more likely cut off than switched off.
func TestANodeThatWasJustSeenIsNotCalledOffInPassing(t *testing.T) {
	for _, c := range []struct {
		ago       time.Duration
		off       bool
		confirmed bool
	}{
		{2 * time.Second, false, false},
		{2 * time.Second, true, true},
		{2 * time.Minute, false, true},
	} {
		s := &seenNode{ago: c.ago}
		out := &cli.Output{Stdout: io.Discard, Stderr: io.Discard, Now: func() time.Time { return noon }}
		err := runNodeConfirmDead(t.Context(), s, "t1", c.off, out)
		if s.confirmed != c.confirmed || (err == nil) != c.confirmed {
			t.Errorf("seen %v ago, --powered-off %v: confirmed %v, error %v; want confirmed %v", c.ago, c.off, s.confirmed, err, c.confirmed)
		}
		if err != nil && !strings.Contains(cli.NewReport(err).Hints[0], "--powered-off") {
			t.Errorf("hints %q, want one that names --powered-off", cli.NewReport(err).Hints)
		}
	}
}

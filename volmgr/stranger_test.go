// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr/event"
)

// attempt is one step of an intruder, by the name of its call.
type attempt struct {
	call string
	try  func(context.Context, *grpc.ClientConn) error
}

// onManager is an attempt by one unary call of the Manager service.
func onManager[Request, Answer any](call func(pb.ManagerClient, context.Context, Request, ...grpc.CallOption) (Answer, error), request Request) func(context.Context, *grpc.ClientConn) error {
	return func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := call(pb.NewManagerClient(conn), ctx, request)
		return err
	}
}

// reported is how an agent's stream ends.
func reported[Report, Wanted any](stream grpc.BidiStreamingClient[Report, Wanted], err error, report *Report) error {
	if err != nil {
		return err
	}
	_ = stream.Send(report) // Recv says why it failed
	_, err = stream.Recv()
	return err
}

func reportsAs(node, boot string) func(context.Context, *grpc.ClientConn) error {
	return func(ctx context.Context, conn *grpc.ClientConn) error {
		stream, err := pb.NewAgentsClient(conn).Target(ctx)
		return reported(stream, err, &pb.TargetReport{Node: node, BootId: boot})
	}
}

// intrusion is what somebody did to a cluster that let everyone in: he learned the names and boot
// ids, deleted a volume, took a backup of everything, took the places of agents, made up nodes, and
// filled the manager's memory with watches.
func intrusion() []attempt {
	all := []attempt{
		{"ListNodes", onManager(pb.ManagerClient.ListNodes, &pb.ListNodesRequest{})},
		{"ListVolumes", onManager(pb.ManagerClient.ListVolumes, &pb.ListVolumesRequest{})},
		{"ListEvents", onManager(pb.ManagerClient.ListEvents, &pb.ListEventsRequest{})},
		{"DeleteVolume", onManager(pb.ManagerClient.DeleteVolume, &pb.DeleteVolumeRequest{Volume: "payroll"})},
		{"DeletePool", onManager(pb.ManagerClient.DeletePool, &pb.DeletePoolRequest{Name: "gold"})},
		{"CreateToken", func(ctx context.Context, conn *grpc.ClientConn) error {
			_, err := pb.NewIdentitiesClient(conn).CreateToken(ctx, &pb.CreateTokenRequest{Subject: &pb.Subject{Person: true, Name: "eve", Role: "admin"}})
			return err
		}},
		{"Backup", func(ctx context.Context, conn *grpc.ClientConn) error {
			stream, err := pb.NewManagerClient(conn).Backup(ctx, &pb.BackupRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}},
		{"Initiator", func(ctx context.Context, conn *grpc.ClientConn) error {
			stream, err := pb.NewAgentsClient(conn).Initiator(ctx)
			return reported(stream, err, &pb.InitiatorReport{Node: "c1", BootId: "boot-1", Host: &pb.Host{Nqn: "nqn.2014-08.org.nvmexpress:uuid:" + uuid(1), Id: uuid(1)}})
		}},
		{"Target", reportsAs("t1", "boot-1")},
	}
	for i := range 100 {
		all = append(all, attempt{"Target", reportsAs(fmt.Sprint("ghost", i), "boot")})
	}
	for range 5000 {
		all = append(all, attempt{"WatchEvents", func(ctx context.Context, conn *grpc.ClientConn) error {
			stream, err := pb.NewManagerClient(conn).WatchEvents(ctx, &pb.WatchEventsRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}})
	}
	return all
}

// Each step of that intrusion is refused: to a peer without a certificate, and to one that has got
// hold of the certificate of another node's target. Each is counted, and each kind is an event.
func TestAnIntrusionIsRefusedAtEachStep(t *testing.T) {
	s := newSecured(t)
	if _, err := s.m.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	other := s.member(&pb.Subject{Name: "t9", Role: "target"})
	for _, c := range []struct {
		who   access.Identity
		creds credentials.TransportCredentials
		want  codes.Code
	}{
		{access.Identity{}, credentials.NewTLS(s.token(targetT1).Client(s.now)), codes.Unauthenticated},
		{other.Identity(), credentials.NewTLS(other.Client(s.now)), codes.PermissionDenied},
	} {
		before, times := s.counted(), map[string]int{}
		err := s.call(c.creds, func(_ context.Context, conn *grpc.ClientConn) error {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			for _, a := range intrusion() {
				if err := a.try(ctx, conn); status.Code(err) != c.want {
					t.Errorf("%s by %v: %v, want %v", a.call, c.who, err, c.want)
				}
				times[a.call]++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		after := s.counted()
		for call, n := range times {
			if got := after[call] - before[call]; got != n {
				t.Errorf("%d attempts at %s by %v were counted, want %d", got, call, c.who, n)
			}
			eventually(t, fmt.Sprintf("there is an event of %s by %v", call, c.who), func() bool { return s.told(c.who, call) })
		}
		s.pass(2 * refusedEvery)
	}
	nodes, err := s.m.ListNodes(t.Context(), &pb.ListNodesRequest{})
	if err != nil || len(nodes.GetNodes()) != 0 {
		t.Errorf("the nodes are %v, %v; want none", nodes, err)
	}
	pools, err := s.m.ListPools(t.Context(), &pb.ListPoolsRequest{})
	if err != nil || len(pools.GetPools()) != 2 {
		t.Errorf("the pools are %v, %v; want default and gold", pools, err)
	}
}

// Who guesses a token is refused, counted, and told of.
func TestAGuessedTokenIsAnEvent(t *testing.T) {
	s := newSecured(t)
	c, err := pki.NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	guess := pki.NewToken(s.token(targetT1).Authority)
	if _, err := s.join(guess, c); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("join with a guessed token: %v", err)
	}
	if got := s.counted()["Join"]; got != 1 {
		t.Errorf("%d attempts to join were counted, want 1", got)
	}
	eventually(t, "there is an event", func() bool { return s.told(access.Identity{}, "Join") })
}

// counted are the refused calls that the metric has, by their name.
func (s *secured) counted() map[string]int {
	s.t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(s.m.metrics.refused)
	all, err := registry.Gather()
	if err != nil {
		s.t.Fatal(err)
	}
	calls := map[string]int{}
	for _, family := range all {
		for _, one := range family.GetMetric() {
			calls[one.GetLabel()[0].GetValue()] = int(one.GetCounter().GetValue())
		}
	}
	return calls
}

// told reports whether there is an event of a refused call.
func (s *secured) told(who access.Identity, call string) bool {
	s.t.Helper()
	list, err := s.m.ListEvents(s.t.Context(), &pb.ListEventsRequest{Object: who.String()})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range list.GetEvents() {
		if e.Kind == event.AccessRefused && e.Attributes["call"] == call {
			return true
		}
	}
	return false
}

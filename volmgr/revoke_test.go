// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/trust"
)

func TestCertificatesAndTheirRecordsLiveEquallyLong(t *testing.T) {
	if trust.CertificateLife != pki.Life {
		t.Errorf("records say %v, certificates %v", trust.CertificateLife, pki.Life)
	}
}

// revoke is what an admin asks for.
func (s *secured) revoke(admin *pki.Credential, subject *pb.Subject) (revoked []*pb.Access) {
	s.t.Helper()
	if err := s.as(admin, func(ctx context.Context, conn *grpc.ClientConn) error {
		got, err := pb.NewIdentitiesClient(conn).RevokeAccess(ctx, &pb.RevokeAccessRequest{Subject: subject})
		revoked = got.GetAccess()
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	return revoked
}

// refusedAsRevoked reports whether a call was refused since the caller's certificate is revoked.
func refusedAsRevoked(err error) bool {
	return status.Code(err) == codes.Unauthenticated && reason(err) == access.ReasonRevoked
}

// A revoked certificate opens nothing any more: its streams end, it is not renewed, and the token
// that it came from lets nobody in. With a new token, the same name joins again at once, and its old
// certificate stays worthless. A restart changes nothing of that.
func TestARevokedCertificateIsWorthless(t *testing.T) {
	s := newSecured(t)
	ada := s.member(&pb.Subject{Person: true, Name: "ada", Role: "admin"})
	key, err := pki.NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	token := s.token(targetT1)
	stolen, err := s.join(token, key)
	if err != nil {
		t.Fatal(err)
	}
	unused := s.token(targetT1)
	other := s.member(&pb.Subject{Name: "t2", Role: "target"})

	if err := s.as(stolen, func(ctx context.Context, conn *grpc.ClientConn) error {
		stream, err := pb.NewAgentsClient(conn).Target(ctx)
		if err != nil {
			return err
		}
		if err := reported(stream, nil, &pb.TargetReport{Node: "t1", BootId: "boot-1"}); err != nil {
			return err
		}
		if all := s.revoke(ada, &pb.Subject{Name: "t1"}); len(all) != 1 || all[0].Subject.Role != "target" || all[0].Revoked == nil {
			t.Errorf("revoked: %v, want target t1", all)
		}
		for err == nil {
			_, err = stream.Recv()
		}
		if !refusedAsRevoked(err) {
			t.Errorf("the stream of t1 ends with %v", err)
		}
		if err := reads(ctx, conn); !refusedAsRevoked(err) { // on the connection that it has
			t.Errorf("GetStatus: %v", err)
		}
		_, err = pb.NewIdentitiesClient(conn).Renew(ctx, &pb.RenewRequest{})
		if !refusedAsRevoked(err) {
			t.Errorf("Renew: %v", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for what, token := range map[string]pki.Token{"the token that was used": token, "one that was not": unused} {
		if _, err := s.join(token, key); reason(err) != cluster.ReasonToken {
			t.Errorf("%s: %v", what, err)
		}
	}
	again := s.member(targetT1)
	for range 2 {
		if err := s.as(stolen, reads); !refusedAsRevoked(err) {
			t.Errorf("the old certificate after the node has joined again: %v", err)
		}
		for _, c := range []*pki.Credential{again, s.renew(again), other} {
			if err := s.as(c, reads); err != nil {
				t.Errorf("%v: %v", c.Identity(), err)
			}
		}
		s.stop()
		s.start()
	}
	s.pass(pki.Life - time.Hour)
	if err := s.as(stolen, reads); !refusedAsRevoked(err) {
		t.Errorf("shortly before its end: %v", err)
	}
	s.pass(3 * 24 * time.Hour)
	if state, err := s.m.snapshot(t.Context()); err != nil || len(state.Holders()) == 0 {
		t.Errorf("all is forgotten as soon as a clock says that it has ended, %v", err)
	}
	s.pass(25 * time.Hour)
	if state, err := s.m.snapshot(t.Context()); err != nil || len(state.Holders()) != 0 {
		t.Errorf("%v is remembered after all has ended, %v", state.Holders(), err)
	}
}

// What is revoked by name leaves the managers alone, and a name that nobody has is told.
func TestWhatIsRevokedIsNamed(t *testing.T) {
	s := newSecured(t)
	for _, role := range []string{"target", "initiator", "manager"} {
		s.member(&pb.Subject{Name: "n1", Role: role})
	}
	s.member(&pb.Subject{Person: true, Name: "n1", Role: "viewer"})
	api := identities{m: s.m}
	var got []string
	revoked, err := api.RevokeAccess(t.Context(), &pb.RevokeAccessRequest{Subject: &pb.Subject{Name: "n1"}})
	for _, a := range revoked.GetAccess() {
		got = append(got, a.Subject.Role)
	}
	if err != nil || strings.Join(got, " ") != "initiator target" {
		t.Errorf("revoked: %v, %v; want initiator and target", got, err)
	}
	for _, c := range []struct {
		subject *pb.Subject
		want    codes.Code
	}{
		{&pb.Subject{Name: "n2"}, codes.NotFound},
		{&pb.Subject{Name: "n2", Role: "target"}, codes.OK}, // a restored store may not know it
		{&pb.Subject{Name: "n1", Role: "manager"}, codes.FailedPrecondition},
		{&pb.Subject{Name: "n1", Role: "admin"}, codes.InvalidArgument},
		{&pb.Subject{Person: true, Name: "n1", Role: "viewer"}, codes.OK},
		{&pb.Subject{}, codes.InvalidArgument},
	} {
		if _, err := api.RevokeAccess(t.Context(), &pb.RevokeAccessRequest{Subject: c.subject}); status.Code(err) != c.want {
			t.Errorf("revoke %v: %v, want %v", c.subject, err, c.want)
		}
	}
	list, err := s.m.ListEvents(t.Context(), &pb.ListEventsRequest{Object: "node n1 (target)"})
	if err != nil || len(list.Events) != 1 || list.Events[0].Kind != event.AccessRevoked {
		t.Errorf("events: %v, %v", list.GetEvents(), err)
	}
}

// asks reports how a manager answers a call with a certificate that was issued at a time.
func (p *replica) asks(who access.Identity, issued time.Time) error {
	ctx := peer.NewContext(context.Background(), &peer.Peer{AuthInfo: access.AuthInfo{Identity: who, Issued: issued}})
	info := &grpc.UnaryServerInfo{FullMethod: pb.Manager_GetStatus_FullMethodName}
	_, err := p.Guard().Unary(ctx, nil, info, func(context.Context, any) (any, error) { return nil, nil })
	return err
}

// A node that is removed is shut out by every manager, also by those that follow. When it has joined
// again, its old certificate stays worthless.
func TestARemovedNodesCertificateIsRefusedByAFollower(t *testing.T) {
	_, all := three(t)
	leader := leads(t, all...)
	do := func(in cluster.Input) any {
		t.Helper()
		result, err := leader.step(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		return result
	}
	subject := trust.Subject{Name: "t1", Role: "target"}
	join := func(token string) time.Time {
		t.Helper()
		do(cluster.CreateToken{ID: token, Hash: "hash", Subject: subject})
		return do(cluster.UseToken{ID: token, Hash: "hash", Key: "key"}).(cluster.Grant).Issued
	}
	do(cluster.AddAuthority{Hash: "0123456789abcdef", First: true})
	issued := join("1")
	do(cluster.TargetReported{Session: 1, Report: cluster.TargetReport{Node: "t1", BootID: "boot-1"}})
	do(cluster.TargetLost{Session: 1, Node: "t1"})
	t1 := identities{m: leader.Manager}.identity(subject)
	for _, p := range all {
		if err := p.asks(t1, issued); err != nil {
			t.Fatalf("before it is removed: %v", err)
		}
	}
	if _, err := leader.RemoveNode(t.Context(), &pb.RemoveNodeRequest{Node: "t1"}); err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		eventually(t, "a manager refuses the removed node", func() bool { return refusedAsRevoked(p.asks(t1, issued)) })
	}
	again := join("2")
	for _, p := range all {
		if err := p.asks(t1, again); err != nil {
			t.Errorf("after it has joined again: %v", err)
		}
		if err := p.asks(t1, issued); !refusedAsRevoked(err) {
			t.Errorf("its old certificate: %v", err)
		}
		t2 := t1
		t2.Name = "t2"
		if err := p.asks(t2, issued); err != nil {
			t.Errorf("another node: %v", err)
		}
	}
}

// A manager that was removed is shut out by every manager, also with a certificate that it has signed
// for itself since: it has the authority's key. It adds itself neither in its own name nor in one that
// it has made up. A new token lets it in again.
func TestARemovedManagerIsShutOut(t *testing.T) {
	_, all := three(t)
	leader := leads(t, all...)
	do := func(in cluster.Input) {
		t.Helper()
		if _, err := leader.step(t.Context(), in); err != nil {
			t.Fatal(err)
		}
	}
	do(cluster.AddAuthority{Hash: "0123456789abcdef", First: true})
	subject := trust.Subject{Name: "m4", Role: trust.ManagerRole}
	join := func(token string) {
		t.Helper()
		do(cluster.CreateToken{ID: token, Hash: "hash", Subject: subject})
		do(cluster.UseToken{ID: token, Hash: "hash", Key: "key"})
	}
	m4 := identities{m: leader.Manager}.identity(subject)
	add := func(who access.Identity, id string) error {
		_, err := leader.AddManager(peer.NewContext(t.Context(), &peer.Peer{AuthInfo: access.AuthInfo{Identity: who, Issued: time.Now()}}),
			&pb.AddManagerRequest{Id: id, Address: "127.0.0.1:" + id[12:]})
		return err
	}
	if err := add(m4, "0000000000000004"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a manager that no token has let in is added: %v", err)
	}
	join("1")
	if err := add(m4, "0000000000000004"); err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if err := p.asks(m4, time.Now()); err != nil {
			t.Errorf("before it is removed: %v", err)
		}
	}
	if _, err := leader.RemoveManager(t.Context(), &pb.RemoveManagerRequest{Manager: "0000000000000004"}); err != nil {
		t.Fatal(err)
	}
	for _, issued := range []time.Time{time.Now().Add(-time.Hour), time.Now().Add(240 * time.Hour)} {
		for _, p := range all {
			eventually(t, "a manager refuses the removed one", func() bool { return refusedAsRevoked(p.asks(m4, issued)) })
		}
	}
	if err := add(m4, "0000000000000005"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a manager that was removed adds itself again: %v", err)
	}
	join("2")
	for _, p := range all {
		eventually(t, "it is let in again", func() bool { return p.asks(m4, time.Now()) == nil })
	}
	if err := add(m4, "0000000000000005"); err != nil {
		t.Errorf("with a new token: %v", err)
	}

	// The leader may end between the removal and what shuts it out. Then it can be shut out by itself.
	revoke := func() error {
		_, err := identities{m: leader.Manager}.RevokeAccess(t.Context(), &pb.RevokeAccessRequest{Subject: &pb.Subject{Name: "m4", Role: trust.ManagerRole}})
		return err
	}
	if err := revoke(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the certificate of a manager is revoked: %v", err)
	}
	id, _ := quorum.ParseID("0000000000000005")
	if err := leader.quorum.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := revoke(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a manager is shut out, and one of the members may have its name: %v", err)
	}
	for i, p := range all {
		if err := leader.quorum.Move(t.Context(), p.id, p.cfg.Quorum.Address, fmt.Sprintf("m%d", i+1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := revoke(); err != nil {
		t.Errorf("a manager that is no member any more cannot be shut out: %v", err)
	}
	for _, p := range all {
		eventually(t, "a manager refuses the one that was shut out", func() bool { return refusedAsRevoked(p.asks(m4, time.Now().Add(240*time.Hour))) })
	}
}

// A removal is carried through, with what shuts the manager out, if its caller has gone.
func TestARemovalGoesOnWithoutItsCaller(t *testing.T) {
	ps, all := three(t)
	leader := leads(t, all...)
	if _, err := leader.step(t.Context(), cluster.AddAuthority{Hash: "0123456789abcdef", First: true}); err != nil {
		t.Fatal(err)
	}
	id, _ := quorum.ParseID("0000000000000004")
	if err := leader.quorum.AddLearner(t.Context(), quorum.Member{ID: id, Address: "m4:9800", Name: "m4"}); err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	ps.mu.Lock()
	ps.sees = func(message []byte) {
		if bytes.Contains(message, []byte("m4:9800")) { // the change of the members
			leave()
		}
	}
	ps.mu.Unlock()
	_, err := leader.RemoveManager(ctx, &pb.RemoveManagerRequest{Manager: id.String()})
	if t.Logf("RemoveManager = %v", err); ctx.Err() == nil {
		t.Fatal("the caller has not left meanwhile")
	}
	m4 := identities{m: leader.Manager}.identity(trust.Subject{Name: "m4", Role: trust.ManagerRole})
	for _, p := range all {
		eventually(t, "a manager refuses the removed one", func() bool { return refusedAsRevoked(p.asks(m4, time.Now())) })
	}
}

// An agent whose certificate is revoked sends no more figures either, on the stream that it has.
func TestARevokedAgentSendsNoMoreFigures(t *testing.T) {
	s := newSecured(t)
	ada := s.member(&pb.Subject{Person: true, Name: "ada", Role: "admin"})
	stolen := s.member(targetT1)
	if err := s.as(stolen, func(ctx context.Context, conn *grpc.ClientConn) error {
		stream, err := pb.NewAgentsClient(conn).Figures(ctx)
		if err != nil {
			return err
		}
		report := &pb.FiguresReport{Node: "t1", Source: pb.FiguresSource_FIGURES_SOURCE_TARGET, Nanoseconds: 1}
		if err := stream.Send(report); err != nil {
			return err
		}
		s.revoke(ada, &pb.Subject{Name: "t1"})
		deadline := time.Now().Add(5 * time.Second)
		for err == nil && time.Now().Before(deadline) {
			time.Sleep(20 * time.Millisecond)
			err = stream.Send(report)
		}
		if err == nil {
			t.Fatal("the stream goes on")
		}
		if _, err := stream.CloseAndRecv(); !refusedAsRevoked(err) {
			t.Errorf("the stream ends with %v", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

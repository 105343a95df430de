// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr/cluster"
)

// joinAs joins with a service account's token.
func (s *secured) joinAs(token, role string) (joined *pki.Credential, err error) {
	s.t.Helper()
	c, err := pki.NewCredential()
	if err != nil {
		s.t.Fatal(err)
	}
	der, err := c.Request()
	if err != nil {
		s.t.Fatal(err)
	}
	pins, err := pki.ParsePins(pki.Hash(s.keys.Authorities()[0]))
	if err != nil {
		s.t.Fatal(err)
	}
	err = s.call(credentials.NewTLS(pins.Client(s.now)), func(ctx context.Context, conn *grpc.ClientConn) error {
		got, err := pb.NewIdentitiesClient(conn).Join(ctx, &pb.JoinRequest{AccountToken: []byte(token), Role: role, CertificateRequest: der})
		if err == nil {
			joined, err = c.Renewed(got.Certificate, got.Authorities)
		}
		return err
	})
	return joined, err
}

// Kubernetes says which node shows a token, and the manager in which roles that one may join. Whom
// an admin has shut out needs a token from one, although Kubernetes still vouches for him.
func TestKubernetesVouchesForANode(t *testing.T) {
	s := newSecured(t)
	if _, err := s.joinAs("of n1", "target"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a manager that trusts nobody: %v", err)
	}
	s.m.cfg.Vouch = func(_ context.Context, token string) (string, []access.Role, error) {
		switch token {
		case "of n1":
			return "n1", []access.Role{access.Target, access.CSI}, nil
		case "down":
			return "", nil, errors.New("connection refused")
		}
		return "", nil, ErrNotVouched
	}
	n1, err := s.joinAs("of n1", "target")
	if err != nil {
		t.Fatal(err)
	}
	if who := n1.Identity(); who.Kind != access.Node || who.Name != "n1" || who.Role != access.Target {
		t.Errorf("the pod on n1 has joined as %v", who)
	}
	if err := s.as(n1, reads); err != nil {
		t.Errorf("GetStatus as n1: %v", err)
	}
	for _, c := range []struct {
		token, role string
		want        codes.Code
	}{
		{"of n1", "initiator", codes.FailedPrecondition},
		{"of n1", "manager", codes.FailedPrecondition},
		{"of n1", "admin", codes.InvalidArgument},
		{"of nobody", "target", codes.FailedPrecondition},
		{"down", "target", codes.Unavailable},
		{strings.Repeat("x", accountTokenMost+1), "target", codes.InvalidArgument},
	} {
		if _, err := s.joinAs(c.token, c.role); status.Code(err) != c.want {
			t.Errorf("%.10s as %s: %v, want %v", c.token, c.role, err, c.want)
		}
	}
	if _, err := (identities{m: s.m}).RevokeAccess(t.Context(), &pb.RevokeAccessRequest{Subject: &pb.Subject{Name: "n1"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.joinAs("of n1", "target"); reason(err) != cluster.ReasonRevoked {
		t.Errorf("a node that was shut out: %v", err)
	}
	if _, err := s.joinAs("of n1", "csi"); reason(err) != cluster.ReasonRevoked {
		t.Errorf("a node that was shut out, in a role that it has not had: %v", err)
	}
	s.member(&pb.Subject{Name: "n1", Role: "target"})
	if _, err := s.joinAs("of n1", "target"); err != nil {
		t.Errorf("after an admin has let it in again: %v", err)
	}
	if strings.Contains(s.log.String(), "of n1") {
		t.Error("a service account's token is in the log")
	}
}

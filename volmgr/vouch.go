// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/trust"
)

// Voucher asks Kubernetes whose service account's token somebody shows. It returns the node that the
// account's pod runs on, and the roles in which that node may join. [ErrNotVouched] means that it
// may not; after any other error the request may be repeated.
type Voucher func(ctx context.Context, token string) (node string, roles []access.Role, err error)

// ErrNotVouched is returned by a [Voucher] for a token that is not accepted.
var ErrNotVouched = errors.New("the service account's token is not accepted")

// accountTokenMost bounds a service account's token, in bytes.
const accountTokenMost = 16 << 10

// joinVouched gives a certificate to a node for which Kubernetes vouches. Only the manager that leads
// asks there.
func (s identities) joinVouched(ctx context.Context, keys *pki.Keyring, r *pb.JoinRequest, request pki.Request) (*pb.Credentials, error) {
	refuse := func(reason, text, hint string) (*pb.Credentials, error) {
		s.m.refuse(ctx)
		return nil, toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Reason: reason, Text: text, Hint: hint})
	}
	if s.m.cfg.Vouch == nil {
		return refuse("", "this manager trusts no service accounts of Kubernetes", "start it with --trust-kubernetes, or join with a token: `weft token create` prints one")
	}
	if len(r.AccountToken) > accountTokenMost {
		return nil, toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "account_token", Text: fmt.Sprintf("account_token: at most %d bytes are allowed", accountTokenMost)})
	}
	if _, err := s.authorities(ctx); err != nil {
		return nil, toStatus(err)
	}
	node, roles, err := s.m.cfg.Vouch(ctx, string(r.AccountToken))
	if errors.Is(err, ErrNotVouched) {
		return refuse(cluster.ReasonToken, err.Error(), "is its audience that of --trust-kubernetes, and its account in --kubernetes-account?")
	}
	if err != nil {
		s.m.cfg.Log.Warn("join by a service account", "err", err)
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	subject := trust.Subject{Name: node, Role: r.Role}
	if err := s.identity(subject).Check(); err != nil {
		return nil, toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "role", Text: err.Error()})
	}
	if !slices.Contains(roles, access.Role(r.Role)) {
		return refuse(cluster.ReasonToken, fmt.Sprintf("the service account on %s may join as %v, not as %s", node, roles, r.Role), "see --kubernetes-account of the managers")
	}
	result, err := s.m.step(ctx, cluster.JoinVouched{Subject: subject})
	if err != nil {
		return nil, toStatus(err)
	}
	return s.sign(ctx, keys, result.(cluster.Grant), request)
}

// Authorities returns the hashes of the authorities that members trust, at the manager that leads.
func (m *Manager) Authorities(ctx context.Context) ([]string, error) {
	all, err := identities{m: m}.authorities(ctx)
	return list(all, func(a trust.Authority) string { return a.Hash }), err
}

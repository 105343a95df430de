// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
)

// AuthInfo is the identity of a peer, as its handshake has shown it.
type AuthInfo struct {
	credentials.CommonAuthInfo
	Identity Identity
	// Issued is when the certificate says that it was issued; zero if it is not the cluster's own,
	// which cannot be revoked here.
	Issued time.Time
	// Ends is when the certificate ends; zero if the peer has none. A connection must not outlast it.
	Ends time.Time
}

// AuthType implements [credentials.AuthInfo].
func (AuthInfo) AuthType() string { return "weft" }

// From returns who calls. ok is false on a server whose handshakes find out nothing, as in tests
// of a service alone.
func From(ctx context.Context) (who Identity, ok bool) {
	info, ok := infoOf(ctx)
	return info.Identity, ok
}

// Issued returns when the caller's certificate says that it was issued; zero if it has none of the
// cluster's own.
func Issued(ctx context.Context) time.Time {
	info, _ := infoOf(ctx)
	return info.Issued
}

func infoOf(ctx context.Context) (info AuthInfo, ok bool) {
	p, _ := peer.FromContext(ctx)
	if p == nil {
		return info, false
	}
	info, ok = p.AuthInfo.(AuthInfo)
	return info, ok
}

// Speaks returns an error if the caller must not speak for a node in a role: a node speaks for
// itself, and people for none. Who is asked for nothing else may speak for any: the users of a
// socket or of plain TCP, and certificates that name no role.
func Speaks(ctx context.Context, role Role, node block.NodeName) error {
	who, ok := From(ctx)
	if !ok || who.Kind == Anonymous || who.Kind == Local || who.Kind == Outside {
		return nil
	}
	if who.Kind == Node && who.Role == role && who.Name == string(node) {
		return nil
	}
	return denied(codes.PermissionDenied, ReasonOtherNode, fmt.Sprintf("%v may not speak for node %s as its %s", who, node, role),
		fmt.Sprintf("this agent's certificate is for %s: is --node right? else join again with a token for node %s", who.Name, node))
}

// The reasons in the details of a refusal.
const (
	ReasonRole      = "ROLE_NEEDED"     // the identity has not the role
	ReasonIdentity  = "IDENTITY_NEEDED" // there is none
	ReasonOtherNode = "OTHER_NODE"      // it is another node's
	ReasonRevoked   = "CERTIFICATE_REVOKED"
)

// Guard refuses calls on a server, before the service sees them.
type Guard struct {
	// Cluster is the cluster that certificates must name; zero: any, as long as it is not known.
	Cluster block.ClusterID
	// Revoked are certificates that are refused; nil: none.
	Revoked *Revocations
	// Refused is called for each call that is refused; nil: for none. It must not wait.
	Refused func(ctx context.Context, who Identity, method string)
}

// MayReadMetrics returns an error if somebody may not read a daemon's metrics: people may.
func (g Guard) MayReadMetrics(info AuthInfo) error {
	who := info.Identity
	if !people(Viewer).allows(who) {
		return denied(codes.PermissionDenied, ReasonRole, fmt.Sprintf("metrics: %v may not read them; it needs the role viewer, operator or admin", who), "an admin makes a token: `weft token create --person NAME --role viewer`")
	}
	if err := g.ours(who); err != nil {
		return err
	}
	return g.Revoked.check(info)
}

// ours returns an error if an identity is of another cluster.
func (g Guard) ours(who Identity) error {
	if who.Kind != Node && who.Kind != Person || g.Cluster.IsZero() || g.Cluster == who.Cluster {
		return nil
	}
	return denied(codes.PermissionDenied, ReasonIdentity, fmt.Sprintf("%v: the certificate is of cluster %v, this one is %v", who, who.Cluster, g.Cluster), "is --manager right?")
}

// check decides on a call.
func (g Guard) check(ctx context.Context, method string) error {
	info, _ := infoOf(ctx)
	who := info.Identity
	err := Decide(method, who)
	if err == nil {
		err = g.ours(who)
	}
	if err == nil && !table[method].open {
		err = g.Revoked.check(info)
	}
	if err == nil {
		return nil
	}
	if g.Refused != nil {
		g.Refused(ctx, who, method)
	}
	var r *Refusal
	switch {
	case !errors.As(err, &r):
		return err
	case who.Kind == Stranger:
		return denied(codes.Unauthenticated, ReasonIdentity, r.Error(), "log in, or join, with a token: `weft token create` prints one")
	}
	return denied(codes.PermissionDenied, ReasonRole, r.Error(), "an admin can give another role: `weft token create --person NAME --role "+lowest(r)+"`")
}

// lowest is the role that an operator would ask for.
func lowest(r *Refusal) string {
	if len(r.needs) == 0 {
		return string(Admin)
	}
	return r.needs[0]
}

func denied(code codes.Code, reason, text, hint string) error {
	s := status.New(code, strings.ToValidUTF8(text, "?"))
	with, err := s.WithDetails(&errdetails.ErrorInfo{Domain: "weft.dev", Reason: reason, Metadata: map[string]string{"hint": strings.ToValidUTF8(hint, "?")}})
	if err != nil {
		return s.Err()
	}
	return with.Err()
}

// Unary is a [grpc.UnaryServerInterceptor].
func (g Guard) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if err := g.check(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return handle(ctx, req)
}

// Stream is a [grpc.StreamServerInterceptor].
func (g Guard) Stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := g.check(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return g.Revoked.serve(server, stream, handle)
}

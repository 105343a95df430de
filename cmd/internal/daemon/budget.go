// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"weft.dev/weft/proto/access"
)

// budgets bound what peers can take of a server, so that none keeps the others out: the memory of a
// call is bounded by that of a message, so calls are counted. A peer is a member, or else an
// address. Sockets of this machine have no budget.
type budgets struct {
	handshakes   int           // at once, of all addresses
	handshakesOf int           // at once, of one address
	handshake    time.Duration // how long one may take
	conns        int           // of all addresses
	connsOf      int           // of one address
	strangers    int           // connections without a certificate, of all addresses
	strangersOf  int           // of one address
	stranger     time.Duration // how long such a connection may take: it is there to join
	calls        int           // at once, of all strangers
	callsOf      int           // at once, of one stranger
	memberCalls  int           // at once, of one member
}

// defaultBudgets let some thousand agents connect at once, also from behind one address.
var defaultBudgets = budgets{
	handshakes: 1024, handshakesOf: 128, handshake: 5 * time.Second,
	conns: 16384, connsOf: 4096,
	strangers: 64, strangersOf: 8, stranger: 15 * time.Second,
	calls: 64, callsOf: 4, memberCalls: 256,
}

// usage counts against budgets.
type usage struct {
	most budgets

	mu    sync.Mutex
	count map[string]int // by what is counted, and of whom; "" of all
}

func newUsage(most budgets) *usage { return &usage{most: most, count: map[string]int{}} }

// take counts one more of a kind, of someone and of all. give ends that.
func (u *usage) take(kind, of string, mostOf, most int) (give func(), err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	one, all := kind+" of "+of, kind
	if u.count[one] >= mostOf || u.count[all] >= most {
		return nil, fmt.Errorf("too many %s", kind)
	}
	u.count[one]++
	u.count[all]++
	return sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.count[all]--
		if u.count[one]--; u.count[one] == 0 {
			delete(u.count, one)
		}
	}), nil
}

// hostOf is the address of a peer without its port; empty for a socket.
func hostOf(at net.Addr) string {
	host, _, err := net.SplitHostPort(at.String())
	if err != nil {
		return ""
	}
	return host
}

// bounded are the credentials of a server that keeps to its budgets. It closes a connection when the
// certificate of its peer ends: by then the peer has a new one and connects again with that, and a
// revocation of the old one is soon forgotten.
type bounded struct {
	credentials.TransportCredentials
	usage   *usage
	refused prometheus.Counter
	now     func() time.Time
}

// ServerHandshake implements [credentials.TransportCredentials].
func (b bounded) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if onSocket(raw) {
		return b.TransportCredentials.ServerHandshake(raw)
	}
	host, most := hostOf(raw.RemoteAddr()), b.usage.most
	give, err := b.usage.take("connections", host, most.connsOf, most.conns)
	if err != nil {
		return nil, nil, err
	}
	conn, info, err := b.shake(raw, host)
	if err != nil {
		b.refused.Inc()
		give()
		return nil, nil, err
	}
	held := &heldConn{Conn: conn, give: give}
	if info.Identity.Kind != access.Stranger {
		if !info.Ends.IsZero() {
			held.closeAfter(info.Ends.Sub(b.now()))
		}
		return held, info, nil
	}
	gone, err := b.usage.take("connections without a certificate", host, most.strangersOf, most.strangers)
	if err != nil {
		give()
		return nil, nil, err
	}
	held.give = func() {
		gone()
		give()
	}
	held.closeAfter(most.stranger)
	return held, info, nil
}

// shake carries a handshake out.
func (b bounded) shake(raw net.Conn, host string) (net.Conn, access.AuthInfo, error) {
	give, err := b.usage.take("handshakes", host, b.usage.most.handshakesOf, b.usage.most.handshakes)
	if err != nil {
		return nil, access.AuthInfo{}, err
	}
	defer give()
	conn, info, err := b.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, access.AuthInfo{}, err
	}
	who, _ := info.(access.AuthInfo)
	return conn, who, nil
}

// Clone implements [credentials.TransportCredentials].
func (b bounded) Clone() credentials.TransportCredentials { return b }

// heldConn counts against a budget until it is closed.
type heldConn struct {
	net.Conn
	give func()
	end  *time.Timer // closes it; nil: nothing does
}

// closeAfter closes the connection after a time. Call it before the connection is used.
func (c *heldConn) closeAfter(d time.Duration) {
	c.end = time.AfterFunc(d, func() { c.Conn.Close() })
}

// Close implements [net.Conn].
func (c *heldConn) Close() error {
	defer c.give()
	if c.end != nil {
		c.end.Stop()
	}
	return c.Conn.Close()
}

// call refuses calls beyond the budget, before their requests are read.
func (u *usage) call(ctx context.Context, info *tap.Info) (context.Context, error) {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil || hostOf(p.Addr) == "" {
		return ctx, nil
	}
	who, _ := access.From(ctx)
	kind, of, mostOf, most := "calls", who.String(), u.most.memberCalls, u.most.memberCalls*1024
	switch who.Kind {
	case access.Stranger:
		kind, of, mostOf, most = "calls without a certificate", hostOf(p.Addr), u.most.callsOf, u.most.calls
	case access.Anonymous, access.Outside:
		of += " at " + hostOf(p.Addr)
	}
	give, err := u.take(kind, of, mostOf, most)
	if err != nil {
		return ctx, status.Error(codes.ResourceExhausted, err.Error())
	}
	context.AfterFunc(ctx, give)
	return ctx, nil
}

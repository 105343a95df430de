// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
)

// tight are budgets that a test can use up.
var tight = budgets{
	handshakes: 6, handshakesOf: 3, handshake: 5 * time.Second, conns: 100, connsOf: 50,
	strangers: 4, strangersOf: 2, stranger: 500 * time.Millisecond, calls: 8, callsOf: 1, memberCalls: 3,
}

// closedServer is a server of a closed cluster with tight budgets. It implements only the health
// service.
func closedServer(t *testing.T) (address string, member TLSFiles, m *Metrics) {
	t.Helper()
	return closedServerLater(t, 0)
}

// closedServerLater is closedServer some time after it has got its certificate.
func closedServerLater(t *testing.T, later time.Duration) (address string, member TLSFiles, m *Metrics) {
	t.Helper()
	cluster := block.ClusterID{UUID: block.UUID{1}}
	keys, err := pki.CreateKeyring(filepath.Join(t.TempDir(), "keys"), cluster, "m1", time.Now)
	if err != nil {
		t.Fatal(err)
	}
	files := TLSFiles{Identity: keys.Identity(), Now: func() time.Time { return time.Now().Add(later) }}
	m = NewMetrics()
	server, err := newServer(files, m, access.Guard{Cluster: cluster}, tight)
	if err != nil {
		t.Fatal(err)
	}
	pb.RegisterIdentitiesServer(server, pb.UnimplementedIdentitiesServer{})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- Serve(discard, listener, server).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return listener.Addr().String(), files, m
}

// from dials from an address of this machine.
func from(t *testing.T, host, to string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}
	conn, err := d.Dial("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// closedWithin reports whether the server closes a connection.
func closedWithin(conn net.Conn, d time.Duration) bool {
	conn.SetReadDeadline(time.Now().Add(d))
	_, err := io.Copy(io.Discard, conn)
	return !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err)
}

func isTimeout(err error) bool {
	e, ok := errors.AsType[net.Error](err)
	return ok && e.Timeout()
}

// Peers that connect and say nothing use up their own address's budget, and nobody else's.
func TestSilentPeersKeepNobodyOut(t *testing.T) {
	address, member, m := closedServer(t)
	var silent []net.Conn
	for range 10 {
		silent = append(silent, from(t, "127.0.0.2", address))
	}
	closed := 0
	for _, conn := range silent {
		if closedWithin(conn, 100*time.Millisecond) {
			closed++
		}
	}
	if closed != len(silent)-tight.handshakesOf {
		t.Errorf("%d of %d silent connections were closed, want all but %d", closed, len(silent), tight.handshakesOf)
	}
	if err := checkHealth(t, address, member); err != nil {
		t.Errorf("a member at another address: %v", err)
	}
	for _, conn := range silent {
		if !closedWithin(conn, tight.handshake+2*time.Second) {
			t.Error("a silent connection is not closed in time")
		}
	}
	counted := 0.0
	for deadline := time.Now().Add(5 * time.Second); counted != float64(len(silent)) && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		all, err := m.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range all {
			if family.GetName() == "weft_grpc_handshakes_refused_total" {
				counted = family.GetMetric()[0].GetCounter().GetValue()
			}
		}
	}
	if counted != float64(len(silent)) {
		t.Errorf("%v refused handshakes are counted, want %d", counted, len(silent))
	}
}

// Peers without a certificate are few, and go soon.
func TestStrangersAreFewAndGoSoon(t *testing.T) {
	address, member, _ := closedServer(t)
	var open []*tls.Conn
	for range 5 {
		conn := tls.Client(from(t, "127.0.0.2", address), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		if conn.Handshake() != nil {
			continue
		}
		// A client in TLS 1.3 is done before the server is.
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			open = append(open, conn)
		}
	}
	if len(open) != tight.strangersOf {
		t.Errorf("%d strangers of one address are connected, want %d", len(open), tight.strangersOf)
	}
	if err := checkHealth(t, address, member); err != nil {
		t.Errorf("a member: %v", err)
	}
	for _, conn := range open {
		if !closedWithin(conn, tight.stranger+2*time.Second) {
			t.Error("a stranger stays")
		}
	}
}

// A stranger's calls are bounded, and so are those of a member, whatever number of connections they
// come over.
func TestCallsOfAPeerAreBounded(t *testing.T) {
	address, member, _ := closedServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	watch := func() error {
		conn, err := Dial(address, member)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		stream, err := grpc_health_v1.NewHealthClient(conn).Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	for i := range tight.memberCalls + 2 {
		err := watch()
		if i < tight.memberCalls && err != nil {
			t.Fatalf("watch %d of a member: %v", i+1, err)
		}
		if i >= tight.memberCalls && status.Code(err) != codes.ResourceExhausted {
			t.Errorf("watch %d of a member: %v, want it to be refused", i+1, err)
		}
	}
}

// A request of a stranger that is too long is refused by its length.
func TestLongMessagesAreRefused(t *testing.T) {
	address, member, _ := closedServer(t)
	conn, err := Dial(address, member)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = pb.NewIdentitiesClient(conn).Join(t.Context(), &pb.JoinRequest{Proof: make([]byte, 5<<20)}, grpc.MaxCallSendMsgSize(8<<20))
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a message of 5 MiB: %v", err)
	}
}

// A connection is closed when the certificate of its peer ends: who gets no other one is out then.
func TestAConnectionDoesNotOutlastItsCertificate(t *testing.T) {
	for what, left := range map[string]time.Duration{"ends soon": 3 * time.Second, "ends later": time.Hour} {
		address, member, _ := closedServerLater(t, pki.Life-left)
		conn, err := Dial(address, member)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		// Ended by hand: the server knows of a deadline, and may end the call before this end does.
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		time.AfterFunc(6*time.Second, cancel)
		stream, err := grpc_health_v1.NewHealthClient(conn).Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Fatalf("a certificate that %s: %v", what, err)
		}
		_, err = stream.Recv()
		if stays := ctx.Err() != nil; stays != (left == time.Hour) {
			t.Errorf("a certificate that %s: the connection stays: %v, %v", what, stays, err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package managers

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// fakeManager answers with its name, or as answer says.
type fakeManager struct {
	pb.UnimplementedManagerServer
	pb.UnimplementedAgentsServer
	name, address string

	mu     sync.Mutex
	answer error
	calls  int
}

func (f *fakeManager) said() (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	return f.calls, f.answer
}

func (f *fakeManager) set(answer error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls, f.answer = 0, answer
}

func (f *fakeManager) asked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls
}

func (f *fakeManager) GetStatus(context.Context, *pb.GetStatusRequest) (*pb.Status, error) {
	_, err := f.said()
	return &pb.Status{Version: f.name}, err
}

func (f *fakeManager) Target(stream grpc.BidiStreamingServer[pb.TargetReport, pb.TargetWanted]) error {
	if _, err := f.said(); err != nil {
		return err
	}
	return stream.Send(&pb.TargetWanted{ClusterId: f.name})
}

// startManager runs a manager at an address of its own until stop, or the end of the test.
func startManager(t *testing.T, name string) (f *fakeManager, stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f = &fakeManager{name: name, address: listener.Addr().String()}
	server := grpc.NewServer()
	pb.RegisterManagerServer(server, f)
	pb.RegisterAgentsServer(server, f)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	stop = sync.OnceFunc(func() { server.Stop(); <-ended })
	t.Cleanup(stop)
	return f, stop
}

func follow(leader string) error {
	info := &errdetails.ErrorInfo{Reason: pb.ReasonNotLeader, Metadata: map[string]string{pb.LeaderKey: leader}}
	s, _ := status.New(codes.Unavailable, "this volume manager does not lead").WithDetails(info) //nolint:errcheck // plain data
	return s.Err()
}

func dialAll(t *testing.T, addresses ...string) *Conn {
	t.Helper()
	m, err := Connect(strings.Join(addresses, ","), func(address string) (*grpc.ClientConn, error) {
		return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// asks returns the manager that answers a call and, after at most a few streams that end, the one
// that serves a stream.
func asks(t *testing.T, m *Conn) (call, stream string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := pb.NewManagerClient(m).GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil {
		t.Fatalf("GetStatus = %v", err)
	}
	return s.GetVersion(), streams(t, ctx, m)
}

func streams(t *testing.T, ctx context.Context, m *Conn) string {
	t.Helper()
	var err error
	for range 4 {
		var open grpc.BidiStreamingClient[pb.TargetReport, pb.TargetWanted]
		if open, err = pb.NewAgentsClient(m).Target(ctx); err != nil {
			continue
		}
		var w *pb.TargetWanted
		if w, err = open.Recv(); err == nil {
			return w.GetClusterId()
		}
	}
	t.Fatalf("after four streams: %v", err)
	return ""
}

func TestACallGoesToTheManagerThatLeads(t *testing.T) {
	a, stopA := startManager(t, "a")
	b, stopB := startManager(t, "b")
	m := dialAll(t, a.address, b.address)
	if call, stream := asks(t, m); call != "a" || stream != "a" || b.asked() > 0 {
		t.Errorf("the first of two that answer is not asked alone: call %s, stream %s", call, stream)
	}
	a.set(follow(b.address))
	if call, stream := asks(t, m); call != "b" || stream != "b" || a.asked() != 1 {
		t.Errorf("a follows b: call %s, stream %s, a asked %d times; want b, b, once", call, stream, a.asked())
	}
	a.set(nil)
	stopB()
	if call, stream := asks(t, m); call != "a" || stream != "a" {
		t.Errorf("b is gone: call %s, stream %s", call, stream)
	}
	c, _ := startManager(t, "c")
	a.set(follow(c.address))
	if call, stream := asks(t, m); call != "c" || stream != "c" {
		t.Errorf("a follows one that is not in the list: call %s, stream %s", call, stream)
	}
	stopA()
	m.Next()
	if call, stream := asks(t, m); call != "c" || stream != "c" {
		t.Errorf("after the next one was asked for, with c alone there: call %s, stream %s", call, stream)
	}
}

// Streams alone find the leader too: an agent makes no calls at first.
func TestAStreamGoesToTheManagerThatLeads(t *testing.T) {
	a, _ := startManager(t, "a")
	b, _ := startManager(t, "b")
	gone, stop := startManager(t, "gone")
	stop()
	a.set(follow(b.address))
	if got := streams(t, t.Context(), dialAll(t, gone.address, a.address, b.address)); got != "b" {
		t.Errorf("the stream is to %s, want b", got)
	}
}

// A manager names the leader by an address at which something else answers here, a proxy or a firewall for example.
// The list has the leader under another address, and that is found, whoever names it.
func TestALeaderIsFoundThoughItsAddressLeadsElsewhere(t *testing.T) {
	proxy := startProxy(t)
	a, _ := startManager(t, "a")
	b, _ := startManager(t, "b")
	c, _ := startManager(t, "c")
	a.set(follow(proxy))
	c.set(follow(proxy))
	for _, list := range [][]string{{a.address, b.address, c.address}, {c.address, a.address, b.address}, {a.address, c.address, b.address}} {
		if call, stream := asks(t, dialAll(t, list...)); call != "b" || stream != "b" {
			t.Errorf("with %v the call was answered by %q and the stream by %q, want b", list, call, stream)
		}
	}
	m := dialAll(t, proxy)
	if _, err := pb.NewManagerClient(m).GetStatus(t.Context(), &pb.GetStatusRequest{}); !strings.Contains(fmt.Sprint(err), "404") {
		t.Errorf("where nothing else answers: %v, want what it says", err)
	}
}

// startProxy answers HTTP/2 requests that there is no such page.
func startProxy(t *testing.T) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.NotFoundHandler(), Protocols: new(http.Protocols), ReadHeaderTimeout: time.Minute}
	server.Protocols.SetUnencryptedHTTP2(true)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	t.Cleanup(func() { server.Close(); <-ended })
	return listener.Addr().String()
}

// A refusal by the leader is not retried at another manager.
func TestARefusalIsNotAskedElsewhere(t *testing.T) {
	a, _ := startManager(t, "a")
	b, _ := startManager(t, "b")
	a.set(status.Error(codes.FailedPrecondition, "no"))
	_, err := pb.NewManagerClient(dialAll(t, a.address, b.address)).GetStatus(t.Context(), &pb.GetStatusRequest{})
	if status.Code(err) != codes.FailedPrecondition || a.asked() != 1 || b.asked() != 0 {
		t.Errorf("GetStatus = %v, a asked %d times, b %d", err, a.asked(), b.asked())
	}
}

// A manager names a leader that has just died, until it leads itself.
func TestACallWaitsForTheElection(t *testing.T) {
	a, _ := startManager(t, "a")
	gone, stop := startManager(t, "gone")
	stop()
	a.set(follow(gone.address))
	elected := time.AfterFunc(300*time.Millisecond, func() { a.set(nil) })
	defer elected.Stop()
	got, err := pb.NewManagerClient(dialAll(t, gone.address, a.address)).GetStatus(t.Context(), &pb.GetStatusRequest{})
	if err != nil || got.GetVersion() != "a" {
		t.Errorf("GetStatus = %v, %v; want the answer of a", got, err)
	}
}

// If no manager leads, a call ends: its caller decides whether to wait longer.
func TestACallEndsWhereNobodyLeads(t *testing.T) {
	a, _ := startManager(t, "a")
	b, _ := startManager(t, "b")
	a.set(follow(b.address))
	b.set(follow(a.address))
	managers := dialAll(t, a.address, b.address)
	managers.patience = 0
	_, err := pb.NewManagerClient(managers).GetStatus(t.Context(), &pb.GetStatusRequest{})
	if _, notLeader := pb.NotLeader(err); !notLeader || a.asked()+b.asked() > 4 {
		t.Errorf("GetStatus = %v after asking %d and %d times", err, a.asked(), b.asked())
	}
}

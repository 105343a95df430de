// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
)

var discard = slog.New(slog.DiscardHandler)

// journal records what happened, in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

// part runs until stopped, and records the start and the end.
func (j *journal) part(name string, started chan<- struct{}) Part {
	return Part{Name: name, Run: func(ctx context.Context) error {
		started <- struct{}{}
		<-ctx.Done()
		j.add(name + " stopped")
		return ctx.Err()
	}}
}

func TestRunStopsPartsInReverseOrder(t *testing.T) {
	var j journal
	started := make(chan struct{}, 3)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for range 3 {
			<-started
		}
		cancel()
	}()
	err := Run(ctx, discard, j.part("store", started), j.part("loop", started), j.part("server", started))
	want := []string{"server stopped", "loop stopped", "store stopped"}
	if err != nil || !slices.Equal(j.lines, want) {
		t.Errorf("Run = %v after %v, want nil after %v", err, j.lines, want)
	}
}

func TestRunEndsWhenAPartFails(t *testing.T) {
	var j journal
	broken := errors.New("disk on fire")
	started := make(chan struct{}, 1)
	err := Run(t.Context(), discard, j.part("store", started),
		Part{"loop", func(context.Context) error { return broken }})
	if !errors.Is(err, broken) || err.Error() != "loop: disk on fire" || len(j.lines) != 1 {
		t.Errorf("Run = %v after %v, want loop: %v after the store stopped", err, j.lines, broken)
	}
	err = Run(t.Context(), discard, Part{"loop", func(context.Context) error { return nil }})
	if err == nil {
		t.Error("Run = nil where a part ended by itself, want an error")
	}
}

// systemd is a socket as systemd gives to a daemon, and the messages received on it.
func systemd(t *testing.T) *net.UnixConn {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	t.Setenv("NOTIFY_SOCKET", socket)
	return conn
}

func expect(t *testing.T, conn *net.UnixConn, want string) {
	t.Helper()
	b := make([]byte, 100)
	conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	n, err := conn.Read(b)
	if got := string(b[:n]); err != nil || got != want {
		t.Errorf("notification = %q, %v; want %q", got, err, want)
	}
}

func TestRunTellsSystemdOfItsState(t *testing.T) {
	conn := systemd(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- Run(ctx, discard, Part{"idle", func(ctx context.Context) error { <-ctx.Done(); return nil }})
	}()
	expect(t, conn, "READY=1")
	cancel()
	expect(t, conn, "STOPPING=1")
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
}

func TestWatchdogSpeaksOnlyWhileAlive(t *testing.T) {
	if _, ok := Watchdog(discard, nil); ok {
		t.Error("Watchdog is on where systemd did not ask for it")
	}
	conn := systemd(t)
	t.Setenv("WATCHDOG_USEC", "30000")
	answers := make(chan error, 3)
	answers <- nil
	answers <- errors.New("stuck")
	answers <- nil
	ctx, cancel := context.WithCancel(t.Context())
	part, ok := Watchdog(discard, func(context.Context) error {
		select {
		case err := <-answers:
			return err
		default:
			cancel()
			return ctx.Err()
		}
	})
	if !ok {
		t.Fatal("Watchdog is off, want on")
	}
	if err := part.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("watchdog = %v, want canceled", err)
	}
	expect(t, conn, "WATCHDOG=1")
	expect(t, conn, "WATCHDOG=1")
	conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if n, err := conn.Read(make([]byte, 100)); err == nil {
		t.Errorf("a third notification of %d bytes came, want two for three answers of which one was bad", n)
	}
}

func TestLoggerRefusesUnknownFlags(t *testing.T) {
	for _, o := range []Options{{LogFormat: "xml", LogLevel: "info"}, {LogFormat: "text", LogLevel: "loud"}} {
		if _, err := o.Logger(io.Discard); err == nil {
			t.Errorf("Logger with %+v succeeded", o)
		}
	}
	var b bytes.Buffer
	log, err := (&Options{LogFormat: "json", LogLevel: "warn"}).Logger(&b)
	if err != nil {
		t.Fatal(err)
	}
	log.Info("quiet")
	log.Warn("leg failed", "leg", 3)
	if got := b.String(); strings.Contains(got, "quiet") || !strings.Contains(got, `"msg":"leg failed","leg":3`) {
		t.Errorf("log = %q, want the warning alone, as json", got)
	}
}

// serve runs a server on a free port of this machine until the test ends.
func serve(t *testing.T, files TLSFiles, m *Metrics) (address string) {
	t.Helper()
	server, err := NewServer(files, m, access.Guard{})
	if err != nil {
		t.Fatal(err)
	}
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
			t.Errorf("serve = %v, want nil", err)
		}
	})
	return listener.Addr().String()
}

func checkHealth(t *testing.T, address string, files TLSFiles) error {
	t.Helper()
	conn, err := Dial(address, files)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	return err
}

func TestServerAnswersAndCounts(t *testing.T) {
	m := NewMetrics()
	address := serve(t, TLSFiles{}, m)
	if err := checkHealth(t, address, TLSFiles{}); err != nil {
		t.Fatalf("health = %v, want nil", err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- ServeHTTP(discard, "metrics", listener, m.routes(Readers{})).Run(ctx) }()
	reply, err := http.Get("http://" + listener.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(reply.Body)
	reply.Body.Close()
	if want := `weft_grpc_calls_total{code="OK",method="Check"} 1`; !strings.Contains(string(text), want) {
		t.Errorf("/metrics has no line %q", want)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("metrics = %v, want nil", err)
	}
}

func TestServerStopsInSpiteOfAnEndlessStream(t *testing.T) {
	server, err := NewServer(TLSFiles{}, NewMetrics(), access.Guard{})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- Serve(discard, listener, server).Run(ctx) }()
	conn, err := Dial(listener.Addr().String(), TLSFiles{})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	watch, err := grpc_health_v1.NewHealthClient(conn).Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("serve = %v, want nil", err)
		}
	case <-time.After(stopTime + 5*time.Second):
		t.Error("the server did not stop")
	}
}

// A peer that says hello and then nothing, not even an answer to pings, looks to the server like a
// machine that lost its power.
func TestServerDropsASilentPeerWithinSixSeconds(t *testing.T) {
	address := serve(t, TLSFiles{}, NewMetrics())
	// It takes 5 s. A machine that is busy with other tests may lose a second once.
	var took time.Duration
	for range 3 {
		if took = dropped(t, address); took <= 6*time.Second {
			return
		}
	}
	t.Errorf("the connection was closed after %v, three times; want it closed within 6s", took)
}

// dropped is how long a server keeps a connection whose peer is silent.
func dropped(t *testing.T, address string) time.Duration {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	start := time.Now()
	if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil {
		t.Fatal(err)
	}
	conn.SetReadDeadline(start.Add(30 * time.Second))
	if _, err = io.Copy(io.Discard, conn); err != nil {
		t.Fatalf("the connection ended with %v, want it closed", err)
	}
	return time.Since(start)
}

func TestDialNamesWhatIsWrong(t *testing.T) {
	for address, want := range map[string]string{"m1": "must be host:port"} {
		if _, err := Dial(address, TLSFiles{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Dial(%q) = %v, want %q", address, err, want)
		}
	}
	for flag, files := range map[string]TLSFiles{
		"--tls-ca: ":                    {Cert: "x", Key: "y"},
		"--tls-ca: open /nope: ":        {CA: "/nope"},
		"--tls-ca: no certificate in ":  {CA: "daemon_test.go"},
		"--tls-cert, --tls-key: open x": {CA: newAuthority(t).issue(t, t.TempDir(), "m1").CA, Cert: "x", Key: "y"},
	} {
		if _, err := Dial("m1:4480", files); err == nil || !strings.HasPrefix(err.Error(), flag) {
			t.Errorf("Dial with %+v = %v, want it to name the flag and the file: %q", files, err, flag)
		}
	}
}

func TestADeadAddressIsUnavailableAtOnce(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	if err := checkHealth(t, address, TLSFiles{}); status.Code(err) != codes.Unavailable {
		t.Errorf("health at a closed port = %v, want Unavailable", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"weft.dev/weft/proto/pb"
)

// logBuffer is a log that several goroutines write to.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// served is a part of a driver on a socket, until the test or stop ends it.
type served struct {
	conn *grpc.ClientConn
	stop context.CancelFunc
	done chan error
}

func serve(t *testing.T, newServer func(stopping context.Context) *grpc.Server) *served {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &served{conn, stop, make(chan error, 1)}
	server := newServer(ctx)
	context.AfterFunc(ctx, server.GracefulStop)
	go func() { s.done <- server.Serve(listener) }()
	t.Cleanup(func() { conn.Close(); stop() })
	return s
}

func newDriver(t *testing.T, m *fakeManager, mode Mode, log *logBuffer) *Driver {
	t.Helper()
	d, err := New(Config{
		Manager: m, Mode: mode, Node: "n1", Version: "1", SlowAfter: time.Millisecond,
		Log: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestConfigMustSayWhatIsServed(t *testing.T) {
	for _, cfg := range []Config{{}, {Manager: newFakeManager()}, {Manager: newFakeManager(), Mode: ModeNode}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("New(%+v) succeeded", cfg)
		}
	}
	if _, err := New(Config{Manager: newFakeManager(), Mode: ModeController}); err != nil {
		t.Errorf("New of a controller without a node = %v", err)
	}
}

func TestModesServeTheirServices(t *testing.T) {
	for _, mode := range []Mode{ModeAll, ModeController, ModeNode} {
		s := serve(t, newDriver(t, newFakeManager(), mode, &logBuffer{}).Server)
		if info, err := csi.NewIdentityClient(s.conn).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{}); err != nil || info.Name != DriverName {
			t.Errorf("mode %s: GetPluginInfo = %v, %v", mode, info, err)
		}
		_, err := csi.NewControllerClient(s.conn).ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
		if (err == nil) != mode.controller() {
			t.Errorf("mode %s: the controller's answer = %v", mode, err)
		}
		_, err = csi.NewNodeClient(s.conn).NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{})
		if strings.Contains(status.Convert(err).Message(), "unknown service") == mode.node() {
			t.Errorf("mode %s: the node's answer = %v", mode, err)
		}
	}
}

func TestProbeTellsWhetherTheManagerAnswers(t *testing.T) {
	m := newFakeManager()
	identity := csi.NewIdentityClient(serve(t, newDriver(t, m, ModeController, &logBuffer{}).Server).conn)
	for _, up := range []bool{true, false} {
		m.mu.Lock()
		m.fail = func(string) error {
			if up {
				return nil
			}
			return status.Error(codes.Unavailable, "down")
		}
		m.mu.Unlock()
		if reply, err := identity.Probe(t.Context(), &csi.ProbeRequest{}); err != nil || reply.Ready.GetValue() != up {
			t.Errorf("Probe with the manager up %v = %v, %v; want it ready then, and no error", up, reply, err)
		}
	}
}

func TestCallsAreLoggedWithoutSecretsAndMeasured(t *testing.T) {
	log := &logBuffer{}
	d := newDriver(t, newFakeManager(), ModeController, log)
	client := csi.NewControllerClient(serve(t, d.Server).conn)
	_, err := client.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: firstID, Secrets: map[string]string{"key": "hunter2"}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: firstID, CapacityRange: &csi.CapacityRange{}})
	if status.Code(err) != codes.NotFound {
		t.Fatal(err)
	}
	text := log.String()
	for _, want := range []string{"rpc=DeleteVolume", "request=", "volume=" + firstID, "code=OK", "level=WARN msg=answered rpc=ControllerExpandVolume", "code=NotFound", "took="} {
		if !strings.Contains(text, want) {
			t.Errorf("the log lacks %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "hunter2") || !strings.Contains(text, "***stripped***") {
		t.Errorf("the log shows a secret:\n%s", text)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(d)
	families, err := registry.Gather()
	if err != nil || len(families) != 1 || families[0].GetName() != "csi_plugin_operations_seconds" || len(families[0].Metric) != 2 {
		t.Errorf("metrics = %v, %v; want one series for each method and code", families, err)
	}
}

// lineOf is the log line with this message.
func lineOf(log *logBuffer, message string) string {
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "msg="+message+" ") {
			return line
		}
	}
	return ""
}

func TestTheVolumeThatIsMadeIsInTheLog(t *testing.T) {
	m, log := newFakeManager(), &logBuffer{}
	m.stuck = true
	client := csi.NewControllerClient(serve(t, newDriver(t, m, ModeController, log).Server).conn)
	ctx, cancel := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() {
		_, err := client.CreateVolume(ctx, createRequest("pvc-1"))
		answer <- err
	}()
	until(t, "the driver waits for the volume", func() bool { return lineOf(log, "waiting") != "" })
	cancel()
	refused(t, "create what does not come to its end", <-answer, codes.Canceled)
	until(t, "the driver ends the call", func() bool { return lineOf(log, "answered") != "" })
	for _, message := range []string{"waiting", "answered"} {
		if line := lineOf(log, message); !strings.Contains(line, " name=pvc-1 volume="+firstID+" ") {
			t.Errorf("the line %q lacks the name or the volume's id: %q", message, line)
		}
	}
}

func TestTheManagerIsToldTheRequest(t *testing.T) {
	log := &logBuffer{}
	d := newDriver(t, newFakeManager(), ModeController, log)
	told := map[string]bool{}
	for range 2 {
		_, err := d.observe(t.Context(), &csi.DeleteVolumeRequest{VolumeId: firstID}, &grpc.UnaryServerInfo{FullMethod: "/csi.v1.Controller/DeleteVolume"},
			func(ctx context.Context, _ any) (any, error) {
				sent, _ := metadata.FromOutgoingContext(ctx)
				for _, request := range sent[pb.RequestKey] {
					told[request] = true
				}
				return nil, nil
			})
		if err != nil {
			t.Fatal(err)
		}
	}
	for request := range told {
		if !strings.Contains(log.String(), "request="+request+" volume="+firstID) {
			t.Errorf("told is %q, which is not in the log:\n%s", request, log)
		}
	}
	if len(told) != 2 {
		t.Errorf("two calls are told as %v", told)
	}
}

func TestAPanicIsAnAnswerThatIsNotFinal(t *testing.T) {
	m := newFakeManager()
	m.fail = func(string) error { panic("broken invariant") }
	log := &logBuffer{}
	client := csi.NewControllerClient(serve(t, newDriver(t, m, ModeController, log).Server).conn)
	for range 2 { // the second one shows that the first has not kept the volume
		_, err := client.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: firstID})
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "broken invariant") {
			t.Errorf("a call that panics = %v, want Unavailable with the cause", err)
		}
	}
	if !strings.Contains(log.String(), "level=ERROR msg=panic") {
		t.Errorf("the log lacks the panic:\n%s", log)
	}
}

// A driver that is stopped answers the waiting calls, and ends.
func TestStoppingEndsCallsThatWait(t *testing.T) {
	m := newFakeManager()
	m.stuck = true
	log := &logBuffer{}
	s := serve(t, newDriver(t, m, ModeController, log).Server)
	answer := make(chan error, 1)
	go func() {
		_, err := csi.NewControllerClient(s.conn).CreateVolume(context.Background(), createRequest("pvc-1"))
		answer <- err
	}()
	deadline := time.Now().Add(10 * time.Second)
	for !strings.Contains(log.String(), "call is slow") {
		if time.Now().After(deadline) {
			t.Fatalf("the log never calls it slow:\n%s", log)
		}
		time.Sleep(time.Millisecond)
	}
	s.stop()
	if err := <-answer; status.Code(err) != codes.Canceled || !strings.Contains(err.Error(), "waiting for") {
		t.Errorf("the call = %v, want Canceled that says what it waited for", err)
	}
	if err := <-s.done; err != nil {
		t.Errorf("Serve = %v, want none", err)
	}
}

func TestTheKubeletRegistersTheDriver(t *testing.T) {
	server, refused := newDriver(t, newFakeManager(), ModeNode, &logBuffer{}).Registration("/var/lib/kubelet/csi.sock")
	s := serve(t, func(context.Context) *grpc.Server { return server })
	kubelet := registerapi.NewRegistrationClient(s.conn)
	info, err := kubelet.GetInfo(t.Context(), &registerapi.InfoRequest{})
	if err != nil || info.Type != "CSIPlugin" || info.Name != DriverName || info.Endpoint != "/var/lib/kubelet/csi.sock" || len(info.SupportedVersions) != 1 {
		t.Errorf("GetInfo = %v, %v", info, err)
	}
	if _, err := kubelet.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Error(err)
	}
	select {
	case err := <-refused:
		t.Fatalf("the driver that was registered is told: %v", err)
	default:
	}
	for range 2 { // the kubelet may repeat it
		if _, err := kubelet.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{Error: "name taken"}); err != nil {
			t.Error(err)
		}
	}
	if err := <-refused; !strings.Contains(err.Error(), "name taken") {
		t.Errorf("the driver that was refused is told: %v, want the kubelet's cause", err)
	}
}

func TestAliveTellsWhetherTheDriverAnswers(t *testing.T) {
	m := newFakeManager()
	m.fail = func(string) error { return status.Error(codes.Unavailable, "down") }
	s := serve(t, newDriver(t, m, ModeController, &logBuffer{}).Server)
	socket := strings.TrimPrefix(s.conn.Target(), "unix://")
	if err := Alive(t.Context(), socket); err != nil {
		t.Errorf("Alive of a driver whose manager is down = %v, want none", err)
	}
	s.stop()
	<-s.done
	if err := Alive(t.Context(), socket); err == nil {
		t.Error("Alive of a driver that has ended = none")
	}
}

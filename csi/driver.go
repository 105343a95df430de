// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// DriverName is what StorageClasses and CSINode objects call the driver.
const DriverName = "csi.weft.dev"

// Mode says which services a process serves.
type Mode string

// The modes. Identity is served in each.
const (
	ModeAll        Mode = "all"
	ModeController Mode = "controller"
	ModeNode       Mode = "node"
)

// ParseMode checks a mode's name.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case ModeAll, ModeController, ModeNode:
		return m, nil
	}
	return "", fmt.Errorf("mode %q: must be controller, node or all", s)
}

func (m Mode) controller() bool { return m != ModeNode }
func (m Mode) node() bool       { return m != ModeController }

// Config is the configuration of a driver.
type Config struct {
	Manager pb.ManagerClient // the only other process that the driver talks to
	Mode    Mode             // empty: all
	Node    block.NodeName   // this node's name in Weft; required to serve the node
	Version string
	Log     *slog.Logger // nil: no log

	// KubeletDir is the kubelet's root directory, which holds all staging and target paths. Empty:
	// unknown, any path is accepted.
	KubeletDir string
	// MaxVolumes is how many volumes a node may have; 0 leaves the limit to the CO.
	MaxVolumes int
	// DetachGrace is how long a node may take to release a volume before it is fenced; a node that
	// the manager has not heard from for that long is fenced at once. 0 means 15 s.
	DetachGrace time.Duration
	// SlowAfter is how long a call may take before the log reports that it is still under way; 0
	// means 30 s.
	SlowAfter time.Duration
}

// Driver serves the CSI services. It is a prometheus.Collector of the answered calls.
type Driver struct {
	cfg        Config
	identity   *identityServer
	controller *controllerServer
	node       *nodeServer
	metrics    *metrics
	requests   *requestIDs
}

// New makes a driver. It starts nothing and makes no calls.
func New(cfg Config) (*Driver, error) {
	if cfg.Mode == "" {
		cfg.Mode = ModeAll
	}
	switch {
	case cfg.Manager == nil:
		return nil, errors.New("csi driver: Manager is missing")
	case cfg.Mode.node() && cfg.Node == "":
		return nil, fmt.Errorf("csi driver: Node is missing, mode %s needs it", cfg.Mode)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.DetachGrace == 0 {
		cfg.DetachGrace = defaultGrace
	}
	if cfg.SlowAfter == 0 {
		cfg.SlowAfter = 30 * time.Second
	}
	d := &Driver{
		cfg:        cfg,
		identity:   newIdentity(cfg),
		controller: newController(cfg),
		node:       newNode(cfg),
		metrics:    newMetrics(),
		requests:   newRequestIDs(),
	}
	d.node.took = func(step string, t time.Duration) { d.metrics.steps.WithLabelValues(step).Observe(t.Seconds()) }
	return d, nil
}

// Server makes a gRPC server of the mode's services. When stopping ends, the calls under way are
// cancelled through their contexts, so that they answer; the caller then stops the server. Work
// that waits in the kernel cannot be cancelled, and may outlast it.
func (d *Driver) Server(stopping context.Context) *grpc.Server {
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(d.observe, endWith(stopping)), grpc.StreamInterceptor(d.observeStream(stopping)))
	csi.RegisterIdentityServer(server, d.identity)
	if d.cfg.Mode.controller() {
		csi.RegisterControllerServer(server, d.controller)
		csi.RegisterGroupControllerServer(server, d.controller)
		csi.RegisterSnapshotMetadataServer(server, d.controller)
	}
	if d.cfg.Mode.node() {
		csi.RegisterNodeServer(server, d.node)
	}
	return server
}

// endWith cancels the calls when the driver is told to stop.
func endWith(stopping context.Context) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(stopping, cancel)()
		return handle(ctx, req)
	}
}

// Describe and Collect make the driver's metrics a prometheus.Collector.
func (d *Driver) Describe(ch chan<- *prometheus.Desc) {
	d.metrics.seconds.Describe(ch)
	d.metrics.steps.Describe(ch)
}

// Collect is the other half of Describe.
func (d *Driver) Collect(ch chan<- prometheus.Metric) {
	d.metrics.seconds.Collect(ch)
	d.metrics.steps.Collect(ch)
}

// registration tells the kubelet where the driver's node service is. It replaces the usual sidecar,
// node-driver-registrar.
type registration struct {
	registerapi.UnimplementedRegistrationServer
	endpoint string // path of the node service's socket, as the kubelet sees it

	once    sync.Once
	refused chan error
}

// Registration makes the server that the kubelet's plugin watcher asks about the driver. The
// endpoint is the path of the socket on which [Driver.Server] answers, as the kubelet sees it. If
// the kubelet refuses the driver, refused delivers one error, and serving further is useless.
func (d *Driver) Registration(endpoint string) (server *grpc.Server, refused <-chan error) {
	r := &registration{endpoint: endpoint, refused: make(chan error, 1)}
	server = grpc.NewServer(grpc.UnaryInterceptor(d.observe))
	registerapi.RegisterRegistrationServer(server, r)
	return server, r.refused
}

// GetInfo says who the driver is and where it answers.
func (r *registration) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: DriverName, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus is called by the kubelet to say whether it uses the driver.
func (r *registration) NotifyRegistrationStatus(ctx context.Context, s *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	if s.PluginRegistered {
		logOf(ctx).Info("registered with the kubelet", "endpoint", r.endpoint)
		return &registerapi.RegistrationStatusResponse{}, nil
	}
	r.once.Do(func() { r.refused <- fmt.Errorf("register with the kubelet: %s", s.Error) })
	return &registerapi.RegistrationStatusResponse{}, nil
}

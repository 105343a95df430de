// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// DriverName is what StorageClasses and CSINode objects call the driver.
const DriverName = "csi.weft.dev"

// Mode is which of the services a process serves.
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

// Config is what a driver is made with.
type Config struct {
	Manager pb.ManagerClient // the one thing that the driver talks to
	Mode    Mode             // empty: all
	Node    block.NodeName   // this node as Weft knows it; needed to serve the node
	Version string
	Log     *slog.Logger // nil: nothing is logged

	// KubeletDir is the kubelet's root directory, below which all staging and
	// target paths of a kubelet lie. Empty: not known, any path is served.
	KubeletDir string
	// MaxVolumes is how many volumes a node may have; 0 leaves it to the CO.
	MaxVolumes int
	// DetachGrace is how long a node may take to let go of a volume before it is
	// fenced; one that the manager has not heard for as long before is not waited for.
	// 0 means 15 s.
	DetachGrace time.Duration
	// SlowAfter is how long a call may take before the log says that it is still
	// under way; 0 means 30 s.
	SlowAfter time.Duration
}

// Driver serves the CSI services. It is a prometheus.Collector of the calls
// that it has answered.
type Driver struct {
	cfg        Config
	identity   *identityServer
	controller *controllerServer
	node       *nodeServer
	metrics    *metrics
	requests   *requestIDs
}

// New makes a driver. It starts nothing and calls nobody.
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

// Server makes a gRPC server of the mode's services. Calls that are under way when
// stopping ends are told by their context, so that they answer; who serves stops
// the server then. What waits in the kernel cannot be told, and may outlast it.
func (d *Driver) Server(stopping context.Context) *grpc.Server {
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(d.observe, endWith(stopping)))
	csi.RegisterIdentityServer(server, d.identity)
	if d.cfg.Mode.controller() {
		csi.RegisterControllerServer(server, d.controller)
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/kubeapi"
	"weft.dev/weft/cmd/internal/member"
	"weft.dev/weft/csi"
	"weft.dev/weft/csi/drain"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pki"
)

type csiOptions struct {
	daemon.Options
	manager       string
	tls           daemon.TLSFiles
	plain         bool
	join          string
	stateDir      string
	endpoint      string
	mode, node    string
	kubeletDir    string
	registration  string
	kubeletSocket string
	maxVolumes    int
	detachGrace   time.Duration
	slowAfter     time.Duration
	claimEvents   bool
	guards        string
	guarded       string
}

func newCSI(g *cli.Globals) *cobra.Command {
	var o csiOptions
	cmd := &cobra.Command{
		Use:   "csi",
		Short: "Run the CSI driver, which provides volumes to Kubernetes pods",
		Long: `Run the CSI driver ` + csi.DriverName + `. One process with --mode controller
serves a cluster, beside Kubernetes' sidecars, and needs no privileges. One with
--mode node runs on each node that uses volumes, beside "weft initiator". It
needs root to mount, and registers itself with the kubelet. Neither stores any
state: both can be stopped at any time, and mounted volumes keep serving.`,
		Example: "  weft csi --mode controller --endpoint unix:///csi/csi.sock --manager m1:4480\n" +
			"  weft csi --mode node --node gpu1 --kubelet-socket /var/lib/kubelet/plugins/" + csi.DriverName + "/csi.sock",
		Args: cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.manager, o.tls, o.plain = g.Manager, g.TLS, g.Plain
			return runCSI(cmd.Context(), o, g)
		},
	}
	o.AddFlags(cmd)
	addJoin(cmd, &o.join)
	f := cmd.Flags()
	f.StringVar(&o.stateDir, "state-dir", "/var/lib/weft/csi", "`directory` that keeps this driver's key and certificate")
	f.StringVar(&o.endpoint, "endpoint", cmp.Or(os.Getenv("CSI_ENDPOINT"), "unix:///csi/csi.sock"), "unix `socket` to answer on [CSI_ENDPOINT]")
	f.StringVar(&o.mode, "mode", string(csi.ModeAll), "`services` to run: controller, node or all")
	f.StringVar(&o.node, "node", "", "`name` of this node, the same as for \"weft initiator\" (default: this host's name)")
	f.StringVar(&o.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "the kubelet's root `directory`")
	f.StringVar(&o.registration, "registration", "", "`socket` to register with the kubelet on, or off (default: below plugins_registry in the kubelet's directory)")
	f.StringVar(&o.kubeletSocket, "kubelet-socket", "", "`path` of the endpoint as the kubelet sees it (default: as this process does)")
	f.IntVar(&o.maxVolumes, "max-volumes", 0, "largest `number` of volumes on a node; 0: no limit")
	f.DurationVar(&o.detachGrace, "detach-grace", 15*time.Second, "how long a node may take to release a volume before it is fenced; a node that has been silent this long is fenced at once")
	f.DurationVar(&o.slowAfter, "slow-after", 30*time.Second, "log a call that is still running after this long")
	f.BoolVar(&o.claimEvents, "claim-events", false, "report changes of volumes as events on their PersistentVolumeClaims; in a pod, for the controller")
	f.StringVar(&o.guards, "drain-guards", "", "`name` of the StatefulSet and the PodDisruptionBudget of the guards of storage nodes, which can be drained when volumes in use can do without them; in a pod, for the controller")
	f.StringVar(&o.guarded, "drain-guarded", "weft-target", "`name` of the DaemonSet of the targets, for --drain-guards")
	return cmd
}

func runCSI(ctx context.Context, o csiOptions, g *cli.Globals) (err error) {
	log, err := o.Logger(g.Stderr)
	if err != nil {
		return cli.UsageError{Err: err}
	}
	cfg, socket, err := o.config()
	if err != nil {
		return err
	}
	metrics := daemon.NewMetrics()
	conn, files, keep, err := o.connect(ctx, log, metrics)
	if err != nil {
		return err
	}
	defer conn.Close()
	cfg.Manager, cfg.Log = pages.Client(conn), log
	driver, err := csi.New(cfg)
	if err != nil {
		return err
	}
	listener, err := daemon.ListenUnix(socket)
	if err != nil {
		return fmt.Errorf("--endpoint: %w", err)
	}
	defer listener.Close()
	metrics.Alive = func(ctx context.Context) error { return csi.Alive(ctx, socket) }
	parts, err := daemon.ServeMetrics(o.Options, log, metrics, driver, daemon.Readers{TLS: files, Plain: o.plain})
	if err != nil {
		return err
	}
	parts = append(parts, keep...)
	parts = append(parts, daemon.Part{Name: "csi", Run: func(ctx context.Context) error {
		return daemon.Serve(log, listener, driver.Server(ctx)).Run(ctx)
	}})
	if path := o.registrationSocket(); path != "" {
		registry, err := daemon.ListenUnix(path)
		if err != nil {
			return fmt.Errorf("--registration: %w", err)
		}
		defer registry.Close()
		server, refused := driver.Registration(cmp.Or(o.kubeletSocket, socket))
		parts = append(parts, daemon.Serve(log, registry, server), daemon.Part{Name: "registration", Run: func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case err := <-refused:
				return err
			}
		}})
	}
	more, err := o.kubernetesParts(driver, cfg)
	if err != nil {
		return err
	}
	parts = append(parts, more...)
	log.Info("starting", "mode", cfg.Mode, "node", cfg.Node, "manager", o.manager, "version", version())
	return daemon.Run(ctx, log, parts...)
}

// kubernetesParts are those that ask Kubernetes' API.
func (o *csiOptions) kubernetesParts(driver *csi.Driver, cfg csi.Config) (parts []daemon.Part, err error) {
	if o.claimEvents {
		api, err := kubeapi.InCluster()
		if err != nil {
			return nil, cli.UsageError{Err: fmt.Errorf("--claim-events: %w", err)}
		}
		parts = append(parts, daemon.Part{Name: "claim events", Run: func(ctx context.Context) error { return driver.ServeClaimEvents(ctx, api) }})
	}
	if o.guards != "" {
		guards, err := kubeapi.NewGuards(o.guards, o.guarded)
		if err != nil {
			return nil, cli.UsageError{Err: fmt.Errorf("--drain-guards: %w", err)}
		}
		c := drain.Config{Kubernetes: guards, Manager: cfg.Manager, Log: cfg.Log}
		parts = append(parts, daemon.Part{Name: "drains", Run: func(ctx context.Context) error { return drain.Serve(ctx, c) }})
	}
	return parts, nil
}

// connect connects the driver to the managers. keep are parts that keep it connected.
func (o *csiOptions) connect(ctx context.Context, log *slog.Logger, metrics *daemon.Metrics) (conn *managers.Conn, files daemon.TLSFiles, keep []daemon.Part, err error) {
	name, err := cli.NodeOrThis(o.node)
	if err != nil {
		return nil, files, nil, err
	}
	e := member.Entry{Managers: o.manager, Path: pki.IdentityIn(o.stateDir), TokenFile: o.join, Role: access.CSI, Node: name, Log: log}
	return connectMember(ctx, o.Options, e, o.tls, o.plain, metrics)
}

// config returns the driver's configuration from the flags, and its socket.
func (o *csiOptions) config() (cfg csi.Config, socket string, err error) {
	fail := func(flag string, err error) (csi.Config, string, error) {
		return csi.Config{}, "", cli.UsageError{Err: fmt.Errorf("--%s: %w", flag, err)}
	}
	mode, err := csi.ParseMode(o.mode)
	if err != nil {
		return fail("mode", err)
	}
	if socket, err = socketPath(o.endpoint); err != nil {
		return fail("endpoint", err)
	}
	if o.maxVolumes < 0 {
		return fail("max-volumes", fmt.Errorf("%d: must not be negative", o.maxVolumes))
	}
	cfg = csi.Config{
		Mode: mode, Version: version(), KubeletDir: o.kubeletDir,
		MaxVolumes: o.maxVolumes, DetachGrace: o.detachGrace, SlowAfter: o.slowAfter,
	}
	if mode != csi.ModeController {
		name, err := cli.NodeOrThis(o.node)
		if err != nil {
			return csi.Config{}, "", err
		}
		if cfg.Node, err = block.ParseNodeName(name); err != nil {
			return fail("node", err)
		}
	}
	return cfg, socket, nil
}

// registrationSocket is where the kubelet looks for plugins; empty if registration is off or there
// is no node to register.
func (o *csiOptions) registrationSocket() string {
	switch {
	case o.mode == string(csi.ModeController) || o.registration == "off":
		return ""
	case o.registration != "":
		return o.registration
	}
	return filepath.Join(o.kubeletDir, "plugins_registry", csi.DriverName+"-reg.sock")
}

// socketPath is the path in an endpoint such as unix:///csi/csi.sock.
func socketPath(endpoint string) (string, error) {
	path := strings.TrimPrefix(strings.TrimPrefix(endpoint, "unix:"), "//")
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("%q: must be unix:// and an absolute path", endpoint)
	}
	return path, nil
}

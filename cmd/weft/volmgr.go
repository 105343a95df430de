// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/volmgr"
)

// volmgrOptions are the flags of the manager, and of what stands in for it.
type volmgrOptions struct {
	daemon.Options
	dataDir, listen string
	nodes           []string      // rebuild-from-drives: who must have reported
	settle          time.Duration // rebuild-from-drives: for how long to wait for them
}

func newVolmgr(g *globals) *cobra.Command {
	var o volmgrOptions
	cmd := &cobra.Command{
		Use:   "volmgr",
		Short: "Run the volume manager",
		Long: `Runs the volume manager: it holds the truth of the cluster, which all agents and
commands ask. Exactly one may run on a data directory. Attached volumes go on
serving while it is stopped; only changes wait for it.`,
		Example: `  weft volmgr --data-dir /var/lib/weft/volmgr
  weft volmgr --listen 192.0.2.10:4480 --metrics-listen :9480 --log-format json`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return needsVerb(cmd, args)
			}
			return runVolmgr(cmd.Context(), o, g)
		},
	}
	o.AddFlags(cmd)
	cmd.Flags().StringVar(&o.dataDir, "data-dir", defaultDataDir, "`directory` of the store")
	cmd.Flags().StringVar(&o.listen, "listen", ":4480", "`address` to answer on")
	cmd.AddCommand(newVolmgrBackup(g))
	return cmd
}

func runVolmgr(ctx context.Context, o volmgrOptions, g *globals) (err error) {
	log, err := o.Logger(g.stderr)
	if err != nil {
		return usageError{err: err}
	}
	m, err := volmgr.New(volmgr.Config{Dir: o.dataDir, Version: version(), Log: log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	metrics := daemon.NewMetrics()
	server, err := daemon.NewServer(g.tls, metrics)
	if err != nil {
		return err
	}
	m.Register(server)
	parts, err := serveMetrics(o.Options, log, metrics, m)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("answer on %s: %w", o.listen, err)
	}
	// The server is stopped first: what it has taken on, the manager still does.
	parts = append(parts, daemon.Part{Name: "manager", Run: m.Run}, daemon.Serve(log, listener, server))
	log.Info("starting", "data", o.dataDir, "version", version())
	return daemon.Run(ctx, log, parts...)
}

const defaultDataDir = "/var/lib/weft/volmgr"

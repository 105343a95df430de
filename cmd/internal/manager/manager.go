// SPDX-License-Identifier: Apache-2.0

// Package manager runs a volume manager in this process, as "weft volmgr" and "weft dev"
// do.
package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
)

// Config is the configuration of a manager.
type Config struct {
	daemon.Options        // only the metrics options are used
	DataDir        string // of the store
	Version        string // of this program
	TLS            daemon.TLSFiles
	ReplaceAfter   time.Duration // see volmgr.Config
}

// Serve runs a manager on a listener until ctx ends. It also runs the parts that more returns, if
// more is not nil: they rely on the manager and stop before it.
func (c Config) Serve(ctx context.Context, listener net.Listener, log *slog.Logger, more func() ([]daemon.Part, error)) (err error) {
	m, err := volmgr.New(volmgr.Config{Dir: c.DataDir, Version: c.Version, Log: log, ReplaceAfter: c.ReplaceAfter})
	if err != nil {
		return fmt.Errorf("open the store in %s: %w", c.DataDir, err)
	}
	// Close comes last: the loop may commit until it has returned.
	defer func() { err = errors.Join(err, m.Close()) }()
	parts, err := c.parts(m, listener, log)
	if err != nil {
		return err
	}
	if more != nil {
		others, err := more()
		if err != nil {
			return err
		}
		parts = append(parts, others...)
	}
	log.Info("starting", "data", c.DataDir, "version", c.Version)
	return daemon.Run(ctx, log, parts...)
}

// parts returns the loop and everything that uses it, which stops before the loop.
func (c Config) parts(m *volmgr.Manager, listener net.Listener, log *slog.Logger) ([]daemon.Part, error) {
	metrics := daemon.NewMetrics()
	server, err := daemon.NewServer(c.TLS, metrics)
	if err != nil {
		return nil, cli.UsageError{Err: err}
	}
	m.Register(server)
	alive := func(ctx context.Context) error {
		_, err := m.GetStatus(ctx, &pb.GetStatusRequest{})
		return err
	}
	metrics.Alive = alive
	parts := []daemon.Part{{Name: "manager", Run: m.Run}}
	measured, err := daemon.ServeMetrics(c.Options, log, metrics, m)
	if err != nil {
		return nil, err
	}
	parts = append(parts, measured...)
	parts = append(parts, daemon.Serve(log, listener, server))
	if watchdog, ok := daemon.Watchdog(log, alive); ok {
		parts = append(parts, watchdog)
	}
	return parts, nil
}

// Collect answers the agents until a rebuild is done, and returns its summary. It takes at most
// timeout.
func Collect(ctx context.Context, rebuild *volmgr.Rebuild, listener net.Listener, log *slog.Logger, tls daemon.TLSFiles, timeout time.Duration) (text string, err error) {
	server, err := daemon.NewServer(tls, daemon.NewMetrics())
	if err != nil {
		return "", cli.UsageError{Err: err}
	}
	rebuild.Register(server)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, cli.LateError{
		After: timeout, Hint: "do these agents run, with --manager set to this address? --timeout gives them longer",
	})
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	serving, stop := context.WithCancel(ctx)
	group.Go(func() error { return daemon.Serve(log, listener, server).Run(serving) })
	group.Go(func() (err error) {
		defer stop()
		text, err = rebuild.Run(ctx)
		return err
	})
	err = group.Wait()
	return text, err
}

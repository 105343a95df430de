// SPDX-License-Identifier: Apache-2.0

// Package manager runs a volume manager in this process, as "weft volmgr" and "weft dev"
// do.
package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr"
)

// Config is the configuration of a manager.
type Config struct {
	daemon.Options        // only the metrics options and Recent are used
	DataDir        string // of the store
	Version        string // of this program
	TLS            daemon.TLSFiles
	Plain          bool          // --insecure-plain-tcp
	ReplaceAfter   time.Duration // see volmgr.Config
	HealAfter      time.Duration // see volmgr.Config
	EvacuateAfter  time.Duration // see volmgr.Config
	HoldFor        time.Duration // see volmgr.Config
	Overcommit     float64       // see volmgr.Config
	Address        string        // where others reach this manager; empty means the listener's
	Keys           *pki.Keyring  // the cluster's own authorities; TLS then names its credential
	Vouch          volmgr.Voucher
	Publish        func(ctx context.Context, authorities string) error // for pods that join; nil: they are not published
	Socket         string                                              // where users of this machine reach this manager, too; empty: nowhere
}

// Serve runs a manager on a listener until ctx ends. It also runs the parts that more returns, if
// more is not nil: they rely on the manager and stop before it.
func (c Config) Serve(ctx context.Context, listener net.Listener, log *slog.Logger, more func() ([]daemon.Part, error)) (err error) {
	m, err := volmgr.New(volmgr.Config{Dir: c.DataDir, Version: c.Version, Log: log, ReplaceAfter: c.ReplaceAfter, HealAfter: c.HealAfter, EvacuateAfter: c.EvacuateAfter, HoldFor: c.HoldFor, Overcommit: c.Overcommit, Keys: c.Keys, Vouch: c.Vouch, Recent: c.recent(), Quorum: &volmgr.Quorum{
		Address: cmp.Or(c.Address, addressOf(listener)),
		Dial:    func(address string) (*grpc.ClientConn, error) { return daemon.DialOne(address, c.TLS) },
	}})
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

// recent returns what returns the newest lines of the log; nil if nobody keeps them.
func (c Config) recent() func() []byte {
	if c.Options.Recent == nil {
		return nil
	}
	return c.Options.Recent.Lines
}

// parts returns the loop and everything that uses it, which stops before the loop.
func (c Config) parts(m *volmgr.Manager, listener net.Listener, log *slog.Logger) ([]daemon.Part, error) {
	metrics := daemon.NewMetrics()
	metrics.ShowCertificate(c.TLS)
	server, err := daemon.NewServer(c.TLS, metrics, m.Guard())
	if err != nil {
		return nil, cli.UsageError{Err: err}
	}
	m.Register(server)
	metrics.Alive = m.Alive
	parts := []daemon.Part{{Name: "manager", Run: m.Run}}
	measured, err := daemon.ServeMetrics(c.Options, log, metrics, m, daemon.Readers{TLS: c.TLS, Plain: c.Plain, Guard: m.Guard()})
	if err != nil {
		return nil, err
	}
	parts = append(parts, measured...)
	parts = append(parts, daemon.Serve(log, listener, server))
	if socket, err := c.listenHere(); err != nil {
		log.Warn("no socket for users of this machine", "path", c.Socket, "err", err)
	} else if socket != nil {
		parts = append(parts, daemon.Serve(log, socket, server))
	}
	if watchdog, ok := daemon.Watchdog(log, m.Alive); ok {
		parts = append(parts, watchdog)
	}
	if c.Publish != nil {
		parts = append(parts, daemon.Part{Name: "authority", Run: func(ctx context.Context) error { return c.publishing(ctx, m, log) }})
	}
	return append(parts, handOver(m, log)), nil
}

// publishEvery is how often the published authorities are compared with the records.
const publishEvery = 30 * time.Second

// publishing publishes the authorities that members trust, while this manager leads.
func (c Config) publishing(ctx context.Context, m *volmgr.Manager, log *slog.Logger) error {
	tick := beat.NewTicker(publishEvery)
	defer tick.Stop()
	for {
		all, err := m.Authorities(ctx)
		if err == nil {
			err = c.Publish(ctx, strings.Join(all, "\n"))
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, volmgr.ErrNotLeading) {
			log.Warn("publish the authority", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// socketMost is how long a socket's path may be.
const socketMost = 107

// listenHere opens the socket for users of this machine. Its file says who that is: the manager's
// own user, and root.
func (c Config) listenHere() (net.Listener, error) {
	if c.Socket == "" {
		return nil, nil
	}
	if len(c.Socket) > socketMost {
		return nil, fmt.Errorf("the path is longer than %d bytes", socketMost)
	}
	listener, err := daemon.ListenUnix(c.Socket)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(c.Socket, 0o600); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

// handOver is a part that makes another manager lead when this one is told to stop, while its
// server still answers the others.
func handOver(m *volmgr.Manager, log *slog.Logger) daemon.Part {
	return daemon.Part{Name: "leadership", Run: func(ctx context.Context) error {
		<-ctx.Done()
		if err := m.HandOver(context.WithoutCancel(ctx)); err != nil {
			log.Warn("hand leadership over", "err", err)
		}
		return nil
	}}
}

// addressOf returns the address of a listener as others dial it. A listener on all addresses of
// the machine is reached by the machine's name.
func addressOf(listener net.Listener) string {
	switch at := listener.Addr().(type) {
	case *net.UnixAddr:
		return daemon.Unix + at.Name
	case *net.TCPAddr:
		if name, err := os.Hostname(); at.IP.IsUnspecified() && err == nil {
			return net.JoinHostPort(name, strconv.Itoa(at.Port))
		}
	}
	return listener.Addr().String()
}

// Collect answers the agents until a rebuild is done, and returns its summary. It takes at most
// timeout.
func Collect(ctx context.Context, rebuild *volmgr.Rebuild, listener net.Listener, log *slog.Logger, tls daemon.TLSFiles, timeout time.Duration) (text string, err error) {
	server, err := daemon.NewServer(tls, daemon.NewMetrics(), access.Guard{})
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

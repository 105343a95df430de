// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/parts"
)

// Both ends notice within 5 s that the other machine is gone. The server uses HTTP/2 pings. gRPC
// limits a client to a ping every 10 s, so there the kernel does it: TCP keepalive probes each
// second, and gRPC sets TCP_USER_TIMEOUT to pingTimeout where keepalive is on, which limits both
// probes and unacknowledged data.
const (
	pingEvery       = time.Second
	pingTimeout     = 4 * time.Second
	clientPingEvery = 10 * time.Second // the minimum that gRPC allows
)

// Unix is the prefix of a manager's address that is a socket: "unix:/path".
const Unix = "unix:"

// window is how much data may be on its way to a peer. It is fixed: gRPC otherwise answers each
// report with a ping to measure the connection.
const window = 1 << 20

// streamsMost is how many calls of one connection are served at once; others wait.
const streamsMost = 256

// headersMost bounds the headers of a call, in bytes.
const headersMost = 64 << 10

// Dial opens connections to volume managers; addresses is separated by commas. Connections are made
// in the background and retried for ever, with a back-off of 0.2 to 2 s. Who gives only sockets of
// this machine, and nothing to show to others, is led to no manager elsewhere.
func Dial(addresses string, files TLSFiles, options ...grpc.DialOption) (*managers.Conn, error) {
	here := files.Off() && OnSockets(addresses)
	return managers.Connect(addresses, func(address string) (*grpc.ClientConn, error) {
		if here && !strings.HasPrefix(address, Unix) {
			return nil, fmt.Errorf("manager address %q: only sockets of this machine were given", address)
		}
		return dial(address, files, options)
	})
}

// OnSockets reports whether all addresses of managers are sockets of this machine.
func OnSockets(addresses string) bool {
	return !slices.ContainsFunc(strings.Split(addresses, ","), func(address string) bool {
		return !strings.HasPrefix(strings.TrimSpace(address), Unix)
	})
}

// DialOne opens a connection to one volume manager, whether it leads or not; see Dial.
func DialOne(address string, files TLSFiles) (*grpc.ClientConn, error) {
	return dial(address, files, nil)
}

// dial opens a connection to one volume manager; see Dial.
func dial(address string, files TLSFiles, options []grpc.DialOption) (*grpc.ClientConn, error) {
	if path, socket := strings.CutPrefix(address, Unix); socket && !filepath.IsAbs(path) {
		return nil, fmt.Errorf("manager address %q: must be %s and an absolute path", address, Unix)
	} else if _, _, err := net.SplitHostPort(address); err != nil && !socket {
		return nil, fmt.Errorf("manager address %q: must be host:port, or %s/path of a socket", address, Unix)
	}
	if strings.HasPrefix(address, Unix) { // its file says who may open it
		if files.Held != nil { // a user of this machine may do more than its holder
			return nil, fmt.Errorf("manager address %q: a socket takes no credential", address)
		}
		files = TLSFiles{}
	}
	creds, err := files.transport(TLSFiles.client)
	if err != nil {
		return nil, err
	}
	dialer := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: pingEvery, Interval: pingEvery, Count: 2}}
	options = append([]grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			if path, socket := strings.CutPrefix(address, Unix); socket {
				return dialer.DialContext(ctx, "unix", path)
			}
			return dialer.DialContext(ctx, "tcp", address)
		}),
		// gRPC would look for a service config in DNS (TXT records) before it connects. There is none, and a
		// DNS server that does not answer would delay each connection by seconds, also to a name in the
		// hosts file.
		grpc.WithDisableServiceConfig(),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: clientPingEvery, Timeout: pingTimeout, PermitWithoutStream: true}),
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(parts.MaxMessage), grpc.MaxCallSendMsgSize(parts.MaxMessage)),
	}, options...)
	conn, err := grpc.NewClient(address, options...)
	if err != nil {
		return nil, fmt.Errorf("manager address %q: %w", address, err)
	}
	return conn, nil
}

// NewServer makes a gRPC server with the health service; m counts its calls, and guard refuses those
// that their caller may not make.
func NewServer(files TLSFiles, m *Metrics, guard access.Guard) (*grpc.Server, error) {
	return newServer(files, m, guard, defaultBudgets)
}

func newServer(files TLSFiles, m *Metrics, guard access.Guard, most budgets) (*grpc.Server, error) {
	creds, err := files.transport(TLSFiles.server)
	if err != nil {
		return nil, err
	}
	usage := newUsage(most)
	server := grpc.NewServer(
		grpc.Creds(bounded{creds, usage, m.handshakes, files.now()}),
		grpc.ConnectionTimeout(most.handshake),
		grpc.InTapHandle(usage.call),
		grpc.MaxHeaderListSize(headersMost),
		grpc.MaxRecvMsgSize(parts.MaxMessage),
		grpc.MaxSendMsgSize(parts.MaxMessage),
		grpc.MaxConcurrentStreams(streamsMost),
		grpc.StaticStreamWindowSize(window), grpc.StaticConnWindowSize(window),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingEvery, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: clientPingEvery / 2, PermitWithoutStream: true}),
		grpc.ChainUnaryInterceptor(m.unary, guard.Unary),
		grpc.ChainStreamInterceptor(m.stream, guard.Stream),
	)
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	return server, nil
}

// stopTime is how long calls under way may take to end. Agents' streams never end by themselves, so
// a volume manager with agents always uses it up. The CSI driver's calls are cancelled, and end
// sooner.
const stopTime = time.Second

// Serve is a part that serves on a listener, and closes it at the end.
func Serve(log *slog.Logger, listener net.Listener, server *grpc.Server) Part {
	return Part{Name: "server", Run: func(ctx context.Context) error {
		log.Info("listening", "address", listener.Addr().String())
		stopped := make(chan struct{})
		release := context.AfterFunc(ctx, func() {
			defer close(stopped)
			force := time.AfterFunc(stopTime, server.Stop)
			defer force.Stop()
			server.GracefulStop()
		})
		err := server.Serve(listener)
		if !release() {
			<-stopped
		}
		if errors.Is(err, grpc.ErrServerStopped) {
			return nil
		}
		return err
	}}
}

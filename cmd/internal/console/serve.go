// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/member"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
)

// Served is the console that a manager serves. Each browser logs in with a token.
type Served struct {
	Listen    string // address; empty: it serves none
	Cert, Key string // files for TLS; empty: plain HTTP, at a loopback address only
	Manager   string // where this manager answers its cluster
	Version   string // of this program
}

// servedHint says how to get a link to a manager's console.
const servedHint = "`weft console --at` with this console's address prints a link that fills this in, with your name and role. It is good once, for 15 minutes. So is a token that an admin made for you with `weft token create`."

// connsMost is how many connections of browsers there may be at once.
const connsMost = 512

// Parts opens the listener, and returns what has to run.
func (o Served) Parts(log *slog.Logger) ([]daemon.Part, error) {
	if o.Listen == "" {
		return nil, nil
	}
	listener, err := o.open()
	if err != nil {
		return nil, err
	}
	door := NewDoor(o.admit(log), servedHint, time.Now, log)
	return []daemon.Part{{Name: "console sessions", Run: door.Run}, daemon.ServeHTTP(log, "console", listener, door.Handler())}, nil
}

// Check returns an error if it cannot be served with these settings.
func (o Served) Check() error {
	switch {
	case o.Listen == "" && o.Cert+o.Key != "":
		return cli.UsageError{Err: errors.New("--console-cert, --console-key: there is no --console")}
	case o.Listen == "":
		return nil
	case (o.Cert == "") != (o.Key == ""):
		return cli.UsageError{Err: errors.New("--console-cert and --console-key: give both or neither")}
	case o.Cert == "":
		if err := onlyHere("--console", o.Listen); err != nil {
			return cli.UsageError{Err: err, Hint: "give --console-cert and --console-key, with a certificate that your browsers trust"}
		}
	default:
		if _, err := tls.LoadX509KeyPair(o.Cert, o.Key); err != nil {
			return cli.UsageError{Err: fmt.Errorf("--console-cert, --console-key: %w", err)}
		}
	}
	return nil
}

func (o Served) open() (net.Listener, error) {
	listener, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return nil, fmt.Errorf("--console: %w", err)
	}
	listener = &bounded{listener, make(chan struct{}, connsMost)}
	if o.Cert == "" {
		return listener, nil
	}
	return tls.NewListener(listener, &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { // read anew: it may have been renewed
			pair, err := tls.LoadX509KeyPair(o.Cert, o.Key)
			return &pair, err
		},
	}), nil
}

// admit joins the cluster with the token that a browser shows.
func (o Served) admit(log *slog.Logger) Admit {
	return func(ctx context.Context, code string) (*Server, error) {
		token, err := pki.ParseToken(code)
		if err != nil {
			return nil, errNoLink
		}
		held, err := member.JoinHeld(ctx, o.Manager, token)
		if err != nil {
			return nil, err
		}
		who := held.Identity()
		if who.Kind != access.Person {
			return nil, cli.RefusedError{Err: fmt.Errorf("that token is for %v: the console is for people", who)}
		}
		conn, err := daemon.Dial(o.Manager, daemon.TLSFiles{Held: held}, grpc.WithUnaryInterceptor(cli.LimitCall))
		if err != nil {
			return nil, err
		}
		log.Info("a person uses the console", "who", who.String())
		return NewServer(Config{
			Clients: Clients{Manager: pages.Client(conn), Identities: pb.NewIdentitiesClient(conn)}, Who: who,
			Managers: o.Manager, Version: o.Version, Log: log, Until: held.Cert.NotAfter, Close: conn.Close,
		}), nil
	}
}

// bounded is a listener that waits while it has many connections.
type bounded struct {
	net.Listener
	free chan struct{}
}

// Accept implements [net.Listener].
func (b *bounded) Accept() (net.Conn, error) {
	b.free <- struct{}{}
	conn, err := b.Listener.Accept()
	if err != nil {
		<-b.free
		return nil, err
	}
	return &boundedConn{Conn: conn, give: sync.OnceFunc(func() { <-b.free })}, nil
}

type boundedConn struct {
	net.Conn
	give func()
}

// Close implements [net.Conn].
func (c *boundedConn) Close() error {
	defer c.give()
	return c.Conn.Close()
}

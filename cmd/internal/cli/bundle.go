// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/volmgr"
	"weft.dev/weft/volmgr/bundle"
)

// AllowBundle lets commands below root, named as they are typed, answer from a support bundle. All
// others refuse --bundle: they would change the cluster, or are about this machine.
func (g *Globals) AllowBundle(root *cobra.Command, commands ...string) {
	for _, name := range commands {
		if cmd, rest, err := root.Find(strings.Fields(name)); err != nil || len(rest) > 0 || cmd == root {
			panic("cli: there is no command " + name)
		}
	}
	var refuse func(cmd *cobra.Command)
	refuse = func(cmd *cobra.Command) {
		for _, below := range cmd.Commands() {
			refuse(below)
		}
		name := strings.TrimPrefix(cmd.CommandPath(), root.Name()+" ")
		if run := cmd.RunE; run != nil && cmd != root && !slices.Contains(commands, name) {
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				if g.Bundle == "" {
					return run(cmd, args)
				}
				return RefusedError{Err: fmt.Errorf("weft %s cannot answer from a support bundle: a bundle is only read", name), Hints: []string{
					"leave out --bundle; these commands take it: " + strings.Join(commands, ", "),
				}}
			}
		}
	}
	refuse(root)
}

// dialBundle connects to a manager in this process that answers from the bundle.
func (g *Globals) dialBundle(options ...grpc.DialOption) (*managers.Conn, error) {
	f, err := os.Open(g.Bundle)
	if err != nil {
		return nil, fmt.Errorf("--bundle: %w", err)
	}
	defer f.Close()
	b, err := bundle.Read(f)
	if err != nil {
		return nil, fmt.Errorf("--bundle %s: %w", g.Bundle, err)
	}
	kept, err := volmgr.Keep(b)
	if err != nil {
		return nil, fmt.Errorf("--bundle %s: %w", g.Bundle, err)
	}
	g.made = b.Made
	server := grpc.NewServer(append(kept.Guard(), grpc.MaxRecvMsgSize(parts.MaxMessage), grpc.MaxSendMsgSize(parts.MaxMessage))...)
	kept.Register(server)
	here := newPipes()
	go server.Serve(here) //nolint:errcheck // it ends with this process, as the command does
	return managers.Connect("support bundle", func(string) (*grpc.ClientConn, error) {
		return grpc.NewClient("passthrough:///support bundle", append([]grpc.DialOption{
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return here.dial(ctx) }),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(parts.MaxMessage), grpc.MaxCallSendMsgSize(parts.MaxMessage)),
		}, options...)...)
	})
}

// pipes is a listener in this process.
type pipes struct {
	conns chan net.Conn
	end   chan struct{}
	close func()
}

func newPipes() *pipes {
	end := make(chan struct{})
	return &pipes{make(chan net.Conn), end, sync.OnceFunc(func() { close(end) })}
}

func (p *pipes) dial(ctx context.Context) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case p.conns <- far:
		return near, nil
	case <-p.end:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Accept implements [net.Listener].
func (p *pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.end:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (p *pipes) Close() error {
	p.close()
	return nil
}

// Addr implements [net.Listener].
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "support bundle", Net: "unix"} }

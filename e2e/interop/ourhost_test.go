// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	nvmehost "weft.dev/weft/proto/nvmetcp/host"
)

// ourHost is proto/nvmetcp/host, in this process.
type ourHost struct{}

func (ourHost) ours() bool { return true }

// ourSession is one controller per portal.
type ourSession struct {
	t           *testing.T
	name        block.NQN
	controllers []*nvmehost.Controller
	wires       []*wires
}

// wires are the open connections of one controller.
type wires struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
}

// wire is a connection that removes itself from its list when closed.
type wire struct {
	*net.TCPConn
	list *wires
}

func (w *wire) Close() error {
	w.list.mu.Lock()
	delete(w.list.open, w)
	w.list.mu.Unlock()
	return w.TCPConn.Close()
}

func (w *wires) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	n := &wire{c.(*net.TCPConn), w}
	w.open[n] = struct{}{}
	return n, nil
}

func (ourHost) connect(t *testing.T, s served, o options) (session, error) {
	t.Helper()
	o = o.withDefaults(s)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if o.once && a.Key == slog.MessageKey && a.Value.String() == "connect attempt failed" {
			cancel()
		}
		return a
	}}))
	c := &ourSession{t: t, name: s.nqn()}
	t.Cleanup(func() {
		for _, c := range c.controllers {
			c.Cut()
			<-c.Done()
		}
	})
	for _, portal := range o.portals {
		w := &wires{open: map[net.Conn]struct{}{}}
		h, err := nvmehost.Connect(ctx, nvmehost.Config{
			Portals: []string{portal}, Subsystem: s.nqn(), Host: o.host, IOQueues: o.queues, KATO: o.keepAlive,
			ConnectTimeout: limit / 2, ReconnectMax: time.Second,
			HeaderDigest: o.headerDigest, DataDigest: o.dataDigest, HostKey: o.hostKey, ControllerKey: o.controllerKey,
			Log: log, Dial: w.dial,
		})
		if err != nil {
			return nil, err
		}
		c.controllers, c.wires = append(c.controllers, h), append(c.wires, w)
	}
	return c, nil
}

func (ourHost) discover(t *testing.T, portal string, id block.Host) map[entry]int {
	t.Helper()
	all, err := nvmehost.Discover(soon(t), portal, id)
	must(t, err)
	found := map[entry]int{}
	for _, e := range all {
		found[entry{e.Subsystem, net.JoinHostPort(e.Address, e.Service)}]++
	}
	return found
}

func (c *ourSession) namespaces() map[uint32]int64 {
	sizes := map[uint32]int64{}
	for _, n := range c.controllers[0].Namespaces() {
		sizes[n.NSID] = int64(n.Geometry.Size)
	}
	return sizes
}

// device is the namespace, over all controllers if there are several.
func (c *ourSession) device(nsid uint32) block.Device {
	c.t.Helper()
	var spaces []*nvmehost.Namespace
	for _, h := range c.controllers {
		eventually(c.t, fmt.Sprintf("namespace %d appears", nsid), func() bool {
			n, err := h.Namespace(nsid, block.UUID{})
			if err == nil {
				spaces = append(spaces, n)
			}
			return err == nil
		})
	}
	if len(spaces) == 1 {
		return spaces[0]
	}
	paths, err := nvmehost.Multipath(nvmehost.MultipathConfig{}, spaces...)
	must(c.t, err)
	return paths
}

func (*ourSession) path(uint32) string { return "" }

func (c *ourSession) live(i int) bool { return c.controllers[i].State().Phase == nvmehost.Live }

func (c *ourSession) ana(i int, nsid uint32) anaState {
	names := map[nvmetcp.ANAState]anaState{
		nvmetcp.ANAStateOptimized: optimized, nvmetcp.ANAStateNonOptimized: nonOptimized, nvmetcp.ANAStateInaccessible: inaccessible,
	}
	for _, n := range c.controllers[i].Namespaces() {
		if n.NSID == nsid {
			return names[n.ANAState]
		}
	}
	return ""
}

func (c *ourSession) queues(i int) int {
	c.wires[i].mu.Lock()
	defer c.wires[i].mu.Unlock()
	return len(c.wires[i].open) - 1 // without the admin queue
}

// reset breaks the connections, and waits until the host has noticed.
func (c *ourSession) reset(i int) {
	c.t.Helper()
	before := c.controllers[i].State().Session
	c.wires[i].mu.Lock()
	for w := range c.wires[i].open {
		w.(*wire).TCPConn.Close()
	}
	c.wires[i].mu.Unlock()
	eventually(c.t, "the host connects again", func() bool { return c.controllers[i].State().Session > before })
}

func (c *ourSession) disconnect() {
	for _, h := range c.controllers {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		if err := h.Close(ctx); err != nil && !errors.Is(err, block.ErrGone) {
			c.t.Error(err)
		}
		cancel()
	}
}

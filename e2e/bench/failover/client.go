// SPDX-License-Identifier: Apache-2.0

package failover

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/initiator"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

const clientName = "c1"

// client is an initiator agent in this process, and a writer to its volume.
type client struct {
	writer *writer
	stop   context.CancelFunc
	done   chan struct{}
	wire   wire

	mu   sync.Mutex
	last stall     // the parts of the last loss
	more []*writer // to further volumes
}

// writerTo returns the writer to a volume that is attached.
func (c *client) writerTo(name block.VolumeName) *writer {
	if name == volume {
		return c.writer
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.more = append(c.more, &writer{every: groupOf})
	return c.more[len(c.more)-1]
}

// writers are all of them.
func (c *client) writers() []*writer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*writer{c.writer}, c.more...)
}

func newClient(dir string, manager *grpc.ClientConn) (*client, error) {
	c := &client{writer: &writer{}, done: make(chan struct{})}
	c.wire.cond = sync.NewCond(&c.wire.mu)
	agent, err := initiator.New(initiator.Config{
		Node: clientName, Version: "bench", Kernel: "bench", Manager: pb.NewAgentsClient(manager),
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Datapath: initiator.User,
		Log: slog.New(losses{c, nil}), Dial: c.wire.dial,
		Export: func(_ context.Context, volume block.Device, of userspace.Of) (userspace.Exported, error) {
			go c.writerTo(of.Name).run(volume)
			return used{}, nil
		},
	})
	if err != nil {
		return nil, err
	}
	var ctx context.Context
	ctx, c.stop = context.WithCancel(context.Background())
	go func() {
		defer close(c.done)
		agent.Run(ctx) //nolint:errcheck // it ends when it is told to
	}()
	return c, nil
}

func (c *client) close() {
	for _, w := range c.writers() {
		w.end()
	}
	c.stop()
	<-c.done
}

func (c *client) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = stall{}
}

func (c *client) parts() stall {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

func (c *client) cut(portals []string) error { return c.wire.cut(portals) }
func (c *client) mend()                      { c.wire.mend() }

// losses takes the parts of each stall from the agent's log.
type losses struct {
	client *client
	with   []slog.Attr
}

func (l losses) Enabled(context.Context, slog.Level) bool { return true }
func (l losses) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l losses) WithGroup(string) slog.Handler            { return l }

// Handle takes the message of package initiator/keeper that a leg's writes go on.
func (l losses) Handle(_ context.Context, r slog.Record) error {
	if r.Message != "leg released" {
		return nil
	}
	s := stall{known: true}
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "detect":
			s.detect = a.Value.Duration()
		case "record":
			s.record = a.Value.Duration()
		case "release":
			s.release = a.Value.Duration()
		}
		return true
	})
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	l.client.last = s
	return nil
}

// used is a volume in use.
type used struct{}

func (used) Path() string                      { return "/dev/null" }
func (used) Number() string                    { return "" }
func (used) Resize(context.Context) error      { return nil }
func (used) Close(context.Context, bool) error { return nil }
func (used) Done() <-chan struct{}             { return nil }

// writer writes 4 KiB to random places, one at a time, and remembers the longest write.
type writer struct {
	every time.Duration // pauses between two writes, if not one
	mu    sync.Mutex
	began time.Time // of the write that is under way; zero: none is
	most  time.Duration
	ended bool
	count int
	err   error
}

// pause is between two writes; reach is how much of the volume they touch, so that little has to be
// copied when a leg returns.
const (
	pause = time.Millisecond
	reach = 16 << 20
)

func (w *writer) run(volume block.Device) {
	data := make([]byte, 4096)
	for w.begin() {
		data[rand.IntN(len(data))]++
		w.finish(block.WriteAt(volume, data, rand.Int64N(reach/int64(len(data)))*int64(len(data))))
		time.Sleep(max(1, w.every) * pause)
	}
}

func (w *writer) begin() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.began = time.Now()
	return !w.ended
}

func (w *writer) finish(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.most = max(w.most, time.Since(w.began))
	w.began = time.Time{}
	w.count++
	w.err = errors.Join(w.err, err)
	w.ended = w.ended || err != nil
}

func (w *writer) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
}

func (w *writer) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.most = 0
}

func (w *writer) longest() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.most
}

// waits reports whether a write is waiting for more than a moment.
func (w *writer) waits() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.began.IsZero() && time.Since(w.began) > 100*time.Millisecond
}

func (w *writer) writes() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count > 0 && !w.ended
}

func (w *writer) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// wire is the network between the client and the targets. A portal that is cut is silent both ways.
type wire struct {
	mu    sync.Mutex
	cond  *sync.Cond
	dead  []string // the portals that are cut
	conns []*conn
}

// conn is a connection to a portal.
type conn struct {
	net.Conn
	wire   *wire
	portal string
	closed bool
	queued []byte // written while the portal was cut
}

func (w *wire) dial(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	for {
		w.mu.Lock()
		cut := slices.Contains(w.dead, address)
		w.mu.Unlock()
		if !cut {
			break
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(10 * time.Millisecond):
		}
	}
	raw, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, wire: w, portal: address}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.conns = append(w.conns, c)
	return c, nil
}

// cut silences the one of these portals that is in use.
func (w *wire) cut(portals []string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.conns = slices.DeleteFunc(w.conns, func(c *conn) bool { return c.closed })
	for _, c := range slices.Backward(w.conns) {
		if slices.Contains(portals, c.portal) {
			w.dead = []string{c.portal}
			return nil
		}
	}
	return errors.New("no path is in use")
}

// cutAll silences these portals.
func (w *wire) cutAll(portals []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead = portals
}

func (w *wire) mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead = nil
	w.cond.Broadcast()
}

// silent waits while the portal of a connection is cut.
func (c *conn) silent() {
	c.wire.mu.Lock()
	defer c.wire.mu.Unlock()
	for slices.Contains(c.wire.dead, c.portal) && !c.closed {
		c.wire.cond.Wait()
	}
}

// Read returns nothing while the portal is cut, also not what had arrived.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.silent()
	return n, err
}

// Write queues what is written while the portal is cut, as a socket does. It is sent with what is
// written after that.
func (c *conn) Write(b []byte) (int, error) {
	c.wire.mu.Lock()
	if slices.Contains(c.wire.dead, c.portal) {
		c.queued = append(c.queued, b...)
		c.wire.mu.Unlock()
		return len(b), nil
	}
	queued := c.queued
	c.queued = nil
	c.wire.mu.Unlock()
	if len(queued) > 0 {
		if _, err := c.Conn.Write(queued); err != nil {
			return 0, err
		}
	}
	return c.Conn.Write(b)
}

// Close also ends calls that wait.
func (c *conn) Close() error {
	c.wire.mu.Lock()
	c.closed = true
	c.wire.cond.Broadcast()
	c.wire.mu.Unlock()
	return c.Conn.Close()
}

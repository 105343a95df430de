// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

// resized is a device that reports another size.
type resized struct {
	block.Device
	size atomic.Uint64
}

func newResized(size block.Size) *resized {
	d := &resized{Device: ramdisk.New(8*block.MiB, blocks)}
	d.size.Store(uint64(size))
	return d
}

func (d *resized) Geometry() block.Geometry {
	g := d.Device.Geometry()
	g.Size = block.Size(d.size.Load())
	return g
}

// resize changes the size of the target's namespace.
func (d *resized) resize(t *testing.T, w *world, size block.Size) {
	t.Helper()
	d.size.Store(uint64(size))
	if err := w.sub.ResizeNamespace(1); err != nil {
		t.Fatal(err)
	}
}

// line is a connection to a target that can be cut.
type line struct {
	mu    sync.Mutex
	isCut bool
	conns []net.Conn
}

func (l *line) dial(ctx context.Context, network, address string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isCut {
		return nil, errors.New("the line is cut")
	}
	c, err := new(net.Dialer).DialContext(ctx, network, address)
	l.conns = append(l.conns, c)
	return c, err
}

func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isCut = true
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = nil
}

func (l *line) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isCut = false
}

func TestANamespaceGrowsUnderIO(t *testing.T) {
	d := newResized(block.MiB)
	w := newWorld(t, d)
	cfg := w.config()
	var told <-chan struct{}
	cfg.OnNamespaces, told = teller()
	n := space(t, connect(t, cfg), uuidA)
	if err := block.WriteAt(n, noise(4096, 1), 1<<20); !errors.Is(err, block.ErrRange) {
		t.Errorf("write beyond the end: %v", err)
	}
	end := make(chan struct{})
	var users sync.WaitGroup
	for i := range 4 {
		users.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				want, got := noise(8192, uint64(i)), make([]byte, 8192)
				if err := errors.Join(block.WriteAt(n, want, int64(i)*8192), block.ReadAt(n, got, int64(i)*8192)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("IO while the namespace grows: %v", err)
					return
				}
			}
		})
	}
	for size := 2 * block.MiB; size <= 8*block.MiB; size += block.MiB {
		d.resize(t, w, size)
		await(t, told, "the new size", func() bool { return n.Geometry().Size == size })
		last := int64(size) - 4096
		if err := block.WriteAt(n, noise(4096, 9), last); err != nil {
			t.Errorf("write to the last block of %v: %v", size, err)
		}
		got := make([]byte, 4096)
		if err := block.ReadAt(d, got, last); err != nil || !bytes.Equal(got, noise(4096, 9)) {
			t.Errorf("the last block of %v on the medium: %v", size, err)
		}
	}
	close(end)
	users.Wait()
}

// TestANamespaceThatShrinksIsGone: the data beyond the new end is lost, and continuing with
// the rest would hide that.
func TestANamespaceThatShrinksIsGone(t *testing.T) {
	for name, shrink := range map[string]func(resize func(), l *line){
		"while connected": func(resize func(), _ *line) { resize() },
		"while there is no connection": func(resize func(), l *line) {
			l.cut()
			resize()
			l.mend()
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newResized(2 * block.MiB)
			w := newWorld(t, d)
			cfg := w.config()
			cfg.ReconnectMin, cfg.ReconnectMax = time.Millisecond, time.Millisecond
			l := &line{}
			cfg.Dial = l.dial
			var told <-chan struct{}
			cfg.OnNamespaces, told = teller()
			c := connect(t, cfg)
			n := space(t, c, uuidA)
			shrink(func() { d.resize(t, w, block.MiB) }, l)
			await(t, told, "the host to see it", func() bool { return n.Info().Err != nil })
			const reason = "has shrunk from 2MiB to 1MiB"
			if err := n.Info().Err; !strings.Contains(err.Error(), reason) {
				t.Errorf("the reason is %q, want %q in it", err, reason)
			}
			if g := n.Geometry(); g.Size != 2*block.MiB {
				t.Errorf("the device shrank to %v under its user", g.Size)
			}
			gone := func() {
				t.Helper()
				if err := block.WriteAt(n, noise(4096, 1), 0); !errors.Is(err, block.ErrGone) || !strings.Contains(err.Error(), reason) {
					t.Errorf("write to a shrunk namespace: %v", err)
				}
			}
			gone()
			small := space(t, c, uuidA)
			if g := small.Geometry(); small == n || g.Size != block.MiB {
				t.Errorf("opened again it has %v", g.Size)
			}
			if err := block.WriteAt(small, noise(4096, 1), 0); err != nil {
				t.Error(err)
			}
			d.resize(t, w, 2*block.MiB)
			await(t, told, "the first size again", func() bool { return small.Geometry().Size == 2*block.MiB })
			gone()
		})
	}
}

func TestPathsGrowWhenAllThatServeHaveGrown(t *testing.T) {
	d := newResized(block.MiB)
	w := newWorld(t, d)
	a, b := w.config(), w.config()
	tell, told := teller()
	a.OnNamespaces, b.OnNamespaces = tell, tell
	p, err := Multipath(MultipathConfig{}, space(t, connect(t, a), uuidA), space(t, connect(t, b), uuidA))
	if err != nil {
		t.Fatal(err)
	}
	if p.Active() == nil {
		t.Fatal("no path")
	}
	behind := *p.all[1].space.state.Load()
	d.resize(t, w, 2*block.MiB)
	await(t, told, "both to have grown", func() bool { return p.Geometry().Size == 2*block.MiB })
	p.all[1].space.state.Store(&behind)
	if g := p.Geometry(); g.Size != block.MiB {
		t.Errorf("with one path at 1 MiB the size is %v", g.Size)
	}
	p.all[1].space.controller.Rescan()
	await(t, told, "the second path to look again", func() bool { return p.Geometry().Size == 2*block.MiB })
}

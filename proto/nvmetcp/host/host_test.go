// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
)

// patience is the longest that a test waits for an expected event.
const patience = 20 * time.Second

const testNQN block.NQN = "nqn.2026-11.dev.weft:test"

var (
	me     = block.Host{NQN: "nqn.2014-08.org.nvmexpress:uuid:a", ID: block.UUID{0xa}}
	uuidA  = block.UUID{1, 2, 3}
	uuidB  = block.UUID{4, 5, 6}
	blocks = block.Size(4096)
)

// world is a target with one subsystem that has one namespace, on one port.
type world struct {
	t      testing.TB
	target *controller.Target
	sub    *controller.Subsystem
	port   *controller.Port
	addr   string
	device block.Device
}

func newWorld(t testing.TB, device block.Device, change ...func(*controller.Config, *controller.SubsystemConfig)) *world {
	t.Helper()
	cfg := controller.Config{}
	sub := controller.SubsystemConfig{NQN: testNQN, Serial: "0123456789abcdef", Hosts: []controller.Host{{NQN: me.NQN}}}
	for _, f := range change {
		f(&cfg, &sub)
	}
	target, err := controller.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, target: target, device: device}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := target.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	if w.sub, err = target.AddSubsystem(sub); err != nil {
		t.Fatal(err)
	}
	w.add(1, uuidA, device)
	w.port, w.addr = w.serve(1)
	return w
}

func (w *world) add(nsid uint32, uuid block.UUID, device block.Device) {
	w.t.Helper()
	if err := w.sub.AddNamespace(controller.NamespaceConfig{NSID: nsid, UUID: uuid, Device: device}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) serve(id uint16) (*controller.Port, string) {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	p, err := w.target.Serve(l, controller.PortConfig{ID: id})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := p.Link(w.sub); err != nil {
		w.t.Fatal(err)
	}
	return p, l.Addr().String()
}

func (w *world) config() Config {
	return Config{Portals: []string{w.addr}, Subsystem: testNQN, Host: me, IOQueues: 2}
}

// connect connects, and cuts the connection when the test ends.
func connect(t testing.TB, cfg Config) *Controller {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := Connect(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Cut()
		wait(t, c.Done(), "the controller to be over")
	})
	return c
}

func wait(t testing.TB, ch <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatalf("waited %v for %s", patience, what)
	}
}

func space(t testing.TB, c *Controller, uuid block.UUID) *Namespace {
	t.Helper()
	n, err := c.Namespace(0, uuid)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func noise(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := 0; i < n; i += 8 {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], r.Uint64())
		copy(b[i:], word[:])
	}
	return b
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"plain":           func(*Config) {},
		"header digest":   func(c *Config) { c.HeaderDigest = true },
		"data digest":     func(c *Config) { c.DataDigest = true },
		"both digests":    func(c *Config) { c.HeaderDigest, c.DataDigest = true, true },
		"one small queue": func(c *Config) { c.IOQueues, c.QueueDepth = 1, 2 },
		"small reads":     func(c *Config) { c.BufferSize = 4096 },
	} {
		t.Run(name, func(t *testing.T) {
			device := ramdisk.New(16*block.MiB, blocks)
			w := newWorld(t, device, func(c *controller.Config, _ *controller.SubsystemConfig) { c.MDTS = 64 * block.KiB })
			cfg := w.config()
			change(&cfg)
			n := space(t, connect(t, cfg), uuidA)
			if g := n.Geometry(); g.Size != 16*block.MiB || g.BlockSize != blocks {
				t.Fatalf("geometry %+v", g)
			}
			// From one block to many commands, in the capsule and by R2T, all at once.
			var all sync.WaitGroup
			off := int64(0)
			for i, size := range []int{4096, 8192, 16384, 20480, 65536, 69632, 1 << 20, 3<<20 + 4096} {
				at := off
				off += int64(size)
				all.Go(func() {
					want := noise(size, uint64(i))
					if err := block.WriteAt(n, want, at); err != nil {
						t.Error(err)
					}
					got := make([]byte, size)
					if err := block.ReadAt(n, got, at); err != nil || !bytes.Equal(got, want) {
						t.Errorf("%d bytes at %d: %v", size, at, err)
					}
					if err := block.ReadAt(device, got, at); err != nil || !bytes.Equal(got, want) {
						t.Errorf("%d bytes at %d of the medium: %v", size, at, err)
					}
				})
			}
			all.Wait()
			if err := block.Flush(n); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestEveryOperationReachesTheMedium(t *testing.T) {
	device := ramdisk.New(8*block.MiB, blocks)
	n := space(t, connect(t, newWorld(t, device).config()), uuidA)
	full := bytes.Repeat([]byte{7}, 1<<20)
	if err := block.Do(n, &block.IO{Op: block.OpWrite, FUA: true, Data: full, Len: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := block.Do(n, &block.IO{Op: block.OpWriteZeroes, Off: 4096, Len: 65536}); err != nil {
		t.Fatal(err)
	}
	if err := block.Do(n, &block.IO{Op: block.OpWriteZeroes, Unmap: true, Off: 1 << 19, Len: 4096}); err != nil {
		t.Fatal(err)
	}
	clear(full[4096:][:65536])
	clear(full[1<<19:][:4096])
	got := make([]byte, 1<<20)
	if err := block.ReadAt(device, got, 0); err != nil || !bytes.Equal(got, full) {
		t.Fatalf("after write zeroes: %v", err)
	}
	if err := block.Do(n, &block.IO{Op: block.OpDiscard, Off: 0, Len: 8 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := n.Compare(t.Context(), full[:4096], 4096<<6); err != nil && !errors.Is(err, nvmetcp.CompareFailure) {
		t.Fatal(err)
	}
	if err := block.WriteAt(n, full[:8192], 0); err != nil {
		t.Fatal(err)
	}
	if err := n.Compare(t.Context(), full[:8192], 0); err != nil {
		t.Errorf("compare of equal data: %v", err)
	}
	if err := n.Compare(t.Context(), noise(8192, 1), 0); !errors.Is(err, nvmetcp.CompareFailure) {
		t.Errorf("compare of different data: %v", err)
	}
	if err := block.ReadAt(n, got[:4096], 8<<20); !errors.Is(err, block.ErrRange) {
		t.Errorf("read beyond the end: %v", err)
	}
}

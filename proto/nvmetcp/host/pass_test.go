// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp/controller"
)

// late answers each IO a little later, on another goroutine.
type late struct{ block.Device }

func (l late) Submit(io *block.IO) {
	time.AfterFunc(rand.N(time.Millisecond), func() { l.Device.Submit(io) })
}

// passOn replaces the world's target by another one, which takes over its controllers.
func (w *world) passOn(round int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	passed := w.target.Pass(ctx)
	if err := w.target.Close(ctx); err != nil {
		w.t.Fatal(err)
	}
	next := newWorld(w.t, w.device, onePerHost)
	w.target, w.sub, w.port = next.target, next.sub, next.port
	if len(passed) != 1 {
		w.t.Fatalf("round %d: %d controllers are passed on", round, len(passed))
	}
	if err := w.port.TakeOver(passed[0]); err != nil {
		w.t.Fatal(err)
	}
}

// While a host reads and writes, small and large, its controller goes through many targets. The host
// keeps its connections, no IO fails, and each reads what it wrote.
func TestAControllerGoesFromTargetToTargetUnderIO(t *testing.T) {
	for digests := range 4 {
		t.Run(fmt.Sprint("digests ", digests), func(t *testing.T) {
			const writers, share = 16, 256 << 10
			w := newWorld(t, late{ramdisk.New(writers*share, 4096)}, onePerHost)
			cfg := w.config()
			cfg.HeaderDigest, cfg.DataDigest = digests&1 != 0, digests&2 != 0
			c := connect(t, cfg)
			n := space(t, c, uuidA)
			stop := make(chan struct{})
			var wait sync.WaitGroup
			var rounds [writers]int
			for i := range writers {
				wait.Go(func() {
					for ; ; rounds[i]++ {
						select {
						case <-stop:
							return
						default:
						}
						size := 4096 << rand.N(7)
						at := int64(i*share) + int64(rand.N(share-size+1))/4096*4096
						want, got := noise(size, uint64(rounds[i])), make([]byte, size)
						if err := block.WriteAt(n, want, at); err != nil {
							t.Errorf("write: %v", err)
							return
						}
						if err := block.ReadAt(n, got, at); err != nil || !bytes.Equal(got, want) {
							t.Errorf("read of %d bytes at %d, equal to what was written: %t, %v", size, at, bytes.Equal(got, want), err)
							return
						}
					}
				})
			}
			for round := range 25 {
				time.Sleep(rand.N(20 * time.Millisecond))
				w.passOn(round)
			}
			close(stop)
			wait.Wait()
			for i, n := range rounds {
				if n == 0 {
					t.Errorf("writer %d has written nothing", i)
				}
			}
			if s := c.Session(); s != 1 {
				t.Errorf("the host has connected %d times", s)
			}
		})
	}
}

// A host whose controller has gone to another target hears of what changes there.
func TestAPassedHostHearsOfNamespaces(t *testing.T) {
	w := newWorld(t, ramdisk.New(block.MiB, blocks), onePerHost)
	cfg := w.config()
	var told <-chan struct{}
	cfg.OnNamespaces, told = teller()
	c := connect(t, cfg)
	for round := range 3 {
		w.passOn(round)
		nsid := uint32(round + 2)
		w.add(nsid, uuidB, ramdisk.New(block.MiB, 512))
		await(t, told, "the second namespace", func() bool { return len(c.Namespaces()) == 2 })
		if err := w.sub.RemoveNamespace(t.Context(), nsid); err != nil {
			t.Fatal(err)
		}
		await(t, told, "the second namespace to go", func() bool { return len(c.Namespaces()) == 1 })
	}
	if s := c.Session(); s != 1 {
		t.Errorf("the host has connected %d times", s)
	}
}

// A passed controller that does not fit the next target is closed, and its host connects again.
func TestAControllerThatDoesNotFitIsClosed(t *testing.T) {
	for why, change := range map[string]func(*controller.Passed){
		"does not lead to the subsystem": func(p *controller.Passed) { p.Subsystem += "x" },
		"the host may not connect":       func(p *controller.Passed) { p.Host.NQN += "x" },
		"namespace 1 is not there":       func(p *controller.Passed) { p.Spaces = map[uint32]controller.PassedSpace{1: {}} },
		"namespace 9 is not there":       func(p *controller.Passed) { p.Spaces[9] = controller.PassedSpace{} },
		"namespace 1 has changed": func(p *controller.Passed) {
			s := p.Spaces[1]
			s.ReadOnly = true
			p.Spaces[1] = s
		},
		"id is not free":             func(p *controller.Passed) { p.ID = 0 },
		"queue 1 of 1048576 entries": func(p *controller.Passed) { p.Queues[1].Size = 1 << 20 },
		"queue 1 of 129 entries":     func(p *controller.Passed) { p.Queues[2].ID = p.Queues[1].ID },
	} {
		t.Run(why, func(t *testing.T) {
			w := newWorld(t, ramdisk.New(block.MiB, blocks), onePerHost)
			c := connect(t, w.config())
			n := space(t, c, uuidA)
			passed := w.target.Pass(t.Context())
			if len(passed) != 1 {
				t.Fatalf("%d controllers are passed on", len(passed))
			}
			for len(w.sub.Controllers()) > 0 { // this target has ended it, but not forgotten it yet
				time.Sleep(time.Millisecond)
			}
			change(&passed[0])
			if err := w.port.TakeOver(passed[0]); err == nil || !strings.Contains(err.Error(), why) {
				t.Fatalf("it is taken over: %v", err)
			}
			if err := block.WriteAt(n, noise(4096, 1), 0); err != nil {
				t.Error(err)
			}
			if s := c.Session(); s != 2 {
				t.Errorf("the host has connected %d times", s)
			}
		})
	}
}

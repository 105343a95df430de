// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// BenchmarkIO keeps depth IOs in flight against our controller, which serves memory from
// the same process: both ends and the kernel's TCP share its processors.
func BenchmarkIO(b *testing.B) {
	for _, c := range []struct {
		op    block.Op
		size  int
		depth int
	}{
		{block.OpRead, 4096, 1}, {block.OpRead, 4096, 32}, {block.OpRead, 4096, 128},
		{block.OpWrite, 4096, 1}, {block.OpWrite, 4096, 32}, {block.OpWrite, 4096, 128},
		{block.OpRead, 128 << 10, 8}, {block.OpWrite, 128 << 10, 8},
	} {
		for _, queues := range []int{1, 2} {
			b.Run(fmt.Sprintf("%v/%dk/depth%d/queues%d", c.op, c.size>>10, c.depth, queues), func(b *testing.B) {
				w := newWorld(b, ramdisk.New(64*block.MiB, blocks))
				cfg := w.config()
				cfg.IOQueues = queues
				stream(b, space(b, connect(b, cfg), uuidA), c.op, c.size, c.depth)
			})
		}
	}
}

// stream keeps depth IOs in flight until b.N are done. The completion of each IO submits
// the next, as the engine and ublk do.
func stream(b *testing.B, d block.Device, op block.Op, size, depth int) {
	slots := int64(d.Geometry().Size) / int64(size)
	ended := make(chan error, depth)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	share := b.N/depth + 1
	for i := range depth {
		n, at := share, uint64(i)
		io := &block.IO{Op: op, Len: int64(size), Data: make([]byte, size)}
		next := func() {
			at = at*6364136223846793005 + 1442695040888963407
			io.Off = int64(at>>11) % slots * int64(size)
			d.Submit(io)
		}
		io.Done = func(io *block.IO) {
			if n--; n == 0 || io.Err != nil {
				ended <- io.Err
				return
			}
			next()
		}
		next()
	}
	for range depth {
		if err := <-ended; err != nil {
			b.Error(err)
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(share*depth)/b.Elapsed().Seconds(), "IOPS")
}

// BenchmarkDigests compares connections whose headers and data carry checksums with those that do
// not, in turns, and reports by how much more time an IO takes.
func BenchmarkDigests(b *testing.B) {
	for _, c := range []struct {
		op    block.Op
		size  int
		depth int
	}{
		{block.OpRead, 4096, 1}, {block.OpRead, 4096, 32}, {block.OpWrite, 4096, 1}, {block.OpWrite, 4096, 32},
		{block.OpRead, 128 << 10, 8}, {block.OpWrite, 128 << 10, 8},
	} {
		b.Run(fmt.Sprintf("%v/%dk/depth%d", c.op, c.size>>10, c.depth), func(b *testing.B) {
			w := newWorld(b, ramdisk.New(64*block.MiB, blocks))
			var devices [2]block.Device
			for i := range devices {
				cfg := w.config()
				cfg.HeaderDigest, cfg.DataDigest = i == 1, i == 1
				devices[i] = space(b, connect(b, cfg), uuidA)
			}
			const rounds = 40
			var took [2][]float64
			n := max(c.depth, b.N/rounds)
			for round := range 2 * rounds {
				i := (round + round/2) % 2 // each is now and then the first
				began := time.Now()
				turn(b, devices[i], c.op, c.size, c.depth, n)
				took[i] = append(took[i], time.Since(began).Seconds())
			}
			var ratios []float64
			for r := range took[0] {
				ratios = append(ratios, took[1][r]/took[0][r])
			}
			slices.Sort(ratios)
			b.ReportMetric(100*(ratios[len(ratios)/2]-1), "%more")
		})
	}
}

// turn does n IOs, depth at a time.
func turn(b *testing.B, d block.Device, op block.Op, size, depth, n int) {
	free := make(chan *block.IO, depth)
	for range depth {
		free <- &block.IO{Op: op, Len: int64(size), Data: make([]byte, size), Done: func(io *block.IO) { free <- io }}
	}
	slots := int64(d.Geometry().Size) / int64(size)
	for i := range n + depth {
		io := <-free
		if io.Err != nil {
			b.Fatal(io.Err)
		}
		if i >= n {
			continue
		}
		io.Off = int64(i*7919) % slots * int64(size)
		d.Submit(io)
	}
}

// BenchmarkAuthentication compares connections without authentication with those that Weft
// authenticates, in both directions, with and without a Diffie-Hellman group. It connects an admin
// queue and one I/O queue over loopback, as the initiator does, and reads and writes over them.
func BenchmarkAuthentication(b *testing.B) {
	key := func(n byte) dhchap.Key {
		k, err := dhchap.NewKey(dhchap.SHA256, bytes.Repeat([]byte{n}, 32))
		if err != nil {
			b.Fatal(err)
		}
		return k
	}
	for _, c := range []struct {
		name             string
		host, controller dhchap.Key
		groups           []dhchap.Group
	}{
		{"none", dhchap.Key{}, dhchap.Key{}, nil},
		{"null", key(1), key(2), []dhchap.Group{dhchap.Null}},
		{"ffdhe2048", key(1), key(2), []dhchap.Group{dhchap.FFDHE2048}},
	} {
		config := func(b *testing.B) Config {
			w := newWorld(b, ramdisk.New(64*block.MiB, blocks), func(_ *controller.Config, s *controller.SubsystemConfig) {
				s.Hosts = []controller.Host{{NQN: me.NQN, HostKey: c.host, ControllerKey: c.controller, Groups: c.groups}}
			})
			cfg := w.config()
			cfg.IOQueues, cfg.HostKey, cfg.ControllerKey = 1, c.host, c.controller
			return cfg
		}
		b.Run("connect/"+c.name, func(b *testing.B) {
			cfg := config(b)
			for b.Loop() {
				n, err := Connect(b.Context(), cfg)
				if err != nil {
					b.Fatal(err)
				}
				n.Cut()
				<-n.Done()
			}
		})
		for _, op := range []block.Op{block.OpRead, block.OpWrite} {
			b.Run(fmt.Sprintf("%v/4k/depth32/%s", op, c.name), func(b *testing.B) {
				stream(b, space(b, connect(b, config(b)), uuidA), op, 4096, 32)
			})
		}
	}
}

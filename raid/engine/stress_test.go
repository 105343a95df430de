// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// remote is a leg that answers from goroutines of its own, in any order, until it
// is cut.
type remote struct {
	*memory
	mu    sync.Mutex
	queue chan *block.IO
	cut   bool
}

func newRemote(t *testing.T, m *memory) *remote {
	r := &remote{memory: m, queue: make(chan *block.IO, 4096)}
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for io := range r.queue {
				r.memory.Submit(io)
			}
		})
	}
	t.Cleanup(func() {
		r.mu.Lock()
		r.cut = true
		close(r.queue)
		r.mu.Unlock()
		all.Wait()
	})
	return r
}

func (r *remote) Submit(io *block.IO) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cut {
		go io.Complete(block.ErrGone)
		return
	}
	r.queue <- io
}

// stressed is the size that the volume under stress grows to.
const stressed = 8 * block.MiB

// Users write and read blocks of their own and check what they read, while legs come, go and
// fail, and the volume is suspended and grows. It is meant for the race detector.
func TestManyUsersWhileLegsComeAndGo(t *testing.T) {
	cfg := Config{Layout: layout(2, 3, 64*block.KiB), Size: stressed / 8, Region: 64 * block.KiB}
	events := make(chan Event, 1000)
	cfg.OnEvent = func(e Event) { events <- e }
	mediums := make([]*memory, 6)
	legs := make([]block.Device, 6)
	for i := range legs {
		mediums[i] = newMemory(4 * block.MiB)
		legs[i] = newRemote(t, mediums[i])
	}
	v := volume(t, cfg, legs...)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var users sync.WaitGroup
	for user := range 8 {
		users.Go(func() {
			if err := use(ctx, v, user, 8); err != nil {
				t.Error(err)
			}
		})
	}
	own(t, v, mediums, events)
	cancel()
	settle(t, v)
	users.Wait()
	ctx, cancel = context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := v.Close(ctx); err != nil {
		t.Fatal(err)
	}
	for k, copies := range v.Status().Legs {
		for i, l := range copies {
			first := -1
			for j := range copies {
				if copies[j].State == InSync && first < 0 {
					first = j
				}
			}
			if l.State == InSync && string(mediums[k*3+i].data) != string(mediums[k*3+first].data) {
				t.Errorf("leg %d.%d differs from %d.%d", k, i, k, first)
			}
		}
	}
}

// use writes and reads every n-th block of 4 KiB.
func use(ctx context.Context, v *Volume, user, n int) error {
	r := rand.New(rand.NewPCG(uint64(user), 5))
	want := make([]uint64, int(stressed)/4096/n)
	buf := make([]byte, 4096)
	for i := uint64(1); ctx.Err() == nil; i++ {
		b := r.IntN(int(v.Geometry().Size) / 4096 / n)
		off := int64(b*n+user) * 4096
		switch r.IntN(8) {
		case 0:
			if err := block.Flush(v); err != nil {
				return err
			}
		case 1, 2, 3:
			want[b] = i
			binary.LittleEndian.PutUint64(buf, i)
			if err := block.WriteAt(v, buf, off); err != nil {
				return err
			}
		default:
			if err := block.ReadAt(v, buf, off); err != nil {
				return err
			}
			if got := binary.LittleEndian.Uint64(buf); got != want[b] {
				return fmt.Errorf("user %d: block %d has %d, want %d", user, b, got, want[b])
			}
		}
	}
	return nil
}

// own drops legs, makes them err, and brings them back, until some were rebuilt and
// the volume has grown.
func own(t *testing.T, v *Volume, mediums []*memory, events chan Event) {
	r := rand.New(rand.NewPCG(1, 6))
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for rebuilt := 0; rebuilt < 8 || v.Geometry().Size < stressed; {
		k, i := r.IntN(2), r.IntN(3)
		switch n := r.IntN(100); {
		case n < 3:
			_ = v.Drop(k, i) // it may be the last one
		case n < 5 && i == 2:
			mediums[k*3+i].failing(errDisk)
		case n < 8:
			v.Suspend()
			v.Resume()
		case n < 12:
			if err := v.Grow(min(stressed, v.Geometry().Size+block.Size(1+r.IntN(64))*4096*8)); err != nil {
				t.Error(err)
			}
		case n < 50 && v.Status().Legs[k][i].State == Dropped:
			mediums[k*3+i].failing(nil)
			if err := v.Add(k, i, newRemote(t, mediums[k*3+i]), Rebuilding, r.IntN(4) == 0); err != nil {
				t.Error(err)
			}
		}
		select {
		case e := <-events:
			switch e.Kind {
			case LegCaughtUp:
				if v.Promote(e.Column, e.Copy) == nil {
					rebuilt++
				}
			case LegFailed:
				_ = v.Drop(e.Column, e.Copy)
			}
		case <-tick.C:
		case <-deadline:
			t.Errorf("%d legs were rebuilt in 20s", rebuilt)
			return
		}
	}
}

// settle drops the legs that still hold IO up.
func settle(t *testing.T, v *Volume) {
	until(t, func() bool {
		for k, copies := range v.Status().Legs {
			for i, l := range copies {
				if l.Failed > 0 {
					_ = v.Drop(k, i)
				}
			}
		}
		return v.Status().Held == 0
	})
}

func TestAnIOTakesNoMemory(t *testing.T) {
	if raced {
		t.Skip("the race detector takes memory")
	}
	for _, l := range []block.Layout{layout(1, 1, block.DefaultChunk), layout(2, 2, block.DefaultChunk), layout(1, 3, block.DefaultChunk)} {
		cfg := Config{Layout: l, Size: 16 * block.MiB}
		v := volume(t, cfg, memories(cfg)...)
		data := make([]byte, 4096)
		for _, io := range []*block.IO{write(8192, data), read(8192, data), {Op: block.OpFlush}, {Op: block.OpWriteZeroes, Off: 4096, Len: 4096}, write(0, make([]byte, 1<<20))} {
			io.Done = func(*block.IO) {}
			if n := testing.AllocsPerRun(1000, func() { v.Submit(io) }); n != 0 {
				t.Errorf("%v: %v of %d bytes takes %v allocations", l, io.Op, io.Len, n)
			}
		}
	}
}

func BenchmarkIO(b *testing.B) {
	for _, l := range []block.Layout{layout(1, 1, block.DefaultChunk), layout(1, 2, block.DefaultChunk), layout(2, 2, block.DefaultChunk), layout(1, 3, block.DefaultChunk)} {
		for _, op := range []block.Op{block.OpRead, block.OpWrite} {
			for _, size := range []int64{4096, 128 << 10} {
				b.Run(fmt.Sprintf("%v/%dx%d/%dk", op, l.Stripes, l.Copies, size>>10), func(b *testing.B) {
					bench(b, l, op, size)
				})
			}
		}
	}
}

// bench has each of its goroutines do one IO after another at random places.
func bench(b *testing.B, l block.Layout, op block.Op, size int64) {
	cfg := Config{Layout: l, Size: 64 * block.MiB}
	v := volume(b, cfg, memories(cfg)...)
	b.SetBytes(size)
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		r := rand.New(rand.NewPCG(rand.Uint64(), 1))
		io := &block.IO{Op: op, Len: size, Data: make([]byte, size)}
		done := make(chan struct{}, 1)
		io.Done = func(*block.IO) { done <- struct{}{} }
		for pb.Next() {
			io.Off = r.Int64N(int64(cfg.Size)/size) * size
			v.Submit(io)
			<-done
		}
	})
}

// BenchmarkBare measures the share of BenchmarkIO that the legs and the measurement take.
func BenchmarkBare(b *testing.B) {
	m := newMemory(64 * block.MiB)
	io := read(0, make([]byte, 4096))
	done := make(chan struct{}, 1)
	io.Done = func(*block.IO) { done <- struct{}{} }
	for b.Loop() {
		m.Submit(io)
		<-done
	}
}

// BenchmarkQueue keeps many IOs under way in one lock unit, where each has to be
// compared with all the others.
func BenchmarkQueue(b *testing.B) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 64 * block.MiB}
	legs := []*slow{{memory: newMemory(cfg.Size)}, {memory: newMemory(cfg.Size)}}
	v := volume(b, cfg, legs[0], legs[1])
	ios := make([]*block.IO, 128)
	for i := range ios {
		ios[i] = write(int64(i)*4096, make([]byte, 4096))
		ios[i].Done = func(*block.IO) {}
	}
	b.ReportAllocs()
	b.ResetTimer()
	for n := 0; n < b.N; n += len(ios) {
		for _, io := range ios {
			v.Submit(io)
		}
		answerAll(legs)
	}
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
)

// memory is a leg that answers at once.
type memory struct {
	g    block.Geometry
	mu   sync.RWMutex
	data []byte
	fail atomic.Pointer[error] // what it answers instead
	ios  atomic.Int64
}

func newMemory(size block.Size) *memory {
	return &memory{data: make([]byte, size), g: block.Geometry{Size: size, BlockSize: 512, DiscardUnit: 4096, VolatileCache: true}}
}

func (m *memory) Geometry() block.Geometry { return m.g }

func (m *memory) Submit(io *block.IO) {
	m.ios.Add(1)
	if err := m.fail.Load(); err != nil {
		io.Complete(*err)
		return
	}
	io.Complete(m.do(io))
}

func (m *memory) do(io *block.IO) error {
	if err := m.g.CheckIO(io); err != nil {
		return err
	}
	if io.Op == block.OpRead {
		m.mu.RLock()
		defer m.mu.RUnlock()
		copy(io.Data, m.data[io.Off:])
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch io.Op {
	case block.OpWrite:
		copy(m.data[io.Off:], io.Data)
	case block.OpWriteZeroes, block.OpDiscard:
		clear(m.data[io.Off : io.Off+io.Len])
	}
	return nil
}

func (m *memory) failing(err error) {
	if err == nil {
		m.fail.Store(nil)
		return
	}
	m.fail.Store(&err)
}

// slow is a leg that keeps its IOs until it is told to answer.
type slow struct {
	*memory
	mu   sync.Mutex
	kept []*block.IO
}

func (s *slow) Submit(io *block.IO) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = append(s.kept, io)
}

// answer completes all IOs that the leg holds, or fails them with err.
func (s *slow) answer(err error) {
	s.mu.Lock()
	kept := s.kept
	s.kept = nil
	s.mu.Unlock()
	for _, io := range kept {
		if err != nil {
			io.Complete(err)
			continue
		}
		s.memory.Submit(io)
	}
}

func (s *slow) holds() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.kept)
}

// volume makes a volume of legs in sync; legs are by column and copy.
func volume(t testing.TB, cfg Config, legs ...block.Device) *Volume {
	t.Helper()
	v, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i, dev := range legs {
		if dev == nil {
			continue
		}
		if err := v.Add(i/cfg.Layout.Copies, i%cfg.Layout.Copies, dev, InSync, false); err != nil {
			t.Fatal(err)
		}
	}
	return v
}

func memories(cfg Config) []block.Device {
	legs := make([]block.Device, cfg.Layout.Legs())
	for i := range legs {
		legs[i] = newMemory(cfg.Layout.LegSize(cfg.Size))
	}
	return legs
}

func layout(stripes, copies int, chunk block.Size) block.Layout {
	return block.Layout{Stripes: stripes, Copies: copies, Chunk: chunk}
}

func fill(n int, seed uint64) []byte {
	p := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	_, _ = r.Read(p)
	return p
}

// start submits an IO and returns a channel for its result.
func start(v block.Device, io *block.IO) chan error {
	done := make(chan error, 1)
	io.Done = func(io *block.IO) { done <- io.Err }
	v.Submit(io)
	return done
}

func write(off int64, data []byte) *block.IO {
	return &block.IO{Op: block.OpWrite, Off: off, Len: int64(len(data)), Data: data}
}

func read(off int64, data []byte) *block.IO {
	return &block.IO{Op: block.OpRead, Off: off, Len: int64(len(data)), Data: data}
}

// open reports that an IO has no result yet.
func open(done chan error) bool { return len(done) == 0 }

func TestAVolumeIsOneDevice(t *testing.T) {
	for _, l := range []block.Layout{
		layout(1, 1, 4096), layout(1, 2, 128*block.KiB), layout(3, 1, 4096), layout(3, 2, 64*block.KiB), layout(5, 3, 4096),
	} {
		for _, most := range []block.Size{0, 12 << 10} {
			t.Run(fmt.Sprint(l, most), func(t *testing.T) {
				cfg := Config{Layout: l, Size: 2*block.MiB + 12*block.KiB, BlockSize: 512}
				legs := memories(cfg)
				for _, m := range legs {
					m.(*memory).g.MaxIO = most
				}
				v := volume(t, cfg, legs...)
				testDevice(t, v, int(cfg.Size))
				if err := v.Close(context.Background()); err != nil {
					t.Fatal(err)
				}
				if err := block.Flush(v); !errors.Is(err, block.ErrGone) {
					t.Errorf("flush after close = %v", err)
				}
				for i := range legs {
					first := legs[i/l.Copies*l.Copies].(*memory)
					if !bytes.Equal(first.data, legs[i].(*memory).data) {
						t.Errorf("leg %d differs from its mirror", i)
					}
				}
			})
		}
	}
}

// testDevice compares a device with a slice over random IO.
func testDevice(t *testing.T, d block.Device, size int) {
	t.Helper()
	want, r := make([]byte, size), rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		off := r.IntN(size/512) * 512
		n := min(size-off, (1+r.IntN(1<<r.IntN(13)))*512)
		var err error
		switch r.IntN(5) {
		case 0, 1:
			data := fill(n, uint64(i))
			copy(want[off:], data)
			err = block.WriteAt(d, data, int64(off))
		case 2:
			clear(want[off : off+n])
			err = block.Do(d, &block.IO{Op: []block.Op{block.OpDiscard, block.OpWriteZeroes}[r.IntN(2)], Off: int64(off), Len: int64(n)})
		case 3:
			got := make([]byte, n)
			err = block.ReadAt(d, got, int64(off))
			if !bytes.Equal(got, want[off:off+n]) {
				t.Fatalf("step %d: read of %d at %d is wrong", i, n, off)
			}
		case 4:
			err = block.Flush(d)
		}
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	got := make([]byte, size)
	if err := block.ReadAt(d, got, 0); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("the whole device reads wrong (%v)", err)
	}
}

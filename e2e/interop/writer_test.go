// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/backend"
)

const (
	unit     = 4 << 10   // unit of checking
	slotSize = 128 << 10 // largest request of a worker: beyond in-capsule data
	depth    = 32        // requests in flight
)

// writer writes to a device at depth 32 and reads back what it wrote. It knows each unit's
// content, because each request belongs to one worker and no two workers share a slot.
type writer struct {
	dev    block.Device
	stop   chan struct{}
	done   sync.WaitGroup
	ops    atomic.Int64
	mu     sync.Mutex
	err    error
	phases [][]uint64 // per slot and unit: number of writes
}

// load starts a writer on the start of the device.
func load(t *testing.T, dev block.Device, size int64) *writer {
	t.Helper()
	w := &writer{dev: dev, stop: make(chan struct{}), phases: make([][]uint64, size/slotSize)}
	if len(w.phases) < depth {
		t.Fatalf("%d slots for %d workers", len(w.phases), depth)
	}
	for i := range w.phases {
		w.phases[i] = make([]uint64, slotSize/unit)
	}
	for i := range depth {
		w.done.Go(func() { w.work(i, rand.New(rand.NewPCG(uint64(i), 1))) })
	}
	return w
}

func (w *writer) work(worker int, r *rand.Rand) {
	buf := backend.Aligned(slotSize)
	for {
		select {
		case <-w.stop:
			return
		default:
		}
		slot := worker + depth*r.IntN((len(w.phases)-worker+depth-1)/depth)
		units := []int{1, 1, 1, 4, 16, slotSize / unit}[r.IntN(6)]
		first := r.IntN(slotSize/unit - units + 1)
		var err error
		if r.IntN(3) == 0 {
			err = w.check(slot, first, units, buf)
		} else {
			err = w.write(slot, first, units, buf)
		}
		if err != nil {
			w.mu.Lock()
			w.err = errors.Join(w.err, err)
			w.mu.Unlock()
			return
		}
		w.ops.Add(1)
	}
}

func content(b []byte, at int64, phase uint64) {
	if phase == 0 {
		clear(b)
		return
	}
	x := uint64(at)*0x9e3779b97f4a7c15 ^ phase
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], x)
		x = x*6364136223846793005 + 1442695040888963407
	}
}

func (w *writer) write(slot, first, units int, buf []byte) error {
	b := buf[:units*unit]
	off := int64(slot)*slotSize + int64(first)*unit
	for i := range units {
		content(b[i*unit:(i+1)*unit], off+int64(i)*unit, w.phases[slot][first+i]+1)
	}
	if err := block.WriteAt(w.dev, b, off); err != nil {
		return fmt.Errorf("writing %d bytes at %d: %w", len(b), off, err)
	}
	for i := range units {
		w.phases[slot][first+i]++
	}
	return nil
}

func (w *writer) check(slot, first, units int, buf []byte) error {
	b := buf[:units*unit]
	off := int64(slot)*slotSize + int64(first)*unit
	if err := block.ReadAt(w.dev, b, off); err != nil {
		return fmt.Errorf("reading %d bytes at %d: %w", len(b), off, err)
	}
	want := make([]byte, unit)
	for i := range units {
		phase := w.phases[slot][first+i]
		content(want, off+int64(i)*unit, phase)
		if got := b[i*unit : (i+1)*unit]; !bytes.Equal(got, want) {
			return fmt.Errorf("at %d: % x…, want % x… of write %d", off+int64(i)*unit, got[:16], want[:16], phase)
		}
	}
	return nil
}

// moves waits until the writer has made progress from now on.
func (w *writer) moves(t *testing.T) {
	t.Helper()
	from := w.ops.Load()
	eventually(t, "the writer continues", func() bool { return w.failed() != nil || w.ops.Load() > from+2*depth })
	must(t, w.failed())
}

// rests returns when no request has completed for a while, so that all are held.
func (w *writer) rests(t *testing.T) {
	t.Helper()
	from := w.ops.Load()
	eventually(t, "the writer is held", func() bool {
		time.Sleep(300 * time.Millisecond)
		now := w.ops.Load()
		still := now == from
		from = now
		return still
	})
	must(t, w.failed())
}

func (w *writer) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// end stops the writer and reads everything back.
func (w *writer) end(t *testing.T) {
	t.Helper()
	close(w.stop)
	w.done.Wait()
	must(t, w.failed())
	w.checkAll(t, w.dev)
	t.Logf("%d requests", w.ops.Load())
}

// checkAll reads everything back through dev.
func (w *writer) checkAll(t *testing.T, dev block.Device) {
	t.Helper()
	must(t, w.verify(dev))
}

// verify returns an error if dev does not hold the last writes.
func (w *writer) verify(dev block.Device) error {
	w.dev = dev
	buf := backend.Aligned(slotSize)
	for slot := range w.phases {
		if err := w.check(slot, 0, slotSize/unit, buf); err != nil {
			return err
		}
	}
	return nil
}

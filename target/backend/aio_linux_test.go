// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"weft.dev/weft/proto/block"
)

// TestIOsUnderWayTogetherDoNotMix runs more IOs at once than the kernel is given, from aligned and
// unaligned memory, first to holes and then to allocated blocks. Each has its own place, where a
// read must find the last write.
func TestIOsUnderWayTogetherDoNotMix(t *testing.T) {
	const places, rounds, unit = aioQueues * aioDepth * 3 / 2, 6, 8192
	for name, d := range devices(t, places*unit, 4096) {
		t.Run(name, func(t *testing.T) {
			var wg sync.WaitGroup
			r := rand.New(rand.NewPCG(3, 4))
			for place := range places {
				skip := r.IntN(2) * 8
				io := &block.IO{Op: block.OpWrite, Off: int64(place) * unit, Len: unit, Data: Aligned(unit + 8)[skip:][:unit]}
				for at := 0; at < unit; at += 8 {
					binary.NativeEndian.PutUint64(io.Data[at:], uint64(place))
				}
				left := rounds
				io.Done = func(*block.IO) {
					if io.Err != nil {
						t.Error(io.Err)
					}
					if left--; left == 0 {
						wg.Done()
						return
					}
					if io.Op == block.OpWrite {
						clear(io.Data)
						io.Op = block.OpRead
					} else {
						for at := 0; at < unit; at += 8 {
							if got := binary.NativeEndian.Uint64(io.Data[at:]); got != uint64(place) {
								t.Errorf("place %d holds %d at %d", place, got, at)
								break
							}
						}
						io.Op = block.OpWrite
					}
					d.Submit(io)
				}
				wg.Add(1)
				d.Submit(io)
			}
			wg.Wait()
		})
	}
}

func TestTheKernelIsGivenWhatItNeedNotWaitFor(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	if f.aio == nil {
		t.Skip("no asynchronous direct IO on this machine's temporary files")
	}
	if err := block.WriteAt(f, Aligned(4096), 0); err != nil {
		t.Fatal(err)
	}
	if f.aio.off.Load() {
		t.Skip("the file system of the temporary files cannot say that it would wait")
	}
	answered := make(chan *block.IO, 1)
	io := &block.IO{Op: block.OpRead, Len: 4096, Data: Aligned(4096), Done: func(io *block.IO) { answered <- io }}
	read := func() { // bypassing the workers
		if !f.aio.submit(io) {
			t.Fatal("the kernel does not take a read")
		}
		<-answered
	}
	read()
	for _, op := range []block.Op{block.OpRead, block.OpWrite} { // a write may also need a worker, for the file's time
		io.Op = op
		if n := testing.AllocsPerRun(100, func() { f.Submit(io); <-answered }); n > 0 {
			t.Errorf("a %v allocates %v times", op, n)
		}
	}
	io.Op = block.OpRead
	for what, other := range map[string]block.IO{
		"a write that must be durable":  {Op: block.OpWrite, FUA: true, Len: 4096, Data: Aligned(4096)},
		"zeroes":                        {Op: block.OpWriteZeroes, Len: 4096},
		"much in memory at odd offsets": {Op: block.OpRead, Len: 65536, Data: Aligned(65536 + 8)[8:]},
	} {
		if f.aio.submit(&other) {
			t.Errorf("the kernel is given %s", what)
		}
	}
}

// With one queue full, IOs go to another one, so that a worker need not wait for them.
func TestAFullQueueLeavesRoomInTheOthers(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	if f.aio == nil || len(f.aio.queues) < 2 {
		t.Skip("no two queues of asynchronous direct IO: this needs two processors")
	}
	if err := block.WriteAt(f, Aligned(4096), 0); err != nil {
		t.Fatal(err)
	}
	if f.aio.off.Load() {
		t.Skip("the file system of the temporary files cannot say that it would wait")
	}
	taken := make(map[*aioQueue][]uint32)
	fill := func(q *aioQueue) {
		for i, ok := q.take(); ok; i, ok = q.take() {
			taken[q] = append(taken[q], i)
		}
	}
	answered := make(chan error, 1)
	io := &block.IO{Op: block.OpRead, Len: 4096, Data: Aligned(4096), Done: func(io *block.IO) { answered <- io.Err }}
	for i, q := range f.aio.queues {
		if !f.aio.submit(io) {
			t.Fatalf("with %d of %d queues full, an IO is not taken", i, len(f.aio.queues))
		}
		if err := <-answered; err != nil {
			t.Error(err)
		}
		fill(q)
	}
	fill(f.aio.queues[len(f.aio.queues)-1]) // the slot of the last IO may have returned since
	if f.aio.submit(io) {
		t.Error("an IO is taken with all queues full")
	}
	f.Submit(io) // a worker does it
	if err := <-answered; err != nil {
		t.Error(err)
	}
	for q, slots := range taken {
		q.mu.Lock()
		q.free = append(q.free, slots...)
		q.returnedLocked(len(slots))
		q.mu.Unlock()
	}
}

// An IO may be admitted just before Close, and get to the kernel or to the workers just after it.
func TestAnIOThatWasAdmittedBeforeCloseIsRefusedAfterIt(t *testing.T) {
	for name, o := range map[string]Options{"direct": {}, "workers": {workersOnly: true}} {
		f := openFile(t, 1<<20, o)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		io := &block.IO{Op: block.OpRead, Len: 4096, Data: Aligned(4096), Done: func(*block.IO) { t.Errorf("%s: an IO is answered twice", name) }}
		if f.aio != nil {
			for _, q := range f.aio.queues { // whose context may be another file's by now
				if _, ok := q.take(); ok {
					t.Errorf("%s: a queue takes an IO", name)
				}
			}
		}
		if err := f.toWorkers(io); !errors.Is(err, block.ErrGone) {
			t.Errorf("%s: for the workers an IO is %v, want ErrGone", name, err)
		}
	}
}

// BenchmarkFile keeps depth IOs of 4 KiB in flight on a file of 64 MiB in TMPDIR, half of them submitted
// by each of two goroutines and then by whoever answers.
func BenchmarkFile(b *testing.B) {
	for _, op := range []block.Op{block.OpRead, block.OpWrite} {
		for _, depth := range []int{2, 32, 128, 512} {
			b.Run(fmt.Sprintf("%v/depth%d", op, depth), func(b *testing.B) {
				const size = 64 << 20
				f := openFile(b, size, Options{})
				whole := Aligned(1 << 20)
				for off := int64(0); off < size; off += 1 << 20 {
					if err := block.WriteAt(f, whole, off); err != nil {
						b.Fatal(err)
					}
				}
				b.SetBytes(4096)
				b.ReportAllocs()
				b.ResetTimer()
				var all sync.WaitGroup
				for g := range 2 {
					all.Add(depth / 2)
					go func() {
						for i := range depth / 2 {
							random, left := rand.New(rand.NewPCG(uint64(g), uint64(i))), b.N/depth+1
							io := &block.IO{Op: op, Len: 4096, Data: Aligned(4096)}
							io.Done = func(io *block.IO) {
								if io.Err != nil {
									b.Error(io.Err)
								}
								if left--; left == 0 {
									all.Done()
									return
								}
								io.Off = random.Int64N(size/4096) * 4096
								f.Submit(io)
							}
							f.Submit(io)
						}
					}()
				}
				all.Wait()
				b.StopTimer()
				b.ReportMetric(float64((b.N/depth+1)*depth)/b.Elapsed().Seconds(), "IOPS")
			})
		}
	}
}

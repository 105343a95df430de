// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"testing"

	"weft.dev/weft/proto/block"
)

// TestIOsUnderWayTogetherDoNotMix runs more IOs at once than the kernel is given, from aligned and
// unaligned memory, first to holes and then to allocated blocks. Each has its own place, where a
// read must find the last write.
func TestIOsUnderWayTogetherDoNotMix(t *testing.T) {
	const places, rounds, unit = aioDepth * 3 / 2, 6, 8192
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
		f.mu.Lock()
		f.withAIO++
		f.mu.Unlock()
		if !f.aio.submit(io) {
			t.Fatal("the kernel does not take a read")
		}
		<-answered
	}
	read()
	if n := testing.AllocsPerRun(100, read); n > 0 {
		t.Errorf("a read allocates %v times", n)
	}
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

// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

// devices are all the kinds, each of the given size.
func devices(t *testing.T, size, blockSize block.Size) map[string]block.Device {
	t.Helper()
	all := map[string]block.Device{"memory": ramdisk.New(size, blockSize)}
	for name, o := range map[string]Options{"direct": {}, "direct, workers": {workersOnly: true}, "buffered": {Buffered: true}} {
		o.BlockSize, o.Workers = blockSize, 4
		all[name] = openFile(t, size, o)
	}
	return all
}

func openFile(t testing.TB, size block.Size, o Options) *File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "drive")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, int64(size)); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// TestADeviceIsAnArrayOfBytes compares every device with a slice over random IOs, from aligned and
// unaligned memory.
func TestADeviceIsAnArrayOfBytes(t *testing.T) {
	const size, unit = 1 << 20, 512
	for name, d := range devices(t, size, unit) {
		t.Run(name, func(t *testing.T) {
			model := make([]byte, size)
			r := rand.New(rand.NewPCG(1, 2))
			for range 600 {
				off := r.Int64N(size/unit) * unit
				n := (1 + r.Int64N(min(64, size/unit-off/unit))) * unit
				p := Aligned(int(n) + 8)[r.IntN(2)*8:][:n]
				io := &block.IO{Op: block.OpRead, Off: off, Len: n, Data: p, FUA: r.IntN(4) == 0, Unmap: r.IntN(2) == 0}
				switch r.IntN(5) {
				case 0:
					io.Op, io.Data = block.OpWriteZeroes, nil
					clear(model[off:][:n])
				case 1, 2:
					io.Op = block.OpWrite
					for i := range p {
						p[i] = byte(r.Uint32())
					}
					copy(model[off:], p)
				case 3:
					if err := block.Flush(d); err != nil {
						t.Fatal(err)
					}
				}
				if err := block.Do(d, io); err != nil {
					t.Fatalf("%v of %d at %d: %v", io.Op, n, off, err)
				}
				if io.Op == block.OpRead && !bytes.Equal(p, model[off:][:n]) {
					t.Fatalf("read of %d at %d differs from what was written", n, off)
				}
			}
		})
	}
}

func TestADiscardedRangeCanBeWrittenAgain(t *testing.T) {
	for name, d := range devices(t, 1<<20, 4096) {
		want := bytes.Repeat([]byte{7}, 8192)
		if err := block.WriteAt(d, want, 4096); err != nil {
			t.Fatal(name, err)
		}
		if err := block.Do(d, &block.IO{Op: block.OpDiscard, Off: 4096, Len: 4096}); err != nil {
			t.Fatal(name, err)
		}
		got := make([]byte, 4096)
		if err := block.ReadAt(d, got, 8192); err != nil || !bytes.Equal(got, want[4096:]) {
			t.Errorf("%s: the neighbour of a discarded range changed (%v)", name, err)
		}
		if err := block.WriteAt(d, want[:4096], 4096); err != nil {
			t.Fatal(name, err)
		}
		if err := block.ReadAt(d, got, 4096); err != nil || !bytes.Equal(got, want[:4096]) {
			t.Errorf("%s: a discarded range does not take a write (%v)", name, err)
		}
	}
}

func TestADiscardGivesTheFilesSpaceBack(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	if err := block.WriteAt(f, Aligned(1<<20), 0); err != nil {
		t.Fatal(err)
	}
	before := allocated(t, f)
	if err := block.Do(f, &block.IO{Op: block.OpDiscard, Off: 0, Len: 1 << 19}); err != nil {
		t.Fatal(err)
	}
	if after := allocated(t, f); after > before-(1<<18) {
		t.Errorf("a file of %d bytes on disk has %d after half of it was discarded", before, after)
	}
}

func TestWhatIsOutOfRangeIsRefused(t *testing.T) {
	for name, d := range devices(t, 1<<20, 4096) {
		for _, io := range []block.IO{
			{Op: block.OpRead, Off: 1 << 20, Len: 4096, Data: make([]byte, 4096)},
			{Op: block.OpRead, Off: 512, Len: 4096, Data: make([]byte, 4096)},
			{Op: block.OpWrite, Off: 0, Len: 8192, Data: make([]byte, 4096)},
			{Op: block.OpWriteZeroes, Off: -4096, Len: 4096},
			{Op: block.OpWriteZeroes, Off: 4096, Len: 1<<63 - 4096},
		} {
			if err := block.Do(d, &io); !errors.Is(err, block.ErrRange) {
				t.Errorf("%s: %v of %d at %d = %v, want ErrRange", name, io.Op, io.Len, io.Off, err)
			}
		}
	}
}

func TestAReadOnlyFileTakesNoWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "drive")
	if err := os.WriteFile(path, make([]byte, 8192), 0o400); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path, Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := block.WriteAt(f, make([]byte, 4096), 0); !errors.Is(err, block.ErrReadOnly) {
		t.Errorf("write = %v, want ErrReadOnly", err)
	}
	if err := block.ReadAt(f, make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
}

func TestAfterCloseNothingIsTaken(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := block.Flush(f); !errors.Is(err, block.ErrGone) {
		t.Errorf("flush of a closed file = %v, want ErrGone", err)
	}
	if err := f.Close(); err != nil {
		t.Errorf("second Close = %v", err)
	}
}

// TestCloseWaitsForWhatIsUnderWay submits many writes and closes at once; when Close returns, all
// must be in the file and answered.
func TestCloseWaitsForWhatIsUnderWay(t *testing.T) {
	f := openFile(t, 1<<20, Options{Workers: 3})
	var mu sync.Mutex
	done := 0
	for i := range 256 {
		p := Aligned(4096)
		p[0] = byte(i)
		f.Submit(&block.IO{Op: block.OpWrite, Off: int64(i) * 4096, Len: 4096, Data: p, Done: func(io *block.IO) {
			mu.Lock()
			defer mu.Unlock()
			if io.Err == nil {
				done++
			}
		}})
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if done != 256 {
		t.Errorf("%d of 256 writes were done when Close returned", done)
	}
}

func TestAFlushThatFailedOnceFailsForEver(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	lost := fmt.Errorf("what the kernel said: %w", block.ErrMedium)
	f.mu.Lock()
	f.lost = lost
	f.mu.Unlock()
	for range 2 {
		if err := block.Flush(f); !errors.Is(err, block.ErrMedium) {
			t.Errorf("flush after a lost write = %v, want ErrMedium", err)
		}
	}
}

func TestManyFlushesShareOneSync(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	var wg sync.WaitGroup
	for range 100 {
		wg.Add(1)
		f.Submit(&block.IO{Op: block.OpFlush, Done: func(io *block.IO) {
			if io.Err != nil {
				t.Error(io.Err)
			}
			wg.Done()
		}})
	}
	wg.Wait()
}

func TestAFileThatShrankIsAMediumError(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	if err := os.Truncate(f.path, 4096); err != nil {
		t.Fatal(err)
	}
	if err := block.ReadAt(f, Aligned(4096), 8192); !errors.Is(err, block.ErrMedium) {
		t.Errorf("read behind the end of a file that shrank = %v, want ErrMedium", err)
	}
	if err := f.Refresh(); err != nil || f.Geometry().Size != 4096 {
		t.Errorf("Refresh = %v, size %v, want 4KiB", err, f.Geometry().Size)
	}
}

func TestOpenRefusesWhatIsNoDevice(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{dir, filepath.Join(dir, "none"), "/dev/null"} {
		if f, err := Open(path, Options{}); err == nil {
			f.Close()
			t.Errorf("Open(%s) succeeded", path)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

const legSize = 2 << 20

// world is a volume whose copies a test changes while they are compared.
type world struct {
	mu      sync.Mutex
	legs    map[int][]byte // by copy, of column 0; other columns are zeroes
	of      map[int]string
	bad     map[int]int64 // by copy, where a block cannot be read
	answers bool
	settled bool
	size    int64
	writing bool           // writes of users never rest
	after   func(copy int) // called after a read of column 0
	found   []string
	looks   int
}

func newWorld(copies int) *world {
	w := &world{legs: map[int][]byte{}, of: map[int]string{}, bad: map[int]int64{}, answers: true, settled: true, size: legSize}
	for copy := range copies {
		w.legs[copy], w.of[copy], w.bad[copy] = make([]byte, legSize), fmt.Sprint("leg ", copy), -1
	}
	return w
}

func (w *world) set(copy int, off int64, b byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.legs[copy][off] = b
}

// legSize is also what is told of the size of a column.
func (w *world) legSize() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.size
}

// rest is true now and then, as on a device that is written to.
func (w *world) rest() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks++
	return !w.writing && w.looks%5 == 0
}

// write is a write under way: it has reached copy 1, and reaches copy 0 after a while.
func (w *world) write(off int64, b byte, takes time.Duration) {
	w.set(1, off, b)
	w.mu.Lock()
	w.writing = true
	w.mu.Unlock()
	time.AfterFunc(takes, func() {
		w.set(0, off, b)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.writing = false
	})
}

func (w *world) copies(column int) (all []Copy, settled bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for copy := range 3 {
		if _, ok := w.legs[copy]; ok {
			all = append(all, Copy{Copy: copy, Of: w.of[copy], Read: func(p []byte, off int64) error { return w.read(column, copy, p, off) }})
		}
	}
	return all, w.settled
}

func (w *world) read(column, copied int, p []byte, off int64) error {
	time.Sleep(time.Millisecond)
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(p)
	switch leg, ok := w.legs[copied]; {
	case !w.answers || !ok:
		return errors.New("no answer")
	case column > 0:
		return nil
	default:
		if at := w.bad[copied]; at >= off && at < off+int64(len(p)) {
			return fmt.Errorf("read: %w", block.ErrMedium)
		}
		copy(p, leg[off:])
		if w.after != nil {
			w.after(copied)
		}
		return nil
	}
}

// compared runs a comparison of the world to its end.
func (w *world) compared(t *testing.T, cfg Config) *Comparison {
	t.Helper()
	cfg.Columns, cfg.Copies, cfg.LegSize = max(cfg.Columns, 1), w.copies, w.legSize
	cfg.Rest = w.rest
	cfg.Waits = func(err error) { t.Log(err) }
	cfg.Found = func(f volume.ScrubFinding) {
		w.found = append(w.found, fmt.Sprintf("%d: %d at %d, equal %v, unreadable %v", f.Column, f.Length, f.Off, f.Equal, f.Unreadable))
	}
	c := New(cfg)
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	if err := c.Run(ctx); err != nil {
		t.Fatal(err)
	}
	return c
}

// is checks what was found, and how much had nothing to compare.
func (w *world) is(t *testing.T, c *Comparison, alone block.Size, want ...string) {
	t.Helper()
	if !slices.Equal(w.found, want) {
		t.Errorf("found %q, want %q", w.found, want)
	}
	if done, total, was := c.Progress(); done != total || was != alone {
		t.Errorf("%v of %v compared, %v alone; want all, %v alone", done, total, was, alone)
	}
}

func TestWhatDiffersIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(3)
		for _, copy := range []int{0, 1, 2} {
			w.set(copy, 9000, 5)
		}
		w.set(1, 4096, 1)
		w.set(1, 8191, 2)
		w.set(1, 8192, 2) // the next block, too
		w.set(0, 1<<20, 1)
		w.set(1, 1<<20, 2)
		w.set(2, legSize-1, 9)
		c := w.compared(t, Config{Columns: 2})
		w.is(t, c, 0, "0: 8192 at 4096, equal [[0 2] [1]], unreadable []", "0: 4096 at 1048576, equal [[0] [1] [2]], unreadable []",
			fmt.Sprintf("0: 4096 at %d, equal [[0 1] [2]], unreadable []", legSize-4096))
		if at := c.Position(); at != (volume.ScrubPosition{Column: 1, Off: legSize}) {
			t.Errorf("it ends at %v", at)
		}
	})
}

func TestWhatIsBeingWrittenIsNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, takes := range []time.Duration{time.Millisecond, time.Second, 10 * time.Second} {
			w := newWorld(2)
			w.write(5, 1, takes)
			c := w.compared(t, Config{})
			w.is(t, c, 0)
		}
	})
}

// What is written again and again may be the same twice.
func TestWhatDiffersForAMomentIsNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.set(1, 5, 1)
		time.AfterFunc(5*firstWait, func() { w.set(0, 5, 1) })
		c := w.compared(t, Config{})
		w.is(t, c, 0)
	})
}

// A moment without writes says nothing of what was written since.
func TestAWriteAfterAMomentOfRestIsNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.set(1, 5, 1)
		time.AfterFunc(5*firstWait, func() { w.write(5, 2, 3*time.Hour) })
		c := w.compared(t, Config{})
		w.is(t, c, 4096)
	})
}

// Such a write may wait for hours, where one of the copies has no space.
func TestWhatDiffersWhileWritesNeverRestIsNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.write(5, 1, 3*time.Hour)
		c := w.compared(t, Config{})
		w.is(t, c, 4096)
	})
}

// What is written all the time may differ whenever it is read.
func TestWhatChangesAllTheTimeIsNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		n := byte(0)
		w.after = func(int) {
			n++
			w.legs[0][70000], w.legs[1][70000] = n, n+100
		}
		began := time.Now()
		c := w.compared(t, Config{})
		w.is(t, c, 4096)
		if took := time.Since(began); took > time.Minute {
			t.Errorf("it took %v", took)
		}
	})
}

func TestNothingIsToldWhileALegDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.settled = false
		w.set(0, 5, 1)
		c := w.compared(t, Config{})
		w.is(t, c, 4096)
	})
}

func TestWhatCannotBeReadIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.bad[1] = 8192 + 5
		c := w.compared(t, Config{})
		w.is(t, c, 0, "0: 4096 at 8192, equal [[0]], unreadable [1]")
	})
}

// A copy that leaves while it is compared differs for a reason.
func TestACopyThatLeavesIsNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.write(1<<20, 1, time.Hour)
		time.AfterFunc(time.Second, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			delete(w.legs, 1)
		})
		c := w.compared(t, Config{})
		w.is(t, c, legSize/2)
	})
}

// A leg that is attached anew may hold something else from then on.
func TestACopyThatIsAttachedAnewIsReadAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.write(5, 1, time.Hour)
		time.AfterFunc(2*time.Second, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.of[1], w.legs[1][5] = "leg 1 on another device", 0
		})
		c := w.compared(t, Config{})
		w.is(t, c, 0)
	})
}

func TestACopyThatDoesNotAnswerIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.set(0, 1<<20, 1)
		w.answers = false
		time.AfterFunc(time.Minute, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.answers = true
		})
		c := w.compared(t, Config{})
		w.is(t, c, 0, "0: 4096 at 1048576, equal [[0] [1]], unreadable []")
	})
}

func TestItBeginsWhereItIsToldAndKeepsItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.set(0, 0, 1)
		began := time.Now()
		c := w.compared(t, Config{From: volume.ScrubPosition{Off: 1 << 20}, Rate: 100 << 10})
		w.is(t, c, 0)
		if took := time.Since(began); took < 10*time.Second || took > 11*time.Second {
			t.Errorf("1 MiB at 100 KiB a second took %v", took)
		}
	})
}

func TestManyDifferencesAreToldTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		for off := int64(0); off < legSize; off += 8192 {
			w.set(0, off, 1)
		}
		began := time.Now()
		w.compared(t, Config{})
		if took := time.Since(began); len(w.found) != legSize/8192 || took > 5*time.Second {
			t.Errorf("%d findings in %v", len(w.found), took)
		}
	})
}

func TestAComparisonEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		c := New(Config{Columns: 1, Copies: w.copies, LegSize: w.legSize, Rest: w.rest, Rate: 1})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := c.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Run = %v", err)
		}
		if at := c.Position(); at.Off != piece {
			t.Errorf("it is at %v", at)
		}
	})
}

// A column that cannot be interpreted for a moment has no size then.
func TestASizeThatIsNotKnownIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.set(1, legSize-1, 1)
		w.after = func(int) {
			w.after, w.size = nil, 0
			time.AfterFunc(time.Minute, func() {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.size = legSize
			})
		}
		c := w.compared(t, Config{Columns: 2})
		w.is(t, c, 0, fmt.Sprintf("0: 4096 at %d, equal [[0] [1]], unreadable []", legSize-4096))
	})
}

// What a controller refuses to read holds up the rest of the volume for some minutes, and not for ever.
func TestAPieceThatIsNeverReadIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.answers = false
		time.AfterFunc(mostAttempts*noAnswer+time.Minute, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.answers = true
		})
		c := w.compared(t, Config{})
		w.is(t, c, piece)
	})
}

// What a column that was compared to its end has got since is not compared, and that is said.
func TestWhatGrowsBehindItIsNotCompared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		cfg := Config{Columns: 2}
		w.after = func(int) { // of column 0, near its end
			w.after = nil
			time.AfterFunc(6*time.Millisecond, func() {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.size = 2 * legSize
			})
		}
		cfg.From.Off = legSize - 4096
		c := w.compared(t, cfg)
		w.is(t, c, legSize)
	})
}

func TestItBeginsInAColumnWhoseSizeIsNotKnownYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2)
		w.size = 0
		time.AfterFunc(time.Hour/2, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.size = legSize
		})
		c := w.compared(t, Config{Columns: 2, From: volume.ScrubPosition{Column: 1, Off: 1 << 20}})
		w.is(t, c, 0)
	})
}

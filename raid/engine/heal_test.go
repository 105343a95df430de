// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// rotten is a leg on which blocks of 4 KiB do not match their checksums until they are written whole.
type rotten struct {
	*memory
	mu  sync.Mutex
	bad map[int64]bool // by number
}

func (r *rotten) rot(blocks ...int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bad == nil {
		r.bad = map[int64]bool{}
	}
	for _, b := range blocks {
		r.bad[b] = true
		r.memory.data[b*4096] ^= 1
	}
}

func (r *rotten) left() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.bad)
}

func (r *rotten) Submit(io *block.IO) {
	r.mu.Lock()
	for b := io.Off / 4096; b*4096 < io.Off+io.Len; b++ {
		switch {
		case io.Op == block.OpRead && r.bad[b]:
			r.mu.Unlock()
			io.Complete(block.ErrChecksum)
			return
		case io.Op == block.OpWrite && b*4096 >= io.Off && (b+1)*4096 <= io.Off+io.Len:
			delete(r.bad, b)
		}
	}
	r.mu.Unlock()
	r.memory.Submit(io)
}

type told struct {
	Finding
	Outcome
	err error
}

// healing is a volume of two copies on legs that can rot, full of data.
func healing(t *testing.T) (v *Volume, legs [2]*rotten, data []byte, healed chan told) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 16 * block.MiB, FailMedium: true}
	healed = make(chan told, 10000)
	cfg.OnHealed = func(f Finding, o Outcome, err error) { healed <- told{f, o, err} }
	cfg.OnEvent = func(e Event) { t.Errorf("event %+v: a leg that heals has not failed", e) }
	mem := memories(cfg)
	legs = [2]*rotten{{memory: mem[0].(*memory)}, {memory: mem[1].(*memory)}}
	v = volume(t, cfg, legs[0], legs[1])
	data = fill(int(cfg.Size), 7)
	if err := block.WriteAt(v, data, 0); err != nil {
		t.Fatal(err)
	}
	return v, legs, data, healed
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for range 10000 {
		if is() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("never: %s", what)
}

// A read of data that does not match its checksum gets that of the other copy, and the bad copy gets
// it too. What no read finds, a scrub does.
func TestAReadHealsWhatDoesNotMatchItsChecksum(t *testing.T) {
	v, legs, data, healed := healing(t)
	for b := range int64(256) {
		legs[b%2].rot(b) // of each read of two blocks or more, both copies are bad in a part
	}
	for at := 0; at < 2<<20; at += 64 << 10 {
		got := make([]byte, 64<<10)
		if err := block.ReadAt(v, got, int64(at)); err != nil || !bytes.Equal(got, data[at:][:len(got)]) {
			t.Fatalf("64KiB at %d: %v", at, err)
		}
	}
	left := func() int { return legs[0].left() + legs[1].left() }
	eventually(t, "some of it heals", func() bool { return left() < 250 })
	if err := v.NewScrub(ScrubConfig{Repair: &Repair{}}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all of it heals", func() bool { return left() == 0 })
	if err := v.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, l := range legs {
		if !bytes.Equal(l.memory.data, data) {
			t.Errorf("copy %d is not what was written", i)
		}
	}
	for len(healed) > 0 {
		if x := <-healed; x.Outcome != Repaired || x.err != nil || len(x.Unreadable) != 1 {
			t.Errorf("%+v: %v, %v", x.Finding, x.Outcome, x.err)
		}
	}
}

// Where no copy can be read, nothing is written, and that is told block by block.
func TestWhatNoCopyCanGiveIsTold(t *testing.T) {
	v, legs, data, healed := healing(t)
	legs[0].rot(8, 9)
	legs[1].rot(9, 10)
	if err := block.ReadAt(v, make([]byte, 32<<10), 16<<10); !errors.Is(err, block.ErrChecksum) {
		t.Fatalf("read: %v", err)
	}
	eventually(t, "the rest heals", func() bool { return legs[0].left() == 1 && legs[1].left() == 1 })
	x := <-healed
	for x.Outcome == Repaired {
		x = <-healed
	}
	if x.Outcome != NotKnown || x.Off != 9*4096 || x.Length != 4096 || !errors.Is(x.err, block.ErrChecksum) {
		t.Errorf("%+v: %v, %v", x.Finding, x.Outcome, x.err)
	}
	if err := block.WriteAt(v, data[9*4096:][:4096], 9*4096); err != nil {
		t.Fatal(err)
	}
	if err := block.ReadAt(v, make([]byte, 32<<10), 16<<10); err != nil {
		t.Errorf("after it was written: %v", err)
	}
}

// A volume whose owner does not want it to heal only reads from another copy.
func TestNothingHealsUnasked(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB}
	mem := memories(cfg)
	l := &rotten{memory: mem[0].(*memory)}
	v := volume(t, cfg, l, mem[1])
	l.rot(0)
	for range 4 {
		if err := block.ReadAt(v, make([]byte, 4096), 0); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(20 * time.Millisecond)
	if l.left() != 1 {
		t.Error("it was written again")
	}
}

// A rebuild reads from the copy that is right, and heals the one that is not.
func TestARebuildTakesNothingThatDoesNotMatch(t *testing.T) {
	cfg := Config{Layout: layout(1, 3, block.DefaultChunk), Size: 8 * block.MiB}
	cfg.OnHealed = func(Finding, Outcome, error) {}
	caught := make(chan Event, 10)
	cfg.OnEvent = func(e Event) {
		if e.Kind == LegCaughtUp {
			caught <- e
		}
	}
	mem := memories(cfg)
	legs := [2]*rotten{{memory: mem[0].(*memory)}, {memory: mem[1].(*memory)}}
	third := mem[2].(*memory)
	v := volume(t, cfg, legs[0], legs[1], third)
	data := fill(int(cfg.Size), 3)
	if err := block.WriteAt(v, data, 0); err != nil {
		t.Fatal(err)
	}
	if err := v.Drop(0, 2); err != nil {
		t.Fatal(err)
	}
	clear(third.data)
	legs[0].rot(1, 100, 700)
	legs[1].rot(2, 101, 1500)
	if err := v.Add(0, 2, third, Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	wait(t, caught)
	if !bytes.Equal(third.data, data) {
		t.Error("the new copy is not what was written")
	}
}

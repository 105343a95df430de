// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"testing"

	"weft.dev/weft/proto/block"
)

// TestAVolumeGoesOnAfterALossOfCacheOnlyIfAllWasFlushed: acknowledged data that is not known
// to be durable may be lost, and nothing else would detect that.
func TestAVolumeGoesOnAfterALossOfCacheOnlyIfAllWasFlushed(t *testing.T) {
	data := func() *block.IO { return write(0, fill(4096, 1)) }
	flush := func() *block.IO { return &block.IO{Op: block.OpFlush} }
	fua := data()
	fua.FUA = true
	for name, c := range map[string]struct {
		answered []*block.IO // in turn
		out      *block.IO   // under way when the power goes
		lost     bool
	}{
		"nothing was written":             {},
		"a write":                         {answered: []*block.IO{data()}, lost: true},
		"a write that was flushed":        {answered: []*block.IO{data(), flush()}},
		"a write after a flush":           {answered: []*block.IO{flush(), data()}, lost: true},
		"a write through the cache":       {answered: []*block.IO{fua}},
		"a write whose flush is not over": {answered: []*block.IO{data()}, out: flush(), lost: true},
		"a write that is not answered":    {out: data()},
		"zeroes":                          {answered: []*block.IO{{Op: block.OpWriteZeroes, Len: 4096}}, lost: true},
	} {
		for _, copies := range []int{1, 2} {
			v, legs, _ := mirrorOf(t, copies)
			for _, io := range c.answered {
				done := start(v, io)
				answerAll(legs)
				if err := wait(t, done); err != nil {
					t.Fatal(err)
				}
			}
			out := make(chan error, 1)
			out <- nil
			if c.out != nil {
				out = start(v, c.out)
			}
			for copy := 1; copy < copies; copy++ { // lost as well, and recorded so
				if err := v.Drop(0, copy); err != nil {
					t.Fatal(err)
				}
				legs[copy].answer(block.ErrGone)
			}
			if got := v.Status().Legs[0][0].Unflushed; got != c.lost {
				t.Errorf("%s, %d copies: unflushed %v, want %v", name, copies, got, c.lost)
			}
			err := v.Renew(0, 0, legs[0].memory)
			legs[0].answer(block.ErrGone)
			switch {
			case c.lost && !errors.Is(err, ErrUnflushed):
				t.Errorf("%s, %d copies: renew = %v, want that writes may be lost", name, copies, err)
			case !c.lost && err != nil:
				t.Errorf("%s, %d copies: renew = %v", name, copies, err)
			case !c.lost:
				if err := wait(t, out); err != nil {
					t.Errorf("%s, %d copies: what was under way = %v", name, copies, err)
				}
			}
		}
	}
}

// TestWhatALegSaidBeforeItLostItsCacheIsNotBelieved: a late answer may be about data that is
// lost. A write of several parts starts again.
func TestWhatALegSaidBeforeItLostItsCacheIsNotBelieved(t *testing.T) {
	cfg := Config{Layout: layout(1, 1, block.DefaultChunk), Size: block.MiB}
	old := &slow{memory: newMemory(cfg.Size)}
	old.g.MaxIO = 4096
	v := volume(t, cfg, old)
	old.answer(nil) // the first flush
	data := fill(4096, 1)
	parts := start(v, &block.IO{Op: block.OpWriteZeroes, Off: 1 << 19, Len: 8192}) // the first of two
	old.answer(nil)
	whole := start(v, write(0, data))
	anew := newMemory(cfg.Size)
	copy(anew.data[1<<19:], fill(8192, 9))
	if err := v.Renew(0, 0, anew); err != nil {
		t.Fatal(err)
	}
	for range 4 { // it says that it has the rest
		old.answer(nil)
	}
	if err := errors.Join(wait(t, parts), wait(t, whole)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(anew.data[:4096], data) || !bytes.Equal(anew.data[1<<19:1<<19+8192], make([]byte, 8192)) {
		t.Error("writes were acknowledged of which the leg has only a part")
	}
}

// TestOfALegWithoutACacheNobodyKnowsWhatWasInIt: its drive may have got one since.
func TestOfALegWithoutACacheNobodyKnowsWhatWasInIt(t *testing.T) {
	cfg := Config{Layout: layout(1, 1, block.DefaultChunk), Size: block.MiB}
	leg := newMemory(cfg.Size)
	leg.g.VolatileCache = false
	v := volume(t, cfg, leg)
	if err := v.Renew(0, 0, newMemory(cfg.Size)); !errors.Is(err, ErrUnflushed) || !v.Status().Legs[0][0].Unflushed {
		t.Errorf("renew = %v, want that writes may be lost", err)
	}
}

func TestOnlyALegWithAllThatIsDurableIsRenewed(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: block.MiB}
	legs := memories(cfg)
	v := volume(t, cfg, legs...)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	if err := v.Renew(0, 1, legs[1]); err == nil {
		t.Error("a leg that was dropped is renewed")
	}
	if err := v.Renew(0, 0, newMemory(block.MiB/2)); err == nil {
		t.Error("a leg is renewed with half of it")
	}
	v.Abort()
	if err := v.Renew(0, 0, legs[0]); !errors.Is(err, block.ErrGone) {
		t.Errorf("renew in a volume that was given up = %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"time"
)

// history knows what a read of a block may find.
type history struct {
	first uint64            // earlier writers had lower sequence numbers
	begun map[uint64]uint64 // by block: the newest write
	known map[uint64]uint64 // by block: the newest write that was acknowledged, or found by a read
	blank map[uint64]bool   // by block: a discard has begun since its last acknowledged write
}

func newHistory(first uint64) history {
	return history{first: first, begun: map[uint64]uint64{}, known: map[uint64]uint64{}, blank: map[uint64]bool{}}
}

// learn notes that a block holds a write.
func (h history) learn(block, seq uint64) { h.known[block] = max(h.known[block], seq) }

// wrong says what is wrong with a read that found a write, 0 if the block was blank, when oldest was known as the
// read began.
func (h history) wrong(block, found, oldest uint64) error {
	newest, ok := h.begun[block]
	if !ok {
		newest = h.first - 1
	}
	switch {
	case found < oldest:
		return fmt.Errorf("stale: holds write %d, and write %d was there before the read began", found, oldest)
	case found > newest:
		return fmt.Errorf("holds write %d, and none after %d had begun when the read ended", found, newest)
	}
	return nil
}

// read reads random blocks until ctx ends, at the rate o.reads of all readers together.
func (w *writer) read(ctx context.Context, f io.ReaderAt, o options) {
	b := aligned(1)
	for ctx.Err() == nil {
		r := w.look(o.blocks)
		start := time.Now()
		_, err := f.ReadAt(b, int64(r.block*blockSize))
		w.judge(r, b, start, time.Now(), err)
		pause(ctx, time.Second*time.Duration(o.depth)/time.Duration(o.reads)-time.Since(start))
	}
}

// reading is a read of a block, with what was known of the block as it began.
type reading struct {
	block, oldest, begun uint64
	beside               bool // a write or a discard was under way
	blank                bool // it may have been blank
}

// look begins a read of a random block.
func (w *writer) look(blocks uint64) reading {
	w.mu.Lock()
	defer w.mu.Unlock()
	block := w.rand.Uint64N(blocks)
	return reading{block, w.known[block], w.begun[block], w.busy[block], w.blank[block]}
}

// judge prints whether a read found what it may. A block that was written meanwhile may be torn, which says
// nothing.
func (w *writer) judge(r reading, b []byte, start, end time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var found uint64
	if err == nil {
		found, err = parse(b, r.block)
		switch {
		case err == errBlank && (r.blank || w.blank[r.block]):
			err = nil
		case err == nil, err == errBlank:
			err = w.wrong(r.block, found, r.oldest)
		case r.beside, r.begun != w.begun[r.block]:
			return
		}
	}
	if err != nil {
		fmt.Fprintf(w.out, "E %d %d %d %d read: %v\n", r.block, found, start.UnixNano(), end.UnixNano(), err)
		return
	}
	w.learn(r.block, found)
	fmt.Fprintf(w.out, "R %d %d %d %d\n", r.block, found, start.UnixNano(), end.UnixNano())
}

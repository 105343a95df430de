// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
)

// rangeWorld is a tree, and what each of its legs and snapshots holds: a number for each 4 KiB.
type rangeWorld struct {
	r       *rand.Rand
	tree    *Tree
	legs    map[block.UUID]*Leg
	holds   map[block.UUID][]uint64
	frozen  map[block.UUID]bool
	next    uint64 // object or tag
	compare int    // pairs that were compared
}

const (
	rangeUnit = 4096
	rangeSize = 3<<20 + 5*rangeUnit // the last grain is a part of one
)

func (w *rangeWorld) pick(frozen ...bool) block.UUID {
	all := slices.SortedFunc(maps.Keys(w.holds), func(a, b block.UUID) int { return slices.Compare(a[:], b[:]) })
	all = slices.DeleteFunc(all, func(o block.UUID) bool { return !slices.Contains(frozen, w.frozen[o]) })
	if len(all) == 0 {
		return block.UUID{}
	}
	return all[w.r.IntN(len(all))]
}

func (w *rangeWorld) leg(object block.UUID) *Leg {
	if w.legs[object] == nil {
		l, err := w.tree.Leg(object)
		if err != nil {
			panic(err)
		}
		w.legs[object] = l
	}
	return w.legs[object]
}

func (w *rangeWorld) step() error {
	w.next++
	head, snapshot, fresh := w.pick(false), w.pick(true), id(1000+w.next)
	switch n := w.r.IntN(20); {
	case n < 12:
		return w.change(head)
	case n < 14 && len(w.holds) < 9:
		w.holds[fresh], w.frozen[fresh] = slices.Clone(w.holds[head]), true
		return w.tree.Freeze(head, fresh, nil)
	case n < 16 && len(w.holds) < 9 && !snapshot.IsZero():
		w.holds[fresh] = slices.Clone(w.holds[snapshot])
		return w.tree.Clone(snapshot, fresh, rangeSize, nil)
	case n < 18 && len(w.holds) > 3:
		return w.delete(w.pick(true, false))
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if w.r.IntN(2) == 0 {
		cancel()
	}
	if err := w.tree.Reclaim(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func (w *rangeWorld) delete(object block.UUID) error {
	if l := w.legs[object]; l != nil {
		l.Close()
		delete(w.legs, object)
	}
	if object == id(1) {
		return nil // so that there is always a head
	}
	delete(w.holds, object)
	delete(w.frozen, object)
	return w.tree.Delete(object)
}

// change writes, discards or zeroes some of a head.
func (w *rangeWorld) change(head block.UUID) error {
	units := rangeSize / rangeUnit
	at := w.r.IntN(units)
	n := 1 + w.r.IntN(min(units-at, []int{1, 12, 400}[w.r.IntN(3)]))
	io := block.IO{Op: block.OpWrite, Off: int64(at) * rangeUnit, Len: int64(n) * rangeUnit, Data: make([]byte, n*rangeUnit)}
	tag, first, last := w.next, at, at+n
	switch w.r.IntN(4) {
	case 0:
		io.Op, io.Data, tag = []block.Op{block.OpWriteZeroes, block.OpDiscard}[w.r.IntN(2)], nil, 0
		if io.Op == block.OpDiscard { // whole grains only
			first, last = (at+3)/4*4, (at+n)/4*4
		}
	default:
		for i := range n {
			binary.LittleEndian.PutUint64(io.Data[i*rangeUnit:], tag)
		}
	}
	for i := first; i < last; i++ {
		w.holds[head][i] = tag
	}
	return block.Do(w.leg(head), &io)
}

// named is the units that ranges name, asked for in pieces.
func (w *rangeWorld) named(ask func(off, end int64, most int) ([]block.Range, int64, error)) ([]bool, error) {
	named := make([]bool, rangeSize/rangeUnit)
	last := int64(0)
	for off, end := int64(0), int64(0); off < rangeSize; {
		if off == end {
			end = min(rangeSize, off+rangeUnit*int64(1+w.r.IntN(700)))
		}
		found, next, err := ask(off, end, 1+w.r.IntN(5))
		if err != nil {
			return nil, err
		}
		if next <= off || next > end {
			return nil, fmt.Errorf("%d to %d: goes on at %d", off, end, next)
		}
		for _, r := range found {
			if r.Off < last || r.End <= r.Off || r.End > next {
				return nil, fmt.Errorf("%d to %d: found %v, the next is %d", off, end, found, next)
			}
			for at := r.Off; at < r.End; at += rangeUnit {
				named[at/rangeUnit] = true
			}
			last = r.End
		}
		off = next
	}
	return named, nil
}

// check compares what the tree says of an object with what it holds.
func (w *rangeWorld) check(object, since block.UUID) error {
	holds, leg := w.holds[object], w.leg(object)
	named, err := w.named(leg.Allocated)
	if err != nil {
		return err
	}
	for i, tag := range holds {
		if tag != 0 && !named[i] {
			return fmt.Errorf("4 KiB %d holds %d and is not named", i, tag)
		}
	}
	if w.frozen[object] {
		byTree, err := w.named(func(off, end int64, most int) ([]block.Range, int64, error) {
			return w.tree.Ranges(object, block.UUID{}, off, end, most)
		})
		if err != nil || !slices.Equal(byTree, named) {
			return fmt.Errorf("the tree names other ranges of a snapshot: %v", err)
		}
	}
	if since.IsZero() {
		return nil
	}
	w.compare++
	named, err = w.named(func(off, end int64, most int) ([]block.Range, int64, error) {
		return leg.Differing(since, off, end, most)
	})
	if err != nil {
		return err
	}
	if w.frozen[object] {
		byTree, err := w.named(func(off, end int64, most int) ([]block.Range, int64, error) {
			return w.tree.Ranges(object, since, off, end, most)
		})
		if err != nil || !slices.Equal(byTree, named) {
			return fmt.Errorf("the tree names other differences of a snapshot: %v", err)
		}
	}
	was := w.holds[since]
	for i := range holds {
		first := i / 4 * 4
		last := min(first+4, len(holds))
		switch equal := slices.Equal(holds[first:last], was[first:last]); {
		case holds[i] != was[i] && !named[i]:
			return fmt.Errorf("4 KiB %d holds %d, and %d in %v, and is not named", i, holds[i], was[i], since)
		case equal && named[i] && !slices.Contains(holds[first:last], 0): // each write has its own number
			return fmt.Errorf("4 KiB %d is named, and nobody has written it since %v", i, since)
		}
	}
	return nil
}

func TestRangesNameAllThatIsThere(t *testing.T) {
	compared := 0
	for seed := range uint64(12) {
		tree, leg, _ := memory(t, rangeSize)
		w := &rangeWorld{r: rand.New(rand.NewPCG(seed, 9)), tree: tree, legs: map[block.UUID]*Leg{id(1): leg}}
		w.holds, w.frozen = map[block.UUID][]uint64{id(1): make([]uint64, rangeSize/rangeUnit)}, map[block.UUID]bool{}
		for i := range 250 {
			must(t, w.step())
			if err := w.check(w.pick(true, false), w.pick(true)); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, i, err)
			}
		}
		compared += w.compare
	}
	if compared < 1000 {
		t.Errorf("%d pairs were compared, want more", compared)
	}
}

func TestRangesThatAreRefused(t *testing.T) {
	tree, leg, _ := memory(t, 8<<20)
	must(t, block.WriteAt(leg, tagged(7, 8), 1<<20))
	must(t, tree.Freeze(id(1), id(2), nil))
	must(t, tree.Clone(id(2), id(3), 8<<20, nil))
	for _, c := range []struct {
		since    uint64
		off, end int64
		want     error
	}{{2, 0, 8 << 20, nil}, {2, 8 << 20, 8 << 20, nil}, {2, 0, 8<<20 + 1, block.ErrRange}, {2, -1, 4096, block.ErrRange}, {2, 4096, 0, block.ErrRange},
		{9, 0, 4096, ErrUnknown}, {3, 0, 4096, ErrState}, {1, 0, 4096, ErrState}} {
		found, next, err := leg.Differing(id(c.since), c.off, c.end, 10)
		if !errors.Is(err, c.want) || len(found) > 0 || err == nil && next != c.end {
			t.Errorf("Differing(%d, %d, %d) = %v, %d, %v; want %v", c.since, c.off, c.end, found, next, err, c.want)
		}
	}
	found, next, err := leg.Allocated(0, 8<<20, 0)
	if err != nil || len(found) > 0 || next != 1<<20 {
		t.Errorf("with room for nothing: %v, %d, %v; want to go on at 1 MiB", found, next, err)
	}
	must(t, tree.Delete(id(2)))
	if _, _, err := leg.Differing(id(2), 0, 4096, 10); !errors.Is(err, ErrUnknown) {
		t.Errorf("since a deleted snapshot: %v, want ErrUnknown", err)
	}
	leg.Close()
	if _, _, err := leg.Allocated(0, 4096, 10); !errors.Is(err, block.ErrGone) {
		t.Errorf("of a closed leg: %v, want ErrGone", err)
	}
}

func BenchmarkRangesOfAnEmptyTebibyte(b *testing.B) {
	_, leg, _ := memory(b, 1<<40)
	for b.Loop() {
		if found, next, err := leg.Allocated(0, 1<<40, 10); err != nil || len(found) > 0 || next != 1<<40 {
			b.Fatal(found, next, err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
)

// theirs says which objects a volume has: some of the world's, or any. Whichever they are, nothing that
// can be read may change.
func (w *world) theirs() func(block.UUID) bool {
	heads := w.names(false)
	if w.r.IntN(4) > 0 {
		head := w.pick(heads)
		return func(o block.UUID) bool { return o == head || w.of.get(o) == head }
	}
	some := append(w.names(true), heads...)
	some = slices.DeleteFunc(some, func(block.UUID) bool { return w.r.IntN(2) == 0 })
	return func(o block.UUID) bool { return slices.Contains(some, o) }
}

// owners says of which head a snapshot was taken. It is asked while others are taken.
type owners struct {
	mu sync.Mutex
	of map[block.UUID]block.UUID
}

func (o *owners) get(snapshot block.UUID) block.UUID {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.of[snapshot]
}

func (o *owners) set(snapshot, head block.UUID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.of == nil {
		o.of = map[block.UUID]block.UUID{}
	}
	o.of[snapshot] = head
}

// flatten makes a volume independent, while the next operations go on.
func (w *world) flatten() {
	own := w.theirs()
	w.bg.Go(func() {
		err := w.t.Flatten(context.Background(), func() func(block.UUID) bool { return own }, unpaced)
		switch {
		case err == nil:
			w.n.flattened.Add(1)
		case !errors.Is(err, block.ErrFull) && !errors.Is(err, ErrPinned):
			w.bgErr.CompareAndSwap(nil, &err)
		}
	})
	if w.r.IntN(2) == 0 {
		w.bg.Wait()
	}
}

func unpaced(context.Context, int64, int64) error { return nil }

func has(objects ...uint64) func(block.UUID) bool {
	return func(o block.UUID) bool {
		return slices.ContainsFunc(objects, func(n uint64) bool { return o == id(n) })
	}
}

func these(objects ...uint64) func() func(block.UUID) bool {
	return func() func(block.UUID) bool { return has(objects...) }
}

// family is a leg, a snapshot 2 of it, a clone 3 of that, which has written something of its own, and a
// snapshot 4 of the clone.
func family(t *testing.T, d block.Device) (tree *Tree, clone *Leg) {
	t.Helper()
	tree, err := Format(testPlace(d), id(1), 64<<20, nil)
	must(t, err)
	leg, err := tree.Leg(id(1))
	must(t, err)
	must(t, block.WriteAt(leg, tagged(1, 4<<20/sector), 0))
	must(t, block.WriteAt(leg, tagged(1, 1<<20/sector), 4<<20))
	must(t, block.WriteAt(leg, make([]byte, 1<<20), 4<<20)) // zeroes as data
	must(t, block.WriteAt(leg, tagged(1, 8), 5<<20))
	must(t, tree.Freeze(id(1), id(2), nil))
	must(t, tree.Clone(id(2), id(3), 128<<20, nil))
	clone, err = tree.Leg(id(3))
	must(t, err)
	must(t, block.WriteAt(clone, tagged(3, 16<<10/sector), 1<<20))
	must(t, block.Do(clone, &block.IO{Op: block.OpDiscard, Off: 2 << 20, Len: 1 << 20})) // a record without a chunk
	must(t, block.Do(clone, &block.IO{Op: block.OpDiscard, Off: 0, Len: 16 << 10}))
	must(t, tree.Freeze(id(3), id(4), nil))
	must(t, block.WriteAt(clone, tagged(4, 8), 3<<20))
	leg.Close()
	return tree, clone
}

func whole(t *testing.T, l *Leg) []byte {
	t.Helper()
	b := make([]byte, 8<<20)
	must(t, block.ReadAt(l, b, 0))
	return b
}

// A flattened clone reads as before, and needs nothing of what it began as: all of that comes free when it
// is deleted. Its snapshots are flattened with it, and share with it what they shared.
func TestAFlattenedCloneNeedsNothingOfItsOrigin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drive{size: testSize, at: true, img: newImage(nil)}
		tree, clone := family(t, d)
		before := usage(tree, 4)
		want := whole(t, clone)
		copied, left := int64(0), []int64{}
		must(t, tree.Flatten(t.Context(), these(3, 4), func(_ context.Context, n, l int64) error {
			copied += n
			left = append(left, l)
			return nil
		}))
		if got := whole(t, clone); !slices.Equal(got, want) {
			t.Error("it reads something else")
		}
		// Of chunk 0 all but one grain, of 1 all but one, nothing of 2, all of 3 and 4, one grain of 5.
		if wantCopied := int64(4<<20 - 2*GrainSize + GrainSize); copied != wantCopied || left[0] != copied || !slices.IsSortedFunc(left, func(a, b int64) int { return int(b - a) }) {
			t.Errorf("%d bytes are looked at, want %d; left %v", copied, wantCopied, left)
		}
		agree(t, tree)
		if l, _ := tree.Layer(id(4)); l.Parent != 0 {
			t.Errorf("the clone's first snapshot is over layer %d", l.Parent)
		}
		if l, _ := tree.Layer(id(3)); l.Parent == 0 {
			t.Error("the clone has nothing in common with its snapshot any more")
		}
		// It had a chunk for 1, got some for 0, 3 and 5, and none for 4, which is zeroes.
		if u := usage(tree, 4); before.Used != ChunkSize || u.Used != 4*ChunkSize {
			t.Errorf("the clone's snapshot has %+v, before %+v", u, before)
		}
		free := tree.Space().Free
		origin := usage(tree, 2)
		must(t, tree.Delete(id(1)))
		must(t, tree.Reclaim(t.Context()))
		if u := usage(tree, 2); u.Freed != u.Used {
			t.Errorf("%v of %v come free with the origin", u.Freed, u.Used)
		}
		must(t, tree.Delete(id(2)))
		must(t, tree.Reclaim(t.Context()))
		if got := tree.Space().Free - free; got != origin.Used {
			t.Errorf("%v came free, want %v", got, origin.Used)
		}
		if got := whole(t, clone); !slices.Equal(got, want) {
			t.Error("without its origin it reads something else")
		}
		agree(t, tree)
		if got := Inheriting(tree.Layers(), has(3, 4)); got != 0 {
			t.Errorf("layer %d is still to be flattened", got)
		}
	})
}

// Flattening stops at the end of its time, and the next one copies only what is left. What was begun
// changes nothing that can be read, also in a tree that is opened again.
func TestFlatteningIsCutOffAndGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drive{size: testSize, at: true, img: newImage(nil)}
		tree, clone := family(t, d)
		want := whole(t, clone)
		ended := errors.New("ended")
		first := int64(0)
		err := tree.Flatten(t.Context(), these(3, 4), func(_ context.Context, n, left int64) error {
			if first += n; first > 2<<20 {
				first -= n
				return ended
			}
			return nil
		})
		if !errors.Is(err, ended) {
			t.Fatalf("Flatten = %v", err)
		}
		agree(t, tree)
		clone.Close()
		tree.Close()
		if err := tree.Flatten(t.Context(), these(3, 4), unpaced); !errors.Is(err, block.ErrGone) {
			t.Errorf("Flatten of a closed tree = %v", err)
		}
		tree, err = Open(testPlace(d))
		must(t, err)
		rest := int64(0)
		must(t, tree.Flatten(t.Context(), these(3, 4), func(_ context.Context, n, _ int64) error { rest += n; return nil }))
		if first == 0 || first+rest != 4<<20-GrainSize {
			t.Errorf("%d bytes, and then %d", first, rest)
		}
		clone, err = tree.Leg(id(3))
		must(t, err)
		if got := whole(t, clone); !slices.Equal(got, want) {
			t.Error("it reads something else")
		}
		agree(t, tree)
	})
}

// Without space nothing is half done, and with more of it the next one goes on.
func TestFlatteningWaitsForSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drive{size: testSize, at: true, img: newImage(nil)}
		p := testPlace(d)
		p.Extents = []uint32{0}
		tree, err := Format(p, id(1), 1<<30, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		for c := range int64(251) { // of 253
			must(t, block.WriteAt(leg, tagged(uint64(c)+1, 1), c<<20))
		}
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, tree.Clone(id(2), id(3), 1<<30, nil))
		if err := tree.Flatten(t.Context(), these(3), unpaced); !errors.Is(err, block.ErrFull) {
			t.Fatalf("Flatten = %v, want ErrFull", err)
		}
		agree(t, tree)
		must(t, tree.AddExtents([]uint32{0, 1}))
		must(t, tree.Flatten(t.Context(), these(3), unpaced))
		if u := usage(tree, 3); u.Used != 251*ChunkSize {
			t.Errorf("the clone has %+v", u)
		}
		agree(t, tree)
	})
}

// What cannot be read stays where it is, and the clone over it; all else is copied. When it can be read, or
// was written anew, it is over.
func TestWhatCannotBeReadIsNotFlattened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drive{size: testSize, at: true, img: newImage(nil)}
		tree, clone := family(t, d)
		want, reads := whole(t, clone), 0
		d.broken = func(io *block.IO) error {
			if io.Op != block.OpRead || io.Len < GrainSize {
				return nil
			}
			if reads++; reads == 1 {
				return errors.New("a bad sector")
			}
			return nil
		}
		if err := tree.Flatten(t.Context(), these(3, 4), unpaced); err == nil || !strings.Contains(err.Error(), "a bad sector") || tree.Err() != nil {
			t.Fatalf("Flatten = %v, the tree: %v", err, tree.Err())
		}
		id := Inheriting(tree.Kin(), has(3, 4))
		if _, left := tree.inheritedBy(id); id == 0 || left != 2*ChunkSize-GrainSize {
			t.Errorf("layer %d reads %d bytes from others: all of chunk 0 but what was discarded, and the zeroes of chunk 4, are %d", id, left, 2*ChunkSize-GrainSize)
		}
		must(t, tree.Flatten(t.Context(), these(3, 4), unpaced))
		if id := Inheriting(tree.Kin(), has(3, 4)); id != 0 {
			t.Errorf("layer %d is over another's", id)
		}
		if got := whole(t, clone); !bytes.Equal(got, want) {
			t.Error("the clone reads otherwise")
		}
		agree(t, tree)
	})
}

// On a volatile drive, what was discarded is free after a flush. Who asks for so much room has it flushed, and
// only then.
func TestRoomIsThereAfterAFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drive{size: testSize, volatile: true, base: newImage(nil)}
		d.img = newImage(d.base)
		tree, err := Format(testPlace(d), id(1), 1<<30, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		must(t, block.WriteAt(leg, tagged(1, 4<<20/sector), 0))
		must(t, block.Flush(leg))
		must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 0, Len: 4 << 20}))
		s := tree.Space()
		if s.Pending == 0 {
			t.Fatal("nothing waits for a flush")
		}
		for _, least := range []block.Size{s.Free, s.Free + s.Pending + 1} {
			if free, err := tree.Room(least); err != nil || free != s.Free || tree.Space().Pending != s.Pending {
				t.Errorf("Room(%v) = %v, %v; %v is free, and %v after a flush", least, free, err, s.Free, s.Pending)
			}
		}
		if free, err := tree.Room(s.Free + s.Pending); err != nil || free != s.Free+s.Pending {
			t.Errorf("Room = %v, %v, after a flush %v", free, err, s.Free+s.Pending)
		}
	})
}

// A clone of a leg that was there before its tree does not take the base's zeroes, and is not over it in
// the end.
func TestACloneOverABaseIsFlattened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, tree, leg := over(t)
		must(t, block.Do(leg, &block.IO{Op: block.OpWriteZeroes, Off: 1 << 20, Len: 1 << 20}))
		want := readObject(leg)
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, tree.Clone(id(2), id(3), 300<<20, nil))
		must(t, tree.Flatten(t.Context(), these(3), unpaced))
		clone, err := tree.Leg(id(3))
		must(t, err)
		if got := readObject(clone); !slices.Equal(got, want) {
			t.Errorf("the clone reads %x, want %x", got, want)
		}
		if u := usage(tree, 3); u.Used != 2*ChunkSize {
			t.Errorf("the clone has %+v, want the chunks 0 and 2", u)
		}
		agree(t, tree)
		leg.Close()
		for _, gone := range []block.UUID{id(1), id(2)} {
			must(t, tree.Delete(gone))
			must(t, tree.Reclaim(t.Context()))
		}
		if got := tree.Base(); len(got) != 0 {
			t.Errorf("Base = %v, which no layer needs", got)
		}
		if got := readObject(clone); !slices.Equal(got, want) {
			t.Errorf("without the base the clone reads %x, want %x", got, want)
		}
		agree(t, tree)
	})
}

// A leg over the base and a flattened clone are both without a parent; what only one of them reads of the base is
// counted for that one.
func TestWhatAFlattenedCloneReadsIsNotTheBase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, tree, leg := over(t)
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, block.WriteAt(leg, tagged(1, 8), 0))
		must(t, tree.Clone(id(2), id(3), 300<<20, nil))
		must(t, tree.Flatten(t.Context(), these(3), unpaced))
		must(t, tree.Delete(id(2)))
		must(t, tree.Reclaim(t.Context()))
		agree(t, tree)
	})
}

// What is written, discarded and frozen while a clone is flattened, in the chunks that are done and in the
// others, is what it holds then, and in its snapshot.
func TestAClonesIOGoesOnWhileItIsFlattened(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			base := newImage(nil)
			tree, clone := family(t, &drive{size: testSize, at: true, img: base})
			clone.Close()
			tree.Close()
			d := &drive{size: testSize, base: base, img: newImage(base)}
			tree, err := Open(testPlace(d))
			must(t, err)
			clone, err = tree.Leg(id(3))
			must(t, err)
			want, r := whole(t, clone), rand.New(rand.NewPCG(seed, 9))
			done := make(chan error, 1)
			go func() {
				done <- tree.Flatten(t.Context(), these(3, 4, 5), func(context.Context, int64, int64) error {
					time.Sleep(5 * time.Microsecond)
					return nil
				})
			}()
			var frozen []byte
			for i := range 30 {
				at, n := int64(r.IntN(12<<20/sector/2))*sector, int64(1+r.IntN(100))*sector
				if r.IntN(3) == 0 {
					at, n = at/GrainSize*GrainSize, 4*GrainSize
					must(t, block.Do(clone, &block.IO{Op: block.OpDiscard, Off: at, Len: n}))
					clear(want[at:][:n])
				} else {
					p := tagged(uint64(100+i), int(n/sector))
					must(t, block.WriteAt(clone, p, at))
					copy(want[at:], p)
				}
				if i == 10 {
					must(t, tree.Freeze(id(3), id(5), nil))
					frozen = slices.Clone(want)
				}
			}
			must(t, <-done)
			must(t, tree.Delete(id(1)))
			must(t, tree.Delete(id(2)))
			must(t, tree.Reclaim(t.Context()))
			snapshot, err := tree.Leg(id(5))
			must(t, err)
			if got := whole(t, snapshot); !slices.Equal(got, frozen) {
				t.Errorf("seed %d: the snapshot reads something else", seed)
			}
			if got := whole(t, clone); !slices.Equal(got, want) {
				t.Errorf("seed %d: the clone reads something else", seed)
			}
			agree(t, tree)
		})
	}
}

// The layer to flatten is the lowest of the volume's own; what lies between its layers and is deleted is
// not, and a volume that needs no other has none.
func TestWhichLayerIsFlattened(t *testing.T) {
	layers := func(all ...Layer) []Layer {
		for i := range all {
			all[i].ID = uint32(i + 1)
		}
		return all
	}
	for name, c := range map[string]struct {
		layers []Layer
		want   uint32
	}{
		"no clone":              {layers(Layer{Object: id(3), State: StateOpen}), 0},
		"over its own snapshot": {layers(Layer{Object: id(4), State: StateFrozen}, Layer{Object: id(3), Parent: 1, State: StateOpen}), 0},
		"a clone":               {layers(Layer{Object: id(2), State: StateFrozen}, Layer{Object: id(3), Parent: 1, State: StateOpen}), 2},
		"a clone's snapshot":    {layers(Layer{Object: id(2), State: StateFrozen}, Layer{Object: id(4), Parent: 1, State: StateFrozen}, Layer{Object: id(3), Parent: 2, State: StateOpen}), 2},
		"under a deleted snapshot": {layers(Layer{Object: id(2), State: StateFrozen}, Layer{Object: id(4), Parent: 1, State: StateFrozen},
			Layer{Object: id(5), Parent: 2, State: StateDoomed}, Layer{Object: id(3), Parent: 3, State: StateOpen}), 2},
		"over its own deleted snapshot": {layers(Layer{Object: id(2), State: StateFrozen}, Layer{Object: id(4), Parent: 1, State: StateDoomed}, Layer{Object: id(3), Parent: 2, State: StateOpen}), 3},
		"a clone of the clone":          {layers(Layer{Object: id(4), State: StateFrozen}, Layer{Object: id(3), Parent: 1, State: StateOpen}, Layer{Object: id(9), Parent: 1, State: StateOpen}), 0},
	} {
		if got := Inheriting(c.layers, has(3, 4, 5)); got != c.want {
			t.Errorf("%s: layer %d, want %d", name, got, c.want)
		}
	}
}

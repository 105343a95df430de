// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"weft.dev/weft/proto/block"
)

// holds reports whether a chunk of a leg begins with what was written under a tag.
func holds(t *testing.T, l *Leg, chunk int64, tag uint64) bool {
	t.Helper()
	b := make([]byte, 4096)
	must(t, block.ReadAt(l, b, chunk<<20))
	want := tagged(tag, 8)
	if tag == 0 {
		want = make([]byte, 4096)
	}
	return bytes.Equal(b, want)
}

func TestAnEmptyExtentIsGivenBackAndAnotherTaken(t *testing.T) {
	tree, leg, place := memory(t, 1<<30)
	must(t, tree.AddExtents([]uint32{1, 0}))
	for c := range int64(300) {
		must(t, block.WriteAt(leg, tagged(uint64(c)+1, 8), c<<20))
	}
	give := func(keep block.Size, want ...uint32) {
		t.Helper()
		if got, err := tree.GiveBack(keep); err != nil || !slices.Equal(got, want) {
			t.Fatalf("GiveBack(%v) leaves %v, %v; want %v", keep, got, err, want)
		}
		agree(t, tree)
	}
	give(0, 1, 0) // both hold something
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 253 << 20, Len: 47 << 20}))
	give(block.MiB, 1, 0) // nothing else is free
	give(0, 1)
	var full *FullError
	if err := block.WriteAt(leg, tagged(9, 8), 400<<20); !errors.As(err, &full) {
		t.Fatalf("a write into an extent that was given back: %v, want a FullError", err)
	}
	must(t, tree.AddExtents([]uint32{1, 2})) // in its place in memory
	for c := int64(400); c < 655; c++ {
		must(t, block.WriteAt(leg, tagged(uint64(c)+1, 8), c<<20))
	}
	agree(t, tree)
	tree.Close()
	place.Extents = []uint32{1, 2}
	tree, err := Open(place)
	must(t, err)
	agree(t, tree)
	leg, err = tree.Leg(id(1))
	must(t, err)
	for c, tag := range map[int64]uint64{0: 1, 252: 253, 253: 0, 299: 0, 400: 401, 654: 655} {
		if !holds(t, leg, c, tag) {
			t.Errorf("chunk %d is not what was written to it last", c)
		}
	}
}

// A power cut at any write while an extent is given back: with the label that still lists it, the
// tree opens with all that it had, and takes the extent again.
func TestACutWhileAnExtentIsGivenBack(t *testing.T) {
	for _, volatile := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			d := &drive{size: testSize, volatile: volatile, img: newImage(nil)}
			place := testPlace(d)
			place.Extents = []uint32{0, 2}
			tree, err := Format(place, id(1), 1<<30, nil)
			must(t, err)
			leg, err := tree.Leg(id(1))
			must(t, err)
			must(t, block.WriteAt(leg, tagged(1, 8), 0))
			must(t, block.Flush(leg))
			start := d.now()
			if has, err := tree.GiveBack(0); err != nil || !slices.Equal(has, place.Extents[:1]) {
				t.Fatalf("it leaves %v, %v", has, err)
			}
			r := rand.New(rand.NewPCG(1, 2))
			for k := start; k <= d.now(); k++ {
				for range 4 {
					p := testPlace(&drive{size: testSize, volatile: volatile, at: true, img: d.crash(r, k)})
					p.Extents = place.Extents
					again, err := Open(p)
					must(t, err)
					if s := again.Space(); s.Total != (253+255)<<20 || s.Free != s.Total-1<<20 {
						t.Fatalf("cut before event %d: space is %+v", k, s)
					}
					l, err := again.Leg(id(1))
					must(t, err)
					if !holds(t, l, 0, 1) {
						t.Fatalf("cut before event %d: an acknowledged write is gone", k)
					}
				}
			}
			if _, err := Open(Place{Device: &drive{size: testSize, at: true, img: d.crash(r, d.now()+1)}, First: firstExtent, Tree: place.Tree, Drive: place.Drive, Extents: place.Extents[:1]}); err != nil {
				t.Errorf("with the label that does not list it any more: %v", err)
			}
		})
	}
}

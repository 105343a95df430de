// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/treecheck"
)

// sample is an image with a tree that has some of everything.
func sample(t testing.TB) (*image, Place) {
	t.Helper()
	d := &drive{size: testSize, at: true, img: newImage(nil)}
	p := testPlace(d)
	tree, err := Format(p, id(1), 64<<20, []byte("a note"))
	must(t, err)
	leg, err := tree.Leg(id(1))
	must(t, err)
	for c := range int64(2) {
		must(t, block.WriteAt(leg, tagged(1, 2048), c<<20))
	}
	must(t, tree.Freeze(id(1), id(2), []byte("snapshot")))
	must(t, block.WriteAt(leg, tagged(2, 64), 0))
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 1 << 20, Len: 1 << 20}))
	must(t, tree.Clone(id(2), id(3), 64<<20, nil))
	tree.Close()
	return d.img, p
}

// open opens a tree of an image over img, which stays as it is.
func openOver(img *image, p Place, change func(*image)) (*Tree, *image, error) {
	over := newImage(img)
	change(over)
	p.Device = &drive{size: testSize, at: true, img: over}
	tree, err := Open(p)
	return tree, over, err
}

func flip(img *image, r *rand.Rand, at, n int64) {
	b := make([]byte, 1)
	at += r.Int64N(n)
	img.read(b, at)
	b[0] ^= 1 << r.IntN(8)
	img.write(b, at)
}

// One bit that turned in metadata changes nothing; where it matters it is repaired.
func TestOneFlippedBitIsRepaired(t *testing.T) {
	img, p := sample(t)
	want := contents(t, img, p)
	home := p.offset(p.home())
	places := map[string][2]int64{ // where, how long; what is used of it
		"head": {home, 64}, "superblock A": {home + superAt[0], 512 + 3*56}, "superblock B": {home + superAt[1], 512 + 3*56},
		"table A": {p.offset(0) + tableAt[0] + recordSize, 6 * recordSize}, "table B": {p.offset(0) + tableAt[1] + recordSize, 6 * recordSize},
	}
	for name, place := range places {
		for seed := range uint64(60) {
			r := rand.New(rand.NewPCG(seed, 1))
			tree, over, err := openOver(img, p, func(m *image) { flip(m, r, place[0], place[1]) })
			if err != nil {
				t.Fatalf("%s, seed %d: %v", name, seed, err)
			}
			tree.Close()
			if err := checked(over, true); err != nil {
				t.Fatalf("%s, seed %d: after the repair: %v", name, seed, err)
			}
			if got := contents(t, over, p); got != want {
				t.Fatalf("%s, seed %d: reads %s, want %s", name, seed, got, want)
			}
		}
	}
}

// contents is what all objects read.
func contents(t *testing.T, img *image, p Place) string {
	t.Helper()
	tree, _, err := openOver(img, p, func(*image) {})
	must(t, err)
	var all strings.Builder
	for object := range uint64(3) {
		l, err := tree.Leg(id(object + 1))
		must(t, err)
		for c := range int64(4) {
			for _, off := range []int64{0, 40 << 10} {
				for _, v := range readObjectAt(t, l, c<<20+off, 1) {
					all.WriteByte(byte('0' + v))
				}
			}
		}
		all.WriteByte(' ')
	}
	return all.String()
}

// Both copies of the superblock turned: the tree is not opened, and both implementations say so. For records see
// TestALostRecordLosesOnlyWhatItMayHaveDecided.
func TestBothCopiesBadIsDamage(t *testing.T) {
	img, p := sample(t)
	_, over, err := openOver(img, p, func(m *image) {
		for _, at := range superAt {
			m.write([]byte{0x5a}, p.offset(p.home())+at+20)
		}
	})
	if !errors.Is(err, ErrDamaged) {
		t.Errorf("Open says %v, want ErrDamaged", err)
	}
	report, err := treecheck.Check(over, testSize, firstExtent)
	if err != nil || !report.Damaged() {
		t.Errorf("the checker finds no damage: %+v, %v", report, err)
	}
}

func TestAnUnfinishedTreeIsNotOpened(t *testing.T) {
	img, p := sample(t)
	// As after a second Format, cut off before its superblock was whole.
	_, _, err := openOver(img, p, func(m *image) {
		for _, at := range superAt {
			m.write(make([]byte, unit), p.offset(p.home())+at)
		}
		m.write([]byte(superMagic), p.offset(p.home())+superAt[0])
	})
	if !errors.Is(err, ErrUnfinished) {
		t.Errorf("Open = %v, want ErrUnfinished", err)
	}
}

func TestANewerFormatIsRefused(t *testing.T) {
	img, p := sample(t)
	_, over, err := openOver(img, p, func(m *image) {
		for _, at := range superAt {
			b := make([]byte, headSize)
			m.read(b, p.offset(p.home())+at)
			b[16] = 3
			le.PutUint32(b[20:], headSum(b))
			m.write(b, p.offset(p.home())+at)
		}
	})
	if !errors.Is(err, ErrNewer) {
		t.Errorf("Open = %v, want ErrNewer", err)
	}
	if len(over.pages) != 2 {
		t.Errorf("a tree of a newer format was written to: %d pages", len(over.pages))
	}
}

// A record or superblock that is moved does not count.
func TestMisplacedMetadataIsBad(t *testing.T) {
	e := entry{layer: 3, chunk: 7, have: 5, zero: 4, seq: 9}
	b := make([]byte, recordSize)
	tree := block.UUID{1}
	e.encode(b, tree, 2, 5)
	if got, ok := decodeEntry(b, tree, 2, 5); !ok || got != e {
		t.Errorf("decodeEntry = %+v, %v; want %+v", got, ok, e)
	}
	for name, ok := range map[string]bool{
		"another tree": second(decodeEntry(b, block.UUID{2}, 2, 5)), "another extent": second(decodeEntry(b, tree, 3, 5)), "another slot": second(decodeEntry(b, tree, 2, 6)),
	} {
		if ok {
			t.Errorf("a record of %s is good", name)
		}
	}
}

func second(_ entry, ok bool) bool { return ok }

// FuzzSuper: whatever is read, what is accepted is encoded as it was, and the checker accepts it.
func FuzzSuper(f *testing.F) {
	img, p := sample(f)
	b := make([]byte, unit)
	img.read(b, p.offset(p.home())+superAt[0])
	f.Add(b[headSize:])
	f.Add([]byte{})
	for _, path := range golden(f) {
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[headSize:])
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		b := append(make([]byte, headSize), payload...)
		if len(b) > maxSuper {
			return
		}
		// The header is made to fit, so that the payload is looked at.
		copy(b, superMagic)
		le.PutUint32(b[16:], version)
		le.PutUint64(b[24:], 7)
		copy(b[32:], p.Tree[:])
		copy(b[48:], p.Drive[:])
		le.PutUint32(b[64:], 2)
		le.PutUint32(b[68:], 5)
		for layers := range uint32(6) {
			le.PutUint32(b[72:], layers)
			le.PutUint32(b[76:], 2)
			le.PutUint32(b[80:], uint32(len(payload)))
			le.PutUint32(b[84:], crcOf(payload))
			le.PutUint32(b[20:], headSum(b))
			s, err := decodeSuper(b, p.Tree, p.Drive, 2)
			if err != nil {
				continue
			}
			again, err := s.encode(p.Tree, p.Drive, 2)
			if err != nil {
				t.Fatalf("what was decoded cannot be encoded: %v", err)
			}
			if back, err := decodeSuper(again, p.Tree, p.Drive, 2); err != nil || len(back.layers) != len(s.layers) {
				t.Fatalf("it cannot be decoded again: %v", err)
			}
		}
	})
}

// FuzzRecord: a record that is accepted is possible, and is encoded as it was.
func FuzzRecord(f *testing.F) {
	f.Add(uint32(1), uint32(2), uint64(7), uint64(3), uint64(9), uint16(17))
	f.Add(uint32(1), uint32(2), uint64(7), uint64(7), uint64(9), uint16(300))
	f.Add(uint32(0), uint32(0), uint64(0), uint64(0), uint64(9), uint16(0))
	f.Fuzz(func(t *testing.T, layer, chunk uint32, have, zero, seq uint64, slot uint16) {
		b := make([]byte, recordSize)
		e := entry{layer, chunk, have, zero, seq}
		e.encode(b, block.UUID{1}, 4, int(slot))
		got, ok := decodeEntry(b, block.UUID{1}, 4, int(slot))
		possible := e == (entry{}) || seq > 0 && zero&^have == 0 && (layer == 0 && have == 0 && chunk == 0 ||
			layer != 0 && have != 0 && slot != 0 && (slot < chunkCount || have == zero))
		if ok != possible || ok && got != e {
			t.Errorf("decodeEntry(%+v in slot %d) = %+v, %v; possible %v", e, slot, got, ok, possible)
		}
	})
}

func golden(t testing.TB) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join("testdata", "super-*"))
	must(t, err)
	return all
}

func crcOf(b []byte) uint32 {
	h := newCRC()
	h.Write(b)
	return h.Sum32()
}

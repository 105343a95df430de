// SPDX-License-Identifier: Apache-2.0

package written

import (
	"encoding/binary"
	"errors"
	"testing"
)

// description builds a description of types, as a kernel has it.
type description struct{ types, strings []byte }

func (d *description) name(s string) uint32 {
	if s == "" {
		return 0
	}
	at := len(d.strings)
	d.strings = append(append(d.strings, s...), 0)
	return uint32(at)
}

// add adds a type; parts are the words that follow it.
func (d *description) add(kind uint32, name string, n uint32, bitFields bool, parts ...uint32) {
	info := kind<<24 | n
	if bitFields {
		info |= 1 << 31
	}
	for _, v := range append([]uint32{d.name(name), info, 0}, parts...) {
		d.types = binary.NativeEndian.AppendUint32(d.types, v)
	}
}

func (d *description) bytes() []byte {
	b := binary.NativeEndian.AppendUint16(nil, btfMagic)
	b = append(b, 1, 0)
	for _, v := range []int{btfHeader, 0, len(d.types), len(d.types), len(d.strings)} {
		b = binary.NativeEndian.AppendUint32(b, uint32(v))
	}
	return append(append(b, d.types...), d.strings...)
}

// newDescription describes
//
//	struct iter { u64 sector; u32 size; };
//	struct bio  { u64 next; union { u64 a; struct { u32 pad; u32 dev : 20; }; }; struct iter iter; };
//	typedef void *probe;
func newDescription() *description {
	d := &description{strings: []byte{0}}
	d.add(1, "u64", 0, false, 64)                                                                       // 1
	d.add(kindStruct, "iter", 2, false, d.name("sector"), 1, 0, d.name("size"), 1, 64)                  // 2
	d.add(kindStruct, "", 2, true, d.name("pad"), 1, 0, d.name("dev"), 1, 20<<24|32)                    // 3
	d.add(kindUnion, "", 2, false, d.name("a"), 1, 0, d.name(""), 3, 0)                                 // 4
	d.add(13, "", 1, false, 0, 1)                                                                       // 5
	d.add(kindStruct, "bio", 3, false, d.name("next"), 1, 0, d.name(""), 4, 64, d.name("iter"), 2, 128) // 6
	d.add(kindTypedef, "probe", 0, false)                                                               // 7
	return d
}

func TestFieldsAreFoundInTheKernelsTypes(t *testing.T) {
	k, err := parseTypes(newDescription().bytes())
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		path []string
		want int
	}{{[]string{"next"}, 0}, {[]string{"a"}, 8}, {[]string{"dev"}, 12}, {[]string{"iter"}, 16}, {[]string{"iter", "size"}, 24}} {
		if got, err := k.offset("bio", test.path...); got != test.want || err != nil {
			t.Errorf("offset(bio, %v) = %d, %v; want %d", test.path, got, err, test.want)
		}
	}
	if id, err := k.find(kindTypedef, "probe"); id != 7 || err != nil {
		t.Errorf("find(typedef probe) = %d, %v; want 7", id, err)
	}
	if at, err := k.offset("bio", "gone"); err == nil {
		t.Errorf("a field that is not there is at %d", at)
	}
	if _, err := k.find(kindStruct, "probe"); err == nil {
		t.Error("a typedef was found as a struct")
	}
}

func TestDamagedTypesAreRefused(t *testing.T) {
	good := newDescription().bytes()
	for n := range len(good) {
		if n < btfHeader || n < len(good)-1 {
			if _, err := parseTypes(good[:n]); !errors.Is(err, errBTF) {
				t.Fatalf("the first %d of %d bytes were read: %v", n, len(good), err)
			}
		}
	}
	d := newDescription()
	d.add(31, "of tomorrow", 0, false)
	if _, err := parseTypes(d.bytes()); !errors.Is(err, errBTF) {
		t.Errorf("a type of a kind that is not known was read: %v", err)
	}
}

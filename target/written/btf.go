// SPDX-License-Identifier: Apache-2.0

package written

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// This file reads the kernel's description of its own types (Linux, Documentation/bpf/btf.rst), as
// far as the program needs it: where the fields of a struct are, and the number of a type.

const (
	btfMagic   = 0xeb9f
	btfHeader  = 24
	btfAnyType = 12 // the size of what all types begin with
	btfMember  = 12
)

// The kinds of types that are told apart here.
const (
	kindStruct  = 4
	kindUnion   = 5
	kindTypedef = 8
)

// extra is what follows a type of each kind: so many bytes once, and so many for each of its parts.
var extra = map[uint32][2]int{
	1: {4, 0}, 2: {0, 0}, 3: {12, 0}, kindStruct: {0, btfMember}, kindUnion: {0, btfMember}, 6: {0, 8}, 7: {0, 0}, kindTypedef: {0, 0}, 9: {0, 0},
	10: {0, 0}, 11: {0, 0}, 12: {0, 0}, 13: {0, 8}, 14: {4, 0}, 15: {0, 12}, 16: {0, 0}, 17: {4, 0}, 18: {0, 0}, 19: {0, 12},
}

var errBTF = errors.New("not a description of kernel types")

// kernelTypes is /sys/kernel/btf/vmlinux.
type kernelTypes struct {
	types   [][]byte // by number; each ends where the next begins
	strings []byte
}

// parseTypes reads the types' boundaries.
func parseTypes(b []byte) (*kernelTypes, error) {
	if len(b) < btfHeader || binary.NativeEndian.Uint16(b) != btfMagic {
		return nil, errBTF
	}
	word := func(at int) uint64 { return uint64(binary.NativeEndian.Uint32(b[at:])) }
	rest := uint64(len(b))
	head, typeOff, typeLen, stringOff, stringLen := word(4), word(8), word(12), word(16), word(20)
	if head+typeOff+typeLen > rest || head+stringOff+stringLen > rest {
		return nil, errBTF
	}
	k := &kernelTypes{types: [][]byte{nil}, strings: b[head+stringOff:][:stringLen]} // number 0 is void
	for t := b[head+typeOff:][:typeLen]; len(t) > 0; {
		if len(t) < btfAnyType {
			return nil, errBTF
		}
		info := binary.NativeEndian.Uint32(t[4:])
		more, known := extra[info>>24&0x1f]
		size := btfAnyType + more[0] + more[1]*int(info&0xffff)
		if !known || size > len(t) {
			return nil, fmt.Errorf("%w: type %d of kind %d", errBTF, len(k.types), info>>24&0x1f)
		}
		k.types, t = append(k.types, t[:size]), t[size:]
	}
	return k, nil
}

func (k *kernelTypes) name(off uint32) string {
	if uint64(off) >= uint64(len(k.strings)) {
		return ""
	}
	name, _, _ := bytes.Cut(k.strings[off:], []byte{0})
	return string(name)
}

// find returns the number of the first type with a kind and a name.
func (k *kernelTypes) find(kind uint32, name string) (uint32, error) {
	for id, t := range k.types[1:] {
		if binary.NativeEndian.Uint32(t[4:])>>24&0x1f == kind && k.name(binary.NativeEndian.Uint32(t)) == name {
			return uint32(id + 1), nil
		}
	}
	return 0, fmt.Errorf("the kernel does not describe %s", name)
}

// offset returns where a field of a struct is, in bytes. Path leads through structs that contain
// one another, from the outermost field.
func (k *kernelTypes) offset(structure string, path ...string) (int, error) {
	id, err := k.find(kindStruct, structure)
	if err != nil {
		return 0, err
	}
	at := 0
	for _, field := range path {
		off, of, found := k.member(id, field)
		if !found {
			return 0, fmt.Errorf("the kernel's struct %s has no field %v", structure, path)
		}
		at, id = at+off, of
	}
	return at, nil
}

// member finds a field of a struct or union, also in those within it that have no name.
func (k *kernelTypes) member(id uint32, field string) (at int, of uint32, found bool) {
	if uint64(id) >= uint64(len(k.types)) || id == 0 {
		return 0, 0, false
	}
	t := k.types[id]
	info := binary.NativeEndian.Uint32(t[4:])
	if kind := info >> 24 & 0x1f; kind != kindStruct && kind != kindUnion {
		return 0, 0, false
	}
	for m := t[btfAnyType:]; len(m) >= btfMember; m = m[btfMember:] {
		name, of, bits := k.name(binary.NativeEndian.Uint32(m)), binary.NativeEndian.Uint32(m[4:]), binary.NativeEndian.Uint32(m[8:])
		if info>>31 == 1 { // the upper byte is the width of a bit field
			bits &= 0xffffff
		}
		switch {
		case name == field:
			return int(bits / 8), of, true
		case name == "":
			if in, of, found := k.member(of, field); found {
				return int(bits/8) + in, of, true
			}
		}
	}
	return 0, 0, false
}

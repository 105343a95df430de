// SPDX-License-Identifier: Apache-2.0

package treecheck

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// The tests of target/mapped have the checker look at every image that they make. Here it looks at
// what no program has written.

func TestADriveWithoutTrees(t *testing.T) {
	r, err := Check(bytes.NewReader(make([]byte, 8<<20)), 8<<20+2*perExtent, 8<<20)
	if err != nil || len(r.Trees) != 0 || r.Damaged() {
		t.Errorf("Check(empty) = %+v, %v", r, err)
	}
	if r, err := Check(bytes.NewReader(nil), 0, 8<<20); err != nil || len(r.Trees) != 0 {
		t.Errorf("Check(nothing) = %+v, %v", r, err)
	}
}

// sealed makes the checksums of a header and its payload right.
func sealed(b []byte, magic string) []byte {
	copy(b, magic)
	if len(b) >= 512 {
		if n := int(num32(b, 80)); n <= len(b)-512 {
			binary.LittleEndian.PutUint32(b[84:], crc(b[512:512+n]))
		}
		binary.LittleEndian.PutUint32(b[20:], crc(b[:20], make([]byte, 4), b[24:512]))
	}
	return b
}

// FuzzCheck: whatever is on a drive, with checksums that are right, the checker ends.
func FuzzCheck(f *testing.F) {
	f.Add([]byte{}, make([]byte, 600), make([]byte, 128))
	super := make([]byte, 512+8+48)
	super[16], super[24], super[68], super[72], super[76], super[80] = 1, 1, 2, 1, 1, 56
	super[512+4], super[520], super[520+8], super[520+34] = 1, 1, 1, 1
	table := make([]byte, 192)
	table[128+4], table[128+16], table[128+32] = 1, 1, 1
	f.Add(make([]byte, 512), super, table)
	f.Fuzz(func(t *testing.T, head, super, table []byte) {
		if len(head) > 4096 || len(super) > 1<<16 || len(table) > records*64 {
			return
		}
		img := make([]byte, 4*mib)
		copy(img, sealed(bytes.Clone(head), "weft tree extent"))
		copy(img[mib:], sealed(bytes.Clone(super), "weft layer tree\x00"))
		for i := 0; i+64 <= len(table); i += 64 {
			b := bytes.Clone(table[i : i+64])
			place := binary.LittleEndian.AppendUint32(make([]byte, 20), uint32(i/64))
			binary.LittleEndian.PutUint32(b, crc(b[4:], place))
			copy(img[64<<10+i:], b)
			copy(img[512<<10+i:], b)
		}
		r, err := Check(bytes.NewReader(img), perExtent, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, tree := range r.Trees {
			if tree.UsedBytes > tree.TotalBytes && !tree.Damaged() {
				t.Errorf("%d bytes of %d are in use, and nothing is wrong", tree.UsedBytes, tree.TotalBytes)
			}
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package integrity

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"testing"
	"time"
)

func sleep(times int) { time.Sleep(time.Duration(times) * quiet) }

func reseal(b []byte) { binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:pageSize], castagnoli)) }

// The format is fixed: drives have it.
func TestThePagesThatDrivesHave(t *testing.T) {
	c := content{mark: 5}
	c.sums[0], c.sums[959] = sum(bytes.Repeat([]byte{1}, BlockSize)), 0x01020304
	b := make([]byte, pageSize)
	c.encode(b, testLeg, 69)
	le := binary.LittleEndian
	for at, want := range map[int]uint32{4: 1, 8: 5, 12: 0, 16: 0x01aa, 32: 69, 36: 0, 252: 0, 256: 0x42186b7f ^ 0x98f94189, 260: 0, 4092: 0x01020304} {
		if got := le.Uint32(b[at:]); got != want {
			t.Errorf("at %d: %08x, want %08x", at, got, want)
		}
	}
	if sum(make([]byte, BlockSize)) != 0 || ofZeroes != 0x98f94189 {
		t.Error("zeroes do not have the checksum 0")
	}
	var got content
	if err := got.decode(b, testLeg, 69); err != nil || got != c {
		t.Errorf("decode: %v", err)
	}
	if 68*pageData != ExtentData || extentOf != 68 || pagesAt+68*pageSize > dataAt || dataAt != 1<<20 {
		t.Error("the geometry of an extent")
	}
}

func TestPartsOfAPage(t *testing.T) {
	for _, c := range []struct {
		from, to int
		want     uint32
	}{{0, 1, 1}, {31, 33, 3}, {32, 64, 2}, {928, 960, 1 << 29}, {0, 960, allParts}} {
		if got := parts(c.from, c.to); got != c.want {
			t.Errorf("blocks %d to %d: %b, want %b", c.from, c.to, got, c.want)
		}
	}
}

// FuzzPage: no page makes the decoder fail in another way than it says, and what it accepts it
// writes again as it was.
func FuzzPage(f *testing.F) {
	b := make([]byte, pageSize)
	f.Add(bytes.Clone(b), true)
	c := content{mark: 3}
	c.sums[7] = 9
	c.encode(b, testLeg, 3)
	f.Add(bytes.Clone(b), false)
	b[100]++
	f.Add(b, true)
	f.Fuzz(func(t *testing.T, b []byte, seal bool) {
		page := make([]byte, pageSize)
		copy(page, b)
		if seal {
			reseal(page)
		}
		var c, again content
		if c.decode(page, testLeg, 3) != nil {
			return
		}
		out := make([]byte, pageSize)
		c.encode(out, testLeg, 3)
		if err := again.decode(out, testLeg, 3); err != nil || again != c {
			t.Fatalf("it is not what was accepted: %v", err)
		}
	})
}

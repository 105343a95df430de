// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/quick"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
)

func TestLogBytesAndParseAreInverses(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		l := CleanLog(rng.Uint64N(3000))
		want := uint64(0)
		for range rng.IntN(50) {
			r := rng.Uint64N(3100)
			if !l.Dirty(r) {
				want++
			}
			l.Mark(r)
		}
		got, err := ParseLog(l.Bytes())
		if err != nil || !got.Equal(l) || got.CountDirty() != want {
			t.Errorf("ParseLog of %d regions, %d dirty = %d dirty, %v; want %d", l.Regions(), l.CountDirty(), got.CountDirty(), err, want)
		}
	}
}

// The bytes that made dm-mirror copy just three regions on 6.1 and 7.2.
func TestLogBytesAreTheKernels(t *testing.T) {
	l := CleanLog(128)
	for _, r := range []uint64{1, 39, 70} {
		l.Mark(r)
	}
	want := make([]byte, 4096)
	header, _ := hex.DecodeString("7252694d" + "02000000" + "8000000000000000")
	copy(want, header)
	bits, _ := hex.DecodeString("fdffffff7fffffff" + "bfffffffffffffff")
	copy(want[1024:], bits)
	if got := l.Bytes(); !bytes.Equal(got, want) {
		t.Errorf("Bytes = %x … %x, want %x … %x", got[:16], got[1024:1040], want[:16], want[1024:1040])
	}
}

func TestALogGrowsAndForgetsNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		n := rng.Uint64N(500)
		l := CleanLog(n)
		for range rng.IntN(20) {
			l.Mark(rng.Uint64N(n + 1))
		}
		to := rng.Uint64N(1000)
		grown := l.Grow(to)
		if want := max(n, to); grown.Regions() != want || grown.CountDirty() != l.CountDirty() {
			t.Fatalf("%d regions, %d dirty, grow to %d: %d, %d dirty", n, l.CountDirty(), to, grown.Regions(), grown.CountDirty())
		}
		for r := range n {
			if grown.Dirty(r) != l.Dirty(r) {
				t.Fatalf("region %d is dirty %v, and was %v", r, grown.Dirty(r), l.Dirty(r))
			}
		}
	}
}

// The kernel writes the whole log at once.
func TestTheLogOfALegOfAnySizeIsSmall(t *testing.T) {
	if err := quick.Check(func(n uint64) bool {
		leg := block.Size(n % uint64(block.PiB))
		return len(CleanLog(raid.Regions(leg, raid.RegionSize(leg))).Bytes()) <= 20<<10
	}, nil); err != nil {
		t.Error(err)
	}
}

func TestLogsCountAndMerge(t *testing.T) {
	for _, n := range []uint64{0, 1, 63, 64, 65, 1000} {
		clean, dirty := CleanLog(n), DirtyLog(n)
		if !clean.AllClean() || !dirty.AllDirty() || dirty.CountDirty() != n || clean.CountDirty() != 0 {
			t.Errorf("%d regions: clean has %d dirty, dirty has %d", n, clean.CountDirty(), dirty.CountDirty())
		}
		if m, err := clean.Merge(dirty); err != nil || !m.Equal(dirty) {
			t.Errorf("%d regions: clean and dirty merge to %d dirty, %v", n, m.CountDirty(), err)
		}
	}
	a, b := CleanLog(100), CleanLog(100)
	a.Mark(3)
	b.Mark(70)
	m, err := a.Merge(b)
	if err != nil || m.CountDirty() != 2 || !m.Dirty(3) || !m.Dirty(70) || a.CountDirty() != 1 {
		t.Errorf("merge of two dirty regions has %d, %v; want 2, and the logs as they were", m.CountDirty(), err)
	}
	a.Mark(99)
	b.Mark(99)
	both, err := a.Both(b)
	if err != nil || both.CountDirty() != 1 || !both.Dirty(99) || a.CountDirty() != 2 {
		t.Errorf("%d regions are dirty in both, %v; want the one that is, and the logs as they were", both.CountDirty(), err)
	}
	if got := b.DirtyWords(); !slices.Equal(got, []uint64{0, 1<<(70-64) | 1<<(99-64)}) {
		t.Errorf("dirty are %x", got)
	}
	if got := DirtyLog(65).DirtyWords(); !slices.Equal(got, []uint64{^uint64(0), 1}) {
		t.Errorf("of 65 dirty regions %x are dirty", got)
	}
	if _, err := a.Both(CleanLog(101)); err == nil {
		t.Error("logs of 100 and 101 regions were compared")
	}
	if _, err := a.Merge(CleanLog(101)); err == nil {
		t.Error("logs of 100 and 101 regions were merged")
	}
	if !CleanLog(8).Dirty(8) {
		t.Error("a region that the log does not have is clean")
	}
}

func TestBytesThatAreNoLogAreRefused(t *testing.T) {
	good := CleanLog(128).Bytes()
	spoilt := func(at int, b byte) []byte {
		c := bytes.Clone(good)
		c[at] = b
		return c
	}
	for name, b := range map[string][]byte{
		"nothing": nil, "zeroes": make([]byte, 4096), "short": good[:1000], "magic": spoilt(0, 0), "version": spoilt(4, 3),
		"more regions than bits": spoilt(10, 1), "far more regions": spoilt(15, 0xff),
	} {
		if got, err := ParseLog(b); !errors.Is(err, ErrLog) {
			t.Errorf("%s: ParseLog = %d regions, %v; want ErrLog", name, got.Regions(), err)
		}
	}
}

func FuzzParseLog(f *testing.F) {
	f.Add(CleanLog(100).Bytes())
	f.Add(DirtyLog(1).Bytes()[:1032])
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := ParseLog(b)
		if err != nil {
			return
		}
		if again, err := ParseLog(l.Bytes()); err != nil || !again.Equal(l) {
			t.Errorf("a log of %d regions does not come back: %v", l.Regions(), err)
		}
	})
}

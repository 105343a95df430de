// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math/rand/v2"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// kernelPlace returns the place to which the table of a volume's device maps a byte.
func kernelPlace(table dm.Table, at block.Size) (column dm.Ref, offset block.Size) {
	for _, r := range table {
		if at >= r.Start+r.Length {
			continue
		}
		within := at - r.Start
		switch target := r.Target.(type) {
		case dm.Linear:
			return target.Device, target.Offset + within
		case dm.Striped:
			chunk, n := within/target.Chunk, block.Size(len(target.Legs))
			return target.Legs[chunk%n].Device, chunk/n*target.Chunk + within%target.Chunk
		}
	}
	return "", 0
}

func randomPlan(r *rand.Rand) (plan, block.Size) {
	l := block.Layout{Stripes: 1 + r.IntN(9), Copies: 1, Chunk: 4 * block.KiB << r.IntN(9)}
	size := block.Size(1+r.IntN(1<<uint(1+r.IntN(16)))) * 512
	region := block.Size(4*block.KiB) << r.IntN(12)
	return newPlan(l, region), size
}

// Each extent of a random range must lie, from its first byte to its last, where
// the kernel's table has it.
func TestAddressesAreThoseOfTheKernel(t *testing.T) {
	id := block.VolumeID{UUID: block.UUID{1}}
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 1))
		p, size := randomPlan(r)
		table := mirror.Top(id, p.layout, size).Table
		for range 20 {
			off := r.Int64N(int64(size))
			end := off + 1 + r.Int64N(int64(size)-off)
			for steps := 0; off < end && steps < 50; steps++ {
				x := p.first(off, end-off)
				if x.length <= 0 || x.off>>p.unit != (x.off+x.length-1)>>p.unit {
					t.Fatalf("seed %d: extent %v of %v crosses a lock unit", seed, x, p.layout)
				}
				for _, at := range []int64{0, r.Int64N(x.length), x.length - 1} {
					column, offset := kernelPlace(table, block.Size(off+at))
					if string(column) != mirror.ColumnName(id, x.column) || int64(offset) != x.off+at {
						t.Fatalf("seed %d: %v of %v: byte %d is at %d of column %d, the kernel has it at %d of %s", seed, size, p.layout, off+at, x.off+at, x.column, offset, column)
					}
				}
				off += x.length
			}
		}
	}
}

// A column's share of a range is compared with a count of its bytes.
func TestSharesOfARangeAreThoseOfItsBytes(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 2))
		p, size := randomPlan(r)
		off := r.Int64N(int64(size)/512) * 512
		end := off + 512*(1+r.Int64N((int64(size)-off)/512))
		for column := range int(p.stripes) {
			from, to := int64(-1), int64(0)
			for at := off; at < end; at += 512 {
				if x := raid.Locate(p.layout, block.Size(at)); x.Column == column {
					if from < 0 {
						from = int64(x.Offset)
					}
					to = int64(x.Offset) + 512
				}
			}
			got, want := [2]int64{p.share(column, off), p.share(column, end)}, [2]int64{from, to}
			if from < 0 && got[0] == got[1] {
				continue
			}
			if got != want {
				t.Fatalf("seed %d: %d to %d of %v: column %d has %v, want %v", seed, off, end, p.layout, column, got, want)
			}
		}
	}
}

func TestABitmapIsASet(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 3))
		n := 1 + r.Uint64N(20000)
		b, other, want := newBitmap(n), newBitmap(n), map[uint64]bool{}
		for range 50 {
			i := r.Uint64N(n)
			switch r.IntN(4) {
			case 0, 1:
				last := min(n-1, i+r.Uint64N(300))
				b.set(i, last)
				for ; i <= last; i++ {
					want[i] = true
				}
			case 2:
				b.unset(i)
				delete(want, i)
			case 3:
				b.moveTo(other)
				if b.len() != 0 {
					t.Fatalf("seed %d: %d left after a move", seed, b.len())
				}
				b, other = other, b
				other.clear()
			}
			if r.IntN(20) == 0 {
				n += r.Uint64N(5000)
				b.grow(n)
				other.grow(n)
			}
		}
		got := uint64(0)
		for i, ok := b.next(0); ok; i, ok = b.next(i + 1) {
			if got++; !want[i] {
				t.Fatalf("seed %d: %d is in the set", seed, i)
			}
		}
		if got != uint64(len(want)) || b.len() != got {
			t.Fatalf("seed %d: set of %d, counted %d, want %d", seed, got, b.len(), len(want))
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package cow

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// Over random changes, a Map holds what a map of Go's holds, and every copy that was taken
// on the way still holds what it held.
func TestMapsAndTheirCopiesHoldWhatWasSet(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, keys := range []int{1, 20, 300, 20_000} {
		var m Map[int, int]
		w, want := new(Writer), map[int]int{}
		type copied struct {
			m    Map[int, int]
			want map[int]int
		}
		var copies []copied
		for i := range 40_000 {
			key := rng.IntN(keys)
			if rng.IntN(3) == 0 {
				m.Delete(w, key)
				delete(want, key)
			} else {
				m.Set(w, key, i)
				want[key] = i
			}
			if rng.IntN(5000) == 0 {
				copies = append(copies, copied{m, maps.Clone(want)})
				w = new(Writer)
			}
		}
		for i, c := range append(copies, copied{m, want}) {
			if got := maps.Collect(c.m.All()); !maps.Equal(got, c.want) || c.m.Len() != len(c.want) {
				t.Fatalf("%d keys: copy %d of %d has %d entries, Len %d, want %d, or others", keys, i, len(copies), len(got), c.m.Len(), len(c.want))
			}
			for key := range keys {
				got, ok := c.m.Find(key)
				if v, has := c.want[key]; ok != has || got != v {
					t.Fatalf("%d keys: copy %d: Find(%d) = %d, %v; want %d, %v", keys, i, key, got, ok, v, has)
				}
			}
		}
	}
}

func TestSortedMapsHoldWhatWasSetInOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var s Sorted[int]
	want := map[string]int{}
	type copied struct {
		s    Sorted[int]
		want map[string]int
	}
	var copies []copied
	for i := range 20_000 {
		key := fmt.Sprintf("v%03d", rng.IntN(1000))
		if rng.IntN(3) == 0 {
			s = s.Delete(key)
			delete(want, key)
		} else {
			s = s.Set(key, i)
			want[key] = i
		}
		if rng.IntN(2000) == 0 {
			copies = append(copies, copied{s, maps.Clone(want)})
		}
	}
	for i, c := range append(copies, copied{s, want}) {
		for _, after := range []string{"", "v", "v500", "v5", "v998", "v999", "w"} {
			var keys, wanted []string
			for key, v := range c.s.After(after) {
				if keys = append(keys, key); v != c.want[key] {
					t.Fatalf("copy %d has %d for %s, want %d", i, v, key, c.want[key])
				}
			}
			for key := range c.want {
				if key > after {
					wanted = append(wanted, key)
				}
			}
			_, here := c.want[after]
			if from := slices.Collect(maps.Keys(maps.Collect(c.s.From(after)))); len(from) != len(wanted) && (!here || len(from) != len(wanted)+1) {
				t.Fatalf("copy %d: From(%q) has %d entries, After %d", i, after, len(from), len(wanted))
			}
			if slices.Sort(wanted); !slices.Equal(keys, wanted) {
				t.Fatalf("copy %d: After(%q) = %v, want %v", i, after, keys, wanted)
			}
		}
		if n := len(maps.Collect(c.s.All())); n != len(c.want) || c.s.Len() != n {
			t.Fatalf("copy %d has %d entries, Len %d, want %d", i, n, c.s.Len(), len(c.want))
		}
	}
}

func TestASortedMapOfAscendingKeysIsBalanced(t *testing.T) {
	var s Sorted[int]
	for i := range 100_000 {
		s = s.Set(fmt.Sprintf("%06d", i), i)
	}
	var depth func(*twig[int]) int
	depth = func(t *twig[int]) int {
		if t == nil {
			return 0
		}
		return 1 + max(depth(t.left), depth(t.right))
	}
	if d := depth(s.root); d > 60 {
		t.Errorf("100 000 keys are %d deep, want about 40", d)
	}
}

func BenchmarkMap(b *testing.B) {
	const keys = 100_000
	for name, copies := range map[string]int{"written": 0, "copied each 100": 100} {
		b.Run(name, func(b *testing.B) {
			var m Map[[2]uint64, int]
			w := new(Writer)
			for i := range uint64(keys) {
				m.Set(w, [2]uint64{i, i * 7}, 1)
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				if copies > 0 && i%copies == 0 {
					w = new(Writer)
				}
				k := uint64(i*7919) % keys
				m.Set(w, [2]uint64{k, k * 7}, i)
			}
		})
	}
	b.Run("read", func(b *testing.B) {
		var m Map[[2]uint64, int]
		w := new(Writer)
		for i := range uint64(keys) {
			m.Set(w, [2]uint64{i, i * 7}, 1)
		}
		b.ResetTimer()
		for i := range b.N {
			k := uint64(i*7919) % keys
			m.Get([2]uint64{k, k * 7})
		}
	})
}

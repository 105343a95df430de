// SPDX-License-Identifier: Apache-2.0

package image

import (
	"cmp"
	"fmt"
	"slices"
)

// Extent is a run of extents of a drive.
type Extent struct {
	Start uint32 `json:"start"`
	Count uint32 `json:"count"`
}

// Overlaps reports whether two runs have an extent in common.
func (e Extent) Overlaps(o Extent) bool {
	return e.Start < o.Start+o.Count && o.Start < e.Start+e.Count
}

// Count is the number of extents in all runs together.
func Count(extents []Extent) (n uint32) {
	for _, e := range extents {
		n += e.Count
	}
	return n
}

// Insert adds runs to a list that is sorted by start.
func Insert(all, extents []Extent) []Extent {
	for _, e := range extents {
		at, _ := slices.BinarySearchFunc(all, e, byStart)
		all = slices.Insert(all, at, e)
	}
	return all
}

// Remove takes runs out of a list that is sorted by start.
func Remove(all, extents []Extent) []Extent {
	for _, e := range extents {
		at, _ := slices.BinarySearchFunc(all, e, byStart)
		for ; at < len(all) && all[at].Start == e.Start; at++ {
			if all[at] == e {
				all = slices.Delete(all, at, at+1)
				break
			}
		}
	}
	return all
}

func byStart(a, b Extent) int { return cmp.Compare(a.Start, b.Start) }

// Holes returns the runs of free extents on a drive of total extents. It sorts taken.
func Holes(taken []Extent, total uint32) (free []Extent) {
	slices.SortFunc(taken, byStart) // fast if they are sorted
	next := uint32(0)
	for _, e := range taken {
		if e.Start > next {
			free = append(free, Extent{next, e.Start - next})
		}
		next = max(next, e.Start+e.Count)
	}
	if next < total {
		free = append(free, Extent{next, total - next})
	}
	return free
}

// FirstFit finds need free extents among total: the first hole that holds them all, or else
// holes from the start on. It sorts taken. The caller has checked that there are enough.
func FirstFit(taken []Extent, total, need uint32) []Extent {
	holes := Holes(taken, total)
	for _, h := range holes {
		if h.Count >= need {
			return []Extent{{h.Start, need}}
		}
	}
	var got []Extent
	for _, h := range holes {
		if need == 0 {
			break
		}
		n := min(h.Count, need)
		got = append(got, Extent{h.Start, n})
		need -= n
	}
	if need > 0 {
		panic(fmt.Sprintf("image: %d extents short on a drive of %d", need, total))
	}
	return got
}

// Extend returns a leg's extents and more new ones. The new ones follow the last extent if
// that space is free, so that the leg stays in one piece.
func Extend(have, taken []Extent, total, more uint32) []Extent {
	grown := slices.Clone(have)
	last := &grown[len(grown)-1]
	end := last.Start + last.Count
	for _, h := range Holes(slices.Clone(taken), total) {
		if h.Start == end && h.Count >= more {
			last.Count += more
			return grown
		}
	}
	for _, e := range FirstFit(slices.Clone(taken), total, more) {
		if last := &grown[len(grown)-1]; last.Start+last.Count == e.Start {
			last.Count += e.Count
			continue
		}
		grown = append(grown, e)
	}
	return grown
}

// Beyond returns the extents of a list after as many as another has.
func Beyond(list, than []Extent) (more []Extent) {
	skip := Count(than)
	for _, e := range list {
		n := min(skip, e.Count)
		skip -= n
		if n < e.Count {
			more = append(more, Extent{e.Start + n, e.Count - n})
		}
	}
	return more
}

// begins reports whether the extents of whole begin with those of part.
func begins(whole, part []Extent) bool {
	return slices.Equal(each(part), each(whole)[:min(Count(part), Count(whole))])
}

// each lists the extents one by one.
func each(extents []Extent) (all []uint32) {
	for _, e := range extents {
		for i := range e.Count {
			all = append(all, e.Start+i)
		}
	}
	return all
}

// Minus returns the extents of a list that another does not have, sorted, in as few runs as there
// can be.
func Minus(list, less []Extent) (rest []Extent) {
	list, less = slices.Clone(list), slices.Clone(less)
	slices.SortFunc(list, byStart)
	slices.SortFunc(less, byStart)
	i := 0
	for _, e := range list {
		at, end := e.Start, e.Start+e.Count
		for at < end {
			for i < len(less) && less[i].Start+less[i].Count <= at {
				i++
			}
			stop := end
			if i < len(less) && less[i].Start < end {
				stop = max(at, less[i].Start)
			}
			if n := len(rest); at < stop && n > 0 && rest[n-1].Start+rest[n-1].Count == at {
				rest[n-1].Count += stop - at
			} else if at < stop {
				rest = append(rest, Extent{Start: at, Count: stop - at})
			}
			if stop == end {
				break
			}
			at = less[i].Start + less[i].Count
		}
	}
	return rest
}

// Union returns the extents of both lists, which have none in common, sorted, in as few runs as there
// can be.
func Union(a, b []Extent) []Extent { return Minus(slices.Concat(a, b), nil) }

// First returns the first n extents of a list, or all there are; with last, the last ones.
func First(list []Extent, n uint32, last bool) (some []Extent) {
	list = slices.Clone(list)
	if last {
		slices.Reverse(list)
	}
	for _, e := range list {
		if n == 0 {
			break
		}
		if e.Count > n {
			if last {
				e.Start += e.Count - n
			}
			e.Count = n
		}
		n -= e.Count
		some = append(some, e)
	}
	return some
}

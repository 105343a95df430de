// SPDX-License-Identifier: Apache-2.0

// Package cow has maps that can be copied in constant time, so that readers can look at a
// large state while it goes on changing.
//
//	m.Set(w, "a", 1)
//	old, w := m, new(Writer)   // old stays as it is: w is another writer
//	m.Set(w, "a", 2)           // copies what it changes, and what leads there
//
// A copy of a Map or a Sorted is a plain assignment. A Sorted never changes in place. A Map
// does, where its present writer has made the place, so that it costs no more than a map of
// Go's while nobody copies it: the one rule is that the writer of a copied Map is dropped
// and a new one taken. Copies may then be read from any goroutine.
package cow

import (
	"hash/maphash"
	"iter"
	"slices"
)

// Writer is the right to change in place what was written with it.
type Writer struct{ _ byte }

// Map is an unordered map. Its zero value is empty.
type Map[K comparable, V any] struct {
	root *node[K, V]
	n    int
}

// node is a leaf with entries or, if they became too many, a branch.
type node[K comparable, V any] struct {
	by      *Writer // may change it in place
	entries []entry[K, V]
	kids    *[fan]*node[K, V]
}

type entry[K comparable, V any] struct {
	key   K
	value V
}

const (
	fanBits = 4
	fan     = 1 << fanBits
	// leafMost is the largest leaf. The last bits of a hash are not exhausted before memory
	// is, so a leaf at that depth may grow.
	leafMost = 16
	hashBits = 64
)

var seed = maphash.MakeSeed()

// Len is the number of entries.
func (m Map[K, V]) Len() int { return m.n }

// Get returns the value of a key, or the zero value.
func (m Map[K, V]) Get(key K) V {
	v, _ := m.Find(key)
	return v
}

// Has reports whether there is a value of a key.
func (m Map[K, V]) Has(key K) bool {
	_, ok := m.Find(key)
	return ok
}

// Find returns the value of a key, and whether there is one.
func (m Map[K, V]) Find(key K) (value V, ok bool) {
	n := m.root
	if n == nil {
		return value, false
	}
	for h := maphash.Comparable(seed, key); n.kids != nil; h >>= fanBits {
		if n = n.kids[h%fan]; n == nil {
			return value, false
		}
	}
	for i := range n.entries {
		if n.entries[i].key == key {
			return n.entries[i].value, true
		}
	}
	return value, false
}

// All lists the entries in no order. The map must not be changed meanwhile.
func (m Map[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) { m.root.each(yield) }
}

// Keys lists the keys in no order.
func (m Map[K, V]) Keys() iter.Seq[K] {
	return func(yield func(K) bool) { m.root.each(func(k K, _ V) bool { return yield(k) }) }
}

func (n *node[K, V]) each(yield func(K, V) bool) bool {
	if n == nil {
		return true
	}
	for i := range n.entries {
		if !yield(n.entries[i].key, n.entries[i].value) {
			return false
		}
	}
	if n.kids != nil {
		for _, kid := range n.kids {
			if !kid.each(yield) {
				return false
			}
		}
	}
	return true
}

// Set gives a key a value.
func (m *Map[K, V]) Set(w *Writer, key K, value V) {
	h := maphash.Comparable(seed, key)
	at, depth := &m.root, 0
	for *at != nil && (*at).kids != nil {
		n := (*at).own(w)
		*at = n
		at, depth = &n.kids[h>>depth%fan], depth+fanBits
	}
	if *at == nil {
		*at = &node[K, V]{by: w}
	}
	n := (*at).own(w)
	*at = n
	for i := range n.entries {
		if n.entries[i].key == key {
			n.entries[i].value = value
			return
		}
	}
	n.entries = append(n.entries, entry[K, V]{key, value})
	m.n++
	if len(n.entries) > leafMost && depth+fanBits <= hashBits {
		n.split(w, depth)
	}
}

// Delete removes a key, if it is there.
func (m *Map[K, V]) Delete(w *Writer, key K) {
	if !m.Has(key) {
		return
	}
	h := maphash.Comparable(seed, key)
	at := &m.root
	for ; (*at).kids != nil; h >>= fanBits {
		n := (*at).own(w)
		*at = n
		at = &n.kids[h%fan]
	}
	n := (*at).own(w)
	*at = n
	last := len(n.entries) - 1
	for i := range n.entries {
		if n.entries[i].key == key {
			n.entries[i] = n.entries[last]
			break
		}
	}
	n.entries[last] = entry[K, V]{}
	if n.entries = n.entries[:last]; last == 0 {
		*at = nil
	}
	if m.n--; m.n == 0 {
		m.root = nil
	}
}

// own returns the node, or a copy of it that w may change.
func (n *node[K, V]) own(w *Writer) *node[K, V] {
	if n.by == w {
		return n
	}
	c := &node[K, V]{by: w, entries: slices.Clone(n.entries)}
	if n.kids != nil {
		kids := *n.kids
		c.kids = &kids
	}
	return c
}

// split turns a leaf into a branch.
func (n *node[K, V]) split(w *Writer, depth int) {
	n.kids = new([fan]*node[K, V])
	for _, e := range n.entries {
		at := &n.kids[maphash.Comparable(seed, e.key)>>depth%fan]
		if *at == nil {
			*at = &node[K, V]{by: w}
		}
		(*at).entries = append((*at).entries, e)
	}
	n.entries = nil
}

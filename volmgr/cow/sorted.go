// SPDX-License-Identifier: Apache-2.0

package cow

import (
	"hash/maphash"
	"iter"
)

// Sorted is a map from texts, in their order. It never changes: Set and Delete return
// another. Its zero value is empty.
type Sorted[V any] struct {
	root *twig[V]
	n    int
}

// twig is a node of a treap: its keys are in order from left to right, and no node has a
// higher rank than the one above it. Ranks are hashes, so the tree is balanced whatever the
// order in which the keys came.
type twig[V any] struct {
	key         string
	value       V
	rank        uint64
	left, right *twig[V]
}

// Len is the number of entries.
func (s Sorted[V]) Len() int { return s.n }

// Find returns the value of a key, and whether there is one.
func (s Sorted[V]) Find(key string) (value V, ok bool) {
	for t := s.root; t != nil; {
		switch {
		case key < t.key:
			t = t.left
		case key > t.key:
			t = t.right
		default:
			return t.value, true
		}
	}
	return value, false
}

// Set returns the map in which key has a value.
func (s Sorted[V]) Set(key string, value V) Sorted[V] {
	_, had := s.Find(key)
	if !had {
		s.n++
	}
	s.root = s.root.set(&twig[V]{key: key, value: value, rank: maphash.String(seed, key)})
	return s
}

func (t *twig[V]) set(fresh *twig[V]) *twig[V] {
	switch {
	case t == nil:
		return fresh
	case t.key == fresh.key:
		fresh.left, fresh.right = t.left, t.right
		return fresh
	case fresh.rank > t.rank:
		fresh.left, fresh.right = t.cut(fresh.key)
		return fresh
	}
	c := *t
	if fresh.key < t.key {
		c.left = t.left.set(fresh)
	} else {
		c.right = t.right.set(fresh)
	}
	return &c
}

// cut returns what is before a key, and what is after it.
func (t *twig[V]) cut(key string) (before, after *twig[V]) {
	if t == nil {
		return nil, nil
	}
	c := *t
	if t.key < key {
		c.right, after = t.right.cut(key)
		return &c, after
	}
	before, c.left = t.left.cut(key)
	return before, &c
}

// Delete returns the map without a key.
func (s Sorted[V]) Delete(key string) Sorted[V] {
	if _, had := s.Find(key); !had {
		return s
	}
	return Sorted[V]{s.root.without(key), s.n - 1}
}

func (t *twig[V]) without(key string) *twig[V] {
	if t.key == key {
		return t.left.join(t.right)
	}
	c := *t
	if key < t.key {
		c.left = t.left.without(key)
	} else {
		c.right = t.right.without(key)
	}
	return &c
}

// join is the inverse of cut.
func (t *twig[V]) join(after *twig[V]) *twig[V] {
	switch {
	case t == nil:
		return after
	case after == nil:
		return t
	case t.rank > after.rank:
		c := *t
		c.right = t.right.join(after)
		return &c
	}
	c := *after
	c.left = t.join(after.left)
	return &c
}

// After lists the entries whose keys are after a key, in order.
func (s Sorted[V]) After(key string) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) { s.root.after(key, yield) }
}

// From lists the entries whose keys are key or after it, in order.
func (s Sorted[V]) From(key string) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		if v, ok := s.Find(key); !ok || yield(key, v) {
			s.root.after(key, yield)
		}
	}
}

// All lists the entries in order.
func (s Sorted[V]) All() iter.Seq2[string, V] {
	return func(yield func(string, V) bool) { s.root.each(yield) }
}

func (t *twig[V]) after(key string, yield func(string, V) bool) bool {
	if t == nil {
		return true
	}
	if t.key <= key {
		return t.right.after(key, yield)
	}
	return t.left.after(key, yield) && yield(t.key, t.value) && t.right.each(yield)
}

func (t *twig[V]) each(yield func(string, V) bool) bool {
	return t == nil || t.left.each(yield) && yield(t.key, t.value) && t.right.each(yield)
}

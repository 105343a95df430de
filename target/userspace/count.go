// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/mapped"
)

// Counting the space of a tree's legs looks at all of its records, so it is done every countEvery, and soon
// after a snapshot comes or goes. It takes a fifth of one processor at most, and a twentieth where snapshots
// come and go all the time.
const (
	countEvery  = 10 * time.Minute
	countSlice  = time.Millisecond // after so much work it rests
	countRest   = 4                // for so many times as long
	countsApart = 20               // after a count it waits for so many times as long as that took
)

// count is what the legs of an open tree took when they were counted last. Guarded by trees.mu.
type count struct {
	running bool
	of      map[block.UUID]mapped.Usage
	layers  []mapped.Layer // of then
	ended   time.Time
	took    time.Duration
}

// due reports whether the legs are to be counted again.
func (c *count) due(now time.Time, layers []mapped.Layer) bool {
	if c.running || now.Sub(c.ended) < countsApart*c.took {
		return false
	}
	return now.Sub(c.ended) >= countEvery || !slices.EqualFunc(layers, c.layers, func(a, b mapped.Layer) bool {
		return a.ID == b.ID && a.State == b.State && a.Parent == b.Parent
	})
}

// count begins to count, in the background, what is due.
func (h *held) count(trees []*openTree) {
	for _, o := range trees {
		if !h.drives.begin() {
			return
		}
		go func() {
			defer h.drives.background.Done()
			h.countNow(o)
		}()
	}
}

func (h *held) countNow(o *openTree) {
	layers, began := o.Kin(), time.Now()
	slice := began
	of := o.Usages(func() bool {
		if worked := time.Since(slice); worked >= countSlice {
			rest := time.NewTimer(countRest * worked)
			defer rest.Stop()
			select {
			case <-rest.C:
			case <-h.drives.ending:
				return false
			}
			slice = time.Now()
		}
		return o.Err() == nil
	})
	t := &h.trees
	t.mu.Lock()
	defer t.mu.Unlock()
	if o.count.running = false; of != nil {
		o.count.of = of
	}
	o.count.layers, o.count.ended = layers, time.Now()
	o.count.took = o.count.ended.Sub(began)
}

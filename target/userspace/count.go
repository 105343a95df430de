// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/mapped"
)

// Counting the space of a tree's legs looks at all of its records, so a tree that changes is counted every
// countEvery, and soon after a snapshot comes or goes. One tree of the process is counted at a time, with a
// fifth of a processor, and then not again for countsApart times as long as that took.
const (
	countEvery  = 10 * time.Minute
	countSlice  = time.Millisecond // after so much work it rests
	countRest   = 4                // for so many times as long
	countsApart = 20
	countStep   = 10 * time.Millisecond // more than the work of one chunk takes: the process was stopped
)

// count is what the legs of an open tree took when they were counted last. Guarded by trees.mu.
type count struct {
	running bool
	of      map[block.UUID]mapped.Usage
	layers  []mapped.Layer // of then
	changes uint64         // of the tree until then
	ended   time.Time
	work    time.Duration // that it took
}

// due reports whether the legs are to be counted again.
func (c *count) due(now time.Time, t *mapped.Tree) bool {
	since := now.Sub(c.ended)
	if c.running || since < min(countsApart*c.work, countEvery) {
		return false
	}
	return since >= countEvery && c.changes != t.Changes() || !slices.EqualFunc(t.Kin(), c.layers, func(a, b mapped.Layer) bool {
		return a.ID == b.ID && a.State == b.State && a.Parent == b.Parent && a.Size == b.Size
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
			select {
			case h.drives.counting <- struct{}{}:
				h.countNow(o)
				<-h.drives.counting
			case <-h.drives.ending:
			}
		}()
	}
}

func (h *held) countNow(o *openTree) {
	layers, changes := o.Kin(), o.Changes()
	var work, slice time.Duration
	last := time.Now()
	of := o.Usages(func() bool {
		worked := min(time.Since(last), countStep)
		work, slice = work+worked, slice+worked
		if slice >= countSlice {
			rest := time.NewTimer(countRest * slice)
			defer rest.Stop()
			select {
			case <-rest.C:
			case <-h.drives.ending:
				return false
			}
			slice = 0
		}
		last = time.Now()
		return o.Err() == nil
	})
	h.trees.mu.Lock()
	defer h.trees.mu.Unlock()
	if of == nil {
		of = o.count.of
	}
	o.count = count{of: of, layers: layers, changes: changes, ended: time.Now(), work: work}
}

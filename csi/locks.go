// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// operations are the operations under way, at most one per volume, or per volume and node if they concern one
// node: a CO attaches and detaches for each node by itself. A second one is refused rather than queued: a CO
// repeats it, and a queue of calls whose callers have gone would delay those that someone waits for.
type operations struct {
	now func() time.Time

	mu    sync.Mutex
	under map[string][]*operation // by volume id, or name where there is no id yet
}

type operation struct {
	rpc, node string // node: empty if it concerns all
	since     time.Time
}

func newOperations() *operations {
	return &operations{now: time.Now, under: map[string][]*operation{}}
}

// start begins an operation on a volume, and returns a function that ends it. The error, of code
// Aborted, names the operation under way. end may be called from another goroutine, for work that
// outlasts its caller; calling it twice is harmless.
func (o *operations) start(volume, rpc string) (end func(), err error) {
	return o.startOn(volume, "", rpc)
}

// startOn is start for an operation that concerns one node; an empty one stands for all.
func (o *operations) startOn(volume, node, rpc string) (end func(), err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, other := range o.under[volume] {
		if node == "" || other.node == "" || other.node == node {
			return nil, status.Errorf(codes.Aborted, "an operation on volume %s is running: %s, since %s", volume, other.rpc, other.since.UTC().Format(time.RFC3339))
		}
	}
	begun := &operation{rpc, node, o.now()}
	o.under[volume] = append(o.under[volume], begun)
	return sync.OnceFunc(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.under[volume] = slices.DeleteFunc(o.under[volume], func(one *operation) bool { return one == begun })
		if len(o.under[volume]) == 0 {
			delete(o.under, volume)
		}
	}), nil
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// operations are the operations under way, at most one per volume. A second one is refused rather
// than queued: a CO repeats it, and a queue of calls whose callers have gone would delay those that
// someone waits for.
type operations struct {
	now func() time.Time

	mu    sync.Mutex
	under map[string]operation // by volume id, or name where there is no id yet
}

type operation struct {
	rpc   string
	since time.Time
}

func newOperations() *operations {
	return &operations{now: time.Now, under: map[string]operation{}}
}

// start begins an operation on a volume, and returns a function that ends it. The error, of code
// Aborted, names the operation under way. end may be called from another goroutine, for work that
// outlasts its caller; calling it twice is harmless.
func (o *operations) start(volume, rpc string) (end func(), err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if other, ok := o.under[volume]; ok {
		return nil, status.Errorf(codes.Aborted, "an operation on volume %s is running: %s, since %s", volume, other.rpc, other.since.UTC().Format(time.RFC3339))
	}
	o.under[volume] = operation{rpc: rpc, since: o.now()}
	return sync.OnceFunc(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.under, volume)
	}), nil
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/initiator/volume"
)

// lastPatience is how long a keeper that is shutting down waits for a pending call.
const lastPatience = time.Second

// ErrBusy says that the same call has not returned yet.
var ErrBusy = errors.New("not tried again: an earlier call has not returned yet")

// Call describes a call that may take long.
type Call struct {
	What     string        // for people, and to identify the call
	Patience time.Duration // how long the keeper waits for it; the constant Patience if zero
	Limit    time.Duration // when its ctx ends; 0: never
}

// Busy reports whether a call was left behind and has not returned yet.
func (k *Keeper) Busy(what string) bool { return k.busy[what] }

// unreturned lists the calls that were left behind, for people.
func (k *Keeper) unreturned() (calls []string) {
	for _, what := range slices.Sorted(maps.Keys(k.busy)) {
		calls = append(calls, what+" has not returned yet")
	}
	return calls
}

// Await runs f on its own goroutine and then finish, with f's outcome, on the keeper's. It
// waits for f as long as its patience lasts. After that it leaves f behind, and finish runs
// when f has returned. Meanwhile the keeper keeps the lease and does its other work, and the
// same call is not started again.
func (k *Keeper) Await(ctx context.Context, c Call, f func(context.Context) error, finish func(error) error) error {
	if k.busy[c.What] {
		return fmt.Errorf("%w: %s", ErrBusy, c.What)
	}
	k.busy[c.What] = true
	patience := cmp.Or(c.Patience, Patience)
	result := make(chan error, 1)
	go func() {
		if c.Limit > 0 {
			limited, cancel := context.WithTimeout(ctx, c.Limit)
			defer cancel()
			result <- f(limited)
			return
		}
		result <- f(ctx)
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-result:
		delete(k.busy, c.What)
		return finish(err)
	case <-ctx.Done():
		// The process may end now, and a table must not be left suspended.
		select {
		case err := <-result:
			return finish(err)
		case <-time.After(lastPatience):
			return ctx.Err()
		}
	case <-timer.C:
	}
	began := time.Now().Add(-patience)
	k.Log.Warn("call has not returned yet", "call", c.What)
	go func() {
		err := <-result
		k.Tell(func() {
			delete(k.busy, c.What)
			if err := finish(err); !errors.Is(err, volume.ErrLater) {
				k.Log.Info("delayed call has returned", "call", c.What, "after", time.Since(began), "err", err)
			}
		})
	}()
	return fmt.Errorf("no answer for %v", patience)
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"sync/atomic"
	"time"
)

// lease is how long a volume may be read. The keeper extends it in its turns. The engine
// checks it each time just before it answers a read, because the whole process may have been
// frozen since the last turn.
type lease struct {
	clock func() time.Time
	from  time.Time
	ends  atomic.Int64 // nanoseconds after from
}

func newLease(clock func() time.Time) *lease { return &lease{clock: clock, from: clock()} }

func (l *lease) extend(end time.Time) { l.ends.Store(int64(end.Sub(l.from))) }

// runs reports whether no other host can have been granted the volume yet.
func (l *lease) runs() bool { return int64(l.clock().Sub(l.from)) < l.ends.Load() }

// SPDX-License-Identifier: Apache-2.0

package lists

import (
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
)

// The targets' lists of writes are what the next host compares if this one crashes. A checkpoint
// shortens them: once a second while there are writes, or sooner if these have touched mostWritten of a
// column.
const (
	every       = time.Second
	mostWritten = 256 * block.MiB
	idle        = 10 * time.Second // without writes: a target may have begun a new list

	Retry        = time.Second // after a checkpoint that was not taken
	RefusedRetry = time.Minute // after a target that keeps no list: it may be upgraded

	LookBusy = 50 * time.Millisecond // how often a column with writes is looked at
	LookIdle = 250 * time.Millisecond

	TargetTimeout = 2 * time.Second // for an answer about a leg's list
	ListTimeout   = 5 * time.Second // for a leg's list

	// Attempts is how often targets are asked for their lists before copies are compared whole.
	Attempts = 3
)

// Moment is the state of a column when a checkpoint began.
type Moment struct {
	At      time.Time
	Written uint64 // bytes since some time; a write counts as one region at least
	Members []checkpoint.Member
}

// Due reports whether a checkpoint should be taken, if the last one was taken at a moment, and the next
// one must not be before a time.
func (now Moment) Due(last Moment, next time.Time) bool {
	since := now.At.Sub(last.At)
	switch {
	case len(now.Members) < 2: // a single copy differs from no other
		return false
	case now.At.Before(next):
		return false
	case !slices.Equal(now.Members, last.Members):
		return true
	case now.Written-last.Written >= uint64(mostWritten):
		return true
	case now.Written != last.Written:
		return since >= every
	}
	return since >= idle
}

// SPDX-License-Identifier: Apache-2.0

package lists

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
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

	retry        = time.Second // after a checkpoint that was not taken
	refusedRetry = time.Minute // after a target that keeps no list: it may be upgraded

	lookBusy = 50 * time.Millisecond // how often a column with writes is looked at
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

// due reports whether a checkpoint should be taken, if the last one was taken at a moment, and the next
// one must not be before a time.
func (now Moment) due(last Moment, next time.Time) bool {
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

// Pace has the checkpoints of one column taken at the right times. It is for one goroutine.
type Pace struct {
	Log *slog.Logger // of the column

	last    Moment // of the last checkpoint
	seen    uint64 // written, at the last look
	next    time.Time
	refused bool // the last one was
}

// Look takes a checkpoint of a column as it is now, if one is due, and returns how long to wait until the
// next look.
func (p *Pace) Look(ctx context.Context, now Moment, c checkpoint.Column) time.Duration {
	if now.due(p.last, p.next) {
		p.take(ctx, now, c)
	}
	pause := LookIdle
	if now.Written != p.seen {
		pause = lookBusy
	}
	p.seen = now.Written
	return pause
}

func (p *Pace) take(ctx context.Context, now Moment, c checkpoint.Column) {
	members, err := checkpoint.Take(ctx, c, token())
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, block.ErrUnsupported):
		if p.next = time.Now().Add(refusedRetry); !p.refused {
			p.Log.Info("no checkpoints are taken: a leg's target keeps no list of writes for this host; after a crash the copies will be compared whole", "err", err)
		}
		p.refused = true
	case err != nil:
		p.next = time.Now().Add(retry)
		p.Log.Debug("checkpoint not taken", "err", err)
	default:
		p.last, p.refused = now, false
		p.last.Members = members
	}
}

// token is a new token of a checkpoint.
func token() checkpoint.Token { return checkpoint.Token(rand.Uint64() | 1) }

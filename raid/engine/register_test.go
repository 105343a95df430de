// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"math"
)

const never = math.MaxInt64

// candidate is a value that a sector may have.
type candidate struct {
	tag uint64
	// began is when its write was submitted. settled is the first moment by which
	// it is known to have happened, or, if its client crashed, never to: when it was
	// acknowledged, when a read that saw it ended, when the client crashed.
	began, settled int64
	// past is the first moment by which it is known that a newer value took its
	// place: no read that begins later may see it.
	past int64
	// acked is when its write was acknowledged, lost the first moment by which it
	// can not come back even if all legs lose their power: a newer one is durable.
	acked, lost int64
}

// register is what is known of one sector.
type register []candidate

func (g *register) write(tag uint64, now int64) {
	*g = append(*g, candidate{tag, now, never, never, never, never})
}

// acked: the write of a tag began and is acknowledged now, so what was settled
// before it began is past.
func (g register) acked(tag uint64, began, now int64) {
	for i := range g {
		c := &g[i]
		if c.tag == tag && c.began == began {
			c.settled, c.acked = min(c.settled, now), now
		} else if c.settled < began {
			c.past = min(c.past, now)
		}
	}
}

// flushed: a flush that began earlier is acknowledged, so what was acknowledged
// before it began is durable.
func (g register) flushed(began, now int64) {
	for _, durable := range g {
		if durable.acked < began {
			g.durable(durable.began, now)
		}
	}
}

// durable: a write that began earlier can not be lost any more.
func (g register) durable(began, now int64) {
	for i := range g {
		if c := &g[i]; c.settled < began {
			c.lost = min(c.lost, now)
		}
	}
}

// powerLost: what was not durable may be there or not.
func (g register) powerLost(now int64) {
	g.crashed(now)
	for i := range g {
		g[i].past, g[i].acked = g[i].lost, never
	}
}

// crashed: what was not acknowledged has happened by now, or never will.
func (g register) crashed(now int64) {
	for i := range g {
		g[i].settled = min(g[i].settled, now)
	}
}

// read: a read that began earlier saw a tag and ends now.
func (g register) read(tag uint64, began, now int64) error {
	legal := false
	for i := range g {
		legal = legal || g[i].tag == tag && g[i].past >= began
	}
	if !legal {
		return fmt.Errorf("a read from %d to %d saw %d, want one of %v", began, now, tag, g.at(began))
	}
	same := 0 // zeroes may have been written more than once
	for i := range g {
		if g[i].tag == tag {
			same++
		}
	}
	for i := range g {
		c := &g[i]
		if c.tag != tag && c.settled < began {
			c.past = min(c.past, now)
		}
		if c.tag == tag && same == 1 {
			c.settled = min(c.settled, now)
		}
	}
	return nil
}

// at lists what may be seen from a moment on.
func (g register) at(began int64) (tags []uint64) {
	for _, c := range g {
		if c.past >= began {
			tags = append(tags, c.tag)
		}
	}
	return tags
}

// has reports whether a leg with a tag has the write of a value that is being
// acknowledged: the tag is that value or one that was not settled before it began.
func (g register) has(tag, want uint64, began int64) bool {
	for _, c := range g {
		if c.tag == tag && (tag == want || c.settled >= began) {
			return true
		}
	}
	return false
}

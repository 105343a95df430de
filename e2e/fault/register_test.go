// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"math"
	"slices"
)

// never is a moment that has not come yet. Moments are numbers of events.
const never = math.MaxInt64

// value is what a unit may hold.
type value struct {
	write  *write
	number uint64 // of the write; 0: zeroes
	began  int64
	// settled is the first moment by which it is known to have happened, or never
	// to: it was acknowledged, or seen, or whom it was given to can not do it any more.
	settled int64
	// past is the first moment by which it is known that a newer one took its place:
	// no read that begins later may see it.
	past int64
	// acked is when it was acknowledged, lost the first moment by which it can not
	// come back even if all drives lose their power: a newer one is durable.
	acked, lost int64
	// instead is when the oldest of those was settled that were seen in its place.
	instead int64
}

// register is what is known of one unit: the values that it may hold, or may have
// held when reads under way began.
type register []value

func (g *register) write(w *write, number uint64, now int64) {
	*g = append(*g, value{w, number, now, never, never, never, never, never})
}

// prune forgets the values that no read may see any more, of those that began at
// oldest or later.
func (g *register) prune(oldest int64) {
	*g = slices.DeleteFunc(*g, func(c value) bool { return c.past < oldest && c.lost < oldest })
}

// ack notes that a write is acknowledged: what was settled before it began is past.
func (g register) ack(w *write, now int64) error {
	for i := range g {
		switch c := &g[i]; {
		case c.write == w && c.instead < c.began:
			return fmt.Errorf("write %d is acknowledged, after something older was read in its place", c.number)
		case c.write == w:
			c.settled, c.acked = min(c.settled, now), now
		case c.settled < w.began:
			c.past = min(c.past, now)
		}
	}
	return nil
}

// discarded notes that a discard has written zeroes by now, or never will.
func (g register) discarded(w *write, now int64) {
	for i := range g {
		if c := &g[i]; c.write == w {
			c.settled = min(c.settled, now)
		}
	}
}

// flushed notes that a flush is acknowledged: what was acknowledged before it
// began is durable.
func (g register) flushed(began, now int64) {
	for _, durable := range g {
		if durable.acked < began {
			g.durable(durable.began, now)
		}
	}
}

// durable notes that what a write that began then left can not be lost any more.
func (g register) durable(began, now int64) {
	for i := range g {
		if c := &g[i]; c.settled < began {
			c.lost = min(c.lost, now)
		}
	}
}

// crashed notes that what was not acknowledged has happened by now, or never will.
func (g register) crashed(now int64) {
	for i := range g {
		g[i].settled = min(g[i].settled, now)
	}
}

// powerLost notes that whatever was not durable may be there or not.
func (g register) powerLost(now int64) {
	g.crashed(now)
	for i := range g {
		g[i].past, g[i].acked, g[i].instead = g[i].lost, never, never
	}
}

// read notes what a read saw that began earlier.
func (g register) read(number uint64, began, now int64) error {
	legal, same, settled := false, 0, int64(never)
	for _, c := range g {
		if c.number == number {
			legal, same, settled = legal || c.past >= began, same+1, c.settled
		}
	}
	if !legal {
		return fmt.Errorf("it holds write %d; it may hold %v", number, g.at(began))
	}
	for i := range g {
		switch c := &g[i]; {
		case c.number != number && c.settled < began:
			c.past = min(c.past, now)
			if same == 1 { // else who knows which of them
				c.instead = min(c.instead, settled)
			}
		case c.number == number && same == 1:
			c.settled = min(c.settled, now)
		}
	}
	return nil
}

// at lists what may be seen from a moment on.
func (g register) at(began int64) (numbers []uint64) {
	for _, c := range g {
		if c.past >= began {
			numbers = append(numbers, c.number)
		}
	}
	return numbers
}

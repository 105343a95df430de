// SPDX-License-Identifier: Apache-2.0

// Package history models what a user of a block device may read. Tests use it to decide
// whether data that they read is right, although operations overlap, hosts crash and
// drives lose power.
//
// A [Unit] is the knowledge about one block: a register, whose values have the moments at
// which their writes began and were acknowledged. The tests of raid/engine and e2e/fault
// keep one for each sector that they write.
//
// Moments are increasing numbers of events. No two writes of a unit begin at the same
// moment, and none at 0. A value has the number of the write that left it, or 0 for
// zeroes, which more than one write may have left.
package history

import (
	"fmt"
	"math"
	"slices"
)

// never is a moment that has not come yet.
const never = math.MaxInt64

// value is a value that a unit may hold.
type value struct {
	number uint64
	began  int64
	// settled is the first moment at which the write has certainly happened or will never
	// happen: it was acknowledged or read, or its receiver can no longer do it.
	settled int64
	// past is the first moment at which a newer value has certainly replaced it: no read
	// that begins later may return it.
	past int64
	// acked is when the write was acknowledged. lost is the first moment from which the
	// value cannot come back even if all drives lose power: a newer one is durable.
	acked, lost int64
	// instead is when the oldest of the values that were read in its place was settled.
	instead int64
	// repeats: the write may happen more than once, so reading the value settles nothing.
	repeats bool
}

// Unit is the knowledge about one unit: the values that it may hold, or may have held when
// reads under way began.
type Unit []value

// Zeroes returns n units that hold zeroes.
func Zeroes(n int) []Unit {
	units, values := make([]Unit, n), make([]value, n)
	for i := range units {
		values[i] = value{past: never, lost: never, instead: never}
		units[i] = values[i : i+1 : i+1]
	}
	return units
}

// Known returns units that hold what writes with these numbers left.
func Known(numbers []uint64) []Unit {
	units := Zeroes(len(numbers))
	for i, n := range numbers {
		units[i][0].number = n
	}
	return units
}

// Write notes that a write begins.
func (u *Unit) Write(number uint64, began int64) {
	*u = append(*u, value{number: number, began: began, settled: never, past: never, acked: never, lost: never, instead: never})
}

// WriteRepeated notes that a write begins that may happen more than once until it is
// acknowledged: its host sends it again if the answer is lost, and does not know what other
// hosts have written there since.
func (u *Unit) WriteRepeated(number uint64, began int64) {
	u.Write(number, began)
	(*u)[len(*u)-1].repeats = true
}

// Prune forgets the values that no read that began at oldest or later may return.
func (u *Unit) Prune(oldest int64) {
	*u = slices.DeleteFunc(*u, func(v value) bool { return v.past < oldest && v.lost < oldest })
}

// Acked notes that the write that began at began is acknowledged: values that were settled
// before it began are past. It returns an error if an older value was read in its place.
func (u Unit) Acked(began, now int64) error {
	for i := range u {
		switch v := &u[i]; {
		case v.began == began && v.instead < began:
			return fmt.Errorf("write %d is acknowledged, after something older was read in its place", v.number)
		case v.began == began:
			v.settled, v.acked = min(v.settled, now), now
		case v.settled < began:
			v.past = min(v.past, now)
		}
	}
	return nil
}

// Discarded notes that the discard that began at began has written zeroes by now, or never
// will.
func (u Unit) Discarded(began, now int64) {
	for i := range u {
		if v := &u[i]; v.began == began {
			v.settled = min(v.settled, now)
		}
	}
}

// Flushed notes that a flush is acknowledged: writes that were acknowledged before it began
// are durable.
func (u Unit) Flushed(began, now int64) {
	for _, durable := range u {
		if durable.acked < began {
			u.Durable(durable.began, now)
		}
	}
}

// Durable notes that the data of the write that began at began can no longer be lost.
func (u Unit) Durable(began, now int64) {
	for i := range u {
		if v := &u[i]; v.settled < began {
			v.lost = min(v.lost, now)
		}
	}
}

// Crashed notes that unacknowledged writes have happened by now, or never will.
func (u Unit) Crashed(now int64) {
	for i := range u {
		u[i].settled = min(u[i].settled, now)
	}
}

// PowerLost notes that data that was not durable may or may not be lost.
func (u Unit) PowerLost(now int64) {
	u.Crashed(now)
	for i := range u {
		u[i].past, u[i].acked, u[i].instead = u[i].lost, never, never
	}
}

// Replaced notes that at a moment from began to now, with no write under way that could still happen, the
// unit was made what an earlier write had left, for good: nothing that was there before comes back.
func (u *Unit) Replaced(number uint64, began, now int64) {
	for i := range *u {
		v := &(*u)[i]
		v.settled, v.past, v.lost = min(v.settled, now), min(v.past, now), min(v.lost, now)
	}
	u.Write(number, began)
	v := &(*u)[len(*u)-1]
	v.settled, v.acked = now, now
}

// Read notes the value that a read returned, which began at began and ends now. It returns
// an error if the unit cannot have held that value in between.
func (u Unit) Read(number uint64, began, now int64) error {
	legal, same, settled := false, 0, int64(never)
	for _, v := range u {
		if v.number == number {
			legal, same, settled = legal || v.past >= began, same+1, v.settled
		}
	}
	if !legal {
		return fmt.Errorf("it holds write %d; it may hold %v", number, u.At(began))
	}
	for i := range u {
		switch v := &u[i]; {
		case v.number != number && v.settled < began:
			v.past = min(v.past, now)
			if same == 1 { // otherwise it is unknown which of them was read
				v.instead = min(v.instead, settled)
			}
		case v.number == number && same == 1 && !v.repeats:
			v.settled = min(v.settled, now)
		}
	}
	return nil
}

// At returns the values that a read that begins at a moment may return.
func (u Unit) At(began int64) (numbers []uint64) {
	for _, v := range u {
		if v.past >= began {
			numbers = append(numbers, v.number)
		}
	}
	return numbers
}

// Span is the moments from From to To.
type Span struct{ From, To int64 }

// Held returns when, from one moment to another, the unit may have held a value. Nothing may have been
// pruned that was past after from.
func (u Unit) Held(number uint64, from, to int64) (all []Span) {
	for _, v := range u {
		if s := (Span{max(from, v.began), min(to, v.past)}); v.number == number && s.From <= s.To {
			all = append(all, s)
		}
	}
	return all
}

// Common returns the first moment that is in a span of each of some units; ok is false if there is none.
func Common(held [][]Span) (moment int64, ok bool) {
	for again := true; again; {
		again = false
		for _, spans := range held {
			next := int64(never)
			for _, s := range spans {
				if s.To >= moment {
					next = min(next, max(s.From, moment))
				}
			}
			if next == never {
				return 0, false
			}
			again = again || next > moment
			moment = next
		}
	}
	return moment, true
}

// Has reports whether a copy that holds number has the write that began at began: the copy
// holds the data of that write, or a value that was not settled before it began.
func (u Unit) Has(number, written uint64, began int64) bool {
	return slices.ContainsFunc(u, func(v value) bool {
		return v.number == number && (number == written || v.settled >= began)
	})
}

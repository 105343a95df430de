// SPDX-License-Identifier: Apache-2.0

// Package history is what the user of a block device may see: a model for tests
// that read and write one, with operations that overlap, crashes and losses of
// power, and must tell whether what they read is right.
//
// A [Unit] is what is known of one block: a register whose values have the
// moments at which they began and were acknowledged. The tests of raid/engine and
// e2e/fault keep one for each sector that they write.
//
// Moments are numbers of events, that grow; no two writes of a unit begin at the
// same one, and none at 0. A value's number is the write's that left it, 0 for
// zeroes, which more than one write may have left.
package history

import (
	"fmt"
	"math"
	"slices"
)

// never is a moment that has not come yet.
const never = math.MaxInt64

// value is what a unit may hold.
type value struct {
	number uint64
	began  int64
	// settled is the first moment by which it is known to have happened, or never
	// to: it was acknowledged, or seen, or whom it was given to cannot do it any more.
	settled int64
	// past is the first moment by which it is known that a newer one took its place:
	// no read that begins later may see it.
	past int64
	// acked is when it was acknowledged, lost the first moment by which it cannot
	// come back even if all drives lose their power: a newer one is durable.
	acked, lost int64
	// instead is when the oldest of those was settled that were seen in its place.
	instead int64
	// repeats: it may happen more than once, so to have seen it settles nothing.
	repeats bool
}

// Unit is what is known of one unit: the values that it may hold, or may have held
// when reads under way began.
type Unit []value

// Zeroes are units that hold zeroes.
func Zeroes(n int) []Unit {
	units, values := make([]Unit, n), make([]value, n)
	for i := range units {
		values[i] = value{past: never, lost: never, instead: never}
		units[i] = values[i : i+1 : i+1]
	}
	return units
}

// Write notes that a write begins.
func (u *Unit) Write(number uint64, began int64) {
	*u = append(*u, value{number: number, began: began, settled: never, past: never, acked: never, lost: never, instead: never})
}

// WriteRepeated notes that a write begins which may happen more than once until it is
// acknowledged: its host sends it again if the answer is lost, and does not know
// what other hosts have written there since.
func (u *Unit) WriteRepeated(number uint64, began int64) {
	u.Write(number, began)
	(*u)[len(*u)-1].repeats = true
}

// Prune forgets the values that no read may see any more, of those that began at
// oldest or later.
func (u *Unit) Prune(oldest int64) {
	*u = slices.DeleteFunc(*u, func(v value) bool { return v.past < oldest && v.lost < oldest })
}

// Acked notes that the write which began then is acknowledged: what was settled
// before it began is past. It is wrong if something older was read in its place.
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

// Discarded notes that the discard which began then has written zeroes by now, or
// never will.
func (u Unit) Discarded(began, now int64) {
	for i := range u {
		if v := &u[i]; v.began == began {
			v.settled = min(v.settled, now)
		}
	}
}

// Flushed notes that a flush is acknowledged: what was acknowledged before it
// began is durable.
func (u Unit) Flushed(began, now int64) {
	for _, durable := range u {
		if durable.acked < began {
			u.Durable(durable.began, now)
		}
	}
}

// Durable notes that what the write that began then left cannot be lost any more.
func (u Unit) Durable(began, now int64) {
	for i := range u {
		if v := &u[i]; v.settled < began {
			v.lost = min(v.lost, now)
		}
	}
}

// Crashed notes that what was not acknowledged has happened by now, or never will.
func (u Unit) Crashed(now int64) {
	for i := range u {
		u[i].settled = min(u[i].settled, now)
	}
}

// PowerLost notes that whatever was not durable may be there or not.
func (u Unit) PowerLost(now int64) {
	u.Crashed(now)
	for i := range u {
		u[i].past, u[i].acked, u[i].instead = u[i].lost, never, never
	}
}

// Read notes what a read saw that began earlier and ends now. It is wrong if the
// unit cannot have held that meanwhile.
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
			if same == 1 { // else who knows which of them
				v.instead = min(v.instead, settled)
			}
		case v.number == number && same == 1 && !v.repeats:
			v.settled = min(v.settled, now)
		}
	}
	return nil
}

// At lists what may be seen from a moment on.
func (u Unit) At(began int64) (numbers []uint64) {
	for _, v := range u {
		if v.past >= began {
			numbers = append(numbers, v.number)
		}
	}
	return numbers
}

// Has reports whether a copy that holds a number has the write which began then:
// it holds what that wrote, or a value that was not settled before it began.
func (u Unit) Has(number, written uint64, began int64) bool {
	return slices.ContainsFunc(u, func(v value) bool {
		return v.number == number && (number == written || v.settled >= began)
	})
}

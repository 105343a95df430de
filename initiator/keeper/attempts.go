// SPDX-License-Identifier: Apache-2.0

package keeper

import "time"

// insist is how often a portal is tried while its target answers that it does not export the leg: 0.6 s. As
// a rule a target exports a moment after the attachment was granted, and another of its portals would answer
// the same: legs that went on to it would all leave the rail over which they were balanced.
const insist = 3

// Attempts counts the failed attempts to connect a path. The zero value stands for a path
// without failed attempts.
type Attempts struct {
	Failed int
	Turns  int       // how often another portal was to be tried first, after these failures
	Next   time.Time // no attempt before
	Error  string    // of the last attempt
}

// Fail counts an attempt that has failed now, and reports whether its error differs from the
// previous one. answered: the target refused, so the network between is well. The pause before the next
// attempt doubles from 0.2 s to 2 s.
func (a *Attempts) Fail(err error, answered bool) (differs bool) {
	a.Next = time.Now().Add(min(2*time.Second, 200*time.Millisecond<<min(a.Failed, 4)))
	a.Failed++
	if !answered || a.Failed >= insist {
		a.Turns++
	}
	differs = a.Error != err.Error()
	a.Error = err.Error()
	return differs
}

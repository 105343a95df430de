// SPDX-License-Identifier: Apache-2.0

package keeper

import "time"

// Attempts counts the failed attempts to connect a path. The zero value stands for a path
// without failed attempts.
type Attempts struct {
	Failed int
	Next   time.Time // no attempt before
	Error  string    // of the last attempt
}

// Fail counts an attempt that has failed now, and reports whether its error differs from the
// previous one. The pause before the next attempt doubles from 0.2 s to 2 s.
func (a *Attempts) Fail(err error) (differs bool) {
	a.Next = time.Now().Add(min(2*time.Second, 200*time.Millisecond<<min(a.Failed, 4)))
	a.Failed++
	differs = a.Error != err.Error()
	a.Error = err.Error()
	return differs
}

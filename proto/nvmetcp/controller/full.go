// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"time"

	"weft.dev/weft/proto/block"
)

// fullDelays are how long a host waits before it repeats a write for which there was no space, by how long
// there has been none. Linux repeats a command 255 times at most, even if its agent has raised that, and
// then fails it. So a short lack is over for a writer 2 s after its end; and a write lasts for nine hours,
// a night, where 255 answers at the first of these delays would be eleven minutes. The last delay is the
// longest for which a write waits although there is space, and for which a kernel keeps a write that is not
// to go to this target any more.
var fullDelays = [3]struct {
	until time.Duration // that there has been no space for so long; the last one has no end
	delay time.Duration
}{
	{2 * time.Minute, 2 * time.Second},
	{10 * time.Minute, 15 * time.Second},
	{0, 3 * time.Minute},
}

// fullDelay says which of the delays applies to a write for which there was no space: 1 to 3. A device that
// does not say for how long there has been none has the first.
func fullDelay(err error) uint8 {
	full, ok := errors.AsType[*block.FullError](err)
	if !ok {
		return 1
	}
	for i, d := range fullDelays[:2] {
		if full.For < d.until {
			return uint8(i + 1)
		}
	}
	return 3
}

// crdt is CRDT1 to CRDT3 of Identify Controller, in units of 100 ms.
func crdt() (all [3]uint16) {
	for i, d := range fullDelays {
		all[i] = uint16(d.delay / (100 * time.Millisecond))
	}
	return all
}

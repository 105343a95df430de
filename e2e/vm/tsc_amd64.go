// SPDX-License-Identifier: Apache-2.0

package vm

import "time"

// readTSC reads the processor's time stamp counter.
func readTSC() uint64

// tscKHz measures the frequency of this machine's time stamp counter, which is the guest's
// too under TCG. A guest measures it wrong while its thread waits for a processor: on a
// busy machine one got 397 MHz instead of 2595, and its time ran six times too fast.
func tscKHz() uint64 {
	t1, c1 := stamp()
	time.Sleep(50 * time.Millisecond)
	t2, c2 := stamp()
	return (c2 - c1) * uint64(time.Millisecond) / uint64(t2.Sub(t1))
}

// stamp reads both clocks as close together as possible, out of several tries.
func stamp() (at time.Time, count uint64) {
	best := time.Hour
	for range 20 {
		before := time.Now()
		c := readTSC()
		if took := time.Since(before); took < best {
			best, at, count = took, before, c
		}
	}
	return at, count
}

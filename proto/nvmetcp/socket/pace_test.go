// SPDX-License-Identifier: Apache-2.0

package socket

import "testing"

// parts works through a batch of n messages, each with so many bytes, and returns how many
// times it sent before the end.
func (p *Pace) parts(n, bytes int, waited bool) (sends int) {
	ready := 0
	for range n {
		p.Took()
		if ready++; p.Due(ready, ready*bytes) {
			sends++
			ready = 0
		}
	}
	p.End(waited)
	return sends
}

func TestPartsAreSentEarlyOnlyWhileThePeerWouldIdle(t *testing.T) {
	var p Pace
	if n := p.parts(32, 0, true); n != 0 {
		t.Errorf("the first batch is sent in %d parts before its end", n)
	}
	p.parts(32, 0, true)
	if n := p.parts(32, 0, true); n != 2 {
		t.Errorf("after waits, %d parts of a batch of 32 are sent early, want 2", n)
	}
	for range 10 * calmFor {
		p.parts(32, 0, false)
	}
	if n := p.parts(32, 0, false); n != 0 {
		t.Errorf("while the peer keeps up, %d parts are sent early, want 0", n)
	}
	for range 100 {
		p.parts(4, 0, true)
	}
	if n := p.parts(32, 0, true); n != 0 {
		t.Errorf("after small batches, %d parts are sent early: waits after them say nothing", n)
	}
	if n := p.parts(8, largePart/2, true); n != 4 {
		t.Errorf("8 large messages are sent in %d parts, want 4", n)
	}
}

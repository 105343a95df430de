// SPDX-License-Identifier: Apache-2.0

package socket

// Pace decides when an end that works through a batch sends what it has so far.
//
// Sending once, after the whole batch, needs the fewest system calls. But the peer then has
// nothing to do meanwhile, and afterwards this end waits for the peer: both work by turns.
// So where this end idled after a large batch, part of the next batch is sent early. Where
// more had already arrived, or there was other work, parts grow again.
type Pace struct {
	after int // messages to send at once; 0: not set yet
	calm  int // large batches in a row after which there was more to do
	n     int // messages taken out of this batch
}

const (
	leastPart = 12
	mostPart  = 128
	calmFor   = 16
	// largePart is how many bytes are always worth a system call.
	largePart = 256 << 10
)

// Took counts a message that was taken out of the batch.
func (p *Pace) Took() { p.n++ }

// Due reports whether the messages that are ready should be sent, although the batch is not
// at its end. bytes is the length of their data.
func (p *Pace) Due(ready, bytes int) bool {
	if p.after == 0 {
		p.after = mostPart
	}
	return ready >= p.after || bytes >= largePart
}

// End notes the end of a batch, and whether this end then idled; see [Conn.Idled].
func (p *Pace) End(idled bool) {
	n := p.n
	p.n = 0
	switch {
	case n <= leastPart:
	case idled:
		p.after, p.calm = max(min(p.after, n)/2, leastPart), 0
	default:
		if p.calm++; p.calm == calmFor {
			p.after, p.calm = min(p.after*2, mostPart), 0
		}
	}
}

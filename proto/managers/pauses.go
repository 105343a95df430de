// SPDX-License-Identifier: Apache-2.0

package managers

import "time"

// Pauses says how long an agent waits between two streams to its managers. The zero value has had a
// stream that worked.
//
// When the manager that leads is lost, another one leads within some two seconds, and until then
// nobody can take an agent's report: managers that do not know yet name the lost one. So agents ask
// again at short and equal intervals at first. If nobody can be reached for longer, the intervals
// grow. They are spread at random, since all agents of a cluster lose their stream at the same time.
type Pauses struct {
	failing time.Time // since when no stream has worked; zero: the last one has
	next    time.Duration
}

const (
	pauseFirst  = 200 * time.Millisecond
	pauseMost   = 2 * time.Second
	pauseSpread = 2               // a pause is longer by up to one part in so many
	pauseEqual  = 4 * time.Second // for how long pauses do not grow
)

// After returns how long to wait after a stream that began and ended at these times. random is at
// least 0 and less than 1.
func (p *Pauses) After(began, ended time.Time, random float64) time.Duration {
	if p.failing.IsZero() || ended.Sub(began) > pauseMost { // it has worked
		p.failing, p.next = ended, pauseFirst
	}
	pause := p.next
	if ended.Sub(p.failing) >= pauseEqual {
		p.next = min(2*p.next, pauseMost)
	}
	return pause + time.Duration(random*float64(pause)/pauseSpread)
}

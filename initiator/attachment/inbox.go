// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"sync"
	"time"
)

// Times that the keepers of both data paths go by.
const (
	// LookInterval is how often a keeper looks when nothing wakes it: the kernel
	// tells of much, and nothing of a controller's state.
	LookInterval = 200 * time.Millisecond

	// Patience is how long a keeper waits for a call while the volume serves: all
	// that it does in one turn must end well before the manager's lease does.
	Patience = 250 * time.Millisecond

	RecordTimeout   = 2 * time.Second        // of one request for a record
	RetryInterval   = 500 * time.Millisecond // after one that was refused
	ConnectPatience = 10 * time.Second       // with a leg in sync, before it is recorded stale
)

// Told is what a keeper was last told.
type Told struct {
	Known      bool // the manager has said something
	Wanted     *Wanted
	Problem    string // why what is wanted cannot be acted on; empty if it can
	Generation uint64
}

// Inbox is how others reach a keeper, which is one goroutine: what is wanted, that
// it look soon, and the outcomes of calls that were apart. Its methods may be
// called from any goroutine, but for Drain and End, which are the keeper's.
type Inbox struct {
	wake   chan struct{}
	events chan func()
	ended  chan struct{}

	mu   sync.Mutex
	told Told
}

// NewInbox makes an Inbox in which nothing is.
func NewInbox() *Inbox {
	return &Inbox{wake: make(chan struct{}, 1), events: make(chan func(), 16), ended: make(chan struct{})}
}

// Want tells the keeper what is wanted: nil if the volume is not. With a problem,
// what is wanted cannot be acted on, and what is stays.
func (b *Inbox) Want(w *Wanted, problem string, generation uint64) {
	b.mu.Lock()
	b.told = Told{Known: true, Wanted: w, Problem: problem, Generation: generation}
	b.mu.Unlock()
	b.Poke()
}

// Told is what the keeper was last told by Want.
func (b *Inbox) Told() Told {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.told
}

// Unwanted reports whether the keeper was told that its volume is not wanted.
func (b *Inbox) Unwanted() bool {
	told := b.Told()
	return told.Known && told.Wanted == nil
}

// Poke has the keeper look soon.
func (b *Inbox) Poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Tell has the keeper's goroutine run event, and waits until there is room for it.
// False if the keeper has ended: then event is not run.
func (b *Inbox) Tell(event func()) bool {
	select {
	case b.events <- event:
		return true
	case <-b.ended:
		return false
	}
}

// Woken is readable when somebody wants the keeper to look.
func (b *Inbox) Woken() <-chan struct{} { return b.wake }

// Events are what the keeper is to run.
func (b *Inbox) Events() <-chan func() { return b.events }

// Drain runs the events that have come.
func (b *Inbox) Drain() {
	for len(b.events) > 0 {
		(<-b.events)()
	}
}

// End lets go those who wait in Tell: the keeper has ended. It is called once.
func (b *Inbox) End() { close(b.ended) }

// Ended is closed by End.
func (b *Inbox) Ended() <-chan struct{} { return b.ended }

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"sync"
	"time"

	"weft.dev/weft/initiator/volume"
)

// Times that the keepers of both data paths use.
const (
	// LookInterval is how often a keeper looks when nothing wakes it: the kernel reports many
	// events, but no change of a controller's state.
	LookInterval = 200 * time.Millisecond

	// Patience is how long a keeper waits for a call while the volume serves: one turn must end
	// well before the manager's lease does.
	Patience = 250 * time.Millisecond

	RecordTimeout = 2 * time.Second        // of one request for a record
	RetryInterval = 500 * time.Millisecond // after a refused request
)

// Message is what [Inbox.Want] tells a keeper.
type Message struct {
	Known      bool // the manager has said something
	Wanted     *volume.Wanted
	Problem    string // why the wanted state cannot be acted on; empty if it can
	Generation uint64
}

// Inbox is how others reach a keeper's goroutine: with the wanted state, with a request to
// look soon, and with the outcomes of calls that were left behind. Its methods may be called from any
// goroutine, except Drain and End, which only the keeper calls.
type Inbox struct {
	wake   chan struct{}
	events chan func() (news bool)
	ended  chan struct{}

	mu   sync.Mutex
	last Message
}

// NewInbox makes an empty Inbox.
func NewInbox() *Inbox {
	return &Inbox{wake: make(chan struct{}, 1), events: make(chan func() bool, 16), ended: make(chan struct{})}
}

// Want tells the keeper what is wanted: nil if the volume is not. If there is a problem, the
// wanted state cannot be acted on, and the volume stays as it is.
func (b *Inbox) Want(w *volume.Wanted, problem string, generation uint64) {
	b.mu.Lock()
	b.last = Message{Known: true, Wanted: w, Problem: problem, Generation: generation}
	b.mu.Unlock()
	b.Poke()
}

// Last returns what Want last told the keeper.
func (b *Inbox) Last() Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.last
}

// Unwanted reports whether the keeper was told that its volume is not wanted.
func (b *Inbox) Unwanted() bool {
	last := b.Last()
	return last.Known && last.Wanted == nil
}

// Poke makes the keeper look soon.
func (b *Inbox) Poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Tell runs event on the keeper's goroutine, and waits until there is room for it. Then the keeper looks. It
// returns false, without running event, if the keeper has ended.
func (b *Inbox) Tell(event func()) bool {
	return b.Mention(func() bool { event(); return true })
}

// Mention is Tell for what is often no news, in which case the keeper does not look because of it.
func (b *Inbox) Mention(event func() (news bool)) bool {
	select {
	case b.events <- event:
		return true
	case <-b.ended:
		return false
	}
}

// Woken is readable when somebody wants the keeper to look.
func (b *Inbox) Woken() <-chan struct{} { return b.wake }

// Events are the functions that the keeper has to run; it looks after those that return true.
func (b *Inbox) Events() <-chan func() (news bool) { return b.events }

// Drain runs the events that have arrived.
func (b *Inbox) Drain() {
	for len(b.events) > 0 {
		(<-b.events)()
	}
}

// End releases those who wait in Tell, because the keeper has ended. It is called once.
func (b *Inbox) End() { close(b.ended) }

// Ended is closed by End.
func (b *Inbox) Ended() <-chan struct{} { return b.ended }

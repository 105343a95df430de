// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"slices"
	"sync"

	"weft.dev/weft/proto/block"
)

// budget bounds what all connections hold together. A host may hold half of it, so that none takes
// it all. Whatever the others hold, each host has room for least bytes: all of them go on, though
// slowly.
//
// Who finds no room waits. The hosts take turns, and so do the connections of a host.
type budget struct {
	most, mostOf, least int

	mu      sync.Mutex
	held    int
	of      map[block.NQN]*account
	waiting []*account // those with waiters; the first one is next
}

func newBudget(most, least int) *budget {
	return &budget{most: most, mostOf: max(most/2, least), least: least, of: map[block.NQN]*account{}}
}

// account is a host's share of a budget. It exists while the host has connections or holds
// something.
type account struct {
	b       *budget
	host    block.NQN
	mostOf  int
	conns   int
	held    int
	waiting []*waiter
}

// waiter is told when it has been given n bytes.
type waiter struct {
	n     int
	given func() // called on a goroutine of its own
}

// strangers is the account of those who need not prove who they are, since they see only discovery.
// They have least bytes together.
const strangers block.NQN = ""

// open adds a connection of a host.
func (b *budget) open(host block.NQN) *account {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.of[host]
	if a == nil {
		a = &account{b: b, host: host, mostOf: b.mostOf}
		if host == strangers {
			a.mostOf = b.least
		}
		b.of[host] = a
	}
	a.conns++
	return a
}

// conns is how many connections a host has.
func (b *budget) conns(host block.NQN) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a := b.of[host]; a != nil {
		return a.conns
	}
	return 0
}

// close removes a connection that holds nothing more.
func (a *account) close() {
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	a.conns--
	a.endLocked()
}

func (a *account) endLocked() {
	if a.conns == 0 && a.held == 0 && a.b.of[a.host] == a {
		delete(a.b.of, a.host)
	}
}

func (a *account) fitsLocked(n int) bool {
	own := a.held + n
	return own <= a.b.least || own <= a.mostOf && a.b.held+n <= a.b.most
}

func (a *account) addLocked(n int) {
	a.held += n
	a.b.held += n
}

// take reports whether there is room for n bytes, and nobody of the host waits. They are then held.
func (a *account) take(n int) bool {
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	if len(a.waiting) > 0 || !a.fitsLocked(n) {
		return false
	}
	a.addLocked(n)
	return true
}

// await calls given when n bytes are held for the caller; n is at most least.
func (a *account) await(n int, given func()) *waiter {
	w := &waiter{n, given}
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	if len(a.waiting) == 0 {
		a.b.waiting = append(a.b.waiting, a)
	}
	a.waiting = append(a.waiting, w)
	a.b.serveLocked()
	return w
}

// cancel ends a wait. What w was given meanwhile is given back.
func (a *account) cancel(w *waiter) {
	a.b.mu.Lock()
	at := slices.Index(a.waiting, w)
	if at >= 0 {
		a.waiting = slices.Delete(a.waiting, at, at+1)
		if len(a.waiting) == 0 {
			a.b.waiting = slices.DeleteFunc(a.b.waiting, func(o *account) bool { return o == a })
		}
	}
	a.b.mu.Unlock()
	if at < 0 {
		a.give(w.n)
	}
}

// give ends that n bytes are held.
func (a *account) give(n int) {
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	a.addLocked(-n)
	a.b.serveLocked()
	a.endLocked()
}

// serveLocked gives those that wait what there is room for, one of each host after the other.
func (b *budget) serveLocked() {
	for passed := 0; passed < len(b.waiting); {
		a := b.waiting[0]
		b.waiting = append(b.waiting[1:], a)
		w := a.waiting[0]
		if !a.fitsLocked(w.n) {
			passed++
			continue
		}
		passed = 0
		a.addLocked(w.n)
		if a.waiting = a.waiting[1:]; len(a.waiting) == 0 {
			b.waiting = b.waiting[:len(b.waiting)-1]
		}
		go w.given()
	}
}

// holding is what a connection holds. The first part of that is free, so that small commands do not
// meet at the budget's lock; the rest is charged to an account. Guarded by conn.mu.
type holding struct {
	account *account // nil before the host is known: conn.limit then bounds what is held
	free    int
	held    int
	charged int
}

// lacks is what must be charged before n more bytes are held.
func (h *holding) lacks(n int) int {
	if h.account == nil {
		return 0
	}
	return max(0, h.held+n-h.free-h.charged)
}

// take reports whether n more bytes can be held, and then holds them.
func (h *holding) take(n int) bool {
	lacks := h.lacks(n)
	if lacks > 0 && !h.account.take(lacks) {
		return false
	}
	h.charged += lacks
	h.held += n
	return true
}

// settle gives back what is charged and not held.
func (h *holding) settle() {
	if surplus := h.charged - max(0, h.held-h.free); surplus > 0 {
		h.charged -= surplus
		h.account.give(surplus)
	}
}

// end gives everything back.
func (h *holding) end() {
	if h.account != nil {
		h.account.give(h.charged)
		h.account.close()
	}
	*h = holding{}
}

// Parts of what a connection may hold that are not charged.
const (
	freeOfHost     = 128 << 10
	freeOfStranger = 32 << 10
)

// enroll charges what the connection holds from now on to a host.
func (c *conn) enroll(host block.NQN) {
	free := freeOfHost
	if host == strangers {
		free = freeOfStranger
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked.account, c.asked.free = c.t.data.open(host), free
	c.capsules.account, c.capsules.free = c.t.capsules.open(host), free
}

// given continues the commands that waited for n bytes.
func (c *conn) given(n int) {
	c.mu.Lock()
	c.asking = false
	if c.asked.account == nil { // the connection is over
		c.mu.Unlock()
		return
	}
	c.asked.charged += n
	ready := c.admitLocked()
	c.mu.Unlock()
	for _, r := range ready {
		r.proceed()
	}
}

// errClosing ends a wait of a connection that is closed.
var errClosing = errors.New("the connection is closed")

// holdCapsule holds n bytes for data in a capsule. The reader waits here if there is no room: what is
// held for capsules is in a Device or on its way to a host, so others need no reader to end.
func (c *conn) holdCapsule(r *request, n int) error {
	c.mu.Lock()
	h := &c.capsules
	if h.take(n) {
		r.capsule = n
		c.mu.Unlock()
		return nil
	}
	account, lacks := h.account, h.lacks(n)
	c.mu.Unlock()
	c.rest() // so that others send what is completed meanwhile
	stalled := c.partial.Swap(0) != 0
	given := make(chan struct{})
	w := account.await(lacks, func() { close(given) })
	select {
	case <-given:
	case <-c.shut:
		account.cancel(w)
		return errClosing
	}
	if stalled {
		c.partial.Store(c.now())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reading = true
	h.charged += lacks
	h.held += n
	r.capsule = n
	h.settle()
	return nil
}

// leave is called when a command of the connection has left a Device.
func (c *conn) leave() {
	if c.inside.Add(-1) == 0 && c.over.Load() {
		c.endHoldings()
	}
}

// release gives back what the connection holds when it is over and no command of it is in a Device.
func (c *conn) release() {
	c.over.Store(true)
	if c.inside.Load() == 0 {
		c.endHoldings()
	}
}

func (c *conn) endHoldings() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asking {
		c.asked.account.cancel(c.asks)
		c.asking = false
	}
	c.asked.end()
	c.capsules.end()
}

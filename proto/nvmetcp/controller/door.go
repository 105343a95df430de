// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"sync"
	"time"
)

// door counts connections, so that no peer takes all the room. A flood of
// connections that do not introduce themselves pushes itself out: the oldest of
// the address that has the most of them makes room.
type door struct {
	cfg *Config

	mu        sync.Mutex
	inside    map[*conn]struct{}
	address   map[string]int
	strangers map[string][]*conn // have not connected yet, or to discovery only; oldest first
	n         int                // of strangers
	watching  bool
	closed    bool
	stop      chan struct{} // closed with it
}

func newDoor(cfg *Config) *door {
	return &door{cfg: cfg, inside: map[*conn]struct{}{}, address: map[string]int{}, strangers: map[string][]*conn{}, stop: make(chan struct{})}
}

func (d *door) enter(c *conn) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return ErrClosed
	case len(d.inside) >= d.cfg.MaxConnections:
		return fmt.Errorf("the target has %d connections", len(d.inside))
	case d.address[c.address] >= d.cfg.MaxConnectionsPerAddress:
		return fmt.Errorf("the address has %d connections", d.address[c.address])
	}
	if d.n >= d.cfg.MaxHandshakes {
		d.pushOutLocked()
	}
	d.inside[c] = struct{}{}
	d.address[c.address]++
	d.strangers[c.address] = append(d.strangers[c.address], c)
	d.n++
	if !d.watching {
		d.watching = true
		go d.watch()
	}
	return nil
}

func (d *door) pushOutLocked() {
	var most string
	for a, s := range d.strangers {
		if len(s) > len(d.strangers[most]) {
			most = a
		}
	}
	c := d.strangers[most][0]
	d.knownLocked(c)
	c.close()
}

// known is called when c has connected.
func (d *door) known(c *conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.knownLocked(c)
}

func (d *door) knownLocked(c *conn) {
	list := d.strangers[c.address]
	for i := range list {
		if list[i] == c {
			d.n--
			if list = append(list[:i:i], list[i+1:]...); len(list) == 0 {
				delete(d.strangers, c.address)
			} else {
				d.strangers[c.address] = list
			}
			return
		}
	}
}

func (d *door) leave(c *conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.knownLocked(c)
	delete(d.inside, c)
	if d.address[c.address]--; d.address[c.address] == 0 {
		delete(d.address, c.address)
	}
}

// clear closes all connections that came through p.
func (d *door) clear(p *Port) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.inside {
		if c.port == p {
			c.close()
		}
	}
}

// watch closes connections that have stalled. It is there while there are any.
func (d *door) watch() {
	tick := time.NewTicker(max(d.cfg.StallTimeout/8, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-d.stop:
			return
		}
		if d.sweep(time.Now().Add(-d.cfg.StallTimeout).UnixNano()) {
			return
		}
	}
}

// close ends the watch; nobody enters any more.
func (d *door) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.closed = true
		close(d.stop)
	}
}

// sweep closes who has stalled since before, and reports that nobody is inside.
func (d *door) sweep(before int64) (empty bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.inside {
		if since := c.partial.Load(); since != 0 && since < before {
			c.log.Warn("connection closed: a PDU does not come to its end")
			c.close()
		} else if since := c.stuck.Load(); since != 0 && since < before {
			c.log.Warn("connection closed: the host does not take what is sent")
			c.close()
		}
	}
	if len(d.inside) == 0 {
		d.watching = false
	}
	return !d.watching
}

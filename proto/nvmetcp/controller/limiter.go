// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"sync"
	"time"

	"weft.dev/weft/proto/beat"
)

// connLimiter counts connections, so that no peer can use them all up. When there are too many
// that have not connected to a subsystem yet, a new one displaces the oldest one of the
// address with the most of them. A flood thus displaces mainly itself.
type connLimiter struct {
	cfg *Config

	mu          sync.Mutex
	open        map[*conn]struct{}
	address     map[string]int
	handshaking map[string][]*conn // not connected yet, or only to discovery; oldest first
	handshakes  int                // how many of them
	watching    bool
	closed      bool
	stop        chan struct{} // closed when it closes
}

func newConnLimiter(cfg *Config) *connLimiter {
	return &connLimiter{cfg: cfg, open: map[*conn]struct{}{}, address: map[string]int{}, handshaking: map[string][]*conn{}, stop: make(chan struct{})}
}

func (l *connLimiter) add(c *conn) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return ErrClosed
	case len(l.open) >= l.cfg.MaxConnections:
		return fmt.Errorf("the target has %d connections", len(l.open))
	case l.address[c.address] >= l.cfg.MaxConnectionsPerAddress:
		return fmt.Errorf("the address has %d connections", l.address[c.address])
	}
	if l.handshakes >= l.cfg.MaxHandshakes {
		l.evictLocked()
	}
	l.open[c] = struct{}{}
	l.address[c.address]++
	l.handshaking[c.address] = append(l.handshaking[c.address], c)
	l.handshakes++
	if !l.watching {
		l.watching = true
		go l.watch()
	}
	return nil
}

func (l *connLimiter) evictLocked() {
	var most string
	for a, s := range l.handshaking {
		if len(s) > len(l.handshaking[most]) {
			most = a
		}
	}
	c := l.handshaking[most][0]
	l.connectedLocked(c)
	c.close()
}

// known takes a connected c off the handshaking.
func (l *connLimiter) connected(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.connectedLocked(c)
}

func (l *connLimiter) connectedLocked(c *conn) {
	list := l.handshaking[c.address]
	for i := range list {
		if list[i] == c {
			l.handshakes--
			if list = append(list[:i:i], list[i+1:]...); len(list) == 0 {
				delete(l.handshaking, c.address)
			} else {
				l.handshaking[c.address] = list
			}
			return
		}
	}
}

func (l *connLimiter) remove(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.connectedLocked(c)
	delete(l.open, c)
	if l.address[c.address]--; l.address[c.address] == 0 {
		delete(l.address, c.address)
	}
}

// closePort closes all connections that came through p, or dismisses them: those of controllers that were dismissed,
// and those whose Connect may be under way; see association.kill.
func (l *connLimiter) closePort(p *Port) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		switch {
		case c.port != p || c.leaves.Load():
		case c.greeted.Load() && c.bound.Load() == nil:
			c.dismiss()
		default:
			c.close()
		}
	}
}

// watch closes stalled connections. It runs while there are any connections.
func (l *connLimiter) watch() {
	tick := beat.NewTicker(max(l.cfg.StallTimeout/8, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-l.stop:
			return
		}
		if l.sweep(time.Now().Add(-l.cfg.StallTimeout).UnixNano()) {
			return
		}
	}
}

// close ends the watch and refuses new connections.
func (l *connLimiter) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.closed = true
		close(l.stop)
	}
}

// sweep closes connections that have stalled since before. It reports whether none is left.
func (l *connLimiter) sweep(before int64) (empty bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		if since := c.partial.Load(); since != 0 && since < before {
			c.log.Warn("connection closed: an incomplete PDU stalled")
			c.close()
		} else if since := c.stuck.Load(); since != 0 && since < before {
			c.log.Warn("connection closed: the host stopped reading")
			c.close()
		} else if since := c.owes.Load(); since != 0 && since < before {
			c.log.Warn("connection closed: the host does not send the data of its commands")
			c.close()
		}
	}
	if len(l.open) == 0 {
		l.watching = false
	}
	return !l.watching
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// network is a network in memory: TCP as its users see it, between named hosts, with faults.
// It uses package time, so in a synctest bubble it runs as fast as the processor allows.
//
// Data that a cut link holds back is delivered when the link heals, as TCP retransmits it,
// however late: a write may arrive long after everybody has given it up.
type network struct {
	mu        sync.Mutex
	listeners map[string]*listener // by address
	links     map[pair]link
	off       map[string]bool // hosts without power
	conns     map[*conn]bool
	made      map[string]int // connections that were made, by address
}

// pair names two hosts in one direction. A host may be reached on several rails, such as t1-a and
// t1-b. What holds between two hosts holds on each of their rails; what holds on one rail does not
// hold on the others.
type pair struct{ from, to string }

// hosts is the pair of the hosts alone.
func (p pair) hosts() pair { return pair{hostOf(p.from), hostOf(p.to)} }

// hostOf is the host that has a rail.
func hostOf(rail string) string {
	host, _, _ := strings.Cut(rail, "-")
	return host
}

func (p pair) back() pair { return pair{p.to, p.from} }

// link is one direction between two hosts.
type link struct {
	cut   bool
	since time.Time // when it was cut
	delay time.Duration
}

// window is how much one direction of a connection buffers before its writer waits.
const window = 256 << 10

// connectTimeout is how long a connect to an unresponsive host takes.
const connectTimeout = 10 * time.Second

// userTimeout is how long a connection to the manager survives without an answer to its
// keepalive probes; TCP_USER_TIMEOUT has this value there.
const userTimeout = 4 * time.Second

func newNetwork() *network {
	return &network{listeners: map[string]*listener{}, links: map[pair]link{}, off: map[string]bool{}, conns: map[*conn]bool{}, made: map[string]int{}}
}

// cut stops or restores the traffic from one host to another.
func (n *network) cut(from, to string, cut bool) {
	n.change(func() {
		l := n.links[pair{from, to}]
		if l.cut != cut {
			l.cut, l.since = cut, time.Now()
		}
		n.links[pair{from, to}] = l
	})
}

// part stops or restores the traffic between two hosts, in both directions.
func (n *network) part(a, b string, cut bool) {
	n.cut(a, b, cut)
	n.cut(b, a, cut)
}

// delay delays everything that goes from one host to another by d.
func (n *network) delay(from, to string, d time.Duration) {
	n.change(func() {
		l := n.links[pair{from, to}]
		l.delay = d
		n.links[pair{from, to}] = l
	})
}

// heal ends all cuts and delays.
func (n *network) heal() {
	n.change(func() { clear(n.links) })
}

// reset breaks all connections between two hosts: both ends learn of it.
func (n *network) reset(a, b string) {
	n.change(func() {
		for c := range n.conns {
			if way := c.out.pair.hosts(); way == (pair{a, b}) || way == (pair{b, a}) {
				n.drop(c, func() { c.out.breakOff() })
			}
		}
	})
}

// change changes links, and wakes everybody who waits.
func (n *network) change(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
	for c := range n.conns {
		c.in.wake()
		c.out.wake()
	}
}

// state is the present state of a link.
func (n *network) state(p pair) link {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.stateLocked(p)
}

func (n *network) stateLocked(p pair) link {
	rail, hosts := n.links[p], n.links[p.hosts()]
	if p == p.hosts() || hosts == (link{}) {
		return rail
	}
	all := link{cut: rail.cut || hosts.cut, since: rail.since, delay: rail.delay + hosts.delay}
	if hosts.cut && (!rail.cut || hosts.since.Before(rail.since)) {
		all.since = hosts.since
	}
	return all
}

// machine is one run of a process on a host, as the network sees it.
type machine struct {
	network *network
	host    string
	dead    bool          // under network.mu
	frozen  chan struct{} // under network.mu; closed when a frozen run continues; nil: it is not frozen
	heir    *machine      // under network.mu; the run that gets its sockets; nil: none does
}

// freeze stops a run while its clock continues and its host still receives, as SIGSTOP, a
// cgroup's freezer or a lack of memory do.
func (m *machine) freeze() {
	m.network.change(func() {
		if m.frozen == nil && !m.dead {
			m.frozen = make(chan struct{})
		}
	})
}

// thaw lets a frozen run continue.
func (m *machine) thaw() { m.network.change(m.thawLocked) }

func (m *machine) thawLocked() {
	if m.frozen != nil {
		close(m.frozen)
		m.frozen = nil
	}
}

// awake returns when the run is not frozen.
func (m *machine) awake() {
	for {
		m.network.mu.Lock()
		frozen := m.frozen
		m.network.mu.Unlock()
		if frozen == nil {
			return
		}
		<-frozen
	}
}

// boot starts a new run on a host. Connections of an earlier run that lost power are reset,
// since the host no longer knows them.
func (n *network) boot(host string) *machine {
	n.change(func() {
		delete(n.off, host)
		for c := range n.conns {
			if c.at.host == host && c.at.dead {
				n.drop(c, func() { c.out.breakOff() })
			}
		}
	})
	return &machine{network: n, host: host}
}

// beside starts another run on the same host, next to a living one.
func (m *machine) beside() *machine { return &machine{network: m.network, host: m.host} }

// kill ends a run like the death of its process: what it has sent still goes out, and then the
// other ends learn of it.
func (m *machine) kill() {
	n := m.network
	n.change(func() {
		m.dieLocked()
		for c := range n.conns {
			if c.at == m {
				n.drop(c, func() { c.out.finish() })
			}
		}
	})
}

// powerOff ends a run like a loss of power: what it has sent is lost, and nobody learns of it
// until the host is back.
func (m *machine) powerOff() {
	n := m.network
	n.change(func() {
		m.dieLocked()
		n.off[m.host] = true
		for c := range n.conns {
			if c.at == m {
				c.in.end(syscall.ECONNRESET)
				c.out.freeze()
			}
		}
	})
}

func (m *machine) dieLocked() {
	m.dead = true
	m.thawLocked()
	for _, l := range m.network.listeners {
		if l.at == m {
			l.closeLocked()
		}
	}
}

// drop forgets a connection's end; its reader gets an error.
func (n *network) drop(c *conn, out func()) {
	delete(n.conns, c)
	c.in.end(syscall.ECONNRESET)
	out()
}

// listen accepts connections to an address.
func (m *machine) listen(address string) (net.Listener, error) {
	n := m.network
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case m.dead:
		return nil, syscall.ENETDOWN
	case n.listeners[address] != nil:
		return nil, fmt.Errorf("listen on %s: %w", address, syscall.EADDRINUSE)
	}
	l := &listener{at: m, address: address, queue: make(chan *conn, 128), done: make(chan struct{})}
	n.listeners[address] = l
	return l, nil
}

// dial connects to an address on a host.
func (m *machine) dial(ctx context.Context, host, address string) (*conn, error) {
	n := m.network
	fail := func(err error) (*conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: addr(address), Err: err}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, connectTimeout, syscall.ETIMEDOUT)
	defer cancel()
	for {
		n.mu.Lock()
		way := pair{m.host, host}
		switch {
		case m.dead:
			n.mu.Unlock()
			return fail(syscall.ENETDOWN)
		case n.stateLocked(way).cut || n.stateLocked(way.back()).cut || n.off[hostOf(host)]:
		case n.listeners[address] == nil:
			n.mu.Unlock()
			return fail(syscall.ECONNREFUSED)
		default:
			defer n.mu.Unlock()
			return m.connectLocked(n.listeners[address], way), nil
		}
		n.mu.Unlock()
		select {
		case <-ctx.Done():
			return fail(context.Cause(ctx))
		case <-time.After(200 * time.Millisecond): // the SYN is sent again
		}
	}
}

func (m *machine) connectLocked(l *listener, way pair) *conn {
	n := m.network
	there, back := newStream(n, way), newStream(n, way.back())
	near := &conn{at: m, remote: l.address, in: back, out: there}
	far := &conn{at: l.at, remote: m.host, in: there, out: back}
	n.conns[near], n.conns[far] = true, true
	n.made[l.address]++
	select {
	case l.queue <- far:
	default: // no room to accept it
		n.drop(far, func() { far.out.breakOff() })
	}
	return near
}

type addr string

func (addr) Network() string  { return "tcp" }
func (a addr) String() string { return string(a) }

type listener struct {
	at      *machine
	address string
	queue   chan *conn
	left    bool // under network.mu: another one has the queue
	once    sync.Once
	done    chan struct{}
}

// Duplicate returns a listener on the same socket, for the next run on the host.
func (l *listener) Duplicate() (net.Listener, error) {
	n := l.at.network
	n.mu.Lock()
	defer n.mu.Unlock()
	if l.at.dead || l.at.heir == nil {
		return nil, syscall.ENETDOWN
	}
	l.left = true
	d := &listener{at: l.at.heir, address: l.address, queue: l.queue, done: make(chan struct{})}
	n.listeners[l.address] = d
	return d, nil
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.done: // the queue may be another one's
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.at.network.mu.Lock()
	defer l.at.network.mu.Unlock()
	l.closeLocked()
	return nil
}

func (l *listener) closeLocked() {
	l.once.Do(func() {
		n := l.at.network
		if n.listeners[l.address] == l {
			delete(n.listeners, l.address)
		}
		close(l.done)
		for !l.left && len(l.queue) > 0 {
			c := <-l.queue
			n.drop(c, func() { c.out.breakOff() })
		}
	})
}

func (l *listener) Addr() net.Addr { return addr(l.address) }

// conn is one end of a connection.
type conn struct {
	at        *machine
	remote    string
	in, out   *stream
	keepalive bool // reset it after userTimeout without a working round trip

	stalled chan struct{} // under network.mu; closed when its reader continues; nil: it is not stalled
	left    bool          // under network.mu: another one has the streams
}

// Duplicate returns the same end, for the next run on the host.
func (c *conn) Duplicate() (net.Conn, error) {
	n := c.at.network
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.conns[c] || c.at.dead || c.at.heir == nil {
		return nil, syscall.ENETDOWN
	}
	c.left = true
	delete(n.conns, c)
	d := &conn{at: c.at.heir, remote: c.remote, in: c.in, out: c.out, keepalive: c.keepalive}
	n.conns[d] = true
	return d, nil
}

func (c *conn) Read(p []byte) (int, error) {
	defer c.at.awake()
	n, err := c.in.read(p, c.keepalive)
	if n > 0 {
		c.stay()
	}
	return n, err
}

// stay returns when the reader may continue with what it has received.
func (c *conn) stay() {
	c.at.network.mu.Lock()
	stalled := c.stalled
	c.at.network.mu.Unlock()
	if stalled != nil {
		<-stalled
	}
}

// stall stops a host's readers of the present connections to another host, each at its next
// data, until goOn is called: like a thread that waits for a page of memory. Nothing else on
// the host waits for them.
func (n *network) stall(host, other string) (goOn func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	stalled := make(chan struct{})
	for c := range n.conns {
		if c.out.pair == (pair{host, other}) {
			c.stalled = stalled
		}
	}
	return func() { close(stalled) }
}

// Write also closes the way back if the other end has reset the connection.
func (c *conn) Write(p []byte) (int, error) {
	c.at.awake()
	n, err := c.out.write(p)
	if err == syscall.EPIPE {
		c.in.end(syscall.ECONNRESET)
	}
	return n, err
}

// Close ends both directions: data written before is still delivered.
func (c *conn) Close() error {
	n := c.at.network
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.left {
		return nil
	}
	if n.conns[c] && !c.at.dead {
		n.drop(c, func() { c.out.finish() })
	}
	c.in.end(net.ErrClosed)
	return nil
}

func (c *conn) LocalAddr() net.Addr  { return addr(c.at.host) }
func (c *conn) RemoteAddr() net.Addr { return addr(c.remote) }

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.in.deadline(&c.in.readBy, t)
	return nil
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.out.deadline(&c.out.writeBy, t)
	return nil
}

// stream is one direction of a connection.
type stream struct {
	network *network
	pair    pair

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each change
	segments []segment
	size     int
	finished bool      // the writer has closed: its reader gets the rest, then EOF
	broken   bool      // the writer's host does not know the connection: its reader gets an error
	frozen   time.Time // since when the writer's host has been without power
	err      error     // set when the reader's end is closed
	readBy   time.Time
	writeBy  time.Time
}

type segment struct {
	data []byte
	at   time.Time // when it arrives
}

func newStream(n *network, p pair) *stream {
	return &stream{network: n, pair: p, changed: make(chan struct{})}
}

// set changes a stream, and wakes those who wait for it.
func (s *stream) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.wakeLocked()
}

func (s *stream) wake() { s.set(func() {}) }

func (s *stream) wakeLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *stream) deadline(which *time.Time, t time.Time) { s.set(func() { *which = t }) }
func (s *stream) finish()                                { s.set(func() { s.finished = true }) }

// breakOff discards data that was written but not read.
func (s *stream) breakOff() { s.set(func() { s.broken, s.segments = true, nil }) }

func (s *stream) freeze() { s.set(func() { s.frozen, s.segments = time.Now(), nil }) }

func (s *stream) end(err error) {
	s.set(func() {
		if s.err == nil {
			s.err = err
		}
	})
}

// silence is since when a round trip to the other end has been impossible; zero if it is
// possible.
func (s *stream) silence(there, back link) time.Time {
	var all []time.Time
	if there.cut {
		all = append(all, there.since)
	}
	if back.cut {
		all = append(all, back.since)
	}
	if !s.frozen.IsZero() {
		all = append(all, s.frozen)
	}
	if len(all) == 0 {
		return time.Time{}
	}
	return slices.MinFunc(all, time.Time.Compare)
}

func (s *stream) read(p []byte, keepalive bool) (int, error) {
	for {
		there, back := s.network.state(s.pair), s.network.state(s.pair.back())
		s.mu.Lock()
		now := time.Now()
		by := s.readBy
		if since := s.silence(there, back); keepalive && !since.IsZero() {
			if now.Sub(since) >= userTimeout {
				s.mu.Unlock()
				return 0, syscall.ETIMEDOUT
			}
			by = earlier(by, since.Add(userTimeout))
		}
		switch {
		case s.err != nil:
			defer s.mu.Unlock()
			return 0, s.err
		case !s.readBy.IsZero() && !now.Before(s.readBy):
			s.mu.Unlock()
			return 0, os.ErrDeadlineExceeded
		case there.cut:
		case len(s.segments) > 0 && !s.segments[0].at.After(now):
			defer s.mu.Unlock()
			return s.take(p, now), nil
		case s.broken:
			s.mu.Unlock()
			return 0, syscall.ECONNRESET
		case len(s.segments) > 0:
			by = earlier(by, s.segments[0].at)
		case s.finished:
			s.mu.Unlock()
			return 0, io.EOF
		}
		s.wait(by)
	}
}

// earlier returns the earlier of two times; zero means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// take copies what has arrived; s is locked.
func (s *stream) take(p []byte, now time.Time) (n int) {
	for n < len(p) && len(s.segments) > 0 && !s.segments[0].at.After(now) {
		k := copy(p[n:], s.segments[0].data)
		n += k
		s.size -= k
		if s.segments[0].data = s.segments[0].data[k:]; len(s.segments[0].data) == 0 {
			s.segments = s.segments[1:]
		}
	}
	s.wakeLocked()
	return n
}

// wait unlocks s, and waits for a change, or until by if that is not zero.
func (s *stream) wait(by time.Time) {
	changed := s.changed
	s.mu.Unlock()
	if by.IsZero() {
		<-changed
		return
	}
	timer := time.NewTimer(time.Until(by))
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	}
}

func (s *stream) write(p []byte) (n int, err error) {
	for {
		there, back := s.network.state(s.pair), s.network.state(s.pair.back())
		s.mu.Lock()
		switch {
		case s.finished || s.broken || !s.frozen.IsZero():
			s.mu.Unlock()
			return n, net.ErrClosed
		case s.err != nil && !there.cut && !back.cut: // the reader's end is closed, and replies so
			s.mu.Unlock()
			return n, syscall.EPIPE
		case !s.writeBy.IsZero() && !time.Now().Before(s.writeBy):
			s.mu.Unlock()
			return n, os.ErrDeadlineExceeded
		case s.size < window:
			k := min(len(p)-n, window-s.size)
			s.segments = append(s.segments, segment{data: slices.Clone(p[n : n+k]), at: time.Now().Add(there.delay)})
			s.size += k
			n += k
			s.wakeLocked()
			if n == len(p) {
				s.mu.Unlock()
				return n, nil
			}
			s.mu.Unlock()
			continue
		}
		s.wait(s.writeBy)
	}
}

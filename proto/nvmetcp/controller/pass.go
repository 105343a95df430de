// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// A controller can go from one process to the next one with its connections, and its host notices only
// that answers take longer for a moment:
//
//	Pass      reads no more commands, and answers those that it has read
//	          ── Passed ──▶
//	TakeOver  makes the controller again, with the same id, and reads on
//
// What a host has sent and nobody has read stays in the socket. What has been read and not begun goes along.

// Passed is a controller at rest, with its connections. Whoever has it closes them, or gives it to TakeOver.
type Passed struct {
	Subsystem block.NQN
	Port      uint16 // id of the port
	ID        uint16 // of the controller
	Host      block.Host
	Since     time.Time              // when the host connected
	Spaces    map[uint32]PassedSpace // by NSID
	Config    uint32                 // CC
	KeepAlive time.Duration          // KATO
	Settings  map[uint8]uint32       // features without an effect here, by FID
	Behavior  []byte                 // of the feature Host Behavior Support
	Events    uint32                 // of the feature Asynchronous Event Configuration
	Masked    []uint8                // kinds of events that the host has been told of
	Waiting   []uint8                // kinds of events that it is to be told of
	Changed   []uint32               // NSIDs that the log of changed namespaces has
	Requests  []uint16               // command ids of its Asynchronous Event Requests
	Queues    []PassedQueue          // the admin queue first
	MDTS      block.Size             // largest transfer
	InCapsule block.Size             // largest data in a capsule

	WriteThrough bool // the host has switched the volatile write cache off
}

// PassedSpace is a namespace as a host knows it.
type PassedSpace struct {
	UUID      block.UUID
	Blocks    uint64
	BlockSize block.Size
	ReadOnly  bool
}

func (n *namespace) told() PassedSpace {
	s := n.shape.Load()
	return PassedSpace{n.cfg.UUID, s.blocks, s.BlockSize, n.cfg.ReadOnly}
}

// PassedQueue is a queue with its connection.
type PassedQueue struct {
	Conn         net.Conn
	ID           uint16
	Size         uint32
	Head         uint32 // of the submission queue
	NoFlow       bool   // its head is not reported
	HeaderDigest bool
	DataDigest   bool
	Align        uint8  // HPDA
	Read         []byte // what has been read and not begun: PDUs, the last one perhaps in part
}

// Close closes the connections.
func (p Passed) Close() error {
	var errs []error
	for _, q := range p.Queues {
		errs = append(errs, q.Conn.Close())
	}
	return errors.Join(errs...)
}

// errPassing ends what this process does with a connection that the next one takes over.
var errPassing = errors.New("the next process takes it over")

// Pass brings all controllers to rest that can go to another process, and returns them. The others are
// left as they are: those for discovery, those that are being set up, those of subsystems with
// reservations, which end with this process, and those whose commands are not answered when ctx ends,
// which are killed. No host must be able to connect meanwhile.
func (t *Target) Pass(ctx context.Context) []Passed {
	t.mu.Lock()
	var going []*association
	for _, s := range t.subsystems {
		if s.closed || s.reserved() {
			continue
		}
		for _, a := range s.associations {
			if a.begin() {
				going = append(going, a)
			}
		}
	}
	t.mu.Unlock()
	all := make([]*Passed, len(going))
	var wait sync.WaitGroup
	for i, a := range going {
		wait.Go(func() { all[i] = a.pass(ctx) })
	}
	wait.Wait()
	var passed []Passed
	for _, p := range all {
		if p != nil {
			passed = append(passed, *p)
		}
	}
	return passed
}

// reserved reports whether a host has registered for a reservation.
func (s *Subsystem) reserved() bool {
	return slices.ContainsFunc(s.namespaces(), func(n *namespace) bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return !n.reserved.Idle()
	})
}

// begin tells the readers of a's connections to leave them, if a can go to another process.
func (a *association) begin() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.mayGoLocked() {
		return false
	}
	a.passing = true
	for _, c := range a.queues {
		c.passing.Store(true)
		c.sock.SetReadDeadline(time.Unix(1, 0)) // wakes the reader
	}
	return true
}

// mayGoLocked reports whether a can go to another process, as far as its own state says.
func (a *association) mayGoLocked() bool {
	ev := &a.events
	return !a.dead.Load() && a.enabled.Load() && a.queues[0] != nil &&
		!ev.tooMany && len(ev.notices) == 0 && len(a.features.reservationMask) == 0
}

// pass returns a when its readers have left it, and ends it here. It returns nil, and kills it, if they
// have not when ctx ends.
func (a *association) pass(ctx context.Context) *Passed {
	a.mu.Lock()
	conns := slices.Collect(maps.Values(a.queues))
	a.mu.Unlock()
	for _, c := range conns {
		select {
		case <-c.done:
		case <-ctx.Done():
			a.kill(fmt.Errorf("its commands are not answered when the next process takes over: %w", context.Cause(ctx)))
			return nil
		}
	}
	p := a.estate()
	why := errPassing
	if p == nil {
		why = errors.New("a connection ended when the next process took over")
	}
	a.kill(why)
	return p
}

// estate takes the connections off a, whose readers have ended; nil if one has broken.
func (a *association) estate() *Passed {
	s := a.sub
	p := &Passed{
		Subsystem: s.cfg.NQN, Port: a.port.cfg.ID, ID: a.id, Host: a.host, Since: a.since, Spaces: map[uint32]PassedSpace{},
		Settings: map[uint8]uint32{}, WriteThrough: a.writeThrough.Load(), MDTS: s.t.cfg.MDTS, InCapsule: s.t.cfg.InCapsule,
	}
	for _, n := range s.namespaces() {
		p.Spaces[n.cfg.NSID] = n.told()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.mayGoLocked() || s.reserved() { // commands that were under way may have changed it
		return nil
	}
	f, ev := &a.features, &a.events
	p.Config, p.KeepAlive, p.Behavior, p.Events = a.cc, a.kato, bytes.Clone(f.behavior[:]), f.events
	for id, v := range f.plain {
		p.Settings[uint8(id)] = v
	}
	for e := range eventKinds {
		if ev.masked[e] {
			p.Masked = append(p.Masked, uint8(e))
		}
	}
	for _, e := range ev.queued {
		p.Waiting = append(p.Waiting, uint8(e))
	}
	p.Changed = slices.Clone(ev.changed)
	for _, r := range ev.requests {
		p.Requests = append(p.Requests, r.cmd.CID())
	}
	for _, id := range slices.Sorted(maps.Keys(a.queues)) {
		q, ok := a.queues[id].part()
		if !ok {
			p.Close() //nolint:errcheck // the host sees the end
			return nil
		}
		p.Queues = append(p.Queues, q)
	}
	clear(a.queues)
	return p
}

// part takes the socket off c, whose reader has ended. ok is false if it was not at rest.
func (c *conn) part() (q PassedQueue, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing || !c.rested {
		return q, false
	}
	c.passed = true
	c.sock.Leave()
	c.sock.SetReadDeadline(time.Time{})
	b, d := c.bound.Load(), c.digests
	var late bytes.Buffer
	w := nvmetcp.NewWriter(&late, nvmetcp.WriterConfig{HeaderDigest: d.HeaderDigest, DataDigest: d.DataDigest})
	for i := range c.deferred {
		w.Command(&c.deferred[i], nil)
	}
	if err := w.Flush(); err != nil {
		panic(err) // a bytes.Buffer takes everything
	}
	return PassedQueue{
		Conn: c.sock.Conn, ID: b.id, Size: b.size, Head: b.sqHead, NoFlow: b.noFlow,
		HeaderDigest: d.HeaderDigest, DataDigest: d.DataDigest, Align: d.HPDA, Read: append(late.Bytes(), c.r.Rest()...),
	}, true
}

// rests waits until every command that has been read is answered, but for requests for events, and
// reports whether c is at rest: the reader then leaves it. It does not while the host owes data, nor
// while the host proves who it is.
func (c *conn) rests() bool {
	q := c.bound.Load()
	if q == nil || !q.proven || q.proof.open || q.proof.reply != nil || q.ctrl.sub.discovery {
		return false
	}
	c.rest()
	events := 0
	if q.id == 0 { // their number stays: only this goroutine takes requests, and passing ends none
		q.ctrl.mu.Lock()
		events = len(q.ctrl.events.requests)
		q.ctrl.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closing || c.dead.Load():
			return false
		case len(c.requests)-len(c.free) == events && len(c.out) == 0 && !c.sending:
			c.rested = true
			return true
		case c.taking > 0:
			return false
		}
		c.quiet.Wait()
	}
}

// readOn is what a read that has ended early returns, for the next process. It ends between two PDUs if
// c is at rest, and otherwise goes on.
func (c *conn) readOn(p, q []byte, err error) (int, error) {
	for errors.Is(err, os.ErrDeadlineExceeded) {
		if c.r.Between() && c.rests() {
			return 0, errPassing
		}
		var n int
		c.sock.SetReadDeadline(time.Time{})
		if n, err = c.sock.ReadBoth(p, q); err == nil {
			return n, nil
		}
	}
	return 0, err
}

// postpone leaves a command to the next process: its data would have to be asked for, and the host could
// go on for ever with such commands.
func (c *conn) postpone(r *request) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deferred = append(c.deferred, r.cmd)
	c.freeLocked(r)
	if len(c.deferred) > c.limit {
		return nvmetcp.Fatal(nvmetcp.FESSequence, 0, nil, fmt.Sprintf("more than %d commands under way", c.limit/2))
	}
	return nil
}

// TakeOver makes a controller that another process had, and reads on where that stopped. Its host may
// connect through p, and its namespaces are there. After an error the connections are closed.
func (p *Port) TakeOver(x Passed) error {
	a, conns, err := p.again(x)
	if err != nil {
		return errors.Join(fmt.Errorf("take over controller %d of %s for %s: %w", x.ID, x.Subsystem, x.Host.NQN, err), x.Close())
	}
	a.setKATO(x.KeepAlive)
	for _, c := range conns {
		p.start(c)
	}
	p.t.log.Info("controller goes on", "subsystem", x.Subsystem, "cntlid", x.ID, "host", x.Host.NQN, "queues", len(conns)-1)
	return nil
}

// again makes an association that another process had, and its connections. The caller starts them; the
// port waits for them.
func (p *Port) again(x Passed) (a *association, conns []*conn, retErr error) {
	t := p.t
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.subsystems[x.Subsystem]
	if err := p.fitsLocked(s, x); err != nil {
		return nil, nil, err
	}
	a = &association{
		sub: s, port: p, id: x.ID, host: x.Host, since: x.Since, features: newFeatures(),
		gone: make(chan struct{}), killed: make(chan struct{}), queues: map[uint16]*conn{},
	}
	a.restore(x)
	defer func() {
		if retErr != nil {
			for _, c := range conns {
				t.limiter.remove(c)
			}
		}
	}()
	for _, q := range x.Queues {
		if q.Conn.RemoteAddr() == nil { // net.FileConn finds no peer after a reset
			return nil, conns, errors.New("its host has reset a connection")
		}
		c := newConn(t, p, q.Conn)
		if err := t.limiter.add(c); err != nil {
			return nil, conns, err
		}
		conns = append(conns, c)
		a.address, a.queues[q.ID] = c.address, c
	}
	for i, c := range conns { // from here on nothing fails
		c.resume(a, x.Queues[i])
	}
	for _, cid := range x.Requests {
		if r := a.queues[0].take(); r != nil {
			r.cmd.SetOpcode(nvmetcp.AdminAsyncEvent)
			r.cmd.SetCID(cid)
			a.events.requests = append(a.events.requests, r)
		}
	}
	s.associations[a.id] = a
	t.perHost[a.host.NQN]++
	for _, n := range s.namespaces() {
		if was, known := x.Spaces[n.cfg.NSID]; !known || was.Blocks != n.shape.Load().blocks {
			a.namespaceChanged(n.cfg.NSID)
		}
	}
	a.mu.Lock()
	a.tellLocked() // what it was not told while it came to rest
	a.mu.Unlock()
	p.accepting.Add(len(conns))
	return a, conns, nil
}

// fitsLocked returns why a controller of another process cannot go on here, in the subsystem s.
func (p *Port) fitsLocked(s *Subsystem, x Passed) error {
	switch {
	case s == nil || !p.leadsLocked(s):
		return errors.New("the port does not lead to the subsystem")
	case !s.admitsLocked(x.Host.NQN):
		return errors.New("the host may not connect")
	case x.ID < s.cfg.CntlidMin || x.ID > s.cfg.CntlidMax || s.associations[x.ID] != nil:
		return errors.New("the controller's id is not free")
	case p.t.perHost[x.Host.NQN] >= p.t.cfg.MaxControllersPerHost:
		return fmt.Errorf("the host has %d controllers", p.t.perHost[x.Host.NQN])
	case p.hasOtherLocked(s, x.Host.NQN):
		return errors.New("the host has connected again")
	}
	for nsid, was := range x.Spaces {
		n := s.namespace(nsid)
		if n == nil || n.cfg.UUID != was.UUID {
			return fmt.Errorf("namespace %d is not there", nsid)
		}
		if is := n.told(); is.BlockSize != was.BlockSize || is.ReadOnly != was.ReadOnly {
			return fmt.Errorf("namespace %d has changed", nsid)
		}
	}
	return p.t.cfg.admitsQueues(x)
}

// hasOtherLocked reports whether a host has so many other controllers that another one would replace them.
func (p *Port) hasOtherLocked(s *Subsystem, host block.NQN) bool {
	others := 0
	for _, o := range s.associations {
		if o.host.NQN != host {
			continue
		}
		if others++; s.cfg.PerHost > 0 && (o.port == p || others >= s.cfg.PerHost) {
			return true
		}
	}
	return false
}

// admitsQueues returns why the queues of a controller of another process cannot go on here: its host knows
// what it may send.
func (c *Config) admitsQueues(x Passed) error {
	queues := x.Queues
	if x.MDTS > c.MDTS || x.InCapsule > c.InCapsule {
		return fmt.Errorf("its host may send %v, and %v in a capsule", x.MDTS, x.InCapsule)
	}
	for i, q := range queues {
		if q.Size < 2 || int(q.Size) > c.QueueDepth || int(q.ID) > c.MaxIOQueues || (i == 0) != (q.ID == 0) || i > 0 && q.ID <= queues[i-1].ID {
			return fmt.Errorf("queue %d of %d entries is not supported", q.ID, q.Size)
		}
	}
	if len(queues) == 0 {
		return errors.New("it has no admin queue")
	}
	return nil
}

// restore sets what the host has set.
func (a *association) restore(x Passed) {
	a.cc, a.csts = x.Config, nvmetcp.ControllerStatus{Ready: true}
	a.enabled.Store(true)
	a.writeThrough.Store(x.WriteThrough)
	f, ev := &a.features, &a.events
	for id := range f.plain {
		f.plain[id] = x.Settings[uint8(id)]
	}
	copy(f.behavior[:], x.Behavior)
	f.events, ev.changed = x.Events, x.Changed
	for _, e := range x.Masked {
		if event(e) < eventKinds {
			ev.masked[e] = true
		}
	}
	for _, e := range x.Waiting {
		if event(e) < eventKinds {
			ev.queued = append(ev.queued, event(e))
		}
	}
}

// resume makes c the queue that another process had.
func (c *conn) resume(a *association, q PassedQueue) {
	c.greeted.Store(true)
	c.digests = nvmetcp.ICReq{HeaderDigest: q.HeaderDigest, DataDigest: q.DataDigest, HPDA: q.Align}
	c.r.Configure(c.readerConfig(adminCapsule))
	c.w.Configure(nvmetcp.WriterConfig{HeaderDigest: q.HeaderDigest, DataDigest: q.DataDigest, Align: q.Align})
	b := &queue{ctrl: a, id: q.ID, size: q.Size, noFlow: q.NoFlow, sqHead: q.Head % q.Size, proven: true}
	b.proof.keys = a.sub.hosts[a.host.NQN]
	c.bound.Store(b)
	c.introduced()
	c.r.Preload(q.Read)
}

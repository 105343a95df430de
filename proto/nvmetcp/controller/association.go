// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// association is a controller: a host gets one by connecting an admin queue.
//
//	            CC.EN                 CC.SHN
//	disabled ──────────▶ enabled ──────────────▶ shut down
//	    any of them ── kill ──▶ dead ── commands left the Devices ──▶ gone
type association struct {
	sub     *Subsystem
	port    *Port
	id      uint16
	host    block.Host
	address string
	since   time.Time
	enabled atomic.Bool // CC.EN and CSTS.RDY
	// writeThrough is set when the host has switched the volatile write cache off: from
	// then on each write is durable before it is answered.
	writeThrough atomic.Bool
	alive        atomic.Bool // something has arrived since the keep-alive timer's last check
	dead         atomic.Bool
	gone         chan struct{} // closed when its commands have left the Devices
	killed       chan struct{} // closed when it is dead

	mu       sync.Mutex
	why      error
	queues   map[uint16]*conn
	cc       uint32
	csts     nvmetcp.ControllerStatus
	kato     time.Duration
	timer    *beat.Ticker
	quiet    time.Duration // since the last arrival
	passing  bool          // to another process: nothing changes any more, see Target.Pass
	events   events
	features features
}

// errReplaced is the reason for a kill by PerHost.
var errReplaced = errors.New("the host has connected again")

// errSilent ends an association whose host sends nothing.
var errSilent = errors.New("keep-alive timer expired")

// newAssociation makes an association for a host that connects to s through p. It kills and
// returns the associations that this one replaces, except if keys demand that the host
// authenticate first: until then anybody can claim its name.
func (p *Port) newAssociation(s *Subsystem, host block.Host, c *conn) (a *association, older []*association, keys Host, err error) {
	t := p.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if !p.leadsLocked(s) || !s.admitsLocked(host.NQN) { // may have changed since find
		return nil, nil, keys, ErrClosed
	}
	if t.perHost[host.NQN] >= t.cfg.MaxControllersPerHost {
		return nil, nil, keys, fmt.Errorf("the host has %d controllers", t.perHost[host.NQN])
	}
	id, ok := s.newIDLocked()
	if !ok {
		return nil, nil, keys, errors.New("no controller id is free")
	}
	a = &association{
		sub: s, port: p, id: id, host: host, address: c.address, since: time.Now(), features: newFeatures(),
		gone: make(chan struct{}), killed: make(chan struct{}), queues: map[uint16]*conn{0: c},
	}
	if keys = s.hosts[host.NQN]; keys.HostKey.IsZero() {
		older = s.replaceLocked(a)
	}
	s.associations[id] = a
	t.perHost[host.NQN]++
	return a, older, keys, nil
}

// leadsLocked reports whether hosts can reach s through p.
func (p *Port) leadsLocked(s *Subsystem) bool {
	_, linked := p.linked[s]
	return !p.closed && !s.closed && (linked || s.discovery)
}

// replaceLocked kills and returns the controllers of a's host that a replaces; see
// SubsystemConfig.PerHost.
func (s *Subsystem) replaceLocked(a *association) (older []*association) {
	if s.cfg.PerHost == 0 {
		return nil
	}
	var others []*association
	for _, o := range s.associations {
		if o != a && o.host.NQN == a.host.NQN {
			others = append(others, o)
		}
	}
	slices.SortFunc(others, func(x, y *association) int { return y.since.Compare(x.since) })
	stay := s.cfg.PerHost - 1
	for _, o := range others {
		if stay > 0 && o.port != a.port && !o.dead.Load() {
			stay--
			continue
		}
		o.kill(errReplaced)
		older = append(older, o)
	}
	return older
}

// replace lets a, whose host has authenticated, replace the host's other controllers.
func (a *association) replace() error {
	t := a.sub.t
	t.mu.Lock()
	older := a.sub.replaceLocked(a)
	t.mu.Unlock()
	return a.await(older, t.cfg.StallTimeout)
}

// farewell is how long a connection of a controller that has ended stays open, if the host is still connecting. Its
// next command comes within milliseconds.
const farewell = 500 * time.Millisecond

// kill closes the association's connections. Its commands in Devices continue, and bury
// waits for them. kill may be called again.
//
// While Linux sets a controller up or deletes it, it does not notice that a connection is closed: it waits for the
// answer to its command, for a minute (drivers/nvme/host/tcp.c: nvme_tcp_error_recovery does nothing in the states
// connecting and deleting). So its connections are dismissed. It has no I/O under way then. Nothing hangs on
// discovery, for which no other process should wait.
func (a *association) kill(why error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.dead.Swap(true) {
		return
	}
	a.why = why
	close(a.killed)
	if a.timer != nil {
		a.timer.Stop()
	}
	for _, c := range a.queues {
		if a.settledLocked() || a.sub.discovery || errors.Is(why, errSilent) || errors.Is(why, errPassing) {
			c.close()
		} else {
			c.dismiss()
		}
	}
	a.sub.t.log.Info("controller ends", "subsystem", a.sub.cfg.NQN, "cntlid", a.id, "host", a.host.NQN, "address", a.address, "reason", why)
	a.sub.t.burials.Add(1)
	go a.bury()
}

// settledLocked reports whether the host has asked for events, as it does when it has connected all. A reset and a
// shutdown end that.
func (a *association) settledLocked() bool {
	return a.features.events != 0 || len(a.events.requests) > 0
}

// withdrawn reports whether this end has ended the association, though its host was not silent.
func (a *association) withdrawn() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.dead.Load() && !errors.Is(a.why, errSilent)
}

// abandon kills an association that the host has not heard of yet. The connection stays
// open for the answer.
func (a *association) abandon(why error) {
	a.mu.Lock()
	delete(a.queues, 0)
	a.mu.Unlock()
	a.kill(why)
}

// bury frees the controller id once no command of a is in a Device.
func (a *association) bury() {
	defer a.sub.t.burials.Done()
	a.sub.drain(context.Background()) // terminates, although its context never ends
	t := a.sub.t
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(a.sub.associations, a.id)
	if t.perHost[a.host.NQN]--; t.perHost[a.host.NQN] == 0 {
		delete(t.perHost, a.host.NQN)
	}
	close(a.gone)
}

// lose is called when a connection of a has ended.
func (a *association) lose(c *conn, why error) {
	q := c.bound.Load()
	a.mu.Lock()
	if a.queues[q.id] == c {
		delete(a.queues, q.id)
	}
	a.mu.Unlock()
	if q.id == 0 {
		a.kill(why)
	}
}

// join adds an I/O queue.
func (a *association) join(c *conn, id uint16) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.dead.Load():
		return ErrClosed
	case a.passing:
		return errPassing
	case a.queues[id] != nil:
		return ErrExists
	}
	a.queues[id] = c
	return nil
}

// operational returns the status that refuses I/O commands, or Success.
func (a *association) operational() nvmetcp.Status {
	if !a.enabled.Load() {
		return nvmetcp.CommandSequenceError | dnr
	}
	return nvmetcp.Success
}

// setKATO restarts the keep-alive timer; 0 stops it. Any command counts as a keep alive
// (traffic based keep alive, Base, 3.9), so the timer checks for arrivals four times per
// KATO, beginning with the command that sets it. A host that is silent for 1.25 to 1.5 KATO is
// disconnected.
func (a *association) setKATO(d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timer != nil {
		a.timer.Stop()
		a.timer = nil
	}
	a.kato, a.quiet = d, 0
	a.alive.Store(true)
	if d > 0 && !a.dead.Load() {
		a.timer = beat.Call(d/4, a.look)
	}
}

func (a *association) look() {
	a.mu.Lock()
	if a.timer == nil || a.dead.Load() {
		a.mu.Unlock()
		return
	}
	a.quiet += a.kato / 4
	if a.alive.Swap(false) {
		a.quiet = 0
	}
	expired := a.quiet >= a.kato+a.kato/4 // Linux's host may be silent for a whole KATO
	a.mu.Unlock()
	if expired {
		a.kill(fmt.Errorf("%w: nothing received for %v", errSilent, a.kato))
	}
}

// info describes a.
func (a *association) info() ControllerInfo {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.queues)
	if a.queues[0] != nil {
		n--
	}
	return ControllerInfo{ID: a.id, Host: a.host, Port: a.port.cfg.ID, Address: a.address, Since: a.since, Queues: n}
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/nvmetcp"
)

// PortConfig describes a port.
type PortConfig struct {
	ID uint16 // identifies the port to hosts; unique in a Target

	// The port's address in the discovery log. Empty means the listener's address, or, if
	// that is the wildcard, the address that the asking host connected to.
	Address, Service string

	// Link is linked before the first host is let in. A host that connects before its
	// subsystem is linked is told that there is no such subsystem, and may never retry
	// (Linux since 6.10 does not).
	Link []*Subsystem
}

// maxANAGroups is ANAGRPMAX and NANAGRPID of Identify.
const maxANAGroups = 128

// Port is a listener and the subsystems reached through it. All methods may be called from
// any goroutine.
type Port struct {
	t   *Target
	cfg PortConfig
	l   net.Listener

	ana atomic.Pointer[map[uint32]nvmetcp.ANAState] // replaced as a whole

	// Guarded by t.mu.
	closed bool
	linked map[*Subsystem]struct{}

	accepting sync.WaitGroup
}

// Addr is the address that the port listens on.
func (p *Port) Addr() net.Addr { return p.l.Addr() }

// state is a group's state through this port.
func (p *Port) state(group uint32) nvmetcp.ANAState {
	if m := *p.ana.Load(); len(m) > 0 {
		if s, ok := m[group]; ok {
			return s
		}
	}
	return nvmetcp.ANAStateOptimized
}

// Link lets hosts reach s through the port. A repeated call is no error.
func (p *Port) Link(s *Subsystem) error {
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	if p.closed || s.closed || s.t != p.t {
		return fmt.Errorf("link %s to port %d: %w", s.cfg.NQN, p.cfg.ID, ErrClosed)
	}
	if _, ok := p.linked[s]; !ok {
		p.linked[s] = struct{}{}
		p.t.discoveryChangedLocked()
	}
	return nil
}

// Unlink is the inverse of Link. It kills the controllers of s that came through the port
// and does not wait for their commands: see Subsystem.Close and RemoveNamespace.
func (p *Port) Unlink(s *Subsystem) {
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	if _, ok := p.linked[s]; !ok {
		return
	}
	delete(p.linked, s)
	p.killLocked(s, errors.New("the subsystem was unlinked from the port"))
	p.t.discoveryChangedLocked()
}

func (p *Port) killLocked(s *Subsystem, why error) {
	for _, a := range s.associations {
		if a.port == p {
			a.kill(why)
		}
	}
}

// SetANA sets the state of a namespace group as seen through the port, and notifies hosts.
// The default is optimized.
func (p *Port) SetANA(group uint32, state nvmetcp.ANAState) error {
	if group == 0 || group > maxANAGroups {
		return fmt.Errorf("ANA group %d: must be 1 to %d", group, maxANAGroups)
	}
	switch state {
	case nvmetcp.ANAStateOptimized, nvmetcp.ANAStateNonOptimized, nvmetcp.ANAStateInaccessible, nvmetcp.ANAStateLost, nvmetcp.ANAStateChange:
	default:
		return fmt.Errorf("ANA state %#x: unknown", uint8(state))
	}
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	if p.state(group) == state {
		return nil
	}
	m := maps.Clone(*p.ana.Load())
	m[group] = state
	p.ana.Store(&m)
	p.t.anaChanges.Add(1)
	for s := range p.linked {
		for _, a := range s.associations {
			if a.port == p {
				a.notify(eventANA)
			}
		}
	}
	return nil
}

// Close closes the listener and kills all controllers that came through it, without waiting
// for their commands.
func (p *Port) Close() error {
	p.t.mu.Lock()
	if p.closed {
		p.t.mu.Unlock()
		return nil
	}
	p.closed = true
	delete(p.t.ports, p)
	for _, s := range p.t.subsystems {
		p.killLocked(s, errors.New("the port is closed"))
	}
	p.killLocked(p.t.discovery, errors.New("the port is closed"))
	p.linked = map[*Subsystem]struct{}{}
	p.t.discoveryChangedLocked()
	p.t.mu.Unlock()
	err := p.l.Close()
	p.t.limiter.closePort(p)
	p.accepting.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("close port %d: %w", p.cfg.ID, err)
	}
	return nil
}

// accept accepts connections until the listener is closed.
func (p *Port) accept() {
	defer p.accepting.Done()
	wait := 5 * time.Millisecond
	for {
		nc, err := p.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			if p.isClosed() {
				return
			}
			// Probably out of file descriptors; connections that close will free some.
			p.t.log.Warn("connection not accepted", "port", p.cfg.ID, "err", err)
			time.Sleep(wait)
			wait = min(2*wait, time.Second)
			continue
		}
		wait = 5 * time.Millisecond
		p.admit(nc)
	}
}

func (p *Port) isClosed() bool {
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	return p.closed
}

// admit starts a connection if the limits allow it.
func (p *Port) admit(nc net.Conn) {
	if tcp, ok := nc.(*net.TCPConn); ok {
		tcp.SetNoDelay(true)
	}
	c := newConn(p.t, p, nc)
	if err := p.t.limiter.add(c); err != nil {
		p.t.log.Warn("connection refused", "port", p.cfg.ID, "address", c.address, "err", err)
		nc.Close()
		return
	}
	p.accepting.Add(1)
	p.start(c)
}

// start serves c, which the port waits for.
func (p *Port) start(c *conn) {
	go func() {
		defer p.accepting.Done()
		defer p.t.limiter.remove(c)
		c.serve()
	}()
}

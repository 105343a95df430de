// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/controller"
)

// The sockets of a process go to the next one: those that listen, and the connections of hosts. The
// kernel takes what arrives at them all the time, and keeps it until the next process reads it. So a host
// that connects meanwhile waits for its answer, and one that is connected notices no more than that:
//
//	this process                                  the next one
//	-------------------------------------------------------------------------------
//	Keep: accepts no more connections
//	Pass: answers the commands that it has read
//	Close: I/O leaves the drives
//	                                 sockets ──▶  Adopt
//	                                              makes its exports
//	                                              Settle: reads the next commands,
//	                                              accepts connections
//
// A connection that does not come to rest in passFor, or that does not fit what the next process exports,
// is closed, and its host connects again.

// Sockets are listening sockets by where they listen.
type Sockets = map[block.Portal]net.Listener

// Controller is a controller that goes to the next process, with its connections.
type Controller struct {
	Portal block.Portal // to which its host has connected
	controller.Passed
}

// passFor is how long the commands of controllers may take that go to the next process. Meanwhile their
// hosts' next commands wait.
const passFor = 250 * time.Millisecond

// Pass brings the hosts' controllers to rest, after Keep, and returns those that can go to the next
// process, until passFor has passed. Writes do not wait for space any more. The caller closes them.
func (m *Machine) Pass() []Controller {
	m.Drives.end.Do(m.Drives.stop)
	return m.Exports.pass()
}

func (e *Exports) pass() (all []Controller) {
	ctx, cancel := context.WithTimeout(context.Background(), passFor)
	defer cancel()
	passed := e.target.Pass(ctx)
	s := e.server
	s.mu.Lock()
	defer s.mu.Unlock()
	all, s.passed = s.passed, nil // of exports that have not been made again yet
	for _, p := range passed {
		if detachAll(p.Queues) != nil || s.ports[p.Port] == nil {
			p.Close() //nolint:errcheck // its host connects again
			continue
		}
		all = append(all, Controller{s.ports[p.Port].portal, p})
	}
	return all
}

// detachAll detaches connections from this process, where that takes more than to pass them on.
func detachAll(queues []controller.PassedQueue) error {
	for i := range queues {
		d, ok := queues[i].Conn.(interface{ Duplicate() (net.Conn, error) })
		if !ok {
			continue
		}
		next, err := d.Duplicate()
		if err != nil {
			return err
		}
		queues[i].Conn = next
	}
	return nil
}

// Keep stops accepting connections, and returns the sockets of the open portals. They go on listening
// when the exports end, until they are closed.
func (e *Exports) Keep() (Sockets, error) {
	s := e.server
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := Sockets{}
	var errs []error
	for _, open := range s.ports {
		// Before the controllers end: a host that connects again would be accepted, and lost once more.
		l, err := Detach(open.listener)
		if err != nil {
			errs = append(errs, fmt.Errorf("keep portal %s open: %w", open.portal, err))
			continue
		}
		kept[open.portal] = l
	}
	for portal, l := range s.inherited { // of exports that have not been made again yet
		kept[portal] = l.Listener
		delete(s.inherited, portal)
	}
	return kept, errors.Join(errs...)
}

// Detach closes l, and returns a listener on the same socket, which has been listening all the time.
func Detach(l net.Listener) (net.Listener, error) {
	switch l := l.(type) {
	case *inherited:
		l.once.Do(func() { close(l.closed) })
		return Detach(l.Listener)
	case *net.TCPListener:
		f, err := l.File()
		if err != nil {
			return nil, err
		}
		defer f.Close()
		// Before net.FileListener, which makes the socket blocking for a moment: who accepts on it in
		// that moment waits for the next connection, and Close waits for them.
		if err := l.Close(); err != nil {
			return nil, err
		}
		return net.FileListener(f)
	case duplicable:
		next, err := l.Duplicate()
		if err != nil {
			return nil, err
		}
		return next, l.Close()
	}
	return nil, fmt.Errorf("%T: %w", l, errors.ErrUnsupported)
}

// duplicable is a listener of a test's network.
type duplicable interface {
	net.Listener
	Duplicate() (net.Listener, error)
}

// Adopt takes the sockets that the previous process has kept, and the controllers that it has passed on.
// Exports at these portals use them once Settle is called: a host that finds its export missing may give
// up.
func (e *Exports) Adopt(kept Sockets, passed []Controller) {
	s := e.server
	s.mu.Lock()
	defer s.mu.Unlock()
	s.passed = passed
	for portal, l := range kept {
		s.inherited[portal] = &inherited{Listener: l, settled: s.settled, closed: make(chan struct{})}
	}
}

// Settle begins to serve the adopted controllers, and to accept connections on the adopted sockets. It
// closes those that no export uses. A repeated call does nothing.
func (e *Exports) Settle() {
	s := e.server
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.settled:
		return
	default:
		s.takeOverLocked() // first: a host that has connected again replaces its controller
		close(s.settled)
	}
	s.forsakeLocked()
}

// takeOverLocked serves the controllers that the previous process has passed on.
func (s *server) takeOverLocked() {
	for _, c := range s.passed {
		err := fmt.Errorf("nothing is exported at %s", c.Portal)
		if port := s.portAt(c.Portal); port != nil {
			err = port.TakeOver(c.Passed)
		} else {
			err = errors.Join(err, c.Close())
		}
		if err != nil {
			s.log.Warn("a host has to connect again", "subsystem", c.Subsystem, "host", c.Host.NQN, "err", err)
		}
	}
	s.passed = nil
}

// portAt returns the open port of a portal, or nil.
func (s *server) portAt(p block.Portal) *controller.Port {
	for _, open := range s.ports {
		if open.portal == p {
			return open.port
		}
	}
	return nil
}

// forsakeLocked closes the adopted sockets that no export uses.
func (s *server) forsakeLocked() {
	for _, c := range s.passed {
		c.Close() //nolint:errcheck // its host connects again
	}
	s.passed = nil
	for portal, l := range s.inherited {
		l.Close() //nolint:errcheck // nothing was accepted on it
		delete(s.inherited, portal)
	}
}

// listenLocked opens a portal, on an adopted socket if there is one.
func (s *server) listenLocked(p block.Portal) (net.Listener, error) {
	if l := s.inherited[p]; l != nil {
		delete(s.inherited, p)
		return l, nil
	}
	return s.listen(p)
}

// inherited is the listening socket of the previous process. It accepts nothing before it is settled.
type inherited struct {
	net.Listener
	settled <-chan struct{}
	closed  chan struct{}
	once    sync.Once
}

// Accept implements net.Listener.
func (l *inherited) Accept() (net.Conn, error) {
	select {
	case <-l.settled:
		return l.Listener.Accept()
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *inherited) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// Adopt takes the incarnations of drives that the previous process could note nowhere, and the paths of
// the drives that it has held until now.
func (d *Drives) Adopt(losses map[block.DriveID]uint32, held []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.Copy(d.unnoted, losses)
	d.resumed = map[string]bool{}
	for _, path := range held {
		d.resumed[path] = true
	}
}

// Unnoted returns the incarnations of the drives that have lost acknowledged writes, if that could not
// be noted for the next process.
func (d *Drives) Unnoted() map[block.DriveID]uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.unnoted)
}

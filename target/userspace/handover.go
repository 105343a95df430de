// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"sync"

	"weft.dev/weft/proto/block"
)

// The listening sockets of a process go to the next one. The kernel takes connections on them all the
// time, and keeps them until the next process accepts them. So a host that connects meanwhile waits
// for its answer, and is not refused:
//
//	this process                                  the next one
//	-------------------------------------------------------------------------------
//	Keep: accepts no more connections
//	Close: controllers end, I/O leaves the drives
//	                                 sockets ──▶  Adopt
//	                                              makes its exports
//	                                              Settle: accepts connections

// Sockets are listening sockets by where they listen.
type Sockets = map[block.Portal]net.Listener

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

// Adopt takes the sockets that the previous process has kept. Exports at these portals use them, and
// accept connections once Settle is called: a host that finds its export missing may give up.
func (e *Exports) Adopt(kept Sockets) {
	s := e.server
	s.mu.Lock()
	defer s.mu.Unlock()
	for portal, l := range kept {
		s.inherited[portal] = &inherited{Listener: l, settled: s.settled, closed: make(chan struct{})}
	}
}

// Settle begins to accept connections on the adopted sockets, and closes those that no export uses.
// A repeated call does nothing.
func (e *Exports) Settle() {
	s := e.server
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.settled:
		return
	default:
		close(s.settled)
	}
	s.forsakeLocked()
}

// forsakeLocked closes the adopted sockets that no export uses.
func (s *server) forsakeLocked() {
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

// Adopt takes the incarnations of drives that the previous process could note nowhere.
func (d *Drives) Adopt(losses map[block.DriveID]uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.Copy(d.unnoted, losses)
}

// Unnoted returns the incarnations of the drives that have lost acknowledged writes, if that could not
// be noted for the next process.
func (d *Drives) Unnoted() map[block.DriveID]uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.unnoted)
}

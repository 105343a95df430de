// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"io"
	"net"
	"sync"
	"testing"
)

// proxy is the network between a host and a target. It can fall silent and break
// connections.
type proxy struct {
	listener net.Listener
	to       string

	mu     sync.Mutex
	silent chan struct{} // closed when the silence ends; nil: not silent
	refuse bool
	conns  map[net.Conn]struct{}
	ended  int // connections that the target has closed
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p := &proxy{listener: l, to: to, conns: map[net.Conn]struct{}{}}
	t.Cleanup(func() {
		p.refuseAll(true)
		p.listen()
		l.Close()
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.carry(c)
		}
	}()
	return p
}

func (p *proxy) portal() string { return p.listener.Addr().String() }

// mute makes all traffic vanish without notice to either side, as if the cable were
// unplugged.
func (p *proxy) mute() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent == nil {
		p.silent = make(chan struct{})
	}
}

// listen ends mute. What was sent meanwhile then arrives.
func (p *proxy) listen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent != nil {
		close(p.silent)
		p.silent = nil
	}
}

// refuseAll(true) breaks all connections and accepts no new ones.
func (p *proxy) refuseAll(refuse bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = refuse
	if refuse {
		p.breakLocked()
	}
}

func (p *proxy) breakLocked() {
	for c := range p.conns {
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
}

// givenUp is the number of connections that the target has closed by itself.
func (p *proxy) givenUp() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

func (p *proxy) quiet() chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silent
}

func (p *proxy) keep(c net.Conn, keep bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !keep {
		delete(p.conns, c)
		return true
	}
	if p.refuse {
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *proxy) carry(from net.Conn) {
	defer from.Close()
	if q := p.quiet(); q != nil {
		<-q
	}
	if !p.keep(from, true) {
		return
	}
	defer p.keep(from, false)
	to, err := net.Dial("tcp", p.to)
	if err != nil || !p.keep(to, true) {
		return
	}
	defer to.Close()
	defer p.keep(to, false)
	up := make(chan struct{})
	go func() {
		defer close(up)
		p.pump(to, from, false)
		to.Close()
		from.Close()
	}()
	p.pump(from, to, true)
	from.Close()
	to.Close()
	<-up
}

// pump copies data from one side to the other.
func (p *proxy) pump(to io.Writer, from io.Reader, fromTarget bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil && fromTarget {
			p.mu.Lock()
			p.ended++
			p.mu.Unlock()
		}
		if q := p.quiet(); q != nil {
			<-q
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

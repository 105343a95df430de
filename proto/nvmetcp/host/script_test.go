// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// FuzzController connects to an honest controller whose answers a script damages: bytes are
// changed, dropped, repeated and inserted, and connections end. Whatever happens, Connect
// returns, every IO completes once, and after a Cut nothing is left.
func FuzzController(f *testing.F) {
	f.Add([]byte{})
	for what := range byte(mischiefs) {
		for answer := range byte(5) {
			f.Add([]byte{3 * answer, what, 8 + 20*answer, 0, 0xff})
			f.Add([]byte{0x40 | answer, what, 24, 0, 1, 0x80 | answer, what, 0, 1, 0x80})
		}
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 1<<10 {
			t.Skip("longer scripts find no more")
		}
		defer time.AfterFunc(patience, func() { panic("the script hangs") }).Stop()
		against(t, script)
	})
}

// against connects to a controller damaged by a script, and uses it.
func against(t *testing.T, script []byte) {
	p := &peer{t: t, ended: make(chan error, 1000), memory: make([]byte, 256<<10), uuid: uuidA}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Millisecond)
	defer cancel()
	m := &mangler{p: p, script: script, tired: cancel}
	defer m.end()
	cfg := Config{Portals: []string{"192.0.2.1:4420"}, Subsystem: testNQN, Host: me, IOQueues: 1, QueueDepth: 8, Dial: m.dial,
		DataDigest: len(script)%2 == 1, HeaderDigest: len(script)%4 > 1, BufferSize: 16 << 10,
		KATO: -1, ConnectTimeout: 20 * time.Millisecond, CommandTimeout: 20 * time.Millisecond,
		ReconnectMin: time.Millisecond, ReconnectMax: time.Millisecond}
	c, err := Connect(ctx, cfg)
	if err != nil {
		return
	}
	told := make(chan *block.IO, 64)
	sent := 0
	if n, err := c.Namespace(1, block.UUID{}); err == nil {
		sent = use(n, told)
	}
	for sent > 0 && ctx.Err() == nil {
		select {
		case <-told:
			sent--
		case <-ctx.Done():
		}
	}
	c.Cut()
	<-c.Done()
	close(told) // an IO that completes twice panics
	for range told {
		sent--
	}
	if sent != 0 {
		t.Errorf("%d IOs have no outcome", sent)
	}
}

// use submits one IO of each kind and returns their number.
func use(n *Namespace, told chan<- *block.IO) int {
	ios := []*block.IO{
		{Op: block.OpRead, Len: 4096}, {Op: block.OpWrite, Len: 4096}, {Op: block.OpRead, Len: 128 << 10},
		{Op: block.OpWrite, Len: 128 << 10}, {Op: block.OpFlush}, {Op: block.OpDiscard, Len: 8192}, {Op: block.OpWriteZeroes, Len: 64 << 10, Unmap: true},
	}
	for _, io := range ios {
		if io.Op == block.OpRead || io.Op == block.OpWrite {
			io.Data = make([]byte, io.Len)
		}
		io.Done = func(io *block.IO) { told <- io }
		n.Submit(io)
	}
	return len(ios)
}

// mangler dials connections to a peer and applies the script to what the peer sends. Each
// step of the script is five bytes: the connection (high two bits) and which of its answers
// (low six), the change, the position (two bytes), and the new value.
type mangler struct {
	p      *peer
	script []byte
	tired  func() // called when so many connections were made that the script has ended

	mu    sync.Mutex
	conns []net.Conn
	all   sync.WaitGroup
}

const (
	change = iota // a byte
	leaveOut
	twice
	putIn
	cutOff
	grow // a length by a lot
	mischiefs
)

func (m *mangler) dial(context.Context, string, string) (net.Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ours, theirs := net.Pipe()
	if len(m.conns) > 8 {
		m.tired()
		return nil, errors.New("the controller is tired")
	}
	c := &mangled{Conn: theirs, m: m, number: len(m.conns), out: make(chan []byte, 1<<10)}
	m.conns = append(m.conns, theirs)
	m.all.Go(c.send)
	m.all.Go(func() {
		m.p.serve(c)
		close(c.out)
	})
	return ours, nil
}

func (m *mangler) end() {
	m.mu.Lock()
	conns := m.conns
	m.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
	m.all.Wait()
}

// mangled is the peer's end of a connection. The peer's writes do not wait for the host to
// read.
type mangled struct {
	net.Conn
	m      *mangler
	number int
	writes int
	out    chan []byte // nil: the end
}

func (c *mangled) send() {
	for b := range c.out {
		if b == nil {
			break
		}
		if _, err := c.Conn.Write(b); err != nil {
			break
		}
	}
	c.Close()
	for range c.out { // until the peer has stopped sending
	}
}

func (c *mangled) Write(b []byte) (int, error) {
	n := len(b)
	b = append([]byte(nil), b...)
	cut := false
	for s := c.m.script; len(s) >= 5; s = s[5:] {
		if int(s[0]>>6) == min(c.number, 3) && int(s[0]&63) == c.writes {
			b, cut = mischief(b, s[1]%mischiefs, int(binary.LittleEndian.Uint16(s[2:])), s[4])
		}
	}
	c.writes++
	c.out <- b
	if cut {
		c.out <- nil
		return 0, net.ErrClosed
	}
	return n, nil
}

func mischief(b []byte, what byte, at int, with byte) (_ []byte, cut bool) {
	if len(b) == 0 {
		return b, false
	}
	at %= len(b)
	switch what {
	case change:
		b[at] ^= with
	case leaveOut:
		b = append(b[:at], b[min(at+int(with)+1, len(b)):]...)
	case twice:
		b = append(b, b[:at]...)
	case putIn:
		pdu := nvmetcp.DataHeader{CID: uint16(with)}.Append(nvmetcp.Header{Type: nvmetcp.Type(with), HLen: 24, PLen: 24}.Append(nil))
		b = append(pdu, b...)
	case cutOff:
		return b[:at], true
	case grow:
		if at+4 <= len(b) {
			binary.LittleEndian.PutUint32(b[at:], 0xfffffff0|uint32(with))
		}
	}
	return b, false
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// patternSize is the length of the pattern that commands' data repeats: one range of
// Dataset Management, or the two keys of a reservation command.
const patternSize = 16

type cursor struct{ b []byte }

func (c *cursor) take(n int) []byte {
	out := make([]byte, n)
	c.b = c.b[copy(out, c.b):]
	return out
}

func (c *cursor) byte() byte { return c.take(1)[0] }

// scriptConn is a connection whose peer is a script. The script continues only when the
// target has read what it sent.
type scriptConn struct {
	mu      sync.Mutex
	cond    sync.Cond
	unread  []byte
	eof     bool
	closed  bool
	reading bool
	sent    []byte // by the target

	greeted bool
	digests byte
	cid     uint16
}

func newScriptConn() *scriptConn {
	c := &scriptConn{}
	c.cond.L = &c.mu
	return c
}

func (c *scriptConn) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.unread) == 0 {
		if c.closed {
			return 0, net.ErrClosed
		}
		if c.eof {
			return 0, io.EOF
		}
		c.reading = true
		c.cond.Broadcast()
		c.cond.Wait()
	}
	c.reading = false
	n := copy(p, c.unread)
	c.unread = c.unread[n:]
	return n, nil
}

func (c *scriptConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, net.ErrClosed
	}
	c.sent = append(c.sent, p...)
	c.cond.Broadcast()
	return len(p), nil
}

// await waits until the target has sent something.
func (c *scriptConn) await(what []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !bytes.Contains(c.sent, what) {
		c.cond.Wait()
	}
}

func (c *scriptConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.cond.Broadcast()
	return nil
}

func (c *scriptConn) LocalAddr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 4420}
}
func (c *scriptConn) RemoteAddr() net.Addr             { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 1} }
func (c *scriptConn) SetDeadline(time.Time) error      { return nil }
func (c *scriptConn) SetReadDeadline(time.Time) error  { return nil }
func (c *scriptConn) SetWriteDeadline(time.Time) error { return nil }

// push sends bytes to the target and waits until it has read them.
func (c *scriptConn) push(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unread = append(c.unread, b...)
	c.reading = false
	c.cond.Broadcast()
	for !c.closed && !(c.reading && len(c.unread) == 0) {
		c.cond.Wait()
	}
}

// end closes the script's end, waits for the target's, and parses the target's output.
func (c *scriptConn) end(t *testing.T) {
	c.mu.Lock()
	c.eof = true
	c.cond.Broadcast()
	for !c.closed {
		c.cond.Wait()
	}
	sent := c.sent
	c.mu.Unlock()
	r := nvmetcp.NewReader(bytes.NewReader(sent), nvmetcp.ReaderConfig{Role: nvmetcp.RoleHost})
	for first := true; ; first = false {
		pdu, err := r.Next()
		if first && err == nil && pdu.Type == nvmetcp.TypeICResp {
			resp, _ := nvmetcp.ParseICResp(pdu.Head)
			r.Configure(nvmetcp.ReaderConfig{Role: nvmetcp.RoleHost, HeaderDigest: resp.HeaderDigest, DataDigest: resp.DataDigest, MaxData: 1 << 30, Align: c.digests >> 2 & 31})
		}
		var fatal *nvmetcp.FatalError
		if errors.As(err, &fatal) {
			t.Errorf("the target sent an invalid PDU: %v", err)
		}
		if err != nil {
			return
		}
	}
}

func (c *scriptConn) play(kind byte, s *cursor) {
	switch kind {
	case stepGreet:
		c.greet(s.byte())
	case stepConnect:
		c.connect(uint16(s.byte()), s.byte(), s.byte())
	case stepEnable:
		cc := nvmetcp.Configuration{Enable: true, SubmissionEntrySize: 6, CompletionEntrySize: 4}
		c.command(nvmetcp.PropertySetCommand(nvmetcp.PropertyCC, uint64(cc.Encode())), nil)
	case stepCommand:
		n := int(s.byte()) * 256
		cmd := nvmetcp.Command(s.take(nvmetcp.CommandSize))
		c.command(cmd, bytes.Repeat(s.take(patternSize), n/patternSize))
	case stepData:
		tag, size := s.byte(), s.byte()
		c.write(func(w *nvmetcp.Writer) {
			w.Data(nvmetcp.TypeH2CData, tag>>5&nvmetcp.FlagLastPDU, nvmetcp.DataHeader{CID: c.cid, TTAG: uint16(tag & 31)}, make([]byte, (int(size)+1)*256))
		})
	case stepBytes:
		c.push(s.take(int(s.byte())))
	case stepAuth:
		c.authenticate(s.take(int(s.byte())))
	case stepClose:
		c.mu.Lock()
		c.eof = true
		c.cond.Broadcast()
		c.mu.Unlock()
	}
}

func (c *scriptConn) greet(digests byte) {
	if !c.greeted { // only the first one counts; others are refused
		c.greeted, c.digests = true, digests
	}
	c.push(nvmetcp.ICReq{MaxR2T: 1, HPDA: digests >> 2 & 31, HeaderDigest: digests&1 != 0, DataDigest: digests&2 != 0}.Append(nil))
}

func (c *scriptConn) connect(queue uint16, size, odd byte) {
	d := nvmetcp.ConnectData{HostID: hostA.ID, ControllerID: nvmetcp.DynamicController, Subsystem: testNQN, Host: hostA.NQN}
	switch odd & 3 {
	case 1:
		d.Subsystem = nvmetcp.DiscoveryNQN
	case 2:
		d.Subsystem = provenNQN
	}
	if queue != 0 {
		d.ControllerID = 1
	}
	c.command(nvmetcp.Connect{QueueID: queue, QueueSize: uint32(size) + 1, Attributes: odd}.Command(), d.Append(nil))
}

// authenticate sends a message, or asks for one.
func (c *scriptConn) authenticate(message []byte) {
	auth := nvmetcp.AuthCommand{Protocol: nvmetcp.AuthProtocol, SPSP0: 1, SPSP1: 1, Length: uint32(len(message))}
	if len(message) == 0 {
		auth.Receive, auth.Length = true, dhchap.MaxMessage
	}
	c.command(auth.Command(len(message) > 0), message)
}

func (c *scriptConn) command(cmd nvmetcp.Command, data []byte) {
	c.cid++
	cmd.SetCID(c.cid)
	c.write(func(w *nvmetcp.Writer) { w.Command(&cmd, data) })
}

func (c *scriptConn) write(add func(*nvmetcp.Writer)) {
	var out buffered
	w := nvmetcp.NewWriter(&out, nvmetcp.WriterConfig{HeaderDigest: c.digests&1 != 0, DataDigest: c.digests&2 != 0})
	add(w)
	w.Flush()
	c.push(out)
}

// memoryListener accepts scriptConns.
type memoryListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newMemoryListener() *memoryListener {
	return &memoryListener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

func (l *memoryListener) dial() *scriptConn {
	c := newScriptConn()
	l.conns <- c
	return c
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *memoryListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 4420} }

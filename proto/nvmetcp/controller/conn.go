// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/socket"
)

// conn is one connection. Once connected, it is one queue of a controller.
//
// One goroutine reads what the socket holds and executes all commands in it. Completions
// are gathered and written with one call before it reads again, or in parts before that
// (socket.Pace). If a Device completes on another goroutine while the reader waits for the
// host, that goroutine writes, without blocking. Only while the socket is full a second
// goroutine does the writing.
//
//	      ┌─────────────▶ free ◀───────────────┐
//	  capsule                                 sent
//	      ▼                                    │
//	wantsMemory ──▶ wantsData ──▶ working ──▶ out
//	      └────── (reads) ──────────▲
type conn struct {
	t       *Target
	port    *Port
	sock    *socket.Conn
	log     *slog.Logger
	address string

	// Of the reader's goroutine.
	r       *nvmetcp.Reader
	digests nvmetcp.ICReq // what the host requested
	pace    socket.Pace

	// Of the goroutine that holds the token (sending).
	w      *nvmetcp.Writer
	batch  []outgoing
	pieces [][]byte

	sendSoon func() // send(false) as a value, to allocate it once

	mu       sync.Mutex
	out      []outgoing
	sending  bool // a goroutine has the token
	reading  bool // the reader is busy, and will send afterwards
	requests []*request
	free     []*request
	taking   int     // requests that wait for H2CData
	limit    int     // of len(requests)
	asked    holding // requests' memory, without data from capsules
	capsules holding // data from capsules
	waiting  []*request
	asking   bool // asks waits for the account of asked
	asks     *waiter
	// memoryLimit is the limit of asked.
	memoryLimit int
	closing     bool
	quiet       sync.Cond         // signaled when the token is free, and by close
	rested      bool              // its reader has left it for another process: see Target.Pass
	passed      bool              // the socket is another's
	deferred    []nvmetcp.Command // not begun, for the other process

	greeted atomic.Bool           // ICReq has arrived; set by the reader
	bound   atomic.Pointer[queue] // nil until Connect; set once, by the reader

	dead    atomic.Bool   // closed or dismissed: no more commands go to a Device
	leaves  atomic.Bool   // dismissed: its commands are answered with an error until it is closed
	passing atomic.Bool   // another process is to take it over: see Target.Pass
	partial atomic.Int64  // when the wait for the rest of an incomplete PDU began, Unix ns; 0: none
	stuck   atomic.Int64  // when the peer last accepted some of the waiting data; 0: nothing waits
	owes    atomic.Int64  // when the peer was asked for data, or last sent some of that; 0: it owes none
	inside  atomic.Int64  // commands in a Device
	over    atomic.Bool   // the reader has ended
	shut    chan struct{} // closed with the socket
	done    chan struct{}
}

// queue is the queue that Connect binds to a connection.
type queue struct {
	ctrl   *association
	id     uint16
	size   uint32
	noFlow bool
	sqHead uint32 // belongs to the holder of the conn's token
	proven bool   // authenticated, or nothing to prove; belongs to the reader
	proof  proof
}

// outgoing is something to send: for the request r, or raw bytes.
type outgoing struct {
	r    *request
	kind kind
	raw  []byte
}

type kind uint8

const (
	sendReply kind = iota // data or completion; frees r
	sendR2T
	sendRaw
)

const (
	handshakeBuffer = 8 << 10
	adminBuffer     = 16 << 10
	ioBuffer        = 256 << 10
	handshakeSlots  = 4
	maxBatch        = 128
	maxH2CData      = 1 << 20
	adminCapsule    = 8 << 10 // in-capsule data of the admin queue (Base, 6.3)
)

func newConn(t *Target, p *Port, c net.Conn) *conn {
	n := &conn{t: t, port: p, sock: socket.New(c), address: remoteHost(c), limit: handshakeSlots, memoryLimit: handshakeSlots * maxAuthMessage, shut: make(chan struct{}), done: make(chan struct{})}
	n.log = t.log.With("host_address", c.RemoteAddr().String())
	n.sock.Expecting = n.expecting
	n.sock.Advanced = func() { n.stuck.Store(n.now()) }
	n.r = nvmetcp.NewReader(n, nvmetcp.ReaderConfig{Role: nvmetcp.RoleController, MaxCapsuleData: adminCapsule, BufferSize: handshakeBuffer})
	n.w = nvmetcp.NewWriter(nil, nvmetcp.WriterConfig{})
	n.quiet.L = &n.mu
	n.sendSoon = func() { n.send(false) }
	return n
}

// serve reads until the connection ends, and then cleans up.
func (c *conn) serve() {
	defer close(c.done)
	defer c.release()
	defer c.awaitSender()
	if c.bound.Load() == nil { // not taken over
		c.sock.SetReadDeadline(time.Now().Add(c.t.cfg.HandshakeTimeout))
	}
	err := c.loop()
	if errors.Is(err, errPassing) {
		return
	}
	c.flushLast(err)
	c.dead.Store(true)
	if q := c.bound.Load(); q != nil {
		if !q.proven && !q.ctrl.withdrawn() {
			c.unproven(q, err)
		}
		q.ctrl.lose(c, err) // before the host sees the connection end, since it may reconnect the queue
	} else {
		c.log.Debug("connection ended before connect", "err", err)
	}
	c.close()
}

// loop reads and processes PDUs until an error ends the connection.
func (c *conn) loop() error {
	for {
		if c.passing.Load() && c.r.Between() && c.rests() { // inside a PDU that was refused, Next skips its data
			return errPassing
		}
		pdu, err := c.r.Next()
		if err != nil {
			return err
		}
		if err := c.receive(pdu); err != nil {
			return err
		}
		c.pace.Took()
		if c.r.Buffered() { // otherwise Read sends
			c.early()
		}
		if c.partial.Load() != 0 && !c.r.Partial() {
			c.partial.Store(0)
		}
	}
}

// Read reads for the Reader.
func (c *conn) Read(p []byte) (int, error) { return c.ReadBoth(p, nil) }

// ReadBoth reads for the Reader. Before it waits, it sends all answers.
func (c *conn) ReadBoth(p, q []byte) (int, error) {
	if c.partial.Load() == 0 && c.r.Partial() {
		c.partial.Store(c.now())
	}
	c.rest()
	n, err := c.sock.ReadBoth(p, q)
	if err != nil && c.passing.Load() {
		n, err = c.readOn(p, q, err)
	}
	c.pace.End(c.sock.Idled())
	c.mu.Lock()
	c.reading = true
	c.mu.Unlock()
	if q := c.bound.Load(); q != nil && (q.proven || q.id == 0) { // else it may be a stranger's, at another's controller
		q.ctrl.alive.Store(true)
	}
	return n, err
}

// now is the time that stalls are measured with, Unix ns.
func (c *conn) now() int64 { return time.Now().UnixNano() }

// expecting reports whether only the host can bring more work: no command is in a Device,
// whose completion would have to find a processor.
func (c *conn) expecting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.requests)-len(c.free) == c.taking
}

// early sends the completions so far, if the host should have them before the batch ends.
func (c *conn) early() {
	c.mu.Lock()
	bytes := 0
	for i := range c.out {
		if r := c.out[i].r; r != nil {
			bytes += len(r.reply)
		}
	}
	if c.sending || len(c.out) == 0 || !c.pace.Due(len(c.out), bytes) {
		c.mu.Unlock()
		return
	}
	c.sending = true
	c.mu.Unlock()
	c.send(false)
}

// rest ends a batch: it sends the completions so far. Goroutines with later completions
// send them themselves.
func (c *conn) rest() {
	c.mu.Lock()
	c.reading = false
	if c.sending || len(c.out) == 0 {
		c.mu.Unlock()
		return
	}
	c.sending = true
	c.mu.Unlock()
	c.send(false)
}

// close closes the socket at once. Commands in a Device continue, and their completions are
// dropped.
func (c *conn) close() {
	c.dead.Store(true)
	c.mu.Lock()
	passed := c.passed
	if !c.closing {
		c.closing = true
		close(c.shut)
	}
	c.quiet.Broadcast()
	for i := range c.out {
		c.out[i] = outgoing{}
	}
	c.out, c.waiting = nil, nil
	c.mu.Unlock()
	if !passed { // not under c.mu: Close waits for the reader, which may be in expecting
		c.sock.Close()
	}
}

// dismiss closes the connection soon, unless the host does. Until then it answers each command with an error.
func (c *conn) dismiss() {
	c.dead.Store(true)
	c.leaves.Store(true)
	c.mu.Lock()
	c.quiet.Broadcast() // for rests
	rested := c.rested
	c.mu.Unlock()
	if rested { // nobody reads it
		c.close()
		return
	}
	time.AfterFunc(farewell, c.close)
}

// receive processes one PDU.
func (c *conn) receive(p *nvmetcp.PDU) error {
	if !c.greeted.Load() {
		return c.greet(p)
	}
	switch p.Type {
	case nvmetcp.TypeCapsuleCmd:
		return c.command(p)
	case nvmetcp.TypeH2CData:
		return c.data(p)
	case nvmetcp.TypeH2CTermReq:
		return c.terminated(p)
	}
	return nvmetcp.Fatal(nvmetcp.FESSequence, 0, p.Head, fmt.Sprintf("%v on a connection that is set up", p.Type))
}

// greet answers ICReq (TCP, 3.1), which must come first.
func (c *conn) greet(p *nvmetcp.PDU) error {
	if p.Type != nvmetcp.TypeICReq {
		return nvmetcp.Fatal(nvmetcp.FESSequence, 0, p.Head, fmt.Sprintf("%v before ICReq", p.Type))
	}
	req, err := nvmetcp.ParseICReq(p.Head)
	if err != nil {
		return err
	}
	c.digests = req
	c.greeted.Store(true)
	c.push(outgoing{kind: sendRaw, raw: nvmetcp.ICResp{HeaderDigest: req.HeaderDigest, DataDigest: req.DataDigest, MaxH2CData: maxH2CData}.Append(nil)})
	c.r.Configure(c.readerConfig(adminCapsule))
	c.w.Configure(nvmetcp.WriterConfig{HeaderDigest: req.HeaderDigest, DataDigest: req.DataDigest, Align: req.HPDA})
	return nil
}

func (c *conn) readerConfig(capsule uint32) nvmetcp.ReaderConfig {
	return nvmetcp.ReaderConfig{
		Role: nvmetcp.RoleController, HeaderDigest: c.digests.HeaderDigest, DataDigest: c.digests.DataDigest,
		MaxCapsuleData: capsule, MaxData: maxH2CData,
	}
}

func (c *conn) terminated(p *nvmetcp.PDU) error {
	data, err := c.r.Data()
	if err != nil {
		return err
	}
	t, err := nvmetcp.ParseTermReq(append(append([]byte(nil), p.Head...), data...))
	if err != nil {
		return err
	}
	return &nvmetcp.TerminatedError{TermReq: t}
}

// flushLast tells the peer what it did wrong, and gives it a second to read that and close.
// A reset at once could overtake the reason.
func (c *conn) flushLast(err error) {
	var fatal *nvmetcp.FatalError
	if !errors.As(err, &fatal) || c.dead.Load() {
		return
	}
	c.log.Warn("peer broke the protocol", "err", err)
	if !c.greeted.Load() && fatal.FES == nvmetcp.FESInvalidHeader && fatal.FEI == 0 {
		return // its first byte is no type of a host's PDU: who scans ports learns nothing
	}
	c.dead.Store(true)
	c.mu.Lock()
	c.out = c.out[:0]
	c.mu.Unlock()
	c.sock.SetDeadline(time.Now().Add(time.Second))
	c.push(outgoing{kind: sendRaw, raw: fatal.TermReq(true).Append(nil)})
	c.rest()
	c.awaitSender()
	if half, ok := c.sock.Conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		io.Copy(io.Discard, io.LimitReader(c.sock.Conn, 1<<20))
	}
}

func remoteHost(c net.Conn) string {
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		return c.RemoteAddr().String()
	}
	return host
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/socket"
)

// queue is one connection: a submission and a completion queue. Any goroutine submits. The
// reader goroutine completes all that one read brought, and then sends what was submitted
// meanwhile with one write; see send.go for who else sends.
type queue struct {
	id      uint16
	conn    net.Conn
	sock    *socket.Conn // conn
	reader  *nvmetcp.Reader
	writer  *nvmetcp.Writer
	maxData int             // bytes of one H2CData
	capsule int             // bytes of in-capsule data
	lost    func(error)     // tells the session that the queue has ended
	dead    <-chan struct{} // the session has ended
	hearing *hearing        // of the controller

	wake  chan struct{} // the writer has something to do
	quit  chan struct{}
	ended sync.WaitGroup // reader and writer
	clock atomic.Uint32  // stamps requests when they are sent; see session.watch

	// Of the reader.
	pace socket.Pace

	mu        sync.Mutex
	waiting   list
	transfers list // R2Ts to answer; their requests are in slots
	slots     []slot
	free      []uint16
	fresh     int  // requests and R2Ts since the last gather
	bulk      int  // the length of their data
	corked    bool // the reader is completing a batch and will send after it
	sending   bool // a goroutine has the token
	full      bool // the token is the writer's: the socket was full
	closed    bool
	err       error     // why the queue closed
	quiet     sync.Cond // signaled when no goroutine is sending, or full is set

	// Of the holder of the token: what is in nvmetcp.Writer, its requests, and the R2Ts it
	// is answering.
	pieces [][]byte
	batch  []*request
	grants []grant
}

// grant is an R2T and its command.
type grant struct {
	r    *request
	data nvmetcp.DataHeader
}

// slot is the use of a command identifier. The low bits of an identifier are the slot's
// index; the high bits change with every use, so that a repeated completion is detected.
type slot struct {
	r   *request
	use uint16
}

const (
	slotBits = 12
	maxDepth = 1<<slotBits - 1 // so that no identifier is 0xffff, which means none
	slotMask = 1<<slotBits - 1
)

func newQueue(id uint16, conn net.Conn, depth int, s *session) *queue {
	q := &queue{id: id, conn: conn, lost: s.fail, dead: s.dead, hearing: &s.c.hearing, wake: make(chan struct{}, 1), quit: make(chan struct{})}
	q.sock = socket.New(conn)
	q.sock.Expecting = q.expecting
	q.quiet.L = &q.mu
	q.setDepth(depth)
	return q
}

// setDepth sets the limit of commands in flight. Call it only before start.
func (q *queue) setDepth(depth int) {
	depth = min(depth, maxDepth)
	q.slots = make([]slot, depth)
	q.free = make([]uint16, depth)
	for i := range q.free {
		q.free[i] = uint16(depth - 1 - i)
	}
	q.batch = make([]*request, 0, depth)
}

// start starts the queue's goroutines.
func (q *queue) start() {
	q.ended.Go(q.read)
	q.ended.Go(q.write)
}

// submit accepts a request, or returns false if the queue is closed.
func (q *queue) submit(r *request) bool {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return false
	}
	// The admin queue always waits for an event, and has little else to do.
	alone := q.waiting.head == nil && (q.id == 0 || len(q.free) == len(q.slots))
	q.waiting.push(r)
	q.noteLocked(r)
	if q.corked || q.sending {
		q.mu.Unlock()
		return true
	}
	q.sending = alone
	q.mu.Unlock()
	if alone {
		q.send()
	} else {
		q.kick()
	}
	return true
}

// fail ends the queue from within. Its requests stay until stop.
func (q *queue) fail(err error) {
	q.mu.Lock()
	first := !q.closed
	if first {
		q.closed, q.err = true, err
	}
	q.mu.Unlock()
	if first {
		q.lost(fmt.Errorf("queue %d: %w", q.id, err))
	}
}

// stop ends the connection, waits until no request's data is in use, and returns the
// unfinished requests. Nothing is sent afterwards.
func (q *queue) stop() (unfinished list) {
	q.mu.Lock()
	q.closed = true
	err := q.err
	q.mu.Unlock()
	close(q.quit)
	q.terminate(err)
	q.ended.Wait()
	q.awaitSender()

	for r := q.transfers.pop(); r != nil; r = q.transfers.pop() {
		if r.release() {
			r.finish()
		}
	}
	q.sock.Owed(false)
	for i := range q.slots {
		if r := q.slots[i].r; r != nil {
			r.rewind()
			unfinished.push(r)
			q.slots[i].r = nil
		}
	}
	unfinished.append(q.waiting.take())
	return unfinished
}

// terminate closes the connection. If the peer broke the protocol, it first gets the
// reason. Otherwise the connection is reset, so that the kernel drops its unsent data: a
// write in it could land after the same write has been sent again.
func (q *queue) terminate(err error) {
	var fatal *nvmetcp.FatalError
	if errors.As(err, &fatal) {
		q.conn.SetDeadline(time.Now().Add(goodbye)) //nolint:errcheck // the connection is closed in any case
		if _, err := q.conn.Write(fatal.TermReq(false).Append(nil)); err == nil {
			io.Copy(io.Discard, q.conn) //nolint:errcheck // until the peer closes or the deadline comes
		}
	}
	if tcp, ok := q.conn.(interface{ SetLinger(int) error }); ok {
		tcp.SetLinger(0) //nolint:errcheck // if it fails, the kernel still sends its data
	}
	q.conn.Close() //nolint:errcheck // nothing depends on it
}

// goodbye is how long a peer that broke the protocol gets to read the reason.
const goodbye = 200 * time.Millisecond

// maxTries limits how often an IO is sent again after a transport error.
const maxTries = 3

// finish reports the outcome in result, or sends the IO again.
func (r *request) finish() {
	err := r.outcome()
	if r.zeroesMore(err) {
		r.rewind()
		r.space.controller.route(r)
		return
	}
	if err != nil && r.done == nil && r.tries < maxTries && transient(err) {
		r.tries++
		r.rewind()
		r.space.controller.route(r)
		return
	}
	r.tell(err)
}

// transient reports whether an IO failed in transit: its data was damaged in either
// direction, or the controller asks for a retry.
func transient(err error) bool {
	status, ok := err.(nvmetcp.Status) //nolint:errorlint // outcome does not wrap it
	if !ok {
		return errors.Is(err, nvmetcp.ErrDataDigest)
	}
	switch status.Code() {
	case nvmetcp.TransientTransportError, nvmetcp.DataTransferError, nvmetcp.CommandInterrupted:
		return !status.DNR()
	}
	return false
}

func (r *request) outcome() error {
	status := r.result.Status()
	switch {
	case status.Code() != nvmetcp.Success:
		return status
	case r.damaged:
		return nvmetcp.ErrDataDigest
	case !r.out && int(r.received) != len(r.data):
		return fmt.Errorf("%d of %d bytes came: %w", r.received, len(r.data), nvmetcp.DataTransferError|nvmetcp.DNR)
	}
	return nil
}

// read is the reader goroutine.
func (q *queue) read() {
	for {
		pdu, err := q.reader.Next()
		if err == nil {
			err = q.handle(pdu)
		}
		if err != nil {
			q.fail(err)
			return
		}
		q.pace.Took()
		if q.reader.Buffered() { // otherwise Read sends
			q.flush(false)
		}
	}
}

// Read reads for the Reader.
func (q *queue) Read(p []byte) (int, error) { return q.ReadBoth(p, nil) }

// ReadBoth reads for the Reader. Before it may wait, it sends what was submitted.
// Submissions that the completions in this read cause then go out together.
func (q *queue) ReadBoth(p, more []byte) (int, error) {
	q.flush(true)
	n, err := q.sock.ReadBoth(p, more)
	if n > 0 {
		q.hearing.hear()
	}
	q.pace.End(q.sock.Idled())
	q.mu.Lock()
	q.corked = true
	q.mu.Unlock()
	return n, err
}

// flush sends what was submitted while the reader completes a batch: all of it if that was
// the end of the batch, and otherwise if the controller should have it before.
func (q *queue) flush(end bool) {
	q.mu.Lock()
	if end {
		q.corked = false
	}
	ready := q.transfers.head != nil || q.waiting.head != nil && len(q.free) > 0
	if !ready || q.sending || q.closed || !end && !q.pace.Due(q.fresh, q.bulk) {
		q.mu.Unlock()
		return
	}
	q.sending = true
	q.mu.Unlock()
	q.send()
}

// expecting reports whether the controller has something to answer.
func (q *queue) expecting() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.id != 0 && len(q.free) != len(q.slots)
}

// handle processes a PDU. An error ends the connection.
func (q *queue) handle(pdu *nvmetcp.PDU) error {
	switch pdu.Type {
	case nvmetcp.TypeCapsuleResp:
		return q.complete(pdu)
	case nvmetcp.TypeC2HData:
		return q.receive(pdu)
	case nvmetcp.TypeR2T:
		return q.grant(pdu)
	case nvmetcp.TypeC2HTermReq:
		return q.reader.TermReq()
	}
	return nvmetcp.Fatal(nvmetcp.FESSequence, 0, pdu.Head, fmt.Sprintf("%v on a connection that is established", pdu.Type))
}

// lookup returns the command in flight with an identifier.
func (q *queue) lookup(cid uint16) *request {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := int(cid & slotMask)
	if i >= len(q.slots) || q.slots[i].r == nil || q.slots[i].r.cid != cid {
		return nil
	}
	return q.slots[i].r
}

// leave frees a command's identifier.
func (q *queue) leave(cid uint16) *request {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := cid & slotMask
	if int(i) >= len(q.slots) || q.slots[i].r == nil || q.slots[i].r.cid != cid {
		return nil
	}
	r := q.slots[i].r
	q.slots[i].r = nil
	q.free = append(q.free, i)
	if q.id != 0 && len(q.free) == len(q.slots) {
		q.sock.Owed(false)
	}
	return r
}

func unknown(pdu *nvmetcp.PDU, cid uint16, fei uint32) error {
	return nvmetcp.Fatal(nvmetcp.FESInvalidHeader, fei, pdu.Head, fmt.Sprintf("%v for command %#x, which is not under way", pdu.Type, cid))
}

func (q *queue) complete(pdu *nvmetcp.PDU) error {
	c := pdu.Completion()
	r := q.leave(c.CID())
	if r == nil {
		return unknown(pdu, c.CID(), 20)
	}
	q.done(r, *c)
	return nil
}

// done completes a command whose identifier has been freed.
func (q *queue) done(r *request, c nvmetcp.Completion) {
	r.result = c
	if r.complete() {
		r.finish()
	}
}

// receive copies data into the command's buffer. A command's data PDUs come in order (TCP,
// 3.3.2), and each offset is checked.
func (q *queue) receive(pdu *nvmetcp.PDU) error {
	d := pdu.Data()
	r := q.lookup(d.CID)
	switch {
	case r == nil:
		return unknown(pdu, d.CID, 8)
	case r.out || d.Offset != r.received || uint64(d.Offset)+uint64(d.Length) > uint64(len(r.data)):
		return nvmetcp.Fatal(nvmetcp.FESOutOfRange, 12, pdu.Head,
			fmt.Sprintf("C2HData of %d bytes at %d for a command that has %d of %d", d.Length, d.Offset, r.received, len(r.data)))
	}
	flags := pdu.Flags
	err := q.reader.ReadData(r.data[d.Offset:][:d.Length])
	if errors.Is(err, nvmetcp.ErrDataDigest) {
		r.damaged, err = true, nil
	}
	if err != nil {
		return err
	}
	r.received += d.Length
	if flags&nvmetcp.FlagSuccess != 0 {
		q.leave(d.CID)
		q.done(r, nvmetcp.Completion{})
	}
	return nil
}

// grant queues an R2T for the writer. As agreed in ICReq, a command has one R2T outstanding
// at a time, and they come in order.
func (q *queue) grant(pdu *nvmetcp.PDU) error {
	d := pdu.Data()
	q.mu.Lock()
	defer q.mu.Unlock()
	i := int(d.CID & slotMask)
	if i >= len(q.slots) || q.slots[i].r == nil || q.slots[i].r.cid != d.CID {
		return unknown(pdu, d.CID, 8)
	}
	r := q.slots[i].r
	switch {
	case !r.out || r.inCapsule || d.Length == 0 || d.Offset != r.granted || uint64(d.Offset)+uint64(d.Length) > uint64(len(r.data)):
		return nvmetcp.Fatal(nvmetcp.FESOutOfRange, 12, pdu.Head,
			fmt.Sprintf("R2T of %d bytes at %d for a command that has sent %d of %d", d.Length, d.Offset, r.granted, len(r.data)))
	case r.granting:
		return nvmetcp.Fatal(nvmetcp.FESLimitExceeded, 0, pdu.Head, "a second R2T of a command before the first is answered")
	}
	r.grant, r.granting = d, true
	r.granted += d.Length
	r.hold()
	q.transfers.push(r)
	q.fresh++
	q.bulk += int(d.Length)
	return nil
}

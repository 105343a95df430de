// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/nvmetcp"
)

// queue is one connection: a submission and a completion queue. Any goroutine submits; the
// writer goroutine sends all waiting requests with one write, and the reader goroutine
// completes all that one read brought.
type queue struct {
	id      uint16
	conn    net.Conn
	reader  *nvmetcp.Reader
	writer  *nvmetcp.Writer
	maxData int             // bytes of one H2CData
	capsule int             // bytes of in-capsule data
	lost    func(error)     // tells the session that the queue has ended
	dead    <-chan struct{} // the session has ended

	wake  chan struct{} // the writer has something to do
	quit  chan struct{}
	ended sync.WaitGroup // reader and writer
	clock atomic.Uint32  // stamps requests when they are sent; see session.watch

	mu        sync.Mutex
	waiting   list
	transfers list // R2Ts to answer; their requests are in slots
	slots     []slot
	free      []uint16
	corked    bool // the reader is completing a batch and will wake the writer after it
	closed    bool
	err       error // why the queue closed

	// Of the writer: the requests in nvmetcp.Writer, and the R2Ts it is answering.
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
	q := &queue{id: id, conn: conn, lost: s.fail, dead: s.dead, wake: make(chan struct{}, 1), quit: make(chan struct{})}
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
	q.waiting.push(r)
	wake := !q.corked
	q.mu.Unlock()
	if wake {
		q.kick()
	}
	return true
}

func (q *queue) kick() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
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

	for r := q.transfers.pop(); r != nil; r = q.transfers.pop() {
		if r.release() {
			r.finish()
		}
	}
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

// write is the writer goroutine.
func (q *queue) write() {
	for {
		select {
		case <-q.quit:
			return
		case <-q.wake:
		}
		// Let others submit first, so that one write carries all their requests.
		runtime.Gosched()
		for {
			if !q.gather() {
				break
			}
			err := q.writer.Flush()
			q.sent()
			if err != nil {
				q.fail(err)
				return
			}
		}
	}
}

// maxFlush is roughly how many bytes one write carries.
const maxFlush = 1 << 20

// gather adds what may be sent to the writer.
func (q *queue) gather() bool {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return false
	}
	for r := q.transfers.pop(); r != nil; r = q.transfers.pop() {
		q.grants = append(q.grants, grant{r, r.grant})
		r.granting = false
	}
	size := 0
	var astray list
	for q.waiting.head != nil && len(q.free) > 0 && size < maxFlush {
		r := q.waiting.pop()
		if r.done == nil && !r.space.present() {
			astray.push(r) // removed since; its NSID may belong to another one
			continue
		}
		q.assign(r)
		size += nvmetcp.CapsuleCmdSize
		if r.inCapsule {
			size += len(r.data)
		}
	}
	q.mu.Unlock()
	for r := astray.pop(); r != nil; r = astray.pop() {
		r.space.controller.route(r)
	}
	for _, r := range q.batch {
		if r.inCapsule {
			q.writer.Command(&r.cmd, r.data)
		} else {
			q.writer.Command(&r.cmd, nil)
		}
	}
	for _, g := range q.grants {
		q.batch = append(q.batch, g.r)
		q.transfer(g.r, g.data)
	}
	clear(q.grants)
	q.grants = q.grants[:0]
	return len(q.batch) > 0
}

// assign gives a request its command identifier. q.mu is held.
func (q *queue) assign(r *request) {
	i := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	s := &q.slots[i]
	s.use += 1 << slotBits
	s.r = r
	r.cid = s.use | i
	r.tick = q.clock.Load()
	r.sent = true
	r.prepare(q)
	r.cmd.SetCID(r.cid)
	r.hold()
	q.batch = append(q.batch, r)
}

// transfer adds the data that an R2T asked for, unless the command is already done.
func (q *queue) transfer(r *request, g nvmetcp.DataHeader) {
	if r.state.Load()&completed != 0 {
		return
	}
	for left := r.data[g.Offset:][:g.Length]; len(left) > 0; {
		n := min(len(left), q.maxData)
		flags := uint8(0)
		if n == len(left) {
			flags = nvmetcp.FlagLastPDU
		}
		q.writer.Data(nvmetcp.TypeH2CData, flags, g, left[:n])
		g.Offset += uint32(n)
		left = left[n:]
	}
}

// sent releases the requests that were written.
func (q *queue) sent() {
	for i, r := range q.batch {
		q.batch[i] = nil
		if r.release() {
			r.finish()
		}
	}
	q.batch = q.batch[:0]
}

// read is the reader goroutine.
func (q *queue) read() {
	for {
		pdu, err := q.reader.Next()
		if err == nil {
			// If the buffer holds more PDUs, wake the writer only after the last one: the
			// submissions that these completions cause then go out together.
			q.cork(q.reader.Buffered())
			err = q.handle(pdu)
		}
		if err != nil {
			q.fail(err)
			return
		}
	}
}

func (q *queue) cork(on bool) {
	if q.corked == on {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.corked = on
	if !on && (q.transfers.head != nil || q.waiting.head != nil && len(q.free) > 0) {
		q.kick()
	}
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
	if !q.corked && q.waiting.head != nil {
		q.kick()
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
	if !q.corked {
		q.kick()
	}
	return nil
}

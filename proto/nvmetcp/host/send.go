// SPDX-License-Identifier: Apache-2.0

package host

import (
	"runtime"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// One goroutine at a time sends: the one that has the token (queue.sending). It is
//
//   - the caller that submits the only request: it need not wake another goroutine;
//   - the reader, for everything that is submitted while it completes a batch;
//   - the writer goroutine, for a burst of requests from elsewhere, and for the rest when
//     the socket is full, which is when the others hand the token over.

// noteLocked counts a request for socket.Pace.
func (q *queue) noteLocked(r *request) {
	q.fresh++
	if r.op == block.OpWrite && r.length <= int64(q.capsule) {
		q.bulk += int(r.length)
	}
}

// kick wakes the writer.
func (q *queue) kick() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// maxRounds is how many times a goroutine that does not only send sends what others have
// submitted meanwhile.
const maxRounds = 4

// send sends what waits, without blocking. The caller has taken the token; send returns it
// or hands it to the writer.
func (q *queue) send() {
	for range maxRounds {
		if !q.gather() {
			return
		}
		done, err := q.sock.Send(&q.pieces, false)
		if err == nil && !done {
			q.handOver()
			return
		}
		if !q.sent(err) {
			return
		}
	}
	if q.giveBack() {
		q.kick()
	}
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
		mine, more := q.takeOver()
		for mine && (more || q.gather()) {
			more = false
			_, err := q.sock.Send(&q.pieces, true)
			if !q.sent(err) {
				return
			}
		}
	}
}

// takeOver takes the token for the writer, if it is free or meant for it. more means that
// there is a rest to send.
func (q *queue) takeOver() (mine, more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.full {
		q.full = false
		return true, true
	}
	if q.sending {
		return false, false // its holder sends what has been submitted until now
	}
	q.sending = true
	return true, false
}

// handOver gives the token to the writer, with a rest that the socket did not take. If the writer has
// ended meanwhile, awaitSender takes it.
func (q *queue) handOver() {
	q.mu.Lock()
	q.full = true
	q.quiet.Broadcast()
	q.mu.Unlock()
	q.kick()
}

// giveBack returns the token, and reports whether there is more to send.
func (q *queue) giveBack() (more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sending = false
	q.quiet.Broadcast()
	return !q.corked && (q.transfers.head != nil || q.waiting.head != nil && len(q.free) > 0)
}

// awaitSender waits until nobody sends any more, after the connection was closed and the
// writer has ended.
func (q *queue) awaitSender() {
	q.mu.Lock()
	for q.sending && !q.full {
		q.quiet.Wait()
	}
	rest := q.full
	q.full = false
	q.mu.Unlock()
	if rest {
		q.sent(errLost)
	}
}

// maxFlush is roughly how many bytes one write carries.
const maxFlush = 1 << 20

// gather makes PDUs of what may be sent. If nothing may, it returns the token.
func (q *queue) gather() bool {
	astray, some := q.take()
	for r := astray.pop(); r != nil; r = astray.pop() {
		r.space.controller.route(r)
	}
	if !some {
		return false
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
	q.pieces = q.writer.Pieces()
	return true
}

// take moves what may be sent to batch and grants. If nothing may, it returns the token.
// astray are requests for a namespace that was removed; its NSID may belong to another one.
func (q *queue) take() (astray list, some bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.fresh, q.bulk = 0, 0
	if !q.closed {
		astray = q.takeLocked()
	}
	if len(q.batch)+len(q.grants) > 0 {
		return astray, true
	}
	q.sending = false
	q.quiet.Broadcast()
	return astray, false
}

func (q *queue) takeLocked() (astray list) {
	for r := q.transfers.pop(); r != nil; r = q.transfers.pop() {
		q.grants = append(q.grants, grant{r, r.grant})
		r.granting = false
	}
	size := 0
	for q.waiting.head != nil && len(q.free) > 0 && size < maxFlush {
		r := q.waiting.pop()
		if r.done == nil && !r.space.present() {
			astray.push(r)
			continue
		}
		q.assign(r)
		size += nvmetcp.CapsuleCmdSize
		if r.inCapsule {
			size += len(r.data)
		}
	}
	return astray
}

// assign gives a request its command identifier. q.mu is held.
func (q *queue) assign(r *request) {
	if q.id != 0 && len(q.free) == len(q.slots) {
		q.sock.Owed(true)
	}
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

// sent releases the requests that were sent, or were not because of err, which ends the
// queue. It then also returns the token, and false.
func (q *queue) sent(err error) bool {
	q.writer.Reset()
	q.pieces = nil
	for i, r := range q.batch {
		q.batch[i] = nil
		if r.release() {
			r.finish()
		}
	}
	q.batch = q.batch[:0]
	if err == nil {
		return true
	}
	q.fail(err)
	q.giveBack()
	return false
}

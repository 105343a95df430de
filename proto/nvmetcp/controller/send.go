// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"time"

	"weft.dev/weft/proto/nvmetcp"
)

// push adds something to be sent with the batch; the reader's goroutine calls it.
func (c *conn) push(o outgoing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closing {
		c.out = append(c.out, o)
	}
}

// deliver adds something to be sent, from any goroutine, and sends it unless
// somebody is at it, or the reader is busy and will. While other commands are under
// way, a goroutine sends it: whoever brings this completion may be about to bring
// theirs, and all of them go with one call. On an admin queue it always does: who
// tells of an event holds locks, and what waits for memory, and goes on once
// something was sent, takes them.
func (c *conn) deliver(o outgoing) {
	c.mu.Lock()
	if c.closing {
		c.mu.Unlock()
		return
	}
	c.out = append(c.out, o)
	if c.reading || c.sending {
		c.mu.Unlock()
		return
	}
	c.sending = true
	q := c.bound.Load()
	alone := q != nil && q.id != 0 && len(c.requests)-len(c.free) <= len(c.out)
	c.mu.Unlock()
	if alone {
		c.send(false)
		return
	}
	go c.sendSoon()
}

// send writes what waits until there is nothing or the socket is full: then a
// goroutine goes on with it. The caller has set c.sending, and send or that
// goroutine takes it back.
func (c *conn) send(block bool) {
	for {
		if len(c.pieces) == 0 && !c.gather() {
			return
		}
		done, err := c.sock.write(&c.pieces, block)
		if err != nil {
			c.breakOff()
			return
		}
		if !done {
			c.hire()
			return
		}
		c.sent()
	}
}

// hire starts the goroutine that goes on when the socket is full.
func (c *conn) hire() {
	c.stuck.Store(time.Now().UnixNano())
	go c.send(true)
}

// awaitSender waits until what was to be sent has been, or cannot be.
func (c *conn) awaitSender() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.sending {
		c.quiet.Wait()
	}
}

// gather makes PDUs of what waits. It gives the token back if there is nothing.
func (c *conn) gather() bool {
	c.mu.Lock()
	n := min(len(c.out), maxBatch)
	if n == 0 {
		c.sending = false
		c.quiet.Broadcast()
		c.stuck.Store(0)
		c.mu.Unlock()
		return false
	}
	c.batch = append(c.batch[:0], c.out[:n]...)
	c.out = c.out[:copy(c.out, c.out[n:])]
	c.mu.Unlock()
	for i := range c.batch {
		c.encode(&c.batch[i])
	}
	c.pieces = c.w.Pieces()
	return true
}

// encode adds the PDUs of o to the Writer.
func (c *conn) encode(o *outgoing) {
	r := o.r
	switch o.kind {
	case sendRaw:
		c.w.Raw(o.raw)
	case sendR2T:
		c.w.R2T(nvmetcp.DataHeader{CID: r.cmd.CID(), TTAG: r.tag, Length: uint32(r.want)})
		o.r = nil // from now on it may be with the reader
	case sendReply:
		c.encodeReply(r)
	}
}

// encodeReply adds C2HData, if the command has data for the host and did well,
// and CapsuleResp, unless SUCCESS stands for it (TCP, 3.3.2.2).
func (c *conn) encodeReply(r *request) {
	head := c.nextHead()
	data := r.reply
	if r.status == nvmetcp.Success && len(data) > 0 {
		flags := nvmetcp.FlagLastPDU
		if r.result == 0 {
			flags |= nvmetcp.FlagSuccess
		}
		c.w.Data(nvmetcp.TypeC2HData, flags, nvmetcp.DataHeader{CID: r.cmd.CID()}, data)
		if r.result == 0 {
			return
		}
	}
	var cqe nvmetcp.Completion
	cqe.SetResult(r.result)
	cqe.SetSQHead(head)
	cqe.SetCID(r.cmd.CID())
	cqe.SetStatus(r.status)
	c.w.Completion(&cqe)
}

// nextHead is the submission queue's head after one more command.
func (c *conn) nextHead() uint16 {
	q := c.bound.Load()
	if q == nil || q.noFlow {
		return 0xffff
	}
	q.sqHead = (q.sqHead + 1) % q.size
	return uint16(q.sqHead)
}

// sent frees what a batch has sent, and starts who waits for memory.
func (c *conn) sent() {
	c.w.Reset()
	c.pieces = nil
	c.mu.Lock()
	for i, o := range c.batch {
		if o.r != nil {
			c.freeLocked(o.r)
		}
		c.batch[i] = outgoing{}
	}
	ready := c.admitLocked()
	c.mu.Unlock()
	for _, r := range ready {
		r.proceed()
	}
}

// breakOff drops what was to be sent: the socket is broken. The reader finds
// that out and ends the connection.
func (c *conn) breakOff() {
	c.dead.Store(true)
	c.sock.Close()
	c.w.Reset()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closing = true
	c.out, c.pieces = nil, nil
	c.sending = false
	c.quiet.Broadcast()
}

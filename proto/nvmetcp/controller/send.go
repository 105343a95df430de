// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"weft.dev/weft/proto/nvmetcp"
)

// push adds something to the batch. Only the reader's goroutine calls it.
func (c *conn) push(o outgoing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closing {
		c.out = append(c.out, o)
	}
}

// deliver adds something to send, from any goroutine. It also sends it, unless another
// goroutine is sending or the reader is busy and will send. While other commands are in
// flight, it leaves the sending to a new goroutine: the caller may have more completions,
// and one call then sends them all. On an admin queue it always does so: a caller with an
// event holds locks, and sending may continue a request that waited for memory and takes
// them.
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

// send writes until nothing is left or the socket is full; in the latter case a goroutine
// continues. The caller has taken the token (c.sending); send or that goroutine returns it.
func (c *conn) send(block bool) {
	for {
		if len(c.pieces) == 0 && !c.gather() {
			return
		}
		done, err := c.sock.Send(&c.pieces, block)
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

// hire starts the goroutine that continues when the socket is full.
func (c *conn) hire() {
	c.stuck.Store(c.now())
	go c.send(true)
}

// awaitSender waits until everything has been sent or the socket has failed.
func (c *conn) awaitSender() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.sending {
		c.quiet.Wait()
	}
}

// gather makes PDUs of what waits. If nothing does, it returns the token.
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
		o.r = nil // from now on the reader may own it
	case sendReply:
		c.encodeReply(r)
	}
}

// encodeReply adds C2HData, if the command succeeded and has data for the host, and
// CapsuleResp, unless the SUCCESS flag replaces it (TCP, 3.3.2.2).
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

// nextHead advances the submission queue's head by one command.
func (c *conn) nextHead() uint16 {
	q := c.bound.Load()
	if q == nil || q.noFlow {
		return 0xffff
	}
	q.sqHead = (q.sqHead + 1) % q.size
	return uint16(q.sqHead)
}

// sent frees a batch's requests and continues those that waited for memory.
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
	c.capsules.settle()
	ready := c.admitLocked()
	c.mu.Unlock()
	for _, r := range ready {
		r.proceed()
	}
}

// breakOff drops the unsent data, because the socket has failed. The reader notices and
// ends the connection.
func (c *conn) breakOff() {
	c.dead.Store(true)
	c.sock.Close()
	c.w.Reset()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closing {
		c.closing = true
		close(c.shut)
	}
	c.out, c.pieces = nil, nil
	c.sending = false
	c.quiet.Broadcast()
}

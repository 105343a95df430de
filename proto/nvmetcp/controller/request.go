// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// request is a command in progress. A connection allocates as many as its queue can need,
// and reuses them.
type request struct {
	c   *conn
	tag uint16 // its index in c.requests; the transfer tag of its R2T
	cmd nvmetcp.Command

	ns    *namespace // of I/O commands
	side  uint32     // of ns.inflight, while in the Device
	io    block.IO   // the IO in the Device
	parts []block.IO // the IOs in the Device if one is not enough

	buf      *buffer
	held     int            // buf's share of c.asked
	capsule  int            // buf's share of c.capsules
	data     []byte         // memory for the data from or to the host
	size     int            // of data, while the request waits for memory
	ready    func(*request) // called when there is memory
	want     int            // bytes that the host sends
	received uint32         // of them, the bytes received in H2CData
	taking   bool           // H2CData may come; guarded by c.mu
	then     func(*request) // called when the host's data has arrived

	status nvmetcp.Status
	result uint64
	reply  []byte // data for the host
}

// take returns a free request for a command, or nil if the host has sent more commands than
// its queue has entries.
func (c *conn) take() *request {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.free); n > 0 {
		r := c.free[n-1]
		c.free = c.free[:n-1]
		return r
	}
	if len(c.requests) == c.limit {
		return nil
	}
	r := &request{c: c, tag: uint16(len(c.requests))}
	r.io.Owner, r.io.Done = r, completed
	c.requests = append(c.requests, r)
	return r
}

// freeLocked frees a request and its memory.
func (c *conn) freeLocked(r *request) {
	c.asked.held -= r.held
	c.capsules.held -= r.capsule
	c.t.buffers.put(r.buf)
	*r = request{c: c, tag: r.tag, io: block.IO{Owner: r, Done: completed}}
	c.free = append(c.free, r)
}

// withMemory allocates n bytes for r and then calls ready. If the connection, its host or the
// target already holds as much as it may, r first waits until others have been answered; those of
// a connection are continued in order of arrival.
func (c *conn) withMemory(r *request, n int, ready func(*request)) {
	r.ready, r.size, r.held = ready, n, bufferSize(n)
	c.mu.Lock()
	if len(c.waiting) > 0 || !c.holdLocked(r.held) {
		if !c.closing {
			c.waiting = append(c.waiting, r)
		}
		c.mu.Unlock()
		return
	}
	c.mu.Unlock()
	r.proceed()
}

// holdLocked reports whether there is memory for n bytes, and then holds them. If only the host or
// the target lacks it, the connection gets its turn when there is some.
func (c *conn) holdLocked(n int) bool {
	switch {
	case c.asked.held+n > c.memoryLimit:
		return false
	case c.asked.take(n):
		return true
	case !c.asking && !c.closing:
		lacks := c.asked.lacks(n)
		c.asking = true
		c.asks = c.asked.account.await(lacks, func() { c.given(lacks) })
	}
	return false
}

// admitLocked takes off the queue the requests for which there is now memory.
func (c *conn) admitLocked() (ready []*request) {
	for len(c.waiting) > 0 && c.holdLocked(c.waiting[0].held) {
		ready = append(ready, c.waiting[0])
		c.waiting = c.waiting[1:]
	}
	c.asked.settle()
	return ready
}

// proceed allocates r's memory and continues it.
func (r *request) proceed() {
	r.buf = r.c.t.buffers.get(r.size)
	r.data = r.buf.b[:r.size]
	r.ready(r)
}

// finish ends a command. Its reply goes to the host only if status is Success.
func (r *request) finish(status nvmetcp.Status) {
	r.status = status
	if status != nvmetcp.Success {
		r.reply = nil
	}
	r.c.deliver(outgoing{r: r, kind: sendReply})
}

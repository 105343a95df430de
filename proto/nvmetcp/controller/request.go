// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// request is a command under way. A connection has as many as its queue can
// need, and uses them again and again.
type request struct {
	c   *conn
	tag uint16 // its place in c.requests; the transfer tag of its R2T
	cmd nvmetcp.Command

	ns    *namespace // of I/O commands
	side  uint32     // of ns.gate, while in the Device
	io    block.IO   // what is with the Device
	parts []block.IO // what is with the Device if one IO is not enough

	buf      *buffer
	held     int            // what buf counts of c.held
	data     []byte         // memory for what the host sends, or what it gets
	size     int            // of data, while it waits for memory
	ready    func(*request) // there is memory
	want     int            // bytes that the host sends
	received uint32         // of them, in H2CData
	taking   bool           // H2CData is welcome; guarded by c.mu
	then     func(*request) // the host's data is there

	status nvmetcp.Status
	result uint64
	reply  []byte // data for the host
}

// take finds a free request for a command; nil if the host has more under way
// than its queue has entries.
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

// freeLocked takes a request and its memory back.
func (c *conn) freeLocked(r *request) {
	c.held -= r.held
	c.t.memory.put(r.buf)
	*r = request{c: c, tag: r.tag, io: block.IO{Owner: r, Done: completed}}
	c.free = append(c.free, r)
}

// withMemory gets r memory of n bytes and then calls ready, at once or, if the
// connection holds as much as it may, when others have been answered: first
// come, first served.
func (c *conn) withMemory(r *request, n int, ready func(*request)) {
	r.ready, r.size, r.held = ready, n, bufferSize(n)
	c.mu.Lock()
	if len(c.waiting) > 0 || c.held+r.held > c.memoryLimit {
		c.waiting = append(c.waiting, r)
		c.mu.Unlock()
		return
	}
	c.held += r.held
	c.mu.Unlock()
	r.proceed()
}

// admitLocked takes those off the queue for whom there is memory now.
func (c *conn) admitLocked() (ready []*request) {
	for len(c.waiting) > 0 && c.held+c.waiting[0].held <= c.memoryLimit {
		ready = append(ready, c.waiting[0])
		c.held += c.waiting[0].held
		c.waiting = c.waiting[1:]
	}
	return ready
}

// proceed gives r its memory and lets it go on.
func (r *request) proceed() {
	r.buf = r.c.t.memory.get(r.size)
	r.data = r.buf.b[:r.size]
	r.ready(r)
}

// finish ends a command; reply goes to the host if status is Success.
func (r *request) finish(status nvmetcp.Status) {
	r.status = status
	if status != nvmetcp.Success {
		r.reply = nil
	}
	r.c.deliver(outgoing{r: r, kind: sendReply})
}

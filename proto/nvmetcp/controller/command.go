// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"

	"weft.dev/weft/proto/nvmetcp"
)

const dnr = nvmetcp.DNR

// command starts the command of a capsule. An error ends the connection.
func (c *conn) command(p *nvmetcp.PDU) error {
	r := c.take()
	if r == nil {
		return nvmetcp.Fatal(nvmetcp.FESSequence, 0, p.Head, fmt.Sprintf("more than %d commands under way", c.limit/2))
	}
	r.cmd = *p.Command()
	q := c.bound.Load()
	switch {
	case c.leaves.Load():
		r.finish(nvmetcp.InternalPathError) // the host may try again, with another controller
	case r.cmd.Fused() != 0 || r.cmd.PSDT() != 1:
		r.finish(nvmetcp.InvalidField | dnr)
	case r.cmd.Opcode() == nvmetcp.OpFabrics:
		return c.fabrics(r, p, q)
	case q == nil:
		r.finish(nvmetcp.CommandSequenceError | dnr)
	case !q.proven:
		r.finish(nvmetcp.AuthenticationRequired | dnr)
	case q.id == 0:
		return c.admin(r, p, q)
	default:
		return c.io(r, p, q)
	}
	return nil
}

// fetch gets n bytes of data from the host into memory of size bytes, from the capsule or
// by R2T, and then calls then.
func (c *conn) fetch(r *request, p *nvmetcp.PDU, n, size int, then func(*request)) error {
	sgl := r.cmd.SGL()
	if int64(sgl.Length) != int64(n) {
		r.finish(nvmetcp.InvalidSGLLength | dnr)
		return nil
	}
	switch sgl.Kind {
	case nvmetcp.SGLInCapsule:
		if sgl.Address > uint64(p.DataLen) || uint64(n) > uint64(p.DataLen)-sgl.Address {
			r.finish(nvmetcp.InvalidSGLOffset | dnr)
			return nil
		}
		return c.fromCapsule(r, int(p.DataLen), int(sgl.Address), n, size, then)
	case nvmetcp.SGLTransport:
		if c.passing.Load() {
			return c.postpone(r)
		}
		r.then, r.want = then, n
		c.withMemory(r, size, (*request).askForData)
		return nil
	}
	r.finish(nvmetcp.InvalidSGLType | dnr)
	return nil
}

// fromCapsule takes n of the capsule's total bytes of data. This memory does not count
// towards the connection's limit, since it cannot exceed the queue's entries times the capsule's
// size. It has a budget of its own, since waiting for it blocks the data of other commands behind it.
func (c *conn) fromCapsule(r *request, total, offset, n, size int, then func(*request)) error {
	most := max(total, offset+size)
	if err := c.holdCapsule(r, bufferSize(most)); err != nil {
		return err
	}
	r.buf = c.t.buffers.get(most)
	err := c.r.ReadData(r.buf.b[:total])
	if errors.Is(err, nvmetcp.ErrDataDigest) {
		r.finish(nvmetcp.TransientTransportError)
		return nil
	}
	if err != nil {
		return err
	}
	r.data = r.buf.b[offset : offset+size]
	r.want = n
	then(r)
	return nil
}

// askForData sends one R2T for all of the data.
func (r *request) askForData() {
	r.c.mu.Lock()
	r.taking = true
	if r.c.taking++; r.c.taking == 1 {
		r.c.owes.Store(r.c.now())
	}
	r.c.mu.Unlock()
	r.c.deliver(outgoing{r: r, kind: sendR2T})
}

// data processes an H2CData.
func (c *conn) data(p *nvmetcp.PDU) error {
	d := p.Data()
	r := c.taker(d)
	switch {
	case r == nil:
		return nvmetcp.Fatal(nvmetcp.FESInvalidHeader, 10, p.Head, fmt.Sprintf("H2CData for transfer %d of command %d, for which there is none", d.TTAG, d.CID))
	case d.Offset != r.received:
		return nvmetcp.Fatal(nvmetcp.FESOutOfRange, 12, p.Head, fmt.Sprintf("H2CData at %d, where %d is next", d.Offset, r.received))
	case int64(p.DataLen) > int64(r.want)-int64(r.received):
		return nvmetcp.Fatal(nvmetcp.FESOutOfRange, 16, p.Head, fmt.Sprintf("H2CData of %d bytes at %d of %d", p.DataLen, d.Offset, r.want))
	case p.Flags&nvmetcp.FlagLastPDU != 0 && int64(p.DataLen) != int64(r.want)-int64(r.received):
		return nvmetcp.Fatal(nvmetcp.FESInvalidHeader, 1, p.Head, fmt.Sprintf("H2CData says it is the last at %d of %d", d.Offset, r.want))
	}
	err := c.r.ReadData(r.data[r.received:][:p.DataLen])
	if errors.Is(err, nvmetcp.ErrDataDigest) {
		r.status, err = nvmetcp.TransientTransportError, nil
	}
	if err != nil {
		return err
	}
	if r.received += p.DataLen; int(r.received) < r.want {
		c.owes.Store(c.now())
		return nil
	}
	c.mu.Lock()
	r.taking = false
	if c.taking--; c.taking > 0 {
		c.owes.Store(c.now())
	} else {
		c.owes.Store(0)
	}
	c.mu.Unlock()
	switch {
	case r.status != nvmetcp.Success:
		r.finish(r.status)
	case c.leaves.Load():
		r.finish(nvmetcp.InternalPathError)
	default:
		r.then(r)
	}
	return nil
}

// taker returns the request that waits for the data d, or nil.
func (c *conn) taker(d nvmetcp.DataHeader) *request {
	if int(d.TTAG) >= len(c.requests) {
		return nil
	}
	r := c.requests[d.TTAG]
	c.mu.Lock() // a lying peer may name a request that other goroutines hold
	defer c.mu.Unlock()
	if !r.taking || r.cmd.CID() != d.CID {
		return nil
	}
	return r
}

// answer gets memory for a reply of n bytes and then calls then to fill r.data.
func (c *conn) answer(r *request, n int, then func(*request)) {
	if sgl := r.cmd.SGL(); sgl.Kind != nvmetcp.SGLTransport || int64(sgl.Length) != int64(n) {
		r.finish(nvmetcp.InvalidSGLLength | dnr)
		return
	}
	if n == 0 {
		r.finish(nvmetcp.Success)
		return
	}
	c.withMemory(r, n, then)
}

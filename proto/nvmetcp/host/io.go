// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// Submit starts an IO: see [block.Device]. Reads, writes and zeroes of any length are split
// into as many commands as needed. If one of the commands fails, the IO fails.
func (n *Namespace) Submit(io *block.IO) { n.submit(io, false) }

// submit is Submit. If failed is set, the IO fails instead of waiting when there is no
// connection or it is lost.
func (n *Namespace) submit(io *block.IO, failed bool) {
	c, a := n.controller, n.state.Load()
	if io.Op == block.OpMap {
		n.submitMap(io)
		return
	}
	c.outstanding.Add(1)
	c.use()
	err := a.Geometry.CheckIO(io)
	if c.closing.Load() {
		err = block.ErrGone
	}
	limit := n.limit(a, io)
	if err == nil && limit == 0 && c.ctx.Err() != nil {
		err = block.ErrGone
	}
	if err != nil || limit == 0 {
		io.Complete(err) // needs no command: a discard where there is none, or a flush without a cache
		c.left()
		return
	}
	if io.Op == block.OpFlush || io.Len <= limit {
		r := n.request(io, io.Off, io.Len, failed)
		r.io = io
		c.route(r)
		return
	}
	s := splits.Get().(*split)
	s.io = io
	s.left.Store((io.Len + limit - 1) / limit)
	for off, left := io.Off, io.Len; left > 0; {
		length := min(left, limit)
		r := n.request(io, off, length, failed)
		r.split = s
		off, left = off+length, left-length
		c.route(r) // io and s may be gone after the last part
	}
}

// limit is the most bytes that one command of the IO can cover; 0 means no command is
// needed.
func (n *Namespace) limit(a *namespaceState, io *block.IO) int64 {
	switch io.Op {
	case block.OpFlush:
		if a.Geometry.VolatileCache {
			return 1
		}
		return 0
	case block.OpDiscard:
		if a.canDiscard {
			return maxDiscard << a.shift
		}
		return 0
	case block.OpWriteZeroes:
		if n.hasZeroes(a) {
			return a.maxZeroes
		}
		return a.zeroesAsData()
	}
	return a.maxIO
}

// hasZeroes reports whether Write Zeroes works for the namespace. A controller may announce
// the command and not support it here: Linux's target does so over a file system without
// it, and for fewer blocks than the command can name.
func (n *Namespace) hasZeroes(a *namespaceState) bool { return a.maxZeroes > 0 && !n.plain.Load() }

// zeroesAsData is the most zeroes that one Write can carry.
func (a *namespaceState) zeroesAsData() int64 { return min(a.maxIO, int64(len(zeroes))) }

// zeroes is the data of Writes that stand in for Write Zeroes.
var zeroes [64 << 10]byte

// request makes the request for a part of an IO.
func (n *Namespace) request(io *block.IO, off, length int64, failed bool) *request {
	r := requests.Get().(*request)
	r.space, r.op, r.offset, r.length, r.fua, r.unmap, r.failed = n, io.Op, off, length, io.FUA, io.Unmap, failed
	if io.Op == block.OpRead || io.Op == block.OpWrite {
		at := off - io.Off
		r.data = io.Data[at : at+length : at+length]
	}
	return r
}

// prepare builds the command of an IO for a queue. Other commands are ready already.
func (r *request) prepare(q *queue) {
	if r.done != nil {
		return
	}
	a := r.space.state.Load()
	r.cmd = nvmetcp.Command{}
	r.cmd.SetNSID(a.NSID)
	r.cmd.SetOpcode(r.opcode(a))
	r.out = r.cmd.DataDirection() == nvmetcp.ToController
	switch r.op {
	case block.OpFlush:
	case block.OpDiscard:
		r.cmd.SetRangeCount(1)
		r.cmd.SetCDW(11, nvmetcp.DatasetDeallocate)
		r.data = nvmetcp.Range{Blocks: uint32(r.length >> a.shift), Start: uint64(r.offset) >> a.shift}.Append(r.ranges[:0])
	case block.OpWriteZeroes:
		r.data = nil
		if r.out {
			r.data = zeroes[:min(a.zeroesAsData(), r.length-r.zeroed)]
		} else if r.unmap && a.canUnmap {
			r.cmd.SetDeallocate()
		}
		r.cover(a)
	default:
		r.cover(a)
	}
	r.inCapsule = r.out && len(r.data) <= q.capsule
	if r.inCapsule {
		r.cmd.SetSGL(nvmetcp.InCapsule(uint32(len(r.data))))
	} else {
		r.cmd.SetSGL(nvmetcp.Transport(uint32(len(r.data))))
	}
}

func (r *request) opcode(a *namespaceState) nvmetcp.Opcode {
	switch r.op {
	case block.OpRead:
		return nvmetcp.IORead
	case block.OpFlush:
		return nvmetcp.IOFlush
	case block.OpDiscard:
		return nvmetcp.IODatasetManagement
	case block.OpWriteZeroes:
		if r.space.hasZeroes(a) && r.zeroed == 0 {
			return nvmetcp.IOWriteZeroes
		}
	}
	return nvmetcp.IOWrite
}

// zeroesMore reports whether a Write Zeroes needs another command after this outcome: the
// next Write, if zeroes are written as data, or the first one, if the controller has just
// refused Write Zeroes.
func (r *request) zeroesMore(err error) bool {
	switch {
	case r.done != nil || r.op != block.OpWriteZeroes:
		return false
	case err == nil && r.out:
		r.zeroed += int64(len(r.data))
		return r.zeroed < r.length
	case err != nil && !r.out && errors.Is(err, block.ErrUnsupported):
		r.space.plain.Store(true)
		return true
	}
	return false
}

// cover sets the command's block range.
func (r *request) cover(a *namespaceState) {
	offset, length := r.offset, r.length
	if r.out && r.op == block.OpWriteZeroes {
		offset, length = r.offset+r.zeroed, int64(len(r.data))
	}
	r.cmd.SetSLBA(uint64(offset) >> a.shift)
	r.cmd.SetBlocks(uint32(length >> a.shift))
	if r.fua {
		r.cmd.SetFUA()
	}
}

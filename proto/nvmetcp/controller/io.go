// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"errors"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// io starts an I/O command.
func (c *conn) io(r *request, p *nvmetcp.PDU, q *queue) error {
	if status := q.ctrl.operational(); status != nvmetcp.Success {
		r.finish(status)
		return nil
	}
	r.ns = q.ctrl.sub.namespace(r.cmd.NSID())
	if r.ns == nil {
		r.finish(nvmetcp.InvalidNamespace | dnr)
		return nil
	}
	switch r.cmd.Opcode() {
	case nvmetcp.IORead:
		c.read(r)
	case nvmetcp.IOWrite:
		return c.write(r, p, 1, (*request).submitWrite)
	case nvmetcp.IOCompare:
		return c.write(r, p, 2, (*request).submitCompare)
	case nvmetcp.IOFlush:
		r.io.Op = block.OpFlush
		r.submit()
	case nvmetcp.IOWriteZeroes:
		r.writeZeroes()
	case nvmetcp.IODatasetManagement:
		return c.datasetManagement(r, p)
	case nvmetcp.IOReservationRegister, nvmetcp.IOReservationAcquire, nvmetcp.IOReservationRelease, nvmetcp.IOReservationReport:
		return c.reservation(r, p)
	default:
		r.finish(nvmetcp.InvalidOpcode | dnr)
	}
	return nil
}

// locate fills in the range of a command's blocks. If it is invalid, locate ends the
// command.
func (r *request) locate(transfer bool) bool {
	off, n, ok := r.ns.shape.Load().span(r.cmd.SLBA(), r.cmd.Blocks())
	if !ok {
		r.finish(nvmetcp.LBAOutOfRange | dnr)
		return false
	}
	if transfer && n > int64(r.c.t.cfg.MDTS) {
		r.finish(nvmetcp.InvalidField | dnr)
		return false
	}
	r.io.Off, r.io.Len = off, n
	return true
}

func (c *conn) read(r *request) {
	if r.locate(true) {
		r.io.Op = block.OpRead
		c.answer(r, int(r.io.Len), (*request).submitRead)
	}
}

func (r *request) submitRead() {
	r.io.Data, r.reply = r.data, r.data
	r.submit()
}

// write fetches the data of a Write or Compare, into memory of times its size.
func (c *conn) write(r *request, p *nvmetcp.PDU, times int, then func(*request)) error {
	if !r.locate(true) {
		return nil
	}
	return c.fetch(r, p, int(r.io.Len), times*int(r.io.Len), then)
}

func (r *request) submitWrite() {
	r.io.Op, r.io.FUA, r.io.Data = block.OpWrite, r.durable(), r.data
	r.submit()
}

// durable reports whether the command's data must be on the medium before the answer.
func (r *request) durable() bool { return r.cmd.FUA() || r.association().writeThrough.Load() }

// submitCompare reads into the second half of the memory; completed compares the halves.
func (r *request) submitCompare() {
	r.io.Op, r.io.Data = block.OpRead, r.data[r.want:]
	r.submit()
}

func (r *request) writeZeroes() {
	if r.locate(false) {
		r.io.Op, r.io.FUA, r.io.Unmap = block.OpWriteZeroes, r.durable(), r.cmd.Deallocate()
		r.submit()
	}
}

func (c *conn) datasetManagement(r *request, p *nvmetcp.PDU) error {
	least := r.cmd.RangeCount() * nvmetcp.RangeSize
	// Linux always sends a full page.
	n := int(min(r.cmd.SGL().Length, pageSize))
	if n < least {
		r.finish(nvmetcp.InvalidSGLLength | dnr)
		return nil
	}
	return c.fetch(r, p, n, n, (*request).deallocate)
}

// deallocate discards the ranges in r.data.
func (r *request) deallocate() {
	if r.cmd.CDW(11)&nvmetcp.DatasetDeallocate == 0 {
		r.finish(nvmetcp.Success) // the other attributes are hints
		return
	}
	shape := r.ns.shape.Load()
	ranges, err := nvmetcp.ParseRanges(r.data, r.cmd.RangeCount())
	if err != nil {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	for _, one := range ranges {
		off, n, ok := shape.span(one.Start, one.Blocks)
		if !ok {
			r.finish(nvmetcp.LBAOutOfRange | dnr)
			return
		}
		if n > 0 {
			r.parts = append(r.parts, block.IO{Op: block.OpDiscard, Off: off, Len: n})
		}
	}
	if len(r.parts) == 0 {
		r.finish(nvmetcp.Success)
		return
	}
	r.io.Op = block.OpDiscard
	r.submit()
}

// submit gives r.io, or r.parts, to the Device.
func (r *request) submit() {
	c := r.c
	c.inside.Add(1)
	r.side = r.ns.inflight.enter()
	if status := r.admit(); status != nvmetcp.Success {
		r.ns.inflight.leave(r.side)
		c.leave()
		if status != abandoned {
			r.finish(status)
		}
		return
	}
	if limit := r.ns.shape.Load().maxIO; limit != 0 && r.io.Len > limit && len(r.parts) == 0 {
		r.split(limit)
	}
	if len(r.parts) > 0 {
		r.submitParts()
		return
	}
	r.ns.cfg.Device.Submit(&r.io)
}

// abandoned means that the connection is being closed. The host gets no answer, because it
// resends a command without an answer, while an answer would fail the command. A host that is
// connecting has no command here; see association.kill.
const abandoned = nvmetcp.AbortedSQDeletion

// admit returns Success if a command may go to the Device. Call it for a command in flight: a
// change that forbids the command is then either seen here, or waits for the command.
func (r *request) admit() nvmetcp.Status {
	ns, q := r.ns, r.c.bound.Load()
	write := r.io.Op != block.OpRead
	switch {
	case r.c.dead.Load() || q.ctrl.dead.Load():
		return abandoned
	case ns.gone.Load():
		return nvmetcp.InvalidNamespace | dnr
	case write && ns.cfg.ReadOnly && r.io.Op != block.OpFlush:
		return nvmetcp.NamespaceWriteProtected | dnr
	case !ns.mayDo(q.ctrl.host.ID, write):
		return nvmetcp.ReservationConflict | dnr
	}
	return r.c.port.state(ns.group.Load()).Status()
}

// pending counts the parts of a request that are in the Device.
type pending struct {
	left   atomic.Int32
	failed atomic.Pointer[error]
}

// split makes parts of r.io, each of at most limit bytes.
func (r *request) split(limit int64) {
	for at := int64(0); at < r.io.Len; at += limit {
		part := block.IO{Op: r.io.Op, FUA: r.io.FUA, Unmap: r.io.Unmap, Off: r.io.Off + at, Len: min(limit, r.io.Len-at)}
		if r.io.Data != nil {
			part.Data = r.io.Data[at:][:part.Len]
		}
		r.parts = append(r.parts, part)
	}
}

func (r *request) submitParts() {
	todo := &pending{}
	todo.left.Store(int32(len(r.parts)))
	ns, parts := r.ns, r.parts
	for i := range parts {
		parts[i].Done = func(io *block.IO) {
			if io.Err != nil {
				todo.failed.CompareAndSwap(nil, &io.Err)
			}
			if todo.left.Add(-1) > 0 {
				return
			}
			if err := todo.failed.Load(); err != nil {
				r.io.Err = *err
			}
			completed(&r.io)
		}
	}
	for i := range parts { // after the last part r may be done and reused
		ns.cfg.Device.Submit(&parts[i])
	}
}

// completed is called by the Device, from any goroutine.
func completed(io *block.IO) {
	r := io.Owner.(*request)
	defer r.c.leave()
	r.ns.inflight.leave(r.side)
	status := statusOf(io)
	r.count(status)
	if status == nvmetcp.Success && r.cmd.Opcode() == nvmetcp.IOCompare && !bytes.Equal(r.data[:r.want], r.data[r.want:]) {
		status = nvmetcp.CompareFailure | dnr
	}
	r.finish(status)
}

// count adds the command to the SMART counters.
func (r *request) count(status nvmetcp.Status) {
	n := &r.association().sub.counters
	switch {
	case status.SCT() == 2 && status.Code() != nvmetcp.CompareFailure:
		n.mediaErrors.Add(1)
	case r.io.Op == block.OpRead:
		n.reads.Add(1)
		n.read.Add(uint64(r.io.Len))
	case r.io.Op == block.OpWrite:
		n.writes.Add(1)
		n.written.Add(uint64(r.io.Len))
	}
}

// statusOf translates an IO's outcome for the host.
func statusOf(io *block.IO) nvmetcp.Status {
	if io.Err == nil {
		return nvmetcp.Success
	}
	return statusOfError(io.Err, io.Op)
}

func statusOfError(err error, op block.Op) nvmetcp.Status {
	var status nvmetcp.Status // declared here because errors.As moves it to the heap
	switch {
	case errors.As(err, &status):
		return status // the Device is an NVMe namespace itself
	case errors.Is(err, block.ErrRange):
		return nvmetcp.LBAOutOfRange | dnr
	case errors.Is(err, block.ErrFull): // there may be space later
		return nvmetcp.CapacityExceeded.Delay(fullDelay(err))
	case errors.Is(err, block.ErrReadOnly):
		return nvmetcp.NamespaceWriteProtected | dnr
	case errors.Is(err, block.ErrUnsupported):
		return nvmetcp.InvalidOpcode | dnr
	case errors.Is(err, block.ErrChecksum) && op == block.OpRead:
		return nvmetcp.GuardCheckError | dnr
	case errors.Is(err, block.ErrMedium) && op == block.OpRead:
		return nvmetcp.UnrecoveredReadError | dnr
	case errors.Is(err, block.ErrMedium):
		return nvmetcp.WriteFault | dnr
	}
	return nvmetcp.InternalError | dnr
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"math"

	"weft.dev/weft/proto/nvmetcp"
)

// admin executes a command of the admin queue.
func (c *conn) admin(r *request, p *nvmetcp.PDU, q *queue) error {
	a := q.ctrl
	op := r.cmd.Opcode()
	if op == nvmetcp.AdminKeepAlive {
		r.finish(nvmetcp.Success)
		return nil
	}
	if status := a.operational(); status != nvmetcp.Success {
		r.finish(status)
		return nil
	}
	switch op {
	case nvmetcp.AdminIdentify:
		c.answer(r, nvmetcp.IdentifySize, (*request).identify)
	case nvmetcp.AdminGetLogPage:
		c.logPage(r)
	case nvmetcp.AdminGetFeatures:
		c.getFeature(r, a)
	case nvmetcp.AdminSetFeatures:
		return c.setFeature(r, p, a)
	case nvmetcp.AdminAsyncEvent:
		a.takeEventRequest(r)
	case nvmetcp.AdminAbort:
		r.abort(a)
	case nvmetcp.AdminCheckpoint:
		r.finish(a.checkpoint(nvmetcp.ParseCheckpoint(&r.cmd)))
	case nvmetcp.AdminReplace:
		r.replaceElsewhere(a)
	case nvmetcp.AdminGetLBAStatus:
		c.getLBAStatus(r, a)
	case nvmetcp.AdminGetDifferences:
		g := nvmetcp.ParseGetDifferences(&r.cmd)
		c.findRanges(r, a, uint64(g.Length), g.Start, math.MaxUint64)
	case nvmetcp.AdminBehind:
		n := int(r.cmd.SGL().Length)
		if n > nvmetcp.MostBehindLen {
			r.finish(nvmetcp.InvalidSGLLength | dnr)
			return nil
		}
		return c.fetch(r, p, n, n, (*request).checkpointBehind)
	default:
		r.finish(nvmetcp.InvalidOpcode | dnr)
	}
	return nil
}

// abort ends an Asynchronous Event Request if the command names one. It ends no other
// command early: IO inside a Device cannot be called back, and a transfer that waits for
// the host is the host's to finish (Base, 5.1: best effort).
func (r *request) abort(a *association) {
	if uint16(r.cmd.CDW(10)) == 0 && a.abortEvent(uint16(r.cmd.CDW(10)>>16)) {
		r.finish(nvmetcp.Success)
		return
	}
	r.result = 1 // not aborted
	r.finish(nvmetcp.Success)
}

// replaceElsewhere has the target for which the subsystem speaks end the host's controllers, beside what else
// the connection does.
func (r *request) replaceElsewhere(a *association) {
	replace := a.sub.cfg.Replace
	if replace == nil {
		r.finish(nvmetcp.InvalidOpcode | dnr)
		return
	}
	c := r.c
	c.inside.Add(1)
	go func() {
		defer c.leave()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go func() {
			select {
			case <-a.killed: // nobody waits for the answer
				cancel()
			case <-ctx.Done():
			}
		}()
		if err := replace(ctx, nvmetcp.ReplacedBy(&r.cmd)); err != nil {
			c.t.log.Warn("controllers are not replaced", "subsystem", a.sub.cfg.NQN, "host", a.host.NQN, "err", err)
			r.finish(nvmetcp.InternalError)
			return
		}
		r.finish(nvmetcp.Success)
	}()
}

// respond copies a data structure into the reply and finishes the command.
func (r *request) respond(b []byte) {
	clear(r.data[copy(r.data, b):])
	r.reply = r.data
	r.finish(nvmetcp.Success)
}

func (r *request) association() *association { return r.c.bound.Load().ctrl }

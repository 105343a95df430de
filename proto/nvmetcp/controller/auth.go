// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// maxAuthMessage is larger than any DH-HMAC-CHAP message.
const maxAuthMessage = 8 << 10

// maxAuthAttempts limits how often an unauthenticated host may start over. Each start costs
// a DH key.
const maxAuthAttempts = 3

// proof is the state of a queue's authentication. It belongs to the reader.
type proof struct {
	keys     Host // without a HostKey there is nothing to prove
	machine  *dhchap.Controller
	attempts int
	open     bool   // a transaction is under way
	reply    []byte // waits for Authentication Receive
	err      error  // why the transaction failed; the reply says so, then the connection ends
}

// keysOf returns the keys of a's host.
func (s *Subsystem) keysOf(a *association) Host {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	return s.hosts[a.host.NQN]
}

// Unproven is a connection whose host had to prove its identity and did not.
type Unproven struct {
	Subsystem, Host block.NQN // Host: the name that it gave
	Address         string    // the remote end, with its port
	Err             error     // how the connection ended
}

// unproven tells that a host has not proven its identity: its proof was wrong, it sent other
// commands, or it went away. A controller that this end withdrew, as a fence does, does not count.
func (c *conn) unproven(q *queue, err error) {
	u := Unproven{Subsystem: q.ctrl.sub.cfg.NQN, Host: q.ctrl.host.NQN, Address: c.sock.RemoteAddr().String(), Err: err}
	c.log.Warn("host refused", "subsystem", u.Subsystem, "host", u.Host, "queue", q.id, "err", err)
	if c.t.cfg.Unproven != nil {
		c.t.cfg.Unproven(u)
	}
}

// errNotProven ends the connection of a host that has not authenticated.
var errNotProven = errors.New("the host has not authenticated")

// authenticate executes Authentication Send and Receive (Base, 6.1, 6.2 and 8.13).
func (c *conn) authenticate(r *request, p *nvmetcp.PDU, q *queue) error {
	cmd := nvmetcp.ParseAuthCommand(&r.cmd)
	switch {
	case q.proof.keys.HostKey.IsZero():
		r.finish(nvmetcp.InvalidOpcode | dnr)
	case cmd.Protocol != nvmetcp.AuthProtocol || cmd.SPSP0 != 1 || cmd.SPSP1 != 1 || cmd.Length == 0 || cmd.Length > maxAuthMessage:
		r.finish(nvmetcp.InvalidField | dnr)
	case !cmd.Receive:
		return c.fetch(r, p, int(cmd.Length), int(cmd.Length), (*request).authSend)
	default:
		return c.authReceive(r, q, int(cmd.Length))
	}
	return nil
}

// authSend processes a message of the host. The command always succeeds; the reply says
// what is wrong with the message.
func (r *request) authSend() {
	q := r.c.bound.Load()
	p := &q.proof
	if kind, _, err := dhchap.KindOf(r.data); err == nil && kind == dhchap.KindNegotiate || p.machine == nil {
		if err := q.beginProof(); err != nil {
			p.err = err
			r.finish(nvmetcp.CommandSequenceError | dnr)
			return
		}
	}
	reply, done, err := p.machine.Step(r.data)
	p.reply, p.err, p.open = reply, err, !done && err == nil
	if done && q.id == 0 && !q.proven {
		if err := q.ctrl.replace(); err != nil {
			p.reply, p.err = nil, err
			r.finish(nvmetcp.InternalError)
			return
		}
	}
	if done {
		if !q.proven {
			r.c.introduced()
		}
		q.proven = true
		r.c.log.Debug("host authenticated", "subsystem", q.ctrl.sub.cfg.NQN, "cntlid", q.ctrl.id, "queue", q.id)
	}
	r.finish(nvmetcp.Success)
}

func (q *queue) beginProof() error {
	p := &q.proof
	if p.attempts++; p.attempts > maxAuthAttempts && !q.proven {
		return errNotProven
	}
	p.keys = q.ctrl.sub.keysOf(q.ctrl) // they may have changed since the host connected
	m, err := dhchap.NewController(dhchap.Config{
		HostNQN: string(q.ctrl.host.NQN), SubsystemNQN: string(q.ctrl.sub.cfg.NQN),
		HostKey: p.keys.HostKey, ControllerKey: p.keys.ControllerKey,
		Hashes: p.keys.Hashes, Groups: p.keys.Groups,
	})
	p.machine = m
	return err
}

// authReceive sends the reply.
func (c *conn) authReceive(r *request, q *queue, n int) error {
	p := &q.proof
	if p.reply == nil || len(p.reply) > n {
		r.finish(nvmetcp.CommandSequenceError | dnr)
		return p.end(c)
	}
	reply := p.reply
	p.reply = nil
	c.answer(r, n, func(r *request) { r.respond(reply) })
	return p.end(c)
}

// end returns the error that ends the connection if the transaction has failed.
func (p *proof) end(c *conn) error {
	if p.err == nil {
		return nil
	}
	c.rest()
	return fmt.Errorf("%w: %w", errNotProven, p.err)
}

// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"bytes"
	"crypto/hmac"
	"slices"
)

// Host is the host's end of one transaction. Only one goroutine at a time may use it.
type Host struct {
	cfg  Config
	step func(in []byte) (out []byte, done bool, err *Error)

	exchange exchange
	c2       []byte // the host's own challenge, nil if there is none
	seq2     uint32
}

// NewHost begins a transaction. It fails if cfg is not usable.
func NewHost(cfg Config) (*Host, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	h := &Host{cfg: cfg}
	h.step = h.negotiate
	return h, nil
}

// Step processes the received message, nil at first, and returns the one to send, or nil.
// When done, the host is authenticated, and so is the controller if there is a controller
// key; before that, send nothing else to the controller. An error is an *Error and ends the
// transaction: send the message that comes with it, if any, and close the connection.
func (h *Host) Step(in []byte) (out []byte, done bool, err error) {
	out, done, failure := h.step(in)
	if failure == nil {
		return out, done, nil
	}
	h.step = h.ended
	if !failure.Peer {
		m := Failure{KindFailure2, h.cfg.Transaction, 1, failure.Explanation}
		out = m.Append(nil)
	}
	return out, false, failure
}

func (h *Host) negotiate(in []byte) ([]byte, bool, *Error) {
	if in != nil {
		return nil, false, fail(IncorrectMessage, "a message before Negotiate was sent")
	}
	m := Negotiate{Transaction: h.cfg.Transaction, Hashes: h.cfg.Hashes, Groups: h.cfg.Groups}
	h.step = h.challenge
	return m.Append(nil), false, nil
}

func (h *Host) challenge(in []byte) ([]byte, bool, *Error) {
	c, failure := read(in, KindChallenge, h.cfg.Transaction, ParseChallenge)
	if failure != nil {
		return nil, false, failure
	}
	if failure := h.acceptable(&c); failure != nil {
		return nil, false, failure
	}
	reply := Reply{Transaction: h.cfg.Transaction}
	h.exchange = exchange{hash: c.Hash, transaction: h.cfg.Transaction, hostNQN: h.cfg.HostNQN, subsystem: h.cfg.SubsystemNQN}
	if c.Group != Null {
		key, err := newPair(c.Group, h.cfg.Random)
		if err != nil {
			return nil, false, fail(Failed, "%v", err)
		}
		if h.exchange.session, err = key.secret(c.DH); err != nil {
			return nil, false, fail(IncorrectPayload, "parsing Challenge: %v", err)
		}
		reply.DH = key.public
	}
	reply.Proof = h.exchange.hostProof(h.cfg.HostKey, c.Value, c.Sequence)
	if !h.cfg.ControllerKey.IsZero() {
		if failure := h.ownChallenge(c.Value); failure != nil {
			return nil, false, failure
		}
		reply.Challenge, reply.Sequence = h.c2, h.seq2
	}
	h.step = h.success
	return reply.Append(nil), false, nil
}

// acceptable refuses a choice that the host did not offer, so that an attacker in between
// cannot make the ends use something weaker than both are configured for.
func (h *Host) acceptable(c *Challenge) *Error {
	switch {
	case !slices.Contains(h.cfg.Hashes, c.Hash):
		return fail(NoHash, "the controller chose %v, which was not offered", c.Hash)
	case !slices.Contains(h.cfg.Groups, c.Group):
		return fail(NoGroup, "the controller chose %v, which was not offered", c.Group)
	case len(c.Value) != c.Hash.Size():
		return fail(IncorrectPayload, "parsing Challenge: %d bytes for %v", len(c.Value), c.Hash)
	case len(c.DH) != c.Group.Size():
		return fail(IncorrectPayload, "parsing Challenge: a %v value of %d bytes", c.Group, len(c.DH))
	case c.Sequence == 0:
		return fail(IncorrectPayload, "parsing Challenge: sequence number 0")
	}
	return nil
}

func (h *Host) ownChallenge(c1 []byte) *Error {
	c2, failure := h.cfg.random(len(c1))
	if failure != nil {
		return failure
	}
	if bytes.Equal(c1, c2) {
		return fail(Failed, "the controller's challenge is the host's own")
	}
	seq, err := h.cfg.Sequence.next(h.cfg.Random)
	if err != nil {
		return fail(Failed, "%v", err)
	}
	h.c2, h.seq2 = c2, seq
	return nil
}

func (h *Host) success(in []byte) ([]byte, bool, *Error) {
	s, failure := read(in, KindSuccess1, h.cfg.Transaction, ParseSuccess1)
	if failure != nil {
		return nil, false, failure
	}
	if int(s.HashLen) != h.exchange.hash.Size() {
		return nil, false, fail(IncorrectPayload, "parsing Success1: %d bytes for %v", s.HashLen, h.exchange.hash)
	}
	if h.c2 == nil {
		h.step = h.ended
		return nil, true, nil
	}
	if len(s.Proof) == 0 {
		return nil, false, fail(Failed, "the controller proves nothing")
	}
	if !hmac.Equal(s.Proof, h.exchange.controllerProof(h.cfg.ControllerKey, h.c2, h.seq2)) {
		return nil, false, fail(Failed, "the controller does not know its key")
	}
	h.step = h.ended
	m := Success2{h.cfg.Transaction}
	return m.Append(nil), true, nil
}

func (h *Host) ended([]byte) ([]byte, bool, *Error) {
	return nil, false, fail(IncorrectMessage, "a message after the end of the transaction")
}

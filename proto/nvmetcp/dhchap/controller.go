// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"bytes"
	"crypto/hmac"
	"slices"
)

// Controller is the controller's end of one transaction. Only one goroutine at a time may
// use it. An unauthenticated host can make it compute at most one DH key and one DH secret.
type Controller struct {
	cfg  Config
	step func(in []byte) (out []byte, done bool, err *Error)

	exchange    exchange
	key         *pair // nil in the null group
	c1          []byte
	seq1        uint32
	transaction uint16
}

// NewController makes a Controller that waits for a Negotiate. Make a new one for each
// transaction, also when a connection authenticates again. It fails if cfg is not usable.
func NewController(cfg Config) (*Controller, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	c := &Controller{cfg: cfg}
	c.step = c.negotiate
	return c, nil
}

// Step processes a received message and returns the one to send at the host's next
// Authentication Receive, or nil. When done, the host is authenticated; a message returned
// with done must still be sent. An error is an *Error and ends the transaction: send the
// message that comes with it, if any, and then close the connection.
func (c *Controller) Step(in []byte) (out []byte, done bool, err error) {
	out, done, failure := c.step(in)
	if failure == nil {
		return out, done, nil
	}
	c.step = c.ended
	if !failure.Peer {
		m := Failure{KindFailure1, c.transaction, 1, failure.Explanation}
		out = m.Append(nil)
	}
	return out, false, failure
}

func (c *Controller) negotiate(in []byte) ([]byte, bool, *Error) {
	kind, t, err := KindOf(in)
	if err != nil {
		return nil, false, fail(IncorrectPayload, "%v", err)
	}
	c.transaction = t
	if kind != KindNegotiate {
		return nil, false, fail(IncorrectMessage, "%v where Negotiate was expected", kind)
	}
	m, err := ParseNegotiate(in)
	if err != nil {
		return nil, false, fail(IncorrectPayload, "%v", err)
	}
	if m.SecureChannel != 0 {
		return nil, false, fail(ChannelMismatch, "the host wants a secure channel")
	}
	hash := slices.IndexFunc(c.cfg.Hashes, func(h Hash) bool { return slices.Contains(m.Hashes, h) })
	if hash < 0 {
		return nil, false, fail(NoHash, "the host offers %v, allowed is %v", m.Hashes, c.cfg.Hashes)
	}
	group := slices.IndexFunc(c.cfg.Groups, func(g Group) bool { return slices.Contains(m.Groups, g) })
	if group < 0 {
		return nil, false, fail(NoGroup, "the host offers %v, allowed is %v", m.Groups, c.cfg.Groups)
	}
	out, failure := c.challenge(c.cfg.Hashes[hash], c.cfg.Groups[group])
	return out, false, failure
}

func (c *Controller) challenge(hash Hash, group Group) ([]byte, *Error) {
	m := Challenge{Transaction: c.transaction, Hash: hash, Group: group}
	if group != Null {
		key, err := newPair(group, c.cfg.Random)
		if err != nil {
			return nil, fail(Failed, "%v", err)
		}
		c.key, m.DH = key, key.public
	}
	var failure *Error
	if c.c1, failure = c.cfg.random(hash.Size()); failure != nil {
		return nil, failure
	}
	var err error
	if c.seq1, err = c.cfg.Sequence.next(c.cfg.Random); err != nil {
		return nil, fail(Failed, "%v", err)
	}
	m.Value, m.Sequence = c.c1, c.seq1
	c.exchange = exchange{hash: hash, transaction: c.transaction, hostNQN: c.cfg.HostNQN, subsystem: c.cfg.SubsystemNQN}
	c.step = c.reply
	return m.Append(nil), nil
}

func (c *Controller) reply(in []byte) ([]byte, bool, *Error) {
	r, failure := read(in, KindReply, c.transaction, ParseReply)
	if failure != nil {
		return nil, false, failure
	}
	size := c.exchange.hash.Size()
	if len(r.Proof) != size {
		return nil, false, fail(IncorrectPayload, "parsing Reply: a proof of %d bytes for %v", len(r.Proof), c.exchange.hash)
	}
	if c.key == nil && len(r.DH) != 0 {
		return nil, false, fail(IncorrectPayload, "parsing Reply: a DH value in the null group")
	}
	if c.key != nil {
		var err error
		if c.exchange.session, err = c.key.secret(r.DH); err != nil {
			return nil, false, fail(IncorrectPayload, "parsing Reply: %v", err)
		}
	}
	if !hmac.Equal(r.Proof, c.exchange.hostProof(c.cfg.HostKey, c.c1, c.seq1)) {
		return nil, false, fail(Failed, "the host does not know its key")
	}
	m := Success1{Transaction: c.transaction, HashLen: uint8(size)}
	// A challenge with sequence number 0 is only for TLS keys and asks for no proof.
	if len(r.Challenge) == 0 || r.Sequence == 0 {
		c.step = c.success // some hosts send Success2 even then
		return m.Append(nil), true, nil
	}
	switch {
	case c.cfg.ControllerKey.IsZero():
		return nil, false, fail(Failed, "the host asks for a proof, and there is no controller key")
	case bytes.Equal(r.Challenge, c.c1):
		return nil, false, fail(Failed, "the host's challenge is the controller's own")
	}
	m.Proof = c.exchange.controllerProof(c.cfg.ControllerKey, r.Challenge, r.Sequence)
	c.step = c.success
	return m.Append(nil), false, nil
}

func (c *Controller) success(in []byte) ([]byte, bool, *Error) {
	if _, failure := read(in, KindSuccess2, c.transaction, ParseSuccess2); failure != nil {
		return nil, false, failure
	}
	c.step = c.ended
	return nil, true, nil
}

func (c *Controller) ended([]byte) ([]byte, bool, *Error) {
	return nil, false, fail(IncorrectMessage, "a message after the end of the transaction")
}

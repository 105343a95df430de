// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"encoding/binary"
	"fmt"
)

// Kind is the kind of a message: its type in the high byte, its identifier in the low one
// (Base 2.1, section 8.3.4.4).
type Kind uint16

// The messages.
const (
	KindNegotiate Kind = 0x0000
	KindFailure2  Kind = 0x00f0
	KindFailure1  Kind = 0x00f1
	KindChallenge Kind = 0x0101
	KindReply     Kind = 0x0102
	KindSuccess1  Kind = 0x0103
	KindSuccess2  Kind = 0x0104
)

func (k Kind) String() string {
	switch k {
	case KindNegotiate:
		return "Negotiate"
	case KindFailure1:
		return "Failure1"
	case KindFailure2:
		return "Failure2"
	case KindChallenge:
		return "Challenge"
	case KindReply:
		return "Reply"
	case KindSuccess1:
		return "Success1"
	case KindSuccess2:
		return "Success2"
	}
	return fmt.Sprintf("message %#06x", uint16(k))
}

// MaxMessage is the length limit of every message, the same as Linux's. It is enough for
// the largest hash and group; callers need no larger buffer.
const MaxMessage = 4096

const (
	headerLen     = 6 // kind, reserved, transaction
	failureLen    = 8
	negotiateLen  = 8
	descriptorLen = 64
	fixedLen      = 16 // of the messages of DH-HMAC-CHAP itself
	maxIDs        = 30
	dhchapID      = 1
)

// KindOf returns a message's kind and transaction.
func KindOf(b []byte) (Kind, uint16, error) {
	if len(b) < headerLen {
		return 0, 0, fmt.Errorf("a message of %d bytes", len(b))
	}
	return Kind(b[0])<<8 | Kind(b[1]), binary.LittleEndian.Uint16(b[4:]), nil
}

// expect checks the kind and the minimum length. Bytes after the message are padding.
func expect(b []byte, want Kind, least int) (transaction uint16, err error) {
	kind, transaction, err := KindOf(b)
	switch {
	case err != nil:
		return 0, fmt.Errorf("parsing %v: %w", want, err)
	case kind != want:
		return 0, fmt.Errorf("parsing %v: it is %v", want, kind)
	case len(b) < least:
		return 0, fmt.Errorf("parsing %v: %d bytes where %d are needed", want, len(b), least)
	case len(b) > MaxMessage:
		return 0, fmt.Errorf("parsing %v: %d bytes", want, len(b))
	}
	return transaction, nil
}

func appendHeader(b []byte, k Kind, transaction uint16) []byte {
	b = append(b, byte(k>>8), byte(k), 0, 0)
	return binary.LittleEndian.AppendUint16(b, transaction)
}

// Negotiate is the host's offer (Base 2.1, section 8.3.4.4.1).
type Negotiate struct {
	Transaction   uint16
	SecureChannel uint8   // 0: no secure channel
	Hashes        []Hash  // known ones, in the host's order of preference; at most 30
	Groups        []Group // likewise
}

// Append appends the message to b.
func (m *Negotiate) Append(b []byte) []byte {
	b = appendHeader(b, KindNegotiate, m.Transaction)
	b = append(b, m.SecureChannel, 1)
	var d [descriptorLen]byte
	d[0] = dhchapID
	for i, h := range m.Hashes[:min(len(m.Hashes), maxIDs)] {
		d[2], d[4+i] = uint8(i+1), uint8(h)
	}
	for i, g := range m.Groups[:min(len(m.Groups), maxIDs)] {
		d[3], d[4+maxIDs+i] = uint8(i+1), uint8(g)
	}
	return append(b, d[:]...)
}

// ParseNegotiate reads an offer. It drops unknown hashes, groups and protocols; an offer
// without DH-HMAC-CHAP is an error.
func ParseNegotiate(b []byte) (Negotiate, error) {
	t, err := expect(b, KindNegotiate, negotiateLen)
	if err != nil {
		return Negotiate{}, err
	}
	m := Negotiate{Transaction: t, SecureChannel: b[6]}
	protocols, rest := int(b[7]), b[negotiateLen:]
	if len(rest) < protocols*descriptorLen {
		return Negotiate{}, fmt.Errorf("parsing Negotiate: %d protocols in %d bytes", protocols, len(b))
	}
	for ; protocols > 0; protocols-- {
		d := rest[:descriptorLen]
		rest = rest[descriptorLen:]
		if d[0] != dhchapID {
			continue
		}
		hashes, groups := int(d[2]), int(d[3])
		if hashes > maxIDs || groups > maxIDs {
			return Negotiate{}, fmt.Errorf("parsing Negotiate: %d hashes and %d groups", hashes, groups)
		}
		for _, h := range d[4 : 4+hashes] {
			if Hash(h).Size() > 0 {
				m.Hashes = append(m.Hashes, Hash(h))
			}
		}
		for _, g := range d[4+maxIDs : 4+maxIDs+groups] {
			if Group(g).known() {
				m.Groups = append(m.Groups, Group(g))
			}
		}
		return m, nil
	}
	return Negotiate{}, fmt.Errorf("parsing Negotiate: it does not offer DH-HMAC-CHAP")
}

// Challenge is the controller's challenge (Base 2.1, section 8.3.4.5.2).
type Challenge struct {
	Transaction uint16
	Hash        Hash
	Group       Group
	Sequence    uint32
	Value       []byte // C1, as long as the hash's digest
	DH          []byte // the controller's public value; empty in the null group
}

// Append appends the message to b.
func (m *Challenge) Append(b []byte) []byte {
	b = appendHeader(b, KindChallenge, m.Transaction)
	b = append(b, byte(len(m.Value)), 0, byte(m.Hash), byte(m.Group))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.DH)))
	b = binary.LittleEndian.AppendUint32(b, m.Sequence)
	b = append(b, m.Value...)
	return append(b, m.DH...)
}

// ParseChallenge reads a challenge; its slices point into b. The hash and the group may be
// unknown. Lengths that exceed the message are an error.
func ParseChallenge(b []byte) (Challenge, error) {
	t, err := expect(b, KindChallenge, fixedLen)
	if err != nil {
		return Challenge{}, err
	}
	m := Challenge{
		Transaction: t,
		Hash:        Hash(b[8]),
		Group:       Group(b[9]),
		Sequence:    binary.LittleEndian.Uint32(b[12:]),
	}
	hl, dh, rest := int(b[6]), int(binary.LittleEndian.Uint16(b[10:])), b[fixedLen:]
	if hl+dh > len(rest) {
		return Challenge{}, fmt.Errorf("parsing Challenge: values of %d and %d bytes in %d", hl, dh, len(b))
	}
	m.Value, m.DH = rest[:hl:hl], rest[hl:hl+dh:hl+dh]
	return m, nil
}

// Reply is the host's proof and, if the controller shall prove itself too, the host's
// challenge (Base 2.1, section 8.3.4.5.3).
type Reply struct {
	Transaction uint16
	Sequence    uint32 // of Challenge; 0 without one
	Proof       []byte
	Challenge   []byte // C2; empty: the controller need not authenticate
	DH          []byte // the host's public value; empty in the null group
}

// Append appends the message to b. A Challenge, if any, has the length of Proof.
func (m *Reply) Append(b []byte) []byte {
	hl := len(m.Proof)
	b = appendHeader(b, KindReply, m.Transaction)
	b = append(b, byte(hl), 0, bit(len(m.Challenge) > 0), 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.DH)))
	b = binary.LittleEndian.AppendUint32(b, m.Sequence)
	b = append(b, m.Proof...)
	if len(m.Challenge) > 0 {
		b = append(b, m.Challenge...)
	} else {
		b = append(b, make([]byte, hl)...)
	}
	return append(b, m.DH...)
}

// ParseReply reads a reply; its slices point into b.
func ParseReply(b []byte) (Reply, error) {
	t, err := expect(b, KindReply, fixedLen)
	if err != nil {
		return Reply{}, err
	}
	hl, dh, rest := int(b[6]), int(binary.LittleEndian.Uint16(b[10:])), b[fixedLen:]
	if 2*hl+dh > len(rest) {
		return Reply{}, fmt.Errorf("parsing Reply: values of twice %d and %d bytes in %d", hl, dh, len(b))
	}
	m := Reply{Transaction: t, Sequence: binary.LittleEndian.Uint32(b[12:])}
	m.Proof, m.DH = rest[:hl:hl], rest[2*hl:2*hl+dh:2*hl+dh]
	if b[8]&1 != 0 {
		m.Challenge = rest[hl : 2*hl : 2*hl]
	}
	return m, nil
}

// Success1 accepts the host's proof and carries the controller's, if the host asked for it
// (Base 2.1, section 8.3.4.5.4).
type Success1 struct {
	Transaction uint16
	HashLen     uint8
	Proof       []byte // empty: none
}

// Append appends the message to b.
func (m *Success1) Append(b []byte) []byte {
	b = appendHeader(b, KindSuccess1, m.Transaction)
	b = append(b, m.HashLen, 0, bit(len(m.Proof) > 0), 0, 0, 0, 0, 0, 0, 0)
	return append(b, m.Proof...)
}

// ParseSuccess1 reads the message; its slices point into b.
func ParseSuccess1(b []byte) (Success1, error) {
	t, err := expect(b, KindSuccess1, fixedLen)
	if err != nil {
		return Success1{}, err
	}
	m := Success1{Transaction: t, HashLen: b[6]}
	if b[8]&1 != 0 {
		hl := int(b[6])
		if hl > len(b)-fixedLen {
			return Success1{}, fmt.Errorf("parsing Success1: a proof of %d bytes in %d", hl, len(b))
		}
		m.Proof = b[fixedLen : fixedLen+hl : fixedLen+hl]
	}
	return m, nil
}

// Success2 accepts the controller's proof (Base 2.1, section 8.3.4.5.5).
type Success2 struct {
	Transaction uint16
}

// Append appends the message to b.
func (m *Success2) Append(b []byte) []byte {
	b = appendHeader(b, KindSuccess2, m.Transaction)
	return append(b, make([]byte, fixedLen-headerLen)...)
}

// ParseSuccess2 reads the message.
func ParseSuccess2(b []byte) (Success2, error) {
	t, err := expect(b, KindSuccess2, fixedLen)
	return Success2{t}, err
}

// Failure ends a transaction: Failure1 is the controller's, Failure2 the host's
// (Base 2.1, sections 8.3.4.4.2 and 8.3.4.4.3).
type Failure struct {
	Kind        Kind
	Transaction uint16
	Reason      uint8 // 1: authentication failure, the only reason
	Explanation Explanation
}

// Append appends the message to b.
func (m *Failure) Append(b []byte) []byte {
	b = appendHeader(b, m.Kind, m.Transaction)
	return append(b, m.Reason, byte(m.Explanation))
}

// ParseFailure reads a Failure1 or Failure2.
func ParseFailure(b []byte) (Failure, error) {
	kind, _, err := KindOf(b)
	if err == nil && kind != KindFailure1 {
		kind = KindFailure2
	}
	t, err := expect(b, kind, failureLen)
	if err != nil {
		return Failure{}, err
	}
	return Failure{kind, t, b[6], Explanation(b[7])}, nil
}

func bit(set bool) byte {
	if set {
		return 1
	}
	return 0
}

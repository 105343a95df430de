// SPDX-License-Identifier: Apache-2.0

package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"weft.dev/weft/proto/block"
)

const (
	magic       = "WEFTLOG1"
	headerSize  = 8 + 8 + 16 + 8 + 4
	frameHead   = 4 + 8 + 4
	mostPayload = 256 << 20 // bytes
)

// What a payload holds, as bits of its first byte. A reader refuses bits that it does not
// know: a later version has written them.
const (
	holdsHard = 1 << iota
	holdsBase
	holdsAll = holdsHard | holdsBase
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(seed uint32, parts ...[]byte) uint32 {
	for _, p := range parts {
		seed = crc32.Update(seed, castagnoli, p)
	}
	return seed
}

type header struct {
	number uint64
	owner  Owner
}

func (h header) encode() []byte {
	b := append(make([]byte, 0, headerSize), magic...)
	b = binary.LittleEndian.AppendUint64(b, h.number)
	b = append(b, h.owner.Cluster.UUID[:]...)
	b = binary.LittleEndian.AppendUint64(b, h.owner.Member)
	return binary.LittleEndian.AppendUint32(b, sum(0, b))
}

func parseHeader(b []byte) (h header, err error) {
	if len(b) < headerSize || sum(0, b[:headerSize-4]) != binary.LittleEndian.Uint32(b[headerSize-4:headerSize]) {
		return h, fmt.Errorf("%w: its header is not readable", ErrDamaged)
	}
	if string(b[:8]) != magic {
		return h, fmt.Errorf("its format is %q; this version reads %q", b[:8], magic)
	}
	h.number = binary.LittleEndian.Uint64(b[8:])
	h.owner.Cluster = block.ClusterID{UUID: block.UUID(b[16:32])}
	h.owner.Member = binary.LittleEndian.Uint64(b[32:])
	return h, nil
}

// frame is what one Save writes.
type frame struct {
	hard    *HardState
	base    *Base // in the first frame of a file
	entries []Entry
}

func (f frame) encode(seed uint32, sequence uint64) ([]byte, error) {
	b := make([]byte, frameHead, frameHead+64+f.bytes())
	b = append(b, 0)
	if f.hard != nil {
		b[frameHead] |= holdsHard
		b = appendUvarints(b, f.hard.Term, f.hard.Vote, f.hard.Commit)
	}
	if f.base != nil {
		b[frameHead] |= holdsBase
		b = appendUvarints(b, f.base.Index, f.base.Term, uint64(len(f.base.Members)))
		b = append(b, f.base.Members...)
	}
	b = appendUvarints(b, uint64(len(f.entries)))
	for _, e := range f.entries {
		b = append(appendUvarints(b, e.Index, e.Term), e.Kind)
		b = append(appendUvarints(b, uint64(len(e.Data))), e.Data...)
	}
	payload := b[frameHead:]
	if len(payload) > mostPayload {
		return nil, fmt.Errorf("%d bytes at once; at most %d", len(payload), mostPayload)
	}
	binary.LittleEndian.PutUint32(b, uint32(len(payload)))
	binary.LittleEndian.PutUint64(b[4:], sequence)
	binary.LittleEndian.PutUint32(b[12:], sum(seed, b[:12], payload))
	return b, nil
}

// bytes estimates the size of the entries.
func (f frame) bytes() (n int) {
	for _, e := range f.entries {
		n += len(e.Data) + 32
	}
	return n
}

func appendUvarints(b []byte, values ...uint64) []byte {
	for _, v := range values {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

// frameAt returns the sequence and the payload of the frame at the beginning of b, if it is
// good.
func frameAt(seed uint32, b []byte) (sequence uint64, payload []byte, ok bool) {
	if len(b) < frameHead {
		return 0, nil, false
	}
	n := binary.LittleEndian.Uint32(b)
	if n > mostPayload || int64(n) > int64(len(b)-frameHead) {
		return 0, nil, false
	}
	payload = b[frameHead : frameHead+int(n)]
	return binary.LittleEndian.Uint64(b[4:]), payload, sum(seed, b[:12], payload) == binary.LittleEndian.Uint32(b[12:])
}

// reader takes a payload apart. After an error it returns zero values.
type reader struct {
	b   []byte
	err error
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.b, r.err = nil, errors.New("a number is cut short")
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) bytes(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.b, r.err = nil, errors.New("it is cut short")
		return nil
	}
	b := r.b[:n:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) byte() byte {
	if b := r.bytes(1); len(b) == 1 {
		return b[0]
	}
	return 0
}

func decode(payload []byte) (f frame, err error) {
	r := &reader{b: payload}
	holds := r.byte()
	if holds&^holdsAll != 0 {
		return f, fmt.Errorf("it holds kinds %#x, which a later version has written", holds)
	}
	if holds&holdsHard != 0 {
		f.hard = &HardState{r.uvarint(), r.uvarint(), r.uvarint()}
	}
	if holds&holdsBase != 0 {
		f.base = &Base{Index: r.uvarint(), Term: r.uvarint()}
		f.base.Members = bytes.Clone(r.bytes(r.uvarint()))
	}
	for n := r.uvarint(); n > 0 && r.err == nil; n-- {
		e := Entry{Index: r.uvarint(), Term: r.uvarint(), Kind: r.byte()}
		e.Data = bytes.Clone(r.bytes(r.uvarint()))
		f.entries = append(f.entries, e)
	}
	if r.err == nil && len(r.b) > 0 {
		r.err = fmt.Errorf("%d bytes are left over", len(r.b))
	}
	return f, r.err
}

// contents is what a file holds.
type contents struct {
	owner    Owner
	seed     uint32
	sequence uint64 // of the next frame
	end      int64  // of the last good frame
	state    State
}

// parse reads a file. A bad frame at its end is left out.
func parse(b []byte, number uint64) (c contents, err error) {
	h, err := parseHeader(b)
	if err != nil {
		return c, err
	}
	if h.number != number {
		return c, fmt.Errorf("%w: it is number %d under the name of another", ErrDamaged, h.number)
	}
	c = contents{owner: h.owner, seed: sum(0, b[:headerSize]), end: headerSize}
	for int(c.end) < len(b) {
		sequence, payload, ok := frameAt(c.seed, b[c.end:])
		if !ok {
			break
		}
		if sequence != c.sequence {
			return c, fmt.Errorf("%w: frame %d at byte %d, where frame %d belongs", ErrDamaged, sequence, c.end, c.sequence)
		}
		if err := c.take(payload); err != nil {
			return c, fmt.Errorf("frame %d at byte %d: %w", sequence, c.end, err)
		}
		c.sequence++
		c.end += int64(frameHead + len(payload))
	}
	if c.sequence == 0 {
		return c, fmt.Errorf("%w: its first frame is not readable", ErrDamaged)
	}
	return c, c.noneLater(b)
}

// take adds what a frame holds.
func (c *contents) take(payload []byte) error {
	f, err := decode(payload)
	if err != nil {
		return err
	}
	if (f.base != nil) != (c.sequence == 0) || c.sequence == 0 && f.hard == nil {
		return fmt.Errorf("%w: a base belongs into the first frame", ErrDamaged)
	}
	if f.base != nil {
		c.state.Base = *f.base
	}
	if err := c.state.add(f); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// noneLater returns ErrDamaged if a good frame follows after the end: the bad one before it
// was durable once.
func (c *contents) noneLater(b []byte) error {
	for at := int(c.end) + 1; at+frameHead <= len(b); at++ {
		// The sequence is compared first, since a checksum at every byte takes long.
		if later := binary.LittleEndian.Uint64(b[at+4:]) - c.sequence; later == 0 || later > uint64(len(b)) {
			continue
		}
		if sequence, _, ok := frameAt(c.seed, b[at:]); ok {
			return fmt.Errorf("%w: frame %d at byte %d is not readable, but frame %d at byte %d is, which was written after it was durable", ErrDamaged, c.sequence, c.end, sequence, at)
		}
	}
	return nil
}

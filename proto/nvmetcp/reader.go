// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"errors"
	"fmt"
	"io"
)

// PDU is one PDU as a Reader hands it out. Head is valid until the next call of Next.
type PDU struct {
	Header
	Head    []byte // HLen bytes, the common header included
	DataLen uint32 // bytes of data, without padding and digest
}

// Command is the command of a CapsuleCmd.
func (p *PDU) Command() *Command { return (*Command)(p.Head[CommonHeaderSize:]) }

// Completion is the completion of a CapsuleResp.
func (p *PDU) Completion() *Completion { return (*Completion)(p.Head[CommonHeaderSize:]) }

// Data is the transfer header of an H2CData, C2HData or R2T.
func (p *PDU) Data() DataHeader {
	d, _ := ParseDataHeader(p.Head) // Next has checked the length
	return d
}

// Role is an end of a connection.
type Role uint8

// The ends of a connection. A Reader accepts only the PDUs that its end may receive.
const (
	RoleController Role = iota // reads what hosts send
	RoleHost                   // reads what controllers send
)

// ReaderConfig limits what a Reader accepts.
type ReaderConfig struct {
	Role         Role
	HeaderDigest bool
	DataDigest   bool

	// MaxCapsuleData and MaxData are the most bytes of data in a CapsuleCmd, and in an
	// H2CData or C2HData. More is a fatal error. 0 means none.
	MaxCapsuleData uint32
	MaxData        uint32

	// Align is the negotiated padding (CPDA or HPDA): PDO must be a multiple of
	// (Align+1)*4. 0 means the specification's minimum of 4.
	Align uint8

	// BufferSize is the size of one read; default 256 KiB, at least 4 KiB.
	BufferSize int
}

// Reader reads PDUs from a connection. Each read takes as much as the connection has into
// the Reader's one buffer, and PDUs are handed out from there without copying.
//
//	for {
//		pdu, err := r.Next()
//		…                     // r.Data() or r.ReadData(dst) for its data
//		if !r.Buffered() {
//			w.Flush()     // answer everything before waiting for more
//		}
//	}
//
// A fault of the peer is a [*FatalError]. The end of the stream is io.EOF between two PDUs
// and io.ErrUnexpectedEOF within one. After an error the Reader returns it forever.
type Reader struct {
	src  io.Reader
	both bothReader // src, or nil if it cannot do that
	cfg  ReaderConfig

	buf        []byte
	start, end int // buf[start:end] has been read but not handed out

	head    [maxHeaderSize]byte // the current PDU's header, copied because the buffer moves
	pdu     PDU
	pending int  // bytes of the current PDU after its header that are not handed out yet
	pad     int  // padding before the data, included in pending
	bulk    bool // the last data was large, see need
	err     error
}

// bothReader reads into p and, when p is full, on into q, with one system call.
type bothReader interface {
	ReadBoth(p, q []byte) (int, error)
}

// NewReader makes a Reader of the stream src.
func NewReader(src io.Reader, cfg ReaderConfig) *Reader {
	if cfg.BufferSize == 0 {
		cfg.BufferSize = 256 << 10
	}
	r := &Reader{src: src, cfg: cfg, buf: make([]byte, max(cfg.BufferSize, 4<<10))}
	r.both, _ = src.(bothReader)
	return r
}

// Configure sets what ICReq and ICResp negotiated. It applies from the next PDU on.
func (r *Reader) Configure(cfg ReaderConfig) {
	cfg.BufferSize = len(r.buf)
	r.cfg = cfg
}

// ErrDataDigest is the error of Data and ReadData when the data digest does not match. It
// is not fatal: the command fails with DataTransferError, and the connection continues
// (TCP, 3.3.1.1).
var ErrDataDigest = errors.New("data digest does not match")

// Next returns the next PDU, reading if necessary. It skips unread data of the previous
// PDU. The PDU belongs to the Reader and is valid until the next call.
func (r *Reader) Next() (*PDU, error) {
	if r.err != nil {
		return nil, r.err
	}
	if err := r.skip(); err != nil {
		return nil, r.fail(err)
	}
	if err := r.next(); err != nil {
		return nil, r.fail(err)
	}
	return &r.pdu, nil
}

func (r *Reader) fail(err error) error {
	r.err = err
	return err
}

func (r *Reader) next() error {
	if err := r.need(CommonHeaderSize); err != nil {
		return err
	}
	h, _ := ParseHeader(r.buf[r.start:r.end]) // the bytes are all there
	if err := r.cfg.check(h, r.buf[r.start:r.start+CommonHeaderSize]); err != nil {
		return err
	}
	digest := r.cfg.headerDigest(h.Type)
	if err := r.need(int(h.HLen) + digest); err != nil {
		return unexpected(err)
	}
	head := r.head[:copy(r.head[:h.HLen], r.buf[r.start:])]
	if digest != 0 {
		got := le.Uint32(r.buf[r.start+int(h.HLen):])
		if want := Digest(head); got != want {
			return fatal(FESHeaderDigest, got, head, "%v has header digest %#08x, its header %#08x", h.Type, got, want)
		}
	}
	r.start += int(h.HLen) + digest
	r.pending = int(h.PLen) - int(h.HLen) - digest
	r.pad = 0
	r.pdu = PDU{Header: h, Head: head}
	if r.pending == 0 {
		return r.checkBody()
	}
	if carriesData(h.Type) {
		r.pad = int(h.PDO) - int(h.HLen) - digest
	}
	r.pdu.DataLen = uint32(r.pending - r.pad - r.dataDigest())
	return r.checkBody()
}

// dataDigest is the length of the digest behind the current PDU's data.
func (r *Reader) dataDigest() int {
	if r.pdu.Flags&FlagDataDigest != 0 && r.pdu.PLen > uint32(r.pdu.HLen)+DigestSize && carriesData(r.pdu.Type) {
		return DigestSize
	}
	return 0
}

// checkBody compares a data PDU's length with what its header says.
func (r *Reader) checkBody() error {
	if r.pdu.Type != TypeH2CData && r.pdu.Type != TypeC2HData {
		return nil
	}
	if d := r.pdu.Data(); d.Length == 0 || d.Length != r.pdu.DataLen {
		return fatal(FESInvalidHeader, 16, r.pdu.Head, "%v of command %d says %d bytes of data and has %d", r.pdu.Type, d.CID, d.Length, r.pdu.DataLen)
	}
	return nil
}

// need waits until the buffer holds n bytes, which must fit. io.EOF means that the stream
// ended before the first of them.
func (r *Reader) need(n int) error {
	for r.end-r.start < n {
		if r.start != 0 && (r.end-r.start < compactBelow || r.start+n > len(r.buf)) {
			r.end = copy(r.buf, r.buf[r.start:r.end])
			r.start = 0
		}
		room := r.buf[r.end:]
		if r.bulk && len(room) > bulkAhead && n <= bulkAhead {
			room = room[:bulkAhead]
		}
		got, err := r.src.Read(room)
		r.end += got
		if err != nil && r.end-r.start < n {
			if r.start != r.end {
				err = unexpected(err)
			}
			return err
		}
	}
	return nil
}

// compactBelow is the size below which a remainder is moved to the buffer's start before a
// read: a cheap way to make room for the read.
const compactBelow = 4 << 10

// While data is large, no more than bulkAhead is read ahead into the buffer: the data that
// comes next can then be read directly to its place, and is not copied.
const (
	bulkAhead = 4 << 10
	bulkData  = 64 << 10
)

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Buffered reports whether the rest of this PDU and the whole next one are in the buffer,
// so that Next and its data will not wait.
func (r *Reader) Buffered() bool {
	have := r.end - r.start - r.pending
	if have < CommonHeaderSize {
		return false
	}
	h, _ := ParseHeader(r.buf[r.start+r.pending:])
	return uint64(have) >= uint64(h.PLen)
}

// Data returns the PDU's data from the buffer, reading what is missing. It is valid until
// the next call of Next. Data larger than the buffer is an error; use ReadData for it.
func (r *Reader) Data() ([]byte, error) {
	if r.err != nil {
		return nil, r.err
	}
	if r.pending > len(r.buf) || r.pending < int(r.pdu.DataLen) {
		return nil, fmt.Errorf("take data of %v: %d bytes are left, the buffer has %d", r.pdu.Type, r.pending, len(r.buf))
	}
	if err := r.need(r.pending); err != nil {
		return nil, r.fail(unexpected(err))
	}
	body := r.buf[r.start : r.start+r.pending]
	r.start += r.pending
	r.pending = 0
	n := r.pad + int(r.pdu.DataLen)
	data := body[r.pad:n:n]
	if r.dataDigest() != 0 && le.Uint32(body[n:]) != Digest(data) {
		return nil, ErrDataDigest
	}
	return data, nil
}

// ReadData fills dst, whose length must be the PDU's DataLen, with the PDU's data. What is
// not in the buffer yet is read directly into dst.
func (r *Reader) ReadData(dst []byte) error {
	if r.err != nil {
		return r.err
	}
	if len(dst) != int(r.pdu.DataLen) || r.pending < len(dst) {
		return fmt.Errorf("take %d bytes of %v's data: it has %d, and %d are left", len(dst), r.pdu.Type, r.pdu.DataLen, r.pending)
	}
	r.bulk = len(dst) >= bulkData
	if err := r.readData(dst); err != nil {
		return r.fail(unexpected(err))
	}
	if r.dataDigest() == 0 {
		return nil
	}
	if err := r.need(DigestSize); err != nil {
		return r.fail(unexpected(err))
	}
	want := le.Uint32(r.buf[r.start:])
	r.start += DigestSize
	r.pending -= DigestSize
	if want != Digest(dst) {
		return ErrDataDigest
	}
	return nil
}

func (r *Reader) readData(dst []byte) error {
	if err := r.discard(r.pad); err != nil {
		return err
	}
	r.pending -= r.pad
	for len(dst) > 0 {
		n := copy(dst, r.buf[r.start:r.end])
		r.start += n
		if n == 0 {
			var err error
			if n, err = r.fill(dst); n == 0 && err != nil {
				return err
			}
		}
		dst = dst[n:]
		r.pending -= n
	}
	return nil
}

// fill reads while the buffer is empty: directly into dst if much is missing, otherwise
// into the buffer, so that the same read brings the bytes that follow.
func (r *Reader) fill(dst []byte) (int, error) {
	if len(dst) < directAbove {
		return 0, r.need(1)
	}
	if r.both == nil {
		return r.src.Read(dst)
	}
	n, err := r.both.ReadBoth(dst, r.buf[:min(len(r.buf), bulkAhead)])
	if n > len(dst) {
		r.start, r.end = 0, n-len(dst)
		n = len(dst)
	}
	return n, err
}

// directAbove is the number of missing bytes above which fill reads directly into dst.
// Below it, a read that also brings the following bytes is cheaper.
const directAbove = 16 << 10

// TermReq reads the current PDU, an H2CTermReq or C2HTermReq, and returns it as an error.
func (r *Reader) TermReq() error {
	data, err := r.Data()
	if err != nil {
		return err
	}
	whole := append(append([]byte(nil), r.pdu.Head...), data...)
	t, err := ParseTermReq(whole)
	if err != nil {
		return err
	}
	return &TerminatedError{TermReq: t}
}

// skip drops the rest of the current PDU.
func (r *Reader) skip() error {
	for r.pending > 0 {
		if r.start == r.end {
			if err := r.need(1); err != nil {
				return unexpected(err)
			}
		}
		n := min(r.pending, r.end-r.start)
		r.start += n
		r.pending -= n
	}
	return nil
}

func (r *Reader) discard(n int) error {
	for n > 0 {
		if r.start == r.end {
			if err := r.need(1); err != nil {
				return err
			}
		}
		m := min(n, r.end-r.start)
		r.start += m
		n -= m
	}
	return nil
}

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

// Data is what H2CData, C2HData and R2T say of their transfer.
func (p *PDU) Data() DataHeader {
	d, _ := ParseDataHeader(p.Head) // Next has checked the length
	return d
}

// Role is an end of a connection.
type Role uint8

// The ends. A Reader takes only what its end may receive.
const (
	RoleController Role = iota // reads what hosts send
	RoleHost                   // reads what controllers send
)

// ReaderConfig bounds what a Reader takes.
type ReaderConfig struct {
	Role         Role
	HeaderDigest bool
	DataDigest   bool

	// MaxCapsuleData and MaxData are the most bytes of data in a CapsuleCmd, and in
	// an H2CData or C2HData; more is a fatal error. 0 means none.
	MaxCapsuleData uint32
	MaxData        uint32

	// Align is the padding that was agreed on (CPDA or HPDA): PDO must be a multiple
	// of (Align+1)*4. 0 asks for nothing but the specification's 4.
	Align uint8

	// BufferSize is how much is read at once; default 256 KiB, at least 4 KiB.
	BufferSize int
}

// Reader takes PDUs from a connection. It reads as much as the connection holds
// into its one buffer, and hands PDUs out of it without copying.
//
//	for {
//		pdu, err := r.Next()
//		…                     // r.Data() or r.ReadData(dst) for its data
//		if !r.Buffered() {
//			w.Flush()     // answer everything before waiting for more
//		}
//	}
//
// Faults of the peer are [*FatalError]s; the end of the stream between two PDUs is
// io.EOF, within one io.ErrUnexpectedEOF. After an error a Reader gives it again.
type Reader struct {
	src io.Reader
	cfg ReaderConfig

	buf        []byte
	start, end int // buf[start:end] is read and not taken

	head    [maxHeaderSize]byte // the current PDU's: the buffer moves under it
	pdu     PDU
	pending int // bytes of the current PDU, behind its header, that are not taken
	pad     int // of them, bytes before the data
	err     error
}

// NewReader makes a Reader of what src delivers.
func NewReader(src io.Reader, cfg ReaderConfig) *Reader {
	if cfg.BufferSize == 0 {
		cfg.BufferSize = 256 << 10
	}
	return &Reader{src: src, cfg: cfg, buf: make([]byte, max(cfg.BufferSize, 4<<10))}
}

// Configure sets what was agreed on by ICReq and ICResp. It holds from the next PDU on.
func (r *Reader) Configure(cfg ReaderConfig) {
	cfg.BufferSize = len(r.buf)
	r.cfg = cfg
}

// ErrDataDigest is what Data and ReadData answer when the data is not what was
// sent. It is no fatal error: the command fails with DataTransferError, and the
// connection goes on (TCP, 3.3.1.1).
var ErrDataDigest = errors.New("data digest does not match")

// Next returns the next PDU, reading if need be. Data of the PDU before that
// nobody took is skipped. The PDU is the Reader's own and holds until the next call.
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
	h, _ := ParseHeader(r.buf[r.start:r.end]) // it is all there
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

// need waits until n bytes, which fit the buffer, are in it. io.EOF means that
// there is not one.
func (r *Reader) need(n int) error {
	for r.end-r.start < n {
		if r.start != 0 && (r.end-r.start < compactBelow || r.start+n > len(r.buf)) {
			r.end = copy(r.buf, r.buf[r.start:r.end])
			r.start = 0
		}
		got, err := r.src.Read(r.buf[r.end:])
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

// compactBelow is how much is moved to the buffer's start before a read, so that
// the read has room.
const compactBelow = 4 << 10

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Buffered reports whether Next and the data of its PDU are there without waiting:
// what is left of this PDU and the whole next one are in the buffer.
func (r *Reader) Buffered() bool {
	have := r.end - r.start - r.pending
	if have < CommonHeaderSize {
		return false
	}
	h, _ := ParseHeader(r.buf[r.start+r.pending:])
	return uint64(have) >= uint64(h.PLen)
}

// Data returns the PDU's data out of the buffer, reading what is missing; it holds
// until the next call of Next. Data that is larger than the buffer is an error:
// ReadData is for that.
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

// ReadData fills dst, whose length must be the PDU's DataLen, with its data. What
// is not in the buffer is read straight into dst.
func (r *Reader) ReadData(dst []byte) error {
	if r.err != nil {
		return r.err
	}
	if len(dst) != int(r.pdu.DataLen) || r.pending < len(dst) {
		return fmt.Errorf("take %d bytes of %v's data: it has %d, and %d are left", len(dst), r.pdu.Type, r.pdu.DataLen, r.pending)
	}
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

// fill reads while the buffer is empty: straight into dst if much is missing, else
// into the buffer, so that what follows comes with the same read.
func (r *Reader) fill(dst []byte) (int, error) {
	if len(dst) >= directAbove {
		return r.src.Read(dst)
	}
	return 0, r.need(1)
}

// directAbove is from how many missing bytes on a read of them alone is worth more
// than one that takes along what follows.
const directAbove = 16 << 10

// TermReq reads the current PDU, an H2CTermReq or C2HTermReq, as the error that it is.
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

// skip drops what nobody took of the current PDU.
func (r *Reader) skip() error {
	n := r.pending
	r.pending = 0
	return unexpected(r.discard(n))
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

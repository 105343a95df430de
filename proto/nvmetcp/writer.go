// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"io"
	"net"
)

// WriterConfig is what ICReq and ICResp negotiated.
type WriterConfig struct {
	HeaderDigest bool
	DataDigest   bool
	Align        uint8 // data begins at a multiple of (Align+1)*4: CPDA at a host, HPDA at a controller

	// CopyBelow is the length up to which data is copied next to its header; longer data is
	// written from its own memory. Default 1 KiB.
	CopyBelow int
}

// Writer gathers PDUs and writes them with one call (writev on a TCP connection). The data
// given to it must not change until Flush has returned. Once grown to the size of its
// flushes it allocates nothing per PDU. After Flush has failed it returns that error
// forever.
type Writer struct {
	dst io.Writer
	cfg WriterConfig

	buf  []byte // headers and copied data
	from int    // buf[from:] is not in vec yet
	vec  [][]byte
	out  net.Buffers // a copy of vec that WriteTo consumes; the array is kept
	size int
	err  error
}

// NewWriter makes a Writer to dst.
func NewWriter(dst io.Writer, cfg WriterConfig) *Writer {
	w := &Writer{dst: dst}
	w.Configure(cfg)
	return w
}

// Configure sets what was negotiated, for PDUs added from now on.
func (w *Writer) Configure(cfg WriterConfig) {
	if cfg.CopyBelow == 0 {
		cfg.CopyBelow = 1 << 10
	}
	w.cfg = cfg
}

// Raw adds a complete PDU that needs no digest: ICReq, ICResp or TermReq.
func (w *Writer) Raw(pdu []byte) {
	w.buf = append(w.buf, pdu...)
	w.size += len(pdu)
}

// Command adds a CapsuleCmd, with data in the capsule if there is any.
func (w *Writer) Command(c *Command, data []byte) {
	at := w.begin(TypeCapsuleCmd, 0, CapsuleCmdSize, len(data))
	w.buf = append(w.buf, c[:]...)
	w.end(at, data)
}

// Completion adds a CapsuleResp.
func (w *Writer) Completion(c *Completion) {
	at := w.begin(TypeCapsuleResp, 0, CapsuleRespSize, 0)
	w.buf = append(w.buf, c[:]...)
	w.end(at, nil)
}

// Data adds an H2CData or C2HData. flags are FlagLastPDU and FlagSuccess. The length in d
// must be that of data.
func (w *Writer) Data(t Type, flags uint8, d DataHeader, data []byte) {
	d.Length = uint32(len(data))
	at := w.begin(t, flags, DataHeaderSize, len(data))
	w.buf = d.Append(w.buf)
	w.end(at, data)
}

// R2T adds an R2T.
func (w *Writer) R2T(d DataHeader) {
	at := w.begin(TypeR2T, 0, DataHeaderSize, 0)
	w.buf = d.Append(w.buf)
	w.end(at, nil)
}

// begin adds the common header of a PDU with n bytes of data.
func (w *Writer) begin(t Type, flags uint8, hlen, n int) (at int) {
	h := Header{Type: t, Flags: flags, HLen: uint8(hlen), PLen: uint32(hlen)}
	if w.cfg.HeaderDigest {
		h.Flags |= FlagHeaderDigest
		h.PLen += DigestSize
	}
	if n > 0 {
		align := 4 * (uint32(w.cfg.Align) + 1)
		h.PLen = (h.PLen + align - 1) / align * align
		h.PDO = uint8(h.PLen)
		h.PLen += uint32(n)
		if w.cfg.DataDigest {
			h.Flags |= FlagDataDigest
			h.PLen += DigestSize
		}
	}
	w.size += int(h.PLen)
	at = len(w.buf)
	w.buf = h.Append(w.buf)
	return at
}

var padding [maxHeaderSize]byte

// end completes the PDU whose header begins at w.buf[at].
func (w *Writer) end(at int, data []byte) {
	if w.cfg.HeaderDigest {
		w.buf = le.AppendUint32(w.buf, Digest(w.buf[at:]))
	}
	if len(data) == 0 {
		return
	}
	if pad := int(w.buf[at+3]) - (len(w.buf) - at); pad > 0 {
		w.buf = append(w.buf, padding[:pad]...)
	}
	if len(data) <= w.cfg.CopyBelow {
		w.buf = append(w.buf, data...)
	} else {
		w.vec = append(w.vec, w.buf[w.from:], data)
		w.from = len(w.buf)
	}
	if w.cfg.DataDigest {
		w.buf = le.AppendUint32(w.buf, Digest(data))
	}
}

// Buffered is the number of bytes that the next Flush writes.
func (w *Writer) Buffered() int { return w.size }

// Flush writes the added PDUs.
func (w *Writer) Flush() error {
	if w.err != nil || w.size == 0 {
		return w.err
	}
	if len(w.vec) == 0 {
		_, w.err = w.dst.Write(w.buf)
	} else {
		if w.from < len(w.buf) {
			w.vec = append(w.vec, w.buf[w.from:])
		}
		w.out = w.vec
		_, w.err = w.out.WriteTo(w.dst)
	}
	clear(w.vec) // release the owner's data
	w.buf, w.vec, w.out, w.from, w.size = w.buf[:0], w.vec[:0], nil, 0, 0
	return w.err
}

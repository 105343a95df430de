// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import "bytes"

// Pieces returns the bytes that Flush would write, for a caller that does its own writing,
// for instance without blocking. They are valid until a PDU is added or Reset is called.
func (w *Writer) Pieces() [][]byte {
	if w.from < len(w.buf) {
		w.vec = append(w.vec, w.buf[w.from:])
		w.from = len(w.buf)
	}
	return w.vec
}

// Reset drops everything that was added.
func (w *Writer) Reset() {
	clear(w.vec) // release the owner's data
	w.buf, w.vec, w.out, w.from, w.size = w.buf[:0], w.vec[:0], nil, 0, 0
}

// Partial reports whether a PDU has arrived only in part.
func (r *Reader) Partial() bool { return r.pending > 0 || r.start != r.end }

// Grow enlarges the buffer to n bytes if it is smaller. It invalidates the Head of the
// current PDU.
func (r *Reader) Grow(n int) {
	if n <= len(r.buf) {
		return
	}
	buf := make([]byte, n)
	r.end = copy(buf, r.buf[r.start:r.end])
	r.buf, r.start = buf, 0
}

// Between reports whether everything of the PDUs that Next has returned has been handed out or skipped.
func (r *Reader) Between() bool { return r.pending == 0 }

// Rest returns the bytes that have been read and, between two PDUs, belong to none that Next has returned.
func (r *Reader) Rest() []byte { return bytes.Clone(r.buf[r.start:r.end]) }

// Preload makes b the first bytes to be read. Nothing must have been read yet.
func (r *Reader) Preload(b []byte) {
	r.Grow(len(b))
	r.start, r.end = 0, copy(r.buf, b)
}

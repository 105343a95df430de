// SPDX-License-Identifier: Apache-2.0

package nvmetcp

// Pieces is what Flush would write, for an end that writes by itself, without
// blocking or piece by piece. It holds until the next PDU is added or Reset.
func (w *Writer) Pieces() [][]byte {
	if w.from < len(w.buf) {
		w.vec = append(w.vec, w.buf[w.from:])
		w.from = len(w.buf)
	}
	return w.vec
}

// Reset forgets what was added.
func (w *Writer) Reset() {
	clear(w.vec) // let go of the owner's data
	w.buf, w.vec, w.out, w.from, w.size = w.buf[:0], w.vec[:0], nil, 0, 0
}

// Partial reports whether a PDU has begun to arrive and is not whole yet.
func (r *Reader) Partial() bool { return r.pending > 0 || r.start != r.end }

// Grow makes the buffer n bytes large, if it is smaller. The Head of the current
// PDU is no longer valid after.
func (r *Reader) Grow(n int) {
	if n <= len(r.buf) {
		return
	}
	buf := make([]byte, n)
	r.end = copy(buf, r.buf[r.start:r.end])
	r.buf, r.start = buf, 0
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// The requests and simple replies of the NBD protocol, as the kernel's client
// speaks it (linux/nbd.h); all numbers are big-endian.
//
//	request: magic u32, flags u16, command u16, handle [8], offset u64, length u32
//	reply:   magic u32, error u32, handle [8], then what was read
const (
	nbdRequestMagic = 0x25609513
	nbdReplyMagic   = 0x67446698
	nbdRequestSize  = 28
	nbdReplySize    = 16

	nbdRead        = 0
	nbdWrite       = 1
	nbdDisc        = 2
	nbdFlush       = 3
	nbdTrim        = 4
	nbdWriteZeroes = 6

	nbdFUA    = 1 << 0 // a flag
	nbdNoHole = 1 << 1

	nbdMaxData = 32 << 20 // the driver's own limit for a request
)

// nbdLink serves one socket: one goroutine reads requests, another writes replies, so that a
// reply never waits for a request.
type nbdLink struct {
	fd   int
	gate *gate

	mu      sync.Mutex
	ready   []*nbdRequest // answered, to be sent
	stopped bool
	wake    sync.Cond
}

type nbdRequest struct {
	request
	link   *nbdLink
	handle [8]byte
	buf    *[]byte // the whole buffer, from the pool; nil: none
	head   [nbdReplySize]byte
}

var nbdRequests = sync.Pool{New: func() any { return new(nbdRequest) }}

func newNBDLink(fd int, g *gate) *nbdLink {
	l := &nbdLink{fd: fd, gate: g}
	l.wake.L = &l.mu
	return l
}

// run serves until the other end hangs up or hangUp is called.
func (l *nbdLink) run() {
	written := make(chan struct{})
	go func() { defer close(written); l.write() }()
	_ = l.read() // it ends when the kernel hangs up, or on a malformed request
	_ = unix.Shutdown(l.fd, unix.SHUT_RDWR)
	l.mu.Lock()
	l.stopped = true
	l.mu.Unlock()
	l.wake.Signal()
	<-written
	serving.forget(l.fd)
	unix.Close(l.fd)
}

func (l *nbdLink) hangUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stopped { // only until then is the descriptor ours
		_ = unix.Shutdown(l.fd, unix.SHUT_RDWR)
	}
}

var errNBDEnd = errors.New("the other end hung up")

// read reads requests and submits them.
func (l *nbdLink) read() error {
	in := nbdReader{fd: l.fd, buf: make([]byte, 256<<10)}
	var head [nbdRequestSize]byte
	for {
		if err := in.full(head[:]); err != nil {
			return err
		}
		if binary.BigEndian.Uint32(head[:]) != nbdRequestMagic {
			return errors.New("not a request")
		}
		command := binary.BigEndian.Uint16(head[6:])
		if command == nbdDisc {
			return errNBDEnd
		}
		r, err := l.request(command, head[:])
		if err != nil {
			return err
		}
		if r.Op == block.OpWrite {
			if err := in.full(r.Data); err != nil {
				return err
			}
		}
		l.gate.submit(&r.request)
	}
}

func (l *nbdLink) request(command uint16, head []byte) (*nbdRequest, error) {
	flags := binary.BigEndian.Uint16(head[4:])
	length := binary.BigEndian.Uint32(head[24:])
	r := nbdRequests.Get().(*nbdRequest)
	r.link, r.front, r.finish, r.handle = l, r, finishNBD, [8]byte(head[8:])
	r.IO = block.IO{Off: int64(binary.BigEndian.Uint64(head[16:])), Len: int64(length), FUA: flags&nbdFUA != 0}
	switch command {
	case nbdRead, nbdWrite:
		if length > nbdMaxData {
			return nil, errors.New("a request that is too long")
		}
		r.Op = block.OpRead
		if command == nbdWrite {
			r.Op = block.OpWrite
		}
		r.buf = getBuffer(int(length))
		r.Data = (*r.buf)[:length]
	case nbdFlush:
		r.Op, r.Len, r.Off = block.OpFlush, 0, 0
	case nbdTrim:
		r.Op = block.OpDiscard
	case nbdWriteZeroes:
		r.Op, r.Unmap = block.OpWriteZeroes, flags&nbdNoHole == 0
	default:
		r.Op = 0 // the gate will refuse it
	}
	return r, nil
}

func finishNBD(r *request) {
	n := r.front.(*nbdRequest)
	binary.BigEndian.PutUint32(n.head[:], nbdReplyMagic)
	binary.BigEndian.PutUint32(n.head[4:], uint32(errno(n.Err)))
	copy(n.head[8:], n.handle[:])
	l := n.link
	l.mu.Lock()
	l.ready = append(l.ready, n)
	l.mu.Unlock()
	l.wake.Signal()
}

// write sends the replies that are ready, as many as possible in one call.
func (l *nbdLink) write() {
	var (
		batch []*nbdRequest
		iov   [][]byte
	)
	for {
		l.mu.Lock()
		for len(l.ready) == 0 && !l.stopped {
			l.wake.Wait()
		}
		batch, l.ready = l.ready, batch[:0]
		stopped := l.stopped
		l.mu.Unlock()
		if stopped {
			return // later replies have no receiver
		}
		iov = iov[:0]
		for _, r := range batch {
			iov = append(iov, r.head[:])
			if r.Op == block.OpRead && r.Err == nil {
				iov = append(iov, r.Data)
			}
		}
		err := writeAll(l.fd, iov)
		for i, r := range batch {
			putBuffer(r.buf)
			*r = nbdRequest{}
			nbdRequests.Put(r)
			batch[i] = nil
		}
		if err != nil {
			_ = unix.Shutdown(l.fd, unix.SHUT_RDWR) // this ends the reader too
		}
	}
}

// writeAll writes all of iov, which it changes.
func writeAll(fd int, iov [][]byte) error {
	const most = 1024 // IOV_MAX
	for len(iov) > 0 {
		n, err := unix.Writev(fd, iov[:min(len(iov), most)])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		for n > 0 || len(iov) > 0 && len(iov[0]) == 0 {
			k := min(n, len(iov[0]))
			n -= k
			if iov[0] = iov[0][k:]; len(iov[0]) == 0 {
				iov = iov[1:]
			}
		}
	}
	return nil
}

// nbdReader reads a socket in large pieces; large data bypasses its buffer.
type nbdReader struct {
	fd   int
	buf  []byte
	a, b int // the part of buf not yet consumed
}

func (r *nbdReader) full(p []byte) error {
	for len(p) > 0 {
		if r.a < r.b {
			n := copy(p, r.buf[r.a:r.b])
			p, r.a = p[n:], r.a+n
			continue
		}
		into := r.buf
		if len(p) >= len(into)/4 {
			into = p
		}
		n, err := unix.Read(r.fd, into)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return errNBDEnd
		case len(into) == len(p) && &into[0] == &p[0]:
			p = p[n:]
		default:
			r.a, r.b = 0, n
		}
	}
	return nil
}

// Buffers by powers of two, from one page up: Go aligns them to a page, as direct I/O below
// requires.
var buffers [32]sync.Pool

func bufferClass(n int) int { return max(12, bits.Len(uint(max(n, 1)-1))) }

func getBuffer(n int) *[]byte {
	c := bufferClass(n)
	if b, ok := buffers[c].Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, 1<<c)
	return &b
}

func putBuffer(b *[]byte) {
	if b != nil {
		buffers[bufferClass(len(*b))].Put(b)
	}
}

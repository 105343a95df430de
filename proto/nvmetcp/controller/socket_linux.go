// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"net"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socket writes many pieces with one system call, and without blocking if asked to. Only
// one goroutine at a time may write.
type socket struct {
	net.Conn
	raw syscall.RawConn // nil: the connection is not a socket

	vec      []unix.Iovec
	n        int
	err      error
	block    bool
	attempt  func(fd uintptr) bool // writeOnce as a value, to allocate it once
	advanced func()                // called when a blocked write makes progress
}

func newSocket(c net.Conn) *socket {
	s := &socket{Conn: c, advanced: func() {}}
	s.attempt = s.writeOnce
	if sc, ok := c.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			s.raw = raw
		}
	}
	return s
}

// maxVec is the most pieces that the kernel accepts at once (IOV_MAX).
const maxVec = 1024

// write sends pieces and removes what was sent; done means that nothing is left. Without
// block it returns when the socket is full.
func (s *socket) write(pieces *[][]byte, block bool) (done bool, err error) {
	if s.raw == nil {
		return s.writePlain(pieces, block)
	}
	for len(*pieces) > 0 {
		s.load(*pieces)
		s.block, s.n, s.err = block, 0, nil
		if err := s.raw.Write(s.attempt); err != nil {
			return false, err
		}
		if s.err == unix.EAGAIN {
			return false, nil
		}
		if s.err != nil {
			return false, s.err
		}
		consume(pieces, s.n)
		if block {
			s.advanced()
		}
	}
	return true, nil
}

// load converts pieces to the kernel's form.
func (s *socket) load(pieces [][]byte) {
	s.vec = s.vec[:0]
	for _, p := range pieces[:min(len(pieces), maxVec)] {
		v := unix.Iovec{Base: unsafe.SliceData(p)}
		v.SetLen(len(p))
		s.vec = append(s.vec, v)
	}
}

// writeOnce is called by the runtime. If it returns false, the runtime calls it again when
// the socket is writable.
func (s *socket) writeOnce(fd uintptr) bool {
	for {
		n, _, errno := unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(s.vec))), uintptr(len(s.vec)))
		switch errno {
		case 0:
			s.n = int(n)
			return true
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			if s.block {
				return false
			}
		}
		s.err = errno
		return true
	}
}

func (s *socket) writePlain(pieces *[][]byte, block bool) (bool, error) {
	if !block {
		return len(*pieces) == 0, nil
	}
	for len(*pieces) > 0 {
		n, err := s.Conn.Write((*pieces)[0])
		consume(pieces, n)
		if err != nil {
			return false, err
		}
		s.advanced()
	}
	return true, nil
}

// consume removes n bytes from the front of pieces.
func consume(pieces *[][]byte, n int) {
	p := *pieces
	for len(p) > 0 && n >= len(p[0]) {
		n -= len(p[0])
		p = p[1:]
	}
	if n > 0 {
		p[0] = p[0][n:]
	}
	*pieces = p
}

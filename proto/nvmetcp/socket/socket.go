// SPDX-License-Identifier: Apache-2.0

// Package socket is a TCP connection of the data path, for both ends. It costs few wake-ups
// and never blocks a sender that does not want to block.
//
//	Read ── data is there ──────────────────────────────────────▶ return
//	  └──── nothing ─▶ look again, at most 50 µs ─▶ data came ───▶ return
//	                    │ (only if that paid lately)
//	                    └─▶ wait in the runtime's poller ────────▶ return
//
// Being woken costs tens of microseconds, more than a small I/O over a fast network. So a
// reader that expects data soon looks again for a moment before it waits. The rules bound
// what this costs:
//
//   - habit: a connection looks again only where that found data lately. After failures it
//     does so ever more rarely, down to one wait in 128.
//   - crowd: at most half of the program's processors look at the same time. With a single
//     processor, goroutines that are ready run between two looks, and one looks for all
//     connections: a volume's legs answer on several.
//   - load: nobody looks while more of the machine's threads are ready to run than it has
//     processors, or for a while after another program has taken one from a looker.
//   - attend: a reader that never waits still gives the rest of the program its turn, four
//     times in a millisecond.
//
// An idle connection costs nothing: looking begins only after something arrived.
package socket

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Conn is one connection. One goroutine at a time may read, and one may send.
type Conn struct {
	net.Conn
	raw syscall.RawConn // nil: not a socket, for example a pipe in a test

	// Expecting says whether it is worth to look again, because the peer has something to
	// answer or nothing else can bring work. Nil means always. Set it before the first Read.
	Expecting func() bool
	// Advanced is called when a blocked Send makes progress. Set it before the first Send.
	Advanced func()

	owed atomic.Bool // see Owed

	// Of the goroutine that reads.
	in      [2][]byte // where to
	vec     [2]unix.Iovec
	got     int
	inErr   error
	reading func(fd uintptr) bool // readOnce as a value, to allocate it once
	waited  bool                  // this Read found nothing at first
	blocked bool                  // and it has waited in the poller
	idled   bool                  // see Idled
	before  uint64                // crowd.reads when it found nothing
	last    uint64                // crowd.reads after the last Read
	alone   int                   // Reads in a row without one of another connection
	rested  time.Time             // when a Read last did, or attend gave others their turn
	hushed  bool                  // see hush
	watched bool                  // see watch
	habit   habit

	// Of the goroutine that sends.
	out     []unix.Iovec
	sent    int
	outErr  error
	block   bool
	sending func(fd uintptr) bool // sendOnce as a value, to allocate it once
}

// New makes a Conn of c. If c is not a socket, Read and Send work as c does.
func New(c net.Conn) *Conn {
	s := &Conn{Conn: c}
	s.reading, s.sending = s.readOnce, s.sendOnce
	if sc, ok := c.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			s.raw = raw
		}
	}
	return s
}

// Owed says whether the peer owes an answer: on a single processor, the readers of other
// connections then look for it as well. Say no before the connection is given up. Any goroutine
// may call it.
func (c *Conn) Owed(yes bool) {
	switch {
	case c.owed.Swap(yes) == yes:
	case yes:
		crowd.owed.Add(1)
	default:
		crowd.owed.Add(-1)
	}
}

// Leave undoes what Reads have set on the socket, before somebody else reads from it. The goroutine that
// reads calls it, or one after that has ended.
func (c *Conn) Leave() {
	if c.raw == nil {
		return
	}
	_ = c.raw.Control(func(fd uintptr) { // it fails if the socket is closed
		c.speak(fd)
		c.watch(fd, false)
	})
}

// Read implements io.Reader.
func (c *Conn) Read(p []byte) (int, error) { return c.ReadBoth(p, nil) }

// ReadBoth reads into p and, when p is full, on into q, with one system call. It returns the
// total number of bytes.
func (c *Conn) ReadBoth(p, q []byte) (int, error) {
	c.waited, c.blocked, c.idled = false, false, false
	if c.raw == nil {
		return c.Conn.Read(p)
	}
	if len(p)+len(q) == 0 {
		return 0, nil
	}
	c.attend()
	c.in = [2][]byte{p, q}
	err := c.raw.Read(c.reading)
	c.in = [2][]byte{}
	if c.blocked {
		c.rested = time.Now()
	}
	c.count(crowd.reads.Add(1))
	switch {
	case err != nil:
		return 0, err
	case c.inErr != nil:
		return 0, fmt.Errorf("read from %v: %w", c.RemoteAddr(), c.inErr)
	case c.got == 0:
		return 0, io.EOF
	}
	return c.got, nil
}

// count notes what a Read says about other connections. reads counts the Reads of all.
func (c *Conn) count(reads uint64) {
	c.idled = c.waited && reads-c.before <= uint64(runtime.GOMAXPROCS(0))
	if c.alone++; reads != c.last+1 {
		c.alone = 0
	}
	c.last = reads
}

// Idled reports whether the last Read found nothing at first, and no processor had much else
// to do until data came: each other one may have served one Read of another connection.
func (c *Conn) Idled() bool { return c.idled }

// readOnce is called by the runtime. If it returns false, the runtime calls it again when
// there is something to read.
func (c *Conn) readOnce(fd uintptr) bool {
	if c.take(fd) {
		return true
	}
	if c.waited { // the runtime was wrong, for example because looking again found the data first
		return false
	}
	c.waited, c.before = true, crowd.reads.Load()
	if c.look(fd) {
		return true
	}
	c.speak(fd)
	if runtime.GOMAXPROCS(0) == 1 {
		c.watch(fd, c.alone < aloneAfter)
	}
	c.blocked = true
	return false
}

// take reads without waiting, and reports whether the Read is over.
func (c *Conn) take(fd uintptr) bool {
	for {
		c.got, c.inErr = c.read(int(fd))
		switch c.inErr {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return false
		}
		return true
	}
}

// read makes the system call. For one slice it is syscall.Read, which the race detector
// knows: what the peer did before it sent, if it is in the same process, was done before.
func (c *Conn) read(fd int) (int, error) {
	p, q := c.in[0], c.in[1]
	switch {
	case len(q) == 0:
		return syscall.Read(fd, p)
	case len(p) == 0:
		return syscall.Read(fd, q)
	}
	for i, b := range c.in {
		c.vec[i].Base = unsafe.SliceData(b)
		c.vec[i].SetLen(len(b))
	}
	n, _, errno := syscall.Syscall(unix.SYS_READV, uintptr(fd), uintptr(unsafe.Pointer(&c.vec)), uintptr(len(c.vec)))
	c.vec = [2]unix.Iovec{}
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// maxPieces is the most pieces that the kernel accepts at once (IOV_MAX).
const maxPieces = 1024

// Send writes pieces and removes from them what was sent; done means that nothing is left.
// Without block it returns when the socket is full.
func (c *Conn) Send(pieces *[][]byte, block bool) (done bool, err error) {
	if c.raw == nil {
		return c.sendPlain(pieces, block)
	}
	for len(*pieces) > 0 {
		c.load(*pieces)
		c.block, c.sent, c.outErr = block, 0, nil
		if err := c.raw.Write(c.sending); err != nil {
			return false, err
		}
		if c.outErr == unix.EAGAIN {
			return false, nil
		}
		if c.outErr != nil {
			return false, fmt.Errorf("write to %v: %w", c.RemoteAddr(), c.outErr)
		}
		consume(pieces, c.sent)
		if block {
			c.advanced()
		}
	}
	return true, nil
}

func (c *Conn) advanced() {
	if c.Advanced != nil {
		c.Advanced()
	}
}

// load converts pieces to the kernel's form.
func (c *Conn) load(pieces [][]byte) {
	c.out = c.out[:0]
	for _, p := range pieces[:min(len(pieces), maxPieces)] {
		v := unix.Iovec{Base: unsafe.SliceData(p)}
		v.SetLen(len(p))
		c.out = append(c.out, v)
	}
}

// sendOnce is called by the runtime. If it returns false, the runtime calls it again when
// the socket is writable.
func (c *Conn) sendOnce(fd uintptr) bool {
	for {
		n, _, errno := syscall.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(c.out))), uintptr(len(c.out)))
		switch errno {
		case 0:
			c.sent = int(n)
			return true
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			if c.block {
				return false
			}
		}
		c.outErr = errno
		return true
	}
}

func (c *Conn) sendPlain(pieces *[][]byte, block bool) (bool, error) {
	if !block {
		return len(*pieces) == 0, nil
	}
	for len(*pieces) > 0 {
		n, err := c.Conn.Write((*pieces)[0])
		consume(pieces, n)
		if err != nil {
			return false, err
		}
		c.advanced()
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

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// fuseConn is a connection to the kernel's FUSE, with the protocol of linux/fuse.h. One
// goroutine reads requests and submits them; whoever completes a request writes its answer. So
// no request needs a goroutine of its own, and none makes garbage. (A library that calls a
// method for each request needs both.)
type fuseConn struct {
	fs   *fuseFS
	log  *slog.Logger
	file *os.File
	raw  syscall.RawConn
	fd   int

	refs   atomic.Int64 // answers being written; plus shutGate once shut
	closed sync.Once
}

// newFuseConn makes a connection of fd, which must be non-blocking, and owns it.
func newFuseConn(fd int, fs *fuseFS, log *slog.Logger) (*fuseConn, error) {
	c := &fuseConn{fs: fs, log: log, file: os.NewFile(uintptr(fd), "fuse"), fd: fd}
	var err error
	if c.raw, err = c.file.SyscallConn(); err != nil {
		c.file.Close()
		return nil, err
	}
	return c, nil
}

// Sizes of the protocol's headers.
const (
	inHeaderSize  = int(unsafe.Sizeof(fuse.InHeader{}))
	outHeaderSize = int(unsafe.Sizeof(fuse.OutHeader{}))
	writeInSize   = int(unsafe.Sizeof(fuse.WriteIn{}))
)

// fuseRequest is a request with its memory: the data starts at a page.
type fuseRequest struct {
	request
	conn   *fuseConn
	unique uint64
	pool   *fusePool
	memory []byte // one page, with the headers at its end, and then the data
}

const fusePage = 4096

func (q *fuseRequest) room(n int) []byte { return q.memory[fusePage : fusePage+n] }

// frame is where a request is read to; the data of a write then starts at the room.
func (q *fuseRequest) frame() []byte { return q.memory[fusePage-writeInSize:] }

// answer returns the header and n bytes of the room.
func (q *fuseRequest) answer(n int) []byte { return q.memory[fusePage-outHeaderSize : fusePage+n] }

// fusePools are the requests by the size of their room. Requests are read into the largest;
// writes up to copyLimit are copied out of them, so that many small writes need little memory.
var fusePools = []*fusePool{newFusePool(4 << 10), newFusePool(32 << 10), newFusePool(copyLimit), newFusePool(int(fuseMaxWrite))}

type fusePool struct {
	room int
	sync.Pool
}

func newFusePool(room int) *fusePool {
	return &fusePool{room, sync.Pool{New: func() any { return newFuseRequest(room) }}}
}

const copyLimit = 128 << 10

func newFuseRequest(room int) *fuseRequest {
	b := make([]byte, room+2*fusePage)
	// The kernel fails a request whose memory it has to find first for a process that is being
	// killed, and the next process would not get it.
	for at := 0; at < len(b); at += fusePage {
		b[at] = 1
	}
	skip := -int(uintptr(unsafe.Pointer(&b[0]))) & (fusePage - 1)
	q := &fuseRequest{memory: b[skip : skip+fusePage+room]}
	q.finish, q.front = fuseFinish, q
	return q
}

// get returns a request with room for n bytes.
func (c *fuseConn) get(n int, unique uint64) *fuseRequest {
	for _, p := range fusePools {
		if n <= p.room {
			q := p.Get().(*fuseRequest)
			q.conn, q.unique, q.pool = c, unique, p
			return q
		}
	}
	panic(fmt.Sprintf("a FUSE request of %d bytes", n)) // fuseFS.take lets none pass
}

func (q *fuseRequest) put() {
	q.Data, q.conn, q.gate = nil, nil, nil
	q.pool.Put(q)
}

// serve answers requests until the connection ends.
func (c *fuseConn) serve() {
	var n int
	var errno syscall.Errno
	in := c.get(int(fuseMaxWrite), 0)
	read := func(fd uintptr) bool {
		n, errno = rawIO(unix.SYS_READ, int(fd), in.frame())
		return errno != unix.EAGAIN
	}
	for {
		if err := c.raw.Read(read); err != nil { // shut
			return
		}
		switch errno {
		case 0:
			in = c.take(in, n)
		case unix.EINTR, unix.ENOENT: // ENOENT: the request was withdrawn meanwhile
		case unix.ENODEV: // the connection has ended
			c.fs.end()
			c.shut()
			return
		default:
			c.log.Error("cannot read from the FUSE connection", "err", errno)
			c.fs.end()
			c.shut()
			return
		}
	}
}

// fuseResend is FUSE_NOTIFY_RESEND.
const fuseResend = 7

// resend makes the kernel send again what an earlier process had read and not answered. It marks the
// numbers of such requests, which are answered like others.
func (c *fuseConn) resend() error {
	b := make([]byte, outHeaderSize)
	*(*fuse.OutHeader)(unsafe.Pointer(&b[0])) = fuse.OutHeader{Length: uint32(len(b)), Status: fuseResend}
	if _, errno := rawIO(unix.SYS_WRITE, c.fd, b); errno != 0 {
		return fmt.Errorf("have the kernel send FUSE requests again: %w", errno)
	}
	return nil
}

// rawIO makes a system call that never waits, without telling Go's scheduler.
func rawIO(trap uintptr, fd int, b []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(trap, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n), errno
}

// take starts the request that was read, and returns memory for the next one.
func (c *fuseConn) take(in *fuseRequest, n int) *fuseRequest {
	frame := in.frame()[:n]
	if n < inHeaderSize {
		c.log.Error("a FUSE request is too short", "bytes", n)
		return in
	}
	header := (*fuse.InHeader)(unsafe.Pointer(&frame[0]))
	unique := header.Unique // the answer will overwrite it
	if header.Opcode == fuseInit {
		a, ring := c.fs.init(frame)
		c.answer(unique, a)
		c.fs.begun <- ring // the only one
		return in
	}
	data := 0
	if header.Opcode == fuseWrite && n > writeInSize {
		frame, data = frame[:writeInSize], n-writeInSize
	}
	io, ask, a := c.fs.take(frame, data)
	if !ask {
		c.answer(unique, a)
		return in
	}
	q := in
	switch {
	case io.Op == block.OpWrite && data > copyLimit:
		in = c.get(int(fuseMaxWrite), 0)
		q.unique = unique
	case io.Op == block.OpWrite:
		q = c.get(data, unique)
		copy(q.room(data), in.room(data))
	case io.Op == block.OpRead:
		q = c.get(int(io.Len), unique)
	default:
		q = c.get(0, unique)
	}
	q.IO = io
	if io.Op == block.OpWrite || io.Op == block.OpRead {
		q.Data = q.room(int(io.Len))
	}
	c.fs.gate.submit(&q.request)
	return in
}

// answer answers a request that the device has nothing to do with.
func (c *fuseConn) answer(unique uint64, a fuseAnswer) {
	if a.none {
		return
	}
	b := make([]byte, outHeaderSize, outHeaderSize+len(a.data))
	*(*fuse.OutHeader)(unsafe.Pointer(&b[0])) = fuse.OutHeader{Length: uint32(outHeaderSize + len(a.data)), Status: -int32(a.errno), Unique: unique}
	c.write(append(b, a.data...))
}

// write writes an answer. It does not wait: the kernel copies the answer to the requester.
func (c *fuseConn) write(b []byte) {
	if c.refs.Add(1) > 0 {
		_, errno := rawIO(unix.SYS_WRITE, c.fd, b)
		switch errno {
		case 0, unix.ENOENT, unix.ENODEV: // the requester no longer waits
		default:
			c.log.Error("cannot answer a FUSE request", "bytes", len(b), "err", errno)
		}
	}
	c.leave()
}

func (c *fuseConn) leave() {
	if c.refs.Add(-1) == shutGate {
		c.closed.Do(func() {
			c.fs.onEnd()
			go c.file.Close() // waits for the reader
		})
	}
}

// shut ends the connection, even if the file system is mounted or the file open.
func (c *fuseConn) shut() {
	c.refs.Add(1)
	for n := c.refs.Load(); n > 0 && !c.refs.CompareAndSwap(n, n+shutGate); n = c.refs.Load() {
	}
	c.leave()
}

// fuseFinish answers a request that the device has completed. Another goroutine copies large
// answers, so that the caller can continue.
func fuseFinish(r *request) {
	q := r.front.(*fuseRequest)
	if q.Op == block.OpRead && q.Len > copyLimit {
		go q.finished()
		return
	}
	q.finished()
}

func (q *fuseRequest) finished() {
	n := 0
	if q.Err == nil {
		switch q.Op {
		case block.OpRead:
			n = int(q.Len)
		case block.OpWrite:
			*(*fuse.WriteOut)(unsafe.Pointer(&q.room(8)[0])) = fuse.WriteOut{Size: uint32(q.Len)}
			n = int(unsafe.Sizeof(fuse.WriteOut{}))
		}
	}
	b := q.answer(n)
	*(*fuse.OutHeader)(unsafe.Pointer(&b[0])) = fuse.OutHeader{Length: uint32(len(b)), Status: -int32(errno(q.Err)), Unique: q.unique}
	c := q.conn
	c.write(b)
	q.put()
}

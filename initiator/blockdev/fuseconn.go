// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
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

// fuseConn is a connection to the kernel's FUSE, the protocol of linux/fuse.h. One
// goroutine reads requests and submits them; what answers one writes the answer
// itself. So no request has a goroutine of its own, and none makes garbage. (A
// library that calls a method for each request needs both.)
type fuseConn struct {
	fs   *fuseFS
	log  *slog.Logger
	file *os.File
	raw  syscall.RawConn
	fd   int

	refs   atomic.Int64 // answers being written; shutGate + these once shut
	closed sync.Once
}

// newFuseConn makes a connection of fd, which does not block, and owns it.
func newFuseConn(fd int, fs *fuseFS, log *slog.Logger) (*fuseConn, error) {
	c := &fuseConn{fs: fs, log: log, file: os.NewFile(uintptr(fd), "fuse"), fd: fd}
	var err error
	if c.raw, err = c.file.SyscallConn(); err != nil {
		c.file.Close()
		return nil, err
	}
	return c, nil
}

// Sizes of what comes before the data, by the protocol.
const (
	inHeaderSize  = int(unsafe.Sizeof(fuse.InHeader{}))
	outHeaderSize = int(unsafe.Sizeof(fuse.OutHeader{}))
	writeInSize   = int(unsafe.Sizeof(fuse.WriteIn{}))
)

// fuseRequest is a request with memory for it: data begins with a page.
type fuseRequest struct {
	request
	conn   *fuseConn
	unique uint64
	pool   *fusePool
	memory []byte // a page, of which the headers are the end, and the data
}

const fusePage = 4096

func (q *fuseRequest) room(n int) []byte { return q.memory[fusePage : fusePage+n] }

// frame is where a request is read to, so that a write's data begins with the room.
func (q *fuseRequest) frame() []byte { return q.memory[fusePage-writeInSize:] }

// answer is the header and n bytes of the room.
func (q *fuseRequest) answer(n int) []byte { return q.memory[fusePage-outHeaderSize : fusePage+n] }

// fusePools are requests by the size of their room. Those of the largest take what
// is read; writes up to copyLimit are copied out of them, so that many small ones
// do not take much memory.
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
	skip := -int(uintptr(unsafe.Pointer(&b[0]))) & (fusePage - 1)
	q := &fuseRequest{memory: b[skip : skip+fusePage+room]}
	q.finish, q.front = fuseFinish, q
	return q
}

// get returns a request with room for n bytes, nil if n is more than the protocol allows.
func (c *fuseConn) get(n int, unique uint64) *fuseRequest {
	for _, p := range fusePools {
		if n <= p.room {
			q := p.Get().(*fuseRequest)
			q.conn, q.unique, q.pool = c, unique, p
			return q
		}
	}
	return nil
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

// rawIO is a system call that never waits, for which the scheduler need not know
// of it.
func rawIO(trap uintptr, fd int, b []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(trap, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n), errno
}

// take begins the request that was read, and returns memory for the next one.
func (c *fuseConn) take(in *fuseRequest, n int) *fuseRequest {
	frame := in.frame()[:n]
	if n < inHeaderSize {
		c.log.Error("a FUSE request is too short", "bytes", n)
		return in
	}
	header := (*fuse.InHeader)(unsafe.Pointer(&frame[0]))
	q, errno := in, syscall.Errno(0)
	switch header.Opcode {
	case fuseWrite:
		if q, errno = c.takeWrite(in, frame); q == in {
			in = c.get(int(fuseMaxWrite), 0)
		}
	case fuseRead:
		q, errno = c.takeRead(frame)
	case fuseFsync:
		q, errno = c.takeFsync(header)
	case fuseFallocate:
		q, errno = c.takeFallocate(frame)
	default:
		c.others(header, frame)
		return in
	}
	if q == nil {
		c.reply(header.Unique, errno)
		return in
	}
	c.fs.gate.submit(&q.request)
	return in
}

// body is a request as the protocol has it; nil if it is shorter.
func body[T any](frame []byte) *T {
	if len(frame) < int(unsafe.Sizeof(*new(T))) {
		return nil
	}
	return (*T)(unsafe.Pointer(&frame[0]))
}

func (c *fuseConn) takeRead(frame []byte) (*fuseRequest, syscall.Errno) {
	in := body[fuse.ReadIn](frame)
	if in == nil || in.NodeId != fileNode {
		return nil, unix.EINVAL
	}
	size := uint64(c.fs.gate.geometry.Load().Size)
	if in.Offset >= size {
		return nil, 0 // the end: no bytes
	}
	n := int(min(uint64(in.Size), size-in.Offset))
	q := c.get(n, in.Unique)
	if q == nil || n == 0 {
		return nil, unix.EINVAL
	}
	q.IO = block.IO{Op: block.OpRead, Off: int64(in.Offset), Len: int64(n), Data: q.room(n)}
	return q, 0
}

// takeWrite makes in itself the request, or copies it to a smaller one.
func (c *fuseConn) takeWrite(in *fuseRequest, frame []byte) (*fuseRequest, syscall.Errno) {
	w := body[fuse.WriteIn](frame)
	if w == nil || w.NodeId != fileNode || int64(w.Size) != int64(len(frame)-writeInSize) || w.Size == 0 {
		return nil, unix.EINVAL
	}
	n, off, unique := int(w.Size), int64(w.Offset), w.Unique // an answer is written over them
	q := in
	if n <= copyLimit {
		q = c.get(n, unique)
		copy(q.room(n), in.room(n))
	}
	q.unique = unique
	q.IO = block.IO{Op: block.OpWrite, Off: off, Len: int64(n), Data: q.room(n)}
	return q, 0
}

// takeFsync: the loop driver sends one when it is set up, and whoever opens the
// loop device meanwhile waits with it, not to be killed. The device, which may
// keep a flush as long as it likes, is asked only if there is something to flush.
// For users that is also what a dead process was told by the device and had not
// flushed.
func (c *fuseConn) takeFsync(header *fuse.InHeader) (*fuseRequest, syscall.Errno) {
	if g := c.fs.gate; g.clean() && (g.everFlushed.Load() || !c.fs.kept.Load()) {
		return nil, 0
	}
	q := c.get(0, header.Unique)
	q.IO = block.IO{Op: block.OpFlush}
	return q, 0
}

// takeFallocate: the loop driver punches a hole both for a discard and for zeroing
// that may deallocate, so that each must read as zeroes after.
func (c *fuseConn) takeFallocate(frame []byte) (*fuseRequest, syscall.Errno) {
	in := body[fuse.FallocateIn](frame)
	if in == nil || in.NodeId != fileNode {
		return nil, unix.EINVAL
	}
	mode := in.Mode &^ unix.FALLOC_FL_KEEP_SIZE
	if mode != unix.FALLOC_FL_PUNCH_HOLE && mode != unix.FALLOC_FL_ZERO_RANGE {
		return nil, unix.EOPNOTSUPP
	}
	q := c.get(0, in.Unique)
	q.IO = block.IO{Op: block.OpWriteZeroes, Unmap: mode == unix.FALLOC_FL_PUNCH_HOLE, Off: int64(in.Offset), Len: int64(in.Length)}
	return q, 0
}

// reply answers without data.
func (c *fuseConn) reply(unique uint64, errno syscall.Errno) {
	out := fuse.OutHeader{Length: uint32(outHeaderSize), Status: -int32(errno), Unique: unique}
	c.write((*[unsafe.Sizeof(out)]byte)(unsafe.Pointer(&out))[:])
}

// write writes an answer. It does not wait: the kernel copies it to who asked.
func (c *fuseConn) write(b []byte) {
	if c.refs.Add(1) > 0 {
		_, errno := rawIO(unix.SYS_WRITE, c.fd, b)
		switch errno {
		case 0, unix.ENOENT, unix.ENODEV: // nobody waits for it any more
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

// shut ends the connection, whoever has the file system mounted or the file open.
func (c *fuseConn) shut() {
	c.refs.Add(1)
	for n := c.refs.Load(); n > 0 && !c.refs.CompareAndSwap(n, n+shutGate); n = c.refs.Load() {
	}
	c.leave()
}

// fuseFinish answers a request that the device has done. Large ones are copied by
// another goroutine, so that who has called can go on.
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

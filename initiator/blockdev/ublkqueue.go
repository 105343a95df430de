// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/uring"
	"weft.dev/weft/proto/block"
)

// A request of the driver (struct ublksrv_io_desc).
type ublkDesc struct {
	op      uint32 // and flags
	sectors uint32
	start   uint64
	addr    uint64
}

const (
	ublkOpRead        = 0
	ublkOpWrite       = 1
	ublkOpFlush       = 2
	ublkOpDiscard     = 3
	ublkOpWriteZeroes = 5

	ublkFlagFUA     = 1 << 13
	ublkFlagNoUnmap = 1 << 15

	ublkMaxDepth = 4096
)

// ublkQueue serves one queue of a device. The driver requires all commands to come from the
// thread that sent the first, so each queue has its own thread. Whoever completes a request
// puts it into the mailbox; the thread passes it on.
type ublkQueue struct {
	mailbox[*ublkRequest]
	id    uint16
	depth int
	char  int // the device's /dev/ublkc
	gate  *gate
	code  func(number uint32) uint32

	descs    []byte
	bufs     []byte
	size     int // of one buffer
	requests []ublkRequest
	severed  *atomic.Bool // shared by the device's queues
	scratch  uint64       // gets the data of requests once the queue is dead
	dead     bool         // the thread has seen severed: every request is answered with an error
	running  int          // tags that the driver or we have
}

type ublkRequest struct {
	request
	queue    *ublkQueue
	tag      uint16
	given    bool // the device has it; guarded by the queue's mu
	answered bool // answered while severed, before the device completed it
}

func newUBLKQueue(id uint16, depth, size, char int, g *gate, severed *atomic.Bool, encoded bool) (q *ublkQueue, err error) {
	q = &ublkQueue{id: id, depth: depth, size: size, char: char, gate: g, severed: severed}
	q.event = -1
	q.code = func(n uint32) uint32 { return ublkCode(n, 16, encoded) }
	defer func() {
		if err != nil {
			q.leave()
			q.free()
		}
	}()
	page := os.Getpagesize()
	whole := func(n int) int { return (n + page - 1) / page * page }
	desc := int(unsafe.Sizeof(ublkDesc{}))
	at := int64(id) * int64(whole(ublkMaxDepth*desc))
	if q.descs, err = unix.Mmap(char, at, whole(depth*desc), unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return q, fmt.Errorf("map queue %d: %w", id, err)
	}
	// One buffer more, for the data of severed requests.
	if q.bufs, err = unix.Mmap(-1, 0, (depth+1)*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE); err != nil {
		return q, fmt.Errorf("map the buffers of queue %d: %w", id, err)
	}
	q.scratch = uint64(uintptr(unsafe.Pointer(&q.bufs[depth*size])))
	_, err = serving.open(func() ([]int, error) {
		ring, err := uring.New(uint32(2*(depth+1)), 0)
		if err != nil {
			return nil, err
		}
		return []int{ring.FD()}, q.open(ring)
	})
	if err != nil {
		return q, err
	}
	q.requests = make([]ublkRequest, depth)
	for i := range q.requests {
		r := &q.requests[i]
		r.queue, r.tag, r.finish, r.front = q, uint16(i), finishUBLK, r
	}
	return q, nil
}

// run serves the queue until the driver needs it no more. It calls fetched when the driver has
// all tags.
func (q *ublkQueue) run(fetched func(error)) {
	// Not unlocked, so that the thread, which the driver knows, ends with the queue.
	runtime.LockOSThread()
	main := unix.Gettid() == unix.Getpid()
	if main {
		defer runtime.UnlockOSThread()
	}
	for i := range q.requests {
		q.command(ublkFetch, &q.requests[i], 0)
	}
	q.running = q.depth
	q.listen()
	err := q.ring.Enter(false)
	q.ring.Ended(q.ended) // if the driver refuses a command, it does so at once
	if err == nil && q.running < q.depth {
		err = fmt.Errorf("queue %d: the driver refused %d of %d tags", q.id, q.depth-q.running, q.depth)
	}
	fetched(err)
	for err == nil && q.running > 0 {
		q.flushDone()
		wait := q.sleep()
		err = q.ring.Enter(wait)
		q.awake()
		q.ring.Ended(q.ended)
	}
}

// command prepares a command for the driver. It carries the tag's buffer, which also holds the
// data of a completed read.
func (q *ublkQueue) command(number uint32, r *ublkRequest, result int32) {
	addr := uint64(uintptr(unsafe.Pointer(&q.bufs[int(r.tag)*q.size])))
	if q.dead {
		addr, result = q.scratch, -int32(unix.EIO) // the device may still use r's own buffer
	}
	s := q.ring.Next()
	s.Opcode, s.FD, s.Off, s.UserData = uring.OpCmd, int32(q.char), uint64(q.code(number)), uint64(r.tag)
	binary.NativeEndian.PutUint16(s.Cmd[0:], q.id)
	binary.NativeEndian.PutUint16(s.Cmd[2:], r.tag)
	binary.NativeEndian.PutUint32(s.Cmd[4:], uint32(result))
	binary.NativeEndian.PutUint64(s.Cmd[8:], addr)
}

func (q *ublkQueue) ended(data uint64, res int32) {
	if data == eventData {
		if q.severed.Load() && !q.dead {
			q.dead = true
			q.abandon()
		}
		q.listen()
		return
	}
	if res < 0 { // ENODEV: no more requests; any other error means a protocol mismatch
		q.running--
		return
	}
	q.take(&q.requests[data])
}

// take submits the request that the driver put under a tag.
func (q *ublkQueue) take(r *ublkRequest) {
	d := *(*ublkDesc)(unsafe.Pointer(&q.descs[int(r.tag)*int(unsafe.Sizeof(ublkDesc{}))]))
	n := int64(d.sectors) * int64(block.SectorSize)
	io := block.IO{Off: int64(d.start) * int64(block.SectorSize), Len: n, FUA: d.op&ublkFlagFUA != 0}
	switch d.op & 0xff {
	case ublkOpRead:
		io.Op = block.OpRead
	case ublkOpWrite:
		io.Op = block.OpWrite
	case ublkOpFlush:
		io = block.IO{Op: block.OpFlush}
	case ublkOpDiscard:
		io.Op = block.OpDiscard
	case ublkOpWriteZeroes:
		io.Op, io.Unmap = block.OpWriteZeroes, d.op&ublkFlagNoUnmap == 0
	}
	if io.Op == block.OpRead || io.Op == block.OpWrite {
		io.Data = q.bufs[int(r.tag)*q.size:][:n]
	}
	if q.dead {
		q.command(ublkCommit, r, 0)
		return
	}
	r.IO = io
	q.mu.Lock()
	r.given = true
	q.mu.Unlock()
	q.gate.submit(&r.request)
}

func finishUBLK(f *request) {
	r := f.front.(*ublkRequest)
	q := r.queue
	q.mu.Lock()
	r.given = false
	if !r.answered {
		q.putLocked(r)
	}
	q.mu.Unlock()
}

// flushDone passes the completed requests to the driver.
func (q *ublkQueue) flushDone() {
	for _, r := range q.collect() {
		q.command(ublkCommit, r, ublkResult(&r.IO))
	}
}

// ublkResult is the number of bytes read or written, or a negated errno.
func ublkResult(io *block.IO) int32 {
	switch {
	case io.Err != nil:
		return -int32(errno(io.Err))
	case io.Op == block.OpRead || io.Op == block.OpWrite:
		return int32(io.Len)
	}
	return 0
}

// abandon answers with an error whatever the device does not complete. The device still has
// those buffers, so the driver gets another one for the requests that follow.
func (q *ublkQueue) abandon() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.requests {
		if r := &q.requests[i]; r.given && !r.answered {
			r.answered = true
			q.command(ublkCommit, r, 0)
		}
	}
}

// leave releases everything of the queue but its buffers, after run.
func (q *ublkQueue) leave() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.left {
		return
	}
	q.leaveLocked()
	if q.descs != nil {
		_ = unix.Munmap(q.descs)
	}
}

// free releases the buffers; the device must no longer use them.
func (q *ublkQueue) free() {
	if q.bufs != nil {
		_ = unix.Munmap(q.bufs)
		q.bufs = nil
	}
}

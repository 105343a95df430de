// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// aio submits direct reads and writes to the kernel (io_submit) without a waiting thread for each,
// and learns of completions through a descriptor per queue. A worker waiting in pread would hold one of
// Go's few processors until the runtime takes it away, after up to 10 ms.
//
// io_submit rather than io_uring: sandboxes allow it far more often, and for direct I/O on block
// devices and their file systems it is just as good.
//
// The kernel is asked not to wait (RWF_NOWAIT). An IO that would have to wait (for a block to be
// allocated, a modification time to be set, a full queue), and every IO that fails, is repeated by
// a worker, which can wait and produces the error text.
type aio struct {
	memory int // alignment that the device requires
	off    atomic.Bool
	queues []*aioQueue
	// near holds queues: the runtime keeps such a pool for each processor, so IOs that are submitted
	// on one processor go to one queue, which others use only if theirs is full.
	near sync.Pool
	next atomic.Uint32 // the queue of the next processor
	// answer receives each completed IO; well says that it was done as a whole. One goroutine of each
	// queue calls it.
	answer func(io *block.IO, well bool)
}

// aioQueue is a context of the kernel, with the goroutine that collects its completions.
type aioQueue struct {
	all     *aio
	context uintptr
	ended   *os.File // eventfd: becomes readable when an IO has completed
	done    chan struct{}

	mu       sync.Mutex
	free     []uint32
	underWay int // IOs that have not been answered
	closed   bool
	rest     sync.Cond // underWay is 0
	slots    [aioDepth]aioSlot
}

const (
	aioDepth = 128 // of a queue
	// aioQueues is the most queues of a file. Some drives have more, but the kernel allows 65536 IOs in all
	// contexts of a machine (fs.aio-max-nr), and a hundred drives with four queues each ask for 51200.
	aioQueues = 4
	// aioBounce is the largest IO accepted from unaligned memory; a slot holds a buffer of that
	// size.
	aioBounce = 32 << 10
)

// aioSlot is one IO in the kernel.
type aioSlot struct {
	block  iocb
	list   [1]*iocb
	io     *block.IO
	bounce []byte      // in place of unaligned memory
	copied bool        // bounce is in use
	filled atomic.Bool // orders what submit has written before what reap reads
}

// iocb is struct iocb of linux/aio_abi.h on little-endian machines.
type iocb struct {
	data    uint64
	_       uint32
	flags   uint32 // RWF_*
	opcode  uint16
	_       int16
	fd      uint32
	buf     uint64
	nbytes  uint64
	offset  int64
	_       uint64
	options uint32
	eventfd uint32
}

// ioEvent is struct io_event of linux/aio_abi.h.
type ioEvent struct {
	data uint64
	_    uint64
	res  int64
	_    int64
}

const (
	iocbPread     = 0
	iocbPwrite    = 1
	iocbFlagResfd = 1
)

// newAIO returns nil if the kernel lacks or forbids aio. The caller starts it.
func newAIO(fd, memory int) *aio {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return nil
	}
	a := &aio{memory: memory}
	for range min(runtime.GOMAXPROCS(0), aioQueues) {
		q := newAIOQueue(fd, a)
		if q == nil {
			break
		}
		a.queues = append(a.queues, q)
	}
	if len(a.queues) == 0 {
		return nil
	}
	a.near.New = func() any { return a.queues[int(a.next.Add(1)-1)%len(a.queues)] }
	return a
}

// newAIOQueue returns nil if the kernel has no further context.
func newAIOQueue(fd int, a *aio) *aioQueue {
	q := &aioQueue{all: a, done: make(chan struct{})}
	q.rest.L = &q.mu
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, aioDepth, uintptr(unsafe.Pointer(&q.context)), 0); errno != 0 {
		return nil
	}
	event, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		q.destroy()
		return nil
	}
	for i := range q.slots {
		s := &q.slots[i]
		s.list[0] = &s.block
		s.block = iocb{data: uint64(i), fd: uint32(fd), options: iocbFlagResfd, eventfd: uint32(event), flags: unix.RWF_NOWAIT}
		q.free = append(q.free, uint32(i))
	}
	q.ended = os.NewFile(uintptr(event), "eventfd")
	return q
}

// start begins to answer IOs, through answer.
func (a *aio) start(answer func(io *block.IO, well bool)) {
	a.answer = answer
	for _, q := range a.queues {
		go q.reap()
	}
}

// submit hands an IO to the kernel, if it is suitable, there is room and aio is not closed.
func (a *aio) submit(io *block.IO) bool {
	if a == nil || a.off.Load() || io.FUA || io.Op != block.OpRead && io.Op != block.OpWrite {
		return false
	}
	straight := aligned(io.Data, a.memory)
	if !straight && io.Len > aioBounce {
		return false
	}
	near := a.near.Get().(*aioQueue)
	a.near.Put(near)
	if i, ok := near.take(); ok {
		return near.submit(i, io, !straight)
	}
	for _, q := range a.queues {
		if i, ok := q.take(); ok {
			return q.submit(i, io, !straight)
		}
	}
	return false
}

// take reserves a slot.
func (q *aioQueue) take() (uint32, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	last := len(q.free) - 1
	if last < 0 || q.closed {
		return 0, false
	}
	i := q.free[last]
	q.free = q.free[:last]
	q.underWay++
	return i, true
}

// submit hands an IO to the kernel in a slot that was taken.
func (q *aioQueue) submit(i uint32, io *block.IO, bounce bool) bool {
	s := &q.slots[i]
	s.fill(io, bounce)
	s.filled.Store(true)
	// If the kernel takes the slot, only the reaper touches it from here on.
	_, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, q.context, 1, uintptr(unsafe.Pointer(&s.list)))
	if errno == 0 {
		return true
	}
	if errno != unix.EAGAIN && errno != unix.EINTR { // for example: RWF_NOWAIT is not supported here
		q.all.off.Store(true)
	}
	s.empty()
	q.mu.Lock()
	q.free = append(q.free, i)
	q.returnedLocked(1)
	q.mu.Unlock()
	return false
}

// fill builds the kernel's form of io. The address in it stays valid: the slot keeps the IO, and Go
// does not move heap objects.
func (s *aioSlot) fill(io *block.IO, bounce bool) {
	p := io.Data
	s.io, s.copied = io, bounce
	if bounce {
		if len(s.bounce) < len(p) {
			s.bounce = Aligned(len(p))
		}
		p = s.bounce[:len(p)]
	}
	s.block.opcode = iocbPread
	if io.Op == block.OpWrite {
		s.block.opcode = iocbPwrite
		if bounce {
			copy(p, io.Data)
		}
	}
	s.block.buf = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p))))
	s.block.nbytes, s.block.offset = uint64(len(p)), io.Off
}

func (s *aioSlot) empty() {
	s.filled.Store(false)
	s.io = nil
}

// reap answers completed IOs, until close.
func (q *aioQueue) reap() {
	defer close(q.done)
	var count [8]byte
	var events [aioDepth]ioEvent
	var ios [aioDepth]*block.IO
	for {
		if _, err := q.ended.Read(count[:]); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				panic(fmt.Sprintf("wait for ended IOs: %v", err)) // a readable eventfd has no errors
			}
			return
		}
		for n := len(events); n == len(events); {
			n = q.collect(events[:])
			q.end(events[:n], ios[:n])
		}
	}
}

// collect fetches completions without waiting.
func (q *aioQueue) collect(events []ioEvent) int {
	var now unix.Timespec
	for {
		n, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, q.context, 0, uintptr(len(events)), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(unsafe.Pointer(&now)), 0)
		switch errno {
		case 0:
			return int(n)
		case unix.EINTR:
		default:
			panic(fmt.Sprintf("collect ended IOs: %v", errno)) // it cannot fail with these arguments
		}
	}
}

// end answers the IOs of events, which it notes in ios. Their slots are free before that, since whoever
// has an answer may submit the next IO.
func (q *aioQueue) end(events []ioEvent, ios []*block.IO) {
	if len(events) == 0 {
		return
	}
	for k, e := range events {
		s := &q.slots[e.data]
		if !s.filled.Load() {
			panic(fmt.Sprintf("an IO in slot %d ended that is not under way", e.data))
		}
		ios[k] = s.io
		if s.copied && s.io.Op == block.OpRead && e.res == s.io.Len {
			copy(s.io.Data, s.bounce)
		}
		s.empty()
	}
	q.mu.Lock()
	for _, e := range events {
		q.free = append(q.free, uint32(e.data))
	}
	q.mu.Unlock()
	for k, io := range ios {
		ios[k] = nil
		q.all.answer(io, events[k].res == io.Len)
	}
	q.mu.Lock()
	q.returnedLocked(len(events))
	q.mu.Unlock()
}

// returnedLocked counts IOs that are no longer under way.
func (q *aioQueue) returnedLocked(n int) {
	if q.underWay -= n; q.underWay == 0 {
		q.rest.Broadcast()
	}
}

// close accepts no more IOs, and ends when all have been answered.
func (a *aio) close() {
	if a == nil {
		return
	}
	for _, q := range a.queues {
		q.mu.Lock()
		q.closed = true
		for q.underWay > 0 {
			q.rest.Wait()
		}
		q.mu.Unlock()
		q.ended.Close()
		<-q.done
		q.destroy()
	}
}

func (q *aioQueue) destroy() {
	if _, _, errno := unix.Syscall(unix.SYS_IO_DESTROY, q.context, 0, 0); errno != 0 {
		panic(fmt.Sprintf("io_destroy: %v", errno)) // the context is ours and is destroyed once
	}
}

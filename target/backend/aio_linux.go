// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// aio submits direct reads and writes to the kernel (io_submit) without a waiting thread for each,
// and learns of completions through one descriptor. A worker waiting in pread would hold one of
// Go's few processors until the runtime takes it away, after up to 10 ms.
//
// io_submit rather than io_uring: sandboxes allow it far more often, and for direct I/O on block
// devices and their file systems it is just as good.
//
// The kernel is asked not to wait (RWF_NOWAIT). An IO that would have to wait (for a block to be
// allocated, a modification time to be set, a full queue), and every IO that fails, is repeated by
// a worker, which can wait and produces the error text.
type aio struct {
	context uintptr
	device  int
	memory  int      // alignment that the device requires
	ended   *os.File // eventfd: becomes readable when an IO has completed
	off     atomic.Bool
	// answer receives each completed IO; well says that it was done as a whole. One goroutine calls
	// it at a time.
	answer func(io *block.IO, well bool)
	rest   func(n int) // n IOs have been answered
	done   chan struct{}

	mu    sync.Mutex
	free  []uint32
	slots [aioDepth]aioSlot
}

const (
	aioDepth = 128
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

// newAIO returns nil if the kernel lacks or forbids aio.
func newAIO(fd, memory int) *aio {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return nil
	}
	a := &aio{device: fd, memory: memory, done: make(chan struct{})}
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, aioDepth, uintptr(unsafe.Pointer(&a.context)), 0); errno != 0 {
		return nil
	}
	event, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		a.destroy()
		return nil
	}
	for i := range a.slots {
		s := &a.slots[i]
		s.list[0] = &s.block
		s.block = iocb{data: uint64(i), fd: uint32(fd), options: iocbFlagResfd, eventfd: uint32(event), flags: unix.RWF_NOWAIT}
		a.free = append(a.free, uint32(i))
	}
	a.ended = os.NewFile(uintptr(event), "eventfd")
	return a
}

// submit hands an IO to the kernel, if it is suitable and there is room.
func (a *aio) submit(io *block.IO) bool {
	if a == nil || a.off.Load() || io.FUA || io.Op != block.OpRead && io.Op != block.OpWrite {
		return false
	}
	straight := aligned(io.Data, a.memory)
	if !straight && io.Len > aioBounce {
		return false
	}
	i, ok := a.take()
	if !ok {
		return false
	}
	s := &a.slots[i]
	s.fill(io, !straight)
	s.filled.Store(true)
	// If the kernel takes the slot, only the reaper touches it from here on.
	_, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, a.context, 1, uintptr(unsafe.Pointer(&s.list)))
	if errno == 0 {
		return true
	}
	if errno != unix.EAGAIN && errno != unix.EINTR { // for example: RWF_NOWAIT is not supported here
		a.off.Store(true)
	}
	s.empty()
	a.mu.Lock()
	a.free = append(a.free, i)
	a.mu.Unlock()
	return false
}

func (a *aio) take() (uint32, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	last := len(a.free) - 1
	if last < 0 {
		return 0, false
	}
	i := a.free[last]
	a.free = a.free[:last]
	return i, true
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
func (a *aio) reap() {
	defer close(a.done)
	var count [8]byte
	var events [aioDepth]ioEvent
	for {
		if _, err := a.ended.Read(count[:]); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				panic(fmt.Sprintf("wait for ended IOs: %v", err)) // a readable eventfd has no errors
			}
			return
		}
		for n := len(events); n == len(events); {
			n = a.collect(events[:])
			for _, e := range events[:n] {
				a.end(e)
			}
			if n > 0 {
				a.rest(n)
			}
		}
	}
}

// collect fetches completions without waiting.
func (a *aio) collect(events []ioEvent) int {
	var now unix.Timespec
	for {
		n, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, a.context, 0, uintptr(len(events)), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(unsafe.Pointer(&now)), 0)
		switch errno {
		case 0:
			return int(n)
		case unix.EINTR:
		default:
			panic(fmt.Sprintf("collect ended IOs: %v", errno)) // it cannot fail with these arguments
		}
	}
}

// end answers the IO of one event.
func (a *aio) end(e ioEvent) {
	s := &a.slots[e.data]
	if !s.filled.Load() {
		panic(fmt.Sprintf("an IO in slot %d ended that is not under way", e.data))
	}
	io := s.io
	well := e.res == io.Len
	if well && s.copied && io.Op == block.OpRead {
		copy(io.Data, s.bounce)
	}
	s.empty()
	a.mu.Lock()
	a.free = append(a.free, uint32(e.data))
	a.mu.Unlock()
	a.answer(io, well)
}

// close ends reap; no IO may be under way.
func (a *aio) close() {
	if a == nil {
		return
	}
	a.ended.Close()
	<-a.done
	a.destroy()
}

func (a *aio) destroy() {
	if _, _, errno := unix.Syscall(unix.SYS_IO_DESTROY, a.context, 0, 0); errno != 0 {
		panic(fmt.Sprintf("io_destroy: %v", errno)) // the context is ours and is destroyed once
	}
}

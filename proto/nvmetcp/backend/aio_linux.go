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

// aio hands direct reads and writes to the kernel without a thread that waits
// for each (io_submit), and learns of their ends through one descriptor. A worker
// that waits in pread holds one of Go's few processors until the runtime takes it
// away, after up to 10 ms.
//
// io_submit rather than io_uring, since what sandboxes allow has it far more
// often, and for direct IO on block devices and their file systems it is as good.
//
// The kernel is asked not to wait (RWF_NOWAIT). What it would wait for (a block
// to be allocated, a file's time of change to be set, a full queue), and all that
// goes wrong, is done again by a worker, who can wait and words the error.
type aio struct {
	context uintptr
	device  int
	memory  int      // alignment that the device wants
	ended   *os.File // eventfd: becomes readable when something has ended
	off     atomic.Bool
	// answer gets an IO that ended; well says that it has been done as a whole. It is
	// called by one goroutine at a time.
	answer func(io *block.IO, well bool)
	rest   func(n int) // n IOs have been answered
	done   chan struct{}

	mu    sync.Mutex
	free  []uint32
	slots [aioDepth]aioSlot
}

const (
	aioDepth = 128
	// aioBounce is how large an IO in memory that is not aligned can be; a slot
	// keeps that much.
	aioBounce = 32 << 10
)

// aioSlot is one IO that the kernel has.
type aioSlot struct {
	block  iocb
	list   [1]*iocb
	io     *block.IO
	bounce []byte      // in place of memory that is not aligned
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

// newAIO is nil if the kernel has or allows no such thing.
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

// submit gives an IO to the kernel, if it is one for it and there is room.
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
	// Nobody but the reaper touches the slot from here on, if the kernel takes it.
	_, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, a.context, 1, uintptr(unsafe.Pointer(&s.list)))
	if errno == 0 {
		return true
	}
	if errno != unix.EAGAIN && errno != unix.EINTR { // no RWF_NOWAIT here, for one
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

// fill makes the kernel's form of io. The address that it holds stays valid: the
// slot keeps the IO, and Go does not move what is on its heap.
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

// reap answers what has ended, until close.
func (a *aio) reap() {
	defer close(a.done)
	var count [8]byte
	var events [aioDepth]ioEvent
	for {
		if _, err := a.ended.Read(count[:]); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				panic(fmt.Sprintf("wait for ended IOs: %v", err)) // an eventfd that can be read has no errors
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

// collect fills in what has ended, without waiting.
func (a *aio) collect(events []ioEvent) int {
	var now unix.Timespec
	for {
		n, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, a.context, 0, uintptr(len(events)), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(unsafe.Pointer(&now)), 0)
		switch errno {
		case 0:
			return int(n)
		case unix.EINTR:
		default:
			panic(fmt.Sprintf("collect ended IOs: %v", errno)) // with these arguments it cannot fail
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

// close ends reap; nothing may be under way.
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

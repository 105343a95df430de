// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file implements the part of io_uring(7) that ublk and FUSE need: one thread submits
// commands and reads of an eventfd, and waits for their completions.

const (
	uringOpRead    = 22
	uringOpMessage = 40
	uringOpCmd     = 46

	uringSendMessage = 31 // from Linux 6.13 on

	uringCoopTaskrun  = 1 << 8
	uringSQE128       = 1 << 10 // entries of 128 bytes
	uringSingleIssuer = 1 << 12
	uringDeferTaskrun = 1 << 13 // from Linux 6.1 on: the kernel's work for the thread waits for enter
	uringNoMmap       = 1 << 14 // from Linux 6.5 on

	uringEnterGetEvents = 1 << 0

	uringOffSQ   = 0
	uringOffCQ   = 0x8000000
	uringOffSQEs = 0x10000000
)

// uringParams is struct io_uring_params.
type uringParams struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32
	_                                                                      [3]uint32
	sq                                                                     struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		userAddr                                            uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		userAddr                                            uint64
	}
}

// uringSQE is the first 64 bytes of struct io_uring_sqe; in entries of 128 bytes, the command
// continues after them.
type uringSQE struct {
	opcode, flags uint8
	_             uint16
	fd            int32
	off           uint64 // for commands: the operation, in the lower half
	addr          uint64
	len           uint32
	_             uint32
	userData      uint64
	_             uint64
	cmd           [16]byte
}

// uringCQE is struct io_uring_cqe.
type uringCQE struct {
	userData uint64
	res      int32
	flags    uint32
}

// uring is one ring. Only one goroutine may use it.
type uring struct {
	fd                int
	entrySize         uintptr
	sqMem, cqMem, sqe []byte
	sqHead, sqTail    *atomic.Uint32
	cqHead, cqTail    *atomic.Uint32
	sqMask, cqMask    uint32
	tail              uint32 // prepared entries; sqTail is the part visible to the kernel
	array             []uint32
	cqes              []uringCQE
}

func newURing(entries, flags uint32) (r *uring, err error) {
	r = &uring{entrySize: 64}
	if flags&uringSQE128 != 0 {
		r.entrySize = 128
	}
	flags |= uringCoopTaskrun
	if r.ownMemory(entries, flags) == nil {
		return r, nil
	}
	p := uringParams{flags: flags}
	r.fd, err = uringSetup(entries, &p)
	if errors.Is(err, unix.EINVAL) {
		p = uringParams{flags: flags &^ uringCoopTaskrun} // before Linux 5.19
		r.fd, err = uringSetup(entries, &p)
	}
	if err != nil {
		return nil, fmt.Errorf("set up io_uring: %w", err)
	}
	if err := r.mmap(&p); err != nil {
		r.close()
		return nil, fmt.Errorf("map io_uring: %w", err)
	}
	return r, nil
}

// ownMemory places the ring in memory of this process. A mapped ring lives as long as the
// process's memory, and so as long as any of its threads. A thread that waits for the device
// of the ring, see unshared, would then keep a killed process, and the device, forever: since
// Linux 6.7 the device ends when the ring does.
func (r *uring) ownMemory(entries, flags uint32) (err error) {
	const rw, anonymous = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANON | unix.MAP_POPULATE
	n := 1 << bits.Len32(entries-1) // as the kernel rounds
	rings := os.Getpagesize() + n*4 + 2*n*int(unsafe.Sizeof(uringCQE{}))
	if r.sqMem, err = unix.Mmap(-1, 0, rings, rw, anonymous); err != nil {
		return err
	}
	if r.sqe, err = unix.Mmap(-1, 0, n*int(r.entrySize), rw, anonymous); err != nil {
		r.unmap()
		return err
	}
	p := uringParams{flags: flags | uringNoMmap}
	p.cq.userAddr = uint64(uintptr(unsafe.Pointer(&r.sqMem[0])))
	p.sq.userAddr = uint64(uintptr(unsafe.Pointer(&r.sqe[0])))
	if r.fd, err = uringSetup(entries, &p); err != nil {
		r.unmap()
		return err
	}
	r.point(&p, r.sqMem, r.sqMem)
	return nil
}

func uringSetup(entries uint32, p *uringParams) (int, error) {
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if e != 0 {
		return -1, os.NewSyscallError("io_uring_setup", e)
	}
	return int(fd), nil // it is close-on-exec
}

func (r *uring) mmap(p *uringParams) (err error) {
	const rw = unix.PROT_READ | unix.PROT_WRITE
	if r.sqMem, err = unix.Mmap(r.fd, uringOffSQ, int(p.sq.array+p.sqEntries*4), rw, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return err
	}
	if r.cqMem, err = unix.Mmap(r.fd, uringOffCQ, int(p.cq.cqes+p.cqEntries*uint32(unsafe.Sizeof(uringCQE{}))), rw, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return err
	}
	if r.sqe, err = unix.Mmap(r.fd, uringOffSQEs, int(p.sqEntries)*int(r.entrySize), rw, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return err
	}
	r.point(p, r.sqMem, r.cqMem)
	return nil
}

// point locates the parts of the rings in their memory.
func (r *uring) point(p *uringParams, sq, cq []byte) {
	counter := func(mem []byte, off uint32) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&mem[off])) }
	r.sqHead, r.sqTail = counter(sq, p.sq.head), counter(sq, p.sq.tail)
	r.cqHead, r.cqTail = counter(cq, p.cq.head), counter(cq, p.cq.tail)
	r.sqMask, r.cqMask = counter(sq, p.sq.mask).Load(), counter(cq, p.cq.mask).Load()
	r.array = unsafe.Slice((*uint32)(unsafe.Pointer(&sq[p.sq.array])), p.sqEntries)
	r.cqes = unsafe.Slice((*uringCQE)(unsafe.Pointer(&cq[p.cq.cqes])), p.cqEntries)
	r.tail = r.sqTail.Load()
}

func (r *uring) close() {
	unix.Close(r.fd)
	r.unmap()
}

func (r *uring) unmap() {
	for _, mem := range []*[]byte{&r.sqMem, &r.cqMem, &r.sqe} {
		if *mem != nil {
			_ = unix.Munmap(*mem)
			*mem = nil
		}
	}
}

// next returns an empty entry. There must be room: a ring has as many entries as its owner can
// have outstanding.
func (r *uring) next() *uringSQE {
	if r.tail-r.sqHead.Load() > r.sqMask {
		panic(fmt.Sprintf("io_uring of %d entries is full", r.sqMask+1))
	}
	i := r.tail & r.sqMask
	r.tail++
	r.array[i] = i
	mem := r.sqe[uintptr(i)*r.entrySize:][:r.entrySize]
	clear(mem)
	return (*uringSQE)(unsafe.Pointer(&mem[0]))
}

// enter submits the prepared entries and, if wait is set, waits for a completion.
func (r *uring) enter(wait bool) error {
	r.sqTail.Store(r.tail)
	for {
		submit := r.tail - r.sqHead.Load()
		var least, flags uintptr
		if wait && r.cqHead.Load() == r.cqTail.Load() {
			least = 1
		}
		if wait {
			flags = uringEnterGetEvents
		}
		if submit == 0 && least == 0 {
			return nil
		}
		_, _, e := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(submit), least, flags, 0, 0)
		switch {
		case e == unix.EINTR, e == unix.EAGAIN:
		case e != 0:
			return os.NewSyscallError("io_uring_enter", e)
		case r.tail == r.sqHead.Load():
			return nil
		}
	}
}

// message makes a completion with this user data appear in the ring. Unlike all other methods,
// any thread may call it while the ring is open.
func (r *uring) message(userData uint64) error {
	s := uringSQE{opcode: uringOpMessage, fd: int32(r.fd), off: userData}
	_, _, e := syscall.RawSyscall6(unix.SYS_IO_URING_REGISTER, ^uintptr(0), uringSendMessage, uintptr(unsafe.Pointer(&s)), 1, 0, 0)
	if e != 0 {
		return os.NewSyscallError("io_uring_register", e)
	}
	return nil
}

// ended calls f for each completion.
func (r *uring) ended(f func(userData uint64, res int32)) {
	head := r.cqHead.Load()
	for tail := r.cqTail.Load(); head != tail; head++ {
		c := r.cqes[head&r.cqMask]
		r.cqHead.Store(head + 1)
		f(c.userData, c.res)
	}
}

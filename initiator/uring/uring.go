// SPDX-License-Identifier: Apache-2.0

// Package uring has the part of io_uring(7) that block devices and probes of legs need: one thread prepares
// commands of drivers, and reads of an eventfd, submits them and waits for their completions.
package uring

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

// Operations of entries (Linux, include/uapi/linux/io_uring.h, as everything here).
const (
	OpRead = 22
	OpCmd  = 46 // a command of the driver of the file

	opMessage = 40
)

// Flags of a ring.
const (
	SQE128       = 1 << 10 // entries of 128 bytes
	CQE32        = 1 << 11 // completions of 32 bytes
	SingleIssuer = 1 << 12 // one thread alone submits
	DeferTaskrun = 1 << 13 // from Linux 6.1 on: the kernel's work for the thread waits for Enter

	coopTaskrun = 1 << 8
	noMmap      = 1 << 14 // from Linux 6.5 on
)

const (
	sendMessage    = 31 // from Linux 6.13 on
	enterGetEvents = 1 << 0

	offSQ   = 0
	offCQ   = 0x8000000
	offSQEs = 0x10000000
)

// params is struct io_uring_params.
type params struct {
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

// SQE is the first 64 bytes of struct io_uring_sqe.
type SQE struct {
	Opcode, flags uint8
	_             uint16
	FD            int32
	Off           uint64 // for commands: the operation, in the lower half
	Addr          uint64
	Len           uint32
	_             uint32
	UserData      uint64
	_             uint64
	Cmd           [16]byte // in entries of 128 bytes, 64 more follow
}

// CQE is struct io_uring_cqe. With CQE32, 16 bytes more follow.
type CQE struct {
	UserData uint64
	Res      int32
	flags    uint32
}

// Ring is one ring. Only one goroutine may use it at a time.
type Ring struct {
	fd                int
	sqeSize, cqeSize  uintptr
	sqMem, cqMem, sqe []byte
	sqHead, sqTail    *atomic.Uint32
	cqHead, cqTail    *atomic.Uint32
	sqMask, cqMask    uint32
	tail              uint32 // prepared entries; sqTail is the part visible to the kernel
	array             []uint32
	cqes              []byte
}

// New makes a ring with room for at least so many entries.
func New(entries, flags uint32) (r *Ring, err error) {
	r = newRing(flags)
	flags |= coopTaskrun
	if r.ownMemory(entries, flags) == nil {
		return r, nil
	}
	p := params{flags: flags}
	r.fd, err = setup(entries, &p)
	if errors.Is(err, unix.EINVAL) {
		p = params{flags: flags &^ coopTaskrun} // before Linux 5.19
		r.fd, err = setup(entries, &p)
	}
	if err != nil {
		return nil, fmt.Errorf("set up io_uring: %w", err)
	}
	if err := r.mmap(&p); err != nil {
		r.Close()
		return nil, fmt.Errorf("map io_uring: %w", err)
	}
	return r, nil
}

func newRing(flags uint32) *Ring {
	r := &Ring{sqeSize: unsafe.Sizeof(SQE{}), cqeSize: unsafe.Sizeof(CQE{})}
	if flags&SQE128 != 0 {
		r.sqeSize *= 2
	}
	if flags&CQE32 != 0 {
		r.cqeSize *= 2
	}
	return r
}

// FD is the ring's file, open until Close.
func (r *Ring) FD() int { return r.fd }

// ownMemory places the ring in memory of this process. A mapped ring lives as long as the process's
// memory, and so as long as any of its threads. A thread that waits for the device of the ring (see
// unshared in package blockdev) would then keep a killed process, and the device, forever: since
// Linux 6.7 the device ends when the ring does.
func (r *Ring) ownMemory(entries, flags uint32) (err error) {
	const rw, anonymous = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANON | unix.MAP_POPULATE
	n := 1 << bits.Len32(entries-1) // as the kernel rounds
	rings := os.Getpagesize() + n*4 + 2*n*int(r.cqeSize)
	if r.sqMem, err = unix.Mmap(-1, 0, rings, rw, anonymous); err != nil {
		return err
	}
	if r.sqe, err = unix.Mmap(-1, 0, n*int(r.sqeSize), rw, anonymous); err != nil {
		r.unmap()
		return err
	}
	p := params{flags: flags | noMmap}
	p.cq.userAddr = uint64(uintptr(unsafe.Pointer(&r.sqMem[0])))
	p.sq.userAddr = uint64(uintptr(unsafe.Pointer(&r.sqe[0])))
	if r.fd, err = setup(entries, &p); err != nil {
		r.unmap()
		return err
	}
	r.point(&p, r.sqMem, r.sqMem)
	return nil
}

func setup(entries uint32, p *params) (int, error) {
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if e != 0 {
		return -1, os.NewSyscallError("io_uring_setup", e)
	}
	return int(fd), nil // it is close-on-exec
}

func (r *Ring) mmap(p *params) (err error) {
	const rw = unix.PROT_READ | unix.PROT_WRITE
	if r.sqMem, err = unix.Mmap(r.fd, offSQ, int(p.sq.array+p.sqEntries*4), rw, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return err
	}
	if r.cqMem, err = unix.Mmap(r.fd, offCQ, int(p.cq.cqes+p.cqEntries*uint32(r.cqeSize)), rw, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return err
	}
	if r.sqe, err = unix.Mmap(r.fd, offSQEs, int(p.sqEntries)*int(r.sqeSize), rw, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return err
	}
	r.point(p, r.sqMem, r.cqMem)
	return nil
}

// point locates the parts of the rings in their memory.
func (r *Ring) point(p *params, sq, cq []byte) {
	counter := func(mem []byte, off uint32) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&mem[off])) }
	r.sqHead, r.sqTail = counter(sq, p.sq.head), counter(sq, p.sq.tail)
	r.cqHead, r.cqTail = counter(cq, p.cq.head), counter(cq, p.cq.tail)
	r.sqMask, r.cqMask = counter(sq, p.sq.mask).Load(), counter(cq, p.cq.mask).Load()
	r.array = unsafe.Slice((*uint32)(unsafe.Pointer(&sq[p.sq.array])), p.sqEntries)
	r.cqes = cq[p.cq.cqes:][:uintptr(p.cqEntries)*r.cqeSize]
	r.tail = r.sqTail.Load()
}

// Close ends the ring. What it still has outstanding ends in its own time.
func (r *Ring) Close() {
	unix.Close(r.fd)
	r.unmap()
}

func (r *Ring) unmap() {
	for _, mem := range []*[]byte{&r.sqMem, &r.cqMem, &r.sqe} {
		if *mem != nil {
			_ = unix.Munmap(*mem)
			*mem = nil
		}
	}
}

// Next returns an empty entry. There must be room: a ring has as many entries as its owner can
// have outstanding.
func (r *Ring) Next() *SQE {
	if r.tail-r.sqHead.Load() > r.sqMask {
		panic(fmt.Sprintf("io_uring of %d entries is full", r.sqMask+1))
	}
	i := r.tail & r.sqMask
	r.tail++
	r.array[i] = i
	mem := r.sqe[uintptr(i)*r.sqeSize:][:r.sqeSize]
	clear(mem)
	return (*SQE)(unsafe.Pointer(&mem[0]))
}

// Enter submits the prepared entries and, if wait is set, waits for a completion.
func (r *Ring) Enter(wait bool) error {
	r.sqTail.Store(r.tail)
	for {
		submit := r.tail - r.sqHead.Load()
		var least, flags uintptr
		if wait && r.cqHead.Load() == r.cqTail.Load() {
			least = 1
		}
		if wait {
			flags = enterGetEvents
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

// Do submits the only prepared entry, and returns the result of its completion. The ring has no other outstanding.
func (r *Ring) Do() (result int32, err error) {
	for done := false; !done; {
		if err := r.Enter(true); err != nil {
			return 0, err
		}
		r.Ended(func(_ uint64, res int32) { result, done = res, true })
	}
	return result, nil
}

// Message makes a completion with this user data appear in the ring. Unlike all other methods,
// any thread may call it while the ring is open.
func (r *Ring) Message(userData uint64) error {
	s := SQE{Opcode: opMessage, FD: int32(r.fd), Off: userData}
	_, _, e := syscall.RawSyscall6(unix.SYS_IO_URING_REGISTER, ^uintptr(0), sendMessage, uintptr(unsafe.Pointer(&s)), 1, 0, 0)
	if e != 0 {
		return os.NewSyscallError("io_uring_register", e)
	}
	return nil
}

// Ended calls f for each completion.
func (r *Ring) Ended(f func(userData uint64, res int32)) {
	head := r.cqHead.Load()
	for tail := r.cqTail.Load(); head != tail; head++ {
		c := *(*CQE)(unsafe.Pointer(&r.cqes[uintptr(head&r.cqMask)*r.cqeSize]))
		r.cqHead.Store(head + 1)
		f(c.UserData, c.Res)
	}
}

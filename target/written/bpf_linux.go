// SPDX-License-Identifier: Apache-2.0

package written

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file makes the calls of bpf(2) and the shared memory.

// Commands of bpf(2), types and flags (Linux, include/uapi/linux/bpf.h).
const (
	cmdMapCreate  = 0
	cmdMapUpdate  = 2
	cmdMapDelete  = 3
	cmdProgLoad   = 5
	cmdTracepoint = 17
	cmdInfo       = 15

	mapArray, mapHashOfMaps = 2, 13
	flagMmap, flagInner     = 0x400, 0x1000

	progTracing, attachRaw = 26, 23

	attrSize   = 144
	infoSize   = 232
	infoTook   = 192 // run_time_ns
	infoRuns   = 200 // run_cnt
	infoMisses = 208 // recursion_misses
)

// license of the program in program.go as the kernel is told: since Linux 6.2 it lets only programs under the GPL
// read its types, struct bio here.
const license = "GPL"

// attributes is a union bpf_attr.
type attributes [attrSize]byte

func (a *attributes) set32(at int, v uint32) { binary.NativeEndian.PutUint32(a[at:], v) }
func (a *attributes) set64(at int, v uint64) { binary.NativeEndian.PutUint64(a[at:], v) }

// point sets an address; keep what it points to alive until the call is made.
func (a *attributes) point(at int, p unsafe.Pointer) { a.set64(at, uint64(uintptr(p))) }

func bpf(cmd uintptr, a *attributes) (int, error) {
	for {
		n, _, errno := unix.Syscall(unix.SYS_BPF, cmd, uintptr(unsafe.Pointer(a)), attrSize)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR, unix.EAGAIN: // a signal interrupted the check of a program
		default:
			return -1, errno
		}
	}
}

// createMap makes a map; inner is the model of the maps in it, or -1.
func createMap(kind, keySize, valueSize, entries, flags uint32, inner int) (int, error) {
	var a attributes
	for i, v := range []uint32{kind, keySize, valueSize, entries, flags} {
		a.set32(4*i, v)
	}
	if inner >= 0 {
		a.set32(20, uint32(inner))
	}
	fd, err := bpf(cmdMapCreate, &a)
	if err != nil {
		return -1, fmt.Errorf("create BPF map: %w", err)
	}
	unix.CloseOnExec(fd)
	return fd, nil
}

// putMap makes a map an element of another one.
func putMap(outer int, key uint32, inner int) error {
	var a attributes
	value := uint32(inner)
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&key)
	pin.Pin(&value)
	a.set32(0, uint32(outer))
	a.point(8, unsafe.Pointer(&key))
	a.point(16, unsafe.Pointer(&value))
	_, err := bpf(cmdMapUpdate, &a)
	return err
}

func deleteKey(outer int, key uint32) error {
	var a attributes
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&key)
	a.set32(0, uint32(outer))
	a.point(8, unsafe.Pointer(&key))
	_, err := bpf(cmdMapDelete, &a)
	return err
}

// loadProgram has the kernel check a program for a tracepoint, which has a type of its own.
func loadProgram(code []byte, tracepoint uint32) (int, error) {
	var a attributes
	text, log := append([]byte(license), 0), make([]byte, 64<<10)
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&text[0])
	pin.Pin(&log[0])
	pin.Pin(&code[0])
	a.set32(0, progTracing)
	a.set32(4, uint32(len(code)/8))
	a.point(8, unsafe.Pointer(&code[0]))
	a.point(16, unsafe.Pointer(&text[0]))
	a.set32(24, 1)
	a.set32(28, uint32(len(log)))
	a.point(32, unsafe.Pointer(&log[0]))
	copy(a[48:], "weft_written")
	a.set32(68, attachRaw)
	a.set32(108, tracepoint)
	fd, err := bpf(cmdProgLoad, &a)
	if errors.Is(err, unix.ENOSPC) { // the log is full, and the kernel says no more than that
		a.set32(24, 0)
		a.set32(28, 0)
		a.set64(32, 0)
		fd, err = bpf(cmdProgLoad, &a)
	}
	if err != nil {
		log, _, _ = bytes.Cut(log, []byte{0})
		if len(log) > 400 {
			log = log[len(log)-400:]
		}
		return -1, fmt.Errorf("load BPF program: %w: %s", err, bytes.TrimSpace(log))
	}
	unix.CloseOnExec(fd)
	return fd, nil
}

// attach has the kernel run a program. It runs until the result is closed.
func attach(program int) (int, error) {
	var a attributes
	a.set32(8, uint32(program))
	fd, err := bpf(cmdTracepoint, &a)
	if err != nil {
		return -1, fmt.Errorf("attach BPF program: %w", err)
	}
	unix.CloseOnExec(fd)
	return fd, nil
}

// info is what the kernel says of a program.
type info struct {
	misses uint64 // how often it could not run the program, because it was running it already
	// How often it ran, and nanoseconds; 0 unless the sysctl kernel.bpf_stats_enabled is set.
	runs, took uint64
}

func infoOf(program int) (info, error) {
	var a attributes
	b := make([]byte, infoSize)
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&b[0])
	a.set32(0, uint32(program))
	a.set32(4, infoSize)
	a.point(8, unsafe.Pointer(&b[0]))
	if _, err := bpf(cmdInfo, &a); err != nil {
		return info{}, fmt.Errorf("read the state of a BPF program: %w", err)
	}
	at := func(off int) uint64 { return binary.NativeEndian.Uint64(b[off:]) }
	return info{at(infoMisses), at(infoRuns), at(infoTook)}, nil
}

// share maps the words of an array into this process.
func share(fd, words int) ([]byte, error) {
	size := (8*words + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1)
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("share memory with a BPF program: %w", err)
	}
	return b, nil
}

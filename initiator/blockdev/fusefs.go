// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

const (
	rootNode = 1
	fileNode = 2
)

// The requests, by number (enum fuse_opcode).
const (
	fuseLookup      = 1
	fuseForget      = 2
	fuseGetAttr     = 3
	fuseOpen        = 14
	fuseRead        = 15
	fuseWrite       = 16
	fuseStatFs      = 17
	fuseRelease     = 18
	fuseFsync       = 20
	fuseFlush       = 25
	fuseInit        = 26
	fuseOpenDir     = 27
	fuseReadDir     = 28
	fuseReleaseDir  = 29
	fuseDestroy     = 38
	fuseBatchForget = 42
	fuseFallocate   = 43
)

// fuseFS is a file system with one file, whose content is the device's.
type fuseFS struct {
	gate  *gate
	name  string
	maxIO block.Size // the largest read or write
	ring  bool       // asks the kernel for io_uring
	begun chan bool  // gets whether the kernel agreed to io_uring, once it has had our first answer

	resends atomic.Bool // the kernel can send requests again that a dead process had read

	opens  atomic.Uint64
	kept   atomic.Bool // the loop device was the first to open it
	ended  chan struct{}
	ending sync.Once
	onEnd  func() // before the connection's descriptor is closed
}

// newFuseFS makes a file system that closes ended when it can no longer be used.
func newFuseFS(g *gate, name string, ended chan struct{}) *fuseFS {
	return &fuseFS{gate: g, name: name, maxIO: fuseMaxWrite, begun: make(chan bool, 1), ended: ended}
}

// takenOver is for a connection that an earlier process began: the loop device has its file open.
func (fs *fuseFS) takenOver() {
	fs.opens.Store(1)
	fs.kept.Store(true)
	fs.resends.Store(true)
}

func (fs *fuseFS) end() { fs.ending.Do(func() { close(fs.ended) }) }

// fuseAnswer is the answer to a request that needs nothing from the device.
type fuseAnswer struct {
	data  []byte
	errno syscall.Errno
	none  bool // the kernel expects no answer
}

// answerWith answers with a structure of the protocol.
func answerWith[T any](out *T) fuseAnswer {
	return fuseAnswer{data: unsafe.Slice((*byte)(unsafe.Pointer(out)), unsafe.Sizeof(*out))}
}

// take decides what a request needs: an IO of the device if ask is set, for which the caller
// provides the memory, or else the answer a. frame is the request without the data of a write,
// which has n bytes.
func (fs *fuseFS) take(frame []byte, n int) (io block.IO, ask bool, a fuseAnswer) {
	header := (*fuse.InHeader)(unsafe.Pointer(&frame[0]))
	switch header.Opcode {
	case fuseRead:
		io, a.errno = fs.read(body[fuse.ReadIn](frame))
	case fuseWrite:
		io, a.errno = fs.write(body[fuse.WriteIn](frame), n)
	case fuseFallocate:
		io, a.errno = fs.fallocate(body[fuse.FallocateIn](frame))
	case fuseFsync:
		return block.IO{Op: block.OpFlush}, fs.mustFlush(), a
	default:
		return io, false, fs.answer(header, frame)
	}
	return io, a.errno == 0 && io.Len > 0, a
}

// body returns a request's structure; nil if the request is too short.
func body[T any](frame []byte) *T {
	if len(frame) < int(unsafe.Sizeof(*new(T))) {
		return nil
	}
	return (*T)(unsafe.Pointer(&frame[0]))
}

func (fs *fuseFS) read(in *fuse.ReadIn) (io block.IO, errno syscall.Errno) {
	if in == nil || in.NodeId != fileNode || in.Size == 0 || int64(in.Size) > int64(fs.maxIO) {
		return io, unix.EINVAL
	}
	size := uint64(fs.gate.geometry.Load().Size)
	if in.Offset >= size {
		return io, 0 // end of file: no bytes
	}
	return block.IO{Op: block.OpRead, Off: int64(in.Offset), Len: int64(min(uint64(in.Size), size-in.Offset))}, 0
}

func (fs *fuseFS) write(in *fuse.WriteIn, n int) (io block.IO, errno syscall.Errno) {
	if in == nil || in.NodeId != fileNode || int64(in.Size) != int64(n) || n == 0 {
		return io, unix.EINVAL
	}
	return block.IO{Op: block.OpWrite, Off: int64(in.Offset), Len: int64(n)}, 0
}

// mustFlush decides whether an fsync must reach the device. The loop driver sends an fsync when
// it is set up, and a program that opens the loop device meanwhile waits for it and cannot be
// killed. The device may take any time for a flush, so it is asked only if there is something
// to flush. Once there are users, that includes data that a dead process acknowledged but did
// not flush.
func (fs *fuseFS) mustFlush() bool {
	g := fs.gate
	return !g.clean() || !g.everFlushed.Load() && fs.kept.Load()
}

// fallocate: the loop driver punches a hole for a discard, and also for zeroing that may
// deallocate, so after either the range must read as zeroes.
func (fs *fuseFS) fallocate(in *fuse.FallocateIn) (io block.IO, errno syscall.Errno) {
	if in == nil || in.NodeId != fileNode || in.Length == 0 {
		return io, unix.EINVAL
	}
	mode := in.Mode &^ unix.FALLOC_FL_KEEP_SIZE
	if mode != unix.FALLOC_FL_PUNCH_HOLE && mode != unix.FALLOC_FL_ZERO_RANGE {
		return io, unix.EOPNOTSUPP
	}
	return block.IO{Op: block.OpWriteZeroes, Unmap: mode == unix.FALLOC_FL_PUNCH_HOLE, Off: int64(in.Offset), Len: int64(in.Length)}, 0
}

// answer answers a request that does not involve the device.
//
// Branches: one for each kind of request.
func (fs *fuseFS) answer(header *fuse.InHeader, frame []byte) fuseAnswer {
	switch header.Opcode {
	case fuseForget, fuseBatchForget:
		return fuseAnswer{none: true}
	case fuseLookup:
		name, _, _ := bytes.Cut(frame[inHeaderSize:], []byte{0})
		if header.NodeId != rootNode || string(name) != fs.name {
			return fuseAnswer{errno: unix.ENOENT}
		}
		out := fuse.EntryOut{NodeId: fileNode}
		fs.attr(fileNode, &out.Attr)
		return answerWith(&out)
	case fuseGetAttr: // not cached, so that a new size is seen
		var out fuse.AttrOut
		fs.attr(header.NodeId, &out.Attr)
		return answerWith(&out)
	case fuseStatFs:
		return fs.statFs()
	case fuseOpen:
		if header.NodeId != fileNode {
			return fuseAnswer{errno: unix.EINVAL}
		}
		// No flush: a killed process would wait for it, see unshared.
		return answerWith(&fuse.OpenOut{Fh: fs.opens.Add(1), OpenFlags: fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES | fuse.FOPEN_NOFLUSH})
	case fuseRelease:
		if in := body[fuse.ReleaseIn](frame); in != nil && in.Fh == 1 && fs.kept.Load() {
			fs.end()
		}
		return fuseAnswer{}
	case fuseOpenDir:
		return answerWith(&fuse.OpenOut{})
	case fuseReadDir:
		return fuseAnswer{data: fs.readDir(body[fuse.ReadIn](frame))}
	case fuseFlush, fuseReleaseDir, fuseDestroy: // all data has reached the device already
		return fuseAnswer{}
	}
	// After this answer the kernel stops sending most of these: extended attributes, which it
	// would ask for on each write, and interrupts, since I/O is waited for in any case.
	return fuseAnswer{errno: unix.ENOSYS}
}

// The capabilities that the file system requests. Without async direct I/O a loop device over
// FUSE has a queue depth of 1.
const (
	fuseMinor        = 36
	fuseHasResend    = uint32(fuse.CAP_HAS_RESEND >> 32)
	fuseCapabilities = fuse.CAP_ASYNC_READ | fuse.CAP_BIG_WRITES | fuse.CAP_ASYNC_DIO | fuse.CAP_MAX_PAGES
)

// initIn is the part of fuse_init_in that all kernels send, and flags2In what later ones add.
type (
	initIn struct {
		fuse.InHeader
		Major, Minor, MaxReadAhead, Flags uint32
	}
	flags2In struct {
		initIn
		Flags2 uint32
	}
)

// init answers the first request, in which the two ends agree on the protocol, and on whether
// all further requests go over io_uring.
func (fs *fuseFS) init(frame []byte) (a fuseAnswer, ring bool) {
	in := body[initIn](frame)
	if in == nil || in.Major != 7 || in.Minor < 23 { // the answer's size, Linux 3.15
		return fuseAnswer{errno: unix.EPROTO}, false
	}
	out := &fuse.InitOut{
		Major: 7, Minor: min(in.Minor, fuseMinor),
		MaxReadAhead:        in.MaxReadAhead,
		Flags:               in.Flags & fuseCapabilities,
		MaxBackground:       fuseMaxBackground,
		CongestionThreshold: fuseMaxBackground,
		MaxWrite:            uint32(fs.maxIO),
		MaxPages:            uint16(fs.maxIO / fusePage),
		TimeGran:            1,
	}
	more := body[flags2In](frame)
	if in.Flags&fuse.CAP_INIT_EXT == 0 {
		more = nil
	}
	fs.resends.Store(more != nil && more.Flags2&fuseHasResend != 0)
	if fs.ring && more != nil && more.Flags2&fuseOverRing != 0 {
		ring = true
		out.Flags |= fuse.CAP_INIT_EXT
		out.Flags2 = fuseOverRing
	}
	return answerWith(out), ring
}

func (fs *fuseFS) attr(node uint64, a *fuse.Attr) {
	geometry := fs.gate.geometry.Load()
	*a = fuse.Attr{Ino: node, Mode: unix.S_IFDIR | 0o700, Nlink: 2, Blksize: uint32(geometry.BlockSize)}
	if node == fileNode {
		a.Mode, a.Nlink = unix.S_IFREG|0o600, 1
		a.Size, a.Blocks = uint64(geometry.Size), geometry.Size.Sectors()
	}
}

// statFs: the loop driver uses the block size as the discard granularity, and supports no
// discards if it gets no answer.
func (fs *fuseFS) statFs() fuseAnswer {
	geometry := fs.gate.geometry.Load()
	if geometry.DiscardUnit == 0 {
		return fuseAnswer{errno: unix.ENOSYS}
	}
	unit := uint32(min(max(geometry.DiscardUnit, geometry.BlockSize), block.GiB))
	return answerWith(&fuse.StatfsOut{Bsize: unit, Frsize: unit, Blocks: uint64(geometry.Size) / uint64(unit), NameLen: 255})
}

// readDir lists the one file (struct fuse_dirent).
func (fs *fuseFS) readDir(in *fuse.ReadIn) (b []byte) {
	if in != nil && in.Offset == 0 {
		b = binary.NativeEndian.AppendUint64(b, fileNode)
		b = binary.NativeEndian.AppendUint64(b, 1) // the offset of the next entry
		b = binary.NativeEndian.AppendUint32(b, uint32(len(fs.name)))
		b = binary.NativeEndian.AppendUint32(b, unix.DT_REG)
		b = append(b, fs.name...)
		b = append(b, make([]byte, -len(b)&7)...)
	}
	return b
}

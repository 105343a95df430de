// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"encoding/binary"
	"sync"
	"sync/atomic"
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
	gate *gate
	name string

	opens  atomic.Uint64
	kept   atomic.Bool // the loop device was the first to open it
	ended  chan struct{}
	ending sync.Once
	onEnd  func() // before the connection's descriptor is closed
}

// newFuseFS makes a file system that closes ended when it can no longer be used.
func newFuseFS(g *gate, name string, ended chan struct{}) *fuseFS {
	return &fuseFS{gate: g, name: name, ended: ended}
}

func (fs *fuseFS) end() { fs.ending.Do(func() { close(fs.ended) }) }

// others answers the requests that do not involve the device.
func (c *fuseConn) others(header *fuse.InHeader, frame []byte) {
	fs, unique := c.fs, header.Unique
	switch header.Opcode {
	case fuseForget, fuseBatchForget: // never answered
	case fuseInit:
		c.init(body[initIn](frame), unique)
	case fuseLookup:
		name, _, _ := bytes.Cut(frame[inHeaderSize:], []byte{0})
		if header.NodeId != rootNode || string(name) != fs.name {
			c.reply(unique, unix.ENOENT)
			return
		}
		out := fuse.EntryOut{NodeId: fileNode}
		fs.attr(fileNode, &out.Attr)
		replyWith(c, unique, &out)
	case fuseGetAttr: // not cached, so that a new size is seen
		var out fuse.AttrOut
		fs.attr(header.NodeId, &out.Attr)
		replyWith(c, unique, &out)
	case fuseStatFs:
		c.statFs(unique)
	case fuseOpen:
		if header.NodeId != fileNode {
			c.reply(unique, unix.EINVAL)
			return
		}
		// No flush: a killed process would wait for it, see apart.
		replyWith(c, unique, &fuse.OpenOut{Fh: fs.opens.Add(1), OpenFlags: fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES | fuse.FOPEN_NOFLUSH})
	case fuseRelease:
		if in := body[fuse.ReleaseIn](frame); in != nil && in.Fh == 1 && fs.kept.Load() {
			fs.end()
		}
		c.reply(unique, 0)
	case fuseOpenDir:
		replyWith(c, unique, &fuse.OpenOut{})
	case fuseReadDir:
		c.readDir(body[fuse.ReadIn](frame), unique)
	case fuseFlush, fuseReleaseDir, fuseDestroy: // all data has reached the device already
		c.reply(unique, 0)
	default:
		// After this answer the kernel stops sending most of these: extended attributes, which
		// it would ask for on each write, and interrupts, since I/O is waited for in any case.
		c.reply(unique, unix.ENOSYS)
	}
}

// replyWith answers with a structure of the protocol.
func replyWith[T any](c *fuseConn, unique uint64, out *T) {
	c.replyBytes(unique, unsafe.Slice((*byte)(unsafe.Pointer(out)), unsafe.Sizeof(*out)))
}

func (c *fuseConn) replyBytes(unique uint64, data []byte) {
	b := make([]byte, outHeaderSize, outHeaderSize+len(data))
	*(*fuse.OutHeader)(unsafe.Pointer(&b[0])) = fuse.OutHeader{Length: uint32(outHeaderSize + len(data)), Unique: unique}
	c.write(append(b, data...))
}

// The capabilities that the file system requests. Without async direct I/O a loop device over
// FUSE has a queue depth of 1.
const (
	fuseMinor        = 36
	fuseCapabilities = fuse.CAP_ASYNC_READ | fuse.CAP_BIG_WRITES | fuse.CAP_ASYNC_DIO | fuse.CAP_MAX_PAGES
)

// initIn is the part of fuse_init_in that all kernels send.
type initIn struct {
	fuse.InHeader
	Major, Minor, MaxReadAhead, Flags uint32
}

func (c *fuseConn) init(in *initIn, unique uint64) {
	if in == nil || in.Major != 7 || in.Minor < 23 { // the answer's size, Linux 3.15
		c.reply(unique, unix.EPROTO)
		return
	}
	replyWith(c, unique, &fuse.InitOut{
		Major: 7, Minor: min(in.Minor, fuseMinor),
		MaxReadAhead:        in.MaxReadAhead,
		Flags:               in.Flags & fuseCapabilities,
		MaxBackground:       fuseMaxBackground,
		CongestionThreshold: fuseMaxBackground,
		MaxWrite:            uint32(fuseMaxWrite),
		MaxPages:            uint16(fuseMaxWrite / fusePage),
		TimeGran:            1,
	})
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
func (c *fuseConn) statFs(unique uint64) {
	geometry := c.fs.gate.geometry.Load()
	if geometry.DiscardUnit == 0 {
		c.reply(unique, unix.ENOSYS)
		return
	}
	unit := uint32(min(max(geometry.DiscardUnit, geometry.BlockSize), block.GiB))
	replyWith(c, unique, &fuse.StatfsOut{Bsize: unit, Frsize: unit, Blocks: uint64(geometry.Size) / uint64(unit), NameLen: 255})
}

// readDir lists the one file (struct fuse_dirent).
func (c *fuseConn) readDir(in *fuse.ReadIn, unique uint64) {
	var b []byte
	if in != nil && in.Offset == 0 {
		b = binary.NativeEndian.AppendUint64(b, fileNode)
		b = binary.NativeEndian.AppendUint64(b, 1) // the offset of the next entry
		b = binary.NativeEndian.AppendUint32(b, uint32(len(c.fs.name)))
		b = binary.NativeEndian.AppendUint32(b, unix.DT_REG)
		b = append(b, c.fs.name...)
		b = append(b, make([]byte, -len(b)&7)...)
	}
	c.replyBytes(unique, b)
}

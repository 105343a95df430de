// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"sync"
	"sync/atomic"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

const (
	rootNode = fuse.FUSE_ROOT_ID
	fileNode = 2
)

// fuseFS is a file system with one file, whose bytes are the device's. go-fuse
// calls each method in a goroutine of its own, and has its buffers back when the
// method returns, so that each waits for its I/O; signals to who asked are no
// reason to stop waiting.
type fuseFS struct {
	fuse.RawFileSystem
	gate *gate
	name string

	waits  sync.Pool // of *fuseWait
	opens  atomic.Uint64
	kept   atomic.Bool // the first open is the loop device's
	ended  chan struct{}
	ending sync.Once
	onEnd  func()
}

type fuseWait struct {
	request
	done chan struct{}
}

// newFuseFS makes a file system that closes ended when nobody can use it more.
func newFuseFS(g *gate, name string, ended chan struct{}) *fuseFS {
	return &fuseFS{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		gate:          g, name: name, ended: ended,
		waits: sync.Pool{New: func() any {
			w := &fuseWait{done: make(chan struct{}, 1)}
			w.finish = func(*request) { w.done <- struct{}{} }
			return w
		}},
	}
}

func (fs *fuseFS) end() { fs.ending.Do(func() { close(fs.ended) }) }

// do submits an IO and waits for it.
func (fs *fuseFS) do(op block.Op, off, length int64, data []byte) fuse.Status {
	w := fs.waits.Get().(*fuseWait)
	w.IO = block.IO{Op: op, Off: off, Len: length, Data: data, Unmap: op == block.OpWriteZeroes}
	return fs.wait(w)
}

func (fs *fuseFS) wait(w *fuseWait) fuse.Status {
	fs.gate.submit(&w.request)
	<-w.done
	err := w.Err
	w.IO = block.IO{}
	fs.waits.Put(w)
	return fuse.Status(errno(err))
}

func (fs *fuseFS) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if in.NodeId != fileNode {
		return nil, fuse.EINVAL
	}
	size := int64(fs.gate.geometry.Load().Size)
	off := int64(in.Offset)
	if off >= size {
		return fuse.ReadResultData(nil), fuse.OK
	}
	buf = buf[:min(int64(in.Size), int64(len(buf)), size-off)]
	if status := fs.do(block.OpRead, off, int64(len(buf)), buf); status != fuse.OK {
		return nil, status
	}
	return fuse.ReadResultData(buf), fuse.OK
}

func (fs *fuseFS) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	if in.NodeId != fileNode {
		return 0, fuse.EINVAL
	}
	return uint32(len(data)), fs.do(block.OpWrite, int64(in.Offset), int64(len(data)), data)
}

// Fsync: the loop driver sends one when it is set up, and whoever opens the loop
// device meanwhile waits with it, not to be killed. The device, which may keep a
// flush as long as it likes, is asked only if there is something to flush. For
// users that is also what a dead process was told by the device and had not flushed.
func (fs *fuseFS) Fsync(<-chan struct{}, *fuse.FsyncIn) fuse.Status {
	if fs.gate.clean() && (fs.gate.everFlushed.Load() || !fs.kept.Load()) {
		return fuse.OK
	}
	return fs.do(block.OpFlush, 0, 0, nil)
}

// Fallocate: the loop driver punches a hole both for a discard and for zeroing
// that may deallocate, so that each must read as zeroes after.
func (fs *fuseFS) Fallocate(_ <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	w := fs.waits.Get().(*fuseWait)
	w.IO = block.IO{Op: block.OpWriteZeroes, Off: int64(in.Offset), Len: int64(in.Length)}
	switch in.Mode &^ unix.FALLOC_FL_KEEP_SIZE {
	case unix.FALLOC_FL_PUNCH_HOLE:
		w.Unmap = true
	case unix.FALLOC_FL_ZERO_RANGE:
	default:
		fs.waits.Put(w)
		return fuse.Status(unix.EOPNOTSUPP)
	}
	return fs.wait(w)
}

// Flush is a close; what was written is in the device already.
func (fs *fuseFS) Flush(<-chan struct{}, *fuse.FlushIn) fuse.Status { return fuse.OK }

func (fs *fuseFS) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if in.NodeId != fileNode {
		return fuse.EINVAL
	}
	out.Fh = fs.opens.Add(1)
	// No flush: a process that is killed would wait for one, see apart.
	out.OpenFlags = fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES | fuse.FOPEN_NOFLUSH
	return fuse.OK
}

func (fs *fuseFS) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	if in.Fh == 1 && fs.kept.Load() {
		fs.end()
	}
}

func (fs *fuseFS) Lookup(_ <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if header.NodeId != rootNode || name != fs.name {
		return fuse.ENOENT
	}
	out.NodeId = fileNode
	fs.attr(fileNode, &out.Attr)
	return fuse.OK
}

// GetAttr is asked again each time, so that a new size is seen.
func (fs *fuseFS) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	fs.attr(in.NodeId, &out.Attr)
	return fuse.OK
}

func (fs *fuseFS) attr(node uint64, a *fuse.Attr) {
	geometry := fs.gate.geometry.Load()
	*a = fuse.Attr{Ino: node, Mode: unix.S_IFDIR | 0o700, Nlink: 2, Blksize: uint32(geometry.BlockSize)}
	if node == fileNode {
		a.Mode, a.Nlink = unix.S_IFREG|0o600, 1
		a.Size, a.Blocks = uint64(geometry.Size), geometry.Size.Sectors()
	}
}

// StatFs: the loop driver takes the block size for the granularity of discards,
// and does no discards where it is not answered.
func (fs *fuseFS) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	geometry := fs.gate.geometry.Load()
	if geometry.DiscardUnit == 0 {
		return fuse.ENOSYS
	}
	out.Bsize = uint32(fs.discardUnit())
	out.Frsize = out.Bsize
	out.Blocks = uint64(geometry.Size) / uint64(out.Bsize)
	out.NameLen = 255
	return fuse.OK
}

func (fs *fuseFS) discardUnit() block.Size {
	geometry := fs.gate.geometry.Load()
	return min(max(geometry.DiscardUnit, geometry.BlockSize), block.GiB)
}

// OnUnmount is called when the connection has ended, whoever ended it.
func (fs *fuseFS) OnUnmount() {
	fs.end()
	fs.onEnd()
}

func (fs *fuseFS) OpenDir(<-chan struct{}, *fuse.OpenIn, *fuse.OpenOut) fuse.Status { return fuse.OK }

func (fs *fuseFS) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	if in.Offset == 0 {
		out.AddDirEntry(fuse.DirEntry{Mode: unix.S_IFREG, Name: fs.name, Ino: fileNode, Off: 1})
	}
	return fuse.OK
}

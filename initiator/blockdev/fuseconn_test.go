// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"log/slog"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// fuseKernel is the kernel's end of a connection, played by a test.
type fuseKernel struct {
	t    *testing.T
	fd   int
	conn *fuseConn
	disk *memDisk
}

func newFuseKernel(t *testing.T) *fuseKernel {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	k := &fuseKernel{t: t, fd: fds[0], disk: newMemDisk(plain)}
	if err := errors.Join(unix.SetNonblock(k.fd, false), unix.SetsockoptTimeval(k.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})); err != nil {
		t.Fatal(err)
	}
	fs := newFuseFS(newGate(k.disk), "db1", make(chan struct{}))
	fs.onEnd = func() {}
	if k.conn, err = newFuseConn(fds[1], fs, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() { defer close(served); k.conn.serve() }()
	t.Cleanup(func() {
		k.conn.shut()
		select {
		case <-served:
		case <-time.After(10 * time.Second):
			t.Error("the reader of a connection that was shut goes on")
		}
		unix.Close(k.fd)
	})
	return k
}

// send sends a request: its header, and what follows.
func (k *fuseKernel) send(opcode uint32, node, unique uint64, body ...any) {
	k.t.Helper()
	var b bytes.Buffer
	for _, part := range body {
		if err := binary.Write(&b, binary.NativeEndian, part); err != nil {
			k.t.Fatal(err)
		}
	}
	header := fuse.InHeader{Length: uint32(inHeaderSize + b.Len()), Opcode: opcode, Unique: unique, NodeId: node}
	frame := append(bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&header)), inHeaderSize)), b.Bytes()...)
	if _, err := unix.Write(k.fd, frame); err != nil {
		k.t.Fatal(err)
	}
}

// answer receives the next answer.
func (k *fuseKernel) answer() (unique uint64, errno syscall.Errno, data []byte) {
	k.t.Helper()
	b := make([]byte, 2<<20)
	n, err := unix.Read(k.fd, b)
	if err != nil || n < outHeaderSize {
		k.t.Fatalf("answer of %d bytes: %v", n, err)
	}
	out := (*fuse.OutHeader)(unsafe.Pointer(&b[0]))
	if int(out.Length) != n {
		k.t.Fatalf("an answer of %d bytes says that it has %d", n, out.Length)
	}
	return out.Unique, syscall.Errno(-out.Status), b[outHeaderSize:n]
}

// Kernels before 5.17 send 16 bytes, later ones 64.
func TestFUSEBeginsWithOldKernelsAndNew(t *testing.T) {
	for _, rest := range []int{0, 48} {
		k := newFuseKernel(t)
		k.send(fuseInit, 0, 7, []uint32{7, 31, 1 << 17, fuse.CAP_ASYNC_DIO | fuse.CAP_POSIX_ACL | fuse.CAP_MAX_PAGES}, make([]byte, rest))
		unique, errno, data := k.answer()
		if unique != 7 || errno != 0 || len(data) != int(unsafe.Sizeof(fuse.InitOut{})) {
			t.Fatalf("INIT answered for %d with %v, %d bytes", unique, errno, len(data))
		}
		out := (*fuse.InitOut)(unsafe.Pointer(&data[0]))
		if out.Minor != 31 || out.Flags != fuse.CAP_ASYNC_DIO|fuse.CAP_MAX_PAGES || out.MaxWrite != uint32(fuseMaxWrite) {
			t.Errorf("INIT of 7.31 answered with %+v", *out)
		}
	}
}

func TestFUSERequestsThatAreWrongAreErrorsAndTheNextIsServed(t *testing.T) {
	k := newFuseKernel(t)
	read := func(off uint64, size uint32) []any { return []any{uint64(1), off, size, make([]byte, 20)} }
	write := func(off uint64, size uint32, data []byte) []any {
		return []any{uint64(1), off, size, make([]byte, 20), data}
	}
	page := randomBytes(memPage)
	for i, c := range []struct {
		what   string
		opcode uint32
		node   uint64
		body   []any
		errno  syscall.Errno
		bytes  int
	}{
		{"a write", fuseWrite, fileNode, write(0, memPage, page), 0, 8},
		{"a read", fuseRead, fileNode, read(0, memPage), 0, memPage},
		{"a read over the end", fuseRead, fileNode, read(uint64(plain.Size)-memPage, 2*memPage), 0, memPage},
		{"a read after the end", fuseRead, fileNode, read(uint64(plain.Size), memPage), 0, 0},
		{"a read of the directory", fuseRead, rootNode, read(0, memPage), unix.EINVAL, 0},
		{"a read of more than was agreed", fuseRead, fileNode, read(0, 2<<20), unix.EINVAL, 0},
		{"a read of a part of a block", fuseRead, fileNode, read(1, memPage), unix.EINVAL, 0},
		{"a short read request", fuseRead, fileNode, []any{uint64(1)}, unix.EINVAL, 0},
		{"a write of less than it says", fuseWrite, fileNode, write(0, 2*memPage, page), unix.EINVAL, 0},
		{"a write after the end", fuseWrite, fileNode, write(uint64(plain.Size), memPage, page), unix.EINVAL, 0},
		{"a hole", fuseFallocate, fileNode, []any{uint64(1), uint64(0), uint64(memPage), uint32(unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE), uint32(0)}, 0, 0},
		{"an allocation", fuseFallocate, fileNode, []any{uint64(1), uint64(0), uint64(memPage), uint64(0)}, unix.EOPNOTSUPP, 0},
		{"extended attributes", 22, fileNode, []any{uint64(0)}, unix.ENOSYS, 0},
		{"another name", fuseLookup, rootNode, []any{[]byte("db2\x00")}, unix.ENOENT, 0},
		{"the name", fuseLookup, rootNode, []any{[]byte("db1\x00")}, 0, int(unsafe.Sizeof(fuse.EntryOut{}))},
		{"a large write", fuseWrite, fileNode, write(0, copyLimit+memPage, make([]byte, copyLimit+memPage)), 0, 8},
	} {
		k.send(fuseForget, fileNode, 99, uint64(1)) // is never answered
		k.send(c.opcode, c.node, uint64(i), c.body...)
		unique, errno, data := k.answer()
		if unique != uint64(i) || errno != c.errno || len(data) != c.bytes {
			t.Errorf("%s: answered for %d of %d with %v, %d bytes; want %v, %d", c.what, unique, i, errno, len(data), c.errno, c.bytes)
		}
		if c.what == "a read" && !bytes.Equal(data, page) {
			t.Error("what was read is not what was written")
		}
	}
}

func (k *fuseKernel) read(unique uint64, off int64) {
	k.t.Helper()
	k.send(fuseRead, fileNode, unique, uint64(1), uint64(off), uint32(memPage), make([]byte, 20))
}

func TestFUSERequestsThatTheDeviceKeepsHoldUpNoOthers(t *testing.T) {
	k := newFuseKernel(t)
	k.disk.hold(func(io *block.IO) bool { return io.Off == 0 })
	const many = 1000 // far more than a kernel has outstanding
	for i := range uint64(many) {
		k.read(i, 0)
	}
	k.read(many, memPage)
	if unique, errno, _ := k.answer(); unique != many || errno != 0 {
		t.Fatalf("first answered was %d with %v, want the one that the device does not keep", unique, errno)
	}
}

func TestFUSERequestsThatTheDeviceKeptAreAnsweredOnce(t *testing.T) {
	k := newFuseKernel(t)
	k.disk.hold(anything)
	const many = 16 // the number of answers that the socket holds
	for i := range uint64(many) {
		k.read(i, 0)
	}
	for range many {
		<-k.disk.arrived
	}
	k.disk.release()
	seen := make(map[uint64]bool)
	for range many {
		unique, errno, data := k.answer()
		if seen[unique] || errno != 0 || len(data) != memPage {
			t.Fatalf("answer for %d: %v, %d bytes, seen before: %v", unique, errno, len(data), seen[unique])
		}
		seen[unique] = true
	}
}

func TestAFUSEConnectionThatWasShutAnswersNothing(t *testing.T) {
	k := newFuseKernel(t)
	k.disk.hold(anything)
	k.read(1, 0)
	<-k.disk.arrived
	k.conn.shut()
	k.disk.release()
	if n, err := unix.Read(k.fd, make([]byte, 100)); n != 0 || err != nil {
		t.Errorf("read of the other end = %d, %v; want that it is closed", n, err)
	}
}

func TestFUSEKnowsAKernelThatSendsRequestsAgain(t *testing.T) {
	for _, c := range []struct {
		flags, more uint32
		want        bool
	}{
		{fuse.CAP_INIT_EXT, fuseHasResend, true},
		{fuse.CAP_INIT_EXT, 0, false},
		{0, fuseHasResend, false}, // those bytes mean nothing
	} {
		k := newFuseKernel(t)
		k.send(fuseInit, 0, 1, []uint32{7, 45, 1 << 17, fuse.CAP_ASYNC_DIO | c.flags, c.more}, make([]byte, 44))
		k.answer()
		if got := k.conn.fs.resends.Load(); got != c.want {
			t.Errorf("flags %x, %x: sends again: %v, want %v", c.flags, c.more, got, c.want)
		}
	}
}

func TestFUSEAsksForRequestsAgainAndAnswersThemByTheirNumbers(t *testing.T) {
	k := newFuseKernel(t)
	if err := k.conn.resend(); err != nil {
		t.Fatal(err)
	}
	if unique, status, data := k.answer(); unique != 0 || status != -7&0xffffffff && int32(-status) != 7 || len(data) != 0 {
		t.Errorf("notification for %d with %d, %d bytes; want FUSE_NOTIFY_RESEND", unique, status, len(data))
	}
	const again = 1<<63 | 42 // FUSE_UNIQUE_RESEND
	k.read(again, 0)
	if unique, errno, data := k.answer(); unique != again || errno != 0 || len(data) != memPage {
		t.Errorf("answer for %x with %v, %d bytes; want %x", unique, errno, len(data), uint64(again))
	}
}

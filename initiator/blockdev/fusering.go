// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/uring"
	"weft.dev/weft/proto/block"
)

// FUSE over io_uring (Linux 6.14 and newer, if the module parameter fuse.enable_uring is set):
//
//	the kernel's queues    cpu 0   cpu 1   cpu 2   cpu 3
//	entries                 ▯▯▯     ▯▯▯     ▯▯▯     ▯▯▯     each with memory of ours
//	threads, rings             0       1       0       1
//
// The kernel has one queue for each processor, and puts a request into the queue of the
// processor on which it is made. We register entries with each queue, which are commands that
// wait: one completes when the kernel has put a request, with its data, into the entry's
// memory. A command that carries the answer also makes the entry wait for the next request. So
// a request costs one system call at most, and many of them together still one. Under load that
// is far less than a read and a write for each.
//
// The kernel writes a request in the context of the thread that submitted the entry's command,
// and cancels the commands of a thread that ends. So only threads of our own submit commands,
// and they do nothing that can wait: any other thread of the process could be waiting for a
// disk, or be about to end, when the kernel needs it for the next request.
//
// The connection's descriptor is still read, see fuseConn: the kernel's first request and its
// FORGETs come there.
const (
	fuseRegister = 1 // FUSE_IO_URING_CMD_REGISTER
	fuseCommit   = 2 // FUSE_IO_URING_CMD_COMMIT_AND_FETCH

	fuseOverRing = uint32(fuse.CAP_OVER_IO_URING >> 32)

	fuseRingFlags   = uring.SQE128 | uring.SingleIssuer | uring.DeferTaskrun
	fuseRingMaxIO   = 128 * block.KiB
	fuseRingThreads = 4
)

// ringDepths is the number of entries in the kernel's queue of each processor that it could
// have; there must be one at least. Processors that are there get as many as a busy device
// needs, since the loop driver makes all of a device's requests on one processor at a time.
// Memory is used only by entries that have been used, and the last one used is used first.
func ringDepths(possible int, online []int) []int {
	depths := make([]int, possible)
	for cpu := range depths {
		depths[cpu] = 4
	}
	for _, cpu := range online {
		if cpu < possible {
			depths[cpu] = min(max(2048/len(online), 32), 64)
		}
	}
	return depths
}

// fuseEntryHeader is struct fuse_uring_req_header, and what registers it.
type fuseEntryHeader struct {
	inOut           [128]byte // the request's header, then the answer's
	op              [128]byte // the request's structure
	flags, commitID uint64
	size, _         uint32 // bytes of data
	_               uint64

	memory [2]unix.Iovec // this header and the data
	_      [192]byte
}

const fuseEntryHeaderSize = 288 // of the kernel's structure

// fuseEntry is an entry of one of the kernel's queues, and the request in it.
type fuseEntry struct {
	request
	ring   *fuseRing
	number int
	cpu    uint16
	unique uint64
	header *fuseEntryHeader
	data   []byte
}

// fuseRing is a thread that serves the queues of some processors.
type fuseRing struct {
	mailbox[*fuseEntry]
	fs   *fuseFS
	fd   int // of the connection
	log  *slog.Logger
	fail func() // ends the connection

	cpus    []int
	entries []fuseEntry
	headers []byte
	data    []byte
	frame   []byte // the request that is being looked at
	running int    // entries that the kernel or we have
	stopped atomic.Bool
	users   atomic.Int64 // of the memory: the thread, and what the device has
}

// fuseRings are all the rings of a connection. They have a descriptor of their own: a command
// must not meet another file under the number of one that was closed.
type fuseRings struct {
	fd      int
	all     []*fuseRing
	threads sync.WaitGroup
	ended   sync.Once
}

// startFuseRings registers entries with the kernel's queues. If it fails, the caller ends the
// connection. fail must end the connection; it is called if a ring
// cannot serve any more.
func startFuseRings(fd int, depths []int, fs *fuseFS, log *slog.Logger, fail func()) (_ *fuseRings, err error) {
	fds, err := serving.open(func() ([]int, error) {
		fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return []int{fd}, os.NewSyscallError("fcntl", err)
	})
	if err != nil {
		return nil, err
	}
	rs := &fuseRings{fd: fds[0]}
	defer func() {
		if err != nil {
			rs.stop()
		}
	}()
	registered := make(chan error, fuseRingThreads)
	n := min(fuseRingThreads, len(depths), runtime.NumCPU())
	for i := range n {
		q := &fuseRing{fs: fs, fd: rs.fd, log: log, fail: fail}
		for cpu := i; cpu < len(depths); cpu += n {
			q.cpus = append(q.cpus, cpu)
		}
		if err := q.allocate(depths); err != nil {
			return nil, err
		}
		rs.all = append(rs.all, q)
		rs.threads.Go(func() { onOwnThread(func() { q.run(func(err error) { registered <- err }) }) })
	}
	for range n {
		err = errors.Join(err, <-registered)
	}
	return rs, err
}

// stop makes the threads end. What the device still has is not answered.
func (rs *fuseRings) stop() {
	for _, q := range rs.all {
		q.stopped.Store(true)
		q.wake()
	}
	rs.threads.Wait()
	rs.ended.Do(func() {
		serving.forget(rs.fd)
		unix.Close(rs.fd)
	})
}

// onOwnThread runs f on a thread that ends with it.
func onOwnThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() { // which never ends; see onThread
		defer runtime.UnlockOSThread()
		done := make(chan struct{})
		go func() { defer close(done); onOwnThread(f) }()
		<-done
		return
	}
	f()
}

// allocate makes the entries and their memory.
func (q *fuseRing) allocate(depths []int) (err error) {
	const rw, anonymous = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANON | unix.MAP_NORESERVE
	for _, cpu := range q.cpus {
		for range depths[cpu] {
			q.entries = append(q.entries, fuseEntry{ring: q, number: len(q.entries), cpu: uint16(cpu)})
		}
	}
	n, stride := len(q.entries), int(unsafe.Sizeof(fuseEntryHeader{}))
	if q.headers, err = unix.Mmap(-1, 0, n*stride, rw, anonymous); err != nil {
		return fmt.Errorf("map headers: %w", err)
	}
	if q.data, err = unix.Mmap(-1, 0, n*int(fuseRingMaxIO), rw, anonymous); err != nil {
		_ = unix.Munmap(q.headers)
		return fmt.Errorf("map data: %w", err)
	}
	q.event = -1
	q.users.Store(1)
	for i := range q.entries {
		e := &q.entries[i]
		e.finish, e.front = finishFuseEntry, e
		e.header = (*fuseEntryHeader)(unsafe.Pointer(&q.headers[i*stride]))
		e.data = q.data[i*int(fuseRingMaxIO):][:fuseRingMaxIO]
		e.header.memory[0] = unix.Iovec{Base: &e.header.inOut[0], Len: fuseEntryHeaderSize}
		e.header.memory[1] = unix.Iovec{Base: &e.data[0], Len: uint64(fuseRingMaxIO)}
	}
	return nil
}

// release is called by each user of the memory when it has ended.
func (q *fuseRing) release() {
	if q.users.Add(-1) == 0 {
		_ = unix.Munmap(q.headers)
		_ = unix.Munmap(q.data)
	}
}

// run serves the queues until the connection ends or stop is called. It calls registered when
// the kernel has all entries.
func (q *fuseRing) run(registered func(error)) {
	defer q.release()
	defer q.close()
	q.settle()
	err := q.open()
	if err == nil {
		err = q.register()
	}
	registered(err)
	for err == nil && q.running > 0 && !q.stopped.Load() {
		for _, e := range q.collect() {
			q.answerIO(e)
		}
		wait := q.sleep()
		err = q.ring.Enter(wait)
		q.awake()
		q.ring.Ended(q.ended)
	}
	if err != nil && !q.stopped.Load() {
		q.log.Error("FUSE over io_uring has ended", "err", err)
		go q.fail() // it waits for this thread
	}
}

// settle keeps the thread on the processors whose requests it serves: the kernel's thread that
// makes a request then wakes it without waking another processor.
func (q *fuseRing) settle() {
	var set unix.CPUSet
	for _, cpu := range q.cpus {
		set.Set(cpu)
	}
	_ = unix.SchedSetaffinity(0, &set) // if that is refused it runs anywhere
}

// open makes the ring, on the thread that will use it.
func (q *fuseRing) open() error {
	_, err := serving.open(func() (_ []int, err error) {
		ring, err := uring.New(uint32(len(q.entries)+1), fuseRingFlags)
		if err != nil {
			return nil, err
		}
		return []int{ring.FD()}, q.mailbox.open(ring)
	})
	return err
}

func (q *fuseRing) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.leaveLocked()
}

// register gives all entries to the kernel, which refuses one at once or keeps it.
func (q *fuseRing) register() error {
	for i := range q.entries {
		e := &q.entries[i]
		s := q.command(fuseRegister, e)
		s.Addr, s.Len = uint64(uintptr(unsafe.Pointer(&e.header.memory))), uint32(len(e.header.memory))
	}
	q.running = len(q.entries)
	q.listen()
	if err := q.ring.Enter(false); err != nil {
		return err
	}
	refused := int32(0)
	q.ring.Ended(func(data uint64, res int32) {
		if data != eventData && res < 0 {
			q.running--
			refused = res
			return
		}
		q.ended(data, res)
	})
	if refused != 0 {
		return fmt.Errorf("the kernel refused %d of %d entries: %w", len(q.entries)-q.running, len(q.entries), unix.Errno(-refused))
	}
	return nil
}

// command prepares a command for an entry (struct fuse_uring_cmd_req).
func (q *fuseRing) command(number uint32, e *fuseEntry) *uring.SQE {
	s := q.ring.Next()
	s.Opcode, s.FD, s.Off, s.UserData = uring.OpCmd, int32(q.fd), uint64(number), uint64(e.number)
	c := (*struct {
		flags, commitID uint64
		cpu             uint16
		_               [6]byte
	})(unsafe.Pointer(&s.Cmd))
	c.cpu = e.cpu
	if number == fuseCommit {
		c.commitID = e.header.commitID
	}
	return s
}

func (q *fuseRing) ended(data uint64, res int32) {
	switch {
	case data == eventData:
		if !q.stopped.Load() {
			q.listen()
		}
	case res == 0:
		q.take(&q.entries[data])
	default: // the entry is gone, and with it the connection
		q.running--
		if err := unix.Errno(-res); !dead(err) && err != unix.ECANCELED && !q.stopped.Load() {
			q.log.Error("the kernel refused an answer over io_uring", "err", err)
			go q.fail()
		}
	}
}

// take starts the request that the kernel has put into an entry.
func (q *fuseRing) take(e *fuseEntry) {
	h := e.header
	in := (*fuse.InHeader)(unsafe.Pointer(&h.inOut))
	e.unique = in.Unique
	op, n := int(in.Length)-inHeaderSize-int(h.size), int(h.size)
	if op < 0 || op > len(h.op) || n > len(e.data) {
		q.answer(e, fuseAnswer{errno: unix.EIO})
		return
	}
	q.frame = append(append(q.frame[:0], h.inOut[:inHeaderSize]...), h.op[:op]...)
	if in.Opcode != fuseWrite {
		q.frame = append(q.frame, e.data[:n]...)
	}
	io, ask, a := q.fs.take(q.frame, n)
	if !ask {
		q.answer(e, a)
		return
	}
	e.IO = io
	if io.Op == block.OpRead || io.Op == block.OpWrite {
		e.Data = e.data[:io.Len]
	}
	q.users.Add(1)
	q.fs.gate.submit(&e.request)
}

// finishFuseEntry passes a request that the device has completed to its thread.
func finishFuseEntry(r *request) {
	e := r.front.(*fuseEntry)
	q := e.ring
	q.mu.Lock()
	q.putLocked(e)
	q.mu.Unlock()
	q.release()
}

// answerIO answers a request that the device has completed.
func (q *fuseRing) answerIO(e *fuseEntry) {
	n := 0
	if e.Err == nil {
		switch e.Op {
		case block.OpRead:
			n = int(e.Len)
		case block.OpWrite:
			*(*fuse.WriteOut)(unsafe.Pointer(&e.data[0])) = fuse.WriteOut{Size: uint32(e.Len)}
			n = int(unsafe.Sizeof(fuse.WriteOut{}))
		}
	}
	q.commit(e, n, errno(e.Err))
}

// answer answers a request that the device has nothing to do with.
func (q *fuseRing) answer(e *fuseEntry, a fuseAnswer) {
	q.commit(e, copy(e.data, a.data), a.errno)
}

// commit answers a request with n bytes of the entry's data, and makes the entry wait for the
// next one.
func (q *fuseRing) commit(e *fuseEntry, n int, errno syscall.Errno) {
	*(*fuse.OutHeader)(unsafe.Pointer(&e.header.inOut)) = fuse.OutHeader{Length: uint32(outHeaderSize + n), Status: -int32(errno), Unique: e.unique}
	e.header.size = uint32(n)
	q.command(fuseCommit, e)
}

// fuseRingState says whether this machine's FUSE can use io_uring: depths is what ringDepths
// says of it, or nil. In that case why says what is missing, and fix how to enable it, if that
// is possible.
func (s system) fuseRingState() (depths []int, why, fix string) {
	const parameter = "module/fuse/parameters/enable_uring"
	enabled, err := os.ReadFile(filepath.Join(s.sys, parameter))
	switch {
	case err != nil:
		return nil, "this kernel's FUSE cannot use io_uring (Linux 6.14 can)", ""
	case !strings.HasPrefix(string(enabled), "Y"):
		return nil, "FUSE may not use io_uring", "echo Y > " + filepath.Join("/sys", parameter) + "; to keep it over a reboot, add fuse.enable_uring=Y to the kernel's command line"
	}
	if why, fix := s.uringRefused(fuseRingFlags); why != "" {
		return nil, why, fix
	}
	possible := s.processors("possible")
	if len(possible) == 0 {
		return nil, "the number of processors is unknown", ""
	}
	return ringDepths(len(possible), s.processors("online")), "", ""
}

// processors lists the processors in a file of sysfs.
func (s system) processors(file string) []int {
	text, _ := os.ReadFile(filepath.Join(s.sys, "devices/system/cpu", file))
	return parseList(strings.TrimSpace(string(text)))
}

// parseList returns the members of a list such as 0-3,8; nil if it is none.
func parseList(list string) (all []int) {
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil {
			return nil
		}
		for n := first; n <= last; n++ {
			all = append(all, n)
		}
	}
	return all
}

// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// lookFor is how long a Read looks again: about the cost of being woken.
	lookFor = 50 * time.Microsecond
	// maxLooks bounds it where time stands still (testing/synctest).
	maxLooks = 1024
	// attendAlone and attendMany are how long a reader that never waits may keep a single
	// processor, or one of many: there it wakes another thread to have a look.
	attendAlone = 250 * time.Microsecond
	attendMany  = time.Millisecond
)

// habit decides whether a connection looks again, by what that brought lately.
type habit struct {
	failures int // in a row
	skip     int // the number of waits in which it does not look again
}

const maxFailures = 7

// may reports whether to look again in this wait.
func (h *habit) may() bool {
	if h.skip > 0 {
		h.skip--
		return false
	}
	return true
}

// paid notes that data came while it looked.
func (h *habit) paid() { h.failures = 0 }

// failed notes that none came.
func (h *habit) failed() {
	h.failures = min(h.failures+1, maxFailures)
	h.skip = 1<<h.failures - 1
}

// crowd counts the goroutines that look again at this moment, and says when none may. It
// belongs to the whole program because processors do.
var crowd struct {
	lookers atomic.Int32
	owed    atomic.Int32 // connections whose peer owes an answer; see Conn.Owed
	until   atomic.Int64 // nobody looks before this time, in nanoseconds since epoch
	pause   atomic.Int64 // the length of the last pause that disturbed asked for
	load    load

	_     [64]byte      // on a cache line of its own:
	reads atomic.Uint64 // of all connections
}

// epoch makes times comparable as numbers.
var epoch = time.Now()

const (
	// aloneAfter is how many reads in a row, without one of another connection, make a
	// connection the only busy one.
	aloneAfter = 64
	// stolen is how long a look that finds nothing may take. If it takes longer, another
	// program has run on this processor.
	stolen = 100 * time.Microsecond
	// Something else that is ready to run ends the looking for leastPause, and if it is
	// still there afterwards, for longer and longer.
	leastPause = 10 * time.Millisecond
	mostPause  = 2560 * time.Millisecond
)

// look looks again for a moment, and reports whether data has come.
func (c *Conn) look(fd uintptr) bool {
	if !c.habit.may() || !c.expects() {
		return false
	}
	start, processors := time.Now(), runtime.GOMAXPROCS(0)
	if !enter(start, processors) {
		return false
	}
	defer crowd.lookers.Add(-1)
	if processors == 1 {
		return c.lookForAll(fd, start)
	}
	last := start
	for range maxLooks {
		if c.take(fd) {
			c.habit.paid()
			c.hush(fd)
			return true
		}
		now := time.Now()
		if lookedEnough(start, last, now) {
			break
		}
		last = now
	}
	c.habit.failed()
	return false
}

// lookedEnough reports whether to stop looking: it has lasted long enough, or somebody else had
// the processor since last.
func lookedEnough(start, last, now time.Time) bool {
	if now.Sub(last) > stolen {
		disturbed(now)
		return true
	}
	return now.Sub(start) >= lookFor
}

// expects reports whether data may come soon: to this connection, or on a single processor, where
// one looks for all, to another one.
func (c *Conn) expects() bool {
	return c.Expecting == nil || c.Expecting() || runtime.GOMAXPROCS(0) == 1 && crowd.owed.Load() > 0
}

// lookForAll is look on a single processor. Nothing else can run meanwhile, so goroutines
// that are ready get their turn between two looks, and if another connection has data, this
// one waits with it in the poller, which then finds both.
func (c *Conn) lookForAll(fd uintptr, start time.Time) bool {
	c.watch(fd, c.alone < aloneAfter)
	for i := range maxLooks {
		runtime.Gosched()
		last := time.Now()
		ready := int(fd)
		if c.watched {
			ready = readable()
		}
		if ready >= 0 && ready != int(fd) {
			if i > 0 { // otherwise it had data before this look, which says nothing
				c.habit.paid()
			}
			return false
		}
		if ready >= 0 && c.take(fd) {
			c.habit.paid()
			return true
		}
		if lookedEnough(start, last, time.Now()) {
			break
		}
	}
	c.habit.failed()
	return false
}

// enter counts one more that looks, if there may be one more.
func enter(now time.Time, processors int) bool {
	if at := int64(now.Sub(epoch)); at < crowd.until.Load() || crowd.load.busy(at) {
		return false
	}
	if crowd.lookers.Add(1) <= int32(max(1, processors/2)) {
		return true
	}
	crowd.lookers.Add(-1)
	return false
}

// disturbed ends all looking for a while. A program that always runs loses its processor to
// others for a whole time slice of each, milliseconds. One that sleeps in between is woken
// ahead of them.
func disturbed(now time.Time) {
	at, pause := int64(now.Sub(epoch)), crowd.pause.Load()
	if at < crowd.until.Load() {
		return
	}
	if at-crowd.until.Load() > 2*pause {
		pause = 0
	}
	pause = min(max(2*pause, int64(leastPause)), int64(mostPause))
	crowd.pause.Store(pause)
	crowd.until.Store(at + pause)
}

// hushedBytes is how much must arrive to wake a thread while the reader looks for itself.
const hushedBytes = 64 << 10

// hush stops the kernel from telling the runtime's poller of each arrival, while the reader
// finds the data by itself. Otherwise each arrival would wake another thread for nothing.
// With one processor, no thread waits in the poller while the reader looks.
func (c *Conn) hush(fd uintptr) {
	if !c.hushed {
		c.hushed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, hushedBytes) == nil
	}
}

// speak ends hush. If data has come meanwhile, the kernel now tells the poller.
func (c *Conn) speak(fd uintptr) {
	if c.hushed {
		c.hushed = false
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, 1) // it worked for the larger value
	}
}

// attend gives the rest of the program its turn, if this reader has not waited for a while.
// Only a goroutine that waits makes the runtime look at its queues and its poller. On a
// single processor nothing else would run for up to ten milliseconds.
func (c *Conn) attend() {
	now := time.Now()
	if c.rested.IsZero() {
		c.rested = now
	}
	if now.Sub(c.rested) < attendAlone {
		return
	}
	alone := runtime.GOMAXPROCS(0) == 1
	if !alone && now.Sub(c.rested) < attendMany {
		return
	}
	c.rested = now
	runtime.Gosched()
	if alone {
		nudge()
	}
}

// watched is an epoll instance of the connections of a program with a single processor, or
// negative.
var watched = sync.OnceValue(func() int {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return -1
	}
	return fd
})

// watch says whether readable finds this connection. It no longer does once the connection
// is closed.
func (c *Conn) watch(fd uintptr, on bool) {
	if c.watched == on || watched() < 0 {
		return
	}
	op, event := unix.EPOLL_CTL_DEL, unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
	if on {
		op = unix.EPOLL_CTL_ADD
	}
	if unix.EpollCtl(watched(), op, int(fd), &event) == nil {
		c.watched = on
	}
}

// readable returns a watched connection that has data, or a negative number. It does not
// wait.
func readable() int {
	var event unix.EpollEvent
	n, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(watched()), uintptr(unsafe.Pointer(&event)), 1, 0, 0, 0)
	if errno != 0 || n == 0 {
		return -1
	}
	return int(event.Fd)
}

// bell is an eventfd that the runtime's poller watches, or nil.
var bell = sync.OnceValue(func() syscall.RawConn {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil
	}
	raw, err := os.NewFile(uintptr(fd), "eventfd").SyscallConn()
	if err != nil {
		return nil
	}
	return raw
})

// nudge makes the runtime look at its poller: it waits there for an event that it causes
// itself, and every other event is found with it.
func nudge() {
	if raw := bell(); raw != nil {
		_ = raw.Read(ring) // it fails only if the eventfd is closed, which it never is
	}
}

// ring consumes the event, or causes it and waits for it.
func ring(fd uintptr) bool {
	count := [8]byte{0: 1}
	_, _, errno := syscall.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&count)), uintptr(len(count)))
	if errno != unix.EAGAIN {
		return true
	}
	count = [8]byte{0: 1}
	_, _, errno = syscall.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&count)), uintptr(len(count)))
	return errno != 0
}

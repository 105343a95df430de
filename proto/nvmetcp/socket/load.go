// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"bytes"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// load follows whether the machine has more threads that are ready to run than processors:
// one that looks again then takes a processor from another thread, perhaps from the very one
// whose answer it waits for. The scheduler may let it, for milliseconds.
type load struct {
	next  atomic.Int64 // when to count again, in nanoseconds since epoch
	score atomic.Int32 // rises with each count above the processors, falls with each other one
}

const (
	countEvery = time.Millisecond
	// A kernel thread that runs for a moment must not matter, so one count does not decide.
	scoreUp   = 2
	scoreBusy = 4
	scoreMost = 16
)

// busy reports whether threads wait for a processor, and counts them if that is due. To a
// program with real-time priority it does not matter: who started it has decided who waits.
func (l *load) busy(at int64) bool {
	if realTime() {
		return false
	}
	if next := l.next.Load(); at >= next && l.next.CompareAndSwap(next, at+int64(countEvery)) {
		if ready, ok := readyThreads(); ok {
			l.note(ready, onlineProcessors())
		}
	}
	return l.score.Load() >= scoreBusy
}

// note takes a count of the threads that run or are ready to.
func (l *load) note(ready, processors int) {
	score := l.score.Load() - 1
	if ready > processors {
		score += 1 + scoreUp
	}
	l.score.Store(min(max(score, 0), scoreMost))
}

// realTime reports whether this program has real-time priority.
var realTime = sync.OnceValue(func() bool {
	a, err := unix.SchedGetAttr(0, 0)
	return err == nil && (a.Policy == unix.SCHED_FIFO || a.Policy == unix.SCHED_RR)
})

// loadavg is /proc/loadavg, or negative. It is opened once because it is read often.
var loadavg = sync.OnceValue(func() int {
	fd, err := unix.Open("/proc/loadavg", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return fd
})

// readyThreads counts the machine's threads that run or are ready to.
func readyThreads() (n int, ok bool) {
	var b [64]byte
	k, err := unix.Pread(loadavg(), b[:], 0)
	if err != nil {
		return 0, false
	}
	return parseLoad(b[:k])
}

// parseLoad takes the number of ready threads from the text of /proc/loadavg, for example
// "0.20 0.18 0.12 1/80 11206".
func parseLoad(text []byte) (n int, ok bool) {
	slash := bytes.IndexByte(text, '/')
	if slash < 0 {
		return 0, false
	}
	for _, digit := range text[bytes.LastIndexByte(text[:slash], ' ')+1 : slash] {
		if digit < '0' || digit > '9' {
			return 0, false
		}
		n = 10*n + int(digit-'0')
	}
	return n, true
}

// onlineProcessors is the number of the machine's processors, whichever this program may use.
var onlineProcessors = sync.OnceValue(func() int {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if n := parseOnline(string(text)); err == nil && n > 0 {
		return n
	}
	return runtime.NumCPU()
})

// parseOnline counts the processors in a list such as "0-3,8".
func parseOnline(list string) (n int) {
	for span := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		from, to, several := strings.Cut(span, "-")
		first, err := strconv.Atoi(from)
		if err != nil {
			return 0
		}
		last := first
		if several {
			if last, err = strconv.Atoi(to); err != nil {
				return 0
			}
		}
		n += last - first + 1
	}
	return n
}

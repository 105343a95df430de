// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"sync"
	"time"
)

// Waits measures for how long anything waited. Times that overlap count once. Its times are
// nanoseconds of any clock.
type Waits struct {
	mu    sync.Mutex
	n     int   // that wait now
	since int64 // when the first of them began
	until int64 // the end of the last wait
	total int64
}

// Begin notes that one more waits, since a time that may be past.
func (w *Waits) Begin(since int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	since = max(since, w.until) // earlier, it was counted
	if w.n++; w.n == 1 || since < w.since {
		w.since = since
	}
}

// End notes that one fewer waits.
func (w *Waits) End(now int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n--; w.n == 0 {
		w.total += max(0, now-w.since)
		w.until = max(w.until, now)
	}
}

// Total is for how long something waited until now.
func (w *Waits) Total(now int64) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	total := w.total
	if w.n > 0 {
		total += max(0, now-w.since)
	}
	return time.Duration(total)
}

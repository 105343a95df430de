// SPDX-License-Identifier: Apache-2.0

package host

import (
	"sync"
	"sync/atomic"
	"time"
)

// hearing knows since when a controller has not answered. Anything that comes back on any queue
// is an answer; keep alives and attempts to connect are the questions, because a controller
// answers them whatever its drives do.
type hearing struct {
	told  atomic.Bool // something has come back since Answered was called
	heard atomic.Bool // something has come back since the last question

	mu    sync.Mutex
	asked time.Time // the first question since something came back; zero: there was none
}

// hear notes that something has come back. It is called for each read, so it mostly only looks.
func (h *hearing) hear() {
	if !h.told.Load() {
		h.told.Store(true)
	}
	if !h.heard.Load() {
		h.heard.Store(true)
	}
}

// ask notes that a question is sent now.
func (h *hearing) ask() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.heard.Swap(false) || h.asked.IsZero() {
		h.asked = time.Now()
	}
}

// unanswered is when the first question was sent that nothing has come back since; zero if there
// is none.
func (h *hearing) unanswered() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.heard.Load() {
		return time.Time{}
	}
	return h.asked
}

// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"slices"
	"sync"
)

// recentMost is how much of a daemon's log is kept in memory for support bundles, in bytes.
const recentMost = 512 << 10

// Recent keeps the newest lines that are written to it. Its methods may be called concurrently, and
// those of a nil Recent keep nothing.
type Recent struct {
	mu   sync.Mutex
	kept []byte
}

// Write keeps lines. It implements [io.Writer].
func (r *Recent) Write(p []byte) (int, error) {
	if r == nil {
		return len(p), nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept = append(r.kept, p...)
	if len(r.kept) > 2*recentMost { // so that not every line moves all of them
		r.kept = slices.Clone(newest(r.kept))
	}
	return len(p), nil
}

// Lines returns the newest lines.
func (r *Recent) Lines() []byte {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(newest(r.kept))
}

// newest cuts off what is more than recentMost, and the rest of a line that was cut.
func newest(lines []byte) []byte {
	if len(lines) <= recentMost {
		return lines
	}
	lines = lines[len(lines)-recentMost:]
	return lines[bytes.IndexByte(lines, '\n')+1:]
}

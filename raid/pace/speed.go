// SPDX-License-Identifier: Apache-2.0

package pace

import (
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
)

// speedEvery is the time over which a speed is measured.
const speedEvery = 5 * time.Second

// Speedometer measures how fast work has been lately. The zero value is ready for use.
type Speedometer struct {
	since, bytes int64
	last         atomic.Int64 // in a second, before since; 0: not known
}

// Add notes that work on some bytes has ended now. The caller sees to it that there is one call at a time.
func (m *Speedometer) Add(now, bytes int64) {
	if m.since == 0 {
		m.since = now
	}
	m.bytes += bytes
	if past := now - m.since; past >= int64(speedEvery) {
		m.last.Store(int64(float64(m.bytes) / float64(past) * float64(time.Second)))
		m.since, m.bytes = now, 0
	}
}

// Lately is the speed in bytes a second; 0: not known. It may be called from any goroutine.
func (m *Speedometer) Lately() block.Size { return block.Size(m.last.Load()) }

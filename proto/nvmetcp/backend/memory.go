// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"sync"

	"weft.dev/weft/proto/block"
)

// stripe is how much of a Memory one lock guards, and what it takes at a time.
const stripe = 256 << 10

// Memory is a block.Device in RAM. It takes memory only for what was written,
// and does each IO before Submit returns. An IO within one stripe of 256 KiB is
// atomic to others; larger ones are made of such parts.
type Memory struct {
	geometry block.Geometry
	stripes  []memoryStripe
}

type memoryStripe struct {
	mu   sync.RWMutex
	data []byte // nil: zeroes
}

// NewMemory makes a device of zeroes. The size is rounded up to the block size,
// which must be 512 or 4096; 0 means 4096.
func NewMemory(size, blockSize block.Size) *Memory {
	if blockSize == 0 {
		blockSize = 4 * block.KiB
	}
	size = size.RoundUp(blockSize)
	return &Memory{
		geometry: block.Geometry{Size: size, BlockSize: blockSize, DiscardUnit: blockSize},
		stripes:  make([]memoryStripe, (size+stripe-1)/stripe),
	}
}

// Geometry implements block.Device.
func (m *Memory) Geometry() block.Geometry { return m.geometry }

// Submit implements block.Device.
func (m *Memory) Submit(io *block.IO) {
	err := m.geometry.CheckIO(io)
	if err == nil && io.Op != block.OpFlush {
		m.do(io)
	}
	io.Complete(err)
}

// do walks the stripes of a checked IO.
func (m *Memory) do(io *block.IO) {
	for done := int64(0); done < io.Len; {
		at := io.Off + done
		s := &m.stripes[at/stripe]
		from := at % stripe
		n := min(stripe-from, io.Len-done)
		switch io.Op {
		case block.OpRead:
			s.read(io.Data[done:done+n], from)
		case block.OpWrite:
			s.write(io.Data[done:done+n], from)
		default:
			s.zero(from, n)
		}
		done += n
	}
}

func (s *memoryStripe) read(p []byte, from int64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.data == nil {
		clear(p)
		return
	}
	copy(p, s.data[from:])
}

func (s *memoryStripe) write(p []byte, from int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.data == nil {
		s.data = make([]byte, stripe)
	}
	copy(s.data[from:], p)
}

func (s *memoryStripe) zero(from, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n == stripe {
		s.data = nil
		return
	}
	if s.data != nil {
		clear(s.data[from : from+n])
	}
}

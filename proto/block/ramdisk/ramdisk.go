// SPDX-License-Identifier: Apache-2.0

// Package ramdisk is a block.Device in RAM, for tests and benchmarks of code that serves or
// uses block devices.
package ramdisk

import (
	"sync"

	"weft.dev/weft/proto/block"
)

// stripe is the amount of a Disk that one lock guards, and the unit of its allocation.
const stripe = 256 << 10

// Disk is a block.Device in RAM. It allocates memory only for written data, and completes
// each IO before Submit returns. An IO within one stripe of 256 KiB is atomic; larger ones
// are split at the stripes.
type Disk struct {
	geometry block.Geometry
	stripes  []lockedStripe
}

type lockedStripe struct {
	mu   sync.RWMutex
	data []byte // nil: zeroes
}

// New makes a device of zeroes. The size is rounded up to the block size,
// which must be 512 or 4096; 0 means 4096.
func New(size, blockSize block.Size) *Disk {
	if blockSize == 0 {
		blockSize = 4 * block.KiB
	}
	size = size.RoundUp(blockSize)
	return &Disk{
		geometry: block.Geometry{Size: size, BlockSize: blockSize, DiscardUnit: blockSize},
		stripes:  make([]lockedStripe, (size+stripe-1)/stripe),
	}
}

// Geometry implements block.Device.
func (d *Disk) Geometry() block.Geometry { return d.geometry }

// Submit implements block.Device.
func (d *Disk) Submit(io *block.IO) {
	err := d.geometry.CheckIO(io)
	if err == nil && io.Op != block.OpFlush {
		d.do(io)
	}
	io.Complete(err)
}

// do walks the stripes of a checked IO.
func (d *Disk) do(io *block.IO) {
	for done := int64(0); done < io.Len; {
		at := io.Off + done
		s := &d.stripes[at/stripe]
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

func (s *lockedStripe) read(p []byte, from int64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.data == nil {
		clear(p)
		return
	}
	copy(p, s.data[from:])
}

func (s *lockedStripe) write(p []byte, from int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.data == nil {
		s.data = make([]byte, stripe)
	}
	copy(s.data[from:], p)
}

func (s *lockedStripe) zero(from, n int64) {
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

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/reservation"
)

// namespace is a Device as hosts see it.
type namespace struct {
	cfg      NamespaceConfig
	inflight *inflight // commands in the Device
	gone     atomic.Bool
	shape    atomic.Pointer[shape]
	group    atomic.Uint32

	mu       sync.Mutex
	reserved reservation.State
	held     atomic.Bool // there is a reservation: see mayDo
}

// shape is a Device's geometry in blocks.
type shape struct {
	shift  uint // a block is 1<<shift bytes
	blocks uint64
	maxIO  int64 // bytes; 0: no limit
	block.Geometry
}

func newNamespace(c NamespaceConfig) (*namespace, error) {
	if c.ANAGroup == 0 {
		c.ANAGroup = 1
	}
	switch {
	case c.NSID == 0 || c.NSID > 0xfffffffe:
		return nil, fmt.Errorf("namespace %d: NSID must be 1 to 4294967294", c.NSID)
	case c.Device == nil:
		return nil, fmt.Errorf("namespace %d: no device", c.NSID)
	case c.ANAGroup > maxANAGroups:
		return nil, fmt.Errorf("namespace %d: ANA group %d: must be 1 to %d", c.NSID, c.ANAGroup, maxANAGroups)
	}
	n := &namespace{cfg: c, inflight: newInflight()}
	n.group.Store(c.ANAGroup)
	return n, n.measure()
}

// measure reads the Device's geometry.
func (n *namespace) measure() error {
	g := n.cfg.Device.Geometry()
	if g.BlockSize < 512 || g.BlockSize > 64*block.KiB || g.BlockSize&(g.BlockSize-1) != 0 {
		return fmt.Errorf("namespace %d: blocks of %v: must be a power of two from 512 bytes", n.cfg.NSID, g.BlockSize)
	}
	if g.Size < g.BlockSize {
		return fmt.Errorf("namespace %d: %w", n.cfg.NSID, errEmpty)
	}
	n.shape.Store(&shape{
		shift: uint(bits.TrailingZeros64(uint64(g.BlockSize))), blocks: uint64(g.Size / g.BlockSize), Geometry: g,
		maxIO: int64(g.MaxIO / g.BlockSize * g.BlockSize),
	})
	return nil
}

var errEmpty = errors.New("the device has no block")

// span is the byte range of blocks lba to lba+count; ok is false beyond the namespace's
// end.
func (s *shape) span(lba uint64, count uint32) (off, n int64, ok bool) {
	if lba > s.blocks || uint64(count) > s.blocks-lba {
		return 0, 0, false
	}
	return int64(lba << s.shift), int64(count) << s.shift, true
}

// mayDo checks the reservations. Call it for a command in flight: a preemption then either refuses
// the command here, or waits for it.
func (n *namespace) mayDo(h block.UUID, write bool) bool {
	if !n.held.Load() {
		return true
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if write {
		return n.reserved.MayWrite(reservation.Host(h))
	}
	return n.reserved.MayRead(reservation.Host(h))
}

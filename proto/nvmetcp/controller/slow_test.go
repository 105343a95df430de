// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"sync"

	"weft.dev/weft/proto/block"
)

// slowDevice holds the IOs that it is told to until release, and counts the writes that
// have reached the medium.
type slowDevice struct {
	block.Device

	mu     sync.Mutex
	cond   sync.Cond
	holds  func(*block.IO) bool // nil: nothing
	held   []*block.IO
	landed int // writes
}

func newSlow(d block.Device) *slowDevice {
	s := &slowDevice{Device: d}
	s.cond.L = &s.mu
	return s
}

// hold starts to hold the IOs that which selects.
func (s *slowDevice) hold(which func(*block.IO) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holds = which
}

func writes(io *block.IO) bool { return io.Op == block.OpWrite }

func (s *slowDevice) Submit(io *block.IO) {
	s.mu.Lock()
	if s.holds != nil && s.holds(io) {
		s.held = append(s.held, io)
		s.cond.Broadcast()
		s.mu.Unlock()
		return
	}
	if io.Op == block.OpWrite {
		s.landed++
	}
	s.mu.Unlock()
	s.Device.Submit(io)
}

// waitHeld waits until n IOs are held.
func (s *slowDevice) waitHeld(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.held) < n {
		s.cond.Wait()
	}
}

// release continues all held IOs and holds no more.
func (s *slowDevice) release() {
	s.mu.Lock()
	held := s.held
	s.held, s.holds = nil, nil
	for _, io := range held {
		if io.Op == block.OpWrite {
			s.landed++
		}
	}
	s.mu.Unlock()
	for _, io := range held {
		s.Device.Submit(io)
	}
}

func (s *slowDevice) writesLanded() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.landed
}

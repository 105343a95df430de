// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"encoding/binary"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/uring"
)

// eventData marks the completions in a ring that stand for a call of wake.
const eventData = ^uint64(0)

// mailbox takes completed requests to the thread that owns a ring, since a driver accepts
// commands from that thread alone. If the thread waits for the kernel, a message to the ring
// wakes it, or in older kernels an eventfd, which the ring reads.
type mailbox[T any] struct {
	ring  *uring.Ring
	event int          // -1 if the ring takes messages
	woken kernelMemory // the value read from event

	mu          sync.Mutex
	done, taken []T
	sleeps      bool
	left        bool // the thread takes nothing any more
}

// open makes a mailbox of the thread that owns r.
func (m *mailbox[T]) open(r *uring.Ring) (err error) {
	m.ring, m.event = r, -1
	if r.Message(eventData) == nil {
		return nil
	}
	zero := uint64(0)
	m.woken = ublkMemory(&zero)
	m.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC)
	return err
}

// leaveLocked releases the ring and what open made.
func (m *mailbox[T]) leaveLocked() {
	m.left = true
	if m.ring != nil {
		serving.forget(m.ring.FD())
		m.ring.Close()
	}
	if m.event >= 0 {
		unix.Close(m.event)
	}
	if m.woken != nil {
		m.woken.free()
	}
}

// listen makes the ring report the next call of wake.
func (m *mailbox[T]) listen() {
	if m.event >= 0 {
		s := m.ring.Next()
		s.Opcode, s.FD, s.Addr, s.Len, s.UserData = uring.OpRead, int32(m.event), m.woken.addr(), 8, eventData
	}
}

// putLocked hands v over, unless the thread has left.
func (m *mailbox[T]) putLocked(v T) {
	if m.left {
		return
	}
	m.done = append(m.done, v)
	if m.sleeps {
		m.sleeps = false
		m.wakeLocked()
	}
}

// wake makes the thread look around.
func (m *mailbox[T]) wake() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.left && m.ring != nil {
		m.wakeLocked()
	}
}

func (m *mailbox[T]) wakeLocked() {
	if m.event < 0 {
		for m.ring.Message(eventData) != nil { // only for want of memory: it has worked before
			time.Sleep(time.Millisecond)
		}
		return
	}
	one := [8]byte{}
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(m.event, one[:])
}

// sleep reports whether the thread may wait for the kernel; from then on, whoever puts
// something in wakes it.
func (m *mailbox[T]) sleep() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sleeps = len(m.done) == 0
	return m.sleeps
}

func (m *mailbox[T]) awake() {
	m.mu.Lock()
	m.sleeps = false
	m.mu.Unlock()
}

// collect returns what was put in. The slice is valid until the next call.
func (m *mailbox[T]) collect() []T {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done, m.taken = m.taken[:0], m.done
	return m.taken
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"io"
	"syscall"
	"testing"

	"weft.dev/weft/proto/nvmetcp"
)

// After a controller has died its connections may still bring commands for a moment. They
// must get no answer: an answer would fail them at the host, which resends only commands
// without one.
func TestACommandToADeadControllerHasNoAnswer(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	w.target.mu.Lock()
	a := w.sub.associations[h.id]
	w.target.mu.Unlock()
	a.dead.Store(true)
	for i := range 8 {
		h.io.send(new(ioCommand(nvmetcp.IOWrite, uint64(i), 1, nvmetcp.InCapsule(4096))), pattern(4096, 1))
	}
	if err := h.io.w.Flush(); err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	queue := a.queues[1]
	a.mu.Unlock()
	soon(t, "all commands are read", func() bool {
		queue.mu.Lock()
		defer queue.mu.Unlock()
		return len(queue.requests)-len(queue.free) >= 8
	})
	a.dead.Store(false)
	a.kill(errors.New("test"))
	if pdu, err := h.io.r.Next(); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the host got %v %v", pdu, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync"
	"syscall"
	"time"

	"weft.dev/weft/e2e/guest"
)

// control is the test's end of a guest's control port, for one boot.
type control struct {
	onEvent func(guest.Reply)
	hello   chan guest.Reply
	ended   chan struct{} // closed when the port has closed

	sendMu sync.Mutex
	enc    *gob.Encoder

	mu    sync.Mutex
	last  uint64
	calls map[uint64]*call
}

// call is a request that waits for its reply.
type call struct {
	out, err io.Writer
	done     chan guest.Reply
}

func newControl(conn io.Writer, onEvent func(guest.Reply)) *control {
	return &control{
		onEvent: onEvent,
		hello:   make(chan guest.Reply, 1),
		ended:   make(chan struct{}),
		enc:     gob.NewEncoder(conn),
		calls:   make(map[uint64]*call),
	}
}

// receive passes replies to the waiting calls until the port closes.
func (c *control) receive(conn io.Reader) {
	defer close(c.ended)
	dec := gob.NewDecoder(conn)
	for {
		var r guest.Reply
		if err := dec.Decode(&r); err != nil {
			return
		}
		c.take(r)
	}
}

func (c *control) take(r guest.Reply) {
	switch {
	case r.Kind == guest.KindHello:
		c.hello <- r
		return
	case r.ID == 0:
		c.onEvent(r)
		return
	}
	c.mu.Lock()
	call := c.calls[r.ID]
	if r.Kind == guest.KindDone {
		delete(c.calls, r.ID)
	}
	c.mu.Unlock()
	if call == nil {
		return
	}
	switch r.Kind {
	case guest.KindOut:
		_, _ = call.out.Write(r.Data)
	case guest.KindErr:
		_, _ = call.err.Write(r.Data)
	case guest.KindDone:
		call.done <- r
	}
}

// errGone is the error of requests to a machine that has ended.
var errGone = errors.New("the machine is gone")

// do sends a request and waits for its reply. When ctx ends, it kills the command and gives
// it a moment to exit.
func (c *control) do(ctx context.Context, r guest.Request, stdout, stderr io.Writer) (guest.Reply, error) {
	if err := ctx.Err(); err != nil {
		return guest.Reply{}, err
	}
	id, call := c.register(stdout, stderr)
	r.ID = id
	if err := c.send(r); err != nil {
		return guest.Reply{}, errGone
	}
	select {
	case done := <-call.done:
		return done, replyError(done)
	case <-c.ended:
		return guest.Reply{}, errGone
	case <-ctx.Done():
		c.abandon(r, call)
		return guest.Reply{}, context.Cause(ctx)
	}
}

func (c *control) register(stdout, stderr io.Writer) (uint64, *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	call := &call{out: orDiscard(stdout), err: orDiscard(stderr), done: make(chan guest.Reply, 1)}
	c.calls[c.last] = call
	return c.last, call
}

func (c *control) send(r guest.Request) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	return c.enc.Encode(r)
}

// abandon kills the command of a call. The command may not have started yet, so the signal
// is repeated for a short while. A process stuck in the kernel remains.
func (c *control) abandon(r guest.Request, call *call) {
	if r.Op != guest.OpRun {
		return
	}
	for range 20 {
		if c.send(guest.Request{Op: guest.OpSignal, Target: r.ID, Signal: int(syscall.SIGKILL)}) != nil {
			return
		}
		select {
		case <-call.done:
			return
		case <-c.ended:
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// replyError makes the error of a reply that carries no exit code.
func replyError(r guest.Reply) error {
	switch {
	case r.Name == "not exist":
		return fmt.Errorf("%s: %w", r.Text, fs.ErrNotExist)
	case r.Code < 0:
		return errors.New(r.Text)
	}
	return nil
}

func orDiscard(w io.Writer) io.Writer {
	if w == nil {
		return io.Discard
	}
	return w
}

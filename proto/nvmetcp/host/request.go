// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// request is one command, from its submission until its outcome is reported. It outlives
// connections: if one is lost, the request is sent again.
//
//	held ──▶ waiting ──▶ under way ──▶ done
//	  ▲         │            │
//	  └─────────┴────────────┘  the connection is lost
//
// The owner of the list that a request is in owns the request. There is one exception: a
// request under way belongs to the reader, while the writer may still be sending its data.
// state counts the writer's holds and records whether the command is completed; whichever
// comes last finishes the request.
type request struct {
	next *request // in a list

	cmd       nvmetcp.Command
	data      []byte // what is sent, or the buffer for what is received
	out       bool   // data goes to the controller
	inCapsule bool   // with the command
	cid       uint16
	tick      uint32 // the queue's clock when it was sent
	tries     int

	received uint32                  // bytes received
	grant    nvmetcp.DataHeader      // the R2T to be answered
	granted  uint32                  // bytes that R2Ts have asked for so far
	granting bool                    // grant waits for the writer
	damaged  bool                    // a data digest did not match
	state    atomic.Uint32           // see hold, release, complete
	result   nvmetcp.Completion      // the outcome, once completed
	ranges   [nvmetcp.RangeSize]byte // data of Dataset Management

	// Of an IO.
	space  *Namespace
	io     *block.IO // nil if it is a part of split
	split  *split
	op     block.Op
	offset int64
	length int64
	zeroed int64 // if zeroes are written as data: bytes written so far
	fua    bool
	unmap  bool
	failed bool // fail instead of waiting when the connection is lost
	sent   bool // it may have reached the controller

	// Of any other command: called once, must not block. The request is not reused.
	done func(*request, error)
}

// completed is the bit of request.state above the count of holds.
const completed = 1 << 31

// hold prevents the request from being finished.
func (r *request) hold() { r.state.Add(1) }

// release ends a hold and reports whether the caller must finish the request.
func (r *request) release() bool { return r.state.Add(^uint32(0)) == completed }

// complete records that the command is done and reports whether the caller must finish it.
func (r *request) complete() bool { return r.state.Add(completed) == completed }

// rewind resets a request that was in flight, as if it had never been sent.
func (r *request) rewind() {
	r.state.Store(0)
	r.received, r.granted, r.granting, r.damaged = 0, 0, false, false
}

// list is a queue of requests.
type list struct {
	head, tail *request
	n          int
}

func (l *list) push(r *request) {
	r.next = nil
	if l.head == nil {
		l.head = r
	} else {
		l.tail.next = r
	}
	l.tail = r
	l.n++
}

func (l *list) pop() *request {
	r := l.head
	if r == nil {
		return nil
	}
	if l.head = r.next; l.head == nil {
		l.tail = nil
	}
	r.next = nil
	l.n--
	return r
}

// take moves all requests out of l.
func (l *list) take() list {
	all := *l
	*l = list{}
	return all
}

// append moves all requests of m to the end of l.
func (l *list) append(m list) {
	for r := m.pop(); r != nil; r = m.pop() {
		l.push(r)
	}
}

// split is an IO that needs several commands.
type split struct {
	io   *block.IO
	left atomic.Int64
	mu   sync.Mutex
	err  error // the first one
}

var (
	requests = sync.Pool{New: func() any { return new(request) }}
	splits   = sync.Pool{New: func() any { return new(split) }}
)

// tell reports a request's outcome to its owner and frees the request.
func (r *request) tell(err error) {
	if r.done != nil {
		r.done(r, err)
		return
	}
	if err != nil {
		err = fmt.Errorf("%v of %d bytes at %d, %v: %w", r.op, r.length, r.offset, r.space, err)
	}
	io, s := r.io, r.split
	owner := r.space.controller
	r.forget()
	requests.Put(r)
	if s != nil {
		io = s.part(err)
		if io == nil {
			return
		}
		err = s.err
		s.io, s.err = nil, nil
		splits.Put(s)
	}
	io.Complete(err)
	owner.left()
}

// forget clears the request's references.
func (r *request) forget() {
	r.data, r.space, r.io, r.split, r.done = nil, nil, nil, nil, nil
	r.zeroed, r.tries, r.failed, r.sent = 0, 0, false, false
	r.rewind()
}

// part counts one finished part of a split IO, and returns the IO after the last.
func (s *split) part(err error) *block.IO {
	if err != nil {
		s.mu.Lock()
		if s.err == nil || errors.Is(err, errLost) {
			s.err = err // this error alone says that data may have been written
		}
		s.mu.Unlock()
	}
	if s.left.Add(-1) > 0 {
		return nil
	}
	return s.io
}

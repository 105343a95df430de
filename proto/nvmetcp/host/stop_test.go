// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// The socket is full when a request is sent, and whoever sends it learns that only after the connection has
// been closed: the end must not wait for it for ever.
func TestAConnectionEndsWhileItsSocketIsFull(t *testing.T) {
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ends[0])
	defer unix.Close(ends[1])
	for page := make([]byte, 4096); ; {
		if _, err := unix.Write(ends[1], page); err != nil {
			break
		}
	}
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		c := &Controller{drained: make(chan struct{}, 1)}
		s := &session{c: c, dead: make(chan struct{}), capsule: 4096}
		q := newQueue(1, crammed{ours, ends[1]}, 8, s)
		q.reader = nvmetcp.NewReader(q, nvmetcp.ReaderConfig{Role: nvmetcp.RoleHost, MaxData: 1 << 31, BufferSize: 4096})
		q.writer, q.maxData, q.capsule = nvmetcp.NewWriter(nil, nvmetcp.WriterConfig{}), 4096, 4096
		n := &Namespace{controller: c}
		n.state.Store(&namespaceState{NamespaceInfo: NamespaceInfo{NSID: 1, shift: 9}, present: true})
		io := &block.IO{Op: block.OpRead, Data: make([]byte, 512), Len: 512, Done: func(*block.IO) {}}
		r := n.request(io, 0, io.Len, false)
		r.io = io
		q.ended.Go(q.write)
		go q.submit(r)
		synctest.Wait()
		left := make(chan list)
		go func() { left <- q.stop() }()
		select {
		case l := <-left:
			if l.pop() != r {
				t.Error("the request that was not sent is not handed back")
			}
		case <-time.After(time.Minute):
			t.Error("the connection has not ended")
			q.quiet.Broadcast() // so that the bubble can end
			<-left
		}
	})
}

// crammed is a connection whose socket is full, which is found out within a second.
type crammed struct {
	net.Conn
	full int // file descriptor of a pipe that takes nothing
}

func (c crammed) SyscallConn() (syscall.RawConn, error) { return rawCrammed(c), nil }

type rawCrammed crammed

func (rawCrammed) Control(func(uintptr)) error   { return net.ErrClosed }
func (rawCrammed) Read(func(uintptr) bool) error { return net.ErrClosed }
func (c rawCrammed) Write(write func(uintptr) bool) error {
	time.Sleep(time.Second)
	write(uintptr(c.full))
	return nil
}

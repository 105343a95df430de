// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

// forgetful answers some requests without executing them.
type forgetful struct {
	block.Device
	n      atomic.Int64
	forget func(n int64, io *block.IO) bool
	answer func(io *block.IO) // answers what is not executed
}

func (f *forgetful) Submit(io *block.IO) {
	if f.forget != nil && f.forget(f.n.Add(1), io) {
		go f.answer(io)
		return
	}
	f.Device.Submit(io)
}

func TestTheWriterNoticesWhatIsLost(t *testing.T) {
	for name, forget := range map[string]func(int64, *block.IO) bool{
		"a write now and then": func(n int64, io *block.IO) bool { return n%50 == 0 && io.Op == block.OpWrite },
		"a read now and then":  func(n int64, io *block.IO) bool { return n%50 == 0 && io.Op == block.OpRead },
		"all to 1 MiB":         func(n int64, io *block.IO) bool { return n > 200 && io.Op == block.OpWrite && io.Off < mib },
	} {
		d := &forgetful{Device: ramdisk.New(8*mib, 512), forget: forget, answer: func(io *block.IO) { io.Complete(nil) }}
		w := load(t, d, 8*mib)
		eventually(t, "the writer notices that it loses "+name, func() bool { return w.failed() != nil })
		close(w.stop)
		w.done.Wait()
	}
}

func TestTheWriterFindsOneLostWriteAtItsEnd(t *testing.T) {
	// The lost write is the last one to its place, because the writer ends before its
	// answer.
	var lost atomic.Bool
	forgotten, end := make(chan struct{}), make(chan struct{})
	d := &forgetful{
		Device: ramdisk.New(8*mib, 512),
		forget: func(n int64, io *block.IO) bool {
			return n > 500 && io.Op == block.OpWrite && lost.CompareAndSwap(false, true)
		},
		answer: func(io *block.IO) {
			close(forgotten)
			<-end
			io.Complete(nil)
		},
	}
	w := load(t, d, 8*mib)
	<-forgotten
	close(w.stop)
	close(end)
	w.done.Wait()
	if err := w.failed(); err != nil {
		t.Fatalf("the writer failed before the lost write: %v", err)
	}
	if w.verify(w.dev) == nil {
		t.Error("the writer does not find the lost write")
	}
}

func TestTheWriterFindsNothingWhereNothingIsLost(t *testing.T) {
	d := &forgetful{Device: ramdisk.New(8*mib, 512)}
	w := load(t, d, 8*mib)
	for range 5 {
		w.moves(t)
	}
	w.end(t)
}

func TestSubsystemsHaveNamesOfTheirOwn(t *testing.T) {
	seen := map[block.NQN]bool{}
	for range 1000 {
		nqn := newNQN()
		if seen[nqn] {
			t.Fatalf("%s twice", nqn)
		}
		seen[nqn] = true
	}
}

func TestTheProxyKeepsWhatWasSentInSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	got := make(chan byte)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		for b := make([]byte, 1); ; {
			if _, err := io.ReadFull(c, b); err != nil {
				close(got)
				return
			}
			got <- b[0]
		}
	}()
	p := newProxy(t, l.Addr().String())
	c, err := net.Dial("tcp", p.portal())
	must(t, err)
	defer c.Close()
	send := func(b byte) {
		t.Helper()
		_, err := c.Write([]byte{b})
		must(t, err)
	}
	send(1)
	if b := <-got; b != 1 {
		t.Fatalf("%d arrives", b)
	}
	p.mute()
	send(2)
	select {
	case b := <-got:
		t.Errorf("%d arrives in silence", b)
	case <-time.After(100 * time.Millisecond):
	}
	p.listen()
	if b := <-got; b != 2 {
		t.Errorf("%d arrives", b)
	}
	p.refuseAll(true)
	if _, open := <-got; open {
		t.Error("a connection outlives the refusal of all")
	}
}

// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/backend"
)

// forgetful answers some requests without doing them.
type forgetful struct {
	block.Device
	n      atomic.Int64
	forget func(n int64, io *block.IO) bool
}

func (f *forgetful) Submit(io *block.IO) {
	if f.forget(f.n.Add(1), io) {
		go io.Complete(nil)
		return
	}
	f.Device.Submit(io)
}

func TestTheWriterNoticesWhatIsLost(t *testing.T) {
	for name, forget := range map[string]func(int64, *block.IO) bool{
		"nothing":      func(int64, *block.IO) bool { return false },
		"one write":    func(n int64, io *block.IO) bool { return n > 200 && n < 210 && io.Op == block.OpWrite },
		"many reads":   func(n int64, io *block.IO) bool { return n%50 == 0 && io.Op == block.OpRead },
		"all to 1 MiB": func(n int64, io *block.IO) bool { return n > 200 && io.Op == block.OpWrite && io.Off < mib },
	} {
		d := &forgetful{Device: backend.NewMemory(8*mib, 512), forget: forget}
		w := load(t, d, 8*mib)
		for began := time.Now(); w.ops.Load() < 2000 && w.failed() == nil && time.Since(began) < 10*time.Second; {
			time.Sleep(time.Millisecond)
		}
		close(w.stop)
		w.done.Wait()
		err := w.failed()
		buf := backend.Aligned(slotSize)
		for slot := range w.phases {
			if err == nil {
				err = w.check(slot, 0, slotSize/unit, buf)
			}
		}
		if (err != nil) != (name != "nothing") {
			t.Errorf("%s lost: the writer says %v", name, err)
		}
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

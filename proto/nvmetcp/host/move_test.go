// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
)

func onePerHost(_ *controller.Config, s *controller.SubsystemConfig) { s.PerHost = 1 }

// entered is a busy device that tells of each IO.
type entered struct {
	busy
	entered chan struct{}
}

func (e entered) Submit(io *block.IO) {
	e.entered <- struct{}{}
	e.busy.Submit(io)
}

// TestAMovedConnectionServesAfterItsOldCommandsHaveLeft: a write is inside the target's device when
// the connection moves. The new one serves nothing before that write has left.
func TestAMovedConnectionServesAfterItsOldCommandsHaveLeft(t *testing.T) {
	slow := entered{busy{ramdisk.New(block.MiB, blocks), make(chan struct{})}, make(chan struct{}, 8)}
	w := newWorld(t, ramdisk.New(block.MiB, blocks), onePerHost)
	w.add(2, uuidB, slow)
	_, second := w.serve(2)
	c := connect(t, w.config())
	if !c.Replaces() {
		t.Error("the target does not promise to replace the host's older controller")
	}
	n := space(t, c, uuidB)
	want := noise(4096, 1)
	write := startWrite(n, want, 0)
	wait(t, slow.entered, "the write to reach the device")
	c.Move(second)
	for end := time.Now().Add(10 * time.Second); c.Session() == 1 && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // until the old connection takes no more
	}
	other := startWrite(space(t, c, uuidA), want, 0)
	select {
	case err := <-other:
		t.Fatalf("the moved connection has served a write, with %v, while one of the old connection is in a device", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(slow.goOn)
	if err := outcome(t, write); err != nil {
		t.Error(err)
	}
	if err := outcome(t, other); err != nil {
		t.Error(err)
	}
	if s := c.State(); s.Portal != second || s.Session != 2 {
		t.Errorf("session %d through %s, want session 2 through %s", s.Session, s.Portal, second)
	}
	got := make([]byte, 4096)
	if err := outcome(t, startRead(n, got, 0)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read after the move: %v", err)
	}
}

func TestAMoveInterruptsAttemptsAtASilentPortal(t *testing.T) {
	w := newWorld(t, ramdisk.New(block.MiB, blocks), onePerHost)
	cfg := w.config()
	const nowhere = "192.0.2.99:4420"
	trying := make(chan struct{}, 8)
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if address == nowhere {
			trying <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	cfg.ConnectTimeout = time.Hour
	c := connect(t, cfg)
	n := space(t, c, uuidA)
	c.Move("192.0.2.99")
	wait(t, trying, "an attempt at the silent portal")
	c.Move(w.addr)
	if err := outcome(t, startWrite(n, noise(4096, 1), 0)); err != nil {
		t.Error(err)
	}
}

func TestATargetWithoutALimitPromisesNothing(t *testing.T) {
	for _, perHost := range []int{0, 2} {
		w := newWorld(t, ramdisk.New(block.MiB, blocks), func(_ *controller.Config, s *controller.SubsystemConfig) { s.PerHost = perHost })
		if connect(t, w.config()).Replaces() {
			t.Errorf("with %d controllers per host the target promises to replace the older one", perHost)
		}
	}
}

// TestASilentControllerHasNotAnswered: keep alives show within their interval whether anything
// comes back.
func TestASilentControllerHasNotAnswered(t *testing.T) {
	p := newPeer(t, 1<<20)
	var silent atomic.Bool
	p.admin = func(*link, *nvmetcp.Command, []byte) bool { return silent.Load() }
	cfg := p.config()
	cfg.KATO, cfg.KeepAliveEvery = time.Hour, 5*time.Millisecond
	c := connect(t, cfg)
	within := func(d time.Duration) bool {
		for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if c.Answered() {
				return true
			}
		}
		return false
	}
	c.Answered()
	if !within(patience) {
		t.Error("a controller that answers keep alives has not answered")
	}
	silent.Store(true)
	within(50 * time.Millisecond) // what was on its way
	if within(50 * time.Millisecond) {
		t.Error("a silent controller has answered")
	}
}

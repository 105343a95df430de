// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
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

// TestAMoveHasTheOldControllerEndedElsewhere: where the target does not promise to end it, that is done by other
// means, until it succeeds, and before the first connection through the new portal. A connection that is lost does
// not need it.
func TestAMoveHasTheOldControllerEndedElsewhere(t *testing.T) {
	for _, promises := range []bool{false, true} {
		var mu sync.Mutex
		var history []string
		var last net.Conn
		did := func(what string) int {
			mu.Lock()
			defer mu.Unlock()
			history = append(history, what)
			return len(history)
		}
		w := newWorld(t, ramdisk.New(block.MiB, blocks), func(_ *controller.Config, s *controller.SubsystemConfig) {
			if promises {
				s.PerHost = 1
			}
		})
		_, second := w.serve(2)
		cfg := w.config()
		cfg.IOQueues = 1
		cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			switch address {
			case w.addr:
				did("first")
			case second:
				did("second")
			}
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			mu.Lock()
			last = conn
			mu.Unlock()
			return conn, err
		}
		cfg.Replace = func(context.Context) error {
			if did("replace") < 5 {
				return errors.New("a drive hangs")
			}
			return nil
		}
		c := connect(t, cfg)
		if err := outcome(t, startWrite(space(t, c, uuidA), noise(4096, 1), 0)); err != nil {
			t.Fatal(err)
		}
		c.Move(second)
		for end := time.Now().Add(patience); c.Session() != 2; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("session %d long after a move, want 2", c.Session())
			}
		}
		if err := outcome(t, startWrite(space(t, c, uuidA), noise(4096, 2), 0)); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		lost := last.Close()
		mu.Unlock()
		if err := errors.Join(lost, outcome(t, startWrite(space(t, c, uuidA), noise(4096, 3), 0))); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		got := slices.Compact(slices.Clone(history))
		mu.Unlock()
		want := []string{"first", "replace", "second"}
		if promises {
			want = []string{"first", "second"}
		}
		if !slices.Equal(got, want) {
			t.Errorf("with a target that promises it: %v: %q, want %q", promises, got, want)
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

// While an IO waits, keep alives go out more often, and show since when nothing has come back. The
// data of an IO that hangs in the controller says nothing about the controller.
func TestUnansweredKeepAlivesSaySinceWhenAControllerIsSilent(t *testing.T) {
	p := newPeer(t, 1<<20)
	var silent atomic.Bool
	var asked atomic.Int32
	p.admin = func(_ *link, cmd *nvmetcp.Command, _ []byte) bool {
		if cmd.Opcode() == nvmetcp.AdminKeepAlive {
			asked.Add(1)
		}
		return silent.Load()
	}
	p.hang(func(*link, *nvmetcp.Command, []byte) bool { return true })
	cfg := p.config()
	cfg.KATO, cfg.KeepAliveEvery, cfg.AskEvery = 2*time.Hour, time.Hour, 40*time.Millisecond
	c := connect(t, cfg)
	for end := time.Now().Add(patience); c.usage.Load() != resting; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("keep alives stay frequent without an IO")
		}
	}
	if n := asked.Load(); n > 0 {
		t.Errorf("%d keep alives while no IO was outstanding", n)
	}
	startRead(space(t, c, uuidA), make([]byte, 4096), 0)
	for end := time.Now().Add(patience); asked.Load() < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d keep alives in %v while an IO waits", asked.Load(), patience)
		}
	}
	for end := time.Now().Add(patience); !c.Unanswered().IsZero(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a controller that answers keep alives is silent, as its device hangs")
		}
	}
	before := time.Now()
	silent.Store(true)
	time.Sleep(500 * time.Millisecond) // what was on its way has come
	since, n := c.Unanswered(), asked.Load()
	if since.Before(before.Add(-patience)) || since.After(before.Add(400*time.Millisecond)) {
		t.Errorf("silent since %v after it fell silent", since.Sub(before))
	}
	for end := time.Now().Add(patience); asked.Load() == n && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	if later := c.Unanswered(); !later.Equal(since) {
		t.Errorf("with another keep alive it is silent since %v later", later.Sub(since))
	}
}

// A portal that refuses is told apart from one that is silent, and each refusal is told.
func TestRefusedAttemptsToConnectAreTold(t *testing.T) {
	p := newPeer(t, 1<<20)
	cfg := p.config()
	cfg.ReconnectMin, cfg.ReconnectMax = time.Millisecond, time.Millisecond
	told, refused := teller()
	cfg.OnState = func(State) { told() }
	var down atomic.Bool
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if down.Load() {
			return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	c := connect(t, cfg)
	if s := c.State(); !s.Failed.IsZero() {
		t.Errorf("connected, and an attempt failed at %v", s.Failed)
	}
	down.Store(true)
	p.cutAll()
	var last time.Time
	for range 3 {
		await(t, refused, "another refusal", func() bool { return c.State().Failed.After(last) })
		last = c.State().Failed
	}
	if err := c.State().Err; !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("refused with %v", err)
	}
	if c.Unanswered().IsZero() {
		t.Error("a controller that refuses connections has answered")
	}
}

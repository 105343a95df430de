// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// moment is long enough for a wrong target to do what it must not.
const moment = 50 * time.Millisecond

// slowWorld has a device that holds writes back, and a host with one write in it.
func slowWorld(t *testing.T, change ...func(*Config, *SubsystemConfig)) (*world, *slowDevice, *host) {
	t.Helper()
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow, change...)
	t.Cleanup(slow.release) // before the world is closed
	h := w.attach(hostA)
	slow.hold(writes)
	h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096)), pattern(4096, 1))
	slow.waitHeld(1)
	return w, slow, h
}

// begin sends a command without waiting for it.
func (p *peer) begin(cmd nvmetcp.Command, out []byte) (cid uint16) {
	p.t.Helper()
	p.send(&cmd, out)
	if err := p.w.Flush(); err != nil {
		p.t.Fatal(err)
	}
	return cmd.CID()
}

// during checks that f does not return while the write is held, and succeeds once it has
// landed.
func during(t *testing.T, slow *slowDevice, what string, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	select {
	case err := <-done:
		t.Fatalf("%s returned (%v) while a write was in the device", what, err)
	case <-time.After(moment):
	}
	slow.release()
	if err := <-done; err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if n := slow.writesLanded(); n != 1 {
		t.Errorf("%d writes landed before %s returned, want 1", n, what)
	}
}

func TestACloseOfASubsystemWaitsForTheDevice(t *testing.T) {
	w, slow, h := slowWorld(t)
	during(t, slow, "Close", w.sub.Close)
	h.io.ended()
	h.admin.ended()
}

func TestARemovedNamespaceIsOutOfTheDevice(t *testing.T) {
	w, slow, h := slowWorld(t)
	during(t, slow, "RemoveNamespace", func(ctx context.Context) error { return w.sub.RemoveNamespace(ctx, 1) })
	h.io.must(h.io.serve(h.io.cid, nil, nil)) // the write was executed, and its host gets the answer
	h.io.want(h.io.write(0, pattern(4096, 2)), nvmetcp.InvalidNamespace)
	if n := slow.writesLanded(); n != 1 {
		t.Errorf("%d writes landed, want 1: one came after the namespace was removed", n)
	}
}

func TestACloseThatGivesUpSaysSoAndCanBeRepeated(t *testing.T) {
	w, slow, _ := slowWorld(t)
	for _, f := range []func(context.Context) error{
		w.sub.Close, w.sub.Close,
		func(ctx context.Context) error { return w.target.Close(ctx) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), moment)
		if err := f(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("while a write is in the device: %v, want deadline exceeded", err)
		}
		cancel()
	}
	during(t, slow, "Close", w.sub.Close)
}

func TestARemoveThatGivesUpCanBeRepeated(t *testing.T) {
	w, slow, _ := slowWorld(t)
	ctx, cancel := context.WithTimeout(t.Context(), moment)
	defer cancel()
	if err := w.sub.RemoveNamespace(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("RemoveNamespace while a write is in the device = %v, want deadline exceeded", err)
	}
	add := func() error {
		return w.sub.AddNamespace(NamespaceConfig{NSID: 1, UUID: block.UUID{9}, Device: ramdisk.New(devSize, 4096)})
	}
	if err := add(); !errors.Is(err, ErrExists) {
		t.Errorf("AddNamespace before the old one is drained = %v, want ErrExists", err)
	}
	during(t, slow, "RemoveNamespace", func(ctx context.Context) error { return w.sub.RemoveNamespace(ctx, 1) })
	if err := add(); err != nil {
		t.Error(err)
	}
}

// TestRemovingANamespaceDoesNotWaitForASilentHost: a host falls silent in the middle of
// sending a write. With nvmet it would block the removal for as long as it is silent.
func TestRemovingANamespaceDoesNotWaitForASilentHost(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 16, nvmetcp.Transport(65536)), nil)
	if pdu := h.io.next(); pdu.Type != nvmetcp.TypeR2T {
		t.Fatalf("received %v, want R2T", pdu.Type)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := w.sub.RemoveNamespace(ctx, 1); err != nil {
		t.Error(err)
	}
}

// TestDataThatComesAfterTheFenceDoesNotLand: the target has accepted the write, and the
// host still has its data when the namespace is removed.
func TestDataThatComesAfterTheFenceDoesNotLand(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow)
	h := w.attach(hostA)
	data := pattern(65536, 1)
	cid := h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 16, nvmetcp.Transport(65536)), nil)
	pdu := h.io.next()
	d := pdu.Data()
	if err := w.sub.RemoveNamespace(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	h.io.w.Data(nvmetcp.TypeH2CData, nvmetcp.FlagLastPDU, nvmetcp.DataHeader{CID: cid, TTAG: d.TTAG}, data)
	h.io.want(h.io.serve(cid, nil, nil), nvmetcp.InvalidNamespace)
	if n := slow.writesLanded(); n != 0 {
		t.Error("a write landed after the namespace was removed")
	}
}

func TestAHostsNewControllerWaitsForItsOldOnesWrites(t *testing.T) {
	w, slow, old := slowWorld(t, func(_ *Config, s *SubsystemConfig) { s.PerHost = 1 })
	connected := make(chan *peer, 1)
	p := w.dial()
	p.greet()
	go func() {
		if s := p.connect(hostA, testNQN, 0, nvmetcp.DynamicController); s != nvmetcp.Success {
			t.Errorf("connect: %v", s)
		}
		connected <- p
	}()
	old.io.ended()
	select {
	case <-connected:
		t.Fatal("the host has a new controller while a write of the old one is in the device")
	case <-time.After(moment):
	}
	slow.release()
	<-connected
	if n := slow.writesLanded(); n != 1 {
		t.Errorf("%d writes landed, want 1", n)
	}
}

// A subsystem that speaks for another target has the host's controllers there ended. It offers that, and says how
// it went; it gives up when the host has gone.
func TestAHostHasItsControllersElsewhereReplaced(t *testing.T) {
	replace := nvmetcp.ReplaceCommand(block.SamePart)
	w := newWorld(t)
	p := w.admin(hostA)
	p.want(p.do(replace, nil, nil), nvmetcp.InvalidOpcode)

	asked, answer := make(chan context.Context, 1), make(chan error, 1)
	w = newWorld(t, func(_ *Config, s *SubsystemConfig) {
		s.Replace = func(ctx context.Context, _ block.ServedBy) error {
			asked <- ctx
			select {
			case err := <-answer:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	p = w.admin(hostA)
	answer <- nil
	p.must(p.do(replace, nil, nil))
	<-asked
	answer <- errors.New("a drive hangs")
	p.want(p.do(replace, nil, nil), nvmetcp.InternalError)
	<-asked
	p.begin(replace, nil)
	ctx := <-asked
	var other nvmetcp.Command
	other.SetOpcode(nvmetcp.AdminKeepAlive)
	other.SetSGL(nvmetcp.Transport(0))
	p.must(p.do(other, nil, nil)) // is answered meanwhile
	p.conn.Close()
	select {
	case <-ctx.Done():
	case <-time.After(10 * time.Second):
		t.Error("the host has gone, and its controllers are still waited for")
	}
}

func TestAnotherHostDoesNotKillAController(t *testing.T) {
	w := newWorld(t, func(_ *Config, s *SubsystemConfig) { s.PerHost = 1 })
	a := w.attach(hostA)
	b := w.attach(hostB)
	a.io.must(a.io.flush())
	b.io.must(b.io.flush())
}

func TestWithoutALimitAHostHasManyControllers(t *testing.T) {
	w := newWorld(t)
	a, b := w.attach(hostA), w.attach(hostA)
	a.io.must(a.io.flush())
	b.io.must(b.io.flush())
	if a.id == b.id {
		t.Errorf("two controllers have id %d", a.id)
	}
}

// TestAHostHasAControllerAtEachOfItsPorts: one that connects replaces the one of its port, and
// the oldest if the host has more ports than it may have controllers.
func TestAHostHasAControllerAtEachOfItsPorts(t *testing.T) {
	w := newWorld(t, func(_ *Config, s *SubsystemConfig) { s.PerHost = 2 })
	first := w.attach(hostA)
	w.port = w.listen(2)
	second := w.attach(hostA)
	first.io.must(first.io.flush())
	second.io.must(second.io.flush())
	again := w.attach(hostA)
	second.io.ended()
	first.io.must(first.io.flush())
	w.port = w.listen(3)
	third := w.attach(hostA)
	first.io.ended()
	again.io.must(again.io.flush())
	third.io.must(third.io.flush())
}

// TestTheNewestConnectWins: Connects that wait for the oldest controller's drain give way
// to the newest one. Otherwise a host that retries could lock itself out.
func TestTheNewestConnectWins(t *testing.T) {
	w, slow, _ := slowWorld(t, func(_ *Config, s *SubsystemConfig) { s.PerHost = 1 })
	first, second := w.dial(), w.dial()
	first.greet()
	d := nvmetcp.ConnectData{HostID: hostA.ID, ControllerID: nvmetcp.DynamicController, Subsystem: testNQN, Host: hostA.NQN}
	first.begin(nvmetcp.Connect{QueueSize: 32}.Command(), d.Append(nil))
	soon(t, "the first connect waits", func() bool { return len(w.sub.Controllers()) == 2 })
	second.greet()
	status := make(chan nvmetcp.Status, 1)
	go func() { status <- second.connect(hostA, testNQN, 0, nvmetcp.DynamicController) }()
	pdu, err := first.r.Next()
	if err == nil && (pdu.Type != nvmetcp.TypeCapsuleResp || pdu.Completion().Status() == nvmetcp.Success) {
		t.Errorf("the overtaken connect got %v", pdu.Type)
	}
	slow.release()
	second.must(<-status)
}

func TestAConnectWhoseOldControllerHangsIsToldToTryAgain(t *testing.T) {
	w, slow, _ := slowWorld(t, func(c *Config, s *SubsystemConfig) { s.PerHost, c.StallTimeout = 1, moment })
	p := w.dial()
	p.greet()
	s := p.connect(hostA, testNQN, 0, nvmetcp.DynamicController)
	p.want(s, nvmetcp.ConnectControllerBusy)
	if s.DNR() {
		t.Error("the host is told not to retry")
	}
	slow.release()
}

// TestAControllersIDIsNotGivenAgainBeforeItsCommandsAreOut: otherwise a host could mistake
// the old controller for its own.
func TestAControllersIDIsNotGivenAgainBeforeItsCommandsAreOut(t *testing.T) {
	w, slow, h := slowWorld(t, func(_ *Config, s *SubsystemConfig) { s.CntlidMin, s.CntlidMax = 7, 7 })
	h.admin.conn.Close()
	h.io.ended()
	p := w.dial()
	p.greet()
	p.want(p.connect(hostA, testNQN, 0, nvmetcp.DynamicController), nvmetcp.ConnectControllerBusy)
	slow.release()
	soon(t, "the id is free", func() bool { return len(w.sub.Controllers()) == 0 })
	p.must(p.connect(hostA, testNQN, 0, nvmetcp.DynamicController))
}

func TestUnlinkingKillsTheControllersOfThePort(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	w.port.Unlink(w.sub)
	h.io.ended()
	h.admin.ended()
	p := w.dial()
	p.greet()
	p.want(p.connect(hostA, testNQN, 0, nvmetcp.DynamicController), nvmetcp.ConnectInvalidParameters)
}

func TestAHostThatIsNoLongerAllowedIsCutOff(t *testing.T) {
	w := newWorld(t)
	a, b := w.attach(hostA), w.attach(hostB)
	if err := w.sub.SetHosts([]Host{{NQN: hostB.NQN}}, false); err != nil {
		t.Fatal(err)
	}
	a.io.ended()
	b.io.must(b.io.flush())
	p := w.dial()
	p.greet()
	p.want(p.connect(hostA, testNQN, 0, nvmetcp.DynamicController), nvmetcp.ConnectInvalidHost)
}

// Linux does not notice the end of a connection while it sets its controller up: it waits for an answer.
func TestAHostThatIsConnectingIsAnsweredWhenItsControllerEnds(t *testing.T) {
	w := newWorld(t)
	admin := w.admin(hostA)
	io, late := w.queue(hostA, admin.cntlid(), 1), w.dial()
	late.greet()
	if err := w.sub.SetHosts([]Host{{NQN: hostB.NQN}}, false); err != nil {
		t.Fatal(err)
	}
	ended := time.Now()
	admin.want(admin.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyCSTS), nil, nil), nvmetcp.InternalPathError)
	var identify nvmetcp.Command
	identify.SetOpcode(nvmetcp.AdminIdentify)
	admin.want(admin.do(identify, nil, nil), nvmetcp.InternalPathError)
	io.want(io.write(0, pattern(4096, 1)), nvmetcp.InternalPathError)
	if err := w.sub.SetHosts([]Host{{NQN: hostA.NQN}}, false); err != nil {
		t.Fatal(err)
	}
	if s := late.connect(hostA, testNQN, 2, admin.cntlid()); s&dnr != 0 || s == nvmetcp.Success {
		t.Errorf("a queue of the controller that has ended: %v; want an error after which the host tries again", s)
	}
	admin.ended()
	io.ended()
	if took := time.Since(ended); took < farewell/2 {
		t.Errorf("closed after %v, when the host might have waited for an answer", took)
	}
	h := w.attach(hostA)
	data := make([]byte, 4096)
	h.io.must(h.io.read(0, data))
	if !bytes.Equal(data, make([]byte, 4096)) {
		t.Error("a write has landed that was sent after the end of its controller")
	}
}

// The last export of a portal takes the portal with it. A host may be connecting a queue then.
func TestAHostThatIsConnectingIsAnsweredWhenItsPortCloses(t *testing.T) {
	w := newWorld(t)
	admin, early := w.admin(hostA), w.dial()
	early.greet()
	w.target.mu.Lock()
	a := w.sub.associations[admin.cntlid()]
	w.target.mu.Unlock()
	closed := make(chan error, 1)
	go func() { closed <- w.port.Close() }()
	<-a.killed
	admin.want(admin.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyCSTS), nil, nil), nvmetcp.InternalPathError)
	if s := early.connect(hostA, testNQN, 1, admin.cntlid()); s == nvmetcp.Success {
		t.Error("a queue was connected through a port that closes")
	}
	admin.conn.Close() // as a host does after that
	early.conn.Close()
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// A host that has connected notices the end of its connections, and it is to notice that at once.
func TestAHostThatHasConnectedIsCutOffAtOnce(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	h.admin.askForEvent()
	var id nvmetcp.Command
	id.SetOpcode(nvmetcp.AdminKeepAlive)
	h.admin.must(h.admin.do(id, nil, nil)) // the target has read the request before
	began := time.Now()
	w.port.Unlink(w.sub)
	h.io.ended()
	h.admin.ended()
	if took := time.Since(began); took >= farewell {
		t.Errorf("closed after %v", took)
	}
}

// TestAHostThatComesAsItIsShutOutStaysOut: its Connect was checked while it was still
// allowed.
func TestAHostThatComesAsItIsShutOutStaysOut(t *testing.T) {
	w := newWorld(t)
	c := &conn{address: "192.0.2.1"}
	if err := w.sub.SetHosts([]Host{{NQN: hostB.NQN}}, false); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := w.port.newAssociation(w.sub, hostA, c); err == nil {
		t.Error("a host has a controller of a subsystem that it may not connect to")
	}
	w.port.Unlink(w.sub)
	if _, _, _, err := w.port.newAssociation(w.sub, hostB, c); err == nil {
		t.Error("a host has a controller through a port that no longer leads to the subsystem")
	}
}

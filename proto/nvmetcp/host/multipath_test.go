// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
)

// twoPorts is a device that uses two ports of one target.
func twoPorts(t *testing.T) (w *world, second *controller.Port, p *Paths, told <-chan struct{}) {
	t.Helper()
	w = newWorld(t, ramdisk.New(block.MiB, blocks))
	second, addr := w.serve(2)
	tell, told := teller()
	a, b := w.config(), w.config()
	b.Portals = []string{addr}
	a.OnNamespaces, b.OnNamespaces = tell, tell
	a.OnState, b.OnState = func(State) { tell() }, func(State) { tell() }
	p, err := Multipath(MultipathConfig{}, space(t, connect(t, a), uuidA), space(t, connect(t, b), uuidA))
	if err != nil {
		t.Fatal(err)
	}
	return w, second, p, told
}

func TestIOFollowsTheANAState(t *testing.T) {
	w, second, p, told := twoPorts(t)
	want := noise(4096, 1)
	check := func() {
		t.Helper()
		got := make([]byte, 4096)
		if err := outcome(t, startWrite(p, want, 0)); err != nil {
			t.Fatal(err)
		}
		if err := outcome(t, startRead(p, got, 0)); err != nil || !bytes.Equal(got, want) {
			t.Fatal(err)
		}
	}
	set := func(port *controller.Port, s nvmetcp.ANAState) {
		t.Helper()
		if err := port.SetANA(1, s); err != nil {
			t.Fatal(err)
		}
	}
	check()
	first := p.all[0].space
	if p.Active() != first {
		t.Error("of two equal paths the first is not chosen")
	}
	set(w.port, nvmetcp.ANAStateNonOptimized)
	await(t, told, "the second path", func() bool { return p.Active() == p.all[1].space })
	check()
	set(second, nvmetcp.ANAStateInaccessible)
	check() // whether the host knows it yet or not
	await(t, told, "the first path", func() bool { return p.Active() == first })
	set(w.port, nvmetcp.ANAStateInaccessible)
	await(t, told, "no path", func() bool { return p.Active() == nil })
	o := startWrite(p, want, 0)
	select {
	case err := <-o:
		t.Fatalf("a write without a path was answered: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	set(second, nvmetcp.ANAStateOptimized)
	if err := outcome(t, o); err != nil {
		t.Error(err)
	}
}

// peers is a device over two peers that share their memory.
func peers(t *testing.T, quiesce time.Duration) (a, b *peer, p *Paths) {
	t.Helper()
	a, b = newPeer(t, 1<<20), newPeer(t, 1<<20)
	slow := a.config()
	slow.ReconnectMin, slow.ReconnectMax = time.Hour, time.Hour
	p, err := Multipath(MultipathConfig{Quiesce: quiesce}, space(t, connect(t, slow), uuidA), space(t, connect(t, b.config()), uuidA))
	if err != nil {
		t.Fatal(err)
	}
	return a, b, p
}

func TestAReadThatLostItsPathGoesOverAnotherAtOnce(t *testing.T) {
	a, b, p := peers(t, time.Hour)
	copy(b.memory, noise(4096, 1))
	reached := make(chan struct{}, 1)
	a.hang(func(*link, *nvmetcp.Command, []byte) bool { reached <- struct{}{}; return true })
	got := make([]byte, 4096)
	o := startRead(p, got, 0)
	wait(t, reached, "the first path")
	a.listener.Close()
	a.cutAll()
	if err := outcome(t, o); err != nil || !bytes.Equal(got, b.memory[:4096]) {
		t.Fatal(err)
	}
}

func TestAWriteThatLostItsPathWaitsUntilItCanNotLandThereAnyMore(t *testing.T) {
	const quiesce = 100 * time.Millisecond
	a, b, p := peers(t, quiesce)
	reached := make(chan struct{}, 1)
	a.hang(func(*link, *nvmetcp.Command, []byte) bool { reached <- struct{}{}; return true })
	data := noise(4096, 1)
	o := startWrite(p, data, 0)
	wait(t, reached, "the first path")
	a.listener.Close()
	from := time.Now()
	a.cutAll()
	if err := outcome(t, startWrite(p, data, 8192)); err != nil { // a write that was never on the lost path does not wait
		t.Fatal(err)
	}
	if err := outcome(t, o); err != nil || !bytes.Equal(b.memory[:4096], data) {
		t.Fatal(err)
	}
	if d := time.Since(from); d < quiesce {
		t.Errorf("it was sent over the other path after %v, not %v", d, quiesce)
	}
}

func TestAPathStatusSendsIOOverAnother(t *testing.T) {
	a, b, p := peers(t, time.Hour)
	a.hang(func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		l.answer(cmd.CID(), nvmetcp.ANAInaccessible, 0)
		return true
	})
	data := noise(4096, 1)
	if err := outcome(t, startWrite(p, data, 0)); err != nil || !bytes.Equal(b.memory[:4096], data) {
		t.Fatal(err)
	}
}

func TestWithoutAnyControllerIOFails(t *testing.T) {
	_, _, p := peers(t, time.Millisecond)
	p.all[1].space.controller.Cut()
	if err := outcome(t, startWrite(p, noise(4096, 1), 0)); err != nil {
		t.Fatal(err)
	}
	p.all[0].space.controller.Cut()
	if err := outcome(t, startWrite(p, noise(4096, 1), 0)); !errors.Is(err, block.ErrGone) {
		t.Fatal(err)
	}
}

func TestPathsOfDifferentNamespacesAreRefused(t *testing.T) {
	w := newWorld(t, ramdisk.New(block.MiB, blocks))
	w.add(2, uuidB, ramdisk.New(block.MiB, blocks))
	c := connect(t, w.config())
	if _, err := Multipath(MultipathConfig{}, space(t, c, uuidA), space(t, c, uuidB)); err == nil {
		t.Fatal("no error")
	}
	if _, err := Multipath(MultipathConfig{}); err == nil {
		t.Fatal("no error without any path")
	}
}

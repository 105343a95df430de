// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// passOn replaces the world's target by another one, which takes over what is passed on.
func (w *world) passOn(want int) []Passed {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	passed := w.target.Pass(ctx)
	if len(passed) != want {
		w.t.Fatalf("%d controllers are passed on, want %d", len(passed), want)
	}
	w.close()
	next := newWorldOn(w.t, w.device)
	w.target, w.sub, w.port = next.target, next.sub, next.port
	for _, p := range passed {
		if err := w.port.TakeOver(p); err != nil {
			w.t.Fatal(err)
		}
	}
	return passed
}

// bytesOf is what a peer sends for a command.
func (p *peer) bytesOf(cmd nvmetcp.Command, data []byte) (b []byte) {
	p.t.Helper()
	p.send(&cmd, data)
	for _, piece := range p.w.Pieces() {
		b = append(b, piece...)
	}
	p.w.Reset()
	return b
}

// A command that has arrived in part when its controller is passed on is executed once, by one of the
// two targets, wherever it was cut.
func TestACommandThatArrivedInPartIsExecuted(t *testing.T) {
	for _, digests := range []bool{false, true} {
		for _, cut := range []int{0, 1, 8, 40, 72, 76, 80, 1000, 4096} {
			w := newWorld(t)
			h := w.attach(hostA, func(p *peer) { p.ic.HeaderDigest, p.ic.DataDigest = digests, digests })
			want := pattern(4096, byte(cut))
			b := h.io.bytesOf(ioCommand(nvmetcp.IOWrite, 3, 1, nvmetcp.InCapsule(4096)), want)
			if _, err := h.io.conn.Write(b[:cut]); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Millisecond) // it has probably been read
			rest := time.AfterFunc(20*time.Millisecond, func() {
				if _, err := h.io.conn.Write(b[cut:]); err != nil {
					t.Error(err)
				}
			})
			w.passOn(1)
			h.io.must(h.io.serve(h.io.cid, nil, nil))
			rest.Stop()
			got := make([]byte, 4096)
			h.io.must(h.io.read(3, got))
			if !bytes.Equal(got, want) {
				t.Errorf("cut at %d, digests %t: it is not what was written", cut, digests)
			}
		}
	}
}

// A host has been asked for data when its controller is passed on. The target waits for the data, and
// leaves to the next one what comes meanwhile and needs data too.
func TestDataThatWasAskedForIsAwaited(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	first, second := pattern(64<<10, 1), pattern(64<<10, 2)
	sgl := nvmetcp.Transport(64 << 10)
	one := h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 16, sgl), nil)
	r2t := h.io.next().Data()
	passed := make(chan []Passed)
	go func() { passed <- w.target.Pass(t.Context()) }()
	select {
	case <-passed:
		t.Fatal("the controller is passed on while its host owes data")
	case <-time.After(20 * time.Millisecond):
	}
	two := h.io.begin(ioCommand(nvmetcp.IOWrite, 16, 16, sgl), nil)
	h.io.w.Data(nvmetcp.TypeH2CData, nvmetcp.FlagLastPDU, nvmetcp.DataHeader{CID: one, TTAG: r2t.TTAG}, first)
	h.io.must(h.io.serve(one, nil, nil))
	x := <-passed
	if len(x) != 1 {
		t.Fatalf("%d controllers are passed on", len(x))
	}
	if len(x[0].Queues[1].Read) == 0 {
		t.Error("nothing is left to the next target")
	}
	w.close()
	w = newWorldOn(t, w.device)
	if err := w.port.TakeOver(x[0]); err != nil {
		t.Fatal(err)
	}
	h.io.must(h.io.serve(two, second, nil))
	got := make([]byte, 128<<10)
	h.io.must(h.io.read(0, got))
	if !bytes.Equal(got, slices.Concat(first, second)) {
		t.Error("it is not what was written")
	}
}

// What a host has set, and what it waits for, goes along.
func TestSettingsAndRequestsForEventsGoAlong(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	a := h.admin
	a.must(a.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventNamespaces}.SetCommand(), nil, nil))
	a.must(a.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureVolatileWriteCache, Value: 0}.SetCommand(), nil, nil))
	a.must(a.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureTemperature, Value: 7}.SetCommand(), nil, nil))
	a.must(a.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureKeepAlive, Value: 7000}.SetCommand(), nil, nil))
	cid := a.askForEvent()
	a.must(a.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureKeepAlive}.GetCommand(), nil, nil)) // the request has arrived
	before := a.last.SQHead()
	w.passOn(1)
	for id, want := range map[nvmetcp.FeatureID]uint32{
		nvmetcp.FeatureAsyncEvents: nvmetcp.EventNamespaces, nvmetcp.FeatureVolatileWriteCache: 0,
		nvmetcp.FeatureTemperature: 7, nvmetcp.FeatureKeepAlive: 7000,
	} {
		a.must(a.do(nvmetcp.FeatureAccess{ID: id}.GetCommand(), nil, nil))
		if got := a.last.DW0(); got != want {
			t.Errorf("feature %v is %d, want %d", id, got, want)
		}
	}
	if got := a.last.SQHead(); got != before+4 {
		t.Errorf("the head of the admin queue is %d, after %d and four commands", got, before)
	}
	if err := w.sub.AddNamespace(NamespaceConfig{NSID: 5, Device: ramdisk.New(devSize, 4096)}); err != nil {
		t.Fatal(err)
	}
	if e := a.event(cid); e.Info != nvmetcp.NoticeNamespaces {
		t.Errorf("event %+v", e)
	}
}

// Controllers that cannot go along are left, and one whose command is not answered in time is killed:
// after that, the write is on the medium, or never.
func TestWhatCannotGoAlongStays(t *testing.T) {
	t.Run("reservation", func(t *testing.T) {
		w := newWorld(t)
		h := w.attach(hostA)
		cmd, data := nvmetcp.ReservationRegister{New: 1}.Command(1)
		h.io.must(h.io.do(cmd, data, nil))
		if p := w.target.Pass(t.Context()); len(p) != 0 {
			t.Error("a controller of a subsystem with a reservation is passed on")
		}
		h.io.must(h.io.flush())
	})
	t.Run("setting up", func(t *testing.T) {
		w := newWorld(t)
		p := w.dial()
		p.greet()
		p.must(p.connect(hostA, testNQN, 0, nvmetcp.DynamicController))
		if x := w.target.Pass(t.Context()); len(x) != 0 {
			t.Error("a controller that is not enabled is passed on")
		}
		p.enable()
	})
	t.Run("a write in the device", func(t *testing.T) {
		slow := newSlow(ramdisk.New(devSize, 4096))
		w := newWorldOn(t, slow)
		h, other := w.attach(hostA), w.attach(hostB)
		slow.hold(writes)
		h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096)), pattern(4096, 1))
		slow.waitHeld(1)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		x := w.target.Pass(ctx)
		if len(x) != 1 || x[0].Host != hostB {
			t.Fatalf("%d controllers are passed on", len(x))
		}
		x[0].Close() //nolint:errcheck // the test is over
		h.io.ended()
		other.io.ended()
		short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer stop()
		if err := w.sub.Close(short); err == nil {
			t.Error("the subsystem is drained while a write is in its device")
		}
		slow.release()
	})
	t.Run("a write that is in the socket", func(t *testing.T) {
		w := newWorld(t)
		h := w.attach(hostA)
		x := w.target.Pass(t.Context())
		h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096)), pattern(4096, 1))
		time.Sleep(20 * time.Millisecond)
		got := make([]byte, 4096)
		if err := block.ReadAt(w.device, got, 0); err != nil || !bytes.Equal(got, make([]byte, 4096)) {
			t.Errorf("it is executed by a target that has passed its controller on (%v)", err)
		}
		x[0].Close() //nolint:errcheck // the test is over
	})
}

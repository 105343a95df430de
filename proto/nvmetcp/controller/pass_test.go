// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"net"
	"slices"
	"strings"
	"sync"
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

// queueUp adds a command to what the next Flush sends.
func (p *peer) queueUp(cmd nvmetcp.Command, data []byte) { p.send(&cmd, data) }

// passing begins to pass controllers on, and returns what comes of it.
func (w *world) passing() <-chan []Passed {
	passed := make(chan []Passed, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		passed <- w.target.Pass(ctx)
	}()
	time.Sleep(20 * time.Millisecond)
	return passed
}

// owing is a host that has been asked for the data of a write, and has not sent it.
type owing struct {
	*host
	cid uint16
	r2t nvmetcp.DataHeader
}

func (w *world) owing() owing {
	w.t.Helper()
	o := owing{host: w.attach(hostA)}
	o.cid = o.io.begin(ioCommand(nvmetcp.IOWrite, 0, 16, nvmetcp.Transport(64<<10)), nil)
	o.r2t = o.io.next().Data()
	return o
}

// pays sends the data.
func (o owing) pays() {
	o.io.w.Data(nvmetcp.TypeH2CData, nvmetcp.FlagLastPDU, nvmetcp.DataHeader{CID: o.cid, TTAG: o.r2t.TTAG}, pattern(64<<10, 1))
	o.io.w.Flush() //nolint:errcheck // the connection may have ended
}

// What a host does while its controller comes to rest can keep that from going along.
func TestWhatAHostDoesMeanwhileCounts(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(owing)
		goes bool
	}{
		"nothing": {func(owing) {}, true},
		"registers for a reservation": {func(o owing) {
			cmd, data := nvmetcp.ReservationRegister{New: 1}.Command(1)
			o.io.must(o.io.do(cmd, data, nil))
		}, false},
		"sends without end": {func(o owing) {
			cmd := ioCommand(nvmetcp.IOWrite, 16, 16, nvmetcp.Transport(64<<10))
			for range 1000 { // the queue has 32 entries
				o.io.w.Command(&cmd, nil)
			}
		}, false},
		"sends a command that is refused without its data": {func(o owing) {
			cmd := ioCommand(nvmetcp.IOWrite, 1<<40, 1, nvmetcp.InCapsule(4096))
			if s := o.io.do(cmd, pattern(4096, 1), nil); s.Code() != nvmetcp.LBAOutOfRange {
				o.io.t.Errorf("status %v", s)
			}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			o := w.owing()
			passed := w.passing()
			c.do(o)
			o.pays()
			x := <-passed
			if goes := len(x) == 1 && len(x[0].Queues) == 2; goes != c.goes {
				t.Errorf("its connection goes along: %t, of %d controllers", goes, len(x))
			}
			for _, p := range x {
				p.Close() //nolint:errcheck // the test is over
			}
		})
	}
}

// A controller that its host has shut down does not go along.
func TestAControllerThatIsShutDownStays(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	w.target.mu.Lock()
	a := w.sub.associations[h.id]
	w.target.mu.Unlock()
	if !a.begin() {
		t.Fatal("it does not begin to go")
	}
	// As the admin queue's reader does if it has taken the command just before it is to leave.
	a.configure(nvmetcp.Configuration{Enable: true, SubmissionEntrySize: 6, CompletionEntrySize: 4, Shutdown: 1}.Encode())
	if x := a.pass(t.Context()); x != nil {
		t.Error("it goes along")
		x.Close() //nolint:errcheck // the test is over
	}
}

// What happens while a controller comes to rest, its host hears from the next target.
func TestAnEventIsNotLostOnTheWay(t *testing.T) {
	w := newWorld(t)
	o := w.owing()
	o.admin.must(o.admin.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventNamespaces}.SetCommand(), nil, nil))
	cid := o.admin.askForEvent()
	o.admin.must(o.admin.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureKeepAlive}.GetCommand(), nil, nil)) // the request has arrived
	passed := w.passing()
	other := NamespaceConfig{NSID: 5, UUID: block.UUID{5}, Device: ramdisk.New(devSize, 4096)}
	if err := w.sub.AddNamespace(other); err != nil {
		t.Fatal(err)
	}
	o.pays()
	x := <-passed
	w.close()
	next := newWorldOn(t, w.device)
	if err := next.sub.AddNamespace(other); err != nil {
		t.Fatal(err)
	}
	if err := next.port.TakeOver(x[0]); err != nil {
		t.Fatal(err)
	}
	if e := o.admin.event(cid); e.Info != nvmetcp.NoticeNamespaces {
		t.Errorf("event %+v", e)
	}
}

// onePerHost has a new controller of a host replace its older one.
func onePerHost(_ *Config, s *SubsystemConfig) { s.PerHost = 1 }

// A host that has connected to the next target goes on there: nothing that it sent before on its older
// connection lands later.
func TestAnOlderControllerIsNotTakenOver(t *testing.T) {
	w := newWorld(t, onePerHost)
	w.attach(hostB).admin.conn.Close()
	h := w.attach(hostA) // its id is another one than that of the next target's first controller
	for len(w.sub.Controllers()) > 1 {
		time.Sleep(time.Millisecond)
	}
	x := <-w.passing()
	late, newer := pattern(4096, 1), pattern(4096, 2)
	h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096)), late)
	w.close()
	next := newWorldOn(t, w.device, onePerHost)
	again := next.attach(hostA)
	again.io.must(again.io.write(0, late))
	again.io.must(again.io.write(0, newer))
	if err := next.port.TakeOver(x[0]); err == nil || !strings.Contains(err.Error(), "connected again") {
		t.Errorf("the older controller is taken over: %v", err)
	}
	time.Sleep(20 * time.Millisecond)
	got := make([]byte, 4096)
	again.io.must(again.io.read(0, got))
	if !bytes.Equal(got, newer) {
		t.Error("a write of the older controller has landed after its repetition on the newer one")
	}
}

// A namespace whose blocks are others than the host knows is not served to it.
func TestAControllerWithOtherBlocksIsNotTakenOver(t *testing.T) {
	w := newWorld(t)
	w.attach(hostA)
	x := <-w.passing()
	w.close()
	for name, next := range map[string]*world{
		"blocks":   newWorldOn(t, ramdisk.New(devSize, 512)),
		"transfer": newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MDTS = 64 << 10 }),
		"capsule":  newWorld(t, func(c *Config, _ *SubsystemConfig) { c.InCapsule = 4096 }),
	} {
		if err := next.port.TakeOver(x[0]); err == nil {
			t.Errorf("%s: it is taken over", name)
		}
	}
}

// A host that resets a connection on its way to the next target loses its controller, and no other host
// notices.
func TestAConnectionIsResetOnTheWay(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	x := <-w.passing()
	w.close()
	if err := h.io.conn.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	h.io.conn.Close()
	time.Sleep(20 * time.Millisecond)
	for i, q := range x[0].Queues { // as another process gets it
		f, err := q.Conn.(*net.TCPConn).File()
		if err != nil {
			t.Fatal(err)
		}
		q.Conn.Close()
		x[0].Queues[i].Conn, err = net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	next := newWorldOn(t, w.device)
	if err := next.port.TakeOver(x[0]); err == nil {
		t.Error("it is taken over")
	}
	next.attach(hostA)
}

// A connection is closed while its reader looks whether data is there: neither waits for the other.
func TestAConnectionIsClosedWhileItsReaderLooks(t *testing.T) {
	w := newWorld(t)
	p := w.dial()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	p.conn.Close()
	c := newConn(w.target, w.port, far)
	looks, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	c.sock.Expecting = func() bool {
		once.Do(func() {
			close(looks)
			<-goOn
		})
		return c.expecting()
	}
	go c.sock.Read(make([]byte, 10)) //nolint:errcheck // it ends when the socket is closed
	<-looks
	closed := make(chan struct{})
	go func() {
		c.close()
		close(closed)
	}()
	time.Sleep(20 * time.Millisecond)
	close(goOn)
	select {
	case <-closed:
	case <-time.After(patience):
		t.Fatal("close waits for the reader, and the reader for close")
	}
}

// Controllers come to rest while something else ends them. Whatever comes first, no connection stays open
// that nobody serves, and nothing hangs.
func TestControllersEndWhileTheyComeToRest(t *testing.T) {
	for round := range 40 {
		w := newWorld(t)
		var wait sync.WaitGroup
		hosts := []*host{w.attach(hostA), w.attach(hostB), w.attach(hostA)}
		for _, h := range hosts {
			wait.Go(func() {
				for k := uint64(0); ; k++ {
					h.io.queueUp(ioCommand(nvmetcp.IOWrite, k%8, 1, nvmetcp.InCapsule(4096)), pattern(4096, 1))
					if h.io.w.Flush() != nil {
						return
					}
					if _, err := h.io.r.Next(); err != nil {
						return
					}
				}
			})
		}
		time.Sleep(2 * time.Millisecond)
		passed := make(chan []Passed, 1)
		go func() { passed <- w.target.Pass(context.Background()) }()
		switch round % 5 {
		case 0:
			if err := w.sub.SetHosts([]Host{{NQN: hostA.NQN}}, false); err != nil {
				t.Error(err)
			}
		case 1:
			w.port.Unlink(w.sub)
		case 2:
			w.target.limiter.closePort(w.port)
		case 3:
			w.target.limiter.sweep(time.Now().Add(time.Hour).UnixNano())
		case 4:
			hosts[0].io.conn.Close()
		}
		var x []Passed
		select {
		case x = <-passed:
		case <-time.After(patience):
			t.Fatalf("round %d: Pass hangs", round)
		}
		w.close()
		for _, p := range x {
			p.Close() //nolint:errcheck // the host sees the end
		}
		done := make(chan struct{})
		go func() {
			wait.Wait()
			close(done)
		}()
		select {
		case <-done:
		case <-time.After(patience):
			t.Fatalf("round %d: a connection stays open", round)
		}
	}
}

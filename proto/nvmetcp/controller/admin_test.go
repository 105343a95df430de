// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// identify reads an Identify data structure.
func (p *peer) identify(i nvmetcp.Identify) ([]byte, nvmetcp.Status) {
	p.t.Helper()
	b := make([]byte, nvmetcp.IdentifySize)
	return b, p.do(i.Command(), nil, b)
}

// log reads a log page.
func (p *peer) log(g nvmetcp.GetLog) []byte {
	p.t.Helper()
	b := make([]byte, g.Length)
	p.must(p.do(g.Command(), nil, b))
	return b
}

func TestIdentifyTellsWhatThereIs(t *testing.T) {
	w := newWorld(t)
	if err := w.sub.AddNamespace(NamespaceConfig{NSID: 7, UUID: block.UUID{7}, NGUID: [16]byte{8}, Device: ramdisk.New(1<<20, 512), ReadOnly: true, ANAGroup: 3}); err != nil {
		t.Fatal(err)
	}
	p := w.admin(hostA)
	b, s := p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSController})
	p.must(s)
	c, err := nvmetcp.ParseController(b)
	if err != nil || c.Subsystem != string(testNQN) || c.Serial != "0123456789abcdef" || c.ControllerID != p.id || c.MDTS != 8 {
		t.Errorf("controller: %+v, %v", c, err)
	}
	b, s = p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSActiveNamespaces})
	p.must(s)
	if ids, err := nvmetcp.ParseNamespaceList(b); err != nil || !slices.Equal(ids, []uint32{1, 7}) {
		t.Errorf("namespaces: %v, %v", ids, err)
	}
	b, s = p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSActiveNamespaces, NSID: 1})
	p.must(s)
	if ids, err := nvmetcp.ParseNamespaceList(b); err != nil || !slices.Equal(ids, []uint32{7}) {
		t.Errorf("namespaces after 1: %v, %v", ids, err)
	}
	b, s = p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSNamespace, NSID: 7})
	p.must(s)
	n, err := nvmetcp.ParseNamespace(b)
	if err != nil || n.Size != 2048 || n.Formats[0].BlockShift != 9 || !n.WriteProtected || n.ANAGroup != 3 || n.NGUID[0] != 8 {
		t.Errorf("namespace: %+v, %v", n, err)
	}
	b, s = p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSDescriptors, NSID: 7})
	p.must(s)
	if d, err := nvmetcp.ParseDescriptors(b); err != nil || d.UUID != (block.UUID{7}) || d.NGUID[0] != 8 {
		t.Errorf("descriptors: %+v, %v", d, err)
	}
	b, s = p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSNamespace, NSID: 2})
	p.must(s)
	if slices.ContainsFunc(b, func(b byte) bool { return b != 0 }) {
		t.Error("a missing namespace is not reported as zeroes")
	}
	for _, cns := range []nvmetcp.CNS{nvmetcp.CNSControllerOfSet, nvmetcp.CNSActiveOfSet, nvmetcp.CNSCommandSets, nvmetcp.CNSControllers} {
		_, s = p.identify(nvmetcp.Identify{CNS: cns})
		p.must(s)
	}
	for _, cns := range []nvmetcp.CNS{nvmetcp.CNSIndependentNamespace, nvmetcp.CNSNamespaceOfSet, nvmetcp.CNSNamespaceControllers} {
		_, s = p.identify(nvmetcp.Identify{CNS: cns, NSID: 1})
		p.must(s)
		_, s = p.identify(nvmetcp.Identify{CNS: cns, NSID: 2})
		p.want(s, nvmetcp.InvalidNamespace)
	}
	_, s = p.identify(nvmetcp.Identify{CNS: 0x77})
	p.want(s, nvmetcp.InvalidField)
}

func TestOnlyWhatIsInTheQueuesSizeAndNamesConnects(t *testing.T) {
	w := newWorld(t)
	admin := w.admin(hostA)
	type change = func(*nvmetcp.Connect, *nvmetcp.ConnectData)
	inData, inCommand := true, false
	for _, c := range []struct {
		name   string
		queue  uint16
		cntlid uint16
		change change
		status nvmetcp.Status
		offset uint16
		data   bool
	}{
		{"another record format", 0, 0xffff, func(c *nvmetcp.Connect, _ *nvmetcp.ConnectData) { c.RecordFormat = 1 }, nvmetcp.ConnectIncompatibleFormat, 0, false},
		{"a queue of one entry", 0, 0xffff, func(c *nvmetcp.Connect, _ *nvmetcp.ConnectData) { c.QueueSize = 1 }, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldQueueSize, inCommand},
		{"a queue too large", 1, admin.id, func(c *nvmetcp.Connect, _ *nvmetcp.ConnectData) { c.QueueSize = 65536 }, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldQueueSize, inCommand},
		{"an admin queue too large", 0, 0xffff, func(c *nvmetcp.Connect, _ *nvmetcp.ConnectData) { c.QueueSize = 129 }, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldQueueSize, inCommand},
		{"a queue too many", 65, admin.id, nil, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldQueueID, inCommand},
		{"a static controller", 0, 5, nil, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldControllerID, inData},
		{"a controller that is not", 1, 60000, nil, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldControllerID, inData},
		{"another host's controller", 1, admin.id, func(_ *nvmetcp.Connect, d *nvmetcp.ConnectData) { d.Host = hostB.NQN }, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldControllerID, inData},
		{"another host id", 1, admin.id, func(_ *nvmetcp.Connect, d *nvmetcp.ConnectData) { d.HostID = hostB.ID }, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldControllerID, inData},
		{"no host id", 0, 0xffff, func(_ *nvmetcp.Connect, d *nvmetcp.ConnectData) { d.HostID = block.UUID{} }, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldHostID, inData},
		{"another subsystem", 0, 0xffff, func(_ *nvmetcp.Connect, d *nvmetcp.ConnectData) { d.Subsystem += "x" }, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldSubsystem, inData},
		{"a stranger", 0, 0xffff, func(_ *nvmetcp.Connect, d *nvmetcp.ConnectData) { d.Host += "x" }, nvmetcp.ConnectInvalidHost, nvmetcp.ConnectFieldHost, inData},
		{"an I/O queue of discovery", 1, admin.id, func(_ *nvmetcp.Connect, d *nvmetcp.ConnectData) { d.Subsystem = nvmetcp.DiscoveryNQN }, nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectFieldControllerID, inData},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := w.dial()
			p.greet()
			if c.change == nil {
				c.change = func(*nvmetcp.Connect, *nvmetcp.ConnectData) {}
			}
			p.want(p.connect(hostA, testNQN, c.queue, c.cntlid, c.change), c.status)
			if want := nvmetcp.ConnectInvalid(c.offset, c.data); c.offset+1 > 1 && p.last.Result() != want {
				t.Errorf("result %#x, want %#x", p.last.Result(), want)
			}
			p.must(p.connect(hostA, testNQN, 0, 0xffff)) // the connection is still usable
		})
	}
}

func TestAQueueConnectsOnce(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	p := w.dial()
	p.greet()
	p.want(p.connect(hostA, testNQN, 1, h.id), nvmetcp.ConnectInvalidParameters)
	p.want(h.io.connect(hostA, testNQN, 2, h.id), nvmetcp.CommandSequenceError)
	h.io.conn.Close()
	soon(t, "the queue is free", func() bool { return w.sub.Controllers()[0].Queues == 0 })
	p.must(p.connect(hostA, testNQN, 1, h.id))
}

func TestCommandsWaitForConnectAndEnable(t *testing.T) {
	w := newWorld(t)
	p := w.dial()
	p.greet()
	p.want(p.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyCAP), nil, nil), nvmetcp.CommandSequenceError)
	_, s := p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSController})
	p.want(s, nvmetcp.CommandSequenceError)
	p.must(p.connect(hostA, testNQN, 0, 0xffff))
	_, s = p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSController})
	p.want(s, nvmetcp.CommandSequenceError)
	q := w.dial()
	q.greet()
	q.want(q.connect(hostA, testNQN, 1, nvmetcp.ParseConnectResult(p.last.Result()).ControllerID), nvmetcp.ConnectInvalidParameters)
	p.enable()
	_, s = p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSController})
	p.must(s)
}

func TestAControllerThatShutsDownServesNoMore(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	cc := nvmetcp.Configuration{Enable: true, SubmissionEntrySize: 6, CompletionEntrySize: 4, Shutdown: 1}
	h.admin.must(h.admin.do(nvmetcp.PropertySetCommand(nvmetcp.PropertyCC, uint64(cc.Encode())), nil, nil))
	h.admin.must(h.admin.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyCSTS), nil, nil))
	if s := nvmetcp.ParseControllerStatus(uint32(h.admin.last.Result())); s.Shutdown != 2 {
		t.Errorf("after a shutdown CSTS is %+v", s)
	}
	h.io.want(h.io.flush(), nvmetcp.CommandSequenceError)
}

func TestAControllerThatCanNotBeEnabledSaysSo(t *testing.T) {
	w := newWorld(t)
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, testNQN, 0, 0xffff))
	cc := nvmetcp.Configuration{Enable: true, PageSize: 5, SubmissionEntrySize: 6, CompletionEntrySize: 4}
	p.must(p.do(nvmetcp.PropertySetCommand(nvmetcp.PropertyCC, uint64(cc.Encode())), nil, nil))
	p.must(p.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyCSTS), nil, nil))
	if s := nvmetcp.ParseControllerStatus(uint32(p.last.Result())); !s.Fatal || s.Ready {
		t.Errorf("CSTS is %+v, want fatal", s)
	}
}

func TestDisconnectEndsAnIOQueueOnly(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	h.io.must(h.io.do(nvmetcp.DisconnectCommand(), nil, nil))
	h.io.ended()
	h.admin.want(h.admin.do(nvmetcp.DisconnectCommand(), nil, nil), nvmetcp.ConnectInvalidQueueType)
	w.queue(hostA, h.id, 1)
}

func TestASilentHostIsGivenUp(t *testing.T) {
	w := newWorld(t)
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, testNQN, 0, 0xffff, func(c *nvmetcp.Connect, _ *nvmetcp.ConnectData) { c.KATO = 4 * moment }))
	p.ended()
	soon(t, "the controller is gone", func() bool { return len(w.sub.Controllers()) == 0 })
}

// TestAnyCommandKeepsAlive: keep alive is traffic based, and any queue counts.
func TestAnyCommandKeepsAlive(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	h.admin.must(h.admin.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureKeepAlive, Value: uint32(8 * moment / time.Millisecond)}.SetCommand(), nil, nil))
	for range 20 {
		h.io.must(h.io.flush())
		time.Sleep(moment)
	}
	var cmd nvmetcp.Command
	cmd.SetOpcode(nvmetcp.AdminKeepAlive)
	h.admin.must(h.admin.do(cmd, nil, nil))
	h.io.ended() // the host falls silent
}

func TestFeaturesAreSetAndRead(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MaxIOQueues = 5 })
	p := w.admin(hostA)
	set := func(id nvmetcp.FeatureID, v uint32) nvmetcp.Status {
		return p.do(nvmetcp.FeatureAccess{ID: id, Value: v}.SetCommand(), nil, nil)
	}
	get := func(id nvmetcp.FeatureID) uint32 {
		t.Helper()
		p.must(p.do(nvmetcp.FeatureAccess{ID: id, NSID: 1}.GetCommand(), nil, nil))
		return p.last.DW0()
	}
	p.must(set(nvmetcp.FeatureQueues, nvmetcp.QueueCounts{Submission: 64, Completion: 64}.Encode()))
	if q := nvmetcp.ParseQueueCounts(p.last.DW0()); q.Submission != 5 || q.Completion != 5 {
		t.Errorf("queues are %+v, want 5", q)
	}
	p.must(set(nvmetcp.FeatureAsyncEvents, nvmetcp.EventANA))
	if v := get(nvmetcp.FeatureAsyncEvents); v != nvmetcp.EventANA {
		t.Errorf("events are %#x", v)
	}
	p.want(set(nvmetcp.FeatureAsyncEvents, nvmetcp.EventDiscovery), nvmetcp.InvalidField)
	p.must(set(nvmetcp.FeatureKeepAlive, 60000))
	if v := get(nvmetcp.FeatureKeepAlive); v != 60000 {
		t.Errorf("keep alive is %d", v)
	}
	if v := get(nvmetcp.FeatureVolatileWriteCache); v != 1 {
		t.Errorf("volatile write cache is %d", v)
	}
	p.must(set(nvmetcp.FeatureVolatileWriteCache, 0))
	if v := get(nvmetcp.FeatureVolatileWriteCache); v != 0 {
		t.Errorf("the write cache is %d after it was switched off", v)
	}
	p.want(set(0xc7, 0), nvmetcp.InvalidField)

	behavior := pattern(512, 1)
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureHostBehavior, Length: 512}.SetCommand(), behavior, nil))
	got := make([]byte, 512)
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureHostBehavior, Length: 512}.GetCommand(), nil, got))
	if !slices.Equal(got, behavior) {
		t.Error("the host behavior differs from the value set")
	}
	id := make([]byte, 16)
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureHostID, Value: 1, Length: 16}.GetCommand(), nil, id))
	if block.UUID(id) != hostA.ID {
		t.Errorf("the host's id is %x", id)
	}
}

// event waits for an Asynchronous Event Request's answer.
func (p *peer) event(cid uint16) nvmetcp.Event {
	p.t.Helper()
	p.must(p.serve(cid, nil, nil))
	return nvmetcp.ParseEvent(p.last.DW0())
}

func (p *peer) askForEvent() uint16 {
	p.t.Helper()
	var c nvmetcp.Command
	c.SetOpcode(nvmetcp.AdminAsyncEvent)
	return p.begin(c, nil)
}

func TestHostsAreToldOfNamespaces(t *testing.T) {
	w := newWorld(t)
	p := w.admin(hostA)
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventNamespaces}.SetCommand(), nil, nil))
	dev := ramdisk.New(devSize, 4096)
	changes := []struct {
		name string
		do   func() error
		nsid uint32
	}{
		{"added", func() error { return w.sub.AddNamespace(NamespaceConfig{NSID: 5, Device: dev}) }, 5},
		{"resized", func() error { return w.sub.ResizeNamespace(1) }, 1},
		{"removed", func() error { return w.sub.RemoveNamespace(t.Context(), 5) }, 5},
	}
	for _, c := range changes {
		cid := p.askForEvent()
		if err := c.do(); err != nil {
			t.Fatal(err)
		}
		if e := p.event(cid); e.Type != nvmetcp.EventTypeNotice || e.Info != nvmetcp.NoticeNamespaces || e.Log != nvmetcp.LogChangedNamespaces {
			t.Fatalf("%s: event %+v", c.name, e)
		}
		log, err := nvmetcp.ParseChangedNamespaces(p.log(nvmetcp.GetLog{ID: nvmetcp.LogChangedNamespaces, Length: 4096}))
		if err != nil || !slices.Equal(log.IDs, []uint32{c.nsid}) {
			t.Errorf("%s: changed are %+v, %v", c.name, log, err)
		}
	}
}

// TestAnEventIsSentWithoutLocks: sending an event may let a command that waits for memory
// continue, and that command may take the target's locks, as a log page does.
func TestAnEventIsSentWithoutLocks(t *testing.T) {
	w := newWorld(t)
	p := w.admin(hostA)
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventNamespaces}.SetCommand(), nil, nil))
	cid := p.askForEvent()
	c, done := w.connOf(p), make(chan struct{})
	soon(t, "the event request is there", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.requests)-len(c.free) == 1 && !c.reading && !c.sending
	})
	c.mu.Lock()
	c.waiting = append(c.waiting, &request{c: c, size: pageSize, ready: func(*request) {
		w.target.mu.Lock()
		defer w.target.mu.Unlock()
		close(done)
	}})
	c.mu.Unlock()
	told := make(chan error, 1)
	go func() { told <- w.sub.RemoveNamespace(t.Context(), 1) }()
	select {
	case err := <-told:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("the target deadlocks")
	}
	p.event(cid)
	<-done
}

func TestAnEventComesOnceUntilItsLogIsRead(t *testing.T) {
	w := newWorld(t)
	p := w.admin(hostA)
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventNamespaces}.SetCommand(), nil, nil))
	for range 3 {
		if err := w.sub.ResizeNamespace(1); err != nil {
			t.Fatal(err)
		}
	}
	p.event(p.askForEvent())
	cid := p.askForEvent()
	p.log2(t, cid, nvmetcp.GetLog{ID: nvmetcp.LogChangedNamespaces, Length: 4096, RetainEvent: true})
	w.sub.ResizeNamespace(1)
	p.log2(t, cid, nvmetcp.GetLog{ID: nvmetcp.LogChangedNamespaces, Length: 4096})
	w.sub.ResizeNamespace(1)
	p.event(cid)
}

// log2 reads a log page while an event request is outstanding. The request must stay so.
func (p *peer) log2(t *testing.T, open uint16, g nvmetcp.GetLog) {
	t.Helper()
	cmd := g.Command()
	cid := p.begin(cmd, nil)
	pdu := p.next()
	if got := pdu.Data().CID; pdu.Type != nvmetcp.TypeC2HData || got != cid {
		t.Fatalf("%v while event request %d should stay open", pdu.Type, open)
	}
}

func TestAnEventRequestCanBeAborted(t *testing.T) {
	w := newWorld(t)
	p := w.admin(hostA)
	cid := p.askForEvent()
	var abort nvmetcp.Command
	abort.SetOpcode(nvmetcp.AdminAbort)
	abort.SetCDW(10, uint32(cid)<<16)
	id := p.begin(abort, nil)
	p.want(p.serve(cid, nil, nil), nvmetcp.AbortRequested)
	p.must(p.serve(id, nil, nil))
	if p.last.DW0() != 0 {
		t.Error("the abort reports that it aborted nothing")
	}
	p.must(p.do(abort, nil, nil))
	if p.last.DW0() != 1 {
		t.Error("the abort of an unknown command reports success")
	}
	for range maxEventRequests {
		p.askForEvent()
	}
	id = p.askForEvent()
	p.want(p.serve(id, nil, nil), nvmetcp.AsyncEventLimitExceeded)
}

func TestANAStatesAreToldAndHeld(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	p := h.admin
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventANA}.SetCommand(), nil, nil))
	for _, state := range []nvmetcp.ANAState{nvmetcp.ANAStateInaccessible, nvmetcp.ANAStateLost, nvmetcp.ANAStateChange, nvmetcp.ANAStateNonOptimized, nvmetcp.ANAStateOptimized} {
		cid := p.askForEvent()
		if err := w.port.SetANA(1, state); err != nil {
			t.Fatal(err)
		}
		if e := p.event(cid); e.Info != nvmetcp.NoticeANA {
			t.Fatalf("event %+v", e)
		}
		log, err := nvmetcp.ParseANALog(p.log(nvmetcp.GetLog{ID: nvmetcp.LogANA, Length: 4096}))
		if err != nil || len(log.Groups) == 0 || log.Groups[0].State != state || !slices.Equal(log.Groups[0].Namespaces, []uint32{1}) {
			t.Errorf("%v: log %+v, %v", state, log, err)
		}
		for _, s := range []nvmetcp.Status{h.io.flush(), h.io.write(0, pattern(4096, 1)), h.io.read(0, make([]byte, 4096))} {
			h.io.want(s, state.Status())
		}
	}
	other := w.listen(2)
	if err := other.SetANA(1, nvmetcp.ANAStateInaccessible); err != nil {
		t.Fatal(err)
	}
	h.io.must(h.io.flush()) // this queue came through the first port
	if err := w.sub.SetANAGroup(1, 9); err != nil {
		t.Fatal(err)
	}
	h.io.must(h.io.flush())
	if w.port.SetANA(0, nvmetcp.ANAStateOptimized) == nil || w.port.SetANA(1, 7) == nil || w.sub.SetANAGroup(1, 129) == nil {
		t.Error("an unknown group or state was accepted")
	}
}

func TestDiscoveryListsWhatTheHostMayConnectTo(t *testing.T) {
	w := newWorld(t)
	second, err := w.target.AddSubsystem(SubsystemConfig{NQN: testNQN + "2", Hosts: []Host{{NQN: hostB.NQN}}})
	if err != nil {
		t.Fatal(err)
	}
	discover := func(h block.Host) *peer {
		p := w.dial()
		p.greet()
		p.must(p.connect(h, nvmetcp.DiscoveryNQN, 0, 0xffff))
		p.enable()
		return p
	}
	list := func(p *peer) (names []string, generation uint64) {
		t.Helper()
		log, err := nvmetcp.ParseDiscoveryLog(p.log(nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: 8192}))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range log.Entries {
			names = append(names, fmt.Sprint(e.PortID, " ", e.Subsystem, " ", e.Address, ":", e.Service))
		}
		return names, log.Generation
	}
	a, b := discover(hostA), discover(hostB)
	b.must(b.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventDiscovery}.SetCommand(), nil, nil))
	first := fmt.Sprint("1 ", testNQN, " ", w.port.Addr())
	before, g1 := list(b)
	if !slices.Equal(before, []string{first}) {
		t.Errorf("discovery lists %q", before)
	}
	cid := b.askForEvent()
	if err := w.port.Link(second); err != nil {
		t.Fatal(err)
	}
	if e := b.event(cid); e.Info != nvmetcp.NoticeDiscovery {
		t.Errorf("event %+v", e)
	}
	after, g2 := list(b)
	if !slices.Equal(after, []string{first, fmt.Sprint("1 ", testNQN, "2 ", w.port.Addr())}) || g2 <= g1 {
		t.Errorf("discovery lists %q, generation %d after %d", after, g2, g1)
	}
	if names, _ := list(a); !slices.Equal(names, []string{first}) {
		t.Errorf("discovery lists %q to a host", names)
	}
	_, s := a.identify(nvmetcp.Identify{CNS: nvmetcp.CNSActiveNamespaces})
	a.want(s, nvmetcp.InvalidField)
}

func TestSmartCountsWhatWasReadAndWritten(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	h.io.must(h.io.write(0, pattern(1<<20, 1)))
	h.io.must(h.io.read(0, make([]byte, 4096)))
	s, err := nvmetcp.ParseSmart(h.admin.log(nvmetcp.GetLog{ID: nvmetcp.LogSmart, NSID: nvmetcp.AllNamespaces, Length: 512}))
	if err != nil || s.Writes != 1 || s.Reads != 1 || s.UnitsWritten != 3 || s.UnitsRead != 1 || s.Warnings != 0 {
		t.Errorf("SMART log %+v, %v", s, err)
	}
	for _, id := range []nvmetcp.LogID{nvmetcp.LogSupported, nvmetcp.LogErrors, nvmetcp.LogFirmware, nvmetcp.LogEffects, nvmetcp.LogReservations} {
		h.admin.log(nvmetcp.GetLog{ID: id, Length: 64})
	}
	h.admin.want(h.admin.do(nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: 64}.Command(), nil, make([]byte, 64)), nvmetcp.InvalidLogPage)
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// elsewhere is the log entry of a subsystem of another target.
func elsewhere(nqn block.NQN) nvmetcp.DiscoveryEntry {
	return nvmetcp.DiscoveryEntry{
		Transport: nvmetcp.TransportTCP, Family: nvmetcp.FamilyIPv4, Type: nvmetcp.SubsystemNVM, PortID: 1,
		ControllerID: nvmetcp.DynamicController, AdminQueue: 32, Service: "4420", Subsystem: nqn, Address: "192.0.2.11",
	}
}

// listenTo connects to discovery and asks for its events.
func (w *world) listenTo(h block.Host, prove func(*peer)) *peer {
	w.t.Helper()
	p := w.dial()
	p.greet()
	p.must(p.connect(h, nvmetcp.DiscoveryNQN, 0, nvmetcp.DynamicController))
	if prove != nil {
		prove(p)
	}
	p.enable()
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventDiscovery}.SetCommand(), nil, nil))
	return p
}

func (p *peer) discovered() nvmetcp.DiscoveryLog {
	p.t.Helper()
	log, err := nvmetcp.ParseDiscoveryLog(p.log(nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: 8192}))
	if err != nil {
		p.t.Fatal(err)
	}
	return log
}

// quiet fails the test if an event comes before the answer to another command.
func (p *peer) quiet() {
	p.t.Helper()
	p.askForEvent()
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureKeepAlive, Value: 60000}.SetCommand(), nil, nil))
}

func TestDiscoveryTellsEachHostItsOwnAlone(t *testing.T) {
	w := newWorld(t)
	w.port.Unlink(w.sub)
	a, b := w.listenTo(hostA, nil), w.listenTo(hostB, nil)
	before, strange := a.discovered(), b.discovered()
	cid := a.askForEvent()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	mine := []nvmetcp.DiscoveryEntry{elsewhere("nqn.2026-11.dev.weft:one"), elsewhere("nqn.2026-11.dev.weft:two")}
	must(w.target.Discover([]DiscoveredHost{{Host: Host{NQN: hostA.NQN}, Entries: mine}}))
	if e := a.event(cid); e.Info != nvmetcp.NoticeDiscovery || e.Log != nvmetcp.LogDiscovery {
		t.Errorf("event %+v", e)
	}
	after := a.discovered()
	if !slices.Equal(after.Entries, mine) || after.Generation <= before.Generation {
		t.Errorf("the host is told %+v, generation %d after %d", after.Entries, after.Generation, before.Generation)
	}
	b.quiet()
	if log := b.discovered(); len(log.Entries) != 0 || log.Generation != strange.Generation {
		t.Errorf("a stranger is told %+v, generation %d after %d", log.Entries, log.Generation, strange.Generation)
	}

	// The same again is no news; its end is.
	must(w.target.Discover([]DiscoveredHost{{Host: Host{NQN: hostA.NQN}, Entries: mine}}))
	again := w.listenTo(hostA, nil)
	again.quiet()
	if log := again.discovered(); log.Generation != after.Generation {
		t.Errorf("generation %d after %d, and nothing has changed", log.Generation, after.Generation)
	}

	// A target that was away exports it again: a host that was refused meanwhile has to know.
	cid = a.askForEvent()
	must(w.target.Discover([]DiscoveredHost{{Host: Host{NQN: hostA.NQN}, Entries: mine, Version: "away"}}))
	a.event(cid)
	if log := a.discovered(); !slices.Equal(log.Entries, mine) || log.Generation <= after.Generation {
		t.Errorf("the host is told %+v, generation %d after %d", log.Entries, log.Generation, after.Generation)
	}
	cid = a.askForEvent()
	must(w.target.Discover(nil))
	a.event(cid)
	if log := a.discovered(); len(log.Entries) != 0 || log.Generation <= after.Generation {
		t.Errorf("after the end, the host is told %+v, generation %d after %d", log.Entries, log.Generation, after.Generation)
	}
	if w.target.Discover([]DiscoveredHost{{Host: Host{NQN: hostA.NQN}}, {Host: Host{NQN: hostA.NQN}}}) == nil {
		t.Error("a host was listed twice")
	}
}

func TestDiscoveryTellsAHostWithAKeyNothingBeforeItsProof(t *testing.T) {
	w, hostKey, controllerKey := keyed(t)
	mine := []nvmetcp.DiscoveryEntry{elsewhere("nqn.2026-11.dev.weft:one")}
	tell := func(key dhchap.Key) {
		t.Helper()
		if err := w.target.Discover([]DiscoveredHost{{Host: Host{NQN: hostA.NQN, HostKey: key, ControllerKey: controllerKey}, Entries: mine}}); err != nil {
			t.Fatal(err)
		}
	}
	early := w.listenTo(hostA, nil)
	tell(hostKey)
	early.ended() // it has proven nothing
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, nvmetcp.DiscoveryNQN, 0, nvmetcp.DynamicController))
	get := nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: 8192}
	p.want(p.do(get.Command(), nil, make([]byte, 8192)), nvmetcp.AuthenticationRequired)
	if err := p.authenticateTo(nvmetcp.DiscoveryNQN, hostA, hostKey, controllerKey); err != nil {
		t.Fatal(err)
	}
	p.enable()
	if log := p.discovered(); !slices.ContainsFunc(log.Entries, func(e nvmetcp.DiscoveryEntry) bool { return e == mine[0] }) {
		t.Errorf("with its key, the host is told %+v", log.Entries)
	}
	p.must(p.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventDiscovery}.SetCommand(), nil, nil))
	p.quiet()
	tell(hostKey) // the same key
	p.discovered()
	tell(controllerKey)
	p.ended()
}

func TestDiscoveryDoesNotListWhatIsUnlisted(t *testing.T) {
	w := newWorld(t, func(_ *Config, s *SubsystemConfig) { s.Unlisted = true })
	if log := w.listenTo(hostA, nil).discovered(); len(log.Entries) != 0 {
		t.Errorf("it lists %+v", log.Entries)
	}
	h := w.attach(hostA) // all the same it is there
	h.io.must(h.io.flush())
}

// Hosts read the log in pieces of any size, most of them the header first.
func TestTheDiscoveryLogIsReadInPieces(t *testing.T) {
	w := newWorld(t)
	w.port.Unlink(w.sub)
	var mine []nvmetcp.DiscoveryEntry
	for i := range 70 { // more than a host may read at once
		mine = append(mine, elsewhere(block.NQN(fmt.Sprintf("nqn.2026-11.dev.weft:%02d", i))))
	}
	if err := w.target.Discover([]DiscoveredHost{{Host: Host{NQN: hostA.NQN}, Entries: mine}}); err != nil {
		t.Fatal(err)
	}
	p := w.listenTo(hostA, nil)
	size := (len(mine) + 1) * nvmetcp.DiscoveryEntrySize
	for _, piece := range []int{64, nvmetcp.DiscoveryEntrySize, 4096, 10_000} {
		var all []byte
		for len(all) < size {
			all = append(all, p.log(nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Offset: uint64(len(all)), Length: uint64(min(piece, size-len(all)))})...)
		}
		if log, err := nvmetcp.ParseDiscoveryLog(all); err != nil || !slices.Equal(log.Entries, mine) {
			t.Errorf("in pieces of %d bytes the log has %d entries of %d, %v", piece, len(log.Entries), len(mine), err)
		}
	}
	if log, err := nvmetcp.ParseDiscoveryLog(p.log(nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: 3 * nvmetcp.DiscoveryEntrySize})); err != nil || log.Records != uint64(len(mine)) || !slices.Equal(log.Entries, mine[:2]) {
		t.Errorf("the beginning of the log says %d records and has %+v, %v", log.Records, log.Entries, err)
	}
	if rest := p.log(nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Offset: uint64(size), Length: 64}); slices.ContainsFunc(rest, func(b byte) bool { return b != 0 }) {
		t.Errorf("behind the end of the log is %x", rest)
	}
	for what, g := range map[string]nvmetcp.GetLog{
		"an offset beyond the end":      {Offset: uint64(size) + 4, Length: 64},
		"an offset of half a dword":     {Offset: 2, Length: 64},
		"more than the transfer limit":  {Length: uint64(w.target.cfg.MDTS) + 4},
		"an index instead of an offset": {Length: 64, IndexOffset: true},
	} {
		g.ID = nvmetcp.LogDiscovery
		if s := p.do(g.Command(), nil, make([]byte, min(g.Length, 64))); s == nvmetcp.Success {
			t.Errorf("%s is answered", what)
		}
	}
}

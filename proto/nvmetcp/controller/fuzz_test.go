// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"runtime"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// FuzzConnections turns bytes into the traffic of peers on up to four connections: valid
// openings, commands with any content and any length of data, data PDUs for transfers that
// may not exist, and raw bytes. Whatever they send, nothing panics, every connection ends,
// memory stays bounded, the target's output can be parsed, and an honest host is served
// afterwards.
func FuzzConnections(f *testing.F) {
	for _, s := range seeds() {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 4<<10 {
			t.Skip("longer scripts find no more")
		}
		play(t, script)
	})
}

// The steps of a script. Each is a byte with the connection (low two bits) and the step
// (the other bits), followed by the step's arguments.
const (
	stepGreet = iota
	stepConnect
	stepEnable
	stepCommand
	stepData
	stepBytes
	stepClose
	stepHost
	stepAuth
	steps
)

// provenNQN is the subsystem whose hosts must authenticate.
const provenNQN block.NQN = "nqn.2026-11.dev.weft:proven"

func step(conn, kind byte, rest ...byte) []byte { return append([]byte{kind<<2 | conn}, rest...) }

func seeds() [][]byte {
	open := bytes.Join([][]byte{step(0, stepGreet, 3), step(0, stepConnect, 0, 31, 0), step(0, stepEnable), step(1, stepGreet, 0), step(1, stepConnect, 1, 31, 0)}, nil)
	seeds := [][]byte{open, {}, step(0, stepBytes, 1, 2, 3), proving()}
	with := func(steps ...[]byte) { seeds = append(seeds, append(bytes.Clone(open), bytes.Join(steps, nil)...)) }
	for _, c := range ioCommands() {
		with(doing(1, c.cmd, 16, c.pattern), step(1, stepData, 0x80, 255))
	}
	chain := [][]byte{}
	for _, c := range ioCommands() {
		chain = append(chain, doing(1, c.cmd, 16, c.pattern))
	}
	with(chain...)
	seeds = append(seeds, bytes.Join([][]byte{step(2, stepGreet, 0), step(2, stepConnect, 0, 31, 1), step(2, stepEnable),
		doing(2, nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: 4096}.Command(), 0, nil)}, nil))
	aer := doing(0, nvmetcp.Command{byte(nvmetcp.AdminAsyncEvent), 1 << 6}, 0, nil)
	all := doing(0, nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: 0xffff}.SetCommand(), 0, nil)
	for _, c := range adminCommands() {
		with(all, aer, doing(0, c, 2, nil), step(0, stepHost, 1), step(0, stepHost, 2), aer, doing(0, c, 2, nil))
	}
	return seeds
}

// proving is the script of a host that starts to authenticate.
func proving() []byte {
	m := (&dhchap.Negotiate{Transaction: 1, Hashes: []dhchap.Hash{dhchap.SHA256}, Groups: []dhchap.Group{dhchap.Null}}).Append(nil)
	return bytes.Join([][]byte{step(0, stepGreet, 0), step(0, stepConnect, 0, 31, 2),
		step(0, stepAuth, append([]byte{byte(len(m))}, m...)...), step(0, stepAuth, 0)}, nil)
}

// doing is a command with n times 256 bytes of data, which repeat pattern.
func doing(conn byte, c nvmetcp.Command, n byte, pattern []byte) []byte {
	data := [patternSize]byte{}
	copy(data[:], pattern)
	return append(append(step(conn, stepCommand, n), c[:]...), data[:]...)
}

type seedCommand struct {
	cmd     nvmetcp.Command
	pattern []byte
}

func ioCommands() []seedCommand {
	discard := ioCommand(nvmetcp.IODatasetManagement, 0, 0, nvmetcp.InCapsule(4096))
	discard.SetRangeCount(3)
	discard.SetCDW(11, nvmetcp.DatasetDeallocate)
	register, keys := nvmetcp.ReservationRegister{New: 7}.Command(1)
	register.SetSGL(nvmetcp.InCapsule(uint32(len(keys))))
	acquire, mine := nvmetcp.ReservationAcquire{Current: 7, Type: nvmetcp.WriteExclusive}.Command(1)
	acquire.SetSGL(nvmetcp.InCapsule(uint32(len(mine))))
	release, yours := nvmetcp.ReservationRelease{Current: 7, Type: nvmetcp.WriteExclusive}.Command(1)
	release.SetSGL(nvmetcp.InCapsule(uint32(len(yours))))
	return []seedCommand{
		{ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096)), []byte{1}},
		{ioCommand(nvmetcp.IORead, 1, 2, nvmetcp.Transport(8192)), nil},
		{ioCommand(nvmetcp.IOWrite, 0, 16, nvmetcp.Transport(65536)), nil},
		{ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.Transport(4096)), nil},
		{ioCommand(nvmetcp.IOCompare, 0, 1, nvmetcp.InCapsule(4096)), nil},
		{ioCommand(nvmetcp.IOCompare, 0, 16, nvmetcp.Transport(65536)), nil},
		{ioCommand(nvmetcp.IOWriteZeroes, 0, 200, nvmetcp.Transport(0)), nil},
		{ioCommand(nvmetcp.IOFlush, 0, 0, nvmetcp.Transport(0)), nil},
		{discard, nvmetcp.Range{Blocks: 8, Start: 8}.Append(nil)},
		{register, keys}, {acquire, mine}, {release, yours},
		{nvmetcp.ReservationReport{NSID: 1, Length: 4096, Extended: true}.Command(), nil},
		{nvmetcp.DisconnectCommand(), nil},
	}
}

func adminCommands() []nvmetcp.Command {
	all := []nvmetcp.Command{
		{byte(nvmetcp.AdminKeepAlive), 1 << 6}, {byte(nvmetcp.AdminAbort), 1 << 6},
		nvmetcp.FeatureAccess{ID: nvmetcp.FeatureHostBehavior, Length: 512}.SetCommand(),
		nvmetcp.FeatureAccess{ID: nvmetcp.FeatureReservationMask, Value: 1}.SetCommand(),
		nvmetcp.FeatureAccess{ID: nvmetcp.FeatureQueues, Value: 3<<16 | 3}.SetCommand(),
		nvmetcp.PropertyGetCommand(nvmetcp.PropertyCAP), nvmetcp.PropertySetCommand(nvmetcp.PropertyCC, 0),
		nvmetcp.PropertySetCommand(nvmetcp.PropertyCC, 0x464001),
	}
	for _, commit := range []bool{false, true} {
		all = append(all, nvmetcp.Checkpoint{NSID: 1, Token: 5, Commit: commit}.Command())
	}
	all = append(all, nvmetcp.GetLBAStatus{NSID: 1, Action: nvmetcp.LBAAllocated, Length: 64}.Command(),
		nvmetcp.GetDifferences{NSID: 1, Since: block.UUID{1}, Length: 64}.Command())
	all = append(all, nvmetcp.GetLog{ID: nvmetcp.LogWritten, NSID: 1, Length: 64}.Command())
	for cns := range nvmetcp.CNSCommandSets + 1 {
		all = append(all, nvmetcp.Identify{CNS: cns, NSID: 1}.Command())
	}
	for id := range nvmetcp.LogReservations + 1 {
		if id <= nvmetcp.LogANA || id >= nvmetcp.LogDiscovery {
			all = append(all, nvmetcp.GetLog{ID: id, NSID: nvmetcp.AllNamespaces, Length: 64}.Command())
		}
	}
	for id := range nvmetcp.FeatureWriteProtect + 1 {
		if id <= nvmetcp.FeatureHostBehavior || id >= nvmetcp.FeatureHostID {
			all = append(all, nvmetcp.FeatureAccess{ID: id, NSID: 1, Select: nvmetcp.FeatureSelect(id % 4)}.GetCommand())
		}
	}
	return all
}

// play runs a script against a fresh target.
func play(t *testing.T, script []byte) {
	defer time.AfterFunc(2*patience, func() { panic("the script hangs") }).Stop()
	l := newMemoryListener()
	target, err := New(Config{MemoryPerConnection: 2 * block.MiB, HandshakeTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	sub, _ := target.AddSubsystem(SubsystemConfig{NQN: testNQN, Hosts: []Host{{NQN: hostA.NQN}}})
	if err := sub.AddNamespace(NamespaceConfig{NSID: 1, Device: limited{ramdisk.New(1<<20, 4096)}}); err != nil {
		t.Fatal(err)
	}
	proven, _ := target.AddSubsystem(SubsystemConfig{NQN: provenNQN, Hosts: []Host{{NQN: hostA.NQN, HostKey: fuzzKey, Groups: []dhchap.Group{dhchap.Null}}}})
	port, err := target.Serve(l, PortConfig{ID: 1, Link: []*Subsystem{sub, proven}})
	if err != nil {
		t.Fatal(err)
	}
	var conns [4]*scriptConn
	for s := (&cursor{script}); len(s.b) > 0; {
		b := s.byte()
		i := b & 3
		if conns[i] == nil {
			conns[i] = l.dial()
		}
		if b>>2%steps == stepHost {
			operate(sub, port, s.byte())
		} else {
			conns[i].play(b>>2%steps, s)
		}
		settle(target)
		checkMemory(t, target)
	}
	for _, c := range conns {
		if c != nil {
			c.end(t)
		}
	}
	c := l.dial()
	c.greet(0)
	c.connect(0, 31, 0)
	c.await([]byte{byte(nvmetcp.TypeCapsuleResp), 0, 24, 0})
	c.end(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := target.Close(ctx); err != nil {
		t.Error(err)
	}
}

// operate is what an operator does meanwhile. It may fail if it was done before.
func operate(sub *Subsystem, port *Port, what byte) {
	switch what % 5 {
	case 0:
		sub.ResizeNamespace(1)
	case 1:
		sub.AddNamespace(NamespaceConfig{NSID: 2, Device: ramdisk.New(1<<20, 512)})
	case 2:
		port.SetANA(1, nvmetcp.ANAStateNonOptimized+nvmetcp.ANAState(what>>3%2))
	case 3:
		sub.RemoveNamespace(context.Background(), 2)
	case 4:
		sub.SetANAGroup(1, 1+uint32(what>>3))
	}
}

// limited is a device that needs IOs in parts.
type limited struct{ block.Device }

func (l limited) Geometry() block.Geometry {
	g := l.Device.Geometry()
	g.MaxIO = 16 * block.KiB
	return g
}

// settle waits until the target has sent everything, so that a script always has the same
// result.
func settle(target *Target) {
	for !settled(target) {
		runtime.Gosched()
	}
}

func settled(target *Target) bool {
	target.limiter.mu.Lock()
	defer target.limiter.mu.Unlock()
	for c := range target.limiter.open {
		c.mu.Lock()
		busy := c.sending || len(c.out) > 0
		c.mu.Unlock()
		if busy {
			return false
		}
	}
	return true
}

var fuzzKey, _ = dhchap.Generate(dhchap.SHA256, nil)

func checkMemory(t *testing.T, target *Target) {
	target.limiter.mu.Lock()
	defer target.limiter.mu.Unlock()
	for c := range target.limiter.open {
		c.mu.Lock()
		if c.asked.held < 0 || c.asked.held > target.memoryLimit || len(c.requests) > c.limit {
			t.Errorf("a connection holds %d bytes and %d requests", c.asked.held, len(c.requests))
		}
		c.mu.Unlock()
	}
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// Random connections of random hosts take, wait and give. At no time do they hold more than the
// budget and what each host has in any case, and nobody waits for ever.
func TestABudgetIsKeptAndServesEveryone(t *testing.T) {
	const most, least, hosts = 1000, 100, 4
	for seed := range uint64(20) {
		b := newBudget(most, least)
		var all sync.WaitGroup
		for i := range 12 {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			a := b.open(block.NQN(fmt.Sprint(i % hosts)))
			all.Go(func() {
				defer a.close()
				for range 200 {
					n := 1 + random.IntN(least)
					switch {
					case a.take(n):
					case random.IntN(4) == 0:
						a.cancel(a.await(n, func() {}))
						continue
					default:
						given := make(chan struct{})
						a.await(n, func() { close(given) })
						<-given
					}
					b.mu.Lock()
					if b.held > most+hosts*least || a.held > max(most/2, least) {
						t.Errorf("seed %d: %d bytes are held, of them %d of one host", seed, b.held, a.held)
					}
					b.mu.Unlock()
					a.give(n)
				}
			})
		}
		all.Wait()
		if b.held != 0 || len(b.of) != 0 || len(b.waiting) != 0 {
			t.Errorf("seed %d: in the end %d bytes are held, by %d hosts", seed, b.held, len(b.of))
		}
	}
}

// The hosts take turns: one with many connections that wait does not keep another one waiting.
func TestHostsTakeTurns(t *testing.T) {
	b := newBudget(100, 10)
	hog, other, full := b.open("hog"), b.open("other"), b.open("full")
	third := b.open("third")
	for a, n := range map[*account]int{hog: 10, other: 10, full: 50, third: 30} {
		if !a.take(n) {
			t.Fatalf("%s has no room for %d", a.host, n)
		}
	}
	order := make(chan string, 10)
	for range 5 {
		hog.await(10, func() { order <- "hog" })
	}
	other.await(10, func() { order <- "other" })
	full.give(10)
	if first := <-order; first != "hog" {
		t.Errorf("%s was served, though hog waited first", first)
	}
	third.give(10)
	if second := <-order; second != "other" {
		t.Errorf("%s was served again, and the other host waits", second)
	}
}

// small is a target with room for 8 MiB, and 2 MiB for each host.
func small(c *Config, _ *SubsystemConfig) {
	c.MDTS, c.MemoryPerConnection, c.Memory = block.MiB, 2*block.MiB, 8*block.MiB
}

// hoard begins n commands on each of some new I/O connections of a host, and takes no answer.
func (w *world) hoard(h block.Host, conns, n int, begin func(p *peer)) (all []*peer) {
	w.t.Helper()
	cntlid := w.admin(h).cntlid()
	for i := range conns {
		p := w.queue(h, cntlid, uint16(i+1))
		for range n {
			begin(p)
		}
		p.w.Flush()
		all = append(all, p)
	}
	return all
}

// A host that begins large commands on many connections and ends none of them holds its share, not
// the target's memory. Another host goes on, and in the end nobody waits.
func TestAHostThatHoardsHoldsItsShareOnly(t *testing.T) {
	for what, begin := range map[string]func(p *peer){
		"reads that are not taken": func(p *peer) {
			cmd := ioCommand(nvmetcp.IORead, 0, 256, nvmetcp.Transport(1<<20))
			p.send(&cmd, nil)
		},
		"writes whose data does not come": func(p *peer) {
			cmd := ioCommand(nvmetcp.IOWrite, 0, 256, nvmetcp.Transport(1<<20))
			p.send(&cmd, nil)
		},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, small)
			other := w.attach(hostB)
			hoard := w.hoard(hostA, 12, 24, begin)
			share := w.target.data.mostOf
			soon(t, "the host has its share", func() bool { return w.target.data.heldBy(hostA.NQN) > share-(1<<20) })
			for i := range 20 {
				data := pattern(1<<20, byte(i))
				other.io.must(other.io.write(0, data))
				other.io.must(other.io.read(0, data))
				if held := w.target.data.heldBy(hostA.NQN); held > share {
					t.Fatalf("the host holds %d bytes, its share is %d", held, share)
				}
			}
			for _, p := range hoard {
				p.conn.Close()
			}
			soon(t, "everything is given back", func() bool { return w.target.data.heldBy(hostA.NQN) == 0 })
			again := w.attach(hostA)
			again.io.must(again.io.read(0, make([]byte, 1<<20)))
		})
	}
}

// heldBy is what a host holds of a budget.
func (b *budget) heldBy(host block.NQN) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a := b.of[host]; a != nil {
		return a.held
	}
	return 0
}

// Many small writes, with their data in the capsules, wait in a drive that hangs. Together they hold
// no more than their budget, and another host's writes to a drive that works go on. When the drive
// works again, all are done.
func TestWritesToADriveThatHangsHoldTheirBudgetOnly(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow, small, func(c *Config, _ *SubsystemConfig) { c.Memory = 8 * block.MiB })
	t.Cleanup(slow.release)
	if err := w.sub.AddNamespace(NamespaceConfig{NSID: 2, UUID: block.UUID{4, 5, 6}, Device: ramdisk.New(devSize, 4096)}); err != nil {
		t.Fatal(err)
	}
	other := w.attach(hostB)
	slow.hold(writes)
	const conns, each = 8, 30
	data := pattern(16<<10, 1)
	hoard := w.hoard(hostA, conns, each, func(p *peer) {
		cmd := ioCommand(nvmetcp.IOWrite, 0, 4, nvmetcp.InCapsule(16<<10))
		p.send(&cmd, data)
	})
	share := w.target.capsules.mostOf
	soon(t, "the host has its share", func() bool { return w.target.capsules.heldBy(hostA.NQN) > share-(16<<10) })
	for range 20 {
		cmd := ioCommand(nvmetcp.IOWrite, 0, 4, nvmetcp.InCapsule(16<<10))
		cmd.SetNSID(2)
		other.io.must(other.io.do(cmd, data, nil))
		if held := w.target.capsules.heldBy(hostA.NQN); held > share {
			t.Fatalf("the host holds %d bytes, its share is %d", held, share)
		}
	}
	slow.release()
	for _, p := range hoard {
		for range each {
			if pdu := p.next(); pdu.Type != nvmetcp.TypeCapsuleResp || pdu.Completion().Status() != nvmetcp.Success {
				t.Fatalf("a write ends with %v", pdu.Type)
			}
		}
	}
	soon(t, "everything is given back", func() bool { return w.target.capsules.heldBy(hostA.NQN) == 0 })
}

// A connection that is closed while its commands are in a drive that hangs still counts: a host that
// comes again and again piles nothing up.
func TestMemoryInADriveCountsUntilItIsBack(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow, small)
	t.Cleanup(slow.release)
	slow.hold(writes)
	data := pattern(16<<10, 1)
	for _, p := range w.hoard(hostA, 1, 30, func(p *peer) {
		cmd := ioCommand(nvmetcp.IOWrite, 0, 4, nvmetcp.InCapsule(16<<10))
		p.send(&cmd, data)
	}) {
		slow.waitHeld(30)
		p.conn.Close()
	}
	soon(t, "the queue is gone", func() bool { all := w.sub.Controllers(); return len(all) == 1 && all[0].Queues == 0 })
	if held, want := w.target.capsules.heldBy(hostA.NQN), 30*(16<<10)-freeOfHost; held != want {
		t.Errorf("%d bytes are held for commands in the drive, want %d", held, want)
	}
	slow.release()
	soon(t, "everything is given back", func() bool { return w.target.capsules.heldBy(hostA.NQN) == 0 })
}

// Anybody may ask for discovery's log, and not take it. All who do so share little memory.
func TestStrangersHoldLittleTogether(t *testing.T) {
	w := newWorld(t, small, func(c *Config, _ *SubsystemConfig) { c.MDTS = 256 * block.KiB })
	var all []*peer
	for i := range 40 {
		p := w.dial()
		p.greet()
		anybody := block.Host{NQN: block.NQN(fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:%d", i)), ID: block.UUID{byte(i + 1)}}
		p.must(p.connect(anybody, nvmetcp.DiscoveryNQN, 0, nvmetcp.DynamicController))
		p.enable()
		all = append(all, p)
	}
	for _, p := range all {
		for range 20 {
			cmd := nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: 256 << 10}.Command()
			cmd.SetSGL(nvmetcp.Transport(256 << 10))
			p.send(&cmd, nil)
		}
		p.w.Flush()
	}
	h := w.attach(hostA)
	h.io.must(h.io.write(0, pattern(1<<18, 1)))
	if held, most := w.target.data.heldBy(strangers), w.target.data.least; held > most {
		t.Errorf("strangers hold %d bytes, at most %d allowed", held, most)
	}
}

// A host that asks to write and does not send the data holds memory only for a limited time.
func TestAHostThatOwesDataIsCutOff(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.StallTimeout = 4 * moment })
	h := w.attach(hostA)
	cmd := ioCommand(nvmetcp.IOWrite, 0, 16, nvmetcp.Transport(65536))
	h.io.send(&cmd, nil)
	if r2t := h.io.next(); r2t.Type != nvmetcp.TypeR2T {
		t.Fatalf("received %v", r2t.Type)
	}
	other := w.attach(hostB)
	other.io.must(other.io.write(0, pattern(65536, 1)))
	h.io.ended()
	other.io.must(other.io.flush())
}

func TestAHostHasItsShareOfConnections(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MaxConnectionsPerHost = 3 })
	h := w.attach(hostA)
	w.queue(hostA, h.id, 2)
	p := w.dial()
	p.greet()
	p.want(p.connect(hostA, testNQN, 3, h.id), nvmetcp.ConnectControllerBusy)
	w.attach(hostB)
	h.io.conn.Close()
	soon(t, "another connection is let in", func() bool {
		p := w.dial()
		p.greet()
		return p.connect(hostA, testNQN, 3, h.id) == nvmetcp.Success
	})
}

// A stranger who knows the names of a host and its controller, and not the key, gets neither the
// memory nor the many commands of a queue, and does not keep the controller alive.
func TestWhoHasNotProvenAnythingHoldsLittle(t *testing.T) {
	w, hostKey, _ := keyed(t)
	admin := w.unproven()
	id := nvmetcp.ParseConnectResult(admin.last.Result()).ControllerID
	if err := admin.authenticate(hostA, hostKey, dhchap.Key{}); err != nil {
		t.Fatal(err)
	}
	admin.enable()
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, testNQN, 2, id))
	at := w.connOf(admin).bound.Load().ctrl
	at.alive.Store(false)
	p.want(p.flush(), nvmetcp.AuthenticationRequired)
	if at.alive.Load() {
		t.Error("who has proven nothing counts as the host's sign of life")
	}
	for range 2 * handshakeSlots {
		cmd := nvmetcp.AuthCommand{Protocol: nvmetcp.AuthProtocol, SPSP0: 1, SPSP1: 1, Length: maxAuthMessage}.Command(false)
		p.send(&cmd, nil)
	}
	p.w.Flush()
	if term := p.ended(); term == nil || term.FES != nvmetcp.FESSequence {
		t.Errorf("reason %+v, want a sequence error", term)
	}
}

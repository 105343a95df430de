// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// bearable is the longest that an IO may take while another host misbehaves. Undisturbed it
// takes less than a millisecond; the rest is for busy machines.
const bearable = 3 * time.Second

// neighbour is a host that works while another one misbehaves.
type neighbour struct {
	w       *world
	host    *host
	ios     atomic.Int64
	slowest atomic.Int64
	most    int // most bytes that the target's connections held
	stop    chan struct{}
	done    chan struct{}
}

// beside starts a host that writes, reads and reconnects all the time.
func (w *world) beside() *neighbour {
	n := &neighbour{w: w, host: w.attach(hostB), stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(n.done)
		got := make([]byte, 4096)
		for i := 0; ; i++ {
			select {
			case <-n.stop:
				return
			default:
			}
			if i%100 == 99 {
				n.host.io.conn.Close()
				n.host.admin.conn.Close()
				n.within(func() { n.host = w.attach(hostB) })
			}
			want := pattern(4096, byte(i))
			n.within(func() { n.host.io.must(n.host.io.write(uint64(i%8), want)) })
			n.within(func() { n.host.io.must(n.host.io.read(uint64(i%8), got)) })
			if !bytes.Equal(got, want) {
				w.t.Error("the neighbor read other data than it wrote")
			}
			n.most = max(n.most, w.held())
		}
	}()
	return n
}

func (n *neighbour) within(do func()) {
	from := time.Now()
	do()
	n.ios.Add(1)
	n.slowest.Store(max(n.slowest.Load(), int64(time.Since(from))))
}

// held is the memory that the target holds for data of commands.
func (w *world) held() (sum int) {
	w.target.limiter.mu.Lock()
	defer w.target.limiter.mu.Unlock()
	for c := range w.target.limiter.open {
		c.mu.Lock()
		sum += c.asked.held + c.capsules.held
		c.mu.Unlock()
	}
	return sum
}

// unharmed ends the neighbour after the given number of IOs. It fails the test if one of
// them took too long, or if the target held more than most bytes of data.
func (n *neighbour) unharmed(ios int64, most block.Size) {
	n.w.t.Helper()
	soon(n.w.t, "the neighbour's IO", func() bool { return n.ios.Load() >= ios || n.ended() })
	close(n.stop)
	<-n.done
	n.host.io.conn.Close()
	n.host.admin.conn.Close()
	if d := time.Duration(n.slowest.Load()); d > bearable {
		n.w.t.Errorf("an IO of the neighbor took %v", d)
	}
	if n.most > int(most) {
		n.w.t.Errorf("the target held %d bytes for data", n.most)
	}
}

func (n *neighbour) ended() bool {
	select {
	case <-n.done:
		return true
	default:
		return false
	}
}

// from dials as if from another machine.
func (w *world) from(address string) net.Conn {
	w.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	c, err := d.Dial("tcp", w.port.Addr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	return c
}

func TestSlowSendersHarmNobodyElse(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) {
		c.HandshakeTimeout, c.StallTimeout, c.MemoryPerConnection = 8*moment, 4*moment, 2*block.MiB
	})
	n := w.beside()
	var slow []net.Conn
	for range 50 {
		slow = append(slow, w.from("127.0.0.2")) // never completes its ICReq
	}
	for range 4 { // never sends all of the data that the target asked for
		h := w.attach(hostA)
		for range 2 {
			h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 256, nvmetcp.Transport(1<<20)), nil)
		}
		r2t := h.io.next().Data()
		b := nvmetcp.Header{Type: nvmetcp.TypeH2CData, Flags: nvmetcp.FlagLastPDU, HLen: 24, PDO: 24, PLen: 24 + 1<<20}.Append(nil)
		h.io.raw(nvmetcp.DataHeader{CID: r2t.CID, TTAG: r2t.TTAG, Length: 1 << 20}.Append(b))
		slow = append(slow, h.io.conn)
	}
	tick := time.NewTicker(moment / 4)
	defer tick.Stop()
	soon(t, "all slow connections are closed", func() bool {
		<-tick.C
		left := slow[:0]
		for _, c := range slow {
			if _, err := c.Write([]byte{0}); err == nil {
				left = append(left, c)
			}
		}
		slow = left
		return len(slow) == 0
	})
	n.unharmed(200, 5*2*block.MiB)
}

func TestAFloodHarmsNobodyElse(t *testing.T) {
	const strangers = 32
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MaxHandshakes, c.MaxConnectionsPerAddress = strangers, 64 })
	n := w.beside()
	before := runtime.NumGoroutine()
	most, connections := 0, 0
	for i := range 400 {
		c := w.from("127.0.0.2")
		if i%2 == 0 {
			c.Write(nvmetcp.ICReq{MaxR2T: 1}.Append(nil))
		}
		most, connections = max(most, runtime.NumGoroutine()-before), max(connections, w.connections())
	}
	// Connections that are being closed count too: an address has 64. The neighbour has
	// two, and two more while it reconnects.
	if connections > 64+4 || most > 4*strangers {
		t.Errorf("the target has %d connections and %d goroutines in a flood limited to %d", connections, most, strangers)
	}
	n.unharmed(500, 2*block.MiB)
}

func TestLyingLengthsHarmNobodyElse(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MemoryPerConnection = 2 * block.MiB })
	n := w.beside()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 50 {
		for _, b := range [][]byte{
			head(nvmetcp.TypeICReq, 0, 128, 0, 0xffffffff, 120),
			append(nvmetcp.ICReq{MaxR2T: 1}.Append(nil), head(nvmetcp.TypeCapsuleCmd, 0, 72, 72, 0xffffffff, 64)...),
			append(nvmetcp.ICReq{MaxR2T: 1}.Append(nil), head(nvmetcp.TypeH2CData, 0, 24, 24, 0xfffffff0, 16)...),
			append(nvmetcp.ICReq{MaxR2T: 1}.Append(nil), head(nvmetcp.TypeH2CTermReq, 0, 24, 0, 0x7fffffff, 16)...),
		} {
			c := w.from("127.0.0.2")
			c.Write(b)
			c.Close()
		}
	}
	h := w.attach(hostA)
	for range 30 { // a transfer of 4 GiB, in the command's words
		cmd := ioCommand(nvmetcp.IOWrite, 0, 512, nvmetcp.Transport(0xffffffff))
		h.io.want(h.io.do(cmd, nil, nil), nvmetcp.InvalidField) // beyond MDTS
		cmd = ioCommand(nvmetcp.IORead, 0, 1, nvmetcp.Transport(0xffffffff))
		h.io.want(h.io.do(cmd, nil, nil), nvmetcp.InvalidSGLLength)
	}
	n.unharmed(500, 4*block.MiB)
	soon(t, "the liars are forgotten", func() bool { return w.connections() <= 4 })
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 32<<20 {
		t.Errorf("the heap has grown by %d bytes", grown)
	}
}

// TestStreamsThatEndAnywhereHarmNobodyElse ends an admin queue's connection after each of
// its bytes, and an IO queue's, which is mostly data, after many of them.
func TestStreamsThatEndAnywhereHarmNobodyElse(t *testing.T) {
	w := newWorld(t)
	before := runtime.NumGoroutine()
	n := w.beside()
	cut := func(stream []byte, step int) {
		if raceDetector {
			step *= 7
		}
		for i := 0; i < len(stream); i += step {
			c := w.from("127.0.0.2")
			c.Write(stream[:i])
			c.Close()
		}
	}
	cut(adminScript(w.sub), 1)
	h := w.admin(hostA)
	cut(queueScript(h.id), 17)
	n.unharmed(500, 2*block.MiB)
	h.conn.Close()
	soon(t, "the connections are gone", func() bool { return w.connections() == 0 && len(w.sub.Controllers()) == 0 })
	soon(t, "the goroutines are gone", func() bool { return runtime.NumGoroutine() <= before+1 })
}

// queueScript is what a host sends on an IO queue: writes in the capsule and by R2T,
// without waiting for them, and a read.
func queueScript(id uint16) []byte {
	w := newScript()
	d := nvmetcp.ConnectData{HostID: hostA.ID, ControllerID: id, Subsystem: testNQN, Host: hostA.NQN}
	w.send(nvmetcp.Connect{QueueID: 1, QueueSize: 32}.Command(), d.Append(nil))
	w.send(ioCommand(nvmetcp.IOWrite, 64, 1, nvmetcp.InCapsule(4096)), pattern(4096, 1))
	w.send(ioCommand(nvmetcp.IORead, 64, 1, nvmetcp.Transport(4096)), nil)
	w.send(ioCommand(nvmetcp.IOWrite, 64, 2, nvmetcp.Transport(8192)), nil)
	w.w.Data(nvmetcp.TypeH2CData, nvmetcp.FlagLastPDU, nvmetcp.DataHeader{CID: w.cid}, pattern(8192, 1))
	return w.bytes()
}

func TestAHostThatTakesNothingHarmsNobodyElse(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.StallTimeout, c.MemoryPerConnection = 4*moment, 2*block.MiB })
	n := w.beside()
	for range 4 {
		h := w.attach(hostA)
		for range 30 {
			h.io.send(new(ioCommand(nvmetcp.IORead, 0, 256, nvmetcp.Transport(1<<20))), nil)
		}
		h.io.w.Flush()
	}
	soon(t, "they are disconnected", func() bool {
		for _, c := range w.sub.Controllers() {
			if c.Host.NQN == hostA.NQN && c.Queues > 0 {
				return false
			}
		}
		return true
	})
	n.unharmed(200, 5*2*block.MiB)
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// head makes a PDU's common header.
func head(kind nvmetcp.Type, flags, hlen, pdo uint8, plen uint32, rest int) []byte {
	b := nvmetcp.Header{Type: kind, Flags: flags, HLen: hlen, PDO: pdo, PLen: plen}.Append(nil)
	return append(b, make([]byte, rest)...)
}

// TestABrokenPDUIsAnsweredWithTheReason tries the errors that a peer can make, and checks
// after each that another host is still served.
func TestABrokenPDUIsAnsweredWithTheReason(t *testing.T) {
	w := newWorld(t)
	other := w.attach(hostB)
	for _, c := range []struct {
		name   string
		greet  bool
		bytes  []byte
		reason nvmetcp.FES
	}{
		{"a type that there is not", true, head(0x42, 0, 24, 0, 24, 16), nvmetcp.FESInvalidHeader},
		{"a PDU for the host", true, head(nvmetcp.TypeC2HData, 0, 24, 24, 28, 20), nvmetcp.FESInvalidHeader},
		{"a wrong header length", true, head(nvmetcp.TypeCapsuleCmd, 0, 73, 0, 73, 64), nvmetcp.FESInvalidHeader},
		{"a length below the header's", true, head(nvmetcp.TypeCapsuleCmd, 0, 72, 0, 8, 64), nvmetcp.FESInvalidHeader},
		{"a capsule of 4 GiB", true, head(nvmetcp.TypeCapsuleCmd, 0, 72, 72, 0xffffffff, 64), nvmetcp.FESLimitExceeded},
		{"data of 4 GiB", true, head(nvmetcp.TypeH2CData, 0, 24, 24, 0xfffffff0, 16), nvmetcp.FESLimitExceeded},
		{"data behind the end", true, head(nvmetcp.TypeCapsuleCmd, 0, 72, 200, 80, 64), nvmetcp.FESInvalidHeader},
		{"data for no transfer", true, head(nvmetcp.TypeH2CData, 4, 24, 24, 28, 20), nvmetcp.FESInvalidHeader},
		{"a command before ICReq", false, head(nvmetcp.TypeCapsuleCmd, 0, 72, 0, 72, 64), nvmetcp.FESSequence},
		{"a second ICReq", true, nvmetcp.ICReq{MaxR2T: 1}.Append(nil), nvmetcp.FESSequence},
		{"ICReq of another format", false, nvmetcp.ICReq{PFV: 7, MaxR2T: 1}.Append(nil), nvmetcp.FESUnsupportedParameter},
		{"ICReq of another length", false, head(nvmetcp.TypeICReq, 0, 128, 0, 0x10000000, 120), nvmetcp.FESInvalidHeader},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := w.dial()
			if c.greet {
				p.greet()
			}
			b := c.bytes
			if c.name == "data for no transfer" {
				binary.LittleEndian.PutUint16(b[10:], 999)
				binary.LittleEndian.PutUint32(b[16:], 4)
			}
			p.raw(b)
			switch term := p.ended(); {
			case term == nil:
				t.Error("the connection ended without a reason")
			case term.FES != c.reason:
				t.Errorf("reason %v, want %v", term.FES, c.reason)
			}
			other.io.must(other.io.flush())
		})
	}
}

// Who looks for other services at the port gets nothing.
func TestAnotherProtocolGetsNoAnswer(t *testing.T) {
	w := newWorld(t)
	for _, first := range []string{"GET /metrics HTTP/1.1\r\nHost: target\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", strings.Repeat("\xff", 200)} {
		p := w.dial()
		p.raw([]byte(first))
		if got, err := io.ReadAll(p.conn); len(got) > 0 {
			t.Errorf("%q is answered with %q, %v", first, got, err)
		}
	}
}

// TestDataThatWasNotAskedForIsAnsweredWithTheReason sends H2CData that does not match its
// R2T.
func TestDataThatWasNotAskedForIsAnsweredWithTheReason(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		name   string
		lie    func(d *nvmetcp.DataHeader, n *int, flags *uint8)
		reason nvmetcp.FES
	}{
		{"behind its end", func(d *nvmetcp.DataHeader, n *int, _ *uint8) { *n += 4096 }, nvmetcp.FESOutOfRange},
		{"at another offset", func(d *nvmetcp.DataHeader, n *int, _ *uint8) { d.Offset, *n = 4096, 4096 }, nvmetcp.FESOutOfRange},
		{"of another command", func(d *nvmetcp.DataHeader, _ *int, _ *uint8) { d.CID++ }, nvmetcp.FESInvalidHeader},
		{"of another transfer", func(d *nvmetcp.DataHeader, _ *int, _ *uint8) { d.TTAG++ }, nvmetcp.FESInvalidHeader},
		{"that ends too early", func(d *nvmetcp.DataHeader, n *int, _ *uint8) { *n = 4096 }, nvmetcp.FESInvalidHeader},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := w.attach(hostA)
			cid := h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 16, nvmetcp.Transport(65536)), nil)
			r2t := h.io.next().Data()
			d, n, flags := nvmetcp.DataHeader{CID: cid, TTAG: r2t.TTAG}, 65536, nvmetcp.FlagLastPDU
			c.lie(&d, &n, &flags)
			h.io.w.Data(nvmetcp.TypeH2CData, flags, d, make([]byte, n))
			h.io.w.Flush()
			if term := h.io.ended(); term == nil || term.FES != c.reason {
				t.Errorf("reason %+v, want %v", term, c.reason)
			}
		})
	}
}

func TestAHeaderThatChangedOnTheWayEndsTheConnection(t *testing.T) {
	w := newWorld(t)
	p := w.dial()
	p.ic.HeaderDigest = true
	p.greet()
	cmd := nvmetcp.PropertyGetCommand(nvmetcp.PropertyCAP)
	b := nvmetcp.Header{Type: nvmetcp.TypeCapsuleCmd, Flags: nvmetcp.FlagHeaderDigest, HLen: 72, PLen: 76}.Append(nil)
	b = append(b, cmd[:]...)
	b = binary.LittleEndian.AppendUint32(b, nvmetcp.Digest(b)^1)
	p.raw(b)
	if term := p.ended(); term == nil || term.FES != nvmetcp.FESHeaderDigest {
		t.Errorf("reason %+v, want a header digest error", term)
	}
}

// TestDataThatChangedOnTheWayIsNotWritten covers data in the capsule and in data PDUs. The
// connection continues (TCP, 3.3.1.1).
func TestDataThatChangedOnTheWayIsNotWritten(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow)
	h := w.attach(hostA, func(p *peer) { p.ic.DataDigest = true })
	broken := &flipper{Conn: h.io.conn}
	h.io.w = nvmetcp.NewWriter(broken, nvmetcp.WriterConfig{DataDigest: true})

	broken.at = 72 + 10
	h.io.want(h.io.write(0, pattern(4096, 1)), nvmetcp.TransientTransportError)

	cid := h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 16, nvmetcp.Transport(65536)), nil)
	r2t := h.io.next().Data()
	broken.at = 24 + 10
	h.io.w.Data(nvmetcp.TypeH2CData, nvmetcp.FlagLastPDU, nvmetcp.DataHeader{CID: cid, TTAG: r2t.TTAG}, pattern(65536, 1))
	h.io.want(h.io.serve(cid, nil, nil), nvmetcp.TransientTransportError)

	if n := slow.writesLanded(); n != 0 {
		t.Errorf("%d broken writes landed", n)
	}
	h.io.must(h.io.write(0, pattern(4096, 1)))
}

// flipper changes one byte of what is written, once.
type flipper struct {
	net.Conn
	at int
}

func (f *flipper) Write(b []byte) (int, error) {
	if n := len(b); f.at >= n {
		f.at -= n
	} else if f.at > 0 {
		b = append([]byte(nil), b...)
		b[f.at] ^= 1
		f.at = 0
	}
	return f.Conn.Write(b)
}

func TestMoreCommandsThanTheQueueHasEntriesEndTheConnection(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow)
	t.Cleanup(slow.release)
	h := w.attach(hostA)
	slow.hold(func(*block.IO) bool { return true })
	for range 100 {
		cmd := ioCommand(nvmetcp.IOFlush, 0, 0, nvmetcp.Transport(0))
		h.io.send(&cmd, nil)
	}
	h.io.w.Flush()
	if term := h.io.ended(); term == nil || term.FES != nvmetcp.FESSequence {
		t.Errorf("reason %+v, want a sequence error", term)
	}
	slow.release()
}

// TestAConnectionThatSaysNothingIsClosed falls silent at each point of the handshake.
func TestAConnectionThatSaysNothingIsClosed(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.HandshakeTimeout = moment })
	silent := w.dial()
	silent.ended()
	half := w.dial()
	half.raw(nvmetcp.ICReq{MaxR2T: 1}.Append(nil)[:100])
	half.ended()
	greeted := w.dial()
	greeted.greet()
	greeted.ended()
	soon(t, "the connections are forgotten", func() bool { return w.connections() == 0 })
}

func TestAConnectionThatHasConnectedMayBeSilent(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.HandshakeTimeout, c.StallTimeout = 4*moment, moment })
	h := w.attach(hostA)
	time.Sleep(8 * moment)
	h.io.must(h.io.flush())
	h.admin.must(h.admin.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyVS), nil, nil))
}

// TestATrickleIsCutOff: a PDU that arrives byte by byte holds memory only for a limited
// time, however alive the connection looks.
func TestATrickleIsCutOff(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.StallTimeout = 4 * moment })
	h := w.attach(hostA)
	cmd := ioCommand(nvmetcp.IOFlush, 0, 0, nvmetcp.Transport(0))
	b := nvmetcp.Header{Type: nvmetcp.TypeCapsuleCmd, HLen: 72, PLen: 72}.Append(nil)
	b = append(b, cmd[:]...)
	for _, one := range b[:70] {
		if _, err := h.io.conn.Write([]byte{one}); err != nil {
			return // disconnected while it trickled
		}
		time.Sleep(moment / 8)
	}
	h.io.ended()
}

// TestAHostThatTakesNothingIsCutOff also checks that it holds limited memory until then.
func TestAHostThatTakesNothingIsCutOff(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.StallTimeout = 2 * moment })
	h := w.attach(hostA)
	other := w.attach(hostB)
	for range 30 {
		cmd := ioCommand(nvmetcp.IORead, 0, 256, nvmetcp.Transport(1<<20))
		h.io.send(&cmd, nil)
	}
	h.io.w.Flush()
	soon(t, "the connection is closed", func() bool { return len(w.sub.Controllers()) == 2 && w.sub.Controllers()[0].Queues == 0 })
	other.io.must(other.io.flush())
}

// TestMemoryIsBoundedAndNobodyWaitsForEver reads far more at once than a connection may
// hold.
func TestMemoryIsBoundedAndNobodyWaitsForEver(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MemoryPerConnection = 2 * block.MiB })
	h := w.attach(hostA)
	c := w.connOf(h.io)
	cids := map[uint16]bool{}
	for range 30 {
		cmd := ioCommand(nvmetcp.IORead, 0, 256, nvmetcp.Transport(1<<20))
		h.io.send(&cmd, nil)
		cids[h.io.cid] = true
	}
	buf := make([]byte, 1<<20)
	for len(cids) > 0 {
		pdu := h.io.next()
		delete(cids, pdu.Data().CID)
		if err := h.io.r.ReadData(buf); err != nil {
			t.Fatal(err)
		}
		c.mu.Lock()
		if c.asked.held > 2<<20 {
			t.Errorf("the connection holds %d bytes, at most %d allowed", c.asked.held, 2<<20)
		}
		c.mu.Unlock()
	}
	h.io.must(h.io.write(0, pattern(1<<20, 1)))
}

// connOf finds the target's end of a connection.
func (w *world) connOf(p *peer) *conn {
	l := w.target.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		if c.sock.RemoteAddr().String() == p.conn.LocalAddr().String() {
			return c
		}
	}
	w.t.Fatal("the target has no such connection")
	return nil
}

func (w *world) connections() int {
	w.target.limiter.mu.Lock()
	defer w.target.limiter.mu.Unlock()
	return len(w.target.limiter.open)
}

// TestAFloodOfConnectionsPushesItselfOut: during a flood, hosts that complete their
// handshake get in, and connected hosts are served.
func TestAFloodOfConnectionsPushesItselfOut(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MaxHandshakes = 8 })
	inside := w.attach(hostB)
	var flood []*peer
	for i := range 100 {
		flood = append(flood, w.dial())
		if i%25 == 24 {
			h := w.attach(hostA)
			h.io.must(h.io.flush())
		}
	}
	inside.io.must(inside.io.flush())
	soon(t, "the flood pushes itself out", func() bool { return w.connections() <= 8+2+8 })
	for _, p := range flood {
		p.conn.Close()
	}
}

// TestAFloodOfDiscoveryPushesItselfOut: anybody may connect to discovery under any name and
// stay. Hosts of the subsystem must get in nevertheless.
func TestAFloodOfDiscoveryPushesItselfOut(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MaxHandshakes, c.MaxConnections = 8, 24 })
	for i := range 40 {
		p := w.dial()
		p.greet()
		anybody := block.Host{NQN: block.NQN(fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:%d", i)), ID: block.UUID{byte(i)}}
		p.must(p.connect(anybody, nvmetcp.DiscoveryNQN, 0, nvmetcp.DynamicController))
	}
	h := w.attach(hostA)
	h.io.must(h.io.flush())
}

func TestAnAdminQueueHoldsLittleMemory(t *testing.T) {
	w := newWorld(t)
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, nvmetcp.DiscoveryNQN, 0, nvmetcp.DynamicController))
	p.enable()
	const pages = 30
	for range pages {
		cmd := nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: 1 << 20}.Command()
		cmd.SetSGL(nvmetcp.Transport(1 << 20))
		p.send(&cmd, nil)
	}
	for range pages {
		pdu := p.next()
		if pdu.Type != nvmetcp.TypeC2HData || pdu.DataLen != 1<<20 {
			t.Fatalf("got %v of %d bytes", pdu.Type, pdu.DataLen)
		}
		if held := w.held(); held > 1<<20 {
			t.Fatalf("%d bytes are held for discovery", held)
		}
	}
}

func TestAnAddressHasItsShareOfConnections(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MaxConnectionsPerAddress = 4 })
	for range 4 {
		w.dial().greet()
	}
	w.dial().ended()
}

func TestAHostHasItsShareOfControllers(t *testing.T) {
	w := newWorld(t, func(c *Config, _ *SubsystemConfig) { c.MaxControllersPerHost = 2 })
	w.admin(hostA)
	w.admin(hostA)
	p := w.dial()
	p.greet()
	p.want(p.connect(hostA, testNQN, 0, nvmetcp.DynamicController), nvmetcp.ConnectControllerBusy)
	w.admin(hostB)
}

// script is what a host sends, recorded in advance.
type script struct {
	w   *nvmetcp.Writer
	out buffered
	cid uint16 // of the last command
}

func newScript() *script {
	s := new(script)
	s.w = nvmetcp.NewWriter(&s.out, nvmetcp.WriterConfig{})
	s.w.Raw(nvmetcp.ICReq{MaxR2T: 1}.Append(nil))
	return s
}

func (s *script) send(c nvmetcp.Command, data []byte) {
	s.cid++
	c.SetCID(s.cid)
	s.w.Command(&c, data)
}

func (s *script) bytes() []byte {
	s.w.Flush()
	return s.out
}

// adminScript connects an admin queue and sends some requests.
func adminScript(s *Subsystem) []byte {
	w := newScript()
	d := nvmetcp.ConnectData{HostID: hostA.ID, ControllerID: nvmetcp.DynamicController, Subsystem: s.NQN(), Host: hostA.NQN}
	w.send(nvmetcp.Connect{QueueSize: 32}.Command(), d.Append(nil))
	cc := nvmetcp.Configuration{Enable: true, SubmissionEntrySize: 6, CompletionEntrySize: 4}
	w.send(nvmetcp.PropertySetCommand(nvmetcp.PropertyCC, uint64(cc.Encode())), nil)
	w.send(nvmetcp.Identify{CNS: nvmetcp.CNSController}.Command(), nil)
	w.send(nvmetcp.Identify{CNS: nvmetcp.CNSNamespace, NSID: 1}.Command(), nil)
	w.send(nvmetcp.GetLog{ID: nvmetcp.LogANA, Length: 64}.Command(), nil)
	w.send(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureAsyncEvents, Value: nvmetcp.EventNamespaces}.SetCommand(), nil)
	var aer nvmetcp.Command
	aer.SetOpcode(nvmetcp.AdminAsyncEvent)
	aer.SetSGL(nvmetcp.Transport(0))
	w.send(aer, nil)
	return w.bytes()
}

type buffered []byte

func (b *buffered) Write(p []byte) (int, error) {
	*b = append(*b, p...)
	return len(p), nil
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// patience is the longest that a test waits for an expected event.
const patience = 10 * time.Second

const (
	testNQN block.NQN = "nqn.2026-11.dev.weft:test"
	devSize           = 4 * block.MiB
)

var (
	hostA = block.Host{NQN: "nqn.2014-08.org.nvmexpress:uuid:a", ID: block.UUID{0xa}}
	hostB = block.Host{NQN: "nqn.2014-08.org.nvmexpress:uuid:b", ID: block.UUID{0xb}}
)

// world is a target with one subsystem, one namespace and one port.
type world struct {
	t      testing.TB
	target *Target
	sub    *Subsystem
	port   *Port
	device block.Device
}

func newWorld(t testing.TB, change ...func(*Config, *SubsystemConfig)) *world {
	t.Helper()
	return newWorldOn(t, ramdisk.New(devSize, 4096), change...)
}

func newWorldOn(t testing.TB, device block.Device, change ...func(*Config, *SubsystemConfig)) *world {
	t.Helper()
	cfg, sub := Config{}, SubsystemConfig{NQN: testNQN, Serial: "0123456789abcdef", Hosts: []Host{{NQN: hostA.NQN}, {NQN: hostB.NQN}}}
	for _, c := range change {
		c(&cfg, &sub)
	}
	target, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, target: target, device: device}
	t.Cleanup(w.close)
	if w.sub, err = target.AddSubsystem(sub); err != nil {
		t.Fatal(err)
	}
	if err := w.sub.AddNamespace(NamespaceConfig{NSID: 1, UUID: block.UUID{1, 2, 3}, Device: device}); err != nil {
		t.Fatal(err)
	}
	w.port = w.listen(1)
	return w
}

// listen adds a port and links it to the subsystem.
func (w *world) listen(id uint16) *Port {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	p, err := w.target.Serve(l, PortConfig{ID: id})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := p.Link(w.sub); err != nil {
		w.t.Fatal(err)
	}
	return p
}

func (w *world) close() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := w.target.Close(ctx); err != nil {
		w.t.Errorf("closing the target: %v", err)
	}
}

// peer is a host that does one thing at a time and can misbehave.
type peer struct {
	t    testing.TB
	conn net.Conn
	r    *nvmetcp.Reader
	w    *nvmetcp.Writer
	ic   nvmetcp.ICReq
	cid  uint16
	id   uint16 // of the controller
	last nvmetcp.Completion
}

// dial opens a connection and sends nothing.
func (w *world) dial() *peer {
	w.t.Helper()
	conn, err := net.Dial("tcp", w.port.Addr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	return newPeer(w.t, conn)
}

func newPeer(t testing.TB, conn net.Conn) *peer {
	conn.SetDeadline(time.Now().Add(6 * patience))
	t.Cleanup(func() { conn.Close() })
	p := &peer{t: t, conn: conn, ic: nvmetcp.ICReq{MaxR2T: 1}}
	p.r = nvmetcp.NewReader(conn, nvmetcp.ReaderConfig{Role: nvmetcp.RoleHost})
	p.w = nvmetcp.NewWriter(conn, nvmetcp.WriterConfig{})
	return p
}

// greet exchanges ICReq and ICResp.
func (p *peer) greet() nvmetcp.ICResp {
	p.t.Helper()
	p.w.Raw(p.ic.Append(nil))
	pdu := p.next()
	resp, err := nvmetcp.ParseICResp(pdu.Head)
	if err != nil {
		p.t.Fatal(err)
	}
	p.r.Configure(nvmetcp.ReaderConfig{Role: nvmetcp.RoleHost, HeaderDigest: resp.HeaderDigest, DataDigest: resp.DataDigest, MaxData: 1 << 24, Align: p.ic.HPDA})
	p.w.Configure(nvmetcp.WriterConfig{HeaderDigest: resp.HeaderDigest, DataDigest: resp.DataDigest})
	return resp
}

// next sends what is buffered and reads a PDU.
func (p *peer) next() *nvmetcp.PDU {
	p.t.Helper()
	if err := p.w.Flush(); err != nil {
		p.t.Fatal(err)
	}
	pdu, err := p.r.Next()
	if err != nil {
		p.t.Fatal(err)
	}
	return pdu
}

// do sends a command and serves it until it is done. out is sent to the controller, in the
// capsule or by R2T; in receives data.
func (p *peer) do(cmd nvmetcp.Command, out, in []byte) nvmetcp.Status {
	p.t.Helper()
	p.send(&cmd, out)
	return p.serve(cmd.CID(), out, in)
}

func (p *peer) send(cmd *nvmetcp.Command, out []byte) {
	p.cid++
	cmd.SetCID(p.cid)
	if cmd.PSDT() == 0 {
		cmd.SetSGL(nvmetcp.Transport(0))
	}
	if cmd.SGL().Kind == nvmetcp.SGLInCapsule {
		p.w.Command(cmd, out)
	} else {
		p.w.Command(cmd, nil)
	}
}

// serve answers the controller until the command is done.
func (p *peer) serve(cid uint16, out, in []byte) nvmetcp.Status {
	p.t.Helper()
	for {
		pdu := p.next()
		switch pdu.Type {
		case nvmetcp.TypeCapsuleResp:
			p.last = *pdu.Completion()
			if p.last.CID() != cid {
				p.t.Fatalf("completion of command %d, want %d", p.last.CID(), cid)
			}
			return p.last.Status()
		case nvmetcp.TypeR2T:
			d := pdu.Data()
			p.w.Data(nvmetcp.TypeH2CData, nvmetcp.FlagLastPDU, nvmetcp.DataHeader{CID: cid, TTAG: d.TTAG, Offset: d.Offset}, out[d.Offset:][:d.Length])
		case nvmetcp.TypeC2HData:
			d := pdu.Data()
			if d.CID != cid || int(d.Offset)+int(pdu.DataLen) > len(in) {
				p.t.Fatalf("data of command %d, %d bytes at %d; want command %d, at most %d", d.CID, pdu.DataLen, d.Offset, cid, len(in))
			}
			flags := pdu.Flags
			if err := p.r.ReadData(in[d.Offset:][:pdu.DataLen]); err != nil {
				p.t.Fatal(err)
			}
			if flags&nvmetcp.FlagSuccess != 0 {
				p.last = nvmetcp.Completion{}
				return nvmetcp.Success
			}
		default:
			p.t.Fatalf("received %v", pdu.Type)
		}
	}
}

// connect sends Connect for a queue.
func (p *peer) connect(host block.Host, nqn block.NQN, queue uint16, cntlid uint16, change ...func(*nvmetcp.Connect, *nvmetcp.ConnectData)) nvmetcp.Status {
	p.t.Helper()
	c := nvmetcp.Connect{QueueID: queue, QueueSize: 32}
	d := nvmetcp.ConnectData{HostID: host.ID, ControllerID: cntlid, Subsystem: nqn, Host: host.NQN}
	for _, f := range change {
		f(&c, &d)
	}
	return p.do(c.Command(), d.Append(nil), nil)
}

// must fails the test if a command failed.
func (p *peer) must(s nvmetcp.Status) {
	p.t.Helper()
	if s != nvmetcp.Success {
		p.t.Fatalf("status is %v", s)
	}
}

// want fails the test unless a command ended with want's code.
func (p *peer) want(s, want nvmetcp.Status) {
	p.t.Helper()
	if s.Code() != want {
		p.t.Errorf("status is %v, want %v", s, want)
	}
}

// host is a connected controller, as seen by a host.
type host struct {
	admin *peer
	io    *peer
	id    uint16
}

// attach connects an admin queue and one I/O queue.
func (w *world) attach(h block.Host, change ...func(*peer)) *host {
	w.t.Helper()
	admin := w.admin(h, change...)
	return &host{admin: admin, id: admin.cntlid(), io: w.queue(h, admin.cntlid(), 1, change...)}
}

func (p *peer) cntlid() uint16 { return p.id }

// admin connects an admin queue and enables the controller.
func (w *world) admin(h block.Host, change ...func(*peer)) *peer {
	w.t.Helper()
	p := w.dial()
	for _, c := range change {
		c(p)
	}
	p.greet()
	p.must(p.connect(h, testNQN, 0, nvmetcp.DynamicController))
	p.id = nvmetcp.ParseConnectResult(p.last.Result()).ControllerID
	p.enable()
	return p
}

func (p *peer) enable() {
	p.t.Helper()
	cc := nvmetcp.Configuration{Enable: true, SubmissionEntrySize: 6, CompletionEntrySize: 4}
	p.must(p.do(nvmetcp.PropertySetCommand(nvmetcp.PropertyCC, uint64(cc.Encode())), nil, nil))
	p.must(p.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyCSTS), nil, nil))
	if !nvmetcp.ParseControllerStatus(uint32(p.last.Result())).Ready {
		p.t.Fatal("the controller is not ready")
	}
}

// queue connects an I/O queue.
func (w *world) queue(h block.Host, cntlid, id uint16, change ...func(*peer)) *peer {
	w.t.Helper()
	p := w.dial()
	for _, c := range change {
		c(p)
	}
	p.greet()
	p.must(p.connect(h, testNQN, id, cntlid))
	return p
}

func ioCommand(op nvmetcp.Opcode, lba uint64, blocks uint32, sgl nvmetcp.SGL) nvmetcp.Command {
	var c nvmetcp.Command
	c.SetOpcode(op)
	c.SetNSID(1)
	c.SetSLBA(lba)
	if blocks > 0 {
		c.SetBlocks(blocks)
	}
	c.SetSGL(sgl)
	return c
}

// write writes data at a block, in the capsule if it is small.
func (p *peer) write(lba uint64, data []byte) nvmetcp.Status {
	p.t.Helper()
	sgl := nvmetcp.Transport(uint32(len(data)))
	if len(data) <= 16<<10 {
		sgl = nvmetcp.InCapsule(uint32(len(data)))
	}
	return p.do(ioCommand(nvmetcp.IOWrite, lba, uint32(len(data)/4096), sgl), data, nil)
}

func (p *peer) read(lba uint64, data []byte) nvmetcp.Status {
	p.t.Helper()
	return p.do(ioCommand(nvmetcp.IORead, lba, uint32(len(data)/4096), nvmetcp.Transport(uint32(len(data)))), nil, data)
}

func (p *peer) flush() nvmetcp.Status {
	p.t.Helper()
	return p.do(ioCommand(nvmetcp.IOFlush, 0, 0, nvmetcp.Transport(0)), nil, nil)
}

// ended waits until the target has closed the connection. It returns the target's TermReq,
// if any.
func (p *peer) ended() *nvmetcp.TermReq {
	p.t.Helper()
	for {
		pdu, err := p.r.Next()
		if err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				p.t.Fatal("the target did not close the connection")
			}
			return nil
		}
		if pdu.Type == nvmetcp.TypeC2HTermReq {
			data, _ := p.r.Data()
			t, err := nvmetcp.ParseTermReq(append(bytes.Clone(pdu.Head), data...))
			if err != nil {
				p.t.Fatal(err)
			}
			p.conn.Close()
			return &t
		}
	}
}

// raw sends bytes unchanged.
func (p *peer) raw(b []byte) {
	p.t.Helper()
	if err := p.w.Flush(); err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.conn.Write(b); err != nil && !errors.Is(err, io.ErrClosedPipe) {
		p.t.Logf("writing: %v", err)
	}
}

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i/512) ^ seed
	}
	return b
}

// soon waits until other goroutines make a condition true.
func soon(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

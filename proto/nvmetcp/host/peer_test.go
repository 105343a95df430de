// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// peer is a controller for tests. By default it serves one namespace in memory; a hook can
// handle IO commands in any other way.
type peer struct {
	t    testing.TB
	addr string

	// hook gets each command first; true means that it has handled it. After the first
	// connection it is set with hang.
	hook func(l *link, cmd *nvmetcp.Command, data []byte) bool
	// admin is the same for the admin queue.
	admin func(l *link, cmd *nvmetcp.Command, data []byte) bool
	// ended receives the error that ended each connection of an IO queue.
	ended chan error

	mu       sync.Mutex
	memory   []byte
	uuid     block.UUID // zero: there is no namespace
	sessions int
	listener net.Listener
	open     map[net.Conn]bool
	all      sync.WaitGroup
}

// link is one connection of a peer.
type link struct {
	p       *peer
	conn    net.Conn
	r       *nvmetcp.Reader
	w       *nvmetcp.Writer
	qid     uint16
	session int
	writes  map[uint16]nvmetcp.Command // waiting for data
	events  []uint16                   // event requests
}

func newPeer(t testing.TB, size int) *peer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{t: t, addr: l.Addr().String(), ended: make(chan error, 1000), memory: make([]byte, size), uuid: uuidA,
		listener: l, open: map[net.Conn]bool{}}
	p.all.Go(func() { p.accept(l) })
	t.Cleanup(func() {
		p.listener.Close()
		p.cutAll()
		p.all.Wait()
	})
	return p
}

func (p *peer) config() Config {
	return Config{Portals: []string{p.addr}, Subsystem: testNQN, Host: me, IOQueues: 1, ReconnectMin: time.Millisecond, ReconnectMax: 10 * time.Millisecond}
}

// hang sets the hook.
func (p *peer) hang(hook func(l *link, cmd *nvmetcp.Command, data []byte) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hook = hook
}

func (p *peer) accept(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		p.open[conn] = true
		p.mu.Unlock()
		p.all.Go(func() {
			defer conn.Close()
			p.serve(conn)
			p.mu.Lock()
			delete(p.open, conn)
			p.mu.Unlock()
		})
	}
}

// cutAll closes all connections.
func (p *peer) cutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		c.Close()
	}
}

func (p *peer) serve(conn net.Conn) {
	l := &link{p: p, conn: conn, w: nvmetcp.NewWriter(conn, nvmetcp.WriterConfig{}), writes: map[uint16]nvmetcp.Command{}}
	l.r = nvmetcp.NewReader(conn, nvmetcp.ReaderConfig{Role: nvmetcp.RoleController, MaxData: 1 << 20, MaxCapsuleData: 16 << 10})
	pdu, err := l.r.Next()
	if err != nil {
		return
	}
	req, err := nvmetcp.ParseICReq(pdu.Head)
	if err != nil {
		return
	}
	l.w.Raw(nvmetcp.ICResp{HeaderDigest: req.HeaderDigest, DataDigest: req.DataDigest, MaxH2CData: 16 << 10}.Append(nil))
	if l.w.Flush() != nil {
		return
	}
	l.r.Configure(nvmetcp.ReaderConfig{Role: nvmetcp.RoleController, MaxData: 1 << 20, MaxCapsuleData: 16 << 10,
		HeaderDigest: req.HeaderDigest, DataDigest: req.DataDigest})
	l.w.Configure(nvmetcp.WriterConfig{HeaderDigest: req.HeaderDigest, DataDigest: req.DataDigest})
	for err == nil {
		if err = l.step(); err == nil && !l.r.Buffered() {
			err = l.w.Flush()
		}
	}
	if l.qid != 0 {
		p.ended <- err
	}
}

func (l *link) step() error {
	pdu, err := l.r.Next()
	if err != nil {
		return err
	}
	switch pdu.Type {
	case nvmetcp.TypeH2CTermReq:
		return l.r.TermReq()
	case nvmetcp.TypeH2CData:
		d := pdu.Data()
		data, err := l.r.Data()
		if err != nil {
			return err
		}
		return l.more(d, data)
	case nvmetcp.TypeCapsuleCmd:
		cmd := *pdu.Command()
		data, err := l.r.Data()
		if err != nil {
			return err
		}
		l.command(&cmd, data)
		return nil
	}
	return errors.New("unexpected PDU")
}

func (l *link) more(d nvmetcp.DataHeader, data []byte) error {
	cmd, ok := l.writes[d.CID]
	if !ok {
		return errors.New("data for no command")
	}
	l.p.mu.Lock()
	copy(l.p.memory[cmd.SLBA()*4096+uint64(d.Offset):], data)
	l.p.mu.Unlock()
	if d.Offset+d.Length == cmd.Blocks()*4096 {
		delete(l.writes, d.CID)
		l.answer(d.CID, nvmetcp.Success, 0)
	}
	return nil
}

func (l *link) answer(cid uint16, s nvmetcp.Status, result uint64) {
	var c nvmetcp.Completion
	c.SetCID(cid)
	c.SetStatus(s)
	c.SetResult(result)
	l.w.Completion(&c)
}

// send answers with data, and with the SUCCESS flag.
func (l *link) send(cid uint16, data []byte) {
	l.w.Data(nvmetcp.TypeC2HData, nvmetcp.FlagLastPDU|nvmetcp.FlagSuccess, nvmetcp.DataHeader{CID: cid}, data)
}

func (l *link) command(cmd *nvmetcp.Command, data []byte) {
	switch {
	case cmd.Opcode() == nvmetcp.OpFabrics:
		l.fabrics(cmd, data)
	case l.qid == 0:
		if l.p.admin == nil || !l.p.admin(l, cmd, data) {
			l.administer(cmd)
		}
	default:
		l.p.mu.Lock()
		hook := l.p.hook
		l.p.mu.Unlock()
		if hook == nil || !hook(l, cmd, data) {
			l.io(cmd, data)
		}
	}
}

func (l *link) fabrics(cmd *nvmetcp.Command, data []byte) {
	result := uint64(0)
	switch cmd.FabricsType() {
	case nvmetcp.FabricsConnect:
		l.qid = nvmetcp.ParseConnect(cmd).QueueID
		l.p.mu.Lock()
		if l.qid == 0 {
			l.p.sessions++
		}
		l.session = l.p.sessions
		l.p.mu.Unlock()
		result = 1
	case nvmetcp.FabricsPropertyGet:
		switch nvmetcp.ParseProperty(cmd).Property {
		case nvmetcp.PropertyCAP:
			result = nvmetcp.Capabilities{MaxQueueEntries: 128, CommandSets: 1}.Encode()
		case nvmetcp.PropertyCSTS:
			result = uint64(nvmetcp.ControllerStatus{Ready: true, Shutdown: 2}.Encode())
		}
	}
	l.answer(cmd.CID(), nvmetcp.Success, result)
}

func (l *link) administer(cmd *nvmetcp.Command) {
	l.p.mu.Lock()
	uuid, blocks := l.p.uuid, uint64(len(l.p.memory)/4096)
	l.p.mu.Unlock()
	switch cmd.Opcode() {
	case nvmetcp.AdminIdentify:
		i := nvmetcp.ParseIdentify(cmd)
		switch i.CNS {
		case nvmetcp.CNSController:
			c := nvmetcp.Controller{MDTS: 5, IOCapsule: (16<<10 + 64) / 16, OAES: nvmetcp.EventNamespaces, VWC: nvmetcp.VWCPresent,
				ONCS: nvmetcp.ONCSDatasetManagement}
			l.send(cmd.CID(), c.Append(nil))
		case nvmetcp.CNSActiveNamespaces:
			var ids []uint32
			if !uuid.IsZero() && i.NSID == 0 {
				ids = []uint32{1}
			}
			l.send(cmd.CID(), nvmetcp.AppendNamespaceList(nil, ids))
		case nvmetcp.CNSNamespace:
			n := nvmetcp.Namespace{Size: blocks, Formats: []nvmetcp.LBAFormat{{BlockShift: 12}}}
			l.send(cmd.CID(), n.Append(nil))
		case nvmetcp.CNSDescriptors:
			l.send(cmd.CID(), nvmetcp.Descriptors{UUID: uuid}.Append(nil))
		default:
			l.answer(cmd.CID(), nvmetcp.InvalidField|nvmetcp.DNR, 0)
		}
	case nvmetcp.AdminGetLogPage:
		l.send(cmd.CID(), make([]byte, nvmetcp.ParseGetLog(cmd).Length))
	case nvmetcp.AdminAsyncEvent:
		l.events = append(l.events, cmd.CID())
	default:
		l.answer(cmd.CID(), nvmetcp.Success, 0)
	}
}

func (l *link) io(cmd *nvmetcp.Command, data []byte) {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	switch cmd.Opcode() {
	case nvmetcp.IORead:
		at := cmd.SLBA() * 4096
		l.send(cmd.CID(), l.p.memory[at:at+uint64(cmd.Blocks())*4096])
		if err := l.w.Flush(); err != nil { // before memory changes
			l.conn.Close()
		}
	case nvmetcp.IOWrite:
		if cmd.SGL().Kind == nvmetcp.SGLTransport {
			l.writes[cmd.CID()] = *cmd
			l.w.R2T(nvmetcp.DataHeader{CID: cmd.CID(), TTAG: 9, Length: cmd.Blocks() * 4096})
			return
		}
		copy(l.p.memory[cmd.SLBA()*4096:], data)
		fallthrough
	default:
		l.answer(cmd.CID(), nvmetcp.Success, 0)
	}
}

// start submits an IO and returns the channel for its outcome.
func start(d block.Device, io *block.IO) <-chan error {
	told := make(chan error, 1)
	io.Done = func(io *block.IO) { told <- io.Err }
	d.Submit(io)
	return told
}

func startRead(d block.Device, p []byte, off int64) <-chan error {
	return start(d, &block.IO{Op: block.OpRead, Data: p, Off: off, Len: int64(len(p))})
}

func startWrite(d block.Device, p []byte, off int64) <-chan error {
	return start(d, &block.IO{Op: block.OpWrite, Data: p, Off: off, Len: int64(len(p))})
}

func outcome(t testing.TB, told <-chan error) error {
	t.Helper()
	select {
	case err := <-told:
		return err
	case <-time.After(patience):
		t.Fatalf("an IO was not completed within %v", patience)
		return nil
	}
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"weft.dev/weft/proto/nvmetcp"
)

// TestAControllerThatBreaksTheProtocolIsCutOff: the controller of the first connection
// answers one IO with a protocol error. The host must report the error to it, and complete
// the IO over the next connection.
func TestAControllerThatBreaksTheProtocolIsCutOff(t *testing.T) {
	data := func(l *link, flags uint8, cid uint16, off uint32, n int) {
		l.w.Data(nvmetcp.TypeC2HData, flags, nvmetcp.DataHeader{CID: cid, Offset: off}, make([]byte, n))
	}
	const last, success = nvmetcp.FlagLastPDU, nvmetcp.FlagSuccess
	for name, c := range map[string]struct {
		write bool
		size  int
		fes   nvmetcp.FES
		do    func(l *link, cid uint16)
	}{
		"completion of an unknown command": {false, 4096, nvmetcp.FESInvalidHeader, func(l *link, cid uint16) { l.answer(cid^1, 0, 0) }},
		"completion of no command":         {false, 4096, nvmetcp.FESInvalidHeader, func(l *link, cid uint16) { l.answer(0xffff, 0, 0) }},
		"a second completion": {false, 4096, nvmetcp.FESInvalidHeader, func(l *link, cid uint16) {
			l.answer(cid, nvmetcp.TransientTransportError, 0) // the resent command has another identifier
			l.answer(cid, nvmetcp.TransientTransportError, 0)
		}},
		"data of an unknown command":  {false, 4096, nvmetcp.FESInvalidHeader, func(l *link, cid uint16) { data(l, last|success, cid^1, 0, 4096) }},
		"more data than asked for":    {false, 4096, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { data(l, last|success, cid, 0, 8192) }},
		"data beyond the end":         {false, 4096, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { data(l, 0, cid, 0, 4096); data(l, last, cid, 4096, 4) }},
		"data with a gap":             {false, 4096, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { data(l, last, cid, 1024, 1024) }},
		"the same data again":         {false, 4096, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { data(l, 0, cid, 0, 1024); data(l, last, cid, 0, 1024) }},
		"an offset that wraps":        {false, 4096, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { data(l, last, cid, 1<<32-4, 8) }},
		"data for a write":            {true, 4096, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { data(l, last|success, cid, 0, 4096) }},
		"R2T for a read":              {false, 4096, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { l.w.R2T(nvmetcp.DataHeader{CID: cid, Length: 4096}) }},
		"R2T for data in the capsule": {true, 4096, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { l.w.R2T(nvmetcp.DataHeader{CID: cid, Length: 4096}) }},
		"R2T of an unknown command":   {true, 65536, nvmetcp.FESInvalidHeader, func(l *link, cid uint16) { l.w.R2T(nvmetcp.DataHeader{CID: cid ^ 1, Length: 4096}) }},
		"R2T beyond the end":          {true, 65536, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { l.w.R2T(nvmetcp.DataHeader{CID: cid, Length: 65540}) }},
		"R2T of nothing":              {true, 65536, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { l.w.R2T(nvmetcp.DataHeader{CID: cid}) }},
		"R2T that wraps":              {true, 65536, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { l.w.R2T(nvmetcp.DataHeader{CID: cid, Offset: 1<<32 - 4, Length: 8}) }},
		"R2T with a gap":              {true, 65536, nvmetcp.FESOutOfRange, func(l *link, cid uint16) { l.w.R2T(nvmetcp.DataHeader{CID: cid, Offset: 4096, Length: 4096}) }},
		"the first data asked for twice": {true, 65536, nvmetcp.FESOutOfRange, func(l *link, cid uint16) {
			l.w.R2T(nvmetcp.DataHeader{CID: cid, Length: 32768}) // more would be sent before the second is read
			l.w.R2T(nvmetcp.DataHeader{CID: cid, Length: 32768})
		}},
		"ICResp again":     {false, 4096, nvmetcp.FESSequence, func(l *link, cid uint16) { l.w.Raw(nvmetcp.ICResp{MaxH2CData: 4096}.Append(nil)) }},
		"a host's PDU":     {false, 4096, nvmetcp.FESInvalidHeader, func(l *link, cid uint16) { l.w.Command(&nvmetcp.Command{}, nil) }},
		"a PDU of no type": {false, 4096, nvmetcp.FESInvalidHeader, func(l *link, cid uint16) { l.w.Raw(bytes.Repeat([]byte{0xee}, 128)) }},
		"a length beyond all bounds": {false, 4096, nvmetcp.FESLimitExceeded, func(l *link, cid uint16) {
			l.w.Raw(nvmetcp.DataHeader{CID: cid, Length: 1<<32 - 1 - 24}.Append(nvmetcp.Header{Type: nvmetcp.TypeC2HData, HLen: 24, PDO: 24, PLen: 1<<32 - 1}.Append(nil)))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPeer(t, 1<<20)
			broken := false
			p.hook = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
				if l.session > 1 || broken {
					return l.session == 1 // leave alone what is sent again over the broken connection
				}
				broken = true
				c.do(l, cmd.CID())
				return true
			}
			n := space(t, connect(t, p.config()), uuidA)
			want := noise(c.size, 3)
			if c.write {
				if err := outcome(t, startWrite(n, want, 0)); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(p.memory[:c.size], want) {
					t.Error("the written data is missing")
				}
			} else {
				copy(p.memory, want)
				got := make([]byte, c.size)
				if err := outcome(t, startRead(n, got, 0)); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("read: %v", err)
				}
			}
			var told *nvmetcp.TerminatedError
			if err := outcome(t, p.ended); !errors.As(err, &told) || told.TermReq.FES != c.fes {
				t.Errorf("the controller was told %v, not %v", err, c.fes)
			}
			if s := n.controller.State(); s.Session != 2 {
				t.Errorf("it is session %d", s.Session)
			}
		})
	}
}

func TestAControllerWithoutEndOfNamespacesIsGivenUp(t *testing.T) {
	p := newPeer(t, 1<<20)
	p.admin = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		switch i := nvmetcp.ParseIdentify(cmd); {
		case cmd.Opcode() != nvmetcp.AdminIdentify:
			return false
		case i.CNS == nvmetcp.CNSActiveNamespaces:
			var ids []uint32
			for id := range uint32(nvmetcp.MaxNamespaceList) {
				ids = append(ids, i.NSID+id+1)
			}
			l.send(cmd.CID(), nvmetcp.AppendNamespaceList(nil, ids))
			return true
		case i.CNS == nvmetcp.CNSNamespace:
			l.answer(cmd.CID(), nvmetcp.InvalidNamespace|nvmetcp.DNR, 0)
			return true
		}
		return false
	}
	cfg := p.config()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	dials := 0
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if dials++; dials == 3 {
			cancel()
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	if _, err := Connect(ctx, cfg); err == nil || !strings.Contains(err.Error(), "there are more than") {
		t.Fatal(err)
	}
}

func TestAReadThatBringsTooLittleFails(t *testing.T) {
	p := newPeer(t, 1<<20)
	p.hook = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		l.w.Data(nvmetcp.TypeC2HData, nvmetcp.FlagLastPDU|nvmetcp.FlagSuccess, nvmetcp.DataHeader{CID: cmd.CID()}, make([]byte, 512))
		return true
	}
	n := space(t, connect(t, p.config()), uuidA)
	if err := outcome(t, startRead(n, make([]byte, 4096), 0)); !errors.Is(err, nvmetcp.DataTransferError) {
		t.Fatal(err)
	}
}

func TestACompletionWithoutDataIsNoRead(t *testing.T) {
	p := newPeer(t, 1<<20)
	p.hook = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		l.answer(cmd.CID(), nvmetcp.Success, 0)
		return true
	}
	n := space(t, connect(t, p.config()), uuidA)
	if err := outcome(t, startRead(n, make([]byte, 4096), 0)); !errors.Is(err, nvmetcp.DataTransferError) {
		t.Fatal(err)
	}
}

// A controller may fail a command before it has received the command's data. The owner may
// then reuse the data, so the host must not touch it any more (the race detector checks).
func TestAWriteThatFailsEarlyLetsGoOfItsData(t *testing.T) {
	p := newPeer(t, 1<<20)
	p.hook = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		if cmd.SGL().Kind == nvmetcp.SGLTransport {
			l.w.R2T(nvmetcp.DataHeader{CID: cmd.CID(), Length: 65536})
		}
		l.answer(cmd.CID(), nvmetcp.WriteFault|nvmetcp.DNR, 0)
		return true
	}
	cfg := p.config()
	cfg.DataDigest = true
	n := space(t, connect(t, cfg), uuidA)
	data := make([]byte, 65536)
	for i := range 50 {
		for j := range data {
			data[j] = byte(i)
		}
		if err := outcome(t, startWrite(n, data, 0)); err == nil {
			t.Fatal("no error")
		}
	}
}

func TestCompletionsMayComeInAnyOrder(t *testing.T) {
	p := newPeer(t, 1<<20)
	copy(p.memory, noise(1<<20, 5))
	var kept []nvmetcp.Command
	p.hook = func(l *link, cmd *nvmetcp.Command, data []byte) bool {
		kept = append(kept, *cmd)
		if len(kept) < 64 {
			return true
		}
		for i := range kept { // in a scattered order
			l.io(&kept[(len(kept)-1-i)*37%len(kept)], nil)
		}
		kept = nil
		return true
	}
	n := space(t, connect(t, p.config()), uuidA)
	var told []<-chan error
	got := make([]byte, 64*4096)
	for i := range int64(64) {
		told = append(told, startRead(n, got[i*4096:][:4096], i*4096))
	}
	for _, c := range told {
		if err := outcome(t, c); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(got, p.memory[:len(got)]) {
		t.Error("a read got the data of another one")
	}
}

func TestDamagedDataIsReadAgain(t *testing.T) {
	p := newPeer(t, 1<<20)
	copy(p.memory, noise(4096, 6))
	damage := 2
	p.hook = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		if damage == 0 {
			return false
		}
		damage--
		pdu := nvmetcp.Header{Type: nvmetcp.TypeC2HData, Flags: nvmetcp.FlagDataDigest | nvmetcp.FlagLastPDU | nvmetcp.FlagSuccess, HLen: 24, PDO: 24, PLen: 24 + 4096 + 4}.Append(nil)
		pdu = nvmetcp.DataHeader{CID: cmd.CID(), Length: 4096}.Append(pdu)
		l.w.Raw(append(pdu, make([]byte, 4100)...)) // a digest of 0 does not fit zeroes
		return true
	}
	cfg := p.config()
	cfg.DataDigest = true
	c := connect(t, cfg)
	got := make([]byte, 4096)
	if err := outcome(t, startRead(space(t, c, uuidA), got, 0)); err != nil || !bytes.Equal(got, p.memory[:4096]) {
		t.Fatal(err)
	}
	if s := c.State(); s.Session != 1 {
		t.Errorf("the connection was lost: %v", s.Err)
	}
}

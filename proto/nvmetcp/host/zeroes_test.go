// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"errors"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// boasting is a peer that announces Write Zeroes and answers them with status.
func boasting(t *testing.T, status nvmetcp.Status) (p *peer, refused func() int) {
	p = newPeer(t, 1<<20)
	for i := range p.memory {
		p.memory[i] = 0xff
	}
	p.admin = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		if cmd.Opcode() != nvmetcp.AdminIdentify || nvmetcp.ParseIdentify(cmd).CNS != nvmetcp.CNSController {
			return false
		}
		c := nvmetcp.Controller{MDTS: 5, IOCapsule: (16<<10 + 64) / 16, ONCS: nvmetcp.ONCSWriteZeroes}
		l.send(cmd.CID(), c.Append(nil))
		return true
	}
	n := 0
	p.hook = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		if cmd.Opcode() != nvmetcp.IOWriteZeroes {
			return false
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		n++
		l.answer(cmd.CID(), status, 0)
		return true
	}
	return p, func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return n
	}
}

func TestZeroesAreWrittenWhereWriteZeroesIsRefused(t *testing.T) {
	for _, status := range []nvmetcp.Status{nvmetcp.InvalidOpcode, nvmetcp.CommandSizeLimitExceeded | nvmetcp.DNR} {
		p, refused := boasting(t, status)
		n := space(t, connect(t, p.config()), uuidA)
		for range 2 {
			if err := block.Do(n, &block.IO{Op: block.OpWriteZeroes, Off: 4096, Len: 1<<20 - 8192}); err != nil {
				t.Fatal(err)
			}
		}
		edge := bytes.Repeat([]byte{0xff}, 4096)
		want := append(append(bytes.Clone(edge), make([]byte, 1<<20-8192)...), edge...)
		got := make([]byte, 1<<20)
		if err := block.ReadAt(n, got, 0); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%v: not what should be zero is (%v)", status, err)
		}
		if refused() != 1 {
			t.Errorf("%v: Write Zeroes is tried %d times", status, refused())
		}
	}
}

func TestZeroesThatFailAreNotWrittenAsData(t *testing.T) {
	p, refused := boasting(t, nvmetcp.WriteFault)
	n := space(t, connect(t, p.config()), uuidA)
	if err := block.Do(n, &block.IO{Op: block.OpWriteZeroes, Len: 8192}); !errors.Is(err, block.ErrMedium) {
		t.Error(err)
	}
	if got := make([]byte, 4096); block.ReadAt(n, got, 0) != nil || got[0] != 0xff || refused() != 1 {
		t.Errorf("%x is read after %d failures", got[0], refused())
	}
}

func TestZeroesGoOnWhereALostConnectionStoppedThem(t *testing.T) {
	p, _ := boasting(t, nvmetcp.InvalidOpcode)
	refuse, writes := p.hook, 0
	p.hook = func(l *link, cmd *nvmetcp.Command, data []byte) bool {
		if cmd.Opcode() != nvmetcp.IOWrite {
			return refuse(l, cmd, data)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if writes++; writes != 5 {
			return false
		}
		l.conn.Close()
		return true
	}
	n := space(t, connect(t, p.config()), uuidA)
	if err := block.Do(n, &block.IO{Op: block.OpWriteZeroes, Len: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if got := make([]byte, 1<<20); block.ReadAt(n, got, 0) != nil || !bytes.Equal(got, make([]byte, 1<<20)) {
		t.Error("not all is zero")
	}
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"log/slog"
	"testing"

	"weft.dev/weft/proto/nvmetcp"
)

// BenchmarkRead measures 4 KiB reads of memory over loopback. Its peer does as little as
// possible: it sends many commands in one write, then reads their answers.
func BenchmarkRead(b *testing.B) {
	for _, depth := range []int{1, 32, 128} {
		b.Run(fmt.Sprint("depth ", depth), func(b *testing.B) { pump(b, depth, nvmetcp.IORead) })
	}
}

// BenchmarkWrite is BenchmarkRead for writes.
func BenchmarkWrite(b *testing.B) {
	for _, depth := range []int{1, 32, 128} {
		b.Run(fmt.Sprint("depth ", depth), func(b *testing.B) { pump(b, depth, nvmetcp.IOWrite) })
	}
}

func pump(b *testing.B, depth int, op nvmetcp.Opcode) {
	w := newBenchWorld(b)
	p := w.attachDeep(depth + 1)
	data := make([]byte, 4096)
	cmd := ioCommand(op, 0, 1, nvmetcp.Transport(4096))
	if op == nvmetcp.IOWrite {
		cmd.SetSGL(nvmetcp.InCapsule(4096))
	}
	round := func(n int) {
		for i := range n {
			cmd.SetCID(uint16(i))
			cmd.SetSLBA(uint64(i))
			if op == nvmetcp.IOWrite {
				p.w.Command(&cmd, data)
			} else {
				p.w.Command(&cmd, nil)
			}
		}
		if err := p.w.Flush(); err != nil {
			b.Fatal(err)
		}
		for range n {
			pdu, err := p.r.Next()
			if err != nil {
				b.Fatal(err)
			}
			if pdu.Type == nvmetcp.TypeCapsuleResp && pdu.Completion().Status() != 0 {
				b.Fatal(pdu.Completion().Status())
			}
		}
	}
	round(depth)
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i += depth {
		round(depth)
	}
}

func newBenchWorld(b *testing.B) *world {
	return newWorld(b, func(c *Config, s *SubsystemConfig) { c.Log = slog.New(slog.DiscardHandler) })
}

// attachDeep is attach with a larger I/O queue.
func (w *world) attachDeep(depth int) *peer {
	w.t.Helper()
	admin := w.admin(hostA)
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, testNQN, 1, admin.id, func(c *nvmetcp.Connect, _ *nvmetcp.ConnectData) { c.QueueSize = uint32(depth) }))
	return p
}

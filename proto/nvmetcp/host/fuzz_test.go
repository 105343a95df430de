// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"io"
	"net"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// FuzzQueue connects a queue with commands in flight to a controller that may send
// anything. The queue must end when the connection does, and every command must either
// complete once or be given back.
func FuzzQueue(f *testing.F) {
	var b bytes.Buffer
	w := nvmetcp.NewWriter(&b, nvmetcp.WriterConfig{})
	l := &link{w: w}
	seed := func(build func()) {
		build()
		if err := w.Flush(); err != nil {
			f.Fatal(err)
		}
		f.Add(bytes.Clone(b.Bytes()))
		b.Reset()
	}
	const first, second, third = 0x1000, 0x1001, 0x1002 // identifiers of the commands below
	seed(func() { l.send(first, make([]byte, 512)); l.answer(second, 0, 0); l.answer(third, 0, 0) })
	seed(func() { w.R2T(nvmetcp.DataHeader{CID: third, Length: 8192}); l.answer(third, nvmetcp.WriteFault, 0) })
	seed(func() {
		w.Data(nvmetcp.TypeC2HData, 0, nvmetcp.DataHeader{CID: first}, make([]byte, 100))
		w.Data(nvmetcp.TypeC2HData, nvmetcp.FlagLastPDU, nvmetcp.DataHeader{CID: first, Offset: 100}, make([]byte, 412))
		l.answer(first, 0, 0)
	})
	seed(func() { w.Raw(nvmetcp.TermReq{ToHost: true, FES: nvmetcp.FESSequence, Header: []byte{1}}.Append(nil)) })
	f.Fuzz(func(t *testing.T, stream []byte) {
		ours, theirs := net.Pipe()
		c := &Controller{drained: make(chan struct{}, 1)}
		c.outstanding.Store(3)
		s := &session{c: c, dead: make(chan struct{}), capsule: 4096}
		q := newQueue(1, ours, 8, s)
		q.reader = nvmetcp.NewReader(q, nvmetcp.ReaderConfig{Role: nvmetcp.RoleHost, MaxData: 1 << 31, BufferSize: 4096})
		q.writer, q.maxData, q.capsule = nvmetcp.NewWriter(nil, nvmetcp.WriterConfig{}), 4096, 4096
		n := &Namespace{controller: c}
		n.state.Store(&namespaceState{NamespaceInfo: NamespaceInfo{NSID: 1, shift: 9}, present: true})
		done := map[*block.IO]int{}
		ios := []*block.IO{
			{Op: block.OpRead, Data: make([]byte, 512), Len: 512},
			{Op: block.OpWrite, Data: make([]byte, 512), Len: 512},
			{Op: block.OpWrite, Data: make([]byte, 8192), Len: 8192},
		}
		told := make(chan *block.IO, 16)
		for _, io := range ios {
			io.Done = func(io *block.IO) { told <- io }
			r := n.request(io, 0, io.Len, false)
			r.io, r.tries = io, maxTries
			q.submit(r)
		}
		q.start()
		go func() {
			theirs.Write(stream)
			theirs.Close()
		}()
		go io.Copy(io.Discard, theirs)
		<-s.dead
		left := q.stop()
		close(told)
		for io := range told {
			done[io]++
		}
		for r := left.pop(); r != nil; r = left.pop() {
			done[r.io]++
		}
		for i, io := range ios {
			if done[io] != 1 {
				t.Fatalf("IO %d is done or given back %d times", i, done[io])
			}
		}
	})
}

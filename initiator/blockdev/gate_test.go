// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"testing"

	"weft.dev/weft/proto/block"
)

// gateStep starts or ends an IO, by its number, and says whether the gate is then clean.
type gateStep struct {
	io    int
	op    block.Op
	ends  bool
	err   error
	clean bool
}

func begin(io int, op block.Op, clean bool) gateStep { return gateStep{io: io, op: op, clean: clean} }
func end(io int, clean bool) gateStep                { return gateStep{io: io, ends: true, clean: clean} }
func failed(io int, clean bool) gateStep {
	return gateStep{io: io, ends: true, err: block.ErrMedium, clean: clean}
}

func TestAGateIsCleanOnlyIfAFlushCoversEveryWrite(t *testing.T) {
	const w, f, r = block.OpWrite, block.OpFlush, block.OpRead
	for what, steps := range map[string][]gateStep{
		"nothing":                       {begin(1, r, true), end(1, true)},
		"a write under way":             {begin(1, w, false)},
		"write, flush":                  {begin(1, w, false), end(1, false), begin(2, f, false), end(2, true)},
		"a flush that fails":            {begin(1, w, false), end(1, false), begin(2, f, false), failed(2, false)},
		"a write that fails":            {begin(1, w, false), failed(1, false)},
		"a discard":                     {begin(1, block.OpDiscard, false), end(1, false)},
		"zeroes":                        {begin(1, block.OpWriteZeroes, false), end(1, false)},
		"a write begun before a flush":  {begin(1, w, false), begin(2, f, false), end(1, false), end(2, false)},
		"a write ended after a flush":   {begin(1, w, false), begin(2, f, false), end(2, false), end(1, false)},
		"a write begun during a flush":  {begin(1, f, true), begin(2, w, false), end(1, false), end(2, false)},
		"a write within a flush":        {begin(1, f, true), begin(2, w, false), end(2, false), end(1, false)},
		"an old flush ends after a new": {begin(1, f, true), begin(2, w, false), end(2, false), begin(3, f, false), end(3, true), end(1, true)},
	} {
		t.Run(what, func(t *testing.T) {
			disk := newMemDisk(plain)
			disk.hold(anything)
			g := newGate(disk)
			requests := make(map[int]*request)
			for i, s := range steps {
				if !s.ends {
					q := &request{IO: block.IO{Op: s.op}, finish: func(*request) {}}
					if s.op != block.OpFlush {
						q.Len, q.Data = memPage, make([]byte, memPage)
					}
					requests[s.io] = q
					g.submit(q)
				} else {
					requests[s.io].Complete(s.err)
				}
				if got := g.clean(); got != s.clean {
					t.Fatalf("clean = %v after step %d, want %v", got, i, s.clean)
				}
			}
		})
	}
}

func TestAGateOfATakenOverDeviceIsNotClean(t *testing.T) {
	disk := newMemDisk(plain)
	g := newGate(disk)
	g.inherit()
	if g.clean() {
		t.Error("clean before any flush")
	}
	if err := g.flush(context.Background()); err != nil || !g.clean() || disk.count(block.OpFlush) != 1 {
		t.Errorf("after flush = %v: clean %v, %d flushes; want true, 1", err, g.clean(), disk.count(block.OpFlush))
	}
}

// What a device that was left still answers, such as with errors because it is being taken apart, is
// not for its users: another process will be asked again.
func TestAGateThatWasLeftAnswersNothing(t *testing.T) {
	disk := newMemDisk(plain)
	disk.hold(anything)
	g := newGate(disk)
	q := &request{IO: block.IO{Op: block.OpRead, Len: memPage, Data: make([]byte, memPage)}, finish: func(*request) { t.Error("a request was answered") }}
	g.submit(q)
	g.left.Store(true)
	q.Complete(block.ErrGone)
	g.shut()
	if err := g.drained(t.Context()); err != nil {
		t.Error(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package ramdisk

import (
	"testing"

	"weft.dev/weft/proto/block"
)

func TestSubmitTakesNoMemory(t *testing.T) {
	d := New(1<<20, 4096)
	p := make([]byte, 4096)
	io := &block.IO{Op: block.OpWrite, Len: 4096, Data: p, Done: func(*block.IO) {}}
	d.Submit(io)
	if n := testing.AllocsPerRun(100, func() { d.Submit(io) }); n > 0 {
		t.Errorf("a write to memory allocates %v times", n)
	}
}

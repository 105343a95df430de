// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"fmt"
	"testing"

	"weft.dev/weft/proto/nvmetcp"
)

func TestWhatWasWrittenIsRead(t *testing.T) {
	for _, digests := range []int{0, 1, 2, 3} {
		t.Run(fmt.Sprint("digests ", digests), func(t *testing.T) {
			w := newWorld(t)
			h := w.attach(hostA, func(p *peer) {
				p.ic.HeaderDigest, p.ic.DataDigest = digests&1 != 0, digests&2 != 0
			})
			for i, n := range []int{4096, 8192, 16384, 20480, 131072, 1 << 20} {
				data := pattern(n, byte(i))
				h.io.must(h.io.write(uint64(i), data))
				got := make([]byte, n)
				h.io.must(h.io.read(uint64(i), got))
				if !bytes.Equal(got, data) {
					t.Errorf("%d bytes are not read as they were written", n)
				}
				h.io.must(h.io.flush())
			}
		})
	}
}

func TestDataBeginsWhereTheHostWantsIt(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA, func(p *peer) { p.ic.HPDA = 31 }) // the Reader checks
	h.io.must(h.io.read(0, make([]byte, 8192)))
}

func TestARangeOutsideOfTheNamespaceIsRefused(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	last := uint64(devSize/4096) - 1
	h.io.must(h.io.read(last, make([]byte, 4096)))
	h.io.want(h.io.read(last, make([]byte, 8192)), nvmetcp.LBAOutOfRange)
	h.io.want(h.io.read(1<<63, make([]byte, 4096)), nvmetcp.LBAOutOfRange)
	h.io.want(h.io.write(1<<52, make([]byte, 4096)), nvmetcp.LBAOutOfRange)
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// fullDevice has had no space for so long.
type fullDevice struct {
	block.Device
	full *atomic.Int64 // nanoseconds
}

func (d fullDevice) Submit(io *block.IO) {
	io.Complete(fmt.Errorf("leg: %w", &block.FullError{For: time.Duration(d.full.Load()), Err: fmt.Errorf("tree: %w", block.ErrFull)}))
}

// delayOf is how long a host waits that has got an answer, by what it was told of the delays.
func delayOf(t *testing.T, crdt [3]uint16, answer nvmetcp.Status) time.Duration {
	t.Helper()
	if answer.DNR() || answer.RetryDelay() == 0 || answer.Code() != nvmetcp.CapacityExceeded {
		t.Fatalf("%v, delay %d, do not retry: %v; want one that is repeated later", answer, answer.RetryDelay(), answer.DNR())
	}
	return time.Duration(crdt[answer.RetryDelay()-1]) * 100 * time.Millisecond
}

func TestTheLongerThereIsNoSpaceTheLaterAWriteIsRepeated(t *testing.T) {
	w := newWorld(t)
	var full atomic.Int64
	if err := w.sub.AddNamespace(NamespaceConfig{NSID: 7, UUID: block.UUID{7}, Device: fullDevice{ramdisk.New(1<<20, 512), &full}}); err != nil {
		t.Fatal(err)
	}
	h := w.attach(hostA)
	b, s := h.admin.identify(nvmetcp.Identify{CNS: nvmetcp.CNSController})
	h.admin.must(s)
	c, err := nvmetcp.ParseController(b)
	if err != nil {
		t.Fatal(err)
	}
	zeroes := ioCommand(nvmetcp.IOWriteZeroes, 0, 1, nvmetcp.Transport(0))
	zeroes.SetNSID(7)
	for _, x := range []struct{ full, want time.Duration }{
		{0, 2 * time.Second}, {2*time.Minute - 1, 2 * time.Second}, {2 * time.Minute, 15 * time.Second}, {10*time.Minute - 1, 15 * time.Second},
		{10 * time.Minute, 3 * time.Minute}, {30 * 24 * time.Hour, 3 * time.Minute},
	} {
		full.Store(int64(x.full))
		if got := delayOf(t, c.CRDT, h.io.do(zeroes, nil, nil)); got != x.want {
			t.Errorf("after %v without space, it is repeated after %v, want %v", x.full, got, x.want)
		}
	}
	if got := delayOf(t, c.CRDT, statusOfError(fmt.Errorf("leg: %w", block.ErrFull), block.OpWrite)); got != 2*time.Second {
		t.Errorf("where it is not known for how long there has been no space, it is repeated after %v, want 2s", got)
	}
}

// Linux repeats a write 255 times. No write lasts shorter than the one that finds the lack first.
func TestAWriteOfLinuxLastsForANight(t *testing.T) {
	const repeats, told = 255, 500 * time.Millisecond // a target answers only after some time
	for _, first := range []time.Duration{0, time.Minute, 5 * time.Minute, time.Hour} {
		full := first
		for range repeats {
			full += told
			full += delayOf(t, crdt(), statusOfError(&block.FullError{For: full, Err: block.ErrFull}, block.OpWrite))
		}
		lasts := (full + told - first).Round(time.Minute)
		t.Logf("a write that begins after %v without space lasts for %v", first, lasts)
		if lasts < 8*time.Hour+30*time.Minute || lasts > 13*time.Hour {
			t.Errorf("a write that begins after %v without space lasts for %v", first, lasts)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"slices"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// striped is a device that holds data in every second 16 KiB. It differs from snapshot uuidB in the
// first.
type striped struct{ block.Device }

func (d striped) Allocated(off, end int64, most int) (found []block.Range, next int64, err error) {
	for at := off / 32768 * 32768; at < end; at += 32768 {
		r := block.Range{Off: max(at, off), End: min(at+16384, end)}
		if r.Off >= r.End {
			continue
		}
		if len(found) == most {
			return found, r.Off, nil
		}
		found = append(found, r)
	}
	return found, end, nil
}

func (d striped) Differing(since block.UUID, off, end int64, _ int) ([]block.Range, int64, error) {
	switch {
	case since != uuidB:
		return nil, off, fmt.Errorf("%v: %w", since, fs.ErrNotExist)
	case off >= 16384:
		return nil, end, nil
	}
	return []block.Range{{Off: off, End: 16384}}, end, nil
}

func TestRangesAreReadInPieces(t *testing.T) {
	const size = 1 << 30
	n := space(t, connect(t, newWorld(t, striped{ramdisk.New(size, 4096)}).config()), uuidA)
	for _, c := range []block.Range{{Off: 0, End: size}, {Off: 20480, End: 28672}, {Off: 4096, End: 8192}, {Off: 8192, End: 512 << 20}} {
		want, _, _ := striped{}.Allocated(c.Off, c.End, math.MaxInt)
		var got []block.Range
		asked := 0
		for at := c.Off; at < c.End; asked++ {
			found, next, err := n.Allocated(t.Context(), at, c.End)
			if err != nil || next <= at {
				t.Fatalf("from %d on: next %d, %v", at, next, err)
			}
			got, at = append(got, found...), next
		}
		// A range that a piece ends in comes as two.
		got = slices.CompactFunc(got, func(a, b block.Range) bool { return a == b })
		if !slices.Equal(got, want) || c.End == size && asked != size/32768/4095+1 {
			t.Errorf("%v: %d ranges with %d commands, want %d", c, len(got), asked, len(want))
		}
	}
	if found, next, err := n.Differing(t.Context(), uuidB, 4096, size); err != nil || next != size || !slices.Equal(found, []block.Range{{Off: 4096, End: 16384}}) {
		t.Errorf("Differing = %v, %d, %v", found, next, err)
	}
	if _, _, err := n.Differing(t.Context(), uuidA, 0, size); !errors.Is(err, nvmetcp.InvalidField) {
		t.Errorf("Differing from a snapshot that is not there: %v, want %v", err, nvmetcp.InvalidField)
	}
	for _, c := range []block.Range{{Off: 0, End: size + 4096}, {Off: 4096, End: 4096}, {Off: 100, End: 4096}, {Off: -4096, End: 4096}} {
		if _, _, err := n.Allocated(t.Context(), c.Off, c.End); !errors.Is(err, block.ErrRange) {
			t.Errorf("Allocated(%v): %v, want ErrRange", c, err)
		}
	}
}

func TestAMapSaysWhereDataMayBe(t *testing.T) {
	n := space(t, connect(t, newWorld(t, striped{ramdisk.New(1<<20, 4096)}).config()), uuidA)
	paths, err := Multipath(MultipathConfig{}, n)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []block.Device{n, paths} {
		io := block.IO{Op: block.OpMap, Off: 8192, Len: 22 * 4096, Data: []byte{0xff, 0xff, 0xff}}
		if err := block.Do(d, &io); err != nil || !slices.Equal(io.Data, []byte{0xc3, 0xc3, 0x03}) {
			t.Errorf("map is %x, %v", io.Data, err)
		}
		io = block.IO{Op: block.OpMap, Off: 0, Len: 1 << 20, Data: make([]byte, 3)}
		if err := block.Do(d, &io); !errors.Is(err, block.ErrRange) {
			t.Errorf("a map without room: %v, want ErrRange", err)
		}
	}
}

func TestAnOlderControllerHasNoMap(t *testing.T) {
	n := space(t, connect(t, newPeer(t, 1<<20).config()), uuidA)
	if err := block.Do(n, &block.IO{Op: block.OpMap, Len: 1 << 20, Data: make([]byte, 32)}); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("map of an older controller: %v, want ErrUnsupported", err)
	}
}

func TestAnswersAboutRangesThatAreWrong(t *testing.T) {
	var answer atomic.Pointer[nvmetcp.LBAStatusList]
	p := newPeer(t, 1<<20)
	p.admin = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
		switch {
		case cmd.Opcode() == nvmetcp.AdminGetLBAStatus:
			b := make([]byte, nvmetcp.ParseGetLBAStatus(cmd).Length)
			copy(b, answer.Load().Append(nil))
			l.send(cmd.CID(), b)
			return true
		case cmd.Opcode() != nvmetcp.AdminIdentify || nvmetcp.ParseIdentify(cmd).CNS != nvmetcp.CNSController:
			return false
		}
		l.send(cmd.CID(), (&nvmetcp.Controller{MDTS: 5, IOCapsule: (16<<10 + 64) / 16, OACS: nvmetcp.OACSGetLBAStatus}).Append(nil))
		return true
	}
	n := space(t, connect(t, p.config()), uuidA)
	for what, l := range map[string]nvmetcp.LBAStatusList{
		"nothing, and more":   {Condition: nvmetcp.LBAStatusMore},
		"no condition":        {},
		"what comes before":   {Condition: nvmetcp.LBAStatusMore, Ranges: []nvmetcp.LBARange{{Start: 0, Blocks: 2}}},
		"ranges out of order": {Condition: nvmetcp.LBAStatusAll, Ranges: []nvmetcp.LBARange{{Start: 8, Blocks: 2}, {Start: 4, Blocks: 2}}},
		"an overflow":         {Condition: nvmetcp.LBAStatusAll, Ranges: []nvmetcp.LBARange{{Start: math.MaxUint64, Blocks: 2}}},
		"an empty range":      {Condition: nvmetcp.LBAStatusAll, Ranges: []nvmetcp.LBARange{{Start: 8}}},
	} {
		answer.Store(&l)
		if found, next, err := n.Allocated(t.Context(), 16384, 1<<20); err == nil {
			t.Errorf("%s: %v, next %d, without an error", what, found, next)
		}
	}
	answer.Store(&nvmetcp.LBAStatusList{Condition: nvmetcp.LBAStatusAll, Ranges: []nvmetcp.LBARange{{Start: 0, Blocks: 5}, {Start: 250, Blocks: 1 << 30}}})
	found, next, err := n.Allocated(t.Context(), 16384, 1<<20)
	if want := []block.Range{{Off: 16384, End: 20480}, {Off: 250 * 4096, End: 1 << 20}}; err != nil || next != 1<<20 || !slices.Equal(found, want) {
		t.Errorf("ranges that reach further than was asked for: %v, %d, %v; want %v", found, next, err, want)
	}
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"io/fs"
	"reflect"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// mapping is a Device that says where it holds data.
type mapping struct {
	block.Device
	found []block.Range
	since block.UUID // the snapshot that it knows
	err   error
	asked atomic.Int32
}

func (m *mapping) Allocated(off, end int64, most int) (found []block.Range, next int64, err error) {
	m.asked.Add(1)
	for _, r := range m.found {
		if r.Off = max(r.Off, off); r.Off >= r.End || r.Off >= end {
			continue
		}
		if len(found) == most {
			return found, r.Off, m.err
		}
		found = append(found, block.Range{Off: r.Off, End: min(r.End, end)})
	}
	return found, end, m.err
}

func (m *mapping) Differing(since block.UUID, off, end int64, most int) ([]block.Range, int64, error) {
	if since != m.since {
		return nil, off, fmt.Errorf("snapshot %v: %w", since, fs.ErrNotExist)
	}
	return m.Allocated(off, end, most)
}

func (p *peer) lbaStatus(g nvmetcp.GetLBAStatus) (nvmetcp.LBAStatusList, nvmetcp.Status) {
	p.t.Helper()
	return p.list(g.Command(), int(g.Length))
}

func (p *peer) list(cmd nvmetcp.Command, length int) (l nvmetcp.LBAStatusList, s nvmetcp.Status) {
	p.t.Helper()
	b := make([]byte, length)
	if s = p.do(cmd, nil, b); s != nvmetcp.Success {
		return l, s
	}
	l, err := nvmetcp.ParseLBAStatusList(b)
	if err != nil {
		p.t.Error(err)
	}
	return l, s
}

func TestAControllerSaysWhereItHoldsData(t *testing.T) {
	w := newWorld(t)
	m := &mapping{Device: ramdisk.New(1<<20, 4096), since: block.UUID{5}, found: []block.Range{{Off: 16384, End: 32768}, {Off: 65536, End: 65536 + 5000}, {Off: 1<<20 - 4096, End: 1 << 20}}}
	if err := w.sub.AddNamespace(NamespaceConfig{NSID: 7, Device: m, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	p := w.admin(hostA)
	b, s := p.identify(nvmetcp.Identify{CNS: nvmetcp.CNSController})
	p.must(s)
	if c, err := nvmetcp.ParseController(b); err != nil || c.OACS != nvmetcp.OACSGetLBAStatus {
		t.Errorf("OACS is %#x, %v; want %#x", c.OACS, err, nvmetcp.OACSGetLBAStatus)
	}
	all := nvmetcp.LBAStatusList{Condition: nvmetcp.LBAStatusAll, Ranges: []nvmetcp.LBARange{{Start: 4, Blocks: 4}, {Start: 16, Blocks: 2}, {Start: 255, Blocks: 1}}}
	first := nvmetcp.LBAStatusList{Condition: nvmetcp.LBAStatusMore, Ranges: all.Ranges[:1]}
	middle := nvmetcp.LBAStatusList{Condition: nvmetcp.LBAStatusAll, Ranges: []nvmetcp.LBARange{{Start: 6, Blocks: 2}, {Start: 16, Blocks: 1}}}
	none := nvmetcp.LBAStatusList{Condition: nvmetcp.LBAStatusAll}
	whole := nvmetcp.LBAStatusList{Condition: nvmetcp.LBAStatusAll, Ranges: []nvmetcp.LBARange{{Blocks: 1024}}}
	for _, c := range []struct {
		ask  nvmetcp.GetLBAStatus
		want nvmetcp.LBAStatusList
	}{
		{nvmetcp.GetLBAStatus{NSID: 7, Length: 4096}, all},
		{nvmetcp.GetLBAStatus{NSID: 7, Length: 24}, first},
		{nvmetcp.GetLBAStatus{NSID: 7, Start: 6, Blocks: 11, Length: 4096}, middle},
		{nvmetcp.GetLBAStatus{NSID: 7, Start: 8, Blocks: 8, Length: 64}, none},
		{nvmetcp.GetLBAStatus{NSID: 1, Length: 64}, whole},
	} {
		c.ask.Action = nvmetcp.LBAAllocated
		if got, s := p.lbaStatus(c.ask); s != nvmetcp.Success || !reflect.DeepEqual(got, c.want) {
			t.Errorf("Get LBA Status %+v = %+v, %v; want %+v", c.ask, got, s, c.want)
		}
	}
	d := nvmetcp.GetDifferences{NSID: 7, Start: 8, Since: block.UUID{5}, Length: 64}
	if got, s := p.list(d.Command(), 64); s != nvmetcp.Success || len(got.Ranges) != 2 || got.Condition != nvmetcp.LBAStatusAll {
		t.Errorf("Get Differences = %+v, %v", got, s)
	}
}

func TestRequestsForRangesThatAreMalformed(t *testing.T) {
	w := newWorld(t)
	m := &mapping{Device: ramdisk.New(1<<20, 4096), since: block.UUID{5}}
	gone := &mapping{Device: ramdisk.New(1<<20, 4096), err: block.ErrGone}
	for nsid, d := range map[uint32]block.Device{7: m, 8: gone} {
		if err := w.sub.AddNamespace(NamespaceConfig{NSID: nsid, Device: d}); err != nil {
			t.Fatal(err)
		}
	}
	p := w.admin(hostA)
	good := nvmetcp.GetLBAStatus{NSID: 7, Action: nvmetcp.LBAAllocated, Length: 64}
	for what, c := range map[string]struct {
		change func(*nvmetcp.GetLBAStatus)
		want   nvmetcp.Status
	}{
		"another action":       {func(g *nvmetcp.GetLBAStatus) { g.Action = 0x11 }, nvmetcp.InvalidField},
		"no action":            {func(g *nvmetcp.GetLBAStatus) { g.Action = 0 }, nvmetcp.InvalidField},
		"no namespace":         {func(g *nvmetcp.GetLBAStatus) { g.NSID = 9 }, nvmetcp.InvalidNamespace},
		"all namespaces":       {func(g *nvmetcp.GetLBAStatus) { g.NSID = nvmetcp.AllNamespaces }, nvmetcp.InvalidNamespace},
		"no room":              {func(g *nvmetcp.GetLBAStatus) { g.Length = 20 }, nvmetcp.InvalidField},
		"too much room":        {func(g *nvmetcp.GetLBAStatus) { g.Length = 2 << 20 }, nvmetcp.InvalidField},
		"a start behind":       {func(g *nvmetcp.GetLBAStatus) { g.Start = 256 }, nvmetcp.LBAOutOfRange},
		"a start far behind":   {func(g *nvmetcp.GetLBAStatus) { g.Start = 1 << 63 }, nvmetcp.LBAOutOfRange},
		"an end behind":        {func(g *nvmetcp.GetLBAStatus) { g.Start, g.Blocks = 250, 7 }, nvmetcp.LBAOutOfRange},
		"an end behind it all": {func(g *nvmetcp.GetLBAStatus) { g.Blocks = 257 }, nvmetcp.LBAOutOfRange},
	} {
		g := good
		c.change(&g)
		if s := p.do(g.Command(), nil, make([]byte, g.Length)); s.Code() != c.want.Code() || s.SCT() != c.want.SCT() {
			t.Errorf("%s: %v, want %v", what, s, c.want)
		}
	}
	short := good.Command()
	short.SetSGL(nvmetcp.Transport(32))
	p.want(p.do(short, nil, make([]byte, 32)), nvmetcp.InvalidSGLLength)
	inside := good.Command()
	inside.SetSGL(nvmetcp.InCapsule(64))
	p.want(p.do(inside, nil, nil), nvmetcp.InvalidSGLLength)
	for what, c := range map[string]struct {
		ask  nvmetcp.GetDifferences
		want nvmetcp.Status
	}{
		"an unknown snapshot":        {nvmetcp.GetDifferences{NSID: 7, Since: block.UUID{6}, Length: 64}, nvmetcp.InvalidField},
		"no room":                    {nvmetcp.GetDifferences{NSID: 7, Since: block.UUID{5}, Length: 4}, nvmetcp.InvalidField},
		"too much room":              {nvmetcp.GetDifferences{NSID: 7, Since: block.UUID{5}, Length: 2 << 20}, nvmetcp.InvalidField},
		"a start behind":             {nvmetcp.GetDifferences{NSID: 7, Since: block.UUID{5}, Start: 256, Length: 64}, nvmetcp.LBAOutOfRange},
		"a device that knows none":   {nvmetcp.GetDifferences{NSID: 1, Since: block.UUID{5}, Length: 64}, nvmetcp.InvalidOpcode},
		"a namespace that is not it": {nvmetcp.GetDifferences{NSID: 3, Since: block.UUID{5}, Length: 64}, nvmetcp.InvalidNamespace},
	} {
		if _, s := p.list(c.ask.Command(), int(c.ask.Length)); s.Code() != c.want.Code() || s.SCT() != c.want.SCT() {
			t.Errorf("%s: %v, want %v", what, s, c.want)
		}
	}
	if n := m.asked.Load(); n != 0 {
		t.Errorf("the device was asked %d times by what is malformed", n)
	}
	good.NSID = 8
	_, s := p.lbaStatus(good)
	p.want(s, nvmetcp.InternalError)
}

func TestARangeOfMoreBlocksThanAnEntryHasBecomesSeveral(t *testing.T) {
	l := listOf([]block.Range{{Off: 0, End: 5 << 44}}, true, 9, 3)
	want := nvmetcp.LBAStatusList{Condition: nvmetcp.LBAStatusMore}
	for i := range uint64(3) {
		want.Ranges = append(want.Ranges, nvmetcp.LBARange{Start: i * 0xffffffff, Blocks: 0xffffffff})
	}
	if !reflect.DeepEqual(l, want) {
		t.Errorf("listOf = %+v, want %+v", l, want)
	}
}

// SPDX-License-Identifier: Apache-2.0

package live

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/figures/wire"
	"weft.dev/weft/proto/pb"
)

var h1 = Source{"h1", pb.FiguresSource_FIGURES_SOURCE_INITIATOR}

type world struct {
	*Book
	t   *testing.T
	now time.Time
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, now: time.Unix(1000, 0)}
	w.Book = NewBook(func() time.Time { return w.now })
	return w
}

func volume(i int) Object {
	var id block.UUID
	id[0], id[14], id[15] = 1, byte(i>>8), byte(i)
	return Object{Volume, id}
}

// reads is what a report says of a volume that had n reads of 4 KiB of 1 ms each.
func reads(i, n int) *pb.ObjectFigures {
	var t figures.Tally
	for range n {
		t.Add(figures.Read, 4096, time.Millisecond, false)
	}
	var f figures.Figures
	t.Take(&f)
	return wire.Of(&pb.ObjectFigures{VolumeId: block.VolumeID{UUID: volume(i).ID}.String()}, &f, 0)
}

func (w *world) report(objects ...*pb.ObjectFigures) {
	w.t.Helper()
	w.now = w.now.Add(2 * time.Second)
	if err := w.Take(&pb.FiguresReport{Node: h1.Node, Source: h1.Kind, Nanoseconds: 2e9, Objects: objects}); err != nil {
		w.t.Fatal(err)
	}
}

func TestAWindowIsTheSumOfTheLastReports(t *testing.T) {
	w := newWorld(t)
	w.report(reads(1, 100))
	for range 4 {
		w.report(reads(1, 10), reads(2, 1))
	}
	w.report()
	for window, want := range map[time.Duration][2]int{2 * time.Second: {0, 2}, 4 * time.Second: {10, 4}, 9 * time.Second: {40, 10}, time.Minute: {140, 12}} {
		got := w.Look(h1, volume(1), window)
		if got.Figures[figures.Read].IOs != uint64(want[0]) || got.Covers != time.Duration(want[1])*time.Second {
			t.Errorf("in %v: %d reads in %v; want %d in %d s", window, got.Figures[figures.Read].IOs, got.Covers, want[0], want[1])
		}
	}
	if got := w.Look(h1, volume(3), 10*time.Second); got.Covers != 10*time.Second || got.Figures.IOs() != 0 {
		t.Errorf("an idle volume: %d I/Os in %v", got.Figures.IOs(), got.Covers)
	}
	if got := w.All(h1, Volume, 4*time.Second); got.Figures.IOs() != 11 || got.Covers != 4*time.Second {
		t.Errorf("all volumes: %d I/Os in %v, want 11 in 4s", got.Figures.IOs(), got.Covers)
	}
}

func TestAReportCountsWhenItIsComplete(t *testing.T) {
	w := newWorld(t)
	w.report()
	if err := w.Take(&pb.FiguresReport{Node: h1.Node, Source: h1.Kind, More: true, Objects: []*pb.ObjectFigures{reads(1, 5)}}); err != nil {
		t.Fatal(err)
	}
	if got := w.Look(h1, volume(1), time.Minute); got.Figures.IOs() != 0 {
		t.Errorf("half a report counts: %d I/Os", got.Figures.IOs())
	}
	w.report(reads(2, 1))
	if got := w.Look(h1, volume(1), 2*time.Second); got.Figures.IOs() != 5 {
		t.Errorf("a whole report has %d I/Os, want 5", got.Figures.IOs())
	}
}

func TestFiguresOfASilentAgentAreNotShown(t *testing.T) {
	w := newWorld(t)
	w.report(reads(1, 5))
	w.now = w.now.Add(Silent + 1)
	if got := w.Look(h1, volume(1), time.Minute); got.Covers != 0 {
		t.Errorf("after %v of silence: %v", Silent, got.Covers)
	}
	w.report(reads(1, 1))
	over := w.Over()
	w.Reset()
	select {
	case <-over:
	default:
		t.Error("Reset does not end the streams")
	}
	if got := w.Look(h1, volume(1), time.Minute); got.Covers != 0 {
		t.Errorf("after Reset: %v", got.Covers)
	}
}

func TestMalformedReportsAreRefused(t *testing.T) {
	w := newWorld(t)
	for name, m := range map[string]*pb.FiguresReport{
		"no node":   {Source: h1.Kind},
		"no source": {Node: "h1"},
		"no id":     {Node: "h1", Source: h1.Kind, Objects: []*pb.ObjectFigures{{}}},
		"too many":  {Node: "h1", Source: h1.Kind, Objects: make([]*pb.ObjectFigures, wire.MessageMost+1)},
		"buckets":   {Node: "h1", Source: h1.Kind, Objects: []*pb.ObjectFigures{{VolumeId: block.VolumeID{UUID: volume(1).ID}.String(), Read: &pb.OperationFigures{Buckets: make([]uint64, 1000)}}}},
	} {
		if err := w.Take(m); !errors.Is(err, ErrReport) {
			t.Errorf("%s: %v, want an error", name, err)
		}
	}
}

// busy is what a volume reports under mixed load: reads and writes in some fifty buckets each.
func busy(r *rand.Rand, i int) *pb.ObjectFigures {
	var t figures.Tally
	for n := range 300 {
		t.Add(figures.Op(n%2), 4096, 80*time.Microsecond+time.Duration(r.ExpFloat64()*float64(400*time.Microsecond)), false)
	}
	var f figures.Figures
	t.Take(&f)
	return wire.Of(&pb.ObjectFigures{VolumeId: block.VolumeID{UUID: volume(i).ID}.String()}, &f, 0)
}

func TestABusyVolumeGoesBackAsFarAsItsBytes(t *testing.T) {
	w := newWorld(t)
	r := rand.New(rand.NewPCG(1, 1))
	for range 400 {
		w.report(busy(r, 1), reads(2, 1))
	}
	quiet := w.Look(h1, volume(2), time.Hour)
	if quiet.Covers != 5*time.Minute || quiet.Figures.IOs() != ReportsMost {
		t.Errorf("a volume with little I/O: %d I/Os in %v", quiet.Figures.IOs(), quiet.Covers)
	}
	got := w.Look(h1, volume(1), time.Hour)
	if got.Covers < time.Minute || got.Covers >= 5*time.Minute {
		t.Errorf("a busy volume goes back %v", got.Covers)
	}
	if want := uint64(got.Covers/(2*time.Second)) * 300; got.Figures.IOs() != want {
		t.Errorf("%d I/Os in %v, want %d", got.Figures.IOs(), got.Covers, want)
	}
	s := w.agents[h1].objects[volume(1)]
	if cap(s.buf) > BytesMost {
		t.Errorf("it takes %d bytes, more than %d", cap(s.buf), BytesMost)
	}
}

func TestTenThousandBusyVolumesTakeLessThan90MiB(t *testing.T) {
	w := newWorld(t)
	r := rand.New(rand.NewPCG(1, 1))
	var kinds []*pb.ObjectFigures
	for range 50 {
		kinds = append(kinds, busy(r, 0))
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 60 {
		for host := range 100 {
			m := &pb.FiguresReport{Node: fmt.Sprintf("h%d", host), Source: h1.Kind, Nanoseconds: 2e9}
			for i := range 100 {
				o := kinds[r.IntN(len(kinds))]
				o.VolumeId = block.VolumeID{UUID: volume(i).ID}.String()
				m.Objects = []*pb.ObjectFigures{o}
				m.More = i < 99
				if err := w.Take(m); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	mib := float64(after.HeapAlloc-before.HeapAlloc) / (1 << 20)
	t.Logf("10 000 busy volumes: %.1f MiB", mib)
	if mib > 90 || mib < 20 {
		t.Errorf("they take %.1f MiB", mib)
	}
	runtime.KeepAlive(w)
}

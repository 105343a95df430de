// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/raid/dm"
)

const unit = int64(4 * block.KiB)

// spare is a drive in memory that holds its IOs back on demand.
type spare struct {
	block.Device

	mu     sync.Mutex
	hold   bool
	kept   []*block.IO
	fail   error
	seen   []string // the IOs, "flush" or "write 4096 FUA"
	closed int
	losses uint64
}

func newSpare(size block.Size) *spare {
	return &spare{Device: ramdisk.New(size, 4*block.KiB)}
}

func (s *spare) Submit(io *block.IO) {
	s.mu.Lock()
	s.seen = append(s.seen, words(io))
	if s.hold {
		s.kept = append(s.kept, io)
		s.mu.Unlock()
		return
	}
	fail := s.fail
	s.mu.Unlock()
	if fail != nil {
		io.Complete(fail)
		return
	}
	s.Device.Submit(io)
}

func words(io *block.IO) string {
	text := io.Op.String()
	if io.Op != block.OpFlush {
		text += fmt.Sprintf(" %d at %d", io.Len, io.Off)
	}
	if io.FUA {
		text += " FUA"
	}
	return text
}

func (s *spare) letGo() {
	s.mu.Lock()
	kept := s.kept
	s.kept, s.hold = nil, false
	s.mu.Unlock()
	for _, io := range kept {
		s.Device.Submit(io)
	}
}

func (s *spare) Losses() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.losses
}

func (s *spare) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed++
	return nil
}

var (
	one = block.DeviceNumber{Major: fileMajor, Minor: 1}
	two = block.DeviceNumber{Major: fileMajor, Minor: 2}
	leg = block.LegID{UUID: block.UUIDFromRandom([16]byte{1})}
)

func legsOn(drives map[block.DeviceNumber]*spare) *Legs {
	return NewLegs(func(n block.DeviceNumber) (Device, error) {
		if d := drives[n]; d != nil {
			return d, nil
		}
		return nil, unix.ENODEV
	})
}

// tableOn is a leg's table of segments on a drive: pairs of offset and length, in blocks.
func tableOn(n block.DeviceNumber, segments ...int64) dm.Table {
	var t dm.Table
	var at block.Size
	for i := 0; i < len(segments); i += 2 {
		length := block.Size(segments[i+1] * unit)
		t = append(t, dm.Row{Start: at, Length: length, Target: dm.Linear{Device: dm.RefTo(n), Offset: block.Size(segments[i] * unit)}})
		at += length
	}
	return t
}

func step(op dm.Op, t dm.Table) dm.Step {
	return dm.Step{Op: op, Device: dm.Device{Name: "weft-leg-x", UUID: "weft-leg-x", Table: t}}
}

// mapLeg makes a leg and gives it its name.
func mapLeg(t *testing.T, l *Legs, table dm.Table) block.Device {
	t.Helper()
	must(t, l.Do(step(dm.OpCreate, table)))
	states, err := l.Devices("weft-leg-")
	must(t, err)
	must(t, l.Set(leg, dm.NodePath(states[0].Number)))
	d, err := l.Device("/dev/weft/leg/" + leg.String())
	must(t, err)
	return d
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestWhatIsToBeDurableIsAskedOfTheDrive: a leg stores nothing itself, so its flush, and each part
// of a durable write, go to the drive.
func TestWhatIsToBeDurableIsAskedOfTheDrive(t *testing.T) {
	d := newSpare(64 * 4 * block.KiB)
	leg := mapLeg(t, legsOn(map[block.DeviceNumber]*spare{one: d}), tableOn(one, 32, 1, 3, 1))
	must(t, block.WriteAt(leg, make([]byte, unit), 0))
	must(t, block.Flush(leg))
	must(t, block.Do(leg, &block.IO{Op: block.OpWrite, FUA: true, Len: 2 * unit, Data: make([]byte, 2*unit)}))
	must(t, block.Do(leg, &block.IO{Op: block.OpWriteZeroes, FUA: true, Len: unit}))
	want := []string{"write 4096 at 131072", "flush", "write 4096 at 131072 FUA", "write 4096 at 12288 FUA", "write zeroes 4096 at 131072 FUA"}
	if !slices.Equal(d.seen, want) {
		t.Errorf("the drive was asked for %q, want %q", d.seen, want)
	}
	d.fail = block.ErrMedium
	if err := block.Flush(leg); !errors.Is(err, block.ErrMedium) {
		t.Errorf("a flush that the drive fails = %v", err)
	}
}

// A leg is compared with a plain array of the same content.
func TestALegIsItsSegmentsInTheirOrder(t *testing.T) {
	d := newSpare(64 * 4 * block.KiB)
	l := legsOn(map[block.DeviceNumber]*spare{one: d})
	leg := mapLeg(t, l, tableOn(one, 32, 5, 3, 1, 40, 2, 0, 3))
	if g := leg.Geometry(); g.Size != 11*4*block.KiB || g.BlockSize != 4*block.KiB {
		t.Fatalf("geometry is %+v", g)
	}
	plain := make([]byte, 11*unit)
	random := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		at := random.Int64N(11)
		n := 1 + random.Int64N(11-at)
		p := make([]byte, n*unit)
		switch random.IntN(3) {
		case 0:
			must(t, block.ReadAt(leg, p, at*unit))
			if !bytes.Equal(p, plain[at*unit:][:len(p)]) {
				t.Fatalf("blocks %d to %d are not what was written", at, at+n)
			}
		case 1:
			for i := range p {
				p[i] = byte(random.Uint32())
			}
			copy(plain[at*unit:], p)
			must(t, block.WriteAt(leg, p, at*unit))
		case 2:
			clear(plain[at*unit:][:len(p)])
			must(t, block.Do(leg, &block.IO{Op: block.OpWriteZeroes, Off: at * unit, Len: n * unit}))
		}
	}
	for i, want := range []int64{32, 33, 34, 35, 36, 3, 40, 41, 0, 1, 2} {
		p := make([]byte, unit)
		must(t, block.ReadAt(d, p, want*unit))
		if !bytes.Equal(p, plain[int64(i)*unit:][:unit]) {
			t.Errorf("block %d of the leg is not block %d of the drive", i, want)
		}
	}
	must(t, block.Flush(leg))
	if err := block.WriteAt(leg, make([]byte, 2*unit), 10*unit); !errors.Is(err, block.ErrRange) {
		t.Errorf("a write beyond the end of the leg = %v, want %v", err, block.ErrRange)
	}
	d.fail = block.ErrMedium
	if err := block.WriteAt(leg, make([]byte, 6*unit), 2*unit); !errors.Is(err, block.ErrMedium) {
		t.Errorf("a write that the drive fails = %v, want %v", err, block.ErrMedium)
	}
}

func TestAnUnmappedLegHasLeftItsDrive(t *testing.T) {
	d := newSpare(16 * 4 * block.KiB)
	l := legsOn(map[block.DeviceNumber]*spare{one: d})
	leg := mapLeg(t, l, tableOn(one, 0, 2, 8, 2))
	d.hold = true
	written := make(chan error, 1)
	go func() { written <- block.WriteAt(leg, make([]byte, 4*unit), 0) }()
	removed := make(chan error, 1)
	go func() { removed <- l.Do(step(dm.OpRemove, nil)) }()
	for { // until both wait
		states, _ := l.Devices("")
		d.mu.Lock()
		n := len(d.kept)
		d.mu.Unlock()
		if len(states) == 0 && n == 2 {
			break
		}
		if len(states) == 0 && n == 0 { // the removal came first
			must(t, <-removed)
			if err := <-written; !errors.Is(err, block.ErrGone) {
				t.Fatalf("a write to a leg that is gone = %v, want %v", err, block.ErrGone)
			}
			return
		}
		runtime.Gosched()
	}
	select {
	case err := <-removed:
		t.Fatalf("remove returned (%v) while a write is in the drive", err)
	default:
	}
	d.letGo()
	must(t, <-written)
	must(t, <-removed)
	if d.closed != 1 {
		t.Errorf("the drive was given back %d times, want once", d.closed)
	}
	if err := block.ReadAt(leg, make([]byte, unit), 0); !errors.Is(err, block.ErrGone) {
		t.Errorf("a read of a leg that is gone = %v, want %v", err, block.ErrGone)
	}
}

func TestALegMovesWithItsDrive(t *testing.T) {
	a, b := newSpare(16*4*block.KiB), newSpare(16*4*block.KiB)
	l := legsOn(map[block.DeviceNumber]*spare{one: a, two: b})
	leg := mapLeg(t, l, tableOn(one, 0, 4))
	must(t, block.WriteAt(leg, bytes.Repeat([]byte{1}, int(unit)), 0))
	must(t, l.Do(step(dm.OpReload, tableOn(two, 4, 4))))
	must(t, block.WriteAt(leg, bytes.Repeat([]byte{2}, int(unit)), 0))
	p := make([]byte, unit)
	must(t, block.ReadAt(b, p, 4*unit))
	if p[0] != 2 || a.closed != 1 || b.closed != 0 {
		t.Errorf("the drive has %d, want 2; given back: %d and %d times, want 1 and 0", p[0], a.closed, b.closed)
	}
	must(t, l.Close(t.Context()))
	if b.closed != 1 {
		t.Errorf("after Close the drive was given back %d times, want once", b.closed)
	}
}

// TestALegThatIsMappedTooLateGivesItsDriveBack: its drive may have hung while the agent ended, and the
// next process needs the drive.
func TestALegThatIsMappedTooLateGivesItsDriveBack(t *testing.T) {
	d := newSpare(16 * 4 * block.KiB)
	asked, answer := make(chan struct{}), make(chan struct{})
	l := NewLegs(func(block.DeviceNumber) (Device, error) {
		close(asked)
		<-answer
		return d, nil
	})
	mapped := make(chan error, 1)
	go func() { mapped <- l.Do(step(dm.OpCreate, tableOn(one, 0, 4))) }()
	<-asked
	must(t, l.Close(t.Context()))
	close(answer)
	if err := <-mapped; !errors.Is(err, fs.ErrClosed) {
		t.Errorf("a leg is mapped after Close: %v, want %v", err, fs.ErrClosed)
	}
	if d.closed != 1 {
		t.Errorf("the drive was given back %d times, want once", d.closed)
	}
}

func TestWhatIsNoLegIsRefused(t *testing.T) {
	d := newSpare(16 * 4 * block.KiB)
	l := legsOn(map[block.DeviceNumber]*spare{one: d})
	for name, s := range map[string]dm.Step{
		"another drive's rows": step(dm.OpCreate, append(tableOn(one, 0, 1), dm.Row{Start: 4 * block.KiB, Length: 4 * block.KiB, Target: dm.Linear{Device: dm.RefTo(two)}})),
		"beyond the drive":     step(dm.OpCreate, tableOn(one, 12, 5)),
		"no drive":             step(dm.OpCreate, tableOn(two, 0, 1)),
		"half a block":         step(dm.OpCreate, dm.Table{{Length: 512, Target: dm.Linear{Device: dm.RefTo(one)}}}),
		"no linear map":        step(dm.OpCreate, dm.Whole(4*block.KiB, dm.Zero{})),
		"nothing to reload":    step(dm.OpReload, tableOn(one, 0, 1)),
		"nothing to remove":    step(dm.OpRemove, nil),
	} {
		before := d.closed
		if err := l.Do(s); err == nil {
			t.Errorf("%s: no error", name)
		}
		if name == "beyond the drive" && d.closed == before {
			t.Errorf("%s: the drive was not given back", name)
		}
	}
	mapLeg(t, l, tableOn(one, 0, 1))
	if err := l.Do(step(dm.OpCreate, tableOn(one, 0, 1))); !errors.Is(err, unix.EBUSY) {
		t.Errorf("creating a leg twice = %v, want %v", err, unix.EBUSY)
	}
	must(t, l.Set(leg, ""))
	if _, err := l.Device("/dev/weft/leg/" + leg.String()); err == nil {
		t.Error("a leg without a name was found")
	}
}

func BenchmarkALegsIO(b *testing.B) {
	leg, ios := benchLeg(b)
	b.ReportAllocs()
	for b.Loop() {
		leg.Submit(ios[0])
	}
}

// bare is a drive in memory.
type bare struct{ block.Device }

func (bare) Losses() uint64 { return 0 }
func (bare) Close() error   { return nil }

// benchLeg is a leg of two segments in memory, and reads of it: of both segments, and of each of its blocks.
func benchLeg(b *testing.B) (*linear, []*block.IO) {
	const blocks = 256
	l := NewLegs(func(block.DeviceNumber) (Device, error) {
		return bare{ramdisk.New((2*blocks+8)*4*block.KiB, 4*block.KiB)}, nil
	})
	if err := l.Do(step(dm.OpCreate, tableOn(one, 0, blocks, blocks+4, blocks))); err != nil {
		b.Fatal(err)
	}
	ios := []*block.IO{{Op: block.OpRead, Off: (blocks - 1) * unit, Len: 2 * unit, Data: make([]byte, 2*unit), Done: func(*block.IO) {}}}
	for i := range int64(2 * blocks) {
		ios = append(ios, &block.IO{Op: block.OpRead, Off: i * unit, Len: unit, Data: make([]byte, unit), Done: func(*block.IO) {}})
	}
	return l.mapped["weft-leg-x"].linear, ios
}

// BenchmarkCounting measures what counting costs. One iteration does as many IOs without counts as
// with them, on the same leg. A turn is so short that few turns are interrupted, and the median of
// the ratios of two that follow one another is reported.
func BenchmarkCounting(b *testing.B) {
	leg, ios := benchLeg(b)
	b.Run("two parts", func(b *testing.B) { counting(b, leg, func(int) *block.IO { return ios[0] }) })
	b.Run("4k", func(b *testing.B) { counting(b, leg, func(n int) *block.IO { return ios[1+n*167%512] }) })
}

func counting(b *testing.B, leg *linear, at func(int) *block.IO) {
	const ios = 512
	turn := func(off bool) float64 {
		leg.off = off
		began := time.Now()
		for n := range ios {
			leg.Submit(at(n))
		}
		return float64(time.Since(began)) / ios
	}
	var without, with, ratios []float64
	for i := 0; b.Loop(); i++ {
		first := i%2 == 0
		x, y := turn(first), turn(!first)
		if !first {
			x, y = y, x
		}
		without, with, ratios = append(without, x), append(with, y), append(ratios, y/x)
	}
	b.ReportMetric(0, "ns/op")
	for _, m := range []struct {
		of   []float64
		name string
	}{{without, "ns/IO-without"}, {with, "ns/IO-with"}, {ratios, "with/without"}} {
		slices.Sort(m.of)
		b.ReportMetric(m.of[len(m.of)/2], m.name)
	}
}

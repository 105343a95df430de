// SPDX-License-Identifier: Apache-2.0

package mirror_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// These tests build the planned stacks on a real kernel, make legs fail under them, and
// check the data on the legs.

const legSize = 16 * block.MiB

// bench is a volume of one column, or of columns of one copy, whose legs can fail.
type bench struct {
	*testing.T
	client     *dm.Client
	volume     block.VolumeID
	layout     block.Layout
	size       block.Size
	legs       []dm.Device // over disks
	files      []string    // under them
	log        dm.Loop
	logFile    string
	second     dm.Loop // another log, of a test that needs it
	secondFile string
}

func newBench(t *testing.T, l block.Layout, size block.Size) *bench {
	requireKernel(t)
	c, err := dm.Open()
	b := &bench{T: t, client: c, layout: l, size: size}
	b.must(err)
	t.Cleanup(func() { c.Close() })
	copy(b.volume.UUID[:], fmt.Sprintf("%-16d", os.Getpid()))
	for i := range l.Legs() {
		disk, file := b.loop(fmt.Sprint("disk", i), legSize)
		b.files = append(b.files, file)
		name := fmt.Sprintf("weft-bench-%d-%d", os.Getpid(), i)
		b.legs = append(b.legs, dm.Device{Name: name, UUID: name, Table: dm.Whole(legSize, dm.Linear{Device: dm.RefTo(disk.Number)})})
	}
	b.log, b.logFile = b.loop("log", mirror.LogDeviceSize)
	t.Cleanup(b.tearDown)
	for _, d := range b.legs {
		b.must(c.Do(dm.Step{Op: dm.OpCreate, Device: d}))
	}
	return b
}

// requireKernel skips the test where there is no device mapper. If WEFT_REQUIRE_DM is set,
// the test fails instead.
func requireKernel(t *testing.T) {
	skip := t.Skipf
	if os.Getenv("WEFT_REQUIRE_DM") != "" {
		skip = t.Fatalf
	}
	c, err := dm.Open()
	if err != nil {
		skip("needs root and a kernel with device-mapper: %v", err)
	}
	defer c.Close()
	targets, err := c.Targets()
	if _, ok := targets["mirror"]; !ok {
		skip("needs the mirror target (module dm-mirror): %v", err)
	}
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *bench) loop(name string, size block.Size) (dm.Loop, string) {
	file := filepath.Join(b.TempDir(), name)
	b.must(os.WriteFile(file, nil, 0o600))
	b.must(os.Truncate(file, int64(size)))
	l, err := new(dm.Loops).Attach(file)
	b.must(err)
	b.Cleanup(func() { b.must(new(dm.Loops).Detach(l)) })
	return l, file
}

func (b *bench) tearDown() {
	// Held writes keep devices open; they are released once the legs work.
	for i := range b.legs {
		b.heal(i)
	}
	for _, prefix := range []string{mirror.TopUUID(b.volume), "weft-bench-"} {
		b.eventually("removal of "+prefix, func() error {
			got, err := b.client.Devices(prefix)
			for _, s := range dm.Diff(got, nil) {
				err = errors.Join(err, b.client.Do(s))
			}
			return err
		})
	}
}

// eventually tries until there is no error.
func (b *bench) eventually(what string, f func() error) {
	b.Helper()
	var err error
	for range 300 {
		if err = f(); err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	b.Fatalf("%s: %v", what, err)
}

func (b *bench) number(i int) dm.Ref {
	info, err := b.client.Info(b.legs[i].Name)
	b.must(err)
	return dm.RefTo(info.Number)
}

// column is column k with legs in these states.
func (b *bench) column(k int, states ...mirror.LegState) mirror.Column {
	c := mirror.NewColumn(b.volume, k, b.layout, b.size, dm.RefTo(b.log.Number))
	for i, s := range states {
		c.Legs = append(c.Legs, mirror.Leg{Device: b.number(k*b.layout.Copies + i), State: s})
	}
	return c
}

// reach repeats a plan and its steps until they succeed, and checks that the kernel then
// has the wanted shape.
func (b *bench) reach(c mirror.Column) {
	b.Helper()
	b.eventually("reach "+string(c.Shape().Kind), func() error {
		got, err := b.client.Devices(mirror.TopUUID(b.volume))
		b.must(err)
		steps, err := mirror.Plan(got, c)
		b.must(err)
		for _, s := range steps {
			if s.Log != nil {
				file, _ := b.logFiles(s.Log.Device)
				b.writeTo(file, s.Log.Image)
				continue
			}
			do := func() error { return b.client.Do(*s.DM) }
			if s.LogTo > 0 {
				do = func() error {
					return b.client.DoWith(*s.DM, func() error { b.writeLog(b.readLog().Grow(s.LogTo)); return nil })
				}
			}
			if s.Lacked != nil {
				do = func() error {
					return b.client.DoWith(*s.DM, func() error {
						to, from := b.logFiles(c.Log)
						b.writeTo(to, must2(b.readFrom(from).Merge(*s.Lacked)))
						return nil
					})
				}
			}
			if err := do(); err != nil {
				return err
			}
		}
		o, err := mirror.Observe(c.Name, must2(b.client.Devices(mirror.TopUUID(b.volume))))
		if want := c.Shape(); err != nil || o.Kind != want.Kind || o.Copy != want.Copy || !slices.Equal(o.Sources, want.Sources) {
			b.Fatalf("Observe = %+v, %v; want %+v", o, err, want)
		}
		return nil
	})
}

func must2[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// logFiles are the file under a log, and the one under the other log.
func (b *bench) logFiles(log dm.Ref) (file, other string) {
	if log == dm.RefTo(b.log.Number) {
		return b.logFile, b.secondFile
	}
	return b.secondFile, b.logFile
}

func (b *bench) writeLog(image mirror.LogImage) { b.writeTo(b.logFile, image) }

func (b *bench) writeTo(file string, image mirror.LogImage) {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	b.must(err)
	defer f.Close()
	_, err = f.WriteAt(image.Bytes(), 0)
	b.must(err)
}

func (b *bench) readLog() mirror.LogImage { return b.readFrom(b.logFile) }

func (b *bench) readFrom(file string) mirror.LogImage {
	raw, err := os.ReadFile(file)
	b.must(err)
	image, err := mirror.ParseLog(raw)
	b.must(err)
	return image
}

func (b *bench) expose() {
	b.must(b.client.Do(dm.Step{Op: dm.OpCreate, Device: mirror.Top(b.volume, b.layout, b.size)}))
}

// fail makes a leg fail all I/O; heal undoes it.
func (b *bench) fail(leg int) {
	d := b.legs[leg]
	d.Table = dm.Whole(legSize, dm.ErrorTarget{})
	b.must(b.client.Do(dm.Step{Op: dm.OpReload, Device: d}))
}

func (b *bench) heal(leg int) {
	b.must(b.client.Do(dm.Step{Op: dm.OpReload, Device: b.legs[leg]}))
}

// start writes 4 KiB of a letter to the volume, past the page cache.
func (b *bench) start(at block.Size, letter byte) <-chan error {
	b.Helper()
	info, err := b.client.Info(mirror.TopName(b.volume))
	b.must(err)
	f, err := os.OpenFile(dm.NodePath(info.Number), os.O_RDWR|unix.O_DIRECT, 0)
	b.must(err)
	written := make(chan error, 1)
	go func() {
		defer f.Close()
		p := aligned(4096)
		for i := range p {
			p[i] = letter
		}
		_, err := f.WriteAt(p, int64(at))
		written <- err
	}()
	return written
}

func (b *bench) write(at block.Size, letter byte) {
	b.Helper()
	b.released(b.start(at, letter))
}

func (b *bench) released(written <-chan error) {
	b.Helper()
	select {
	case err := <-written:
		b.must(err)
	case <-time.After(20 * time.Second):
		b.Fatal("a write was not acknowledged within 20 s")
	}
}

func (b *bench) held(written <-chan error) {
	b.Helper()
	select {
	case err := <-written:
		b.Fatalf("a write that a leg lacks was acknowledged: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
}

// aligned returns memory that is aligned for O_DIRECT.
func aligned(n int) []byte {
	const page = 4096
	p := make([]byte, n+page)
	skip := page - int(uintptr(unsafe.Pointer(&p[0]))%page)
	return p[skip : skip+n]
}

// on returns the byte on a leg at an offset.
func (b *bench) on(leg int, at block.Size) byte {
	f, err := os.Open(b.files[leg])
	b.must(err)
	defer f.Close()
	p := make([]byte, 1)
	_, err = f.ReadAt(p, int64(at))
	b.must(err)
	return p[0]
}

func (b *bench) wantOn(at block.Size, letters string) {
	b.Helper()
	for leg, want := range []byte(letters) {
		if want == '.' {
			want = 0
		}
		if got := b.on(leg, at); got != want {
			b.Errorf("leg %d has %q at %v, want %q", leg, got, at, want)
		}
	}
}

func (b *bench) wantIdentical() {
	b.Helper()
	first := must2(os.ReadFile(b.files[0]))
	for i, file := range b.files[1:] {
		if !bytes.Equal(first, must2(os.ReadFile(file))) {
			b.Errorf("legs 0 and %d differ", i+1)
		}
	}
}

// synced waits until the column's mirror has all regions in sync.
func (b *bench) synced(name string) {
	b.Helper()
	b.eventually("resync of "+name, func() error {
		s, err := b.client.MirrorStatus(name)
		b.must(err)
		if !s.Synced() || !s.Healthy() {
			return fmt.Errorf("status %v", s)
		}
		return nil
	})
}

// sectorsWritten returns the number of sectors that were ever written to a leg.
func (b *bench) sectorsWritten(leg int) int {
	info, err := b.client.Info(b.legs[leg].Name)
	b.must(err)
	stat := strings.Fields(string(must2(os.ReadFile(fmt.Sprintf("/sys/block/dm-%d/stat", info.Number.Minor)))))
	return must2(strconv.Atoi(stat[6]))
}

var mirrored = block.Layout{Stripes: 1, Copies: 2, Chunk: block.DefaultChunk}

func TestAWriteIsHeldUntilTheTableIsSwapped(t *testing.T) {
	b := newBench(t, mirrored, legSize)
	const ok, gone, back = mirror.InSync, mirror.Tracked, mirror.Rebuilding
	b.reach(b.column(0, ok, ok))
	b.expose()
	b.write(0, 'a')
	b.wantOn(0, "aa")

	before, err := b.client.Info(mirror.ColumnName(b.volume, 0))
	b.must(err)
	b.fail(1)
	held := []<-chan error{b.start(block.MiB, 'b'), b.start(2*block.MiB, 'c')}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := b.client.Wait(ctx, before.Name, before.EventNr); err != nil {
		t.Errorf("Wait for the failure: %v", err)
	}
	b.held(held[0])
	b.held(held[1])

	b.reach(b.column(0, ok, gone))
	b.released(held[0])
	b.released(held[1])
	b.write(3*block.MiB, 'd')
	for at, letters := range map[block.Size]string{0: "aa", block.MiB: "b.", 2 * block.MiB: "c.", 3 * block.MiB: "d."} {
		b.wantOn(at, letters)
	}
	region := raid.RegionSize(legSize)
	log := b.readLog()
	for _, at := range []block.Size{block.MiB, 2 * block.MiB, 3 * block.MiB} {
		if !log.Dirty(uint64(at / region)) {
			t.Errorf("the region at %v is not dirty", at)
		}
	}
	if log.CountDirty() < 3 || log.CountDirty() > 5 {
		t.Errorf("the log has %d dirty regions, want 3, or hardly more", log.CountDirty())
	}

	sectors := b.sectorsWritten(1)
	b.heal(1)
	b.reach(b.column(0, ok, back))
	b.synced(mirror.ColumnName(b.volume, 0))
	if copied := block.Size(b.sectorsWritten(1)-sectors) * block.SectorSize; copied < 3*region || copied > 6*region {
		t.Errorf("the resync copied %v, want three regions of %v, or hardly more", copied, region)
	}
	b.reach(b.column(0, ok, ok))
	b.write(4*block.MiB, 'e')
	b.wantOn(4*block.MiB, "ee")
	b.wantIdentical()
}

func TestThreeCopiesLoseTwoAndGetThemBack(t *testing.T) {
	l := mirrored
	l.Copies = 3
	b := newBench(t, l, legSize)
	const ok, gone, back, absent = mirror.InSync, mirror.Tracked, mirror.Rebuilding, mirror.Absent
	column := mirror.ColumnName(b.volume, 0)
	b.reach(b.column(0, ok, ok, ok))
	b.expose()
	b.write(0, 'a')
	b.wantOn(0, "aaa")

	b.fail(2)
	first := b.start(block.MiB, 'b')
	b.held(first)
	b.reach(b.column(0, ok, ok, gone))
	b.released(first)
	b.wantOn(block.MiB, "bb.")

	b.fail(0)
	second := b.start(2*block.MiB, 'c')
	b.held(second)
	b.reach(b.column(0, absent, ok, gone))
	b.released(second)
	b.wantOn(block.MiB, "bb.")
	b.wantOn(2*block.MiB, ".c.")

	sectors := b.sectorsWritten(2)
	b.heal(2)
	b.reach(b.column(0, absent, ok, back))
	b.synced(column)
	if copied := block.Size(b.sectorsWritten(2)-sectors) * block.SectorSize; copied > block.MiB {
		t.Errorf("the resync of a tracked leg copied %v of %v", copied, legSize)
	}
	b.wantOn(2*block.MiB, ".cc")
	b.reach(b.column(0, absent, ok, ok))
	b.write(3*block.MiB, 'd')
	b.wantOn(3*block.MiB, ".dd")

	b.heal(0)
	b.reach(b.column(0, back, ok, ok))
	third := b.start(4*block.MiB, 'e') // goes to both that are in sync, copied or not
	b.released(third)
	b.wantOn(4*block.MiB, string([]byte{b.on(0, 4*block.MiB), 'e', 'e'}))
	b.synced(column)
	b.reach(b.column(0, ok, ok, ok))
	b.wantIdentical()
}

// A log begins clean for a leg of which it knows nothing, and has what that leg misses from then on. What it lacked
// before becomes a part of another log with the switch that adds it, and nothing else is copied.
func TestALegJoinsWithWhatItLackedBefore(t *testing.T) {
	b := newBench(t, mirrored, legSize)
	const ok, gone, back, absent = mirror.InSync, mirror.Tracked, mirror.Rebuilding, mirror.Absent
	b.reach(b.column(0, ok, absent))
	b.expose()
	b.write(0, 'a')
	b.write(8*block.MiB, 'b') // which is not told

	begun := b.column(0, ok, gone)
	begun.FromNow = true
	b.reach(begun)
	b.write(block.MiB, 'c')
	b.wantOn(block.MiB, "c.")

	joined := b.column(0, ok, back)
	lacked := mirror.CleanLog(joined.Regions())
	lacked.Mark(0)
	b.second, b.secondFile = b.loop("second", mirror.LogDeviceSize)
	joined.Lacked, joined.Log = &lacked, dm.RefTo(b.second.Number)
	sectors := b.sectorsWritten(1)
	b.reach(joined)
	b.synced(mirror.ColumnName(b.volume, 0))
	if copied := block.Size(b.sectorsWritten(1)-sectors) * block.SectorSize; copied != 2*joined.RegionSize() {
		t.Errorf("%v were copied, want two regions of %v", copied, joined.RegionSize())
	}
	b.wantOn(0, "aa")
	b.wantOn(block.MiB, "cc")
	b.wantOn(8*block.MiB, "b.")
	b.reach(b.column(0, ok, ok))
	b.write(2*block.MiB, 'd')
	b.wantOn(2*block.MiB, "dd")
}

// What a leg missed so far stays in the log before, and what it misses from then on goes to the new one. Both together
// are copied to it.
func TestTheLogOfALostLegBeginsAnew(t *testing.T) {
	b := newBench(t, mirrored, legSize)
	const ok, gone, back = mirror.InSync, mirror.Tracked, mirror.Rebuilding
	b.reach(b.column(0, ok, ok))
	b.expose()
	b.write(0, 'a')
	b.reach(b.column(0, ok, gone))
	b.write(4*block.MiB, 'b')

	anew := b.column(0, ok, gone)
	b.second, b.secondFile = b.loop("second", mirror.LogDeviceSize)
	anew.FromNow, anew.Log = true, dm.RefTo(b.second.Number)
	b.reach(anew)
	b.write(8*block.MiB, 'c')
	dirty := func(file string) (all []block.Size) {
		for image, r := b.readFrom(file), uint64(0); r < image.Regions(); r++ {
			if image.Dirty(r) {
				all = append(all, block.Size(r)*anew.RegionSize())
			}
		}
		return all
	}
	before, now := dirty(b.logFile), dirty(b.secondFile)
	if !slices.Contains(before, 4*block.MiB) || slices.Contains(before, 8*block.MiB) || !slices.Equal(now, []block.Size{8 * block.MiB}) {
		t.Errorf("the log before has %v, want 4MiB and not 8MiB; the one in use %v, want 8MiB", before, now)
	}

	joined := b.column(0, ok, back)
	joined.Lacked = new(b.readLog())
	sectors := b.sectorsWritten(1)
	b.reach(joined)
	b.synced(mirror.ColumnName(b.volume, 0))
	if copied := block.Size(b.sectorsWritten(1)-sectors) * block.SectorSize; copied != block.Size(len(before)+1)*joined.RegionSize() {
		t.Errorf("%v were copied, want %d regions of %v", copied, len(before)+1, joined.RegionSize())
	}
	b.reach(b.column(0, ok, ok))
	b.wantIdentical()
}

func TestLegsThatDifferAreEqualized(t *testing.T) {
	b := newBench(t, mirrored, legSize)
	for i, letter := range []string{"x", "y"} {
		f, err := os.OpenFile(b.files[i], os.O_RDWR, 0)
		b.must(err)
		_, err = f.WriteAt([]byte(letter), int64(5*block.MiB))
		b.must(err)
		f.Close()
	}
	c := b.column(0, mirror.InSync, mirror.InSync)
	c.Equalize = true
	b.reach(c)
	b.synced(c.Name)
	b.reach(b.column(0, mirror.InSync, mirror.InSync))
	b.wantOn(5*block.MiB, "xx")
	b.wantIdentical()
}

// A crash between suspend and resume leaves a mirror suspended with a failed
// region. Resumed as it is, 6.1 acknowledges a write there that one leg lacks.
func TestASuspendedMirrorGoesOnWithAllItsLegs(t *testing.T) {
	b := newBench(t, mirrored, legSize)
	c := b.column(0, mirror.InSync, mirror.InSync)
	b.reach(c)
	b.expose()
	b.fail(1)
	held := b.start(block.MiB, 'b')
	b.held(held)
	b.must(b.client.Suspend(c.Name, true, true))
	b.heal(1)
	if os.Getenv("WEFT_BARE_RESUME") != "" { // to see what happens without care
		b.must(b.client.Resume(c.Name, dm.UdevInner))
	}
	b.reach(c)
	b.released(held)
	b.wantOn(block.MiB, "bb")
}

func TestChunksLieWhereLocateSays(t *testing.T) {
	l := block.Layout{Stripes: 3, Copies: 1, Chunk: 64 * block.KiB}
	size := 2*block.MiB + 100*block.KiB // neither whole rounds nor whole chunks
	b := newBench(t, l, size)
	for k := range l.Stripes {
		b.reach(b.column(k, mirror.InSync))
	}
	b.expose()
	info, err := b.client.Info(mirror.TopName(b.volume))
	b.must(err)
	sectors := strings.TrimSpace(string(must2(os.ReadFile(fmt.Sprintf("/sys/block/dm-%d/size", info.Number.Minor)))))
	if want := strconv.FormatUint(uint64(size/block.SectorSize), 10); sectors != want {
		t.Errorf("the device has %s sectors, want %s", sectors, want)
	}
	for at := block.Size(0); at < size; at += 4 * block.KiB {
		letter := byte(at/(4*block.KiB)%251) + 1
		b.write(at, letter)
		p := raid.Locate(l, at)
		if got := b.on(p.Column, p.Offset); got != letter {
			t.Fatalf("leg %d has %d at %d, want %d, written at %d", p.Column, got, p.Offset, letter, at)
		}
	}
}

func TestAColumnGrowsInPlace(t *testing.T) {
	b := newBench(t, mirrored, legSize/2)
	b.reach(b.column(0, mirror.InSync, mirror.InSync))
	b.expose()
	b.write(0, 'a')
	b.fail(1)
	held := b.start(block.MiB, 'b')
	b.held(held)
	b.reach(b.column(0, mirror.InSync, mirror.Tracked))
	b.released(held)
	if image := b.readLog(); image.Regions() != 32 || image.CountDirty() != 1 || !image.Dirty(4) {
		b.Errorf("before, %d of %d regions are dirty; want 4 of 32", image.CountDirty(), image.Regions())
	}
	b.grow(b.column(0, mirror.InSync, mirror.Tracked))
	// The kernel has written this log from the table that is live now.
	if image := b.readLog(); image.Regions() != 64 || image.CountDirty() != 1 || !image.Dirty(4) {
		b.Errorf("after, %d of %d regions are dirty; want 4 of 64", image.CountDirty(), image.Regions())
	}
	b.write(12*block.MiB, 'c')
	if image := b.readLog(); image.CountDirty() != 2 || !image.Dirty(4) || !image.Dirty(48) {
		b.Errorf("with a write to the new part, %d regions are dirty; want 4 and 48", image.CountDirty())
	}
	b.heal(1)
	before := b.sectorsWritten(1)
	b.reach(b.column(0, mirror.InSync, mirror.Rebuilding))
	b.synced(mirror.ColumnName(b.volume, 0))
	if copied := b.sectorsWritten(1) - before; copied != 2*512 {
		b.Errorf("%d sectors were copied to the leg that is back, want those of two regions", copied)
	}
	b.reach(b.column(0, mirror.InSync, mirror.InSync))
	b.wantOn(0, "aa")
	b.wantOn(block.MiB, "bb")
	b.wantOn(12*block.MiB, "cc")
	b.wantIdentical()
}

// grow makes columns as long as the legs, and then the volume's device.
func (b *bench) grow(columns ...mirror.Column) {
	b.Helper()
	b.size = legSize * block.Size(b.layout.Stripes)
	for _, c := range columns {
		c.Size = legSize
		b.reach(c)
	}
	top, err := b.client.Devices(mirror.TopUUID(b.volume))
	b.must(err)
	top = slices.DeleteFunc(top, func(s dm.State) bool { return s.Name != mirror.TopName(b.volume) })
	for _, s := range dm.Diff(top, []dm.Device{mirror.Top(b.volume, b.layout, b.size)}) {
		b.must(b.client.Do(s))
	}
}

func (b *bench) queue(name, file string) string {
	info, err := b.client.Info(name)
	b.must(err)
	return fmt.Sprintf("/sys/block/dm-%d/%s", info.Number.Minor, file)
}

// TestADeviceGrowsUnderIO: writers continue, find their blocks unchanged, and see the new
// size through the descriptor that they have open.
func TestADeviceGrowsUnderIO(t *testing.T) {
	b := newBench(t, block.Layout{Stripes: 2, Copies: 1, Chunk: 64 * block.KiB}, legSize+100*block.KiB)
	columns := []mirror.Column{b.column(0, mirror.InSync), b.column(1, mirror.InSync)}
	for i := range columns {
		b.reach(columns[i])
	}
	b.expose()
	info, err := b.client.Info(mirror.TopName(b.volume))
	b.must(err)
	f, err := os.OpenFile(dm.NodePath(info.Number), os.O_RDWR|unix.O_DIRECT, 0)
	b.must(err)
	defer f.Close()
	const blocks = 64 // each in a chunk of its own, the last ones beyond the whole rounds
	apart := int64(b.size) / blocks &^ 4095
	at := func(i int) int64 { return int64(i) * apart }
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		p, q := aligned(4096), aligned(4096)
		for round := byte(1); ; round++ {
			for i := range blocks {
				p[0], p[4095] = round, byte(i)
				if _, err := f.WriteAt(p, at(i)); err != nil {
					ended <- err
					return
				}
			}
			for i := range blocks {
				p[0], p[4095] = round, byte(i)
				if _, err := f.ReadAt(q, at(i)); err != nil || q[0] != round || q[4095] != byte(i) {
					ended <- fmt.Errorf("block %d holds %d %d after round %d: %v", i, q[0], q[4095], round, err)
					return
				}
			}
			select {
			case <-end:
				ended <- nil
				return
			default:
			}
		}
	}()
	b.grow(columns...)
	size, err := f.Seek(0, 2)
	if err != nil || block.Size(size) != 2*legSize {
		t.Errorf("who has the device open sees %d bytes, %v; want %d", size, err, 2*legSize)
	}
	b.write(2*legSize-4096, 'z')
	close(end)
	b.must(<-ended)
	if got := b.on(1, legSize-4096); got != 'z' {
		t.Errorf("the last block of the last leg holds %d", got)
	}
}

// TestDiscardsStayOffWhileADeviceGrows: a new table resets a device's limits to those of
// the devices below it, so the limit of the column decides.
func TestDiscardsStayOffWhileADeviceGrows(t *testing.T) {
	b := newBench(t, mirrored, legSize/2)
	b.reach(b.column(0, mirror.InSync, mirror.InSync))
	b.expose()
	discards := func(name string) string {
		return strings.TrimSpace(string(must2(os.ReadFile(b.queue(name, "queue/discard_max_bytes")))))
	}
	top, column := mirror.TopName(b.volume), mirror.ColumnName(b.volume, 0)
	if discards(top) == "0" {
		t.Skip("the legs have no discards")
	}
	b.size = legSize
	b.reach(b.column(0, mirror.InSync, mirror.InSync))
	b.must(os.WriteFile(b.queue(column, "queue/discard_max_bytes"), []byte("0"), 0))
	b.grow(b.column(0, mirror.InSync, mirror.InSync))
	if got := discards(top); got != "0" {
		t.Errorf("after it has grown the device takes discards of %s bytes", got)
	}
}

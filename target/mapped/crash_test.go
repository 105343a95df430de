// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/treecheck"
)

var (
	histories = flag.Int("histories", 3, "random histories of each kind of drive")
	firstSeed = flag.Uint64("first", 1, "seed of the first one")
	opCount   = flag.Int("ops", 45, "operations of a history")
)

const (
	firstExtent = 8 << 20
	objectSize  = 3 << 20
	extraChunks = 6 // free in the base image, so that trees are full now and then
)

// windows are the parts of an object that histories write to: inside a chunk, and across two.
var windows = [][2]int64{{0, 48 << 10}, {1<<20 - 32<<10, 1<<20 + 32<<10}, {2<<20 + 80<<10, 2<<20 + 128<<10}}

// histories have few writes at once, and short chains. Chunks are prepared where a test says so.
func init() { togetherFrom, farFrom, farChunks, prepareAhead = 2, 1, 2, 0 }

func windowSectors() (n int) {
	for _, w := range windows {
		n += int(w[1]-w[0]) / sector
	}
	return n
}

// place finds a sector of the windows in the object.
func sectorAt(i int) int64 {
	for _, w := range windows {
		n := int(w[1]-w[0]) / sector
		if i < n {
			return w[0] + int64(i)*sector
		}
		i -= n
	}
	panic("beyond the windows")
}

func id(n uint64) block.UUID {
	var u block.UUID
	binary.BigEndian.PutUint64(u[8:], n)
	u[0] = 0xaa
	return u
}

func testPlace(d block.Device) Place {
	return Place{Device: d, First: firstExtent, Tree: block.UUID{1, 2, 3}, Drive: block.UUID{4, 5, 6}, Extents: []uint32{2, 0}}
}

const testSize = firstExtent + 3*256<<20 + 8<<20

// tagged is data of which each sector says which write it is of, at both ends.
func tagged(tag uint64, sectors int) []byte {
	b := make([]byte, sectors*sector)
	for i := range sectors {
		binary.LittleEndian.PutUint64(b[i*sector:], tag)
		binary.LittleEndian.PutUint64(b[(i+1)*sector-8:], tag)
	}
	return b
}

func tags(b []byte) []uint64 {
	out := make([]uint64, len(b)/sector)
	for i := range out {
		out[i] = binary.LittleEndian.Uint64(b[i*sector:])
		if binary.LittleEndian.Uint64(b[(i+1)*sector-8:]) != out[i] {
			out[i] = ^uint64(0)
		}
	}
	return out
}

// model is what each object holds, by sector of the windows, and what else a sector may hold after
// a power cut.
type model struct {
	objects map[block.UUID][]uint64
	may     map[block.UUID]map[int][]uint64
	frozen  map[block.UUID]bool
}

func newModel() model {
	return model{map[block.UUID][]uint64{}, map[block.UUID]map[int][]uint64{}, map[block.UUID]bool{}}
}

func (m model) clone() model {
	c := newModel()
	c.frozen = maps.Clone(m.frozen)
	for k, v := range m.objects {
		c.objects[k] = slices.Clone(v)
	}
	for k, v := range m.may {
		c.may[k] = map[int][]uint64{}
		for i, x := range v {
			c.may[k][i] = slices.Clone(x)
		}
	}
	return c
}

// world is a tree, the drive below it, and what it should hold.
type world struct {
	r     *rand.Rand
	kind  kindOfTree
	d     *drive
	t     *Tree
	legs  map[block.UUID]*Leg
	m     model
	next  uint64
	bg    sync.WaitGroup
	bgErr atomic.Pointer[error]
	fulls int
	n     *counts
	of    owners
}

func (w *world) leg(object block.UUID) *Leg {
	if l := w.legs[object]; l != nil {
		return l
	}
	l, err := w.t.Leg(object)
	if err != nil {
		panic(err)
	}
	w.legs[object] = l
	return l
}

func (w *world) close(object block.UUID) {
	if l := w.legs[object]; l != nil {
		l.Close()
		delete(w.legs, object)
	}
}

func readObject(l *Leg) []uint64 {
	var out []uint64
	for _, w := range windows {
		b := make([]byte, w[1]-w[0])
		if err := block.ReadAt(l, b, w[0]); err != nil {
			panic(err)
		}
		out = append(out, tags(b)...)
	}
	return out
}

func (w *world) names(frozen bool) []block.UUID {
	var out []block.UUID
	for k := range w.m.objects {
		if w.m.frozen[k] == frozen {
			out = append(out, k)
		}
	}
	slices.SortFunc(out, func(a, b block.UUID) int { return cmp.Compare(a.String(), b.String()) })
	return out
}

func (w *world) note(object block.UUID, i int, v uint64) {
	h := w.m.may[object]
	if h == nil {
		h = map[int][]uint64{}
		w.m.may[object] = h
	}
	h[i] = append(h[i], w.m.objects[object][i])
	w.m.objects[object][i] = v
}

func (w *world) pick(from []block.UUID) block.UUID { return from[w.r.IntN(len(from))] }

// span is a run of sectors inside one window.
func (w *world) span(most int) (at, n int) {
	k := w.r.IntN(len(windows))
	first := 0
	for _, v := range windows[:k] {
		first += int(v[1]-v[0]) / sector
	}
	size := int(windows[k][1]-windows[k][0]) / sector
	n = 1 + w.r.IntN(min(most, size))
	return first + w.r.IntN(size-n+1), n
}

// writing is a write that is begun with others.
type writing struct {
	object block.UUID
	at, n  int
	tag    uint64
	err    error
}

// burst chooses writes that do not overlap.
func (w *world) burst(heads []block.UUID, count int) (all []*writing) {
	for range count {
		most := 6
		if w.r.IntN(5) == 0 {
			most = 90
		}
		x := &writing{object: w.pick(heads)}
		x.at, x.n = w.span(most)
		if slices.ContainsFunc(all, func(o *writing) bool { return o.object == x.object && x.at < o.at+o.n && o.at < x.at+x.n }) {
			continue
		}
		w.next++
		x.tag = w.next
		all = append(all, x)
		for i := range x.n {
			w.note(x.object, x.at+i, x.tag)
		}
	}
	return all
}

func (w *world) write(all []*writing) error {
	var done sync.WaitGroup
	for _, x := range all {
		leg := w.leg(x.object)
		done.Go(func() {
			x.err = block.Do(leg, &block.IO{Op: block.OpWrite, FUA: x.tag%5 == 0, Off: sectorAt(x.at), Len: int64(x.n) * sector, Data: tagged(x.tag, x.n)})
		})
	}
	done.Wait()
	for _, x := range all {
		if errors.Is(x.err, block.ErrFull) {
			w.fulls++
			w.adopt(x.object) // a write without space may have done a part
		} else if x.err != nil {
			return x.err
		}
	}
	return nil
}

// adopt takes over what an object holds.
func (w *world) adopt(object block.UUID) { w.m.objects[object] = readObject(w.leg(object)) }

// step does one random operation. before is called with what is to be, when the tree has not been
// touched.
//
// Branches: one for each operation.
func (w *world) step(before func()) error {
	if !w.d.volatile {
		clear(w.m.may)
	}
	heads, snaps := w.names(false), w.names(true)
	w.next++
	name := id(w.next << 20)
	switch x := w.r.IntN(100); {
	case x < 42:
		all := w.burst(heads, 1+w.r.IntN(4)*w.r.IntN(2))
		before()
		return w.write(all)
	case x < 58:
		return w.zero(w.pick(heads), before)
	case x < 64 && w.kind == overALeg && len(heads) == 1 && len(snaps) == 0:
		before()
		w.settle(heads[0])
	case x < 72 && w.kind == overALeg && len(snaps) > 0:
		return w.delete(w.pick(snaps), before)
	case x < 66 && len(snaps) < 5:
		return w.freeze(w.pick(heads), name, before)
	case x < 71 && len(snaps) > 0 && len(heads) < 3:
		snap := w.pick(snaps)
		w.m.objects[name] = slices.Clone(w.m.objects[snap])
		before()
		return w.t.Clone(snap, name, objectSize, []byte("clone"))
	case x < 74 && len(snaps) > 0:
		head, snap := w.pick(heads), w.pick(snaps)
		w.m.objects[head] = slices.Clone(w.m.objects[snap])
		w.m.may[head] = nil
		if w.r.IntN(2) == 0 {
			w.close(head)
		}
		before()
		return w.t.Restore(head, snap)
	case x < 82 && len(snaps) > 0:
		return w.delete(w.pick(snaps), before)
	case x < 84 && len(heads) > 1:
		return w.delete(w.pick(heads), before)
	case x < 86 && len(heads) > 1 && len(snaps) < 5:
		return w.seal(w.pick(heads), before)
	case x < 89:
		before()
		w.flatten()
	case x < 93:
		before()
		w.bg.Go(func() {
			if err := w.t.Reclaim(context.Background()); err != nil {
				w.bgErr.CompareAndSwap(nil, &err)
			}
		})
	case x < 96:
		before()
		w.bg.Wait()
	case x < 98:
		before()
		return w.restart()
	default:
		before()
		if err := block.Flush(w.leg(w.pick(heads))); err != nil {
			return err
		}
		clear(w.m.may)
	}
	return nil
}

// blank is 1 if slots that are in use are blank.
func (w *world) blank() int {
	for slot := range w.t.used() {
		if w.t.isBlank(slot) {
			return 1
		}
	}
	return 0
}

// seal makes a head a snapshot: whatever its sectors held before is no longer possible.
func (w *world) seal(head block.UUID, before func()) error {
	w.close(head)
	w.m.frozen[head] = true
	before()
	err := w.t.Seal(head)
	delete(w.m.may, head)
	return err
}

// restart ends the process and begins the next one: the drive keeps what it has in its cache.
func (w *world) restart() (err error) {
	w.bg.Wait()
	for object := range w.legs {
		w.close(object)
	}
	w.t.Close()
	w.t, err = Open(w.kind.place(w.d))
	return err
}

func (w *world) delete(object block.UUID, before func()) error {
	w.close(object)
	delete(w.m.objects, object)
	delete(w.m.frozen, object)
	delete(w.m.may, object)
	before()
	return w.t.Delete(object)
}

// zero discards, or writes zeroes. A discard leaves the edges of its range as they are.
func (w *world) zero(object block.UUID, before func()) error {
	io := &block.IO{Op: block.OpDiscard}
	at, n := w.span(60)
	io.Off, io.Len = sectorAt(at), int64(n)*sector
	if w.r.IntN(3) == 0 {
		io.Off = int64(w.r.IntN(objectSize/GrainSize)) * GrainSize
		io.Len = GrainSize * (1 + int64(w.r.IntN(int(objectSize-io.Off)/GrainSize)))
	}
	from, to := (io.Off+GrainSize-1)/GrainSize*GrainSize, (io.Off+io.Len)/GrainSize*GrainSize
	if w.r.IntN(2) == 0 {
		io.Op, io.FUA = block.OpWriteZeroes, w.r.IntN(2) == 0
		from, to = io.Off, io.Off+io.Len
	}
	for i := range windowSectors() {
		if p := sectorAt(i); p >= from && p < to {
			w.note(object, i, 0)
		}
	}
	before()
	err := block.Do(w.leg(object), io)
	if errors.Is(err, block.ErrFull) {
		w.fulls++
		w.adopt(object)
		return nil
	}
	return err
}

// freeze takes a snapshot, sometimes with writes under way, of which it has any or none.
func (w *world) freeze(head, name block.UUID, before func()) error {
	if !w.d.volatile || w.r.IntN(2) == 0 {
		clear(w.m.may)
	}
	var all []*writing
	if w.r.IntN(2) == 0 {
		all = w.burst([]block.UUID{head}, 3)
	}
	w.m.objects[name], w.m.frozen[name] = slices.Clone(w.m.objects[head]), true
	w.of.set(name, head)
	w.m.may[name] = map[int][]uint64{}
	for i, v := range w.m.may[head] {
		w.m.may[name][i] = slices.Clone(v)
	}
	before()
	var wrote error
	var done sync.WaitGroup
	done.Go(func() { wrote = w.write(all) })
	err := w.t.Freeze(head, name, []byte("snapshot"))
	done.Wait()
	if err = cmp.Or(err, wrote); err != nil {
		return err
	}
	want := w.m.objects[name]
	w.adopt(name)
	for i, v := range w.m.objects[name] {
		if v != want[i] && !slices.ContainsFunc(all, func(x *writing) bool { return i >= x.at && i < x.at+x.n }) {
			return fmt.Errorf("sector %d of the snapshot is %x, want %x", i, v, want[i])
		}
	}
	delete(w.m.may, name) // a freeze is durable
	return nil
}

// verify compares what is read with the model, and the tree in memory with itself.
func (w *world) verify() error {
	if p := w.bgErr.Load(); p != nil {
		return *p
	}
	for _, object := range append(w.names(false), w.names(true)...) {
		if got, want := readObject(w.leg(object)), w.m.objects[object]; !slices.Equal(got, want) {
			for i := range got {
				if got[i] != want[i] {
					return fmt.Errorf("object %v sector %d reads %x, want %x", object, i, got[i], want[i])
				}
			}
		}
	}
	return w.plainIsTheSame()
}

// judge compares what is left after a power cut with what may be.
func judge(t *Tree, before, after model) error {
	var have []block.UUID
	for _, l := range t.Layers() {
		if l.State != StateDoomed && l.Object != ballast {
			have = append(have, l.Object)
		}
	}
	same := func(m model) bool {
		return len(have) == len(m.objects) && !slices.ContainsFunc(have, func(o block.UUID) bool { return m.objects[o] == nil })
	}
	if !same(before) && !same(after) {
		return fmt.Errorf("objects %v are neither those before nor those after", have)
	}
	for _, object := range have {
		l, err := t.Leg(object)
		if err != nil {
			return err
		}
		a, b := before.objects[object], after.objects[object]
		for i, v := range readObject(l) {
			ok := a != nil && v == a[i] || b != nil && v == b[i] ||
				slices.Contains(before.may[object][i], v) || slices.Contains(after.may[object][i], v)
			if !ok {
				return fmt.Errorf("object %v (frozen %v) sector %d is %x", object, after.frozen[object], i, v)
			}
		}
		l.Close()
	}
	return nil
}

// checked is the verdict of the independent checker. Before a repair it may find what a power cut
// leaves, but no damage.
func checked(img *image, repaired bool) error {
	report, err := treecheck.Check(img, testSize, firstExtent)
	if err != nil {
		return err
	}
	if len(report.Trees) != 1 {
		return fmt.Errorf("the checker finds %d trees", len(report.Trees))
	}
	for _, f := range report.Trees[0].Findings {
		if f.Damage || repaired {
			return fmt.Errorf("the checker: %s", f.Text)
		}
	}
	return nil
}

var ballast = id(99)

// baseImage has a tree of which all but a few chunks are taken by a leg.
var baseImage = sync.OnceValue(func() *image {
	d := &drive{size: testSize, at: true, img: newImage(usedBefore(chunkCount-16, chunkCount))}
	t, err := Format(testPlace(d), ballast, 1<<30, nil)
	if err != nil {
		panic(err)
	}
	l, err := t.Leg(ballast)
	if err != nil {
		panic(err)
	}
	for c := range int64(253 + 255 - extraChunks) {
		if err := block.WriteAt(l, tagged(7, 1), c<<20); err != nil {
			panic(err)
		}
	}
	if err := t.Create(id(1), objectSize, []byte("first")); err != nil {
		panic(err)
	}
	t.Close()
	return d.img
})

// usedBefore is a drive of which chunks of all extents hold what somebody else has written.
func usedBefore(from, to int64) *image {
	img, page := newImage(nil), new([unit]byte)
	copy(page[:], tagged(others, unit/sector))
	for e := range int64(3) { // extents
		for at := from * ChunkSize; at < to*ChunkSize; at += unit {
			img.pages[(firstExtent+e*extentSize+at)/unit] = page
		}
	}
	return img
}

const others = 0xbad

type counts struct {
	points, images, fulls, settled int
	blank                          int // operations after which slots were blank
	flattened                      atomic.Int64
	reads, unknown                 int // of sectors of trees in which records were lost
}

// history does random operations, and cuts the power before every event of each.
func history(seed uint64, kind kindOfTree, volatile bool, n *counts) error {
	r := rand.New(rand.NewPCG(seed, 7))
	img := kind.image()
	d := &drive{size: testSize, volatile: volatile, base: img, img: newImage(img)}
	prepareAhead = int(seed%3) * 2 // of some histories none
	defer func() { prepareAhead = 0 }()
	t, err := Open(kind.place(d))
	if err != nil {
		return err
	}
	w := &world{r: r, kind: kind, d: d, t: t, legs: map[block.UUID]*Leg{}, m: newModel(), n: n}
	w.m.objects[id(1)] = readObject(w.leg(id(1)))
	for op := range *opCount {
		d.fold()
		start := d.now()
		before := w.m.clone()
		var after model
		if err := w.step(func() { after = w.m.clone() }); err != nil {
			return fmt.Errorf("op %d: %w", op, err)
		}
		if err := w.verify(); err != nil {
			return fmt.Errorf("op %d: %w", op, err)
		}
		n.blank += w.blank()
		for k, end := start, d.now(); k <= end; k++ {
			n.points++
			n.images++
			if err := afterCut(r, kind, d.crash(r, k), volatile, before, after, n); err != nil {
				return fmt.Errorf("op %d, cut before event %d of %d-%d: %w", op, k, start, d.now(), err)
			}
		}
	}
	w.bg.Wait()
	n.fulls += w.fulls
	if err := w.verify(); err != nil {
		return err
	}
	for _, l := range w.legs {
		l.Close()
	}
	w.t.Close()
	return checked(d.img, true)
}

// prepareNothing leaves the chunks of a tree as they are, whose drive is looked at beside it.
func (t *Tree) prepareNothing() { t.space.restUntil(time.Now().Add(1000 * prepareRest)) }

func afterCut(r *rand.Rand, kind kindOfTree, img *image, volatile bool, before, after model, n *counts) error {
	if err := checked(img, false); err != nil {
		return err
	}
	if loss := rand.New(rand.NewPCG(uint64(n.points), 5)); loss.IntN(5) == 0 {
		if err := afterLoss(loss, kind, img, volatile, before, after, n); err != nil {
			return err
		}
	}
	d := &drive{size: testSize, volatile: volatile, at: true, img: img}
	t, err := Open(kind.place(d))
	if err != nil {
		return err
	}
	t.prepareNothing()
	if err := checked(img, true); err != nil {
		return fmt.Errorf("after the repair: %w", err)
	}
	if err := judge(t, before, after); err != nil {
		return err
	}
	if r.IntN(6) > 0 {
		return nil
	}
	if err := readsAsTheCheckerDoes(t, img); err != nil {
		return err
	}
	if err := countsAsTheCheckerDoes(t, img); err != nil {
		return err
	}
	t.Close()
	n.images++
	if err := goOn(r, kind, img, volatile, n); err != nil {
		return fmt.Errorf("going on: %w", err)
	}
	return nil
}

// goOn works with a recovered tree and cuts the power once more.
func goOn(r *rand.Rand, kind kindOfTree, img *image, volatile bool, n *counts) error {
	d := &drive{size: testSize, volatile: volatile, base: img, img: newImage(img)}
	t, err := Open(kind.place(d))
	if err != nil {
		return err
	}
	w := &world{r: r, kind: kind, n: n, d: d, t: t, legs: map[block.UUID]*Leg{}, m: newModel(), next: 1 << 30}
	for _, l := range t.Layers() {
		if l.State != StateDoomed && l.Object != ballast {
			w.m.objects[l.Object], w.m.frozen[l.Object] = readObject(w.leg(l.Object)), l.State == StateFrozen
		}
	}
	defer w.bg.Wait()
	for range 8 {
		before, start := w.m.clone(), d.now()
		var after model
		if err := w.step(func() { after = w.m.clone() }); err != nil {
			return err
		}
		if err := w.verify(); err != nil {
			return err
		}
		cut := &drive{size: testSize, volatile: volatile, at: true, img: d.crash(r, start+r.IntN(d.now()-start+1))}
		again, err := Open(kind.place(cut))
		if err != nil {
			return err
		}
		if err := judge(again, before, after); err != nil {
			return err
		}
	}
	return nil
}

func TestCrashAtEveryWrite(t *testing.T) { crashHistories(t, alone) }

// crashHistories cuts random histories of a kind of tree at every write.
func crashHistories(t *testing.T, kind kindOfTree) {
	for _, volatile := range []bool{false, true} {
		t.Run(map[bool]string{false: "durable", true: "volatile"}[volatile], func(t *testing.T) {
			var n counts
			for seed := *firstSeed; seed < *firstSeed+uint64(*histories); seed++ {
				synctest.Test(t, func(t *testing.T) {
					if err := history(seed, kind, volatile, &n); err != nil {
						t.Fatalf("seed %d: %v", seed, err)
					}
				})
			}
			t.Logf("%d histories, %d places of a cut, %d images, %d times full, %d times settled, %d flattened, %d times blank; of %d sectors of trees with lost records %d unknown",
				*histories, n.points, n.images, n.fulls, n.settled, n.flattened.Load(), n.blank, n.reads, n.unknown)
			if n.points == 0 || n.unknown == 0 || n.unknown > n.reads*19/20 || kind == alone && n.blank == 0 || *histories >= 10 && (n.fulls+n.settled == 0 || n.flattened.Load() == 0) {
				t.Error("the histories do not reach what they should")
			}
		})
	}
}

// What was written with FUA is there after a power cut, also if an earlier write or discard that it relies
// on was only in the drive's cache.
func TestFUAIsDurableWhateverIsInTheCache(t *testing.T) {
	const n = 64 << 10
	for name, c := range map[string]struct {
		before []*block.IO
		fua    *block.IO
		want   uint64
	}{
		"a write into a grain that is new": {
			[]*block.IO{{Op: block.OpWrite, Len: 8192, Data: tagged(1, 16)}},
			&block.IO{Op: block.OpWrite, FUA: true, Len: 8192, Data: tagged(2, 16)}, 2,
		},
		"a write to a grain that is new, and to one whose record is in the cache": {
			[]*block.IO{{Op: block.OpWrite, Len: GrainSize, Data: tagged(1, GrainSize/sector)}},
			&block.IO{Op: block.OpWrite, FUA: true, Len: 2 * GrainSize, Data: tagged(2, 2*GrainSize/sector)}, 2,
		},
		"zeroes over a discard": {
			[]*block.IO{{Op: block.OpWrite, Len: n, Data: tagged(1, n/512)}, {Op: block.OpFlush}, {Op: block.OpDiscard, Len: n}},
			&block.IO{Op: block.OpWriteZeroes, FUA: true, Len: n}, 0,
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := &drive{size: testSize, volatile: true, base: newImage(nil), img: newImage(nil)}
			tree, err := Format(testPlace(d), id(1), 64<<20, nil)
			must(t, err)
			leg, err := tree.Leg(id(1))
			must(t, err)
			must(t, block.Flush(leg))
			for _, io := range append(c.before, c.fua) {
				must(t, block.Do(leg, io))
			}
			for seed := range uint64(200) {
				after := d.afterCut(t, seed, d.now())
				l, err := after.Leg(id(1))
				must(t, err)
				if got := readObjectAt(t, l, 0, 16); got[0] != c.want {
					t.Fatalf("%s, seed %d: after a power cut the leg has %v, want %d", name, seed, got, c.want)
				}
			}
		})
	}
}

// A discard clears a record, a durable write makes another record elsewhere, and a second discard clears that one.
// A power cut may undo the first discard alone. The data from before the durable write must not come back.
func TestADurableWriteIsTheEndOfWhatWasDiscardedBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drive{size: testSize, volatile: true, base: newImage(nil), img: newImage(nil)}
		tree, err := Format(testPlace(d), id(1), 512<<20, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		const grain = GrainSize / sector
		for chunk := range int64(perBlock + 8) { // the next free slot is of another block of the table
			must(t, block.WriteAt(leg, tagged(1, grain), chunk*ChunkSize))
		}
		must(t, block.Flush(leg))
		was := tree.own(tree.layers[leg.layer.ID], 0)
		for _, io := range []*block.IO{
			{Op: block.OpDiscard, Len: ChunkSize},
			{Op: block.OpWrite, FUA: true, Len: GrainSize, Data: tagged(2, grain)},
		} {
			must(t, block.Do(leg, io))
		}
		if now := tree.own(tree.layers[leg.layer.ID], 0); now/perBlock == was/perBlock {
			t.Fatalf("slots %d and %d have their records in one block: nothing is tried here", was, now)
		}
		must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: ChunkSize}))
		for seed := range uint64(200) {
			after := d.afterCut(t, seed, d.now())
			l, err := after.Leg(id(1))
			must(t, err)
			if got := readObjectAt(t, l, 0, 1); got[0] == 1 {
				t.Fatalf("seed %d: after a power cut the leg has what was discarded before a durable write", seed)
			}
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/engine/history"
)

// world consists of legs, an engine over them, its owner, and users who know which writes
// were acknowledged. Everything happens in one goroutine, in an order that depends on the
// seed alone.
type world struct {
	r      *rand.Rand
	cfg    Config
	weak   guards
	errant errant
	marks  *simCheckpoints // nil: no checkpoints are taken
	fills  *rand.Rand      // nil: no leg lacks space
	faults bool

	legs [][]*simLeg // by column and copy
	time int64
	bad  error // the first violation

	v       *Volume // nil: nobody has the volume
	serving bool
	unclean bool // the last client crashed
	resting bool // users are, and then the client goes
	equal   *equalizer
	ended   chan struct{}
	size    block.Size // by the manager's record
	wanted  block.Size // what the legs are made large enough for
	todo    []func()   // what the owner is about to do
	timers  []simTimer

	sectors  []history.Unit // of the volume
	ios      []*simIO       // not answered
	next     uint64
	acks     int
	reads    int
	crashes  int
	rebuilds int
	drops    int
	grown    int
	lapsed   bool // another may have written: no read may be answered
	renewed  int  // legs that went on after a loss of their caches
	failed   int  // volumes that did not
	starved  int  // answers without space to a rebuild
	unequal  int  // and while copies were made equal
}

// errant weakens the owner.
type errant struct {
	dropBeforeRecord bool
	serveUnequal     bool
	unfenced         bool
	partialOfUnknown bool
	growsOntoRubbish bool
}

type simIO struct {
	block.IO
	w     *world
	began int64
	tag   uint64
}

type simTimer struct {
	at int64
	do func()
}

// simVolume is the initial size of a volume, and simMost the size to which it may grow.
const (
	simVolume = 1280 * block.KiB
	simMost   = 4 * block.MiB
)

func (w *world) now() int64 { return w.time*int64(time.Millisecond) + 1 }
func (w *world) after(d time.Duration, do func()) {
	w.timers = append(w.timers, simTimer{w.now() + int64(d), do})
}

func newWorld(seed uint64, weak guards, wrong errant) *world {
	w := &world{r: rand.New(rand.NewPCG(seed, 77)), weak: weak, errant: wrong, faults: true}
	l := block.Layout{Stripes: 1 + w.r.IntN(3), Copies: 2, Chunk: 64 * block.KiB}
	switch w.r.IntN(6) {
	case 0:
		l.Copies = 1
	case 1, 2:
		l.Copies = 3
	}
	w.cfg = Config{Layout: l, Size: simVolume, BlockSize: 512, Region: 64 * block.KiB << w.r.IntN(4), FailMedium: false, OnEvent: w.event, Current: func() bool { return !w.lapsed }}
	w.size, w.wanted = simVolume, simVolume
	w.sectors = history.Zeroes(int(simMost / sector))
	for range l.Stripes {
		var copies []*simLeg
		for range l.Copies {
			copies = append(copies, newSimLeg(w.r, l.LegSize(simVolume)))
		}
		w.legs = append(w.legs, copies)
	}
	return w
}

func (w *world) fail(format string, args ...any) {
	if w.bad == nil {
		w.bad = fmt.Errorf(format, args...)
	}
}

// act lets one thing happen.
func (w *world) act() {
	w.time++
	if w.resting && w.close() {
		return
	}
	if len(w.ios) < 12 && !w.resting && w.v != nil && w.r.IntN(4) == 0 {
		w.submit()
		return
	}
	if w.marks != nil && w.v != nil && (w.serving || w.marks.always) && w.marks.r.IntN(3) == 0 {
		w.checkpoint()
	}
	if w.fills != nil && w.faults && (w.fills.IntN(60) == 0 || w.equal != nil && w.fills.IntN(8) == 0) {
		w.fill()
	}
	switch n := w.r.IntN(200); {
	case n < 110:
		w.stepLeg()
	case n < 135:
		w.own()
	case n < 165:
		w.tick()
	case n < 175:
		w.randomLeg().land()
	case !w.faults:
	case n < 177:
		w.hang()
	case n < 179:
		w.powerLoss()
	case n < 182:
		w.stepLeg()
	case n < 188:
		w.heal()
	case n < 190:
		w.suspend()
	case n < 191:
		switch w.r.IntN(8) {
		case 0, 1:
			w.crash()
		case 2:
			w.blackout()
		case 3, 4:
			w.lostTogether()
		}
	case n < 193:
		w.resting = w.resting || w.r.IntN(5) == 0
	case n < 195:
		w.replace()
	case n < 196:
		w.spuriousDrop()
	case n < 198:
		w.grow()
	case n < 199:
		w.wear()
	default:
		w.lapse()
	}
}

func (w *world) randomLeg() *simLeg {
	c := w.legs[w.r.IntN(len(w.legs))]
	return c[w.r.IntN(len(c))]
}

func (w *world) stepLeg() {
	for range 4 { // most have nothing to do
		if d := w.randomLeg().dev; d != nil && len(d.ops) > 0 {
			d.step(w.faults)
			return
		}
	}
}

// tick lets the next timer go off.
func (w *world) tick() {
	if len(w.timers) == 0 {
		return
	}
	i := 0
	for j := range w.timers {
		if w.timers[j].at < w.timers[i].at {
			i = j
		}
	}
	do := w.timers[i].do
	w.time = max(w.time, w.timers[i].at/int64(time.Millisecond)+1)
	w.timers = slices.Delete(w.timers, i, i+1)
	do()
}

// submit lets a user submit an IO, often one that overlaps others or crosses boundaries.
func (w *world) submit() {
	size := int64(w.v.Geometry().Size)
	spots := []int64{0, 64 << 10, 128 << 10, 192 << 10, 1 << 20, int64(simVolume), size}
	n := int64(1 + w.r.IntN(4))
	if w.r.IntN(12) == 0 {
		n = int64(1 + w.r.IntN(400))
	}
	at := spots[w.r.IntN(len(spots))]/sector + int64(w.r.IntN(6)) - 3
	at = max(0, min(at, size/sector-n))
	w.next++
	io := &simIO{w: w, tag: w.next}
	io.Off, io.Len, io.Done, io.began = at*sector, n*sector, simDone, w.time
	switch k := w.r.IntN(20); {
	case k < 8:
		io.Op = block.OpRead
		io.Data = make([]byte, io.Len)
	case k < 16:
		io.Op, io.FUA = block.OpWrite, w.r.IntN(6) == 0
		io.Data = make([]byte, io.Len)
		for i := range n {
			binary.LittleEndian.PutUint64(io.Data[i*sector:], io.tag)
		}
	case k < 17:
		io.Op, io.Unmap, io.tag = block.OpWriteZeroes, w.r.IntN(2) == 0, 0
	case k < 18 && w.cfg.Layout.Copies > 1:
		// On a single leg, the leg alone decides what a discarded block reads as.
		io.Op, io.tag = block.OpDiscard, 0
	default:
		io.Op, io.Off, io.Len = block.OpFlush, 0, 0
	}
	if io.writes() {
		for i := range io.each() {
			w.sectors[i].Write(io.tag, io.began)
		}
	}
	io.Owner = io
	w.ios = append(w.ios, io)
	w.v.Submit(&io.IO)
}

func (io *simIO) writes() bool { return io.Op != block.OpRead && io.Op != block.OpFlush }

// each visits the sectors of an IO.
func (io *simIO) each() func(func(int) bool) {
	return func(yield func(int) bool) {
		for i := io.Off / sector; i < (io.Off+io.Len)/sector; i++ {
			if !yield(int(i)) {
				return
			}
		}
	}
}

func simDone(b *block.IO) {
	io := b.Owner.(*simIO)
	w := io.w
	i := slices.Index(w.ios, io)
	if i < 0 {
		return // of a client that crashed
	}
	w.ios = slices.Delete(w.ios, i, i+1)
	switch {
	case io.Err != nil:
		w.fail("%v at %d failed: %v", io.Op, io.Off, io.Err)
	case io.Op == block.OpRead && w.lapsed:
		w.fail("read at %d answered when another may have written", io.Off)
	case io.Op == block.OpRead:
		w.reads++
		for s := range io.each() {
			tag := binary.LittleEndian.Uint64(io.Data[int64(s)*sector-io.Off:])
			if err := w.sectors[s].Read(tag, io.began, w.time); err != nil {
				w.fail("sector %d: %w", s, err)
				return
			}
		}
	case io.Op == block.OpFlush:
		for s := range w.sectors[:w.size/sector] {
			if len(w.sectors[s]) > 1 {
				w.sectors[s].Flushed(io.began, w.time)
			}
		}
	case io.Op == block.OpDiscard:
		w.discarded(io)
	case io.writes():
		w.acked(io)
	}
}

func (w *world) discarded(io *simIO) {
	w.acks++
	for s := range io.each() {
		w.sectors[s].Discarded(io.began, w.time)
	}
}

// acked checks that each leg that is recorded in sync has the acknowledged data.
func (w *world) acked(io *simIO) {
	w.acks++
	for s := range io.each() {
		place := raid.Locate(w.cfg.Layout, block.Size(s*sector))
		for copy, l := range w.legs[place.Column] {
			if l.inSync && !l.rebooted && !l.lostCache && !w.sectors[s].Has(l.tags[place.Offset/sector], io.tag, io.began) {
				w.fail("%v of %d acknowledged, sector %d on leg %d.%d has %d", io.Op, io.tag, s, place.Column, copy, l.tags[place.Offset/sector])
				return
			}
		}
		if err := w.sectors[s].Acked(io.began, w.time); err != nil {
			w.fail("sector %d: %w", s, err)
			return
		}
		if io.FUA {
			w.sectors[s].Durable(io.began, w.time)
		}
	}
}

// hang makes a leg stop answering, forever or for a while, or fail often.
func (w *world) hang() {
	if l := w.randomLeg(); l.dev != nil && w.r.IntN(2) == 0 {
		l.dev.silent = true
	} else if l.dev != nil {
		l.dev.sick = true
	}
}

// heal lets a silent leg answer again, and brings a dead one back.
func (w *world) heal() {
	l := w.randomLeg()
	if !l.alive {
		l.alive = true // but what it answered before it died is gone with its connections
		return
	}
	if l.dev != nil && !l.dev.cut && !l.rebooted {
		l.dev.silent, l.dev.sick = false, false
	}
}

// powerLoss cuts a leg's power, if another leg has all its data.
func (w *world) powerLoss() {
	k := w.r.IntN(len(w.legs))
	copies := w.legs[k]
	i := w.r.IntN(len(copies))
	for j, l := range copies {
		if j != i && l.inSync && !l.rebooted {
			copies[i].losePower()
			return
		}
	}
}

// blackout cuts the power of all legs.
func (w *world) blackout() {
	w.crash()
	w.unclean = true
	for _, copies := range w.legs {
		for _, l := range copies {
			l.disown()
			l.losePower()
			l.alive, l.rebooted = true, false // all lost alike
		}
	}
	for i := range w.sectors[:w.size/sector] {
		w.sectors[i].PowerLost(w.time)
	}
}

// wear makes a leg fail all writes until it is replaced.
func (w *world) wear() {
	if l := w.randomLeg(); w.r.IntN(3) == 0 {
		l.worn = true
	}
}

// repair makes one leg accept writes again in a column in which none does.
func (w *world) repair() {
	for _, copies := range w.legs {
		if !slices.ContainsFunc(copies, func(l *simLeg) bool { return !l.worn }) {
			copies[w.r.IntN(len(copies))].worn = false
		}
	}
}

// lostTogether cuts the power of all legs of a column that are recorded in sync, while the
// client lives. The manager keeps one of them in sync and tells the client.
func (w *world) lostTogether() {
	if w.v == nil || w.equal != nil || !w.serving {
		return
	}
	k := w.r.IntN(len(w.legs))
	var good []int
	for i, l := range w.legs[k] {
		if l.rebooted || l.leaving || l.lostCache || l.inSync && (l.dev == nil || w.v.columns[k].legs[i].state < CaughtUp) {
			return // the manager has something else to see to first
		}
		if l.inSync {
			good = append(good, i)
		}
	}
	keep := good[w.r.IntN(len(good))]
	for _, i := range good {
		if l := w.legs[k][i]; i != keep {
			l.losePower()
			l.inSync, l.leaving = false, true
			w.todo = append(w.todo, func() { w.drop(k, i) })
		}
	}
	l := w.legs[k][keep]
	old := l.dev
	l.losePower()
	l.rebooted, l.lostCache, old.cut = false, true, true // and what has the old identity finds nothing
	w.todo = append(w.todo, func() { w.renew(k, keep, old) })
}

// renew makes the client continue with a leg that has lost its cache, or end.
func (w *world) renew(k, i int, old *simDevice) {
	l := w.legs[k][i]
	l.alive, l.limbo = true, nil
	answer := func() {
		ops := old.ops
		old.ops = nil
		for _, o := range ops {
			if o.io.Op != block.OpFlush && o.at == o.sectors() { // an answer that was on its way
				o.orig.Complete(nil)
			} else {
				o.orig.Complete(block.ErrGone)
			}
		}
	}
	late := w.r.IntN(2) == 0
	if !late {
		answer()
	}
	switch err := w.v.Renew(k, i, l.connect()); {
	case err == nil:
		l.lostCache = false
		w.renewed++
	case errors.Is(err, ErrUnflushed):
		l.dev = nil
		w.failed++
		w.crash()
		return
	default:
		w.fail("%w", err)
	}
	if late {
		w.todo = append(w.todo, answer)
	}
}

// cachesLost notes which data can no longer be known when a client ends that has not
// continued with a leg that lost its cache.
func (w *world) cachesLost() {
	for s := range w.sectors[:w.size/sector] {
		if place := raid.Locate(w.cfg.Layout, block.Size(s*sector)); slices.ContainsFunc(w.legs[place.Column], func(l *simLeg) bool { return l.lostCache }) {
			w.sectors[s].PowerLost(w.time)
		}
	}
	for _, copies := range w.legs {
		for _, l := range copies {
			l.lostCache = false
		}
	}
}

// lapse makes reads wait for a while.
func (w *world) lapse() {
	if w.v == nil || w.lapsed {
		return
	}
	w.lapsed = true
	w.todo = append(w.todo, func() { w.lapsed = false })
}

func (w *world) suspend() {
	if w.v == nil {
		return
	}
	w.v.Suspend()
	w.todo = append(w.todo, func() { w.v.Resume() })
}

// crash ends the client at whatever it was doing.
func (w *world) crash() {
	if w.v == nil {
		return
	}
	w.crashes++
	w.unclean = true
	for i := range w.sectors[:w.size/sector] {
		w.sectors[i].Crashed(w.time)
	}
	w.cachesLost()
	w.ios = nil
	w.leave()
}

// close ends the client when it is idle.
func (w *world) close() (closed bool) {
	if w.v == nil || len(w.ios) > 0 || !w.serving || len(w.todo) > 0 {
		return false
	}
	if w.v.active.Load() == 0 { // else there are rebuilds
		w.unclean = false
	}
	w.resting = false
	w.leave()
	return true
}

// leave forgets the engine, and with it which regions its stale legs miss.
func (w *world) leave() {
	w.v, w.serving, w.equal, w.todo, w.timers, w.lapsed = nil, false, nil, nil, nil, false
	for k := range w.legs {
		for _, l := range w.legs[k] {
			l.disown()
		}
	}
}

// disown cuts the leg's connection. Writes on their way may still happen later.
func (l *simLeg) disown() {
	if l.dev == nil {
		return
	}
	for _, o := range l.dev.ops {
		if !o.reads() && o.at < o.sectors() && l.alive {
			o.io.Data = append([]byte(nil), o.io.Data...)
			l.limbo = append(l.limbo, o)
		}
	}
	l.dev.ops, l.dev.cut, l.dev.silent = nil, true, true
	l.dev = nil
}

// finish repairs everything, and checks that nothing is stuck and nothing lost.
func (w *world) finish() {
	w.faults, w.resting = false, false
	for range 20000 {
		if w.bad != nil || w.healthy() {
			break
		}
		w.time++
		w.randomLeg().alive = true
		w.randomLeg().full = false
		w.repair()
		for _, copies := range w.legs {
			for _, l := range copies {
				if l.dev != nil && !l.dev.cut && !l.rebooted && l.alive {
					l.dev.silent = false
				}
			}
		}
		switch w.r.IntN(8) {
		case 0:
			w.tick()
		case 1, 2:
			w.growLeg(w.randomLeg())
			w.own()
		default:
			w.stepLeg()
		}
	}
	if w.bad == nil && !w.healthy() {
		w.fail("stuck with %d IOs: %v", len(w.ios), w.describe())
	}
	if w.bad == nil {
		w.compare()
	}
}

func (w *world) healthy() bool {
	if w.v == nil || !w.serving || len(w.ios) > 0 || len(w.todo) > 0 || w.v.Geometry().Size < w.wanted {
		return false
	}
	for k := range w.legs {
		for i, l := range w.legs[k] {
			if !l.inSync || w.v.columns[k].legs[i].state != InSync || len(l.dev.ops) > 0 {
				return false
			}
		}
	}
	return true
}

func (w *world) describe() string {
	if w.v == nil {
		return "no engine"
	}
	s := w.v.Status()
	text := fmt.Sprintf("%v of %v, held %d suspended %v equalizing %v", s.Size, w.wanted, s.Held, s.Suspended, s.Equalizing)
	for k, legs := range s.Legs {
		for i, sim := range w.legs[k] {
			l := legs[i]
			text += fmt.Sprintf("; %d.%d %v out %d dirty %d recorded %v alive %v rebooted %v worn %v", k, i, l.State, l.Outstanding, l.Dirty, sim.inSync, sim.alive, sim.rebooted, sim.worn)
		}
	}
	return text
}

// compare checks that the legs of each column are the same, and hold what was
// acknowledged.
func (w *world) compare() {
	for k, copies := range w.legs {
		for i, l := range copies {
			if !slices.Equal(copies[0].tags, l.tags) {
				w.fail("leg %d.%d differs from leg %d.0", k, i, k)
				return
			}
		}
	}
	for s := range w.sectors[:w.size/sector] {
		place := raid.Locate(w.cfg.Layout, block.Size(s*sector))
		tag := w.legs[place.Column][0].tags[place.Offset/sector]
		if err := w.sectors[s].Read(tag, w.time+1, w.time+2); err != nil {
			w.fail("in the end, sector %d: %w", s, err)
			return
		}
	}
}

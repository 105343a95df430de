// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// This file simulates what device-mapper, and dm-raid1 in it, does with writes. It follows
// drivers/md/dm-raid1.c of 6.1 in everything that decides which writes are acknowledged:
// do_writes, write_callback, do_failures, hold_bio, fail_mirror, presuspend and the resume
// of a disk log. Time is a set of events that are taken in random order.

const (
	simBlocks  = 8
	simRegions = 4
	simRegion  = 8 * block.KiB // two blocks
	simSize    = simRegions * simRegion
)

func regionOf(b int) int { return b * simRegions / simBlocks }

type result int

const (
	done result = iota
	failed
	requeued // by a suspend without a flush
)

type bio struct {
	block, value int
	end          func(result)
}

// disk holds the data of a leg. port is a connection to it, with a device number of its own.
type disk struct{ data [simBlocks]int }

type port struct {
	disk  *disk
	hung  bool // I/O waits
	dead  bool // I/O fails
	flaky int  // so many more writes fail, and then no more
}

type event struct {
	ready func() bool
	run   func()
}

type kernelSim struct {
	rng     *rand.Rand
	events  []event
	ports   map[dm.Ref]*port
	logs    map[dm.Ref]LogImage // the log devices
	devices map[string]*simDevice

	readFrom *disk // by the newest read
}

type simDevice struct {
	k              *kernelSim
	name           string
	live, inactive dm.Target
	mirror         *simMirror // if live is one
	suspended      bool
	noflush        bool
	inflight       int
	deferred       []*bio
}

func newKernelSim(rng *rand.Rand) *kernelSim {
	return &kernelSim{rng: rng, ports: map[dm.Ref]*port{}, devices: map[string]*simDevice{}, logs: map[dm.Ref]LogImage{}}
}

func (k *kernelSim) later(ready func() bool, run func()) {
	if ready == nil {
		ready = func() bool { return true }
	}
	k.events = append(k.events, event{ready, run})
}

// step runs one event, if any is ready.
func (k *kernelSim) step() bool {
	var ready []int
	for i, e := range k.events {
		if e.ready() {
			ready = append(ready, i)
		}
	}
	if len(ready) == 0 {
		return false
	}
	i := ready[k.rng.IntN(len(ready))]
	e := k.events[i]
	k.events = slices.Delete(k.events, i, i+1)
	e.run()
	return true
}

// submit sends a write to a device.
func (k *kernelSim) submit(ref dm.Ref, b *bio) {
	if d := k.devices[string(ref)]; d != nil {
		d.submit(b)
		return
	}
	p := k.ports[ref]
	k.later(func() bool { return !p.hung || p.dead }, func() {
		switch {
		case p.dead:
			b.end(failed)
		case p.flaky > 0:
			p.flaky--
			if k.rng.IntN(2) == 0 { // a failed write may have reached the disk
				p.disk.data[b.block] = b.value
			}
			b.end(failed)
		default:
			p.disk.data[b.block] = b.value
			b.end(done)
		}
	})
}

// read reads a block; ok is false for an error or a hung path.
func (k *kernelSim) read(ref dm.Ref, block int) (int, bool) {
	d := k.devices[string(ref)]
	if d == nil {
		p := k.ports[ref]
		k.readFrom = p.disk
		return p.disk.data[block], !p.hung && !p.dead
	}
	switch t := d.live.(type) {
	case dm.Linear:
		return k.read(t.Device, block)
	case dm.Mirror:
		leg := d.mirror.readLeg(regionOf(block))
		if leg < 0 {
			return 0, false
		}
		return k.read(t.Legs[leg].Device, block)
	}
	return 0, false
}

func (d *simDevice) submit(b *bio) {
	if d.suspended {
		d.deferred = append(d.deferred, b)
		return
	}
	d.inflight++
	child := &bio{block: b.block, value: b.value}
	child.end = func(r result) {
		d.inflight--
		if r == requeued {
			d.deferred = append(d.deferred, b)
			return
		}
		b.end(r)
	}
	switch t := d.live.(type) {
	case dm.Linear:
		d.k.submit(t.Device, child)
	case dm.ErrorTarget:
		d.k.later(nil, func() { child.end(failed) })
	case dm.Mirror:
		d.mirror.write(child)
	}
}

// suspendBegin starts a suspend, which is complete when the device is quiet.
func (d *simDevice) suspendBegin(noflush bool) {
	if d.suspended {
		return
	}
	d.suspended, d.noflush = true, noflush
	if d.mirror != nil {
		holds := d.mirror.holds
		d.mirror.holds = nil
		for _, b := range holds {
			d.mirror.hold(b)
		}
	}
}

func (d *simDevice) quiet() bool {
	return d.inflight == 0 && (d.mirror == nil || len(d.mirror.recovering) == 0)
}

func (d *simDevice) resume() {
	if d.inactive != nil {
		d.live, d.inactive, d.mirror = d.inactive, nil, nil
		if t, ok := d.live.(dm.Mirror); ok {
			d.mirror = newSimMirror(d, t)
		}
	} else if d.mirror != nil {
		d.mirror.readLog() // a disk log is read at each resume
	}
	d.suspended = false
	deferred := d.deferred
	d.deferred = nil
	for _, b := range deferred {
		d.submit(b)
	}
	if d.mirror != nil {
		d.mirror.recover()
	}
}

// simMirror is struct mirror_set.
type simMirror struct {
	d          *simDevice
	t          dm.Mirror
	sync       [simRegions]bool
	nosync     [simRegions]bool // in the region hash, since a write failed
	pending    [simRegions]int
	recovering map[int]bool
	delayed    []*bio
	holds      []*bio
	errors     []bool
	first      int // the default leg
	legFailure bool
	inSync     bool
	clean      [simRegions]bool // the log in core, which a flush writes as a whole
}

func newSimMirror(d *simDevice, t dm.Mirror) *simMirror {
	m := &simMirror{d: d, t: t, errors: make([]bool, len(t.Legs)), recovering: map[int]bool{}}
	if t.Log.Device == "" {
		for r := range m.sync {
			m.sync[r] = t.Log.Sync == dm.NoSync
		}
	}
	m.readLog()
	return m
}

func (m *simMirror) readLog() {
	if m.t.Log.Device != "" {
		switch m.t.Log.Sync {
		case dm.NoSync:
			m.d.k.logs[m.t.Log.Device] = CleanLog(simRegions)
		case dm.ReSync:
			m.d.k.logs[m.t.Log.Device] = DirtyLog(simRegions)
		}
		for r := range m.sync {
			m.sync[r] = !m.d.k.logs[m.t.Log.Device].Dirty(uint64(r))
		}
		m.clean = m.sync
	}
	m.checkSynced()
}

func (m *simMirror) setClean(r int, clean bool) {
	if m.t.Log.Device == "" {
		return
	}
	m.clean[r] = clean
	m.flush()
}

// flush is disk_flush.
func (m *simMirror) flush() {
	if m.t.Log.Device == "" {
		return
	}
	image := CleanLog(simRegions)
	for r, clean := range m.clean {
		if !clean {
			image.Mark(uint64(r))
		}
	}
	m.d.k.logs[m.t.Log.Device] = image
}

// checkSynced is the end of do_recovery: once all regions are in sync, errors are forgotten.
func (m *simMirror) checkSynced() {
	if !m.inSync && m.synced() {
		m.inSync, m.legFailure = true, false
		clear(m.errors)
	}
}

func (m *simMirror) synced() bool { return !slices.Contains(m.sync[:], false) }

func (m *simMirror) write(b *bio) {
	r := regionOf(b.block)
	switch {
	case m.recovering[r]:
		m.delayed = append(m.delayed, b)
	case m.sync[r] && !m.nosync[r]:
		m.pending[r]++
		m.setClean(r, false)
		m.writeAll(b, r)
	case m.legFailure && m.t.HandleErrors && !m.t.KeepLog:
		m.failures(b)
	default: // counted as pending too, so that the region is not recovered meanwhile
		m.pending[r]++
		end := b.end
		b.end = func(res result) { m.release(r); end(res) }
		m.d.k.submit(m.t.Legs[m.first].Device, b)
	}
}

func (m *simMirror) writeAll(b *bio, r int) {
	left, bad := len(m.t.Legs), make([]bool, len(m.t.Legs))
	for i, leg := range m.t.Legs {
		m.d.k.submit(leg.Device, &bio{block: b.block, value: b.value, end: func(res result) {
			bad[i] = res != done
			if left--; left > 0 {
				return
			}
			end := b.end
			b.end = func(res result) { m.release(r); end(res) }
			if !slices.Contains(bad, true) {
				b.end(done)
				return
			}
			for leg, failed := range bad {
				if failed {
					m.fail(leg)
				}
			}
			m.d.k.later(nil, func() { m.failures(b) }) // kmirrord gets to it
		}})
	}
}

func (m *simMirror) release(r int) {
	if m.pending[r]--; m.pending[r] == 0 && m.sync[r] && !m.nosync[r] {
		m.setClean(r, true)
	}
}

// fail is fail_mirror.
func (m *simMirror) fail(leg int) {
	m.legFailure = true
	first := !m.errors[leg]
	m.errors[leg] = true
	if !first || !m.t.HandleErrors || leg != m.first || !m.inSync && !m.t.KeepLog {
		return
	}
	if v := m.valid(); v >= 0 {
		m.first = v
	}
}

func (m *simMirror) valid() int { return slices.Index(m.errors, false) }

// failures is do_failures for one write.
func (m *simMirror) failures(b *bio) {
	r := regionOf(b.block)
	m.inSync = false
	m.nosync[r], m.sync[r] = true, false
	// core_set_region_sync touches the log, so kmirrord flushes it when it runs next: perhaps only once the device is
	// suspended, since it is this write that the suspend waits for, but before the table is destroyed.
	m.d.k.later(nil, func() {
		if m.d.mirror == m {
			m.flush()
		}
	})
	switch {
	case m.valid() < 0:
		b.end(failed)
	case m.t.HandleErrors && !m.t.KeepLog:
		m.hold(b)
	default:
		b.end(done)
	}
}

func (m *simMirror) hold(b *bio) {
	switch {
	case !m.d.suspended:
		m.holds = append(m.holds, b)
	case m.d.noflush:
		b.end(requeued)
	default:
		b.end(failed)
	}
}

func (m *simMirror) readLeg(r int) int {
	if !m.sync[r] || m.nosync[r] {
		if m.errors[m.first] {
			return -1
		}
		return m.first
	}
	n := len(m.errors)
	for i := range n {
		if leg := (m.first - i + n) % n; !m.errors[leg] {
			return leg
		}
	}
	return -1
}

// recover tries each region once, as the log's search does.
func (m *simMirror) recover() {
	for r := range m.sync {
		if m.sync[r] {
			continue
		}
		stale := func() bool { return m.d.mirror != m }
		m.d.k.later(func() bool { return stale() || !m.d.suspended && m.pending[r] == 0 && len(m.recovering) == 0 }, func() {
			if stale() || m.sync[r] {
				return
			}
			m.recoverRegion(r)
		})
	}
}

func (m *simMirror) recoverRegion(r int) {
	per := simBlocks / simRegions
	m.recovering[r] = true
	left, bad := 1, make([]bool, len(m.t.Legs))
	finish := func() {
		if left--; left > 0 {
			return
		}
		delete(m.recovering, r)
		if slices.Contains(bad, true) {
			for leg, failed := range bad {
				if failed {
					m.fail(leg)
				}
			}
		} else {
			m.sync[r], m.nosync[r] = true, false
			m.setClean(r, true)
			m.checkSynced()
		}
		delayed := m.delayed
		m.delayed = nil
		for _, b := range delayed {
			m.write(b)
		}
	}
	source := m.first
	for b := r * per; b < (r+1)*per; b++ {
		v, ok := m.d.k.read(m.t.Legs[source].Device, b)
		if !ok {
			bad[source] = true
			continue
		}
		for i, leg := range m.t.Legs {
			if i == source {
				continue
			}
			left++
			m.d.k.submit(leg.Device, &bio{block: b, value: v, end: func(res result) {
				bad[i] = bad[i] || res != done
				finish()
			}})
		}
	}
	m.d.k.later(nil, finish)
}

// states returns what dm.Client.Devices would return.
func (k *kernelSim) states() []dm.State {
	var all []dm.State
	for name, d := range k.devices {
		s := dm.State{Info: dm.Info{Name: name, UUID: name, Live: d.live != nil, Inactive: d.inactive != nil, Suspended: d.suspended}}
		if d.live != nil {
			s.Table = dm.Whole(simSize, d.live)
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b dm.State) int { return slices.Compare([]byte(a.Name), []byte(b.Name)) })
	return all
}

func (k *kernelSim) users(name string) int {
	n := 0
	for _, d := range k.devices {
		for _, t := range []dm.Target{d.live, d.inactive} {
			if t != nil && slices.Contains(dm.Whole(simSize, t).Refs(), dm.Ref(name)) {
				n++
			}
		}
	}
	return n
}

// actions splits a step into the actions between which it can be interrupted. An action
// returns nil when it is done; one that has to wait is tried again while events run.
func (k *kernelSim) actions(s dm.Step) []func() error {
	name := s.Device.Name
	var target dm.Target
	if len(s.Device.Table) > 0 {
		target = s.Device.Table[0].Target
	}
	create := func() error {
		k.devices[name] = &simDevice{k: k, name: name}
		return nil
	}
	load := func() error { k.devices[name].inactive = target; return nil }
	suspend := func() error {
		d := k.devices[name]
		d.suspendBegin(true)
		if !d.quiet() {
			return fmt.Errorf("suspend %s waits for %d writes", name, d.inflight)
		}
		return nil
	}
	resume := func() error { k.devices[name].resume(); return nil }
	switch s.Op {
	case dm.OpCreate:
		return []func() error{create, load, resume}
	case dm.OpReload:
		return []func() error{load, suspend, resume}
	case dm.OpResume:
		return []func() error{resume}
	case dm.OpClear:
		return []func() error{func() error { k.devices[name].inactive = nil; return nil }}
	case dm.OpRemove:
		return []func() error{func() error {
			if n := k.users(name); n > 0 {
				return fmt.Errorf("remove %s: %d use it", name, n)
			}
			delete(k.devices, name)
			return nil
		}}
	}
	panic("unexpected step " + s.String())
}

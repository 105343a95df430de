// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// platter is a drive with a volatile cache that can be slow, fail, and lose its
// power: then each sector that was not flushed holds what it held at the last
// flush, or what was written since. It outlives the processes that use it.
type platter struct {
	file *os.File

	mu      sync.Mutex
	lent    *medium // the last one
	delay   time.Duration
	err     error
	lie     func(*block.IO) bool // of a write or flush: answer it without doing it
	writes  uint64
	flushed uint64               // by its number, the last write that is durable for certain
	before  map[int64][]replaced // by sector
}

// replaced is what a write has replaced.
type replaced struct {
	write uint64
	data  []byte
}

const sector = int64(block.SectorSize)

func newPlatter(path string) (*platter, error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	return &platter{file: file, before: map[int64][]replaced{}}, err
}

// lend is the drive for one run of an agent.
func (p *platter) lend(below block.Device) block.Device {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lent = &medium{platter: p, below: below}
	return p.lent
}

// fail answers all IO with err, until it is nil.
func (p *platter) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

// slow holds all IO up for d.
func (p *platter) slow(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// powerOff has nothing more reach the drive from whom it is lent to.
func (p *platter) powerOff() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lent != nil {
		p.lent.off = true
	}
}

// forgetBlocks is forget for blocks of 4 KiB, each of which holds one thing.
func (p *platter) forgetBlocks(random *rand.Rand) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	since := map[int64]uint64{} // by block, the first write that is lost; 0: none
	for _, off := range slices.Sorted(maps.Keys(p.before)) {
		olds := slices.DeleteFunc(p.before[off], func(r replaced) bool { return r.write <= p.flushed })
		if _, known := since[off/unit]; !known {
			since[off/unit] = 0
			if i := random.IntN(len(olds) + 1); i < len(olds) {
				since[off/unit] = olds[i].write
			}
		}
		lost := since[off/unit]
		i := slices.IndexFunc(olds, func(r replaced) bool { return r.write >= lost })
		if lost == 0 || i < 0 {
			continue
		}
		if _, err := p.file.WriteAt(olds[i].data, off); err != nil {
			return err
		}
	}
	clear(p.before)
	return nil
}

// forget has the sectors that were not flushed hold any of what they have held
// since. No IO may be under way.
func (p *platter) forget(random *rand.Rand) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, off := range slices.Sorted(maps.Keys(p.before)) { // so that a seed always loses the same
		olds := slices.DeleteFunc(p.before[off], func(r replaced) bool { return r.write <= p.flushed })
		if i := random.IntN(len(olds) + 1); i < len(olds) {
			if _, err := p.file.WriteAt(olds[i].data, off); err != nil {
				return err
			}
		}
	}
	clear(p.before)
	return nil
}

// medium is a platter as one run of an agent has it.
type medium struct {
	platter *platter
	below   block.Device
	off     bool // under platter.mu
}

// Geometry is the device's, with a volatile cache.
func (m *medium) Geometry() block.Geometry {
	g := m.below.Geometry()
	g.VolatileCache = true
	return g
}

// Submit is block.Device's.
func (m *medium) Submit(io *block.IO) {
	m.platter.mu.Lock()
	delay := m.platter.delay
	m.platter.mu.Unlock()
	if delay == 0 {
		m.submit(io)
		return
	}
	time.AfterFunc(delay, func() { m.submit(io) })
}

var errNoPower = fmt.Errorf("no power: %w", block.ErrGone)

func (m *medium) submit(io *block.IO) {
	p := m.platter
	own := &block.IO{Op: io.Op, FUA: io.FUA, Unmap: io.Unmap, Off: io.Off, Len: io.Len, Data: io.Data}
	own.Done = func(own *block.IO) { io.Complete(own.Err) }
	p.mu.Lock()
	err := p.err
	if m.off {
		err = errNoPower
	}
	lied := false
	switch {
	case err != nil || io.Op == block.OpRead:
	case p.lie != nil && p.lie(io):
		lied = true
	case io.Op == block.OpFlush:
		upTo := p.writes
		own.Done = func(own *block.IO) {
			p.flush(upTo, own.Err)
			io.Complete(own.Err)
		}
	default:
		err = p.rememberLocked(io)
		if number := p.writes; io.FUA {
			own.Done = func(own *block.IO) {
				p.durable(own, number)
				io.Complete(own.Err)
			}
		}
	}
	p.mu.Unlock()
	if err != nil || lied {
		io.Complete(err)
		return
	}
	m.below.Submit(own)
}

// rememberLocked keeps what a write is about to replace.
func (p *platter) rememberLocked(io *block.IO) error {
	p.writes++
	all := make([]byte, io.Len)
	if _, err := p.file.ReadAt(all, io.Off); err != nil {
		return err
	}
	for at := int64(0); at < io.Len; at += sector {
		olds := slices.DeleteFunc(p.before[io.Off+at], func(r replaced) bool { return r.write <= p.flushed })
		p.before[io.Off+at] = append(olds, replaced{p.writes, all[at : at+sector]})
	}
	return nil
}

func (p *platter) flush(upTo uint64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.flushed = max(p.flushed, upTo)
	}
}

// durable notes that a write of that number is.
func (p *platter) durable(io *block.IO, number uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if io.Err != nil {
		return
	}
	for at := io.Off; at < io.Off+io.Len; at += sector {
		p.before[at] = slices.DeleteFunc(p.before[at], func(r replaced) bool { return r.write <= number })
	}
}

// failing reports whether the drive gives errors.
func (p *platter) failing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err != nil
}

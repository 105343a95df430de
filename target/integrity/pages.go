// SPDX-License-Identifier: Apache-2.0

package integrity

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/proto/block"
)

// aligned is memory that begins on a page, which every drive can use without a copy.
func aligned(n int) []byte {
	b := make([]byte, n+pageSize)
	skip := (pageSize - int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))%pageSize)) % pageSize
	return b[skip : skip+n : skip+n]
}

var pageMemory = sync.Pool{New: func() any { return new([]byte) }}

func takePage() *[]byte {
	b := pageMemory.Get().(*[]byte)
	if *b == nil {
		*b = aligned(pageSize)
	}
	return b
}

// load reads a page, and the data of its marked parts. p.mu is locked, and is given up meanwhile;
// no write to the page is under way, and none begins.
func (l *Leg) load(p *page) error {
	p.loading = true
	c, fresh := p.content, !p.loaded
	p.mu.Unlock()
	var err error
	if fresh {
		err = l.readPage(p, &c)
	}
	if err == nil {
		err = l.adopt(p, &c)
	}
	p.mu.Lock()
	defer p.changed.Broadcast()
	p.loading = false
	if err != nil {
		return fmt.Errorf("checksums of leg %v: %w", l.id, err)
	}
	p.content, p.loaded, p.unsure = c, true, false
	if fresh && p.mark != 0 {
		l.mu.Lock() // not while forget waits for p.mu: p has a user
		l.marked++
		l.arm()
		l.mu.Unlock()
	}
	return nil
}

// readPage reads a page. One that is damaged counts as marked everywhere.
func (l *Leg) readPage(p *page, c *content) error {
	b := takePage()
	defer pageMemory.Put(b)
	err := block.ReadAt(l.dev, *b, p.self)
	if err == nil {
		err = c.decode(*b, l.id, p.number)
	}
	if errors.Is(err, errDamaged) || errors.Is(err, block.ErrMedium) {
		l.damaged.Add(1)
		*c, err = content{mark: allParts}, nil
	}
	return err
}

// adopt takes what the drive holds in the marked parts of a page for right.
func (l *Leg) adopt(p *page, c *content) error {
	data := aligned(partBlocks * BlockSize)
	for part := range PageBlocks / partBlocks {
		if c.mark>>part&1 == 0 {
			continue
		}
		if err := l.adoptPart(p, c, span{part * partBlocks, (part + 1) * partBlocks}, data); err != nil {
			return err
		}
	}
	return nil
}

// adoptPart does so for the blocks of one part. Those that cannot be read keep their checksums.
func (l *Leg) adoptPart(p *page, c *content, s span, data []byte) error {
	err := l.readBlocks(p, s, data)
	if errors.Is(err, block.ErrMedium) && s.to-s.from > 1 {
		for b := s.from; b < s.to; b++ {
			if err := l.adoptPart(p, c, span{b, b + 1}, data[:BlockSize]); err != nil {
				return err
			}
		}
		return nil
	}
	if errors.Is(err, block.ErrMedium) {
		return nil
	}
	if err != nil {
		return err
	}
	for b := s.from; b < s.to; b++ {
		if is := sum(data[(b-s.from)*BlockSize:][:BlockSize]); is != c.sums[b] {
			c.sums[b] = is
			l.adopted.Add(1)
		}
	}
	return nil
}

// markFor makes sure, before blocks are written that will have these checksums, that the drive has
// the marks for them. Blocks that do not change need none.
func (l *Leg) markFor(p *page, s span, sums []uint32) error {
	want := parts(s.from, s.to)
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case p.mark&want == want || p.has(s.from, sums):
			return nil
		case p.marking:
			p.changed.Wait()
		default:
			if err := l.setMark(p, want); err != nil {
				return err
			}
		}
	}
}

// setMark writes a page with more marks: with those that are wanted if it has none, else with all,
// because the page is busy. p.mu is locked, and is given up meanwhile.
func (l *Leg) setMark(p *page, want uint32) error {
	p.marking = true
	c := p.content
	if c.mark != 0 {
		want = allParts
	}
	first := c.mark == 0
	c.mark |= want
	p.mu.Unlock()
	if first {
		l.waitForRoom()
	}
	err := l.writePage(p, &c, l.dev.Geometry().VolatileCache)
	p.mu.Lock()
	p.marking = false
	p.changed.Broadcast()
	if err != nil {
		if first {
			l.unmarked()
		}
		return err
	}
	p.mark = c.mark
	return nil
}

func (l *Leg) writePage(p *page, c *content, durable bool) error {
	b := takePage()
	defer pageMemory.Put(b)
	c.encode(*b, l.id, p.number)
	err := block.Do(l.dev, &block.IO{Op: block.OpWrite, FUA: durable, Data: *b, Off: p.self, Len: pageSize})
	if err != nil {
		return fmt.Errorf("write checksums of leg %v: %w", l.id, err)
	}
	return nil
}

// waitForRoom counts one more page with a mark. If there are too many, marks are taken away first.
func (l *Leg) waitForRoom() {
	if full, _ := l.full(); full {
		l.takeMarks(context.Background(), true)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.marked++
	l.arm()
}

// unmarked counts a page that has no mark any more.
func (l *Leg) unmarked() {
	l.mu.Lock()
	l.marked--
	l.mu.Unlock()
}

// arm sets the timer of the next cleaning. l.mu is locked.
func (l *Leg) arm() {
	if l.armed || l.closed {
		return
	}
	l.armed = true
	l.timer = time.AfterFunc(quiet, func() {
		l.mu.Lock()
		l.armed = false
		l.mu.Unlock()
		l.takeMarks(context.Background(), false)
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.marked > 0 {
			l.arm()
		}
	})
}

// full reports whether marks are to be taken away at once.
func (l *Leg) full() (full, closed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed || l.marked >= l.markedMost, l.closed
}

// cleanAtOnce is how many pages are written at a time when marks are taken away.
const cleanAtOnce = 16

// takeMarks takes away the marks of pages to which nothing was written since the last call, or of
// all of them, until ctx ends.
func (l *Leg) takeMarks(ctx context.Context, all bool) {
	l.cleaning.Lock()
	defer l.cleaning.Unlock()
	if full, closed := l.full(); all && !full || !all && closed {
		return // another call has made room, or taken the last marks
	}
	batch := l.quietPages(all)
	defer func() {
		for _, p := range batch {
			l.drop(p)
		}
	}()
	if len(batch) == 0 {
		return
	}
	if !l.settled() {
		for _, p := range batch {
			p.resume(func() {})
		}
		return
	}
	var group errgroup.Group
	group.SetLimit(cleanAtOnce)
	for _, p := range batch {
		group.Go(func() error {
			if ctx.Err() != nil {
				p.resume(func() {})
				return nil
			}
			p.mu.Lock()
			c := p.content
			p.mu.Unlock()
			c.mark = 0
			if err := l.writePage(p, &c, false); err != nil {
				p.resume(func() {})
				return nil // it keeps its mark, on the drive too
			}
			p.resume(func() { p.mark = 0 })
			l.unmarked()
			return nil
		})
	}
	group.Wait() //nolint:errcheck // it returns none
}

// settled makes what was written durable, and reports whether that is certain.
func (l *Leg) settled() bool {
	failed := l.dev.Geometry().VolatileCache && block.Flush(l.dev) != nil
	if failed {
		l.doubtAll()
	}
	return !l.doubt() && !failed
}

// doubt reports whether the drive has lost acknowledged writes since the last look. If so, the data
// of all parts with marks may be older than the checksums in memory.
func (l *Leg) doubt() bool {
	l.mu.Lock()
	now := l.losses()
	lost := now != l.lost
	l.lost = now
	l.mu.Unlock()
	if lost {
		l.doubtAll()
	}
	return lost
}

func (l *Leg) doubtAll() {
	for _, p := range l.all() {
		p.mu.Lock()
		p.unsure = p.unsure || p.mark != 0
		p.mu.Unlock()
		l.drop(p)
	}
}

// all are the pages in memory, each to be dropped.
func (l *Leg) all() (pages []*page) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.pages {
		p.users++
		pages = append(pages, p)
	}
	return pages
}

// quietPages are the pages whose marks can go. No write to them begins until resume.
func (l *Leg) quietPages(all bool) (batch []*page) {
	for _, p := range l.all() {
		if p.pause(all) {
			batch = append(batch, p)
		} else {
			l.drop(p)
		}
	}
	return batch
}

// pause keeps writes from a page that has a mark, if it is quiet.
func (p *page) pause(force bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.written
	p.written = false
	if p.mark == 0 || !p.loaded || p.loading || p.unsure || p.marking || !force && (was || len(p.busy) > 0) {
		return false
	}
	p.clean = true
	for len(p.busy) > 0 {
		p.changed.Wait()
	}
	if p.unsure {
		p.clean = false
		p.changed.Broadcast()
		return false
	}
	return true
}

// resume lets writes go on, after a change.
func (p *page) resume(change func()) {
	p.mu.Lock()
	change()
	p.clean = false
	p.changed.Broadcast()
	p.mu.Unlock()
}

// SPDX-License-Identifier: Apache-2.0

package integrity

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/proto/block"
)

// Place says where a leg is.
type Place struct {
	Device  block.Device
	Leg     block.LegID
	Size    block.Size // of the leg, at most ExtentData for each extent
	Extents []int64    // where each begins on the device
	// Losses grows when the device may have lost acknowledged writes; nil: it never does.
	Losses func() uint64
}

// check refuses a place that no leg can have.
func (p Place) check() error {
	g := p.Device.Geometry()
	if p.Size == 0 || p.Size%BlockSize != 0 || uint64(p.Size) > uint64(len(p.Extents))*uint64(ExtentData) {
		return fmt.Errorf("leg %v: %v on %d extents: %w", p.Leg, p.Size, len(p.Extents), block.ErrRange)
	}
	if g.BlockSize == 0 || BlockSize%g.BlockSize != 0 || g.MaxIO != 0 && g.MaxIO < BlockSize {
		return fmt.Errorf("leg %v: a drive with blocks of %v that takes %v at once: %w", p.Leg, g.BlockSize, g.MaxIO, block.ErrRange)
	}
	for _, at := range p.Extents {
		if at < 0 || at%BlockSize != 0 || uint64(at)+uint64(block.ExtentSize) > uint64(g.Size) {
			return fmt.Errorf("leg %v: an extent at %d: %w", p.Leg, at, block.ErrRange)
		}
	}
	return nil
}

// Stats counts what a leg has met since it was opened.
type Stats struct {
	Mismatches uint64 // reads that failed with block.ErrChecksum
	// Adopted are blocks that were being written to when the power was cut, or whose page was
	// damaged: what the drive holds is taken for right.
	Adopted uint64
	Damaged uint64 // pages that were damaged, by a power cut or by the drive
}

// Leg is a leg with checksums, a block.Device. Its methods may be called concurrently.
type Leg struct {
	dev    block.Device
	id     block.LegID
	losses func() uint64
	size   atomic.Uint64
	at     atomic.Pointer[[]int64] // where its extents are

	mismatches, adopted, damaged atomic.Uint64

	pagesMost, markedMost int

	mu     sync.Mutex
	pages  map[uint64]*page
	marked int  // pages that have a mark
	armed  bool // a cleaning is to come
	timer  *time.Timer
	closed bool
	lost   uint64 // losses at the last look

	cleaning sync.Mutex // held by the cleaning that is under way
}

// The pages that a leg keeps in memory: 4 KiB for each 3.75 MiB of the leg. Pages with a mark
// cannot be forgotten, so writes wait while there are too many.
const (
	pagesMost  = 2048
	markedMost = 2048
)

// quiet is for how long nothing was written to a page when its mark is taken away.
var quiet = 5 * time.Second

// Open returns the leg at a place. It reads nothing. A leg that was never written must be zeroes,
// its checksums included.
func Open(p Place) (*Leg, error) {
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("open leg with checksums: %w", err)
	}
	l := &Leg{dev: p.Device, id: p.Leg, losses: p.Losses, pages: map[uint64]*page{}}
	if l.losses == nil {
		l.losses = func() uint64 { return 0 }
	}
	l.pagesMost, l.markedMost, l.lost = pagesMost, markedMost, l.losses()
	extents := slices.Clone(p.Extents)
	l.at.Store(&extents)
	l.size.Store(uint64(p.Size))
	return l, nil
}

// Grow makes the leg larger. Its extents stay, and more may follow.
func (l *Leg) Grow(p Place) error {
	if err := p.check(); err != nil {
		return fmt.Errorf("grow leg with checksums: %w", err)
	}
	if have := *l.at.Load(); len(p.Extents) < len(have) || !slices.Equal(p.Extents[:len(have)], have) || uint64(p.Size) < l.size.Load() {
		return fmt.Errorf("grow leg %v: it would not keep what it has: %w", l.id, block.ErrRange)
	}
	extents := slices.Clone(p.Extents)
	l.at.Store(&extents)
	l.size.Store(uint64(p.Size))
	return nil
}

// Geometry is the drive's, except for the size.
func (l *Leg) Geometry() block.Geometry {
	g := l.dev.Geometry()
	g.Size = block.Size(l.size.Load())
	if g.DiscardUnit > 0 {
		g.DiscardUnit = max(g.DiscardUnit, BlockSize)
	}
	return g
}

// Stats returns what the leg has met.
func (l *Leg) Stats() Stats {
	return Stats{l.mismatches.Load(), l.adopted.Load(), l.damaged.Load()}
}

// page is a page of checksums in memory.
type page struct {
	number uint64
	data   int64 // on the device: of its first block
	self   int64 // on the device: the page
	users  int   // guarded by Leg.mu

	mu      sync.Mutex
	changed sync.Cond
	content // the checksums are those of the data, the mark is that on the drive
	loaded  bool
	loading bool
	marking bool
	clean   bool // its mark is being taken away: no write begins
	unsure  bool // a write failed, so its checksums are read again from the data
	written bool // since the last cleaning
	busy    []span
}

// span is a run of blocks of a page, that are being written or looked at; without to.
type span struct{ from, to int }

// hold finds a page for an IO, until drop.
func (l *Leg) hold(number uint64) *page {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pages[number]
	if p == nil {
		l.forget()
		extent := (*l.at.Load())[number/extentOf]
		at := int64(number % extentOf)
		p = &page{number: number, self: extent + pagesAt + at*pageSize, data: extent + dataAt + at*pageData}
		p.changed.L = &p.mu
		l.pages[number] = p
	}
	p.users++
	return p
}

func (l *Leg) drop(p *page) {
	l.mu.Lock()
	p.users--
	l.mu.Unlock()
}

// forget makes room for one more page, as far as a few looks find unused ones. l.mu is locked.
func (l *Leg) forget() {
	looks := 0
	for number, p := range l.pages { // in random order
		if len(l.pages) < l.pagesMost || looks == 32 {
			return
		}
		if p.users == 0 && !p.marks() {
			delete(l.pages, number)
		}
		looks++
	}
}

func (p *page) marks() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mark != 0
}

// free reports whether no other IO is at blocks from to to. p.mu is locked.
func (p *page) free(from, to int) bool {
	for _, s := range p.busy {
		if from < s.to && s.from < to {
			return false
		}
	}
	return true
}

// leave ends an IO's hold on blocks. p.mu is locked.
func (p *page) leave(s span) {
	i := slices.Index(p.busy, s)
	p.busy = slices.Delete(p.busy, i, i+1)
	p.changed.Broadcast()
}

// Submit implements block.Device.
func (l *Leg) Submit(io *block.IO) {
	if err := l.Geometry().CheckIO(io); err != nil {
		io.Complete(err)
		return
	}
	if io.Op == block.OpFlush {
		l.dev.Submit(io)
		return
	}
	number, from := uint64(io.Off/pageData), io.Off%pageData
	if (io.Op == block.OpRead || io.Op == block.OpWrite) && from+io.Len <= pageData && from%BlockSize == 0 && io.Len%BlockSize == 0 {
		p := l.hold(number)
		if l.fast(p, io, from) {
			return
		}
		l.drop(p)
	}
	go func() { io.Complete(l.slow(io)) }()
}

// piecesAtOnce is how many pages one IO uses at a time.
const piecesAtOnce = 32

// slow does an IO page by page, and may wait.
func (l *Leg) slow(io *block.IO) error {
	off, end := io.Off, io.Off+io.Len
	if io.Op == block.OpDiscard { // whole blocks, which read as zeroes afterwards
		off, end = (off+BlockSize-1)/BlockSize*BlockSize, end/BlockSize*BlockSize
	}
	var group errgroup.Group
	group.SetLimit(piecesAtOnce)
	for off < end {
		at, n := off, min(pageData-off%pageData, end-off)
		if at == io.Off && n == io.Len {
			return l.piece(io, at, n)
		}
		group.Go(func() error { return l.piece(io, at, n) })
		off += n
	}
	return group.Wait()
}

// piece does the part of an IO that is in one page.
func (l *Leg) piece(io *block.IO, at, n int64) error {
	p := l.hold(uint64(at / pageData))
	defer l.drop(p)
	from := at % pageData
	switch io.Op {
	case block.OpRead:
		return l.read(p, io.Data[at-io.Off:][:n], from)
	case block.OpWrite:
		return l.write(p, change{data: io.Data[at-io.Off:][:n], from: from, length: n, fua: io.FUA})
	}
	return l.write(p, change{from: from, length: n, fua: io.FUA, unmap: io.Unmap || io.Op == block.OpDiscard})
}

// Close takes away all marks, so that the leg's next opening finds nothing to do. No IO may be
// under way. Errors, and the end of ctx, leave marks behind and are not reported: that is what marks
// are for.
func (l *Leg) Close(ctx context.Context) {
	l.mu.Lock()
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
	}
	l.mu.Unlock()
	l.takeMarks(ctx, true)
}

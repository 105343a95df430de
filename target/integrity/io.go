// SPDX-License-Identifier: Apache-2.0

package integrity

import (
	"errors"
	"fmt"
	"sync"

	"weft.dev/weft/proto/block"
)

// job is a read or write of whole blocks of one page that waits for nothing but the drive.
type job struct {
	io   block.IO
	user *block.IO
	leg  *Leg
	page *page
	span span
	sums []uint32
}

// jobs are reused, so that an IO allocates none.
var jobs = sync.Pool{New: func() any { return &job{} }}

// fast starts an IO of whole blocks, unless it would have to wait.
func (l *Leg) fast(p *page, io *block.IO, from int64) bool {
	j := jobs.Get().(*job)
	j.user, j.leg, j.page = io, l, p
	j.span = span{int(from / BlockSize), int((from + io.Len) / BlockSize)}
	j.io = block.IO{Op: io.Op, FUA: io.FUA, Off: p.data + from, Len: io.Len, Data: io.Data, Owner: j, Done: wasRead}
	if io.Op == block.OpWrite {
		j.io.Done = wasWritten
		j.sums = sumsOf(j.sums[:0], io.Data)
	}
	p.mu.Lock()
	ok := p.loaded && !p.unsure
	if ok && io.Op == block.OpWrite {
		ok = !p.clean && p.free(j.span.from, j.span.to) && (p.mark&parts(j.span.from, j.span.to) == parts(j.span.from, j.span.to) || p.has(j.span.from, j.sums))
		if ok {
			p.busy = append(p.busy, j.span)
			p.written = true
		}
	}
	p.mu.Unlock()
	if !ok {
		j.end()
		return false
	}
	l.dev.Submit(&j.io)
	return true
}

func (j *job) end() {
	j.user, j.leg, j.page, j.io = nil, nil, nil, block.IO{}
	jobs.Put(j)
}

func sumsOf(sums []uint32, data []byte) []uint32 {
	for at := 0; at < len(data); at += BlockSize {
		sums = append(sums, sum(data[at:at+BlockSize]))
	}
	return sums
}

// has reports whether these are the checksums of blocks from from on. p.mu is locked.
func (p *page) has(from int, sums []uint32) bool {
	for i, s := range sums {
		if p.sums[from+i] != s {
			return false
		}
	}
	return true
}

// checkedAtOnce is how much is checked by the goroutine that completes a drive's IOs.
const checkedAtOnce = 128 << 10

func wasRead(io *block.IO) {
	j := io.Owner.(*job)
	if io.Err == nil && io.Len > checkedAtOnce {
		go j.wasRead()
		return
	}
	j.wasRead()
}

// wasRead checks what was read. If it is wrong, a write may have been under way, so it is read again
// without one.
func (j *job) wasRead() {
	io := &j.io
	l, p, user, err, from := j.leg, j.page, j.user, io.Err, j.span.from
	ok := true
	if err == nil {
		j.sums = sumsOf(j.sums[:0], io.Data)
		p.mu.Lock()
		ok = p.has(from, j.sums)
		p.mu.Unlock()
	}
	j.end()
	if !ok {
		go func() {
			err := l.read(p, user.Data, int64(from)*BlockSize)
			l.drop(p)
			user.Complete(err)
		}()
		return
	}
	l.drop(p)
	user.Complete(err)
}

func wasWritten(io *block.IO) {
	j := io.Owner.(*job)
	l, p, user, err := j.leg, j.page, j.user, io.Err
	p.wrote(j.span, j.sums, err)
	j.end()
	l.drop(p)
	user.Complete(err)
}

// wrote ends a write of blocks with these checksums. After an error it is not known what the drive
// holds.
func (p *page) wrote(s span, sums []uint32, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		copy(p.sums[s.from:], sums)
	} else {
		p.unsure = true
	}
	p.leave(s)
}

// enter waits until no other IO is at these blocks, and keeps others from them until leave. It
// returns with p.mu locked.
func (l *Leg) enter(p *page, s span, write bool) error {
	p.mu.Lock()
	for {
		switch {
		case p.loading || p.clean && (write || p.unsure) || p.unsure && len(p.busy) > 0 || !p.free(s.from, s.to):
			p.changed.Wait()
		case !p.loaded || p.unsure:
			if err := l.load(p); err != nil {
				p.mu.Unlock()
				return err
			}
		default:
			p.busy = append(p.busy, s)
			p.written = p.written || write
			return nil
		}
	}
}

// errAgain ends a read that is to be made again, because the drive has lost what was written.
var errAgain = errors.New("read again")

// read reads a part of a page, and checks it.
func (l *Leg) read(p *page, data []byte, from int64) error {
	for {
		if err := l.readOnce(p, data, from); !errors.Is(err, errAgain) {
			return err
		}
	}
}

// readOnce reads a part of a page, while nothing writes to its blocks, and checks them.
func (l *Leg) readOnce(p *page, data []byte, from int64) error {
	to := from + int64(len(data))
	s := span{int(from / BlockSize), int((to + BlockSize - 1) / BlockSize)}
	if err := l.enter(p, s, false); err != nil {
		return err
	}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.leave(s)
		p.mu.Unlock()
	}()
	blocks := data
	if from%BlockSize != 0 || to%BlockSize != 0 {
		blocks = aligned((s.to - s.from) * BlockSize)
	}
	if err := l.readBlocks(p, s, blocks); err != nil {
		return err
	}
	bad := p.wrong(s, blocks)
	if len(bad) > 0 && l.doubt() {
		p.mu.Lock()
		unsure := p.unsure
		p.mu.Unlock()
		if unsure {
			return errAgain
		}
	}
	if len(bad) > 0 {
		l.mismatches.Add(1)
		return fmt.Errorf("read %d bytes at %d of leg %v: %d of %d blocks from %d on: %w",
			len(data), int64(p.number)*pageData+from, l.id, len(bad), s.to-s.from, int64(p.number)*pageData+int64(bad[0])*BlockSize, block.ErrChecksum)
	}
	if from%BlockSize != 0 || to%BlockSize != 0 {
		copy(data, blocks[from-int64(s.from)*BlockSize:])
	}
	return nil
}

// wrong lists the blocks of a span whose data does not match. Nothing writes to them.
func (p *page) wrong(s span, data []byte) (bad []int) {
	for b := s.from; b < s.to; b++ {
		got := sum(data[(b-s.from)*BlockSize:][:BlockSize])
		p.mu.Lock()
		if p.sums[b] != got {
			bad = append(bad, b)
		}
		p.mu.Unlock()
	}
	return bad
}

// readBlocks reads a span from the drive, as much at once as that takes.
func (l *Leg) readBlocks(p *page, s span, data []byte) error {
	most := len(data)
	if n := int(l.dev.Geometry().MaxIO); n > 0 {
		most = n / BlockSize * BlockSize
	}
	for at := 0; at < len(data); at += most {
		piece := data[at:min(at+most, len(data))]
		if err := block.ReadAt(l.dev, piece, p.data+int64(s.from)*BlockSize+int64(at)); err != nil {
			return err
		}
	}
	return nil
}

// change is a write to a part of a page, or of zeroes to it.
type change struct {
	data       []byte // nil: zeroes
	from       int64  // in the page
	length     int64
	fua, unmap bool
}

// write writes to a part of a page: the mark first, then the data.
func (l *Leg) write(p *page, c change) error {
	to := c.from + c.length
	s := span{int(c.from / BlockSize), int((to + BlockSize - 1) / BlockSize)}
	if err := l.enter(p, s, true); err != nil {
		return err
	}
	p.mu.Unlock()
	sums, err := l.sumsAfter(p, s, c)
	if err == nil {
		err = l.markFor(p, s, sums)
	}
	if err != nil { // nothing was written
		p.mu.Lock()
		p.leave(s)
		p.mu.Unlock()
		return err
	}
	io := &block.IO{Op: block.OpWrite, FUA: c.fua, Off: p.data + c.from, Len: c.length, Data: c.data}
	if c.data == nil {
		io.Op, io.Unmap = block.OpWriteZeroes, c.unmap
	}
	err = block.Do(l.dev, io)
	p.wrote(s, sums, err)
	return err
}

// sumsAfter are the checksums of the blocks of a span after a change. A block that is wrong, and is
// changed in part, keeps the checksum that it has, and so stays wrong.
func (l *Leg) sumsAfter(p *page, s span, c change) ([]uint32, error) {
	sums := make([]uint32, s.to-s.from)
	for b := s.from; b < s.to; b++ {
		at := int64(b)*BlockSize - c.from // of the block, in the change
		if at >= 0 && at+BlockSize <= c.length {
			if c.data != nil {
				sums[b-s.from] = sum(c.data[at:][:BlockSize])
			}
			continue
		}
		whole := aligned(BlockSize)
		one := span{b, b + 1}
		if err := l.readBlocks(p, one, whole); err != nil {
			return nil, err
		}
		if len(p.wrong(one, whole)) > 0 {
			l.mismatches.Add(1)
			p.mu.Lock()
			sums[b-s.from] = p.sums[b]
			p.mu.Unlock()
			continue
		}
		begin, end := max(at, 0), min(at+BlockSize, c.length)
		if c.data != nil {
			copy(whole[begin-at:end-at], c.data[begin:end])
		} else {
			clear(whole[begin-at : end-at])
		}
		sums[b-s.from] = sum(whole)
	}
	return sums, nil
}

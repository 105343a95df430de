// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// memDisk is a Device in memory that counts and checks its requests, and holds or fails them
// on demand.
type memDisk struct {
	mu       sync.Mutex
	geometry block.Geometry
	pages    map[int64][]byte // by page number; absent ones are zero
	counts   map[block.Op]int
	fua      int
	largest  int64
	bad      []string // requests that no kernel should send
	holds    func(*block.IO) bool
	held     []*block.IO
	arrived  chan struct{} // gets a value for each held IO
	fails    func(*block.IO) error
}

const memPage = 4096

func newMemDisk(g block.Geometry) *memDisk {
	return &memDisk{geometry: g, pages: make(map[int64][]byte), counts: make(map[block.Op]int), arrived: make(chan struct{}, 1000)}
}

func (d *memDisk) Geometry() block.Geometry {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.geometry
}

func (d *memDisk) grow(to block.Size) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.geometry.Size = to
}

func (d *memDisk) Submit(io *block.IO) {
	d.mu.Lock()
	if err := d.geometry.CheckIO(io); err != nil {
		d.bad = append(d.bad, fmt.Sprintf("%v at %d+%d: %v", io.Op, io.Off, io.Len, err))
	}
	d.counts[io.Op]++
	if io.FUA {
		d.fua++
	}
	d.largest = max(d.largest, io.Len)
	if d.holds != nil && d.holds(io) {
		d.held = append(d.held, io)
		d.mu.Unlock()
		d.arrived <- struct{}{}
		return
	}
	err := d.doLocked(io)
	d.mu.Unlock()
	io.Complete(err)
}

func (d *memDisk) doLocked(io *block.IO) error {
	if d.fails != nil {
		if err := d.fails(io); err != nil {
			return err
		}
	}
	if err := d.geometry.CheckIO(io); err != nil {
		return err
	}
	for at := int64(0); at < io.Len; {
		page, in := (io.Off+at)/memPage, (io.Off+at)%memPage
		n := min(memPage-in, io.Len-at)
		d.touchLocked(io, page, in, at, n)
		at += n
	}
	return nil
}

func (d *memDisk) touchLocked(io *block.IO, page, in, at, n int64) {
	p := d.pages[page]
	switch io.Op {
	case block.OpRead:
		if p == nil {
			clear(io.Data[at : at+n])
			return
		}
		copy(io.Data[at:at+n], p[in:])
	case block.OpWrite:
		if p == nil {
			p = make([]byte, memPage)
			d.pages[page] = p
		}
		copy(p[in:in+n], io.Data[at:])
	case block.OpDiscard, block.OpWriteZeroes:
		if n == memPage {
			delete(d.pages, page)
		} else if p != nil {
			clear(p[in : in+n])
		}
	}
}

// hold delays the IOs that match until release.
func (d *memDisk) hold(match func(*block.IO) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.holds = match
}

func (d *memDisk) release() {
	d.mu.Lock()
	held := d.held
	d.held, d.holds = nil, nil
	errs := make([]error, len(held))
	for i, io := range held {
		errs[i] = d.doLocked(io)
	}
	d.mu.Unlock()
	for i, io := range held {
		io.Complete(errs[i])
	}
}

func (d *memDisk) fail(with func(*block.IO) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fails = with
}

func (d *memDisk) count(op block.Op) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts[op]
}

func (d *memDisk) fuaWrites() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fua
}

func (d *memDisk) used() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.pages)
}

// fileDisk is a Device in a file, so that acknowledged data outlives the process that serves
// it.
type fileDisk struct {
	f        *os.File
	geometry block.Geometry
	delay    time.Duration // of writes
}

func openFileDisk(path string, g block.Geometry) (*fileDisk, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return &fileDisk{f: f, geometry: g}, f.Truncate(int64(g.Size))
}

func (d *fileDisk) Geometry() block.Geometry { return d.geometry }

func (d *fileDisk) Submit(io *block.IO) {
	go func() { io.Complete(d.do(io)) }()
}

func (d *fileDisk) do(io *block.IO) (err error) {
	if err := d.geometry.CheckIO(io); err != nil {
		return err
	}
	switch io.Op {
	case block.OpRead:
		_, err = d.f.ReadAt(io.Data, io.Off)
	case block.OpWrite:
		time.Sleep(d.delay)
		_, err = d.f.WriteAt(io.Data, io.Off)
	case block.OpDiscard, block.OpWriteZeroes:
		err = unix.Fallocate(int(d.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, io.Off, io.Len)
	}
	return err
}

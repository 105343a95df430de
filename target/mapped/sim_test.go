// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

const sector = 512

// image is what a drive holds: pages over those of another image, which does not change any more.
type image struct {
	under *image
	pages map[int64]*[unit]byte
}

func newImage(under *image) *image { return &image{under, map[int64]*[unit]byte{}} }

func (m *image) page(n int64) *[unit]byte {
	for at := m; at != nil; at = at.under {
		if p := at.pages[n]; p != nil {
			return p
		}
	}
	return nil
}

func (m *image) read(p []byte, off int64) {
	for len(p) > 0 {
		n, from := min(int64(len(p)), unit-off%unit), off%unit
		if page := m.page(off / unit); page != nil {
			copy(p[:n], page[from:])
		} else {
			clear(p[:n])
		}
		p, off = p[n:], off+n
	}
}

func (m *image) write(p []byte, off int64) {
	for len(p) > 0 {
		n, from := min(int64(len(p)), unit-off%unit), off%unit
		page := m.pages[off/unit]
		if page == nil {
			page = new([unit]byte)
			if was := m.page(off / unit); was != nil {
				*page = *was
			}
			m.pages[off/unit] = page
		}
		copy(page[from:], p[:n])
		p, off = p[n:], off+n
	}
}

// ReadAt makes an image a file for the checker.
func (m *image) ReadAt(p []byte, off int64) (int, error) {
	m.read(p, off)
	return len(p), nil
}

// write is a write or a flush (nil data) that a drive was asked for.
type write struct {
	off        int64
	data       []byte
	fua        bool
	begun, end int // events; end is a large number until it has ended
}

const never = 1 << 60

// drive is a drive that keeps a log of what it was asked for, to make of it what a power cut may
// leave. Writes take a microsecond, so those of one moment are in flight together.
type drive struct {
	size     block.Size
	volatile bool
	at       bool // at once: no log and no time

	mu     sync.Mutex
	img    *image
	base   *image   // what is durable for sure, without log
	log    []*write // by begin
	events int
	broken func(*block.IO) error // fails what it returns an error for
}

func (d *drive) Geometry() block.Geometry {
	return block.Geometry{Size: d.size, BlockSize: sector, VolatileCache: d.volatile}
}

func (d *drive) Submit(io *block.IO) {
	if err := d.Geometry().CheckIO(io); err != nil {
		panic(fmt.Sprintf("%v %d+%d: %v", io.Op, io.Off, io.Len, err))
	}
	d.mu.Lock()
	if d.broken != nil {
		if err := d.broken(io); err != nil {
			d.mu.Unlock()
			io.Complete(err)
			return
		}
	}
	if io.Op == block.OpRead {
		d.img.read(io.Data, io.Off)
		d.mu.Unlock()
		io.Complete(nil)
		return
	}
	data := slices.Clone(io.Data)
	if io.Op == block.OpDiscard || io.Op == block.OpWriteZeroes {
		data = make([]byte, io.Len)
	}
	if d.at {
		d.img.write(data, io.Off)
		d.mu.Unlock()
		io.Complete(nil)
		return
	}
	w := &write{off: io.Off, data: data, fua: io.FUA, begun: d.events, end: never}
	d.events++
	d.log = append(d.log, w)
	d.mu.Unlock()
	time.AfterFunc(time.Microsecond, func() {
		d.mu.Lock()
		d.img.write(w.data, w.off)
		w.end = d.events
		d.events++
		d.mu.Unlock()
		io.Complete(nil)
	})
}

// durable reports whether a write is on the medium for sure when the power is cut before event k.
func (d *drive) durable(w *write, k int) bool {
	if w.end >= k {
		return false
	}
	if !d.volatile || w.fua {
		return true
	}
	return slices.ContainsFunc(d.log, func(f *write) bool { return f.data == nil && f.begun > w.end && f.end < k })
}

// now is how many events there were.
func (d *drive) now() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.events
}

// fold makes what is durable the base, to keep the log short.
func (d *drive) fold() {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for n < len(d.log) && (d.durable(d.log[n], d.events) || d.log[n].data == nil && d.log[n].end < never) {
		n++
	}
	if n == 0 {
		return
	}
	base := newImage(d.base)
	for _, w := range d.log[:n] {
		base.write(w.data, w.off)
	}
	d.base, d.log = flat(base), slices.Clone(d.log[n:])
}

// flat keeps images from being a long chain.
func flat(m *image) *image {
	depth := 0
	for at := m; at != nil; at = at.under {
		depth++
	}
	if depth < 8 {
		return m
	}
	out, root := newImage(nil), m
	for root.under != nil {
		root = root.under
	}
	out.under = root
	var chain []*image
	for at := m; at != root; at = at.under {
		chain = append(chain, at)
	}
	for _, at := range slices.Backward(chain) {
		for n, p := range at.pages {
			out.pages[n] = p
		}
	}
	return out
}

// crash is what a power cut before event k may leave.
func (d *drive) crash(r *rand.Rand, k int) *image {
	d.mu.Lock()
	defer d.mu.Unlock()
	img := newImage(d.base)
	mode := r.IntN(4)
	for _, w := range d.log {
		if w.begun >= k {
			break
		}
		sure := d.durable(w, k)
		for at := 0; at < len(w.data); at += sector {
			if sure || mode == 1 || mode > 1 && r.IntN(2) == 0 {
				img.write(w.data[at:at+sector], w.off+int64(at))
			}
		}
	}
	return img
}

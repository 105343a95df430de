// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"

	"weft.dev/weft/proto/block"
)

// memory is a medium with a volatile cache, in sectors of 512 bytes; absent sectors read as zeroes.
// It loses power at the write of sector number cutAt.
type memory struct {
	size    block.Size
	durable map[int64][]byte
	cache   map[int64][]byte // durable, and what was written since
	order   []write          // what was written since the last flush
	writes  int
	cutAt   int // 0 means never
	flushes int
	failAt  int64 // offset whose sector cannot be written; 0 means none
	badRead map[int64]bool
}

type write struct {
	sector int64
	data   []byte
}

var (
	errCut = errors.New("power cut")
	errBad = errors.New("bad sector")
)

const sector = 512

func newMemory(size block.Size) *memory {
	return &memory{size: size, durable: map[int64][]byte{}, cache: map[int64][]byte{}, badRead: map[int64]bool{}}
}

func (m *memory) Size() block.Size      { return m.size }
func (m *memory) BlockSize() block.Size { return sector }
func (m *memory) Close() error          { return nil }

func (m *memory) cut() bool { return m.cutAt > 0 && m.writes >= m.cutAt }

func (m *memory) ReadAt(p []byte, offset int64) (int, error) {
	if offset < 0 || uint64(offset)+uint64(len(p)) > uint64(m.size) {
		return 0, io.EOF
	}
	clear(p)
	for s := offset / sector; s*sector < offset+int64(len(p)); s++ {
		if m.badRead[s] {
			return 0, errBad
		}
		if data, ok := m.cache[s]; ok {
			from, to := max(s*sector, offset), min((s+1)*sector, offset+int64(len(p)))
			copy(p[from-offset:to-offset], data[from-s*sector:])
		}
	}
	return len(p), nil
}

func (m *memory) WriteAt(p []byte, offset int64) (int, error) {
	if offset < 0 || offset%sector != 0 || len(p)%sector != 0 || uint64(offset)+uint64(len(p)) > uint64(m.size) {
		return 0, fmt.Errorf("write of %d bytes at %d is not in whole blocks", len(p), offset)
	}
	for i := 0; i < len(p); i += sector {
		if err := m.writeSector((offset+int64(i))/sector, append([]byte(nil), p[i:i+sector]...)); err != nil {
			return i, err
		}
	}
	return len(p), nil
}

func (m *memory) writeSector(s int64, data []byte) error {
	if m.cut() {
		return errCut
	}
	if m.failAt != 0 && s == m.failAt/sector {
		return errBad
	}
	m.writes++
	m.order = append(m.order, write{s, data})
	m.cache[s] = data
	return nil
}

func (m *memory) Flush() error {
	if m.cut() {
		return errCut
	}
	m.flushes++
	m.durable, m.order = maps.Clone(m.cache), nil
	return nil
}

// Zero writes only the sectors that are not zero: the others would make no new state.
func (m *memory) Zero(ctx context.Context, offset, length block.Size, progress func(block.Size)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if offset%sector != 0 || length%sector != 0 || offset+length > m.size {
		return fmt.Errorf("zero of %d bytes at %d is not in whole blocks", length, offset)
	}
	for s := range maps.Clone(m.cache) {
		if at := block.Size(s) * sector; at < offset || at >= offset+length || allZero(m.cache[s]) {
			continue
		}
		if err := m.writeSector(s, make([]byte, sector)); err != nil {
			return err
		}
	}
	if progress != nil {
		progress(length)
	}
	return m.Flush()
}

// clone is a copy with the power on and no undurable writes in the cache.
func (m *memory) clone() *memory {
	c := newMemory(m.size)
	c.durable, c.cache = maps.Clone(m.durable), maps.Clone(m.durable)
	return c
}

// afterCut yields the media that may be found after a power loss: of the writes since the last
// flush, all, none, all but one sector, only one, some at random, and all with the last sector torn
// in three ways.
func (m *memory) afterCut(random *rand.Rand) []*memory {
	pick := func(keep func(i int) bool) *memory {
		c := m.clone()
		for i, w := range m.order {
			if keep(i) {
				c.durable[w.sector], c.cache[w.sector] = w.data, w.data
			}
		}
		return c
	}
	media := []*memory{pick(func(int) bool { return true }), pick(func(int) bool { return false })}
	for range 2 {
		media = append(media, pick(func(int) bool { return random.IntN(2) == 0 }))
	}
	if len(m.order) == 0 {
		return media
	}
	one := random.IntN(len(m.order))
	media = append(media, pick(func(i int) bool { return i == one }), pick(func(i int) bool { return i != one }))
	last := m.order[len(m.order)-1]
	for _, torn := range [][2]int{{0, 256}, {256, 512}, {20, 24}} {
		c := pick(func(i int) bool { return i < len(m.order)-1 })
		data := append(make([]byte, 0, sector), make([]byte, sector)...)
		copy(data, c.cache[last.sector])
		copy(data[torn[0]:torn[1]], last.data[torn[0]:torn[1]])
		c.durable[last.sector], c.cache[last.sector] = data, data
		media = append(media, c)
	}
	return media
}

// damage overwrites bytes, durably.
func (m *memory) damage(offset int64, text string) {
	s := offset / sector
	data := make([]byte, sector)
	copy(data, m.cache[s])
	if n := copy(data[offset%sector:], text); n != len(text) {
		panic("damage crosses a sector")
	}
	m.cache[s], m.durable[s] = data, data
}

func allZero(b []byte) bool { return bytes.Count(b, []byte{0}) == len(b) }

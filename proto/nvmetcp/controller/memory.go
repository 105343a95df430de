// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"math/bits"
	"sync"
	"unsafe"
)

// pageSize is what direct IO wants memory to be aligned to.
const pageSize = 4096

// buffer is memory for the data of one command, aligned to pages.
type buffer struct {
	b     []byte
	class int
}

// memory hands out buffers of 4 KiB times powers of two and takes them back.
type memory struct{ pools [16]sync.Pool }

func class(n int) int { return bits.Len(uint(max(n, 1)-1) / pageSize) }

// size is what get(n) really takes.
func bufferSize(n int) int { return pageSize << class(n) }

func (m *memory) get(n int) *buffer {
	c := class(n)
	if b, ok := m.pools[c].Get().(*buffer); ok {
		return b
	}
	return &buffer{b: alignedSlice(pageSize << c), class: c}
}

func (m *memory) put(b *buffer) {
	if b != nil {
		m.pools[b.class].Put(b)
	}
}

func alignedSlice(n int) []byte {
	b := make([]byte, n+pageSize)
	skip := 0
	if over := int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) % pageSize); over != 0 {
		skip = pageSize - over
	}
	return b[skip : skip+n : skip+n]
}

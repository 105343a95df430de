// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"math/bits"
	"sync"
	"unsafe"
)

// pageSize is the alignment of memory that direct IO requires.
const pageSize = 4096

// buffer is memory for the data of one command, aligned to pages.
type buffer struct {
	b     []byte
	class int
}

// bufferPool provides buffers of 4 KiB times powers of two, and reuses them.
type bufferPool struct{ pools [16]sync.Pool }

func class(n int) int { return bits.Len(uint(max(n, 1)-1) / pageSize) }

// bufferSize is the size of the buffer that get(n) returns.
func bufferSize(n int) int { return pageSize << class(n) }

func (p *bufferPool) get(n int) *buffer {
	c := class(n)
	if b, ok := p.pools[c].Get().(*buffer); ok {
		return b
	}
	return &buffer{b: alignedSlice(pageSize << c), class: c}
}

func (p *bufferPool) put(b *buffer) {
	if b != nil {
		p.pools[b.class].Put(b)
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

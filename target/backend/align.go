// SPDX-License-Identifier: Apache-2.0

package backend

import "unsafe"

// PageSize is an alignment that suffices for every O_DIRECT transfer.
const PageSize = 4096

// Aligned returns a slice of n bytes that begins on a page, so that it can be read and written past
// the page cache without a copy.
func Aligned(n int) []byte {
	b := make([]byte, n+PageSize)
	skip := 0
	if over := int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) % PageSize); over != 0 {
		skip = PageSize - over
	}
	return b[skip : skip+n : skip+n]
}

// aligned reports whether b begins on a multiple of unit.
func aligned(b []byte, unit int) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%uintptr(max(unit, 1)) == 0
}

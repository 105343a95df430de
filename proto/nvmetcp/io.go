// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import "fmt"

// Range is one range of Dataset Management (NVM, figure 42).
type Range struct {
	Attributes uint32
	Blocks     uint32
	Start      uint64
}

// The limits of Dataset Management.
const (
	RangeSize = 16
	MaxRanges = 256
)

// DatasetDeallocate is AD of CDW11: the ranges' content is no longer needed.
const DatasetDeallocate uint32 = 1 << 2

// Append adds RangeSize bytes to b.
func (r Range) Append(b []byte) []byte {
	b = le.AppendUint32(b, r.Attributes)
	b = le.AppendUint32(b, r.Blocks)
	return le.AppendUint64(b, r.Start)
}

// ParseRanges reads n ranges; n is at most MaxRanges.
func ParseRanges(b []byte, n int) ([]Range, error) {
	if n < 0 || n > MaxRanges {
		return nil, fmt.Errorf("parse ranges: %d, at most %d allowed", n, MaxRanges)
	}
	if len(b) < n*RangeSize {
		return nil, short("ranges", len(b), n*RangeSize)
	}
	ranges := make([]Range, n)
	for i := range ranges {
		at := b[RangeSize*i:]
		ranges[i] = Range{Attributes: le.Uint32(at), Blocks: le.Uint32(at[4:]), Start: le.Uint64(at[8:])}
	}
	return ranges, nil
}

// SetRangeCount sets NR of Dataset Management; n is 1 to MaxRanges.
func (c *Command) SetRangeCount(n int) { c[40] = byte(n - 1) }

// RangeCount is NR.
func (c *Command) RangeCount() int { return int(c[40]) + 1 }

// SPDX-License-Identifier: Apache-2.0

package block

import "fmt"

// Layout is how a volume is spread: Stripes columns, each of Copies legs that
// mirror one another, Chunk bytes of one column before the next one follows.
// RAID0 has one copy, RAID1 one stripe.
type Layout struct {
	Stripes int
	Copies  int
	Chunk   Size
}

// Limits of a layout.
const (
	MaxStripes   = 64
	MaxCopies    = 3
	DefaultChunk = 128 * KiB
)

// Check says what is wrong with l, naming the field.
func (l Layout) Check() error {
	switch {
	case l.Stripes < 1 || l.Stripes > MaxStripes:
		return fmt.Errorf("stripes %d: must be 1 to %d", l.Stripes, MaxStripes)
	case l.Copies < 1 || l.Copies > MaxCopies:
		return fmt.Errorf("copies %d: must be 1 to %d", l.Copies, MaxCopies)
	case l.Chunk < 4*KiB || l.Chunk > 16*MiB || l.Chunk&(l.Chunk-1) != 0:
		return fmt.Errorf("chunk %v: must be a power of two from 4KiB to 16MiB", l.Chunk)
	}
	return nil
}

// Legs is how many legs a volume of this layout has.
func (l Layout) Legs() int { return l.Stripes * l.Copies }

// LegSize is the size of each leg of a volume of the given size: its share of
// the columns, rounded up to whole chunks and to 1 MiB.
func (l Layout) LegSize(volume Size) Size {
	unit := max(l.Chunk, MiB)
	return ((volume + Size(l.Stripes) - 1) / Size(l.Stripes)).RoundUp(unit)
}

// LegExtents is how many extents each leg takes.
func (l Layout) LegExtents(volume Size) int {
	return int(l.LegSize(volume).RoundUp(ExtentSize) / ExtentSize)
}

// String prints "2×2 chunk 128KiB": stripes × copies.
func (l Layout) String() string {
	return fmt.Sprintf("%d×%d chunk %v", l.Stripes, l.Copies, l.Chunk)
}

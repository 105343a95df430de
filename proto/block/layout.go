// SPDX-License-Identifier: Apache-2.0

package block

import "fmt"

// Layout describes how a volume's data is spread: over Stripes columns, each a redundancy
// group of legs; after Chunk bytes of one column the next column follows. The legs of a
// column are Copies that mirror one another, or the Data and Parity members of a code.
// RAID0 has one copy, RAID1 one stripe.
type Layout struct {
	Stripes int
	Copies  int // of a mirror; 0 of a code
	Chunk   Size
	Data    int `json:",omitempty"` // of a code
	Parity  int `json:",omitempty"` // of a code
	// Integrity: a checksum of each block is kept beside the data of each leg.
	Integrity bool `json:",omitempty"`
}

// Limits of a layout.
const (
	MaxStripes   = 64
	MaxCopies    = 3
	MaxSlots     = MaxCopies + 1 // see Layout.Slots
	DefaultChunk = 128 * KiB
)

// ScrubUnit is the unit in which a scrub tells where copies differ. Its positions are multiples of
// it.
const ScrubUnit = 4 * KiB

// Kind is the kind of each column's redundancy group.
func (l Layout) Kind() GroupKind {
	if l.Data != 0 || l.Parity != 0 {
		return Code
	}
	return Mirror
}

// Group is the redundancy group of each column.
func (l Layout) Group() Group {
	if l.Kind() == Code {
		return Group{Code, l.Data + l.Parity, l.Data}
	}
	return Group{Mirror, l.Copies, 1}
}

// Check returns an error that names the first invalid field of l.
//
// Branches: two for each field, its lower and its upper limit.
func (l Layout) Check() error {
	switch {
	case l.Stripes < 1 || l.Stripes > MaxStripes:
		return fmt.Errorf("stripes %d: must be 1 to %d", l.Stripes, MaxStripes)
	case l.Kind() == Code && l.Copies != 0:
		return fmt.Errorf("copies %d: must be 0 beside data %d and parity %d", l.Copies, l.Data, l.Parity)
	case l.Kind() == Code && (l.Data < 1 || l.Data >= MaxMembers):
		return fmt.Errorf("data %d: must be 1 to %d", l.Data, MaxMembers-1)
	case l.Kind() == Code && (l.Parity < 1 || l.Parity > MaxMembers-l.Data):
		return fmt.Errorf("parity %d: must be 1 to %d beside data %d", l.Parity, MaxMembers-l.Data, l.Data)
	case l.Kind() == Mirror && (l.Copies < 1 || l.Copies > MaxCopies):
		return fmt.Errorf("copies %d: must be 1 to %d", l.Copies, MaxCopies)
	case l.Chunk < 4*KiB || l.Chunk > 16*MiB || l.Chunk&(l.Chunk-1) != 0:
		return fmt.Errorf("chunk %v: must be a power of two from 4KiB to 16MiB", l.Chunk)
	}
	return nil
}

// Slots is how many legs a column can have: those of its group and, if it is a mirror of
// several copies, one more while a copy is made again elsewhere.
func (l Layout) Slots() int {
	if n := l.Group().Members; l.Kind() == Code || n == 1 {
		return n
	}
	return l.Copies + 1
}

// Legs is the number of legs of a volume with this layout.
func (l Layout) Legs() int { return l.Stripes * l.Group().Members }

// MostLegs is how many legs the volume can have while one of each column is made again
// elsewhere.
func (l Layout) MostLegs() int { return l.Stripes * l.Slots() }

// LegSize is the size of each leg of a volume of the given size: its share of the data,
// rounded up to whole chunks and to 1 MiB.
func (l Layout) LegSize(volume Size) Size {
	unit, shares := max(l.Chunk, MiB), Size(l.Stripes*l.Group().Needs)
	return ((volume + shares - 1) / shares).RoundUp(unit)
}

// MaxMapped is the size of the largest leg that is found through a map: 2^31 chunks of 1 MiB.
const MaxMapped = 2 * PiB

// LegExtents is the number of extents of each leg.
func (l Layout) LegExtents(volume Size) int {
	data := l.ExtentData()
	return int((l.LegSize(volume) + data - 1) / data)
}

// ExtentData is how much of each extent is data.
func (l Layout) ExtentData() Size {
	if l.Integrity {
		return CheckedData
	}
	return ExtentSize
}

// String prints "2×2 chunk 128KiB", stripes × copies, or "2×(4+2) chunk 128KiB" of a
// code of data and parity.
func (l Layout) String() string {
	if l.Kind() == Code {
		return fmt.Sprintf("%d×(%d+%d) chunk %v", l.Stripes, l.Data, l.Parity, l.Chunk)
	}
	if l.Integrity {
		return fmt.Sprintf("%d×%d chunk %v with checksums", l.Stripes, l.Copies, l.Chunk)
	}
	return fmt.Sprintf("%d×%d chunk %v", l.Stripes, l.Copies, l.Chunk)
}

// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
)

// Ref refers to a block device in a table: by number ("259:3"), or by the name of a mapped
// device, which is resolved when the table is loaded. With names, a whole stack can be
// described before any of it exists.
type Ref string

// RefTo returns the reference to the device with a number.
func RefTo(n block.DeviceNumber) Ref { return Ref(n.String()) }

// Number returns the device number in r, or false if r is a name.
func (r Ref) Number() (block.DeviceNumber, bool) {
	n, err := block.ParseDeviceNumber(string(r))
	return n, err == nil
}

// Table is the mapping of a device: rows that follow one another without a gap.
type Table []Row

// Row maps Length bytes, from Start on, to a target.
type Row struct {
	Start, Length block.Size
	Target        Target
}

// Target is one of Linear, Checked, Striped, Mirror, ErrorTarget, Zero, Unwritable, Other.
type Target interface {
	// Type is the kernel's name of the target: "linear".
	Type() string
	// String prints the target's parameters as the kernel does: "259:3 2048".
	String() string
	// mapRefs returns the same target with each device reference replaced.
	mapRefs(func(Ref) Ref) Target
	check() error
}

// Whole returns a table with a single row.
func Whole(size block.Size, t Target) Table { return Table{{Length: size, Target: t}} }

// Size returns the end of the last row.
func (t Table) Size() block.Size {
	if len(t) == 0 {
		return 0
	}
	last := t[len(t)-1]
	return last.Start + last.Length
}

// String prints one row per line, in sectors, as `dmsetup table` does.
func (t Table) String() string {
	lines := make([]string, len(t))
	for i, r := range t {
		lines[i] = strings.TrimRight(fmt.Sprintf("%d %d %s %s", sectors(r.Start), sectors(r.Length), r.Target.Type(), r.Target), " ")
	}
	return strings.Join(lines, "\n")
}

// Equal reports whether t and u are the same. Device references are compared as written: a
// name never equals a number.
func (t Table) Equal(u Table) bool { return t.String() == u.String() }

// Refs returns the devices that t uses, in order, each once.
func (t Table) Refs() []Ref {
	var refs []Ref
	t.mapRefs(func(r Ref) Ref {
		if !slices.Contains(refs, r) {
			refs = append(refs, r)
		}
		return r
	})
	return refs
}

func (t Table) mapRefs(f func(Ref) Ref) Table {
	u := slices.Clone(t)
	for i := range u {
		u[i].Target = u[i].Target.mapRefs(f)
	}
	return u
}

// Check returns an error that names the first mistake in t; the kernel would say less.
func (t Table) Check() error {
	if len(t) == 0 {
		return fmt.Errorf("table has no rows")
	}
	next := block.Size(0)
	for i, r := range t {
		switch {
		case r.Target == nil:
			return fmt.Errorf("row %d: no target", i)
		case r.Start != next:
			return fmt.Errorf("row %d: starts at %v, want %v", i, r.Start, next)
		case r.Length == 0 || r.Length%block.SectorSize != 0:
			return fmt.Errorf("row %d: length %d is not a positive multiple of %d", i, r.Length, block.SectorSize)
		}
		if err := r.Target.check(); err != nil {
			return fmt.Errorf("row %d: %s: %w", i, r.Target.Type(), err)
		}
		if s, ok := r.Target.(Striped); ok && r.Length%(s.Chunk*block.Size(len(s.Legs))) != 0 {
			return fmt.Errorf("row %d: striped: length %v is not a multiple of %d chunks of %v", i, r.Length, len(s.Legs), s.Chunk)
		}
		next += r.Length
	}
	return nil
}

// ParseTable is the inverse of Table.String.
func ParseTable(text string) (Table, error) {
	var t Table
	for line := range strings.Lines(text) {
		w := strings.Fields(line)
		if len(w) < 3 {
			return nil, fmt.Errorf("table row %q: want start, length, target", line)
		}
		start, err := parseSectors(w[0])
		if err != nil {
			return nil, fmt.Errorf("table row %q: start: %w", line, err)
		}
		length, err := parseSectors(w[1])
		if err != nil {
			return nil, fmt.Errorf("table row %q: length: %w", line, err)
		}
		target, err := ParseTarget(w[2], strings.Join(w[3:], " "))
		if err != nil {
			return nil, fmt.Errorf("table row %q: %w", line, err)
		}
		t = append(t, Row{start, length, target})
	}
	return t, nil
}

func sectors(s block.Size) uint64 { return uint64(s / block.SectorSize) }

// parseSectors parses a number of sectors. It refuses one that is too large to be
// expressed in bytes.
func parseSectors(s string) (block.Size, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n > uint64(^block.Size(0)/block.SectorSize) || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("%q is not a number of sectors", s)
	}
	return block.Size(n) * block.SectorSize, nil
}

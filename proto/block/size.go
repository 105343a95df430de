// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// Size is a number of bytes. It prints as 10GiB and parses 10GiB, 10GB, 10g
// and 10737418240; in JSON and proto it is a plain integer of bytes.
type Size uint64

// Binary units.
const (
	Byte Size = 1
	KiB       = 1024 * Byte
	MiB       = 1024 * KiB
	GiB       = 1024 * MiB
	TiB       = 1024 * GiB
	PiB       = 1024 * TiB
)

var units = []struct {
	name string
	size Size
}{{"PiB", PiB}, {"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}}

// String prints s exactly: in the largest binary unit that gives a whole number of quarters
// ("1.5GiB"), otherwise in bytes.
func (s Size) String() string {
	for _, u := range units {
		if quarter := u.size / 4; s >= u.size && s%quarter == 0 {
			return strconv.FormatUint(uint64(s/u.size), 10) + [...]string{"", ".25", ".5", ".75"}[s%u.size/quarter] + u.name
		}
	}
	return strconv.FormatUint(uint64(s), 10) + "B"
}

// Short prints s for people, with at most four digits: "1.5TiB".
func (s Size) Short() string {
	for _, u := range units {
		if s >= u.size {
			return strings.TrimSuffix(strconv.FormatFloat(float64(s)/float64(u.size), 'f', 1, 64), ".0") + u.name
		}
	}
	return strconv.FormatUint(uint64(s), 10) + "B"
}

// ParseSize reads a whole or decimal number and a unit: none or B for bytes,
// KiB or K for 1024, KB for 1000, and so on to PiB; letter case is ignored.
func ParseSize(text string) (Size, error) {
	t := strings.ToLower(strings.TrimSpace(text))
	i := len(t)
	for i > 0 && (t[i-1] < '0' || t[i-1] > '9') {
		i--
	}
	number, unit := t[:i], strings.TrimSpace(t[i:])
	factor, ok := unitFactor(unit)
	if !ok {
		return 0, fmt.Errorf("size %q: unknown unit %q, use B, KiB, MiB, GiB, TiB or PiB", text, unit)
	}
	if n, err := strconv.ParseUint(number, 10, 64); err == nil {
		if n > math.MaxUint64/uint64(factor) {
			return 0, fmt.Errorf("size %q: too large", text)
		}
		return Size(n) * factor, nil
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || f < 0 || math.IsNaN(f) || number == "" {
		return 0, fmt.Errorf("size %q: not a number with a unit, such as 10GiB", text)
	}
	if f*float64(factor) >= math.MaxUint64 {
		return 0, fmt.Errorf("size %q: too large", text)
	}
	exact, ok := new(big.Rat).SetString(number) // a float64 would keep only 53 bits
	if !ok || f*float64(factor) < 1 {
		return 0, nil
	}
	exact.Mul(exact, new(big.Rat).SetUint64(uint64(factor)))
	return Size(new(big.Int).Quo(exact.Num(), exact.Denom()).Uint64()), nil
}

func unitFactor(unit string) (Size, bool) {
	if unit == "" || unit == "b" {
		return Byte, true
	}
	prefix := strings.IndexByte("kmgtp", unit[0])
	if prefix < 0 {
		return 0, false
	}
	base := Size(1024)
	switch unit[1:] {
	case "", "ib":
	case "b":
		base = 1000
	default:
		return 0, false
	}
	factor := base
	for range prefix {
		factor *= base
	}
	return factor, true
}

// Sectors is s in 512-byte sectors; s must be a multiple of 512.
func (s Size) Sectors() uint64 { return uint64(s / SectorSize) }

// RoundUp is the smallest multiple of unit that is at least s.
func (s Size) RoundUp(unit Size) Size { return (s + unit - 1) / unit * unit }

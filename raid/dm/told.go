// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"fmt"
	"strings"
)

// Told is devices and their tables as text, for people. Parameters are told only of the targets that
// this package knows: those of others may be keys, such as dm-crypt's.
func Told(devices []State) string {
	var b strings.Builder
	for _, d := range devices {
		fmt.Fprintf(&b, "%s %v uuid %s open %d events %d", d.Name, d.Number, d.UUID, d.Open, d.EventNr)
		for _, is := range []struct {
			so   bool
			word string
		}{{d.Suspended, " suspended"}, {!d.Live, " no-table"}, {d.Inactive, " inactive-table"}, {d.ReadOnly, " read-only"}} {
			if is.so {
				b.WriteString(is.word)
			}
		}
		b.WriteString("\n")
		for _, r := range d.Table {
			params := "[not told]"
			switch r.Target.(type) {
			case Linear, Striped, Mirror, ErrorTarget, Zero, Unwritable:
				params = r.Target.String()
			}
			fmt.Fprintf(&b, "  %s\n", strings.TrimRight(fmt.Sprintf("%d %d %s %s", sectors(r.Start), sectors(r.Length), r.Target.Type(), params), " "))
		}
	}
	return b.String()
}

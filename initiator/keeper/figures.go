// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
)

// Figures is the I/O of a volume on this host. Counts with an equal Key continue one another.
type Figures struct {
	Key    any
	Volume block.VolumeID
	Name   block.VolumeName
	Users  figures.Figures // from those who have the device open
	Held   time.Duration   // while I/O of users could not be answered
	// Latencies: each latency is counted, and Held is; the kernel counts only sums.
	Latencies bool
	Legs      []LegFigures
}

// LegFigures is what was sent to one leg: parts of users' I/O, and copies. Counts of the same place
// continue one another, whichever leg is there.
type LegFigures struct {
	Column, Copy int
	Leg          block.LegID
	Node         string // of its target
	Sent         figures.Figures
}

// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"net/netip"

	"weft.dev/weft/proto/block"
)

// Wanted is the state of a volume on this host that the manager wants.
type Wanted struct {
	Volume block.VolumeID
	Name   block.VolumeName
	Size   block.Size
	Layout block.Layout
	Epoch  block.Epoch
	Grant  uint64 // one of several in an epoch; 0 if the epoch has one
	// SinceEpoch is the first epoch since which this host alone had the volume, and no leg has lost
	// cached writes; 0: not known.
	SinceEpoch block.Epoch
	BootID     string
	ReadOnly   bool // it is shared by readers, and there is no writer
	Equalize   bool
	Detach     bool
	Holds      []Hold // requests to hold its I/O
	Scrub      *Scrub // nil: none is wanted
	// RebuildRate is the most that is copied to legs in a second; 0: no limit.
	RebuildRate block.Size
	Thin        bool // its legs take space only where they were written
	// Heal: the volume is detached, and the host copies to its legs without a device. It keeps no notes:
	// nobody writes, so no leg in sync falls behind.
	Heal  bool
	Links []Link // by column, then copy
	// Rail is the network rail that is preferred for it, before what the host prefers for all its volumes; empty:
	// none. GPU names a GPU of the host, and Near has the networks of the card nearest to it.
	Rail, GPU string
	Near      []netip.Prefix
	NearError string // why Near is empty although a GPU is named
}

// Link is a leg that the manager wants used.
type Link struct {
	Leg          block.LegID
	Column, Copy int
	Rebuilding   bool // else in sync
	Revision     uint64
	Node         string
	NQN          block.NQN
	NSID         uint32
	UUID         block.UUID
	Portals      []block.Portal
	Paths        int // portals to connect to at a time; 0 means 1
	WriteThrough bool
	CopyAll      bool // the host's log does not cover all that it misses
	// CopyAllSince: with CopyAll, the revision since which that is so; 0: not known.
	CopyAllSince uint64
	// CacheLost: since revision AllSince, CopyAll holds only because the leg may have lost what its
	// drive's cache held; AllSince 0: since it was last in sync.
	CacheLost bool
	AllSince  uint64
	// Reborn is the revision at which the leg last came back in sync but without its drive's
	// cache; 0: never.
	Reborn uint64
	// LeaveOut: why the volume shall go on without this leg in sync; empty: it shall not. See
	// leaveout.go.
	LeaveOut string
	// Keys are what the host and the leg's target prove to one another, and Host is as which host to
	// connect then; zero: nothing, as the machine itself.
	Keys block.Keys
	Host block.Host
}

// Believes reports whether what a leg has can be relied on, apart from what it is known to lack since a revision at which
// a copy of all of it began; 0: none is known to have begun.
func (l *Link) Believes(since uint64) bool {
	return !l.CopyAll || l.CopyAllSince > 0 && since >= l.CopyAllSince
}

// At returns the link of a copy of a column, nil if the manager lists none.
func (w *Wanted) At(column, copy int) *Link {
	for i := range w.Links {
		if w.Links[i].Column == column && w.Links[i].Copy == copy {
			return &w.Links[i]
		}
	}
	return nil
}

// Leaving returns w with a detach wanted, for a host that shuts down.
func (w *Wanted) Leaving() *Wanted {
	leaving := *w
	leaving.Detach = true
	return &leaving
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"weft.dev/weft/proto/block"
)

// State is the state of a leg in the engine; see the package comment.
type State uint8

const (
	Absent     State = iota // never added; the regions that it misses since New are tracked
	Dropped                 // was added and then dropped; the regions that it misses are tracked
	Rebuilding              // takes writes and is copied to, but is not read
	CaughtUp                // has everything; not read until the owner has recorded it and calls Promote
	InSync                  // holds every acknowledged write
)

func (s State) String() string {
	return [...]string{"absent", "dropped", "rebuilding", "caught-up", "in-sync"}[s]
}

// Config describes a volume.
type Config struct {
	Layout block.Layout
	Size   block.Size // of the volume
	// BlockSize is 512 or 4096; legs may have smaller blocks. Zero means 4096.
	BlockSize block.Size
	// Region is the unit of tracking, a power of two from 4KiB. Zero means
	// raid.RegionSize of a leg. It stays the same when the volume grows.
	Region block.Size
	// RebuildRate is the most that rebuilds copy in a second, all legs together; 0: no limit.
	// See Volume.SetRebuildRate.
	RebuildRate block.Size
	// Thin: legs take space only where they were written. What reads as zeroes is copied to them as
	// zeroes, which take none.
	Thin bool
	// FailMedium: fail a read with block.ErrMedium if all copies in sync failed it so.
	// Otherwise such a read is held and tried again, as after all other errors.
	FailMedium bool
	// ReadOnly: no host writes to any leg for the lifetime of the volume. IOs that write
	// fail with block.ErrReadOnly. A dropped leg misses nothing, and can be added in
	// sync again.
	ReadOnly bool
	// Turn shifts which of the copies that are equally idle serves a read. Hosts that share a volume have
	// different ones: else those that read the same at the same time would all read it from one copy.
	Turn uint32
	// Current reports whether it is certain that no other host has written to the volume
	// yet. It is called before a read is answered, after a leg has read the data. While
	// it is false, reads are held; after that, they are read again. It is called from any
	// goroutine, with locks held, and must not block. Nil means that it is always true.
	Current func() bool
	// OnEvent is called with what happens to legs, in order for each leg. It is called
	// from any goroutine and must not block. It may call Status, but no method that
	// changes the volume. It may be nil.
	OnEvent func(Event)
	// OnHealed makes the volume heal: what a copy cannot give a read because it does not match its
	// checksum is read from another copy and written again, see Repair. It is called with what
	// became of a range: Repaired, NotRepaired, or NotKnown if no copy can be read. It is called
	// from any goroutine and must not block. No other host may write meanwhile. Nil: nothing is
	// healed.
	OnHealed func(Finding, Outcome, error)
}

// EventKind is the kind of an Event.
type EventKind uint8

const (
	// LegFailed: a leg that is in sync or caught up failed an IO. A write or flush is then
	// Held: record the leg stale and Drop it. A read has gone to another copy. There is
	// one event for the first error of either kind, and a new one if the leg fails again
	// after a second without errors.
	LegFailed EventKind = iota + 1
	// LegCaughtUp: every region of a rebuilding leg is equal, and flushed. Record
	// it in sync, then Promote it.
	LegCaughtUp
	// RebuildFailed: a rebuilding leg failed an IO and was dropped. The regions that it
	// misses stay tracked. A lack of space is no such failure: see LegStatus.Short.
	RebuildFailed
)

func (k EventKind) String() string {
	return [...]string{"", "leg failed", "leg caught up", "rebuild failed"}[k]
}

// Event is what happened to one leg.
type Event struct {
	Kind         EventKind
	Column, Copy int
	Err          error // of LegFailed and RebuildFailed
	Held         bool  // of LegFailed: IOs wait until the leg is dropped or takes them
}

// Progress is the progress of a copy, in bytes.
type Progress struct{ Done, Total block.Size }

// LegStatus is the status of one leg.
type LegStatus struct {
	State State
	Err   error // the last error; nil after a second without errors
	// Failed counts the IOs that are held because the leg failed them.
	Failed int
	Full   int // those of Failed that wait for space on the leg
	// Short: what is copied to the leg waits for space on it. Users' IO does not.
	Short bool
	// Outstanding counts the IOs that the leg has not answered, and Oldest is the age of
	// the first of them. IOs that wait for a Dropped leg go on only when it has answered
	// all of its own: cut its device.
	Outstanding int
	Oldest      time.Duration
	Withheld    bool // see Volume.Withhold
	// Unflushed: the leg may have acknowledged writes that it loses with its cache; see
	// Volume.Renew.
	Unflushed bool
	// LossCovered: Dirty has, or would have once the leg is dropped, all that the leg lacks even if it
	// lost its cache at any time since it was first added. Otherwise a leg that has lost its cache
	// must be added as full.
	LossCovered bool
	// Dirty counts the regions that the leg misses, of Regions in all. A rebuild copies
	// until Dirty is zero.
	Dirty, Regions uint64
	Resync         Progress   // Rebuilding: of the rebuild
	Speed          block.Size // Rebuilding: what it copied in a second lately; 0: not known
	Skipped        block.Size // what its last rebuild did not copy because it holds no data
}

// Status is the status of a volume at one moment.
type Status struct {
	Size     block.Size
	Legs     [][]LegStatus // by column and copy
	InFlight int           // IOs of the volume and copies that are not complete
	// Begun counts the parts of writes, discards and zeroes that some legs may have already and that are not
	// complete, whether a leg works on them or they wait: for space, or for a leg's loss to be recorded.
	Begun      int
	Suspended  bool
	Equalizing bool     // the volume's IO waits for Equalize
	Equalized  Progress // of an Equalize that is not complete
	// Held counts the parts of IOs that are held after an error for which no other leg
	// makes up. HeldFor is how long the first of them has been held.
	Held    int
	HeldFor time.Duration
}

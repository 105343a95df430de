// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"weft.dev/weft/proto/block"
)

// State is what a leg is to the engine; see the package comment.
type State uint8

const (
	Absent     State = iota // never added; what it misses since New is tracked
	Dropped                 // was added once; what it misses is tracked
	Rebuilding              // takes writes, is copied to, not read
	CaughtUp                // has all; not read until the owner has recorded it and calls Promote
	InSync                  // holds every acknowledged write
)

func (s State) String() string {
	return [...]string{"absent", "dropped", "rebuilding", "caught-up", "in-sync"}[s]
}

// Config says what the volume is.
type Config struct {
	Layout block.Layout
	Size   block.Size // of the volume
	// BlockSize is 512 or 4096; legs may have smaller blocks. Zero means 4096.
	BlockSize block.Size
	// Region is the unit of tracking, a power of two from 4KiB. Zero means
	// raid.RegionSize of a leg. It stays the same when the volume grows.
	Region block.Size
	// FailMedium: a read that all copies in sync failed with block.ErrMedium fails
	// with it. Otherwise it is held and tried again, as with all other errors.
	FailMedium bool
	// ReadOnly: nobody writes, to any leg, here or elsewhere, as long as the volume
	// lives. IOs that would fail with block.ErrReadOnly, and a leg that was dropped
	// misses nothing: it is added in sync again.
	ReadOnly bool
	// Current reports whether nobody else may have written the volume yet. It is asked
	// when a read is about to be answered, with what a leg has read before; while it
	// is false reads are held, and then read anew. It is called from any goroutine,
	// with locks held, and must not block. Nil: it is always true.
	Current func() bool
	// OnEvent is told what happens to legs, in the order in which it happens to
	// each. It is called from any goroutine, must not block, and may call Status
	// but nothing that changes the volume. May be nil.
	OnEvent func(Event)
}

// EventKind is what happened to a leg.
type EventKind uint8

const (
	// LegFailed: a leg in sync or caught up answered an IO with an error. If that
	// was a write or flush, it is Held: record the leg stale and Drop it. A read has
	// gone to another copy. Told at the first error of either kind, and again when
	// the leg errs after it was well for a second.
	LegFailed EventKind = iota + 1
	// LegCaughtUp: every region of a rebuilding leg is equal, and flushed. Record
	// it in sync, then Promote it.
	LegCaughtUp
	// RebuildFailed: a rebuilding leg erred and is Dropped. What it misses stays tracked.
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
	Held         bool  // of LegFailed: IOs wait for the leg's fate
}

// Progress is how far a copy has come.
type Progress struct{ Done, Total block.Size }

// LegStatus is how one leg is.
type LegStatus struct {
	State State
	Err   error // the last error, nil once it has been well for a second
	// Failed is how many IOs are held because the leg failed them.
	Failed int
	// Outstanding is how many IOs the leg has not answered, Oldest for how long the
	// first of them has been waiting. A Dropped leg must come to none before what
	// it holds up can go on: cut its device.
	Outstanding int
	Oldest      time.Duration
	// Unflushed: it may have answered what it loses with its cache; see Renew.
	Unflushed bool
	// Dirty of Regions is what the leg misses; a leg that rebuilds is copied to
	// until Dirty is zero.
	Dirty, Regions uint64
	Resync         Progress // Rebuilding: of the copy under way
}

// Status is how a volume is at one moment.
type Status struct {
	Size       block.Size
	Legs       [][]LegStatus // by column and copy
	InFlight   int           // IOs of the volume, and copies, that are not done
	Suspended  bool
	Equalizing bool     // the volume's IO waits for Equalize
	Equalized  Progress // of an Equalize that is not done
	// Held is how many parts of IOs wait for a leg's fate, and HeldFor for how long
	// the first of them has: an error that no other leg makes up for.
	Held    int
	HeldFor time.Duration
}

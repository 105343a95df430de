// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
)

// ErrLater says that an order is not due yet, or is already under way.
var ErrLater = errors.New("later")

// Order is one step. If it fails, the steps that rely on it are skipped.
type Order interface{ String() string }

// Alone reports whether no later order relies on o: if o fails, the orders after it are still
// carried out. A note may name too few legs, never too many.
func Alone(o Order, s *Seen) bool {
	switch o := o.(type) {
	case Connect, Move, Try, FailFast, Readmit, SyncFileSystems, FreezeFileSystems, RecordInSync, MakeLog, SetColumn, Add, Promote, Renew, Grow, GrowDevice, CloseDevice, StartScrub, StopScrub, ProceedScrub, SetScrubRate:
		return true
	case WriteNote:
		return s.Noted.Within(o.Note)
	}
	return false
}

// Begins reports whether o only starts something, so that a new look would find nothing more
// yet.
func Begins(o Order) bool {
	switch o := o.(type) {
	case HoldIO:
		return !o.LeaveOut // the flush comes next
	case Connect, Move, Try, Equalize, StartScrub, SyncFileSystems, FreezeFileSystems:
		return true
	}
	return false
}

// At is a leg in its place, at a revision.
type At struct {
	Place
	Leg      block.LegID
	Revision uint64
	Why      Loss // Drop: why it leaves
}

func (a At) String() string { return fmt.Sprintf("%s@%d", a.Leg, a.Revision) }

// The orders for every volume.
type (
	// Connect makes a path. Others: there are other portals to try if this one does not answer.
	Connect struct {
		Path
		Others bool
		Keys   block.Keys // as in Link
		Host   block.Host
	}
	// Move ends the connection of a path and continues through another portal, with all I/O. If
	// Silent, the path has not answered for so long. By: the subsystem is to change to that part of its target
	// first, which the host asks for, and stays where it is if that fails.
	Move struct {
		PathSeen
		To     block.Portal
		Silent time.Duration
		By     block.ServedBy
	}
	// Try begins to find out whether a portal that is not in use can be reached.
	Try struct{ Path }
	// HoldIO suspends all I/O of the volume.
	HoldIO struct {
		Hold     string        // empty: because of the lease, or LeaveOut
		Limit    time.Duration // of Hold
		Freeze   bool          // of Hold
		LeaveOut bool          // so that legs can be left out
	}
	// SyncFileSystems begins to write out what the device's file systems have in memory, for a hold.
	SyncFileSystems struct{ Hold string }
	// FreezeFileSystems begins to freeze them, for this time at most.
	FreezeFileSystems struct {
		Hold  string
		Limit time.Duration
	}
	// ResumeIO lets it continue.
	ResumeIO struct{}
	// RecordStale reports lost legs to the manager, and waits until the record is durable.
	RecordStale struct{ Legs []Change }
	// RecordInSync reports to the manager that legs have caught up.
	RecordInSync struct{ Legs []Change }
	// WriteNote notes on disk which legs hold every write, and waits until the note is durable.
	WriteNote struct{ Note Note }
	// Cut ends a path at once: I/O that waits on it fails. Mute: the path seems connected but
	// its target does not answer.
	Cut struct {
		Path
		Mute bool
	}
	// BreakDead breaks the connection of a path whose target does not answer there, beside another one through which
	// what waits on it goes on. The host connects it again when it can.
	BreakDead struct{ Path }
	// FailFast makes the I/O on a path fail, or wait again, from the moment in which the host
	// notices that the connection is gone. It changes nothing on a path whose loss the host has noticed already.
	FailFast struct {
		Path
		On bool
	}
	// Disconnect ends a path that nothing uses.
	Disconnect struct {
		Path
		Mute bool
	}
	// MakeDevice makes the block device.
	MakeDevice struct{}
	// NameDevice gives the device its name.
	NameDevice struct{}
	// HideDevice removes the name.
	HideDevice struct{}
	// GrowDevice makes the device as large as the volume.
	GrowDevice struct{}
	// CloseDevice removes the device, unless somebody has it open. Clean: every leg has every
	// write. Force: waiting I/O fails, since nothing else will end it.
	CloseDevice struct{ Clean, Force bool }
	// Flush makes the drives write out their caches.
	Flush struct{}
	// FlushLegs makes the drives of some legs write out their caches, because others are about to be
	// recorded stale. It fails if one of them is not what the volume uses any more. From now on no
	// write is acknowledged in which one of Without takes part, where the data path can do that. If
	// Without is empty, I/O is held, and the order first waits until none is under way.
	FlushLegs struct{ Legs, Without []At }
	// Readmit ends that for a leg that stays.
	Readmit struct{ At }
	// GiveUp ends this epoch for good.
	GiveUp struct{ Over Over }
	// Forget ends an epoch after everything of it is gone. Clean: every leg has every write.
	Forget struct{ Clean bool }
)

// The orders for a volume with Tables.
type (
	// MakeLog creates the storage for a column's log.
	MakeLog struct{ Column int }
	// SetColumn changes a column to what is wanted. Retry: the column stays as it is, and the
	// errors of its copies are cleared.
	SetColumn struct {
		Column int
		Want   Column
		Retry  bool
	}
	// FailColumn makes all I/O of a column fail from now on.
	FailColumn struct{ Column int }
	// RemoveColumn removes a column.
	RemoveColumn struct{ Column int }
	// FailDevice makes all I/O of the device fail from now on.
	FailDevice struct{}
)

// The orders for a volume without Tables.
type (
	// Build builds the volume from the legs in sync.
	Build struct{ Legs []At }
	// Equalize starts to make the copies equal.
	Equalize struct{}
	// Add adds a leg. Full: it is not known what the leg misses. What says what is copied.
	Add struct {
		At
		Full bool
		What string
	}
	// Promote starts to read from a leg.
	Promote struct{ At }
	// Renew continues with a leg whose lost cache held nothing that counts.
	Renew struct{ At }
	// Drop lets the volume continue without some legs.
	Drop struct{ Legs []At }
	// Grow makes the volume as large as wanted.
	Grow struct{}
	// Dismantle takes an unused volume apart.
	Dismantle struct{ Clean bool }
	// Abort removes device and volume; users get errors.
	Abort struct{}
)

// KernelPortal is the one of the two portals of a Move with By that is the kernel's, beside which the host asks.
func (o Move) KernelPortal() block.Portal {
	if o.By == block.InProcess {
		return o.Portal
	}
	return o.To
}

func (o Connect) String() string { return "connect " + o.Path.String() }
func (o Move) String() string {
	if o.By != block.SamePart {
		return "move " + o.Path.String() + " to " + o.By.String() + " at " + o.To.String()
	}
	return "move " + o.Path.String() + " to " + o.To.String()
}
func (o Try) String() string      { return "try " + o.Path.String() }
func (o HoldIO) String() string   { return "hold I/O for " + o.For() }
func (o ResumeIO) String() string { return "resume I/O" }
func (o SyncFileSystems) String() string {
	return "write out the file systems for hold " + o.Hold
}
func (o FreezeFileSystems) String() string { return "freeze the file systems for hold " + o.Hold }
func (o RecordStale) String() string       { return "record-stale" + legsOf(o.Legs) }
func (o RecordInSync) String() string      { return "record-in-sync" + legsOf(o.Legs) }
func (o WriteNote) String() string         { return "note" }
func (o Cut) String() string               { return "cut " + o.Path.String() + mute(o.Mute) }
func (o BreakDead) String() string         { return "break " + o.Path.String() + ", beside another path" }
func (o FailFast) String() string {
	if o.On {
		return "fail fast " + o.Path.String()
	}
	return "fail fast no more " + o.Path.String()
}
func (o Disconnect) String() string   { return "disconnect " + o.Path.String() + mute(o.Mute) }
func (o MakeDevice) String() string   { return "make-device" }
func (o NameDevice) String() string   { return "name-device" }
func (o HideDevice) String() string   { return "hide-device" }
func (o GrowDevice) String() string   { return "grow-device" }
func (o Flush) String() string        { return "flush" }
func (o FlushLegs) String() string    { return "flush" + legsOf(o.Legs) }
func (o Readmit) String() string      { return "readmit " + o.At.String() }
func (o GiveUp) String() string       { return "give-up: " + o.Over.Why }
func (o Forget) String() string       { return "forget" + clean(o.Clean) }
func (o MakeLog) String() string      { return fmt.Sprintf("make-log %d", o.Column) }
func (o SetColumn) String() string    { return fmt.Sprintf("change column %d", o.Column) }
func (o FailColumn) String() string   { return fmt.Sprintf("fail-column %d", o.Column) }
func (o RemoveColumn) String() string { return fmt.Sprintf("remove-column %d", o.Column) }
func (o FailDevice) String() string   { return "fail-device" }
func (o Build) String() string        { return "build" + legsOf(o.Legs) }
func (o Equalize) String() string     { return "equalize" }
func (o Promote) String() string      { return "promote " + o.At.String() }
func (o Renew) String() string        { return "renew " + o.At.String() }
func (o Drop) String() string         { return "drop" + legsOf(o.Legs) }
func (o Grow) String() string         { return "grow" }
func (o Dismantle) String() string    { return "dismantle" + clean(o.Clean) }
func (o Abort) String() string        { return "abort" }

// For is the reason to hold I/O, for people.
func (o HoldIO) For() string {
	switch {
	case o.LeaveOut:
		return "legs to be left out"
	case o.Hold == "":
		return "the lease"
	}
	return "hold " + o.Hold
}

func (o Add) String() string {
	s := "rebuild " + o.At.String()
	if o.Full {
		s += " in full"
	}
	return s
}

func (o CloseDevice) String() string {
	s := "close-device" + clean(o.Clean)
	if o.Force {
		s += " by force"
	}
	return s
}

// SetRebuildRate changes the most that rebuilds copy in a second.
type SetRebuildRate struct{ Rate block.Size }

func (o SetRebuildRate) String() string { return "rebuild at " + o.Rate.String() + " a second" }

func legsOf[L fmt.Stringer](legs []L) string {
	var s strings.Builder
	for _, l := range legs {
		s.WriteString(" " + l.String())
	}
	return s.String()
}

func mute(m bool) string {
	if m {
		return ", whose target does not answer"
	}
	return ""
}

func clean(c bool) string {
	if c {
		return " clean"
	}
	return ""
}

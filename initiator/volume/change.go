// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"fmt"
	"time"

	"weft.dev/weft/proto/block"
)

// Change is one record to make about a leg, in sync or stale.
type Change struct {
	Leg      block.LegID
	Revision uint64
	Column   int
	Copied   block.Size // in sync: bytes its rebuild copied
	What     string     // in sync: what these are, and why; empty: not known
	Why      Loss       // stale: the reason
	Since    time.Time  // stale: when its silence or error began
}

func (c Change) String() string { return fmt.Sprintf("%s@%d", c.Leg, c.Revision) }

// Loss is why a host continues without a leg. The zero value means that the leg is not lost.
type Loss struct {
	Reason StaleReason
	Text   string // for people, with details
}

func (l Loss) any() bool { return l.Reason != "" }

func (l Loss) String() string { return l.Text }

func lost(r StaleReason, format string, args ...any) Loss {
	return Loss{r, fmt.Sprintf(format, args...)}
}

// StaleReason is the reason for which a leg is recorded stale, in the words of pb.StaleReason.
type StaleReason string

// The reasons.
const (
	NoAnswer      StaleReason = "no_answer"      // it was silent for longer than the window
	IOError       StaleReason = "io_error"       // an I/O to it failed
	IOStuck       StaleReason = "io_stuck"       // it answers probes, but an I/O to it was not answered
	RebuildFailed StaleReason = "rebuild_failed" // it could not be rebuilt
	DeviceGone    StaleReason = "device_gone"    // it came back as another device
	SharedPath    StaleReason = "shared_path"    // its only connection was cut for another leg
	NotConnected  StaleReason = "not_connected"  // it could not be connected in time
	NotInUse      StaleReason = "not_in_use"     // the volume was in use without it
	LeftOut       StaleReason = "left_out"       // the manager asked for that
)

// recordedStale marks a leg that is recorded stale already. No host asks to record it again, so
// the wire has no such reason.
const recordedStale StaleReason = "recorded_stale"

// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// Phase is how far an attachment has come, in the words of pb.AttachmentPhase.
type Phase string

// The phases; the package comment draws them.
const (
	Connecting      Phase = "connecting"
	Equalizing      Phase = "equalizing"
	Serving         Phase = "serving"
	Stalled         Phase = "stalled"
	Detaching       Phase = "detaching"
	DetachedClean   Phase = "detached_clean"
	DetachedUnclean Phase = "detached_unclean"
)

// Over is why this host gave up an epoch.
type Over struct {
	Why        string       `json:"why"` // for people
	WritesLost bool         `json:"writes_lost,omitempty"`
	Reason     GiveUpReason `json:"reason,omitempty"` // empty in notes of older versions
}

// GiveUpReason is the reason for which an epoch is given up, in the words of pb.GiveUpReason.
type GiveUpReason string

// The reasons; over.go explains them.
const (
	LostCache GiveUpReason = "lost_cache" // a leg lost writes with its drive's cache, or may have
	Removed   GiveUpReason = "removed"    // the device was removed while the manager did not want it here
	Unclean   GiveUpReason = "unclean"    // the volume had been released, but not cleanly
)

// Verdict is the result of a plan that goes to the manager.
type Verdict struct {
	Phase       Phase
	Waiting     []string   // what I/O or the device waits for
	Notes       []string   // what else makes no progress
	Paths       []string   // why paths are not used that could be, or not first
	Done, Total block.Size // bytes copied
	GaveUp      *Over      // nil: it did not give up
	Holds       []HoldSeen // the requested holds
	Scrub       *ScrubSeen // the wanted scrub; nil: it has not begun
	Heals       *HealsSeen // nil: there was none
	Copies      []CopyTold // the legs that are copied to
}

// CopyTold is how far the rebuild of a leg has come, in bytes. Speed is in a second; 0: not known.
type CopyTold struct {
	Leg                block.LegID
	Done, Total, Speed block.Size
	What               string // what is copied, and why; empty: not known
	Waiting            string // what it waits for; empty: it goes on
}

// Wait adds something that I/O or the device waits for.
func (v *Verdict) Wait(format string, args ...any) {
	v.Waiting = append(v.Waiting, fmt.Sprintf(format, args...))
}

// Note adds something that makes no progress but holds nothing up.
func (v *Verdict) Note(format string, args ...any) {
	v.Notes = append(v.Notes, fmt.Sprintf(format, args...))
}

// path adds why a path is not used that could be, or not first.
func (v *Verdict) path(format string, args ...any) {
	v.Paths = append(v.Paths, fmt.Sprintf(format, args...))
}

// Failed adds the orders that failed. If the volume does not serve and waits for nothing else,
// it waits for them.
func (v *Verdict) Failed(orders []string) {
	v.Notes = append(v.Notes, orders...)
	if v.Phase != Serving && len(v.Waiting) == 0 {
		v.Waiting = append(v.Waiting, orders...)
	}
}

// TooSmall says that a leg's namespace is smaller than the leg must be.
func TooSmall(size, need block.Size) string {
	return fmt.Sprintf("its namespace has %v; the leg must have %v", size, need)
}

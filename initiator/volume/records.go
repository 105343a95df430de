// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"weft.dev/weft/proto/block"
)

// Records holds the manager's answers to this host about the legs of one epoch. A wanted state
// that is older than an answer still shows the leg as it was before, so the answer wins.
// Records is not safe for concurrent use.
type Records struct {
	stale  map[block.LegID]uint64 // at this revision
	inSync map[block.LegID]uint64
	asked  map[block.LegID]uint64 // those that the manager may have recorded stale, and has not said so
}

// NewRecords returns the Records of an epoch with no answers yet.
func NewRecords() Records {
	return Records{stale: map[block.LegID]uint64{}, inSync: map[block.LegID]uint64{}, asked: map[block.LegID]uint64{}}
}

// NoteAsked notes that the manager is asked to record a leg's loss.
func (r Records) NoteAsked(leg block.LegID, revision uint64) { r.asked[leg] = revision }

// NoteRefused notes that the manager has not recorded a leg's loss, and will not: not for an earlier
// request either, since requests are numbered.
func (r Records) NoteRefused(leg block.LegID) { delete(r.asked, leg) }

// MayBeStale reports whether the manager was asked to record l as stale and has not answered.
func (r Records) MayBeStale(l *Link) bool {
	revision, ok := r.asked[l.Leg]
	return ok && l.Revision <= revision
}

// NoteStale notes that a leg's loss is recorded durably.
func (r Records) NoteStale(leg block.LegID, revision uint64) {
	r.stale[leg] = revision
	delete(r.inSync, leg)
	delete(r.asked, leg)
}

// NoteInSync notes that a leg's recovery is recorded durably.
func (r Records) NoteInSync(leg block.LegID, revision uint64) {
	r.inSync[leg] = revision
	delete(r.stale, leg)
}

// Stale reports whether the manager has recorded l as stale for this host, whatever an older
// wanted state still says.
func (r Records) Stale(l *Link) bool {
	revision, ok := r.stale[l.Leg]
	return ok && l.Revision <= revision
}

// InSync reports whether l counts as in sync; a leg that is not wanted does not.
func (r Records) InSync(l *Link) bool {
	if l == nil || r.Stale(l) {
		return false
	}
	revision, recorded := r.inSync[l.Leg]
	return !l.Rebuilding || recorded && revision == l.Revision
}

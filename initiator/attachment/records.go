// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
)

// Records is what the manager has answered to this host about legs of one epoch.
// A wanted state that is older than an answer still tells of a leg as it was
// before. Records is a value of one goroutine.
type Records struct {
	stale  map[block.LegID]uint64 // at this revision
	inSync map[block.LegID]uint64
}

// NewRecords is Records of an epoch in which nothing was recorded yet.
func NewRecords() Records {
	return Records{stale: map[block.LegID]uint64{}, inSync: map[block.LegID]uint64{}}
}

// NoteStale notes that a leg's loss is durable.
func (r Records) NoteStale(leg block.LegID, revision uint64) {
	r.stale[leg] = revision
	delete(r.inSync, leg)
}

// NoteInSync notes that a leg's recovery is durable.
func (r Records) NoteInSync(leg block.LegID, revision uint64) {
	r.inSync[leg] = revision
	delete(r.stale, leg)
}

// Stale reports whether l is one that the manager has recorded stale for us,
// whatever an older wanted state still says.
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

// Refusal is why the manager refused a request: the reason that it gave, then its
// words.
func Refusal(err error) string {
	s := status.Convert(err)
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() != "" {
			return info.GetReason() + ": " + s.Message()
		}
	}
	return s.Message()
}

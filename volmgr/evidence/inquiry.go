// SPDX-License-Identifier: Apache-2.0

// Package evidence decides, from the labels of drives and the notes of hosts, which copies
// of a volume hold every acknowledged write.
//
// When the store is lost, or older than the drives, it cannot say which copies of a volume
// hold every acknowledged write. Labels alone cannot say it either: a label is written after
// the record that it copies, and a target goes on serving while its agent cannot reach the
// manager. So every label may list a stale copy as in sync.
//
// A column with several copies is believed only on one of these proofs. Each needs the
// labels of all its legs, because a later grant of the volume has left its epoch on at
// least one of them. Which legs these are is what the newest label lists. A leg that it does
// not list was made again elsewhere, and counts for nothing. (A new leg comes into sync only
// after the labels of all legs in sync list it, so no set of labels can be complete by an old
// list while a leg of a newer list went on alone.)
//
//   - No host can have written since the newest label: it is quiet, and no leg has
//     admitted a later epoch. Its in-sync set, with the suspects, is the last one.
//   - The host that had the volume at the highest epoch has noted its in-sync set (see
//     [Note]). That host waited for its note to be durable before it went on without a
//     leg. The note must match the present state of a leg of the column. If it matches
//     none, it is too old: all may have lost their caches since, and one was kept.
//
// A column of one copy needs no proof: its leg is believed as the newest label lists it.
// In any other column all legs stay stale until an operator promotes one. The reason of
// each leg lists the evidence for it.
//
// A copy that is believed is suspect if its machine has booted since its
// label was written, or its drive was away or failed a flush: writes that only the drive's
// cache held may then be lost. It is also suspect if its own label does not list it, since
// it may have been suspect before. The copies of a volume that is quiet and clean are never
// suspect, because their caches were flushed.
package evidence

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// Found is the label of a leg, and what became of its drive since it was written.
type Found struct {
	LegLabel
	Cut      bool // its machine has booted, or its drive was away, since the label was written
	Volatile bool // its drive may lose writes that were not flushed
}

// hostNote is a host's note of the volume.
type hostNote struct {
	host block.NodeName
	Note
}

// Inquiry collects the evidence about the copies of one volume.
type Inquiry struct {
	Newest  VolumeLabel // the newest definition: of a label, or of the backup that was restored
	Top     block.Epoch // the highest that a target admitted, or that a host had
	Highest uint64      // revision, of all legs
	Legs    map[block.LegID]Found

	layout block.Layout
	backup bool        // Newest comes from the backup
	label  VolumeLabel // the newest of the labels
	absent []bool      // by column: the label of one of its legs was not found
	notes  []hostNote
	heard  map[block.NodeName]bool // hosts that have reported
}

// New begins with the volume's definition from a backup; nil if there is none.
func New(known *VolumeLabel) *Inquiry {
	q := &Inquiry{Legs: map[block.LegID]Found{}, heard: map[block.NodeName]bool{}}
	if known != nil {
		q.Newest, q.backup, q.Top = *known, true, known.Epoch
	}
	return q
}

// Admitted adds the epoch that a target has admitted.
func (q *Inquiry) Admitted(epoch block.Epoch) { q.Top = max(q.Top, epoch) }

// Add adds the label of a leg.
func (q *Inquiry) Add(l Found) {
	q.Legs[l.Leg] = l
	q.Top = max(q.Top, l.AdmittedEpoch, l.Volume.Epoch)
	q.Highest = max(q.Highest, l.Revision)
	if len(q.Legs) == 1 || l.Volume.newer(&q.label) {
		q.label = l.Volume
	}
	if q.Newest.ID.IsZero() || l.Volume.newer(&q.Newest) {
		q.Newest, q.backup = l.Volume, false
	}
}

// Hear adds what a host reports of the volume: the epochs at which it has it, and its notes.
func (q *Inquiry) Hear(host block.NodeName, epochs []block.Epoch, notes []Note) {
	q.heard[host] = true
	for _, epoch := range epochs {
		q.Top = max(q.Top, epoch)
	}
	for _, n := range notes {
		q.notes = append(q.notes, hostNote{host, n})
		q.Top = max(q.Top, n.Epoch)
		for _, l := range n.Legs {
			q.Highest = max(q.Highest, l.Revision)
		}
	}
}

// Expect sets the layout, and notes which columns lack the label of a leg.
func (q *Inquiry) Expect(layout block.Layout) {
	q.layout = layout
	found := make([]int, layout.Stripes)
	for id, l := range q.Legs {
		if l.Column < layout.Stripes && q.Newest.Has(id) {
			found[l.Column]++
		}
	}
	q.absent = make([]bool, layout.Stripes)
	for c := range q.absent {
		q.absent[c] = found[c] < q.Newest.members(layout, c)
	}
}

// Replaced reports whether a leg was made again elsewhere by the newest label: it counts for
// nothing, whatever its own label says.
func (q *Inquiry) Replaced(leg block.LegID) bool { return !q.Newest.Has(leg) }

// Absent reports whether the label of a leg of a column was not found.
func (q *Inquiry) Absent(column int) bool { return q.absent[column] }

// Unopposed reports whether nothing speaks against a leg but that the label of another leg of its column was
// not found: the newest label lists it as in sync.
func (q *Inquiry) Unopposed(leg block.LegID, column int) bool {
	return q.absent[column] && slices.Contains(q.Newest.InSync, leg)
}

// Unborn reports whether the volume was never ready. It also asks for a generation that was
// never raised, since a ready volume may lack legs in sync until an operator promotes one.
func (q *Inquiry) Unborn() bool { return q.Newest.Generation <= 1 && len(q.Newest.InSync) == 0 }

// Deleted reports whether the volume was deleted: the newest label lists no leg as the volume's. What is left
// are legs that snapshots or clones need.
func (q *Inquiry) Deleted() bool {
	l := &q.Newest
	return l.ListsAll && len(l.InSync)+len(l.Suspect)+len(l.Others) == 0
}

// RestoringTo is the snapshot to which the volume was going back when the newest definition was written,
// so that some of its legs may hold what that does and others not; zero: none. No host was granted the
// volume before that was over.
func (q *Inquiry) RestoringTo() (id block.VolumeID) {
	if q.quiet() {
		id = q.Newest.RestoringTo
	}
	return id
}

// quiet reports whether no host can have written since the newest definition.
func (q *Inquiry) quiet() bool { return q.Newest.Quiet && q.Newest.Epoch >= q.Top }

// lastNote returns the evidence of the host that had the volume at the highest epoch; nil if
// that host has not reported it. Only one host can have had it then, so if two claim it
// neither is believed.
func (q *Inquiry) lastNote() *hostNote {
	var found *hostNote
	for i := range q.notes {
		switch h := &q.notes[i]; {
		case h.Epoch != q.Top:
		case found != nil:
			return nil
		default:
			found = h
		}
	}
	return found
}

// snapshot reports whether the volume is a snapshot.
func (q *Inquiry) snapshot() bool { return !q.Newest.Snapshot.Volume.IsZero() }

// alone reports whether each column is a single leg, so that no copy can differ from it.
func (q *Inquiry) alone() bool { return q.layout.Group().Members == 1 }

// proven reports whether the evidence is enough to tell the in-sync set of a column.
func (q *Inquiry) proven(column int) bool {
	return q.alone() || !q.absent[column] && (q.quiet() && q.named(column) || !q.quiet() && q.upheld(column))
}

// named reports whether a column can be read from the legs that the newest definition lists
// as in sync or suspect. Older versions did not list suspects, so it may not be.
func (q *Inquiry) named(column int) bool {
	return q.readable(column, func(l Found) bool { return q.Newest.inSync(l.Leg) })
}

// upheld reports whether a column can be read from the legs that match the last note.
func (q *Inquiry) upheld(column int) bool {
	note := q.lastNote()
	return note != nil && q.readable(column, func(l Found) bool { return note.against(l) == "" })
}

// readable reports whether a column can be read from its good legs alone.
func (q *Inquiry) readable(column int, good func(Found) bool) bool {
	var members block.MemberSet
	for _, l := range q.Legs {
		if l.Column == column && !q.Replaced(l.Leg) && good(l) {
			members = members.With(l.Copy)
		}
	}
	return q.layout.Group().Readable(members)
}

// conclusive reports whether no host's evidence could change the verdict on any column.
func (q *Inquiry) conclusive() bool {
	for c := range q.layout.Stripes {
		if !q.absent[c] && !q.proven(c) {
			return false
		}
	}
	return true
}

// Awaits names the host that has not reported and whose evidence could decide; empty if
// there is none, or if it is dead.
func (q *Inquiry) Awaits(dead func(block.NodeName) bool) block.NodeName {
	if w := q.Newest.Writer; !q.heard[w] && !dead(w) && !q.conclusive() {
		return w
	}
	return ""
}

// Holder is the host that may still have the volume; was, unless the evidence names another.
func (q *Inquiry) Holder(was block.NodeName) block.NodeName {
	if q.quiet() {
		return was
	}
	if note := q.lastNote(); note != nil {
		return note.host
	}
	return cmp.Or(q.Newest.Writer, was)
}

// Labels returns the labels of the legs that were found, in the order of leg ids.
func (q *Inquiry) Labels() (all []LegLabel) {
	for _, l := range q.Legs {
		all = append(all, l.LegLabel)
	}
	slices.SortFunc(all, func(a, b LegLabel) int { return bytes.Compare(a.Leg.UUID[:], b.Leg.UUID[:]) })
	return all
}

// SharedUnseen reports whether hosts may share the volume read-only unseen: no label or note
// names them, and they go on without a manager. A volume that is not clean is shared only
// while each column has a single leg in sync. Every grant has to fence that leg, so then
// nothing needs to be remembered.
func (q *Inquiry) SharedUnseen() bool { return !q.alone() && q.quiet() && q.Newest.Clean }

// Size returns the size that the labels prove. It is false if they prove none: there are no
// labels, or the backup is newer than all of them.
func (q *Inquiry) Size() (block.Size, bool) {
	labels := q.Labels()
	if len(labels) == 0 || q.Newest.newer(&q.label) {
		return 0, false
	}
	return size(&q.label, labels), true
}

// Basis names the proof of the in-sync sets.
func (q *Inquiry) Basis() string {
	switch note := q.lastNote(); {
	case q.alone():
		return ""
	case q.quiet():
		return "; no host has written since the newest label"
	case note != nil:
		return fmt.Sprintf("; host %s noted at epoch %d which copies are good", note.host, note.Epoch)
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// When the store is lost, or older than the drives, it cannot say which copies of a volume
// hold every acknowledged write. Labels alone cannot say it either: a label is written after
// the record that it copies, and a target goes on serving while its agent cannot reach the
// manager. So every label may list a stale copy as in sync.
//
// A column with several copies is believed only on one of these proofs. Each needs the
// labels of all its legs, because a later grant of the volume has left its epoch on at
// least one of them.
//
//   - No host can have written since the newest label: it is quiet, and no leg has
//     admitted a later epoch. Its in-sync set, with the suspects, is the last one.
//   - The host that had the volume at the highest epoch has noted its in-sync set (see
//     Evidence). That host waited for its note to be durable before it went on without a
//     leg. The note must match the present state of a leg of the column. If it matches
//     none, it is too old: all may have lost their caches since, and one was kept.
//
// A column of one copy needs no proof: its leg is believed as the newest label lists it.
// In any other column all legs stay stale until an operator promotes one. The reason of
// each leg lists the evidence for it.
//
// A copy that is believed is suspect (see suspect.go) if its machine has booted since its
// label was written, or its drive was away or failed a flush: writes that only the drive's
// cache held may then be lost. It is also suspect if its own label does not list it, since
// it may have been suspect before. The copies of a volume that is quiet and clean are never
// suspect, because their caches were flushed.

// foundLeg is a leg as its drive's label describes it.
type foundLeg struct {
	LegLabel
	node     block.NodeName
	cut      bool // its machine has booted, or its drive was away, since the label was written
	volatile bool // its drive may lose writes that were not flushed
}

// cut reports whether the machine has booted, or the drive has a new incarnation, since the
// leg's label was written.
func (d *DriveReport) cut(l LegLabel, boot string) bool {
	known := l.Incarnation != "" && d.Incarnation != ""
	return l.Boot != boot || known && l.Incarnation != d.Incarnation
}

// testimony is a host's evidence of one volume.
type testimony struct {
	host block.NodeName
	Evidence
}

// inquiry collects all evidence about a volume's copies that does not come from a store.
type inquiry struct {
	layout  block.Layout
	newest  VolumeLabel
	backup  bool        // newest comes from the backup that was restored, not from a label
	label   VolumeLabel // the newest of the labels
	top     block.Epoch
	legs    map[block.LegID]foundLeg
	absent  []bool // by column: the label of one of its legs was not found
	hosts   []testimony
	heard   map[block.NodeName]bool // hosts that have reported
	highest uint64                  // revision, of all legs
}

// newInquiry begins with the volume's definition from a backup; nil if there is none.
func newInquiry(known *VolumeLabel) *inquiry {
	q := &inquiry{legs: map[block.LegID]foundLeg{}, heard: map[block.NodeName]bool{}}
	if known != nil {
		q.newest, q.backup, q.top = *known, true, known.Epoch
	}
	return q
}

// newer orders definitions of a volume by age. Generation and epoch only grow, and within
// an epoch a volume may become quiet but not the reverse.
func (l *VolumeLabel) newer(than *VolumeLabel) bool {
	quiet := map[bool]int{true: 1}
	return cmp.Or(cmp.Compare(l.Generation, than.Generation), cmp.Compare(l.Epoch, than.Epoch), quiet[l.Quiet]-quiet[than.Quiet]) > 0
}

func (q *inquiry) leg(l foundLeg) {
	q.legs[l.Leg] = l
	q.top = max(q.top, l.AdmittedEpoch, l.Volume.Epoch)
	q.highest = max(q.highest, l.Revision)
	if len(q.legs) == 1 || l.Volume.newer(&q.label) {
		q.label = l.Volume
	}
	if q.newest.ID.IsZero() || l.Volume.newer(&q.newest) {
		q.newest, q.backup = l.Volume, false
	}
}

// host adds the part of a host's report that is about the volume.
func (q *inquiry) host(id block.VolumeID, r *InitiatorReport) {
	q.heard[r.Node] = true
	for _, a := range r.Attachments {
		if a.Volume == id {
			q.top = max(q.top, a.Epoch)
		}
	}
	for _, e := range r.Evidence {
		if e.Volume != id {
			continue
		}
		q.hosts = append(q.hosts, testimony{r.Node, e})
		q.top = max(q.top, e.Epoch)
		for _, l := range e.Legs {
			q.highest = max(q.highest, l.Revision)
		}
	}
}

// missing notes which columns lack the label of a leg.
func (q *inquiry) missing(layout block.Layout) {
	q.layout = layout
	found := make([]int, layout.Stripes)
	for _, l := range q.legs {
		if l.Column < layout.Stripes {
			found[l.Column]++
		}
	}
	q.absent = make([]bool, layout.Stripes)
	for c := range q.absent {
		q.absent[c] = found[c] < layout.Group().Members
	}
}

// unborn reports whether the volume was never ready. It also asks for a generation that was
// never raised, since a ready volume may lack legs in sync until an operator promotes one.
func (q *inquiry) unborn() bool { return q.newest.Generation <= 1 && len(q.newest.InSync) == 0 }

// quiet reports whether no host can have written since the newest definition.
func (q *inquiry) quiet() bool { return q.newest.Quiet && q.newest.Epoch >= q.top }

// witness returns the evidence of the host that had the volume at the highest epoch; nil if
// that host has not reported it. Only one host can have had it then, so if two claim it
// neither is believed.
func (q *inquiry) witness() *testimony {
	var found *testimony
	for i := range q.hosts {
		switch h := &q.hosts[i]; {
		case h.Epoch != q.top:
		case found != nil:
			return nil
		default:
			found = h
		}
	}
	return found
}

// alone reports whether each column is a single leg, so that no copy can differ from it.
func (q *inquiry) alone() bool { return q.layout.Group().Members == 1 }

// proven reports whether the evidence is enough to tell the in-sync set of a column.
func (q *inquiry) proven(column int) bool {
	return q.alone() || !q.absent[column] && (q.quiet() && q.named(column) || !q.quiet() && q.upheld(column))
}

// named reports whether a column can be read from the legs that the newest definition lists
// as in sync or suspect. Older versions did not list suspects, so it may not be.
func (q *inquiry) named(column int) bool {
	return q.readable(column, func(l foundLeg) bool { return q.newest.inSync(l.Leg) })
}

// upheld reports whether a column can be read from the legs that match the witness's note.
func (q *inquiry) upheld(column int) bool {
	w := q.witness()
	return w != nil && q.readable(column, func(l foundLeg) bool { return w.against(l) == "" })
}

// readable reports whether a column can be read from its good legs alone.
func (q *inquiry) readable(column int, good func(foundLeg) bool) bool {
	var members block.MemberSet
	for _, l := range q.legs {
		if l.Column == column && good(l) {
			members = members.With(l.Copy)
		}
	}
	return q.layout.Group().Readable(members)
}

// conclusive reports whether no host's evidence could change the verdict on any column.
func (q *inquiry) conclusive() bool {
	for c := range q.layout.Stripes {
		if !q.absent[c] && !q.proven(c) {
			return false
		}
	}
	return true
}

// awaits names the host that has not reported and whose evidence could decide; empty if
// there is none, or if it is dead.
func (q *inquiry) awaits(dead func(block.NodeName) bool) block.NodeName {
	if w := q.newest.Writer; !q.heard[w] && !dead(w) && !q.conclusive() {
		return w
	}
	return ""
}

// holder is the host that may still have the volume; was, unless the evidence names another.
func (q *inquiry) holder(was block.NodeName) block.NodeName {
	if q.quiet() {
		return was
	}
	if w := q.witness(); w != nil {
		return w.host
	}
	return cmp.Or(q.newest.Writer, was)
}

// lingering stands for hosts that may share the volume read-only: no label or note names
// them, and they go on without a manager. A volume that is not clean is shared only while
// each column has a single leg in sync. Every grant has to fence that leg, so nothing needs
// to be remembered.
func (q *inquiry) lingering() []Lingerer {
	if q.alone() || !q.quiet() || !q.newest.Clean {
		return nil
	}
	return []Lingerer{{Epoch: q.top, Mode: AttachSharedReadOnly}}
}

// verdict says whether a leg is in sync, and whether it is suspect.
type verdict struct {
	good, suspect bool
	final         bool   // suspect holds whatever the record says
	why           string // why it is not good
}

func (q *inquiry) judge(leg block.LegID, column int) verdict {
	l, found := q.legs[leg]
	switch {
	case !found:
		return verdict{why: "its own label was not found"}
	case !q.proven(column):
		return verdict{why: q.doubt(column) + ": " + q.pleads(l)}
	}
	if w := q.witness(); !q.alone() && !q.quiet() && w != nil {
		if why := w.against(l); why != "" {
			return verdict{why: why}
		}
	} else if !q.newest.inSync(leg) {
		return verdict{why: "the newest label does not list it as in sync"}
	}
	clean := q.quiet() && q.newest.Clean
	suspected := slices.Contains(q.newest.Suspect, leg)
	doubtful := l.cut || !slices.Contains(l.Volume.InSync, leg)
	return verdict{good: true, suspect: !q.alone() && !clean && (suspected || doubtful && l.volatile), final: clean || l.Incarnation != ""}
}

// against says why a leg is not in sync by a host's evidence; empty if it is.
func (w *testimony) against(l foundLeg) string {
	i := slices.IndexFunc(w.Legs, func(e EvidenceLeg) bool { return e.Leg == l.Leg })
	switch {
	case i < 0:
		return fmt.Sprintf("host %s noted at epoch %d that it is not in sync", w.host, w.Epoch)
	case l.AdmittedEpoch < w.Epoch:
		return fmt.Sprintf("its drive admitted epoch %d, but host %s had it at epoch %d", l.AdmittedEpoch, w.host, w.Epoch)
	case l.Revision > w.Legs[i].Revision:
		return fmt.Sprintf("its drive has revision %d, but host %s had revision %d in sync", l.Revision, w.host, w.Legs[i].Revision)
	}
	return ""
}

// doubt says why a column is not proven.
func (q *inquiry) doubt(column int) string {
	if q.absent[column] {
		return "the label of another leg of its column was not found and may be newer"
	}
	var claims []string
	for _, h := range q.hosts {
		if h.Epoch == q.top {
			claims = append(claims, string(h.host))
		}
	}
	if len(claims) > 1 {
		return fmt.Sprintf("hosts %s both claim to have had epoch %d", strings.Join(claims, " and "), q.top)
	}
	if q.quiet() {
		return "the newest label names no copy of its column as in sync: all may have lost what only caches held"
	}
	if w := q.witness(); w != nil {
		return fmt.Sprintf("host %s noted at epoch %d no copy in its present state, so its note may be outdated", w.host, w.Epoch)
	}
	who, said := "the host that had it then", "has not reported"
	if w := q.newest.Writer; w != "" && q.newest.Epoch == q.top {
		who = "host " + string(w)
		if q.heard[w] {
			said = "has no note of it"
		}
	}
	return fmt.Sprintf("a copy may have missed writes at epoch %d without a label that says so, and %s %s", q.top, who, said)
}

// pleads lists the evidence for a leg whose column is not proven.
func (q *inquiry) pleads(l foundLeg) string {
	words := []string{fmt.Sprintf("its label (generation %d, epoch %d, revision %d) %s as in sync",
		l.Volume.Generation, l.Volume.Epoch, l.Revision, lists(l.Volume.InSync, l.Leg))}
	switch {
	case q.backup:
		words = append(words, "the backup is newer than all labels and "+lists(q.newest.InSync, l.Leg))
	case q.newest.newer(&l.Volume):
		words = append(words, fmt.Sprintf("the newest label (generation %d, epoch %d) %s", q.newest.Generation, q.newest.Epoch, lists(q.newest.InSync, l.Leg)))
	default:
		words = append(words, "no label is newer")
	}
	words = append(words, fmt.Sprintf("it admitted epoch %d of %d", l.AdmittedEpoch, q.top))
	for _, h := range q.newestHosts() {
		i := slices.IndexFunc(h.Legs, func(e EvidenceLeg) bool { return e.Leg == l.Leg })
		if i < 0 {
			words = append(words, fmt.Sprintf("host %s noted at epoch %d that it is not in sync", h.host, h.Epoch))
			continue
		}
		words = append(words, fmt.Sprintf("host %s noted at epoch %d that it is in sync at revision %d", h.host, h.Epoch, h.Legs[i].Revision))
	}
	if l.cut && l.volatile {
		words = append(words, "its machine has booted, or its drive was away, since its label was written: it may have lost cached writes")
	}
	return strings.Join(words, "; ")
}

func lists(inSync []block.LegID, leg block.LegID) string {
	if slices.Contains(inSync, leg) {
		return "lists it"
	}
	return "does not list it"
}

// newestHosts returns the evidence of the two newest hosts, newest first.
func (q *inquiry) newestHosts() []testimony {
	hosts := slices.Clone(q.hosts)
	slices.SortStableFunc(hosts, func(a, b testimony) int { return cmp.Or(cmp.Compare(b.Epoch, a.Epoch), cmp.Compare(a.host, b.host)) })
	return hosts[:min(len(hosts), 2)]
}

// labels returns the labels of the legs that were found, in the order of leg ids.
func (q *inquiry) labels() (all []LegLabel) {
	for _, id := range sorted(q.legs) {
		all = append(all, q.legs[id].LegLabel)
	}
	return all
}

// AwaitedHosts names the hosts that a Rebuild should wait for: by the labels they had a
// volume last, and they have not reported what they noted of it.
func AwaitedHosts(targets []TargetReport, hosts []InitiatorReport) []block.NodeName {
	r := newRebuild(targets, hosts)
	awaited := map[block.NodeName]bool{}
	for _, q := range r.inquiries {
		if host := q.awaits(r.s.confirmedDead); host != "" {
			awaited[host] = true
		}
	}
	return slices.Sorted(maps.Keys(awaited))
}

// SPDX-License-Identifier: Apache-2.0

package evidence

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// Verdict says whether a leg is in sync, and whether it is suspect.
type Verdict struct {
	Good    bool
	Suspect bool
	Final   bool   // Suspect holds whatever the record says
	Why     string // why it is not good
}

// Judge says whether a leg of a column is in sync.
//
// Branches: each is one reason for which a leg is not believed.
func (q *Inquiry) Judge(leg block.LegID, column int) Verdict {
	l, found := q.Legs[leg]
	switch {
	case !found:
		return Verdict{Why: "its own label was not found"}
	case q.Replaced(leg):
		return Verdict{Why: "the newest label does not list it: it was made again elsewhere"}
	case !q.proven(column):
		return Verdict{Why: q.doubt(column) + ": " + q.evidenceFor(l)}
	}
	if note := q.lastNote(); !q.alone() && !q.quiet() && note != nil {
		if why := note.against(l); why != "" {
			return Verdict{Why: why}
		}
	} else if !q.Newest.inSync(leg) {
		return Verdict{Why: "the newest label does not list it as in sync"}
	}
	suspected := slices.Contains(q.Newest.Suspect, leg)
	clean := q.quiet() && q.Newest.Clean && !(suspected && q.snapshot()) // a snapshot is always called clean
	doubtful := l.Cut || !slices.Contains(l.Volume.InSync, leg)
	return Verdict{Good: true, Suspect: !q.alone() && !clean && (suspected || doubtful && l.Volatile), Final: clean || l.Incarnation != ""}
}

// against says why a leg is not in sync by a host's evidence; empty if it is.
func (note *hostNote) against(l Found) string {
	i := slices.IndexFunc(note.Legs, func(e NotedLeg) bool { return e.Leg == l.Leg })
	switch {
	case i < 0:
		return fmt.Sprintf("host %s noted at epoch %d that it is not in sync", note.host, note.Epoch)
	case l.AdmittedEpoch < note.Epoch:
		return fmt.Sprintf("its drive admitted epoch %d, but host %s had it at epoch %d", l.AdmittedEpoch, note.host, note.Epoch)
	case l.Revision > note.Legs[i].Revision:
		return fmt.Sprintf("its drive has revision %d, but host %s had revision %d in sync", l.Revision, note.host, note.Legs[i].Revision)
	}
	return ""
}

// doubt says why a column is not proven.
func (q *Inquiry) doubt(column int) string {
	if q.absent[column] {
		return "the label of another leg of its column was not found and may be newer"
	}
	var claims []string
	for _, h := range q.notes {
		if h.Epoch == q.Top {
			claims = append(claims, string(h.host))
		}
	}
	if len(claims) > 1 {
		return fmt.Sprintf("hosts %s both claim to have had epoch %d", strings.Join(claims, " and "), q.Top)
	}
	if q.quiet() {
		return "the newest label names no copy of its column as in sync: all copies may have lost cached writes"
	}
	if note := q.lastNote(); note != nil {
		return fmt.Sprintf("the note of host %s from epoch %d matches no copy in its present state, so it may be outdated", note.host, note.Epoch)
	}
	who, said := "the host that had it then", "has not reported"
	if w := q.Newest.Writer; w != "" && q.Newest.Epoch == q.Top {
		who = "host " + string(w)
		if q.heard[w] {
			said = "has no note of it"
		}
	}
	return fmt.Sprintf("a copy may have missed writes at epoch %d that no label shows, and %s %s", q.Top, who, said)
}

// evidenceFor lists the evidence for a leg whose column is not proven.
func (q *Inquiry) evidenceFor(l Found) string {
	words := []string{fmt.Sprintf("its label (generation %d, epoch %d, revision %d) %s as in sync",
		l.Volume.Generation, l.Volume.Epoch, l.Revision, lists(l.Volume.InSync, l.Leg))}
	switch {
	case q.backup:
		words = append(words, "the backup is newer than all labels and "+lists(q.Newest.InSync, l.Leg))
	case q.Newest.newer(&l.Volume):
		words = append(words, fmt.Sprintf("the newest label (generation %d, epoch %d) %s", q.Newest.Generation, q.Newest.Epoch, lists(q.Newest.InSync, l.Leg)))
	default:
		words = append(words, "no label is newer")
	}
	words = append(words, fmt.Sprintf("it admitted epoch %d of %d", l.AdmittedEpoch, q.Top))
	for _, h := range q.newestHosts() {
		i := slices.IndexFunc(h.Legs, func(e NotedLeg) bool { return e.Leg == l.Leg })
		if i < 0 {
			words = append(words, fmt.Sprintf("host %s noted at epoch %d that it is not in sync", h.host, h.Epoch))
			continue
		}
		words = append(words, fmt.Sprintf("host %s noted at epoch %d that it is in sync at revision %d", h.host, h.Epoch, h.Legs[i].Revision))
	}
	if l.Cut && l.Volatile {
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
func (q *Inquiry) newestHosts() []hostNote {
	hosts := slices.Clone(q.notes)
	slices.SortStableFunc(hosts, func(a, b hostNote) int { return cmp.Or(cmp.Compare(b.Epoch, a.Epoch), cmp.Compare(a.host, b.host)) })
	return hosts[:min(len(hosts), 2)]
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// A volume with checksums heals: its host reads from another copy what does not match, and writes it
// again. Nothing of that is silent: each range is an event, and the volume's record counts them.

// Heals counts the ranges of a volume's copies that did not match their checksums.
type Heals struct {
	// Run is that of the last report, and Count and Failed are what it said.
	Run    string `json:"run"`
	Count  uint64 `json:"count"`
	Failed uint64 `json:"failed,omitempty"`

	Repaired    uint64    `json:"repaired,omitempty"` // since the volume was created
	NotRepaired uint64    `json:"not_repaired,omitempty"`
	Last        time.Time `json:"last"`
}

// HealReport is what a host tells of them.
type HealReport struct {
	Run    string // another one for each time that the host built the volume
	Count  uint64 // of this run
	Failed uint64 // of them: not repaired
	Last   []ScrubFinding
}

// settleHeals records what the host has healed, and makes events of it.
func (t *tx) settleHeals(id block.VolumeID) {
	v := t.peek(id)
	if v.Attachment == nil {
		return
	}
	r, ok := t.s.attachmentReport(v, v.Attachment)
	if !ok || r.Heals == nil {
		return
	}
	var known Heals
	if v.Heals != nil {
		known = *v.Heals
	}
	if known.Run != r.Heals.Run {
		known.Run, known.Count, known.Failed = r.Heals.Run, 0, 0
	}
	if r.Heals.Count <= known.Count {
		return
	}
	news, failed := r.Heals.Count-known.Count, r.Heals.Failed-min(known.Failed, r.Heals.Failed)
	known.Count, known.Failed, known.Last = r.Heals.Count, r.Heals.Failed, t.now.UTC()
	known.Repaired, known.NotRepaired = known.Repaired+news-min(failed, news), known.NotRepaired+failed
	v = t.volume(id)
	v.Heals = &known
	told := r.Heals.Last[max(0, len(r.Heals.Last)-int(min(news, uint64(len(r.Heals.Last))))):]
	for _, f := range told {
		severity := event.Warning
		if f.Outcome != ScrubRepaired {
			severity = event.Trouble
		}
		t.volumeEvent(v, severity, event.ReadRepair, v.healed(f),
			"column", fmt.Sprint(f.Column), "offset_bytes", fmt.Sprint(uint64(f.Off)), "length_bytes", fmt.Sprint(uint64(f.Length)))
	}
	if more := news - uint64(len(told)); more > 0 {
		t.volumeEvent(v, event.Warning, event.ReadRepair, fmt.Sprintf("%s more did not match their checksums since the last report", plural(int(more), "range")))
	}
}

// healed says what became of a range.
func (v *Volume) healed(f ScrubFinding) string {
	text := f.place()
	for _, copy := range f.Unreadable {
		if l := v.legAt(f.Column, copy); l != nil {
			text += fmt.Sprintf(": %v does not match its checksum", l)
		}
	}
	if f.Outcome == ScrubRepaired {
		return text + "; written again from another copy"
	}
	return text + "; not repaired" + because(f.Error)
}

// explainHeals says how often data did not match its checksum.
func (v *Volume) explainHeals(e *Explanation) {
	h := v.Heals
	if h == nil {
		return
	}
	at := h.Last.UTC().Format(time.RFC3339)
	if h.Repaired > 0 {
		e.Facts = append(e.Facts, fmt.Sprintf("%s of its copies did not match their checksums and were written again from another copy, the last at %s", plural(int(h.Repaired), "range"), at))
	}
	if h.NotRepaired > 0 {
		e.Facts = append(e.Facts, fmt.Sprintf("%s of its copies did not match their checksums and could not be written again, the last at %s or before", plural(int(h.NotRepaired), "range"), at))
		e.Actions = append(e.Actions, fmt.Sprintf("to compare all copies and write again what is known to be wrong: weft volume scrub %s --repair", v.Name))
	}
	e.Actions = append(e.Actions, fmt.Sprintf("see which drives changed data: weft event list --object \"volume %s\"; a drive that does so again and again belongs replaced", v.Name))
}

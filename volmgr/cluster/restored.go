// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// Jumps that a restored state makes, so that nothing the cluster did after the
// backup can be taken for what it does from now on: no grant, wanted state or
// revision made since comes near them.
const (
	epochJump      = 1 << 20
	generationJump = 1 << 32
)

// Restored makes the records of a backup fit to start from. What happened after
// the backup is not in it: who was granted what, and which copies went stale.
// So every volume comes up detached and not clean, at an epoch far above any
// that a target can have admitted, with its legs under new identities, and none of
// them is taken for one that was never written.
func Restored(now time.Time, records []Record) ([]Record, error) {
	s, err := Load(records)
	if err != nil {
		return nil, err
	}
	s.meta.Generation += generationJump
	t := newTx(s, now)
	for _, id := range sorted(s.volumes) {
		t.restored(t.volume(id))
	}
	t.event(Trouble, EventStoreRestored, "cluster", fmt.Sprintf("from a backup: %d volumes detached, each is served again once the labels of its legs have been seen", len(s.volumes)))
	t.commit()
	return s.Records(), nil
}

func (t *tx) restored(v *Volume) {
	v.Epoch += epochJump
	v.Clean = false
	v.Formatted = orRaw(v.Formatted)
	if v.Attachment != nil {
		v.Holder, v.Attachment = v.Attachment.Node, nil
	}
	v.linger()
	v.Restored = v.State != VolumeDeleting
	for i := range v.Legs {
		l := &v.Legs[i]
		l.Revision += epochJump
		l.StaleAt = 0
		if l.State == LegRebuilding {
			l.State, l.Reason, l.StaleSince = LegStale, "its rebuild was cut by a restore", t.now.UTC()
		}
	}
}

// settleRestored compares a restored volume with the labels of its legs, when
// all of them have been seen. Until then nothing is wanted of its targets, which
// therefore keep the labels as they are, and it can not be attached.
//
// As in [Rebuild], the label with the highest generation is believed, and a
// column only if all of its legs were found.
func (t *tx) settleRestored(id block.VolumeID) {
	v := t.peek(id)
	if !v.Restored || len(t.s.unseen(v)) > 0 {
		return
	}
	v = t.volume(id)
	v.Restored = false
	best, found := t.s.newestLabel(v)
	if v.State == VolumeCreating && len(best.InSync) == 0 {
		return // it was never ready
	}
	missing := make([]bool, v.Layout.Stripes)
	for _, l := range v.Legs {
		missing[l.Column] = missing[l.Column] || !found[l.ID]
	}
	newer := best.Generation > v.Generation || v.State == VolumeCreating
	v.State = VolumeReady
	t.adopt(v, best, newer)
	for i := range v.Legs {
		l := &v.Legs[i]
		switch listed := slices.Contains(best.InSync, l.ID); {
		case l.State == LegStale && (!newer || !listed || missing[l.Column]):
		case missing[l.Column]:
			t.stale(v, l.ID, EventLegStale, "the label of a leg of its column was not found and may be newer")
		case newer && listed:
			l.good()
		case newer:
			t.stale(v, l.ID, EventLegStale, "it went stale after the backup")
		}
	}
	v.Generation = max(v.Generation, best.Generation) + 1
	t.volumeEvent(v, Info, EventVolumeChecked, "its record was compared with the labels on the drives")
}

// adopt takes over what the labels know of expansions after the backup. A leg that
// missed one is given extents when the volume is expanded again, if not now.
func (t *tx) adopt(v *Volume, best VolumeLabel, newer bool) {
	var labels []LegLabel
	for i := range v.Legs {
		l := &v.Legs[i]
		d, _ := t.s.driveReport(l)
		for _, label := range d.Legs {
			if label.Leg != l.ID {
				continue
			}
			labels = append(labels, label)
			if begins(label.Extents, l.Extents) {
				l.Extents = slices.Clone(label.Extents)
			}
		}
	}
	if !newer {
		return
	}
	v.Size, v.ExpandingTo = max(v.Size, grownOnDrives(best, labels)), 0
	if extents, err := t.s.growth(v, v.Size); err == nil {
		for i := range v.Legs {
			v.Legs[i].Extents = extents[i]
		}
	}
}

// unseen lists the legs of a volume whose drives have not been read since the
// start, and may still be.
func (s *State) unseen(v *Volume) (legs []*Leg) {
	for i := range v.Legs {
		l := &v.Legs[i]
		if n := s.nodes[l.Node]; n != nil && n.ConfirmedDead {
			continue
		}
		if d, ok := s.driveReport(l); !ok || d.Error != "" {
			legs = append(legs, l)
		}
	}
	return legs
}

func (s *State) unseenText(v *Volume) string {
	var names []string
	for _, l := range s.unseen(v) {
		names = append(names, l.String())
	}
	return some(names, 8)
}

func (s *State) driveReport(l *Leg) (DriveReport, bool) {
	on := s.targets[l.Node]
	if on == nil {
		return DriveReport{}, false
	}
	d, ok := on.drives[l.Drive]
	return d, ok
}

// newestLabel is the newest of the labels of a volume's legs, and which legs have one.
func (s *State) newestLabel(v *Volume) (best VolumeLabel, found map[block.LegID]bool) {
	found = map[block.LegID]bool{}
	for i := range v.Legs {
		d, _ := s.driveReport(&v.Legs[i])
		for _, label := range d.Legs {
			if label.Leg != v.Legs[i].ID {
				continue
			}
			found[label.Leg] = true
			if label.Volume.Generation > best.Generation {
				best = label.Volume
			}
		}
	}
	return best, found
}

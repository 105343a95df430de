// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
)

// A drive's label has room for the records of some thousand legs. The largest size that a
// leg's record can reach is reserved when the leg is placed, and again when its volume grows
// or gets labels. So even a full label can record a new epoch, which is the fence, and every
// in-sync set.

// record describes a leg's record at its largest. It always has room for a file system's
// name, which may be added to the labels at any time.
func (v *Volume) record(l *Leg) block.LegRecord {
	r := recordOf(v.Layout, v.kept(), string(v.Name), v.Pool, v.Spread)
	r.Runs = len(l.Extents)
	return r
}

func recordOf(layout block.Layout, labels map[string]string, names ...string) block.LegRecord {
	r := block.LegRecord{Legs: layout.MostLegs(), Runs: 1, Labels: len(labels) + 1, Text: len(formattedLabel) + mostFormatted}
	for _, name := range names {
		r.Text += len(name)
	}
	for key, value := range labels {
		r.Text += len(key) + len(value)
	}
	return r
}

// record is the same for a leg of the requested volume, with its extents in one piece.
func (in CreateVolume) record(layout block.Layout) block.LegRecord {
	return recordOf(layout, in.Labels, string(in.Name), in.Pool, in.Spread)
}

// labelRecord is the same for a leg that is on a label.
func labelRecord(l *evidence.LegLabel) block.LegRecord {
	v := &l.Volume
	r := recordOf(v.Layout, v.Labels, string(v.Name), v.Pool, v.Spread)
	r.Runs = len(l.Extents)
	return r
}

// labelRoom is the room on a drive's label that is left for the records of more legs.
func (s *State) labelRoom(d *Drive) block.Size {
	taken := s.recorded.Get(d.ID)
	if on := s.targets[d.Node]; on != nil {
		taken += on.unknown[d.ID]
	}
	return block.LabelRoom - min(taken, block.LabelRoom)
}

// lacksRoom returns a drive whose label has no room to change a volume from now to next; nil
// if there is none.
func (s *State) lacksRoom(now, next *Volume) *Drive {
	more := map[block.DriveID]int64{}
	for i := range next.Legs {
		more[next.Legs[i].Drive] += int64(next.record(&next.Legs[i]).Size())
	}
	for i := range now.Legs {
		more[now.Legs[i].Drive] -= int64(now.record(&now.Legs[i]).Size())
	}
	for _, id := range sorted(more) {
		if d := s.drives[id]; d != nil && more[id] > 0 && more[id] > int64(s.labelRoom(d)) {
			return d
		}
	}
	return nil
}

// labelFull refuses a change of a volume because a drive's label has no room for it.
func (s *State) labelFull(v *Volume, d *Drive, field string) error {
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonNoSpace, Field: field, Object: v.object(),
		Text: fmt.Sprintf("%s: the label of %s, which describes its %d legs, has no room for this change: %s of %s are left",
			v.object(), d.object(), len(s.onDrive[d.ID]), s.labelRoom(d).Short(), block.LabelRoom.Short()),
	}
	return e.hint("delete volumes with legs there, or remove labels from them")
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// A drive's label has room for the records of some thousand legs. What a record can
// come to take is reserved when a leg is placed, and again when its volume grows or
// gets labels: a label that is full can then still take an epoch, which is the fence,
// and every in-sync set.

// record is the largest that a leg's record can become. A file system's name may
// come to stand among the labels at any time.
func (v *Volume) record(l *Leg) block.LegRecord {
	r := recordOf(v.Layout, v.kept(), string(v.Name), v.Pool, v.Spread)
	r.Runs = len(l.Extents)
	return r
}

func recordOf(layout block.Layout, labels map[string]string, names ...string) block.LegRecord {
	r := block.LegRecord{Legs: layout.Legs(), Runs: 1, Labels: len(labels) + 1, Text: len(formattedLabel) + mostFormatted}
	for _, name := range names {
		r.Text += len(name)
	}
	for key, value := range labels {
		r.Text += len(key) + len(value)
	}
	return r
}

// record is the same of a leg in one piece, of a volume that is to be made.
func (in CreateVolume) record(layout block.Layout) block.LegRecord {
	return recordOf(layout, in.Labels, string(in.Name), in.Pool, in.Spread)
}

// record is the largest that the record of a leg on a label can become.
func (l *LegLabel) record() block.LegRecord {
	v := &l.Volume
	r := recordOf(v.Layout, v.Labels, string(v.Name), v.Pool, v.Spread)
	r.Runs = len(l.Extents)
	return r
}

// labelRoom is how much of a drive's label is left for the records of other legs.
func (s *State) labelRoom(d *Drive) block.Size {
	taken := s.recorded[d.ID]
	if on := s.targets[d.Node]; on != nil {
		taken += on.unknown[d.ID]
	}
	return block.LabelRoom - min(taken, block.LabelRoom)
}

// lacksRoom names a drive whose label has no room for a volume as it is to be, next
// to what it takes there now; nil if there is none.
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

// labelFull refuses a change of a volume for want of room on a drive's label.
func (s *State) labelFull(v *Volume, d *Drive, field string) error {
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonNoSpace, Field: field, Object: v.object(),
		Text: fmt.Sprintf("%s: the label of %s, which describes its %d legs, has no room for this change: %s of %s are left",
			v.object(), d.object(), len(s.onDrive[d.ID]), s.labelRoom(d).Short(), block.LabelRoom.Short()),
	}
	return e.hint("delete volumes with legs there, or remove labels from them")
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cow"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// lists are the lists of a report, by what their entries are about.
type lists struct {
	legs       map[block.LegID]LegReport
	drives     map[block.DriveID]DriveReport // without labels
	labels     map[block.DriveID]map[block.LegID]evidence.LegLabel
	admissions map[block.VolumeID]Admission
	exports    map[block.NQN]ExportReport
}

func listsOf(r *TargetReport) lists {
	l := lists{map[block.LegID]LegReport{}, map[block.DriveID]DriveReport{}, map[block.DriveID]map[block.LegID]evidence.LegLabel{}, map[block.VolumeID]Admission{}, map[block.NQN]ExportReport{}}
	for _, x := range r.Legs {
		l.legs[x.Leg] = x
	}
	for _, d := range r.Drives {
		for _, x := range d.Legs {
			put(l.labels, d.Drive, x.Leg, x)
		}
		d.Legs = nil
		l.drives[d.Drive] = d
	}
	for _, x := range r.Admissions {
		l.admissions[x.Volume] = x
	}
	for _, x := range r.Exports {
		l.exports[x.NQN] = x
	}
	return l
}

// news returns the values that differ from those before, and the keys that are gone.
func news[K comparable, V any](was, is map[K]V) (changed []V, gone []K) {
	for key, v := range is {
		if old, had := was[key]; !had || !reflect.DeepEqual(old, v) {
			changed = append(changed, v)
		}
	}
	for key := range was {
		if _, has := is[key]; !has {
			gone = append(gone, key)
		}
	}
	return changed, gone
}

// since returns the report as its difference from the one before.
func (in TargetReported) since(before *TargetReport) TargetReported {
	was, is := listsOf(before), listsOf(&in.Report)
	c, r := &in.Change, &in.Report
	c.Partial = true
	c.Labels, c.Gone.Labels = map[block.DriveID][]evidence.LegLabel{}, map[block.DriveID][]block.LegID{}
	r.Legs, c.Gone.Legs = news(was.legs, is.legs)
	r.Drives, c.Gone.Drives = news(was.drives, is.drives)
	r.Admissions, c.Gone.Admissions = news(was.admissions, is.admissions)
	r.Exports, c.Gone.Exports = news(was.exports, is.exports)
	for id := range was.labels {
		put(is.labels, id, block.LegID{}, evidence.LegLabel{})
		delete(is.labels[id], block.LegID{})
	}
	for id := range is.labels {
		c.Labels[id], c.Gone.Labels[id] = news(was.labels[id], is.labels[id])
	}
	return in
}

// misheard compares what is known of a target with its whole report.
func (s *State) misheard(in TargetReported) string {
	known := s.targets[in.Report.Node]
	if known == nil || known.session != in.Session {
		return ""
	}
	at := *known // the step has changed records since it compared them with the labels
	on := &at
	on.compared = maps.Clone(on.compared)
	s.compare(on)
	twin := &target{by: new(cow.Writer)}
	twin.observe(&in.Report, &Change{})
	s.compare(twin)
	for what, pair := range map[string][2]any{
		"legs": {maps.Collect(on.legs.All()), maps.Collect(twin.legs.All())}, "labelled": {maps.Collect(on.labelled.All()), maps.Collect(twin.labelled.All())},
		"admitted": {maps.Collect(on.admitted.All()), maps.Collect(twin.admitted.All())}, "exported": {maps.Collect(on.exported.All()), maps.Collect(twin.exported.All())},
		"exports": {maps.Collect(on.exports.All()), maps.Collect(twin.exports.All())}, "drives": {on.inOrder(), twin.inOrder()},
		"strays": {byPlace(on.strays), byPlace(twin.strays)}, "unknown": {on.unknown, twin.unknown},
	} {
		if !reflect.DeepEqual(pair[0], pair[1]) {
			return fmt.Sprintf("%s: of %s are known\n%+v\nand reported\n%+v", in.Report.Node, what, pair[0], pair[1])
		}
	}
	return ""
}

func (on *target) inOrder() map[block.DriveID]DriveReport {
	all := maps.Clone(on.drives)
	for id, d := range all {
		d.Legs = slices.SortedFunc(slices.Values(d.Legs), func(a, b evidence.LegLabel) int { return bytes.Compare(a.Leg.UUID[:], b.Leg.UUID[:]) })
		all[id] = d
	}
	return all
}

func byPlace(strays map[block.DriveID][]image.Extent) map[block.DriveID][]image.Extent {
	all := map[block.DriveID][]image.Extent{}
	for id, x := range strays {
		all[id] = slices.SortedFunc(slices.Values(x), func(a, b image.Extent) int { return cmp.Compare(a.Start, b.Start) })
	}
	return all
}

// A difference of a report that this manager does not have leads nowhere.
func TestADifferenceOfAnUnknownReportIsRefused(t *testing.T) {
	s, _ := New(testCluster())
	in := TargetReported{Session: 3, Report: TargetReport{Node: "t1", BootID: "b"}, Change: Change{Partial: true}}
	if _, err := s.Step(t0, in); err == nil {
		t.Error("a difference of nothing was accepted")
	}
	whole := in
	whole.Change = Change{}
	if _, err := s.Step(t0, whole); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Step(t0, in); err != nil {
		t.Errorf("a difference of the last report = %v", err)
	}
	in.Session++
	if _, err := s.Step(t0, in); err == nil {
		t.Error("a difference of another session's report was accepted")
	}
}

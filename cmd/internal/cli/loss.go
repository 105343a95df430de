// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/pb"
)

// LostThings lists what would be lost.
func LostThings(x *pb.WhatIfResponse) (all []string) {
	if nodes := x.GetNodes(); len(nodes) > 0 {
		all = append(all, fmt.Sprintf("%s: %s", Nouns(len(nodes), "node"), strings.Join(nodes, ", ")))
	}
	all = append(all, fmt.Sprintf("%s, with %s of %s", Nouns(len(x.GetDriveIds()), "drive"),
		Nouns(int(x.GetLegsLost()), "leg"), Nouns(len(x.GetVolumes())+int(x.GetVolumesLeftOut()), "volume")))
	var hosts []string
	for _, a := range x.GetAttachments() {
		hosts = append(hosts, fmt.Sprintf("%s on %s", a.GetVolumeName(), a.GetNode()))
	}
	if n := len(hosts) + int(x.GetAttachmentsLeftOut()); n > 0 {
		all = append(all, fmt.Sprintf("%s: %s", Nouns(n, "attachment"), strings.Join(hosts[:min(8, len(hosts))], ", ")))
	}
	return all
}

// LossSummary says in a few lines what a loss leads to, the worst first.
func LossSummary(x *pb.WhatIfResponse) (all []string) {
	say := func(n int, format string, values ...any) {
		if n > 0 {
			all = append(all, fmt.Sprintf(format, values...))
		}
	}
	lost, stopped := int(x.GetVolumesLosingData()), int(x.GetVolumesUnavailable())
	say(lost, "%s would lose data: no copy in sync is left", Nouns(lost, "volume"))
	say(stopped, "%s would stop until another copy is back", Nouns(stopped, "volume"))
	degraded, without := int(x.GetVolumesDegraded()), int(x.GetLegsWithoutPlace())
	say(degraded, "%s would be degraded, and stay in service", Nouns(degraded, "volume"))
	again := int(x.GetLegsLost()) - without
	when := "once an operator confirms the loss"
	if after := x.GetReplaceAfter(); after != nil {
		when = "after " + strings.TrimSuffix(after.AsDuration().String(), "0s")
	}
	say(again, "%s would be made again elsewhere %s: %s to copy", Nouns(again, "leg"), when, Size(x.GetCopiedBytes()))
	say(without, "%s would not be made again", Nouns(without, "leg"))
	if len(all) == 0 {
		return []string{"no volume would be affected"}
	}
	return all
}

// LossWord says what a loss leaves of a volume.
func LossWord(v *pb.VolumeLoss) string {
	if v.GetDataLost() {
		return "data lost"
	}
	return pb.Word(v.GetAfter())
}

// Remade says how many of a volume's lost legs are made again and where, and what their copies
// wait for.
func Remade(v *pb.VolumeLoss) (again, waits string) {
	var to []string
	for _, l := range v.GetLegs() {
		if l.GetTo() != "" {
			to = append(to, l.GetTo())
		}
	}
	again = fmt.Sprintf("%d of %d", len(to), len(v.GetLegs()))
	if len(to) == 0 {
		return again, ""
	}
	slices.Sort(to)
	return again + " on " + strings.Join(slices.Compact(to), ","), v.GetCopyWaitsFor()
}

// Unplaced lists the legs that are not made again, and why.
func Unplaced(x *pb.WhatIfResponse) (all []string) {
	for _, v := range x.GetVolumes() {
		for _, l := range v.GetLegs() {
			if l.GetTo() == "" {
				all = append(all, fmt.Sprintf("%s leg %d.%d on %s: %s", v.GetVolumeName(), l.GetColumn(), l.GetCopy(), l.GetNode(), l.GetWhy()))
			}
		}
	}
	return all
}

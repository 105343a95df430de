// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
)

// fillReport writes the observed state and the plan's conclusions into a report. The report shares
// no memory with them that is changed later.
func fillReport(report *pb.TargetReport, s seen, p plan, legDir string, zeroed map[block.LegID]progress) {
	for _, d := range s.devices {
		report.Devices = append(report.Devices, proto.CloneOf(d))
	}
	for id, d := range s.drives {
		report.Drives = append(report.Drives, driveReport(id, d))
	}
	report.Drives = sortedBy(report.Drives, (*pb.DriveReport).GetDriveId)
	report.ClusterId = oneCluster(report.Drives)
	report.Authenticates, report.Refusals, report.Integrity = s.authenticates, s.refusals, s.integrity && !s.beside
	report.KernelMaps = s.kernelMaps
	for _, l := range p.legs {
		l = proto.CloneOf(l)
		if id, err := block.ParseLegID(l.GetLegId()); err == nil {
			l.CopiedBytes = uint64(zeroed[id].copied)
			if l.GetZeroedBytes() == 0 {
				l.ZeroedBytes = uint64(zeroed[id].upTo)
			}
		}
		report.Legs = append(report.Legs, l)
	}
	report.Legs = sortedBy(report.Legs, (*pb.LegReport).GetLegId)
	for v, e := range p.admissions {
		report.Admissions = append(report.Admissions, &pb.Admission{VolumeId: v.String(), Epoch: uint64(e)})
	}
	report.Admissions = sortedBy(report.Admissions, (*pb.Admission).GetVolumeId)
	if s.exports == nil {
		return
	}
	want := merged(p.exports, p.process)
	for _, have := range s.exports.Subsystems {
		if have.NQN.Ours() {
			report.Exports = append(report.Exports, exportReport(have, s, want, legDir))
		}
	}
	// The manager takes an export that is not there for one that was given up.
	missing := func(next nvmet.Subsystem) {
		if _, exists := s.exports.Subsystem(next.NQN); !exists {
			report.Exports = append(report.Exports, exportReport(next, s, want, legDir))
		}
	}
	for n := range s.replacing {
		if next, wanted := want.Subsystem(n); wanted {
			missing(next)
		}
	}
	for _, next := range p.between {
		missing(next)
	}
	report.Exports = sortedBy(report.Exports, (*pb.ExportReport).GetNqn)
}

func sortedBy[T any](list []T, key func(T) string) []T {
	slices.SortFunc(list, func(a, b T) int { return cmp.Compare(key(a), key(b)) })
	return list
}

// identity changes whenever unflushed writes may have been lost.
func (d driveSeen) identity() string {
	if d.sequence == "" {
		return fmt.Sprint(d.incarnation)
	}
	return fmt.Sprintf("%d.%s", d.incarnation, d.sequence)
}

func driveReport(id block.DriveID, d driveSeen) *pb.DriveReport {
	r := &pb.DriveReport{
		DriveId: id.String(), ClusterId: d.label.Cluster.String(), Device: d.device,
		Extents: uint32(drive.Extents(d.label.Size)), LabelGeneration: d.label.Generation, Error: d.err,
		Incarnation: d.identity(), Reserve: d.label.Reserve,
	}
	for _, t := range d.label.Trees {
		r.Trees = append(r.Trees, proto.CloneOf(t))
	}
	for _, l := range d.label.Legs {
		r.Legs = append(r.Legs, legOnLabel(l))
	}
	return r
}

// legOnLabel is what the report says of a leg's record. One that is going back is reported as not zeroed:
// managers of earlier versions do not know that a leg can go back, and would take it for done.
func legOnLabel(record *pb.LegLabel) *pb.LegLabel {
	record = proto.CloneOf(record)
	record.Zeroed = drive.Ready(record)
	return record
}

// oneCluster returns the cluster of the drives, if all agree.
func oneCluster(drives []*pb.DriveReport) string {
	if len(drives) == 0 {
		return ""
	}
	first := drives[0].GetClusterId()
	for _, d := range drives {
		if d.GetClusterId() != first {
			return ""
		}
	}
	return first
}

// exportReport counts a draining namespace as exported: the kernel shows it as disabled from the
// start of the drain.
func exportReport(have nvmet.Subsystem, s seen, want nvmet.Config, legDir string) *pb.ExportReport {
	r := &pb.ExportReport{Nqn: string(have.NQN)}
	for _, ns := range have.Namespaces {
		reachable := ns.Enabled || s.busy(have.NQN)
		if leg, ours := legOf(legDir, ns.Device); ours && reachable {
			r.LegIds = append(r.LegIds, leg.String())
		}
	}
	slices.Sort(r.LegIds)
	r.Ready = exportReady(have, *s.exports, want)
	return r
}

// exportReady reports whether a host finds everything it should in the export, through at least one
// portal; the other portals may be in trouble.
func exportReady(have nvmet.Subsystem, got, want nvmet.Config) bool {
	w, wanted := want.Subsystem(have.NQN)
	if !wanted || !got.Linked(have.NQN) {
		return false
	}
	for _, ns := range w.Namespaces {
		if !slices.Contains(have.Namespaces, ns) {
			return false
		}
	}
	for _, h := range w.AllowedHosts {
		if !slices.Contains(have.AllowedHosts, h) {
			return false
		}
	}
	return true
}

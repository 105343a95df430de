// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/pb"
)

// A target's report goes to the manager as its difference from the one before, too. The
// manager does not put the whole together again: it takes the entries that have changed, and
// the names of those that are gone. It keeps only the hash of each piece, for the sum. If
// that differs it ends the stream, and the next one begins with the whole report.

// The kinds of pieces of a report; a key is a kind and what the piece is about. A label is
// that of a leg on a drive.
const (
	legKind       = "leg/"
	labelKind     = "label/" // then drive/leg
	driveKind     = "drive/"
	admissionKind = "admission/"
	exportKind    = "export/"
)

// Gone names the entries of a report that are not there any more.
type Gone struct {
	Legs, Drives, Admissions, Exports []string
	Labels                            [][2]string // a drive and a leg
}

// Change says how a received report relates to the one before.
type Change struct {
	// Partial: Drives, Legs, Admissions and Exports list only what has changed. A drive with
	// legs stands for those labels alone, and another one for all but its labels.
	Partial bool
	Gone    Gone
}

// cutReport cuts a report into pieces, in the order of its lists; ok is false for a message
// that is sent whole. The head holds all but the four lists. Entries that are the same as last
// time are left out: there may be thousands, of which few change.
func cutReport(m proto.Message, same func(of any) bool) (head *pb.TargetReport, pieces []Piece[*pb.TargetReport], ok bool) {
	r, ok := m.(*pb.TargetReport)
	if !ok {
		return nil, nil, false
	}
	at := map[string]int{}
	add := func(key string, of any, content func(*pb.TargetReport)) {
		if i, twice := at[key]; twice {
			first := pieces[i].fill
			pieces[i].of, pieces[i].fill = nil, func(r *pb.TargetReport) { first(r); content(r) }
			return
		}
		at[key] = len(pieces)
		pieces = append(pieces, Piece[*pb.TargetReport]{Key: key, of: of, fill: content})
	}
	for _, l := range r.Legs {
		if !same(l) {
			add(legKind+l.LegId, l, func(r *pb.TargetReport) { r.Legs = append(r.Legs, l) })
		}
	}
	for _, d := range r.Drives {
		add(driveKind+d.DriveId, nil, func(r *pb.TargetReport) { r.Drives = append(r.Drives, withoutLabels(d)) })
		for _, l := range d.Legs {
			if !same(l) {
				add(labelKind+d.DriveId+"/"+l.LegId, l, func(r *pb.TargetReport) {
					r.Drives = append(r.Drives, &pb.DriveReport{DriveId: d.DriveId, Legs: []*pb.LegLabel{l}})
				})
			}
		}
	}
	for _, a := range r.Admissions {
		if !same(a) {
			add(admissionKind+a.VolumeId, a, func(r *pb.TargetReport) { r.Admissions = append(r.Admissions, a) })
		}
	}
	for _, x := range r.Exports {
		if !same(x) {
			add(exportKind+x.Nqn, x, func(r *pb.TargetReport) { r.Exports = append(r.Exports, x) })
		}
	}
	head = &pb.TargetReport{
		Node: r.Node, Labels: r.Labels, BootId: r.BootId, Version: r.Version, Kernel: r.Kernel, Portals: r.Portals, ProcessPortals: r.ProcessPortals, ClusterId: r.ClusterId,
		Generation: r.Generation, Devices: r.Devices, Problems: r.Problems, Term: r.Term, TermClusterId: r.TermClusterId,
		Stopping: r.Stopping, ProcessStops: r.ProcessStops, Authenticates: r.Authenticates, Refusals: r.Refusals, Integrity: r.Integrity, Level: r.Level,
		HandsOver: r.HandsOver, Thin: r.Thin, Snapshots: r.Snapshots, PlainSnapshots: r.PlainSnapshots, Copies: r.Copies, KernelMaps: r.KernelMaps,
	}
	return head, pieces, true
}

// joinDrives puts the labels of a whole report back to their drives.
func joinDrives(all []*pb.DriveReport) (joined []*pb.DriveReport) {
	at := map[string]*pb.DriveReport{}
	for _, d := range all {
		if len(d.Legs) > 0 && at[d.DriveId] != nil {
			at[d.DriveId].Legs = append(at[d.DriveId].Legs, d.Legs...)
			continue
		}
		at[d.DriveId] = d
		joined = append(joined, d)
	}
	return joined
}

func withoutLabels(d *pb.DriveReport) *pb.DriveReport {
	return &pb.DriveReport{
		DriveId: d.DriveId, ClusterId: d.ClusterId, Device: d.Device, Extents: d.Extents, LabelGeneration: d.LabelGeneration,
		Error: d.Error, Incarnation: d.Incarnation, Trees: d.Trees, Reserve: d.Reserve,
	}
}

// sums is what a manager keeps of a report: the number of the newest difference, and the
// hash of each piece.
type sums struct {
	number uint64
	hashes map[string]uint64
	sum    uint64
}

// apply returns the changed entries of a difference.
func (s *sums) apply(m *pb.TargetReport) (*pb.TargetReport, Change, error) {
	d := m.GetScale().GetDifference()
	if d.From == 0 {
		*s = sums{hashes: map[string]uint64{}}
	} else if d.From != s.number {
		return nil, Change{}, status.Errorf(codes.Aborted, "TargetReport: a difference from number %d, but %d was the last", d.From, s.number)
	}
	change := Change{Partial: d.From != 0}
	r := m
	r.Scale = Understood()
	for _, p := range d.Pieces {
		s.sum -= s.hashes[p.Key]
		if len(p.Content) == 0 {
			delete(s.hashes, p.Key)
			change.Gone.add(p.Key)
			continue
		}
		s.hashes[p.Key] = hash(p.Key, p.Content)
		s.sum += s.hashes[p.Key]
		if err := (proto.UnmarshalOptions{Merge: true}).Unmarshal(p.Content, r); err != nil {
			return nil, Change{}, status.Errorf(codes.InvalidArgument, "TargetReport in pieces: %v", err)
		}
	}
	if !change.Partial {
		r.Drives = joinDrives(r.Drives)
	}
	if s.number = d.To; s.sum != d.Sum {
		return nil, Change{}, status.Error(codes.Aborted, "TargetReport: a difference leads to another report here: send the whole")
	}
	return r, change, nil
}

func (g *Gone) add(key string) {
	kind, name, _ := strings.Cut(key, "/")
	switch kind + "/" {
	case legKind:
		g.Legs = append(g.Legs, name)
	case driveKind:
		g.Drives = append(g.Drives, name)
	case admissionKind:
		g.Admissions = append(g.Admissions, name)
	case exportKind:
		g.Exports = append(g.Exports, name)
	case labelKind:
		drive, leg, _ := strings.Cut(name, "/")
		g.Labels = append(g.Labels, [2]string{drive, leg})
	}
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
)

// A wanted state is cut into one piece for each volume, and one for all drives, since few
// drives are listed. An agent that takes differences gets the pieces that have changed.

// drivesKey is the key of the piece with the drives. The others have volumes' ids.
const drivesKey = "drives"

// pieces are the pieces of a wanted state by their keys.
type pieces[M parts.State] map[string]M

// list returns the pieces to send: all there are and, of the volumes that have changed, also
// those that are gone.
func (p pieces[M]) list(changed map[block.VolumeID]bool) (all []parts.Piece[M]) {
	for key, m := range p {
		all = append(all, parts.Piece[M]{Key: key, State: m})
	}
	for id := range changed {
		if _, there := p[id.String()]; !there {
			all = append(all, parts.Piece[M]{Key: id.String()})
		}
	}
	return all
}

func cutTarget(w *pb.TargetWanted) (head *pb.TargetWanted, all pieces[*pb.TargetWanted]) {
	all = pieces[*pb.TargetWanted]{drivesKey: {Drives: w.Drives, Space: w.Space}}
	piece := func(volume string) *pb.TargetWanted {
		if all[volume] == nil {
			all[volume] = &pb.TargetWanted{}
		}
		return all[volume]
	}
	for _, l := range w.Legs {
		p := piece(l.Volume.VolumeId)
		p.Legs = append(p.Legs, l)
	}
	for _, a := range w.Admissions {
		p := piece(a.VolumeId)
		p.Admissions = append(p.Admissions, a)
	}
	for _, x := range w.Exports {
		p := piece(x.VolumeId)
		p.Exports = append(p.Exports, x)
	}
	for _, d := range w.Discovery {
		p := piece(d.VolumeId)
		p.Discovery = append(p.Discovery, d)
	}
	return &pb.TargetWanted{Generation: w.Generation, ClusterId: w.ClusterId, Term: w.Term, MayStop: w.MayStop, Discovers: w.Discovers}, all
}

func cutInitiator(w *pb.InitiatorWanted) (head *pb.InitiatorWanted, all pieces[*pb.InitiatorWanted]) {
	all = pieces[*pb.InitiatorWanted]{}
	for _, a := range w.Attachments {
		all[a.VolumeId] = &pb.InitiatorWanted{Attachments: []*pb.WantedAttachment{a}}
	}
	return &pb.InitiatorWanted{Generation: w.Generation, ClusterId: w.ClusterId, Term: w.Term}, all
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"google.golang.org/protobuf/types/known/durationpb"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
)

func pbScrub(c *cluster.Scrub) *pb.VolumeScrub {
	if c == nil {
		return nil
	}
	return &pb.VolumeScrub{
		Began: pbTime(c.Began), Ended: pbTime(c.Ended), Stopped: c.Stopped, Found: uint64(c.Found),
		DoneBytes: uint64(c.Done), TotalBytes: uint64(c.Total), AloneBytes: uint64(c.Alone),
		BytesPerSecond: uint64(c.Rate), Paused: c.Paused, Repair: c.Repair, Repaired: uint64(c.Repaired), Scheduled: c.Scheduled, From: list(c.From, pbPlace),
	}
}

func pbPlace(l cluster.ScrubLeg) *pb.Place {
	return &pb.Place{Column: uint32(l.Column), Copy: uint32(l.Copy)}
}

func fromPlace(p *pb.Place) cluster.ScrubLeg {
	return cluster.ScrubLeg{Column: int(p.Column), Copy: int(p.Copy)}
}

func fromScrubRequest(r *pb.ScrubVolumeRequest) cluster.ScrubVolume {
	return cluster.ScrubVolume{
		Volume: r.Volume, Rate: block.Size(r.BytesPerSecond), Stop: r.Stop, Pause: r.Pause, Resume: r.Resume,
		Repair: r.Repair, From: list(r.From, fromPlace), Seed: newSeed(),
	}
}

func pbWantedScrub(c *cluster.WantedScrub) *pb.Scrub {
	if c == nil {
		return nil
	}
	return &pb.Scrub{
		Id: c.ID, BytesPerSecond: uint64(c.Rate), Repair: c.Repair, From: list(c.From, pbPlace),
		Begin: &pb.ScrubPosition{Column: uint32(c.Begin.Column), Offset: uint64(c.Begin.Off)}, Run: c.Run, Recorded: uint64(c.Recorded),
	}
}

func fromScrubReport(r *pb.ScrubReport) *cluster.ScrubReport {
	if r == nil {
		return nil
	}
	out := &cluster.ScrubReport{
		ID: r.Id, Run: r.Run, Done: r.Done, Repairs: r.Repairs, Compared: block.Size(r.DoneBytes), Total: block.Size(r.TotalBytes),
		Position:    cluster.ScrubPosition{Column: int(r.GetPosition().GetColumn()), Off: block.Size(r.GetPosition().GetOffset())},
		ScrubCounts: cluster.ScrubCounts{Found: int(r.Found), Settled: int(r.Settled), Repaired: int(r.Repaired), Alone: block.Size(r.AloneBytes)},
	}
	out.Findings = list(r.Findings, fromFinding)
	return out
}

func fromFinding(f *pb.ScrubFinding) cluster.ScrubFinding {
	finding := cluster.ScrubFinding{
		Column: int(f.Column), Off: block.Size(f.Offset), Length: block.Size(f.Length), Unreadable: fromCopies(f.Unreadable),
		Right: -1, Outcome: fromEnum[cluster.ScrubOutcome](f.Outcome, scrubOutcomePrefix), Error: f.Error,
	}
	if f.Right != nil {
		finding.Right = int(*f.Right)
	}
	for _, g := range f.Equal {
		finding.Equal = append(finding.Equal, fromCopies(g))
	}
	return finding
}

func fromHealReport(r *pb.HealReport) *cluster.HealReport {
	if r == nil {
		return nil
	}
	return &cluster.HealReport{Run: r.Run, Count: r.Count, Failed: r.Failed, Last: list(r.Last, fromFinding)}
}

func fromCopies(c *pb.Copies) []int {
	return list(c.GetCopies(), func(copy uint32) int { return int(copy) })
}

func pbRebuild(r cluster.LegRebuild) *pb.Rebuild {
	out := &pb.Rebuild{
		LegId: r.Leg.String(), Column: uint32(r.Column), Copy: uint32(r.Copy), Node: string(r.Node), DriveId: r.Drive.String(), Replaces: string(r.Replaces),
		Began: pbTime(r.Began), Ended: pbTime(r.Ended), Failed: r.Failed, DoneBytes: uint64(r.Done), TotalBytes: uint64(r.Total), BytesPerSecond: uint64(r.Speed),
	}
	if r.Left > 0 {
		out.Left = durationpb.New(r.Left)
	}
	return out
}

func fromCopyReport(c *pb.CopyReport) (out cluster.CopyReport, err error) {
	out = cluster.CopyReport{Done: block.Size(c.DoneBytes), Total: block.Size(c.TotalBytes), Speed: block.Size(c.BytesPerSecond), What: c.What, WaitingFor: c.WaitingFor}
	out.Leg, err = field("attachments.copies.leg_id", c.LegId, block.ParseLegID)
	return out, err
}

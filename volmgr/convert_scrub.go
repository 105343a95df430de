// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
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
	}
}

func pbWantedScrub(c *cluster.WantedScrub) *pb.Scrub {
	if c == nil {
		return nil
	}
	return &pb.Scrub{Id: c.ID, BytesPerSecond: uint64(c.Rate)}
}

func fromScrubReport(r *pb.ScrubReport) *cluster.ScrubReport {
	if r == nil {
		return nil
	}
	out := &cluster.ScrubReport{
		ID: r.Id, Done: r.Done, Compared: block.Size(r.DoneBytes), Total: block.Size(r.TotalBytes), Alone: block.Size(r.AloneBytes), Found: int(r.Found),
	}
	for _, f := range r.Findings {
		finding := cluster.ScrubFinding{Column: int(f.Column), Off: block.Size(f.Offset), Length: block.Size(f.Length), Unreadable: fromCopies(f.Unreadable)}
		for _, g := range f.Equal {
			finding.Equal = append(finding.Equal, fromCopies(g))
		}
		out.Findings = append(out.Findings, finding)
	}
	return out
}

func fromCopies(c *pb.Copies) []int {
	return list(c.GetCopies(), func(copy uint32) int { return int(copy) })
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// The planner's phases, link states and reasons are the words of the wire's enumerations, which
// pb.Value finds.

// Report turns a verdict into the report on an attachment; device and legs are left out.
func Report(v volume.Verdict, id block.VolumeID, epoch block.Epoch, grant uint64) *pb.AttachmentReport {
	r := &pb.AttachmentReport{
		VolumeId: id.String(), Epoch: uint64(epoch), Grant: grant, Phase: pb.Value[pb.AttachmentPhase](string(v.Phase)),
		WaitingFor: strings.Join(v.Waiting, "; "), ResyncDoneBytes: uint64(v.Done), ResyncTotalBytes: uint64(v.Total),
	}
	for _, h := range v.Holds {
		r.Holds = append(r.Holds, &pb.HoldReport{Id: h.ID, State: pb.Value[pb.HoldState](string(h.State)), FsFrozen: h.Frozen, Error: h.Error})
	}
	r.Scrub, r.Scrubs, r.Heals = scrubReport(v.Scrub), true, healReport(v.Heals)
	for _, c := range v.Copies {
		r.Copies = append(r.Copies, &pb.CopyReport{LegId: c.Leg.String(), DoneBytes: uint64(c.Done), TotalBytes: uint64(c.Total), BytesPerSecond: uint64(c.Speed), What: c.What, WaitingFor: c.Waiting})
	}
	if v.GaveUp != nil {
		r.GaveUp = &pb.GaveUp{Why: v.GaveUp.Why, WritesLost: v.GaveUp.WritesLost, Reason: pb.Value[pb.GiveUpReason](string(v.GaveUp.Reason))}
	}
	return r
}

func scrubReport(s *volume.ScrubSeen) *pb.ScrubReport {
	if s == nil {
		return nil
	}
	r := &pb.ScrubReport{
		Id: s.ID, Done: s.Done, DoneBytes: uint64(s.Compared), TotalBytes: uint64(s.Total), AloneBytes: uint64(s.Alone), Found: uint64(s.Found),
		Run: s.Run, Repairs: s.Repairs, Settled: uint64(s.Settled), Repaired: uint64(s.Repaired),
		Position: &pb.ScrubPosition{Column: uint32(s.Position.Column), Offset: uint64(s.Position.Off)},
	}
	for _, f := range s.FirstFound {
		r.Findings = append(r.Findings, finding(f))
	}
	return r
}

func finding(f volume.ScrubFinding) *pb.ScrubFinding {
	out := &pb.ScrubFinding{
		Column: uint32(f.Column), Offset: uint64(f.Off), Length: uint64(f.Length),
		Outcome: pb.Value[pb.ScrubOutcome](string(f.Outcome)), Error: f.Error,
	}
	if f.Right >= 0 {
		out.Right = proto.Uint32(uint32(f.Right))
	}
	for _, g := range f.Equal {
		out.Equal = append(out.Equal, copies(g))
	}
	if len(f.Unreadable) > 0 {
		out.Unreadable = copies(f.Unreadable)
	}
	return out
}

func healReport(h *volume.HealsSeen) *pb.HealReport {
	if h == nil {
		return nil
	}
	r := &pb.HealReport{Run: h.Run, Count: uint64(h.Count), Failed: uint64(h.Failed)}
	for _, f := range h.Last {
		r.Last = append(r.Last, finding(f))
	}
	return r
}

func copies(all []int) *pb.Copies {
	out := &pb.Copies{}
	for _, copy := range all {
		out.Copies = append(out.Copies, uint32(copy))
	}
	return out
}

func sameHold(a, b *pb.HoldReport) bool {
	return a.GetId() == b.GetId() && a.GetState() == b.GetState() && a.GetFsFrozen() == b.GetFsFrozen() && a.GetError() == b.GetError()
}

func scrubNews(a, b *pb.ScrubReport) bool {
	return a.GetRun() != b.GetRun() || a.GetFound() != b.GetFound() || a.GetSettled() != b.GetSettled() || a.GetDone() != b.GetDone()
}

// News reports whether b differs from a in something that the manager must hear at once.
func News(a, b *pb.AttachmentReport) bool {
	return a.GetGrant() != b.GetGrant() || a.GetPhase() != b.GetPhase() || a.GetWaitingFor() != b.GetWaitingFor() ||
		a.GetGaveUp().GetWhy() != b.GetGaveUp().GetWhy() || !slices.EqualFunc(a.GetHolds(), b.GetHolds(), sameHold) ||
		!slices.Equal(a.GetInUse().GetLegIds(), b.GetInUse().GetLegIds()) ||
		scrubNews(a.GetScrub(), b.GetScrub()) || a.GetHeals().GetRun() != b.GetHeals().GetRun() || a.GetHeals().GetCount() != b.GetHeals().GetCount() ||
		a.GetDevice() != b.GetDevice() || a.GetDeviceNumber() != b.GetDeviceNumber() || a.GetSizeBytes() != b.GetSizeBytes()
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"slices"
	"strings"

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
		r.Holds = append(r.Holds, &pb.HoldReport{Id: h.ID, State: pb.Value[pb.HoldState](string(h.State))})
	}
	if v.GaveUp != nil {
		r.GaveUp = &pb.GaveUp{Why: v.GaveUp.Why, WritesLost: v.GaveUp.WritesLost, Reason: pb.Value[pb.GiveUpReason](string(v.GaveUp.Reason))}
	}
	return r
}

func sameHold(a, b *pb.HoldReport) bool {
	return a.GetId() == b.GetId() && a.GetState() == b.GetState()
}

// News reports whether b differs from a in something that the manager must hear at once.
func News(a, b *pb.AttachmentReport) bool {
	return a.GetGrant() != b.GetGrant() || a.GetPhase() != b.GetPhase() || a.GetWaitingFor() != b.GetWaitingFor() ||
		a.GetGaveUp().GetWhy() != b.GetGaveUp().GetWhy() || !slices.EqualFunc(a.GetHolds(), b.GetHolds(), sameHold) ||
		a.GetDevice() != b.GetDevice() || a.GetDeviceNumber() != b.GetDeviceNumber() || a.GetSizeBytes() != b.GetSizeBytes()
}

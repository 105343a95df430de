// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"strings"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// phases maps the phases to those on the wire.
var phases = map[volume.Phase]pb.AttachmentPhase{
	volume.Connecting:      pb.AttachmentPhase_ATTACHMENT_PHASE_CONNECTING,
	volume.Equalizing:      pb.AttachmentPhase_ATTACHMENT_PHASE_EQUALIZING,
	volume.Serving:         pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING,
	volume.Stalled:         pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED,
	volume.Detaching:       pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING,
	volume.DetachedClean:   pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN,
	volume.DetachedUnclean: pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_UNCLEAN,
}

// Report turns a verdict into the report on an attachment; device and legs are left out.
func Report(v volume.Verdict, id block.VolumeID, epoch block.Epoch, grant uint64) *pb.AttachmentReport {
	r := &pb.AttachmentReport{
		VolumeId: id.String(), Epoch: uint64(epoch), Grant: grant, Phase: phases[v.Phase],
		WaitingFor: strings.Join(v.Waiting, "; "), ResyncDoneBytes: uint64(v.Done), ResyncTotalBytes: uint64(v.Total),
	}
	if v.GaveUp != nil {
		r.GaveUp = &pb.GaveUp{Why: v.GaveUp.Why, WritesLost: v.GaveUp.WritesLost}
	}
	return r
}

// News reports whether b differs from a in something that the manager must hear at once.
func News(a, b *pb.AttachmentReport) bool {
	return a.GetGrant() != b.GetGrant() || a.GetPhase() != b.GetPhase() || a.GetWaitingFor() != b.GetWaitingFor() ||
		a.GetGaveUp().GetWhy() != b.GetGaveUp().GetWhy() ||
		a.GetDevice() != b.GetDevice() || a.GetDeviceNumber() != b.GetDeviceNumber() || a.GetSizeBytes() != b.GetSizeBytes()
}

// PhaseName is the name of a phase in metrics, such as "serving".
func PhaseName(p pb.AttachmentPhase) string {
	return strings.ToLower(strings.TrimPrefix(p.String(), "ATTACHMENT_PHASE_"))
}

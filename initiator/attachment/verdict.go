// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"fmt"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Verdict is what a plan has the manager told.
type Verdict struct {
	Phase       pb.AttachmentPhase
	Waiting     []string   // what I/O, or the device, waits for
	Notes       []string   // what else does not go forward
	Done, Total block.Size // of what is copied
	GaveUp      *pb.GaveUp // nil: it has not
}

// Wait says what I/O, or the device, waits for.
func (v *Verdict) Wait(format string, args ...any) {
	v.Waiting = append(v.Waiting, fmt.Sprintf(format, args...))
}

// Note says what does not go forward, and holds nothing up.
func (v *Verdict) Note(format string, args ...any) {
	v.Notes = append(v.Notes, fmt.Sprintf(format, args...))
}

// Failed takes note of orders that failed. If the volume does not serve and waits
// for nothing else, it waits for them.
func (v *Verdict) Failed(orders []string) {
	v.Notes = append(v.Notes, orders...)
	if v.Phase != pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING && len(v.Waiting) == 0 {
		v.Waiting = append(v.Waiting, orders...)
	}
}

// Report is v as the report on an attachment; device and legs are left out.
func (v *Verdict) Report(volume block.VolumeID, epoch block.Epoch, grant uint64) *pb.AttachmentReport {
	return &pb.AttachmentReport{
		VolumeId: volume.String(), Epoch: uint64(epoch), Grant: grant, Phase: v.Phase,
		WaitingFor: strings.Join(v.Waiting, "; "), ResyncDoneBytes: uint64(v.Done), ResyncTotalBytes: uint64(v.Total),
		GaveUp: v.GaveUp,
	}
}

// News reports whether b has something that the manager is to hear of at once,
// after a.
func News(a, b *pb.AttachmentReport) bool {
	return a.GetGrant() != b.GetGrant() || a.GetPhase() != b.GetPhase() || a.GetWaitingFor() != b.GetWaitingFor() ||
		a.GetGaveUp().GetWhy() != b.GetGaveUp().GetWhy() ||
		a.GetDevice() != b.GetDevice() || a.GetDeviceNumber() != b.GetDeviceNumber() || a.GetSizeBytes() != b.GetSizeBytes()
}

// TooSmall says that a leg's namespace is smaller than it has to be.
func TooSmall(size, need block.Size) string {
	return fmt.Sprintf("its namespace has %v; the leg must have %v", size, need)
}

// PhaseName is a phase as logs and metrics name it: "serving".
func PhaseName(p pb.AttachmentPhase) string {
	return strings.ToLower(strings.TrimPrefix(p.String(), "ATTACHMENT_PHASE_"))
}

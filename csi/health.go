// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/pb"
)

// volumeHealth says what is wrong with a volume according to the manager; empty if nothing is.
func volumeHealth(v *pb.Volume) *csi.VolumeHealth {
	h := &csi.VolumeHealth{VolumeId: v.Id}
	add := func(s csi.VolumeHealthErrorType, reason, message string) {
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{Status: s, Reason: reason, Message: message})
	}
	switch v.Health {
	case pb.Health_HEALTH_DEGRADED:
		add(csi.VolumeHealthErrorType_DEGRADED, "CopiesMissing", "some copies are not in use: "+badLegs(v))
	case pb.Health_HEALTH_REBUILDING:
		add(csi.VolumeHealthErrorType_DEGRADED, "Rebuilding", "copies are being rebuilt: "+badLegs(v))
	case pb.Health_HEALTH_UNAVAILABLE:
		add(csi.VolumeHealthErrorType_INACCESSIBLE, "NoGoodCopy", "part of the volume has no good copy that can be reached: "+badLegs(v))
	}
	return h
}

// badLegs lists the legs that are not in sync, and why.
func badLegs(v *pb.Volume) string {
	var bad []string
	for _, l := range v.Legs {
		if l.State == pb.LegState_LEG_STATE_IN_SYNC && l.Reason == "" {
			continue
		}
		state := strings.ToLower(strings.TrimPrefix(l.State.String(), "LEG_STATE_"))
		text := fmt.Sprintf("leg %d.%d on %s is %s", l.Column, l.Copy, l.Node, state)
		if l.Reason != "" {
			text += " (" + l.Reason + ")"
		}
		bad = append(bad, text)
	}
	if len(bad) == 0 {
		return "a target is offline, or a drive is not ready"
	}
	return strings.Join(bad, ", ")
}

// ControllerGetVolumeHealth says what is wrong with a volume.
func (s *controllerServer) ControllerGetVolumeHealth(ctx context.Context, r *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	v, err := s.volume(ctx, r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: volumeHealth(v)}, nil
}

// ControllerListVolumeHealth lists the volumes that have a problem.
func (s *controllerServer) ControllerListVolumeHealth(ctx context.Context, r *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	wrong := func(v *pb.Volume) bool { return len(volumeHealth(v).HealthStatuses) > 0 }
	page, next, err := s.listed(ctx, &pb.ListVolumesRequest{}, r.GetMaxEntries(), r.GetStartingToken(), wrong)
	if err != nil {
		return nil, err
	}
	reply := &csi.ControllerListVolumeHealthResponse{NextToken: next}
	for _, v := range page {
		reply.Entries = append(reply.Entries, volumeHealth(v))
	}
	return reply, nil
}

// clamp converts bytes for a CSI message.
func clamp(bytes uint64) int64 { return int64(min(bytes, math.MaxInt64)) }

func wrap(bytes int64) *wrapperspb.Int64Value { return wrapperspb.Int64(bytes) }

// NodeGetVolumeHealth says what is wrong with a volume on this node: what the manager knows, and
// what its mounts show.
func (s *nodeServer) NodeGetVolumeHealth(ctx context.Context, r *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if err := missingID(r.GetVolumeId()); err != nil {
		return nil, err
	}
	v, err := s.volume(ctx, r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	h := volumeHealth(v)
	add := func(reason, format string, args ...any) {
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: reason, Message: fmt.Sprintf(format, args...),
		})
	}
	a := attachmentTo(v, string(s.cfg.Node))
	if a.GetState() == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED && a.GetWaitingFor() != "" {
		add("IOWaits", "I/O on node %s waits for %s", s.cfg.Node, a.WaitingFor)
	}
	for _, path := range []string{r.GetVolumePublishPath(), r.GetStagingTargetPath()} {
		if path == "" {
			continue
		}
		if m, err := s.mountAt(path); err == nil {
			s.mountHealth(a, v.Id, m, add)
			break // the other is the same file system
		}
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: h}, nil
}

// mountHealth says what is wrong with a mount of a volume.
func (s *nodeServer) mountHealth(a *pb.Attachment, id string, m mount.Mount, add func(reason, format string, args ...any)) {
	device := s.deviceOf(m)
	if number := a.GetDeviceNumber(); a == nil || number != "" && number != device.String() {
		add("AttachmentEnded", "%s is on device %s of an attachment that has ended: writes there are lost", m.Point, device)
		return
	}
	if device != m.Device {
		return // a raw device shows nothing more
	}
	if slices.Contains(m.Super, "ro") && !m.ReadOnly() || slices.Contains(m.Super, "emergency_ro") {
		add("FileSystemReadOnly", "the file system on %s has become read-only after an error", m.Point)
	}
	if slices.Contains(m.Super, "shutdown") { // as ext4 shows it on Linux 6.18, and not on 6.1
		add("FileSystemFails", "the file system on %s has shut itself down after an error", m.Point)
		return
	}
	switch _, err := s.asked.ask(id, m.Point, s.kernel.Usage); {
	case errors.Is(err, errNoAnswer):
		add("FileSystemHangs", "%v", err)
	case err != nil:
		add("FileSystemFails", "%v", err)
	}
}

// NodeGetStorageHealth says how well this node reaches the cluster. Without the volume manager,
// attached volumes keep working; nothing new can be attached.
func (s *nodeServer) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	reply := &csi.NodeGetStorageHealthResponse{}
	add := func(t csi.StorageHealthErrorType, reason, message string) {
		reply.BackendHealth = append(reply.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{Status: t, Reason: reason, Message: message})
	}
	degraded := func(reason, message string) { add(csi.StorageHealthErrorType_STORAGE_DEGRADED, reason, message) }
	all, err := s.cfg.Manager.ListAttachments(ctx, &pb.ListAttachmentsRequest{Node: string(s.cfg.Node)})
	if err != nil {
		degraded("ManagerUnreachable", fromManager("look up the attachments of this node", err).Error())
		return reply, nil
	}
	switch node, err := s.self(ctx); {
	case err != nil:
		degraded("NoAgent", err.Error())
	case !node.Initiator.Online:
		degraded("AgentOffline", "the initiator agent of this node does not report to the volume manager")
	case len(node.Initiator.Problems) > 0:
		p := node.Initiator.Problems[0]
		degraded("AgentProblems", fmt.Sprintf("%s: %s: %s (%d problems in all)", p.Object, p.Doing, p.Cause, len(node.Initiator.Problems)))
	}
	var attached int
	var waiting []string
	for _, a := range all.Attachments {
		if a.State != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
			continue
		}
		attached++
		if a.WaitingFor != "" {
			waiting = append(waiting, fmt.Sprintf("%s waits for %s", a.VolumeName, a.WaitingFor))
		}
	}
	switch text := strings.Join(waiting, ", "); {
	case len(waiting) == 0:
	case len(waiting) == attached:
		add(csi.StorageHealthErrorType_STORAGE_UNREACHABLE, "AllVolumesWait", text)
	default:
		degraded("SomeVolumesWait", text)
	}
	return reply, nil
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/pb"
)

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

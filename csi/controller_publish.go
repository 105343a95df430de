// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// attachments lists all attachments of a volume, shared or not.
func attachments(v *pb.Volume) []*pb.Attachment {
	if len(v.Attachments) > 0 || v.Attachment == nil {
		return v.Attachments
	}
	return []*pb.Attachment{v.Attachment}
}

// attachmentTo returns a volume's attachment to a node; nil if there is none.
func attachmentTo(v *pb.Volume, node string) *pb.Attachment {
	for _, a := range attachments(v) {
		if a.Node == node {
			return a
		}
	}
	return nil
}

// wantedMode says how a volume should be attached to a node. One that is sealed is attached for reading,
// whatever its claim was for; the node service refuses pods that would write.
func wantedMode(r *csi.ControllerPublishVolumeRequest, v *pb.Volume) (pb.AttachMode, error) {
	mode, err := attachMode(r.GetVolumeCapability(), v.GetLayout().GetCopies())
	if err == nil && v.GetSealed() != nil {
		return pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY, nil
	}
	if err == nil && r.GetReadonly() && mode != pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY {
		return 0, status.Error(codes.InvalidArgument, "readonly: supported only for the access mode MULTI_NODE_READER_ONLY")
	}
	return mode, err
}

// ControllerPublishVolume answers when the volume is granted to the node: the targets have
// confirmed that no earlier host can write to it. The device appears some time later;
// NodeStageVolume waits for it.
func (s *controllerServer) ControllerPublishVolume(ctx context.Context, r *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	id, node := r.GetVolumeId(), r.GetNodeId()
	switch {
	case id == "":
		return nil, missingID(id)
	case node == "":
		return nil, status.Error(codes.InvalidArgument, "node_id: missing")
	case r.GetVolumeCapability() == nil:
		return nil, status.Error(codes.InvalidArgument, "volume_capability: missing")
	}
	end, err := s.ops.startOn(id, node, "ControllerPublishVolume")
	if err != nil {
		return nil, err
	}
	defer end()
	v, err := s.volume(ctx, id)
	if err != nil {
		return nil, err
	}
	mode, err := wantedMode(r, v)
	if err != nil {
		return nil, err
	}
	a, err := s.attach(ctx, v, node, mode)
	if err == nil {
		a, err = s.granted(ctx, v, a)
	}
	if err != nil {
		return nil, err
	}
	s.forget(id, node)
	p := publication{volume: block.VolumeName(a.VolumeName), epoch: block.Epoch(a.Epoch), mode: mode}
	return &csi.ControllerPublishVolumeResponse{PublishContext: p.context()}, nil
}

// attach records the attachment, unless it exists.
func (s *controllerServer) attach(ctx context.Context, v *pb.Volume, node string, mode pb.AttachMode) (*pb.Attachment, error) {
	doing := volumeDoing("attach", v) + " to " + node
	switch a := attachmentTo(v, node); {
	case a == nil:
		if s.cfg.MaxVolumes > 0 {
			// Two volumes must not both take the last place on a node.
			s.places.Lock()
			defer s.places.Unlock()
			if err := s.roomOn(ctx, node, doing); err != nil {
				return nil, err
			}
		}
	case a.State == pb.AttachmentState_ATTACHMENT_STATE_DETACHING:
		return nil, status.Errorf(codes.Aborted, "%s: it is being detached from there and waits for %s", doing, detachingWaits(a))
	case attachedMode(a) != mode:
		return nil, status.Errorf(codes.AlreadyExists, "%s: it is attached there as %s, but %s was requested", doing, modeText(attachedMode(a)), modeText(mode))
	default:
		return a, nil
	}
	// The node service records a volume's use (file system or raw) before anything writes to it.
	a, err := s.cfg.Manager.Attach(ctx, &pb.AttachRequest{Volume: v.Id, Node: node, Mode: mode, KeepsRecord: true})
	switch status.Code(err) {
	case codes.InvalidArgument:
		// A malformed node name names no node.
		return nil, status.Errorf(codes.NotFound, "%s: %s", doing, status.Convert(err).Message())
	case codes.Unimplemented:
		return nil, status.Errorf(codes.FailedPrecondition, "%s: %s", doing, status.Convert(err).Message())
	}
	return a, fromManager(doing, err)
}

// attachedMode is an attachment's mode, where unset means exclusive.
func attachedMode(a *pb.Attachment) pb.AttachMode {
	return cmp.Or(a.Mode, pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
}

// roomOn refuses a volume that exceeds the node's limit.
func (s *controllerServer) roomOn(ctx context.Context, node, doing string) error {
	there, err := s.cfg.Manager.ListAttachments(ctx, &pb.ListAttachmentsRequest{Node: node})
	if err != nil {
		return fromManager(doing, err)
	}
	if n := len(there.GetAttachments()); n >= s.cfg.MaxVolumes {
		return status.Errorf(codes.ResourceExhausted, "%s: it has %d volumes of at most %d", doing, n, s.cfg.MaxVolumes)
	}
	return nil
}

// granted waits until the host may write.
func (s *controllerServer) granted(ctx context.Context, v *pb.Volume, a *pb.Attachment) (*pb.Attachment, error) {
	doing := volumeDoing("attach", v) + " to " + a.Node
	node := a.Node
	err := await(ctx, doing, func() (string, error) {
		if isGranted(a) {
			return "", nil
		}
		now, err := s.volume(ctx, v.Id)
		if err != nil {
			return "", err
		}
		if a = attachmentTo(now, node); a == nil || a.State == pb.AttachmentState_ATTACHMENT_STATE_DETACHING {
			return "", status.Errorf(codes.Aborted, "%s: it was detached meanwhile", doing)
		}
		if isGranted(a) {
			return "", nil
		}
		return cmp.Or(a.WaitingFor, "the fence"), nil
	})
	return a, err
}

func isGranted(a *pb.Attachment) bool {
	return a.State == pb.AttachmentState_ATTACHMENT_STATE_GRANTED || a.State == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED
}

func detachingWaits(a *pb.Attachment) string {
	return cmp.Or(a.WaitingFor, "node "+a.Node+" to release it")
}

// ControllerUnpublishVolume answers when the node can no longer write to the volume, whether it is
// alive or not: the attachment is gone, and every target has confirmed that it admits nothing from
// it.
//
// The node is first asked to release the volume. It is fenced if it has not done so after the grace
// time, or at once if it is lost. The driver is not told whether the node was drained or lost, so
// it never skips the fence.
func (s *controllerServer) ControllerUnpublishVolume(ctx context.Context, r *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	id, node := r.GetVolumeId(), r.GetNodeId() // no node given: detach from all
	if err := missingID(id); err != nil {
		return nil, err
	}
	end, err := s.ops.startOn(id, node, "ControllerUnpublishVolume")
	if err != nil {
		return nil, err
	}
	defer end()
	doing := "detach volume " + id
	err = await(ctx, doing, func() (string, error) {
		v, err := s.volume(ctx, id)
		if err != nil {
			return "", err
		}
		waits, err := s.detach(ctx, v, node)
		return strings.Join(append(waits, v.FenceWaitsFor...), "; "), err
	})
	if err != nil && status.Code(err) != codes.NotFound { // no node has a volume that is gone
		return nil, err
	}
	s.forget(id, node)
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

// detach makes the requests that are still missing, and says what it waits for.
func (s *controllerServer) detach(ctx context.Context, v *pb.Volume, node string) (waits []string, err error) {
	for _, a := range attachments(v) {
		if node != "" && a.Node != node {
			continue
		}
		waits = append(waits, detachingWaits(a))
		asked := a.State == pb.AttachmentState_ATTACHMENT_STATE_DETACHING
		force, err := s.mayForce(ctx, v, a)
		if err != nil {
			return nil, err
		}
		if asked && !force {
			continue
		}
		if _, err := s.cfg.Manager.Detach(ctx, &pb.DetachRequest{Volume: v.Id, Node: a.Node, Force: force}); err != nil {
			return nil, fromManager(volumeDoing("detach", v)+" from "+a.Node, err)
		}
	}
	return waits, nil
}

// lookEvery is how often the driver checks whether a node that does not release its volume is lost.
const lookEvery = 2 * time.Second

// mayForce reports whether to stop waiting for a node. The grace time counts from this process's
// first request, by its own clock.
func (s *controllerServer) mayForce(ctx context.Context, v *pb.Volume, a *pb.Attachment) (bool, error) {
	key, now := leave{v.Id, a.Node, a.Epoch}, s.now()
	s.mu.Lock()
	p := s.leaving[key]
	if p == nil {
		p = &patience{since: now}
		s.leaving[key] = p
	}
	waited, look := now.Sub(p.since), now.Sub(p.looked) >= lookEvery
	if look {
		p.looked = now
	}
	why := p.lost
	s.mu.Unlock()
	switch {
	case waited >= s.cfg.DetachGrace:
		why = "it did not release the volume in time: " + a.WaitingFor
	case look:
		nodes, err := s.cfg.Manager.ListNodes(ctx, &pb.ListNodesRequest{})
		if err != nil {
			return false, fromManager("ask for node "+a.Node, err)
		}
		why = lost(nodes.GetNodes(), a.Node, s.cfg.DetachGrace)
		s.mu.Lock()
		p.lost = why
		s.mu.Unlock()
	}
	if why != "" {
		s.tellFenced(ctx, key, why)
	}
	return why != "", nil
}

// lost says why it is useless to ask a node; empty if it is not. Either an operator has confirmed
// that the node is dead, or it has been silent for the grace time already. A shorter silence means
// nothing: an agent that restarts is offline meanwhile while its volumes stay in use, and a manager
// that has just started has heard from nobody. In both cases the node releases the volume once it
// is heard, and its writes are complete; a fence would leave copies to compare.
func lost(nodes []*pb.Node, name string, grace time.Duration) string {
	i := slices.IndexFunc(nodes, func(n *pb.Node) bool { return n.Name == name })
	if i < 0 {
		return ""
	}
	silent := nodes[i].GetInitiator().GetSilent().AsDuration()
	switch {
	case nodes[i].ConfirmedDead:
		return "it is confirmed dead"
	case silent >= grace:
		return fmt.Sprintf("it has been offline for %v", silent.Round(time.Second))
	}
	return ""
}

// tellFenced logs once that a node is no longer asked.
func (s *controllerServer) tellFenced(ctx context.Context, of leave, why string) {
	s.mu.Lock()
	p := s.leaving[of]
	logged := p.logged
	p.logged = true
	s.mu.Unlock()
	if !logged {
		logOf(ctx).Warn("fencing the volume", "node", of.node, "epoch", of.epoch, "why", why)
	}
}

// forget ends the grace times of a detached volume.
func (s *controllerServer) forget(volume, node string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.leaving {
		if key.volume == volume && (node == "" || key.node == node) {
			delete(s.leaving, key)
		}
	}
}

// defaultGrace is how long a node may take to release a volume, and how long it must be silent to
// count as lost. Kubernetes waits longer than that before it detaches from a silent node, so a lost
// node is still fenced at once.
const defaultGrace = 15 * time.Second

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

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

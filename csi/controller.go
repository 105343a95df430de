// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// controllerServer is the controller service, and that of groups. It translates CSI's calls into those of the Manager
// service, and waits where CSI promises a completed result: the manager answers once its decision
// is durable, and finishes the work afterwards.
type controllerServer struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	cfg Config
	ops *operations
	now func() time.Time

	places sync.Mutex // held from counting a node's volumes to adding one

	mu        sync.Mutex
	clusterID string // once known: it never changes
	leaving   map[leave]*patience
}

// leave is a volume that a node has been asked to release. A later attachment of the same volume
// there has another epoch, and its own grace time.
type leave struct {
	volume, node string
	epoch        uint64
}

// patience is how long the driver waits for a node.
type patience struct {
	since  time.Time
	looked time.Time // when the driver last checked whether the node is lost
	lost   string    // the result: why it is lost; empty if it is not
	logged bool      // the log already says that the waiting has ended
}

func newController(cfg Config) *controllerServer {
	return &controllerServer{cfg: cfg, ops: newOperations(), now: time.Now, leaving: map[leave]*patience{}}
}

// controllerServes lists the advertised capabilities.
var controllerServes = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
	csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
	csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
	csi.ControllerServiceCapability_RPC_GET_CAPACITY,
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
	csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
	csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
	csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
	csi.ControllerServiceCapability_RPC_GET_VOLUME,
	csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
	csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
	csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
	csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
}

// ControllerGetCapabilities lists the capabilities.
func (s *controllerServer) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	reply := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range controllerServes {
		reply.Capabilities = append(reply.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return reply, nil
}

// cluster is the id of the manager's cluster.
func (s *controllerServer) cluster(ctx context.Context) (string, error) {
	s.mu.Lock()
	known := s.clusterID
	s.mu.Unlock()
	if known != "" {
		return known, nil
	}
	st, err := s.cfg.Manager.GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil {
		return "", fromManager("ask for the cluster's id", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clusterID = st.ClusterId
	return st.ClusterId, nil
}

// volume finds a volume or a snapshot by its id. It returns NotFound for a malformed id, and for a
// volume that is being deleted.
func (s *controllerServer) volume(ctx context.Context, id string) (*pb.Volume, error) {
	v, err := s.found(ctx, id)
	if err == nil && v.State == pb.VolumeState_VOLUME_STATE_DELETING {
		return nil, status.Errorf(codes.NotFound, "volume %s: not found", id)
	}
	return v, err
}

// found is volume, also for one that is being deleted.
func (s *controllerServer) found(ctx context.Context, id string) (*pb.Volume, error) {
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "volume_id: missing")
	}
	missing := status.Errorf(codes.NotFound, "volume %s: not found", id)
	if _, err := block.ParseVolumeID(id); err != nil {
		return nil, missing
	}
	v, err := s.cfg.Manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: id})
	if err != nil {
		return nil, fromManager("volume "+id, err)
	}
	// The manager accepts names too, and prefers the name where both fit.
	if v.Id != id {
		return nil, missing
	}
	return v, nil
}

// The manager has no call that waits. Most waits end after one or two round trips between the
// manager and its agents, so the first polls come fast.
const (
	firstPause   = 10 * time.Millisecond
	longestPause = 500 * time.Millisecond
)

// await asks until nothing is left to wait for, an error comes, or ctx ends; the error then names
// what was missing.
func await(ctx context.Context, doing string, ask func() (waitingFor string, err error)) error {
	pause := time.NewTimer(0)
	defer pause.Stop()
	waitingFor, said := "an answer from the volume manager", ""
	for next := firstPause; ; next = min(next*3/2, longestPause) {
		select {
		case <-ctx.Done():
			return waitEnded(ctx, doing, waitingFor)
		case <-pause.C:
		}
		now, err := ask()
		switch {
		case err != nil && ctx.Err() != nil:
			return waitEnded(ctx, doing, waitingFor)
		case err != nil || now == "":
			return err
		}
		if waitingFor = now; waitingFor != said {
			said = waitingFor
			logOf(ctx).Debug("waiting", "for", waitingFor)
		}
		pause.Reset(next)
	}
}

// volumeDoing begins an error's text.
func volumeDoing(doing string, v *pb.Volume) string {
	return fmt.Sprintf("%s volume %s (%s)", doing, v.Id, v.Name)
}

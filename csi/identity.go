// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weft.dev/weft/proto/pb"
)

// identityServer is the identity service.
type identityServer struct {
	csi.UnimplementedIdentityServer
	cfg Config
}

func newIdentity(cfg Config) *identityServer { return &identityServer{cfg: cfg} }

// GetPluginInfo names the driver.
func (s *identityServer) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: DriverName, VendorVersion: s.cfg.Version}, nil
}

// GetPluginCapabilities is the same in each mode: it describes the driver as a whole, in however
// many processes it runs.
func (s *identityServer) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	service := func(t csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}}
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		service(csi.PluginCapability_Service_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE),
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{
			Type: csi.PluginCapability_VolumeExpansion_ONLINE,
		}}},
	}}, nil
}

// probeTime is how long the manager has to answer a Probe.
const probeTime = 2 * time.Second

// Probe reports whether the volume manager can be reached. If not, a node still serves calls that
// need no manager, and restarting the driver would not help: so it is not ready, but not broken.
func (s *identityServer) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	_, err := s.cfg.Manager.GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil {
		logOf(ctx).Debug("manager does not answer", "err", err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(err == nil)}, nil
}

// aliveTime is the longest that a working driver takes to answer a Probe: it asks the manager, and
// a silent manager is not the driver's fault.
const aliveTime = 5 * time.Second

// Alive reports whether a driver, ready or not, answers on the unix socket at this path. A liveness
// check sees the same as the CO's own calls.
func Alive(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, aliveTime)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", socket, err)
	}
	defer conn.Close()
	if _, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}); err != nil {
		return fmt.Errorf("probe the driver at %s: %w", socket, err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"
	"sync"

	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registration tells the kubelet where the driver's node service is. It replaces the usual sidecar,
// node-driver-registrar.
type registration struct {
	registerapi.UnimplementedRegistrationServer
	endpoint string // path of the node service's socket, as the kubelet sees it

	once    sync.Once
	refused chan error
}

// Registration makes the server that the kubelet's plugin watcher asks about the driver. The
// endpoint is the path of the socket on which [Driver.Server] answers, as the kubelet sees it. If
// the kubelet refuses the driver, refused delivers one error, and serving further is useless.
func (d *Driver) Registration(endpoint string) (server *grpc.Server, refused <-chan error) {
	r := &registration{endpoint: endpoint, refused: make(chan error, 1)}
	server = grpc.NewServer(grpc.UnaryInterceptor(d.observe))
	registerapi.RegisterRegistrationServer(server, r)
	return server, r.refused
}

// GetInfo says who the driver is and where it answers.
func (r *registration) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: DriverName, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus is called by the kubelet to say whether it uses the driver.
func (r *registration) NotifyRegistrationStatus(ctx context.Context, s *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	if s.PluginRegistered {
		logOf(ctx).Info("registered with the kubelet", "endpoint", r.endpoint)
		return &registerapi.RegistrationStatusResponse{}, nil
	}
	r.once.Do(func() { r.refused <- fmt.Errorf("register with the kubelet: %s", s.Error) })
	return &registerapi.RegistrationStatusResponse{}, nil
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"net"
	"sync"

	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registration tells the kubelet where the driver's node service is. Usually a
// sidecar of its own, node-driver-registrar, does no more than this.
type registration struct {
	registerapi.UnimplementedRegistrationServer
	driver   *Driver
	endpoint string // path of the node service's socket, as the kubelet sees it

	once    sync.Once
	refused chan string
}

// ServeRegistration answers the kubelet's plugin watcher on a listener, which it
// closes, until ctx ends. The endpoint is the path of the socket on which
// [Driver.Serve] answers, as the kubelet sees it. A kubelet that refuses the
// driver ends it with an error.
func (d *Driver) ServeRegistration(ctx context.Context, listener net.Listener, endpoint string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &registration{driver: d, endpoint: endpoint, refused: make(chan string, 1)}
	server := grpc.NewServer(grpc.UnaryInterceptor(d.observe))
	registerapi.RegisterRegistrationServer(server, r)
	ended := make(chan error, 1)
	go func() { ended <- serveUntil(ctx, server, listener) }()
	select {
	case err := <-ended:
		return err
	case why := <-r.refused:
		cancel()
		<-ended
		return &RefusedError{Cause: why}
	}
}

// RefusedError says that the kubelet has refused to register the driver.
type RefusedError struct {
	Cause string // in the kubelet's words
}

func (e *RefusedError) Error() string { return "register with the kubelet: " + e.Cause }

// GetInfo says who the driver is and where it answers.
func (r *registration) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: DriverName, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus is how the kubelet says whether it uses the driver.
func (r *registration) NotifyRegistrationStatus(ctx context.Context, s *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	if s.PluginRegistered {
		logOf(ctx).Info("registered with the kubelet", "endpoint", r.endpoint)
		return &registerapi.RegistrationStatusResponse{}, nil
	}
	r.once.Do(func() { r.refused <- s.Error })
	return &registerapi.RegistrationStatusResponse{}, nil
}

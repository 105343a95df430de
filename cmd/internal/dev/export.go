// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net"
	"sync"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/controller"
)

// volumeServer offers volumes as NVMe/TCP namespaces on the loopback address, if the kernel can
// make no block devices: to programs that speak NVMe/TCP, as proto/nvmetcp/host does. Every user of
// the machine can reach that address, so it serves one host only, whose id is generated at each
// start and shown in the volume's path.
type volumeServer struct {
	target  *controller.Target
	port    *controller.Port
	address string
	host    block.Host
}

func newVolumeServer(log *slog.Logger) (*volumeServer, error) {
	target, err := controller.New(controller.Config{Log: log})
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	port, err := target.Serve(listener, controller.PortConfig{ID: 1})
	if err != nil {
		listener.Close()
		return nil, err
	}
	var random [16]byte
	rand.Read(random[:])
	return &volumeServer{target, port, listener.Addr().String(), block.HostFromID(block.UUIDFromRandom(random))}, nil
}

func (s *volumeServer) close(ctx context.Context) error { return s.target.Close(ctx) }

// servedVolume is a volume as a namespace; its path is a URL.
type servedVolume struct {
	subsystem *controller.Subsystem
	path      string
	done      chan struct{}
	once      sync.Once
}

// export is the server's userspace.Export: one subsystem for each volume, with the volume as its
// namespace 1.
func (s *volumeServer) export(_ context.Context, volume block.Device, of userspace.Of) (userspace.Exported, error) {
	name := of.Name
	nqn := block.NQN("nqn.2026-11.dev.weft:volume." + string(name))
	subsystem, err := s.target.AddSubsystem(controller.SubsystemConfig{NQN: nqn, Serial: "volume", Hosts: []controller.Host{{NQN: s.host.NQN}}})
	if err != nil {
		return nil, fmt.Errorf("serve volume %s: %w", name, err)
	}
	id := sha256.Sum256([]byte(nqn))
	err = subsystem.AddNamespace(controller.NamespaceConfig{NSID: 1, UUID: block.UUIDFromRandom([16]byte(id[:16])), Device: volume})
	if err == nil {
		err = s.port.Link(subsystem)
	}
	if err != nil {
		_ = subsystem.Close(context.Background()) // no host has connected yet
		return nil, fmt.Errorf("serve volume %s: %w", name, err)
	}
	return &servedVolume{subsystem: subsystem, path: fmt.Sprintf("nvme-tcp://%s/%s?host=%v", s.address, nqn, s.host.ID), done: make(chan struct{})}, nil
}

// Path is a URL: the address, the subsystem's name, and the id of the only admitted host.
func (v *servedVolume) Path() string { return v.path }

// Number is empty: it is not a kernel device.
func (v *servedVolume) Number() string { return "" }

// Resize tells the connected hosts the volume's size.
func (v *servedVolume) Resize(context.Context) error { return v.subsystem.ResizeNamespace(1) }

// Close stops serving the volume; without force it refuses while a host is connected.
func (v *servedVolume) Close(ctx context.Context, force bool) error {
	if n := len(v.subsystem.Controllers()); n > 0 && !force {
		return fmt.Errorf("%w: %d hosts are connected to %s", blockdev.ErrBusy, n, v.path)
	}
	err := v.subsystem.Close(ctx)
	if err == nil {
		v.once.Do(func() { close(v.done) })
	}
	return err
}

// Done is closed when Close has finished.
func (v *servedVolume) Done() <-chan struct{} { return v.done }

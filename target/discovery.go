// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/proto/pb"
)

// DiscoveryPort is the TCP port that IANA has assigned to discovery controllers.
const DiscoveryPort = 8009

// discovery is the target's discovery controller. It tells hosts without Weft's agent, by Linux's own
// tools, to which subsystems of the whole cluster they may connect. It knows only what the manager has
// said, and listens from then on: a controller that answered before that would say that there is
// nothing, and hosts disconnect from what is gone. While the manager is away it goes on with what it
// was told last.
//
// It listens only while the cluster has such hosts (weft node add). It answers everybody, but has entries only for the hosts that are named; nothing in the log of another
// one says that there are any. Connections are bounded as those of the data ports. As many as may be
// open may be of one name, since anybody can claim one: a flood displaces itself, address by address.
type discovery struct {
	port   uint16 // 0: there is none
	listen func(block.Portal) (net.Listener, error)
	at     []string // addresses
	log    *slog.Logger

	target *controller.Target // nil until the manager has said something
	ports  map[string]bool    // the addresses at which it listens
	failed map[string]string  // why it does not, by address
	told   *pb.TargetWanted
}

func newDiscovery(c Config, log *slog.Logger) *discovery {
	d := &discovery{port: c.Discovery, listen: c.Listen, log: log, ports: map[string]bool{}, failed: map[string]string{}}
	if d.listen == nil {
		d.listen = func(p block.Portal) (net.Listener, error) {
			return net.Listen("tcp", net.JoinHostPort(p.Address, strconv.Itoa(int(p.Port))))
		}
	}
	for _, p := range c.Portals {
		if !slices.Contains(d.at, p.Address) {
			d.at = append(d.at, p.Address)
		}
	}
	return d
}

// The limits of a discovery controller. A host that stays connected counts as a handshake, see
// package controller.
const (
	maxDiscoverers        = 2048
	discoveryMDTS         = 64 * block.KiB
	maxDiscovererSockets  = 4096
	maxDiscoverersPerPeer = 512
)

// tell makes the controller say what a wanted state says. It is called again and again: an address
// that could not be listened at is tried once more.
func (d *discovery) tell(w *pb.TargetWanted) {
	if d.port == 0 || w == nil {
		return
	}
	if !w.GetDiscovers() {
		d.close()
		return
	}
	if d.target == nil {
		t, err := controller.New(controller.Config{
			Log: d.log, MaxHandshakes: maxDiscoverers, MaxConnections: maxDiscovererSockets,
			MaxConnectionsPerAddress: maxDiscoverersPerPeer, MaxControllersPerHost: maxDiscovererSockets, MDTS: discoveryMDTS,
		})
		if err != nil {
			d.log.Error("no discovery controller", "err", err)
			d.port = 0
			return
		}
		d.target = t
	}
	if w != d.told {
		hosts, bad := discoveredHosts(w.GetDiscovery())
		for _, err := range bad {
			d.log.Warn("discovery leaves out what it cannot read", "err", err)
		}
		if err := d.target.Discover(hosts); err != nil {
			d.log.Error("discovery tells what it told before", "err", err)
		}
		d.told = w
	}
	for i, address := range d.at {
		if !d.ports[address] {
			d.open(uint16(i+1), address)
		}
	}
}

func (d *discovery) open(id uint16, address string) {
	l, err := d.listen(block.Portal{Transport: block.TCP, Address: address, Port: d.port})
	if err == nil {
		if _, err = d.target.Serve(l, controller.PortConfig{ID: id}); err != nil {
			l.Close()
		}
	}
	if err == nil {
		d.ports[address] = true
		d.log.Info("discovery answers", "address", address, "port", d.port)
	} else if d.failed[address] != err.Error() {
		d.failed[address] = err.Error()
		d.log.Warn("discovery does not answer, and tries again; --discovery changes its port", "address", address, "port", d.port, "err", err)
	}
}

func (d *discovery) close() {
	if d.target == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeFor)
	defer cancel()
	if err := d.target.Close(ctx); err != nil {
		d.log.Warn("discovery not closed", "err", err)
	}
	d.target, d.told, d.ports = nil, nil, map[string]bool{}
}

// discoveredHosts are the hosts of a wanted state and what they are told. Entries that cannot be read
// are left out.
func discoveredHosts(all []*pb.Discovered) (hosts []controller.DiscoveredHost, bad []error) {
	at := map[block.NQN]int{}
	for _, m := range all {
		host, entry, err := discovered(m)
		if err != nil {
			bad = append(bad, fmt.Errorf("volume %s: %w", m.GetVolumeId(), err))
			continue
		}
		i, known := at[host.NQN]
		if !known {
			i, at[host.NQN] = len(hosts), len(hosts)
			hosts = append(hosts, controller.DiscoveredHost{Host: host})
		}
		if hosts[i].HostKey.IsZero() {
			hosts[i].Host = host // it proves itself if any entry asks for that
		}
		hosts[i].Entries = append(hosts[i].Entries, entry)
	}
	for _, h := range hosts {
		slices.SortFunc(h.Entries, func(a, b nvmetcp.DiscoveryEntry) int { return cmp.Compare(a.Subsystem, b.Subsystem) })
	}
	return hosts, bad
}

func discovered(m *pb.Discovered) (host controller.Host, e nvmetcp.DiscoveryEntry, err error) {
	if host.NQN, err = block.ParseNQN(m.GetHostNqn()); err != nil {
		return host, e, fmt.Errorf("host: %w", err)
	}
	if host.HostKey, host.ControllerKey, err = discoveryKeys(m.GetKeys()); err != nil {
		return host, e, err
	}
	e = nvmetcp.DiscoveryEntry{
		Family: nvmetcp.FamilyOf(m.GetPortal().GetAddress()), Type: nvmetcp.SubsystemNVM, Requirements: nvmetcp.NoFlowControl,
		PortID: 1, ControllerID: nvmetcp.DynamicController, AdminQueue: nvmetcp.MinAdminQueue,
		Service: strconv.Itoa(int(m.GetPortal().GetPort())), Address: m.GetPortal().GetAddress(),
	}
	switch t := m.GetPortal().GetTransport(); t {
	case pb.Transport_TRANSPORT_TCP:
		e.Transport = nvmetcp.TransportTCP
	case pb.Transport_TRANSPORT_RDMA:
		e.Transport = nvmetcp.TransportRDMA
	default:
		return host, e, fmt.Errorf("transport %v is not known", t)
	}
	e.Subsystem, err = block.ParseNQN(m.GetNqn())
	return host, e, err
}

func discoveryKeys(m *pb.ExportKeys) (host, ctrl dhchap.Key, err error) {
	k, err := block.ParseKeys(m.GetHost(), m.GetController())
	if err != nil || k.IsZero() {
		return host, ctrl, err
	}
	if host, err = dhchap.NewKey(dhchap.SHA256, k.Host.Reveal()); err != nil {
		return host, ctrl, err
	}
	ctrl, err = dhchap.NewKey(dhchap.SHA256, k.Controller.Reveal())
	return host, ctrl, err
}

// SPDX-License-Identifier: Apache-2.0

// Package discovery is a target's discovery controller. It tells hosts without Weft's agent, by
// Linux's own tools, to which subsystems of the whole cluster they may connect.
//
// It knows only what the manager has said, and listens from then on: a controller that answered before
// would say that there is nothing, and hosts disconnect from what is gone. While the manager is away,
// it repeats what it was told last. It listens only while the cluster has such hosts (weft node add).
//
// It answers every host, but has entries only for those that are named. The log of another host does
// not show that there are any. Connections are bounded as those of the data ports. One name may have as
// many as may be open at all, since anybody can claim a name: a flood displaces itself, address by
// address.
//
// The sockets go to the next process in a handover, so that no host is refused meanwhile. Hosts that
// stay connected connect again.
package discovery

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/userspace"
)

// Port is the TCP port that IANA has assigned to discovery controllers.
const Port = 8009

// Config is where a controller listens.
type Config struct {
	Port      uint16                                   // 0: nowhere
	Portals   []block.Portal                           // of the target: it listens at their addresses
	Listen    func(block.Portal) (net.Listener, error) // nil: as usual
	Inherited userspace.Sockets                        // of the previous process
	Log       *slog.Logger
}

// Controller is a target's discovery controller. One goroutine at a time may use it.
type Controller struct {
	c  Config
	at []string // addresses

	inherited userspace.Sockets  // of the previous process, until it is told something
	target    *controller.Target // nil until the manager has said something
	open      userspace.Sockets
	failed    map[block.Portal]error // why it does not listen
	told      *pb.TargetWanted
}

// The limits of a discovery controller. A host that stays connected counts as a handshake, see
// package controller.
const (
	maxDiscoverers        = 2048
	discoveryMDTS         = 64 * block.KiB
	maxDiscovererSockets  = 4096
	maxDiscoverersPerPeer = 512
)

// closeFor is how long the end of the connections may take.
const closeFor = 5 * time.Second

// New returns a controller that does not listen yet. It takes the sockets of the previous process over.
func New(c Config) *Controller {
	d := &Controller{c: c, at: c.addresses(), inherited: userspace.Sockets{}, open: userspace.Sockets{}, failed: map[block.Portal]error{}}
	maps.Copy(d.inherited, c.Inherited)
	if d.c.Listen == nil {
		d.c.Listen = userspace.Listen
	}
	return d
}

// addresses are those of the portals, but for one that has a portal at that very port.
func (c Config) addresses() (all []string) {
	taken := func(address string) bool {
		return slices.ContainsFunc(c.Portals, func(p block.Portal) bool {
			return p.Transport == block.TCP && p.Address == address && p.Port == c.Port
		})
	}
	for _, p := range c.Portals {
		if c.Port != 0 && !slices.Contains(all, p.Address) && !taken(p.Address) {
			all = append(all, p.Address)
		}
	}
	return all
}

func portal(address string, port uint16) block.Portal {
	return block.Portal{Transport: block.TCP, Address: address, Port: port}
}

// Split separates the sockets of discovery from others that a process has left.
func (c Config) Split(all userspace.Sockets) (found, others userspace.Sockets) {
	found, others = userspace.Sockets{}, maps.Clone(all)
	for _, address := range c.addresses() {
		p := portal(address, c.Port)
		if l, ok := all[p]; ok {
			found[p] = l
			delete(others, p)
		}
	}
	return found, others
}

// Tell makes the controller say what a wanted state says. It is called again and again: an address
// at which it could not listen is tried once more.
func (d *Controller) Tell(w *pb.TargetWanted) {
	if d.c.Port == 0 || w == nil {
		return
	}
	if !w.GetDiscovers() {
		d.Close()
		return
	}
	if d.target == nil {
		t, err := controller.New(controller.Config{
			Log: d.c.Log, MaxHandshakes: maxDiscoverers, MaxConnections: maxDiscovererSockets,
			MaxConnectionsPerAddress: maxDiscoverersPerPeer, MaxControllersPerHost: maxDiscovererSockets, MDTS: discoveryMDTS,
		})
		if err != nil {
			d.c.Log.Error("no discovery controller", "err", err)
			d.c.Port = 0
			return
		}
		d.target = t
	}
	if w != d.told {
		hosts, bad := hostsOf(w.GetDiscovery())
		for _, err := range bad {
			d.c.Log.Warn("discovery leaves out what it cannot read", "err", err)
		}
		if err := d.target.Discover(hosts); err != nil {
			d.c.Log.Error("discovery tells what it told before", "err", err)
		}
		d.told = w
	}
	for i, address := range d.at {
		if p := portal(address, d.c.Port); d.open[p] == nil {
			d.serve(uint16(i+1), p)
		}
	}
}

// serve listens at an address, on the previous process's socket if there is one.
func (d *Controller) serve(id uint16, p block.Portal) {
	l, err := d.inherited[p], error(nil)
	if delete(d.inherited, p); l == nil {
		l, err = d.c.Listen(p)
	}
	if err == nil {
		if _, err = d.target.Serve(l, controller.PortConfig{ID: id}); err != nil {
			l.Close() //nolint:errcheck // the error before it says more
		}
	}
	if err != nil {
		d.failed[p] = err
		return
	}
	d.open[p] = l
	delete(d.failed, p)
	d.c.Log.Info("discovery answers", "address", p.Address, "port", p.Port)
}

// Problem is why it does not listen somewhere.
type Problem struct{ Where, Cause string }

// Problems says where it cannot listen.
func (d *Controller) Problems() (all []Problem) {
	for p, err := range d.failed {
		all = append(all, Problem{
			fmt.Sprintf("discovery at %s port %d", p.Address, p.Port),
			fmt.Sprintf("%v; if another program has the port, end it, or choose another port with --discovery", err),
		})
	}
	slices.SortFunc(all, func(a, b Problem) int { return cmp.Compare(a.Where, b.Where) })
	return all
}

// Leave returns the sockets that the next process takes over. It accepts no more connections.
func (d *Controller) Leave() userspace.Sockets {
	kept := d.inherited
	d.inherited = userspace.Sockets{}
	for p, l := range d.open {
		next, err := userspace.Detach(l)
		if err != nil {
			d.c.Log.Warn("discovery does not stay open for the next process: hosts may be refused meanwhile", "address", p.Address, "port", p.Port, "err", err)
			continue
		}
		kept[p] = next
	}
	return kept
}

// Close ends all connections, and listens no more.
func (d *Controller) Close() {
	for _, l := range d.inherited {
		l.Close() //nolint:errcheck // nothing was accepted on it
	}
	clear(d.inherited)
	clear(d.failed)
	if d.target == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeFor)
	defer cancel()
	if err := d.target.Close(ctx); err != nil {
		d.c.Log.Warn("discovery not closed", "err", err)
	}
	clear(d.open)
	d.target, d.told = nil, nil
}

// hostsOf are the hosts of a wanted state and what they are told. Entries that cannot be read
// are left out.
func hostsOf(all []*pb.Discovered) (hosts []controller.DiscoveredHost, bad []error) {
	at := map[block.NQN]int{}
	for _, m := range all {
		host, entry, err := entryOf(m)
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
		if m.GetAway() {
			hosts[i].Version += " " + m.GetNqn()
		}
	}
	for _, h := range hosts {
		slices.SortFunc(h.Entries, func(a, b nvmetcp.DiscoveryEntry) int { return cmp.Compare(a.Subsystem, b.Subsystem) })
	}
	return hosts, bad
}

func entryOf(m *pb.Discovered) (host controller.Host, e nvmetcp.DiscoveryEntry, err error) {
	if host.NQN, err = block.ParseNQN(m.GetHostNqn()); err != nil {
		return host, e, fmt.Errorf("host: %w", err)
	}
	if host.HostKey, host.ControllerKey, err = keys(m.GetKeys()); err != nil {
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

func keys(m *pb.ExportKeys) (host, ctrl dhchap.Key, err error) {
	k, err := block.ParseKeys(m.GetHost(), m.GetController())
	if err != nil || k.IsZero() {
		return host, ctrl, err
	}
	return dhchap.NewKeys(k.Host.Reveal(), k.Controller.Reveal())
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// DiscoveredHost is a host, and what the discovery controller tells it.
type DiscoveredHost struct {
	// Host is its name, and what it has to prove before it is told anything.
	Host
	// Entries are told to this host alone, in this order.
	Entries []nvmetcp.DiscoveryEntry
	// Version: the host gets the event also if this alone changes, as when an entry can be connected to
	// again.
	Version string
}

// told is the part of the discovery log that one host has from Discover.
type told struct {
	entries    []nvmetcp.DiscoveryEntry
	version    string
	generation uint64 // how often they changed
}

// Discover replaces what discovery tells hosts beside this target's own subsystems: a target
// without any is a discovery controller for other targets. Hosts that are not listed are told
// nothing of it, not even that something has changed. Each host whose entries have changed gets
// the event for that. A host whose keys have changed has to connect again. An error means that
// nothing has changed.
func (t *Target) Discover(hosts []DiscoveredHost) error {
	var named []Host
	for _, h := range hosts {
		named = append(named, h.Host)
	}
	keys, err := hostMap(named, false)
	if err == nil && len(keys) != len(hosts) {
		err = errors.New("a host is listed twice")
	}
	if err != nil {
		return fmt.Errorf("set discovery: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	news := map[block.NQN]bool{}
	for _, h := range hosts {
		news[h.NQN] = t.tellLocked(h.NQN, h.Entries, h.Version)
	}
	for nqn := range t.told {
		if _, listed := keys[nqn]; !listed {
			news[nqn] = t.tellLocked(nqn, nil, "")
		}
	}
	was := t.discovery.hosts
	t.discovery.hosts = keys
	for _, a := range t.discovery.associations {
		before, now := was[a.host.NQN], keys[a.host.NQN]
		if !before.HostKey.Equal(now.HostKey) || !before.ControllerKey.Equal(now.ControllerKey) {
			a.kill(errors.New("the host's keys have changed"))
		} else if news[a.host.NQN] {
			a.notify(eventDiscovery)
		}
	}
	return nil
}

// tellLocked replaces what one host is told, and reports whether that is news. A host that was once
// told something is remembered, so that its generation never goes back.
func (t *Target) tellLocked(host block.NQN, entries []nvmetcp.DiscoveryEntry, version string) bool {
	before := t.told[host]
	if slices.Equal(before.entries, entries) && before.version == version {
		return false
	}
	t.told[host] = told{slices.Clone(entries), version, before.generation + 1}
	return true
}

// discoveryLog lists the subsystems that the host may connect to, through every port, and then what
// Discover has told it.
func (a *association) discoveryLog(c *conn, retain bool) []byte {
	t := a.sub.t
	t.mu.Lock()
	defer t.mu.Unlock()
	a.mu.Lock()
	a.unmaskLocked(eventDiscovery, retain)
	a.mu.Unlock()
	more := t.told[a.host.NQN]
	log := nvmetcp.DiscoveryLog{Generation: t.generation + more.generation}
	for p := range t.ports {
		for s := range p.linked {
			if s.admitsLocked(a.host.NQN) && !s.cfg.Unlisted {
				log.Entries = append(log.Entries, p.entry(s, c.sock.LocalAddr()))
			}
		}
	}
	slices.SortFunc(log.Entries, func(x, y nvmetcp.DiscoveryEntry) int {
		if x.PortID != y.PortID {
			return int(x.PortID) - int(y.PortID)
		}
		return strings.Compare(string(x.Subsystem), string(y.Subsystem))
	})
	log.Entries = append(log.Entries, more.entries...)
	return log.Append(nil)
}

// entry describes a subsystem behind a port. came is the address that the host has
// connected to; it is reported if the port listens on all addresses.
func (p *Port) entry(s *Subsystem, came net.Addr) nvmetcp.DiscoveryEntry {
	address, service := p.cfg.Address, p.cfg.Service
	if host, port, err := net.SplitHostPort(p.l.Addr().String()); err == nil {
		if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
			host, _, _ = net.SplitHostPort(came.String())
		}
		address, service = or(address, host), or(service, port)
	}
	return nvmetcp.DiscoveryEntry{
		Transport: nvmetcp.TransportTCP, Family: nvmetcp.FamilyOf(address), Type: nvmetcp.SubsystemNVM, Requirements: nvmetcp.NoFlowControl, PortID: p.cfg.ID,
		ControllerID: nvmetcp.DynamicController, AdminQueue: uint16(min(p.t.cfg.QueueDepth, 4096)), Service: service, Subsystem: s.cfg.NQN, Address: address,
	}
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"

	"weft.dev/weft/proto/block"
)

// The targets and the initiator of dev are one process, and reach each other through sockets in its
// directory: over TCP every user of the machine could speak NVMe to the targets. Each target still
// has a portal for the manager's sake; only its port has a meaning: the target's number.
const portalAddress = "127.0.0.1"

func (d *directory) portal(name block.NodeName) block.Portal {
	number := 1 + slices.IndexFunc(d.state.Targets, func(t savedTarget) bool { return t.Name == name })
	return block.Portal{Transport: block.TCP, Address: portalAddress, Port: uint16(number)}
}

// socketOf is the socket of the target with a portal.
func (d *directory) socketOf(p block.Portal) (string, error) {
	for _, t := range d.state.Targets {
		if d.portal(t.Name) == p {
			return d.in(filepath.Join(string(t.Name), "nvme")), nil
		}
	}
	return "", fmt.Errorf("no target of this directory has the portal %v", p)
}

// listenAt opens a target's portal.
func (d *directory) listenAt(p block.Portal) (net.Listener, error) {
	path, err := d.socketOf(p)
	if err != nil {
		return nil, err
	}
	return listenIn(path)
}

// dialTarget connects the initiator, or a target that copies snapshots, to a portal.
func (d *directory) dialTarget(ctx context.Context, _, address string) (net.Conn, error) {
	p, err := block.ParsePortal("tcp://" + address)
	if err != nil {
		return nil, err
	}
	path, err := d.socketOf(p)
	if err != nil {
		return nil, err
	}
	var dialer net.Dialer
	return dialer.DialContext(ctx, "unix", path)
}

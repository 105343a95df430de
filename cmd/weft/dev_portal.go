// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"

	"weft.dev/weft/proto/block"
)

// Targets and initiator of dev are one process, and reach one another through
// sockets in its directory: over TCP every user of the machine could speak NVMe to
// the targets. To the manager each has a portal all the same, of which only the
// port means something: it is the target's number.
const portalAddress = "127.0.0.1"

func (d *devDir) portal(name block.NodeName) block.Portal {
	number := 1 + slices.IndexFunc(d.state.Targets, func(t devTarget) bool { return t.Name == name })
	return block.Portal{Transport: block.TCP, Address: portalAddress, Port: uint16(number)}
}

// socketOf is where the target with a portal listens.
func (d *devDir) socketOf(p block.Portal) (string, error) {
	for _, t := range d.state.Targets {
		if d.portal(t.Name) == p {
			return d.in(filepath.Join(string(t.Name), "nvme")), nil
		}
	}
	return "", fmt.Errorf("no target of this directory has the portal %v", p)
}

// listenAt opens a target's portal.
func (d *devDir) listenAt(p block.Portal) (net.Listener, error) {
	path, err := d.socketOf(p)
	if err != nil {
		return nil, err
	}
	return listenDev(path)
}

// dialTarget is the initiator's way to a portal.
func (d *devDir) dialTarget(ctx context.Context, _, address string) (net.Conn, error) {
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

// SPDX-License-Identifier: Apache-2.0

// Package namespace opens a volume that `weft dev` serves where the kernel can
// have no block device: as an NVMe/TCP namespace, through proto/nvmetcp/host,
// with the calls that a file has. It is for the programs of this folder.
package namespace

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/host"
)

// scheme begins what `weft attach` prints for such a volume.
const scheme = "nvme-tcp://"

// patience is how long connecting and disconnecting may take.
const patience = 10 * time.Second

// Is reports whether a device's name is that of a namespace.
func Is(name string) bool { return strings.HasPrefix(name, scheme) }

// Namespace is an open volume. It waits for as long as the volume does.
type Namespace struct {
	connection *host.Controller
	device     block.Device
}

// Open connects to nvme-tcp://ADDRESS:PORT/SUBSYSTEM?host=ID as that host, and takes
// the subsystem's only namespace.
func Open(name string) (*Namespace, error) {
	where, err := url.Parse(name)
	if err != nil {
		return nil, err
	}
	id, err := block.ParseUUID(where.Query().Get("host"))
	if err != nil {
		return nil, fmt.Errorf("open %s: host: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := host.Connect(ctx, host.Config{
		Portals: []string{where.Host}, Subsystem: block.NQN(strings.TrimPrefix(where.Path, "/")),
		Host: block.HostFromID(id),
	})
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", name, err)
	}
	var device block.Device
	all := c.Namespaces()
	if len(all) == 1 {
		device, err = c.Namespace(all[0].NSID, all[0].UUID)
	} else {
		err = fmt.Errorf("it has %d namespaces, not one", len(all))
	}
	if err != nil {
		c.Cut()
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	return &Namespace{c, device}, nil
}

// ReadAt reads whole blocks.
func (n *Namespace) ReadAt(p []byte, off int64) (int, error) {
	if err := block.ReadAt(n.device, p, off); err != nil {
		return 0, err
	}
	return len(p), nil
}

// WriteAt writes whole blocks.
func (n *Namespace) WriteAt(p []byte, off int64) (int, error) {
	if err := block.WriteAt(n.device, p, off); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Sync returns when what was written is durable.
func (n *Namespace) Sync() error { return block.Flush(n.device) }

// Close disconnects, when what is under way has been answered.
func (n *Namespace) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return n.connection.Close(ctx)
}

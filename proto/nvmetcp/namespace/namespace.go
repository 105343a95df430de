// SPDX-License-Identifier: Apache-2.0

// Package namespace opens a volume that `weft dev` serves on a machine without block
// devices. It opens the volume as an NVMe/TCP namespace, through proto/nvmetcp/host, and
// offers the calls of a file.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/host"
)

// scheme is the prefix of the name that `weft attach` prints for such a volume.
const scheme = "nvme-tcp://"

// patience is how long connecting and disconnecting may take.
const patience = 10 * time.Second

// Is reports whether a device's name names a namespace.
func Is(name string) bool { return strings.HasPrefix(name, scheme) }

// Namespace is an open volume. Its calls wait while the volume's IO waits.
type Namespace struct {
	connection *host.Controller
	device     block.Device
}

// Open connects to nvme-tcp://ADDRESS:PORT/SUBSYSTEM?host=ID with that host ID, and opens
// the subsystem's only namespace.
func Open(ctx context.Context, name string) (*Namespace, error) {
	where, err := url.Parse(name)
	if err != nil {
		return nil, err
	}
	id, err := block.ParseUUID(where.Query().Get("host"))
	if err != nil {
		return nil, fmt.Errorf("open %s: host: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
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

// Zero makes a range read as zeroes. It may take no space afterwards.
func (n *Namespace) Zero(off, length int64) error {
	return block.Do(n.device, &block.IO{Op: block.OpWriteZeroes, Unmap: true, Off: off, Len: length})
}

// Sync returns when all completed writes are durable.
func (n *Namespace) Sync() error { return block.Flush(n.device) }

// Close waits for outstanding IO and disconnects. If the IO takes too long, its connection is cut.
func (n *Namespace) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := n.connection.Close(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		n.connection.Cut()
	}
	return err
}

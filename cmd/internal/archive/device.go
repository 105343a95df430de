// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/host"
)

// device is what a volume is attached as.
type device interface {
	io.ReaderAt
	io.WriterAt
	Zero(off, n int64) error // the range reads as zeroes afterwards, and may take no space
	Sync() error             // what was written is durable
	Close() error
}

// patience is how long it may take to reach a device that is a namespace.
const patience = 10 * time.Second

// open opens a device by the name that `weft attach` prints: a block device, or of `weft dev` without
// block devices a namespace, nvme-tcp://ADDRESS:PORT/SUBSYSTEM?host=ID.
func open(ctx context.Context, name string, writable bool) (device, error) {
	if strings.HasPrefix(name, "nvme-tcp://") {
		return openNamespace(ctx, name)
	}
	flags := os.O_RDONLY
	if writable {
		flags = os.O_RDWR | os.O_EXCL // nobody else has it open or mounted
	}
	f, err := os.OpenFile(name, flags, 0)
	if err != nil {
		return nil, err
	}
	return blockDevice{f}, nil
}

// blockDevice is a block device of the kernel.
type blockDevice struct{ *os.File }

func (d blockDevice) Zero(off, n int64) error {
	err := unix.Fallocate(int(d.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	if err == nil {
		return nil
	}
	_, err = d.WriteAt(make([]byte, n), off)
	return err
}

type namespace struct {
	connection *host.Controller
	device     block.Device
}

func openNamespace(ctx context.Context, name string) (device, error) {
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
	c, err := host.Connect(ctx, host.Config{Portals: []string{where.Host}, Subsystem: block.NQN(strings.TrimPrefix(where.Path, "/")), Host: block.HostFromID(id)})
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", name, err)
	}
	all := c.Namespaces()
	if len(all) != 1 {
		c.Cut()
		return nil, fmt.Errorf("open %s: it has %d namespaces, not one", name, len(all))
	}
	d, err := c.Namespace(all[0].NSID, all[0].UUID)
	if err != nil {
		c.Cut()
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	return namespace{c, d}, nil
}

func (n namespace) ReadAt(p []byte, off int64) (int, error) {
	return len(p), block.ReadAt(n.device, p, off)
}
func (n namespace) WriteAt(p []byte, off int64) (int, error) {
	return len(p), block.WriteAt(n.device, p, off)
}

func (n namespace) Zero(off, length int64) error {
	return block.Do(n.device, &block.IO{Op: block.OpWriteZeroes, Unmap: true, Off: off, Len: length})
}

func (n namespace) Sync() error { return block.Flush(n.device) }

func (n namespace) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := n.connection.Close(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		n.connection.Cut()
	}
	return err
}

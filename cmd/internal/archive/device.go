// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"context"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/nvmetcp/namespace"
)

// device is the block device, or namespace, of an attached volume.
type device interface {
	io.ReaderAt
	io.WriterAt
	Zero(off, n int64) error // the range reads as zeroes afterwards, and may take no space
	Sync() error             // what was written is durable
	Close() error
}

// open opens a device by the name that `weft attach` prints: a block device, or of `weft dev` without
// block devices a namespace, nvme-tcp://ADDRESS:PORT/SUBSYSTEM?host=ID.
func open(ctx context.Context, name string, writable bool) (device, error) {
	if namespace.Is(name) {
		n, err := namespace.Open(ctx, name)
		if err != nil { // a nil *Namespace would be a device
			return nil, err
		}
		return n, nil
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

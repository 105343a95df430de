// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"weft.dev/weft/proto/nvmetcp/namespace"
)

// served is an archive on a volume that is an NVMe/TCP namespace, for machines without
// block devices. The writer uses the volume's first blocks; the archive follows them.
type served struct {
	name string
	open *namespace.Namespace
}

const (
	archiveOffset = 2 * span << 20
	archivePiece  = 1 << 20 // unit of reads and writes
)

func (v *served) note() string { return "archive.sums" }

func (v *served) format(*demo) {}

func (v *served) enter(d *demo) {
	var err error
	v.open, err = namespace.Open(context.Background(), v.name)
	d.must(err)
	d.undo = append(d.undo, v.open.Close)
}

func (v *served) leave(d *demo) { d.done() }

func (v *served) put(d *demo, files []string) (size int64) {
	to := &pieces{device: v.open, off: archiveOffset}
	archive := tar.NewWriter(to)
	for _, name := range files {
		n, err := addFile(archive, name)
		d.must(err)
		size += n
	}
	d.must(errors.Join(archive.Close(), to.flush(), v.open.Sync()))
	return size
}

func addFile(archive *tar.Writer, name string) (int64, error) {
	f, err := os.Open(name)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if err := archive.WriteHeader(&tar.Header{Name: onVolume(name), Mode: 0o600, Size: info.Size()}); err != nil {
		return 0, err
	}
	return io.Copy(archive, f)
}

func (v *served) sums(d *demo) sums {
	s := sums{}
	for archive := tar.NewReader(&pieces{device: v.open, off: archiveOffset}); ; {
		header, err := archive.Next()
		if err == io.EOF {
			return s
		}
		d.must(err)
		_, err = s.add(header.Name, archive)
		d.must(err)
	}
}

func (v *served) write(d *demo) *writer { return d.startWriter(v.name) }

// pieces reads or writes a device from an offset on, in pieces of whole blocks.
type pieces struct {
	device *namespace.Namespace
	off    int64
	buffer []byte // read but not used yet, or not written yet
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.buffer) == 0 {
		p.buffer = make([]byte, archivePiece)
		if _, err := p.device.ReadAt(p.buffer, p.off); err != nil {
			return 0, fmt.Errorf("read the archive at %d: %w", p.off, err)
		}
		p.off += archivePiece
	}
	n := copy(b, p.buffer)
	p.buffer = p.buffer[n:]
	return n, nil
}

func (p *pieces) Write(b []byte) (int, error) {
	p.buffer = append(p.buffer, b...)
	for len(p.buffer) >= archivePiece {
		if err := p.write(); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

func (p *pieces) write() error {
	if _, err := p.device.WriteAt(p.buffer[:archivePiece], p.off); err != nil {
		return fmt.Errorf("write the archive at %d: %w", p.off, err)
	}
	p.buffer, p.off = p.buffer[archivePiece:], p.off+archivePiece
	return nil
}

// flush writes the last piece, padded with zeroes.
func (p *pieces) flush() error {
	p.buffer = append(p.buffer, make([]byte, archivePiece-len(p.buffer))...)
	return p.write()
}

// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"weft.dev/weft/e2e/guest"
)

// Drive is a disk of a machine. Its file outlives kills and boots.
type Drive struct {
	Serial string

	id   string
	nvme bool
	path string
}

// newDrive makes the drive's file: sparse and blank, or with a file system for
// the state disk.
func newDrive(ctx context.Context, m *Machine, i int, o driveOption) (*Drive, error) {
	size, err := parseSize(o.size)
	if err != nil {
		return nil, err
	}
	d := &Drive{
		Serial: o.serial,
		id:     fmt.Sprintf("drive%d", i),
		nvme:   o.nvme,
		path:   filepath.Join(m.cluster.drives, m.name+"-"+o.serial+".img"),
	}
	if o.serial == guest.StateSerial {
		return d, makeExt4(ctx, d.path, size)
	}
	f, err := os.OpenFile(d.path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return d, f.Truncate(size)
}

// Path is the drive's file on this machine, for looking at what a guest wrote.
func (d *Drive) Path() string { return d.path }

// cacheNoFlush: the host's page cache outlives a killed QEMU, so a flush to the
// host's own disk would only cost time. What the guest was told is written,
// survives Kill.
const cacheNoFlush = "cache.direct=off,cache.no-flush=on"

func (d *Drive) fileNode() string {
	return fmt.Sprintf("driver=file,node-name=%s-file,filename=%s,discard=unmap,%s", d.id, d.path, cacheNoFlush)
}

func (d *Drive) node() string {
	return fmt.Sprintf("driver=raw,node-name=%s,file=%s-file,discard=unmap,%s", d.id, d.id, cacheNoFlush)
}

func (d *Drive) device() string {
	if d.nvme {
		return fmt.Sprintf("nvme,id=%s-device,drive=%s,serial=%s", d.id, d.id, d.Serial)
	}
	return fmt.Sprintf("virtio-blk-pci,id=%s-device,drive=%s,serial=%s", d.id, d.id, d.Serial)
}

// parseSize reads "512MiB", "2GiB" or a number of bytes.
func parseSize(s string) (int64, error) {
	shift := 0
	number := s
	for unit, bits := range map[string]int{"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40} {
		if n, ok := strings.CutSuffix(s, unit); ok {
			number, shift = n, bits
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > 1<<62>>shift {
		return 0, fmt.Errorf("size %q: want a number with KiB, MiB, GiB or TiB", s)
	}
	return n << shift, nil
}

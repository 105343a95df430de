// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/e2e/guest"
)

// Drive is a disk of a machine. Its file outlives kills and boots.
type Drive struct {
	Serial string

	machine *Machine
	id      string
	nvme    bool
	path    string
	cache   *volatile // nil: it has none that is lost

	mu     sync.Mutex
	faults int // filters made
}

// newDrive creates the drive's file: sparse and blank, or with a file system for the state
// disk.
func newDrive(ctx context.Context, m *Machine, i int, o driveOption) (*Drive, error) {
	size, err := parseSize(o.size)
	if err != nil {
		return nil, err
	}
	d := &Drive{
		Serial:  o.serial,
		machine: m,
		id:      fmt.Sprintf("drive%d", i),
		nvme:    o.nvme,
		path:    filepath.Join(m.cluster.drives, m.name+"-"+o.serial+".img"),
	}
	switch o.serial {
	case guest.StateSerial:
		return d, makeExt4(ctx, d.path, size)
	case guest.RootSerial:
		return d, m.cluster.image.copyUserland(ctx, d.path)
	}
	f, err := os.OpenFile(d.path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil || !o.volatile {
		return d, err
	}
	d.cache, err = newVolatile(d.path)
	return d, err
}

// Lost is how many blocks of 4 KiB a volatile drive has lost with its cache so far.
func (d *Drive) Lost() int {
	if d.cache == nil {
		return 0
	}
	return d.cache.lost()
}

// Path is the drive's file on this machine, to inspect what a guest wrote.
func (d *Drive) Path() string { return d.path }

// cacheNoFlush turns flushes to the host's disk off. The host's page cache survives when
// QEMU is killed, so they would only cost time: data that the guest was told is written
// survives Kill without them.
const cacheNoFlush = "cache.direct=off,cache.no-flush=on"

func (d *Drive) fileNode() string {
	if d.cache != nil {
		return fmt.Sprintf("driver=nbd,node-name=%s-file,server.type=unix,server.path=%s,discard=unmap", d.id, d.cache.path)
	}
	return fmt.Sprintf("driver=file,node-name=%s-file,filename=%s,discard=unmap,%s", d.id, d.path, cacheNoFlush)
}

func (d *Drive) node() string {
	node := fmt.Sprintf("driver=raw,node-name=%s,file=%s-file,discard=unmap", d.id, d.id)
	if d.cache != nil {
		return node
	}
	return node + "," + cacheNoFlush
}

func (d *Drive) device() string {
	o := d.deviceOptions()
	return fmt.Sprintf("%s,id=%s,drive=%s,serial=%s", o["driver"], o["id"], o["drive"], o["serial"])
}

func (d *Drive) deviceOptions() map[string]string {
	driver := "virtio-blk-pci"
	if d.nvme {
		driver = "nvme"
	}
	return map[string]string{"driver": driver, "id": d.id + "-device", "drive": d.id, "serial": d.Serial}
}

// DriveFault selects the operations that a drive fails. The zero value is a healthy drive.
type DriveFault struct {
	Reads, Writes, Flushes bool
}

// Fail makes a running drive return I/O errors; the zero DriveFault makes it healthy again.
// It lasts until the machine's next boot.
func (d *Drive) Fail(ctx context.Context, f DriveFault) error {
	b, err := d.machine.current()
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := b.setFault(ctx, d, f); err != nil {
		return fmt.Errorf("fail drive %s of %s: %w", d.Serial, d.machine.name, err)
	}
	return nil
}

// Warn sets the critical warning bits of a running NVMe drive's health log (QEMU knows bits 0
// to 5). It lasts until the machine's next boot.
func (d *Drive) Warn(ctx context.Context, bits uint8) error {
	b, err := d.machine.current()
	if err != nil {
		return err
	}
	_, err = b.qmp.do(ctx, "qom-set", map[string]any{
		"path": "/machine/peripheral/" + d.id + "-device", "property": "smart_critical_warning", "value": bits,
	})
	if err != nil {
		return fmt.Errorf("warn of drive %s of %s: %w", d.Serial, d.machine.name, err)
	}
	return nil
}

// setFault inserts a failing filter between the drive's node and its file, or removes it.
func (b *boot) setFault(ctx context.Context, d *Drive, f DriveFault) error {
	file := d.id + "-file"
	if f != (DriveFault{}) {
		filter := d.faultNode(f)
		if _, err := b.qmp.do(ctx, "blockdev-add", filter); err != nil {
			return err
		}
		file = filter["node-name"].(string)
	}
	_, err := b.qmp.do(ctx, "blockdev-reopen", map[string]any{"options": []any{map[string]any{
		"driver": "raw", "node-name": d.id, "file": file, "discard": "unmap",
		"cache": map[string]any{"direct": false, "no-flush": d.cache == nil},
	}}})
	return err
}

// faultNode is a filter over the drive's file. Each filter needs a new name: the current
// one cannot be removed before the next one has replaced it.
func (d *Drive) faultNode(f DriveFault) map[string]any {
	d.faults++
	rules := []map[string]any{}
	for kind, on := range map[string]bool{"read": f.Reads, "write": f.Writes, "flush": f.Flushes} {
		if on {
			rules = append(rules, map[string]any{"event": "none", "iotype": kind, "errno": int(unix.EIO), "once": false, "immediately": false})
		}
	}
	return map[string]any{
		"driver": "blkdebug", "node-name": fmt.Sprintf("%s-fault%d", d.id, d.faults),
		"image": d.id + "-file", "inject-error": rules,
	}
}

// Pull removes a running drive as a person would: without warning, with I/O in flight. Plug
// puts it back.
func (d *Drive) Pull(ctx context.Context) error {
	b, err := d.machine.current()
	if err != nil {
		return err
	}
	if err := b.unplug(ctx, d.id+"-device"); err != nil {
		return fmt.Errorf("pull drive %s of %s: %w", d.Serial, d.machine.name, err)
	}
	return nil
}

func (b *boot) unplug(ctx context.Context, device string) error {
	if _, err := b.qmp.do(ctx, "device_del", map[string]any{"id": device}); err != nil {
		return err
	}
	for {
		select {
		case e := <-b.events:
			if e.name == "DEVICE_DELETED" && strings.Contains(string(e.data), `"`+device+`"`) {
				return nil
			}
		case <-b.gone:
			return b.goneError()
		case <-ctx.Done():
			return fmt.Errorf("the guest did not release it: %w", context.Cause(ctx))
		}
	}
}

// Plug puts a pulled drive back.
func (d *Drive) Plug(ctx context.Context) error {
	b, err := d.machine.current()
	if err != nil {
		return err
	}
	if _, err := b.qmp.do(ctx, "device_add", d.deviceOptions()); err != nil {
		return fmt.Errorf("plug drive %s of %s: %w", d.Serial, d.machine.name, err)
	}
	return nil
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

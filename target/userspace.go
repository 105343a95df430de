// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/userspace"
)

// userKernel serves from this process in place of the kernel.
func userKernel(c Config, hungry func()) (kernel, error) {
	m, err := newMachine(c, hungry, false)
	if err != nil {
		return kernel{}, err
	}
	k := kernel{
		hardware: userDrives{m.Drives, sensors{c.Root}},
		mapper:   func() (mapper, error) { return m.Legs, nil },
		names:    m.Legs,
		counting: &counting{legs: m.Legs.Figures},
		exports:  func() (exporter, error) { return m.Exports.OpenTree() },
		watch:    watchUser(c),
		readOnly: true, integrity: true, thin: true,
		before: func() (kernel, bool, error) { return kernelBefore(c, hungry) },
	}
	k.inProcess(m)
	return k, nil
}

// kernelBefore is the kernel's data path if an earlier agent has left exports there: otherwise a
// leg that is reported as fenced here could still be written there. An agent with files alone
// cannot take it over.
func kernelBefore(c Config, hungry func()) (kernel, bool, error) {
	served, err := kernelServes(c.Root)
	switch {
	case err != nil:
		return kernel{}, false, err
	case served == "":
		return kernel{}, false, kernelLegs(c)
	case c.Rehearsal:
		return kernel{}, false, nil
	case c.FilesOnly:
		return kernel{}, false, fmt.Errorf("the kernel exports %s: run `weft target` with data path %q until it is detached, or restart the machine; then this process can serve instead", served, Kernel)
	}
	k, err := kernelAndProcess(c, hungry)
	return k, true, err
}

// userDrives adapts the drives to the hardware that openDrives expects.
type userDrives struct {
	*userspace.Drives
	sensors
}

// Open opens the drive at path.
func (d userDrives) Open(path string) (disk, error) {
	opened, err := d.Drives.Open(path)
	if err != nil {
		return nil, err
	}
	return opened, nil
}

// watchUser reports no events for files.
func watchUser(c Config) func(context.Context, func()) error {
	if !c.FilesOnly {
		return watchDevices
	}
	return func(ctx context.Context, _ func()) error {
		<-ctx.Done()
		return context.Cause(ctx)
	}
}

// kernelServes names one of our exports in the kernel; empty if it has none.
func kernelServes(root string) (string, error) {
	entries, err := os.ReadDir(filepath.Join(root, "sys/kernel/config/nvmet/subsystems"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read the kernel's exports: %w", err)
	}
	for _, e := range entries {
		if block.NQN(e.Name()).Ours() {
			return e.Name(), nil
		}
	}
	return "", nil
}

// kernelLegs unmaps the legs that an earlier agent has left mapped in the kernel: each of them
// keeps its drive from being opened here.
func kernelLegs(c Config) error {
	if c.FilesOnly {
		return nil // its drives are files, on which the kernel maps no legs
	}
	if _, err := os.Stat(filepath.Join(c.Root, "dev/mapper/control")); err != nil {
		return nil // no device mapper, and so no legs
	}
	m, err := dm.Open()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil // without permission to look: drives that are mapped will report busy
	}
	if err != nil {
		return fmt.Errorf("read the kernel's mapped legs: %w", err)
	}
	defer m.Close()
	return unmapLegs(c.Log, m)
}

func unmapLegs(log *slog.Logger, m mapper) error {
	left, err := m.Devices(dmPrefix)
	if err == nil {
		var under []dm.State
		under, err = m.Devices(userspace.RowsPrefix)
		left = append(left, under...)
	}
	if err != nil {
		return fmt.Errorf("read the kernel's mapped legs: %w", err)
	}
	for _, s := range dm.Diff(left, nil) { // each before those that it is over
		if err := m.Do(s); err != nil {
			return fmt.Errorf("unmap %s, left by data path %q: %w", s.Device.Name, Kernel, err)
		}
		log.Info("leg unmapped from the kernel", "device", s.Device.Name)
	}
	return nil
}

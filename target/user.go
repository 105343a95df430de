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

// userKernel is this process in the kernel's place.
func userKernel(c Config) (kernel, error) {
	if err := kernelServes(c.Root); err != nil {
		return kernel{}, err
	}
	if err := kernelLegs(c); err != nil {
		return kernel{}, err
	}
	m, err := userspace.New(userspace.Config{Root: c.Root, Files: c.Files, FilesOnly: c.FilesOnly, Listen: c.Listen, Medium: c.Medium, Log: c.Log})
	if err != nil {
		return kernel{}, err
	}
	return kernel{
		hardware: userDrives{m.Drives},
		mapper:   func() (mapper, error) { return m.Legs, nil },
		names:    m.Legs,
		exports:  func() (exporter, error) { return m.Exports.OpenTree() },
		watch:    watchUser(c),
		close:    m.Close,
		readOnly: true,
	}, nil
}

// userDrives is the hardware, with its drives as the shelf knows them.
type userDrives struct{ *userspace.Drives }

// Open opens the drive at path.
func (d userDrives) Open(path string) (disk, error) {
	opened, err := d.Drives.Open(path)
	if err != nil {
		return nil, err
	}
	return opened, nil
}

// watchUser has no news of files.
func watchUser(c Config) func(context.Context, func()) error {
	if !c.FilesOnly {
		return watchDevices
	}
	return func(ctx context.Context, _ func()) error {
		<-ctx.Done()
		return context.Cause(ctx)
	}
}

// kernelServes is an error while the kernel exports legs, as an agent before this
// one has left it: what is reported here as fenced could still be written there.
func kernelServes(root string) error {
	entries, err := os.ReadDir(filepath.Join(root, "sys/kernel/config/nvmet/subsystems"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for what the kernel exports: %w", err)
	}
	for _, e := range entries {
		if block.NQN(e.Name()).Ours() {
			return fmt.Errorf("the kernel exports %s: detach what is attached with data path %q, or restart the machine, before this process serves in its place", e.Name(), Kernel)
		}
	}
	return nil
}

// kernelLegs lets go of the legs that an agent before this one has left mapped in
// the kernel: each keeps its drive from being opened here.
func kernelLegs(c Config) error {
	if c.FilesOnly {
		return nil // on no device
	}
	if _, err := os.Stat(filepath.Join(c.Root, "dev/mapper/control")); err != nil {
		return nil // no device mapper, and so no legs
	}
	m, err := dm.Open()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil // who may not look finds its drives busy, if they are
	}
	if err != nil {
		return fmt.Errorf("look for legs that the kernel has mapped: %w", err)
	}
	defer m.Close()
	return unmapLegs(c.Log, m)
}

func unmapLegs(log *slog.Logger, m mapper) error {
	left, err := m.Devices(dmPrefix)
	if err != nil {
		return fmt.Errorf("look for legs that the kernel has mapped: %w", err)
	}
	for _, d := range left {
		if err := m.Do(dm.Step{Op: dm.OpRemove, Device: d.Device()}); err != nil {
			return fmt.Errorf("unmap %s, which data path %q has left: %w", d.Name, Kernel, err)
		}
		log.Info("leg unmapped from the kernel", "device", d.Name)
	}
	return nil
}

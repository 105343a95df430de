// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"

	"weft.dev/weft/target/userspace"
)

// userKernel is this process in the kernel's place.
func userKernel(c Config) (kernel, error) {
	m, err := userspace.New(userspace.Config{Root: c.Root, Files: c.Files, FilesOnly: c.FilesOnly, Log: c.Log})
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

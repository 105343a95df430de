// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// systemd waits for a device of /etc/fstab until udev has named it. udev takes the name from a
// file of the disk, <DevDir>/.weft/<disk>, by the rules in deploy/udev.

// Announce tells udev that a disk is a volume that is ready for use. Where there is no udev,
// nothing comes of it.
func Announce(devDir, sysDir, disk string, name block.VolumeName) error {
	file := announcement(devDir, disk)
	err := os.MkdirAll(filepath.Dir(file), 0o755)
	if err == nil {
		err = os.WriteFile(file, fmt.Appendf(nil, "WEFT_VOLUME=%s\n", name), 0o644)
	}
	if err != nil {
		return fmt.Errorf("announce %s to udev: %w", disk, err)
	}
	return changed(sysDir, disk)
}

// Withdraw takes an announcement back: the disk may serve another purpose.
func Withdraw(devDir, sysDir, disk string) error {
	err := os.Remove(announcement(devDir, disk))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("withdraw %s from udev: %w", disk, err)
	}
	return changed(sysDir, disk)
}

func announcement(devDir, disk string) string { return filepath.Join(devDir, ".weft", disk) }

// changed makes the kernel send udev an event of the disk. A container may not be allowed to;
// there, no udev has the rules either.
func changed(sysDir, disk string) error {
	err := os.WriteFile(filepath.Join(sysDir, "block", disk, "uevent"), []byte("change"), 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
		return nil
	}
	return err
}

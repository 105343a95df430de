// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const (
	userlandSuite = "bookworm"
	userlandSize  = "1GiB"
)

// userlandPackages are the packages beside the essential ones.
var userlandPackages = []string{"systemd-sysv", "udev", "kmod", "e2fsprogs", "iproute2"}

// userlandModules are modules that systemd and the machines' own tools need, beside those of our
// own guests.
var userlandModules = []string{"autofs4", "overlay", "vfat"}

// quietUnits would only slow an emulated machine down, or wait for what it lacks.
var quietUnits = []string{
	"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer",
	"getty@tty1.service", "getty-static.service", "serial-getty@ttyS0.service", "systemd-timesyncd.service", "systemd-pstore.service",
}

const controlUnit = `[Unit]
Description=The test's control of this machine
DefaultDependencies=no
After=systemd-remount-fs.service

[Service]
ExecStart=/usr/local/sbin/weft-guest userland
Environment=HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin

[Install]
WantedBy=sysinit.target
`

// copyUserland writes a copy of the userland's disk to path.
func (i Image) copyUserland(ctx context.Context, path string) error {
	image, err := i.userland(ctx)
	if err != nil {
		return fmt.Errorf("build Debian's userland: %w", err)
	}
	if out, err := exec.CommandContext(ctx, "cp", "--sparse=always", image, path).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", image, err, out)
	}
	return nil
}

// userland is a disk with Debian, the kernel's modules and the service of the control port.
func (i Image) userland(ctx context.Context) (string, error) {
	if os.Geteuid() != 0 {
		return "", errors.New("files of several owners can be made only by root")
	}
	dir, err := cacheDir("userland")
	if err != nil {
		return "", err
	}
	unlock, err := lockDir(dir)
	if err != nil {
		return "", err
	}
	defer unlock()
	base, err := debian(ctx, dir)
	if err != nil {
		return "", err
	}
	key, err := hashOf(slices.Concat([]string{"2", filepath.Base(base), i.Kernel.Release, controlUnit}, userlandModules, quietUnits, guestModules()), i.Init)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "userland-"+key+".ext4")
	if touch(path) {
		return path, nil
	}
	stage, err := os.MkdirTemp(dir, "staging-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(stage)
	root := filepath.Join(stage, "root")
	if out, err := exec.CommandContext(ctx, "cp", "-a", base, root).CombinedOutput(); err != nil {
		return "", fmt.Errorf("copy %s: %w: %s", base, err, out)
	}
	if err := i.furnish(ctx, root); err != nil {
		return "", err
	}
	size, err := parseSize(userlandSize)
	if err != nil {
		return "", err
	}
	return path, makeExt4(ctx, path, size, "-d", root)
}

// debian is a directory with Debian's files, as its package manager installs them.
func debian(ctx context.Context, dir string) (string, error) {
	key, err := hashOf(append([]string{userlandSuite, "1"}, userlandPackages...))
	if err != nil {
		return "", err
	}
	root := filepath.Join(dir, "debian-"+key)
	if _, err := os.Stat(root); err == nil {
		return root, nil
	}
	program, err := lookProgram("mmdebstrap")
	if err != nil {
		return "", fmt.Errorf("%w; install mmdebstrap", err)
	}
	notice("installing Debian %s with %s (2 minutes, once)", userlandSuite, strings.Join(userlandPackages, " "))
	partial := root + ".new"
	if err := os.RemoveAll(partial); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, program, "--quiet", "--mode=root", "--format=directory", "--variant=minbase",
		"--include="+strings.Join(userlandPackages, ","),
		"--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/i18n/*",
		`--customize-hook=chroot "$1" systemctl enable systemd-networkd`,
		userlandSuite, partial)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.Join(fmt.Errorf("mmdebstrap: %w: %s", err, tailOf(out)), os.RemoveAll(partial))
	}
	return root, os.Rename(partial, root)
}

// furnish adds to Debian what makes it a machine of a test.
func (i Image) furnish(ctx context.Context, root string) error {
	init, err := os.ReadFile(i.Init)
	if err != nil {
		return err
	}
	files := map[string][]byte{
		"usr/local/sbin/weft-guest":               init,
		"etc/systemd/system/weft-control.service": []byte(controlUnit),
		"etc/machine-id":                          []byte("77656674766d77656674766d77656674\n"), // known: not the machine's first boot
		"etc/fstab":                               nil,
		"etc/.updated":                            nil, // newer than /usr: no caches to update at boot
		"var/.updated":                            nil,
	}
	modules, err := selectModules(i.Kernel, slices.Concat(guestModules(), userlandModules))
	if err != nil {
		return err
	}
	dir := filepath.Join("lib/modules", i.Kernel.Release)
	for _, name := range slices.Sorted(maps.Keys(modules)) {
		files[filepath.Join(dir, modules[name].path)] = modules[name].image
	}
	for _, name := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		if files[filepath.Join(dir, name)], err = os.ReadFile(filepath.Join(i.Kernel.Modules, name)); err != nil {
			return err
		}
	}
	for name, content := range files {
		file, mode := filepath.Join(root, name), fs.FileMode(0o644)
		if name == "usr/local/sbin/weft-guest" {
			mode = 0o755
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, content, mode)); err != nil {
			return err
		}
	}
	wants := filepath.Join(root, "etc/systemd/system/sysinit.target.wants")
	err = errors.Join(os.MkdirAll(wants, 0o755), os.Symlink("../weft-control.service", filepath.Join(wants, "weft-control.service")))
	for _, unit := range quietUnits {
		err = errors.Join(err, remask(filepath.Join(root, "etc/systemd/system", unit)))
	}
	if err != nil {
		return err
	}
	depmod, err := lookProgram("depmod")
	if err != nil {
		return fmt.Errorf("%w; install kmod", err)
	}
	if out, err := exec.CommandContext(ctx, depmod, "-b", root, i.Kernel.Release).CombinedOutput(); err != nil {
		return fmt.Errorf("depmod: %w: %s", err, out)
	}
	return nil
}

// remask masks a unit, whatever stands there.
func remask(file string) error {
	return errors.Join(os.RemoveAll(file), os.Symlink("/dev/null", file))
}

// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/u-root/u-root/pkg/kmodule"
	"golang.org/x/sys/unix"
)

// A machine can boot a distribution's own userland instead of ours: a disk with its root, on which
// its init (systemd) becomes process 1. A service there serves the control port.

const (
	// UserlandArg is the word of the kernel's command line that asks for it.
	UserlandArg = "weft.userland"
	// RootSerial is the disk with the userland's root file system.
	RootSerial = "weft-root"
)

// wantsUserland reports whether the kernel was asked to boot the disk's userland.
func wantsUserland() bool {
	for word := range strings.FieldsSeq(read("/proc/cmdline")) {
		if word == UserlandArg {
			return true
		}
	}
	return false
}

// enterUserland makes the disk the root and executes its init. It returns only on error.
func enterUserland() error {
	probe, err := kmodule.NewProber(kmodule.ProbeOpts{})
	if err != nil {
		return err
	}
	const crc32c = "crc32c_generic" // see mountDisks
	for _, m := range []string{"virtio_pci", "virtio_console", "virtio_blk", "virtio_net", crc32c, "ext4"} {
		if err := probe.Probe(m, ""); err != nil && m != crc32c {
			return fmt.Errorf("load module %s: %w", m, err)
		}
	}
	disk, err := diskOf(RootSerial)
	if err != nil {
		return err
	}
	const root = "/sysroot"
	if err := (mount{disk, root, "ext4", 0}).do(); err != nil {
		return err
	}
	for _, m := range []string{"/dev", "/proc", "/sys", "/run"} {
		if err := unix.Mount(m, root+m, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", m, err)
		}
	}
	err = errors.Join(os.Chdir(root), unix.Mount(".", "/", "", unix.MS_MOVE, ""), unix.Chroot("."), os.Chdir("/"))
	if err != nil {
		return fmt.Errorf("switch to %s: %w", disk, err)
	}
	return syscall.Exec("/sbin/init", []string{"/sbin/init"}, []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TERM=dumb"})
}

// diskOf finds a virtio disk by its serial number.
func diskOf(serial string) (string, error) {
	found, err := filepath.Glob("/sys/block/vd*/serial")
	if err != nil {
		return "", err
	}
	for _, file := range found {
		if read(file) == serial {
			return "/dev/" + filepath.Base(filepath.Dir(file)), nil
		}
	}
	return "", fmt.Errorf("no disk has the serial number %s", serial)
}

// ServeUserland serves the control port from a service of the userland. Devices and network are the
// userland's own affair.
func ServeUserland() error {
	port, err := openPort(portLimit)
	if err != nil {
		return err
	}
	defer port.Close()
	s := &Server{Reset: reset, Setup: func(c Setup) error {
		return errors.Join(setClock(c.Time), unix.Sethostname([]byte(c.Hostname)), os.WriteFile("/etc/hostname", []byte(c.Hostname+"\n"), 0o644))
	}}
	return s.Serve(port, release())
}

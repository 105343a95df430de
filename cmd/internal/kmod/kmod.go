// SPDX-License-Identifier: Apache-2.0

// Package kmod sees to it that the parts of the kernel that a daemon needs are
// there: it looks for each, and runs modprobe only for those that are missing,
// so that it works with parts that are built in, that an image has loaded
// beforehand, and where there is no modprobe at all.
package kmod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Module is one part of the kernel.
type Module struct {
	Name string // as modprobe takes it
	Sign string // path, under the root, that is there when the part is
}

// The parts that Weft uses. A part that is built in and has no parameters shows no
// directory in /sys/module; modprobe is then run, and does nothing.
var (
	ConfigFS = Module{"configfs", "sys/kernel/config"}
	NvmetTCP = Module{"nvmet-tcp", "sys/module/nvmet_tcp"}
	Nvmet    = Module{"nvmet", "sys/kernel/config/nvmet"}
	NvmeTCP  = Module{"nvme-tcp", "sys/module/nvme_tcp"}
	Fabrics  = Module{"nvme-fabrics", "dev/nvme-fabrics"}
	DM       = Module{"dm-mod", "dev/mapper/control"}
	DMMirror = Module{"dm-mirror", "sys/module/dm_mirror"}
	Loop     = Module{"loop", "dev/loop-control"}
	TCPDiag  = Module{"tcp_diag", "sys/module/tcp_diag"}
	UBLK     = Module{"ublk_drv", "dev/ublk-control"}
	NBD      = Module{"nbd", "sys/module/nbd"}
	FUSE     = Module{"fuse", "dev/fuse"}
)

// Loader loads modules. The zero value looks under / and runs modprobe.
type Loader struct {
	Root     string                                    // "" means "/"
	Modprobe func(ctx context.Context, m string) error // nil means the program
}

// Need loads what is missing, and names everything that cannot be had.
func (l Loader) Need(ctx context.Context, modules ...Module) error {
	var errs []error
	for _, m := range modules {
		if l.Present(m) {
			continue
		}
		if err := l.modprobe(ctx, m.Name); err != nil {
			errs = append(errs, fmt.Errorf("load kernel module %s: %w", m.Name, err))
		}
		// No second look: a part that is built in and has no parameters
		// has no directory in /sys/module, and modprobe knows it.
	}
	return errors.Join(errs...)
}

// Present reports whether the sign of a part is there.
func (l Loader) Present(m Module) bool {
	_, err := os.Stat(filepath.Join("/", l.Root, m.Sign))
	return err == nil
}

// Usable is Need, and then looks for what a loaded part makes elsewhere than in
// /sys/module: a container may load a module and see nothing of it.
func (l Loader) Usable(ctx context.Context, modules ...Module) error {
	if err := l.Need(ctx, modules...); err != nil {
		return err
	}
	for _, m := range modules {
		if !strings.HasPrefix(m.Sign, "sys/module/") && !l.Present(m) {
			return fmt.Errorf("/%s is not there", m.Sign)
		}
	}
	return nil
}

func (l Loader) modprobe(ctx context.Context, name string) error {
	if l.Modprobe != nil {
		return l.Modprobe(ctx, name)
	}
	out, err := exec.CommandContext(ctx, "modprobe", "--", name).CombinedOutput()
	if text := strings.TrimSpace(string(out)); err != nil && text != "" {
		return fmt.Errorf("%w: %s", err, text)
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0

// Package kmod makes sure that the kernel modules that a daemon needs are there. It looks for each,
// and runs modprobe only for the missing ones. So it also works with built-in modules, with modules
// that an image has loaded beforehand, and without modprobe.
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

// Module is a part of the kernel that may be a module.
type Module struct {
	Name string // as modprobe expects it
	Sign string // path, under the root, that exists when the part is there
}

// The modules that Weft uses. A built-in one without parameters has no directory in /sys/module;
// modprobe is then run, and does nothing.
var (
	ConfigFS  = Module{"configfs", "sys/kernel/config"}
	NvmetTCP  = Module{"nvmet-tcp", "sys/module/nvmet_tcp"}
	Nvmet     = Module{"nvmet", "sys/kernel/config/nvmet"}
	NvmetRDMA = Module{"nvmet-rdma", "sys/module/nvmet_rdma"}
	NvmeTCP   = Module{"nvme-tcp", "sys/module/nvme_tcp"}
	NvmeRDMA  = Module{"nvme-rdma", "sys/module/nvme_rdma"}
	Fabrics   = Module{"nvme-fabrics", "dev/nvme-fabrics"}
	DM        = Module{"dm-mod", "dev/mapper/control"}
	DMMirror  = Module{"dm-mirror", "sys/module/dm_mirror"}
	Loop      = Module{"loop", "dev/loop-control"}
	TCPDiag   = Module{"tcp_diag", "sys/module/tcp_diag"}
	UBLK      = Module{"ublk_drv", "dev/ublk-control"}
	NBD       = Module{"nbd", "sys/module/nbd"}
	FUSE      = Module{"fuse", "dev/fuse"}
)

// Loader loads modules. The zero value looks under / and runs modprobe.
type Loader struct {
	Root     string                                    // "" means "/"
	Modprobe func(ctx context.Context, m string) error // nil means the program
}

// Need loads what is missing; its error names everything that cannot be loaded.
func (l Loader) Need(ctx context.Context, modules ...Module) error {
	var errs []error
	for _, m := range modules {
		if l.Present(m) {
			continue
		}
		if err := l.modprobe(ctx, m.Name); err != nil {
			errs = append(errs, fmt.Errorf("load kernel module %s: %w", m.Name, err))
		}
		// No second look: a built-in part without parameters has no directory in /sys/module, but
		// modprobe knows it.
	}
	return errors.Join(errs...)
}

// Present reports whether the sign of a part exists.
func (l Loader) Present(m Module) bool {
	_, err := os.Stat(filepath.Join("/", l.Root, m.Sign))
	return err == nil
}

// Usable is Need, and then looks for what a loaded part provides outside /sys/module: a container
// may load a module and see nothing of it.
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

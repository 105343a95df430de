// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// DefaultKernel is the kernel of Debian 12.
const DefaultKernel = "6.1"

// Kernel is a kernel image and the modules that belong to it.
type Kernel struct {
	Release string // as uname -r says
	Image   string // vmlinuz
	Modules string // directory lib/modules/<Release>
}

// The suites that carry the supported kernels. "" means apt's own configuration.
var kernelSuites = map[string][]string{
	"6.1":  {"", "bookworm"},
	"6.12": {"bookworm-backports", "trixie"},
}

// FindKernel returns the kernel of a version ("6.1", "6.12") from the cache, or else from
// the distribution's packages. WEFT_KERNEL_DIR overrides both.
func FindKernel(ctx context.Context, version string) (Kernel, error) {
	if dir := os.Getenv("WEFT_KERNEL_DIR"); dir != "" {
		return openKernel(dir)
	}
	suites, ok := kernelSuites[version]
	if !ok {
		return Kernel{}, fmt.Errorf("kernel %q: not known; use 6.1 or 6.12, or set WEFT_KERNEL_DIR", version)
	}
	cache, err := cacheDir("kernel", version)
	if err != nil {
		return Kernel{}, err
	}
	unlock, err := lockDir(cache)
	if err != nil {
		return Kernel{}, err
	}
	defer unlock()
	if k, err := openKernel(filepath.Join(cache, "root")); err == nil {
		return k, nil
	}
	if err := fetchKernel(ctx, version, suites, cache); err != nil {
		return Kernel{}, fmt.Errorf("get kernel %s: %w; set WEFT_KERNEL_DIR to a directory with boot/vmlinuz-* and lib/modules/*", version, err)
	}
	return openKernel(filepath.Join(cache, "root"))
}

// openKernel finds the kernel in a directory with the layout of an unpacked package.
func openKernel(dir string) (Kernel, error) {
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil {
		return Kernel{}, err
	}
	if len(images) == 0 {
		return Kernel{}, fmt.Errorf("kernel in %s: no boot/vmlinuz-*", dir)
	}
	image := slices.Max(images)
	release := strings.TrimPrefix(filepath.Base(image), "vmlinuz-")
	for _, lib := range []string{"lib", "usr/lib"} {
		modules := filepath.Join(dir, lib, "modules", release)
		if _, err := os.Stat(modules); err == nil {
			return Kernel{Release: release, Image: image, Modules: modules}, nil
		}
	}
	return Kernel{}, fmt.Errorf("kernel in %s: no lib/modules/%s", dir, release)
}

// fetchKernel unpacks the newest image package of the version in the given suites into
// dir/root.
func fetchKernel(ctx context.Context, version string, suites []string, dir string) error {
	if _, err := lookProgram("apt-get"); err != nil {
		return errors.New("no apt-get here")
	}
	var errs error
	for _, suite := range suites {
		err := fetchKernelFrom(ctx, version, suite, dir)
		if err == nil {
			return nil
		}
		errs = errors.Join(errs, err)
	}
	return errs
}

func fetchKernelFrom(ctx context.Context, version, suite, dir string) error {
	a, err := newApt(ctx, suite, filepath.Join(dir, "apt-"+suite))
	if err != nil {
		return err
	}
	pkg, err := a.kernelPackage(ctx, version)
	if err != nil {
		return err
	}
	notice("getting kernel package %s", pkg)
	return a.unpack(ctx, []string{pkg}, filepath.Join(dir, "root"))
}

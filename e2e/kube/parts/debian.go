// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// debianPackages are unpacked without their dependencies. They need only the C library and
// libseccomp, which a machine with apt has.
var debianPackages = []string{"containerd", "runc", "containernetworking-plugins"}

// debianPrograms are the programs that must be in the packages.
var debianPrograms = []string{
	"usr/bin/containerd", "usr/bin/containerd-shim-runc-v2", "usr/bin/ctr", "usr/sbin/runc",
	"usr/lib/cni/bridge", "usr/lib/cni/host-local", "usr/lib/cni/loopback",
}

// unpackDebian downloads and unpacks the packages into root.
func unpackDebian(ctx context.Context, root string) error {
	if _, err := os.Stat(root); err == nil {
		return nil
	}
	work, err := os.MkdirTemp(filepath.Dir(root), ".debian-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	download := append([]string{"download", "-qq", "-oAPT::Sandbox::User="}, debianPackages...)
	if err := run(ctx, work, "apt-get", download...); err != nil {
		return fmt.Errorf("%w; is the package list there (apt-get update)?", err)
	}
	debs, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil {
		return err
	}
	staging := filepath.Join(work, "root")
	for _, deb := range debs {
		if err := run(ctx, work, "dpkg-deb", "-x", deb, staging); err != nil {
			return err
		}
	}
	return os.Rename(staging, root)
}

func run(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

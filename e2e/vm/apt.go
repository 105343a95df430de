// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// apt gets packages from the archive that this machine uses. It downloads and unpacks them
// without installing them, so it needs no privilege.
type apt struct {
	options []string // apt's options for a private configuration; nil uses the machine's
	dir     string
}

// newApt returns access to a suite. "" means apt's own configuration. For another suite it
// makes a private configuration with the archive address of the machine's own.
func newApt(ctx context.Context, suite, dir string) (*apt, error) {
	if err := os.MkdirAll(filepath.Join(dir, "download"), 0o755); err != nil {
		return nil, err
	}
	a := &apt{dir: dir}
	if suite == "" {
		return a, nil
	}
	archive, err := a.archive(ctx)
	if err != nil {
		return nil, err
	}
	return a, a.configure(ctx, archive, suite)
}

// archive is the address of the distribution's archive that the machine uses.
func (a *apt) archive(ctx context.Context) (string, error) {
	out, err := a.run(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(COMPONENT)", "Created-By: Packages")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) >= 2 && f[1] == "Debian" && f[len(f)-1] == "main" && !strings.Contains(f[0], "security") {
			return f[0], nil
		}
	}
	return "", errors.New("apt knows no Debian archive here")
}

func (a *apt) configure(ctx context.Context, archive, suite string) error {
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.dir, d), 0o755); err != nil {
			return err
		}
	}
	keyring := ""
	if _, err := os.Stat("/usr/share/keyrings/debian-archive-keyring.gpg"); err == nil {
		keyring = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
	}
	sources := filepath.Join(a.dir, "sources.list")
	if err := os.WriteFile(sources, fmt.Appendf(nil, "deb %s%s %s main\n", keyring, archive, suite), 0o644); err != nil {
		return err
	}
	a.options = []string{
		"-oDir::Etc::SourceList=" + sources,
		"-oDir::Etc::SourceParts=/dev/null",
		"-oDir::State::Lists=" + filepath.Join(a.dir, "lists"),
		"-oDir::Cache=" + filepath.Join(a.dir, "cache"),
		"-oAPT::Sandbox::User=",
	}
	notice("reading the package list of %s", suite)
	_, err := a.run(ctx, "apt-get", "update", "-qq")
	return err
}

var kernelDepends = regexp.MustCompile(`(?m)^\s*Depends: (linux-image-(\d+\.\d+)\.\S+)$`)

// kernelPackage is the image package that linux-image-amd64 depends on.
func (a *apt) kernelPackage(ctx context.Context, version string) (string, error) {
	out, err := a.run(ctx, "apt-cache", "depends", "linux-image-amd64")
	if err != nil {
		return "", err
	}
	found := kernelDepends.FindAllStringSubmatch(out, -1)
	for _, m := range found {
		if m[2] == version {
			return m[1], nil
		}
	}
	return "", fmt.Errorf("linux-image-amd64 is not %s here: %s", version, strings.Join(strings.Fields(out), " "))
}

// unpack downloads the packages and unpacks them into root. root appears only when it is
// complete.
func (a *apt) unpack(ctx context.Context, packages []string, root string) error {
	download := filepath.Join(a.dir, "download")
	if _, err := a.run(ctx, "apt-get", append([]string{"download", "-qq"}, packages...)...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(download, "*.deb"))
	if err != nil {
		return err
	}
	staging := root + ".tmp"
	if err := os.RemoveAll(staging); err != nil {
		return err
	}
	for _, deb := range debs {
		if _, err := a.run(ctx, "dpkg-deb", "-x", deb, staging); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(root); err != nil {
		return err
	}
	if err := os.Rename(staging, root); err != nil {
		return err
	}
	return os.RemoveAll(a.dir)
}

// closure is the packages and all their dependencies.
func (a *apt) closure(ctx context.Context, packages []string) ([]string, error) {
	args := []string{
		"depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts",
		"--no-breaks", "--no-replaces", "--no-enhances",
	}
	out, err := a.run(ctx, "apt-cache", append(args, packages...)...)
	if err != nil {
		return nil, err
	}
	var all []string
	for line := range strings.Lines(out) {
		name := strings.TrimSpace(line)
		// Names at the line's start are packages; <name> is a virtual one.
		if name == "" || line[0] == ' ' || line[0] == '<' || line[0] == '|' {
			continue
		}
		all = append(all, name)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

func (a *apt) run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, append(slices.Clone(a.options), args...)...)
	if name == "dpkg-deb" {
		cmd = exec.CommandContext(ctx, name, args...)
	}
	cmd.Dir = filepath.Join(a.dir, "download")
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

// lookProgram finds a program in $PATH or in the system directories (sbin).
func lookProgram(name string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return filepath.Abs(p)
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		p := filepath.Join(dir, name)
		if s, err := os.Stat(p); err == nil && s.Mode().IsRegular() && s.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("program %s: %w", name, fs.ErrNotExist)
}

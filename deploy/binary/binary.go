// SPDX-License-Identifier: Apache-2.0

// Package binary builds the weft program as it is delivered, in the container image and in
// packages: static, without paths of the machine that builds it, and with the licenses of
// everything in it.
package binary

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Build builds the program. release is what `weft version` prints; arch is "" for that of
// this machine.
func Build(ctx context.Context, to, release, arch string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w -X main.release="+release, "-o", to, "weft.dev/weft/cmd/weft")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if arch != "" {
		cmd.Env = append(cmd.Env, "GOARCH="+arch)
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build weft: %w\n%s", err, out)
	}
	return nil
}

// Static returns an error if a program needs a loader.
func Static(program string) error {
	f, err := elf.Open(program)
	if err != nil {
		return fmt.Errorf("read %s: %w", program, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("%s is not static: build it with CGO_ENABLED=0", program)
		}
	}
	return nil
}

// Licences are the licenses of the modules in the program, and of Go, by MODULE/FILE.
func Licences(ctx context.Context) (map[string][]byte, error) {
	all := map[string][]byte{}
	out, err := output(ctx, "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}\t{{.Dir}}{{end}}", "weft.dev/weft/cmd/weft")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(out) {
		if module, dir, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
			if err := addLicences(all, module, dir); err != nil {
				return nil, err
			}
		}
	}
	goroot, err := output(ctx, "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	return all, addLicences(all, "go", strings.TrimSpace(goroot))
}

var licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)([.-].*)?$`)

// addLicences adds the license files in a module's root.
func addLicences(all map[string][]byte, module, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read the license of %s: %w", module, err)
	}
	found := false
	for _, e := range entries {
		if !e.Type().IsRegular() || !licenceName.MatchString(e.Name()) {
			continue
		}
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		all[module+"/"+e.Name()] = content
		found = true
	}
	if !found {
		return fmt.Errorf("module %s has no license in %s", module, dir)
	}
	return nil
}

// Source describes the sources of a program.
type Source struct {
	Revision string // commit; "" if unknown
	Created  time.Time
}

// Describe asks git, if it is installed, for the commit and its time. SOURCE_DATE_EPOCH overrides the commit's time
// (reproducible-builds.org).
func Describe(ctx context.Context) Source {
	s := Source{Created: time.Unix(0, 0).UTC()}
	out, err := exec.CommandContext(ctx, "git", "log", "-1", "--format=%H %ct").Output()
	if revision, seconds, ok := strings.Cut(strings.TrimSpace(string(out)), " "); err == nil && ok {
		s.Revision = revision
		s.Created = unixTime(seconds, s.Created)
	}
	s.Created = unixTime(os.Getenv("SOURCE_DATE_EPOCH"), s.Created)
	return s
}

func unixTime(seconds string, otherwise time.Time) time.Time {
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return otherwise
	}
	return time.Unix(n, 0).UTC()
}

// output runs a program and returns what it prints.
func output(ctx context.Context, name string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, name, args...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return "", fmt.Errorf("%s %s: %w: %s", name, args[0], err, exit.Stderr)
	}
	return string(out), err
}

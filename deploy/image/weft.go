// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// weftFiles is the layer with our own program and the licenses of everything in it.
func weftFiles(ctx context.Context, program string) (tree, error) {
	content, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	if err := static(program); err != nil {
		return nil, err
	}
	t := tree{"usr/bin/weft": {mode: 0o755, content: content}}
	out, err := output(ctx, "", "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}\t{{.Dir}}{{end}}", "weft.dev/weft/cmd/weft")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(out)) {
		if module, dir, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
			if err := addLicences(t, module, dir); err != nil {
				return nil, err
			}
		}
	}
	return t, addLicences(t, "go", strings.TrimSpace(goroot(ctx)))
}

func goroot(ctx context.Context) string {
	out, err := output(ctx, "", "go", "env", "GOROOT")
	if err != nil {
		return ""
	}
	return string(out)
}

// static returns an error if a program needs a loader.
func static(program string) error {
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

var licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)([.-].*)?$`)

// addLicences adds the license files in a module's root.
func addLicences(t tree, module, dir string) error {
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
		t["usr/share/doc/weft/"+module+"/"+e.Name()] = file{mode: 0o644, content: content}
		found = true
	}
	if !found {
		return fmt.Errorf("module %s has no license in %s", module, dir)
	}
	return nil
}

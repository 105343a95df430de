// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// debian is a Debian package.
type debian struct {
	name    string
	depends []string // names of the packages that it depends on, in its order
	control []byte   // the package's description
	files   tree
}

// packages returns packages by name.
type packages interface {
	get(ctx context.Context, name string) (*debian, error)
}

// collect takes files from packages, with everything they depend on: the targets of links,
// and the libraries and the loader that programs name. From each package used it also takes
// the description and the license.
func collect(ctx context.Context, from packages, wanted map[string]string) (tree, error) {
	c := &collector{from: from, got: tree{}, opened: map[string]*debian{}, used: map[string]*debian{}}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		p, err := c.open(ctx, wanted[name])
		if err != nil {
			return nil, err
		}
		if err := c.take(ctx, p, name); err != nil {
			return nil, err
		}
	}
	for _, p := range c.used {
		if err := c.credit(ctx, p); err != nil {
			return nil, err
		}
	}
	return c.got, nil
}

type collector struct {
	from   packages
	got    tree
	opened map[string]*debian // by name
	used   map[string]*debian // those that files were taken from
}

func (c *collector) open(ctx context.Context, name string) (*debian, error) {
	if p, ok := c.opened[name]; ok {
		return p, nil
	}
	p, err := c.from.get(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("package %s: %w", name, err)
	}
	c.opened[name] = p
	return p, nil
}

// take takes a file from a package, with everything that it needs.
func (c *collector) take(ctx context.Context, p *debian, name string) error {
	f, ok := p.files[name]
	if !ok {
		return fmt.Errorf("package %s has no %s", p.name, name)
	}
	if _, done := c.got[name]; done {
		return nil
	}
	c.used[p.name] = p
	if f.link != "" {
		to := target(name, f.link)
		c.got[name] = file{link: relative(name, to)}
		return c.take(ctx, p, to)
	}
	c.got[name] = f
	loader, libraries, err := needs(f.content)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, soname := range libraries {
		if err := c.takeLibrary(ctx, p, soname); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if loader != "" {
		// The loader comes with the C library, at a path that is written in programs.
		libc, err := c.open(ctx, "libc6")
		if err != nil {
			return err
		}
		return c.take(ctx, libc, place(loader))
	}
	return nil
}

// needs returns the loader and the libraries that a program or library names; nothing for
// other files.
func needs(content []byte) (loader string, libraries []string, err error) {
	if !bytes.HasPrefix(content, []byte(elf.ELFMAG)) {
		return "", nil, nil
	}
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return "", nil, err
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			text := make([]byte, p.Filesz)
			if _, err := p.ReadAt(text, 0); err != nil {
				return "", nil, err
			}
			loader = strings.TrimRight(string(text), "\x00")
		}
	}
	libraries, err = f.ImportedLibraries()
	return loader, libraries, err
}

// takeLibrary finds a library in the packages that p depends on. A package may leave its
// libraries' dependencies to its users, so the dependencies of all used packages are
// searched too. Opened packages and those named like the library come first: the others may
// be large.
func (c *collector) takeLibrary(ctx context.Context, p *debian, soname string) error {
	for have := range c.got {
		if path.Base(have) == soname {
			return nil
		}
	}
	candidates := slices.Clone(p.depends)
	for _, name := range slices.Sorted(maps.Keys(c.used)) {
		candidates = append(candidates, c.used[name].depends...)
	}
	rank := func(name string) int {
		switch {
		case c.opened[name] != nil:
			return 0
		case plain(name) == plain(strings.Replace(soname, ".so.", "", 1)):
			return 1
		case strings.HasPrefix(name, "lib"):
			return 2
		}
		return 3
	}
	slices.SortStableFunc(candidates, func(a, b string) int { return rank(a) - rank(b) })
	for _, name := range append([]string{p.name}, candidates...) {
		other, err := c.open(ctx, name)
		if err != nil {
			if errors.Is(err, errNoPackage) {
				continue // a virtual package
			}
			return err
		}
		for _, at := range slices.Sorted(maps.Keys(other.files)) {
			if path.Base(at) == soname && strings.HasPrefix(at, "usr/lib") {
				return c.take(ctx, other, at)
			}
		}
	}
	return fmt.Errorf("needs %s, which no package has that %s or another depends on", soname, p.name)
}

// plain removes the differences in spelling between package names and library names.
func plain(name string) string {
	return strings.TrimSuffix(strings.NewReplacer("-", "", "_", "").Replace(name), "t64")
}

// relative is the text of a link from one path of the tree to another.
func relative(from, to string) string {
	dir := path.Dir(from) + "/"
	common := 0
	for i := 0; i < len(dir) && i < len(to) && dir[i] == to[i]; i++ {
		if dir[i] == '/' {
			common = i + 1
		}
	}
	return strings.Repeat("../", strings.Count(dir[common:], "/")) + to[common:]
}

// credit adds a package's license, and its description at the place where scanners look in
// images without a package manager. Packages built from one source may share one license:
// the directory of the others is then a link.
func (c *collector) credit(ctx context.Context, p *debian) error {
	c.got["var/lib/dpkg/status.d/"+p.name] = file{mode: 0o644, content: p.control}
	holder := p
	if f, ok := p.files["usr/share/doc/"+p.name]; ok && f.link != "" {
		var err error
		if holder, err = c.open(ctx, path.Base(f.link)); err != nil {
			return err
		}
	}
	f, ok := holder.files["usr/share/doc/"+holder.name+"/copyright"]
	if !ok || f.link != "" {
		return fmt.Errorf("package %s has no license", p.name)
	}
	c.got["usr/share/doc/"+p.name+"/copyright"] = file{mode: 0o644, content: f.content}
	return nil
}

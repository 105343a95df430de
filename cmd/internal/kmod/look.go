// SPDX-License-Identifier: Apache-2.0

package kmod

import (
	"os"
	"path/filepath"
	"strings"
)

// State is whether a part of the kernel can be had.
type State int

// The states, best first.
const (
	Present   State = iota // there now
	Loadable               // a module on disk
	NotBuilt               // modules are on disk, but not this one
	NoModules              // no modules of the running kernel are on disk
)

// Look tells whether a part can be had. It loads nothing.
func (l Loader) Look(m Module) State {
	if l.Present(m) {
		return Present
	}
	dir := l.modules()
	if listed(filepath.Join(dir, "modules.builtin"), m.Name) {
		return Present
	}
	if listed(filepath.Join(dir, "modules.dep"), m.Name) {
		return Loadable
	}
	if _, err := os.Stat(filepath.Join(dir, "modules.dep")); err != nil {
		return NoModules
	}
	return NotBuilt
}

// modules is where the running kernel's modules are.
func (l Loader) modules() string {
	release, _ := os.ReadFile(filepath.Join("/", l.Root, "proc/sys/kernel/osrelease"))
	return filepath.Join("/", l.Root, "lib/modules", strings.TrimSpace(string(release)))
}

// listed tells whether a list of files of modules, one in the beginning of each
// line, has a name. Names are the same with - and _.
func listed(file, name string) bool {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		path, _, _ := strings.Cut(strings.TrimSpace(line), ":")
		base, _, _ := strings.Cut(filepath.Base(path), ".ko")
		if dashed(base) == dashed(name) {
			return true
		}
	}
	return false
}

func dashed(s string) string { return strings.ReplaceAll(s, "_", "-") }

// SPDX-License-Identifier: Apache-2.0

package kmod

import (
	"os"
	"path/filepath"
	"strings"
)

// State says whether a part of the kernel is available.
type State int

// The states, best first.
const (
	Present   State = iota // there now
	Loadable               // a module on disk
	NotBuilt               // modules are on disk, but not this one
	NoModules              // no modules of the running kernel are on disk
)

// StateOf says whether a part is available. It loads nothing.
func (l Loader) StateOf(m Module) State {
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

// modules is the directory of the running kernel's modules.
func (l Loader) modules() string {
	release, _ := os.ReadFile(filepath.Join("/", l.Root, "proc/sys/kernel/osrelease"))
	return filepath.Join("/", l.Root, "lib/modules", strings.TrimSpace(string(release)))
}

// listed reports whether a list of module files, one at the beginning of each line, contains a
// name. Names are the same with - and _.
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

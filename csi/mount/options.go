// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"slices"
	"strings"
)

// telling are the options that make a difference to users of a mount, and that mountinfo shows
// whenever they are set. Some other options are shown only if they differ from the default.
var telling = strings.Fields("noatime nodiratime nosuid nodev noexec sync dirsync lazytime discard nodelalloc wsync largeio filestreams")

// Identity returns the options that must be equal for two requests to mean the same mount.
func Identity(options []string) []string {
	var found []string
	for _, o := range options {
		switch {
		case o == "ro", slices.Contains(telling, o):
			found = append(found, o)
		case strings.HasPrefix(o, "context="):
			found = append(found, strings.ReplaceAll(o, `"`, ""))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// IdentityOf is the Identity of a mount. It ignores the file system's own "ro": a file system may
// turn read-only by itself, after an error.
func IdentityOf(m Mount) []string {
	super := slices.DeleteFunc(slices.Clone(m.Super), func(o string) bool { return o == "ro" })
	return Identity(append(super, m.Options...))
}

// SameOptions reports whether a mount has the requested options.
func SameOptions(m Mount, options []string) bool {
	return slices.Equal(IdentityOf(m), Identity(options))
}

// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"
)

// diskName holds the parts of a kernel device name; a missing part is -1.
//
//	nvme3      controller 3
//	nvme0n2    head 2 of subsystem 0
//	nvme0c3n2  the same head through controller 3
type diskName struct{ subsystem, control, namespace int }

func (n diskName) controller() bool { return n.subsystem < 0 }
func (n diskName) head() bool       { return n.subsystem >= 0 && n.control < 0 }

// String is the name of a path.
func (n diskName) String() string {
	return fmt.Sprintf("nvme%dc%dn%d", n.subsystem, n.control, n.namespace)
}

// parseName parses such a name and nothing longer: "nvme0n1p1" is a partition.
func parseName(s string) (diskName, bool) {
	rest, ok := strings.CutPrefix(s, "nvme")
	if !ok {
		return diskName{}, false
	}
	first, rest, ok := digits(rest)
	if !ok {
		return diskName{}, false
	}
	if rest == "" {
		return diskName{-1, first, -1}, true
	}
	name := diskName{first, -1, -1}
	if r, found := strings.CutPrefix(rest, "c"); found {
		if name.control, rest, ok = digits(r); !ok {
			return diskName{}, false
		}
	}
	if rest, ok = strings.CutPrefix(rest, "n"); !ok {
		return diskName{}, false
	}
	if name.namespace, rest, ok = digits(rest); !ok || rest != "" {
		return diskName{}, false
	}
	return name, true
}

// digits parses a decimal number of at most 9 digits at the start of s.
func digits(s string) (n int, rest string, ok bool) {
	i := 0
	for i < len(s) && i < 9 && s[i] >= '0' && s[i] <= '9' {
		n = n*10 + int(s[i]-'0')
		i++
	}
	return n, s[i:], i > 0
}

// vanished reports whether err says that an object went away while it was read.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO)
}

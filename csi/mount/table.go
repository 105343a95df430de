// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
)

// Mount is one line of mountinfo (proc(5)).
type Mount struct {
	ID, Parent int
	Device     block.DeviceNumber // of the file system
	Root       string             // what of the file system is mounted: "/", a file or a directory
	Point      string             // the mount point
	Options    []string
	FSType     string
	Source     string
	Super      []string // options of the file system, the same wherever it is mounted
}

// ReadOnly reports whether the mount accepts no writes.
func (m Mount) ReadOnly() bool { return slices.Contains(m.Options, "ro") }

// Table is the mounts of one mount namespace.
type Table []Mount

// parseMounts reads mountinfo. It skips lines that it cannot parse: one odd mount must not stop the
// node.
func parseMounts(mountinfo string) Table {
	var all Table
	for line := range strings.Lines(mountinfo) {
		if m, ok := parseMount(line); ok {
			all = append(all, m)
		}
	}
	return all
}

// parseMount reads
//
//	36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
func parseMount(line string) (m Mount, ok bool) {
	of, fs, found := strings.Cut(strings.TrimSpace(line), " - ")
	fields, fsFields := strings.Fields(of), strings.Fields(fs)
	if !found || len(fields) < 6 || len(fsFields) < 2 {
		return m, false
	}
	id, err1 := strconv.Atoi(fields[0])
	parent, err2 := strconv.Atoi(fields[1])
	device, err3 := block.ParseDeviceNumber(fields[2])
	if err1 != nil || err2 != nil || err3 != nil {
		return m, false
	}
	m = Mount{
		ID: id, Parent: parent, Device: device, Root: unescape(fields[3]), Point: unescape(fields[4]),
		Options: strings.Split(fields[5], ","), FSType: fsFields[0], Source: unescape(fsFields[1]),
	}
	if len(fsFields) > 2 {
		m.Super = SplitOptions(unescape(strings.Join(fsFields[2:], " ")))
	}
	return m, true
}

// unescape undoes the \040 of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`).Replace(s)
}

// SplitOptions splits at commas outside quotes: an SELinux context has commas.
func SplitOptions(s string) []string {
	quoted := false
	return strings.FieldsFunc(s, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}
		return r == ',' && !quoted
	})
}

// At returns the mount visible at a path: the topmost, if there are several.
func (all Table) At(point string) (Mount, bool) {
	var here Table
	for _, m := range all {
		if m.Point == point {
			here = append(here, m)
		}
	}
	for _, m := range here {
		covered := slices.ContainsFunc(here, func(o Mount) bool { return o.Parent == m.ID && o.ID != m.ID })
		if !covered {
			return m, true
		}
	}
	return Mount{}, false
}

// Place is the directory or file that something is mounted on, identified within the file system
// that holds it. One mount can appear at several paths: if the kubelet's directory is also bound
// elsewhere and the two propagate, each mount below one has a copy below the other. Copies have the
// same place; different mounts do not.
type Place struct {
	device block.DeviceNumber
	path   string
}

// Place returns the place of a mount, which its copies share.
func (all Table) Place(m Mount) Place {
	i := slices.IndexFunc(all, func(o Mount) bool { return o.ID == m.Parent })
	if i < 0 {
		return Place{path: m.Point}
	}
	under := all[i]
	below := strings.TrimPrefix(strings.TrimPrefix(m.Point, under.Point), "/")
	return Place{under.Device, path.Join(under.Root, below)}
}

// FileSystemOn returns the mounts of a device's whole file system, except those at the given
// places; copies of one mount count once.
func (all Table) FileSystemOn(device block.DeviceNumber, without ...Place) Table {
	return all.Distinct(without, func(m Mount) bool { return m.Device == device && m.Root == "/" })
}

// Distinct returns the mounts that satisfy a condition, one for each place.
func (all Table) Distinct(without []Place, is func(Mount) bool) Table {
	seen := slices.Clone(without)
	var found Table
	for _, m := range all {
		if p := all.Place(m); is(m) && !slices.Contains(seen, p) {
			seen = append(seen, p)
			found = append(found, m)
		}
	}
	return found
}

// Points lists the mount points, for messages.
func (all Table) Points() string {
	var names []string
	for _, m := range all {
		names = append(names, m.Point)
	}
	return strings.Join(names, ", ")
}

// MayBeNode reports whether a mount may be of a device node: of a single file in a file system such
// as a node's or a container's /dev. Other mounts are not examined, since their server may be a
// machine that is gone.
func (m Mount) MayBeNode() bool {
	return m.Root != "/" && (m.FSType == "devtmpfs" || m.FSType == "tmpfs")
}

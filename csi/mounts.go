// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
)

// mount is one line of mountinfo (proc(5)).
type mount struct {
	id, parent int
	device     block.DeviceNumber // of the file system
	root       string             // what of the file system is mounted: "/", or a file or directory in it
	point      string             // where
	options    []string
	fsType     string
	source     string
	super      []string // options of the file system, the same wherever it is mounted
}

func (m mount) readOnly() bool { return slices.Contains(m.options, "ro") }

// mounts are those of one mount namespace.
type mounts []mount

// parseMounts reads mountinfo. Lines that it does not understand are left out:
// one odd mount must not stop the node.
func parseMounts(mountinfo string) mounts {
	var all mounts
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
func parseMount(line string) (m mount, ok bool) {
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
	m = mount{
		id: id, parent: parent, device: device, root: unescape(fields[3]), point: unescape(fields[4]),
		options: strings.Split(fields[5], ","), fsType: fsFields[0], source: unescape(fsFields[1]),
	}
	if len(fsFields) > 2 {
		m.super = splitOptions(unescape(strings.Join(fsFields[2:], " ")))
	}
	return m, true
}

// unescape undoes the \040 of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`).Replace(s)
}

// splitOptions splits at commas outside quotes: an SELinux context has commas.
func splitOptions(s string) []string {
	quoted := false
	return strings.FieldsFunc(s, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}
		return r == ',' && !quoted
	})
}

// at is the mount that is seen at a path: of several, the topmost.
func (all mounts) at(point string) (mount, bool) {
	var here mounts
	for _, m := range all {
		if m.point == point {
			here = append(here, m)
		}
	}
	for _, m := range here {
		covered := slices.ContainsFunc(here, func(o mount) bool { return o.parent == m.id && o.id != m.id })
		if !covered {
			return m, true
		}
	}
	return mount{}, false
}

// place is the directory or file that something is mounted on, told by the file
// system it is in. One mount can show at several paths: where the kubelet's
// directory is itself bound elsewhere and the two propagate, each mount below one
// has a copy below the other. Copies have the same place, other mounts have not.
type place struct {
	device block.DeviceNumber
	path   string
}

func (all mounts) place(m mount) place {
	i := slices.IndexFunc(all, func(o mount) bool { return o.id == m.parent })
	if i < 0 {
		return place{path: m.point}
	}
	under := all[i]
	below := strings.TrimPrefix(strings.TrimPrefix(m.point, under.point), "/")
	return place{under.device, path.Join(under.root, below)}
}

// fileSystemOn are the mounts of a device's whole file system that are not at the
// places that are left out; copies of one mount count once.
func (all mounts) fileSystemOn(device block.DeviceNumber, without ...place) mounts {
	return all.distinct(without, func(m mount) bool { return m.device == device && m.root == "/" })
}

// distinct are the mounts that a condition is true of, by place.
func (all mounts) distinct(without []place, is func(mount) bool) mounts {
	seen := slices.Clone(without)
	var found mounts
	for _, m := range all {
		if p := all.place(m); is(m) && !slices.Contains(seen, p) {
			seen = append(seen, p)
			found = append(found, m)
		}
	}
	return found
}

// points are where mounts are, for people.
func (all mounts) points() string {
	var names []string
	for _, m := range all {
		names = append(names, m.point)
	}
	return strings.Join(names, ", ")
}

// mayBeNode tells whether a mount may be that of a device node: of one file in the
// file system that a node's /dev is, or a container's. No other is looked at: its
// server may be a machine that is gone.
func (m mount) mayBeNode() bool {
	return m.root != "/" && (m.fsType == "devtmpfs" || m.fsType == "tmpfs")
}

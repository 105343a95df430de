// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
)

// The users of a mount, according to /proc and /sys. Nothing here accesses the file system itself,
// so all of it answers while a device hangs. In a container without the host's processes (hostPID),
// only the container's own are visible.

// mostNamed is how many holders are named: an operator needs a few, not a thousand.
const mostNamed = 8

func (l *linux) MountsElsewhere(device block.DeviceNumber) ([]string, error) {
	own, err := os.Readlink(filepath.Join(l.proc, "self/ns/mnt"))
	if err != nil {
		return nil, fmt.Errorf("find this process's mount namespace: %w", err)
	}
	seen := []string{own}
	var found []string
	for _, pid := range l.processes() {
		ns, err := os.Readlink(filepath.Join(l.proc, pid, "ns/mnt"))
		if err != nil || slices.Contains(seen, ns) {
			continue // gone, or seen before
		}
		seen = append(seen, ns)
		text, err := os.ReadFile(filepath.Join(l.proc, pid, "mountinfo"))
		if err != nil {
			continue
		}
		all := parseMounts(string(text))
		if i := slices.IndexFunc(all, func(m Mount) bool { return m.Device == device }); i >= 0 {
			found = append(found, fmt.Sprintf("%s has it mounted on %s", l.process(pid), all[i].Point))
		}
	}
	return found, nil
}

func (l *linux) Holders(m Mount) []string {
	var found []string
	if all, err := l.Mounts(); err == nil {
		for _, o := range all {
			if o.Parent == m.ID {
				found = append(found, "the mount on "+o.Point)
			}
		}
	}
	found = append(found, l.loops(m.Point)...)
	ns, _ := os.Readlink(filepath.Join(l.proc, "self/ns/mnt"))
	for _, pid := range l.processes() {
		if how := l.uses(pid, m, ns); how != "" {
			found = append(found, l.process(pid)+" "+how)
		}
	}
	if len(found) > mostNamed {
		found = append(found[:mostNamed], fmt.Sprintf("and %d more", len(found)-mostNamed))
	}
	return found
}

// loops lists the loop devices over files below a directory.
func (l *linux) loops(dir string) []string {
	files, _ := filepath.Glob(filepath.Join(l.sys, "block/loop*/loop/backing_file"))
	var found []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if backing := strings.TrimSpace(string(text)); err == nil && strings.HasPrefix(backing, dir+"/") {
			disk := filepath.Base(filepath.Dir(filepath.Dir(file)))
			found = append(found, fmt.Sprintf("%s over %s", disk, backing))
		}
	}
	return found
}

// uses says how a process keeps a mount busy; "" if it does not. For an open file the kernel tells
// the mount through which it was opened (proc(5), fdinfo); for directories it tells paths, which
// mean the same only in our own namespace.
func (l *linux) uses(pid string, m Mount, ns string) string {
	dir := filepath.Join(l.proc, pid)
	if theirs, err := os.Readlink(filepath.Join(dir, "ns/mnt")); err == nil && theirs == ns {
		for _, link := range []struct{ name, how string }{
			{"cwd", "is in"}, {"root", "has its root in"}, {"exe", "runs"},
		} {
			to, err := os.Readlink(filepath.Join(dir, link.name))
			if err == nil && (to == m.Point || strings.HasPrefix(to, m.Point+"/")) {
				return link.how + " " + to
			}
		}
	}
	fds, _ := os.ReadDir(filepath.Join(dir, "fdinfo"))
	for _, fd := range fds {
		text, err := os.ReadFile(filepath.Join(dir, "fdinfo", fd.Name()))
		if err != nil || mountID(string(text)) != m.ID {
			continue
		}
		to, err := os.Readlink(filepath.Join(dir, "fd", fd.Name()))
		if err != nil {
			to = "a file in it"
		}
		return "has open " + to
	}
	return ""
}

// mountID is the mnt_id in a file of fdinfo; -1 if it has none.
func mountID(fdinfo string) int {
	for lines := bufio.NewScanner(strings.NewReader(fdinfo)); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "mnt_id:"); ok {
			if id, err := strconv.Atoi(strings.TrimSpace(value)); err == nil {
				return id
			}
		}
	}
	return -1
}

func (l *linux) processes() []string {
	entries, _ := os.ReadDir(l.proc)
	var all []string
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			all = append(all, e.Name())
		}
	}
	return all
}

// process describes a process: `process 4711 ("postgres")`.
func (l *linux) process(pid string) string {
	comm, _ := os.ReadFile(filepath.Join(l.proc, pid, "comm"))
	return fmt.Sprintf("process %s (%q)", pid, strings.TrimSpace(string(comm)))
}

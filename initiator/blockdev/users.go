// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// User is somebody who has a device open.
type User struct {
	Kind string // "mount", "holder", "swap", "process", "unknown"
	Name string // mount point, holder's disk, or command
	PID  int    // the process, or one that sees a mount that we do not
}

func (u User) String() string {
	switch u.Kind {
	case "mount":
		if u.PID != 0 {
			return fmt.Sprintf("the file system on %s, as process %d sees it", u.Name, u.PID)
		}
		return "the file system on " + u.Name
	case "holder":
		return "device " + u.Name
	case "swap":
		return "swap"
	case "process":
		return fmt.Sprintf("%s (process %d)", u.Name, u.PID)
	}
	return "something that cannot be seen from here"
}

// users lists who has a disk open, mounts and holders first.
func (s system) users(disk string, n block.DeviceNumber) ([]User, error) {
	all, err := s.seenUsers(disk, n)
	if err == nil && len(all) == 0 && s.claimed(disk) {
		all = append(all, User{Kind: "unknown"})
	}
	return all, err
}

// inUse reports whether somebody uses a disk whose process is dead, or has its node in a container. It
// does not open the disk, which might not answer. What it cannot know counts as used.
func (s system) inUse(disk string) bool {
	n, err := block.ParseDeviceNumber(s.diskText(disk, "dev"))
	if err != nil {
		return s.exists(disk)
	}
	users, err := s.seenUsers(disk, n)
	return err != nil || len(users) > 0 || s.bound(disk)
}

// exists reports whether the kernel has a disk.
func (s system) exists(disk string) bool {
	_, err := os.Stat(filepath.Join(s.sys, "block", disk))
	return !errors.Is(err, fs.ErrNotExist)
}

// bound reports whether the node of a disk is mounted somewhere by itself, as for a pod that uses it as
// a block device.
func (s system) bound(disk string) bool {
	for _, mountinfo := range s.mountNamespaces() {
		for line := range strings.Lines(mountinfo) {
			// The fourth field is the root of the mount within its file system.
			if fields := strings.Fields(line); len(fields) > 4 && filepath.Base(fields[3]) == disk {
				return true
			}
		}
	}
	return false
}

// seenUsers lists who has a disk open, except who has it exclusively and cannot be seen.
func (s system) seenUsers(disk string, n block.DeviceNumber) ([]User, error) {
	var all []User
	holders, _ := os.ReadDir(filepath.Join(s.sys, "block", disk, "holders"))
	for _, h := range holders {
		all = append(all, User{Kind: "holder", Name: h.Name()})
	}
	partitions, err := s.numbers(disk, n)
	if err != nil {
		return nil, err
	}
	all = append(all, s.mounts(partitions)...)
	if s.swaps(partitions) {
		all = append(all, User{Kind: "swap"})
	}
	return append(all, s.openers(partitions)...), nil
}

// numbers returns a disk's number and those of its partitions.
func (s system) numbers(disk string, n block.DeviceNumber) ([]block.DeviceNumber, error) {
	all := []block.DeviceNumber{n}
	devs, err := filepath.Glob(filepath.Join(s.sys, "block", disk, disk+"*", "dev"))
	for _, file := range devs {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // gone in the meantime
		}
		if p, err := block.ParseDeviceNumber(strings.TrimSpace(string(text))); err == nil {
			all = append(all, p)
		}
	}
	return all, err
}

// mounts searches the mount namespaces of all processes.
func (s system) mounts(devices []block.DeviceNumber) []User {
	var all []User
	for pid, mountinfo := range s.mountNamespaces() {
		for _, place := range mountsOf(strings.NewReader(mountinfo), devices) {
			u := User{Kind: "mount", Name: place, PID: pid}
			// Namespaces share most of their mounts.
			if !slices.ContainsFunc(all, func(o User) bool { return o.Name == u.Name }) {
				all = append(all, u)
			}
		}
	}
	return all
}

// mountNamespaces yields the mountinfo of each mount namespace, and a process that sees it: 0 for this
// one, which comes first.
func (s system) mountNamespaces() iter.Seq2[int, string] {
	return func(yield func(int, string) bool) {
		seen := make(map[string]bool)
		for i, process := range append([]string{"self"}, s.processes()...) {
			ns, err := os.Readlink(filepath.Join(s.proc, process, "ns/mnt"))
			if err != nil && i > 0 || seen[ns] {
				continue
			}
			seen[ns] = true
			text, err := os.ReadFile(filepath.Join(s.proc, process, "mountinfo"))
			if err != nil {
				continue
			}
			pid, _ := strconv.Atoi(process)
			if !yield(pid, string(text)) {
				return
			}
		}
	}
}

// mountsOf reads mountinfo (proc(5)): the third field is the device, the fifth the mount
// point.
func mountsOf(mountinfo io.Reader, devices []block.DeviceNumber) []string {
	var places []string
	for lines := bufio.NewScanner(mountinfo); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 {
			continue
		}
		if n, err := block.ParseDeviceNumber(fields[2]); err == nil && slices.Contains(devices, n) {
			places = append(places, unescape(fields[4]))
		}
	}
	return places
}

// unescape undoes the \040 of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

func (s system) swaps(devices []block.DeviceNumber) bool {
	text, _ := os.ReadFile(filepath.Join(s.proc, "swaps"))
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 0 && s.isOneOf(fields[0], devices) {
			return true
		}
	}
	return false
}

// openers lists the processes that have a descriptor of a device, except this one.
func (s system) openers(devices []block.DeviceNumber) []User {
	var all []User
	self := strconv.Itoa(os.Getpid())
	for _, pid := range s.processes() {
		if pid == self {
			continue
		}
		dir := filepath.Join(s.proc, pid, "fd")
		fds, _ := os.ReadDir(dir)
		for _, fd := range fds {
			if !s.isOneOf(filepath.Join(dir, fd.Name()), devices) {
				continue
			}
			comm, _ := os.ReadFile(filepath.Join(s.proc, pid, "comm"))
			u := User{Kind: "process", Name: strings.TrimSpace(string(comm))}
			u.PID, _ = strconv.Atoi(pid)
			all = append(all, u)
			break
		}
	}
	return all
}

func (s system) processes() []string {
	entries, _ := os.ReadDir(s.proc)
	var all []string
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			all = append(all, e.Name())
		}
	}
	return all
}

func (s system) isOneOf(path string, devices []block.DeviceNumber) bool {
	// A link of /proc whose target is not a path is no device. This saves a call into a file
	// system that might not respond.
	if to, err := os.Readlink(path); err == nil && !strings.HasPrefix(to, "/") {
		return false
	} else if err == nil && !strings.HasPrefix(to, "/dev/") && !strings.HasPrefix(to, s.dev+"/") {
		return false
	}
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return false
	}
	return slices.Contains(devices, numberOf(st.Rdev))
}

// claimed reports whether somebody holds the disk exclusively: a mount, a holder. It does not
// detect plain readers and writers.
func (s system) claimed(disk string) bool {
	err := unshared(func() error {
		fd, err := unix.Open(s.node(disk), unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	})
	return errors.Is(err, unix.EBUSY)
}

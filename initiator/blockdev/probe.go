// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/uring"
)

// Ability says whether this machine supports a kind of device.
type Ability struct {
	Kind     Kind
	Usable   bool
	Reason   string   // what is missing, or what exists, in plain words
	Fix      string   // how to enable it; "" if it is usable, or nothing helps
	Modules  []string // modules that must be loaded, and can be
	Survives bool     // I/O waits for the successor of a dead process, see Options.Resume
	Ring     bool     // FUSE: requests come over io_uring
	Faster   string   // what would make a usable kind faster; "" if there is nothing
}

// Probe checks each kind, best first. It changes nothing and loads nothing.
func Probe() []Ability {
	s := systemOf(Options{DevDir: devices})
	var all []Ability
	for _, k := range kinds {
		all = append(all, s.probe(k))
	}
	return all
}

// Choose returns the kind that Auto uses: the first usable one.
func Choose(all []Ability) (Kind, bool) {
	for _, a := range all {
		if a.Usable {
			return a.Kind, true
		}
	}
	return "", false
}

func (s system) probe(k Kind) Ability {
	a := Ability{Kind: k}
	switch k {
	case UBLK:
		s.probeUBLK(&a)
	case NBD:
		s.probeNBD(&a)
	case FUSE:
		s.probeFUSE(&a)
	}
	return a
}

func (s system) probeFUSE(a *Ability) {
	switch {
	case !s.root(a, "FUSE mounts and loop devices"):
	case s.filesystem("fuse") && s.opens(a, "fuse") && s.opens(a, "loop-control"):
		a.Usable, a.Reason = true, "FUSE and loop devices are available"
		a.Survives = s.kernelSince(6, 9) // FUSE_NOTIFY_RESEND
		depths, why, fix := s.fuseRingState()
		if a.Ring = depths != nil; a.Ring {
			a.Reason = "FUSE, over io_uring, and loop devices are available"
		} else if fix != "" {
			a.Faster = fmt.Sprintf("%s: %s", why, fix)
		}
	case a.Reason != "":
	default:
		s.missing(a, "fuse", "the kernel has no FUSE")
	}
}

// kernelSince reports whether the running kernel is this version of Linux or a later one.
func (s system) kernelSince(major, minor int) bool {
	release, _ := os.ReadFile(filepath.Join(s.proc, "sys/kernel/osrelease"))
	var is [2]int
	_, err := fmt.Sscanf(string(release), "%d.%d", &is[0], &is[1])
	return err == nil && slices.Compare(is[:], []int{major, minor}) >= 0
}

// root reports whether this process has the privileges that the kind needs.
func (s system) root(a *Ability, what string) bool {
	switch {
	case os.Geteuid() != 0:
		a.Reason, a.Fix = what+" are for root only", "run as root"
	case !s.administers():
		a.Reason, a.Fix = what+" need CAP_SYS_ADMIN, which this process lacks", "in a container, give it CAP_SYS_ADMIN"
	default:
		return true
	}
	return false
}

// uringRefused says why a ring with these flags is refused here, and how to enable it; "" if it
// is not.
func (s system) uringRefused(flags uint32) (why, fix string) {
	disabled, _ := os.ReadFile(filepath.Join(s.proc, "sys/kernel/io_uring_disabled"))
	if strings.TrimSpace(string(disabled)) == "2" {
		return "io_uring is disabled", "sysctl kernel.io_uring_disabled=1"
	}
	ring, err := uring.New(4, flags)
	if err != nil {
		return fmt.Sprintf("io_uring is refused: %v", err), "allow io_uring (a container's seccomp profile forbids it)"
	}
	ring.Close()
	return "", ""
}

// administers reports whether this process has CAP_SYS_ADMIN.
func (s system) administers() bool {
	text, err := os.ReadFile(filepath.Join(s.proc, "self/status"))
	if err != nil {
		return true // then an attempt will show
	}
	_, rest, _ := strings.Cut(string(text), "\nCapEff:")
	line, _, _ := strings.Cut(rest, "\n")
	capabilities, err := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	return err != nil || capabilities&(1<<unix.CAP_SYS_ADMIN) != 0
}

// filesystem reports whether the kernel currently supports a file system.
func (s system) filesystem(name string) bool {
	f, err := os.Open(filepath.Join(s.proc, "filesystems"))
	if err != nil {
		return false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 0 && fields[len(fields)-1] == name {
			return true
		}
	}
	return false
}

// opens reports whether a control device can be opened, and if not, says why.
func (s system) opens(a *Ability, name string) bool {
	path := s.control(name)
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		unix.Close(fd)
		return true
	}
	module := strings.TrimSuffix(name, "-control")
	switch {
	case errors.Is(err, fs.ErrNotExist) && s.misc(name):
		a.Reason = fmt.Sprintf("the kernel has it, but %s is missing", path)
		a.Fix = "in a container, give it the device " + path
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		s.missing(a, module, fmt.Sprintf("%s is missing", path))
	case errors.Is(err, fs.ErrPermission):
		a.Reason = fmt.Sprintf("%s cannot be opened: %v", path, err)
		a.Fix = "in a container, give it the device " + path
	default:
		a.Reason = fmt.Sprintf("%s cannot be opened: %v", path, err)
	}
	return false
}

// misc reports whether the kernel has a control device, even if /dev lacks its node.
func (s system) misc(name string) bool {
	text, err := os.ReadFile(filepath.Join(s.proc, "misc"))
	return err == nil && slices.Contains(strings.Fields(string(text)), name)
}

// missing says that a part of the kernel is missing, and whether a module could provide it.
func (s system) missing(a *Ability, module, what string) {
	a.Reason = what
	switch known, installed := s.module(module); {
	case known:
		a.Modules = append(a.Modules, module)
		a.Fix = "modprobe " + module
	case installed:
		a.Fix = fmt.Sprintf("another kernel; this one was built without module %s", module)
	default:
		a.Fix = fmt.Sprintf("a kernel with module %s; no modules are installed for this one", module)
	}
}

// module reports whether a module of the running kernel is on disk, and whether any are.
func (s system) module(name string) (known, any bool) {
	release, err := os.ReadFile(filepath.Join(s.proc, "sys/kernel/osrelease"))
	if err != nil {
		return false, false
	}
	text, err := os.ReadFile(filepath.Join("/lib/modules", strings.TrimSpace(string(release)), "modules.dep"))
	if err != nil {
		return false, false
	}
	for line := range strings.Lines(string(text)) {
		file, _, _ := strings.Cut(filepath.Base(strings.SplitN(line, ":", 2)[0]), ".ko")
		if strings.ReplaceAll(file, "-", "_") == name {
			return true, true
		}
	}
	return false, true
}

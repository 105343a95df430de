// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/cmd/internal/rdma"
)

// text reads a small file of the machine; "" if it does not exist.
func (d doctor) text(path string) string {
	b, _ := os.ReadFile(filepath.Join("/", d.root, path))
	return strings.TrimSpace(string(b))
}

// has reports whether one of the paths, which may be patterns, exists.
func (d doctor) has(paths ...string) bool {
	return slices.ContainsFunc(paths, func(p string) bool {
		found, err := filepath.Glob(filepath.Join("/", d.root, p))
		return err == nil && len(found) > 0
	})
}

// says reports whether one of the files, which may be patterns, has a text in a line that is not a
// comment.
func (d doctor) says(text string, files ...string) bool {
	for _, pattern := range files {
		found, _ := filepath.Glob(filepath.Join("/", d.root, pattern))
		for _, file := range found {
			b, _ := os.ReadFile(file)
			for line := range strings.Lines(string(b)) {
				if line = strings.TrimSpace(line); !strings.HasPrefix(line, "#") && strings.Contains(line, text) {
					return true
				}
			}
		}
	}
	return false
}

// checks looks for programs and settings that could interfere with legs, volumes or agents.
func (d doctor) checks() []finding {
	return append([]finding{d.checkUdev(), d.checkLVM(), d.checkMD(), d.checkAutoconnect(), d.checkRun(), d.checkFlusher(), d.checkURing()}, d.checkRDMA()...)
}

func (d doctor) udev() bool { return d.has("usr/bin/udevadm", "bin/udevadm", "sbin/udevadm") }

func (d doctor) checkUdev() finding {
	f := finding{Way: "udev", OK: true}
	switch {
	case !d.udev():
		f.Why = "there is no udev that could look into legs"
	case d.has("etc/udev/rules.d/*weft.rules", "usr/lib/udev/rules.d/*weft.rules", "lib/udev/rules.d/*weft.rules"):
		f.Why = "its rules leave the contents of legs alone"
	default:
		f.OK, f.Why = false, "its rules look into legs, so LVM, md or a desktop could activate their contents"
		f.Fix = "install deploy/udev/11-weft.rules in /etc/udev/rules.d, then: udevadm control --reload"
	}
	return f
}

func (d doctor) checkLVM() finding {
	f := finding{Way: "lvm", OK: true}
	switch {
	case !d.has("usr/sbin/lvm", "sbin/lvm"):
		f.Why = "LVM is not installed"
	case d.says("weft-", "etc/lvm/lvmlocal.conf", "etc/lvm/lvm.conf"):
		f.Why = "LVM leaves legs alone"
	default:
		f.OK, f.Why = false, "LVM scans legs and could activate what users put into volumes"
		f.Fix = "copy deploy/lvm/lvmlocal.conf to /etc/lvm/lvmlocal.conf"
	}
	return f
}

func (d doctor) checkMD() finding {
	f := finding{Way: "mdadm", OK: true}
	switch {
	case !d.has("usr/sbin/mdadm", "sbin/mdadm"):
		f.Why = "mdadm is not installed"
	case d.says("AUTO -all", "etc/mdadm/mdadm.conf", "etc/mdadm/mdadm.conf.d/*", "etc/mdadm.conf", "etc/mdadm.conf.d/*"):
		f.Why = "mdadm assembles only arrays that its configuration names"
	default:
		f.OK, f.Why = false, "mdadm assembles all arrays that it finds, also inside legs"
		f.Fix = "install deploy/mdadm/weft.conf in /etc/mdadm/mdadm.conf.d"
	}
	return f
}

// checkAutoconnect looks for nvme-cli's rule, which connects everything that a discovery controller
// names, with timeouts that differ from Weft's. A host without an agent uses that rule.
func (d doctor) checkAutoconnect() finding {
	f := finding{Way: "nvmf-autoconnect", OK: true, Why: "no other program connects to targets by itself"}
	const rule = "70-nvmf-autoconnect.rules"
	if d.udev() && d.has("usr/lib/udev/rules.d/"+rule, "lib/udev/rules.d/"+rule) && !d.has("etc/udev/rules.d/"+rule) {
		f.OK, f.Why = false, "nvme-cli's udev rule connects to subsystems of discovery controllers, with its own timeouts, which only a host without weft initiator wants"
		f.Fix = "ln -s /dev/null /etc/udev/rules.d/" + rule
	}
	return f
}

func (d doctor) checkRun() finding {
	f := finding{Way: "/run", OK: true, Why: "on a tmpfs, whose contents do not outlive a boot"}
	kind := "part of the root file system"
	for line := range strings.Lines(d.text("proc/mounts")) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[1] == "/run" {
			kind = fields[2]
		}
	}
	if kind != "tmpfs" && kind != "ramfs" {
		f.OK, f.Why = false, "is "+kind+": the initiator's state there would outlive a boot"
		f.Fix = "mount a tmpfs on /run, or start weft initiator with a --run-dir on one"
	}
	return f
}

// checkRDMA looks at what RDMA devices lack, and whether the kernel can use them.
func (d doctor) checkRDMA() (all []finding) {
	m := rdma.Read(d.root)
	for _, f := range m.Findings() {
		all = append(all, finding{Way: f.About, OK: f.OK, Why: f.Why, Fix: f.Fix})
	}
	var lacks []string
	for _, need := range []kmod.Module{kmod.NvmetRDMA, kmod.NvmeRDMA} {
		if (kmod.Loader{Root: d.root}).StateOf(need) > kmod.Loadable {
			lacks = append(lacks, need.Name)
		}
	}
	if len(m.Ports) > 0 && len(lacks) > 0 {
		all = append(all, finding{Way: "rdma", Why: "there are RDMA devices, but the kernel has no " + strings.Join(lacks, ", "), Fix: "boot a kernel that has them, such as the distribution's generic one"})
	}
	return all
}

const capSysResource = 24 // linux/capability.h

// checkFlusher looks for CAP_SYS_RESOURCE; see initiator/blockdev on memory.
func (d doctor) checkFlusher() finding {
	f := finding{Way: "io-flusher", OK: true, Why: "an initiator in user space may mark itself as an I/O flusher and is safe when memory is short"}
	for line := range strings.Lines(d.text("proc/self/status")) {
		value, ok := strings.CutPrefix(line, "CapEff:")
		caps, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if ok && err == nil && caps&(1<<capSysResource) == 0 {
			f.OK, f.Why = false, "without CAP_SYS_RESOURCE an initiator in user space can deadlock when memory is short"
			f.Fix = "give the agent CAP_SYS_RESOURCE, or reserve memory for it (a cgroup's memory.min)"
		}
	}
	return f
}

// checkURing looks for the sysctl that switches io_uring off (Linux 6.6 and newer); see initiator/fabrics on probes.
func (d doctor) checkURing() finding {
	f := finding{Way: "io_uring", OK: true, Why: "an agent that waits for a target can always be ended"}
	if d.text("proc/sys/kernel/io_uring_disabled") == "2" {
		f.OK, f.Why = false, "switched off: an agent on the kernel path that is killed while it asks a silent target ends only when that answers"
		f.Fix = "sysctl kernel.io_uring_disabled=1; to keep it over a reboot, write that into a file in /etc/sysctl.d"
	}
	return f
}

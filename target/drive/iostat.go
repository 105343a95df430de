// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
)

// IOs are the reads and writes that a block device has completed since it appeared, and the bytes
// and the time of all of them together. The zeroing of a range counts as writes.
type IOs struct {
	Count uint64
	Bytes uint64
	Time  time.Duration
}

// Since returns what came after an earlier reading of the same device. If a counter is lower than
// it was, the device is another one and all of it is new.
func (n IOs) Since(before IOs) IOs {
	if n.Count < before.Count || n.Bytes < before.Bytes || n.Time < before.Time {
		return n
	}
	return IOs{n.Count - before.Count, n.Bytes - before.Bytes, n.Time - before.Time}
}

// Mean is the mean time of one; 0 if there were none.
func (n IOs) Mean() time.Duration {
	if n.Count == 0 {
		return 0
	}
	return time.Duration(uint64(n.Time) / n.Count)
}

// CompletedIOs reads the counters of a block device below root; none for a regular file, or if the
// kernel does not count.
func CompletedIOs(root, path string) IOs {
	s := sysfs(root)
	n, err := parseStat(s.text("sys/class/block", s.blockName(path), "stat"))
	if err != nil {
		return IOs{}
	}
	return n
}

// Figures reads the counters that the kernel keeps of a block device below root, by kind of I/O and
// without latencies; none for a regular file, or if the kernel does not count.
func Figures(root, path string) figures.Figures {
	s := sysfs(root)
	return figures.ParseStat(s.text("sys/class/block", s.blockName(path), "stat"))
}

// parseStat reads a stat file (Linux, Documentation/block/stat.rst): fields 1 and 5 count reads and
// writes, 3 and 7 their sectors, 4 and 8 the milliseconds that they took.
func parseStat(text string) (IOs, error) {
	fields := strings.Fields(text)
	if len(fields) < 8 {
		return IOs{}, fmt.Errorf("stat %q: want at least 8 fields", text)
	}
	var n [8]uint64
	for i := range n {
		v, err := strconv.ParseUint(fields[i], 10, 53) // longer than a machine can run, and 4 EiB
		if err != nil {
			return IOs{}, fmt.Errorf("stat %q: field %d: %w", text, i+1, err)
		}
		n[i] = v
	}
	const longest = uint64(1<<63-1) / uint64(time.Millisecond)
	return IOs{Count: n[0] + n[4], Bytes: (n[2] + n[6]) * uint64(block.SectorSize), Time: time.Duration(min(n[3]+n[7], longest)) * time.Millisecond}, nil
}

// blockName is the kernel's name of the device at a path in /dev.
func (s sysfs) blockName(path string) string {
	return strings.ReplaceAll(strings.TrimPrefix(filepath.Clean(path), "/dev/"), "/", "!")
}

// diskOf is the name of the whole disk that a device is, or is a part of.
func (s sysfs) diskOf(path string) string {
	name := s.blockName(path)
	if s.text("sys/class/block", name, "partition") == "" {
		return name
	}
	at, err := filepath.EvalSymlinks(s.path("sys/class/block", name))
	if err != nil {
		return name
	}
	return filepath.Base(filepath.Dir(at))
}

// controller names a controller of a local NVMe namespace; empty if the disk is none.
func (s sysfs) controller(disk string) string {
	if !strings.HasPrefix(disk, "nvme") || s.isFabrics(disk) {
		return ""
	}
	device := s.path("sys/block", disk, "device")
	if at, err := filepath.EvalSymlinks(device); err == nil && isController(filepath.Base(at)) {
		return filepath.Base(at)
	}
	for _, name := range s.names("sys/block", disk, "device") { // of a subsystem, with native multipath
		if isController(name) {
			return name
		}
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// found is a block device as /sys and /proc describe it, before its content is read.
type found struct {
	*pb.Device
	heldByOthers bool     // in use by something other than Weft
	partitions   []string // of a whole disk
	diskInUse    string   // the user of the disk that this partition is on
	zoned        bool
}

// sysfs reads a machine's description below a root directory.
type sysfs string

func (s sysfs) path(elements ...string) string {
	return filepath.Join(append([]string{string(s)}, elements...)...)
}

// text returns the content of a small file, without surrounding blanks; empty if the file cannot be
// read: attributes differ between drivers and kernels.
func (s sysfs) text(elements ...string) string { return readText(s.path(elements...)) }

func readText(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// names lists a directory; empty if there is none.
func (s sysfs) names(elements ...string) []string {
	entries, err := os.ReadDir(s.path(elements...))
	if err != nil {
		return nil
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// devices lists all devices that could become drives, or are refused.
func (s sysfs) devices() ([]found, error) {
	entries, err := os.ReadDir(s.path("sys/block"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // no block layer: no devices
		return nil, err
	}
	mounts, err := s.mounts()
	if err != nil {
		return nil, err
	}
	used, err := s.uses(mounts)
	if err != nil {
		return nil, err
	}
	var all []found
	for _, e := range entries {
		if !s.skip(e.Name(), mounts) {
			all = append(all, s.disk(e.Name(), used)...)
		}
	}
	return all, nil
}

// skip reports whether a disk should not even be listed: without a medium, in RAM, optical, a
// network block device, a path or head of NVMe over fabrics (a remote leg, never a drive), a
// device-mapper device that Weft made, a loop device over a file elsewhere, or a disk on top of one
// of these. They must not even be opened. If a Weft volume waited for this target, the target would
// wait for the volume, in a sleep that no signal ends.
func (s sysfs) skip(name string, mounts []mountPoint) bool {
	for _, driver := range []string{"ram", "zram", "sr", "fd", "nbd", "ublkb", "rbd", "mtdblock"} {
		if rest, ok := strings.CutPrefix(name, driver); ok && strings.Trim(rest, "0123456789") == "" {
			return true
		}
	}
	dir := filepath.Join("sys/block", name)
	if s.size(dir) == 0 || s.text(dir, "hidden") == "1" || s.isFabrics(name) || s.isOurs(name) {
		return true
	}
	return slices.ContainsFunc(s.below(name, mounts), func(disk string) bool { return s.skip(disk, mounts) }) ||
		s.isLoopElsewhere(name, mounts) // reads the attributes of a file
}

// Sequence is a number that the kernel gives to each disk that appears, also when it replaces
// another one (Linux 5.15); empty if the kernel has none.
func Sequence(root string, n block.DeviceNumber) string {
	s := sysfs(root)
	dir, err := filepath.EvalSymlinks(s.path(fmt.Sprintf("sys/dev/block/%v", n)))
	if err != nil {
		return ""
	}
	if seq := readText(filepath.Join(dir, "diskseq")); seq != "" {
		return seq
	}
	return readText(filepath.Join(filepath.Dir(dir), "diskseq")) // a partition's disk
}

func (s sysfs) size(dir string) block.Size {
	sectors, err := strconv.ParseUint(s.text(dir, "size"), 10, 64) // of 512 bytes, whatever the block size
	if err != nil {
		return 0
	}
	return block.Size(sectors) * block.SectorSize
}

// isFabrics looks at the controllers of an NVMe namespace: device is the controller, or with native
// multipath the subsystem, which links to them. A head without any controller is the remains of a
// lost remote leg.
func (s sysfs) isFabrics(name string) bool {
	if !strings.HasPrefix(name, "nvme") {
		return false
	}
	transports := s.controllers(name, "transport")
	remote := func(t string) bool { return slices.Contains([]string{"tcp", "rdma", "fc", "loop"}, t) }
	return len(transports) == 0 || slices.ContainsFunc(transports, remote)
}

// controllers are the values of an attribute of the NVMe controllers of a namespace.
func (s sysfs) controllers(name, attribute string) []string {
	device := filepath.Join("sys/block", name, "device")
	var values []string
	for _, dir := range append([]string{"."}, s.names(device)...) {
		if v := s.text(device, dir, attribute); v != "" && (dir == "." || isController(dir)) {
			values = append(values, v)
		}
	}
	return values
}

// isController accepts nvme0 but not nvme0n1.
func isController(name string) bool {
	number, ok := strings.CutPrefix(name, "nvme")
	return ok && number != "" && strings.Trim(number, "0123456789") == ""
}

// isOurs recognizes the device-mapper devices of Weft.
func (s sysfs) isOurs(name string) bool {
	return strings.HasPrefix(s.text("sys/block", name, "dm/name"), "weft-") ||
		strings.HasPrefix(s.text("sys/block", name, "dm/uuid"), "weft-")
}

// disk is a whole device and its partitions.
func (s sysfs) disk(name string, used uses) []found {
	dir := filepath.Join("sys/block", name)
	whole := s.describe(name, dir, used)
	whole.Model, whole.Serial, whole.Wwid = s.identity(name, dir)
	all := []found{whole}
	for _, part := range s.names(dir) {
		number := s.text(dir, part, "partition")
		if number == "" {
			continue
		}
		all[0].partitions = append(all[0].partitions, part)
		p := s.describe(part, filepath.Join(dir, part), used)
		p.diskInUse = strings.Join(whole.Holders, ", ")
		p.Model = whole.Model
		p.BlockSize, p.NumaNode, p.Rotational, p.VolatileCache = whole.BlockSize, whole.NumaNode, whole.Rotational, whole.VolatileCache
		p.ReadOnly = p.ReadOnly || whole.ReadOnly
		p.Serial, p.Wwid = ofPart(whole.Serial, number), ofPart(whole.Wwid, number)
		all = append(all, p)
	}
	return all
}

// ofPart names a partition as udev does in /dev/disk/by-id.
func ofPart(id, number string) string {
	if id == "" {
		return ""
	}
	return id + "-part" + number
}

func (s sysfs) describe(name, dir string, used uses) found {
	path := "/dev/" + strings.ReplaceAll(name, "!", "/") // cciss!c0d0
	f := found{Device: &pb.Device{
		Path: path, SizeBytes: uint64(s.size(dir)), NumaNode: s.numaNode(name, dir),
		Rotational: s.text(dir, "queue/rotational") == "1", VolatileCache: s.text(dir, "queue/write_cache") != "write through", // volatile if unknown
		ReadOnly: s.text(dir, "ro") == "1",
	}}
	if n, err := strconv.ParseUint(s.text(dir, "queue/logical_block_size"), 10, 32); err == nil {
		f.BlockSize = uint32(n)
	}
	zoned := s.text(dir, "queue/zoned")
	f.zoned = zoned != "" && zoned != "none"
	for _, holder := range s.names(dir, "holders") {
		text := holder
		if mapped := s.text("sys/block", holder, "dm/name"); mapped != "" {
			text = fmt.Sprintf("%s (%s)", holder, mapped)
		}
		f.Holders = append(f.Holders, text)
		f.heldByOthers = f.heldByOthers || !s.isOurs(holder)
	}
	by := slices.Concat(used[s.text(dir, "dev")], used[path])
	slices.Sort(by)
	f.Holders = append(f.Holders, slices.Compact(by)...)
	f.heldByOthers = f.heldByOthers || len(by) > 0
	return f
}

// identity is what a device keeps wherever it is plugged in.
func (s sysfs) identity(name, dir string) (model, serial, wwid string) {
	first := func(values ...string) string {
		i := slices.IndexFunc(values, func(v string) bool { return v != "" })
		if i < 0 {
			return ""
		}
		return values[i]
	}
	model = s.text(dir, "device/model")
	if vendor := s.text(dir, "device/vendor"); model != "" && vendor != "" && !strings.HasPrefix(vendor, "0x") {
		model = vendor + " " + model
	}
	if file := s.text(dir, "loop/backing_file"); file != "" {
		model = "loop " + file
	}
	serial = first(s.text(dir, "device/serial"), s.text(dir, "serial"), s.scsiSerial(dir))
	wwid = first(s.text(dir, "wwid"), s.text(dir, "device/wwid"), s.text(dir, "dm/uuid"))
	return model, serial, wwid
}

// scsiSerial reads the Unit Serial Number page (SPC-4, 7.8.15): 4 bytes of
// header, the last two of them the length.
func (s sysfs) scsiSerial(dir string) string {
	b, err := os.ReadFile(s.path(dir, "device/vpd_pg80"))
	if err != nil || len(b) < 4 {
		return ""
	}
	n := min(int(b[2])<<8|int(b[3]), len(b)-4)
	return strings.Trim(string(b[4:4+n]), " \x00")
}

// numaNode looks at the device and its parents; -1 if none says.
func (s sysfs) numaNode(name, dir string) int32 {
	for _, text := range s.controllers(name, "numa_node") {
		if n, err := strconv.ParseInt(text, 10, 32); err == nil {
			return int32(n)
		}
	}
	at, err := filepath.EvalSymlinks(s.path(dir))
	for top := s.path("sys"); err == nil && len(at) > len(top); at = filepath.Dir(at) {
		b, err := os.ReadFile(filepath.Join(at, "numa_node"))
		if err != nil {
			continue
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 32); err == nil {
			return int32(n)
		}
	}
	return -1
}

// uses lists the users of devices that /proc reports, by "major:minor" or by path.
type uses map[string][]string

func (s sysfs) uses(mounts []mountPoint) (uses, error) {
	u := uses{}
	for _, m := range mounts {
		by := "mounted on " + m.point
		u[m.device] = append(u[m.device], by)
		if strings.HasPrefix(m.source, "/dev/") {
			u[m.source] = append(u[m.source], by)
		}
	}
	swaps, err := os.ReadFile(s.path("proc/swaps"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without swap
		return nil, err
	}
	for line := range strings.Lines(string(swaps)) {
		if fields := strings.Fields(line); len(fields) > 0 && strings.HasPrefix(fields[0], "/") {
			u[unescape(fields[0])] = append(u[unescape(fields[0])], "swap")
		}
	}
	return s.withTargets(u), nil
}

// withTargets adds the paths to which symbolic links such as /dev/mapper/x lead.
func (s sysfs) withTargets(u uses) uses {
	out := maps.Clone(u)
	for path, by := range u {
		if !strings.HasPrefix(path, "/") {
			continue
		}
		target, err := filepath.EvalSymlinks(s.path(path))
		if err != nil {
			continue
		}
		if rest, ok := strings.CutPrefix(target, strings.TrimSuffix(string(s), "/")); ok && rest != path {
			out[rest] = append(slices.Clone(out[rest]), by...)
		}
	}
	return out
}

// mountPoint is a line of /proc/self/mountinfo (proc(5)): field 3, field 5, and two after " - ".
// The source counts as a device too, since btrfs and others have device numbers of their own.
type mountPoint struct {
	device, point  string
	fsType, source string
}

func (s sysfs) mounts() ([]mountPoint, error) {
	text, err := os.ReadFile(s.path("proc/self/mountinfo"))
	if err != nil {
		return nil, err
	}
	var all []mountPoint
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(line, " - ")
		fields, fs := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(fs) < 2 {
			continue
		}
		all = append(all, mountPoint{fields[2], unescape(fields[4]), fs[0], unescape(fs[1])})
	}
	return all, nil
}

// unescape undoes the kernel's \040 for characters that would split a field.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`, "#").Replace(s)
}

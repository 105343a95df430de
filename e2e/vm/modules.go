// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// guestModules are the modules for the guests; their dependencies are added. Modules that a
// kernel has built in or lacks are skipped.
func guestModules() []string {
	return []string{
		"virtio_pci", "virtio_blk", "virtio_net", "virtio_console",
		"nvme", "nvme_fabrics", "nvme_tcp", "nvme_rdma", "nvme_loop", "nvmet", "nvmet_tcp", "nvmet_rdma",
		"dm_mod", "dm_mirror", "dm_log", "dm_region_hash", "dm_log_userspace", "dm_delay", "dm_flakey", "dm_zero", "dm_snapshot", "dm_thin_pool", "dm_era", "dm_log_writes",
		"loop", "brd", "null_blk", "nbd", "ublk_drv", "fuse",
		"ext4", "xfs", "crc32c_generic", "crc32c_intel", "crc32_generic", "crc32_pclmul", "libcrc32c",
		"nvme_auth", "dh_generic", "hmac", "sha256_generic", "sha512_generic", // the kernel requests them by algorithm
		"configfs", "tcp_diag", "inet_diag", "sch_netem", "sch_ingress", "sch_prio", "cls_u32", "cls_matchall", "act_gact", "dummy",
		"rdma_rxe", "ib_uverbs", "rdma_ucm",
	}
}

// module is one loadable part of a kernel, uncompressed.
type module struct {
	path    string // below lib/modules/<release>
	depends []string
	aliases []string
	image   []byte
}

// moduleName is the kernel's name of a module file that may be called foo-bar.ko.xz.
func moduleName(path string) string {
	name, _, _ := strings.Cut(filepath.Base(path), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// selectModules reads the named modules of the kernel and their dependencies.
func selectModules(k Kernel, names []string) (map[string]module, error) {
	files := make(map[string]string)
	err := filepath.WalkDir(k.Modules, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			files[moduleName(path)] = path
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	found := make(map[string]module)
	for queue := slices.Clone(names); len(queue) > 0; queue = queue[1:] {
		name := queue[0]
		path, ok := files[name]
		if _, done := found[name]; done || !ok {
			continue
		}
		m, err := readModule(k, path)
		if err != nil {
			return nil, fmt.Errorf("read module %s: %w", name, err)
		}
		found[name] = m
		queue = append(queue, m.depends...)
	}
	return found, nil
}

func readModule(k Kernel, path string) (module, error) {
	image, err := readUncompressed(path)
	if err != nil {
		return module{}, err
	}
	rel, err := filepath.Rel(k.Modules, path)
	if err != nil {
		return module{}, err
	}
	m := module{path: strings.TrimSuffix(strings.TrimSuffix(rel, ".xz"), ".zst"), image: image}
	info, err := modinfo(image)
	if err != nil {
		return module{}, err
	}
	for _, d := range info["depends"] {
		for name := range strings.SplitSeq(d, ",") {
			if name != "" {
				m.depends = append(m.depends, strings.ReplaceAll(name, "-", "_"))
			}
		}
	}
	m.aliases = info["alias"]
	return m, nil
}

func readUncompressed(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	switch filepath.Ext(path) {
	case ".xz":
		r, err := xz.NewReader(f)
		if err != nil {
			return nil, err
		}
		return io.ReadAll(r)
	case ".zst":
		r, err := zstd.NewReader(f)
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return io.ReadAll(r)
	}
	return io.ReadAll(f)
}

// modinfo reads the key=value strings that the kernel's build left in a module.
func modinfo(image []byte) (map[string][]string, error) {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no .modinfo section")
	}
	data, err := section.Data()
	if err != nil {
		return nil, err
	}
	info := make(map[string][]string)
	for s := range bytes.SplitSeq(data, []byte{0}) {
		if key, value, ok := strings.Cut(string(s), "="); ok {
			info[key] = append(info[key], value)
		}
	}
	return info, nil
}

// modulesDep is the file modules.dep: each module with all its dependencies, nearest first.
func modulesDep(all map[string]module) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&b, "%s:", all[name].path)
		for _, d := range dependencies(all, name) {
			fmt.Fprintf(&b, " %s", all[d].path)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// dependencies lists what name needs, each after those that need it, as depmod does.
func dependencies(all map[string]module, name string) []string {
	var order []string
	var visit func(string)
	visit = func(n string) {
		for _, d := range all[n].depends {
			if _, ok := all[d]; !ok {
				continue
			}
			order = slices.DeleteFunc(order, func(o string) bool { return o == d })
			order = append(order, d)
			visit(d)
		}
	}
	visit(name)
	return order
}

// modulesAlias is the file modules.alias. The kernel uses it to find the module of a file
// system, a transport or a device.
func modulesAlias(all map[string]module) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for _, a := range all[name].aliases {
			fmt.Fprintf(&b, "alias %s %s\n", a, name)
		}
	}
	return b.String()
}

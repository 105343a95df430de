// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// modules are the kernel modules that make the RDMA devices of cards, by the driver of their
// network interfaces.
var modules = map[string]string{
	"mlx4_en": "mlx4_ib", "mlx4_core": "mlx4_ib", "mlx5_core": "mlx5_ib", "bnxt_en": "bnxt_re", "ice": "irdma", "i40e": "irdma",
	"qede": "qedr", "hns3": "hns_roce_hw_v2", "erdma": "erdma",
}

// Read reads the files of a machine under root ("" means "/"). What cannot be read counts as
// absent.
func Read(root string) Machine {
	r := reader("/" + root)
	var m Machine
	for _, dir := range r.glob("sys/kernel/config/nvmet/ports/*") {
		at, err := netip.ParseAddr(r.text(dir + "/addr_traddr"))
		if r.text(dir+"/addr_trtype") == "rdma" && err == nil && !at.IsUnspecified() {
			m.Portals = append(m.Portals, at)
		}
	}
	for _, dir := range r.glob("sys/class/net/*") {
		driver := filepath.Base(r.link(dir + "/device/driver"))
		module, ok := modules[driver]
		if !ok {
			continue
		}
		if len(r.glob(dir+"/device/infiniband/*")) > 0 {
			module = ""
		}
		m.Cards = append(m.Cards, Card{Interface: filepath.Base(dir), Driver: driver, Missing: module})
	}
	for _, dir := range r.glob("sys/class/infiniband/*/ports/*") {
		m.Ports = append(m.Ports, r.port(dir))
	}
	return m
}

// reader reads below a root. Names are relative to it.
type reader string

func (r reader) path(name string) string { return filepath.Join(string(r), name) }

func (r reader) text(name string) string {
	b, _ := os.ReadFile(r.path(name))
	return strings.TrimSpace(string(b))
}

func (r reader) link(name string) string {
	to, _ := os.Readlink(r.path(name))
	return to
}

func (r reader) glob(pattern string) []string {
	found, _ := filepath.Glob(r.path(pattern))
	for i, f := range found {
		found[i], _ = filepath.Rel(string(r), f)
	}
	return found
}

func (r reader) port(dir string) Port {
	p := Port{
		Device: filepath.Base(filepath.Dir(filepath.Dir(dir))), Number: filepath.Base(dir),
		Link: r.text(dir + "/link_layer"), Interface: r.text(dir + "/gid_attrs/ndevs/0"), Counters: map[string]uint64{},
	}
	_, p.State, _ = strings.Cut(r.text(dir+"/state"), ": ") // 4: ACTIVE
	if p.Interface == "" {
		p.Interface = r.text(filepath.Dir(filepath.Dir(dir)) + "/parent") // rdma_rxe
	}
	if p.Interface != "" {
		p.MTU, _ = strconv.Atoi(r.text("sys/class/net/" + p.Interface + "/mtu"))
	}
	for _, file := range r.glob(dir + "/gids/*") {
		at, err := netip.ParseAddr(r.text(file))
		if err != nil || at.IsUnspecified() { // a place without a GID, of which there are hundreds
			continue
		}
		p.GIDs = append(p.GIDs, GID{Address: at.Unmap(), Type: r.text(dir + "/gid_attrs/types/" + filepath.Base(file))})
	}
	for _, kind := range []string{"counters", "hw_counters"} {
		for _, file := range r.glob(dir + "/" + kind + "/*") {
			if n, err := strconv.ParseUint(r.text(file), 10, 64); err == nil {
				p.Counters[filepath.Base(file)] = n
			}
		}
	}
	return p
}

// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

// walker follows paths down to the hardware.
type walker struct {
	*reader
	routes []route
	nics   []NIC
}

// path finds the file system that at is on, or the device that it is.
func (w walker) path(at string) (Path, error) {
	if node, ok := strings.CutPrefix(at, "/dev/"); ok {
		if name := w.node("dev/" + node); name != "" {
			return Path{at, w.block(name, maxLayers)}, nil
		}
		return Path{}, notThere(at)
	}
	top, ok := w.mount(at, maxLayers)
	if !ok {
		return Path{}, notThere(at)
	}
	return Path{at, top}, nil
}

// node is the name in /sys/class/block of a device node, which may be a link.
func (w walker) node(file string) string {
	name := path.Base(w.follow(file))
	if w.link("sys/class/block/"+name) != "" {
		return name
	}
	for _, dm := range w.names("sys/class/block") { // without udev, nodes of device-mapper are no links
		if strings.HasPrefix(dm, "dm-") && w.text(w.follow("sys/class/block/"+dm)+"/dm/name") == name {
			return dm
		}
	}
	return ""
}

// mount is the file system that a file is on, and what is below it. The lines of mountinfo are
//
//	36 35 259:3 / /mnt/data rw,noatime shared:1 - ext4 /dev/nvme0n1p3 rw,data=ordered
func (w walker) mount(file string, left int) (Layer, bool) {
	var at []string
	lines, _ := w.lines("proc/self/mountinfo", func(line string) bool {
		f := strings.Fields(line)
		return len(f) > 6 && holds(unescape(f[4]), file)
	})
	for _, line := range lines {
		if f := strings.Fields(line); at == nil || len(f[4]) >= len(at[4]) {
			at = f
		}
	}
	dash := slices.Index(at, "-")
	if dash < 0 || len(at) < dash+4 {
		return Layer{}, false
	}
	kind, source := at[dash+1], unescape(at[dash+2])
	l := Layer{Kind: kindFS, Name: unescape(at[4]), What: kind, Options: strings.Split(at[dash+3], ",")}
	if strings.HasPrefix(kind, "fuse") {
		return Layer{Kind: kindFUSE, Name: l.Name, What: kind}, true
	}
	name := path.Base(w.link("sys/dev/block/" + at[2]))
	if name == "." { // btrfs and others have a number of their own
		if node, ok := strings.CutPrefix(source, "/dev/"); ok {
			name = w.node("dev/" + node)
		}
	}
	if name != "." && name != "" {
		l.Below = []Layer{w.block(name, left-1)}
	}
	return l, true
}

// holds reports whether a file is at or below a mount point.
func holds(point, file string) bool {
	return point == "/" || file == point || strings.HasPrefix(file, point+"/")
}

// unescape undoes what mountinfo does to blanks.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// block is a block device and what is below it.
func (w walker) block(name string, left int) Layer {
	dir := w.follow("sys/class/block/" + name)
	l := Layer{Kind: kindOther, Name: name}
	if left <= 0 {
		return l
	}
	switch {
	case w.text(dir+"/partition") != "":
		l.Kind, l.Below = kindPartition, []Layer{w.block(path.Base(path.Dir(dir)), left-1)}
	case strings.HasPrefix(name, "dm-"):
		l.Kind, l.What = kindDM, w.text(dir+"/dm/name")
		l.Below = w.slaves(dir, left)
	case strings.HasPrefix(name, "md"):
		l.Kind, l.What = kindMD, w.text(dir+"/md/level")
		l.Below = w.slaves(dir, left)
	case strings.HasPrefix(name, "loop"):
		l.Kind, l.What = kindLoop, w.text(dir+"/loop/backing_file")
		if below, ok := w.mount(l.What, left-1); l.What != "" && ok {
			l.Below = []Layer{below}
		}
	case strings.HasPrefix(name, "ublk"):
		l.Kind = kindUBLK
	case strings.HasPrefix(name, "nbd"):
		l.Kind = kindNBD
	case namespace.MatchString(name):
		l = w.namespace(name, dir)
	}
	return l
}

func (w walker) slaves(dir string, left int) (all []Layer) {
	for _, name := range w.names(dir + "/slaves") {
		if w.link(dir+"/slaves/"+name) != "" {
			all = append(all, w.block(name, left-1))
		}
	}
	return all
}

// namespace is an NVMe namespace. It is in the directory of its controller or, with multipath, of its
// subsystem, which has links to all controllers.
func (w walker) namespace(name, dir string) Layer {
	up := path.Dir(dir)
	if controller.MatchString(path.Base(up)) {
		return Layer{Kind: kindNVMe, Name: name, Below: []Layer{w.controller(path.Base(up))}}
	}
	l := Layer{Kind: kindMultipath, Name: name}
	for _, c := range w.names(up) {
		if controller.MatchString(c) && w.link(up+"/"+c) != "" {
			l.Below = append(l.Below, w.controller(c))
		}
	}
	return l
}

func (w walker) controller(name string) Layer {
	dir := w.follow("sys/class/nvme/" + name)
	l := Layer{Kind: kindController, Name: name, What: w.text(dir + "/transport")}
	if l.What == "pcie" {
		l.PCI = path.Base(pciDir(dir))
		return l
	}
	l.PCI = w.nicTo(w.text(dir + "/address"))
	return l
}

// drive is the path to a drive whose namespaces nobody named: the first of them.
func (w walker) drive(d Drive) Layer {
	for _, name := range w.names("sys/class/block") {
		if !namespace.MatchString(name) {
			continue
		}
		l := w.block(name, maxLayers)
		if slices.ContainsFunc(l.Below, func(c Layer) bool { return c.Name == d.Name }) {
			return l
		}
	}
	return w.controller(d.Name)
}

// nicTo is the NIC of a connection, by the file address of its controller:
// traddr=198.51.100.7,trsvcid=4420,host_iface=ens1f0,host_traddr=198.51.100.1. Where the connection
// names no interface, the main routing table decides. Empty if it is not known.
func (w walker) nicTo(address string) string {
	of := map[string]string{}
	for _, field := range strings.Split(address, ",") {
		key, value, _ := strings.Cut(strings.TrimSpace(field), "=")
		of[key] = value
	}
	device := of["host_iface"]
	if to, err := netip.ParseAddr(cmp.Or(of["host_traddr"], of["src_addr"], of["traddr"])); device == "" && err == nil {
		device = via(w.routes, to)
	}
	for _, n := range w.nics {
		if slices.Contains(n.Interfaces, device) {
			return n.Address
		}
	}
	return ""
}

// route is a line of the kernel's routing table.
type route struct {
	to     netip.Prefix
	device string
}

// via is the interface that leads to an address.
func via(routes []route, to netip.Addr) (device string) {
	bits := -1
	for _, r := range routes {
		if r.to.Contains(to) && r.to.Bits() > bits {
			device, bits = r.device, r.to.Bits()
		}
	}
	return device
}

// routes reads the main routing tables as far as they are of network cards, and gives each card its
// networks: those to which a route leads through it, without the default route.
func (r *reader) routes(nics []NIC) (all []route) {
	of := map[string]*NIC{}
	for i := range nics {
		for _, name := range nics[i].Interfaces {
			of[name] = &nics[i]
		}
	}
	keep := func(field int) func(string) bool {
		return func(line string) bool {
			f := strings.Fields(line)
			return len(f) > field && of[f[field]] != nil
		}
	}
	v4, _ := r.lines("proc/net/route", keep(0))
	for _, line := range v4 {
		all = append(all, route4(strings.Fields(line)))
	}
	v6, _ := r.lines("proc/net/ipv6_route", keep(9))
	for _, line := range v6 {
		all = append(all, route6(strings.Fields(line)))
	}
	all = slices.DeleteFunc(all, func(to route) bool {
		at := to.to.Addr()
		return !to.to.IsValid() || at.IsMulticast() || at.IsLinkLocalUnicast() || at.Is6() && to.to.Bits() == 128
	})
	for _, to := range all {
		if n := of[to.device]; to.to.Bits() > 0 && !slices.Contains(n.Networks, to.to.String()) {
			n.Networks = append(n.Networks, to.to.String())
		}
	}
	return all
}

// route4 reads Iface Destination Gateway Flags RefCnt Use Metric Mask …, numbers in hexadecimal and in
// the order of a little-endian processor.
func route4(f []string) route {
	if len(f) < 8 {
		return route{}
	}
	to, err1 := strconv.ParseUint(f[1], 16, 32)
	mask, err2 := strconv.ParseUint(f[7], 16, 32)
	if err1 != nil || err2 != nil {
		return route{}
	}
	var at [4]byte
	binary.LittleEndian.PutUint32(at[:], uint32(to))
	bits := 0
	for ; mask != 0; mask &= mask - 1 {
		bits++
	}
	return route{netip.PrefixFrom(netip.AddrFrom4(at), bits), f[0]}
}

// route6 reads destination, length, source, length, next hop, metric, references, uses, flags, device.
func route6(f []string) route {
	b, err1 := hex.DecodeString(f[0])
	bits, err2 := strconv.ParseUint(f[1], 16, 8)
	at, ok := netip.AddrFromSlice(b)
	if err1 != nil || err2 != nil || !ok {
		return route{}
	}
	return route{netip.PrefixFrom(at, int(bits)), f[9]}
}

// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	vendorNVIDIA  = "0x10de"
	classDisplay  = "0x0300" // VGA controller, and the 3D controllers below
	class3D       = "0x0302"
	maxLayers     = 16 // a path that is deeper is a loop
	nvidiaOptions = "RegistryDwords: "
)

// Read reads the files of a machine below root. It follows at, a mount point, a file or a device
// node, down to the hardware; if at is empty, all of Weft's volumes and all local drives. What cannot
// be read counts as not known; only an at that is not there is an error.
func Read(root fs.FS, at string) (Machine, error) {
	r := &reader{root: root}
	return r.machine(at)
}

func (r *reader) machine(at string) (Machine, error) {
	m := Machine{Kernel: r.kernel(), Driver: r.driver()}
	m.NvidiaFS = r.nvidiaFS(m.Kernel.Release)
	m.GPUs, m.Drives, m.NICs = r.gpus(), r.drives(), r.nics()
	w := walker{r, r.routes(m.NICs), m.NICs}
	if at != "" {
		p, err := w.path(at)
		m.Paths = []Path{p}
		return m, err
	}
	for _, name := range r.names("dev/weft") {
		if p, err := w.path("/dev/weft/" + name); err == nil {
			m.Paths = append(m.Paths, p)
		}
	}
	for _, d := range m.Drives {
		m.Paths = append(m.Paths, Path{d.Name, w.drive(d)})
	}
	return m, nil
}

var (
	driverVersion = regexp.MustCompile(`\b\d{3,}\.[\d.]+\b`)
	pciAddress    = regexp.MustCompile(`^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]$`)
	hookSymbol    = regexp.MustCompile(`\b(nvme|nvme_rdma)_v\d+_register_nvfs_dma_ops\b`)
	controller    = regexp.MustCompile(`^nvme\d+$`)
	namespace     = regexp.MustCompile(`^nvme\d+n\d+$`)
	cufileP2P     = regexp.MustCompile(`"use_pci_p2pdma"\s*:\s*(true|false)`)
)

func (r *reader) kernel() Kernel {
	k := Kernel{Release: r.text("proc/sys/kernel/osrelease"), P2PDMA: Unknown, Multipath: Unknown, UseP2P: Unknown}
	seen := map[string]bool{} // of the first processor; the others are alike
	cpu, _ := r.lines("proc/cpuinfo", func(line string) bool {
		key, _, _ := strings.Cut(line, ":")
		key = strings.TrimSpace(key)
		wanted := slices.Contains([]string{"vendor_id", "cpu family", "flags"}, key) && !seen[key]
		seen[key] = true
		return wanted
	})
	for _, line := range cpu {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "vendor_id":
			k.CPU = value
		case "cpu family":
			k.Family, _ = strconv.Atoi(value)
		case "flags":
			k.Virtual = slices.Contains(strings.Fields(value), "hypervisor")
		}
	}
	symbols, ok := r.lines("proc/kallsyms", func(line string) bool {
		return strings.Contains(line, " pci_p2pdma_add_resource") || strings.Contains(line, "_register_nvfs_dma_ops")
	})
	if ok {
		k.P2PDMA, k.Hooked = No, []string{}
	}
	for _, line := range symbols {
		if strings.Contains(line, " pci_p2pdma_add_resource") {
			k.P2PDMA = Yes
		}
		if hook := hookSymbol.FindStringSubmatch(line); hook != nil && !slices.Contains(k.Hooked, hook[1]) {
			k.Hooked = append(k.Hooked, hook[1])
		}
	}
	switch r.text("sys/module/nvme_core/parameters/multipath") {
	case "Y":
		k.Multipath = Yes
	case "N":
		k.Multipath = No
	}
	config, _ := r.lines("etc/cufile.json", cufileP2P.MatchString)
	for _, line := range config {
		k.UseP2P = answer(cufileP2P.FindStringSubmatch(line)[1] == "true")
	}
	return k
}

// driver reads the options from params: the parameters in /sys/module/nvidia are empty even if they
// were set.
func (r *reader) driver() Driver {
	version := r.text("proc/driver/nvidia/version")
	version, _, _ = strings.Cut(version, "\n")
	d := Driver{Version: driverVersion.FindString(version), Open: strings.Contains(version, "Open Kernel Module")}
	params, _ := r.lines("proc/driver/nvidia/params", func(line string) bool { return strings.HasPrefix(line, nvidiaOptions) })
	for _, line := range params {
		d.Options = map[string]string{}
		for _, option := range strings.Split(strings.Trim(strings.TrimPrefix(line, nvidiaOptions), `" `), ";") {
			if key, value, ok := strings.Cut(strings.TrimSpace(option), "="); ok {
				d.Options[strings.ToLower(key)] = value
			}
		}
	}
	return d
}

func (r *reader) nvidiaFS(release string) NvidiaFS {
	var n NvidiaFS
	_, n.Version, _ = strings.Cut(r.text("proc/driver/nvidia-fs/version"), ": ")
	loaded, _ := r.lines("proc/modules", func(line string) bool { return strings.HasPrefix(line, "nvidia_fs ") })
	n.Loaded = len(loaded) > 0 || n.Version != ""
	reads, _ := r.lines("proc/driver/nvidia-fs/stats", func(line string) bool {
		return strings.HasPrefix(line, "Reads") && strings.Contains(line, "n=")
	})
	for _, line := range reads {
		_, counts, _ := strings.Cut(line, ":")
		n.Reads = strings.TrimSpace(counts)
	}
	if release != "" {
		files, _ := r.lines("lib/modules/"+release+"/modules.dep", func(line string) bool {
			file, _, _ := strings.Cut(line, ":")
			return strings.Contains(path.Base(file), "nvidia-fs.ko")
		})
		n.Installed = len(files) > 0
	}
	return n
}

func (r *reader) gpus() (all []GPU) {
	for _, name := range r.names("sys/bus/pci/devices") {
		dir := r.follow("sys/bus/pci/devices/" + name)
		class := r.text(dir + "/class")
		if !strings.HasPrefix(class, classDisplay) && !strings.HasPrefix(class, class3D) {
			continue
		}
		if r.text(dir+"/vendor") != vendorNVIDIA || r.link(dir+"/physfn") != "" {
			continue
		}
		g := GPU{Function: r.function(dir), BAR1: bar(r.text(dir+"/resource"), 1)}
		model, _ := r.lines("proc/driver/nvidia/gpus/"+name+"/information", func(line string) bool { return strings.HasPrefix(line, "Model:") })
		for _, line := range model {
			g.Model = strings.TrimSpace(strings.TrimPrefix(line, "Model:"))
		}
		all = append(all, g)
	}
	return all
}

// bar is the size of a region in the file resource, which has a line "start end flags" for each.
func bar(resource string, n int) int64 {
	lines := strings.Split(resource, "\n")
	if n >= len(lines) {
		return 0
	}
	fields := strings.Fields(lines[n])
	if len(fields) < 2 {
		return 0
	}
	start, err1 := strconv.ParseUint(strings.TrimPrefix(fields[0], "0x"), 16, 64)
	end, err2 := strconv.ParseUint(strings.TrimPrefix(fields[1], "0x"), 16, 64)
	if err1 != nil || err2 != nil || end <= start {
		return 0
	}
	return int64(end - start + 1)
}

func (r *reader) drives() (all []Drive) {
	for _, name := range r.names("sys/class/nvme") {
		dir := r.follow("sys/class/nvme/" + name)
		pci := pciDir(dir)
		if pci == "" || !controller.MatchString(name) {
			continue
		}
		all = append(all, Drive{Function: r.function(pci), Name: name, Model: r.text(dir + "/model")})
	}
	slices.SortFunc(all, func(a, b Drive) int { return natural(a.Name, b.Name) })
	return all
}

// nics puts interfaces and RDMA devices of one PCI function together. Virtual functions are left
// out where their card is there too.
func (r *reader) nics() (all []NIC) {
	at := map[string]int{}
	nic := func(dir string) *NIC {
		pci := pciDir(dir)
		if pci == "" || r.link(pci+"/physfn") != "" {
			return nil
		}
		if _, ok := at[pci]; !ok {
			at[pci] = len(all)
			all = append(all, NIC{Function: r.function(pci)})
		}
		return &all[at[pci]]
	}
	for _, name := range r.names("sys/class/net") {
		dir := r.follow("sys/class/net/" + name)
		n := nic(dir)
		if n == nil {
			continue
		}
		n.Interfaces = append(n.Interfaces, name)
		if mbits, err := strconv.Atoi(r.text(dir + "/speed")); err == nil {
			n.Gbits = max(n.Gbits, mbits/1000)
		}
	}
	for _, name := range r.names("sys/class/infiniband") {
		dir := r.follow("sys/class/infiniband/" + name)
		n := nic(dir)
		if n == nil {
			continue
		}
		n.RDMA = append(n.RDMA, name)
		rate, _, _ := strings.Cut(r.text(dir+"/ports/1/rate"), " ") // 200 Gb/sec (4X HDR)
		if gbits, err := strconv.Atoi(rate); err == nil && strings.Contains(r.text(dir+"/ports/1/state"), "ACTIVE") {
			n.Gbits = max(n.Gbits, gbits)
		}
	}
	slices.SortFunc(all, func(a, b NIC) int { return natural(a.Name(), b.Name()) })
	return all
}

// natural compares names so that mlx5_2 is before mlx5_10.
func natural(a, b string) int {
	if len(a) != len(b) && strings.TrimRight(a, "0123456789") == strings.TrimRight(b, "0123456789") {
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}

// pciDir is the part of a path in /sys/devices up to the last PCI function; empty if there is none.
func pciDir(dir string) string {
	for dir != "." && dir != "/" {
		if pciAddress.MatchString(path.Base(dir)) {
			return dir
		}
		dir = path.Dir(dir)
	}
	return ""
}

// function reads the PCI function of a directory such as
// sys/devices/pci0000:00/0000:00:01.1/0000:01:00.0. The directories above it are the bridges.
func (r *reader) function(dir string) Function {
	f := Function{Address: path.Base(dir), NUMA: -1, Driver: path.Base(r.link(dir + "/driver"))}
	if f.Driver == "." {
		f.Driver = ""
	}
	if node, err := strconv.Atoi(r.text(dir + "/numa_node")); err == nil {
		f.NUMA = node
	}
	f.Link = Link{speed(r.text(dir + "/current_link_speed")), width(r.text(dir + "/current_link_width"))}
	f.Best = Link{speed(r.text(dir + "/max_link_speed")), width(r.text(dir + "/max_link_width"))}
	if group := r.link(dir + "/iommu_group"); group != "" {
		f.IOMMU = r.text("sys/kernel/iommu_groups/" + path.Base(group) + "/type")
	}
	for up := path.Dir(dir); pciAddress.MatchString(path.Base(up)); up = path.Dir(up) {
		f.Bridges = append(f.Bridges, r.bridge(up))
		f.Root = path.Base(path.Dir(up))
	}
	slices.Reverse(f.Bridges)
	if len(f.Bridges) == 0 {
		f.Root = path.Base(path.Dir(dir))
	}
	return f
}

func speed(text string) float64 { // 16.0 GT/s PCIe
	number, _, _ := strings.Cut(text, " ")
	v, _ := strconv.ParseFloat(number, 64)
	return v
}

func width(text string) int {
	n, _ := strconv.Atoi(text)
	if n > 32 { // 63 and 255 stand for "no link"
		return 0
	}
	return n
}

// bridge reads a bridge's access control from its configuration space; where only its first part may
// be read, nvidia-fs's list of bridges with access control tells, if it is there.
func (r *reader) bridge(dir string) Bridge {
	b := Bridge{Address: path.Base(dir), Redirects: acs(r.bytes(dir + "/config"))}
	if b.Redirects != Unknown {
		return b
	}
	listed, ok := r.lines("proc/driver/nvidia-fs/bridges", func(line string) bool { return true })
	if ok {
		b.Redirects = answer(slices.Contains(listed, b.Address))
	}
	return b
}

// Places in the configuration space; linux/pci_regs.h.
const (
	firstExtended = 0x100
	idACS         = 0x0d
	acsControl    = 6
	acsRedirects  = 1<<2 | 1<<3 | 1<<5 // P2P request redirect, completion redirect, egress control
)

// acs says whether access control redirects, by the extended capabilities of a bridge.
func acs(config []byte) Answer {
	if len(config) <= firstExtended {
		return Unknown
	}
	for at, steps := firstExtended, 0; at >= firstExtended && at+8 <= len(config) && steps < 64; steps++ {
		header := uint32(config[at]) | uint32(config[at+1])<<8 | uint32(config[at+2])<<16 | uint32(config[at+3])<<24
		if header&0xffff == idACS {
			control := uint16(config[at+acsControl]) | uint16(config[at+acsControl+1])<<8
			return answer(control&acsRedirects != 0)
		}
		at = int(header >> 20)
	}
	return No
}

func notThere(at string) error { return fmt.Errorf("%s: no such device or mounted file system", at) }

// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Way is how data gets from a path to a GPU.
type Way string

// The ways.
const (
	Direct   Way = "direct"    // from the drive or the NIC into the GPU's memory
	Bounce   Way = "bounce"    // through a copy in the host's memory
	NotKnown Way = "not known" // nothing is known to prevent direct, and something is not known to allow it
)

// Reason is a ground of a verdict.
type Reason struct {
	Why  string `json:"reason"`
	Next string `json:"next,omitempty"` // what to do about it; empty if nothing
}

// Verdict is the way between a path and a GPU.
type Verdict struct {
	GPU     string   `json:"gpu"`
	Path    string   `json:"path"`
	Way     Way      `json:"verdict"`
	Reasons []Reason `json:"reasons"`
}

// Judge gives a verdict for each path and each GPU.
func Judge(m Machine) []Verdict {
	var all []Verdict
	for _, p := range m.Paths {
		for _, g := range m.GPUs {
			way, why := judge(m, g, p)
			all = append(all, Verdict{g.Address, p.Name, way, why})
		}
	}
	return all
}

// grounds are what speaks against a direct way.
type grounds struct {
	blocks []Reason // exclude it
	doubts []Reason // are not known to allow it
}

func (g *grounds) block(why, next string) { g.blocks = append(g.blocks, Reason{why, next}) }
func (g *grounds) doubt(why, next string) { g.doubts = append(g.doubts, Reason{why, next}) }

func (g *grounds) add(more grounds) {
	g.blocks = append(g.blocks, more.blocks...)
	g.doubts = append(g.doubts, more.doubts...)
}

func judge(m Machine, g GPU, p Path) (Way, []Reason) {
	both := card(g)
	both.add(storage(p))
	if len(both.blocks) > 0 {
		return Bounce, both.blocks
	}
	modes := []struct {
		name string
		of   grounds
	}{{"nvidia-fs", withNvidiaFS(m, p)}, {"P2PDMA", withP2PDMA(m, g, p)}}
	var blocks, doubts []Reason
	open := false // whether nothing is known to exclude one of them
	for _, mode := range modes {
		mode.of.add(reach(m, g, p, mode.name == "P2PDMA"))
		if len(mode.of.blocks) > 0 {
			blocks = append(blocks, within(mode.name, mode.of.blocks)...)
			continue
		}
		if len(mode.of.doubts)+len(both.doubts) == 0 {
			return Direct, []Reason{{Why: "all conditions of " + mode.name + " hold"}}
		}
		open = true
		doubts = append(doubts, within(mode.name, mode.of.doubts)...)
	}
	if open {
		return NotKnown, slices.Concat(both.doubts, doubts)
	}
	return Bounce, blocks
}

// within says of which mode reasons are.
func within(mode string, reasons []Reason) (all []Reason) {
	for _, r := range reasons {
		all = append(all, Reason{mode + ": " + r.Why, r.Next})
	}
	return all
}

const withMistrust = "check with gdscheck -p and measure with gdsio, both of CUDA"

// card looks at the GPU itself.
func card(g GPU) (of grounds) {
	switch {
	case g.Driver == "vfio-pci":
		of.block("the GPU is lent to a virtual machine (driver vfio-pci)", "run weft doctor --gpu inside that machine")
	case g.Driver != "nvidia":
		of.block("the GPU has no NVIDIA driver", "install NVIDIA's driver with the open kernel modules")
	case strings.Contains(g.Model, "GeForce"):
		of.block(g.Model+" has no GPUDirect; data-center and workstation cards have", "")
	case g.BAR1 == 0:
		of.doubt("the size of the GPU's BAR1, through which other devices reach its memory, is not known", "lspci -vs "+g.Address)
	}
	return of
}

// storage looks at the layers, for what excludes a direct way in both modes.
func storage(p Path) (of grounds) {
	layers := p.Top.all()
	mapped := false
	for _, l := range layers {
		if l.Kind == kindDM && mapped { // one stack, one reason
			continue
		}
		mapped = mapped || l.Kind == kindDM
		of.add(layer(l))
	}
	if !slices.ContainsFunc(layers, func(l Layer) bool { return l.Kind == kindController }) && len(of.blocks) == 0 {
		of.block("there is no NVMe device below "+p.Name, "use a file system on NVMe")
	}
	return of
}

// layer looks at one layer.
//
// Branches: one case for each kind of layer.
func layer(l Layer) (of grounds) {
	const raw = "put the file system on the NVMe namespace itself"
	switch l.Kind {
	case kindFS:
		return fileSystem(l)
	case kindDM:
		if strings.HasPrefix(l.What, "weft-") {
			// Its log says "Unsupported block device: /dev/dm-0" (NVIDIA/gds-nvidia-fs#62).
			of.block("a Weft volume on the kernel data path is a device-mapper device ("+l.Name+"), which cuFile refuses", "none yet: no Weft volume is direct; take the NIC near to the GPU")
			return of
		}
		of.block(fmt.Sprintf("%s (%s) is a device-mapper device, which cuFile refuses", l.Name, l.What), raw)
	case kindMD:
		if !slices.Contains([]string{"raid0", "raid1", "raid10"}, l.What) {
			of.block(fmt.Sprintf("%s is md %s: the processor works on the data", l.Name, l.What), raw)
		}
	case kindLoop:
		of.block(l.Name+" is a loop device: the kernel reads its file through host memory", "")
	case kindFUSE:
		of.block(l.Name+" is a file system in a process (FUSE): data is copied through that process", "none yet: no Weft volume in user space is direct")
	case kindUBLK, kindNBD:
		of.block(fmt.Sprintf("%s is a block device of a process (%s): data is copied through that process", l.Name, l.Kind), "none yet: no Weft volume in user space is direct")
	case kindController:
		switch l.What {
		case "pcie", "rdma":
		case "tcp":
			of.block(l.Name+" is connected over TCP, which puts all data into host memory first", "connect over RDMA: give targets portals rdma://ADDRESS, and this host an RDMA card")
		default:
			of.block(fmt.Sprintf("%s is connected over %s", l.Name, l.What), "use a local drive, or NVMe over RDMA")
		}
	case kindOther:
		of.block(l.Name+" is not an NVMe device", "use a file system on NVMe")
	}
	return of
}

func fileSystem(l Layer) (of grounds) {
	switch l.What {
	case "xfs":
	case "ext4":
		for _, o := range l.Options {
			if mode, ok := strings.CutPrefix(o, "data="); ok && mode != "ordered" {
				of.block(fmt.Sprintf("ext4 at %s is mounted with data=%s", l.Name, mode), "mount it with data=ordered, the default")
			}
		}
	default:
		of.block(fmt.Sprintf("the file system at %s is %s; GPUDirect Storage knows ext4 and xfs", l.Name, l.What), "use xfs, or ext4 with data=ordered")
	}
	return of
}

// withNvidiaFS looks for what nvidia-fs needs.
func withNvidiaFS(m Machine, p Path) (of grounds) {
	switch {
	case m.NvidiaFS.Loaded:
	case m.NvidiaFS.Installed:
		of.block("the module is not loaded", "modprobe nvidia-fs")
	default:
		of.block("the module is not installed for this kernel", "install nvidia-fs (package nvidia-fs-dkms or nvidia-gds)")
	}
	for _, l := range p.Top.all() {
		switch {
		case l.Kind == kindController:
			of.add(hooked(m.Kernel, l))
		case l.Kind == kindMD && l.What != "raid0":
			of.doubt(fmt.Sprintf("whether it works through md %s (%s) is not documented", l.What, l.Name), withMistrust)
		case l.Kind == kindMD:
			of.doubt("whether it works through md raid0 ("+l.Name+") depends on the release", withMistrust)
		case l.Kind == kindMultipath:
			of.doubt("whether it works through NVMe multipath ("+l.Name+") depends on the release", withMistrust)
		}
	}
	return of
}

// hooked looks whether the driver of a controller was built for nvidia-fs: only then it asks for the
// addresses of GPU memory.
func hooked(k Kernel, l Layer) (of grounds) {
	driver := map[string]string{"pcie": "nvme", "rdma": "nvme_rdma"}[l.What]
	switch {
	case k.Hooked == nil:
		of.doubt("/proc/kallsyms cannot be read, so it is not known whether the driver "+driver+" was built for it", "run weft doctor --gpu as root")
	case !slices.Contains(k.Hooked, driver):
		of.block("the driver "+driver+" was not built for it, as those of the distributions", "install DOCA-OFED (or MLNX_OFED) with its NVMe drivers for GPUDirect Storage and reboot")
	}
	return of
}

// p2pModels are the GPUs that NVIDIA supports with P2PDMA.
var p2pModels = []string{"A100", "A40", "L4", "L40S", "H100", "H200", "B100", "B200", "B300"}

// Releases from which P2PDMA works.
var (
	p2pKernel  = release{6, 2} // for files and block devices
	p2pStacks  = release{7, 1} // about: nvme-rdma, NVMe multipath, and md without parity
	p2pDriver  = 565
	p2pOptions = []string{"RMForceStaticBar1", "RmForceDisableIomapWC"}
)

// withP2PDMA looks for what the kernel's own way needs.
func withP2PDMA(m Machine, g GPU, p Path) (of grounds) {
	k := m.Kernel
	switch {
	case k.P2PDMA == No:
		of.block("kernel "+k.Release+" was built without CONFIG_PCI_P2PDMA", "boot a kernel that has it, from 6.2 on, such as Ubuntu's")
	case parseRelease(k.Release).before(p2pKernel):
		of.block("kernel "+k.Release+" is older than 6.2", "boot a newer one with CONFIG_PCI_P2PDMA")
	case k.P2PDMA == Unknown:
		of.doubt("/proc/kallsyms cannot be read, so it is not known whether the kernel has it", "run weft doctor --gpu as root")
	}
	of.add(driverFor(m, g))
	if k.UseP2P != Yes {
		why := map[Answer]string{No: "/etc/cufile.json turns it off", Unknown: "/etc/cufile.json does not ask for it"}[k.UseP2P]
		of.doubt(why, `set "use_pci_p2pdma": true under "properties", there or in the file that CUFILE_ENV_PATH_JSON names`)
	}
	for _, l := range p.Top.all() {
		of.add(p2pLayer(k, l))
	}
	return of
}

// driverFor looks for what P2PDMA needs of NVIDIA's driver.
func driverFor(m Machine, g GPU) (of grounds) {
	d := m.Driver
	major, _, _ := strings.Cut(d.Version, ".")
	version, _ := strconv.Atoi(major)
	switch {
	case d.Version == "":
		of.doubt("the version of NVIDIA's driver is not known", "cat /proc/driver/nvidia/version")
	case !d.Open:
		of.block("NVIDIA's driver "+d.Version+" is the closed one", "install its open kernel modules")
	case version < p2pDriver:
		of.block("NVIDIA's driver "+d.Version+" is older than 565", "install a newer one, with open kernel modules")
	}
	words := strings.FieldsFunc(g.Model, func(c rune) bool { return c == ' ' || c == '-' })
	switch {
	case g.Model == "":
		of.doubt("the GPU's model is not known", "cat /proc/driver/nvidia/gpus/"+g.Address+"/information")
	case !slices.ContainsFunc(words, func(word string) bool { return slices.Contains(p2pModels, word) }):
		of.doubt(fmt.Sprintf("the GPU %q is not in NVIDIA's list (%s)", g.Model, strings.Join(p2pModels, ", ")), withMistrust)
	}
	if m.Kernel.CPU == "" { // the options are for x86
		return of
	}
	const option = `options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;" in /etc/modprobe.d/nvidia-p2pdma.conf, then reboot`
	for _, name := range p2pOptions {
		switch {
		case d.Options == nil:
			of.doubt("the options of NVIDIA's driver cannot be read", "grep RegistryDwords /proc/driver/nvidia/params")
			return of
		case d.Options[strings.ToLower(name)] != "1":
			of.block("NVIDIA's driver runs without "+name+"=1", option)
		}
	}
	return of
}

// p2pLayer looks for layers that P2PDMA does not pass in some kernels.
func p2pLayer(k Kernel, l Layer) (of grounds) {
	what := ""
	switch {
	case l.Kind == kindMultipath:
		what = "NVMe multipath (" + l.Name + ")"
	case l.Kind == kindMD:
		what = fmt.Sprintf("md %s (%s)", l.What, l.Name)
	case l.Kind == kindController && l.What == "rdma":
		what = "nvme-rdma (" + l.Name + ")"
	case l.Kind == kindNVMe && k.Multipath == Yes:
		of.doubt("NVIDIA supports it only with nvme_core.multipath=N", "options nvme_core multipath=N in /etc/modprobe.d, then reboot; Weft's kernel data path cannot run with that, use --datapath user")
		return of
	default:
		return of
	}
	if parseRelease(k.Release).before(p2pStacks) {
		of.block(fmt.Sprintf("kernel %s does not pass it through %s", k.Release, what), "use a file system on the namespace of a local drive")
		return of
	}
	why := fmt.Sprintf("whether kernel %s passes it through %s is not known", k.Release, what)
	if l.Kind == kindMD && l.What != "raid0" {
		why += ", nor whether a leg that a GPU cannot reach is counted as written"
	}
	of.doubt(why, withMistrust)
	return of
}

// reach looks at the way over PCIe between the GPU and each end of the path.
func reach(m Machine, g GPU, p Path, p2pdma bool) (of grounds) {
	if m.Kernel.Virtual {
		of.doubt("this is a virtual machine: its PCIe topology, and whether devices may reach each other, is up to the hypervisor", withMistrust)
	}
	translated := slices.Contains([]string{"DMA", "DMA-FQ"}, g.IOMMU)
	switch {
	case m.Kernel.CPU != "" && translated:
		of.doubt("the IOMMU translates the GPU's addresses ("+g.IOMMU+"), which NVIDIA does not promise to work", "iommu=pt on the kernel's command line, or the IOMMU off, then reboot")
	case m.Kernel.CPU == "" && g.IOMMU == "identity":
		of.doubt("the IOMMU passes the GPU's addresses through; NVIDIA wants it to translate on Arm", "remove iommu.passthrough=1 from the kernel's command line and reboot")
	}
	seen := map[string]bool{}
	for _, l := range p.Top.all() {
		if l.Kind != kindController || seen[l.PCI] && l.PCI != "" {
			continue
		}
		seen[l.PCI] = true
		end, ok := m.function(l.PCI)
		if !ok {
			of.doubt("it is not known through which card "+l.Name+" is connected", "give the connection an interface (host_iface)")
			continue
		}
		of.add(meet(m.Kernel, g.Function, end, p2pdma))
	}
	return of
}

// meet looks at the way between two functions.
func meet(k Kernel, g, end Function, p2pdma bool) (of grounds) {
	const nearer = "use a drive or NIC below the GPU's switch, or " + withMistrust
	switch near := Near(g, end); {
	case near == Switch:
		return unredirected(between(g, end))
	case p2pdma && near == Node && k.CPU == "AuthenticAMD" && k.Family >= 0x17:
		return of // the kernel knows that these forward; drivers/pci/p2pdma.c
	case near == Node:
		of.doubt(fmt.Sprintf("%s shares no PCIe switch with the GPU: the processor has to forward between root ports", end.Address), nearer)
	case near == Across:
		of.doubt(fmt.Sprintf("%s is at NUMA node %d and the GPU at %d: the processors have to forward", end.Address, end.NUMA, g.NUMA), nearer)
	default:
		of.doubt("the machine does not say where "+end.Address+" is, relative to the GPU", withMistrust)
	}
	return of
}

// unredirected looks for access control on the way below a switch.
func unredirected(bridges []Bridge) (of grounds) {
	var on, unknown []string
	for _, b := range bridges {
		switch b.Redirects {
		case Yes:
			on = append(on, b.Address)
		case Unknown:
			unknown = append(unknown, b.Address)
		}
	}
	switch {
	case len(on) > 0:
		of.doubt("access control (ACS) at "+strings.Join(on, ", ")+" sends the data up to the processor instead of across the switch", acsOff)
	case len(unknown) > 0:
		of.doubt("whether access control (ACS) is on at "+strings.Join(unknown, ", ")+" is not known", "run weft doctor --gpu as root")
	}
	return of
}

const acsOff = "switch ACS off in the firmware, or at each boot with setpci -s BRIDGE ECAP_ACS+6.w=0000; virtual machines then lose the isolation between devices"

// release is the number of a kernel's release.
type release struct{ major, minor int }

func parseRelease(s string) (r release) {
	fmt.Sscanf(s, "%d.%d", &r.major, &r.minor)
	return r
}

func (r release) before(s release) bool {
	return r.major < s.major || r.major == s.major && r.minor < s.minor
}

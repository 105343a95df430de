// SPDX-License-Identifier: Apache-2.0

// Package gpu says whether storage and the GPUs of a machine can exchange data directly, or only
// through a copy in the host's memory:
//
//	            direct                              bounce
//	drive or NIC ──PCIe switch── GPU      drive or NIC ── host memory ── GPU
//
// [Read] reads the kernel's files, and the other functions judge what was read: [Judge] gives a
// verdict for each GPU and each path, [Machine.Findings] what is right and wrong on the machine,
// [Near] how far two PCI functions are apart.
//
//	/sys/bus/pci/devices, /sys/class/{net,infiniband,nvme,block}   topology, links, layers
//	/proc/driver/nvidia, /proc/driver/nvidia-fs                    the driver and its options
//	/proc/{kallsyms,cpuinfo,modules,mounts}, /sys/module           what the kernel can do
//
// There are two ways to be direct. With nvidia-fs, NVIDIA's module gives drivers that were built
// for it the addresses of GPU memory. With P2PDMA, the kernel does that by itself. Either has its own
// conditions; a path is direct if all conditions of one of them are known to hold. A verdict is
// made of facts only: what cannot be read counts as not known, and nothing is tried out.
//
// [Record] keeps the files that were read, and [Tree] reads them again, so that a user's report can
// become a test.
package gpu

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
)

// Machine describes the parts of a machine that GPU storage depends on.
type Machine struct {
	Kernel   Kernel   `json:"kernel"`
	Driver   Driver   `json:"nvidia_driver"`
	NvidiaFS NvidiaFS `json:"nvidia_fs"`
	GPUs     []GPU    `json:"gpus"` // in the order of PCI addresses, as nvidia-smi numbers them
	NICs     []NIC    `json:"nics"`
	Drives   []Drive  `json:"drives"`
	Paths    []Path   `json:"paths"`
}

// Answer is yes, no, or not known.
type Answer string

// The answers.
const (
	Yes     Answer = "yes"
	No      Answer = "no"
	Unknown Answer = "not known"
)

func answer(yes bool) Answer {
	if yes {
		return Yes
	}
	return No
}

// Kernel describes the running kernel and its processor.
type Kernel struct {
	Release   string `json:"release"`        // /proc/sys/kernel/osrelease
	CPU       string `json:"cpu"`            // vendor_id of /proc/cpuinfo; empty if it is not x86
	Family    int    `json:"cpu_family"`     // cpu family
	Virtual   bool   `json:"virtual"`        // the flag hypervisor: this is a virtual machine
	P2PDMA    Answer `json:"p2pdma"`         // whether it was built with CONFIG_PCI_P2PDMA
	Multipath Answer `json:"nvme_multipath"` // /sys/module/nvme_core/parameters/multipath
	// Hooked are the NVMe drivers that can register with nvidia-fs: nvme, nvme_rdma. Nil means that
	// the kernel's symbols cannot be read.
	Hooked []string `json:"hooked_drivers"`
	UseP2P Answer   `json:"cufile_p2pdma"` // use_pci_p2pdma in /etc/cufile.json
}

// Driver is NVIDIA's driver.
type Driver struct {
	Version string            `json:"version"` // empty if it is not loaded
	Open    bool              `json:"open"`    // the open kernel modules
	Options map[string]string `json:"options"` // RegistryDwords of /proc/driver/nvidia/params; nil if it cannot be read
}

// NvidiaFS is the module of GPUDirect Storage.
type NvidiaFS struct {
	Loaded    bool   `json:"loaded"`
	Installed bool   `json:"installed"` // for the kernel that runs
	Version   string `json:"version"`   // /proc/driver/nvidia-fs/version
	Reads     string `json:"reads"`     // the line of stats that counts them; empty if statistics are off
}

// Function is a PCI function and the way to it.
type Function struct {
	Address string   `json:"pci"`
	Root    string   `json:"host_bridge"` // pci0000:00
	Bridges []Bridge `json:"bridges"`     // the root port first, then the ports of switches
	NUMA    int      `json:"numa_node"`   // -1 if the machine does not say
	Driver  string   `json:"driver"`
	Link    Link     `json:"link"`
	Best    Link     `json:"best_link"` // of the function itself
	IOMMU   string   `json:"iommu"`     // type of its group: identity, DMA, DMA-FQ; empty without an IOMMU
}

// Bridge is a root port, or a port of a switch.
type Bridge struct {
	Address string `json:"pci"`
	// Redirects: access control (ACS) sends requests between functions below it up to the root.
	Redirects Answer `json:"acs_redirects"`
}

// Link is the speed of a PCIe link.
type Link struct {
	GTs   float64 `json:"gt_per_s"`
	Width int     `json:"width"`
}

// Gbits returns the bandwidth of a link, in Gbit/s.
func (l Link) Gbits() float64 {
	if l.GTs > 5 {
		return l.GTs * float64(l.Width) * 128 / 130
	}
	return l.GTs * float64(l.Width) * 8 / 10
}

func (l Link) String() string {
	if l.Width == 0 {
		return ""
	}
	return fmt.Sprintf("%g GT/s x%d", l.GTs, l.Width)
}

// GPU is an NVIDIA GPU.
type GPU struct {
	Function
	Model string `json:"model"` // empty without the driver
	BAR1  int64  `json:"bar1"`  // bytes through which other functions reach its memory
}

// NIC is a network card, or one of its ports.
type NIC struct {
	Function
	Interfaces []string `json:"interfaces"`
	RDMA       []string `json:"rdma_devices"`
	Gbits      int      `json:"gbits"`    // of the network; 0 if there is no link
	Networks   []string `json:"networks"` // to which routes lead through it
}

// Name is the NIC's name for people.
func (n NIC) Name() string {
	for _, names := range [][]string{n.RDMA, n.Interfaces} {
		if len(names) > 0 {
			return names[0]
		}
	}
	return n.Address
}

// Drive is a local NVMe drive.
type Drive struct {
	Function
	Name  string `json:"name"` // nvme0
	Model string `json:"model"`
}

// Path describes the layers between a file or a block device and the hardware.
type Path struct {
	Name string `json:"name"` // as it was asked for, or the name of a drive
	Top  Layer  `json:"layers"`
}

// Layer is one layer of a path.
type Layer struct {
	Kind    string   `json:"kind"`
	Name    string   `json:"name"`
	What    string   `json:"what,omitempty"`    // kind of file system, RAID level, transport
	Options []string `json:"options,omitempty"` // of a mount
	PCI     string   `json:"pci,omitempty"`     // of a controller: the drive, or the NIC to the target
	Below   []Layer  `json:"below,omitempty"`
}

// Kinds of layers.
const (
	kindFS         = "file system"
	kindPartition  = "partition"
	kindDM         = "device-mapper"
	kindMD         = "md"
	kindLoop       = "loop"
	kindFUSE       = "fuse"
	kindUBLK       = "ublk"
	kindNBD        = "nbd"
	kindMultipath  = "nvme multipath"
	kindNVMe       = "nvme namespace"
	kindController = "nvme controller"
	kindOther      = "other"
)

// all lists a layer and what is below it.
func (l Layer) all() []Layer {
	list := []Layer{l}
	for _, b := range l.Below {
		list = append(list, b.all()...)
	}
	return list
}

// function finds a drive or a NIC by its PCI address.
func (m Machine) function(address string) (Function, bool) {
	for _, d := range m.Drives {
		if d.Address == address {
			return d.Function, true
		}
	}
	for _, n := range m.NICs {
		if n.Address == address {
			return n.Function, true
		}
	}
	return Function{}, false
}

// Nearness is how far two PCI functions are apart.
type Nearness string

// Nearness, the nearest first.
const (
	Switch Nearness = "switch" // below the same PCIe switch
	Node   Nearness = "node"   // at the same NUMA node, through its processor
	Across Nearness = "across" // at different NUMA nodes
	Nobody Nearness = "?"      // the machine does not say
)

// Near compares the ways to two functions. Two functions below one root port share a switch, since a
// port leads to one device.
func Near(a, b Function) Nearness {
	switch {
	case shared(a, b) > 0:
		return Switch
	case a.NUMA < 0 || b.NUMA < 0:
		return Nobody
	case a.NUMA == b.NUMA:
		return Node
	}
	return Across
}

// shared counts the bridges that two functions have in common, from the root.
func shared(a, b Function) (n int) {
	for n < min(len(a.Bridges), len(b.Bridges)) && a.Bridges[n].Address == b.Bridges[n].Address {
		n++
	}
	return n
}

// between lists the bridges on the way from one function to another below a switch, without those
// above both.
func between(a, b Function) []Bridge {
	n := shared(a, b)
	return slices.Concat(a.Bridges[n:], b.Bridges[n:])
}

// distance orders functions by how far they are from a.
func distance(a, b Function) int {
	const far = 100 // more bridges than a way has
	at := slices.Index([]Nearness{Switch, Node, Across, Nobody}, Near(a, b))
	return at*far + len(between(a, b))
}

// Nearest lists the network cards, the nearest to a GPU first.
func (m Machine) Nearest(g GPU) []NIC {
	all := slices.Clone(m.NICs)
	slices.SortStableFunc(all, func(a, b NIC) int { return distance(g.Function, a.Function) - distance(g.Function, b.Function) })
	return all
}

// NetworksNear are the networks of the cards that are nearest to a GPU, which is named by its number or
// its PCI address.
func (m Machine) NetworksNear(gpu string) (near []netip.Prefix, err error) {
	i := slices.IndexFunc(m.GPUs, func(g GPU) bool { return g.Address == gpu })
	if n, err := strconv.Atoi(gpu); err == nil && n >= 0 && n < len(m.GPUs) {
		i = n
	}
	if i < 0 {
		return nil, fmt.Errorf("GPU %s: this machine has %d GPUs, and not that one", gpu, len(m.GPUs))
	}
	g, nics := m.GPUs[i], m.Nearest(m.GPUs[i])
	if len(nics) == 0 {
		return nil, fmt.Errorf("GPU %s: this machine has no network card", gpu)
	}
	for _, n := range nics {
		if Near(g.Function, n.Function) != Near(g.Function, nics[0].Function) {
			break
		}
		for _, text := range n.Networks {
			if network, err := netip.ParsePrefix(text); err == nil {
				near = append(near, network)
			}
		}
	}
	if len(near) == 0 {
		return nil, fmt.Errorf("GPU %s: no route leads through the card nearest to it, %s", gpu, nics[0].Name())
	}
	return near, nil
}

// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"fmt"
	"slices"
	"strings"
)

// Finding is one thing that is right on a machine, or not.
type Finding struct {
	About string `json:"name"`
	OK    bool   `json:"ok"`
	Why   string `json:"reason"`
	Fix   string `json:"fix"` // empty if it is right, or nothing helps
}

// Findings says what is right and what is not, whatever the path.
func (m Machine) Findings() []Finding {
	if len(m.GPUs) == 0 {
		return []Finding{{About: "gpu", OK: true, Why: "there is no NVIDIA GPU"}}
	}
	all := slices.Concat([]Finding{m.driver()}, m.ways(), []Finding{m.iommu(), m.acs()})
	for i, g := range m.GPUs {
		all = append(all, slow(fmt.Sprintf("gpu %d", i), g.Function, "; a GPU that is idle lowers its speed, so look again under load")...)
	}
	for _, n := range m.NICs {
		if found := narrow(n); found != nil {
			all = append(all, found...)
			continue
		}
		all = append(all, slow(n.Name(), n.Function, "")...)
	}
	for _, d := range m.Drives {
		all = append(all, slow(d.Name, d.Function, "")...)
	}
	return all
}

// ways looks at the two ways to be direct. Either is enough.
func (m Machine) ways() []Finding {
	module, hooks, p2p := m.nvidiaFS(), m.hooks(), m.p2pdma()
	switch {
	case module.OK && hooks.OK:
		p2p = spare(p2p, "nvidia-fs")
	case p2p.OK:
		module, hooks = spare(module, "P2PDMA"), spare(hooks, "P2PDMA")
	}
	return []Finding{module, hooks, p2p}
}

// spare is a finding on what is not needed, since the other way is there.
func spare(f Finding, other string) Finding {
	if f.OK {
		return f
	}
	return Finding{About: f.About, OK: true, Why: f.Why + "; not needed beside " + other}
}

func (m Machine) driver() Finding {
	f := Finding{About: "nvidia driver"}
	switch {
	case m.Driver.Version == "":
		f.Why, f.Fix = "is not loaded", "install NVIDIA's driver with the open kernel modules"
	case !m.Driver.Open:
		f.Why, f.Fix = m.Driver.Version+", closed: it has no P2PDMA, and newer releases of GPUDirect Storage do not support it", "install its open kernel modules"
	default:
		f.OK, f.Why = true, m.Driver.Version+", open"
	}
	return f
}

func (m Machine) nvidiaFS() Finding {
	f := Finding{About: "nvidia-fs"}
	switch n := m.NvidiaFS; {
	case n.Loaded:
		f.OK, f.Why = true, strings.TrimSpace("is loaded "+n.Version)
		if n.Reads != "" {
			f.Why += "; reads since then: " + n.Reads
		}
	case n.Installed:
		f.Why, f.Fix = "is installed and not loaded", "modprobe nvidia-fs"
	default:
		f.Why, f.Fix = "is not installed for kernel "+m.Kernel.Release, "install nvidia-fs (package nvidia-fs-dkms or nvidia-gds)"
	}
	return f
}

func (m Machine) hooks() Finding {
	f := Finding{About: "nvme drivers"}
	switch {
	case m.Kernel.Hooked == nil:
		f.Why, f.Fix = "/proc/kallsyms cannot be read, so it is not known whether they were built for nvidia-fs", "run weft doctor --gpu as root"
	case len(m.Kernel.Hooked) == 0:
		f.Why, f.Fix = "none that is loaded was built for nvidia-fs", "install DOCA-OFED (or MLNX_OFED) with its NVMe drivers for GPUDirect Storage"
	default:
		f.OK, f.Why = true, "built for nvidia-fs: "+strings.Join(m.Kernel.Hooked, ", ")
	}
	return f
}

// p2pdma says whether the kernel's own way could work with a local drive.
func (m Machine) p2pdma() Finding {
	f := Finding{About: "p2pdma", OK: true, Why: "kernel and driver are ready for it"}
	local := Path{Top: Layer{Kind: kindNVMe, Name: "a local drive"}}
	of := withP2PDMA(m, m.GPUs[0], local)
	if first := append(of.blocks, of.doubts...); len(first) > 0 {
		f.OK, f.Why, f.Fix = false, first[0].Why, first[0].Next
		if more := len(first) - 1; more > 0 {
			f.Why += fmt.Sprintf("; and %d more conditions do not hold", more)
		}
	}
	return f
}

// iommu looks at how the addresses of GPUs are translated.
func (m Machine) iommu() Finding {
	f := Finding{About: "iommu", OK: true, Why: "there is no IOMMU"}
	var kinds []string
	for _, g := range m.GPUs {
		if g.IOMMU != "" && !slices.Contains(kinds, g.IOMMU) {
			kinds = append(kinds, g.IOMMU)
		}
	}
	if len(kinds) > 0 {
		f.Why = "its mode for GPUs is " + strings.Join(kinds, ", ")
	}
	if m.Kernel.CPU != "" && slices.ContainsFunc(kinds, func(kind string) bool { return strings.HasPrefix(kind, "DMA") }) {
		f.OK, f.Why, f.Fix = false, f.Why+", which NVIDIA does not promise to work", "iommu=pt on the kernel's command line, then reboot"
	}
	return f
}

// acs looks at access control above the GPUs, below the root ports: there peers would meet.
func (m Machine) acs() Finding {
	f := Finding{About: "acs", OK: true, Why: "nothing above the GPUs sends data between devices up to the processor"}
	of := map[Answer][]string{}
	for _, g := range m.GPUs {
		for _, b := range g.Bridges[min(1, len(g.Bridges)):] {
			if !slices.Contains(of[b.Redirects], b.Address) {
				of[b.Redirects] = append(of[b.Redirects], b.Address)
			}
		}
	}
	switch {
	case len(of[Yes]) > 0:
		f.OK, f.Why, f.Fix = false, "access control sends data between devices up to the processor at "+strings.Join(of[Yes], ", "), acsOff
	case len(of[Unknown]) > 0:
		f.OK, f.Why, f.Fix = false, "whether access control is on above the GPUs is not known", "run weft doctor --gpu as root"
	}
	return f
}

// slow says that a link is below what the function can do.
func slow(name string, f Function, but string) []Finding {
	if f.Link.Width == 0 || f.Best.Width == 0 || f.Link.Width >= f.Best.Width && f.Link.GTs >= f.Best.GTs {
		return nil
	}
	if f.Link.Width >= f.Best.Width && but != "" { // only its speed is low, and it may be idle
		return []Finding{{About: name, OK: true, Why: fmt.Sprintf("its PCIe link runs at %v of %v%s", f.Link, f.Best, but)}}
	}
	return []Finding{{About: name, Why: fmt.Sprintf("its PCIe link runs at %v, and the device can do %v", f.Link, f.Best),
		Fix: "put it into a slot with more lanes, seat it again, or look for a riser or bifurcation setting that limits it"}}
}

// narrow says that a card's PCIe link carries less than its network.
func narrow(n NIC) []Finding {
	if n.Gbits == 0 || n.Link.Width == 0 || n.Link.Gbits() >= float64(n.Gbits) {
		return nil
	}
	return []Finding{{About: n.Name(), Why: fmt.Sprintf("its network carries %d Gbit/s and its PCIe link (%v, of %v) only %.0f", n.Gbits, n.Link, n.Best, n.Link.Gbits()),
		Fix: "put it into a slot with more or faster lanes, or look for a riser or bifurcation setting that limits it"}}
}

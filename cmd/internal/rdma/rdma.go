// SPDX-License-Identifier: Apache-2.0

// Package rdma says what a machine lacks for NVMe over RoCE. [Read] reads the kernel's files, and
// [Machine.Findings] judges what was read:
//
//	/sys/class/infiniband/<device>/ports/<n>/    state, GIDs, counters
//	/sys/class/net/<interface>/                  MTU, driver
//	/sys/kernel/config/nvmet/ports/<id>/         portals of this machine's target
//
// It sees this machine only. Whether switches pause or mark packets (PFC, ECN) shows in the
// counters that a device has, and nowhere else here: counters of pause frames are in no file of the
// kernel, but in ethtool -S.
package rdma

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Machine lists the RDMA devices and portals of a machine.
type Machine struct {
	Portals []netip.Addr // at which the kernel's target is to listen with RDMA
	Cards   []Card
	Ports   []Port
}

// Card is a network interface whose card can do RDMA: /sys/class/net/<Interface>/device.
type Card struct {
	Interface string
	Driver    string // driver
	Missing   string // the module that would make its RDMA device; empty if there is one
}

// Port is a port of an RDMA device: /sys/class/infiniband/<Device>/ports/<Number>/.
type Port struct {
	Device    string
	Number    string
	State     string // state: ACTIVE, DOWN, INIT, ARMED
	Link      string // link_layer: Ethernet, InfiniBand
	Interface string // gid_attrs/ndevs/0
	MTU       int    // of the interface; 0 if unknown
	GIDs      []GID
	Counters  map[string]uint64 // hw_counters, and packets from counters
}

// GID is an address of a port.
type GID struct {
	Address netip.Addr // gids/<n>
	Type    string     // gid_attrs/types/<n>: RoCE v2, IB/RoCE v1
}

// Finding is one thing that is right, or not.
type Finding struct {
	About string // the device, or rdma
	OK    bool
	Why   string
	Fix   string // empty if it is right
}

// Findings says what is right and what is not. There is always at least one.
func (m Machine) Findings() (all []Finding) {
	for _, p := range m.Ports {
		all = append(all, p.findings()...)
	}
	for _, at := range m.Portals {
		if !m.listens(at) {
			all = append(all, problem("rdma", fmt.Sprintf("there is a portal rdma://%s, but no RDMA device has that address", at),
				"make an RDMA device for the interface with that address (see below), or remove the portal"))
		}
	}
	for _, c := range m.Cards {
		if c.Missing == "" {
			continue
		}
		f := Finding{About: c.Interface, OK: true, Why: fmt.Sprintf("its card can do RDMA, which nothing here uses: module %s is not loaded", c.Missing)}
		if len(m.Portals) > 0 {
			f.OK, f.Why, f.Fix = false, fmt.Sprintf("its card (driver %s) has no RDMA device", c.Driver), "modprobe "+c.Missing
		}
		all = append(all, f)
	}
	if len(all) == 0 {
		all = []Finding{{About: "rdma", OK: true, Why: "there is no RDMA device, and no portal that needs one"}}
	}
	return all
}

func problem(about, why, fix string) Finding { return Finding{About: about, Why: why, Fix: fix} }

func (m Machine) listens(at netip.Addr) bool {
	return slices.ContainsFunc(m.Ports, func(p Port) bool {
		return slices.ContainsFunc(p.GIDs, func(g GID) bool { return g.Address == at })
	})
}

// Name is the port's name for people.
func (p Port) Name() string {
	if p.Number == "1" {
		return p.Device
	}
	return p.Device + "/" + p.Number
}

func (p Port) findings() []Finding {
	if p.Link != "" && p.Link != "Ethernet" {
		return []Finding{{About: p.Name(), OK: true, Why: "its link is " + p.Link + ", which this check does not know"}}
	}
	var all []Finding
	for _, f := range []Finding{p.active(), p.addressed(), p.large(), p.lossless()} {
		if !f.OK {
			all = append(all, f)
		}
	}
	if len(all) == 0 {
		all = []Finding{{About: p.Name(), OK: true, Why: fmt.Sprintf("is active over %s, with a path MTU of %d%s", p.Interface, pathMTU(p.MTU), p.marks())}}
	}
	return all
}

func (p Port) active() Finding {
	if p.State == "ACTIVE" {
		return Finding{OK: true}
	}
	return problem(p.Name(), fmt.Sprintf("its port is %s, must be ACTIVE: nothing can connect through it", cmp.Or(p.State, "in an unknown state")),
		"check cable and switch port, then: ip link set "+cmp.Or(p.Interface, "INTERFACE")+" up")
}

// addressed looks for the address by which RoCE v2 routes. Each address of the interface becomes a
// GID; the link-local one, which is always there, is not enough.
func (p Port) addressed() Finding {
	var old bool
	for _, g := range p.GIDs {
		if !g.Address.IsLinkLocalUnicast() && g.Type == "RoCE v2" {
			return Finding{OK: true}
		}
		old = old || g.Type != "" && g.Type != "RoCE v2"
	}
	at := cmp.Or(p.Interface, "its interface")
	if old {
		return problem(p.Name(), "has addresses for RoCE v1 only, and no GID for RoCE v2: hosts in other networks cannot reach it, and others may not",
			"switch RoCE v2 on in the card's settings, and check "+at+" has an address")
	}
	return problem(p.Name(), fmt.Sprintf("has no GID for RoCE v2, since %s has no address: no portal can be on it", at),
		"ip address add ADDRESS/BITS dev "+at)
}

// Sizes of packets. The kernel takes the largest path MTU that fits after the longest headers
// (iboe_get_mtu).
const (
	headers     = 120
	largestPath = 4096
)

// pathMTU is the size of the payload of RoCE packets over an interface.
func pathMTU(mtu int) int {
	size := largestPath
	for size > mtu-headers && size > 256 {
		size /= 2
	}
	return size
}

func (p Port) large() Finding {
	if p.MTU == 0 || pathMTU(p.MTU) == largestPath {
		return Finding{OK: true}
	}
	return problem(p.Name(), fmt.Sprintf("%s has an MTU of %d, so RoCE packets carry %d bytes instead of %d: more packets for the same data", p.Interface, p.MTU, pathMTU(p.MTU), largestPath),
		fmt.Sprintf("ip link set %s mtu 9000 (%d at least), here, on the other machines and on the switch", p.Interface, largestPath+headers))
}

// losses are the counters, by the names that drivers give them, that rise when packets are lost
// or overtaken: out of sequence, or repeated after a time without an answer.
var losses = []string{
	"out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err", "roce_adp_retrans_to", // mlx5
	"to_retransmits", "seq_err_naks_rcvd", "max_retry_exceeded", "oos_drop_count", // bnxt_re
	"out_of_seq_request", "rcvd_seq_err", "retry_exceeded_err", "completer_retry_err", // rdma_rxe
	"RetransSegs", "InOutOfSeq", "tcpRetransSegs", // irdma and others
}

// Losses that are worth a report: at least few since boot, and one of tolerable that arrived. RoCE
// sends everything again from the lost packet on.
const (
	few       = 50
	tolerable = 10_000
)

// lossless looks whether packets get lost.
func (p Port) lossless() Finding {
	var sum uint64
	var which []string
	for _, name := range losses {
		if n := p.Counters[name]; n > 0 {
			sum += n
			which = append(which, fmt.Sprintf("%s %d", name, n))
		}
	}
	received := max(p.Counters["port_rcv_packets"], p.Counters["rcvd_pkts"], p.Counters["rx_pkts"])
	if sum < few || sum < received/tolerable {
		return Finding{OK: true}
	}
	of := ""
	if received > 0 {
		of = fmt.Sprintf(" of %d", received)
	}
	return problem(p.Name(), fmt.Sprintf("packets%s were lost or overtaken since boot (%s): RoCE becomes slow by that", of, strings.Join(which, ", ")),
		"check that PFC or ECN is on for RoCE's traffic class at every card and switch port; pause frames: ethtool -S "+cmp.Or(p.Interface, "INTERFACE")+" | grep -i pause")
}

// marks are the counters that rise when switches mark packets instead of dropping them.
var marks = map[string]string{
	"np_ecn_marked_roce_packets": "ECN marks seen", "np_cnp_sent": "told to slow down", "rp_cnp_handled": "slowed down", // mlx5
	"ecn_marked_packets": "ECN marks seen", "cnp_sent": "told to slow down", "cnp_handled": "slowed down", // bnxt_re, irdma
	"tx_cnp_pkts": "told to slow down", "rx_cnp_pkts": "slowed down", "rx_ecn_marked_pkts": "ECN marks seen",
}

// marks says how often congestion was answered.
func (p Port) marks() string {
	sum := map[string]uint64{}
	for name, what := range marks {
		if n := p.Counters[name]; n > 0 {
			sum[what] += n
		}
	}
	var text strings.Builder
	for _, what := range slices.Sorted(maps.Keys(sum)) {
		fmt.Fprintf(&text, "; %s %d times", what, sum[what])
	}
	return text.String()
}

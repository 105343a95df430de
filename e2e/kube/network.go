// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
)

// Addresses of the lab's network. The control plane and the targets have separate addresses
// on one bridge, so that a node can lose the control plane and keep its data path.
const (
	controlAddress = "10.77.0.1" // API server, volmgr
	storageAddress = "10.77.1.1" // targets
	bridgeName     = "kube0"
)

func nodeAddress(n int) string { return fmt.Sprintf("10.77.0.%d", 10+n) }

// podNetwork is the network of a node's pods.
func podNetwork(n int) string { return fmt.Sprintf("10.244.%d.0/24", n) }

// labNetwork creates the bridge that the nodes are connected to.
func labNetwork() error {
	if err := linkUp("lo"); err != nil {
		return err
	}
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridgeName}}); err != nil {
		return fmt.Errorf("add the bridge %s: %w", bridgeName, err)
	}
	if err := addAddresses(bridgeName, controlAddress+"/24", storageAddress+"/24"); err != nil {
		return err
	}
	return forward()
}

// plug connects a node's first process to the bridge. It first removes the link of an
// earlier node of that name, whose namespace the kernel may still be removing.
func plug(name string, pid int) error {
	bridge, err := netlink.LinkByName(bridgeName)
	if err != nil {
		return fmt.Errorf("find the bridge %s: %w", bridgeName, err)
	}
	veth := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "veth-" + name, MasterIndex: bridge.Attrs().Index},
		PeerName:  "eth0", PeerNamespace: netlink.NsPid(pid),
	}
	if old, err := netlink.LinkByName(veth.Name); err == nil {
		_ = netlink.LinkDel(old) // it may disappear by itself just now; if it stays, the next call reports it
	}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("connect node %s: %w", name, err)
	}
	return linkUp(veth.Name)
}

// nodeNetwork is the node's side of plug; call it in the node's namespace. It routes the
// pod networks of the other nodes through them.
func nodeNetwork(n, nodes int) error {
	if err := linkUp("lo"); err != nil {
		return err
	}
	if err := addAddresses("eth0", nodeAddress(n)+"/24"); err != nil {
		return err
	}
	routes := map[string]string{"0.0.0.0/0": controlAddress}
	for other := 1; other <= nodes; other++ {
		if other != n {
			routes[podNetwork(other)] = nodeAddress(other)
		}
	}
	for to, via := range routes {
		_, network, err := net.ParseCIDR(to)
		if err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{Dst: network, Gw: net.ParseIP(via)}); err != nil {
			return fmt.Errorf("add the route to %s: %w", to, err)
		}
	}
	return forward()
}

func addAddresses(link string, addresses ...string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find %s: %w", link, err)
	}
	for _, a := range addresses {
		address, err := netlink.ParseAddr(a)
		if err == nil {
			err = netlink.AddrAdd(l, address)
		}
		if err != nil {
			return fmt.Errorf("give %s to %s: %w", a, link, err)
		}
	}
	return linkUp(link)
}

func linkUp(name string) error {
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	if err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}

// forward enables IP forwarding in this network namespace.
func forward() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"weft.dev/weft/proto/block"
)

// portalsOf reads a portal, or a network such as tcp://198.51.100.0/24#a, for which it returns a
// portal for each of this machine's addresses in it. So one command line can start many machines.
func portalsOf(text string, here []netip.Addr) ([]block.Portal, error) {
	if !strings.Contains(afterScheme(text), "/") {
		p, err := block.ParsePortal(text)
		return []block.Portal{p}, err
	}
	before, network, after, err := cutNetwork(text)
	if err != nil {
		return nil, err
	}
	var portals []block.Portal
	for _, address := range here {
		if !network.Contains(address) {
			continue
		}
		p, err := block.ParsePortal(before + "[" + address.String() + "]" + after)
		if err != nil {
			return nil, err
		}
		portals = append(portals, p)
	}
	if len(portals) == 0 {
		return nil, fmt.Errorf("portal %q: this machine has no address in %s", text, network)
	}
	return portals, nil
}

func afterScheme(text string) string {
	if _, rest, ok := strings.Cut(text, "://"); ok {
		return rest
	}
	return text
}

// cutNetwork splits tcp://NETWORK/BITS:PORT#RAIL; an IPv6 network may stand in brackets together
// with its bits.
func cutNetwork(text string) (before string, network netip.Prefix, after string, err error) {
	rest := afterScheme(text)
	before = strings.TrimSuffix(text, rest)
	rest = strings.TrimPrefix(rest, "[")
	slash := strings.IndexByte(rest, '/')
	end := slash + 1
	for end < len(rest) && rest[end] >= '0' && rest[end] <= '9' {
		end++
	}
	network, err = netip.ParsePrefix(rest[:end])
	if err != nil {
		return "", network, "", fmt.Errorf("portal %q: %w", text, err)
	}
	return before, network.Masked(), strings.TrimPrefix(rest[end:], "]"), nil
}

// addressesHere returns this machine's addresses, except link-local ones.
func addressesHere() ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list this machine's addresses: %w", err)
	}
	var here []netip.Addr
	for _, a := range all {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil {
			continue
		}
		if address := prefix.Addr().Unmap(); !address.IsLinkLocalUnicast() {
			here = append(here, address)
		}
	}
	return here, nil
}

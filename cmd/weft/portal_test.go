// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestANetworkStandsForTheAddressesInIt(t *testing.T) {
	var here []netip.Addr
	for _, a := range []string{"127.0.0.1", "192.0.2.11", "198.51.100.7", "198.51.101.7", "2001:db8::7", "2001:db8:1::7"} {
		here = append(here, netip.MustParseAddr(a))
	}
	for _, c := range []struct {
		text string
		want []string
	}{
		{"tcp://192.0.2.99", []string{"tcp://192.0.2.99:4420"}}, // not checked against this machine's
		{"tcp://198.51.100.0/24", []string{"tcp://198.51.100.7:4420"}},
		{"198.51.100.1/24", []string{"tcp://198.51.100.7:4420"}},
		{"tcp://198.51.100.0/23#a", []string{"tcp://198.51.100.7:4420#a", "tcp://198.51.101.7:4420#a"}},
		{"rdma://198.51.100.0/24:4421#b", []string{"rdma://198.51.100.7:4421#b"}},
		{"tcp://2001:db8::/64", []string{"tcp://[2001:db8::7]:4420"}},
		{"tcp://[2001:db8::/64]:4421", []string{"tcp://[2001:db8::7]:4421"}},
	} {
		portals, err := portalsOf(c.text, here)
		var got []string
		for _, p := range portals {
			got = append(got, p.String())
		}
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%q = %v, %v, want %v", c.text, got, err, c.want)
		}
	}
	for _, bad := range []string{"tcp://203.0.113.0/24", "tcp://198.51.100.0/", "tcp://198.51.100.0/33", "tcp:///24", "tcp://host/24", "fc://198.51.100.0/24", "tcp://198.51.100.0/24:0"} {
		if got, err := portalsOf(bad, here); err == nil || !strings.Contains(err.Error(), "portal") {
			t.Errorf("%q = %v, %v, want an error that names the portal", bad, got, err)
		}
	}
}

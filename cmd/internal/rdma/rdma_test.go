// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
)

// machine lays out the tree of a file in testdata, with some of its files changed; "" removes one.
func machine(t *testing.T, name string, changes map[string]string) Machine {
	t.Helper()
	archive, err := txtar.ParseFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	files := map[string]string{}
	for _, f := range archive.Files {
		files[f.Name] = string(f.Data)
	}
	for path, text := range changes {
		files[path] = text
	}
	for path, text := range files {
		if text == "" {
			continue
		}
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if to, ok := strings.CutPrefix(text, "-> "); ok {
			err = os.Symlink(strings.TrimSpace(to), path)
		} else {
			err = os.WriteFile(path, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return Read(root)
}

// The tree follows a listing of a virtual machine of the scenarios, on Debian's 6.1.
func TestSoftRoCEIsRead(t *testing.T) {
	got := machine(t, "rxe.txtar", nil)
	want := Machine{
		Portals: []netip.Addr{netip.MustParseAddr("10.77.1.2")},
		Ports: []Port{{
			Device: "roce1", Number: "1", State: "ACTIVE", Link: "Ethernet", Interface: "eth1", MTU: 9000,
			GIDs: []GID{
				{netip.MustParseAddr("fe80::5054:ff:fe77:104"), "RoCE v2"},
				{netip.MustParseAddr("10.77.1.2"), "RoCE v2"},
			},
			Counters: map[string]uint64{"out_of_seq_request": 0, "rcvd_pkts": 303, "sent_pkts": 297, "rcvd_seq_err": 0, "retry_exceeded_err": 0, "completer_retry_err": 0},
		}},
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("Read (-want +got)\n%s", diff)
	}
}

func TestWhatAMachineLacksIsSaid(t *testing.T) {
	const (
		soft = "sys/class/infiniband/roce1/ports/1/"
		card = "sys/class/infiniband/mlx5_0/ports/1/"
	)
	for _, c := range []struct {
		name    string
		tree    string
		changes map[string]string
		want    []string // the findings, in short
	}{
		{"nothing", "rxe.txtar", nil, []string{"ok roce1: is active over eth1, with a path MTU of 4096"}},
		{"a link", "rxe.txtar", map[string]string{soft + "state": "1: DOWN\n"}, []string{"roce1: its port is DOWN"}},
		{"an address", "rxe.txtar", map[string]string{soft + "gids/1": "0000:0000:0000:0000:0000:0000:0000:0000\n"}, []string{
			"roce1: has no GID for RoCE v2, since eth1 has no address", "rdma: there is a portal rdma://10.77.1.2, but no RDMA device has that address",
		}},
		{"RoCE v2", "mlx5.txtar", map[string]string{card + "gid_attrs/types/3": "IB/RoCE v1\n"}, []string{"mlx5_0: has addresses for RoCE v1 only"}},
		{"large packets", "rxe.txtar", map[string]string{"sys/class/net/eth1/mtu": "1500\n"}, []string{"roce1: eth1 has an MTU of 1500, so RoCE packets carry 1024 bytes instead of 4096"}},
		{"a byte for large packets", "rxe.txtar", map[string]string{"sys/class/net/eth1/mtu": "4215\n"}, []string{"roce1: eth1 has an MTU of 4215, so RoCE packets carry 2048 bytes instead of 4096"}},
		{"no byte for large packets", "rxe.txtar", map[string]string{"sys/class/net/eth1/mtu": "4216\n"}, []string{"ok roce1: is active over eth1, with a path MTU of 4096"}},
		{"a network that loses nothing", "rxe.txtar", map[string]string{soft + "hw_counters/rcvd_seq_err": "70\n"}, []string{"roce1: packets of 303 were lost or overtaken since boot (rcvd_seq_err 70)"}},
		{"nothing, of a card", "mlx5.txtar", nil, []string{"ok mlx5_0: is active over ens1f0np0, with a path MTU of 4096; ECN marks seen 1200 times; slowed down 40 times; told to slow down 1100 times"}},
		{"a handful of packets", "rxe.txtar", map[string]string{soft + "hw_counters/rcvd_seq_err": "49\n"}, []string{"ok roce1: is active over eth1"}},
		{"few packets", "mlx5.txtar", map[string]string{card + "hw_counters/out_of_sequence": "99\n"}, []string{"ok mlx5_0: is active over ens1f0np0"}},
		{"many packets", "mlx5.txtar", map[string]string{card + "hw_counters/out_of_sequence": "101\n"}, []string{"mlx5_0: packets of 1000000 were lost or overtaken since boot (out_of_sequence 101)"}},
		{"a network that this knows", "mlx5.txtar", map[string]string{card + "link_layer": "InfiniBand\n", card + "state": "1: DOWN\n"}, []string{"ok mlx5_0: its link is InfiniBand, which this check does not know"}},
		{"a driver", "card.txtar", nil, []string{"ok ens1f0np0: its card can do RDMA, which nothing here uses: module mlx5_ib is not loaded"}},
		{"a driver for its portal", "card.txtar", map[string]string{
			"sys/kernel/config/nvmet/ports/22272/addr_trtype": "rdma\n", "sys/kernel/config/nvmet/ports/22272/addr_traddr": "198.51.100.12\n",
		}, []string{"rdma: there is a portal rdma://198.51.100.12, but no RDMA device", "ens1f0np0: its card (driver mlx5_core) has no RDMA device"}},
		{"all of it", "card.txtar", map[string]string{"sys/class/net/ens1f0np0/device/driver": ""}, []string{"ok rdma: there is no RDMA device, and no portal that needs one"}},
	} {
		var got []string
		for _, f := range machine(t, c.tree, c.changes).Findings() {
			line := f.About + ": " + f.Why
			if f.OK {
				line = "ok " + line
			}
			if f.OK != (f.Fix == "") {
				t.Errorf("a machine that lacks %s: %+v, want a way out of each trouble, and of nothing else", c.name, f)
			}
			got = append(got, line)
		}
		same := len(got) == len(c.want)
		for i := range min(len(got), len(c.want)) {
			same = same && strings.HasPrefix(got[i], c.want[i])
		}
		if !same {
			t.Errorf("a machine that lacks %s: %q, want %q", c.name, got, c.want)
		}
	}
}

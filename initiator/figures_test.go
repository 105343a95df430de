// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"os"
	"path/filepath"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
)

// latencies is a device-mapper that has counted one I/O.
type latencies struct{ mapper }

func (latencies) Counted(string) (f figures.Figures, ok bool, err error) {
	f[figures.Any].Latency = make(figures.Histogram, figures.Buckets)
	f[figures.Any].Latency[100]++
	return f, true, nil
}

func TestTheKernelCountsTheIOOfAVolumeAndItsLegs(t *testing.T) {
	sys := t.TempDir()
	for name, stat := range map[string]string{"dm-4": "10 0 80 1 20 0 160 2 0 0 0", "nvme1n1": "3 0 24 1 20 0 160 2 0 0 0"} {
		if err := os.MkdirAll(filepath.Join(sys, "block", name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(sys, "block", name, "stat"), []byte(stat), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	k := &kernelKeeper{kernel: &kernel{sysDir: sys, dm: latencies{}}}
	if f := k.Figures(); f != nil {
		t.Errorf("without a device there are %+v", f)
	}
	k.counted.Store(&counted{name: "db1", top: block.DeviceNumber{Major: 253, Minor: 4}, legs: []countedLeg{
		{leg: leg, node: "t1", device: "nvme1n1"}, {copy: 1, node: "t2", device: "nvme2n1"}, // which is gone
	}})
	f := k.Figures()
	if f == nil || f.Name != "db1" || f.Users[figures.Write].IOs != 20 || f.Users[figures.Read].Bytes != 80*512 || f.Users.Latency().Count() != 1 || f.Latencies {
		t.Fatalf("figures: %+v", f)
	}
	if len(f.Legs) != 1 || f.Legs[0].Leg != leg || f.Legs[0].Node != "t1" || f.Legs[0].Sent[figures.Read].IOs != 3 {
		t.Errorf("legs: %+v", f.Legs)
	}
}

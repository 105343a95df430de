// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
)

const kernelDrive = "/dev/nvme0n1"

// TestAgentOnTheKernel takes a drive through its life on a real kernel. It erases
// /dev/nvme0n1, so it runs only in a machine made for it (WEFT_KERNEL is set
// there): as root, with dm-mod, nvmet and nvmet-tcp loaded, and one NVMe drive.
func TestAgentOnTheKernel(t *testing.T) {
	if os.Getenv("WEFT_KERNEL") == "" {
		t.Skip("not in a test machine: see e2e/kernel_test.go")
	}
	for _, needed := range []string{kernelDrive, "/sys/kernel/config/nvmet", "/dev/mapper/control"} {
		if _, err := os.Stat(needed); err != nil {
			t.Skipf("no machine for this here: %v", err)
		}
	}
	w := &world{t: t, root: "/", labels: func() []*drive.Label { return deviceLabels(t) }, stop: func() {}}
	w.tree = func() (*nvmet.Tree, error) { return nvmet.Open("/sys/kernel/config/nvmet") }
	w.manager = manager{world: w, changed: make(chan struct{})}
	defer func() { w.stop() }()

	onDrive := func(w wish) *pb.TargetWanted {
		w.Drives = []*pb.WantedDrive{{DriveId: driveID(1).String(), Device: kernelDrive}}
		return w.TargetWanted
	}
	// Two runs of extents, out of order: a leg is what its table says.
	place := func(w wish) wish {
		for _, l := range w.Legs {
			l.Extents = []*pb.Extent{{Start: 2, Count: 1}, {Start: 0, Count: 1}}
		}
		return w
	}
	portal := net.JoinHostPort("192.0.2.1", "4420")
	addAddress(t, "192.0.2.1")

	w.run()
	w.manager.set(onDrive(place(want().volume(1, 1, 1))))
	r := w.until("export ready", exportsReady(1))
	if !admitted(1, 1)(r) || !legReport(r, 1).GetReady() {
		t.Errorf("report is %v, want an admitted, ready leg", r)
	}
	listens(t, portal, true)
	leg := "/dev/weft/leg/" + legID(1).String()
	m, err := drive.OpenDevice(leg, drive.ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	if m.Size() != 300*block.MiB {
		t.Errorf("the leg's device has %v, want 300MiB", m.Size())
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}

	// A new agent finds all as it is.
	w.stop()
	w.manager.forget()
	w.run()
	r = w.until("generation reached again", func(r *pb.TargetReport) bool { return r.GetGeneration() == 1 && exportsReady(1)(r) })
	if len(r.GetProblems()) > 0 {
		t.Errorf("problems after a restart: %v", r.GetProblems())
	}

	start := time.Now()
	w.manager.set(onDrive(place(want().leg(1, 1, 2, 0)).admit(1, 2)))
	w.until("epoch 2 admitted", admitted(1, 2))
	t.Logf("fenced in %v", time.Since(start))
	listens(t, portal, false)
	w.manager.set(onDrive(place(want().volume(1, 1, 2))))
	w.until("export of epoch 2 ready", exportsReady(1))

	gone := onDrive(place(want().leg(1, 1, 2, 0)))
	gone.Legs[0].Remove = true
	w.manager.set(gone)
	w.until("leg freed", func(r *pb.TargetReport) bool {
		return len(r.GetExports()) == 0 && len(r.GetDrives()) == 1 && len(r.GetDrives()[0].GetLegs()) == 0
	})
	if _, err := os.Lstat(leg); err == nil {
		t.Errorf("%s is still there", leg)
	}
	erased := onDrive(want())
	erased.Drives[0].Remove = true
	w.manager.set(erased)
	w.until("drive erased", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 0 })
	w.until("device blank", func(r *pb.TargetReport) bool {
		for _, d := range r.GetDevices() {
			if d.GetPath() == kernelDrive {
				return d.GetDriveId() == "" && d.GetRefused() == ""
			}
		}
		return false
	})
}

func deviceLabels(t *testing.T) []*drive.Label {
	m, err := drive.OpenDevice(kernelDrive, drive.ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close() //nolint:errcheck // only read
	l, err := drive.ReadLabel(m, m.Size())
	if err != nil {
		return nil
	}
	return []*drive.Label{l}
}

func listens(t *testing.T, address string, want bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if (err == nil) != want {
		t.Errorf("dial %s = %v, want it to listen: %v", address, err, want)
	}
	if c != nil {
		_ = c.Close() //nolint:errcheck // a probe
	}
}

// addAddress gives the loopback device an address of the documentation network.
func addAddress(t *testing.T, address string) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	a, err := netlink.ParseAddr(address + "/32")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrReplace(lo, a); err != nil {
		t.Fatal(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
)

const kernelDrive = "/dev/nvme0n1"

// TestAgentOnTheKernel takes a drive through its life on a real kernel. Like all tests here it
// erases /dev/nvme0n1, so it runs only in a machine made for it (WEFT_GUEST is set there): as root,
// with dm-mod, nvmet, nvmet-tcp and nvme-tcp loaded, and one NVMe drive.
func TestAgentOnTheKernel(t *testing.T) {
	w := kernelWorld(t)
	defer func() { w.stop() }()
	portal := net.JoinHostPort("192.0.2.1", "4420")
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

	growsOnTheKernel(t, w)

	// A new agent finds everything unchanged.
	w.stop()
	w.manager.forget()
	w.run()
	r = w.until("generation reached again", func(r *pb.TargetReport) bool { return r.GetGeneration() == 2 && exportsReady(1)(r) })
	if len(r.GetProblems()) > 0 {
		t.Errorf("problems after a restart: %v", r.GetProblems())
	}

	start := time.Now()
	w.manager.set(onDrive(place(want().leg(1, 1, 2, 0)).more().admit(1, 2)))
	w.checkAdmissions(w.until("epoch 2 admitted", admitted(1, 2)))
	t.Logf("fenced in %v", time.Since(start))
	listens(t, portal, false)
	w.manager.set(onDrive(place(want().volume(1, 1, 2)).more()))
	w.until("export of epoch 2 ready", exportsReady(1))

	gone := onDrive(place(want().leg(1, 1, 2, 0)).more())
	gone.Legs[0].Remove = true
	w.manager.set(gone)
	w.until("leg freed", nothingOnIt)
	if _, err := os.Lstat(leg); err == nil {
		t.Errorf("%s is still there", leg)
	}
	w.erase()
	w.until("device blank", func(r *pb.TargetReport) bool {
		for _, d := range r.GetDevices() {
			if d.GetPath() == kernelDrive {
				return d.GetDriveId() == "" && d.GetRefused() == ""
			}
		}
		return false
	})
}

// more makes the leg grow into the drive's last extent.
func (w wish) more() wish {
	for _, l := range w.Legs {
		l.Extents = append(l.Extents, &pb.Extent{Start: 1, Count: 1})
		l.SizeBytes = uint64(700 * block.MiB)
		l.Volume.Generation++
	}
	return w
}

// growsOnTheKernel grows the leg while a host uses it; the host learns of it.
func growsOnTheKernel(t *testing.T, w *world) {
	t.Helper()
	imported := ""
	if _, err := os.Stat("/dev/nvme-fabrics"); err == nil {
		imported = connect(t, 1, 4420)
		if err := writeBlock(imported); err != nil {
			t.Fatal(err)
		}
	}
	leftBehind(t)
	w.manager.set(onDrive(place(want().volume(1, 1, 1)).more()))
	r := w.until("grown", legHas(700*block.MiB))
	if !exportsReady(1)(r) || len(r.GetProblems()) > 0 {
		t.Errorf("while the leg grew its export became %v, problems %v", r.GetExports(), r.GetProblems())
	}
	for _, path := range []string{"/dev/weft/leg/" + legID(1).String(), imported} {
		if path != "" {
			readsZeroesOnTheKernel(t, path)
		}
	}
}

// leftBehind writes something into the extent that the leg is to grow into.
func leftBehind(t *testing.T) {
	t.Helper()
	m, err := drive.OpenDevice(kernelDrive, drive.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	at := drive.ImageOf(&pb.LegLabel{Extents: []*pb.Extent{{Start: 1, Count: 1}}}).Segments(0)[0].Offset
	if _, err := m.WriteAt(bytes.Repeat([]byte("left"), 1024), int64(at)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.Flush(), m.Close()); err != nil {
		t.Fatal(err)
	}
}

// readsZeroesOnTheKernel waits until a device is as large as the leg, and reads the part by which
// it grew.
func readsZeroesOnTheKernel(t *testing.T, path string) {
	t.Helper()
	for range 100 {
		m, err := drive.OpenDevice(path, drive.ReadOnly)
		if err != nil {
			t.Fatal(err)
		}
		size := m.Size()
		got := make([]byte, 4096)
		if size == 700*block.MiB {
			_, err = m.ReadAt(got, int64(512*block.MiB))
		}
		if err := errors.Join(err, m.Close()); err != nil {
			t.Fatal(err)
		}
		if size == 700*block.MiB {
			if !bytes.Equal(got, make([]byte, 4096)) {
				t.Errorf("%s reads %q… of what the leg grew by, want zeroes", path, got[:8])
			}
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Errorf("%s has not the size of the leg in 10s", path)
}

// TestAProcessBesideTheExportsOnTheKernel has a plain leg and one in a tree on the same drive. The kernel exports
// the first, and goes on when the agent has ended; the agent's process exports the second.
func TestAProcessBesideTheExportsOnTheKernel(t *testing.T) {
	w := kernelWorld(t)
	if _, err := os.Stat("/dev/nvme-fabrics"); err != nil {
		t.Skipf("no NVMe host here: %v", err)
	}
	defer func() { w.stop() }()
	both := func() wish {
		plain, thin := place(want().volume(1, 1, 1)), want().volume(2, 1, 1).thin()
		thin.Legs[0].Process, thin.Exports[0].Process = true, true
		plain.Legs, plain.Exports, plain.Admissions = append(plain.Legs, thin.Legs...), append(plain.Exports, thin.Exports...), append(plain.Admissions, thin.Admissions...)
		plain.Space = []*pb.WantedSpace{{DriveId: driveID(1).String(), Extents: []*pb.Extent{{Start: 1, Count: 1}}}}
		return plain
	}
	w.run()
	w.manager.set(onDrive(both()))
	r := w.until("both exports", exportsReady(2))
	if len(r.GetProcessPortals()) != 1 || len(r.GetProblems()) > 0 {
		t.Errorf("reported %v, problems %v", r.GetProcessPortals(), r.GetProblems())
	}
	if c := w.exported(); len(c.Subsystems) != 1 {
		t.Errorf("the kernel exports %v; want the plain leg alone", c.Subsystems)
	}
	plain, thin := connect(t, 1, 4420), connect(t, 2, 4422)
	if err := errors.Join(writeBlock(plain), writeBlock(thin)); err != nil {
		t.Fatal(err)
	}
	disconnect(t, block.SubsystemNQN(volumeID(2), 1, host, "t1"))
	w.stop()
	listens(t, "192.0.2.1:4422", false)
	if err := writeBlock(plain); err != nil {
		t.Errorf("without the agent: %v", err)
	}
	w.manager.forget()
	w.run()
	w.until("both exports again", exportsReady(2))
	if err := errors.Join(writeBlock(plain), writeBlock(connect(t, 2, 4422))); err != nil {
		t.Errorf("after a restart of the agent: %v", err)
	}
	disconnect(t, block.SubsystemNQN(volumeID(1), 1, host, "t1"))
	disconnect(t, block.SubsystemNQN(volumeID(2), 1, host, "t1"))
	gone := both().removed(1).removed(2)
	gone.Exports, gone.Admissions = nil, nil
	w.manager.set(onDrive(gone))
	w.until("the legs freed", nothingOnIt)
	w.erase()
}

// TestALegThatNobodyWritesOnTheKernel has a leg in a tree written through the agent's process, and then served by the
// kernel: it reads the same there, also when the agent has ended, and cannot be written. Then the process serves it
// again.
func TestALegThatNobodyWritesOnTheKernel(t *testing.T) {
	w := kernelWorld(t)
	if _, err := os.Stat("/dev/nvme-fabrics"); err != nil {
		t.Skipf("no NVMe host here: %v", err)
	}
	defer func() { w.stop() }()
	nqn := block.SubsystemNQN(volumeID(1), 1, host, "t1")
	serve := func(kernel bool) {
		t.Helper()
		v := want().volume(1, 1, 1).thin()
		v.Legs[0].Process, v.Exports[0].Process, v.Legs[0].InKernel = !kernel, !kernel, kernel
		w.manager.set(onDrive(v))
		generation := w.manager.generation()
		r := w.until("the export", func(r *pb.TargetReport) bool { return r.GetGeneration() == generation && exportsReady(1)(r) })
		if r.GetKernelMaps() != pb.Ability_ABILITY_YES || len(r.GetProblems()) > 0 {
			t.Errorf("reported that the kernel maps legs in trees: %v, problems %v", r.GetKernelMaps(), r.GetProblems())
		}
		if n := len(w.exported().Subsystems); n != map[bool]int{true: 1}[kernel] {
			t.Errorf("the kernel exports %d subsystems, serving the leg: %v", n, kernel)
		}
	}
	unserve := func() {
		t.Helper()
		w.manager.set(onDrive(want().leg(1, 1, 1, 0).thin().admit(1, 1)))
		w.until("no export", func(r *pb.TargetReport) bool {
			return r.GetGeneration() == w.manager.generation() && len(r.GetExports()) == 0
		})
	}
	data := func(path string, want byte, at int64) {
		t.Helper()
		got := make([]byte, 4096)
		if err := readBlock(path, got, at); err != nil || got[0] != want || got[4095] != want {
			t.Errorf("%s reads %q… at %d, %v; want %q", path, got[:4], at, err, want)
		}
	}
	w.run()
	serve(false)
	device := connect(t, 1, 4422)
	for i, at := range []int64{0, 5 << 20, 100 << 20} {
		if err := writeBlockOf(device, byte('a'+i), at); err != nil {
			t.Fatal(err)
		}
	}
	disconnect(t, nqn)
	unserve()

	serve(true)
	device = connect(t, 1, 4420)
	reads := func() {
		t.Helper()
		for at, want := range map[int64]byte{0: 'a', 4096: 0, 5 << 20: 'b', 100 << 20: 'c', 200 << 20: 0} {
			data(device, want, at)
		}
	}
	reads()
	if err := writeBlockOf(device, 'x', 0); err == nil {
		t.Error("a host writes what nobody is to write")
	}
	if f, err := os.OpenFile(device, os.O_RDWR, 0); err != nil {
		t.Error(err)
	} else if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Errorf("a flush: %v", err)
	}
	reads()
	w.stop()
	reads()
	w.manager.forget()
	w.run()
	serve(true)
	if r := w.until("the space that it takes", func(r *pb.TargetReport) bool { return len(r.GetLegs()) == 1 && r.GetLegs()[0].GetUsedBytes() > 0 }); r.GetLegs()[0].GetUsedBytes() != uint64(3*block.MiB) {
		t.Errorf("it takes %d bytes, want three chunks", r.GetLegs()[0].GetUsedBytes())
	}
	reads()
	disconnect(t, nqn)

	unserve()
	serve(false)
	device = connect(t, 1, 4422)
	data(device, 'b', 5<<20)
	if err := writeBlockOf(device, 'x', 0); err != nil {
		t.Errorf("with the process again: %v", err)
	}
	disconnect(t, nqn)
	gone := want().leg(1, 1, 1, 0).thin().removed(1)
	gone.Exports, gone.Admissions = nil, nil
	w.manager.set(onDrive(gone))
	w.until("the legs freed", nothingOnIt)
	w.erase()
}

// TestAFenceWaitsForTheIOOfTheOldEpoch holds a host's write below its leg; the next epoch is not
// admitted until the write has landed.
func TestAFenceWaitsForTheIOOfTheOldEpoch(t *testing.T) {
	w := kernelWorld(t)
	if _, err := os.Stat("/dev/nvme-fabrics"); err != nil {
		t.Skipf("no NVMe host here: %v", err)
	}
	defer func() { w.stop() }()
	w.run()
	w.manager.set(onDrive(place(want().volume(1, 1, 1))))
	w.until("export ready", exportsReady(1))
	imported := connect(t, 1, 4420)

	// A leg that is not listed is left alone: the agent would resume its device.
	w.manager.set(onDrive(want().admit(1, 1).export(1, 1, 0)))
	w.until("generation 2", func(r *pb.TargetReport) bool { return r.GetGeneration() == 2 })
	mapper, err := dm.Open()
	if err != nil {
		t.Fatal(err)
	}
	name := dmPrefix + legID(1).String()
	if err := mapper.Suspend(name, true, true); err != nil {
		t.Fatal(err)
	}
	resumed := false
	resume := func() {
		if !resumed {
			resumed = true
			if err := mapper.Resume(name, dm.UdevInner); err != nil {
				t.Error(err)
			}
		}
	}
	defer resume()
	written := make(chan error, 1)
	go func() { written <- writeBlock(imported) }()
	time.Sleep(2 * time.Second) // by then the write has reached the leg

	w.manager.set(onDrive(want().admit(1, 2)))
	w.until("the drain is reported", problemWith("draining"))
	reports := w.manager.reported()
	time.Sleep(5 * time.Second)
	if sent := w.manager.reported() - reports; sent < 4 {
		t.Errorf("%d reports in 5s while the drain hangs, want one a second", sent)
	}
	if r := w.until("a report", func(*pb.TargetReport) bool { return true }); admitted(1, 2)(r) {
		t.Error("epoch 2 is admitted while a write of epoch 1 is under way")
	}
	resume()
	w.checkAdmissions(w.until("epoch 2 admitted", admitted(1, 2)))
	t.Logf("the host's write ended with %v", <-written)
}

// kernelWorld is the machine that the test runs in, with an agent for its drive.
func kernelWorld(t *testing.T) *world {
	t.Helper()
	if os.Getenv("WEFT_GUEST") == "" {
		t.Skip("not in a test machine: see e2e/kernel_test.go")
	}
	for _, needed := range []string{kernelDrive, "/sys/kernel/config/nvmet", "/dev/mapper/control"} {
		if _, err := os.Stat(needed); err != nil {
			t.Skipf("no machine for this here: %v", err)
		}
	}
	addAddress(t, "192.0.2.1")
	w := &world{t: t, root: "/", labels: func() []*drive.Label { return deviceLabels(t) }, stop: func() {}}
	w.tree = func() (*nvmet.Tree, error) { return nvmet.Open("/sys/kernel/config/nvmet") }
	w.manager = manager{world: w, changed: make(chan struct{})}
	return w
}

func onDrive(w wish) *pb.TargetWanted {
	w.Drives = []*pb.WantedDrive{{DriveId: driveID(1).String(), Device: kernelDrive}}
	return w.TargetWanted
}

// nothingOnIt reports whether the drive is there, without legs and exports.
func nothingOnIt(r *pb.TargetReport) bool {
	return len(r.GetExports()) == 0 && len(r.GetDrives()) == 1 && len(r.GetDrives()[0].GetLegs()) == 0
}

// erase has the agent let the drive go.
func (w *world) erase() {
	w.t.Helper()
	erased := onDrive(want())
	erased.Drives[0].Remove = true
	w.manager.set(erased)
	w.until("drive erased", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 0 })
}

// place puts the legs on two runs of extents, out of order, so that only the table gives the right
// content.
func place(w wish) wish {
	for _, l := range w.Legs {
		l.Extents = []*pb.Extent{{Start: 2, Count: 1}, {Start: 0, Count: 1}}
	}
	return w
}

// connect makes this machine a host of a volume's export, and returns its device. A lost connection is
// given up soon, so that the write ends.
func connect(t *testing.T, volume byte, port uint16) string {
	t.Helper()
	nqn := block.SubsystemNQN(volumeID(volume), 1, host, "t1")
	before := glob(t, "/dev/nvme*n*")
	f, err := os.OpenFile("/dev/nvme-fabrics", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // the controller stays
	options := fmt.Sprintf("transport=tcp,traddr=192.0.2.1,trsvcid=%d,nqn=%s,hostnqn=%s,hostid=%s,reconnect_delay=1,ctrl_loss_tmo=2,nr_io_queues=1",
		port, nqn, host.NQN, host.ID)
	if _, err := f.WriteString(options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { disconnect(t, nqn) })
	for range 100 {
		for _, path := range glob(t, "/dev/nvme*n*") {
			if !slices.Contains(before, path) {
				return path
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("no device has come")
	return ""
}

// disconnect ends a host's controllers of a subsystem, since the next test may export the same one.
func disconnect(t *testing.T, nqn block.NQN) {
	for _, dir := range glob(t, "/sys/class/nvme/nvme*") {
		name, _ := os.ReadFile(filepath.Join(dir, "subsysnqn"))
		if strings.TrimSpace(string(name)) != string(nqn) {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, "delete_controller"), []byte("1"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("disconnect: %v", err)
		}
	}
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

func writeBlock(path string) error { return writeBlockOf(path, 0, 0) }

func writeBlockOf(path string, c byte, at int64) error {
	return direct(path, os.O_WRONLY, func(f *os.File, page []byte) error {
		copy(page, bytes.Repeat([]byte{c}, len(page)))
		_, err := f.WriteAt(page, at)
		return err
	})
}

func readBlock(path string, to []byte, at int64) error {
	return direct(path, os.O_RDONLY, func(f *os.File, page []byte) error {
		_, err := f.ReadAt(page, at)
		copy(to, page)
		return err
	})
}

// direct opens a device for I/O without a cache, of a page that is aligned for that.
func direct(path string, flag int, do func(f *os.File, page []byte) error) error {
	f, err := os.OpenFile(path, flag|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	return errors.Join(do(f, page), f.Close(), unix.Munmap(page))
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

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"weft.dev/weft/csi/mount"
)

// realNode is a node service on this machine's kernel, with one volume on a device.
type realNode struct {
	*life
	machine machine
	records *records
	disk    mount.Disk
	device  string
}

func newRealNode(t *testing.T, capability *csi.VolumeCapability) *realNode {
	t.Helper()
	needsRoot(t)
	m := realMachine(t)
	device, _ := loopDevice(t, m.dir, 320*mib)
	d := m.open(t, device)
	b := realBench(t, m, device, d, "ext4")
	b.stage.VolumeCapability = capability
	n := &realNode{machine: m, records: b.records, disk: d, device: device}
	n.life = &life{
		t: t, stage: b.stage, publish: publishOf(b.stage, b.target),
		node: newNodeOn(Config{Manager: b.records, Node: thisNode}, m.Kernel),
	}
	t.Cleanup(func() {
		_ = m.Unmount(b.target, true)
		_ = m.Unmount(b.stage.StagingTargetPath, true)
	})
	return n
}

func (n *realNode) succeeds(calls ...int) {
	n.t.Helper()
	if _, err := n.run(calls...); err != nil {
		n.t.Fatal(err)
	}
}

func (n *realNode) fails(call int, code codes.Code, names ...string) {
	n.t.Helper()
	_, err := n.run(call)
	refused(n.t, "the call", errors.Unwrap(err), code, names...)
}

const anyWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER

// shutDown makes a file system answer everything with an error, like one whose device is gone
// (EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN).
func shutDown(t *testing.T, point string) {
	t.Helper()
	f, err := os.Open(point)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const goingDown, noLogFlush = 0x8004587d, 2
	if err := unix.IoctlSetPointerInt(int(f.Fd()), goingDown, noLogFlush); err != nil {
		t.Fatal(err)
	}
}

func TestADeadFileSystemIsUnmounted(t *testing.T) {
	for _, fsType := range fileSystems {
		t.Run(fsType, func(t *testing.T) {
			n := newRealNode(t, mountCapability(anyWriter, fsType))
			n.succeeds(callStage, callPublish)
			target := n.publish.TargetPath
			if err := os.WriteFile(filepath.Join(target, "data"), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			shutDown(t, target)
			if err := os.WriteFile(filepath.Join(target, "more"), []byte("x"), 0o600); err == nil {
				t.Fatal("the file system still takes writes")
			}
			h, err := n.node.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: volumeID, VolumePublishPath: target})
			succeeds(t, "health", err)
			at, _ := n.machine.at(t, target)
			shows := fsType == "xfs" || slices.Contains(at.Super, "shutdown") // older kernels do not show it for ext4
			if got := reasons(h.VolumeHealth); shows && !slices.Contains(got, "FileSystemFails") {
				t.Errorf("health = %v", got)
			}
			n.succeeds(callUnpublish, callUnpublish, callUnstage, callUnstage)
			n.succeeds(callStage, callPublish, callUnpublish, callUnstage)
		})
	}
}

func TestAUserOfTheTargetIsNamedAndNotHarmed(t *testing.T) {
	n := newRealNode(t, mountCapability(anyWriter, "ext4"))
	n.succeeds(callStage, callPublish)
	f, err := os.Create(filepath.Join(n.publish.TargetPath, "data"))
	if err != nil {
		t.Fatal(err)
	}
	n.fails(callUnpublish, codes.FailedPrecondition, "has open "+f.Name())
	if _, err := f.WriteString("still here"); err != nil {
		t.Error(err)
	}
	f.Close()
	n.succeeds(callUnpublish, callUnstage)
}

// A program being started has, until its exec, a copy of each descriptor of its parent, including
// that of a mount, which is busy until then.
func TestAMountThatIsHeldForAMomentGoes(t *testing.T) {
	n := newRealNode(t, mountCapability(anyWriter, "ext4"))
	for call, point := range map[int]string{callUnpublish: n.publish.TargetPath, callUnstage: n.stage.StagingTargetPath} {
		n.succeeds(callStage, callPublish)
		if call == callUnstage {
			n.succeeds(callUnpublish)
		}
		release := holdElsewhere(t, point)
		if err := unix.Unmount(point, 0); !errors.Is(err, unix.EBUSY) {
			t.Fatalf("umount of %s, which a process holds = %v, want EBUSY", point, err)
		}
		time.AfterFunc(100*time.Millisecond, release)
		n.succeeds(call, callUnpublish, callUnstage)
	}
}

// holdElsewhere makes a child of this process keep a copy of a descriptor of a path until it is
// released, or the test ends.
func holdElsewhere(t *testing.T, path string) (release func()) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	child := exec.Command("cat")
	child.ExtraFiles = []*os.File{f}
	stdin, err := child.StdinPipe()
	if err == nil {
		err = child.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = child.Wait()
	})
	return func() { stdin.Close() }
}

// A container with a private copy of the node's mounts keeps the file system alive
// after it is unmounted on the node.
func TestAMountThatAContainerKeptIsWaitedFor(t *testing.T) {
	n := newRealNode(t, mountCapability(anyWriter, "ext4"))
	n.succeeds(callStage)
	container := exec.Command("sleep", "600")
	container.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := container.Start(); err != nil {
		t.Fatal(err)
	}
	kill := func() { _ = container.Process.Kill(); _ = container.Wait() }
	t.Cleanup(kill)
	n.fails(callUnstage, codes.FailedPrecondition, "sleep", n.stage.StagingTargetPath)
	n.fails(callUnstage, codes.FailedPrecondition, "sleep") // the second time nothing is mounted here
	if busy, err := n.disk.Busy(); !busy || err != nil {
		t.Errorf("Busy = %v, %v, and the file system is live", busy, err)
	}
	n.succeeds(callStage) // it is the same file system, so it is not checked or made
	n.fails(callUnstage, codes.FailedPrecondition, "sleep")
	kill()
	n.succeeds(callUnstage)
}

// A mount follows a link, an unmount does not: so nothing is mounted on a link, where it would
// never be found again.
func TestNothingIsMountedBehindALink(t *testing.T) {
	for name, capability := range map[string]*csi.VolumeCapability{"ext4": mountCapability(anyWriter, "ext4"), "raw": blockCapability(anyWriter)} {
		t.Run(name, func(t *testing.T) {
			n := newRealNode(t, capability)
			behind := filepath.Join(n.machine.dir, "behind")
			succeeds(t, "make the directory", n.machine.MakeDir(behind))
			staging, target := n.stage.StagingTargetPath, n.publish.TargetPath
			if name != "raw" { // a raw volume has nothing at the staging path
				n.machine.link(t, behind, staging)
				n.fails(callStage, codes.FailedPrecondition, staging+" is a symbolic link")
				n.succeeds(callUnstage)
				succeeds(t, "remove the link", n.machine.Remove(staging))
			}
			n.succeeds(callStage)
			succeeds(t, "make the pod's directory", n.machine.MakeDir(filepath.Dir(target)))
			n.machine.link(t, behind, target)
			n.fails(callPublish, codes.FailedPrecondition, target+" is a symbolic link")
			n.succeeds(callUnpublish, callUnstage)
			all, err := n.machine.Mounts()
			succeeds(t, "read the mounts", err)
			if left := all.FileSystemOn(n.disk.Number()); len(left) > 0 {
				t.Errorf("still mounted on %s", left.Points())
			}
		})
	}
}

// The kubelet has a loop device over each raw volume, and removes it when it likes.
func TestTheKubeletsLoopDeviceIsNobodysUse(t *testing.T) {
	n := newRealNode(t, blockCapability(anyWriter))
	n.succeeds(callStage, callPublish)
	own := filepath.Join(filepath.Dir(n.publish.TargetPath), "kubelets")
	succeeds(t, "make the file", n.machine.MakeFile(own))
	succeeds(t, "bind", unix.Mount(n.publish.TargetPath, own, "", unix.MS_BIND, ""))
	loop := strings.TrimSpace(run(t, "losetup", "--find", "--show", own))
	detached := false
	detach := func() {
		if !detached {
			detached = true
			run(t, "losetup", "-d", loop)
		}
	}
	t.Cleanup(detach)
	n.succeeds(callPublish) // again, as after a restart of the kubelet
	n.succeeds(callUnpublish)
	n.fails(callUnstage, codes.FailedPrecondition, own)
	succeeds(t, "detach the kubelet's mount", unix.Unmount(own, unix.MNT_DETACH))
	n.succeeds(callUnstage)
	detach()
}

func TestARestartDisturbsNothing(t *testing.T) {
	n := newRealNode(t, mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, "xfs", "noatime"))
	n.succeeds(callStage, callPublish)
	f, err := os.Create(filepath.Join(n.publish.TargetPath, "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	before, _ := n.machine.Mounts()
	n.node = newNodeOn(Config{Manager: n.records, Node: thisNode}, mount.NewLinux())
	n.succeeds(callStage, callPublish)
	after, _ := n.machine.Mounts()
	if len(before) != len(after) {
		t.Errorf("%d mounts, and %d after a restart and repeated calls", len(before), len(after))
	}
	if _, err := f.WriteString("still here"); err != nil {
		t.Error(err)
	}
	f.Close()
	n.succeeds(callUnpublish, callUnstage)
}

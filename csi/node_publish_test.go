// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/csi/mount/mounttest"
	"weft.dev/weft/proto/pb"
)

func TestPublishChecksThatTheStagedDeviceIsTheVolumes(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	w.publish.VolumeCapability.GetMount().FsType = "xfs"
	refused(t, "publish as another file system", w.publishErr(), codes.FailedPrecondition, "ext4", "xfs")
	w.publish.StagingTargetPath = ""
	refused(t, "publish without a staging path", w.publishErr(), codes.FailedPrecondition, "staging_target_path")
}

// A pod whose device has failed for good is replaced on its node before it is gone: so the kubelet neither unstages
// the volume nor stages it again, although it has another device.
func TestThePodAfterAnEpochHasEndedGetsTheNewDevice(t *testing.T) {
	for name, readOnly := range map[string]bool{"writes": false, "only reads": true} {
		t.Run(name, func(t *testing.T) {
			w := newNodeWorld(t)
			succeeds(t, "stage", w.stageErr())
			succeeds(t, "publish", w.publishErr())
			old := w.publish.TargetPath
			disk := w.attachAnew()
			w.publish.PublishContext = publication{volume: "db1", epoch: 1, mode: pb.AttachMode_ATTACH_MODE_EXCLUSIVE}.context() // no other attachment was published
			w.publish.TargetPath, w.publish.Readonly = "/pods/p2", readOnly
			succeeds(t, "publish for the next pod", w.publishErr())
			for _, path := range []string{"/pods/p2", w.stage.StagingTargetPath} {
				if m, ok := w.mountedAt(path); !ok || m.Device != disk.number || m.ReadOnly() != (readOnly && path == "/pods/p2") {
					t.Errorf("%s has %+v, want the new device %s", path, m, disk.number)
				}
			}
			if m, ok := w.mountedAt(old); !ok || m.Device == disk.number {
				t.Errorf("the old pod has %+v, want what it had", m)
			}
		})
	}
}

// To stage again may fail after the old file system was unmounted. Nobody but the next attempt to publish makes up
// for that.
func TestAPodIsPublishedAfterAnAttemptThatFailedHalfWay(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	disk := w.attachAnew()
	if err := w.kernel.Unmount(w.stage.StagingTargetPath, false); err != nil {
		t.Fatal(err)
	}
	succeeds(t, "publish", w.publishErr())
	for _, path := range []string{w.publish.TargetPath, w.stage.StagingTargetPath} {
		if m, ok := w.mountedAt(path); !ok || m.Device != disk.number {
			t.Errorf("%s has %+v, want the new device %s", path, m, disk.number)
		}
	}
}

// The device of an attachment that lives is not taken for one of an attachment that has ended.
func TestPublishLeavesAnotherVolumesMountAlone(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	was := w.disk.number.String()
	w.attachAnew()
	const other = "0d0d0d0d-0000-4000-8000-000000000002"
	w.addVolume(other, "db2", "ext4")
	w.records.set(other, func(v *pb.Volume) { v.Attachment.DeviceNumber = was })
	refused(t, "publish over another volume's mount", w.publishErr(), codes.FailedPrecondition, "not the volume's device")
	if _, ok := w.mountedAt(w.stage.StagingTargetPath); !ok {
		t.Error("another volume's mount is gone")
	}
}

func TestATargetWithOtherArgumentsAlreadyExists(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "publish", w.publishErr())
	w.publish.Readonly = true
	refused(t, "the same target, read-only", w.publishErr(), codes.AlreadyExists)
	w.publish.TargetPath = "/pods/p2"
	succeeds(t, "another target, read-only", w.publishErr())
	if m, _ := w.mountedAt("/pods/p2"); !m.ReadOnly() {
		t.Error("the target is writable")
	}
	w.publish.VolumeCapability = blockCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
	refused(t, "the same target as a raw device", w.publishErr(), codes.AlreadyExists)
}

func TestASingleWriterHasOneTargetAlsoAfterARestart(t *testing.T) {
	for name, capability := range map[string]*csi.VolumeCapability{
		"file system": mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, "ext4"),
		"raw device":  blockCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER),
	} {
		t.Run(name, func(t *testing.T) {
			w := newNodeWorld(t)
			w.stage.VolumeCapability = capability
			w.publish = publishOf(w.stage, "/pods/p1")
			succeeds(t, "stage", w.stageErr())
			succeeds(t, "publish", w.publishErr())
			w.restart()
			succeeds(t, "publish again", w.publishErr())
			w.publish.TargetPath = "/pods/p2"
			refused(t, "publish at a second target", w.publishErr(), codes.FailedPrecondition, "/pods/p1")
			w.publish.TargetPath = "/pods/p1"
			succeeds(t, "unpublish", w.unpublishErr())
			w.publish.TargetPath = "/pods/p2"
			succeeds(t, "publish at the second target", w.publishErr())
		})
	}
}

func TestManyWritersHaveManyTargets(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	for _, target := range []string{"/pods/p1", "/pods/p2", "/pods/p3"} {
		w.publish.TargetPath = target
		succeeds(t, "publish at "+target, w.publishErr())
	}
	refused(t, "unstage", w.unstageErr(), codes.FailedPrecondition, "/pods/p1", "/pods/p2", "/pods/p3")
	if _, ok := w.mountedAt("/staging/db1"); !ok {
		t.Error("the staging path was unmounted: the next call would not see what is in use")
	}
}

func TestPathsOutsideTheKubeletsDirectoryAreRefused(t *testing.T) {
	w := newNodeWorld(t)
	w.node.cfg.KubeletDir = "/var/lib/kubelet"
	refused(t, "stage", w.stageErr(), codes.InvalidArgument, "/var/lib/kubelet")
	refused(t, "unpublish", w.unpublishErr(), codes.InvalidArgument, "target_path")
	w.stage.StagingTargetPath = "/var/lib/kubelet/../../etc"
	refused(t, "unstage", w.unstageErr(), codes.InvalidArgument, "staging_target_path")
}

func TestAHeldMountIsReportedAndStays(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "publish", w.publishErr())
	w.kernel.held["/pods/p1"] = `process 7 ("postgres") has open /pods/p1/wal`
	refused(t, "unpublish", w.unpublishErr(), codes.FailedPrecondition, "postgres", "/pods/p1")
	if _, ok := w.mountedAt("/pods/p1"); !ok {
		t.Error("a target of a live attachment was detached under its user")
	}
	w.records.down = context.DeadlineExceeded
	refused(t, "unpublish without the manager", w.unpublishErr(), codes.FailedPrecondition, "is unknown")
	w.records.down = nil
	w.records.set(volumeID, func(v *pb.Volume) { v.Attachment, v.FenceWaitsFor = nil, []string{"t1: offline"} })
	refused(t, "unpublish before the fence", w.unpublishErr(), codes.FailedPrecondition, "postgres")
	delete(w.kernel.held, "/pods/p1")
	succeeds(t, "unpublish", w.unpublishErr())
}

func TestAHeldRawDeviceIsReportedAndStays(t *testing.T) {
	w := newNodeWorld(t)
	w.stage.VolumeCapability = blockCapability(anyWriter)
	w.publish = publishOf(w.stage, "/pods/p1")
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "publish", w.publishErr())
	w.kernel.held["/pods/p1"] = "process 7"
	refused(t, "unpublish", w.unpublishErr(), codes.FailedPrecondition, "process 7")
	if n, ok := w.kernel.Node("/pods/p1"); !ok || n != w.disk.number {
		t.Error("a raw device of a live attachment was taken away under its user")
	}
	w.records.set(volumeID, func(v *pb.Volume) { v.Attachment = nil })
	succeeds(t, "unpublish after the fence", w.unpublishErr())
	w.kernel.nothingMounted(t)
}

func TestANodeThatComesBackGetsRidOfWhatItHad(t *testing.T) {
	for name, gone := range map[string]func(w *nodeWorld){
		"attached elsewhere": func(w *nodeWorld) { w.records.volumes[volumeID].Attachment.Node = "n2" },
		"detached":           func(w *nodeWorld) { w.records.volumes[volumeID].Attachment = nil },
		"deleted":            func(w *nodeWorld) { delete(w.records.volumes, volumeID) },
		"attached anew":      func(w *nodeWorld) { w.attachAnew() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newNodeWorld(t)
			succeeds(t, "stage", w.stageErr())
			succeeds(t, "publish", w.publishErr())
			gone(w)
			w.disk.ioError = true
			w.kernel.held["/pods/p1"] = "process 7"
			w.kernel.held["/staging/db1"] = "process 7"
			w.restart()
			succeeds(t, "unpublish", w.unpublishErr())
			succeeds(t, "unstage", w.unstageErr())
			w.kernel.nothingMounted(t)
		})
	}
}

func TestTheNextAttachmentIsStagedOverWhatTheLastOneLeft(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "publish", w.publishErr())
	w.disk.data = "old"
	w.kernel.held["/staging/db1"] = "process 7"
	d := w.attachAnew()
	succeeds(t, "stage", w.stageErr())
	if m, _ := w.mountedAt("/staging/db1"); m.Device != d.number {
		t.Errorf("staged is device %s, want %s", m.Device, d.number)
	}
	delete(w.kernel.held, "/staging/db1")
	succeeds(t, "publish where the old pod's target was", w.publishErr())
	if m, _ := w.mountedAt("/pods/p1"); m.Device != d.number {
		t.Errorf("published is device %s, want %s", m.Device, d.number)
	}
	if w.formats() != 1 {
		t.Errorf("%d file systems made, want the first alone", w.formats())
	}
}

func TestWhatOthersMountedIsNotTakenAway(t *testing.T) {
	w := newNodeWorld(t)
	other := w.kernel.addDisk("/dev/weft/other", 512*mib)
	other.start = mounttest.Ext4(otherID, 512*mib, true)
	w.records.volumes[otherID] = &pb.Volume{Id: otherID, Name: "other", Attachment: &pb.Attachment{
		Node: thisNode, DeviceNumber: other.number.String(), State: pb.AttachmentState_ATTACHMENT_STATE_ATTACHED,
	}}
	succeeds(t, "make the directory", w.kernel.MakeDir("/staging/db1"))
	d, _ := w.kernel.Open("/dev/weft/other")
	succeeds(t, "mount", w.kernel.Mount(d, "/dev/weft/other", "/staging/db1", "ext4", nil))
	refused(t, "stage over another volume", w.stageErr(), codes.FailedPrecondition, "/dev/weft/other")
	if m, ok := w.mountedAt("/staging/db1"); !ok || m.Device != other.number {
		t.Error("another volume's mount was taken away")
	}
}

func TestUnstageIsNotOverBeforeTheDeviceIsFree(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	w.kernel.elsewhere[w.disk.number] = []string{`process 8 ("node-exporter") has it mounted on /host/staging`}
	refused(t, "unstage", w.unstageErr(), codes.FailedPrecondition, "node-exporter")
	w.restart()
	refused(t, "unstage, with nothing mounted here", w.unstageErr(), codes.FailedPrecondition, "node-exporter")
	w.records.down = context.DeadlineExceeded
	refused(t, "unstage, with nothing mounted and no manager", w.unstageErr(), codes.Unavailable)
	w.records.down = nil
	delete(w.kernel.elsewhere, w.disk.number)
	succeeds(t, "unstage", w.unstageErr())
}

func TestUnstageIsNotOverWhileAnUnmountOfAnotherProcessHangs(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	w.disk.claimed = true
	refused(t, "unstage", w.unstageErr(), codes.FailedPrecondition, "this process cannot see")
	w.restart()
	refused(t, "unstage", w.unstageErr(), codes.FailedPrecondition, "this process cannot see")
	refused(t, "stage", w.stageErr(), codes.Unavailable, "open exclusively")
	w.disk.claimed = false
	succeeds(t, "unstage", w.unstageErr())
}

func TestUnstageNeedsNoManagerWhereItUnmounts(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "publish", w.publishErr())
	w.records.down = context.DeadlineExceeded
	succeeds(t, "unpublish", w.unpublishErr())
	succeeds(t, "unstage", w.unstageErr())
}

func TestAnUnmountThatHangsIsNotAnsweredOK(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newNodeWorld(t)
		succeeds(t, "stage", w.stageErr())
		gate := make(chan struct{})
		w.kernel.hang["umount"] = gate
		_, err := w.node.NodeUnstageVolume(callContext(t, 50*time.Millisecond), &csi.NodeUnstageVolumeRequest{VolumeId: volumeID, StagingTargetPath: "/staging/db1"})
		refused(t, "unstage", err, codes.DeadlineExceeded, "unmount /staging/db1")
		refused(t, "unstage again", w.unstageErr(), codes.Aborted)
		refused(t, "stage", w.stageErr(), codes.Aborted)
		close(gate)
		until(t, "the unmount ends", func() bool {
			w.node.ops.mu.Lock()
			defer w.node.ops.mu.Unlock()
			return len(w.node.ops.under) == 0
		})
		succeeds(t, "unstage", w.unstageErr())
	})
}

func TestStatsTellBytesAndInodesOrTheSizeOfARawDevice(t *testing.T) {
	w := newNodeWorld(t)
	ask := &csi.NodeGetVolumeStatsRequest{VolumeId: volumeID, VolumePath: "/pods/p1"}
	_, err := w.node.NodeGetVolumeStats(t.Context(), ask)
	refused(t, "stats of what is not published", err, codes.NotFound, "/pods/p1")
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "publish", w.publishErr())
	w.records.down = context.DeadlineExceeded // it needs no manager
	got, err := w.node.NodeGetVolumeStats(t.Context(), ask)
	succeeds(t, "stats", err)
	if u := got.Usage; len(u) != 2 || u[0].Total != 512*mib || u[1].Total != 16 || u[1].Used != 4 || u[1].Unit != csi.VolumeUsage_INODES {
		t.Errorf("stats = %v", u)
	}
	w.records.down = nil
	succeeds(t, "unpublish", w.unpublishErr())
	succeeds(t, "unstage", w.unstageErr())
	w.stage.VolumeCapability = blockCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
	w.publish.VolumeCapability = w.stage.VolumeCapability
	succeeds(t, "publish raw", w.publishErr())
	got, err = w.node.NodeGetVolumeStats(t.Context(), ask)
	succeeds(t, "stats", err)
	if u := got.Usage; len(u) != 1 || u[0].Total != 512*mib || u[0].Unit != csi.VolumeUsage_BYTES {
		t.Errorf("stats of a raw device = %v", u)
	}
}

func TestStatsAreOfTheVolumeAlone(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "publish", w.publishErr())
	other := w.addVolume(otherID, "other", "ext4")
	ask := func(id, path string) error {
		_, err := w.node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
		return err
	}
	unknown := "7d0f3a52-2b1c-4f7e-8a55-3f1f5f0c2b99"
	refused(t, "stats of another volume", ask(other.VolumeId, "/pods/p1"), codes.NotFound, "/pods/p1", "other")
	refused(t, "stats of no volume", ask(unknown, "/pods/p1"), codes.NotFound, unknown)
	refused(t, "stats of the machine's own file system", ask(volumeID, "/"), codes.NotFound, "db1")
	for _, path := range []string{"/pods/p1", "/staging/db1"} {
		succeeds(t, "stats of the volume on "+path, ask(volumeID, path))
	}
	w.records.set(volumeID, func(v *pb.Volume) { v.Attachment.DeviceNumber = "" })
	succeeds(t, "stats while the agent has not reported", ask(volumeID, "/pods/p1"))
	w.records.set(volumeID, func(v *pb.Volume) { v.Attachment = nil })
	refused(t, "stats of what was detached", ask(volumeID, "/pods/p1"), codes.NotFound, "db1")
}

func TestAFileSystemThatHangsIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newNodeWorld(t)
		succeeds(t, "stage", w.stageErr())
		succeeds(t, "publish", w.publishErr())
		w.records.set(volumeID, func(v *pb.Volume) { v.Attachment.WaitingFor = "leg 0.0 on t1" })
		asked := make(chan struct{}, 10)
		gate := make(chan struct{})
		w.kernel.hang["Usage"] = gate
		w.node.asked.patience = 20 * time.Millisecond
		real := w.node.kernel
		w.node.kernel = usageCounter{real, asked}
		for range 5 {
			_, err := w.node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: volumeID, VolumePath: "/pods/p1"})
			refused(t, "stats", err, codes.Unavailable, "/pods/p1", "leg 0.0 on t1")
		}
		h, err := w.node.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: volumeID, VolumePublishPath: "/pods/p1"})
		succeeds(t, "health", err)
		if got := reasons(h.VolumeHealth); !slices.Equal(got, []string{"IOWaits", "FileSystemHangs"}) {
			t.Errorf("health = %v", got)
		}
		w.records.down = context.DeadlineExceeded
		_, err = w.node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: volumeID, VolumePath: "/pods/p1"})
		refused(t, "stats without a manager", err, codes.Unavailable, "/pods/p1")
		w.records.down = nil
		if len(asked) != 1 {
			t.Errorf("the file system was asked %d times, want once", len(asked))
		}
		close(gate)
		until(t, "it answers", func() bool {
			_, err := w.node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: volumeID, VolumePath: "/pods/p1"})
			return err == nil
		})
	})
}

type usageCounter struct {
	mount.Kernel
	asked chan struct{}
}

func (u usageCounter) Usage(path string) (mount.Usage, error) {
	u.asked <- struct{}{}
	return u.Kernel.Usage(path)
}

func reasons(h *csi.VolumeHealth) []string {
	var all []string
	for _, s := range h.HealthStatuses {
		all = append(all, s.Reason)
	}
	return all
}

func TestHealthTellsWhatTheNodeSees(t *testing.T) {
	w := newNodeWorld(t)
	succeeds(t, "stage", w.stageErr())
	health := func() []string {
		t.Helper()
		h, err := w.node.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: volumeID, StagingTargetPath: "/staging/db1"})
		succeeds(t, "health", err)
		return reasons(h.VolumeHealth)
	}
	if got := health(); len(got) > 0 {
		t.Errorf("health of a healthy volume = %v", got)
	}
	w.records.set(volumeID, func(v *pb.Volume) { v.Health = pb.Health_HEALTH_DEGRADED })
	w.disk.ioError = true
	if got := health(); !slices.Equal(got, []string{"CopiesMissing", "FileSystemFails"}) {
		t.Errorf("health = %v", got)
	}
	w.records.set(volumeID, func(v *pb.Volume) { v.Health = pb.Health_HEALTH_HEALTHY })
	w.attachAnew()
	if got := health(); !slices.Equal(got, []string{"AttachmentEnded"}) {
		t.Errorf("health of an old mount = %v", got)
	}
}

func TestStorageHealthTellsWhatTheNodeReaches(t *testing.T) {
	w := newNodeWorld(t)
	health := func() []string {
		t.Helper()
		h, err := w.node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
		succeeds(t, "health", err)
		var all []string
		for _, b := range h.BackendHealth {
			all = append(all, b.Status.String()+" "+b.Reason)
		}
		return all
	}
	if got := health(); len(got) > 0 {
		t.Errorf("health = %v, want nothing", got)
	}
	w.records.set(volumeID, func(v *pb.Volume) { v.Attachment.WaitingFor = "leg 0.0" })
	if got := health(); !slices.Equal(got, []string{"STORAGE_UNREACHABLE AllVolumesWait"}) {
		t.Errorf("health with a volume that waits = %v", got)
	}
	w.records.down = context.DeadlineExceeded
	if got := health(); !slices.Equal(got, []string{"STORAGE_DEGRADED ManagerUnreachable"}) {
		t.Errorf("health without the manager = %v", got)
	}
}

func TestExpandWaitsForTheDeviceAndGrowsTheFileSystem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newNodeWorld(t)
		w.stage, w.publish = stageOf("xfs"), publishOf(stageOf("xfs"), "/pods/p1")
		succeeds(t, "stage", w.stageErr())
		succeeds(t, "publish", w.publishErr())
		ask := &csi.NodeExpandVolumeRequest{
			VolumeId: volumeID, VolumePath: "/pods/p1", StagingTargetPath: "/staging/db1",
			CapacityRange: &csi.CapacityRange{RequiredBytes: 1024 * mib},
		}
		_, err := w.node.NodeExpandVolume(callContext(t, 50*time.Millisecond), ask)
		refused(t, "expand before the device has grown", err, codes.DeadlineExceeded, "536870912")
		w.kernel.mu.Lock()
		w.disk.size = 1024 * mib
		w.kernel.mu.Unlock()
		var number string
		w.records.set(volumeID, func(v *pb.Volume) { number, v.Attachment.DeviceNumber = v.Attachment.DeviceNumber, "" })
		_, err = w.node.NodeExpandVolume(callContext(t, 50*time.Millisecond), ask)
		refused(t, "expand at a manager that has just begun", err, codes.DeadlineExceeded, "report its device")
		w.records.set(volumeID, func(v *pb.Volume) { v.Attachment.DeviceNumber = number })
		got, err := w.node.NodeExpandVolume(callContext(t, 10*time.Second), ask)
		succeeds(t, "expand", err)
		if s, _ := mount.ParseSuperblock(w.disk.start[:]); got.CapacityBytes != 1024*mib || s.Bytes != 1024*mib {
			t.Errorf("expand = %d, and the file system has %d", got.CapacityBytes, s.Bytes)
		}
		w.attachAnew()
		_, err = w.node.NodeExpandVolume(callContext(t, 10*time.Second), ask)
		refused(t, "expand of an old mount", err, codes.FailedPrecondition)
		ask.VolumePath = "/pods/p2"
		_, err = w.node.NodeExpandVolume(callContext(t, 10*time.Second), ask)
		refused(t, "expand of nothing", err, codes.NotFound)
	})
}

func TestTheNodeTellsItsSegments(t *testing.T) {
	w := newNodeWorld(t)
	w.node.cfg.MaxVolumes = 64
	log := &logBuffer{}
	ctx := withLog(t.Context(), slog.New(slog.NewTextHandler(log, nil)))
	want := map[string]string{"topology.weft.dev/cluster": "c1", "topology.weft.dev/zone": "z1"}
	for range 2 {
		got, err := w.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		succeeds(t, "info", err)
		if got.NodeId != thisNode || got.MaxVolumesPerNode != 64 || !maps.Equal(want, got.AccessibleTopology.Segments) {
			t.Errorf("info = %v, want segments %v", got, want)
		}
	}
	if text := log.String(); strings.Count(text, "left out") != 1 || !strings.Contains(text, "node="+thisNode+" label=owner") {
		t.Errorf("the log says %q, want the node and its one label that is no segment, once", text)
	}
	w.node.cfg.Node = "n9"
	_, err := w.node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	refused(t, "info of a node without an agent", err, codes.Unavailable, "n9")
}

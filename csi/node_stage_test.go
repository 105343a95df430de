// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/csi/mount/mounttest"
	"weft.dev/weft/proto/pb"
)

func TestAVolumeGoesThroughItsLifeOnANode(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", ""} {
		w := newNodeWorld(t)
		w.stage = stageOf(fsType)
		w.publish = publishOf(w.stage, "/pods/p1")
		for range 2 { // each call may be repeated
			succeeds(t, "stage", w.stageErr())
		}
		for range 2 {
			succeeds(t, "publish", w.publishErr())
		}
		want := cmp.Or(fsType, "ext4")
		if m, ok := w.mountedAt("/pods/p1"); !ok || m.FSType != want || m.Device != w.disk.number {
			t.Errorf("target has %+v, want %s of %s", m, want, w.disk.number)
		}
		if n := w.formats(); n != 1 {
			t.Errorf("%d file systems made, want 1", n)
		}
		if got := w.records.updates; !slices.Equal(got, []string{"formatting " + want, want}) {
			t.Errorf("recorded %q", got)
		}
		for range 2 {
			succeeds(t, "unpublish", w.unpublishErr())
		}
		for range 2 {
			succeeds(t, "unstage", w.unstageErr())
		}
		w.kernel.nothingMounted(t)
	}
}

func TestTheStepsAreTimed(t *testing.T) {
	w := newNodeWorld(t)
	var steps []string
	w.node.took = func(step string, _ time.Duration) { steps = append(steps, step) }
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "publish", w.publishErr())
	succeeds(t, "unpublish", w.unpublishErr())
	succeeds(t, "unstage", w.unstageErr())
	if got := strings.Join(steps, " "); got != "wait open look queue make mount wait bind unmount unmount" {
		t.Errorf("steps were %s", got)
	}
}

func TestARawDeviceIsBoundAndHasNoFileSystemMade(t *testing.T) {
	w := newNodeWorld(t)
	w.stage.VolumeCapability = blockCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
	w.publish = publishOf(w.stage, "/pods/p1")
	succeeds(t, "stage", w.stageErr())
	if m, ok := w.mountedAt("/staging/db1"); ok {
		t.Errorf("staging a raw device mounted %+v", m)
	}
	for range 2 {
		succeeds(t, "publish", w.publishErr())
	}
	if n, ok := w.kernel.Node("/pods/p1"); !ok || n != w.disk.number {
		t.Errorf("target is device %v, %v, want %v", n, ok, w.disk.number)
	}
	refused(t, "unstage before unpublish", w.unstageErr(), codes.FailedPrecondition, "/pods/p1")
	succeeds(t, "unpublish", w.unpublishErr())
	succeeds(t, "unstage", w.unstageErr())
	if w.formats() > 0 {
		t.Error("a file system was made on a raw device")
	}
	w.kernel.nothingMounted(t)
}

func TestStageTakesTheDeviceByItsNumberNotItsName(t *testing.T) {
	w := newNodeWorld(t)
	other := w.kernel.addDisk("/dev/other", 512*mib)
	w.kernel.mu.Lock()
	w.kernel.nodes[device1] = other.number // the name leads to another volume's device
	w.kernel.mu.Unlock()
	refused(t, "stage", w.stageErr(), codes.Unavailable, other.number.String(), w.disk.number.String())

	w.kernel.mu.Lock()
	w.kernel.nodes[device1] = w.disk.number
	w.kernel.mu.Unlock()
	gets := 0
	w.records.fail = func(call string) error {
		if call == "GetVolume" {
			if gets++; gets == 2 { // after the open: the volume was attached anew meanwhile
				w.records.volumes[volumeID].Attachment.Epoch++
			}
		}
		return nil
	}
	refused(t, "stage", w.stageErr(), codes.Unavailable, "meanwhile")
	w.records.fail = nil
	succeeds(t, "stage at the later epoch", w.stageErr())
}

func TestStageWaitsForTheDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newNodeWorld(t)
		w.records.set(volumeID, func(v *pb.Volume) {
			v.Attachment.State, v.Attachment.WaitingFor = pb.AttachmentState_ATTACHMENT_STATE_GRANTED, "target t1"
		})
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := w.node.NodeStageVolume(ctx, w.stage)
		refused(t, "stage", err, codes.DeadlineExceeded, "target t1")

		done := make(chan error, 1)
		go func() { done <- w.stageErr() }()
		time.Sleep(5 * time.Second) // in the bubble's time
		w.records.set(volumeID, func(v *pb.Volume) { v.Attachment.State = pb.AttachmentState_ATTACHMENT_STATE_ATTACHED })
		succeeds(t, "stage", <-done)
	})
}

func TestStageRefusesWhatIsNotItsToMount(t *testing.T) {
	cases := []struct {
		name  string
		set   func(w *nodeWorld)
		code  codes.Code
		names []string
	}{
		{"another file system", func(w *nodeWorld) { w.disk.start = mounttest.XFS(otherID, 512*mib, false) }, codes.FailedPrecondition, []string{"ext4", "xfs"}},
		{"another one was recorded", func(w *nodeWorld) { w.records.volumes[volumeID].Formatted = "xfs" }, codes.FailedPrecondition, []string{"ext4", "xfs"}},
		{"a volume group", func(w *nodeWorld) { w.disk.foreign = "LVM2_member" }, codes.FailedPrecondition, []string{"LVM2_member"}},
		{"data at the start", func(w *nodeWorld) { w.disk.start[2000] = 1 }, codes.FailedPrecondition, []string{"data"}},
		{"data at the end", func(w *nodeWorld) { w.disk.end[2000] = 1 }, codes.FailedPrecondition, []string{"data"}},
		{"a file system that is gone", func(w *nodeWorld) { w.records.volumes[volumeID].Formatted = "ext4" }, codes.FailedPrecondition, []string{"ext4", "empty"}},
		{"a device that cannot be read", func(w *nodeWorld) { w.disk.ioError = true }, codes.Unavailable, nil},
		{"a device of which the end cannot be read", func(w *nodeWorld) { w.disk.endError = true }, codes.Unavailable, nil},
		{"no attachment", func(w *nodeWorld) { w.records.volumes[volumeID].Attachment = nil }, codes.FailedPrecondition, []string{thisNode}},
		{"an attachment elsewhere", func(w *nodeWorld) { w.records.volumes[volumeID].Attachment.Node = "n2" }, codes.FailedPrecondition, []string{thisNode}},
		{"an attachment that ends", func(w *nodeWorld) {
			w.records.volumes[volumeID].Attachment.State = pb.AttachmentState_ATTACHMENT_STATE_DETACHING
		}, codes.Aborted, nil},
		{"a device that is too small yet", func(w *nodeWorld) { w.records.volumes[volumeID].Attachment.SizeBytes = 1024 * mib }, codes.Unavailable, nil},
		{"no such volume", func(w *nodeWorld) { w.stage.VolumeId = otherID }, codes.NotFound, nil},
		{"damage", func(w *nodeWorld) {
			w.disk.start, w.disk.fsck = mounttest.Ext4(volumeID, 512*mib, true), mount.Result{Code: 4, Output: "UNEXPECTED INCONSISTENCY"}
		}, codes.FailedPrecondition, []string{"UNEXPECTED INCONSISTENCY"}},
		{"an option that is not served", func(w *nodeWorld) { w.stage = stageOf("ext4", "journal_path=/dev/sda") }, codes.InvalidArgument, []string{"journal_path"}},
		{"a file system that is not served", func(w *nodeWorld) { w.stage = stageOf("btrfs") }, codes.InvalidArgument, []string{"btrfs"}},
		{"several writers of a file system", func(w *nodeWorld) {
			w.stage.VolumeCapability = mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, "ext4")
		}, codes.InvalidArgument, nil},
		{"no manager", func(w *nodeWorld) { w.records.down = context.DeadlineExceeded }, codes.Unavailable, nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			w := newNodeWorld(t)
			c.set(w)
			refused(t, "stage", w.stageErr(), c.code, c.names...)
			if w.formats() > 0 {
				t.Error("it was formatted")
			}
			w.kernel.nothingMounted(t)
		})
	}
}

// It may have been killed by the OOM killer, or with its driver's cgroup: the next call goes on.
func TestAnMkfsThatWasKilledIsTriedAgain(t *testing.T) {
	w := newNodeWorld(t)
	w.disk.mkfsKilled = true
	refused(t, "stage", w.stageErr(), codes.Unavailable, "signal: killed", "half done")
	w.disk.mkfsKilled = false
	succeeds(t, "stage", w.stageErr())
}

func TestAnMkfsThatDidNothingIsNotBelieved(t *testing.T) {
	w := newNodeWorld(t)
	w.disk.idle = true
	refused(t, "stage", w.stageErr(), codes.Unavailable, "mkfs.ext4")
	if got := w.records.volumes[volumeID].Formatted; got != "formatting ext4" {
		t.Errorf("recorded %q", got)
	}
	w.disk.idle = false
	succeeds(t, "stage", w.stageErr())
}

func TestStagedWithOtherArgumentsAlreadyExists(t *testing.T) {
	w := newNodeWorld(t)
	w.stage = stageOf("ext4", "noatime", `context="system_u:object_r:container_file_t:s0:c1,c2"`)
	succeeds(t, "stage", w.stageErr())
	succeeds(t, "the same again", w.stageErr())
	for what, other := range map[string]*csi.NodeStageVolumeRequest{
		"another file system":    stageOf("xfs", "noatime"),
		"other options":          stageOf("ext4", `context="system_u:object_r:container_file_t:s0:c1,c2"`),
		"another SELinux label":  stageOf("ext4", "noatime", `context="system_u:object_r:container_file_t:s0:c3,c4"`),
		"without that label":     stageOf("ext4", "noatime"),
		"with one option more":   stageOf("ext4", "noatime", "nodev", `context="system_u:object_r:container_file_t:s0:c1,c2"`),
		"read-only, by its mode": {VolumeId: volumeID, StagingTargetPath: "/staging/db1", PublishContext: w.stage.PublishContext, VolumeCapability: mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, "ext4", "noatime")},
	} {
		w.stage = other
		refused(t, what, w.stageErr(), codes.AlreadyExists)
	}
}

func TestASharedVolumeIsMountedWithoutAWrite(t *testing.T) {
	for _, fsType := range fileSystems {
		w := newNodeWorld(t)
		w.disk.start, w.disk.readOnly = encode(fsType, otherID, 512*mib, true), true
		w.disk.fsck = mount.Result{Code: 4} // must not be asked for
		w.records.set(volumeID, func(v *pb.Volume) { v.Attachment.Mode = pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY })
		w.stage.PublishContext = publication{volume: "db1", epoch: 1, mode: pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY}.context()
		w.stage.VolumeCapability = mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, "", "rw")
		refused(t, "stage with rw", w.stageErr(), codes.InvalidArgument, "rw")
		w.stage.VolumeCapability = mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, "")
		succeeds(t, "stage", w.stageErr())
		m, _ := w.mountedAt("/staging/db1")
		if !m.ReadOnly() {
			t.Errorf("%s is mounted with %v and %v, want ro", fsType, m.Options, m.Super)
		}
		w.publish = publishOf(w.stage, "/pods/p1")
		succeeds(t, "publish", w.publishErr())
		if m, _ := w.mountedAt("/pods/p1"); !m.ReadOnly() {
			t.Error("the target is writable")
		}
	}
}

// A claim for writing whose volume was sealed is attached for reading, and only pods that ask for that get it.
func TestAClaimOfASealedVolumeIsReadOnly(t *testing.T) {
	for name, capability := range map[string]*csi.VolumeCapability{
		"file system": mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, "ext4"),
		"raw device":  blockCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
	} {
		w := newNodeWorld(t)
		w.disk.start = encode("ext4", otherID, 512*mib, true)
		w.readers("")
		w.stage.VolumeCapability = capability
		succeeds(t, name+": stage", w.stageErr())
		w.publish = publishOf(w.stage, "/pods/p1")
		refused(t, name+": publish for writing", w.publishErr(), codes.FailedPrecondition, "sealed", "readOnly: true")
		if _, ok := w.mountedAt("/pods/p1"); ok {
			t.Errorf("%s: a pod that writes has a sealed volume", name)
		}
		w.publish.Readonly = true
		succeeds(t, name+": publish for reading", w.publishErr())
		if m, ok := w.mountedAt("/pods/p1"); !ok || !m.ReadOnly() {
			t.Errorf("%s: the target is %+v", name, m)
		}
	}
}

// readers attaches the volume to nodes that share it for reading.
func (w *nodeWorld) readers(fsType string) {
	w.disk.readOnly = true
	w.records.set(volumeID, func(v *pb.Volume) { v.Attachment.Mode = pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY })
	w.stage.PublishContext = publication{volume: "db1", epoch: 1, mode: pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY}.context()
	w.stage.VolumeCapability = mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, fsType)
}

// Readers never see a file system without its writer's synced data, nor does one of many replay the
// journal.
func TestReadersAreRefusedAJournal(t *testing.T) {
	for _, fsType := range fileSystems {
		w := newNodeWorld(t)
		w.disk.start, w.disk.dirty = encode(fsType, otherID, 512*mib, true), true
		w.readers("")
		refused(t, "stage", w.stageErr(), codes.FailedPrecondition, "journal", "ReadWriteOnce", "detach")
		w.disk.readOnly = false
		refused(t, "stage, and the device takes writes", w.stageErr(), codes.FailedPrecondition, "accepts writes")
		if !w.disk.dirty {
			t.Errorf("%s: a reader replayed the journal", fsType)
		}
		w.kernel.nothingMounted(t)
		w.disk.readOnly, w.disk.dirty = true, false // another node has had it
		succeeds(t, "stage", w.stageErr())
	}
}

func TestNothingIsMadeOnASharedVolume(t *testing.T) {
	w := newNodeWorld(t)
	w.readers("ext4")
	refused(t, "stage", w.stageErr(), codes.FailedPrecondition, "no file system")
}

// A raw volume's data may be where the driver does not look. So its use is recorded before its
// device becomes writable.
func TestNothingIsMadeOnWhatWasARawDevice(t *testing.T) {
	for _, recorded := range []string{"", "formatting ext4"} {
		w := newNodeWorld(t)
		w.records.volumes[volumeID].Formatted = recorded
		asFileSystem := w.stage
		w.stage = proto.CloneOf(w.stage)
		w.stage.VolumeCapability = blockCapability(anyWriter)
		w.records.down = status.Error(codes.Unavailable, "no manager")
		refused(t, "stage raw, without a record", w.stageErr(), codes.Unavailable)
		w.records.down = nil
		succeeds(t, "stage raw", w.stageErr())
		if got := w.records.volumes[volumeID].Formatted; got != "raw" {
			t.Fatalf("recorded is %q", got)
		}
		w.stage = asFileSystem
		refused(t, "stage", w.stageErr(), codes.FailedPrecondition, "raw device", "weft volume set db1 --formatted none")
		w.disk.start = mounttest.Ext4(otherID, 512*mib, true)
		succeeds(t, "stage what somebody has made on it", w.stageErr())
		if got := w.records.volumes[volumeID].Formatted; got != "ext4" || w.formats() > 0 {
			t.Errorf("recorded is %q, and %d file systems were made", got, w.formats())
		}
	}
}

// While the node decides, an operator may attach the volume by hand.
func TestWhatBecameRawMeanwhileIsNotFormatted(t *testing.T) {
	for _, recorded := range []string{"", "formatting ext4"} {
		w := newNodeWorld(t)
		w.records.volumes[volumeID].Formatted = recorded
		w.records.fail = func(call string) error {
			if call == "UpdateVolume" {
				w.records.volumes[volumeID].Formatted = "raw"
			}
			return nil
		}
		refused(t, "stage", w.stageErr(), codes.FailedPrecondition, "raw")
		if w.formats() > 0 {
			t.Error("it was formatted")
		}
	}
}

func TestStageGrowsTheFileSystem(t *testing.T) {
	w := newNodeWorld(t)
	w.disk.start = mounttest.XFS(volumeID, 256*mib, false)
	w.records.volumes[volumeID].Formatted = "xfs"
	w.stage = stageOf("xfs")
	succeeds(t, "stage", w.stageErr())
	if s, _ := mount.ParseSuperblock(w.disk.start[:]); s.Bytes != w.disk.size {
		t.Errorf("the file system has %d bytes, its device %d", s.Bytes, w.disk.size)
	}
}

func TestExt4GrowsBeforeTheMountWhereItCanNotAfter(t *testing.T) {
	w := newNodeWorld(t)
	w.kernel.bound = true
	w.disk.start = mounttest.Ext4(volumeID, 256*mib, true)
	w.records.volumes[volumeID].Formatted = "ext4"
	succeeds(t, "stage", w.stageErr())
	if s, _ := mount.ParseSuperblock(w.disk.start[:]); s.Bytes != w.disk.size {
		t.Errorf("the file system has %d bytes, its device %d", s.Bytes, w.disk.size)
	}
	w.kernel.mu.Lock()
	w.disk.size = 1024 * mib
	w.kernel.mu.Unlock()
	_, err := w.node.NodeExpandVolume(callContext(t, 10*time.Second), &csi.NodeExpandVolumeRequest{VolumeId: volumeID, VolumePath: "/staging/db1"})
	refused(t, "expand in use", err, codes.FailedPrecondition, "SYS_RESOURCE", "staged next")
	succeeds(t, "stage again", w.stageErr())
}

func TestAFileSystemThatIsLiveElsewhereIsNotTouched(t *testing.T) {
	w := newNodeWorld(t)
	w.disk.start = mounttest.Ext4(volumeID, 512*mib, true)
	w.disk.fsck = mount.Result{Code: 8} // as for a mounted one
	w.kernel.elsewhere[w.disk.number] = []string{`process 7 ("pause") has it mounted on /data`}
	succeeds(t, "stage", w.stageErr())
	if w.formats() > 0 || slices.Contains(w.kernel.ran, "e2fsck") {
		t.Errorf("ran %v", w.kernel.ran)
	}
}

func TestMkfsThatHangsKeepsTheVolumeAndItsOutcomeIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newNodeWorld(t)
		gate := make(chan struct{})
		w.kernel.hang["mkfs.ext4"] = gate
		w.kernel.hang["blkid"] = nil
		_, err := w.node.NodeStageVolume(callContext(t, 50*time.Millisecond), w.stage)
		refused(t, "stage", err, codes.DeadlineExceeded, "ext4", "continues")
		refused(t, "stage again", w.stageErr(), codes.Aborted, "NodeStageVolume")
		refused(t, "unstage", w.unstageErr(), codes.Aborted, "NodeStageVolume")
		close(gate)
		until(t, "the first call's work ends", func() bool {
			w.node.ops.mu.Lock()
			defer w.node.ops.mu.Unlock()
			return len(w.node.ops.under) == 0
		})
		if got := w.records.volumes[volumeID].Formatted; got != "ext4" {
			t.Errorf("recorded %q, though its call had ended: an mkfs that takes longer than a call would be made for ever", got)
		}
		succeeds(t, "stage", w.stageErr())
		if n := w.formats(); n != 1 {
			t.Errorf("%d file systems made, want 1", n)
		}
	})
}

func TestAnMkfsThatHangsStopsOtherVolumesAsLongAsItsCallerWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newNodeWorld(t)
		gate := make(chan struct{})
		w.kernel.hang["mkfs.xfs"] = gate
		hung := make(chan error)
		for i := range mostMaking {
			req := w.addVolume(fmt.Sprintf("7d0f3a52-2b1c-4f7e-8a55-%012d", i), fmt.Sprintf("hangs%d", i), "xfs")
			go func() {
				_, err := w.node.NodeStageVolume(callContext(t, 10*time.Second), req)
				hung <- err
			}()
		}
		synctest.Wait()
		_, err := w.node.NodeStageVolume(callContext(t, time.Second), w.stage)
		refused(t, "stage of one more", err, codes.DeadlineExceeded, "other file systems that are being made")
		for range mostMaking {
			refused(t, "stage", <-hung, codes.DeadlineExceeded, "make xfs on /dev/weft/hangs", "continues")
		}
		succeeds(t, "stage of one more when the callers have gone", w.stageErr())
		close(gate)
		synctest.Wait()
		if n := w.formats(); n != mostMaking+1 || len(w.node.making) != 0 {
			t.Errorf("%d file systems made and %d places taken, want %d and none", n, len(w.node.making), mostMaking+1)
		}
	})
}

// until waits for something that is about to happen.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(10 * time.Second)
	for !is() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%s: not after 10 s", what)
		}
	}
}

func TestTheOptionsOfMkfs(t *testing.T) {
	v := &pb.Volume{Id: volumeID, SizeBytes: 1 << 40, Layout: &pb.Layout{Stripes: 4, Copies: 2, ChunkBytes: 128 << 10}}
	single := &pb.Volume{Id: volumeID, SizeBytes: 1 << 40, Layout: &pb.Layout{Stripes: 1, Copies: 2, ChunkBytes: 128 << 10}}
	small := &pb.Volume{Id: volumeID, SizeBytes: 1 << 29, Layout: v.Layout}
	cases := []struct {
		fsType  string
		volume  *pb.Volume
		fresh   bool
		version string
		want    string
	}{
		{"ext4", v, true, "mke2fs 1.47.0 (5-Feb-2023)", "mkfs.ext4 -q -F -b 4096 -m 0 -U ID -E nodiscard,stride=32,stripe_width=128,assume_storage_prezeroed=1 -O ^orphan_file {}"},
		{"ext4", single, false, "mke2fs 1.47.2 (1-Jan-2025)", "mkfs.ext4 -q -F -b 4096 -m 0 -U ID -E nodiscard,lazy_itable_init=1,lazy_journal_init=0 -O ^orphan_file {}"},
		{"ext4", single, true, "mke2fs 1.46.5 (30-Dec-2021)", "mkfs.ext4 -q -F -b 4096 -m 0 -U ID -E nodiscard,lazy_itable_init=1,lazy_journal_init=0 {}"},
		{"xfs", v, true, "", "mkfs.xfs -q -f -K -m uuid=ID -d su=131072,sw=4 {}"},
		{"xfs", small, true, "", "mkfs.xfs -q -f -K -m uuid=ID -d noalign {}"},
		{"xfs", single, true, "", "mkfs.xfs -q -f -K -m uuid=ID {}"},
	}
	for _, c := range cases {
		program, args := mkfs(c.fsType, c.volume, c.fresh, parseE2fsVersion(c.version))
		want := strings.ReplaceAll(c.want, "ID", volumeID)
		if got := strings.Join(append([]string{program}, args...), " "); got != want {
			t.Errorf("mkfs(%s, %v, %v, %q) =\n%s, want\n%s", c.fsType, c.volume.Layout, c.fresh, c.version, got, want)
		}
	}
}

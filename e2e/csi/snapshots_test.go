// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"weft.dev/weft/csi"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// A file system is snapshotted and cloned while a pod writes it. Both clones are mounted for writing
// beside it, on the same node: their journals are replayed, what was synced is there, and a larger
// clone has a larger file system. So it is for volumes that are thin, and for those that are not.
func TestClonesOfAFileSystemInUseAreMountedBesideIt(t *testing.T) {
	needDevices(t)
	for fsType, parameters := range map[string]map[string]string{"ext4": {"thin": "true"}, "xfs": {}} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			clonesBesideTheirOrigin(t, fsType, parameters)
		})
	}
}

func clonesBesideTheirOrigin(t *testing.T, fsType string, parameters map[string]string) {
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1"})
	controller := c.controller(csi.Config{})
	const size = 320 * block.MiB
	data := func(p *podVolume) string { return filepath.Join(p.target, "data") }
	origin := c.mountedFrom(controller, fsType, parameters, nil, size)
	syncFile(t, data(origin), "first")
	snapshot, err := controller.CreateSnapshot(within(t, 60*time.Second), &spec.CreateSnapshotRequest{SourceVolumeId: origin.id, Name: unique("snap")})
	if err != nil || !snapshot.Snapshot.ReadyToUse {
		t.Fatalf("CreateSnapshot = %v, %v", snapshot, err)
	}
	id := snapshot.Snapshot.SnapshotId
	syncFile(t, data(origin), "second")

	restored := c.mountedFrom(controller, fsType, parameters, &spec.VolumeContentSource{Type: &spec.VolumeContentSource_Snapshot{
		Snapshot: &spec.VolumeContentSource_SnapshotSource{SnapshotId: id},
	}}, 2*size)
	cloned := c.mountedFrom(controller, fsType, parameters, &spec.VolumeContentSource{Type: &spec.VolumeContentSource_Volume{
		Volume: &spec.VolumeContentSource_VolumeSource{VolumeId: origin.id},
	}}, size)
	for p, want := range map[*podVolume]string{origin: "second", restored: "first", cloned: "second"} {
		if got, err := os.ReadFile(data(p)); err != nil || string(got) != want {
			t.Errorf("%s holds %q, %v; want %q", p.id, got, err, want)
		}
		syncFile(t, filepath.Join(p.target, "mine"), p.id)
	}
	if is := totalSize(t, restored.target); is < size*3/2 {
		t.Errorf("the larger clone's file system has %v", is)
	}
	all, err := c.manager.ListVolumes(t.Context(), &pb.ListVolumesRequest{Snapshots: true})
	kept := slices.DeleteFunc(all.GetVolumes(), func(v *pb.Volume) bool { return v.State == pb.VolumeState_VOLUME_STATE_DELETING })
	if err != nil || len(kept) != 1 || kept[0].Id != id {
		t.Errorf("snapshots are %v, %v; want the one that was asked for", kept, err)
	}
	for _, p := range []*podVolume{origin, restored, cloned} {
		if got, err := os.ReadFile(filepath.Join(p.target, "mine")); err != nil || string(got) != p.id {
			t.Errorf("%s holds %q, %v", p.id, got, err)
		}
		p.unmount()
		p.detach()
		if _, err := controller.DeleteVolume(within(t, 30*time.Second), &spec.DeleteVolumeRequest{VolumeId: p.id}); err != nil {
			t.Errorf("DeleteVolume = %v", err)
		}
	}
	c.nothingMounted()
	if _, err := controller.DeleteSnapshot(within(t, 30*time.Second), &spec.DeleteSnapshotRequest{SnapshotId: id}); err != nil {
		t.Errorf("DeleteSnapshot = %v", err)
	}
	c.nothingLeft()
}

// mountedFrom creates a volume that begins as another one, or as zeroes, and mounts it on n1.
func (c *cluster) mountedFrom(controller spec.ControllerClient, fsType string, parameters map[string]string, from *spec.VolumeContentSource, size block.Size) *podVolume {
	c.t.Helper()
	writer := fileSystem(spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, fsType)
	parameters = maps.Clone(parameters)
	maps.Copy(parameters, map[string]string{"stripes": "1", "copies": "2"})
	v, err := controller.CreateVolume(within(c.t, 30*time.Second), &spec.CreateVolumeRequest{
		Name: unique("pvc"), VolumeCapabilities: []*spec.VolumeCapability{writer}, VolumeContentSource: from,
		CapacityRange: &spec.CapacityRange{RequiredBytes: int64(size)},
		Parameters:    parameters,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	p := c.onNode("n1", controller, v.Volume.VolumeId, writer)
	p.attach()
	p.mount()
	return p
}

// totalSize is the size of a mounted file system.
func totalSize(t *testing.T, path string) block.Size {
	t.Helper()
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		t.Fatal(err)
	}
	return block.Size(s.Blocks) * block.Size(s.Bsize)
}

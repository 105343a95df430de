// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/pb"
)

func TestCreateVolumeFromASnapshotCodes(t *testing.T) {
	set := func(key, value string) func(*csi.CreateVolumeRequest) {
		return func(r *csi.CreateVolumeRequest) { r.Parameters[key] = value }
	}
	rack := func(value string) func(*csi.CreateVolumeRequest) {
		return func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{topologyPrefix + "rack": value}}}}
		}
	}
	nothing := func(r *csi.CreateVolumeRequest) { r.Parameters, r.CapacityRange = nil, nil }
	limited := func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: 1 << 29} }
	readers := func(r *csi.CreateVolumeRequest) {
		r.VolumeCapabilities = []*csi.VolumeCapability{capability(manyReaders, "", false)}
	}
	writers := func(r *csi.CreateVolumeRequest) {
		r.VolumeCapabilities = []*csi.VolumeCapability{capability(manyWriters, "", true)}
	}
	xfs := func(r *csi.CreateVolumeRequest) {
		r.VolumeCapabilities = []*csi.VolumeCapability{capability(multiWriter, "xfs", false)}
	}
	const size = 1 << 30
	for _, test := range []struct {
		name   string
		change func(*csi.CreateVolumeRequest)
		want   codes.Code
		says   string
		size   uint64
	}{
		{"the class of its origin", set("copies", "2"), codes.OK, "", size},
		{"no parameters and no size", nothing, codes.OK, "", size},
		{"less than its size", sized(size / 2), codes.OK, "", size},
		{"more", sized(2*size + 1), codes.OK, "", 2*size + 1<<20},
		{"a limit below", limited, codes.OutOfRange, "limit_bytes", 0},
		{"readers alone", readers, codes.OK, "", size},
		{"writers on many nodes", writers, codes.InvalidArgument, "one copy; this one has 2", 0},
		{"more copies", set("copies", "3"), codes.InvalidArgument, "parameters: copies: 3", 0},
		{"fewer copies", set("copies", "1"), codes.OK, "", size},
		{"other columns", set("stripes", "4"), codes.InvalidArgument, "parameters: stripes: 4", 0},
		{"other chunks", set("chunkSize", "1MiB"), codes.InvalidArgument, "parameters: chunkSize", 0},
		{"another pool", set("pool", "gold"), codes.InvalidArgument, "parameters: pool: gold", 0},
		{"another spread", set("spread", "rack"), codes.InvalidArgument, "parameters: spread: rack", 0},
		{"checksums", set("integrity", "true"), codes.InvalidArgument, "parameters: integrity", 0},
		{"a volume that is not thin", set("thin", "false"), codes.InvalidArgument, "parameters: thin", 0},
		{"another file system", xfs, codes.InvalidArgument, "has ext4", 0},
		{"the place of its legs", rack("r1"), codes.OK, "", size},
		{"another place", rack("r2"), codes.ResourceExhausted, "has a leg on n1", 0},
		{"no room", sized(61 << 30), codes.OutOfRange, "even when it is empty", 0},
		{"a volume's id", fromSnapshot(firstID), codes.InvalidArgument, "no snapshot", 0},
		{"an id of nothing", fromSnapshot("none"), codes.NotFound, "volume_content_source", 0},
		{"no id", fromSnapshot(""), codes.InvalidArgument, "snapshot_id", 0},
		{"a source of no kind", func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} }, codes.InvalidArgument, "volume_content_source", 0},
	} {
		m := snapshotted(t)
		m.nodes[0].Labels = map[string]string{"rack": "r1"}
		m.volumes[snapshotID].Formatted = "ext4"
		got, err := testController(m).CreateVolume(t.Context(), createRequest("pvc-2", fromSnapshot(snapshotID), test.change))
		if status.Code(err) != test.want || err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("CreateVolume from a snapshot with %s = %v, want %v that says %q", test.name, err, test.want, test.says)
		}
		if err != nil {
			continue
		}
		v := m.volumes[got.Volume.VolumeId]
		if v.CloneOf != "pvc-1@snap-1" || v.SizeBytes != test.size || got.Volume.CapacityBytes != int64(test.size) || got.Volume.ContentSource.GetSnapshot().GetSnapshotId() != snapshotID {
			t.Errorf("CreateVolume from a snapshot with %s = %v (%v), want %d bytes", test.name, got, v, test.size)
		}
	}
}

// A request that is repeated finds its volume also when its source is gone, and another source is
// another request.
func TestCreateVolumeFromASnapshotAgain(t *testing.T) {
	m := snapshotted(t)
	s := testController(m)
	first, err := s.CreateVolume(t.Context(), createRequest("pvc-2", fromSnapshot(snapshotID)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshotID}); err != nil {
		t.Fatal(err)
	}
	settled(t, m)
	if got, err := s.CreateVolume(t.Context(), createRequest("pvc-2", fromSnapshot(snapshotID))); err != nil || got.Volume.VolumeId != first.Volume.VolumeId {
		t.Errorf("CreateVolume again, without its snapshot = %v, %v; want %v", got, err, first)
	}
	for name, change := range map[string]func(*csi.CreateVolumeRequest){
		"no source": func(*csi.CreateVolumeRequest) {}, "another kind of source": fromVolume(snapshotID), "another source": fromSnapshot(firstID),
	} {
		if _, err := s.CreateVolume(t.Context(), createRequest("pvc-2", change)); status.Code(err) != codes.AlreadyExists {
			t.Errorf("CreateVolume again with %s = %v, want AlreadyExists", name, err)
		}
	}
}

// The snapshot that is taken for a clone of a volume is there until the clone is whole, and no longer.
func TestACloneOfAVolumeLeavesNoSnapshot(t *testing.T) {
	thick := func(m *fakeManager) { m.volumes[firstID].Thin = false }
	summed := func(m *fakeManager) { m.volumes[firstID].Layout.Integrity = true }
	for _, test := range []struct {
		name    string
		prepare func(*fakeManager)
		change  func(*csi.CreateVolumeRequest)
		want    codes.Code
		left    []string
	}{
		{"that is made", nil, sized(2 << 30), codes.OK, []string{"pvc-1", "pvc-2"}},
		{"that has no room", nil, sized(61 << 30), codes.OutOfRange, []string{"pvc-1"}},
		{"of one that is not thin", thick, sized(1 << 30), codes.OK, []string{"pvc-1", "pvc-2"}},
		{"of one with checksums", summed, sized(1 << 30), codes.InvalidArgument, []string{"pvc-1"}},
		{"with another layout", nil, func(r *csi.CreateVolumeRequest) { r.Parameters["copies"] = "3" }, codes.InvalidArgument, []string{"pvc-1"}},
		{"whose snapshot fails", func(m *fakeManager) { m.broken = "it took too long" }, sized(1 << 30), codes.Aborted, []string{"pvc-1"}},
	} {
		m := newFakeManager()
		walked(t, m, 1)
		if test.prepare != nil {
			test.prepare(m)
		}
		got, err := testController(m).CreateVolume(t.Context(), createRequest("pvc-2", fromVolume(firstID), test.change))
		if status.Code(err) != test.want || err == nil && got.Volume.ContentSource.GetVolume().GetVolumeId() != firstID {
			t.Errorf("a clone %s = %v, %v; want %v", test.name, got, err, test.want)
		}
		if left := m.names(); !slices.Equal(left, test.left) {
			t.Errorf("a clone %s leaves %v, want %v", test.name, left, test.left)
		}
	}
}

// cutClone makes a clone until the manager has carried out a call of this method, and no further. What
// is left is two hours old.
func cutClone(t *testing.T, method string) *fakeManager {
	t.Helper()
	m := newFakeManager()
	walked(t, m, 1)
	seen := false
	m.fate = func(_ int, called string) fate {
		switch {
		case seen:
			return requestLost
		case called == method:
			seen = true
			return replyLost
		}
		return delivered
	}
	if _, err := testController(m).CreateVolume(t.Context(), createRequest("pvc-2", fromVolume(firstID))); err == nil {
		t.Fatal("a clone that is cut succeeds")
	}
	m.fate = nil
	for _, v := range m.volumes {
		v.Created = timestamppb.New(time.Now().Add(-2 * leftoverAge))
		if v.Snapshot != nil && v.State == pb.VolumeState_VOLUME_STATE_CREATING {
			m.step(v)
		}
	}
	if len(m.names()) < 2 {
		t.Fatalf("only %v are left", m.names())
	}
	return m
}

// The CO gives up a clone that was cut between its steps: what it leaves goes with the clone, with the
// next clone of the volume a while later, or with the volume.
func TestWhatACutCloneLeavesGoes(t *testing.T) {
	t.Run("with the clone", func(t *testing.T) {
		m := cutClone(t, "CreateVolume") // it is being created, so that the manager keeps its snapshot
		if _, err := testController(m).DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: restoredID}); err != nil {
			t.Fatal(err)
		}
		if got := m.names(); !slices.Equal(got, []string{"pvc-1"}) {
			t.Errorf("left are %v", got)
		}
	})
	t.Run("with another clone", func(t *testing.T) {
		m := cutClone(t, "CreateSnapshots")
		if _, err := testController(m).CreateVolume(t.Context(), createRequest("pvc-3", fromVolume(firstID))); err != nil {
			t.Fatal(err)
		}
		if got := m.names(); !slices.Equal(got, []string{"pvc-1", "pvc-3"}) {
			t.Errorf("left are %v", got)
		}
	})
	t.Run("but not while it is made, nor soon", func(t *testing.T) {
		m := cutClone(t, "CreateSnapshots")
		s := testController(m)
		end, err := s.ops.start("pvc-2", "CreateVolume")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.CreateVolume(t.Context(), createRequest("pvc-3", fromVolume(firstID))); err != nil || len(m.names()) != 3 {
			t.Errorf("another clone = %v and %v are left, want the snapshot of the first one too", err, m.names())
		}
		end()
		m.volumes[snapshotID].Created = timestamppb.Now()
		if _, err := s.CreateVolume(t.Context(), createRequest("pvc-4", fromVolume(firstID))); err != nil || len(m.names()) != 4 {
			t.Errorf("another clone = %v and %v are left, want the snapshot of the first one too", err, m.names())
		}
	})
	t.Run("with the volume", func(t *testing.T) {
		m := cutClone(t, "CreateSnapshots")
		if _, err := testController(m).DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: firstID}); err != nil {
			t.Fatal(err)
		}
		if got := m.names(); len(got) > 0 {
			t.Errorf("left are %v", got)
		}
	})
}

// Somebody reads the snapshot of a clone by hand: the clone is whole, and must not seem to have failed.
func TestACloneWhoseSnapshotIsInUseIsMade(t *testing.T) {
	m := newFakeManager()
	walked(t, m, 1)
	m.fail = func(method string) error {
		if method == "DeleteVolume" {
			return refusedFor("ATTACHED", "attached to n1")
		}
		return nil
	}
	if _, err := testController(m).CreateVolume(t.Context(), createRequest("pvc-2", fromVolume(firstID))); err != nil {
		t.Errorf("CreateVolume = %v", err)
	}
}

// A leg that a volume has moved away from, and that its drive keeps because of snapshots, is not where a clone
// will be, nor is one that is not in sync.
func TestACloneIsNotRefusedBecauseOfLegsThatItDoesNotGet(t *testing.T) {
	m := snapshotted(t)
	m.nodes[0].Labels = map[string]string{"rack": "r1"}
	v := m.volumes[firstID]
	v.Thin = false
	var here []*pb.Leg
	for _, l := range v.Legs {
		l.Node, l.State = m.nodes[0].Name, pb.LegState_LEG_STATE_IN_SYNC
		here = append(here, l)
	}
	for _, state := range []pb.LegState{pb.LegState_LEG_STATE_DELETING, pb.LegState_LEG_STATE_STALE} {
		other := proto.CloneOf(v.Legs[0])
		other.Node, other.State = "elsewhere", state
		here = append(here, other)
	}
	v.Legs = here
	request := createRequest("pvc-2", fromVolume(firstID), func(r *csi.CreateVolumeRequest) {
		r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{topologyPrefix + "rack": "r1"}}}}
	})
	v.Legs[0].Node = "elsewhere"
	if _, err := testController(m).CreateVolume(t.Context(), request); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("with a leg in sync elsewhere = %v", err)
	}
	v.Legs[0].Node = m.nodes[0].Name
	if _, err := testController(m).CreateVolume(t.Context(), request); err != nil {
		t.Error(err)
	}
}

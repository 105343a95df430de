// SPDX-License-Identifier: Apache-2.0

package csi

import (
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

	"weft.dev/weft/proto/pb"
)

func fromSnapshot(id string) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = contentSource{kindSnapshot, id}.csi() }
}

func fromVolume(id string) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = contentSource{kindVolume, id}.csi() }
}

func sized(required int64) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: required} }
}

func snapshotRequest(name string) *csi.CreateSnapshotRequest {
	return &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: name}
}

// snapshotted is a manager with the first volume of the walk and a snapshot of it.
func snapshotted(t *testing.T) *fakeManager {
	t.Helper()
	m := newFakeManager()
	walked(t, m, 1)
	if _, err := testController(m).CreateSnapshot(t.Context(), snapshotRequest("snap-1")); err != nil {
		t.Fatal(err)
	}
	m.calls = nil
	return m
}

// names are those of the volumes that are not being deleted.
func (m *fakeManager) names() (all []string) {
	for _, v := range m.volumes {
		if v.State != pb.VolumeState_VOLUME_STATE_DELETING {
			all = append(all, v.Name)
		}
	}
	slices.Sort(all)
	return all
}

func TestASnapshotSaysWhatItIs(t *testing.T) {
	m := snapshotted(t)
	got, err := testController(m).CreateSnapshot(t.Context(), snapshotRequest("snap-1"))
	if err != nil {
		t.Fatal(err)
	}
	s, v := got.Snapshot, m.volumes[snapshotID]
	if s.SnapshotId != snapshotID || s.SourceVolumeId != firstID || s.SizeBytes != 1<<30 || !s.ReadyToUse || !s.CreationTime.AsTime().Equal(v.Snapshot.Taken.AsTime()) {
		t.Errorf("CreateSnapshot = %v, want that of %v", s, v)
	}
	if v.Name != "pvc-1@snap-1" {
		t.Errorf("its name is %q", v.Name)
	}
	odd := strings.Repeat("Ä ", 64)
	if _, err := testController(m).CreateSnapshot(t.Context(), snapshotRequest(odd)); err != nil {
		t.Errorf("CreateSnapshot of a long name with other characters = %v", err)
	}
}

func TestCreateSnapshotCodes(t *testing.T) {
	of := func(id, name string) *csi.CreateSnapshotRequest {
		return &csi.CreateSnapshotRequest{SourceVolumeId: id, Name: name}
	}
	second, third := "00000000-0000-4000-8000-000000000003", "00000000-0000-4000-8000-000000000033"
	for _, test := range []struct {
		name string
		r    *csi.CreateSnapshotRequest
		want codes.Code
		says string
	}{
		{"no source", of("", "s"), codes.InvalidArgument, "source_volume_id"},
		{"no name", of(firstID, ""), codes.InvalidArgument, "name"},
		{"a parameter", &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: "s", Parameters: map[string]string{"fast": "true"}}, codes.InvalidArgument, "fast"},
		{"a parameter with no such value", &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: "s", Parameters: map[string]string{"freeze": "yes"}}, codes.InvalidArgument, "freeze"},
		{"a parameter of groups", &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: "s", Parameters: map[string]string{"deletionPolicy": "Delete"}}, codes.InvalidArgument, "deletionPolicy"},
		{"frozen file systems", &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: "s", Parameters: map[string]string{"freeze": "true"}}, codes.OK, ""},
		{"what was taken without", &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: "snap-1", Parameters: map[string]string{"freeze": "true"}}, codes.AlreadyExists, "without freezing"},
		{"what the sidecar says", &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: "s", Parameters: map[string]string{"csi.storage.k8s.io/volumesnapshot/name": "a"}}, codes.OK, ""},
		{"a source that is not", of("00000000-0000-4000-8000-00000000000f", "s"), codes.NotFound, ""},
		{"a source that is a snapshot", of(snapshotID, "s"), codes.InvalidArgument, "snapshot itself"},
		{"the name of another volume's snapshot", of(second, "snap-1"), codes.AlreadyExists, firstID},
		{"a volume that is not thin", of(second, "s"), codes.OK, ""},
		{"a volume with checksums", of(third, "s"), codes.FailedPrecondition, "without parameter integrity"},
	} {
		m := snapshotted(t)
		if _, err := testController(m).CreateVolume(t.Context(), createRequest("thick", func(r *csi.CreateVolumeRequest) { delete(r.Parameters, "thin") })); err != nil {
			t.Fatal(err)
		}
		summed := proto.CloneOf(m.volumes[second])
		summed.Id, summed.Name, summed.Layout.Integrity = third, "summed", true
		m.volumes[third] = summed
		_, err := testController(m).CreateSnapshot(t.Context(), test.r)
		if status.Code(err) != test.want || err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("CreateSnapshot with %s = %v, want %v that says %q", test.name, err, test.want, test.says)
		}
	}
}

// A snapshot that could not be taken is no answer to anybody: the same call begins another one, also
// while the first one still has its name.
func TestCreateSnapshotAfterAFailedOne(t *testing.T) {
	for _, keeps := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeManager()
			walked(t, m, 1)
			m.broken, m.keeps = "host n1 held its I/O for 2s, which was not enough", keeps
			for range 2 {
				_, err := testController(m).CreateSnapshot(t.Context(), snapshotRequest("snap-1"))
				if status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), m.broken) {
					t.Errorf("CreateSnapshot that fails = %v, want Aborted with the reason", err)
				}
			}
			m.broken = ""
			got, err := testController(m).CreateSnapshot(t.Context(), snapshotRequest("snap-1"))
			if err != nil || !got.Snapshot.ReadyToUse || m.volumes[got.Snapshot.SnapshotId].Failed != "" {
				t.Errorf("CreateSnapshot after failed ones = %v, %v; want one that is ready", got, err)
			}
			m.keeps = false
			settled(t, m)
			again, err := testController(m).CreateSnapshot(t.Context(), snapshotRequest("snap-1"))
			if err != nil || again.Snapshot.SnapshotId != got.Snapshot.SnapshotId {
				t.Errorf("CreateSnapshot again = %v, %v; want %v", again, err, got)
			}
		})
	}
}

// A snapshot is not cut before it is complete, and nothing is answered then.
func TestCreateSnapshotWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newFakeManager()
		walked(t, m, 1)
		m.stuck = true
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := testController(m).CreateSnapshot(ctx, snapshotRequest("snap-1")); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("CreateSnapshot that does not end = %v, want DeadlineExceeded", err)
		}
		m.stuck = false
		got, err := testController(m).CreateSnapshot(t.Context(), snapshotRequest("snap-1"))
		if err != nil || got.Snapshot.SnapshotId != snapshotID {
			t.Errorf("CreateSnapshot again = %v, %v; want the one that was begun", got, err)
		}
	})
}

func TestASnapshotOutlivesItsVolume(t *testing.T) {
	m := snapshotted(t)
	s := testController(m)
	if _, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: firstID}); err != nil {
		t.Fatalf("DeleteVolume of a volume with a snapshot = %v", err)
	}
	settled(t, m)
	if got, err := s.CreateSnapshot(t.Context(), snapshotRequest("snap-1")); err != nil || got.Snapshot.SnapshotId != snapshotID {
		t.Errorf("CreateSnapshot again = %v, %v; want the one that is there", got, err)
	}
	list, err := s.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SourceVolumeId: firstID})
	if err != nil || len(list.Entries) != 1 {
		t.Errorf("ListSnapshots of a volume that is gone = %v, %v; want its snapshot", list, err)
	}
	if _, err := s.CreateVolume(t.Context(), createRequest("pvc-2", fromSnapshot(snapshotID))); err != nil {
		t.Errorf("CreateVolume from it = %v", err)
	}
}

// No id makes a call delete what the call is not for.
func TestDeletesTellVolumesFromSnapshots(t *testing.T) {
	m := snapshotted(t)
	s := testController(m)
	for id, want := range map[string]codes.Code{
		"": codes.InvalidArgument, "never-was": codes.OK, "00000000-0000-4000-8000-00000000000f": codes.OK,
		"pvc-1@snap-1": codes.OK, "pvc-1": codes.OK, // names are no ids
		firstID: codes.InvalidArgument,
	} {
		if _, err := s.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id}); status.Code(err) != want {
			t.Errorf("DeleteSnapshot(%q) = %v, want %v", id, err, want)
		}
	}
	if _, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: snapshotID}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("DeleteVolume of a snapshot = %v, want InvalidArgument", err)
	}
	if got := m.names(); !slices.Equal(got, []string{"pvc-1", "pvc-1@snap-1"}) {
		t.Errorf("there are %v, want both", got)
	}
	m.volumes[snapshotID].Attachment = &pb.Attachment{Node: "n1", State: pb.AttachmentState_ATTACHMENT_STATE_ATTACHED}
	if _, err := s.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshotID}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("DeleteSnapshot of one in use = %v, want FailedPrecondition", err)
	}
}

func TestListAndGetSnapshots(t *testing.T) {
	m := snapshotted(t)
	s := testController(m)
	for i := range 4 {
		if _, err := s.CreateSnapshot(t.Context(), snapshotRequest(fmt.Sprint("s", 9-i))); err != nil {
			t.Fatal(err)
		}
	}
	m.volumes["00000000-0000-4000-8000-000000000004"].Labels = map[string]string{labelClone: "pvc-9"}
	var seen []string
	r := &csi.ListSnapshotsRequest{MaxEntries: 2}
	for {
		page, err := s.ListSnapshots(t.Context(), r)
		if err != nil || len(page.Entries) > 2 {
			t.Fatalf("ListSnapshots(%v) = %v, %v", r, page, err)
		}
		for _, e := range page.Entries {
			seen = append(seen, e.Snapshot.SnapshotId[35:])
		}
		if r.StartingToken = page.NextToken; r.StartingToken == "" {
			break
		}
	}
	if !slices.Equal(seen, []string{"2", "3", "5", "6"}) {
		t.Errorf("pages hold %v, want all by age, without the one for a clone", seen)
	}
	for _, test := range []struct {
		r    *csi.ListSnapshotsRequest
		want int
	}{
		{&csi.ListSnapshotsRequest{SnapshotId: snapshotID}, 1},
		{&csi.ListSnapshotsRequest{SnapshotId: snapshotID, SourceVolumeId: firstID}, 1},
		{&csi.ListSnapshotsRequest{SnapshotId: snapshotID, SourceVolumeId: snapshotID}, 0},
		{&csi.ListSnapshotsRequest{SnapshotId: firstID}, 0},
		{&csi.ListSnapshotsRequest{SnapshotId: "none"}, 0},
		{&csi.ListSnapshotsRequest{SourceVolumeId: firstID}, 4},
		{&csi.ListSnapshotsRequest{SourceVolumeId: "none"}, 0},
	} {
		if got, err := s.ListSnapshots(t.Context(), test.r); err != nil || len(got.Entries) != test.want {
			t.Errorf("ListSnapshots(%v) = %v, %v; want %d", test.r, got, err, test.want)
		}
	}
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "none": codes.NotFound, firstID: codes.NotFound, snapshotID: codes.OK} {
		if got, err := s.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id}); status.Code(err) != want || err == nil && got.Snapshot.SnapshotId != id {
			t.Errorf("GetSnapshot(%q) = %v, %v; want %v", id, got, err, want)
		}
	}
	all, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if err != nil || len(all.Entries) != 1 {
		t.Errorf("ListVolumes = %v, %v; want no snapshots", all, err)
	}
}

func TestASnapshotOfFrozenFileSystems(t *testing.T) {
	r := &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: "s", Parameters: map[string]string{"freeze": "true", "csi.storage.k8s.io/volumesnapshot/name": "a"}}
	for _, old := range []bool{false, true} {
		m := snapshotted(t)
		m.old = old
		a, err := testController(m).CreateSnapshot(t.Context(), r)
		if want := (map[bool]codes.Code{true: codes.AlreadyExists})[old]; status.Code(err) != want {
			t.Fatalf("CreateSnapshot with an old manager %v = %v, want %v", old, err, want)
		}
		if old {
			continue
		}
		v, err := m.find(a.GetSnapshot().GetSnapshotId())
		if _, labelled := v.GetLabels()["freeze"]; err != nil || !v.GetSnapshot().GetFsFrozen() || labelled || v.GetLabels()["csi.storage.k8s.io/volumesnapshot/name"] != "a" {
			t.Errorf("the snapshot is %v, %v", v, err)
		}
		if b, err := testController(m).CreateSnapshot(t.Context(), r); err != nil || b.GetSnapshot().GetSnapshotId() != a.GetSnapshot().GetSnapshotId() {
			t.Errorf("again: %v, %v", b, err)
		}
	}
}

// A snapshot can be gone before the driver has looked at it. The history says why.
func TestTheReasonOfASnapshotThatIsGone(t *testing.T) {
	m := snapshotted(t)
	gone := &pb.Volume{Id: "00000000-0000-4000-8000-00000000000f", Name: "db1@a", State: pb.VolumeState_VOLUME_STATE_CREATING}
	for id, want := range map[string]string{gone.Id: "host h1 has nothing mounted", "of an earlier one": "weft event list"} {
		m.events = []*pb.Event{{Kind: "snapshot.failed", Object: "volume db1@a", Text: "the snapshot was not taken: host h1 has nothing mounted", Attributes: map[string]string{"volume_id": id}}}
		if _, err := testController(m).taken(t.Context(), gone); status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), want) {
			t.Errorf("taken, with an event of %s = %v, want Aborted with %q", id, err, want)
		}
	}
}

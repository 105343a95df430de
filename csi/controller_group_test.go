// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// twoVolumes is a manager with two thin volumes, and their ids.
func twoVolumes(t *testing.T) (*fakeManager, []string) {
	t.Helper()
	m := newFakeManager()
	var ids []string
	for _, name := range []string{"data", "log"} {
		v, err := testController(m).CreateVolume(t.Context(), createRequest(name))
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, v.Volume.VolumeId)
	}
	return m, ids
}

func TestAGroupIsTakenAtOnceAndDeletedAsAWhole(t *testing.T) {
	m, ids := twoVolumes(t)
	s := testController(m)
	r := &csi.CreateVolumeGroupSnapshotRequest{Name: "group-1", SourceVolumeIds: ids, Parameters: map[string]string{"csi.storage.k8s.io/volumegroupsnapshot/name": "a"}}
	m.calls = nil
	got, err := s.CreateVolumeGroupSnapshot(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	g := got.GroupSnapshot
	var of, parts []string
	for _, one := range g.Snapshots {
		of, parts = append(of, one.SourceVolumeId), append(parts, one.SnapshotId)
		if one.GroupSnapshotId != g.GroupSnapshotId || !one.ReadyToUse {
			t.Errorf("a snapshot of the group %s is %v", g.GroupSnapshotId, one)
		}
	}
	if slices.Sort(of); g.GroupSnapshotId == "" || !g.ReadyToUse || g.CreationTime == nil || !slices.Equal(of, ids) {
		t.Errorf("CreateVolumeGroupSnapshot = %v, want one of %v", g, ids)
	}
	if n := strings.Count(strings.Join(m.calls, " "), "CreateSnapshots"); n != 1 {
		t.Errorf("%d calls took the snapshots, want one, since they are of one moment: %v", n, m.calls)
	}
	if again, err := s.CreateVolumeGroupSnapshot(t.Context(), r); err != nil || len(again.GroupSnapshot.Snapshots) != 2 || again.GroupSnapshot.GroupSnapshotId != g.GroupSnapshotId {
		t.Errorf("CreateVolumeGroupSnapshot again = %v, %v; want %v", again, err, g)
	}
	if _, err := s.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: parts[0]}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("DeleteSnapshot of one of a group = %v, want InvalidArgument", err)
	}
	if _, err := s.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{SourceVolumeId: ids[0], Name: "group-1"}); err != nil {
		t.Errorf("CreateSnapshot with the name of a group = %v", err)
	}
	if _, err := s.CreateVolume(t.Context(), createRequest("restored", fromSnapshot(parts[0]))); err != nil {
		t.Errorf("CreateVolume from one of a group = %v", err)
	}
	for range 2 {
		if _, err := s.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: g.GroupSnapshotId, SnapshotIds: parts}); err != nil {
			t.Errorf("DeleteVolumeGroupSnapshot = %v", err)
		}
	}
	if left := m.names(); !slices.Equal(left, []string{"data", "data@group-1", "log", "restored"}) {
		t.Errorf("there are %v", left)
	}
}

func TestGroupCodes(t *testing.T) {
	const none = "00000000-0000-4000-8000-00000000000f"
	m, ids := twoVolumes(t)
	s := testController(m)
	for _, test := range []struct {
		name string
		of   []string
		want codes.Code
	}{
		{"", ids, codes.InvalidArgument},
		{"g", nil, codes.InvalidArgument},
		{"g", []string{ids[0], ""}, codes.InvalidArgument},
		{"g", []string{ids[0], none}, codes.NotFound},
		{"g", []string{ids[0], ids[0]}, codes.OK},
		{"g", ids, codes.AlreadyExists},
		{"h", ids, codes.OK},
	} {
		if _, err := s.CreateVolumeGroupSnapshot(t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: test.name, SourceVolumeIds: test.of}); status.Code(err) != test.want {
			t.Errorf("CreateVolumeGroupSnapshot(%q, %v) = %v, want %v", test.name, test.of, err, test.want)
		}
	}
	for _, parameters := range []map[string]string{{"fast": "true"}, {"deletionPolicy": "Keep"}} {
		if _, err := s.CreateVolumeGroupSnapshot(t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: "i", SourceVolumeIds: ids, Parameters: parameters}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("CreateVolumeGroupSnapshot with %v = %v, want InvalidArgument", parameters, err)
		}
	}
	if _, err := s.CreateVolumeGroupSnapshot(t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: "h", SourceVolumeIds: ids, Parameters: map[string]string{"freeze": "true"}}); status.Code(err) != codes.AlreadyExists {
		t.Errorf("CreateVolumeGroupSnapshot of frozen file systems, where it exists without = %v, want AlreadyExists", err)
	}
	g, h := wantedSnapshot{label: labelGroup, name: "g"}.weftName(1), wantedSnapshot{label: labelGroup, name: "h"}.weftName(1)
	var inG, inH []string
	for _, v := range m.volumes {
		switch groupOf(v) {
		case g:
			inG = append(inG, v.Id)
		case h:
			inH = append(inH, v.Id)
		}
	}
	for _, test := range []struct {
		id     string
		listed []string
		want   codes.Code // of GetVolumeGroupSnapshot
	}{
		{"", inG, codes.InvalidArgument},
		{"none", nil, codes.NotFound},
		{"none", []string{none}, codes.NotFound},
		{g, inH, codes.InvalidArgument},
		{h, inH[:1], codes.InvalidArgument},
		{h, append([]string{none}, inH...), codes.OK},
		{h, nil, codes.OK},
	} {
		if _, err := s.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: test.id, SnapshotIds: test.listed}); status.Code(err) != test.want {
			t.Errorf("GetVolumeGroupSnapshot(%q, %v) = %v, want %v", test.id, test.listed, err, test.want)
		}
		if test.want == codes.OK {
			continue
		}
		want := test.want
		if want == codes.NotFound {
			want = codes.OK
		}
		if _, err := s.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: test.id, SnapshotIds: test.listed}); status.Code(err) != want {
			t.Errorf("DeleteVolumeGroupSnapshot(%q, %v) = %v, want %v", test.id, test.listed, err, want)
		}
	}
	if len(inG)+len(inH) != 3 || len(m.names()) != 5 {
		t.Errorf("there are %v, want the volumes and their three snapshots", m.names())
	}
}

func TestAGroupThatCouldNotBeTakenIsTakenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, ids := twoVolumes(t)
		m.broken, m.keeps = "host n1 held its I/O for 2s, which was not enough", true
		r := &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: ids}
		if _, err := testController(m).CreateVolumeGroupSnapshot(t.Context(), r); status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), m.broken) {
			t.Errorf("CreateVolumeGroupSnapshot that fails = %v, want Aborted with the reason", err)
		}
		for _, v := range m.volumes { // Weft gives up a group as a whole
			if v.Snapshot != nil {
				v.State, v.Failed = pb.VolumeState_VOLUME_STATE_DELETING, m.broken
			}
		}
		m.broken = ""
		if got, err := testController(m).CreateVolumeGroupSnapshot(t.Context(), r); err != nil || len(got.GroupSnapshot.Snapshots) != 2 {
			t.Errorf("CreateVolumeGroupSnapshot after a failed one = %v, %v", got, err)
		}
	})
}

// Kubernetes' own storage suite gives its classes of groups the parameter.
func TestAGroupsClassMayRepeatItsDeletionPolicy(t *testing.T) {
	for _, policy := range []string{"Delete", "Retain"} {
		m, ids := twoVolumes(t)
		r := &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: ids, Parameters: map[string]string{"deletionPolicy": policy}}
		if got, err := testController(m).CreateVolumeGroupSnapshot(t.Context(), r); err != nil || len(got.GroupSnapshot.Snapshots) != 2 {
			t.Errorf("CreateVolumeGroupSnapshot with deletionPolicy %s = %v, %v", policy, got, err)
		}
		for _, v := range m.volumes {
			if _, ok := v.Labels["deletionPolicy"]; ok {
				t.Errorf("%s has the labels %v", v.Name, v.Labels)
			}
		}
	}
}

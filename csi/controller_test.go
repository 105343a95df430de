// SPDX-License-Identifier: Apache-2.0

package csi

import (
	gocmp "cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/pb"
)

// withDetail is an error as the manager makes it.
func withDetail(code codes.Code, text, reason, field string) error {
	var details []protoadapt.MessageV1
	if reason != "" {
		details = append(details, &errdetails.ErrorInfo{Domain: "weft.dev", Reason: reason})
	}
	if field != "" {
		details = append(details, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field}}})
	}
	s, err := status.New(code, text).WithDetails(details...)
	if err != nil {
		panic(err)
	}
	return s.Err()
}

func testController(m pb.ManagerClient, change ...func(*Config)) *controllerServer {
	cfg := Config{Manager: m, Mode: ModeController, DetachGrace: time.Minute}
	for _, f := range change {
		f(&cfg)
	}
	return newController(cfg)
}

func createRequest(name string, change ...func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest {
	r := &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability(multiWriter, "ext4", false)},
		CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 30}, Parameters: map[string]string{"copies": "2", "thin": "true"},
	}
	for _, f := range change {
		f(r)
	}
	return r
}

func publishRequest(id, node string) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: capability(multiWriter, "ext4", false)}
}

// notFinal are the codes after which a CO assumes that an operation may still be under way.
var notFinal = []codes.Code{codes.Unavailable, codes.Aborted, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted}

// walk is a volume's way through the controller: each step is one call, whose answer is the same
// however often it is made.
var walk = []struct {
	rpc  string
	key  string // the operation that it is, if not one on the first volume
	call func(context.Context, *controllerServer) (proto.Message, error)
}{
	{"CreateVolume", "pvc-1", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.CreateVolume(ctx, createRequest("pvc-1"))
	}},
	{"ControllerPublishVolume", "", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.ControllerPublishVolume(ctx, publishRequest(firstID, "n1"))
	}},
	{"ControllerExpandVolume", "", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
			VolumeId: firstID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30}, VolumeCapability: capability(multiWriter, "", true),
		})
	}},
	{"ControllerModifyVolume", "", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{VolumeId: firstID, MutableParameters: map[string]string{"labels.tier": "gold", "copies": "3", "rebuildRate": "100MiB"}})
	}},
	{"CreateSnapshot", "snapshot snap-1", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: firstID, Name: "snap-1"})
	}},
	{"CreateVolume", "pvc-2", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.CreateVolume(ctx, createRequest("pvc-2", fromSnapshot(snapshotID), sized(3<<30)))
	}},
	{"CreateVolume", "pvc-3", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.CreateVolume(ctx, createRequest("pvc-3", fromVolume(firstID), sized(2<<30)))
	}},
	{"DeleteSnapshot", snapshotID, func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshotID})
	}},
	{"DeleteVolume", restoredID, func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: restoredID})
	}},
	{"DeleteVolume", clonedID, func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: clonedID})
	}},
	{"ControllerUnpublishVolume", "", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: firstID, NodeId: "n1"})
	}},
	{"DeleteVolume", "", func(ctx context.Context, s *controllerServer) (proto.Message, error) {
		return s.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: firstID})
	}},
}

// The volumes of the walk, in the order in which they are made; the snapshot for the clone is between
// the last two.
const (
	firstID    = "00000000-0000-4000-8000-000000000001"
	snapshotID = "00000000-0000-4000-8000-000000000002"
	restoredID = "00000000-0000-4000-8000-000000000003"
	clonedID   = "00000000-0000-4000-8000-000000000005"
)

// walked makes the first steps of the walk without interruption.
func walked(t *testing.T, m *fakeManager, steps int) {
	t.Helper()
	for _, step := range walk[:steps] {
		if _, err := step.call(t.Context(), testController(m)); err != nil {
			t.Fatalf("%s = %v", step.rpc, err)
		}
	}
	m.calls = nil
}

// settled is the manager's state when its agents have nothing left to do.
func settled(t *testing.T, m *fakeManager) map[string]*pb.Volume {
	t.Helper()
	for range 5 {
		for _, v := range slices.Collect(maps.Values(m.volumes)) {
			m.step(v)
		}
	}
	return m.volumes
}

// The connection to the manager is cut, or the driver killed, at each of its calls, before and
// after the manager has acted: the answer is not final, and the same call to the next driver leads
// to the same state and answer.
func TestACallThatIsCutAnywhereIsMadeAgain(t *testing.T) {
	for i, step := range walk {
		t.Run(step.rpc, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				whole := newFakeManager()
				walked(t, whole, i)
				want, err := step.call(t.Context(), testController(whole))
				if err != nil {
					t.Fatal(err)
				}
				calls := len(whole.calls)
				if calls == 0 {
					t.Fatal("it makes no call to the manager")
				}
				end := settled(t, whole)
				for at := 1; at <= calls; at++ {
					for _, f := range []fate{requestLost, replyLost} {
						m := newFakeManager()
						walked(t, m, i)
						m.fate = func(call int, _ string) fate {
							if call == at {
								return f
							}
							return delivered
						}
						_, err := step.call(t.Context(), testController(m))
						if !slices.Contains(notFinal, status.Code(err)) {
							t.Errorf("cut at call %d of %v (%d): %v, want a code that is not final", at, m.calls, f, err)
						}
						m.fate = nil
						got, err := step.call(t.Context(), testController(m)) // a new process
						if err != nil {
							t.Fatalf("after a cut at call %d (%d): %v", at, f, err)
						}
						if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
							t.Errorf("after a cut at call %d (%d), another answer (-want +got):\n%s", at, f, diff)
						}
						if diff := cmp.Diff(end, settled(t, m), protocmp.Transform()); diff != "" {
							t.Errorf("after a cut at call %d (%d), another state (-want +got):\n%s", at, f, diff)
						}
						if m.made != whole.made || m.forced != 0 {
							t.Errorf("after a cut at call %d (%d): %d volumes made and %d fenced, want %d and none", at, f, m.made, m.forced, whole.made)
						}
					}
				}
			})
		})
	}
}

// Each call is made twice: the second one finds the first one's result.
func TestCallsAreIdempotent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newFakeManager()
		for _, step := range walk {
			s := testController(m)
			want, err := step.call(t.Context(), s)
			if err != nil {
				t.Fatalf("%s = %v", step.rpc, err)
			}
			got, err := step.call(t.Context(), s)
			if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
				t.Errorf("%s again = %v (-first +second):\n%s", step.rpc, err, diff)
			}
		}
		if len(settled(t, m)) != 0 {
			t.Errorf("volumes left: %v", m.volumes)
		}
	})
}

// No error of the manager, in whatever call, becomes a final code if the call may have had an
// effect.
func TestNoErrorOfTheManagerEndsWhatMayGoOn(t *testing.T) {
	undecided := []codes.Code{
		codes.Unavailable, codes.Internal, codes.Unknown, codes.DataLoss, codes.Aborted,
		codes.Canceled, codes.DeadlineExceeded, codes.Unauthenticated, codes.PermissionDenied,
	}
	for i, step := range walk {
		probe := newFakeManager()
		walked(t, probe, i)
		if _, err := step.call(t.Context(), testController(probe)); err != nil {
			t.Fatal(err)
		}
		slices.Sort(probe.calls)
		for _, method := range slices.Compact(probe.calls) {
			for _, code := range undecided {
				m := newFakeManager()
				walked(t, m, i)
				m.fail = func(called string) error {
					if called == method {
						return status.Error(code, "it broke")
					}
					return nil
				}
				_, err := step.call(t.Context(), testController(m))
				if !slices.Contains(notFinal, status.Code(err)) || !strings.Contains(err.Error(), "it broke") {
					t.Errorf("%s where %s answers %v = %v, want a code that is not final, and the cause", step.rpc, method, code, err)
				}
			}
		}
	}
}

func TestOperationsOnOneVolumeDoNotOverlap(t *testing.T) {
	for i, step := range walk {
		m := newFakeManager()
		walked(t, m, i)
		s := testController(m)
		end, err := s.ops.start(gocmp.Or(step.key, firstID), "SomeRPC")
		if err != nil {
			t.Fatal(err)
		}
		_, err = step.call(t.Context(), s)
		if status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "SomeRPC") || !strings.Contains(err.Error(), "since") {
			t.Errorf("%s while another is under way = %v, want Aborted that says which and since when", step.rpc, err)
		}
		end()
		end() // harmless
		if _, err := step.call(t.Context(), s); err != nil {
			t.Errorf("%s after the other has ended = %v", step.rpc, err)
		}
	}
}

// A CO calls for each node by itself, and a reader that is slow to come or go keeps no other one waiting.
func TestOperationsForTwoNodesGoOnSideBySide(t *testing.T) {
	o := newOperations()
	end, err := o.startOn(firstID, "n1", "ControllerUnpublishVolume")
	if err != nil {
		t.Fatal(err)
	}
	other, err := o.startOn(firstID, "n2", "ControllerPublishVolume")
	if err != nil {
		t.Fatalf("for another node: %v", err)
	}
	for _, node := range []string{"", "n1", "n2"} {
		if _, err := o.startOn(firstID, node, "SomeRPC"); status.Code(err) != codes.Aborted {
			t.Errorf("for node %q meanwhile: %v, want Aborted", node, err)
		}
	}
	end()
	other()
	if end, err = o.start(firstID, "DeleteVolume"); err != nil {
		t.Fatalf("after both: %v", err)
	}
	if _, err := o.startOn(firstID, "n1", "SomeRPC"); status.Code(err) != codes.Aborted {
		t.Errorf("for a node while an operation concerns all: %v, want Aborted", err)
	}
	if end(); len(o.under) != 0 {
		t.Errorf("%v is left", o.under)
	}
}

// What an expansion waits for may be a node that is lost: it has to be detached from.
func TestAnExpansionThatWaitsForADeviceDoesNotKeepTheVolume(t *testing.T) {
	m := newFakeManager()
	walked(t, m, 2)
	m.stuck = true // no device grows
	s := testController(m)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := s.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
			VolumeId: firstID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30}, VolumeCapability: capability(multiWriter, "", true),
		})
		ended <- err
	}()
	free := func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return slices.Contains(m.calls, "ExpandVolume")
	}
	for end := time.Now().Add(10 * time.Second); !free(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the expansion does not begin")
		}
	}
	var err error
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		var done func()
		if done, err = s.ops.startOn(firstID, "n1", "ControllerUnpublishVolume"); err == nil {
			done()
			break
		}
	}
	if err != nil {
		t.Errorf("while the expansion waits: %v", err)
	}
	select {
	case err := <-ended:
		t.Errorf("the expansion has ended meanwhile: %v", err)
	default:
	}
	cancel()
	<-ended
}

func TestCreateVolumeCodes(t *testing.T) {
	set := func(f func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest { return createRequest("pvc-1", f) }
	for _, test := range []struct {
		name string
		r    *csi.CreateVolumeRequest
		want codes.Code
		says string
	}{
		{"no name", createRequest(""), codes.InvalidArgument, "name"},
		{"no capabilities", set(func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil }), codes.InvalidArgument, "volume_capabilities"},
		{"a content source", set(func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} }), codes.InvalidArgument, "volume_content_source"},
		{"an unknown parameter", set(func(r *csi.CreateVolumeRequest) { r.Parameters["iops"] = "1" }), codes.InvalidArgument, "iops"},
		{"an unknown mutable parameter", set(func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"iops": "1"} }), codes.InvalidArgument, "iops"},
		{"a pool that is not", set(func(r *csi.CreateVolumeRequest) { r.Parameters["pool"] = "gold" }), codes.InvalidArgument, "pool"},
		{"a label that no node has", set(func(r *csi.CreateVolumeRequest) { r.Parameters["spread"] = "room" }), codes.ResourceExhausted, "parameters: spread=room, copies=2"},
		{"two file systems", set(func(r *csi.CreateVolumeRequest) { r.Parameters["fsType"] = "xfs" }), codes.InvalidArgument, "fsType"},
		{"a range without a size", set(func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 1<<30 + 1, LimitBytes: 1<<30 + 2}
		}), codes.OutOfRange, "capacity_range"},
		{"no room now", set(func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 40 << 30 }), codes.ResourceExhausted, "no space"},
		{"no room ever", set(func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 51 << 30 }), codes.OutOfRange, "even when it is empty"},
	} {
		m := newFakeManager()
		_, err := testController(m).CreateVolume(t.Context(), test.r)
		if status.Code(err) != test.want || !strings.Contains(fmt.Sprint(err), test.says) {
			t.Errorf("CreateVolume with %s = %v, want %v that says %q", test.name, err, test.want, test.says)
		}
		if len(m.volumes) != 0 {
			t.Errorf("CreateVolume with %s leaves a volume", test.name)
		}
	}
}

func TestCreateVolumeAgain(t *testing.T) {
	for _, test := range []struct {
		name string
		r    *csi.CreateVolumeRequest
		want codes.Code
	}{
		{"the same", createRequest("pvc-1"), codes.OK},
		{"a range that holds its size", createRequest("pvc-1", func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 1 << 29, LimitBytes: 1 << 31}
		}), codes.OK},
		{"the default said aloud", createRequest("pvc-1", func(r *csi.CreateVolumeRequest) { r.Parameters["pool"] = "default" }), codes.OK},
		{"another size", createRequest("pvc-1", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 2 << 30 }), codes.AlreadyExists},
		{"a limit below", createRequest("pvc-1", func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{LimitBytes: 1 << 29}
		}), codes.AlreadyExists},
		{"another parameter", createRequest("pvc-1", func(r *csi.CreateVolumeRequest) { r.Parameters["copies"] = "1" }), codes.AlreadyExists},
		{"another place", createRequest("pvc-1", func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{"topology.weft.dev/rack": "r1"}}}}
		}), codes.AlreadyExists},
	} {
		m := newFakeManager()
		walked(t, m, 1)
		_, err := testController(m).CreateVolume(t.Context(), test.r)
		if status.Code(err) != test.want || m.made != 1 {
			t.Errorf("CreateVolume again with %s = %v and %d volumes, want %v and 1", test.name, err, m.made, test.want)
		}
	}
	m := newFakeManager()
	walked(t, m, 1)
	m.volumes[firstID].Labels = nil // made by an operator
	if _, err := testController(m).CreateVolume(t.Context(), createRequest("pvc-1")); status.Code(err) != codes.AlreadyExists {
		t.Errorf("CreateVolume of a name that an operator's volume has = %v, want AlreadyExists", err)
	}
	m.volumes[firstID].State, m.stuck = pb.VolumeState_VOLUME_STATE_DELETING, true
	if _, err := testController(m).CreateVolume(t.Context(), createRequest("pvc-1")); status.Code(err) != codes.Aborted {
		t.Errorf("CreateVolume while its predecessor is being deleted = %v, want Aborted", err)
	}
}

// A VolumeAttributesClass counts more than the StorageClass, and its schedules are the volume's from
// the beginning, also if the driver is killed between its two calls.
func TestAVolumeIsCreatedAsItsAttributesClassSays(t *testing.T) {
	r := createRequest("pvc-1", func(r *csi.CreateVolumeRequest) {
		r.MutableParameters = map[string]string{"copies": "3", "labels.tier": "gold", "scrubEvery": "7d"}
	})
	m := newFakeManager()
	m.fail = answers("UpdateVolume", codes.Unavailable, "")
	if _, err := testController(m).CreateVolume(t.Context(), r); status.Code(err) != codes.Unavailable {
		t.Errorf("CreateVolume whose second call fails = %v, want Unavailable", err)
	}
	m.fail = nil
	if _, err := testController(m).CreateVolume(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	v := m.volumes[firstID]
	if v.Layout.Copies != 3 || v.Labels["tier"] != "gold" || v.ScrubEverySeconds != 7*24*3600 || m.made != 1 {
		t.Errorf("%d volumes, the first is %v", m.made, v)
	}
}

// The CO takes such an answer for one after which there is no volume, so it would never delete one.
func TestNoVolumeIsLeftWhereItsAttributesClassIsRefused(t *testing.T) {
	for name, class := range map[string]map[string]string{
		"nothing to compare": {"copies": "1", "scrubEvery": "7d"},
		"scrubs too often":   {"scrubEvery": "30m"},
		"scrubs too slow":    {"scrubRate": "32KiB"},
		"rebuilds too slow":  {"rebuildRate": "500KiB"},
	} {
		m := newFakeManager()
		r := createRequest("pvc-1", func(r *csi.CreateVolumeRequest) { r.MutableParameters = class })
		if _, err := testController(m).CreateVolume(t.Context(), r); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "mutable_parameters: ") || m.made != 0 {
			t.Errorf("%s: CreateVolume = %v, with %d volumes made; want InvalidArgument that names the parameter, and none", name, err, m.made)
		}
	}
	m := newFakeManager()
	r := createRequest("pvc-1", func(r *csi.CreateVolumeRequest) {
		r.MutableParameters = map[string]string{"copies": "1", "scrubEvery": "off", "scrubRate": "off", "rebuildRate": "1MiB"}
	})
	if _, err := testController(m).CreateVolume(t.Context(), r); err != nil {
		t.Errorf("CreateVolume with what the manager accepts = %v", err)
	}
}

func TestPublishCodes(t *testing.T) {
	for _, test := range []struct {
		name    string
		r       *csi.ControllerPublishVolumeRequest
		prepare func(*fakeManager)
		want    codes.Code
	}{
		{"no volume id", publishRequest("", "n1"), nil, codes.InvalidArgument},
		{"no node id", publishRequest(firstID, ""), nil, codes.InvalidArgument},
		{"no capability", &csi.ControllerPublishVolumeRequest{VolumeId: firstID, NodeId: "n1"}, nil, codes.InvalidArgument},
		{"no such volume", publishRequest("00000000-0000-4000-8000-00000000000f", "n1"), nil, codes.NotFound},
		{"what is no id", publishRequest("pvc-1", "n1"), nil, codes.NotFound},
		{"no such node", publishRequest(firstID, "n9"), nil, codes.NotFound},
		{"what is no node's name", publishRequest(firstID, "n 9"), nil, codes.NotFound},
		{"the node that has it", publishRequest(firstID, "n1"), attachedTo("n1", 0), codes.OK},
		{"another node", publishRequest(firstID, "n2"), attachedTo("n1", 0), codes.FailedPrecondition},
		{"another mode", publishRequest(firstID, "n1"), attachedTo("n1", pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY), codes.AlreadyExists},
		{"a node that is letting go", publishRequest(firstID, "n1"), func(m *fakeManager) {
			attachedTo("n1", 0)(m)
			m.stuck, m.volumes[firstID].Attachment.State = true, pb.AttachmentState_ATTACHMENT_STATE_DETACHING
		}, codes.Aborted},
		{"a volume that is being deleted", publishRequest(firstID, "n1"), func(m *fakeManager) {
			m.stuck, m.volumes[firstID].State = true, pb.VolumeState_VOLUME_STATE_DELETING
		}, codes.NotFound},
		{"a mode that is not served", publishRequest(firstID, "n1"), func(m *fakeManager) { m.fail = answers("Attach", codes.Unimplemented, "") }, codes.FailedPrecondition},
		{"a volume whose targets are down", publishRequest(firstID, "n1"), func(m *fakeManager) {
			m.fail = answers("Attach", codes.FailedPrecondition, "NO_IN_SYNC_LEG")
		}, codes.Unavailable},
		{"a node without an agent", publishRequest(firstID, "n1"), func(m *fakeManager) {
			m.fail = answers("Attach", codes.FailedPrecondition, "NO_INITIATOR")
		}, codes.FailedPrecondition},
		{"copies that may differ", publishRequest(firstID, "n1"), func(m *fakeManager) {
			m.fail = answers("Attach", codes.FailedPrecondition, "COPIES_DIFFER")
		}, codes.FailedPrecondition},
	} {
		m := newFakeManager()
		walked(t, m, 1)
		if test.prepare != nil {
			test.prepare(m)
		}
		if _, err := testController(m).ControllerPublishVolume(t.Context(), test.r); status.Code(err) != test.want {
			t.Errorf("ControllerPublishVolume with %s = %v, want %v", test.name, err, test.want)
		}
	}
}

func TestASealedVolumeIsPublishedForReading(t *testing.T) {
	m := newFakeManager()
	walked(t, m, 1)
	m.volumes[firstID].Sealed = timestamppb.Now()
	r, err := testController(m).ControllerPublishVolume(t.Context(), publishRequest(firstID, "n1"))
	if err != nil || r.GetPublishContext()[publishMode] != "SHARED_READ_ONLY" {
		t.Errorf("ControllerPublishVolume of a sealed volume = %v, %v", r, err)
	}
	if mode := m.volumes[firstID].GetAttachment().GetMode(); mode != pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY {
		t.Errorf("it is attached as %v", mode)
	}
	for mode, want := range map[csi.VolumeCapability_AccessMode_Mode]bool{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:      false,
		csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:  true,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY: true,
	} {
		v, err := testController(m).ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: firstID, VolumeCapabilities: []*csi.VolumeCapability{mountCapability(mode, "")}})
		if err != nil || (v.GetConfirmed() != nil) != want {
			t.Errorf("ValidateVolumeCapabilities of a sealed volume for %v = %v, %v", mode, v, err)
		}
	}
}

// attachedTo attaches the volume to a node.
func attachedTo(node string, mode pb.AttachMode) func(*fakeManager) {
	return func(m *fakeManager) {
		m.volumes[firstID].Attachment = &pb.Attachment{
			VolumeId: firstID, VolumeName: "pvc-1", Node: node, Mode: mode, Epoch: 1, State: pb.AttachmentState_ATTACHMENT_STATE_ATTACHED,
		}
	}
}

// answers makes one method return an error.
func answers(method string, code codes.Code, reason string) func(string) error {
	return func(called string) error {
		if called != method {
			return nil
		}
		return withDetail(code, "it is so", reason, "")
	}
}

func TestPublishWaitsForTheFence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newFakeManager()
		walked(t, m, 1)
		m.stuck = true
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := testController(m).ControllerPublishVolume(ctx, publishRequest(firstID, "n1"))
		if status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "target t1 to fence") {
			t.Errorf("ControllerPublishVolume whose fence does not come = %v, want DeadlineExceeded that names it", err)
		}
		if len(m.calls) > 40 {
			t.Errorf("it asked %d times in 10s", len(m.calls))
		}
	})
}

func TestPublishKeepsTheAttachLimit(t *testing.T) {
	m := newFakeManager()
	s := testController(m, func(c *Config) { c.MaxVolumes = 1 })
	var ids []string
	for _, name := range []string{"a", "b"} {
		v, err := s.CreateVolume(t.Context(), createRequest(name))
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, v.Volume.VolumeId)
	}
	for range 2 { // the second time it is there
		if _, err := s.ControllerPublishVolume(t.Context(), publishRequest(ids[0], "n1")); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.ControllerPublishVolume(t.Context(), publishRequest(ids[1], "n1")); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("ControllerPublishVolume over the limit = %v, want ResourceExhausted", err)
	}
	if _, err := s.ControllerPublishVolume(t.Context(), publishRequest(ids[1], "n2")); err != nil {
		t.Errorf("ControllerPublishVolume to another node = %v", err)
	}
}

func TestUnpublishAnswersOnlyWhenFenced(t *testing.T) {
	unpublish := func(ctx context.Context, s *controllerServer) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err := s.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: firstID, NodeId: "n1"})
		return err
	}
	t.Run("a node that does not let go", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeManager()
			walked(t, m, 2)
			m.stuck = true
			s := testController(m, func(c *Config) { c.DetachGrace = 15 * time.Second })
			if err := unpublish(t.Context(), s); status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "n1") || m.forced != 0 {
				t.Errorf("within the grace time = %v and %d forced, want DeadlineExceeded that names the node, and none", err, m.forced)
			}
			err := unpublish(t.Context(), s)
			if status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "target t1 to fence") || m.forced != 1 {
				t.Errorf("after the grace time = %v and %d forced, want DeadlineExceeded that names the target, and 1", err, m.forced)
			}
			m.stuck = false
			if err := unpublish(t.Context(), s); err != nil {
				t.Errorf("with the fence confirmed = %v", err)
			}
			if len(s.leaving) != 0 {
				t.Errorf("grace times are left: %v", s.leaving)
			}
		})
	})
	silent := func(d time.Duration) *pb.AgentStatus {
		return &pb.AgentStatus{Known: true, Silent: durationpb.New(d)}
	}
	for _, c := range []struct {
		what string
		node *pb.Node
	}{
		{"a node that was silent for the grace time", &pb.Node{Initiator: silent(time.Minute)}},
		{"a node that is confirmed dead", &pb.Node{Initiator: silent(time.Second), ConfirmedDead: true}},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeManager()
				walked(t, m, 2)
				c.node.Name, m.nodes[0] = "n1", c.node
				start := time.Now()
				if err := unpublish(t.Context(), testController(m)); err != nil || m.forced != 1 || time.Since(start) > time.Second {
					t.Errorf("= %v and %d forced after %v, want none and 1 at once", err, m.forced, time.Since(start))
				}
			})
		})
	}
	for _, c := range []struct {
		what  string
		agent *pb.AgentStatus
	}{
		{"a node that this manager has not heard yet", &pb.AgentStatus{}},
		{"a node that the manager knows no agent of", nil},
		{"a node whose agent has just gone", silent(6 * time.Second)},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeManager()
				walked(t, m, 2)
				online := m.nodes[0].Initiator
				m.nodes[0] = &pb.Node{Name: "n1", Initiator: c.agent}
				s := testController(m)
				if err := unpublish(t.Context(), s); status.Code(err) != codes.DeadlineExceeded || m.forced != 0 {
					t.Errorf("= %v and %d forced, want DeadlineExceeded and none", err, m.forced)
				}
				m.nodes[0] = &pb.Node{Name: "n1", Initiator: online}
				if err := unpublish(t.Context(), s); err != nil || m.forced != 0 {
					t.Errorf("when it is heard = %v and %d forced, want none and none", err, m.forced)
				}
			})
		})
		t.Run(c.what+", nor later", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeManager()
				walked(t, m, 2)
				m.nodes[0] = &pb.Node{Name: "n1", Initiator: c.agent}
				s := testController(m, func(c *Config) { c.DetachGrace = 8 * time.Second })
				if err := unpublish(t.Context(), s); err != nil || m.forced != 1 {
					t.Errorf("= %v and %d forced, want none and 1 after the grace time", err, m.forced)
				}
			})
		})
	}
	t.Run("a fence that was cut off from", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeManager()
			walked(t, m, 1)
			m.stuck, m.volumes[firstID].FenceWaitsFor = true, []string{"target t1 to fence epochs below 2"}
			if err := unpublish(t.Context(), testController(m)); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("= %v, want DeadlineExceeded: nobody has confirmed", err)
			}
		})
	})
	for _, id := range []string{"00000000-0000-4000-8000-00000000000f", "never-was"} {
		if _, err := testController(newFakeManager()).ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n1"}); err != nil {
			t.Errorf("ControllerUnpublishVolume of %s, which is not there = %v, want none", id, err)
		}
	}
}

func TestUnpublishLeavesOtherNodesAlone(t *testing.T) {
	m := newFakeManager()
	walked(t, m, 2)
	r := &csi.ControllerUnpublishVolumeRequest{VolumeId: firstID, NodeId: "n2"}
	if _, err := testController(m).ControllerUnpublishVolume(t.Context(), r); err != nil || m.volumes[firstID].Attachment == nil {
		t.Errorf("ControllerUnpublishVolume from a node that has it not = %v, attachment %v; want it to stay", err, m.volumes[firstID].Attachment)
	}
	r.NodeId = "" // all of them
	if _, err := testController(m).ControllerUnpublishVolume(t.Context(), r); err != nil || m.volumes[firstID].Attachment != nil {
		t.Errorf("ControllerUnpublishVolume from all nodes = %v, attachment %v; want none", err, m.volumes[firstID].Attachment)
	}
}

func TestDeleteVolumeCodes(t *testing.T) {
	m := newFakeManager()
	walked(t, m, 2)
	for id, want := range map[string]codes.Code{
		"": codes.InvalidArgument, "never-was": codes.OK, "00000000-0000-4000-8000-00000000000f": codes.OK,
		"pvc-1": codes.OK, // a volume's name is not its id
		firstID: codes.FailedPrecondition,
	} {
		if _, err := testController(m).DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); status.Code(err) != want {
			t.Errorf("DeleteVolume(%q) = %v, want %v", id, err, want)
		}
	}
	if m.volumes[firstID] == nil || m.volumes[firstID].State != pb.VolumeState_VOLUME_STATE_READY {
		t.Error("a volume that is attached was deleted")
	}
}

// A volume whose name equals another one's id is not confused with it.
func TestANameIsNotAnID(t *testing.T) {
	m := newFakeManager()
	walked(t, m, 1)
	m.volumes[firstID].Name = "00000000-0000-4000-8000-00000000000f"
	r := publishRequest(m.volumes[firstID].Name, "n1")
	if _, err := testController(m).ControllerPublishVolume(t.Context(), r); status.Code(err) != codes.NotFound {
		t.Errorf("ControllerPublishVolume by a name that reads as an id = %v, want NotFound", err)
	}
}

func TestExpandCodes(t *testing.T) {
	for _, test := range []struct {
		name            string
		required, limit int64
		want            codes.Code
		size            int64
	}{
		{"what it has", 1 << 30, 0, codes.OK, 1 << 30},
		{"less", 1 << 29, 0, codes.OK, 1 << 30},
		{"more, in whole MiB", 1<<30 + 1, 0, codes.OK, 1<<30 + 1<<20},
		{"more, up to the limit", 1<<30 + 1, 1<<30 + 4096, codes.OK, 1<<30 + 4096},
		{"a limit below", 0, 1 << 29, codes.OutOfRange, 0},
		{"no room now", 40 << 30, 0, codes.ResourceExhausted, 0},
		{"no room ever", 51 << 30, 0, codes.OutOfRange, 0},
	} {
		m := newFakeManager()
		walked(t, m, 1)
		reply, err := testController(m).ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: firstID, CapacityRange: &csi.CapacityRange{RequiredBytes: test.required, LimitBytes: test.limit},
		})
		if status.Code(err) != test.want || reply.GetCapacityBytes() != test.size || err == nil && !reply.NodeExpansionRequired {
			t.Errorf("ControllerExpandVolume to %s = %v, %v; want %v and %d bytes, the node to follow", test.name, reply, err, test.want, test.size)
		}
	}
}

func TestListVolumesByPages(t *testing.T) {
	m := newFakeManager()
	s := testController(m)
	add := func(name string) string {
		v, err := s.CreateVolume(t.Context(), createRequest(name))
		if err != nil {
			t.Fatal(err)
		}
		return v.Volume.VolumeId
	}
	var ids []string
	for i := range 5 {
		ids = append(ids, add(fmt.Sprint("v", 9-i)))
	}
	attachedTo("n1", 0)(m)
	page, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2})
	if err != nil || len(page.Entries) != 2 || page.NextToken == "" {
		t.Fatalf("ListVolumes of 2 = %v, %v", page, err)
	}
	if got := page.Entries[0].Status.PublishedNodeIds; !slices.Equal(got, []string{"n1"}) {
		t.Errorf("published nodes = %v, want n1", got)
	}
	// The last volume of the page is deleted, and a new one is created.
	delete(m.volumes, page.Entries[1].Volume.VolumeId)
	ids = append(ids, add("late"))
	seen := []string{page.Entries[0].Volume.VolumeId, page.Entries[1].Volume.VolumeId}
	for token := page.NextToken; token != ""; token = page.NextToken {
		if page, err = s.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token}); err != nil {
			t.Fatal(err)
		}
		for _, e := range page.Entries {
			seen = append(seen, e.Volume.VolumeId)
		}
	}
	if !slices.Equal(seen, ids) {
		t.Errorf("pages hold %v, want %v", seen, ids)
	}
	for _, r := range []*csi.ListVolumesRequest{{StartingToken: "7"}, {StartingToken: "invalid-token"}} {
		if _, err := s.ListVolumes(t.Context(), r); status.Code(err) != codes.Aborted {
			t.Errorf("ListVolumes(%v) = %v, want Aborted", r, err)
		}
	}
	if _, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("ListVolumes of -1 = %v, want InvalidArgument", err)
	}
}

func TestVolumeHealth(t *testing.T) {
	m := newFakeManager()
	walked(t, m, 1)
	s := testController(m)
	for _, test := range []struct {
		health pb.Health
		want   []csi.VolumeHealthErrorType
	}{
		{pb.Health_HEALTH_HEALTHY, nil},
		{pb.Health_HEALTH_REBUILDING, []csi.VolumeHealthErrorType{csi.VolumeHealthErrorType_DEGRADED}},
		{pb.Health_HEALTH_DEGRADED, []csi.VolumeHealthErrorType{csi.VolumeHealthErrorType_DEGRADED}},
		{pb.Health_HEALTH_UNAVAILABLE, []csi.VolumeHealthErrorType{csi.VolumeHealthErrorType_INACCESSIBLE}},
	} {
		v := m.volumes[firstID]
		v.Health = test.health
		v.Legs = []*pb.Leg{{Column: 0, Copy: 1, Node: "t2", State: pb.LegState_LEG_STATE_STALE, Reason: "no answer"}}
		one, err := s.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: firstID})
		if err != nil {
			t.Fatal(err)
		}
		var got []csi.VolumeHealthErrorType
		for _, h := range one.VolumeHealth.HealthStatuses {
			got = append(got, h.Status)
			if h.Reason == "" || !strings.Contains(h.Message, "leg 0.1 on t2 is stale (no answer)") {
				t.Errorf("health of a volume that is %v says %q, %q; want a reason and the leg", test.health, h.Reason, h.Message)
			}
		}
		all, err := s.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
		if err != nil || !slices.Equal(got, test.want) || len(all.Entries) != len(test.want) {
			t.Errorf("health of a volume that is %v = %v, %d listed, %v; want %v", test.health, got, len(all.GetEntries()), err, test.want)
		}
	}
}

func TestCapacity(t *testing.T) {
	s := testController(newFakeManager())
	segment := func(key, value string) *csi.Topology {
		return &csi.Topology{Segments: map[string]string{topologyPrefix + key: value}}
	}
	for _, test := range []struct {
		name string
		r    *csi.GetCapacityRequest
		want int64
		code codes.Code
	}{
		{"all", &csi.GetCapacityRequest{}, 50 << 30, codes.OK},
		{"thin volumes", &csi.GetCapacityRequest{Parameters: map[string]string{paramThin: "true"}}, 500 << 30, codes.OK},
		{"a segment", &csi.GetCapacityRequest{AccessibleTopology: segment("rack", "r1")}, 50 << 30, codes.OK},
		{"another cluster's", &csi.GetCapacityRequest{AccessibleTopology: segment("cluster", "c2")}, 0, codes.OK},
		{"what is not served", &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{capability(manyWriters, "", false)}}, 0, codes.OK},
		{"an unknown parameter", &csi.GetCapacityRequest{Parameters: map[string]string{"x": "y"}}, 0, codes.InvalidArgument},
	} {
		got, err := s.GetCapacity(t.Context(), test.r)
		if status.Code(err) != test.code || got.GetAvailableCapacity() != test.want {
			t.Errorf("GetCapacity of %s = %v, %v; want %d, %v", test.name, got, err, test.want, test.code)
		}
	}
}

func TestValidateCapabilities(t *testing.T) {
	m := newFakeManager()
	walked(t, m, 1)
	for _, test := range []struct {
		cap       *csi.VolumeCapability
		confirmed bool
	}{
		{capability(singleWriter, "ext4", false), true},
		{capability(manyReaders, "", true), true},
		{capability(manyWriters, "", true), false}, // it has two copies
	} {
		r := &csi.ValidateVolumeCapabilitiesRequest{VolumeId: firstID, VolumeCapabilities: []*csi.VolumeCapability{test.cap}}
		got, err := testController(m).ValidateVolumeCapabilities(t.Context(), r)
		if err != nil || (got.Confirmed != nil) != test.confirmed || (got.Message == "") != test.confirmed {
			t.Errorf("ValidateVolumeCapabilities(%v) = %v, %v; want confirmed %v", test.cap, got, err, test.confirmed)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

const (
	thisNode = "n1"
	volumeID = "0b6f8a3e-5a4e-4c0e-9c57-1d6c1f0f9a11"
	otherID  = "7d0f3a52-2b1c-4f7e-8a55-3f1f5f0c2b22"
	mib      = 1 << 20
)

// records is the part of the manager that a node uses.
type records struct {
	pb.ManagerClient // nil: other methods are not called

	mu      sync.Mutex
	volumes map[string]*pb.Volume
	updates []string
	down    error // all calls end with this
	fail    func(call string) error
}

func (r *records) begin(call string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail != nil {
		if err := r.fail(call); err != nil {
			return err
		}
	}
	return r.down
}

// set changes a volume.
func (r *records) set(id string, change func(v *pb.Volume)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(r.volumes[id])
}

func (r *records) GetVolume(_ context.Context, in *pb.GetVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	if err := r.begin("GetVolume"); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.volumes[in.Volume]
	if !ok {
		return nil, status.Errorf(codes.NotFound, "volume %q: there is none", in.Volume)
	}
	return proto.CloneOf(v), nil
}

func (r *records) UpdateVolume(ctx context.Context, in *pb.UpdateVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	if err := cmp.Or(ctx.Err(), r.begin("UpdateVolume")); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volumes[in.Volume]
	making, raw := strings.HasPrefix(in.Formatted, formatting), in.Formatted == rawDevice
	switch is := v.Formatted; {
	case is == "", is == in.Formatted, is == formatting+in.Formatted:
	case is == rawDevice && !making, strings.HasPrefix(is, formatting) && raw:
	default:
		return nil, status.Errorf(codes.AlreadyExists, "formatted is %q, asked for is %q", is, in.Formatted)
	}
	v.Formatted = in.Formatted
	r.updates = append(r.updates, in.Formatted)
	return proto.CloneOf(v), nil
}

func (r *records) ListAttachments(_ context.Context, in *pb.ListAttachmentsRequest, _ ...grpc.CallOption) (*pb.ListAttachmentsResponse, error) {
	if err := r.begin("ListAttachments"); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	reply := &pb.ListAttachmentsResponse{}
	for _, v := range r.volumes {
		if a := attachmentTo(v, in.Node); a != nil {
			reply.Attachments = append(reply.Attachments, proto.CloneOf(a))
		}
	}
	return reply, nil
}

func (r *records) ListNodes(context.Context, *pb.ListNodesRequest, ...grpc.CallOption) (*pb.ListNodesResponse, error) {
	return &pb.ListNodesResponse{Nodes: []*pb.Node{
		{Name: "n0", Initiator: &pb.AgentStatus{Known: true}},
		{Name: thisNode, Labels: map[string]string{"zone": "z1", "owner": "team of Ops"}, Initiator: &pb.AgentStatus{Known: true, Online: true}},
	}}, r.begin("ListNodes")
}

func (r *records) GetStatus(context.Context, *pb.GetStatusRequest, ...grpc.CallOption) (*pb.Status, error) {
	return &pb.Status{ClusterId: "c1"}, r.begin("GetStatus")
}

// nodeWorld is a node with one volume attached, and the calls that a CO makes to it.
type nodeWorld struct {
	t       *testing.T
	kernel  *fakeKernel
	disk    *fakeDisk
	records *records
	node    *nodeServer

	stage   *csi.NodeStageVolumeRequest
	publish *csi.NodePublishVolumeRequest
}

const device1 = "/dev/weft/db1"

// newRecords has one volume, attached here.
func newRecords(device string, n block.DeviceNumber, size uint64) *records {
	a := &pb.Attachment{
		VolumeId: volumeID, VolumeName: "db1", Node: thisNode, Epoch: 1, Device: device, DeviceNumber: n.String(),
		State: pb.AttachmentState_ATTACHMENT_STATE_ATTACHED, SizeBytes: size,
	}
	return &records{volumes: map[string]*pb.Volume{volumeID: {
		Id: volumeID, Name: "db1", SizeBytes: size, Epoch: 1, Attachment: a,
		Layout: &pb.Layout{Stripes: 2, Copies: 1, ChunkBytes: 128 << 10},
	}}}
}

func newNodeWorld(t *testing.T) *nodeWorld {
	w := &nodeWorld{t: t, kernel: newFakeKernel()}
	w.disk = w.kernel.addDisk(device1, 512*mib)
	w.records = newRecords(device1, w.disk.number, 512*mib)
	w.restart()
	w.stage = stageOf("ext4")
	w.publish = publishOf(w.stage, "/pods/p1")
	return w
}

// addVolume attaches one more volume, and returns the request to stage it.
func (w *nodeWorld) addVolume(id, name, fsType string) *csi.NodeStageVolumeRequest {
	device := "/dev/weft/" + name
	d := w.kernel.addDisk(device, w.disk.size)
	v := newRecords(device, d.number, d.size).volumes[volumeID]
	v.Id, v.Name, v.Attachment.VolumeId, v.Attachment.VolumeName = id, name, id, name
	w.records.mu.Lock()
	w.records.volumes[id] = v
	w.records.mu.Unlock()
	req := stageOf(fsType)
	req.VolumeId, req.StagingTargetPath = id, "/staging/"+name
	return req
}

// restart is a new process on the same machine.
func (w *nodeWorld) restart() {
	w.node = newNodeOn(Config{Manager: w.records, Node: thisNode}, w.kernel)
}

func stageOf(fsType string, flags ...string) *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{
		VolumeId: volumeID, StagingTargetPath: "/staging/db1",
		PublishContext:   publication{volume: "db1", epoch: 1, mode: pb.AttachMode_ATTACH_MODE_EXCLUSIVE}.context(),
		VolumeCapability: mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, fsType, flags...),
	}
}

func mountCapability(mode accessMode, fsType string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

func blockCapability(mode accessMode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

func publishOf(s *csi.NodeStageVolumeRequest, target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: s.VolumeId, StagingTargetPath: s.StagingTargetPath, PublishContext: s.PublishContext,
		VolumeCapability: s.VolumeCapability, TargetPath: target,
	}
}

// callContext is a call's context: a test that expects an endless wait may use it up.
func callContext(t *testing.T, patience time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func (w *nodeWorld) stageErr() error {
	_, err := w.node.NodeStageVolume(callContext(w.t, 20*time.Second), w.stage)
	return err
}

func (w *nodeWorld) publishErr() error {
	_, err := w.node.NodePublishVolume(callContext(w.t, 20*time.Second), w.publish)
	return err
}

func (w *nodeWorld) unpublishErr() error {
	_, err := w.node.NodeUnpublishVolume(callContext(w.t, 20*time.Second), &csi.NodeUnpublishVolumeRequest{VolumeId: w.publish.VolumeId, TargetPath: w.publish.TargetPath})
	return err
}

func (w *nodeWorld) unstageErr() error {
	_, err := w.node.NodeUnstageVolume(callContext(w.t, 20*time.Second), &csi.NodeUnstageVolumeRequest{VolumeId: w.stage.VolumeId, StagingTargetPath: w.stage.StagingTargetPath})
	return err
}

// attachAnew makes a later attachment of the volume to this node: another epoch and another device.
// The old device stays as long as it is used.
func (w *nodeWorld) attachAnew() *fakeDisk {
	d := w.kernel.addDisk("/dev/weft/db1-new", w.disk.size)
	w.kernel.mu.Lock()
	delete(w.kernel.nodes, device1)
	delete(w.kernel.nodes, "/dev/weft/db1-new")
	w.kernel.nodes[device1] = d.number
	d.start, d.data = w.disk.start, w.disk.data
	w.kernel.mu.Unlock()
	w.records.set(volumeID, func(v *pb.Volume) {
		v.Epoch, v.Attachment.Epoch, v.Attachment.DeviceNumber = 2, 2, d.number.String()
	})
	w.stage.PublishContext = publication{volume: "db1", epoch: 2, mode: pb.AttachMode_ATTACH_MODE_EXCLUSIVE}.context()
	w.publish.PublishContext = w.stage.PublishContext
	return d
}

func succeeds(t *testing.T, doing string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s = %v, want success", doing, err)
	}
}

// refused checks an error's code, and that its text contains the names.
func refused(t *testing.T, doing string, err error, code codes.Code, names ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("%s = %v, want %v", doing, err, code)
	}
	for _, name := range names {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%s = %v, want it to name %q", doing, err, name)
		}
	}
}

func (w *nodeWorld) formats() int {
	w.kernel.mu.Lock()
	defer w.kernel.mu.Unlock()
	n := 0
	for _, p := range w.kernel.ran {
		if strings.HasPrefix(p, "mkfs") {
			n++
		}
	}
	return n
}

func (w *nodeWorld) mountedAt(point string) (mount.Mount, bool) {
	all, _ := w.kernel.Mounts()
	return all.At(point)
}

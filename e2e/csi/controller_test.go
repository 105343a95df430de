// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// controller is a client of a driver's controller service.
func (c *cluster) controller(cfg csi.Config) spec.ControllerClient {
	c.t.Helper()
	cfg.Mode = csi.ModeController
	conn, err := grpc.NewClient("unix://"+c.startDriver(cfg), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { conn.Close() })
	return spec.NewControllerClient(conn)
}

var raw = &spec.VolumeCapability{
	AccessMode: &spec.VolumeCapability_AccessMode{Mode: spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
	AccessType: &spec.VolumeCapability_Block{Block: &spec.VolumeCapability_BlockVolume{}},
}

func create(name string) *spec.CreateVolumeRequest {
	return &spec.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*spec.VolumeCapability{raw},
		CapacityRange: &spec.CapacityRange{RequiredBytes: int64(64 * block.MiB)}, Parameters: map[string]string{"stripes": "1"},
	}
}

// within sets a time limit for a call, as a CO does.
func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A lost node is fenced before another node gets its volume, and a deleted volume leaves
// nothing behind.
func TestALostNodeIsFencedBeforeTheNextOneGetsTheVolume(t *testing.T) {
	needDevices(t)
	t.Parallel()
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1", "n2"})
	client := c.controller(csi.Config{})
	v, err := client.CreateVolume(within(t, time.Minute), create(unique("pvc")))
	if err != nil {
		t.Fatal(err)
	}
	id := v.Volume.VolumeId
	publish := func(node string) error {
		_, err := client.ControllerPublishVolume(within(t, time.Minute), &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: raw})
		return err
	}
	if err := publish("n1"); err != nil {
		t.Fatal(err)
	}
	c.attached(id, "n1")
	if err := publish("n2"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("publish to a second node = %v, want FailedPrecondition", err)
	}
	before := c.volume(id).Epoch
	c.nodes["n1"]() // its agent ends, so that nothing can ask it to detach
	c.eventually("n1 offline", func(ctx context.Context) error {
		nodes, err := c.manager.ListNodes(ctx, &pb.ListNodesRequest{})
		if err == nil && slices.ContainsFunc(nodes.Nodes, func(n *pb.Node) bool { return n.Name == "n1" && n.Initiator.Online }) {
			err = errors.New("it is online")
		}
		return err
	})
	if _, err := client.ControllerUnpublishVolume(within(t, time.Minute), &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n1"}); err != nil {
		t.Fatalf("unpublish from a lost node = %v", err)
	}
	if v := c.volume(id); v.Attachment != nil || len(v.FenceWaitsFor) > 0 || v.Epoch <= before {
		t.Errorf("after unpublish: attachment %v, fence waits for %v, epoch %d; want no attachment, no fence, an epoch above %d", v.Attachment, v.FenceWaitsFor, v.Epoch, before)
	}
	if err := publish("n2"); err != nil {
		t.Fatalf("publish to the next node = %v", err)
	}
	c.attached(id, "n2")
	if _, err := client.ControllerUnpublishVolume(within(t, time.Minute), &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n2"}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.DeleteVolume(within(t, time.Minute), &spec.DeleteVolumeRequest{VolumeId: id}); err != nil {
		t.Fatal(err)
	}
	c.nothingLeft()
}

// rawOnN1 creates a raw volume, attaches it to n1, and returns the client that did so.
func (c *cluster) rawOnN1() (client spec.ControllerClient, id string) {
	c.t.Helper()
	client = c.controller(csi.Config{})
	v, err := client.CreateVolume(within(c.t, time.Minute), create(unique("pvc")))
	if err != nil {
		c.t.Fatal(err)
	}
	id = v.Volume.VolumeId
	if _, err := client.ControllerPublishVolume(within(c.t, time.Minute), &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "n1", VolumeCapability: raw}); err != nil {
		c.t.Fatal(err)
	}
	c.attached(id, "n1")
	return client, id
}

// A manager that has just started has not heard from any node yet. That is no reason to
// fence a node: it is alive, and detaches when it has contacted the manager.
func TestAManagersRestartFencesNobody(t *testing.T) {
	needDevices(t)
	t.Parallel()
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1"})
	client, id := c.rawOnN1()
	before := c.volume(id).Epoch
	c.end()
	c.startManager()
	c.eventually("detach", func(ctx context.Context) error {
		_, err := client.ControllerUnpublishVolume(ctx, &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n1"})
		return err
	})
	if now := c.volume(id).Epoch; now != before {
		t.Errorf("epoch %d became %d: the node was fenced", before, now)
	}
}

func (c *cluster) volume(id string) *pb.Volume {
	c.t.Helper()
	v, err := c.manager.GetVolume(c.t.Context(), &pb.GetVolumeRequest{Volume: id})
	if err != nil {
		c.t.Fatal(err)
	}
	return v
}

// attached waits until a node has a volume's device.
func (c *cluster) attached(id, node string) {
	c.t.Helper()
	c.eventually("device on "+node, func(ctx context.Context) error {
		a := c.volume(id).Attachment
		if a.GetNode() != node || a.GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
			return errors.New(a.String())
		}
		return nil
	})
}

// nothingLeft waits until there are no volumes and all drives are free.
func (c *cluster) nothingLeft() {
	c.t.Helper()
	c.eventually("nothing is left", func(ctx context.Context) error {
		st, err := c.manager.GetStatus(ctx, &pb.GetStatusRequest{})
		if err == nil && (st.Volumes > 0 || st.AllocatedBytes > 0 || st.Attachments > 0) {
			err = errors.New(st.String())
		}
		return err
	})
}

// cutter interrupts one of the calls to the manager: it loses the request or the reply.
type cutter struct {
	calls atomic.Int64
	at    int64
	reply bool
}

func (k *cutter) intercept(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	lost := status.Error(codes.Unavailable, "connection reset")
	cut := k.calls.Add(1) == k.at
	if cut && !k.reply {
		return lost
	}
	err := invoke(ctx, method, req, reply, cc, opts...)
	if cut {
		return lost
	}
	return err
}

// A volume's whole life, in which the driver is cut off and replaced at each of its first
// calls to the manager. The life must complete and leave nothing behind.
func TestAVolumesLifeIsCutAnywhere(t *testing.T) {
	needDevices(t)
	t.Parallel()
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1"})
	for at := int64(1); at <= 40; at++ {
		whole := false
		for _, reply := range []bool{false, true} {
			k := &cutter{at: at, reply: reply}
			cut := c.controller(csi.Config{Manager: pb.NewManagerClient(c.dial(grpc.WithUnaryInterceptor(k.intercept)))})
			c.life(cut, c.controller(csi.Config{}))
			c.nothingLeft()
			whole = k.calls.Load() < at
		}
		if whole {
			if at < 8 {
				t.Errorf("a volume's life took %d calls, want more", at)
			}
			return
		}
	}
}

// life is a volume's whole life. Each call goes to the first driver and, if it is
// interrupted, then to the second.
func (c *cluster) life(first, second spec.ControllerClient) {
	c.t.Helper()
	t, name, id := c.t, unique("pvc"), ""
	for _, call := range []func(context.Context, spec.ControllerClient) error{
		func(ctx context.Context, s spec.ControllerClient) error {
			v, err := s.CreateVolume(ctx, create(name))
			id = v.GetVolume().GetVolumeId()
			return err
		},
		func(ctx context.Context, s spec.ControllerClient) error {
			_, err := s.ControllerPublishVolume(ctx, &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "n1", VolumeCapability: raw})
			return err
		},
		func(ctx context.Context, s spec.ControllerClient) error {
			_, err := s.ControllerUnpublishVolume(ctx, &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n1"})
			return err
		},
		func(ctx context.Context, s spec.ControllerClient) error {
			_, err := s.DeleteVolume(ctx, &spec.DeleteVolumeRequest{VolumeId: id})
			return err
		},
	} {
		err := call(within(t, time.Minute), first)
		if status.Code(err) == codes.Unavailable {
			err = call(within(t, time.Minute), second)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A volume for readers can be at several nodes at once, as can a volume for many writers if
// it has one copy. Each node is fenced on its own.
func TestSharedVolumes(t *testing.T) {
	needDevices(t)
	t.Parallel()
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1", "n2"})
	client := c.controller(csi.Config{})
	for _, test := range []struct {
		mode   spec.VolumeCapability_AccessMode_Mode
		copies string
	}{
		{spec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, "2"},
		{spec.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, "1"},
	} {
		shared := &spec.VolumeCapability{AccessMode: &spec.VolumeCapability_AccessMode{Mode: test.mode}, AccessType: raw.AccessType}
		r := create(unique("pvc"))
		r.VolumeCapabilities, r.Parameters["copies"] = []*spec.VolumeCapability{shared}, test.copies
		v, err := client.CreateVolume(within(t, time.Minute), r)
		if err != nil {
			t.Fatal(err)
		}
		id := v.Volume.VolumeId
		for _, node := range []string{"n1", "n2"} {
			_, err := client.ControllerPublishVolume(within(t, time.Minute), &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: shared})
			if err != nil {
				t.Fatalf("%v: publish to %s = %v", test.mode, node, err)
			}
		}
		one, err := client.ControllerGetVolume(t.Context(), &spec.ControllerGetVolumeRequest{VolumeId: id})
		if err != nil || !slices.Equal(one.Status.PublishedNodeIds, []string{"n1", "n2"}) {
			t.Errorf("%v: ControllerGetVolume = %v, %v; want it at n1 and n2", test.mode, one, err)
		}
		_, err = client.ControllerPublishVolume(within(t, time.Minute), &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "n1", VolumeCapability: raw})
		if status.Code(err) != codes.AlreadyExists {
			t.Errorf("%v: publish again for one writer = %v, want AlreadyExists", test.mode, err)
		}
		for _, node := range []string{"n1", "n2"} {
			if _, err := client.ControllerUnpublishVolume(within(t, time.Minute), &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node}); err != nil {
				t.Errorf("%v: unpublish from %s = %v", test.mode, node, err)
			}
			if a := c.volume(id).Attachments; slices.ContainsFunc(a, func(a *pb.Attachment) bool { return a.Node == node }) {
				t.Errorf("%v: after unpublish from %s it is at %v", test.mode, node, a)
			}
		}
		if _, err := client.DeleteVolume(within(t, time.Minute), &spec.DeleteVolumeRequest{VolumeId: id}); err != nil {
			t.Fatal(err)
		}
	}
	c.nothingLeft()
}

// When ControllerExpandVolume returns, a raw block volume in use has grown, and so has its
// device. The node has nothing left to do.
func TestARawVolumeGrowsInUse(t *testing.T) {
	needDevices(t)
	t.Parallel()
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1"})
	client, id := c.rawOnN1()
	want := int64(320 * block.MiB) // one more extent for each leg
	grown, err := client.ControllerExpandVolume(within(t, time.Minute), &spec.ControllerExpandVolumeRequest{
		VolumeId: id, VolumeCapability: raw, CapacityRange: &spec.CapacityRange{RequiredBytes: want},
	})
	if err != nil || grown.CapacityBytes != want || grown.NodeExpansionRequired {
		t.Fatalf("ControllerExpandVolume = %v, %v; want %d bytes and nothing for the node to do", grown, err, want)
	}
	device, err := os.Open(c.volume(id).Attachment.Device)
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	if size, err := device.Seek(0, io.SeekEnd); err != nil || size != want {
		t.Errorf("the device has %d bytes, %v; want %d", size, err, want)
	}
	tooMuch := &spec.ControllerExpandVolumeRequest{VolumeId: id, VolumeCapability: raw, CapacityRange: &spec.CapacityRange{RequiredBytes: int64(block.TiB)}}
	if _, err := client.ControllerExpandVolume(within(t, time.Minute), tooMuch); status.Code(err) != codes.OutOfRange {
		t.Errorf("ControllerExpandVolume beyond the free space = %v, want OutOfRange", err)
	}
}

// An administrator's topology decides where a volume lies and is used. If one part of the
// cluster is full, the others still accept volumes.
func TestAVolumeLiesWhereItIsAsked(t *testing.T) {
	needDevices(t)
	t.Parallel()
	c := newCluster(t, []string{"t1", "t2", "t3"}, nil)
	client := c.controller(csi.Config{})
	rack := func(name string) *spec.Topology {
		return &spec.Topology{Segments: map[string]string{"topology.weft.dev/rack": name}}
	}
	r := create(unique("pvc"))
	r.Parameters["copies"] = "1"
	r.AccessibilityRequirements = &spec.TopologyRequirement{Requisite: []*spec.Topology{rack("rt2")}}
	v, err := client.CreateVolume(within(t, time.Minute), r)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range c.volume(v.Volume.VolumeId).Legs {
		if l.Node != "t2" {
			t.Errorf("a leg is on %s, want t2", l.Node)
		}
	}
	if where := v.Volume.AccessibleTopology; len(where) != 1 || where[0].Segments["topology.weft.dev/rack"] != "rt2" {
		t.Errorf("accessible topology = %v, want rack rt2", where)
	}
	r = create(unique("pvc")) // two copies in a rack with one target
	r.AccessibilityRequirements = &spec.TopologyRequirement{Requisite: []*spec.Topology{rack("rt2")}}
	if _, err := client.CreateVolume(within(t, time.Minute), r); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("CreateVolume where there is no space = %v, want ResourceExhausted", err)
	}
	r = create(unique("pvc"))
	r.Parameters["spread"] = "room"
	if _, err := client.CreateVolume(within(t, time.Minute), r); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "parameters: spread=room") {
		t.Errorf("CreateVolume by a label that no node has = %v, want ResourceExhausted that names it", err)
	}
	for segment, want := range map[string]block.Size{"rt2": driveSize, "none": 0} {
		got, err := client.GetCapacity(t.Context(), &spec.GetCapacityRequest{Parameters: map[string]string{"copies": "1", "stripes": "1"}, AccessibleTopology: rack(segment)})
		if err != nil || block.Size(got.AvailableCapacity) > want || want > 0 && got.AvailableCapacity == 0 {
			t.Errorf("GetCapacity of rack %s = %v, %v; want some of %v", segment, got, err, want)
		}
	}
}

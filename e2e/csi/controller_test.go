// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"slices"
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

// within limits a call as a CO does.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A node that is lost is fenced before anybody else gets its volume, and a volume
// that is deleted leaves nothing.
func TestALostNodeIsFencedBeforeTheNextOneGetsTheVolume(t *testing.T) {
	needDevices(t)
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1", "n2"})
	client := c.controller(csi.Config{})
	v, err := client.CreateVolume(within(t, 20*time.Second), create(unique("pvc")))
	if err != nil {
		t.Fatal(err)
	}
	id := v.Volume.VolumeId
	publish := func(node string) error {
		_, err := client.ControllerPublishVolume(within(t, 20*time.Second), &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: raw})
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
	c.nodes["n1"]() // its agent ends, and with it all that could ask it to let go
	c.eventually("n1 offline", func(ctx context.Context) error {
		nodes, err := c.manager.ListNodes(ctx, &pb.ListNodesRequest{})
		if err == nil && slices.ContainsFunc(nodes.Nodes, func(n *pb.Node) bool { return n.Name == "n1" && n.Initiator.Online }) {
			err = errors.New("it is online")
		}
		return err
	})
	if _, err := client.ControllerUnpublishVolume(within(t, 30*time.Second), &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n1"}); err != nil {
		t.Fatalf("unpublish from a lost node = %v", err)
	}
	if v := c.volume(id); v.Attachment != nil || len(v.FenceWaitsFor) > 0 || v.Epoch <= before {
		t.Errorf("after unpublish: attachment %v, fence waits for %v, epoch %d; want none, nobody, more than %d", v.Attachment, v.FenceWaitsFor, v.Epoch, before)
	}
	if err := publish("n2"); err != nil {
		t.Fatalf("publish to the next node = %v", err)
	}
	c.attached(id, "n2")
	if _, err := client.ControllerUnpublishVolume(within(t, 30*time.Second), &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n2"}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.DeleteVolume(within(t, 20*time.Second), &spec.DeleteVolumeRequest{VolumeId: id}); err != nil {
		t.Fatal(err)
	}
	c.nothingLeft()
}

func (c *cluster) volume(id string) *pb.Volume {
	c.t.Helper()
	v, err := c.manager.GetVolume(c.t.Context(), &pb.GetVolumeRequest{Volume: id})
	if err != nil {
		c.t.Fatal(err)
	}
	return v
}

// attached answers when a node has a volume's device.
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

// nothingLeft answers when there are no volumes and all of the drives is free.
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

// cutter cuts one of the calls to the manager: its request or its reply is lost.
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

// A volume's whole life, with the driver cut off and replaced at each of its first
// calls to the manager: it ends all the same, and leaves nothing.
func TestAVolumesLifeIsCutAnywhere(t *testing.T) {
	needDevices(t)
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

// life is a volume's whole life. Each call is made of the first driver, and, if it
// is cut, then of the second one.
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
		err := call(within(t, 20*time.Second), first)
		if status.Code(err) == codes.Unavailable {
			err = call(within(t, 20*time.Second), second)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

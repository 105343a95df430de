// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/csi"
	"weft.dev/weft/proto/block"
)

// podVolume is a volume on one node, as a CO handles it.
type podVolume struct {
	t          testing.TB
	controller spec.ControllerClient
	client     spec.NodeClient
	node, id   string
	capability *spec.VolumeCapability
	context    map[string]string // of the publication
	staging    string
	target     string
}

func fileSystem(mode spec.VolumeCapability_AccessMode_Mode, fsType string) *spec.VolumeCapability {
	return &spec.VolumeCapability{
		AccessMode: &spec.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &spec.VolumeCapability_Mount{Mount: &spec.VolumeCapability_MountVolume{FsType: fsType}},
	}
}

// onNode starts a driver on a node, with the paths that its CO would use.
func (c *cluster) onNode(node string, controller spec.ControllerClient, id string, capability *spec.VolumeCapability) *podVolume {
	c.t.Helper()
	socket := c.startDriver(csi.Config{Mode: csi.ModeNode, Node: block.NodeName(node)})
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { conn.Close() })
	dir := filepath.Join(c.dir, "pods", node+"-"+id)
	return &podVolume{
		t: c.t, controller: controller, client: spec.NewNodeClient(conn), node: node, id: id, capability: capability,
		staging: filepath.Join(dir, "staging"), target: filepath.Join(dir, "target"),
	}
}

func (p *podVolume) attach() {
	p.t.Helper()
	r, err := p.controller.ControllerPublishVolume(within(p.t, 30*time.Second), &spec.ControllerPublishVolumeRequest{VolumeId: p.id, NodeId: p.node, VolumeCapability: p.capability})
	if err != nil {
		p.t.Fatal(err)
	}
	p.context = r.PublishContext
}

func (p *podVolume) detach() {
	p.t.Helper()
	_, err := p.controller.ControllerUnpublishVolume(within(p.t, 60*time.Second), &spec.ControllerUnpublishVolumeRequest{VolumeId: p.id, NodeId: p.node})
	if err != nil {
		p.t.Fatal(err)
	}
}

func (p *podVolume) mount() {
	p.t.Helper()
	ctx := within(p.t, 30*time.Second)
	if err := p.stage(); err != nil {
		p.t.Fatalf("stage on %s = %v", p.node, err)
	}
	if _, err := p.client.NodePublishVolume(ctx, &spec.NodePublishVolumeRequest{
		VolumeId: p.id, PublishContext: p.context, StagingTargetPath: p.staging, TargetPath: p.target, VolumeCapability: p.capability,
	}); err != nil {
		p.t.Fatalf("publish on %s = %v", p.node, err)
	}
}

func (p *podVolume) stage() error {
	p.t.Helper()
	_, err := p.client.NodeStageVolume(within(p.t, 30*time.Second), &spec.NodeStageVolumeRequest{
		VolumeId: p.id, PublishContext: p.context, StagingTargetPath: p.staging, VolumeCapability: p.capability,
	})
	return err
}

func (p *podVolume) unmount() {
	p.t.Helper()
	ctx := within(p.t, 30*time.Second)
	if _, err := p.client.NodeUnpublishVolume(ctx, &spec.NodeUnpublishVolumeRequest{VolumeId: p.id, TargetPath: p.target}); err != nil {
		p.t.Fatalf("unpublish on %s = %v", p.node, err)
	}
	if _, err := p.client.NodeUnstageVolume(ctx, &spec.NodeUnstageVolumeRequest{VolumeId: p.id, StagingTargetPath: p.staging}); err != nil {
		p.t.Fatalf("unstage on %s = %v", p.node, err)
	}
}

// nothingMounted checks that a test's directory has no mounts.
func (c *cluster) nothingMounted() {
	c.t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, filepath.Join(c.dir, "pods")) {
			c.t.Errorf("still mounted: %s", line)
		}
	}
}

// A node is cut off while its pod writes. When it returns, its mount is dead, in use, and
// of an attachment that has ended. The node must be able to remove it while the volume is
// in use elsewhere.
func TestANodeThatComesBackHarmsNobody(t *testing.T) {
	needDevices(t)
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, []string{"t1", "t2"}, []string{"n1", "n2"})
			controller := c.controller(csi.Config{DetachGrace: time.Second})
			writer := fileSystem(spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, fsType)
			id := c.newVolume(controller, writer)

			old := c.onNode("n1", controller, id, writer)
			old.attach()
			old.mount()
			zombie, err := os.Create(filepath.Join(old.target, "data"))
			if err == nil {
				_, err = zombie.WriteString("acknowledged")
			}
			if err == nil {
				err = zombie.Sync()
			}
			if err != nil {
				t.Fatal(err)
			}
			defer zombie.Close()
			c.nodes["n1"]()
			old.detach()

			next := c.onNode("n2", controller, id, writer)
			next.attach()
			next.mount()
			if got, err := os.ReadFile(filepath.Join(next.target, "data")); err != nil || string(got) != "acknowledged" {
				t.Fatalf("on the next node the data is %q, %v", got, err)
			}
			if _, err := zombie.WriteString("late"); err == nil && zombie.Sync() == nil {
				t.Error("the first node could still write")
			}
			old.unmount() // the zombie still has it open
			zombie.Close()

			if err := os.WriteFile(filepath.Join(next.target, "more"), []byte("x"), 0o600); err != nil {
				t.Errorf("the next node cannot write any more: %v", err)
			}
			if got, err := os.ReadFile(filepath.Join(next.target, "data")); err != nil || string(got) != "acknowledged" {
				t.Errorf("after the first node is back the data is %q, %v", got, err)
			}
			next.unmount()
			next.detach()
			c.nothingMounted()
			if _, err := controller.DeleteVolume(within(t, 20*time.Second), &spec.DeleteVolumeRequest{VolumeId: id}); err != nil {
				t.Fatal(err)
			}
			c.nothingLeft()
		})
	}
}

func (c *cluster) newVolume(controller spec.ControllerClient, capability *spec.VolumeCapability) (id string) {
	c.t.Helper()
	return c.newVolumeOf(controller, capability, 2)
}

func (c *cluster) newVolumeOf(controller spec.ControllerClient, capability *spec.VolumeCapability, copies int) (id string) {
	c.t.Helper()
	v, err := controller.CreateVolume(within(c.t, 20*time.Second), &spec.CreateVolumeRequest{
		Name: unique("pvc"), VolumeCapabilities: []*spec.VolumeCapability{capability},
		CapacityRange: &spec.CapacityRange{RequiredBytes: int64(320 * block.MiB)},
		Parameters:    map[string]string{"stripes": "1", "copies": fmt.Sprint(copies)},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return v.Volume.VolumeId
}

// Several nodes read a file system that one node wrote. They write nothing, not even its
// journal.
func TestASharedFileSystemIsRead(t *testing.T) {
	needDevices(t)
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, []string{"t1", "t2"}, []string{"n1"})
			controller := c.controller(csi.Config{})
			writer := fileSystem(spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, fsType)
			id := c.newVolume(controller, writer)
			p := c.onNode("n1", controller, id, writer)
			p.attach()
			p.mount()
			if err := os.WriteFile(filepath.Join(p.target, "data"), []byte("written"), 0o600); err != nil {
				t.Fatal(err)
			}
			p.unmount()
			p.detach()

			for reader := range 2 {
				p = c.onNode("n1", controller, id, fileSystem(spec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, ""))
				p.attach()
				p.mount()
				if got, err := os.ReadFile(filepath.Join(p.target, "data")); err != nil || string(got) != "written" {
					t.Errorf("reader %d finds %q, %v", reader, got, err)
				}
				if err := os.WriteFile(filepath.Join(p.target, fmt.Sprint(reader)), nil, 0o600); err == nil {
					t.Errorf("reader %d could write", reader)
				}
				p.unmount()
				p.detach()
			}
			c.nothingMounted()
		})
	}
}

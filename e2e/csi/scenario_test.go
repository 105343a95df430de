// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"
	"log/slog"
	"path"
	"strconv"
	"strings"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/csi"
	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// driverPort is the client machine's port that forwards to the driver's socket.
const driverPort = 9100

// podOn is a volume on a machine whose kernel carries its I/O. The driver runs there as a
// separate program.
func podOn(t *testing.T, b *testbed.Bed, m *vm.Machine, controller spec.ControllerClient, id string, capability *spec.VolumeCapability) *podVolume {
	t.Helper()
	const socket = "/run/csi.sock"
	for name, argv := range map[string][]string{
		"csi": {"weft", "csi", "--mode", "node", "--node", m.Name(), "--manager", b.ManagerAddr(), "--insecure-plain-tcp",
			"--endpoint", "unix://" + socket, "--kubelet-dir", "/var/lib/kubelet", "--registration", "off"},
		"relay": {"workload", "relay", fmt.Sprintf(":%d", driverPort), socket},
	} {
		if _, err := m.Start(t.Context(), name, argv...); err != nil {
			t.Fatalf("start %s on %s: %v", name, m.Name(), err)
		}
	}
	conn, err := grpc.NewClient("passthrough:///"+m.Forwarded(driverPort), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	client := spec.NewNodeClient(conn)
	b.Eventually(time.Minute, "the driver of "+m.Name()+" answers", func(ctx context.Context) error {
		_, err := client.NodeGetInfo(ctx, &spec.NodeGetInfoRequest{})
		return err
	})
	dir := "/var/lib/kubelet/pods/" + id
	if out, err := m.Shell(t.Context(), "mkdir -p "+dir); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return &podVolume{
		t: t, controller: controller, client: client, node: m.Name(), id: id, capability: capability,
		staging: path.Join(dir, "staging"), target: path.Join(dir, "target"),
	}
}

// A pod's mirrored volume on the kernel data path. It grows while mounted and written. A
// target dies: the writes stall and see no error. Then the pod's machine dies, and a pod on
// another machine finds every acknowledged write.
func TestScenarioPodsVolumeOutlivesTargetAndClient(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Clients: 2, ClientPorts: []int{driverPort}})
	c1, c2 := b.Clients[0], b.Clients[1]
	c := &cluster{t: t, dir: t.TempDir(), log: slog.New(slog.DiscardHandler), manager: b.API}
	controller := c.controller(csi.Config{Manager: b.API})
	capability := fileSystem(spec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, "ext4")
	v, err := controller.CreateVolume(within(t, time.Minute), &spec.CreateVolumeRequest{
		Name: "db1", VolumeCapabilities: []*spec.VolumeCapability{capability},
		CapacityRange: &spec.CapacityRange{RequiredBytes: int64(512 * block.MiB)},
		Parameters:    map[string]string{"stripes": "2", "copies": "2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	id := v.Volume.VolumeId
	name := volumeName(t, b, id)

	first := podOn(t, b, c1, controller, id, capability)
	first.attach()
	first.mount()
	// Write the file once, so that later writes change only its data.
	const span = 16 // MiB
	records := path.Join(first.target, "records")
	if out, err := c1.Shell(t.Context(), fmt.Sprintf("dd if=/dev/zero of=%s bs=1M count=%d conv=fsync 2>&1", records, span)); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w := b.Write(c1, records, span, 200, 1)
	w.AwaitProgress(200, time.Minute)

	const grown = 768 * block.MiB
	first.grow(b, grown)
	w.AwaitProgress(200, time.Minute)
	w.NoErrors()
	holds(t, c1, first.target, grown)

	b.WaitHealth(name, pb.Health_HEALTH_HEALTHY, 2*time.Minute) // on a slow machine a copy may have been lost
	dead := b.Holder(name, 0, 1)
	dead.Kill()
	w.AwaitProgress(200, time.Minute)
	w.NoErrors()
	stall, _ := w.Stall()
	t.Logf("%s was killed: the pod's writes stalled for %v", dead.Name(), stall.Round(time.Millisecond))
	b.Up(dead)
	b.WaitHealth(name, pb.Health_HEALTH_HEALTHY, 2*time.Minute)
	w.AwaitProgress(50, time.Minute)

	c1.Kill()
	w.Abandon()
	acks := testbed.Acks{}.Add(w)
	began := time.Now()
	first.detach()
	second := podOn(t, b, c2, controller, id, capability)
	second.attach()
	second.stageAtLast(b)
	second.mount()
	t.Logf("mounted on %s %v after %s was killed", c2.Name(), time.Since(began).Round(time.Second), c1.Name())
	b.Verify(c2, path.Join(second.target, "records"), span, acks)
	holds(t, c2, second.target, grown)
	second.unmount()
	if out, err := c2.Shell(t.Context(), "e2fsck -fn /dev/weft/"+name); err != nil {
		t.Errorf("the file system is damaged: %v\n%s", err, out)
	}
	second.detach()
	if _, err := controller.DeleteVolume(within(t, time.Minute), &spec.DeleteVolumeRequest{VolumeId: id}); err != nil {
		t.Fatal(err)
	}
}

// stageAtLast retries until the volume is staged, as a CO does: its copies must be made
// equal first.
func (p *podVolume) stageAtLast(b *testbed.Bed) {
	p.t.Helper()
	b.Eventually(3*time.Minute, "the volume is staged on "+p.node, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		_, err := p.client.NodeStageVolume(ctx, &spec.NodeStageVolumeRequest{
			VolumeId: p.id, PublishContext: p.context, StagingTargetPath: p.staging, VolumeCapability: p.capability,
		})
		return err
	})
}

// grow expands a volume, and the file system on its node, as a CO does.
func (p *podVolume) grow(b *testbed.Bed, size block.Size) {
	p.t.Helper()
	bytes := &spec.CapacityRange{RequiredBytes: int64(size)}
	again := func(what string, do func(context.Context) error) {
		b.Eventually(3*time.Minute, what, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			return do(ctx)
		})
	}
	again("the volume grows", func(ctx context.Context) error {
		r, err := p.controller.ControllerExpandVolume(ctx, &spec.ControllerExpandVolumeRequest{VolumeId: p.id, CapacityRange: bytes, VolumeCapability: p.capability})
		if err == nil && !r.NodeExpansionRequired {
			p.t.Fatalf("expand of a file system = %v, want it to require a call to the node too", r)
		}
		return err
	})
	again("the file system grows", func(ctx context.Context) error {
		r, err := p.client.NodeExpandVolume(ctx, &spec.NodeExpandVolumeRequest{
			VolumeId: p.id, VolumePath: p.target, StagingTargetPath: p.staging, CapacityRange: bytes, VolumeCapability: p.capability,
		})
		if err == nil && r.CapacityBytes != int64(size) {
			p.t.Fatalf("expand on %s = %v, want %v", p.node, r, size)
		}
		return err
	})
}

// holds checks that a mounted file system is as large as its volume, except for its own
// metadata.
func holds(t *testing.T, m *vm.Machine, dir string, size block.Size) {
	t.Helper()
	out, err := m.Shell(t.Context(), fmt.Sprintf("df -m %s | tail -1 | tr -s ' ' | cut -d' ' -f2", dir))
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if has, err := strconv.Atoi(strings.TrimSpace(out)); err != nil || block.Size(has)*block.MiB < size*8/10 {
		t.Errorf("%s on %s has %s MiB of %v (%v)", dir, m.Name(), out, size, err)
	}
}

func volumeName(t *testing.T, b *testbed.Bed, id string) string {
	t.Helper()
	v, err := b.API.GetVolume(t.Context(), &pb.GetVolumeRequest{Volume: id})
	if err != nil {
		t.Fatal(err)
	}
	return v.Name
}

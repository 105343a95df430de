// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/csi"
)

// times are the durations of one kind of step.
type times []time.Duration

// at is a quantile in milliseconds.
func (t times) at(q float64) float64 {
	slices.Sort(t)
	return float64(t[int(q*float64(len(t)-1))]) / float64(time.Millisecond)
}

// BenchmarkAttach measures what a pod waits for: from ControllerPublishVolume to the
// mounted file system. The driver, the cluster and its user-space data path run in one
// process. The volume is mirrored and already has its file system.
func BenchmarkAttach(b *testing.B) {
	p := newPod(b)
	id, err := p.create(b.Context(), unique("bench"))
	if err != nil {
		b.Fatal(err)
	}
	if _, _, err := p.attach(b.Context(), id); err != nil { // creates the file system
		b.Fatal(err)
	}
	if err := p.detach(b.Context(), id); err != nil {
		b.Fatal(err)
	}
	var published, mounted times
	for b.Loop() {
		to, whole, err := p.attach(b.Context(), id)
		if err != nil {
			b.Fatal(err)
		}
		published, mounted = append(published, to), append(mounted, whole)
		if err := p.detach(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
	if err := p.remove(b.Context(), id); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(published.at(0.5), "published-p50-ms")
	b.ReportMetric(published.at(0.99), "published-p99-ms")
	b.ReportMetric(mounted.at(0.5), "mounted-p50-ms")
	b.ReportMetric(mounted.at(0.99), "mounted-p99-ms")
}

// BenchmarkVolumes measures volumes per second, eight at a time: created, attached to a
// node with a new file system, detached and deleted.
func BenchmarkVolumes(b *testing.B) {
	p := newPod(b)
	lives := 0
	start := time.Now()
	for b.Loop() {
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				if err := p.life(b.Context()); err != nil {
					b.Error(err)
				}
			})
		}
		all.Wait()
		lives += 8
	}
	b.ReportMetric(float64(lives)/time.Since(start).Seconds(), "volumes/s")
}

// pod does what a CO does for a pod.
type pod struct {
	controller spec.ControllerClient
	node       spec.NodeClient
	dir        string
}

// newPod starts a cluster of two targets and a node. One driver serves the controller and
// the node service.
func newPod(b *testing.B) pod {
	b.Helper()
	needDevices(b)
	c := newCluster(b, []string{"t1", "t2"}, []string{"n1"})
	conn, err := grpc.NewClient("unix://"+c.startDriver(csi.Config{Node: "n1"}), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	p := pod{spec.NewControllerClient(conn), spec.NewNodeClient(conn), filepath.Join(c.dir, "pod")}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		b.Fatal(err)
	}
	return p
}

var mounted = &spec.VolumeCapability{AccessMode: raw.AccessMode, AccessType: &spec.VolumeCapability_Mount{Mount: &spec.VolumeCapability_MountVolume{FsType: "ext4"}}}

func (p pod) paths(id string) (staging, target string) {
	return filepath.Join(p.dir, id+".staging"), filepath.Join(p.dir, id+".target")
}

func (p pod) create(ctx context.Context, name string) (id string, err error) {
	r := create(name)
	r.VolumeCapabilities = []*spec.VolumeCapability{mounted}
	v, err := p.controller.CreateVolume(ctx, r)
	return v.GetVolume().GetVolumeId(), err
}

// attach returns the time until the volume was granted, and until the pod had its file
// system.
func (p pod) attach(ctx context.Context, id string) (published, whole time.Duration, err error) {
	staging, target := p.paths(id)
	start := time.Now()
	granted, err := p.controller.ControllerPublishVolume(ctx, &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "n1", VolumeCapability: mounted})
	if err != nil {
		return 0, 0, err
	}
	published = time.Since(start)
	if err := os.MkdirAll(staging, 0o700); err != nil {
		return 0, 0, err
	}
	_, err = p.node.NodeStageVolume(ctx, &spec.NodeStageVolumeRequest{
		VolumeId: id, StagingTargetPath: staging, VolumeCapability: mounted, PublishContext: granted.PublishContext,
	})
	if err != nil {
		return 0, 0, err
	}
	_, err = p.node.NodePublishVolume(ctx, &spec.NodePublishVolumeRequest{
		VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: mounted, PublishContext: granted.PublishContext,
	})
	return published, time.Since(start), err
}

func (p pod) detach(ctx context.Context, id string) error {
	staging, target := p.paths(id)
	if _, err := p.node.NodeUnpublishVolume(ctx, &spec.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target}); err != nil {
		return err
	}
	if _, err := p.node.NodeUnstageVolume(ctx, &spec.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
		return err
	}
	_, err := p.controller.ControllerUnpublishVolume(ctx, &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n1"})
	return err
}

func (p pod) remove(ctx context.Context, id string) error {
	_, err := p.controller.DeleteVolume(ctx, &spec.DeleteVolumeRequest{VolumeId: id})
	return err
}

func (p pod) life(ctx context.Context) error {
	id, err := p.create(ctx, unique("bench"))
	if err != nil {
		return err
	}
	if _, _, err := p.attach(ctx, id); err != nil {
		return err
	}
	if err := p.detach(ctx, id); err != nil {
		return err
	}
	return p.remove(ctx, id)
}

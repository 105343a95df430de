// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// A volume is the same on both data paths. Data written through the kernel is readable
// through user space and vice versa, after a detach and after the writer's death. A target
// may serve the same drives by either path.
func TestScenarioCrossAttach(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Clients: 2})
	c := cross{T: t, Bed: b, acks: testbed.Acks{}, next: 1}
	kernel, user := b.Clients[0], b.Clients[1]
	b.Datapath(kernel, "kernel")
	b.Datapath(user, "user")
	b.Create("db1", "64MiB", 2, 2)

	for _, m := range []*vm.Machine{kernel, b.Targets[0]} {
		doctor := shell(t, m, "weft doctor")
		t.Logf("weft doctor on %s:\n%s", m.Name(), doctor)
		agent := map[byte]string{'c': "initiator", 't': "target"}[m.Name()[0]]
		if !strings.Contains(doctor, "auto: the "+agent+" uses the kernel") {
			t.Errorf("weft doctor on %s does not say that its %s can use the kernel", m.Name(), agent)
		}
	}

	// Cleanly, there and back.
	c.writeAndDetach(kernel)
	c.writeAndDetach(user)

	// The kernel client loses power while writing, and user space takes over.
	c.dieUnderWrites(kernel, func() { kernel.Kill() })
	c.attachAfterDeath(user)
	comparedWhatTargetsList(t, b, user)
	c.detach()

	// The process of the user-space data path is killed while writing, and the kernel takes
	// over.
	b.Up(kernel)
	c.dieUnderWrites(user, func() {
		if err := b.Daemon(user).Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	c.attachAfterDeath(kernel)
	comparedWhatTargetsList(t, b, kernel)
	c.detach()
	b.Datapath(user, "user")

	// One machine switches from the kernel to user space and back.
	b.Datapath(kernel, "user")
	c.writeAndDetach(kernel)
	b.Datapath(kernel, "kernel")
	c.writeAndDetach(kernel)
	c.targetChanges(b.Targets[0], kernel, user)
}

// cross holds what is known of db1 while it moves between data paths.
type cross struct {
	*testing.T
	*testbed.Bed
	acks   testbed.Acks
	next   uint64 // next unused sequence number
	device string
	writer *testbed.Writer
}

// attach attaches db1 and verifies all writes acknowledged so far.
func (c *cross) attach(client *vm.Machine) {
	c.Helper()
	c.device = c.Attach("db1", client)
	c.Verify(client, c.device, span, c.acks)
}

func (c *cross) write(client *vm.Machine) {
	c.writer = c.Write(client, c.device, span, 0, c.next)
	c.writer.AwaitProgress(100, time.Minute)
}

// written adds the writer's acknowledged writes.
func (c *cross) written() {
	c.acks.Add(c.writer)
	c.next = c.writer.Next() + 1000
}

// detach detaches db1. After that, the copies of each column must be equal, byte for byte.
func (c *cross) detach() {
	c.Helper()
	c.Detach("db1")
	c.copiesEqual()
}

func (c *cross) writeAndDetach(client *vm.Machine) {
	c.Helper()
	c.attach(client)
	c.write(client)
	c.writer.Stop()
	c.written()
	c.detach()
}

// dieUnderWrites attaches db1 and kills the client while it writes.
func (c *cross) dieUnderWrites(client *vm.Machine, die func()) {
	c.Helper()
	c.attach(client)
	c.write(client)
	die()
	c.writer.Abandon()
	c.written()
}

// attachAfterDeath attaches db1 to a new client after the old one died; its legs are fenced
// first.
func (c *cross) attachAfterDeath(client *vm.Machine) {
	c.Helper()
	c.Weft("detach", "db1", "--force")
	c.attach(client)
	everyLegFenced(c.T, c.Bed)
	c.write(client)
	c.writer.Stop()
	c.written()
}

// targetChanges switches a target to user space and back to the kernel: while db1 is
// detached, and while it is attached and written.
func (c *cross) targetChanges(target, kernel, user *vm.Machine) {
	before := c.drives()
	c.Datapath(target, "user")
	c.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, time.Minute)
	c.writeAndDetach(kernel)
	c.attach(user)
	c.write(user)
	c.Datapath(target, "kernel")
	c.writer.AwaitProgress(100, time.Minute)
	c.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, time.Minute)
	c.writer.Stop()
	c.written()
	c.detach()
	c.attach(kernel)
	c.detach()
	if diff := cmp.Diff(before, c.drives(), protocmp.Transform()); diff != "" {
		c.Errorf("the drives have changed (-before +after):\n%s", diff)
	}
}

// drives lists the drives without their health, which changes with time.
func (c *cross) drives() []*pb.Drive {
	c.Helper()
	all, err := c.API.ListDrives(c.Context(), &pb.ListDrivesRequest{})
	if err != nil {
		c.Fatal(err)
	}
	for _, d := range all.Drives {
		d.Health = nil
	}
	return all.Drives
}

// copiesEqual reads the legs of db1 from the targets' drives and compares those that mirror
// one another.
func (c *cross) copiesEqual() {
	c.Helper()
	first := map[uint32]*pb.Leg{}
	for _, leg := range c.Volume("db1").Legs {
		if leg.State != pb.LegState_LEG_STATE_IN_SYNC {
			c.Fatalf("leg %d.%d is %v, want it in sync", leg.Column, leg.Copy, leg.State)
		}
		other := first[leg.Column]
		if other == nil {
			first[leg.Column] = leg
			continue
		}
		if at := differ(c.T, c.leg(leg), c.leg(other)); at >= 0 {
			c.Fatalf("the copies of column %d on %s and %s differ at byte %d", leg.Column, leg.Node, other.Node, at)
		}
	}
}

// leg opens the bytes of a leg: its extents, as package target/drive lays them out.
func (c *cross) leg(leg *pb.Leg) io.ReadCloser {
	c.Helper()
	const labels = 8 * block.MiB // before the first extent
	drives, err := c.API.ListDrives(c.Context(), &pb.ListDrivesRequest{Node: leg.Node})
	if err != nil {
		c.Fatal(err)
	}
	for _, d := range drives.Drives {
		if d.Id != leg.DriveId {
			continue
		}
		for _, target := range c.Targets {
			if target.Name() != leg.Node {
				continue
			}
			f, err := os.Open(target.Drive(d.Serial).Path())
			if err != nil {
				c.Fatal(err)
			}
			var parts []io.Reader
			for _, e := range leg.Extents {
				parts = append(parts, io.NewSectionReader(f, int64(labels+block.Size(e.Start)*block.ExtentSize), int64(block.Size(e.Count)*block.ExtentSize)))
			}
			return struct {
				io.Reader
				io.Closer
			}{io.MultiReader(parts...), f}
		}
	}
	c.Fatalf("the drive of leg %s is not there", leg.Id)
	return nil
}

// differ returns the offset of the first MiB in which two readers differ, or -1.
func differ(t *testing.T, a, b io.ReadCloser) int64 {
	t.Helper()
	defer a.Close()
	defer b.Close()
	p, q := make([]byte, block.MiB), make([]byte, block.MiB)
	for at := int64(0); ; at += int64(block.MiB) {
		n, err := io.ReadFull(a, p)
		m, _ := io.ReadFull(b, q)
		if !bytes.Equal(p[:n], q[:m]) {
			return at
		}
		if err != nil {
			return -1
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// early is a manager that says that snapshots are ready before they are.
func early(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
	err := next(ctx, method, request, reply, conn, o...)
	if v, ok := reply.(*pb.Volume); ok && strings.Contains(v.GetName(), "@") && v.GetState() == pb.VolumeState_VOLUME_STATE_CREATING {
		v.State = pb.VolumeState_VOLUME_STATE_READY
	}
	return err
}

// oneByOne is a manager that takes the snapshots of a group one after the other.
func oneByOne(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
	in, ok := request.(*pb.CreateSnapshotsRequest)
	if !ok {
		return next(ctx, method, request, reply, conn, o...)
	}
	for _, one := range in.GetSnapshots() {
		part := &pb.CreateSnapshotsRequest{Snapshots: []*pb.NewSnapshot{proto.CloneOf(one)}}
		if err := next(ctx, method, part, reply, conn, o...); err != nil {
			return err
		}
		time.Sleep(300 * time.Millisecond)
	}
	return nil
}

// staysAsItIs is a manager that says that volumes have gone back to a snapshot, and does nothing.
func staysAsItIs(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
	if _, ok := request.(*pb.RestoreVolumeRequest); ok {
		return nil
	}
	return next(ctx, method, request, reply, conn, o...)
}

// sealsNothing is a manager that says that volumes are sealed, and does nothing.
func sealsNothing(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
	if _, ok := request.(*pb.SealVolumeRequest); ok {
		return nil
	}
	return next(ctx, method, request, reply, conn, o...)
}

// heads are the newest devices of volumes.
type heads struct {
	mu     sync.Mutex
	newest map[block.VolumeName]block.Device
}

// another is a device in place of the one that a host has made of a volume.
type another struct {
	block.Device
	heads *heads
	of    block.VolumeName
	ops   func(op block.Op) bool
}

// Submit sends some operations to the newest device of another volume.
func (d another) Submit(io *block.IO) {
	d.heads.mu.Lock()
	other := d.heads.newest[d.of]
	d.heads.mu.Unlock()
	if other == nil || !d.ops(io.Op) || uint64(io.Off+io.Len) > uint64(other.Geometry().Size) {
		other = d.Device
	}
	other.Submit(io)
}

// instead makes hosts use the first volume for some operations on some others.
func instead(c *cluster, is func(name string) bool, ops func(block.Op) bool) {
	h := &heads{newest: map[block.VolumeName]block.Device{}}
	c.shows = func(volume block.Device, name block.VolumeName) block.Device {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.newest[name] = volume
		if !is(string(name)) {
			return volume
		}
		return another{volume, h, volumeName, ops}
	}
}

// TestSnapshotsThatLieAreFoundOut makes snapshots and clones misbehave: a suite that did not notice that
// would notice nothing. Some lies need several lives: with -thin only.
func TestSnapshotsThatLieAreFoundOut(t *testing.T) {
	isClone := func(n string) bool { return strings.HasPrefix(n, "k") && !strings.Contains(n, "@") }
	isSnapshot := func(n string) bool { return strings.HasPrefix(n, volumeName+"@") }
	for what, lie := range map[string]struct {
		slow bool
		tell func(*cluster)
	}{
		"a snapshot is ready before it is frozen": {false, func(c *cluster) { c.lieOfShots = early }},
		"a clone writes to another volume":        {false, func(c *cluster) { instead(c, isClone, func(op block.Op) bool { return op == block.OpWrite }) }},
		"a volume does not go back to a snapshot": {true, func(c *cluster) { c.lieOfShots = staysAsItIs }},
		"a sealed volume is not sealed":           {true, func(c *cluster) { c.lieOfShots = sealsNothing }},
		"a group is taken one after the other":    {true, func(c *cluster) { c.lieOfShots = oneByOne }},
		"a snapshot is not frozen":                {true, func(c *cluster) { instead(c, isSnapshot, func(op block.Op) bool { return op == block.OpRead }) }},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			if lie.slow && !*thinly {
				t.Skip("it takes several lives: -thin")
			}
			for seed := uint64(1); seed <= 12; seed++ {
				said := suspect(t, seed, 12, func(c *cluster) {
					c.thin = true
					if lie.slow {
						c.shotsEvery = 300 * time.Millisecond
					}
					lie.tell(c)
				})
				if len(said) > 0 {
					t.Logf("with seed %d: %s", seed, said[0])
					return
				}
			}
			t.Error("nobody noticed")
		})
	}
}

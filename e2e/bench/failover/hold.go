// SPDX-License-Identifier: Apache-2.0

package failover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"weft.dev/weft/proto/pb"
)

// Holds measures how long a write waits while a snapshot of its volume is taken. The volume is thin, and
// nothing fails. In each round one snapshot is taken, and then deleted. The longest write of the round
// counts, so the first writes to chunks that the snapshot has are among them. Beside it stand the longest
// writes of rounds in which nothing is taken, and how long a small write with a flush takes to one of the
// files that the drives are: a snapshot needs at least four of these after one another, two in the
// manager's store and two on the drives.
func Holds(ctx context.Context, o Options) (retErr error) {
	c, err := newCluster(ctx, o.Weft, 1, true)
	if err != nil {
		return err
	}
	defer func() { retErr = errors.Join(retErr, c.close()) }()
	var held, quiet, taken, flushed []time.Duration
	for i := range o.Rounds {
		longest, err := c.longestWrite(func() error { time.Sleep(holdRound); return nil })
		if err != nil {
			return err
		}
		quiet = append(quiet, longest)
		began := time.Now()
		longest, err = c.longestWrite(func() error {
			if err := c.snapshot(ctx, fmt.Sprintf("s%d", i)); err != nil {
				return err
			}
			taken = append(taken, time.Since(began))
			time.Sleep(max(0, holdRound-time.Since(began)))
			return nil
		})
		if err != nil {
			return fmt.Errorf("round %d: %w\n%s", i+1, err, c.explain(ctx))
		}
		held = append(held, longest)
		if err := c.deleteSnapshot(ctx, fmt.Sprintf("%s@s%d", volume, i)); err != nil {
			return err
		}
		flush, err := c.flush()
		if err != nil {
			return err
		}
		flushed = append(flushed, flush)
	}
	fmt.Fprintf(o.Out, "a snapshot of a volume in use, %d times\n\n", o.Rounds)
	out := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "\tmedian\tp90\tp99\tmost\t")
	for _, row := range []struct {
		name string
		all  []time.Duration
	}{{"longest write, snapshot taken", held}, {"longest write, none taken", quiet}, {"from the request to the answer", taken}, {"a flush of 4 KiB", flushed}} {
		fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%s\t\n", row.name, at(row.all, 50), at(row.all, 90), at(row.all, 99), at(row.all, 100))
	}
	return out.Flush()
}

// holdRound is how long a round takes at least.
const holdRound = 300 * time.Millisecond

// longestWrite returns the longest write while something is done.
func (c *cluster) longestWrite(do func() error) (time.Duration, error) {
	c.client.writer.reset()
	if err := do(); err != nil {
		return 0, err
	}
	return c.client.writer.longest(), c.client.writer.failed()
}

// snapshot takes a snapshot, and waits until it is complete.
func (c *cluster) snapshot(ctx context.Context, name string) error {
	if _, err := c.manager.CreateSnapshots(ctx, &pb.CreateSnapshotsRequest{Snapshots: []*pb.NewSnapshot{{Volume: volume, Name: name}}}); err != nil {
		return err
	}
	return c.eventually(ctx, "the snapshot", func(ctx context.Context) error {
		v, err := c.manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume + "@" + name})
		if err == nil && v.GetState() != pb.VolumeState_VOLUME_STATE_READY {
			err = fmt.Errorf("it is %v", v.GetState())
		}
		return err
	})
}

func (c *cluster) deleteSnapshot(ctx context.Context, name string) error {
	if _, err := c.manager.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: name}); err != nil {
		return err
	}
	return c.eventually(ctx, "no snapshot", func(ctx context.Context) error {
		all, err := c.manager.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true})
		if err == nil && len(all.GetVolumes()) > 0 {
			err = errors.New("it is still there")
		}
		return err
	})
}

// flush writes 4 KiB beside the drives and waits until they are durable.
func (c *cluster) flush() (took time.Duration, err error) {
	f, err := os.OpenFile(filepath.Join(c.dir, "flush"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer f.Close() //nolint:errcheck // nothing of it is read
	began := time.Now()
	if _, err := f.WriteAt(make([]byte, 4096), 0); err != nil {
		return 0, err
	}
	err = f.Sync()
	return time.Since(began), err
}

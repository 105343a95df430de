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

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// Holds measures how long a write waits while a snapshot of its volume is taken, alone and in a group of 16 volumes, and
// while one is deleted; and how long snapshots, clones and going back take for the one who asks, for a small and a large
// volume. The volumes are thin, and nothing fails.
func Holds(ctx context.Context, o Options) (retErr error) {
	c, err := newCluster(ctx, o.Weft, 1, true)
	if err != nil {
		return err
	}
	defer func() { retErr = errors.Join(retErr, c.close()) }()
	if err := c.holds(ctx, o, []string{volume}); err != nil {
		return fmt.Errorf("%w\n%s", err, c.explain(ctx))
	}
	if err := c.lifetimes(ctx, o); err != nil {
		return err
	}
	group := []string{volume}
	for len(group) < groupOf {
		name := fmt.Sprintf("group%d", len(group))
		if err := c.attach(ctx, name, clientName); err != nil {
			return err
		}
		group = append(group, name)
	}
	return c.holds(ctx, o, group)
}

// groupOf is how many volumes a group has.
const groupOf = 16

// holds takes a snapshot of some volumes in each round, and deletes it. The longest write of the round to any of them
// counts, so the first writes to chunks that the snapshot has are among them. Beside it stand the longest
// writes of rounds in which nothing is taken, and how long a small write with a flush takes to one of the
// files that the drives are: a snapshot needs at least four of these after one another, two in the
// manager's store and two on the drives.
func (c *cluster) holds(ctx context.Context, o Options, volumes []string) error {
	var held, quiet, taken, deleted, flushed []time.Duration
	for i := range o.Rounds {
		longest, _, err := c.longestWrite(func() error { return nil })
		if err != nil {
			return err
		}
		quiet = append(quiet, longest)
		name := fmt.Sprintf("s%d", i)
		longest, took, err := c.longestWrite(func() error { return c.snapshot(ctx, name, volumes...) })
		if err != nil {
			return fmt.Errorf("round %d: %w", i+1, err)
		}
		held, taken = append(held, longest), append(taken, took)
		if longest, _, err = c.longestWrite(func() error { return c.deleteSnapshots(ctx, name, volumes...) }); err != nil {
			return err
		}
		deleted = append(deleted, longest)
		flush, err := c.flush()
		if err != nil {
			return err
		}
		flushed = append(flushed, flush)
	}
	return printDurations(o, fmt.Sprintf("a snapshot of %d volumes in use, %d times", len(volumes), o.Rounds), []durations{
		{"longest write, snapshot taken", held}, {"longest write, snapshot deleted", deleted}, {"longest write, nothing done", quiet},
		{"from the request to the answer", taken}, {"a flush of 4 KiB", flushed},
	})
}

type durations struct {
	name string
	all  []time.Duration
}

func printDurations(o Options, title string, rows []durations) error {
	fmt.Fprintf(o.Out, "\n%s\n\n", title)
	out := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "\tmedian\tp90\tp99\tmost\t")
	for _, row := range rows {
		fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%s\t\n", row.name, at(row.all, 50), at(row.all, 90), at(row.all, 99), at(row.all, 100))
	}
	return out.Flush()
}

// lifetimes measures what is done to volumes that no host has.
func (c *cluster) lifetimes(ctx context.Context, o Options) error {
	for _, size := range []uint64{1 << 30, 32 << 30} {
		name := fmt.Sprintf("size%d", size>>30)
		if err := c.create(ctx, &pb.CreateVolumeRequest{Name: name, SizeBytes: size, Copies: copies, Stripes: 1, Thin: true}); err != nil {
			return err
		}
		steps := []struct {
			name string
			do   func(snapshot, clone string) error
		}{
			{"snapshot", func(snapshot, _ string) error { return c.snapshot(ctx, snapshot, name) }},
			{"clone", func(snapshot, clone string) error {
				return c.create(ctx, &pb.CreateVolumeRequest{Name: clone, From: name + "@" + snapshot})
			}},
			{"delete the clone", func(_, clone string) error { return c.deleted(ctx, clone) }},
			{"go back to the snapshot", func(snapshot, _ string) error { return c.goBack(ctx, name, name+"@"+snapshot) }},
			{"delete the snapshot", func(snapshot, _ string) error { return c.deleteSnapshots(ctx, snapshot, name) }},
		}
		rows := make([]durations, len(steps))
		for round := range o.Rounds {
			for i, step := range steps {
				began := time.Now()
				if err := step.do(fmt.Sprintf("s%d", round), fmt.Sprintf("%s-clone%d", name, round)); err != nil {
					return fmt.Errorf("%s, %d GiB, round %d: %w", step.name, size>>30, round+1, err)
				}
				rows[i].name, rows[i].all = step.name, append(rows[i].all, time.Since(began))
			}
		}
		if err := printDurations(o, fmt.Sprintf("for the one who asks, a volume of %d GiB that no host has, %d times", size>>30, o.Rounds), rows); err != nil {
			return err
		}
	}
	return nil
}

// holdRound is how long a round takes at least.
const holdRound = 300 * time.Millisecond

// longestWrite returns the longest write to any volume in the round in which something is done, and how long that took.
func (c *cluster) longestWrite(do func() error) (longest, took time.Duration, err error) {
	for _, w := range c.client.writers() {
		w.reset()
	}
	began := time.Now()
	if err := do(); err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	time.Sleep(holdRound - took)
	for _, w := range c.client.writers() {
		longest, err = max(longest, w.longest()), errors.Join(err, w.failed())
	}
	return longest, took, err
}

// snapshot takes a snapshot of volumes at one moment, and waits until it is complete.
func (c *cluster) snapshot(ctx context.Context, name string, of ...string) error {
	r := &pb.CreateSnapshotsRequest{}
	for _, v := range of {
		r.Snapshots = append(r.Snapshots, &pb.NewSnapshot{Volume: v, Name: name})
	}
	if _, err := c.manager.CreateSnapshots(ctx, r); err != nil {
		return err
	}
	for _, v := range of {
		if err := c.ready(ctx, v+"@"+name); err != nil {
			return err
		}
	}
	return nil
}

// ready waits until a volume or a snapshot is ready.
func (c *cluster) ready(ctx context.Context, name string) error {
	return c.eventually(ctx, name, func(ctx context.Context) error {
		v, err := c.manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: name})
		if err == nil && (v.GetState() != pb.VolumeState_VOLUME_STATE_READY || v.GetRestoringTo() != "") {
			err = fmt.Errorf("it is %v, going back to %q", v.GetState(), v.GetRestoringTo())
		}
		return err
	})
}

func (c *cluster) create(ctx context.Context, r *pb.CreateVolumeRequest) error {
	if _, err := c.manager.CreateVolume(ctx, r); err != nil {
		return err
	}
	return c.ready(ctx, r.GetName())
}

func (c *cluster) goBack(ctx context.Context, volume, snapshot string) error {
	if _, err := c.manager.RestoreVolume(ctx, &pb.RestoreVolumeRequest{Volume: volume, Snapshot: snapshot}); err != nil {
		return err
	}
	return c.ready(ctx, volume)
}

func (c *cluster) deleteSnapshots(ctx context.Context, name string, of ...string) error {
	var all []string
	for _, v := range of {
		all = append(all, v+"@"+name)
	}
	return c.deleted(ctx, all...)
}

// deleted deletes volumes or snapshots, and waits until they are gone.
func (c *cluster) deleted(ctx context.Context, names ...string) error {
	for _, name := range names {
		if _, err := c.manager.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: name}); err != nil {
			return err
		}
	}
	for _, name := range names {
		err := c.eventually(ctx, "no "+name, func(ctx context.Context) error {
			switch _, err := c.manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: name}); {
			case status.Code(err) == codes.NotFound:
				return nil
			case err != nil:
				return err
			}
			return errors.New("it is still there")
		})
		if err != nil {
			return err
		}
	}
	return nil
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

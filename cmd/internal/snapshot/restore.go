// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

type restoreOptions struct {
	volume, to, keep string
	acceptDataLoss   bool
	wait             bool
}

// NewRestore is the command that makes a volume what one of its snapshots holds.
func NewRestore(g *cli.Globals) *cobra.Command {
	var o restoreOptions
	cmd := &cobra.Command{
		Use:   "restore VOLUME --to " + argument + " {--keep NAME | --accept-data-loss}",
		Short: "Make a volume what one of its snapshots holds",
		Long: `Make a volume what one of its snapshots holds. No host may have the volume; its
name, its size and its other snapshots stay. Nothing is copied.

What was written since the snapshot is gone. With --keep, another snapshot is
taken before, called VOLUME@NAME, which holds it: so a restore can be undone by
another one.

A copy that was not in sync when the snapshot was taken, or whose target does not
answer, cannot go back. It is made again from the others when the volume is next
attached.

The command waits until the volume has gone back. Until then no host can have it.`,
		Example: `  weft volume restore db1 --to db1@mon --keep before
  weft volume restore db1 --to db1@mon --accept-data-loss`,
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume = args[0]
			return runRestore(ctx, api, o, out)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&o.to, "to", "", "the `snapshot` to go back to, such as db1@mon")
	f.StringVar(&o.keep, "keep", "", "`name` of a snapshot that is taken before")
	f.BoolVar(&o.acceptDataLoss, "accept-data-loss", false, "go back without keeping what was written since")
	f.BoolVar(&o.wait, "wait", true, "wait until the volume has gone back")
	_ = cmd.RegisterFlagCompletionFunc("to", g.CompleteSnapshots)
	return cmd
}

// Restore does what the command does with --keep and without --wait.
func Restore(ctx context.Context, api pb.ManagerClient, volume, to, keep string) error {
	quiet := &cli.Output{Format: cli.FormatTable, Stdout: io.Discard, Stderr: io.Discard, Now: time.Now}
	return runRestore(ctx, api, restoreOptions{volume: volume, to: to, keep: keep}, quiet)
}

func (o restoreOptions) check() error {
	switch {
	case o.to == "":
		return cli.UsageError{Err: errors.New("--to: missing"), Hint: fmt.Sprintf("`weft snapshot list %s` shows which there are", o.volume)}
	case o.keep == "" && !o.acceptDataLoss:
		return cli.UsageError{Err: fmt.Errorf("what was written to %s since %s would be gone", o.volume, o.to), Hint: "keep it in another snapshot: --keep NAME; or let it go: --accept-data-loss"}
	case o.keep != "" && o.acceptDataLoss:
		return cli.UsageError{Err: errors.New("--keep keeps what --accept-data-loss lets go"), Hint: "give one of them"}
	}
	return nil
}

func runRestore(ctx context.Context, api pb.ManagerClient, o restoreOptions, out *cli.Output) error {
	if err := o.check(); err != nil {
		return err
	}
	v, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.volume})
	if err != nil {
		return err
	}
	if o.keep != "" {
		if err := o.keepFirst(ctx, api, v, out); err != nil {
			return err
		}
	}
	// This must not undo what was written after what is kept, nor, if it arrives twice or late, what was
	// written after it had been carried out.
	v, err = api.RestoreVolume(ctx, &pb.RestoreVolumeRequest{Volume: v.GetId(), Snapshot: o.to, IfGeneration: v.GetGeneration(), IfEpoch: v.GetEpoch()})
	if status.Code(err) == codes.Unimplemented {
		return cli.AdvisedError{Err: errors.New("this volume manager cannot make a volume go back to a snapshot: its version cannot"), Hints: []string{"upgrade it: `weft upgrade plan` says how"}}
	}
	if err != nil {
		return err
	}
	out.Say("volume %s goes back to %s", v.GetName(), o.to)
	if o.wait {
		if v, err = waitUntilBack(ctx, api, v, out); err != nil {
			return err
		}
	}
	return out.Print(v, nil)
}

// keepFirst takes a snapshot of what a volume holds. It refuses one that exists: what it holds is older.
func (o restoreOptions) keepFirst(ctx context.Context, api pb.ManagerClient, v *pb.Volume, out *cli.Output) error {
	if len(v.GetAttachments()) > 0 || v.GetAttachment() != nil {
		return cli.RefusedError{Err: fmt.Errorf("volume %s is attached to %s", v.GetName(), v.GetAttachment().GetNode()), Hints: []string{fmt.Sprintf("`weft detach %s` first", v.GetName())}}
	}
	name := v.GetName() + "@" + o.keep
	switch _, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: name}); {
	case err == nil:
		return cli.AdvisedError{Err: status.Errorf(codes.AlreadyExists, "snapshot %s exists, and may not hold what %s does now", name, v.GetName()), Hints: []string{"give another name to --keep"}}
	case status.Code(err) != codes.NotFound:
		return err
	}
	// What would be refused afterwards must be refused before.
	switch to, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.to}); {
	case err != nil:
		return err
	case to.GetSnapshot() == nil || to.GetSnapshot().GetVolumeId() != v.GetId():
		return cli.UsageError{Err: fmt.Errorf("--to: %s is no snapshot of volume %s", o.to, v.GetName()), Hint: fmt.Sprintf("`weft snapshot list %s` shows which there are", v.GetName())}
	}
	made, err := api.CreateSnapshots(ctx, &pb.CreateSnapshotsRequest{Snapshots: []*pb.NewSnapshot{{Volume: v.GetId(), Name: o.keep}}})
	if err != nil {
		return cli.ArgumentError{Name: "--keep", Err: err}
	}
	return waitUntilTaken(ctx, api, made.GetSnapshots(), out)
}

// waitUntilBack returns once a volume has gone back to a snapshot.
func waitUntilBack(ctx context.Context, api pb.ManagerClient, v *pb.Volume, out *cli.Output) (now *pb.Volume, err error) {
	err = cli.Wait(ctx, out, fmt.Sprintf("the request stands; `weft explain volume %s` says what it waits for", v.GetName()), func(ctx context.Context) (string, error) {
		if now, err = api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: v.GetId()}); err != nil {
			return "", err
		}
		switch {
		case now.GetRestoringTo() == "" && now.GetFailed() != "":
			return "", cli.AdvisedError{Err: fmt.Errorf("volume %s: %s", now.GetName(), now.GetFailed()), Hints: []string{"repeat the command to try again"}}
		case now.GetRestoringTo() == "":
			out.Say("volume %s holds what %s does", now.GetName(), v.GetRestoringTo())
			return "", nil
		}
		why, err := api.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: v.GetId()})
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("volume %s to go back: %s", now.GetName(), strings.Join(why.GetWaits(), "; ")), nil
	})
	return now, err
}

// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

func newDiff(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "diff [" + argument + "] " + argument,
		Short: "List the ranges in which a snapshot differs from an earlier one",
		Long: `List the ranges in which the second snapshot differs from the first, in bytes.
They are snapshots of one volume, in either order. With a single snapshot, list
the ranges in which it holds data; the others read as zeroes.

A range that is not listed is the same in both. A range that is listed may be,
too, for example if the same data was written again. Ranges are whole grains of
16 KiB.

Targets that have a copy of both snapshots are asked, so nothing needs to be
attached; they must be online, and serve the volume in user space.`,
		Example: "  weft snapshot diff db1@mon db1@tue\n  weft snapshot diff db1@mon -o json",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return cli.Takes(argument)(cmd, args)
			}
			return cli.Takes(argument, argument)(cmd, args)
		},
		ValidArgsFunction: g.CompleteSnapshots,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			since := ""
			if len(args) == 2 {
				since = args[0]
			}
			return runDiff(ctx, api, since, args[len(args)-1], out)
		}),
	}
}

func runDiff(ctx context.Context, api pb.ManagerClient, since, snapshot string, out *cli.Output) error {
	for _, name := range []string{snapshot, since} {
		if name != "" && !cli.IsSnapshotName(name) {
			return notSnapshot(name)
		}
	}
	all := &pb.GetSnapshotRangesResponse{}
	err := Ranges(ctx, api, snapshot, since, func(r *pb.GetSnapshotRangesResponse) error {
		all.Ranges, all.SizeBytes, all.NextOffset = append(all.Ranges, r.GetRanges()...), r.GetSizeBytes(), r.GetNextOffset()
		return nil
	})
	if err != nil {
		return err
	}
	all.Ranges = joined(all.GetRanges())
	return out.Print(all, func(w io.Writer) {
		var rows [][]string
		bytes := uint64(0)
		for _, r := range all.GetRanges() {
			rows = append(rows, []string{strconv.FormatUint(r.GetOffset(), 10), strconv.FormatUint(r.GetBytes(), 10)})
			bytes += r.GetBytes()
		}
		cli.Table(w, "OFFSET BYTES", rows...)
		what := fmt.Sprintf("differs from %s in", since)
		if since == "" {
			what = "holds data in"
		}
		out.Say("%s %s %s, %s of %s", snapshot, what, cli.Nouns(len(rows), "range"), cli.Size(bytes), cli.Size(all.GetSizeBytes()))
	})
}

// Ranges calls yield with the ranges in which a snapshot holds data, or differs from another one, some at
// a time and in order.
func Ranges(ctx context.Context, api pb.ManagerClient, snapshot, since string, yield func(*pb.GetSnapshotRangesResponse) error) error {
	r := &pb.GetSnapshotRangesRequest{Snapshot: snapshot, Since: since}
	for {
		answer, err := api.GetSnapshotRanges(ctx, r)
		if status.Code(err) == codes.Unimplemented {
			return cli.AdvisedError{Err: fmt.Errorf("this volume manager cannot tell where snapshots differ: its version is an earlier one"), Hints: []string{"upgrade it: `weft upgrade plan` says how"}}
		}
		if err != nil {
			return err
		}
		if err := yield(answer); err != nil {
			return err
		}
		if answer.GetNextOffset() >= answer.GetSizeBytes() {
			return nil
		}
		if answer.GetNextOffset() <= r.GetOffset() {
			return fmt.Errorf("snapshot %s: the volume manager's answer does not go beyond offset %d", snapshot, r.GetOffset())
		}
		r.Offset = answer.GetNextOffset()
	}
}

// joined makes one of ranges that follow one another.
func joined(all []*pb.ByteRange) (out []*pb.ByteRange) {
	for _, r := range all {
		if n := len(out); n > 0 && out[n-1].GetOffset()+out[n-1].GetBytes() == r.GetOffset() {
			out[n-1].Bytes += r.GetBytes()
			continue
		}
		out = append(out, r)
	}
	return out
}

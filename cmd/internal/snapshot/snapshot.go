// SPDX-License-Identifier: Apache-2.0

// Package snapshot has the commands that take, list, describe, compare and delete snapshots of volumes.
//
// A snapshot is a volume that never changes, called like its volume and a name of its own, "db1@mon".
// Other commands take it by that name: it is attached, detached and explained as a volume is.
package snapshot

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// argument is how the usage of these commands calls a snapshot.
const argument = "VOLUME@NAME"

// Tools are what these commands share with others.
type Tools struct {
	// Describe prints the details of a volume or a snapshot.
	Describe func(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) error
	Export   *cobra.Command
}

// New are the commands.
func New(g *cli.Globals, tools Tools) *cobra.Command {
	return cli.Group("snapshot", "Manage snapshots: what volumes held at a moment",
		newCreate(g), g.Watched(newList(g)), newDescribe(g, tools), newDiff(g), tools.Export, newDelete(g))
}

func newList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "list [VOLUME]",
		Short: "List the snapshots, or those of one volume",
		Long: `List the snapshots, or those of one volume. The figures of space are those of all
copies together. USED is the space of what no earlier snapshot has, as of some
seconds ago; REFERENCED is all that the snapshot reads as data, its own and what
it shares; FREES is what comes free if this snapshot alone is deleted, both as of
some minutes ago. COPIES is how many good copies of the data there are, and how
many there should be. FROZEN says whether no file system on the volume had a
write under way: see weft snapshot create --freeze.`,
		Example: "  weft snapshot list\n  weft snapshot list db1\n  weft snapshot list -o json",
		Args: func(cmd *cobra.Command, args []string) error {
			return cli.Takes([]string{"VOLUME"}[:min(1, len(args))]...)(cmd, args)
		},
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runList(ctx, api, args, out)
		}),
	}
}

func runList(ctx context.Context, api pb.ManagerClient, volume []string, out *cli.Output) error {
	of := ""
	if len(volume) > 0 {
		of = volume[0]
	}
	all, err := cli.Snapshots(ctx, api, of)
	if err != nil {
		return err
	}
	return out.Print(all, func(w io.Writer) {
		var rows [][]string
		for _, s := range all.GetVolumes() {
			rows = append(rows, []string{
				s.GetName(), cli.Size(s.GetSizeBytes()), cli.Size(s.GetUsedBytes()),
				counted(s, (*pb.LegSpace).GetReferencedBytes), counted(s, (*pb.LegSpace).GetFreedBytes), copies(s),
				out.Age(s.GetSnapshot().GetTaken()), frozen(s), state(s),
			})
		}
		cli.Table(w, "NAME SIZE USED REFERENCED FREES COPIES TAKEN FROZEN STATE", rows...)
	})
}

// counted is a figure of the space of a snapshot, "-" if it is not known yet.
func counted(s *pb.Volume, figure func(*pb.LegSpace) uint64) string {
	if s.GetSpace() == nil {
		return "-"
	}
	return cli.Size(figure(s.GetSpace()))
}

// frozen says whether no file system on a snapshot's volume had a write under way.
func frozen(s *pb.Volume) string {
	if s.GetSnapshot().GetFsFrozen() {
		return "yes"
	}
	return "no"
}

// state is a snapshot's state, and why it is not kept.
func state(s *pb.Volume) string {
	text := pb.Word(s.GetState())
	if why := s.GetFailed(); why != "" {
		text += ": not taken: " + why
	}
	return text
}

// copies is how many good copies a snapshot has, of how many: those of the column with the fewest.
func copies(s *pb.Volume) string {
	good := make([]int, s.GetLayout().GetStripes())
	for _, l := range s.GetLegs() {
		if l.GetState() == pb.LegState_LEG_STATE_IN_SYNC && int(l.GetColumn()) < len(good) {
			good[l.GetColumn()]++
		}
	}
	if len(good) == 0 {
		return ""
	}
	return fmt.Sprintf("%d/%d", slices.Min(good), s.GetLayout().GetCopies())
}

func newDescribe(g *cli.Globals, tools Tools) *cobra.Command {
	return &cobra.Command{
		Use:               "describe " + argument,
		Short:             "Show a snapshot's details: its legs by column, and where it is attached",
		Example:           "  weft snapshot describe db1@mon",
		Args:              cli.Takes(argument),
		ValidArgsFunction: g.CompleteSnapshot,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return tools.Describe(ctx, api, args[0], out)
		}),
	}
}

func newDelete(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "delete " + argument + "...",
		Short: "Delete snapshots; refused while they are attached",
		Long: `Delete snapshots. Their volume and its other snapshots stay as they are. The
space that only the deleted ones used becomes free some time later.`,
		Example:           "  weft snapshot delete db1@mon\n  weft snapshot delete db1@mon db1@tue",
		Args:              cli.TakesMore(argument),
		ValidArgsFunction: g.CompleteSnapshots,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runDelete(ctx, api, args, out)
		}),
	}
}

// runDelete looks at all names before it deletes anything, so that a name of a volume among them costs
// nothing.
func runDelete(ctx context.Context, api pb.ManagerClient, names []string, out *cli.Output) error {
	absent := map[string]bool{}
	for _, name := range names {
		s, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: name})
		if s.GetSnapshot() == nil && !cli.IsSnapshotName(name) {
			e := notSnapshot(name)
			e.Hint += fmt.Sprintf("; `weft volume delete %s` deletes a volume", cmp.Or(name, "VOLUME"))
			return e
		}
		absent[name] = status.Code(err) == codes.NotFound
	}
	for _, name := range names {
		if _, err := api.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: name}); err != nil {
			return err
		}
		if absent[name] {
			out.Say("snapshot %s does not exist: nothing to delete", name)
		} else {
			out.Say("snapshot %s is being deleted", name)
		}
	}
	return nil
}

func notSnapshot(name string) cli.UsageError {
	return cli.UsageError{Err: fmt.Errorf("%q is not the name of a snapshot, such as db1@mon", name), Hint: "`weft snapshot list` lists them"}
}

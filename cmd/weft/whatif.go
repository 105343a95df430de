// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/explain"
	"weft.dev/weft/proto/pb"
)

func newWhatIf(g *cli.Globals) *cobra.Command {
	return cli.Group("what-if", "Find out what would happen, before it does", newWhatIfLose(g))
}

func newWhatIfLose(g *cli.Globals) *cobra.Command {
	var labels []string
	cmd := &cobra.Command{
		Use:   "lose [node|drive|rack|zone NAME...]",
		Short: "Say what would happen if nodes or drives were lost",
		Long: `Say what would happen if nodes or drives were lost for good now: which volumes
lose data, stop or are degraded, where each lost leg is made again, how much is
copied for that, and which legs have no place and why. Nothing is changed: the
manager plays the loss through on a copy of its state, with its own rules, so
legs take room from each other there too.

A rack or zone is all nodes with that label; --label names any other. Several
nodes or drives are lost at once. Where room is short, which legs get the last of
it is drawn by chance and may turn out otherwise.`,
		Example: `  weft what-if lose node t3
  weft what-if lose node t1 t2
  weft what-if lose drive 4f1c22aa
  weft what-if lose rack r2
  weft what-if lose --label row=7 -o json`,
		Args: cobra.ArbitraryArgs,
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			switch {
			case len(args) == 0:
				return []string{"node", "drive", "rack", "zone"}, cobra.ShellCompDirectiveNoFileComp
			case args[0] == "node":
				return g.CompleteNodes(cmd, args, prefix)
			case args[0] == "drive":
				return g.CompleteDrives(cmd, args, prefix)
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runWhatIfLose(ctx, api, args, labels, out)
		}),
	}
	cmd.Flags().StringArrayVar(&labels, "label", nil, "all nodes with this `key=value`; may be repeated, then nodes need all of them")
	return cmd
}

func runWhatIfLose(ctx context.Context, api pb.ManagerClient, args, labels []string, out *cli.Output) error {
	r, err := lossOf(ctx, api, args, labels)
	if err != nil {
		return err
	}
	x, err := api.WhatIf(ctx, r)
	if err != nil {
		return err
	}
	return out.Print(x, func(w io.Writer) {
		explain.Bullets(w, "lost would be", cli.LostThings(x))
		explain.Bullets(w, "then", cli.LossSummary(x))
		if len(x.GetVolumes()) == 0 {
			return
		}
		fmt.Fprintln(w)
		var rows [][]string
		for _, v := range x.GetVolumes() {
			again, waits := cli.Remade(v)
			rows = append(rows, []string{
				v.GetVolumeName(), cli.Size(v.GetSizeBytes()), pb.Word(v.GetBefore()), cli.LossWord(v), v.GetHosts(), again, waits,
			})
		}
		cli.Table(w, "VOLUME SIZE NOW THEN ATTACHED MADE-AGAIN COPY-WAITS-FOR", rows...)
		if reasons := cli.Unplaced(x); len(reasons) > 0 {
			fmt.Fprintln(w)
			explain.Bullets(w, "not made again", reasons)
		}
		if n := x.GetVolumesLeftOut(); n > 0 {
			fmt.Fprintf(w, "and %d more volumes\n", n)
		}
	})
}

// lossOf makes a request of the arguments of lose.
func lossOf(ctx context.Context, api pb.ManagerClient, args, labels []string) (r *pb.WhatIfRequest, err error) {
	r = &pb.WhatIfRequest{}
	const hint = "such as `weft what-if lose node t3`, or --label rack=r2"
	switch {
	case len(args) == 0 && len(labels) == 0:
		return nil, cli.UsageError{Err: fmt.Errorf("what is lost is missing"), Hint: hint}
	case len(args) == 1:
		return nil, cli.UsageError{Err: fmt.Errorf("the name of the lost %s is missing", args[0]), Hint: hint}
	case len(args) == 0:
	case args[0] == "node":
		r.Nodes = args[1:]
	case args[0] == "drive":
		for _, drive := range args[1:] {
			id, err := resolveDrive(ctx, api, drive)
			if err != nil {
				return nil, err
			}
			r.DriveIds = append(r.DriveIds, id)
		}
	case args[0] != "rack" && args[0] != "zone":
		return nil, cli.UsageError{Err: fmt.Errorf("%q cannot be lost: want node, drive, rack or zone", args[0]), Hint: hint}
	case len(args) > 2:
		return nil, cli.UsageError{Err: fmt.Errorf("only one %s can be lost at a time", args[0]), Hint: "name the nodes instead"}
	default:
		labels = append(slices.Clone(labels), args[0]+"="+args[1])
	}
	r.Labels, err = cli.ParsePairs(labels)
	return r, err
}

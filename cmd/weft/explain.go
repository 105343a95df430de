// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

func newExplain(g *cli.Globals) *cobra.Command {
	return cli.Group("explain", "Explain a state: its reasons, what it waits for, what you can do", newExplainVolume(g))
}

func newExplainVolume(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:               "volume VOLUME",
		Short:             "Explain the state of a volume",
		Example:           "  weft explain volume db1",
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runExplainVolume(ctx, api, args[0], out)
		}),
	}
}

func runExplainVolume(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) error {
	x, err := api.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: volume})
	if err != nil {
		return err
	}
	return out.Print(x, func(w io.Writer) {
		fmt.Fprintln(w, x.GetSummary())
		bullets(w, "because", x.GetFacts())
		bullets(w, "waiting for", x.GetWaits())
		bullets(w, "you can", x.GetActions())
	})
}

func bullets(w io.Writer, heading string, items []string) {
	if len(items) == 0 {
		return
	}
	fmt.Fprintf(w, "%s:\n", heading)
	for _, item := range items {
		fmt.Fprintf(w, "  - %s\n", item)
	}
}

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
		bullets(w, "lost would be", lostThings(x))
		bullets(w, "then", lossSummary(x))
		if len(x.GetVolumes()) == 0 {
			return
		}
		fmt.Fprintln(w)
		var rows [][]string
		for _, v := range x.GetVolumes() {
			again, waits := remade(v)
			rows = append(rows, []string{
				v.GetVolumeName(), cli.Size(v.GetSizeBytes()), pb.Word(v.GetBefore()), lossWord(v), v.GetHosts(), again, waits,
			})
		}
		cli.Table(w, "VOLUME SIZE NOW THEN ATTACHED MADE-AGAIN COPY-WAITS-FOR", rows...)
		if reasons := unplaced(x); len(reasons) > 0 {
			fmt.Fprintln(w)
			bullets(w, "not made again", reasons)
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
	r.Labels, err = parsePairs(labels)
	return r, err
}

// lostThings lists what would be lost.
func lostThings(x *pb.WhatIfResponse) (all []string) {
	if nodes := x.GetNodes(); len(nodes) > 0 {
		all = append(all, fmt.Sprintf("%s: %s", nouns(len(nodes), "node"), strings.Join(nodes, ", ")))
	}
	all = append(all, fmt.Sprintf("%s, with %s of %s", nouns(len(x.GetDriveIds()), "drive"),
		nouns(int(x.GetLegsLost()), "leg"), nouns(len(x.GetVolumes())+int(x.GetVolumesLeftOut()), "volume")))
	var hosts []string
	for _, a := range x.GetAttachments() {
		hosts = append(hosts, fmt.Sprintf("%s on %s", a.GetVolumeName(), a.GetNode()))
	}
	if n := len(hosts) + int(x.GetAttachmentsLeftOut()); n > 0 {
		all = append(all, fmt.Sprintf("%s: %s", nouns(n, "attachment"), strings.Join(hosts[:min(8, len(hosts))], ", ")))
	}
	return all
}

// lossSummary says in a few lines what a loss leads to, the worst first.
func lossSummary(x *pb.WhatIfResponse) (all []string) {
	say := func(n int, format string, values ...any) {
		if n > 0 {
			all = append(all, fmt.Sprintf(format, values...))
		}
	}
	lost, stopped := int(x.GetVolumesLosingData()), int(x.GetVolumesUnavailable())
	say(lost, "%s would lose data: no copy in sync is left", nouns(lost, "volume"))
	say(stopped, "%s would stop until another copy is back", nouns(stopped, "volume"))
	degraded, without := int(x.GetVolumesDegraded()), int(x.GetLegsWithoutPlace())
	say(degraded, "%s would be degraded, and stay in service", nouns(degraded, "volume"))
	again := int(x.GetLegsLost()) - without
	when := "once an operator confirms the loss"
	if after := x.GetReplaceAfter(); after != nil {
		when = "after " + strings.TrimSuffix(after.AsDuration().String(), "0s")
	}
	say(again, "%s would be made again elsewhere %s: %s to copy", nouns(again, "leg"), when, cli.Size(x.GetCopiedBytes()))
	say(without, "%s would not be made again", nouns(without, "leg"))
	if len(all) == 0 {
		return []string{"no volume would be affected"}
	}
	return all
}

// nouns is a number of things.
func nouns(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func lossWord(v *pb.VolumeLoss) string {
	if v.GetDataLost() {
		return "data lost"
	}
	return pb.Word(v.GetAfter())
}

// remade says how many of a volume's lost legs are made again and where, and what their copies
// wait for.
func remade(v *pb.VolumeLoss) (again, waits string) {
	var to []string
	for _, l := range v.GetLegs() {
		if l.GetTo() != "" {
			to = append(to, l.GetTo())
		}
	}
	again = fmt.Sprintf("%d of %d", len(to), len(v.GetLegs()))
	if len(to) == 0 {
		return again, ""
	}
	slices.Sort(to)
	return again + " on " + strings.Join(slices.Compact(to), ","), v.GetCopyWaitsFor()
}

// unplaced lists the legs that are not made again, and why.
func unplaced(x *pb.WhatIfResponse) (all []string) {
	for _, v := range x.GetVolumes() {
		for _, l := range v.GetLegs() {
			if l.GetTo() == "" {
				all = append(all, fmt.Sprintf("%s leg %d.%d on %s: %s", v.GetVolumeName(), l.GetColumn(), l.GetCopy(), l.GetNode(), l.GetWhy()))
			}
		}
	}
	return all
}

// SPDX-License-Identifier: Apache-2.0

// Package upgrade has the commands that plan an upgrade of the cluster, take its steps one at a time,
// show how far it has come, and finish it. What comes next, and what stands in its way, follows from
// what the managers tell alone: Make decides that. Nothing is kept between two commands, so each of
// them may be repeated, from anywhere.
package upgrade

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// New returns the commands.
func New(g *cli.Globals) *cobra.Command {
	return cli.Group("upgrade", "Upgrade the cluster, one manager or agent at a time", newPlan(g), newNext(g), newStatus(g), newFinish(g))
}

func newStatus(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show which version and level each manager and agent has",
		Long: `Show which version each volume manager and each agent runs, the cluster's level,
and which level each of them knows: a number of what may be recorded and said.
Programs of different versions work together at the cluster's level. What a later
version adds is used once "weft upgrade finish" has raised the level. What stands
in the way of that is in the last column.`,
		Example: "  weft upgrade status",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			u, err := api.GetUpgrade(ctx, &pb.GetUpgradeRequest{})
			if err != nil {
				return err
			}
			return out.Print(u, func(w io.Writer) { show(w, u) })
		}),
	}
}

func newFinish(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "finish",
		Short: "Raise the cluster's level, after all of it has been upgraded",
		Long: `Raise the cluster's level to the newest that the volume manager which leads
knows. This is refused, with the reason, while a manager or an agent does not
know that level, or cannot be asked. The command may be repeated.

There is no way back: managers of earlier versions refuse the cluster from then
on.`,
		Example: "  weft upgrade finish",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			u, err := api.FinishUpgrade(ctx, &pb.FinishUpgradeRequest{})
			if err != nil {
				return err
			}
			out.Say("the cluster is at level %d", u.GetLevel())
			return out.Print(u, nil)
		}),
	}
}

func show(w io.Writer, u *pb.Upgrade) {
	var rows [][]string
	blocked := 0
	for _, p := range u.GetParts() {
		level := ""
		if p.GetLevel() > 0 {
			level = strconv.FormatUint(uint64(p.GetLevel()), 10)
		}
		if p.GetBlocks() != "" {
			blocked++
		}
		rows = append(rows, []string{p.GetKind(), p.GetName(), p.GetVersion(), level, p.GetBlocks()})
	}
	cli.Table(w, "PART NAME VERSION LEVEL BLOCKS", rows...)
	fmt.Fprintln(w)
	if text := Mixed(u); text != "" {
		fmt.Fprintf(w, "%s: `weft upgrade plan`\n", text)
	}
	fmt.Fprintf(w, "the cluster is at level %d; %s\n", u.GetLevel(), next(u, blocked))
}

// Mixed says how many managers and agents run which version; empty if there is only one.
func Mixed(u *pb.Upgrade) string {
	count := map[string]int{}
	for _, p := range u.GetParts() {
		if p.GetVersion() != "" {
			count[p.GetVersion()]++
		}
	}
	if len(count) < 2 {
		return ""
	}
	var texts []string
	for _, version := range slices.Sorted(maps.Keys(count)) {
		texts = append(texts, fmt.Sprintf("%d run %s", count[version], version))
	}
	return fmt.Sprintf("of %d, %s", len(u.GetParts()), strings.Join(texts, " and "))
}

// Runs reports whether a manager or an agent runs a version.
func Runs(u *pb.Upgrade, version string) bool {
	return slices.ContainsFunc(u.GetParts(), func(p *pb.UpgradePart) bool { return p.GetVersion() == version })
}

// next says what comes next.
func next(u *pb.Upgrade, blocked int) string {
	switch {
	case blocked > 0:
		return fmt.Sprintf("in the way of the next one: %d", blocked)
	case u.GetNewest() > u.GetLevel():
		return fmt.Sprintf("everything knows level %d: `weft upgrade finish`", u.GetNewest())
	}
	return "that is the newest"
}

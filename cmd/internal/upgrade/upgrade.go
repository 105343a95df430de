// SPDX-License-Identifier: Apache-2.0

// Package upgrade has the commands that show how far an upgrade of the cluster has come, and finish
// it.
package upgrade

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// New returns the commands.
func New(g *cli.Globals) *cobra.Command {
	return cli.Group("upgrade", "Show how far an upgrade of the cluster has come, and finish it", newStatus(g), newFinish(g))
}

func newStatus(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show which level each manager and agent knows",
		Long: `Show the cluster's level, and which level each volume manager and each agent
knows: a number of what may be recorded and said. Programs of different versions
work together at the cluster's level. What a later version adds is used once
"weft upgrade finish" has raised the level. What stands in the way of that is in
the last column.`,
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
	fmt.Fprintf(w, "\nthe cluster is at level %d; %s\n", u.GetLevel(), next(u, blocked))
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

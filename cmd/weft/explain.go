// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"

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

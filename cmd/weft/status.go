// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

func newStatus(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Show the cluster on one screen: space, health, problems",
		Example: "  weft status",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runStatus(ctx, api, out)
		}),
	}
}

func runStatus(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
	s, err := api.GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil {
		return err
	}
	return out.Print(s, func(w io.Writer) {
		properties(w,
			"cluster", s.GetClusterId(),
			"version", s.GetVersion(),
			"capacity", capacity(s.GetAllocatedBytes(), s.GetCapacityBytes()),
			"nodes", counted(s.GetNodes(), "online", tally{s.GetNodesOffline(), "offline"}),
			"drives", counted(s.GetDrives(), "ready", tally{s.GetDrivesNotReady(), "not ready"}),
			"volumes", counted(s.GetVolumes(), "healthy", tally{s.GetVolumesDegraded(), "degraded"}, tally{s.GetVolumesUnavailable(), "unavailable"}),
			"attachments", fmt.Sprint(s.GetAttachments()),
		)
		wrong(w, s.GetWrong())
	})
}

// capacity shows how much of the space belongs to legs.
func capacity(allocated, total uint64) string {
	if total == 0 {
		return "none yet: weft drive add"
	}
	const width = 30
	filled := min(width, int(float64(allocated)/float64(total)*width+0.5))
	bar := strings.Repeat("#", filled) + strings.Repeat(".", width-filled)
	return fmt.Sprintf("[%s] %s  %s of %s", bar, cli.Used(allocated, total), cli.Size(allocated), cli.Size(total))
}

// tally is a number of things in some state.
type tally struct {
	n    uint32
	word string
}

// counted prints "7, all healthy" or "7: 5 healthy, 2 degraded".
func counted(total uint32, good string, bad ...tally) string {
	rest := total
	var parts []string
	for _, t := range bad {
		if t.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", t.n, t.word))
			rest -= min(rest, t.n)
		}
	}
	switch {
	case total == 0:
		return "0"
	case len(parts) == 0:
		return fmt.Sprintf("%d, all %s", total, good)
	}
	return fmt.Sprintf("%d: %d %s, %s", total, rest, good, strings.Join(parts, ", "))
}

// wrong lists the problems in the manager's order, worst first, each with the next command to type
// unless the sentence names one.
func wrong(w io.Writer, sentences []string) {
	if len(sentences) == 0 {
		fmt.Fprint(w, "\nnothing is wrong\n")
		return
	}
	fmt.Fprint(w, "\nwrong, worst first:\n")
	for _, sentence := range sentences {
		fmt.Fprintf(w, "  %s\n", sentence)
		if next := cli.NextCommand(sentence); next != "" {
			fmt.Fprintf(w, "      %s\n", next)
		}
	}
}

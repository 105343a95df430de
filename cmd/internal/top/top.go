// SPDX-License-Identifier: Apache-2.0

// Package top is `weft top`: the I/O of volumes, hosts and drives as it happens.
package top

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

type options struct {
	hosts, drives, once bool
	sort                string
	window              time.Duration
}

// New makes the command.
func New(g *cli.Globals) *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "top [VOLUME]",
		Short: "Show the I/O of volumes, hosts or drives as it happens",
		Long: `Show the I/O of volumes as it happens, the busiest first: reads and writes in a
second, their bandwidth, and how long an I/O takes: half of them take at most
P50, and 1 in 100 takes longer than P99. HELD is the part of the time in which
I/O was held, because a leg was lost or failed it, or the volume was held.

With a VOLUME, show its legs, as its host sees them; with --hosts, the volumes of
each host together; with --drives, the drives as their targets see them. A dash
stands for what no agent reports.

On a terminal the view is refreshed every 2s. Elsewhere, and with --once, it is
printed once.`,
		Example: `  weft top
  weft top db1
  weft top --drives --once
  weft top --once --sort p99 -o json`,
		Args: func(cmd *cobra.Command, args []string) error {
			return cli.Takes([]string{"VOLUME"}[:min(1, len(args))]...)(cmd, args)
		},
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return run(ctx, api, o, args, out)
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&o.hosts, "hosts", "n", false, "show hosts")
	f.BoolVarP(&o.drives, "drives", "d", false, "show drives")
	f.BoolVar(&o.once, "once", false, "print the view once")
	f.StringVar(&o.sort, "sort", "iops", "`column` to sort by: "+strings.Join(columns(), ", "))
	f.DurationVar(&o.window, "window", 10*time.Second, "show the I/O of this `time`, at most 5m")
	_ = cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(columns(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// orders are the columns by which figures can be sorted, the largest first.
var orders = map[string]func(*pb.Figures) uint64{
	"iops":      func(f *pb.Figures) uint64 { return f.GetAll().GetIos() },
	"read":      func(f *pb.Figures) uint64 { return f.GetRead().GetIos() },
	"write":     func(f *pb.Figures) uint64 { return f.GetWrite().GetIos() },
	"bandwidth": func(f *pb.Figures) uint64 { return f.GetRead().GetBytes() + f.GetWrite().GetBytes() },
	"p50":       func(f *pb.Figures) uint64 { return f.GetAll().GetP50Nanoseconds() },
	"p99":       func(f *pb.Figures) uint64 { return f.GetAll().GetP99Nanoseconds() },
	"held":      func(f *pb.Figures) uint64 { return f.GetHeldNanoseconds() },
	"name":      func(*pb.Figures) uint64 { return 0 },
}

func columns() []string {
	return []string{"iops", "read", "write", "bandwidth", "p50", "p99", "held", "name"}
}

// view is what is shown: what is asked for, and the columns before those of the I/O.
type view struct {
	of       pb.FiguresOf
	headings string
	cells    func(*pb.Figures) []string
}

func (o options) view(args []string) (view, error) {
	switch {
	case orders[o.sort] == nil:
		return view{}, cli.UsageError{Err: fmt.Errorf("--sort %q: must be one of %s", o.sort, strings.Join(columns(), ", "))}
	case o.hosts && o.drives:
		return view{}, cli.UsageError{Err: errors.New("--hosts and --drives: give one of them")}
	case len(args) > 0 && (o.hosts || o.drives):
		return view{}, cli.UsageError{Err: fmt.Errorf("unexpected argument %q: the legs of a volume are shown without --hosts and --drives", args[0])}
	case len(args) > 0:
		return view{pb.FiguresOf_FIGURES_OF_LEGS, "LEG TARGET", func(f *pb.Figures) []string { return []string{f.GetName(), f.GetNode()} }}, nil
	case o.hosts:
		return view{pb.FiguresOf_FIGURES_OF_HOSTS, "HOST", func(f *pb.Figures) []string { return []string{f.GetName()} }}, nil
	case o.drives:
		return view{pb.FiguresOf_FIGURES_OF_DRIVES, "DRIVE NODE DEVICE", func(f *pb.Figures) []string {
			return []string{cli.ShortID(f.GetId()), f.GetNode(), f.GetDevice()}
		}}, nil
	}
	return view{pb.FiguresOf_FIGURES_OF_VOLUMES, "VOLUME HOST", func(f *pb.Figures) []string { return []string{f.GetName(), f.GetNode()} }}, nil
}

func run(ctx context.Context, api pb.ManagerClient, o options, args []string, out *cli.Output) error {
	v, err := o.view(args)
	if err != nil {
		return err
	}
	show := func(ctx context.Context, to *cli.Output) error {
		r := &pb.GetFiguresRequest{Of: v.of, Window: durationpb.New(o.window)}
		if len(args) > 0 {
			r.Volume = args[0]
		}
		answer, err := api.GetFigures(ctx, r)
		if err != nil {
			return err
		}
		sorted(answer.GetFigures(), o.sort)
		return to.Print(answer, func(w io.Writer) { v.print(w, answer.GetFigures()) })
	}
	screen := cli.NewScreen(out.Stdout)
	if o.once || !screen.IsTerminal() || out.Format != cli.FormatTable {
		return show(ctx, out)
	}
	return cli.Repeat(ctx, func(ctx context.Context) error {
		var page bytes.Buffer
		to := *out
		to.Stdout = &page
		if err := show(ctx, &to); err != nil {
			return err
		}
		return screen.Show(page.String())
	}, func(err error) { out.Warn("%v", err) })
}

// sorted sorts by a column, and equal ones by name.
func sorted(all []*pb.Figures, by string) {
	of := orders[by]
	slices.SortStableFunc(all, func(a, b *pb.Figures) int {
		return cmp.Or(cmp.Compare(of(b), of(a)), cmp.Compare(a.GetName(), b.GetName()))
	})
}

func (v view) print(w io.Writer, all []*pb.Figures) {
	var rows [][]string
	for _, f := range all {
		row := append(v.cells(f), cli.Rates(f)...)
		rows = append(rows, append(row, cli.Held(f)))
	}
	cli.Table(w, v.headings+" "+cli.RateHeadings+" HELD", rows...)
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

func newPool(g *cli.Globals) *cobra.Command {
	return cli.Group("pool", "Manage pools: sets of drives that volumes can be placed on",
		newPoolCreate(g), g.Watched(newPoolList(g)), newPoolRebalance(g), newPoolDelete(g))
}

type poolCreateOptions struct {
	name     string
	selector []string
}

func newPoolCreate(g *cli.Globals) *cobra.Command {
	var o poolCreateOptions
	cmd := &cobra.Command{
		Use:   "create POOL",
		Short: "Create a pool of drives with matching labels",
		Long: `Create a pool of all drives that have the given labels, either themselves or
through their node; without labels, of all drives. Matching drives that are added
later belong to the pool too. The pool "default" always exists and holds all
drives.`,
		Example: "  weft pool create fast --select class=fast",
		Args:    cli.Takes("POOL"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.name = args[0]
			return runPoolCreate(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringArrayVar(&o.selector, "select", nil, "`key=value` that a drive or its node must carry; may be repeated")
	return cmd
}

func runPoolCreate(ctx context.Context, api pb.ManagerClient, o poolCreateOptions, out *cli.Output) error {
	selector, err := cli.ParsePairs(o.selector)
	if err != nil {
		return err
	}
	p, err := api.CreatePool(ctx, &pb.CreatePoolRequest{Name: o.name, Selector: selector})
	if err != nil {
		return cli.ArgumentError{Name: "POOL", Err: err}
	}
	out.Say("pool %s is created; drives in it: %d", p.GetName(), p.GetDrives())
	return out.Print(p, nil)
}

type poolRebalanceOptions struct {
	pool         string
	dryRun, stop bool
	maxMoves     uint32
}

func newPoolRebalance(g *cli.Globals) *cobra.Command {
	var o poolRebalanceOptions
	cmd := &cobra.Command{
		Use:   "rebalance POOL [--dry-run] [--max-moves N] [--stop]",
		Short: "Move legs from a pool's fullest drives to its emptiest ones",
		Long: `Move legs of a pool's volumes from its fullest drives to its emptiest ones, for
example after drives were added. It goes on by itself until no two drives differ
by more than 10 % of their capacity, or nothing more can be moved. At most two
legs move at a time, one of a volume. Each is copied first, as with "weft leg
move", so no volume has fewer copies meanwhile, and the rules of placement hold.
Only volumes that are attached to one host, and whose legs are all in sync, take
part. "weft volume set --rebuild-rate" bounds the copies of a volume.

--stop ends it: a leg whose copy has begun still moves, others stay. "weft pool
list" shows how far it is. With --dry-run, nothing changes, and the moves that
would be made as things are now are listed.`,
		Example: `  weft pool rebalance default --dry-run
  weft pool rebalance default --max-moves 20
  weft pool rebalance default --stop`,
		Args:              cli.Takes("POOL"),
		ValidArgsFunction: g.CompletePools,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.pool = args[0]
			return runPoolRebalance(ctx, api, o, out)
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&o.dryRun, "dry-run", false, "list the moves and change nothing")
	f.BoolVar(&o.stop, "stop", false, "begin no more moves")
	f.Uint32Var(&o.maxMoves, "max-moves", 0, "end after `N` moves; 0 for as many as it takes")
	return cmd
}

func runPoolRebalance(ctx context.Context, api pb.ManagerClient, o poolRebalanceOptions, out *cli.Output) error {
	if o.stop && (o.dryRun || o.maxMoves != 0) {
		return cli.UsageError{Err: errors.New("--stop ends moves, so it goes without --dry-run and --max-moves"), Hint: "give one of them"}
	}
	r, err := api.RebalancePool(ctx, &pb.RebalancePoolRequest{Pool: o.pool, Stop: o.stop, DryRun: o.dryRun, MaxMoves: o.maxMoves})
	if err != nil {
		return err
	}
	switch {
	case o.dryRun && len(r.GetMoves()) == 0:
		out.Say("no leg would move: the drives differ by 10%% or less, or no volume of the pool can move")
	case o.dryRun:
		return out.Print(r, func(w io.Writer) {
			var rows [][]string
			for _, m := range r.GetMoves() {
				rows = append(rows, []string{
					m.GetVolume(), fmt.Sprintf("%d.%d", m.GetColumn(), m.GetCopy()), cli.Size(m.GetSizeBytes()),
					m.GetFromNode(), cli.ShortID(m.GetFromDriveId()), m.GetToNode(), cli.ShortID(m.GetToDriveId()),
				})
			}
			cli.Table(w, "VOLUME LEG SIZE FROM DRIVE TO DRIVE", rows...)
		})
	case o.stop:
		out.Say("pool %s is not being rebalanced; legs that still move: %d", o.pool, r.GetPool().GetRebalance().GetMoving())
	default:
		out.Say("pool %s is being rebalanced: `weft pool list` shows how far it is", o.pool)
	}
	return out.Print(r, nil)
}

// rebalancing says how far the rebalancing of a pool is.
func rebalancing(p *pb.Pool) string {
	r := p.GetRebalance()
	switch {
	case r == nil:
		return ""
	case r.GetEnded() == nil:
		return fmt.Sprintf("%d begun, %d moving", r.GetMoves(), r.GetMoving())
	case r.GetStopped():
		return fmt.Sprintf("stopped, %d begun", r.GetMoves())
	}
	return fmt.Sprintf("ended, %d moved", r.GetMoves())
}

func newPoolList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the pools and how full they are",
		Example: "  weft pool list",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runPoolList(ctx, api, out)
		}),
	}
}

func runPoolList(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
	pools, err := api.ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil {
		return err
	}
	return out.Print(pools, func(w io.Writer) {
		var rows [][]string
		for _, p := range pools.GetPools() {
			rows = append(rows, []string{
				p.GetName(), cli.Pairs(p.GetSelector()), strconv.Itoa(int(p.GetDrives())), cli.Size(p.GetCapacityBytes()),
				cli.Promised(p.GetAllocatedBytes(), p.GetProvisionedBytes(), p.GetCapacityBytes()), rebalancing(p),
			})
		}
		cli.Table(w, "POOL SELECTS DRIVES CAPACITY USED REBALANCING", rows...)
	})
}

func newPoolDelete(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:               "delete POOL",
		Short:             "Delete a pool that no volume uses",
		Example:           "  weft pool delete fast",
		Args:              cli.Takes("POOL"),
		ValidArgsFunction: g.CompletePools,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runPoolDelete(ctx, api, args[0], out)
		}),
	}
}

func runPoolDelete(ctx context.Context, api pb.ManagerClient, name string, out *cli.Output) error {
	pools, err := api.ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil {
		return err
	}
	there := slices.Contains(cli.Each(pools.GetPools(), (*pb.Pool).GetName), name)
	if _, err := api.DeletePool(ctx, &pb.DeletePoolRequest{Name: name}); err != nil {
		return err
	}
	if there {
		out.Say("pool %s is deleted", name)
	} else {
		out.Say("pool %s does not exist: nothing to delete", name)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

func newPool(g *cli.Globals) *cobra.Command {
	return cli.Group("pool", "Manage pools: sets of drives that volumes can be placed on",
		newPoolCreate(g), newPoolList(g), newPoolDelete(g))
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
	selector, err := parsePairs(o.selector)
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
				used(p.GetAllocatedBytes(), p.GetCapacityBytes()),
			})
		}
		cli.Table(w, "POOL SELECTS DRIVES CAPACITY USED", rows...)
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

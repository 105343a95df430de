// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"weft.dev/weft/proto/pb"
)

func newPool(g *globals) *cobra.Command {
	return group("pool", "Manage pools: sets of drives that volumes can be placed on",
		newPoolCreate(g), newPoolList(g), newPoolDelete(g))
}

type poolCreateOptions struct {
	name     string
	selector []string
}

func newPoolCreate(g *globals) *cobra.Command {
	var o poolCreateOptions
	cmd := &cobra.Command{
		Use:   "create POOL",
		Short: "Create a pool of drives with matching labels",
		Long: `Create a pool of all drives that have the given labels, either themselves or
through their node; without labels, of all drives. Matching drives that are added
later belong to the pool too. The pool "default" always exists and holds all
drives.`,
		Example: "  weft pool create fast --select class=fast",
		Args:    takes("POOL"),
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			o.name = args[0]
			return runPoolCreate(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringArrayVar(&o.selector, "select", nil, "`key=value` that a drive or its node must carry; may be repeated")
	return cmd
}

func runPoolCreate(ctx context.Context, api pb.ManagerClient, o poolCreateOptions, out *output) error {
	selector, err := parsePairs(o.selector)
	if err != nil {
		return err
	}
	p, err := api.CreatePool(ctx, &pb.CreatePoolRequest{Name: o.name, Selector: selector})
	if err != nil {
		return argumentError{name: "POOL", err: err}
	}
	out.say("pool %s is created; drives in it: %d", p.GetName(), p.GetDrives())
	return out.print(p, nil)
}

func newPoolList(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the pools and how full they are",
		Example: "  weft pool list",
		Args:    takes(),
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *output) error {
			return runPoolList(ctx, api, out)
		}),
	}
}

func runPoolList(ctx context.Context, api pb.ManagerClient, out *output) error {
	pools, err := api.ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil {
		return err
	}
	return out.print(pools, func(w io.Writer) {
		var rows [][]string
		for _, p := range pools.GetPools() {
			rows = append(rows, []string{
				p.GetName(), pairs(p.GetSelector()), strconv.Itoa(int(p.GetDrives())), size(p.GetCapacityBytes()),
				used(p.GetAllocatedBytes(), p.GetCapacityBytes()),
			})
		}
		table(w, "POOL SELECTS DRIVES CAPACITY USED", rows...)
	})
}

func newPoolDelete(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:               "delete POOL",
		Short:             "Delete a pool that no volume uses",
		Example:           "  weft pool delete fast",
		Args:              takes("POOL"),
		ValidArgsFunction: g.completePools,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			return runPoolDelete(ctx, api, args[0], out)
		}),
	}
}

func runPoolDelete(ctx context.Context, api pb.ManagerClient, name string, out *output) error {
	pools, err := api.ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil {
		return err
	}
	there := slices.Contains(each(pools.GetPools(), (*pb.Pool).GetName), name)
	if _, err := api.DeletePool(ctx, &pb.DeletePoolRequest{Name: name}); err != nil {
		return err
	}
	if there {
		out.say("pool %s is deleted", name)
	} else {
		out.say("pool %s does not exist: nothing to delete", name)
	}
	return nil
}

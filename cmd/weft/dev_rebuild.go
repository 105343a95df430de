// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr"
)

func newDevRebuild(o *devOptions, g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "rebuild",
		Short: "Rebuild the lost store of a weft dev from its drives",
		Long: `Rebuild the manager's lost store from the labels on the drives, as "weft volmgr
rebuild-from-drives" does for a cluster. Then start weft dev: its volumes are
there, detached.`,
		Example: `  weft dev rebuild
  weft dev rebuild --dir /tmp/weft`,
		Args: takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withDev(*o, g, func(d *dev) error { return d.rebuild(cmd.Context()) })
		},
	}
}

// rebuildPatience is for how long the drives' labels are waited for.
const rebuildPatience = time.Minute

// rebuild runs all but the manager, and takes its place.
func (d *dev) rebuild(ctx context.Context) error {
	var nodes []block.NodeName
	for _, t := range d.dir.state.Targets {
		nodes = append(nodes, t.Name)
	}
	rebuild, err := volmgr.NewRebuild(volmgr.Config{Dir: d.dir.in("volmgr"), Version: version(), Log: d.log}, nodes, []block.NodeName{d.node})
	if err != nil {
		return err
	}
	listener, done, err := d.open()
	if err != nil {
		return err
	}
	defer done()
	initiator, err := d.initiator() // it has noted which copies are good
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{d.targets.Run, initiator.Run} {
		group.Go(func() error {
			if err := run(ctx); ctx.Err() == nil {
				return err
			}
			return nil
		})
	}
	var text string
	group.Go(func() (err error) {
		defer stop()
		o := volmgrRebuildOptions{timeout: rebuildPatience}
		text, err = o.collect(ctx, rebuild, listener, d.log)
		return err
	})
	if err := group.Wait(); err != nil {
		return err
	}
	d.out.say("%s", text)
	return nil
}

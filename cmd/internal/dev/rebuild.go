// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/manager"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr"
)

func newRebuild(o *options, g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "rebuild",
		Short: "Rebuild the lost store of a weft dev from its drives",
		Long: `Rebuild the manager's lost store from the labels on the drives, as "weft volmgr
rebuild-from-drives" does for a cluster. Then start weft dev: its volumes are
there, detached.`,
		Example: `  weft dev rebuild
  weft dev rebuild --dir /tmp/weft`,
		Args: cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withCluster(*o, g, func(d *cluster) error { return d.rebuild(cmd.Context()) })
		},
	}
}

// rebuildPatience is how long a rebuild waits for the drives' labels.
const rebuildPatience = time.Minute

// rebuild runs everything except the manager, and takes the manager's place.
func (d *cluster) rebuild(ctx context.Context) error {
	for i := range d.dir.managers() {
		if volmgr.FindStore(d.dir.store(i)) == nil && i > 0 {
			return cli.RefusedError{Err: fmt.Errorf("manager %s still has the store, in %s", managerName(i), d.dir.store(i)), Hints: []string{"start `weft dev`: while most managers have the store, the others get it from them"}}
		}
	}
	var nodes []block.NodeName
	for _, t := range d.dir.state.Targets {
		nodes = append(nodes, t.Name)
	}
	rebuild, err := volmgr.NewRebuild(volmgr.Config{Dir: d.dir.store(0), Version: d.dir.version, Log: d.log}, nodes, []block.NodeName{d.node})
	if err != nil {
		return err
	}
	listener, done, err := d.open(true)
	if err != nil {
		return err
	}
	defer done()
	initiator, err := d.initiator() // it has notes of which copies are good
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
		text, err = manager.Collect(ctx, rebuild, listener, d.log, daemon.TLSFiles{}, rebuildPatience)
		return err
	})
	if err := group.Wait(); err != nil {
		return err
	}
	d.out.Say("%s", text)
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/volmgr"
)

func newVolmgrInit(g *globals) *cobra.Command {
	var dataDir string
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Create a new cluster: its store, in an empty directory",
		Long: `Create a new cluster: an empty store in a directory that is empty or does not
exist yet. Prints the cluster's id. Then start a manager on the directory.

Do not use this to replace a lost store: agents and drives belong to their
cluster and obey no other. "weft volmgr rebuild-from-drives" rebuilds a lost
store, "weft volmgr restore" restores a backup.`,
		Example: "  weft volmgr init --data-dir /var/lib/weft/volmgr",
		Args:    takes(),
		RunE:    func(*cobra.Command, []string) error { return runVolmgrInit(dataDir, g.out()) },
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "`directory` for the new store")
	return cmd
}

func runVolmgrInit(dataDir string, out *output) error {
	if volmgr.FindStore(dataDir) == nil {
		return refusedError{
			err:   fmt.Errorf("create a cluster in %s: there is a store already", dataDir),
			hints: []string{fmt.Sprintf("to run its manager: `weft volmgr --data-dir %s`", dataDir)},
		}
	}
	id, err := volmgr.Init(volmgr.Config{Dir: dataDir, Version: version()})
	if err != nil {
		return fmt.Errorf("create a cluster in %s: %w", dataDir, err)
	}
	fmt.Fprintln(out.stdout, id)
	out.say("a new cluster is in %s; to run its manager: `weft volmgr --data-dir %s`", dataDir, dataDir)
	return nil
}

// needStore refuses a directory without a store, or waits until it has one. While it
// waits /healthz answers: a probe that had the pod restarted would end the rebuild
// that an operator runs in it.
func (o *volmgrOptions) needStore(ctx context.Context, log *slog.Logger) error {
	err := o.findStore()
	if err == nil || !o.awaitStore || !errors.Is(err, volmgr.ErrNoStore) {
		return err
	}
	log.Error("waiting for a store", "data", o.dataDir, "err", err, "ways_on", waysOn(o.dataDir))
	alive, err := serveMetrics(o.Options, log, daemon.NewMetrics(), nil)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	serving, stop := context.WithCancel(ctx)
	for _, part := range alive {
		group.Go(func() error { return part.Run(serving) })
	}
	group.Go(func() error {
		defer stop()
		return o.untilStore(ctx)
	})
	return group.Wait()
}

// untilStore waits for a store, and for the rebuild that made it to leave the
// manager's address.
func (o *volmgrOptions) untilStore(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		err := o.findStore()
		if err == nil {
			err = o.addressFree()
		}
		if !errors.Is(err, volmgr.ErrNoStore) && !errors.Is(err, syscall.EADDRINUSE) {
			return err
		}
	}
}

func (o *volmgrOptions) addressFree() error {
	listener, err := net.Listen("tcp", o.address())
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	return listener.Close()
}

// findStore tells operators what to do where there is no store: only they know
// whether it is lost, elsewhere, or was never there.
func (o *volmgrOptions) findStore() error {
	err := volmgr.FindStore(o.dataDir)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("open the store in %s: %w", o.dataDir, err)
	if errors.Is(err, volmgr.ErrNoStore) {
		return refusedError{err: err, hints: waysOn(o.dataDir)}
	}
	return err
}

func waysOn(dataDir string) []string {
	return []string{
		"if a store should be there: is its disk mounted, is --data-dir right?",
		fmt.Sprintf("for a new cluster: `weft volmgr init --data-dir %s`", dataDir),
		fmt.Sprintf("if the store was lost, rebuild it from the drives: `weft volmgr rebuild-from-drives --data-dir %s --node …`", dataDir),
		fmt.Sprintf("if drives were lost too, restore a backup: `weft volmgr restore FILE --data-dir %s`", dataDir),
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/login"
	"weft.dev/weft/volmgr"
)

func newVolmgrInit(g *cli.Globals) *cobra.Command {
	var dataDir, node string
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Create a new cluster: its store, in an empty directory",
		Long: `Create a new cluster: an empty store in a directory that is empty or does not
exist yet, and beside it, in DIRECTORY.keys, the authority that signs the
certificates of its members. Prints the cluster's id. Then start a manager on the
directory, and let nodes and people join with "weft token create". Keep a copy of
DIRECTORY.keys in a safe place: no backup has it.

Do not use this to replace a lost store: agents and drives belong to their
cluster and obey no other. "weft volmgr rebuild-from-drives" rebuilds a lost
store, "weft volmgr restore" restores a backup.`,
		Example: "  weft volmgr init --data-dir /var/lib/weft/volmgr",
		Args:    cli.Takes(),
		RunE:    func(*cobra.Command, []string) error { return runVolmgrInit(dataDir, node, g.Out()) },
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "`directory` for the new store")
	cmd.Flags().StringVar(&node, "node", "", "`name` of this manager (default: this host's name)")
	return cmd
}

func runVolmgrInit(dataDir, node string, out *cli.Output) error {
	if volmgr.FindStore(dataDir) == nil {
		return cli.RefusedError{
			Err:   fmt.Errorf("create a cluster in %s: there is a store already", dataDir),
			Hints: []string{fmt.Sprintf("to run its manager: `weft volmgr --data-dir %s`", dataDir)},
		}
	}
	id, err := volmgr.Init(volmgr.Config{Dir: dataDir, Version: version()})
	if err != nil {
		return storeError(dataDir, fmt.Errorf("create a cluster in %s: %w", dataDir, err))
	}
	if err := login.MakeKeys(dataDir, id, node); err != nil {
		return fmt.Errorf("make the keys of the new cluster (`weft ca init` tries again): %w", err)
	}
	fmt.Fprintln(out.Stdout, id)
	out.Say("a new cluster is in %s; to run its manager: `weft volmgr --data-dir %s`", dataDir, dataDir)
	return nil
}

// needStore refuses a directory without a store, or waits until it has one. While it waits /healthz
// answers: if a probe restarted the pod, that would end the rebuild that an operator runs in it.
func (o *volmgrOptions) needStore(ctx context.Context, log *slog.Logger) error {
	err := o.findStore()
	if err == nil || !o.awaitStore || !errors.Is(err, volmgr.ErrNoStore) {
		return err
	}
	log.Error("waiting for a store", "data", o.dataDir, "err", err, "hints", startHints(o.dataDir))
	return daemon.WhileWaiting(ctx, o.Options, log, daemon.Readers{TLS: o.tls, Plain: o.plain}, o.untilStore)
}

// untilStore waits for a store, and until the rebuild that made it has released the manager's
// address.
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
	listener, err := openAddress("listen", o.address())
	if err != nil {
		return err
	}
	return listener.Close()
}

// findStore tells operators what to do if there is no store: only they know whether it is lost,
// elsewhere, or never existed.
func (o *volmgrOptions) findStore() error {
	err := volmgr.FindStore(o.dataDir)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("open the store in %s: %w", o.dataDir, err)
	if errors.Is(err, volmgr.ErrNoStore) {
		return cli.RefusedError{Err: err, Hints: startHints(o.dataDir)}
	}
	return err
}

func startHints(dataDir string) []string {
	return []string{
		"if a store should be there: is its disk mounted, is --data-dir right?",
		fmt.Sprintf("for a new cluster: `weft volmgr init --data-dir %s`", dataDir),
		fmt.Sprintf("if the store was lost, rebuild it from the drives: `weft volmgr rebuild-from-drives --data-dir %s --node …`", dataDir),
		fmt.Sprintf("if drives were lost too, restore a backup: `weft volmgr restore FILE --data-dir %s`", dataDir),
	}
}

// storeError says what to do about an unusable directory.
func storeError(dataDir string, err error) error {
	switch {
	case errors.Is(err, volmgr.ErrInUse):
		return cli.AdvisedError{
			Err:   fmt.Errorf("open the store in %s: %w", dataDir, volmgr.ErrInUse),
			Hints: []string{"only one manager may run on a store: stop the other one first"},
		}
	case errors.Is(err, volmgr.ErrNotEmpty):
		return cli.AdvisedError{Err: err, Hints: []string{"move its content away first, or give another --data-dir"}}
	}
	return err
}

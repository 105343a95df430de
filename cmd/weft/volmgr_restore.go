// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr"
)

func newVolmgrRestore(g *globals) *cobra.Command {
	var dataDir string
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Make a store of a backup, in an empty directory",
		Long: `Makes a store of what "weft volmgr backup" wrote, in a directory that is empty or
not there, for a manager that is then started on it.

A backup is older than the cluster: a copy that has gone stale since may be
recorded as good in it. If the drives are there, rebuild-from-drives knows better.`,
		Example: "  weft volmgr restore /var/backups/weft-2026-11-21 --data-dir /var/lib/weft/volmgr",
		Args:    takes("FILE"),
		RunE:    func(_ *cobra.Command, args []string) error { return runVolmgrRestore(args[0], dataDir, g.out()) },
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "`directory` to make the store in")
	return cmd
}

func runVolmgrRestore(file, dataDir string, out *output) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := volmgr.Restore(volmgr.Config{Dir: dataDir, Version: version()}, f); err != nil {
		return fmt.Errorf("restore %s into %s: %w", file, dataDir, err)
	}
	out.say("restored %s into %s", file, dataDir)
	return nil
}

type volmgrRebuildOptions struct {
	volmgrOptions
	nodes   []string
	timeout time.Duration
}

func newVolmgrRebuild(g *globals) *cobra.Command {
	var o volmgrRebuildOptions
	cmd := &cobra.Command{
		Use:   "rebuild-from-drives --node NODE...",
		Short: "Make a lost store anew from the labels on the drives",
		Long: `Makes a store anew from the labels on the drives, in an empty directory. It takes
the manager's place until the target agents of all nodes named have reported,
writes the store, and ends; start the manager then.

Name every target there is: the newest word on a volume may be on any of them.
Pools, labels that operators gave and the history are not on the drives.`,
		Example: "  weft volmgr rebuild-from-drives --data-dir /var/lib/weft/volmgr --node t1 --node t2 --timeout 5m",
		Args:    takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.tls = g.tls
			log, err := o.Logger(g.stderr)
			if err != nil {
				return usageError{err: err}
			}
			return runVolmgrRebuild(cmd.Context(), o, log, g.out())
		},
	}
	o.AddFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&o.dataDir, "data-dir", defaultDataDir, "`directory` to make the store in")
	f.StringVar(&o.listen, "listen", ":4480", "`address` that the target agents report to, the manager's own")
	f.StringArrayVar(&o.nodes, "node", nil, "`name` of a target; give all of them")
	f.DurationVar(&o.timeout, "timeout", 2*time.Minute, "give up when not all have reported after this long")
	return cmd
}

func runVolmgrRebuild(ctx context.Context, o volmgrRebuildOptions, log *slog.Logger, out *output) error {
	nodes, err := parseNodes(o.nodes)
	if err != nil {
		return err
	}
	rebuild, err := volmgr.NewRebuild(volmgr.Config{Dir: o.dataDir, Version: version(), Log: log}, nodes)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	defer listener.Close()
	text, err := o.collect(ctx, rebuild, listener, log)
	if err != nil {
		return err
	}
	out.say("%s", text)
	return nil
}

// collect answers the target agents until the rebuild is done.
func (o *volmgrRebuildOptions) collect(ctx context.Context, rebuild *volmgr.Rebuild, listener net.Listener, log *slog.Logger) (text string, err error) {
	server, err := daemon.NewServer(o.tls, daemon.NewMetrics())
	if err != nil {
		return "", usageError{err: err}
	}
	rebuild.Register(server)
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	serving, stop := context.WithCancel(ctx)
	group.Go(func() error { return daemon.Serve(log, listener, server).Run(serving) })
	group.Go(func() (err error) {
		defer stop()
		text, err = rebuild.Run(ctx)
		return err
	})
	err = group.Wait()
	return text, err
}

func parseNodes(names []string) ([]block.NodeName, error) {
	if len(names) == 0 {
		return nil, usageError{err: errors.New("--node: must be given"), hint: "name every target there is"}
	}
	var nodes []block.NodeName
	for _, name := range names {
		node, err := block.ParseNodeName(name)
		if err != nil {
			return nil, usageError{err: err}
		}
		nodes = append(nodes, node)
	}
	return nodes, nil
}

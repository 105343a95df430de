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
		Short: "Restore a backup into an empty directory",
		Long: `Restore a file of "weft volmgr backup" into a directory that is empty or does not
exist yet. Then start a manager on the directory.

A backup is older than the cluster: a copy that became stale since then may be
recorded as good in it. So each volume comes up detached and waits for the labels
on its drives and, if it was in use, for the note of its last host ("weft explain
volume" names what it waits for). Unmount the volumes before you start the
manager: it takes the hosts' devices away.`,
		Example: "  weft volmgr restore /var/backups/weft-2026-11-21 --data-dir /var/lib/weft/volmgr",
		Args:    takes("FILE"),
		RunE:    func(_ *cobra.Command, args []string) error { return runVolmgrRestore(args[0], dataDir, g.out()) },
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "`directory` for the new store")
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
	hosts   []string
	timeout time.Duration
}

func newVolmgrRebuild(g *globals) *cobra.Command {
	var o volmgrRebuildOptions
	cmd := &cobra.Command{
		Use:   "rebuild-from-drives --node NODE... [--host NODE...]",
		Short: "Rebuild a lost store from the labels on the drives",
		Long: `Rebuild a store from the labels on the drives, in an empty directory. The command
takes the manager's place until the target agents of all named nodes have
reported, writes the store, and ends. Then start the manager.

Name every target: the newest information on a volume may be on any of them.
Pools, labels that operators set, and the history are not on the drives.

Labels are written after the records that they copy. For a volume in use they may
therefore still list a copy that missed writes; the initiator agent of the
volume's host has noted which copies are good. All hosts that report are heard.
The command waits for hosts named with --host, and ten seconds for hosts that the
labels name. Where a note is missing, no copy is trusted: the output then lists
the evidence for each copy, and an operator chooses with "weft volume
promote-stale".

The command also waits 40 seconds for a drive that its target cannot read. After
that the drive's copies are left out.

Hosts keep their devices meanwhile. The manager that you start afterwards takes
them away: first unmount the volumes that the output lists as in use.`,
		Example: "  weft volmgr rebuild-from-drives --data-dir /var/lib/weft/volmgr --node t1 --node t2 --host c1 --timeout 5m",
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
	f.StringVar(&o.dataDir, "data-dir", defaultDataDir, "`directory` for the new store")
	o.addListen(cmd, "`address` for the agents to report to, the manager's own")
	f.StringArrayVar(&o.nodes, "node", nil, "`name` of a target; name all of them")
	f.StringArrayVar(&o.hosts, "host", nil, "`name` of a host to wait for; name all hosts that used volumes")
	f.DurationVar(&o.timeout, "timeout", 2*time.Minute, "give up if some have not reported after this long")
	return cmd
}

func runVolmgrRebuild(ctx context.Context, o volmgrRebuildOptions, log *slog.Logger, out *output) error {
	if len(o.nodes) == 0 {
		return usageError{err: errors.New("--node: must be given"), hint: "name every target there is"}
	}
	targets, err := parseNodes(o.nodes)
	if err != nil {
		return err
	}
	hosts, err := parseNodes(o.hosts)
	if err != nil {
		return err
	}
	rebuild, err := volmgr.NewRebuild(volmgr.Config{Dir: o.dataDir, Version: version(), Log: log}, targets, hosts)
	if err != nil {
		return err
	}
	listener, err := o.open(log)
	if err != nil {
		return err
	}
	defer listener.Close()
	text, err := o.collect(ctx, rebuild, listener, log)
	if err != nil {
		return err
	}
	out.say("%s", text)
	return nil
}

// collect answers the agents until the rebuild is done.
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/manager"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
)

func newVolmgrBackup(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "backup FILE",
		Short: "Write a consistent copy of a running manager's store to a file",
		Long: `Ask the running volume manager for a copy of its store and write it to FILE. The
file appears only when it is complete and on disk. An older file is replaced.
With "-" the copy goes to the standard output: it is whole only if the command
succeeds, and who may read it is up to you.`,
		Example: "  weft volmgr backup /var/backups/weft-$(date +%F)",
		Args:    cli.Takes("FILE"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolmgrBackup(ctx, api, args[0], out)
		}),
	}
}

func runVolmgrBackup(ctx context.Context, api pb.ManagerClient, path string, out *cli.Output) error {
	if path == "-" {
		n, err := receiveBackup(ctx, api, out.Stdout)
		if err == nil {
			out.Say("wrote %s", cli.Size(uint64(n)))
		}
		return err
	}
	if _, err := os.Stat(filepath.Dir(path)); err != nil { // otherwise the error names a temporary file
		return fmt.Errorf("write the backup %s: %w", path, err)
	}
	var n int64
	// Only the owner may read a store.
	err := durable.Fill(path, 0o600, func(w io.Writer) (err error) {
		n, err = receiveBackup(ctx, api, w)
		return err
	})
	if err != nil {
		return err
	}
	out.Say("wrote %s to %s", cli.Size(uint64(n)), path)
	return nil
}

func receiveBackup(ctx context.Context, api pb.ManagerClient, w io.Writer) (n int64, err error) {
	n, err = receiveCopy(ctx, api, w)
	if _, notLeader := pb.NotLeader(err); notLeader && n == 0 { // the connection is to the leader now
		n, err = receiveCopy(ctx, api, w)
	}
	return n, err
}

func receiveCopy(ctx context.Context, api pb.ManagerClient, w io.Writer) (n int64, err error) {
	stream, err := api.Backup(ctx, &pb.BackupRequest{})
	if err != nil {
		return 0, err
	}
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		written, err := w.Write(chunk.GetData())
		n += int64(written)
		if err != nil {
			return n, fmt.Errorf("write the backup: %w", err)
		}
	}
}

func newVolmgrRestore(g *cli.Globals) *cobra.Command {
	var dataDir string
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Restore a backup into an empty directory",
		Long: `Restore a file of "weft volmgr backup" into a directory that is empty or does not
exist yet. Then start a manager on the directory. In a closed cluster it needs
the authority's keys as well, which are in no backup: put your copy of them at
DIR.keys, beside the directory.

A backup is older than the cluster: a copy that became stale since then may be
recorded as good in it. So each volume comes up detached and waits for the labels
on its drives and, if it was in use, for the note of its last host ("weft explain
volume" names what it waits for). Unmount the volumes before you start the
manager: it takes the hosts' devices away.`,
		Example: "  weft volmgr restore /var/backups/weft-2026-11-21 --data-dir /var/lib/weft/volmgr",
		Args:    cli.Takes("FILE"),
		RunE:    func(_ *cobra.Command, args []string) error { return runVolmgrRestore(args[0], dataDir, g.Out()) },
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "`directory` for the new store")
	return cmd
}

func runVolmgrRestore(file, dataDir string, out *cli.Output) error {
	f, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("restore a backup: %w", err)
	}
	defer f.Close()
	if err := volmgr.Restore(volmgr.Config{Dir: dataDir, Version: version()}, f); err != nil {
		return storeError(dataDir, fmt.Errorf("restore %s into %s: %w", file, dataDir, err))
	}
	out.Say("restored %s into %s", file, dataDir)
	return nil
}

type volmgrRebuildOptions struct {
	volmgrOptions
	nodes   []string
	hosts   []string
	timeout time.Duration
}

func newVolmgrRebuild(g *cli.Globals) *cobra.Command {
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
		Args:    cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.tls, o.plain = g.TLS, g.Plain
			log, err := o.Logger(g.Stderr)
			if err != nil {
				return cli.UsageError{Err: err}
			}
			return runVolmgrRebuild(cmd.Context(), o, log, g.Out())
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

func runVolmgrRebuild(ctx context.Context, o volmgrRebuildOptions, log *slog.Logger, out *cli.Output) error {
	if len(o.nodes) == 0 {
		return cli.UsageError{Err: errors.New("--node: missing"), Hint: "name the nodes of all targets, each with --node"}
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
		return storeError(o.dataDir, err)
	}
	if _, err := o.keys(); err != nil {
		return err
	}
	listener, err := o.open(log)
	if err != nil {
		return err
	}
	defer listener.Close()
	text, err := manager.Collect(ctx, rebuild, listener, log, o.tls, o.timeout)
	if err != nil {
		return err
	}
	out.Say("%s", text)
	return nil
}

func parseNodes(names []string) ([]block.NodeName, error) {
	var nodes []block.NodeName
	for _, name := range names {
		node, err := block.ParseNodeName(name)
		if err != nil {
			return nil, cli.UsageError{Err: err}
		}
		nodes = append(nodes, node)
	}
	return nodes, nil
}

func newVolmgrRecover(g *cli.Globals) *cobra.Command {
	var dataDir string
	cmd := &cobra.Command{
		Use:   "recover DIRECTORY",
		Short: "Begin again with one manager when most of them are lost for good",
		Long: `Make a new store from that of one stopped manager, DIRECTORY, when so many
managers are lost for good that the others are no majority. The new store is for
a single manager; others join again with empty directories. DIRECTORY stays.

The manager may lack the newest records, so this is like restoring a backup: each
volume comes up detached and waits for the labels on its drives and, if it was in
use, for the note of its last host ("weft explain volume" names what it waits
for). Unmount the volumes before you start the manager: it takes the hosts'
devices away. Of several managers that are left, take the one that "weft volmgr
list" shows with the newest record.

Stop all other managers first, and do not start them on their directories again.`,
		Example: "  weft volmgr recover /var/lib/weft/volmgr.before --data-dir /var/lib/weft/volmgr",
		Args:    cli.Takes("DIRECTORY"),
		RunE:    func(_ *cobra.Command, args []string) error { return runVolmgrRecover(args[0], dataDir, g.Out()) },
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "`directory` for the new store")
	return cmd
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func runVolmgrRecover(from, dataDir string, out *cli.Output) error {
	survivor, err := volmgr.Recover(volmgr.Config{Dir: dataDir, Version: version()}, from)
	if err != nil {
		return storeError(dataDir, fmt.Errorf("recover %s into %s: %w", from, dataDir, err))
	}
	out.Say("recovered manager %v of cluster %v, with %d records, into %s; to run it: `weft volmgr --data-dir %s`", survivor.ID, survivor.Cluster, len(survivor.Records), dataDir, dataDir)
	if keys := volmgr.KeysOf(from); exists(keys) && !exists(volmgr.KeysOf(dataDir)) {
		out.Say("its keys are in %s: move them to %s first", keys, volmgr.KeysOf(dataDir))
	}
	for _, m := range survivor.Members {
		if m.ID != survivor.ID {
			out.Say("manager %v at %s must not run on its directory again", m.ID, m.Address)
		}
	}
	return nil
}

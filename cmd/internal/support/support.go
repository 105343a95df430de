// SPDX-License-Identifier: Apache-2.0

// Package support has the commands about support bundles.
package support

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/durable"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/bundle"
)

// New returns the commands.
func New(g *cli.Globals) *cobra.Command {
	return cli.Group("support", "Make a file for those who help, and see what is in one", newBundle(g), newShow(g))
}

func newBundle(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "bundle FILE",
		Short: "Write what is known of the cluster to a file, without secrets",
		Long: `Write what is known of the cluster to FILE, for those who help: the manager's
records and its log, what each node is wanted to do and reports, and from each
agent what "weft doctor" says on its machine, its device-mapper tables, its
exports or connections, and the newest lines of its log. FILE is a tar.gz.

Commands that only read answer from it: "weft --bundle FILE explain volume db1".

No keys, tokens and private keys are in it, nothing of the audit, and no data.
Names are: of nodes, volumes and devices, their labels, and addresses.

An agent that is away, or of a version that cannot answer, does not keep the
file from being written: "weft support show FILE" lists what is missing, and
why. Only an admin may make a bundle.`,
		Example: "  weft support bundle weft-$(date +%F).tar.gz",
		Args:    cli.Takes("FILE"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runBundle(ctx, api, args[0], out)
		}),
	}
}

func runBundle(ctx context.Context, api pb.ManagerClient, path string, out *cli.Output) error {
	if _, err := os.Stat(filepath.Dir(path)); err != nil { // otherwise the error names a temporary file
		return fmt.Errorf("write the bundle %s: %w", path, err)
	}
	var n int64
	err := durable.Fill(path, 0o600, func(w io.Writer) (err error) {
		n, err = receive(ctx, api, w)
		if _, notLeader := pb.NotLeader(err); notLeader && n == 0 { // the connection is to the leader now
			n, err = receive(ctx, api, w)
		}
		return err
	})
	if err != nil {
		return err
	}
	out.Say("wrote %s to %s", cli.Size(uint64(n)), path)
	b, err := open(path)
	if err != nil {
		return err
	}
	for _, m := range b.Missing {
		out.Say("missing: %s: %s", strings.TrimSuffix(m.What, "/"), m.Why)
	}
	return nil
}

func receive(ctx context.Context, api pb.ManagerClient, w io.Writer) (n int64, err error) {
	stream, err := api.SupportBundle(ctx, &pb.SupportBundleRequest{})
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
			return n, fmt.Errorf("write the bundle: %w", err)
		}
	}
}

func open(path string) (*bundle.Bundle, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := bundle.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return b, nil
}

func newShow(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "show FILE",
		Short: "Show what is in a support bundle, and what is missing",
		Long: `Check a support bundle, and show which cluster it is of, when it was made, its
files, what is missing and why, and what is in no bundle.`,
		Example: "  weft support show weft-2026-11-23.tar.gz",
		Args:    cli.Takes("FILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			b, err := open(args[0])
			if err != nil {
				return err
			}
			return g.Out().PrintValue(b.Manifest, func(w io.Writer) { show(w, b) })
		},
	}
}

func show(w io.Writer, b *bundle.Bundle) {
	fmt.Fprintf(w, "cluster     %s\nmade        %s\nversion     %s\nlevel       %d\ngeneration  %d of term %d\n\n",
		b.Cluster, b.Made.Format(time.RFC3339), b.Version, b.Level, b.Generation, b.Term)
	var rows [][]string
	for _, f := range b.Files {
		rows = append(rows, []string{cli.Size(uint64(f.Size)), f.Name})
	}
	cli.Table(w, "SIZE FILE", rows...)
	heading := "\nmissing:\n"
	for _, m := range b.Missing {
		fmt.Fprintf(w, "%s  %s: %s\n", heading, strings.TrimSuffix(m.What, "/"), m.Why)
		heading = ""
	}
	heading = "\nin no bundle:\n"
	for _, what := range b.LeftOut {
		fmt.Fprintf(w, "%s  %s\n", heading, what)
		heading = ""
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/durable"
	"weft.dev/weft/proto/pb"
)

func newVolmgrBackup(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "backup FILE",
		Short: "Write a consistent copy of a running manager's store to a file",
		Long: `Ask the running volume manager for a copy of its store and write it to FILE. The
file appears only when it is complete and on disk. An older file is replaced.`,
		Example: "  weft volmgr backup /var/backups/weft-$(date +%F)",
		Args:    cli.Takes("FILE"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolmgrBackup(ctx, api, args[0], out)
		}),
	}
}

func runVolmgrBackup(ctx context.Context, api pb.ManagerClient, path string, out *cli.Output) error {
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

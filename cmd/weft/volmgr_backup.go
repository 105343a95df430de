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

	"weft.dev/weft/proto/pb"
)

func newVolmgrBackup(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "backup FILE",
		Short: "Write a consistent copy of a running manager's store to a file",
		Long: `Asks the running volume manager for a copy of its store and writes it to FILE,
which is there only when it is complete and on disk. An older file is replaced.`,
		Example: "  weft volmgr backup /var/backups/weft-$(date +%F)",
		Args:    takes("FILE"),
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			return runVolmgrBackup(ctx, api, args[0], out)
		}),
	}
}

func runVolmgrBackup(ctx context.Context, api pb.ManagerClient, path string, out *output) error {
	var n int64
	err := writeDurably(path, func(w io.Writer) (err error) {
		n, err = receiveBackup(ctx, api, w)
		return err
	})
	if err != nil {
		return err
	}
	out.say("wrote %s to %s", size(uint64(n)), path)
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

// writeDurably makes path hold what fill writes, whole and on disk, or leaves
// it as it was.
func writeDurably(path string, fill func(io.Writer) error) (err error) {
	// CreateTemp gives mode 0600: a store is nobody else's to read.
	f, err := os.CreateTemp(filepath.Dir(path), ".weft-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if err := fill(f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes the names in a directory durable.
func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

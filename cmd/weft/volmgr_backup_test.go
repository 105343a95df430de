// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// tape delivers a backup in chunks, then an error (io.EOF at its end).
type tape struct {
	pb.ManagerClient
	grpc.ServerStreamingClient[pb.BackupChunk]
	chunks    []string
	end       error
	elsewhere error // of the first call
}

func (b *tape) Backup(context.Context, *pb.BackupRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[pb.BackupChunk], error) {
	return b, nil
}

func (b *tape) Recv() (*pb.BackupChunk, error) {
	if err := b.elsewhere; err != nil {
		b.elsewhere = nil
		return nil, err
	}
	if len(b.chunks) == 0 {
		return nil, b.end
	}
	chunk := b.chunks[0]
	b.chunks = b.chunks[1:]
	return &pb.BackupChunk{Data: []byte(chunk)}, nil
}

func TestABackupIsThereWhenItIsComplete(t *testing.T) {
	path := filepath.Join(t.TempDir(), "backup")
	var stderr bytes.Buffer
	out := &cli.Output{Stdout: io.Discard, Stderr: &stderr, Now: time.Now}
	if err := runVolmgrBackup(t.Context(), &tape{chunks: []string{"one", "two"}, end: io.EOF}, path, out); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		if got, err := os.ReadFile(path); err != nil || string(got) != "onetwo" {
			t.Errorf("backup = %q, %v; want %q", got, err, "onetwo")
		}
		entries, err := os.ReadDir(filepath.Dir(path))
		if err != nil || len(entries) != 1 {
			t.Errorf("directory = %v, %v; want the backup alone", entries, err)
		}
	}
	check()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("backup has mode %v, %v; want 0600", info.Mode(), err)
	}
	asked, err := status.New(codes.Unavailable, "elsewhere").WithDetails(&errdetails.ErrorInfo{Reason: pb.ReasonNotLeader})
	if err != nil {
		t.Fatal(err)
	}
	if err := runVolmgrBackup(t.Context(), &tape{chunks: []string{"one", "two"}, end: io.EOF, elsewhere: asked.Err()}, path, out); err != nil {
		t.Errorf("backup, with the first call to a manager that does not lead = %v", err)
	}
	check()
	cut := errors.New("cut")
	if err := runVolmgrBackup(t.Context(), &tape{chunks: []string{"three"}, end: cut}, path, out); !errors.Is(err, cut) {
		t.Errorf("backup of a cut stream = %v, want %v", err, cut)
	}
	check() // the older one is still whole
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
)

var quiet = slog.New(slog.DiscardHandler)

// listen gives a listener on a free port of this machine.
func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// beside runs something during the test; stop ends it and waits for it.
func beside(t *testing.T, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() {
		if err := run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	stop = sync.OnceFunc(func() {
		cancel()
		group.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// reporting makes targets report to the manager at an address.
func reporting(t *testing.T, address string, targets []*scriptedTarget) (stop func()) {
	t.Helper()
	conn, err := daemon.Dial(address, daemon.TLSFiles{})
	if err != nil {
		t.Fatal(err)
	}
	return beside(t, func(ctx context.Context) error {
		defer conn.Close()
		var group sync.WaitGroup
		for _, target := range targets {
			target.api = pb.NewAgentsClient(conn)
			group.Go(func() { again(ctx, target.run) })
		}
		group.Wait()
		return nil
	})
}

func managerAt(t *testing.T, address string) pb.ManagerClient {
	t.Helper()
	conn, err := daemon.Dial(address, daemon.TLSFiles{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return pages.Client(conn)
}

func TestALostStoreIsRebuiltFromTheDrives(t *testing.T) {
	targets := []*scriptedTarget{{node: "t1"}, {node: "t2"}}
	var said bytes.Buffer
	out := &cli.Output{Format: cli.FormatTable, Stdout: &said, Stderr: &said, Now: time.Now}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	listener := listen(t)
	o := volmgrOptions{plain: true, dataDir: filepath.Join(t.TempDir(), "first")}
	if _, err := volmgr.Init(volmgr.Config{Dir: o.dataDir}); err != nil {
		t.Fatal(err)
	}
	stopManager := beside(t, func(ctx context.Context) error { return o.serve(ctx, listener, quiet) })
	stopTargets := reporting(t, listener.Addr().String(), targets)
	api := managerAt(t, listener.Addr().String())
	for _, target := range targets {
		if err := cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (string, error) {
			if err := runDriveAdd(ctx, api, driveAddOptions{node: target.node, device: "/dev/nvme0n1"}, out); err != nil {
				return err.Error(), nil
			}
			return "", nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	create := volumeCreateOptions{name: "db1", size: 1 << 29, copies: 2, stripes: 1, wait: true}
	if err := cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (string, error) {
		if err := runVolumeCreate(ctx, api, create, out); err != nil {
			return err.Error(), nil
		}
		return "", nil
	}); err != nil {
		t.Fatalf("%v\n%s", err, said.String())
	}
	before, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: "db1"})
	if err != nil {
		t.Fatal(err)
	}
	stopTargets()
	stopManager()

	listener = listen(t)
	r := volmgrRebuildOptions{nodes: []string{"t1", "t2"}, timeout: 20 * time.Second}
	r.plain, r.dataDir, r.listen = true, filepath.Join(t.TempDir(), "second"), listener.Addr().String()
	listener.Close()
	stopTargets = reporting(t, r.listen, targets)
	if err := runVolmgrRebuild(ctx, r, quiet, out); err != nil {
		t.Fatal(err)
	}
	stopTargets()

	listener = listen(t)
	o.dataDir = r.dataDir
	beside(t, func(ctx context.Context) error { return o.serve(ctx, listener, quiet) })
	after, err := managerAt(t, listener.Addr().String()).GetVolume(ctx, &pb.GetVolumeRequest{Volume: "db1"})
	if err != nil || after.GetId() != before.GetId() || after.GetSizeBytes() != before.GetSizeBytes() || len(after.GetLegs()) != 2 {
		t.Errorf("after the rebuild db1 is %v, %v; was %v", after, err, before)
	}
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/csi"
	"weft.dev/weft/initiator"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target"
	"weft.dev/weft/volmgr"
)

// needDevices skips the test where this machine cannot make block devices of volumes. In CI
// it fails the test instead, if the kernel supports them.
func needDevices(t testing.TB) {
	t.Helper()
	var why error
	switch _, ok := blockdev.Choose(blockdev.Probe()); {
	case os.Geteuid() != 0:
		why = errors.New("mounting needs root")
	case !ok:
		why = errors.New("no kind of block device can be used: see weft doctor")
	default:
		_, why = exec.LookPath("mkfs.ext4")
	}
	_, fuse := os.Stat("/dev/fuse")
	_, loop := os.Stat("/dev/loop-control")
	switch {
	case why == nil:
	case os.Getenv("CI") == "true" && os.Geteuid() == 0 && fuse == nil && loop == nil:
		t.Fatal(why)
	default:
		t.Skip(why)
	}
}

// cluster is a manager, targets with a drive each, and nodes that use volumes.
type cluster struct {
	t       testing.TB
	dir     string
	log     *slog.Logger
	address string // of the manager
	manager pb.ManagerClient
	nodes   map[string]func() // ends a node's initiator
	end     func()            // ends the manager
}

const driveSize = 16 * block.GiB // sparse

// newCluster returns when all drives are usable.
func newCluster(t testing.TB, targets, nodes []string) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), log: slog.New(slog.DiscardHandler), nodes: map[string]func(){}}
	if path := os.Getenv("WEFT_TEST_LOG"); path != "" {
		file, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		c.log = slog.New(slog.NewTextHandler(file, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	if _, err := volmgr.Init(c.managerConfig()); err != nil {
		t.Fatal(err)
	}
	c.startManager()
	c.manager = pages.Client(c.dial())
	for _, name := range targets {
		c.startTarget(name)
	}
	for _, name := range nodes {
		c.nodes[name] = c.startInitiator(name)
	}
	for _, name := range targets {
		c.eventually("drive of "+name, func(ctx context.Context) error {
			d, err := c.manager.AddDrive(ctx, &pb.AddDriveRequest{Node: name, Device: c.drive(name)})
			if err == nil && d.State != pb.DriveState_DRIVE_STATE_READY {
				err = fmt.Errorf("it is %v", d.State)
			}
			return err
		})
	}
	return c
}

// run runs a daemon until the test ends. Cleanups run in reverse order, so each daemon ends
// before those that it depends on.
func (c *cluster) run(what string, do func(context.Context) error) (end func()) {
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	end = sync.OnceFunc(func() {
		stop()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			c.t.Errorf("%s: %v", what, err)
		}
	})
	c.t.Cleanup(end)
	return end
}

func (c *cluster) managerConfig() volmgr.Config {
	return volmgr.Config{Dir: filepath.Join(c.dir, "manager"), Version: "test", Log: c.log.With("at", "manager")}
}

// startManager starts the manager, or restarts it on the same address.
func (c *cluster) startManager() {
	c.t.Helper()
	manager, err := volmgr.New(c.managerConfig())
	if err != nil {
		c.t.Fatal(err)
	}
	listener, err := net.Listen("tcp", cmp.Or(c.address, "127.0.0.1:0"))
	if err != nil {
		c.t.Fatal(err)
	}
	c.address = listener.Addr().String()
	server := grpc.NewServer()
	manager.Register(server)
	c.t.Cleanup(func() { server.Stop() })
	c.end = c.run("manager", func(ctx context.Context) error {
		go server.Serve(listener)
		err := manager.Run(ctx)
		server.Stop()
		return errors.Join(ended(ctx, err), manager.Close())
	})
}

// ended returns nil if a daemon was told to end.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (c *cluster) dial(options ...grpc.DialOption) *grpc.ClientConn {
	c.t.Helper()
	conn, err := grpc.NewClient(c.address, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { conn.Close() })
	return conn
}

func (c *cluster) drive(node string) string { return filepath.Join(c.dir, node+".drive") }

func (c *cluster) startTarget(name string) {
	c.t.Helper()
	if err := errors.Join(os.WriteFile(c.drive(name), nil, 0o600), os.Truncate(c.drive(name), int64(driveSize))); err != nil {
		c.t.Fatal(err)
	}
	port := c.freePort()
	agent, err := target.New(target.Config{
		Node: block.NodeName(name), Portals: []block.Portal{{Transport: block.TCP, Address: "127.0.0.1", Port: port}},
		Labels: map[string]string{"rack": "r" + name}, Manager: pb.NewAgentsClient(c.dial()), Version: "test", Log: c.log.With("at", name),
		Datapath: target.User, Files: []string{c.drive(name)}, FilesOnly: true,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.run("target "+name, agent.Run)
}

// freePort is a port that is not in use: a portal must be known before a target listens on
// it. It lies outside of the kernel's range for outgoing connections, since other clusters
// run beside this one and make many.
func (c *cluster) freePort() uint16 {
	c.t.Helper()
	for range 100 {
		port := 20_000 + mathrand.IntN(12_000)
		if listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			listener.Close()
			return uint16(port)
		}
	}
	c.t.Fatal("no port is free")
	return 0
}

func (c *cluster) startInitiator(name string) (end func()) {
	c.t.Helper()
	agent, err := initiator.New(initiator.Config{
		Node: block.NodeName(name), Labels: map[string]string{"rack": "r" + name}, Version: "test", Kernel: "test",
		Manager:  pb.NewAgentsClient(c.dial()),
		StateDir: filepath.Join(c.dir, name, "state"), RunDir: filepath.Join(c.dir, name, "run"),
		Datapath: initiator.User, Log: c.log.With("at", name),
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return c.run("initiator "+name, agent.Run)
}

// startDriver serves a driver, and returns the path of its socket.
func (c *cluster) startDriver(cfg csi.Config) (socket string) {
	c.t.Helper()
	if cfg.Manager == nil {
		cfg.Manager = pages.Client(c.dial())
	}
	if cfg.Log == nil {
		cfg.Log = c.log.With("at", "csi")
	}
	driver, err := csi.New(cfg)
	if err != nil {
		c.t.Fatal(err)
	}
	// A socket's path must be short, which the test's directory may not be.
	dir, err := os.MkdirTemp("", "weft-e2e-csi-")
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { os.RemoveAll(dir) })
	socket = filepath.Join(dir, "csi.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		c.t.Fatal(err)
	}
	c.run("driver", func(ctx context.Context) error {
		server := driver.Server(ctx)
		defer context.AfterFunc(ctx, server.GracefulStop)()
		return server.Serve(listener)
	})
	return socket
}

// eventually repeats ask until it returns no error.
func (c *cluster) eventually(what string, ask func(context.Context) error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ask(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("%s: %v", what, err)
		case <-tick.C:
		}
	}
}

// unique is a name that no other run uses: all runs share the machine's devices.
func unique(name string) string { return name + "-" + rand.Text()[:8] }

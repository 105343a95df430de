// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/initiator"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// The environment of a client's process.
const (
	clientName    = "WEFT_CRASH_CLIENT"
	clientManager = "WEFT_CRASH_MANAGER"
	clientDir     = "WEFT_CRASH_DIR"
	clientWrites  = "WEFT_CRASH_WRITES"
	clientBehind  = "WEFT_CRASH_BEHIND"
	clientHolder  = "WEFT_CRASH_HOLDER" // the run directory of a holder, which this process then is
	clientResume  = "WEFT_CRASH_RESUME" // not empty: with a block device, whose I/O waits so long
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(clientHolder); dir != "" {
		if err := blockdev.Hold(context.Background(), blockdev.HoldOptions{RunDir: dir, Linger: time.Second}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if name := os.Getenv(clientName); name != "" {
		fmt.Fprintln(os.Stderr, name, client(name))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// client is an initiator whose volume is used by this process. It prints "served IN OUT"
// when it has the volume, with the bytes that its legs have sent and received, and then
// "wrote N" from time to time.
func client(name string) error {
	conn, err := grpc.NewClient(os.Getenv(clientManager), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	behind, err := time.ParseDuration(os.Getenv(clientBehind))
	if err != nil {
		return err
	}
	var in, out atomic.Int64
	var first atomic.Pointer[string] // the target that gets everything at once
	log, err := os.Create(filepath.Join(os.Getenv(clientDir), name+".log"))
	if err != nil {
		return err
	}
	config := initiator.Config{
		Node: block.NodeName(name), Version: "test", Kernel: "test", Manager: pb.NewAgentsClient(conn),
		StateDir: filepath.Join(os.Getenv(clientDir), name, "state"), RunDir: filepath.Join(os.Getenv(clientDir), name, "run"),
		Datapath: initiator.User, Log: slog.New(slog.NewTextHandler(log, nil)),
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			var d net.Dialer
			c, err := d.DialContext(ctx, network, address)
			first.CompareAndSwap(nil, &address)
			if *first.Load() == address {
				return counted{c, &in, &out, 0}, err
			}
			return counted{c, &in, &out, behind}, err
		},
		Export: func(_ context.Context, volume block.Device, _ userspace.Of) (userspace.Exported, error) {
			fmt.Println("served", in.Load(), out.Load())
			if os.Getenv(clientWrites) != "" {
				go writeForever(volume)
			}
			return used{}, nil
		},
	}
	if wait := os.Getenv(clientResume); wait != "" {
		config.Export, config.BlockDevice = nil, blockdev.FUSE
		if config.ResumeWithin, err = time.ParseDuration(wait); err != nil {
			return err
		}
		self, err := os.Executable()
		if err != nil {
			return err
		}
		config.Holder = []string{"/usr/bin/env", clientName + "=", clientHolder + "=" + config.RunDir, self}
	}
	agent, err := initiator.New(config)
	if err != nil {
		return err
	}
	return agent.Run(context.Background())
}

// counted counts a connection's bytes, and may send them late.
type counted struct {
	net.Conn
	in, out *atomic.Int64
	late    time.Duration
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.in.Add(int64(n))
	return n, err
}

func (c counted) Write(p []byte) (int, error) {
	time.Sleep(c.late)
	n, err := c.Conn.Write(p)
	c.out.Add(int64(n))
	return n, err
}

// used is a volume in use.
type used struct{}

func (used) Path() string                      { return "/dev/null" }
func (used) Number() string                    { return "" }
func (used) Resize(context.Context) error      { return nil }
func (used) Close(context.Context, bool) error { return nil }
func (used) Done() <-chan struct{}             { return nil }

// writeForever writes 4 KiB to random places, 32 at a time.
func writeForever(volume block.Device) {
	var done atomic.Int64
	blocks := int64(volume.Geometry().Size) / 4096
	for range 32 {
		go func() {
			data := make([]byte, 4096)
			for {
				data[rand.IntN(len(data))]++
				if err := block.WriteAt(volume, data, rand.Int64N(blocks)*4096); err != nil {
					panic(err)
				}
				done.Add(1)
			}
		}()
	}
	for range time.Tick(100 * time.Millisecond) {
		fmt.Println("wrote", done.Load())
	}
}

// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/initiator/blockdev"
)

// processorTime is the processor time that this process has used.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// limit is the share of a processor that an idle cluster may use. It uses about 0.008 on two virtual
// cores beside builds of others, where the yardstick uses usual at most. On a processor that is slower, or
// whose caches others use, both take longer.
const (
	limit = 0.01
	usual = 0.008
)

// yardstick is the share of a processor for work that resembles an idle cluster's: at 30 moments a
// second, a few kilobytes go over loopback and back, twice.
func yardstick(t *testing.T) float64 {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		peer, err := ln.Accept()
		if err != nil {
			return
		}
		defer peer.Close()
		_, _ = io.Copy(peer, peer)
	}()
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	block := make([]byte, 4096)
	return share(t, func(until time.Time) {
		for ticks := time.Tick(time.Second / 30); time.Now().Before(until); <-ticks {
			for range 2 {
				if _, err := conn.Write(block); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(conn, block); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// share is the share of a processor that this process uses while do lasts.
func share(t *testing.T, do func(until time.Time)) float64 {
	t.Helper()
	before, begin := processorTime(t), time.Now()
	do(begin.Add(2 * time.Second))
	return float64(processorTime(t)-before) / float64(time.Since(begin))
}

// Nothing polls: a whole cluster with four attached volumes on which nobody does I/O hardly uses
// the processor. Processor time does not depend on what else the machine does, except that its
// caches get cold, so one quiet window of several is enough.
func TestAnIdleClusterHardlyUsesTheProcessor(t *testing.T) {
	t.Run("volumes as NVMe/TCP namespaces", func(t *testing.T) { testIdle(t, noBlockDevice, "nvme-tcp://") })
	t.Run("volumes as block devices", func(t *testing.T) {
		abilities := blockdev.Probe()
		if _, ok := blockdev.Choose(abilities); !ok {
			why := abilities[len(abilities)-1].Reason
			if _, err := os.Stat("/dev/fuse"); err == nil && os.Getenv("CI") == "true" {
				t.Fatalf("/dev/fuse is there, but: %s", why)
			}
			t.Skip(why)
		}
		testIdle(t, string(blockdev.Auto), "/dev/weft/")
	})
}

// testIdle attaches four volumes, whose devices' names begin with prefix, and waits until they use little.
func testIdle(t *testing.T, device, prefix string) {
	slowness := max(1, min(yardstick(t), yardstick(t))/usual)
	said := &spoken{}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	place := t.TempDir()
	running.Go(func() {
		err := run(ctx, options{dir: place, driveSize: "1GiB", device: device, logLevel: "info"}, &cli.Globals{Stdout: said, Stderr: said, Version: "test"})
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	defer running.Wait()
	defer stop()
	manager := said.await(t, "manager")
	said.await(t, "try:")
	for i := range 4 {
		if at := attachOne(t, manager, fmt.Sprintf("idle-%d-%d", os.Getpid(), i)); !strings.HasPrefix(at, prefix) {
			t.Fatalf("a volume is attached as %s, want %s...", at, prefix)
		}
	}

	var shares []float64
	for range 20 {
		used := share(t, func(until time.Time) { time.Sleep(time.Until(until)) }) / slowness
		if shares = append(shares, used); used < limit {
			t.Logf("%.2f %% of a processor, on a machine that is slower than usual by a factor of %.2f", 100*used, slowness)
			return
		}
	}
	t.Errorf("an idle cluster uses these shares of a processor: %.4f; want one below %v, on a machine that is slower than usual by a factor of %.2f", shares, limit, slowness)
}

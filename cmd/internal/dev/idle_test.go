// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/cmd/internal/cli"
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
// cores beside builds of others.
const limit = 0.01

// Nothing polls: a whole cluster with four attached volumes on which nobody does I/O hardly uses
// the processor. Processor time does not depend on what else the machine does, except that its
// caches get cold, so one quiet window of several is enough.
func TestAnIdleClusterHardlyUsesTheProcessor(t *testing.T) {
	said := &spoken{}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	place := t.TempDir()
	running.Go(func() {
		err := run(ctx, options{dir: place, driveSize: "1GiB", device: noBlockDevice, logLevel: "info"}, &cli.Globals{Stdout: said, Stderr: said, Version: "test"})
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	defer running.Wait()
	defer stop()
	manager := said.await(t, "manager")
	said.await(t, "try:")
	for i := range 4 {
		attachOne(t, manager, fmt.Sprintf("db%d", i))
	}

	const window = 2 * time.Second
	var shares []float64
	for range 20 {
		before := processorTime(t)
		begin := time.Now()
		time.Sleep(window)
		share := float64(processorTime(t)-before) / float64(time.Since(begin))
		if shares = append(shares, share); share < limit {
			t.Logf("%.2f %% of a processor", 100*share)
			return
		}
	}
	t.Errorf("an idle cluster uses these shares of a processor: %.4f; want one below %v", shares, limit)
}

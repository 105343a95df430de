// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
)

// handsSpan is how much of the volumes is written, in MiB.
const handsSpan = 32

// Targets serve volumes that are not thin through the kernel, to a host in the kernel and to one in user space. While
// both write, a snapshot of all is taken at one moment: the legs change from the kernel to the process for that, and
// back to the kernel when the snapshots are deleted. No leg becomes stale, also not the only copy of a volume, no
// write fails, and each snapshot holds what was acknowledged before it was asked for, and nothing that was begun
// after it was complete. While it has a snapshot, a volume outlives the end of an agent and a handover.
func TestScenarioPlainLegsChangeHands(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Clients: 2, DriveSize: "4GiB", TargetFlags: []string{"--datapath", "kernel"}, TargetEnv: []string{"NOTIFY_SOCKET=@nobody"}})
	b.Datapath(b.Clients[0], "kernel")
	b.Datapath(b.Clients[1], "user")
	var all []*besideVolume
	for i, name := range []string{"two-kernel", "one-kernel", "two-user"} {
		v := &besideVolume{name: name, writer: b.Clients[i/2]}
		copies := map[bool]int{true: 1, false: 2}[strings.HasPrefix(name, "one")]
		b.Create(name, "256MiB", 1, copies)
		v.w = b.Write(v.writer, b.Attach(name, v.writer), handsSpan, 50, 1)
		all = append(all, v)
	}
	progress(t, all)
	inKernels(t, b, 5)

	before, newest, began := map[string]testbed.Acks{}, map[string]uint64{}, map[string]int{}
	for _, v := range all {
		before[v.name], began[v.name] = testbed.Acks{}.Add(v.w), len(v.w.Log())
	}
	b.Weft("snapshot", "create", "--name", "mon", all[0].name, all[1].name, all[2].name)
	for _, v := range all {
		newest[v.name] = v.w.Next()
	}
	progress(t, all)
	stalls(t, all, began, "the snapshot")
	inKernels(t, b, 0)
	for _, v := range all {
		reader := other(b, v.writer)
		b.VerifyUpTo(reader, b.Attach(v.name+"@mon", reader), handsSpan, before[v.name], newest[v.name])
		b.Weft("detach", v.name+"@mon")
	}
	noneStale(t, b, all)

	handOver(t, b, b.Targets[0], "")
	if err := b.Daemon(b.Targets[1]).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	b.StartDaemon(b.Targets[1]) // the only copy of a volume may be there
	progress(t, all)
	healthy(b, all)
	stale(t, b, all) // a process that is killed takes its exports with it

	for _, v := range all {
		began[v.name] = len(v.w.Log())
		b.Weft("snapshot", "delete", v.name+"@mon")
	}
	inKernels(t, b, 5)
	progress(t, all)
	stalls(t, all, began, "the way back")
	noneStale(t, b, all)
	for _, v := range all {
		v.w.Stop()
		acks := testbed.Acks{}.Add(v.w)
		b.Detach(v.name)
		b.Verify(other(b, v.writer), b.Attach(v.name, other(b, v.writer)), handsSpan, acks)
	}
}

// inKernels waits until the kernels of all targets together export so many subsystems.
func inKernels(t *testing.T, b *testbed.Bed, want int) {
	t.Helper()
	b.Eventually(2*time.Minute, fmt.Sprintf("the kernels export %d subsystems", want), func(context.Context) error {
		got := 0
		for _, x := range b.Targets {
			got += len(strings.Fields(shell(t, x, "ls /sys/kernel/config/nvmet/subsystems")))
		}
		if got != want {
			return fmt.Errorf("they export %d", got)
		}
		return nil
	})
}

// stalls logs the longest wait of each writer since it had written so much.
func stalls(t *testing.T, all []*besideVolume, began map[string]int, what string) {
	t.Helper()
	for _, v := range all {
		stall, _ := testbed.LongestGap(v.w.Log()[began[v.name]:])
		t.Logf("%s: no write to %s waits for longer than %v", what, v.name, stall.Round(time.Millisecond))
	}
}

// noneStale reports legs that have become stale since the last look.
func noneStale(t *testing.T, b *testbed.Bed, all []*besideVolume) {
	t.Helper()
	for name, texts := range stale(t, b, all) {
		if len(texts) > 0 {
			t.Errorf("%s: legs became stale: %q", name, texts)
		}
	}
}

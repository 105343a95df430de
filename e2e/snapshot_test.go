// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
)

// snapSpan is how much of the volumes is written, in MiB.
const snapSpan = 32

// Two hosts write to thin volumes, one through the kernel and one in user space, while snapshots of both
// are taken at one moment. Each snapshot holds what was acknowledged before it was asked for, and nothing
// that was begun after it was complete; each host reads that of the other one. A volume begins as a
// snapshot, is written, and the snapshot stays as it is. No leg is lost. A volume that is not thin has
// snapshots, too.
func TestScenarioSnapshots(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Clients: 2, DriveSize: "4GiB", TargetFlags: []string{"--datapath", "user"}})
	hosts := []*snapHost{{volume: "db1", machine: b.Clients[0], path: "kernel"}, {volume: "db2", machine: b.Clients[1], path: "user"}}
	for _, h := range hosts {
		b.Datapath(h.machine, h.path)
		b.Weft("volume", "create", h.volume, "--size", "256MiB", "--copies", "2", "--thin", "--wait")
		h.w = b.Write(h.machine, b.Attach(h.volume, h.machine), snapSpan, 200, 1)
		h.w.AwaitProgress(500, time.Minute)
		idle, _ := h.w.Stall()
		t.Logf("before, no write of the %s host waits for longer than %v", h.path, idle.Round(time.Millisecond))
	}
	const rounds = 5
	for i := range rounds {
		for _, h := range hosts {
			h.before, h.began = testbed.Acks{}.Add(h.w), len(h.w.Log())
		}
		b.Weft("snapshot", "create", "--name", fmt.Sprintf("s%d", i), "db1", "db2")
		for _, h := range hosts {
			h.newest = h.w.Next()
			h.w.AwaitProgress(50, time.Minute)
			stall, _ := testbed.LongestGap(h.w.Log()[h.began:])
			t.Logf("snapshot %d: no write of the %s host waits for longer than %v", i, h.path, stall.Round(time.Millisecond))
		}
	}
	last := fmt.Sprintf("@s%d", rounds-1)
	for i, h := range hosts { // while both go on
		other := hosts[1-i]
		h.snapshot = b.Attach(h.volume+last, other.machine)
		b.VerifyUpTo(other.machine, h.snapshot, snapSpan, h.before, h.newest)
		h.w.Stop()
		for _, e := range b.Events("volume " + h.volume) {
			if e.GetKind() == "leg.stale" {
				t.Errorf("%s: %s", e.GetKind(), e.GetText())
			}
		}
	}
	clone(t, b, hosts[0], last)
	for i, h := range hosts {
		b.VerifyUpTo(hosts[1-i].machine, h.snapshot, snapSpan, h.before, h.newest)
		b.Weft("detach", h.volume+last)
	}
	b.Weft("snapshot", "delete", "db1@s0", "db1@s2", "db2@s1")
	for _, h := range hosts {
		b.Detach(h.volume)
		b.Verify(h.machine, b.Attach(h.volume, h.machine), snapSpan, testbed.Acks{}.Add(h.w))
	}
	plainComesBack(t, b, hosts[0].machine, hosts[1].machine)
}

// snapHost is a host of which snapshots are taken.
type snapHost struct {
	volume, path, snapshot string
	machine                *vm.Machine
	w                      *testbed.Writer
	before                 testbed.Acks // what was acknowledged before the last snapshot was asked for
	newest                 uint64       // the last write that can have begun before it was complete
	began                  int
}

// clone writes to a volume that begins as a snapshot.
func clone(t *testing.T, b *testbed.Bed, h *snapHost, last string) {
	b.Weft("volume", "create", "c1", "--from", h.volume+last, "--size", "512MiB", "--wait")
	device := b.Attach("c1", h.machine)
	b.VerifyUpTo(h.machine, device, snapSpan, h.before, h.newest)
	w := b.Write(h.machine, device, snapSpan, 0, h.w.Next())
	w.AwaitProgress(500, time.Minute)
	w.Stop()
	acks := testbed.Acks{}
	for block, seq := range h.before {
		acks[block] = seq
	}
	b.Verify(h.machine, device, snapSpan, acks.Add(w))
	b.Detach("c1")
}

// plainComesBack writes to a volume that is not thin through the kernel while it gets trees for its first
// snapshot, has it, and is copied back after that is deleted. The snapshot holds what was acknowledged
// before it was asked for, and no write waits for long. Then the volume goes back to another snapshot.
func plainComesBack(t *testing.T, b *testbed.Bed, kernel, reader *vm.Machine) {
	b.Create("plain", "256MiB", 1, 2)
	w := b.Write(kernel, b.Attach("plain", kernel), snapSpan, 200, 1)
	w.AwaitProgress(300, time.Minute)
	before, began := testbed.Acks{}.Add(w), len(w.Log())
	b.Weft("snapshot", "create", "plain@mon")
	newest := w.Next()
	w.AwaitProgress(300, time.Minute)
	b.VerifyUpTo(reader, b.Attach("plain@mon", reader), snapSpan, before, newest)
	b.Weft("detach", "plain@mon")
	b.Weft("snapshot", "delete", "plain@mon")
	deleted := time.Now()
	b.Eventually(2*time.Minute, "the volume is copied back to its own place", func(context.Context) error {
		for _, l := range b.Volume("plain").Legs {
			if l.GetReason() != "" {
				return fmt.Errorf("leg %d.%d: %s", l.GetColumn(), l.GetCopy(), l.GetReason())
			}
		}
		return nil
	})
	back := time.Since(deleted)
	w.AwaitProgress(100, time.Minute)
	w.Stop()
	stall, _ := testbed.LongestGap(w.Log()[began:])
	t.Logf("not thin: copied back %v after its snapshot was deleted; no write of the kernel host waits for longer than %v", back.Round(time.Millisecond), stall.Round(time.Millisecond))
	for _, e := range b.Events("volume plain") {
		if e.GetKind() == "leg.stale" {
			t.Errorf("%s: %s", e.GetKind(), e.GetText())
		}
	}
	b.Detach("plain")
	b.Verify(kernel, b.Attach("plain", kernel), snapSpan, testbed.Acks{}.Add(w))

	kept, last := testbed.Acks{}.Add(w), w.Next()
	b.Weft("snapshot", "create", "plain@tue")
	w = b.Write(kernel, b.Volume("plain").GetAttachment().GetDevice(), snapSpan, 200, last)
	w.AwaitProgress(300, time.Minute)
	w.Stop()
	b.Detach("plain")
	b.Weft("volume", "restore", "plain", "--to", "plain@tue", "--accept-data-loss")
	b.VerifyUpTo(kernel, b.Attach("plain", kernel), snapSpan, kept, last-1)
	b.Detach("plain")
}

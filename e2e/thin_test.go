// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// thinSpan is the size of a thin volume in MiB: twice its drives.
const thinSpan = 2048

// discardsOnTheKernel gives space back from a kernel host, on both copies, and goes on to discard while a target loses its
// power. The function that it returns checks that the copies are equal then.
func discardsOnTheKernel(t *testing.T, b *testbed.Bed) (reach func()) {
	t.Helper()
	host := b.Clients[0]
	b.Weft("volume", "create", "db2", "--size", "64MiB", "--copies", "2", "--thin", "--wait")
	device := b.Attach("db2", host)
	shell(t, host, "dd if=/dev/urandom of="+device+" bs=1M count=64 oflag=direct status=none")
	uses := func(what string, atMost block.Size) {
		t.Helper()
		b.Eventually(time.Minute, what, func(context.Context) error {
			for _, l := range b.Volume("db2").Legs {
				if used := block.Size(l.GetUsedBytes()); used > atMost {
					return fmt.Errorf("leg %d.%d uses %v", l.GetColumn(), l.GetCopy(), used)
				}
			}
			return nil
		})
	}
	shell(t, host, fmt.Sprintf("blkdiscard -o %d -l %d %s", 32<<20, 32<<20, device))
	uses("half of the space is given back by both copies", 34*block.MiB)
	// Several at a time, so that some are under way when the target is lost: one copy alone does those. What follows is
	// refused until all copies are in sync again.
	const trim = `for lane in 0 1 2 3 4 5 6 7; do (for i in $(seq 0 63); do blkdiscard -o $((lane*4194304+i*65536)) -l 65536 %s; done) >/dev/null 2>&1 & done; sleep 1`
	shell(t, host, fmt.Sprintf(trim, device))
	return func() {
		t.Helper()
		b.WaitHealth("db2", pb.Health_HEALTH_HEALTHY, 2*time.Minute)
		out := b.Weft("volume", "scrub", "db2", "--wait")
		if s := b.Volume("db2").GetScrub(); s.GetFound() != 0 || s.GetAloneBytes() > 0 {
			t.Errorf("after discards while a target was lost, a scrub found %v\n%s", s, out)
		}
		shell(t, host, "blkdiscard "+device) // once more, with both copies
		uses("all of the space is given back by both copies", 2*block.MiB)
		b.Detach("db2")
		b.Weft("volume", "delete", "db2")
	}
}

// A kernel host writes to a thin volume that is larger than its drives. A target loses power and comes
// back; then the drives are full. The writes wait for longer than the kernel repeats any by default, no
// leg is lost, and they go on when another volume is deleted. A host in user space finds all of it, and
// gives the space back.
func TestScenarioThin(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Clients: 2, DriveSize: "1GiB", TargetFlags: []string{"--datapath", "user"}})
	kernel, user := b.Clients[0], b.Clients[1]
	b.Datapath(kernel, "kernel")
	b.Datapath(user, "user")
	b.Create("plain", "256MiB", 1, 2)
	b.Weft("volume", "create", "db1", "--size", fmt.Sprintf("%dMiB", thinSpan), "--copies", "2", "--thin", "--wait")
	device := b.Attach("db1", kernel)
	acks := testbed.Acks{}

	w := b.Write(kernel, device, 64, 200, 1)
	w.AwaitProgress(200, time.Minute)
	away := b.Holder("db1", 0, 1)
	reach := discardsOnTheKernel(t, b)
	killUnderWrites(t, b, w, away)
	w.AwaitProgress(100, time.Minute)
	b.Up(away)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 2*time.Minute)
	w.Stop()
	acks.Add(w)
	reach()

	w = b.Write(kernel, device, thinSpan, 0, w.Next())
	last, since := 0, time.Now()
	b.Eventually(3*time.Minute, "the drives are full", func(context.Context) error {
		n := len(w.Log())
		for _, l := range b.Volume("db1").Legs {
			if !l.GetFull() {
				return fmt.Errorf("leg %d.%d has room; %d writes are acknowledged", l.GetColumn(), l.GetCopy(), n)
			}
		}
		// For a moment they are, until the manager has made up their reserve again; and of the writes that are under
		// way some may find room in a chunk that is there.
		if n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) < 5*time.Second {
			return fmt.Errorf("%d writes are acknowledged, the last one just now", n)
		}
		return nil
	})
	before := w.Log()
	time.Sleep(25 * time.Second)
	w.NoErrors()
	if now := w.Log(); len(now) > len(before) {
		t.Errorf("%d writes were acknowledged while the drives were full", len(now)-len(before))
	}
	v := b.Volume("db1")
	t.Logf("full after %d writes: %v of %v are used", len(before), block.Size(v.GetUsedBytes()), block.Size(v.GetSizeBytes()))
	if v.GetHealth() != pb.Health_HEALTH_HEALTHY {
		t.Errorf("full drives make the volume %v\n%s", v.GetHealth(), b.State())
	}
	for _, part := range []string{"writes to places that were never written wait, and nothing is lost", "weft leg move db1 0.0"} {
		if text := b.Weft("explain", "volume", "db1"); !strings.Contains(text, part) {
			t.Errorf("explain does not say %q:\n%s", part, text)
		}
	}
	shell(t, kernel, fmt.Sprintf("dd if=%s of=/dev/null bs=4096 count=1 skip=%d iflag=direct status=none", device, before[0].Block))

	began := time.Now()
	b.Weft("volume", "delete", "plain")
	w.AwaitProgress(20, time.Minute)
	t.Logf("writes go on %v after a volume was deleted", time.Since(began).Round(time.Millisecond))
	w.Stop()
	b.Detach("db1")

	device = b.Attach("db1", user)
	b.Verify(user, device, thinSpan, acks.Add(w))
	shell(t, user, "blkdiscard "+device)
	b.Eventually(time.Minute, "the space is given back", func(context.Context) error {
		if used := b.Volume("db1").GetUsedBytes(); used > uint64(16*block.MiB) {
			return fmt.Errorf("%v are used", block.Size(used))
		}
		drives, err := b.API.ListDrives(t.Context(), &pb.ListDrivesRequest{})
		for _, d := range drives.GetDrives() {
			if used := block.Size(d.GetThinUsedBytes()); used > block.ExtentSize {
				err = fmt.Errorf("the tree of %s keeps %v", d.GetNode(), used)
			}
		}
		return err
	})
}

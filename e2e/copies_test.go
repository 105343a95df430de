// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// A host on the kernel's data path copies to a leg that is made again on another target, at the volume's rate. Of a thin
// volume, it copies what holds data. Of another one that is whole again only by that, the next host goes on where the
// first one lost its power, before which its agent was killed and the leg's target was away. Then what was copied serves
// alone.
func TestScenarioCopiesGoOn(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Clients: 2, DriveSize: "2GiB"})
	c1, c2 := b.Clients[0], b.Clients[1]
	b.Weft("volume", "create", "sparse", "--size", "64MiB", "--copies", "2", "--thin", "--wait")
	device := b.Attach("sparse", c1)
	w := b.Write(c1, device, span, 200, 1)
	w.AwaitProgress(200, time.Minute)
	for _, h := range b.Targets {
		if h != b.Holder("sparse", 0, 0) && h != b.Holder("sparse", 0, 1) {
			b.Weft("leg", "move", "sparse", "0.1", "--to", h.Name())
		}
	}
	b.Eventually(3*time.Minute, "the thin leg has moved", func(context.Context) error {
		if v := b.Volume("sparse"); v.Health != pb.Health_HEALTH_HEALTHY || len(v.Legs) != 2 || b.LastEvent("volume sparse", "leg.in-sync") == nil {
			return fmt.Errorf("it is %v with %d legs", v.Health, len(v.Legs))
		}
		return nil
	})
	w.AwaitProgress(50, time.Minute)
	w.Stop()
	e := b.LastEvent("volume sparse", "leg.in-sync")
	if n := copiedBytes(t, e); n == 0 || n > 2*span*block.MiB {
		t.Errorf("%v were copied to a thin leg, want what %d MiB of writes take: %s", n, span, e.GetText())
	}
	t.Logf("thin: %s", e.GetText())
	out := b.Weft("volume", "scrub", "sparse", "--wait")
	if s := b.Volume("sparse").GetScrub(); s.GetFound() > 0 || s.GetAloneBytes() > 0 || s.GetDoneBytes() == 0 {
		t.Errorf("the copies differ: %v\n%s", s, out)
	}
	b.Detach("sparse")
	b.Weft("volume", "delete", "sparse")

	b.Create("db1", "384MiB", 1, 2)
	device = b.Attach("db1", c1)
	b.Weft("volume", "set", "db1", "--rebuild-rate", "8MiB")
	acks := testbed.Acks{}
	w = b.Write(c1, device, span, 100, w.Next())
	w.AwaitProgress(100, time.Minute)
	dead := b.Holder("db1", 0, 1)
	killUnderWrites(t, b, w, dead)
	confirmDead(b, dead)
	await := func(most block.Size) {
		t.Helper()
		b.Eventually(4*time.Minute, fmt.Sprintf("%v are left to copy", most), func(context.Context) error {
			r := underWay(b, "db1")
			if r == nil || leftOf(r) > most {
				return fmt.Errorf("the copy is %v", r)
			}
			return nil
		})
	}
	await(340 * block.MiB)
	agent := b.Daemon(c1)
	if err := agent.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	restart(t, agent)
	w.AwaitProgress(100, time.Minute)
	was := underWay(b, "db1")
	if was == nil {
		t.Fatalf("the copy has ended before its target could be killed\n%s", b.State())
	}
	to := b.Targets[slices.IndexFunc(b.Targets, func(h *vm.Machine) bool { return h.Name() == was.Node })]
	to.Kill()
	w.AwaitProgress(100, time.Minute)
	b.Up(to)
	await(min(leftOf(was), 300*block.MiB))
	w.AwaitProgress(300, time.Minute) // so there has been a checkpoint
	was = underWay(b, "db1")
	c1.Kill()
	w.Abandon()
	acks.Add(w)

	b.Weft("detach", "db1", "--force")
	device = b.Attach("db1", c2)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 6*time.Minute)
	e = b.LastEvent("volume db1", "leg.in-sync")
	t.Logf("%v were left: %s", leftOf(was), e.GetText())
	if n := copiedBytes(t, e); was == nil || n > leftOf(was)+64*block.MiB { // what was copied and written since a checkpoint
		t.Errorf("of 384 MiB, %v were left when the host lost its power, and the next one copied %v", leftOf(was), n)
	}
	missedAndBack(t, b, c2, device, acks)
	b.Holder("db1", 0, 0).Kill()
	b.Verify(c2, device, span, acks)
}

// missedAndBack has a leg of db1 miss writes and come back. Its host's agent copies them at the volume's rate, and so
// does the next one when that is killed.
func missedAndBack(t *testing.T, b *testbed.Bed, host *vm.Machine, device string, acks testbed.Acks) {
	t.Helper()
	b.Weft("volume", "set", "db1", "--rebuild-rate", "1MiB")
	w := b.Write(host, device, span, 500, 1<<20)
	w.AwaitProgress(100, time.Minute)
	away := b.Holder("db1", 0, 2) // which was made anew
	away.Kill()
	w.AwaitProgress(1500, 2*time.Minute) // in regions of half a MiB, they are all over
	w.Stop()
	acks.Add(w)
	b.Up(away)
	began := time.Now()
	missed := block.Size(0)
	b.Eventually(2*time.Minute, "a part of what the leg missed is copied", func(context.Context) error {
		r := underWay(b, "db1")
		if r == nil || r.DoneBytes == 0 {
			return fmt.Errorf("the copy is %v", r)
		}
		missed = block.Size(r.TotalBytes)
		return nil
	})
	agent := b.Daemon(host)
	if err := agent.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	restart(t, agent)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 6*time.Minute)
	took, e := time.Since(began), b.LastEvent("volume db1", "leg.in-sync")
	t.Logf("the leg missed %v: %s, %.0f s after its target began to boot", missed, e.GetText(), took.Seconds())
	if n := copiedBytes(t, e); missed < 9*block.MiB || n > missed+8*block.MiB || took < time.Duration(missed/block.MiB-8)*time.Second {
		t.Errorf("a leg missed %v, and %v were copied to it in %v, want that at 1 MiB a second", missed, n, took)
	}
}

// copiedBytes is how much was copied to a leg that came in sync.
func copiedBytes(t *testing.T, e *pb.Event) block.Size {
	t.Helper()
	n, err := strconv.ParseUint(e.GetAttributes()["bytes_copied"], 10, 64)
	if err != nil {
		t.Fatalf("event %v: bytes_copied: %v", e, err)
	}
	return block.Size(n)
}

// underWay is the copy to a leg that is under way; nil if none is.
func underWay(b *testbed.Bed, volume string) *pb.Rebuild {
	for _, r := range b.Volume(volume).Rebuilds {
		if r.Ended == nil && r.TotalBytes > 0 {
			return r
		}
	}
	return nil
}

func leftOf(r *pb.Rebuild) block.Size { return block.Size(r.GetTotalBytes() - r.GetDoneBytes()) }

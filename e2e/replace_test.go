// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/proto/pb"
)

// A target is lost for good, under writes on the kernel data path. Once an operator says so,
// its copy is made again on another target. Then a healthy copy is moved to that target. At last the
// other target is taken out for maintenance and loses its power, which no write notices, and the
// moved copy serves alone.
func TestScenarioReplaced(t *testing.T) {
	b := testbed.Start(t, testbed.Options{})
	c1 := b.Clients[0]
	b.Create("db1", "256MiB", 1, 2)
	device := b.Attach("db1", c1)
	acks := testbed.Acks{}
	w := b.Write(c1, device, span, 200, 1)
	w.AwaitProgress(100, time.Minute)

	dead := b.Holder("db1", 0, 1)
	killUnderWrites(t, b, w, dead)
	confirmDead(b, dead)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 6*time.Minute)
	w.AwaitProgress(50, time.Minute)
	w.NoErrors()

	b.Up(dead)
	b.Eventually(2*time.Minute, dead.Name()+"'s drive is ready", func(ctx context.Context) error {
		all, err := b.API.ListDrives(ctx, &pb.ListDrivesRequest{})
		for _, d := range all.GetDrives() {
			if d.Node == dead.Name() && d.State != pb.DriveState_DRIVE_STATE_READY {
				err = fmt.Errorf("it is %v: %s", d.State, d.Reason)
			}
		}
		return err
	})
	w.Stop()
	acks.Add(w)
	w = b.Write(c1, device, span, 200, w.Next())
	first := b.Holder("db1", 0, 0)
	b.Weft("leg", "move", "db1", "0.0", "--to", dead.Name())
	b.Eventually(6*time.Minute, "the copies are on the other two targets", func(context.Context) error {
		v := b.Volume("db1")
		for _, l := range v.Legs {
			if l.Node == first.Name() {
				return fmt.Errorf("%s still has one", first.Name())
			}
		}
		if v.Health != pb.Health_HEALTH_HEALTHY {
			return fmt.Errorf("it is %v", v.Health)
		}
		return nil
	})
	w.AwaitProgress(50, time.Minute)
	w.NoErrors()
	stall, _ := w.Stall()
	t.Logf("while the copy was moved, the longest pause between two writes was %v", stall.Round(time.Millisecond))
	w.Stop()
	acks.Add(w)
	w = b.Write(c1, device, span, 200, w.Next())
	for _, h := range b.Targets {
		if h != first && h != dead {
			b.Weft("node", "maintain", h.Name(), "--for", "10m")
			h.Kill()
		}
	}
	w.AwaitProgress(200*8, time.Minute)
	if stall, _ = w.Stall(); stall > 2500*time.Millisecond {
		t.Errorf("a target was taken out in order, and the writer stalled for %v", stall)
	}
	t.Logf("while a target was taken out in order, the longest pause between two writes was %v", stall.Round(time.Millisecond))
	w.Stop()
	w.NoErrors()
	b.Verify(c1, device, span, acks.Add(w))
}

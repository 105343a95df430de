// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// span is the size in MiB of the part of a volume that the writers use, from its start.
const span = 16

// shell runs a script on a machine; it must succeed.
func shell(t *testing.T, m *vm.Machine, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	out, err := m.Shell(ctx, script)
	if err != nil {
		t.Fatalf("on %s: %v\n%s", m.Name(), err, out)
	}
	return out
}

// fio is a job that writes files and checks each block that it reads.
func fio(dir, options string) string {
	return "fio --name=files --directory=" + dir + " --size=4m --bs=16k --rw=randwrite --ioengine=libaio --direct=1 --iodepth=8" +
		" --verify=crc32c --verify_fatal=1 --randseed=7 --minimal " + options + " >/dev/null"
}

// Scenario 1: volumes of every layout hold a file system, whose files survive detach and
// attach.
func TestScenarioFilesSurviveDetachAndAttach(t *testing.T) {
	b := testbed.Start(t, testbed.Options{})
	c1 := b.Clients[0]
	for _, v := range []struct {
		name            string
		stripes, copies int
	}{{"raid0", 2, 1}, {"raid1", 1, 2}, {"raid10", 2, 2}} {
		b.Create(v.name, "256MiB", v.stripes, v.copies)
		device := b.Attach(v.name, c1)
		shell(t, c1, fmt.Sprintf("mkfs.ext4 -q %s; mkdir -p /mnt/%s; mount %s /mnt/%s; %s; sync; (cd /mnt/%s && sha256sum files.*) > /tmp/%s.sum; umount /mnt/%s",
			device, v.name, device, v.name, fio("/mnt/"+v.name, ""), v.name, v.name, v.name))
	}
	for _, name := range []string{"raid0", "raid1", "raid10"} {
		b.Detach(name)
		if _, err := c1.Run(t.Context(), "test", "-e", "/dev/weft/"+name); err == nil {
			t.Errorf("after the detach /dev/weft/%s is still there", name)
		}
	}
	if left := strings.TrimSpace(shell(t, c1, "ls /sys/class/nvme; ls -d /sys/block/dm-* 2>/dev/null || true")); left != "" {
		t.Errorf("after the detaches controllers or mapped devices are left: %s", left)
	}
	for _, name := range []string{"raid10", "raid0", "raid1"} {
		device := b.Attach(name, c1)
		shell(t, c1, fmt.Sprintf("e2fsck -fn %s >/dev/null; mount %s /mnt/%s; cd /mnt/%s; sha256sum -c /tmp/%s.sum; %s; cd /; umount /mnt/%s",
			device, device, name, name, name, fio("/mnt/"+name, "--verify_only=1"), name))
		b.WaitHealth(name, pb.Health_HEALTH_HEALTHY, 2*time.Minute)
	}
}

// Scenarios 2 and 3: a target dies while a client writes, and the other copy takes over.
// The target returns and receives only what it missed; then the other one dies.
func TestScenarioTargetKilledAndBack(t *testing.T) {
	b := testbed.Start(t, testbed.Options{})
	c1 := b.Clients[0]
	volume := b.Create("db1", "512MiB", 2, 2)
	device := b.Attach("db1", c1)
	comparesCopies(t, b)
	acks := testbed.Acks{}
	w := b.Write(c1, device, span, 200, 1)
	w.AwaitProgress(200, time.Minute)

	first := b.Holder("db1", 0, 1)
	killed := killUnderWrites(t, b, w, first)
	staleBeforeReleased(t, b, w, first, killed)

	// It returns: what it missed is copied while the writer continues.
	b.Up(first)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 2*time.Minute)
	copied := bytesCopied(t, b)
	t.Logf("rebuilt with %v copied of %v", copied, block.Size(volume.SizeBytes))
	if copied == 0 || copied > block.Size(volume.SizeBytes)/4 {
		t.Errorf("the rebuild copied %v of a volume of %v, want a small part", copied, block.Size(volume.SizeBytes))
	}
	w.AwaitProgress(50, time.Minute)

	// Now the other copy of that column dies.
	second := b.Holder("db1", 0, 0)
	killUnderWrites(t, b, w, second)
	w.Stop()
	b.Verify(c1, device, span, acks.Add(w))
}

// Scenario 7: a stale leg alone is refused, and copied to once the good one is back.
func TestScenarioAStaleLegIsRefused(t *testing.T) {
	b := testbed.Start(t, testbed.Options{})
	c1 := b.Clients[0]
	b.Create("db1", "512MiB", 2, 2)
	device := b.Attach("db1", c1)
	acks := testbed.Acks{}
	w := b.Write(c1, device, span, 200, 1)
	w.AwaitProgress(200, time.Minute)
	first, second := b.Holder("db1", 0, 1), b.Holder("db1", 0, 0)
	killUnderWrites(t, b, w, second)
	w.Stop()
	acks.Add(w)

	// Its target returns only after the good one is gone.
	b.Detach("db1")
	first.Kill()
	b.Up(second)
	b.Eventually(time.Minute, "the stale leg's target is online and the good one's is not", func(ctx context.Context) error {
		nodes, err := b.API.ListNodes(ctx, &pb.ListNodesRequest{})
		for _, n := range nodes.GetNodes() {
			if n.Name == second.Name() && !n.Target.Online || n.Name == first.Name() && n.Target.Online {
				err = fmt.Errorf("%s: online is %v", n.Name, n.Target.Online)
			}
		}
		return err
	})
	_, err := b.Try("attach", "db1", "--node", "c1")
	var refused *operator.CommandError
	if !errors.As(err, &refused) || refused.Code != 5 || !strings.Contains(refused.Stderr, "no in-sync leg") {
		t.Errorf("attach with a stale leg alone = %v, want a refusal that names the missing in-sync leg", err)
	}
	explained := b.Weft("explain", "volume", "db1")
	for _, want := range []string{"stale", first.Name(), "promote-stale"} {
		if !strings.Contains(explained, want) {
			t.Errorf("weft explain volume db1 does not say %q:\n%s", want, explained)
		}
	}

	// With the good leg back, a host copies to the stale one while nobody has the volume.
	b.Up(first)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 3*time.Minute)
	if healed := b.LastEvent("volume db1", "volume.healing"); healed == nil || b.Volume("db1").GetAttachment() != nil {
		t.Errorf("the volume is healthy, attached to %v, after %v", b.Volume("db1").GetAttachment(), healed)
	}
	first.Kill() // what is read then was copied
	b.Eventually(time.Minute, "db1 can be served", func(ctx context.Context) error {
		_, err := b.Try("attach", "db1", "--node", "c1")
		return err
	})
	b.Verify(c1, device, span, acks)
}

// comparesCopies compares the copies of a volume in the kernel while it is written to, and finds a block that a
// drive has changed, and no other. Then it repairs that.
func comparesCopies(t *testing.T, b *testbed.Bed) {
	t.Helper()
	const span = 1 // MiB, of four
	c1 := b.Clients[0]
	v := b.Create("db2", "4MiB", 1, 2)
	device := b.Attach("db2", c1)
	w := b.Write(c1, device, span, 20, 1)
	w.AwaitProgress(20, time.Minute)
	leg := v.GetLegs()[slices.IndexFunc(v.GetLegs(), func(l *pb.Leg) bool { return l.GetCopy() == 1 })]
	shell(t, b.Holder("db2", 0, 1), fmt.Sprintf("printf x | dd of=/dev/weft/leg/%s bs=1 seek=%d conv=notrunc && sync", leg.GetId(), 3<<20+5000))
	began := time.Now()
	out := b.Weft("volume", "scrub", "db2", "--wait")
	t.Logf("4 MiB of both copies compared in %v", time.Since(began).Round(time.Second))
	if s := b.Volume("db2").GetScrub(); s.GetFound() != 1 || s.GetAloneBytes() > span<<20 || s.GetDoneBytes() != v.GetSizeBytes() {
		t.Errorf("a scrub found %d ranges, want the one that was changed: %v\n%s", s.GetFound(), s, out)
	}
	if e := b.LastEvent("volume db2", "volume.scrub-found"); e == nil || e.Attributes["offset_bytes"] != strconv.Itoa(3<<20+4096) {
		t.Errorf("the range that a drive has changed is told as %v", e)
	}

	out = b.Weft("volume", "scrub", "db2", "--repair", "--from", "0.0", "--wait")
	if s := b.Volume("db2").GetScrub(); s.GetFound() != 1 || s.GetRepaired() != 1 {
		t.Errorf("a repair ended as %v\n%s", s, out)
	}
	out = b.Weft("volume", "scrub", "db2", "--wait")
	if s := b.Volume("db2").GetScrub(); s.GetFound() != 0 || s.GetAloneBytes() > span<<20 {
		t.Errorf("after the repair, a scrub found %v\n%s", s, out)
	}
	w.NoErrors()
	stall, _ := w.Stall()
	t.Logf("the longest pause between two writes was %v", stall.Round(time.Millisecond))
	w.Stop()
	acks := testbed.Acks{}
	b.Verify(c1, device, span, acks.Add(w))
	b.Detach("db2")
	b.Weft("volume", "delete", "db2")
}

// killUnderWrites cuts a target's power and waits until writes continue.
func killUnderWrites(t *testing.T, b *testbed.Bed, w *testbed.Writer, target *vm.Machine) (killed time.Time) {
	t.Helper()
	offset, _, err := b.Clients[0].ClockOffset(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	killed = time.Now().Add(offset) // by the writer's clock
	target.Kill()
	w.AwaitProgress(100, time.Minute)
	w.NoErrors()
	stall, began := w.Stall()
	t.Logf("%s was killed: the writer stalled for %v, %v after the kill", target.Name(), stall.Round(time.Millisecond), began.Sub(killed).Round(time.Millisecond))
	return killed
}

// confirmDead says that a target is off for good, once its agent counts as offline.
func confirmDead(b *testbed.Bed, target *vm.Machine) {
	b.T.Helper()
	b.Eventually(time.Minute, target.Name()+" is known to be off", func(ctx context.Context) error {
		_, err := b.API.ConfirmNodeDead(ctx, &pb.ConfirmNodeDeadRequest{Node: target.Name()})
		return err
	})
}

// staleBeforeReleased checks record before release. volmgr's event log has the time of the
// record, and the writer's log that of the first write acknowledged after the stall. Both
// are converted to this process's clock, with a known error.
func staleBeforeReleased(t *testing.T, b *testbed.Bed, w *testbed.Writer, target *vm.Machine, killed time.Time) {
	t.Helper()
	managerAhead, managerError, err := b.Manager.ClockOffset(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	clientAhead, clientError, err := b.Clients[0].ClockOffset(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	event := b.LastEvent("volume db1", "leg.stale")
	if event == nil {
		t.Fatalf("no leg was recorded stale\n%s", b.State())
	}
	recorded := event.Time.AsTime().Add(-managerAhead)
	_, began := w.Stall()
	for _, ack := range w.Log() {
		if ack.End.After(began) && ack.End.Sub(began) > 500*time.Millisecond {
			released := ack.End.Add(-clientAhead)
			t.Logf("recorded stale %v before the first write was released (clocks agree within %v)",
				released.Sub(recorded).Round(time.Millisecond), (managerError + clientError).Round(time.Millisecond))
			if released.Add(clientError + managerError).Before(recorded) {
				t.Errorf("write %d was acknowledged at %v, before its missing leg on %s was recorded stale at %v",
					ack.Seq, released, target.Name(), recorded)
			}
			return
		}
	}
	t.Errorf("no write was acknowledged after %s was killed at %v", target.Name(), killed)
}

// bytesCopied is the amount that rebuilds of db1 copied, as volmgr recorded it.
func bytesCopied(t *testing.T, b *testbed.Bed) (sum block.Size) {
	t.Helper()
	for _, e := range b.Events("volume db1") {
		if e.Kind != "leg.in-sync" {
			continue
		}
		sum += copiedBytes(t, e)
	}
	return sum
}

// Scenario 4: a client dies while writing. The volume is attached to another client after
// all legs are fenced; the first client, once back, cannot write.
func TestScenarioClientKilledAndReplaced(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Clients: 2})
	c1, c2 := b.Clients[0], b.Clients[1]
	b.Create("db1", "256MiB", 1, 2)
	device := b.Attach("db1", c1)
	acks := testbed.Acks{}
	w := b.Write(c1, device, span, 0, 1)
	w.AwaitProgress(200, time.Minute)
	connect := connectString(t, c1)
	c1.Kill()
	w.Abandon()
	acks.Add(w)

	if _, err := b.Try("attach", "db1", "--node", "c2"); err == nil {
		t.Errorf("attach on c2 succeeded while c1 holds the volume")
	}
	b.Weft("detach", "db1", "--force")
	device = b.Attach("db1", c2)
	everyLegFenced(t, b)
	comparedWhatTargetsList(t, b, c2)
	b.Verify(c2, device, span, acks)
	w2 := b.Write(c2, device, span, 200, w.Next()+1000)
	w2.AwaitProgress(50, time.Minute)

	// The first client returns and tries by hand to use its old connections.
	b.Up(c1)
	for _, options := range connect {
		if out, err := c1.Shell(t.Context(), fmt.Sprintf("modprobe nvme-tcp; exec 3<>/dev/nvme-fabrics; printf %%s '%s' >&3", options)); err == nil {
			t.Errorf("c1 connected again with its old identity %s: %s", options, out)
		}
	}
	if _, err := c1.Shell(t.Context(), "test -e "+device); err == nil {
		t.Errorf("c1 has %s although c2 holds the volume", device)
	}
	w2.AwaitProgress(50, time.Minute)
	w2.Stop()
	b.Verify(c2, device, span, acks.Add(w2))
}

// comparedWhatTargetsList checks in the log of a client's agent that after a crash it compared only what
// the targets had listed, on either data path.
func comparedWhatTargetsList(t *testing.T, b *testbed.Bed, client *vm.Machine) {
	t.Helper()
	compared := 0
	for line := range strings.Lines(b.Daemon(client).Log()) {
		if !strings.Contains(line, "copies compared") && !strings.Contains(line, "making the copies equal") {
			continue
		}
		compared++
		t.Log(client.Name(), strings.TrimSpace(line))
		if !strings.Contains(line, `whole_because=""`) {
			t.Errorf("%s compared everything: %s", client.Name(), line)
		}
	}
	if compared == 0 {
		t.Errorf("%s compared nothing after a crash", client.Name())
	}
}

// connectString is the options with which a client's kernel connected, read from sysfs.
func connectString(t *testing.T, client *vm.Machine) []string {
	out := shell(t, client, `for c in /sys/class/nvme/nvme*; do
		a=$(cat $c/address | tr , '\n' | grep -E '^(traddr|trsvcid)=' | tr '\n' , )
		echo "transport=tcp,${a}nqn=$(cat $c/subsysnqn),hostnqn=$(cat $c/hostnqn),hostid=$(cat $c/hostid)"
	done`)
	lines := strings.Fields(out)
	if len(lines) == 0 {
		t.Fatal("the client has no controllers")
	}
	return lines
}

// everyLegFenced checks in the event log that the grant came after the fences.
func everyLegFenced(t *testing.T, b *testbed.Bed) {
	t.Helper()
	var granting, granted *pb.Event
	for _, e := range b.Events("volume db1") {
		switch e.Kind {
		case "volume.granting":
			granting, granted = e, nil
		case "volume.granted":
			granted = e
		}
	}
	if granting == nil || granted == nil || granted.Seq < granting.Seq {
		t.Fatalf("the last grant is not in the log: %v, %v", granting, granted)
	}
	if granted.Attributes["equalize"] != "true" {
		t.Errorf("the grant after a crash was %v, want the copies to be made equal", granted)
	}
	for _, leg := range b.Volume("db1").Legs {
		if leg.State != pb.LegState_LEG_STATE_IN_SYNC {
			t.Errorf("leg on %s is %v, want every leg fenced and in sync", leg.Node, leg.State)
		}
	}
}

// There must never be two writers where one was promised. A client that volmgr cannot
// reach, but that still reaches the targets, is fenced before the next one writes.
func TestScenarioPartitionedClientIsFenced(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Clients: 2})
	c1, c2 := b.Clients[0], b.Clients[1]
	b.Create("db1", "256MiB", 1, 2)
	device := b.Attach("db1", c1)
	w := b.Write(c1, device, span, 200, 1)
	w.AwaitProgress(50, time.Minute)
	for _, m := range b.Managers {
		b.Cluster.Network().Cut(c1, m)
	}
	w.AwaitProgress(100, time.Minute)

	b.Weft("detach", "db1", "--force")
	device = b.Attach("db1", c2)
	c1Ahead, within, err := c1.ClockOffset(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	attached := time.Now()
	acks := testbed.Acks{}.Add(w)
	b.Verify(c2, device, span, acks)
	w2 := b.Write(c2, device, span, 200, w.Next()+1_000_000)
	w2.AwaitProgress(100, time.Minute)
	for _, ack := range w.Log() {
		if ack.End.Add(-c1Ahead).After(attached.Add(within)) {
			t.Fatalf("write %d of c1 was acknowledged %v after c2 had the volume", ack.Seq, ack.End.Add(-c1Ahead).Sub(attached))
		}
	}
	w2.Stop()
	b.Verify(c2, device, span, acks.Add(w2))
	for _, m := range b.Managers {
		b.Cluster.Network().Heal(c1, m)
	}
	b.Eventually(time.Minute, "c1 has released the volume", func(ctx context.Context) error {
		out, err := c1.Shell(ctx, "ls /sys/class/nvme")
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("controllers are left: %s", out)
		}
		return err
	})
	w.Abandon()
}

// Scenario 5: of three managers the one that leads loses its power, and a target at the same moment:
// another manager leads, records the lost leg, and writes go on. Then a second manager dies, so that
// none can lead: I/O continues; if a target is lost meanwhile, writes wait until one leads again.
func TestScenarioManagersKilled(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Managers: 3, Closed: true})
	c1 := b.Clients[0]
	b.Create("db1", "256MiB", 1, 2)
	device := b.Attach("db1", c1)
	w := b.Write(c1, device, span, 200, 1)
	w.AwaitProgress(50, time.Minute)

	holder, leader := b.Holder("db1", 0, 1), b.Leader()
	leader.Kill()
	holder.Kill()
	w.AwaitProgress(100, time.Minute)
	w.NoErrors()
	stall, _ := w.Stall()
	t.Logf("the manager that led and a target lost their power at once: writes stalled for %v", stall.Round(time.Millisecond))
	if stall > 20*time.Second {
		t.Errorf("writes stalled for %v", stall)
	}
	if next := b.Leader(); next == leader {
		t.Errorf("%s leads, and has no power", leader.Name())
	}
	if b.LastEvent("volume db1", "leg.stale") == nil {
		t.Errorf("writes continued although no leg was recorded stale\n%s", b.State())
	}
	b.Up(holder)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 2*time.Minute)

	volmgr := b.Daemon(b.Leader())
	if err := volmgr.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	w.AwaitProgress(500, time.Minute)
	if took := time.Since(before); took > 15*time.Second {
		t.Errorf("500 writes took %v without a manager that leads", took)
	}
	holder.Kill()
	time.Sleep(5 * time.Second) // the writer's leg is lost, and no manager can record it
	stuck := len(w.Log())
	time.Sleep(15 * time.Second)
	if now := len(w.Log()); now != stuck {
		t.Errorf("%d writes were acknowledged while a lost leg could not be recorded stale", now-stuck)
	}
	w.NoErrors()
	restart(t, volmgr)
	w.AwaitProgress(100, time.Minute)
	b.Up(leader)
	b.AwaitVotes()
	w.Stop()
	b.Verify(c1, device, span, testbed.Acks{}.Add(w))
}

func restart(t *testing.T, d *vm.Daemon) {
	t.Helper()
	if err := d.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Scenario 6: agents are killed and machines reboot, during I/O.
func TestScenarioAgentsKilledAndMachinesReboot(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Closed: true})
	c1 := b.Clients[0]
	b.Create("db1", "512MiB", 2, 2)
	device := b.Attach("db1", c1)
	w := b.Write(c1, device, span, 200, 1)

	for _, m := range append(append([]*vm.Machine{}, b.Targets...), c1) {
		agent := b.Daemon(m)
		if err := agent.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.AwaitProgress(100, time.Minute)
		restart(t, agent)
		w.AwaitProgress(100, time.Minute)
	}
	if stall, _ := w.Stall(); stall > 3*time.Second {
		t.Errorf("I/O stopped for %v while agents were killed and restarted", stall)
	}
	if e := b.LastEvent("volume db1", "leg.stale"); e != nil {
		t.Errorf("a leg went stale because an agent was restarted: %v", e)
	}

	target := b.Holder("db1", 1, 0)
	if err := target.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.Up(target)
	w.AwaitProgress(100, time.Minute)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 2*time.Minute)
	w.Stop()
	acks := testbed.Acks{}.Add(w)
	b.Verify(c1, device, span, acks)

	// The client's power fails; after its boot the device comes back by itself.
	w = b.Write(c1, device, span, 0, w.Next())
	w.AwaitProgress(100, time.Minute)
	c1.Kill()
	w.Abandon()
	acks.Add(w)
	b.Up(c1)
	b.Eventually(4*time.Minute, "the device is back after the client's reboot", func(ctx context.Context) error {
		v := b.Volume("db1")
		if v.Attachment.GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
			return fmt.Errorf("it is %v", v.Attachment)
		}
		_, err := c1.Run(ctx, "test", "-b", device)
		return err
	})
	b.Verify(c1, device, span, acks)
}

// Scenario 8: invalid input causes a clear error and changes nothing.
func TestScenarioBadInput(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Drives: 2})
	t1, c1 := b.Targets[0], b.Clients[0]
	b.Create("db1", "256MiB", 1, 2)

	refuse := func(code int, says string, args ...string) {
		t.Helper()
		before := len(b.Events(""))
		_, err := b.Try(args...)
		var failed *operator.CommandError
		if !errors.As(err, &failed) || failed.Code != code || !strings.Contains(failed.Stderr, says) {
			t.Errorf("weft %s = %v, want exit code %d and %q", strings.Join(args, " "), err, code, says)
		}
		if after := b.Events(""); len(after) != before {
			t.Errorf("weft %s was refused but recorded the event %v", strings.Join(args, " "), after[len(after)-1])
		}
	}
	refuse(3, "nobody", "drive", "add", "nobody", "/dev/nvme0n1")
	refuse(2, "size", "volume", "create", "db2", "--size", "0")
	refuse(6, "no space", "volume", "create", "db2", "--size", "1TiB", "--stripes", "1", "--copies", "1")
	refuse(6, "copies", "volume", "create", "db2", "--size", "256MiB", "--copies", "3", "--stripes", "1", "--spread", "zone")
	refuse(4, "size", "volume", "create", "db1", "--size", "512MiB", "--copies", "2", "--stripes", "1")
	refuse(3, "nobody", "attach", "db1", "--node", "nobody")
	refuse(3, "nothing", "attach", "nothing", "--node", "c1")
	if again := b.Weft("volume", "create", "db1", "--size", "256MiB", "--stripes", "1", "--copies", "2", "--chunk-size", "64KiB"); strings.Contains(again, "rror") {
		t.Errorf("the same create again = %s", again)
	}

	driveWithAFileSystem(t, b, t1)
	corruptLabel(t, b)
	garbageInTheStateFile(t, b, c1)
}

// driveWithAFileSystem tries to add a drive that holds data.
func driveWithAFileSystem(t *testing.T, b *testbed.Bed, target *vm.Machine) {
	t.Helper()
	var spare *pb.Drive
	drives, err := b.API.ListDrives(t.Context(), &pb.ListDrivesRequest{Node: target.Name()})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range drives.Drives {
		if d.AllocatedBytes == 0 {
			spare = d
		}
	}
	b.Weft("drive", "evict", spare.Id)
	b.Eventually(time.Minute, "the drive is given back", func(ctx context.Context) error {
		list, err := b.API.ListDrives(ctx, &pb.ListDrivesRequest{Node: target.Name()})
		if err == nil && len(list.Drives) != 1 {
			err = fmt.Errorf("%d drives", len(list.Drives))
		}
		return err
	})
	shell(t, target, "mkfs.ext4 -q -L precious "+spare.Device+"; sync; dd if="+spare.Device+" bs=1M count=32 2>/dev/null | sha256sum > /tmp/before")
	// Until then the manager takes the drive for blank, and only the target would refuse it.
	b.Eventually(time.Minute, "the file system is reported", func(context.Context) error {
		out, err := b.Try("drive", "devices", target.Name())
		if err == nil && !strings.Contains(out, "precious") {
			err = fmt.Errorf("devices: %s", out)
		}
		return err
	})
	b.Eventually(time.Minute, "the file system is refused", func(ctx context.Context) error {
		_, err := b.Try("drive", "add", target.Name(), spare.Device)
		var failed *operator.CommandError
		if !errors.As(err, &failed) || !strings.Contains(failed.Stderr, "ext4") || !strings.Contains(failed.Stderr, "precious") {
			return fmt.Errorf("drive add = %v, want a refusal that names ext4 and its label", err)
		}
		return nil
	})
	shell(t, target, "dd if="+spare.Device+" bs=1M count=32 2>/dev/null | sha256sum | cmp - /tmp/before")
}

// corruptLabel destroys copies of a label while the machine is off. The drive survives the
// loss of one copy. With all copies gone, the drive is refused and not written.
func corruptLabel(t *testing.T, b *testbed.Bed) {
	t.Helper()
	target := b.Holder("db1", 0, 0)
	drive := driveOf(t, b, target)
	const slot = 4 << 20 // two copies at each end of the drive
	damage := func(offsets ...int64) {
		if err := target.Shutdown(t.Context()); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(drive.Path(), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		end, err := f.Seek(0, io.SeekEnd)
		if err != nil {
			t.Fatal(err)
		}
		for _, offset := range offsets {
			// Keep the magic: the label is recognized as Weft's but cannot be read.
			if _, err := f.WriteAt([]byte(strings.Repeat("garbage ", 64)), (offset+end)%end+64); err != nil {
				t.Fatal(err)
			}
		}
		b.Up(target)
	}
	damage(0)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, time.Minute)
	damage(0, slot, -2*slot, -slot)
	sum := endsOf(t, drive)
	b.Eventually(time.Minute, "the drive is not used, and said to have a corrupt label", func(ctx context.Context) error {
		devices, err := b.API.ListDevices(ctx, &pb.ListDevicesRequest{Node: target.Name()})
		if err != nil {
			return err
		}
		for _, d := range devices.Devices {
			if d.Serial == drive.Serial && strings.Contains(d.Refused, "corrupt") && b.Volume("db1").Health == pb.Health_HEALTH_DEGRADED {
				return nil
			}
		}
		return fmt.Errorf("db1 is %v, the devices of %s are %v", b.Volume("db1").Health, target.Name(), devices.Devices)
	})
	if now := endsOf(t, drive); now != sum {
		t.Errorf("a drive with a corrupt label was written")
	}
}

// driveOf is the drive on a target that holds a leg of db1.
func driveOf(t *testing.T, b *testbed.Bed, target *vm.Machine) *vm.Drive {
	t.Helper()
	list, err := b.API.ListDrives(t.Context(), &pb.ListDrivesRequest{Node: target.Name()})
	if err != nil {
		t.Fatal(err)
	}
	for _, leg := range b.Volume("db1").Legs {
		for _, d := range list.Drives {
			if d.Id == leg.DriveId {
				return target.Drive(d.Serial)
			}
		}
	}
	t.Fatalf("%s holds no leg of db1", target.Name())
	return nil
}

// endsOf is the checksum of the first and the last 16 MiB of a drive.
func endsOf(t *testing.T, d *vm.Drive) string {
	t.Helper()
	f, err := os.Open(d.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.CopyN(sum, f, 16<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(-16<<20, io.SeekEnd); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sum.Sum(nil))
}

// garbageInTheStateFile damages an initiator agent's state file. The agent must report that
// and change nothing.
func garbageInTheStateFile(t *testing.T, b *testbed.Bed, client *vm.Machine) {
	t.Helper()
	agent := b.Daemon(client).MayExit()
	if err := agent.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	const file = "/var/lib/weft/initiator/hostid"
	shell(t, client, "echo garbage > "+file)
	restart(t, agent)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	code, err := agent.Wait(ctx)
	if err != nil || code == 0 {
		t.Errorf("the agent with garbage in %s ended with %d, %v; want an error", file, code, err)
	}
	if log := agent.Log(); !strings.Contains(log, file) {
		t.Errorf("the agent does not name %s:\n%s", file, log)
	}
	if got := strings.TrimSpace(shell(t, client, "cat "+file)); got != "garbage" {
		t.Errorf("the agent changed %s to %q", file, got)
	}
}

// volmgr's store is lost and rebuilt from the labels on the drives. A stale leg is still
// known to be stale.
func TestScenarioStoreRebuiltFromDrives(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Managers: 1})
	c1 := b.Clients[0]
	b.Create("db1", "256MiB", 1, 2)
	b.Create("idle", "256MiB", 2, 1)
	device := b.Attach("db1", c1)
	w := b.Write(c1, device, span, 200, 1)
	w.AwaitProgress(50, time.Minute)
	lost := b.Holder("db1", 0, 1)
	killUnderWrites(t, b, w, lost)
	w.Stop()
	b.Detach("db1")
	acks := testbed.Acks{}.Add(w)
	before := b.Volume("db1")

	if err := b.Daemon(b.Manager).Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	shell(t, b.Manager, "rm -r /var/lib/weft/volmgr")
	b.Up(lost) // the stale leg's target is back before the store is
	nodes := ""
	for _, m := range b.Targets {
		nodes += " --node " + m.Name()
	}
	t.Log(shell(t, b.Manager, "weft volmgr rebuild-from-drives --insecure-plain-tcp --data-dir /var/lib/weft/volmgr --listen :4480 --timeout 1m"+nodes))
	restart(t, b.Daemon(b.Manager))

	b.Eventually(time.Minute, "db1 is attached from the rebuilt store", func(ctx context.Context) error {
		_, err := b.Try("attach", "db1", "--node", "c1")
		return err
	})
	after := b.Volume("db1")
	if after.Id != before.Id || after.SizeBytes != before.SizeBytes || after.Epoch <= before.Epoch {
		t.Errorf("db1 was %v and is %v", before, after)
	}
	b.Verify(c1, device, span, acks)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 2*time.Minute)
	b.Detach("db1")
	if idle := b.Volume("idle"); len(idle.Legs) != 2 {
		t.Errorf("idle has %d legs, want 2", len(idle.Legs))
	}
}

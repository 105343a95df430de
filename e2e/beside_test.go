// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// besideSpan is how much of the volumes is written, in MiB.
const besideSpan = 32

// Targets serve plain legs through the kernel. Beside it, the agent's process serves legs of a thin volume and
// of one with checksums, and takes snapshots of the thin one. When the agent stops in order, hosts leave out its
// own legs first, and none of the kernel's; when it is killed, hosts lose its own legs alone. After a power cut
// all are copied to again. A handover of the agent costs no leg. At the end each volume holds what was written. A
// snapshot, and the thin volume once it is sealed, are served by the kernel, also while there is no agent.
func TestScenarioBesideTheKernel(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Clients: 2, DriveSize: "4GiB", TargetFlags: []string{"--datapath", "kernel"}, TargetEnv: []string{"NOTIFY_SOCKET=@nobody"}})
	b.Datapath(b.Clients[0], "kernel")
	b.Datapath(b.Clients[1], "user")
	all := []*besideVolume{{name: "plain", writer: b.Clients[0]}, {name: "db1", flag: "--thin", writer: b.Clients[0]}, {name: "sums", flag: "--integrity", writer: b.Clients[1]}}
	for _, v := range all {
		create := []string{"volume", "create", v.name, "--size", "256MiB", "--copies", "2", "--wait"}
		if v.flag != "" {
			create = append(create, v.flag)
		}
		b.Weft(create...)
		v.w = b.Write(v.writer, b.Attach(v.name, v.writer), besideSpan, 50, 1)
	}
	progress(t, all)
	target := b.Targets[0]
	inKernel(t, b, target, 1) // that of the plain volume

	db1 := all[1]
	before := testbed.Acks{}.Add(db1.w)
	b.Weft("snapshot", "create", "db1@mon")
	newest := db1.w.Next()
	for i, c := range b.Clients {
		b.VerifyUpTo(c, b.Attach("db1@mon", c), besideSpan, before, newest)
		inKernel(t, b, target, 2+i)
	}
	b.Weft("detach", "db1@mon")
	inKernel(t, b, target, 1)

	if err := b.Daemon(target).Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	progress(t, all)
	healthy(b, all)
	// An emulated host on the kernel path may take longer to leave a leg than the agent waits.
	gone := stale(t, b, all)
	if len(gone["plain"]) > 0 {
		t.Errorf("a leg that the kernel serves became stale: %q", gone["plain"])
	}
	if sums := gone["sums"]; len(sums) == 0 || !strings.Contains(sums[0], "its target was about to stop") {
		t.Errorf("the agent stopped in order, and legs became stale: %q", sums)
	}

	if err := b.Daemon(target).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	progress(t, all)
	b.StartDaemon(target)
	healthy(b, all)
	if texts := stale(t, b, all)["plain"]; len(texts) > 0 {
		t.Errorf("a leg that the kernel serves became stale: %q", texts)
	}

	b.Targets[1].Kill()
	progress(t, all)
	b.Up(b.Targets[1])
	healthy(b, all)
	stale(t, b, all)

	handOver(t, b, target, "")
	progress(t, all)
	for name, texts := range stale(t, b, all) {
		if slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(text, "on "+target.Name()) }) {
			t.Errorf("%s: legs became stale by a handover: %q", name, texts)
		}
	}
	for _, v := range all {
		v.w.Stop()
		acks := testbed.Acks{}.Add(v.w)
		b.Detach(v.name)
		b.Verify(other(b, v.writer), b.Attach(v.name, other(b, v.writer)), besideSpan, acks)
		b.Detach(v.name)
	}
	sealedBesideTheKernel(t, b, db1)
}

// sealedBesideTheKernel seals a thin volume, and has it read by both hosts while no target has an agent.
func sealedBesideTheKernel(t *testing.T, b *testbed.Bed, v *besideVolume) {
	b.Weft("volume", "seal", v.name)
	device := map[*vm.Machine]string{}
	for _, c := range b.Clients {
		device[c] = b.Attach(v.name, c)
	}
	for _, x := range b.Targets {
		inKernel(t, b, x, len(b.Clients))
		if err := b.Daemon(x).Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for c, device := range device {
		shell(t, c, "sync; echo 3 > /proc/sys/vm/drop_caches")
		b.Verify(c, device, besideSpan, testbed.Acks{}.Add(v.w))
	}
	for _, x := range b.Targets {
		b.StartDaemon(x)
	}
	b.WaitHealth(v.name, pb.Health_HEALTH_HEALTHY, time.Minute)
	b.Weft("detach", v.name)
	for _, x := range b.Targets {
		inKernel(t, b, x, 0)
	}
}

// inKernel waits until the kernel of a target exports so many subsystems.
func inKernel(t *testing.T, b *testbed.Bed, target *vm.Machine, want int) {
	t.Helper()
	b.Eventually(30*time.Second, fmt.Sprintf("the kernel of %s exports %d subsystems", target.Name(), want), func(context.Context) error {
		if got := strings.TrimSpace(shell(t, target, "ls /sys/kernel/config/nvmet/subsystems | wc -l")); got != fmt.Sprint(want) {
			return fmt.Errorf("it exports %s", got)
		}
		return nil
	})
}

// besideVolume is a volume that is written all the time.
type besideVolume struct {
	name, flag string
	writer     *vm.Machine
	w          *testbed.Writer
	stale      int // events that have been looked at
}

func other(b *testbed.Bed, m *vm.Machine) *vm.Machine {
	if m == b.Clients[0] {
		return b.Clients[1]
	}
	return b.Clients[0]
}

// progress waits until each volume is written.
func progress(t *testing.T, all []*besideVolume) {
	t.Helper()
	for _, v := range all {
		began := len(v.w.Log())
		v.w.AwaitProgress(50, 2*time.Minute)
		v.w.NoErrors()
		gap, _ := testbed.LongestGap(v.w.Log()[began:])
		t.Logf("%s: no write waits for longer than %v", v.name, gap.Round(time.Millisecond))
	}
}

func healthy(b *testbed.Bed, all []*besideVolume) {
	for _, v := range all {
		b.WaitHealth(v.name, pb.Health_HEALTH_HEALTHY, 3*time.Minute)
	}
}

// stale returns what the events of stale legs say that have come since the last call, by volume.
func stale(t *testing.T, b *testbed.Bed, all []*besideVolume) map[string][]string {
	t.Helper()
	fresh := map[string][]string{}
	for _, v := range all {
		var texts []string
		for _, e := range b.Events("volume " + v.name) {
			if e.GetKind() == "leg.stale" {
				texts = append(texts, e.GetText())
			}
		}
		fresh[v.name] = texts[v.stale:]
		v.stale = len(texts)
	}
	t.Logf("stale legs: %q", fresh)
	return fresh
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// newVersion is what everything is upgraded to.
const newVersion = "0.99.0"

// While two hosts write, one in user space and one through the kernel, everything is upgraded by the steps
// that weft upgrade plans: managers, a target in user space and one whose exports are the kernel's, which
// both hand over to their next process, and the hosts. No write fails, no leg is lost, and no write
// waits as long as for a lost leg. The volume of the host in user space is detached before its turn.
func TestScenarioEverythingIsUpgraded(t *testing.T) {
	// Under a socket of systemd, agents say that they can be reloaded. Nobody reads what they write to it.
	// With three managers there are seven machines, and under emulation on two cores a handover takes longer
	// than hosts wait for a leg.
	b := testbed.Start(t, testbed.Options{Managers: 1, Targets: 2, Clients: 2, DriveSize: "1GiB", TargetEnv: []string{"NOTIFY_SOCKET=@nobody"}})
	t.Cleanup(func() {
		for _, m := range b.Targets {
			if t.Failed() {
				t.Logf("the log of %s:\n%s", m.Name(), b.Daemon(m).Log())
			}
		}
	})
	program := nextProgram(t)
	b.Datapath(b.Targets[0], "user")
	b.Datapath(b.Targets[1], "kernel")
	hosts := []*upgraded{{volume: "db1", machine: b.Clients[0], path: "kernel"}, {volume: "db2", machine: b.Clients[1], path: "user"}}
	for _, h := range hosts {
		h.begin(t, b)
	}
	for _, m := range slices.Concat(b.Managers, b.Targets, b.Clients) { // long before, since it takes the whole machine
		install(t, m, program)
	}
	steps, all := 0, len(b.Managers)+len(b.Targets)+len(b.Clients)
	for ; ; steps++ {
		step := nextStep(t, b)
		if step == nil {
			break
		}
		if steps == all {
			t.Fatalf("after %d steps, the next one is %s %s\n%s", steps, step.Kind, step.Name, b.Weft("upgrade", "plan", "--to", newVersion))
		}
		m := machineOf(b, step)
		for _, h := range hosts {
			if h.path == "user" && h.machine == m {
				h.w.Stop()
				b.Detach(h.volume)
				h.gone = true
			}
			h.before = len(h.w.Log())
		}
		upgradeNext(t, b, step, m)
		for _, h := range hosts {
			h.goesOn(t, step.Kind+" "+step.Name)
		}
		if step.Kind == "target" {
			for range 3 { // QEMU has translated the program by now
				handOver(t, b, m, "target "+m.Name()+" again", hosts...)
			}
		}
	}
	if steps != all {
		t.Errorf("there were %d steps, want %d", steps, all)
	}
	b.Weft("upgrade", "finish")
	for _, h := range hosts {
		h.check(t, b)
	}
}

// A volume has both of its copies on targets in user space. They are upgraded one after the other while a
// host writes, and hand over three times more. No write fails, no leg is lost, and the log says how long
// writes wait: on two cores without KVM no longer than 0.3 s.
func TestScenarioTargetsAreUpgraded(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Managers: 1, Targets: 2, Clients: 1, DriveSize: "1GiB", TargetEnv: []string{"NOTIFY_SOCKET=@nobody"}})
	program := nextProgram(t)
	for _, m := range b.Targets {
		b.Datapath(m, "user")
	}
	h := &upgraded{volume: "db1", machine: b.Clients[0], path: "kernel"}
	h.begin(t, b)
	for _, m := range b.Targets {
		install(t, m, program)
	}
	for _, m := range b.Targets {
		handOver(t, b, m, "target "+m.Name(), h)
		for range 3 {
			handOver(t, b, m, "target "+m.Name()+" again", h)
		}
		if !strings.Contains(b.Daemon(m).Log(), "msg=rehearsed") {
			t.Errorf("no process of %s has rehearsed:\n%s", m.Name(), b.Daemon(m).Log())
		}
	}
	h.check(t, b)
}

// upgraded is a host that writes while everything is upgraded.
type upgraded struct {
	volume, device, path string
	machine              *vm.Machine
	w                    *testbed.Writer
	before               int // how many writes were acknowledged before the step
	gone                 bool
}

// begin has the host write.
func (h *upgraded) begin(t *testing.T, b *testbed.Bed) {
	t.Helper()
	b.Datapath(h.machine, h.path)
	b.Create(h.volume, "256MiB", 1, 2)
	h.device = b.Attach(h.volume, h.machine)
	h.w = b.Write(h.machine, h.device, 64, 200, 1)
	h.w.AwaitProgress(1000, time.Minute)
	idle, _ := h.w.Stall()
	t.Logf("before, no write of the %s host waits for longer than %v", h.path, idle.Round(time.Millisecond))
}

// check fails the test if the volume has lost a leg, or anything that was written.
func (h *upgraded) check(t *testing.T, b *testbed.Bed) {
	t.Helper()
	for _, e := range b.Events("volume " + h.volume) {
		if e.GetSeverity() >= pb.Severity_SEVERITY_WARNING && strings.HasPrefix(e.GetKind(), "leg.") {
			t.Errorf("%s: %s", e.GetKind(), e.GetText())
		}
	}
	if h.gone {
		h.device = b.Attach(h.volume, h.machine)
	} else {
		h.w.Stop()
	}
	b.Verify(h.machine, h.device, 64, testbed.Acks{}.Add(h.w))
}

// goesOn fails the test if writes failed during a step, or waited as long as for a lost leg.
func (h *upgraded) goesOn(t *testing.T, step string) {
	t.Helper()
	h.w.NoErrors()
	if h.gone {
		return
	}
	h.w.AwaitProgress(200, time.Minute)
	stall, _ := testbed.LongestGap(h.w.Log()[h.before:])
	t.Logf("%s: no write of the %s host waits for longer than %v", step, h.path, stall.Round(time.Millisecond))
	if stall > 5*time.Second { // a leg that does not answer for 2 s is lost, which its events would show
		t.Errorf("during the upgrade of %s a write of the %s host waited for %v", step, h.path, stall)
	}
}

// handOver has a target hand over to a process of the program that is installed now.
func handOver(t *testing.T, b *testbed.Bed, m *vm.Machine, step string, hosts ...*upgraded) {
	t.Helper()
	pids := func() string {
		out, err := m.Shell(t.Context(), "busybox pidof weft")
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(out)
	}
	for _, h := range hosts {
		h.before = len(h.w.Log())
	}
	before := pids()
	if _, err := m.Shell(t.Context(), "kill -USR2 "+before); err != nil {
		t.Fatal(err)
	}
	b.Eventually(time.Minute, m.Name()+" has handed over", func(context.Context) error {
		if now := pids(); now == before || strings.Contains(now, " ") {
			return fmt.Errorf("process %s was told to; there are %s", before, now)
		}
		return nil
	})
	for _, h := range hosts {
		h.goesOn(t, step)
	}
}

// upgradeNext takes a step, and returns when weft upgrade says that it is complete.
func upgradeNext(t *testing.T, b *testbed.Bed, step *planned, m *vm.Machine) {
	t.Helper()
	b.Eventually(time.Minute, "the step may begin", func(context.Context) error {
		_, err := b.Try("upgrade", "next", "--to", newVersion, "--no-wait")
		return err
	})
	if step.Reloads != (step.Kind == "target") {
		t.Errorf("%s %s is upgraded by a reload: %t", step.Kind, step.Name, step.Reloads)
	}
	if step.Reloads {
		if err := b.Daemon(m).Signal(t.Context(), syscall.SIGUSR2); err != nil {
			t.Fatal(err)
		}
	} else {
		if err := b.Daemon(m).Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		b.StartDaemon(m)
	}
	b.Eventually(2*time.Minute, step.Kind+" "+step.Name+" is upgraded", func(context.Context) error {
		for _, s := range plan(t, b) {
			if s.Kind == step.Kind && s.Name == step.Name && s.State == "done" {
				return nil
			}
		}
		return errors.New(b.Weft("upgrade", "plan", "--to", newVersion))
	})
}

// planned is a step of weft upgrade plan.
type planned struct {
	Kind, Name, Address, State string
	Reloads                    bool
}

// nextStep is the step to take; nil if there is none. A target is away for a moment when it has handed over.
func nextStep(t *testing.T, b *testbed.Bed) (next *planned) {
	t.Helper()
	b.Eventually(time.Minute, "no step is under way", func(context.Context) error {
		next = nil
		all := plan(t, b)
		for i, s := range all {
			switch s.State {
			case "under way":
				return errors.New(b.Weft("upgrade", "plan", "--to", newVersion))
			case "next":
				next = &all[i]
			}
		}
		return nil
	})
	return next
}

// plan is what weft upgrade plans. While a manager restarts there is none.
func plan(t *testing.T, b *testbed.Bed) (steps []planned) {
	t.Helper()
	b.Eventually(time.Minute, "there is a plan", func(context.Context) error {
		out, err := b.Try("upgrade", "plan", "--to", newVersion, "--output", "json")
		if err != nil {
			return err
		}
		var plan struct{ Steps []planned }
		err = json.Unmarshal([]byte(out), &plan)
		steps = plan.Steps
		return err
	})
	return steps
}

func machineOf(b *testbed.Bed, s *planned) *vm.Machine {
	for _, m := range slices.Concat(b.Targets, b.Clients, b.Managers) {
		if m.Name() == s.Name || s.Address != "" && strings.HasPrefix(s.Address, m.Addr()) {
			return m
		}
	}
	return nil
}

// nextProgram builds weft with another version.
func nextProgram(t *testing.T) []byte {
	t.Helper()
	root, err := vm.ModuleRoot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "bin", "e2e", "weft-next")
	build := exec.Command("go", "build", "-ldflags", "-s -w -X main.release="+newVersion, "-o", file, "weft.dev/weft/cmd/weft")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the next version: %v\n%s", err, out)
	}
	program, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// install puts a program in the place of weft, in pieces that a small machine has room for.
func install(t *testing.T, m *vm.Machine, program []byte) {
	t.Helper()
	do := func(script string, stdin []byte) {
		if err := m.Do(t.Context(), vm.Command{Argv: []string{"sh", "-c", script}, Stdin: stdin}); err != nil {
			t.Fatalf("install the next version on %s: %v", m.Name(), err)
		}
	}
	do(": >/run/weft-next", nil)
	for piece := range slices.Chunk(program, 2<<20) {
		do("cat >>/run/weft-next", piece)
	}
	do("chmod 755 /run/weft-next && mount --bind /run/weft-next /tools/bin/weft", nil)
}

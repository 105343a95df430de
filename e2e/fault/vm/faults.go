// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"time"

	"weft.dev/weft/e2e/vm"
)

// fault is something that happens to machines, from begin to end.
type fault struct {
	name       string
	machines   []*vm.Machine // no other fault of the same round has them
	begin, end func(context.Context) error
	moves      bool // the volume must then be moved to the other client
}

// choose returns n faults of different machines, or fewer.
func (l *life) choose(n int) (chosen []fault) {
	taken := map[*vm.Machine]bool{}
	for range 20 * n {
		if len(chosen) == n {
			break
		}
		f := l.any()
		if slices.ContainsFunc(f.machines, func(m *vm.Machine) bool { return taken[m] }) {
			continue
		}
		for _, m := range f.machines {
			taken[m] = true
		}
		chosen = append(chosen, f)
	}
	return chosen
}

// any returns one of all faults.
func (l *life) any() fault {
	target := l.Targets[l.rand.IntN(len(l.Targets))]
	if l.caches && l.rand.IntN(3) == 0 { // what these lives are for
		return l.targetPowerCut(target)
	}
	managers := l.rand.Perm(len(l.Managers))
	first, second := l.Managers[managers[0]], l.Managers[managers[1]]
	all := []func() fault{
		func() fault { return l.targetPowerCut(target) },
		func() fault { return l.targetPowerCut(target) }, // twice as likely as others
		func() fault { return l.powerCut(first) },
		func() fault { return l.powerCut(l.Leader()) },
		func() fault { return l.clientPowerCut() },
		func() fault { return l.killed(target) },
		func() fault { return l.killed(l.holder) },
		func() fault { return l.killed(first) },
		func() fault { return l.stopped(first) },
		func() fault { return l.stopped(target) },
		func() fault { return l.frozen(target) },
		func() fault { return l.frozen(l.holder) },
		func() fault { return l.frozen(first) },
		func() fault { return l.frozen(l.Leader()) },
		func() fault { return l.diskFull(first) },
		func() fault { return l.diskFull(l.Leader()) },
		func() fault { return l.rail(target) },
		func() fault { return l.rail(target) },
		func() fault { return l.link(first, second) },
		func() fault { return l.link(first, target) },
		func() fault { return l.link(first, l.holder) },
		func() fault { return l.driveFails(target) },
		func() fault { return l.clockJumps(target) },
		func() fault { return l.clockJumps(first) },
		func() fault { return l.clockJumps(l.holder) },
	}
	return all[l.rand.IntN(len(all))]()
}

// powerCut is a power cut of a machine, which boots at its end.
func (l *life) powerCut(m *vm.Machine) fault {
	return fault{
		name: "power cut of " + m.Name(), machines: []*vm.Machine{m},
		begin: func(context.Context) error { m.Kill(); return nil },
		end:   func(context.Context) error { l.Up(m); return nil },
	}
}

// targetPowerCut is one of a target. If its drives have volatile caches, no other leg may be lost meanwhile: the kernel
// does not say what was flushed, so the volume's device would have to fail.
func (l *life) targetPowerCut(target *vm.Machine) fault {
	f := l.powerCut(target)
	if l.caches {
		f.machines = append(slices.Clone(l.Targets), l.holder)
	}
	return f
}

// clientPowerCut is one of the client that has the volume. The volume goes to the other one.
func (l *life) clientPowerCut() fault {
	f := l.powerCut(l.holder)
	f.moves = true
	return f
}

// killed is a machine's agent, or its manager, that dies and is started again.
func (l *life) killed(m *vm.Machine) fault {
	return fault{
		name: "killed program of " + m.Name(), machines: []*vm.Machine{m},
		begin: l.Daemon(m).Kill,
		end:   l.Daemon(m).Restart,
	}
}

// stopped is an agent that is stopped in order.
func (l *life) stopped(m *vm.Machine) fault {
	return fault{
		name: "stopped program of " + m.Name(), machines: []*vm.Machine{m},
		begin: l.Daemon(m).Stop,
		end:   l.Daemon(m).Restart,
	}
}

// frozen is a program that does nothing for a while, and then goes on where it was.
func (l *life) frozen(m *vm.Machine) fault {
	signal := func(s syscall.Signal) func(context.Context) error {
		return func(ctx context.Context) error { return l.Daemon(m).Signal(ctx, s) }
	}
	return fault{
		name: "frozen program of " + m.Name(), machines: []*vm.Machine{m},
		begin: signal(syscall.SIGSTOP),
		end:   signal(syscall.SIGCONT),
	}
}

// diskFull is a manager whose disk is full. It ends when it cannot write, and is started again with the end of the
// fault.
func (l *life) diskFull(m *vm.Machine) fault {
	const filler = "/var/lib/weft/filler"
	return fault{
		name: "full disk of " + m.Name(), machines: []*vm.Machine{m},
		begin: func(ctx context.Context) error {
			l.Daemon(m).MayExit()
			_, err := m.Shell(ctx, "cat /dev/zero 2>/dev/null > "+filler+" || sync")
			return err
		},
		end: func(ctx context.Context) error {
			if _, err := m.Shell(ctx, "rm "+filler); err != nil {
				return err
			}
			l.StartDaemon(m)
			return nil
		},
	}
}

// rail is a fault of the link between the client and a target, on one of their networks.
func (l *life) rail(target *vm.Machine) fault {
	if l.Rail != nil && l.rand.IntN(2) == 0 {
		return l.linkOn(l.Rail, " on the second network", l.holder, target)
	}
	return l.link(l.holder, target)
}

// link is a fault of the link between two machines.
func (l *life) link(a, b *vm.Machine) fault { return l.linkOn(l.Cluster.Network(), "", a, b) }

func (l *life) linkOn(network *vm.Network, where string, a, b *vm.Machine) fault {
	cut, both := vm.Fault{Cut: true}, func(f vm.Fault) func(*vm.Network) {
		return func(n *vm.Network) { n.SetBoth(a, b, f) }
	}
	kinds := []struct {
		name string
		set  func(*vm.Network)
	}{
		{"cut link of %s and %s", both(cut)},
		{"link from %s to %s cut", func(n *vm.Network) { n.Set(a, b, cut) }},
		{"link to %s from %s cut", func(n *vm.Network) { n.Set(b, a, cut) }},
		{"slow link of %s and %s", both(vm.Fault{Delay: 300 * time.Millisecond})},
		{"lossy link of %s and %s", both(vm.Fault{Loss: 0.2})},
	}
	k := kinds[l.rand.IntN(len(kinds))]
	return fault{
		name: fmt.Sprintf(k.name, a.Name(), b.Name()) + where, machines: []*vm.Machine{a, b},
		begin: func(context.Context) error { k.set(network); return nil },
		end:   func(context.Context) error { network.Heal(a, b); return nil },
	}
}

// driveFails is a target's drive that fails reads and writes. (QEMU cannot repair one that fails
// flushes.) It is the only fault of a target then: the application gets the error of a last copy that
// rejects writes.
func (l *life) driveFails(target *vm.Machine) fault {
	d := l.driveOf(target)
	return fault{
		name: "failing drive of " + target.Name(), machines: l.Targets,
		begin: func(ctx context.Context) error { return d.Fail(ctx, vm.DriveFault{Reads: true, Writes: true}) },
		end:   func(ctx context.Context) error { return d.Fail(ctx, vm.DriveFault{}) },
	}
}

func (l *life) driveOf(target *vm.Machine) *vm.Drive {
	return target.Drive(fmt.Sprintf("T%sD1", target.Name()[1:]))
}

// clockJumps is a clock that is wrong by up to an hour.
func (l *life) clockJumps(m *vm.Machine) fault {
	by := time.Duration(l.rand.Int64N(int64(2*time.Hour))) - time.Hour
	set := func(by time.Duration) func(context.Context) error {
		return func(ctx context.Context) error { return m.SetClock(ctx, time.Now().Add(by)) }
	}
	return fault{
		name: fmt.Sprintf("clock of %s jumps by %v", m.Name(), by.Round(time.Second)), machines: []*vm.Machine{m},
		begin: set(by), end: set(0),
	}
}

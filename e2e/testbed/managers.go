// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// This file makes managers, and finds the one that leads.

// managersByDefault is how many managers clusters have that do not say so.
func managersByDefault(t vm.TB) int {
	text := os.Getenv("WEFT_MANAGERS")
	if text == "" {
		return 1
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("WEFT_MANAGERS is %q: want a number", text)
	}
	return n
}

// managerAddr is the address of a manager in the machines' network.
func managerAddr(m *vm.Machine) string { return fmt.Sprintf("%s:%d", m.Addr(), managerPort) }

// ManagerAddr is the addresses of all managers in the machines' network, as --manager takes them.
func (b *Bed) ManagerAddr() string {
	var all []string
	for _, m := range b.Managers {
		all = append(all, managerAddr(m))
	}
	return strings.Join(all, ",")
}

// forwarded is where this machine reaches the manager of an address.
func (b *Bed) forwarded(address string) string {
	for _, m := range b.Managers {
		if managerAddr(m) == address {
			return m.Forwarded(managerPort)
		}
	}
	return address
}

// initStore makes the store of a manager before its first start: that of a new cluster for the
// first manager, and one that joins for the others.
func (b *Bed) initStore(m *vm.Machine) {
	if m.Name()[0] != 'm' || b.stores[m] {
		return
	}
	b.stores[m] = true
	command := "init"
	if m != b.Manager {
		command = fmt.Sprintf("join --manager %s --address %s", managerAddr(b.Manager), managerAddr(m))
		if b.closed {
			command += " --join " + b.tokenFile(m, "manager")
		} else {
			command += " --insecure-plain-tcp"
		}
	}
	b.Eventually(time.Minute, "the manager of "+m.Name()+" has a store", func(ctx context.Context) error {
		out, err := m.Shell(ctx, "weft volmgr "+command+" --data-dir "+managerStore)
		if err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	})
}

// AwaitVotes waits until all managers vote and are reached by the one that leads.
func (b *Bed) AwaitVotes() {
	b.T.Helper()
	b.Eventually(time.Minute, "all managers vote", func(ctx context.Context) error {
		r, err := b.API.ListManagers(ctx, &pb.ListManagersRequest{})
		if err != nil {
			return err
		}
		voters := slices.DeleteFunc(r.Managers, func(m *pb.ManagerMember) bool { return !m.Voter || m.Problem != "" })
		if len(voters) < len(b.Managers) {
			return fmt.Errorf("%d of %d do", len(voters), len(b.Managers))
		}
		return nil
	})
}

// Leader returns the machine of the manager that leads. It waits until one does, and returns the
// first if none does for a minute.
func (b *Bed) Leader() *vm.Machine {
	if len(b.Managers) == 1 || b.API == nil {
		return b.Manager
	}
	for until := time.Now().Add(time.Minute); time.Now().Before(until); time.Sleep(100 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(b.T.Context(), 5*time.Second)
		r, _ := b.API.ListManagers(ctx, &pb.ListManagersRequest{})
		cancel()
		for _, member := range r.GetManagers() {
			for _, m := range b.Managers {
				if member.Leader && member.Address == managerAddr(m) && member.Problem == "" {
					return m
				}
			}
		}
	}
	return b.Manager
}

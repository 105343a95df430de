// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/replicated"
)

// managerSet runs several managers, each in a process of its own, so that one can be killed.
type managerSet struct {
	dir   *directory
	log   *slog.Logger
	level string
	file  *os.File // for their logs
	tell  func(format string, args ...any)

	mu      sync.Mutex
	ending  bool
	running map[string]*runningManager
}

type runningManager struct {
	process *os.Process
	killed  bool // by stop
	done    chan struct{}
}

// mostManagers bounds the managers of one directory.
const mostManagers = 5

// managerName is the name of a manager, counted from 0.
func managerName(i int) string { return fmt.Sprintf("m%d", i+1) }

// numbered is the name of something in the directory that each manager has. The first one's is that
// of a directory with a single manager.
func numbered(name string, i int) string {
	if i == 0 {
		return name
	}
	return fmt.Sprintf("%s%d", name, i+1)
}

func (d *directory) store(i int) string { return d.in(numbered("volmgr", i)) }

func (d *directory) managers() int { return max(1, d.state.Managers) }

// managerAddress is the address of one of a directory's managers.
func managerAddress(dir string, i int) string {
	return daemon.Unix + managerSocket(dir, i)
}

// managerAddresses lists the addresses of a directory's managers, as --manager takes them.
func managerAddresses(dir string, n int) string {
	var all []string
	for i := range n {
		all = append(all, managerAddress(dir, i))
	}
	return strings.Join(all, ",")
}

// Run runs the managers that have a store until ctx ends; see join for the others.
func (s *managerSet) Run(ctx context.Context) error {
	var errs []error
	for i := range s.dir.managers() {
		if volmgr.FindStore(s.dir.store(i)) == nil {
			errs = append(errs, s.start(managerName(i)))
		}
	}
	if err := errors.Join(errs...); err != nil {
		s.end()
		return err
	}
	<-ctx.Done()
	s.end()
	return context.Cause(ctx)
}

// endPatience is how long managers may take to end when all of them are told to.
const endPatience = 3 * time.Second

// end ends all managers, and lets none start again.
func (s *managerSet) end() {
	s.mu.Lock()
	s.ending = true
	var all []*runningManager
	for _, m := range s.running {
		m.killed = true
		all = append(all, m)
		_ = m.process.Signal(syscall.SIGTERM) // it may have ended
	}
	s.mu.Unlock()
	for late := time.After(endPatience); len(all) > 0; {
		select {
		case <-all[0].done:
			all = all[1:]
		case <-late:
			for _, m := range all {
				_ = m.process.Kill()
			}
		}
	}
}

func (s *managerSet) find(name string) (i int, err error) {
	var names []string
	for i := range s.dir.managers() {
		if managerName(i) == name {
			return i, nil
		}
		names = append(names, managerName(i))
	}
	return 0, status.Errorf(codes.NotFound, "manager %s: not found; there are %s", name, strings.Join(names, ", "))
}

func (s *managerSet) start(name string) error {
	i, err := s.find(name)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running[name] != nil {
		return status.Errorf(codes.FailedPrecondition, "manager %s is already running", name)
	}
	if s.ending {
		return errors.New("dev is ending")
	}
	cmd := exec.Command("/proc/self/exe", "volmgr", "--data-dir", s.dir.store(i), "--listen", managerAddress(s.dir.path, i),
		"--log-format", "text", "--log-level", s.level)
	cmd.Args[0] = "weft"
	cmd.Env = withoutVariables(os.Environ(), "WEFT_", "NOTIFY_SOCKET=", "WATCHDOG_")
	cmd.Stdout, cmd.Stderr = s.file, s.file
	// A Ctrl-C is for weft dev, which ends the managers last.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	m := &runningManager{done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the signal comes at the death of the thread that has started the process
		started <- cmd.Start()
		if cmd.Process != nil {
			s.over(name, m, cmd.Wait())
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start manager %s: %w", name, err)
	}
	m.process = cmd.Process
	s.running[name] = m
	return nil
}

// over notes that a manager has ended.
func (s *managerSet) over(name string, m *runningManager, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.running, name)
	close(m.done)
	if !m.killed {
		s.log.Error("manager ended", "manager", name, "err", err)
		s.tell("manager %s has ended (%v); to start it again: weft dev start-manager %s", name, err, name)
	}
}

// withoutVariables drops variables whose text begins with one of some prefixes.
func withoutVariables(environment []string, prefixes ...string) (rest []string) {
next:
	for _, v := range environment {
		for _, p := range prefixes {
			if strings.HasPrefix(v, p) {
				continue next
			}
		}
		rest = append(rest, v)
	}
	return rest
}

// stop kills a manager: it has no time to make another one lead.
func (s *managerSet) stop(name string) error {
	if _, err := s.find(name); err != nil {
		return err
	}
	s.mu.Lock()
	m := s.running[name]
	if m != nil {
		m.killed = true
	}
	s.mu.Unlock()
	if m == nil {
		return status.Errorf(codes.FailedPrecondition, "manager %s is already stopped", name)
	}
	if err := m.process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-m.done
	return nil
}

// change does what an operator asks for, and returns the name of the manager that was meant.
func (s *managerSet) change(ctx context.Context, api pb.ManagerClient, name, verb string) (_ string, err error) {
	if s == nil {
		return "", status.Error(codes.FailedPrecondition, "there is one manager, in the process of weft dev: `weft dev --managers 3` has several")
	}
	if name == theLeader {
		if name, err = s.leader(ctx, api); err != nil {
			return "", err
		}
	}
	switch verb {
	case "stop":
		return name, s.stop(name)
	case "start":
		return name, s.start(name)
	}
	return "", status.Errorf(codes.NotFound, "%s: a manager can be stopped and started", verb)
}

// leader is the name of the manager that leads.
func (s *managerSet) leader(ctx context.Context, api pb.ManagerClient) (string, error) {
	list, err := api.ListManagers(ctx, &pb.ListManagersRequest{})
	if err != nil {
		return "", err
	}
	for i := range s.dir.managers() {
		for _, m := range list.GetManagers() {
			if m.GetLeader() && m.GetAddress() == managerAddress(s.dir.path, i) {
				return managerName(i), nil
			}
		}
	}
	return "", status.Error(codes.FailedPrecondition, "no manager leads now")
}

// join makes members of the managers that are none yet, also again of those whose store is gone, and
// returns when all of them vote.
func (s *managerSet) join(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
	return cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (waitingFor string, err error) {
		list, err := api.ListManagers(ctx, &pb.ListManagersRequest{})
		if err != nil {
			return "", err
		}
		votes := 0
		for _, m := range list.GetManagers() {
			if m.GetVoter() {
				votes++
			}
		}
		for i := range s.dir.managers() {
			err := s.joinOne(ctx, api, i, list.GetManagers())
			if status.Code(err) == codes.FailedPrecondition { // the quorum is busy, or has no majority without it
				return status.Convert(err).Message(), nil
			}
			if err != nil {
				return "", fmt.Errorf("manager %s: %w", managerName(i), err)
			}
		}
		if votes < s.dir.managers() {
			waitingFor = fmt.Sprintf("managers: %d of %d vote", votes, s.dir.managers())
		}
		return waitingFor, nil
	})
}

func (s *managerSet) joinOne(ctx context.Context, api pb.ManagerClient, i int, members []*pb.ManagerMember) error {
	address := managerAddress(s.dir.path, i)
	lost := volmgr.FindStore(s.dir.store(i)) != nil
	for _, m := range members {
		if m.GetAddress() != address {
			continue
		}
		if !lost {
			return nil
		}
		if _, err := api.RemoveManager(ctx, &pb.RemoveManagerRequest{Manager: m.GetId()}); err != nil {
			return err
		}
	}
	cluster, err := cli.ClusterID(ctx, api)
	if err != nil {
		return err
	}
	var id quorum.ID
	if id, err = volmgr.Join(volmgr.Config{Dir: s.dir.store(i), Version: s.dir.version}, cluster); err != nil && (id == 0 || !errors.Is(err, replicated.ErrTaken)) {
		return err
	}
	if lost {
		if err := s.start(managerName(i)); err != nil {
			return err
		}
	}
	_, err = api.AddManager(ctx, &pb.AddManagerRequest{Id: id.String(), Address: address})
	return err
}

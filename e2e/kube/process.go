// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Process is a running program of the lab, in its own process group.
type Process struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// startProcess starts a program, its output appended to its log.
func startProcess(logs, name string, cmd *exec.Cmd) (*Process, error) {
	p := &Process{name: name, log: filepath.Join(logs, name+".log"), cmd: cmd, done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// signal sends a signal to the whole group: on a node, the group's leader is nsenter.
func (p *Process) signal(s syscall.Signal) { _ = syscall.Kill(-p.cmd.Process.Pid, s) }

// lives reports whether any process of the group is left.
func (p *Process) lives() bool {
	return !errors.Is(syscall.Kill(-p.cmd.Process.Pid, 0), syscall.ESRCH)
}

// Kill kills the program, like a crash.
func (p *Process) Kill() error {
	p.signal(syscall.SIGKILL)
	return p.await(10 * time.Second)
}

// Stop asks the program to exit, and kills it if it does not do so in time.
func (p *Process) Stop(patience time.Duration) error {
	p.signal(syscall.SIGTERM)
	if err := p.await(patience); err == nil {
		return nil
	}
	return errors.Join(fmt.Errorf("%s did not exit within %v of SIGTERM", p.name, patience), p.Kill())
}

func (p *Process) await(patience time.Duration) error {
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for p.lives() {
		select {
		case <-tick.C:
		case <-deadline.C:
			return fmt.Errorf("%s does not end", p.name)
		}
	}
	<-p.done
	return nil
}

// tail is the end of its log, for messages.
func (p *Process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

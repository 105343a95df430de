// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// exitError means that a command ran and exited with a code other than 0.
type exitError struct {
	code int
	text string
}

func (e exitError) Error() string { return e.text }

// run runs a command until it exits. Its children share its process group, so that a signal
// reaches all of them.
func (s *Server) run(r Request) error {
	cmd, err := command(r)
	if err != nil {
		return err
	}
	cmd.Stdin = bytes.NewReader(r.Data)
	cmd.Stdout = s.stream(Reply{ID: r.ID, Kind: KindOut})
	cmd.Stderr = s.stream(Reply{ID: r.ID, Kind: KindErr})
	// A child that outlives the command must not keep the request open through its pipes.
	cmd.WaitDelay = 2 * time.Second
	if err := cmd.Start(); err != nil {
		return err
	}
	s.mu.Lock()
	s.running[r.ID] = cmd.Process
	s.mu.Unlock()
	err = cmd.Wait()
	s.mu.Lock()
	delete(s.running, r.ID)
	s.mu.Unlock()
	return exitOf(err)
}

// start starts a daemon. Its output and its exit are sent as events. A process that takes over from it
// has the same output.
func (s *Server) start(r Request) error {
	cmd, err := command(r)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.daemons[r.Name]; ok {
		return fmt.Errorf("start %s: it is running", r.Name)
	}
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = in, in
	err = cmd.Start()
	in.Close()
	if err != nil {
		out.Close()
		return err
	}
	s.daemons[r.Name] = cmd.Process
	said := make(chan struct{})
	go func() {
		defer close(said)
		defer out.Close()
		_, _ = io.Copy(s.stream(Reply{Kind: KindLog, Name: r.Name}), out)
	}()
	go s.await(r.Name, cmd, said)
	return nil
}

// await sends the exit of a daemon, after what it has said.
func (s *Server) await(name string, cmd *exec.Cmd, said <-chan struct{}) {
	err := exitOf(cmd.Wait())
	select {
	case <-said:
	case <-time.After(2 * time.Second): // another process goes on
	}
	s.mu.Lock()
	delete(s.daemons, name)
	s.mu.Unlock()
	event := Reply{Kind: KindExit, Name: name, Time: time.Now().UnixNano()}
	var exit exitError
	if errors.As(err, &exit) {
		event.Code, event.Text = exit.code, exit.text
	} else if err != nil {
		event.Code, event.Text = -1, err.Error()
	}
	s.event(event)
}

func (s *Server) signal(r Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.running[r.Target], true
	if r.Name != "" {
		p, ok = s.daemons[r.Name]
	}
	if p == nil || !ok {
		return fmt.Errorf("signal %s: it is not running", r.Name)
	}
	return unix.Kill(-p.Pid, unix.Signal(r.Signal))
}

func command(r Request) (*exec.Cmd, error) {
	if len(r.Argv) == 0 {
		return nil, errors.New("no command given")
	}
	cmd := exec.Command(r.Argv[0], r.Argv[1:]...)
	cmd.Env = append(os.Environ(), r.Env...)
	cmd.Dir = r.Dir
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	return cmd, nil
}

// exitOf makes an exitError of a command's exit. The error of a command that could not run
// stays as it is.
func exitOf(err error) error {
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil // it exited with 0, but a child still has its output open
	}
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return err
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return exitError{128 + int(status.Signal()), exit.Error()}
	}
	return exitError{exit.ExitCode(), exit.Error()}
}

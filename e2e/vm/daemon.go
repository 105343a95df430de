// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"time"

	"weft.dev/weft/e2e/guest"
)

// Daemon is a named program that runs in the background in a guest. The test keeps its log,
// so the log survives a power cut. A daemon that exits by itself with an error fails the
// test, unless its Command says MayExit.
type Daemon struct {
	machine *Machine
	name    string
	command Command

	mu       sync.Mutex
	log      []byte
	exited   chan struct{} // closed while it does not run
	stopping bool
	code     int
}

// Start starts a daemon under a unique name. After a boot, or after it has exited, Restart
// starts it again.
func (m *Machine) Start(ctx context.Context, name string, argv ...string) (*Daemon, error) {
	return m.StartDaemon(ctx, name, Command{Argv: argv})
}

// StartDaemon is Start with an environment or a directory.
func (m *Machine) StartDaemon(ctx context.Context, name string, c Command) (*Daemon, error) {
	m.mu.Lock()
	d, ok := m.daemons[name]
	if !ok {
		ended := make(chan struct{})
		close(ended)
		d = &Daemon{machine: m, name: name, exited: ended}
		m.daemons[name] = d
	}
	m.mu.Unlock()
	d.mu.Lock()
	d.command = c
	d.mu.Unlock()
	return d, d.Restart(ctx)
}

// MayExit allows the daemon to exit by itself with an error from now on. If it may do so
// right after its start, use Command.MayExit.
func (d *Daemon) MayExit() *Daemon {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.command.MayExit = true
	return d
}

// Restart stops the daemon gracefully if it runs, and starts it with the same command.
func (d *Daemon) Restart(ctx context.Context) error {
	if err := d.Stop(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	exited := make(chan struct{})
	d.exited, d.stopping, d.code = exited, false, 0
	c := d.command
	d.mu.Unlock()
	r := guest.Request{Op: guest.OpStart, Name: d.name, Argv: c.Argv, Env: c.Env, Dir: c.Dir}
	if _, err := d.machine.request(ctx, r, nil, nil); err != nil {
		d.end(-1)
		return fmt.Errorf("start %s on %s: %w", d.name, d.machine.name, err)
	}
	return nil
}

// Running says whether the daemon runs.
func (d *Daemon) Running() bool {
	select {
	case <-d.done():
		return false
	default:
		return true
	}
}

// Signal sends a signal to the daemon and its children. Its exit is then expected, unless the signal only freezes
// it or lets it go on.
func (d *Daemon) Signal(ctx context.Context, sig syscall.Signal) error {
	if sig != syscall.SIGSTOP && sig != syscall.SIGCONT {
		d.mu.Lock()
		d.stopping = true
		d.mu.Unlock()
	}
	r := guest.Request{Op: guest.OpSignal, Name: d.name, Signal: int(sig)}
	if _, err := d.machine.request(ctx, r, nil, nil); err != nil {
		return fmt.Errorf("signal %s on %s: %w", d.name, d.machine.name, err)
	}
	return nil
}

// stopLimit is how long a daemon may take to exit after SIGTERM.
const stopLimit = 20 * time.Second

// Stop sends SIGTERM to the daemon and waits. If the daemon does not exit, Stop kills it
// and returns an error. It does nothing if the daemon does not run.
func (d *Daemon) Stop(ctx context.Context) error {
	if !d.Running() {
		return nil
	}
	if err := d.Signal(ctx, syscall.SIGTERM); err != nil {
		if !d.Running() {
			return nil
		}
		return err
	}
	select {
	case <-d.done():
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(stopLimit):
	}
	if err := d.Kill(ctx); err != nil {
		return err
	}
	return fmt.Errorf("stop %s on %s: it still ran %s after SIGTERM and was killed", d.name, d.machine.name, stopLimit)
}

// deathPatience is how long a killed daemon may take to end. One that waits for ordinary I/O to a target that is
// away does not end before the target is back.
const deathPatience = time.Minute

// Kill kills the daemon with SIGKILL and waits until it is gone. It is an error if that takes too long.
func (d *Daemon) Kill(ctx context.Context) error {
	if !d.Running() {
		return nil
	}
	if err := d.Signal(ctx, syscall.SIGKILL); err != nil && d.Running() {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, deathPatience, fmt.Errorf("it was killed %v ago, and waits in the kernel", deathPatience))
	defer cancel()
	_, err := d.Wait(ctx)
	return err
}

// Wait waits until the daemon does not run and returns its exit code.
func (d *Daemon) Wait(ctx context.Context) (int, error) {
	select {
	case <-d.done():
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for the end of %s on %s: %w", d.name, d.machine.name, context.Cause(ctx))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.code, nil
}

// Log returns the daemon's output, from all its starts.
func (d *Daemon) Log() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return string(d.log)
}

func (d *Daemon) done() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.exited
}

func (d *Daemon) end(code int) (expected bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.code = code
	select {
	case <-d.exited:
	default:
		close(d.exited)
	}
	return d.stopping || d.command.MayExit
}

// tail is the end of the log, for an error.
func (d *Daemon) tail() string {
	lines := strings.Split(strings.TrimSpace(d.Log()), "\n")
	return "    " + strings.Join(lines[max(0, len(lines)-tailLines):], "\n    ")
}

func (m *Machine) daemon(name string) *Daemon {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.daemons[name]
}

func (m *Machine) daemonLog(name string, data []byte) {
	m.appendLog(name, data)
	d := m.daemon(name)
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log = append(d.log, data...)
}

func (m *Machine) daemonExit(r guest.Reply) {
	d := m.daemon(r.Name)
	if d == nil || d.end(r.Code) || r.Code == 0 {
		return
	}
	m.cluster.fail("%s on %s ended by itself: %s; the end of its log:\n%s", r.Name, m.name, r.Text, d.tail())
}

// endDaemons marks all daemons as ended, because their machine has.
func (m *Machine) endDaemons() {
	m.mu.Lock()
	all := make([]*Daemon, 0, len(m.daemons))
	for _, d := range m.daemons {
		all = append(all, d)
	}
	m.mu.Unlock()
	for _, d := range all {
		d.end(-1)
	}
}

// appendLog writes to a log file of the machine. If that fails, the test prints the data.
func (m *Machine) appendLog(name string, data []byte) {
	f, err := m.logFile(name)
	if err != nil {
		m.cluster.t.Logf("%s: %s: %s", m.name, name, data)
		return
	}
	defer f.Close()
	_, _ = f.Write(data)
}

// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"weft.dev/weft/e2e/guest"
)

// boot is one run of a machine, from QEMU's start to its end.
type boot struct {
	machine *Machine
	process *os.Process
	control *control
	qmp     *qmp
	console *console
	events  chan qmpEvent
	gone    chan struct{} // closed when QEMU has ended and everything here is closed

	expected atomic.Bool // the test asked for its end
}

// qmpEvent is an event that QEMU reports.
type qmpEvent struct {
	name string
	data json.RawMessage
}

// plugged is the connections between QEMU and this process: our ends, and those that QEMU
// inherits.
type plugged struct {
	conns  []net.Conn // control, qmp, networks
	theirs []*os.File
	out    *os.File // QEMU's output: the console
	outEnd *os.File
	log    *os.File
}

func plugIn(m *Machine) (p *plugged, err error) {
	p = &plugged{}
	defer func() {
		if err != nil {
			p.closeTheirs()
			p.close()
		}
	}()
	for range 2 + len(m.nics) {
		ours, theirs, err := socketPair()
		if err != nil {
			return nil, err
		}
		p.theirs = append(p.theirs, theirs)
		conn, err := net.FileConn(ours)
		ours.Close()
		if err != nil {
			return nil, err
		}
		p.conns = append(p.conns, conn)
	}
	if p.out, p.outEnd, err = os.Pipe(); err != nil {
		return nil, err
	}
	p.log, err = m.logFile("console")
	return p, err
}

func (p *plugged) closeTheirs() {
	for _, f := range append(p.theirs, p.outEnd) {
		if f != nil {
			f.Close()
		}
	}
}

func (p *plugged) close() {
	for _, c := range p.conns {
		c.Close()
	}
	for _, f := range []*os.File{p.out, p.log} {
		if f != nil {
			f.Close()
		}
	}
}

// startBoot starts QEMU and the goroutines that listen to it.
func startBoot(m *Machine) (*boot, error) {
	p, err := plugIn(m)
	if err != nil {
		return nil, err
	}
	defer p.closeTheirs()
	b := &boot{machine: m, gone: make(chan struct{}), events: make(chan qmpEvent, 64)}
	b.control = newControl(p.conns[0], b.take)
	b.qmp = newQMP(p.conns[1], b.takeQMP)
	b.console = &console{allowed: m.cluster.allowed, trouble: b.trouble}

	cmd := exec.Command(qemuProgram, m.qemuArgs(inheritedPlugs())...)
	cmd.ExtraFiles = p.theirs
	cmd.Stdout, cmd.Stderr = p.outEnd, p.outEnd
	m.cluster.t.Logf("%s: run it by hand: %s", m.name, commandLine(m.qemuArgs(loosePlugs())))
	exited, err := startBound(cmd)
	if err != nil {
		p.close()
		return nil, err
	}
	b.process = cmd.Process
	var listeners sync.WaitGroup
	listeners.Go(func() { b.console.copy(p.log, p.out) })
	listeners.Go(func() { b.control.receive(p.conns[0]) })
	listeners.Go(b.qmp.receive)
	for i, n := range m.nics {
		listeners.Go(func() { n.net.plug(m.name, p.conns[2+i]) })
	}
	go func() {
		err := <-exited
		listeners.Wait() // QEMU's ends are closed now, so all of them end
		p.close()
		b.ended(err)
		close(b.gone)
	}()
	return b, nil
}

// startBound starts a process from a thread that lives as long as the process. When the
// thread ends, the kernel kills the process. So QEMU never outlives the test, however the
// test ends.
func startBound(cmd *exec.Cmd) (exited <-chan error, err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started, done := make(chan error), make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			done <- cmd.Wait()
		}
	}()
	return done, <-started
}

// greet waits for the guest's init and applies the machine's setup.
func (b *boot) greet(ctx context.Context, setup guest.Setup) error {
	ctx, cancel := context.WithTimeoutCause(ctx, bootLimit, fmt.Errorf("no greeting within %s", bootLimit))
	defer cancel()
	if _, err := b.qmp.do(ctx, "qmp_capabilities", nil); err != nil {
		return err
	}
	select {
	case <-b.control.hello:
	case <-b.gone:
		return b.goneError()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	setup.Time = time.Now().UnixNano()
	_, err := b.control.do(ctx, guest.Request{Op: guest.OpSetup, Setup: &setup}, nil, nil)
	if err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	// The clock was set too late, by the duration of the request.
	offset, _, err := b.clockOffset(ctx)
	if err != nil {
		return fmt.Errorf("compare clocks: %w", err)
	}
	_, err = b.control.do(ctx, guest.Request{Op: guest.OpAdjust, Time: int64(-offset)}, nil, nil)
	return err
}

// clockOffset compares the guest's clock with ours, using the shortest of several round
// trips.
func (b *boot) clockOffset(ctx context.Context) (offset, within time.Duration, err error) {
	within = time.Hour
	for range 8 {
		sent := time.Now()
		r, err := b.control.do(ctx, guest.Request{Op: guest.OpClock}, nil, nil)
		if err != nil {
			return 0, 0, err
		}
		trip := time.Since(sent)
		if trip/2 < within {
			within = trip / 2
			offset = time.Unix(0, r.Time).Sub(sent.Add(trip / 2).Round(0))
		}
	}
	return offset, within, nil
}

// expectEnd records that the machine was told to end.
func (b *boot) expectEnd() { b.expected.Store(true) }

func (b *boot) kill() {
	b.expectEnd()
	_ = b.process.Kill()
}

// ended reports an unexpected end of the machine.
func (b *boot) ended(err error) {
	b.machine.endDaemons()
	if b.expected.Load() {
		return
	}
	how := "it reset or turned itself off"
	if err != nil {
		how = err.Error()
	}
	b.machine.cluster.fail("%s ended unexpectedly (%s); the end of its console:\n%s", b.machine.name, how, b.console.text())
	b.machine.forget(b)
}

// goneError returns the reason why a boot no longer answers.
func (b *boot) goneError() error {
	if b.expected.Load() {
		return fmt.Errorf("%s was turned off", b.machine.name)
	}
	return fmt.Errorf("%s ended unexpectedly; the end of its console:\n%s", b.machine.name, b.console.text())
}

// trouble fails the test because of a line that a healthy kernel does not print.
func (b *boot) trouble(line string) {
	if b.expected.Load() && !strings.Contains(line, "BUG") {
		return
	}
	b.machine.cluster.fail("%s: kernel fault: %s (whole console in %s)", b.machine.name, line, b.machine.cluster.logs)
}

// take handles unsolicited messages of the guest.
func (b *boot) take(r guest.Reply) {
	switch r.Kind {
	case guest.KindKmsg:
		b.machine.appendLog("kmsg", r.Data)
	case guest.KindLog:
		b.machine.daemonLog(r.Name, r.Data)
	case guest.KindExit:
		b.machine.daemonExit(r)
	}
}

// takeQMP keeps QEMU's latest events for those that wait for one.
func (b *boot) takeQMP(name string, data json.RawMessage) {
	select {
	case b.events <- qmpEvent{name, data}:
	default:
		<-b.events
		b.events <- qmpEvent{name, data}
	}
}

// commandLine quotes a command for a shell.
func commandLine(args []string) string {
	quoted := make([]string, 0, len(args)+1)
	quoted = append(quoted, qemuProgram)
	for _, a := range args {
		if strings.ContainsAny(a, " ,*&;|<>()$`\"") {
			a = "'" + a + "'"
		}
		quoted = append(quoted, a)
	}
	return strings.Join(quoted, " ")
}

// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/e2e/guest"
)

// Machine is a virtual machine. Its drives and addresses stay; boots come and go.
//
//	        Boot              Kill, Shutdown, Reboot(first half)
//	off ───────────> running ───────────────────────────────────> off
//	                    └── ends by itself: the test fails ──────> off
//
// Methods may be called from several goroutines.
type Machine struct {
	cluster *Cluster
	name    string
	options machineOptions
	nics    []nic
	drives  []*Drive

	forwards map[int]string // port of the guest to address on this machine

	mu      sync.Mutex
	boot    *boot // nil when off
	boots   int
	daemons map[string]*Daemon
}

// nic is a network device of a machine.
type nic struct {
	net  *Network
	mac  string
	addr string
}

func newMachine(c *Cluster, name string, options []MachineOption) (*Machine, error) {
	m := &Machine{cluster: c, name: name, daemons: make(map[string]*Daemon)}
	m.options = machineOptions{memory: 384, cpus: 1, nets: []*Network{c.Network()}, kmsg: true}
	for _, option := range options {
		option(&m.options)
	}
	for i, n := range m.options.nets {
		place := n.nextPlace()
		m.nics = append(m.nics, nic{
			net:  n,
			mac:  fmt.Sprintf("52:54:00:77:%02x:%02x", n.number, place),
			addr: n.address(place),
		})
		if i == 0 {
			m.options.modules = append([]string{"virtio_net"}, m.options.modules...)
		}
	}
	for _, port := range m.options.forward {
		at, err := freeAddress()
		if err != nil {
			return nil, err
		}
		if m.forwards == nil {
			m.forwards = make(map[int]string)
		}
		m.forwards[port] = at
	}
	drives := m.options.drives
	if m.options.state != "" {
		drives = append(drives, driveOption{size: m.options.state, serial: guest.StateSerial})
	}
	if m.options.userland {
		drives = append(drives, driveOption{size: userlandSize, serial: guest.RootSerial})
		m.options.kernel = append(m.options.kernel, guest.UserlandArg)
	}
	for i, o := range drives {
		d, err := newDrive(c.t.Context(), m, i, o)
		if err != nil {
			return nil, fmt.Errorf("drive %s: %w", o.serial, err)
		}
		if d.nvme {
			m.options.modules = append(m.options.modules, "nvme")
		}
		m.drives = append(m.drives, d)
	}
	return m, nil
}

// Name is the machine's host name.
func (m *Machine) Name() string { return m.name }

// Addr is the machine's address on the cluster's network, "" if it is on none.
func (m *Machine) Addr() string {
	if len(m.nics) == 0 {
		return ""
	}
	return m.nics[0].addr
}

// AddrOn is the machine's address on a network, "" if it is not on it.
func (m *Machine) AddrOn(n *Network) string {
	for _, nic := range m.nics {
		if nic.net == n {
			return nic.addr
		}
	}
	return ""
}

// Drive returns the drive with the serial, or nil.
func (m *Machine) Drive(serial string) *Drive {
	for _, d := range m.drives {
		if d.Serial == serial {
			return d
		}
	}
	return nil
}

// Running reports whether the machine is on.
func (m *Machine) Running() bool {
	_, err := m.current()
	return err == nil
}

// Boot starts the machine with its drives and returns when it is ready.
func (m *Machine) Boot(ctx context.Context) error {
	m.mu.Lock()
	if m.boot != nil {
		m.mu.Unlock()
		return fmt.Errorf("boot %s: it is running", m.name)
	}
	m.boots++
	b, err := startBoot(m)
	if err != nil {
		m.mu.Unlock()
		return fmt.Errorf("boot %s: %w", m.name, err)
	}
	m.boot = b
	m.mu.Unlock()
	if err := b.greet(ctx, m.setup()); err != nil {
		m.end(b)
		return fmt.Errorf("boot %s: %w; the end of its console:\n%s", m.name, err, b.console.text())
	}
	return nil
}

func (m *Machine) setup() guest.Setup {
	s := guest.Setup{Hostname: m.name, Modules: m.options.modules, Kmsg: m.options.kmsg}
	for i, n := range m.nics {
		net := guest.Net{MAC: n.mac, Name: fmt.Sprintf("eth%d", i), CIDR: n.addr + "/24", MTU: n.net.mtu}
		if slices.Contains(m.options.roce, n.net) {
			net.RoCE = fmt.Sprintf("roce%d", i)
		}
		s.Nets = append(s.Nets, net)
	}
	if len(m.forwards) > 0 {
		s.Nets = append(s.Nets, guest.Net{MAC: forwardMAC, Name: "forward0", CIDR: forwardCIDR, MTU: 1500})
	}
	return s
}

// The names of QEMU's user network and of the guest in it.
const (
	forwardMAC  = "52:54:00:76:00:01"
	forwardNet  = "10.76.0.0/24"
	forwardCIDR = "10.76.0.15/24"
)

// freeAddress finds a loopback address that is not in use.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// Forwarded is the address on this machine for a port given to Forward.
func (m *Machine) Forwarded(port int) string { return m.forwards[port] }

// current returns the current boot.
func (m *Machine) current() (*boot, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boot == nil {
		return nil, fmt.Errorf("%s is off", m.name)
	}
	return m.boot, nil
}

// Kill cuts the machine's power. Data that its drives have reported as written survives;
// data that its kernel still held is lost. Killing a machine that is off does nothing.
func (m *Machine) Kill() {
	b, err := m.current()
	if err != nil {
		return
	}
	m.end(b)
}

// end kills a boot and waits until it has ended.
func (m *Machine) end(b *boot) {
	b.kill()
	<-b.gone
	m.forget(b)
}

func (m *Machine) forget(b *boot) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boot == b {
		m.boot = nil
	}
}

// shutdownTimeout is how long a machine may take to sync its disks and switch off. One that hangs then
// loses its power, as an operator would do it.
const shutdownTimeout = 30 * time.Second

// Shutdown syncs the drives and turns the machine off. It does not stop daemons; stop them
// first where that matters.
func (m *Machine) Shutdown(ctx context.Context) error {
	b, err := m.current()
	if err != nil {
		return err
	}
	b.expectEnd()
	_ = b.control.send(guest.Request{Op: guest.OpReset, Sync: true})
	select {
	case <-b.gone:
		m.forget(b)
		return nil
	case <-time.After(shutdownTimeout):
		m.cluster.t.Logf("%s has not switched off after %v: its power is cut", m.name, shutdownTimeout)
		m.end(b)
		return nil
	case <-ctx.Done():
		return fmt.Errorf("shut down %s: %w", m.name, context.Cause(ctx))
	}
}

// Reboot shuts the machine down and boots it again.
func (m *Machine) Reboot(ctx context.Context) error {
	if err := m.Shutdown(ctx); err != nil {
		return err
	}
	return m.Boot(ctx)
}

// Restart reboots a machine with a userland as its operator would, with its services stopped in
// order, and boots it again. It returns when the control port answers: services may still start.
func (m *Machine) Restart(ctx context.Context) error {
	b, err := m.current()
	if err != nil {
		return err
	}
	b.expectEnd()
	if _, err := m.Run(ctx, "systemctl", "reboot"); err != nil && !errors.Is(err, errGone) {
		return err
	}
	select {
	case <-b.gone:
		m.forget(b)
		return m.Boot(ctx)
	case <-ctx.Done():
		return fmt.Errorf("restart %s: %w; the end of its console:\n%s", m.name, context.Cause(ctx), b.console.text())
	}
}

// ExitError means that a command in a guest exited with a code other than 0.
type ExitError struct {
	Machine string
	Argv    []string
	Code    int // 128 + signal if a signal ended it
	Stderr  string
}

func (e *ExitError) Error() string {
	text := fmt.Sprintf("run %q on %s: exit code %d", strings.Join(e.Argv, " "), e.Machine, e.Code)
	if e.Stderr == "" {
		return text
	}
	return text + ": " + e.Stderr
}

// Command is a command for Machine.Do. Only Argv is required.
type Command struct {
	Argv   []string
	Env    []string // added to the guest's environment
	Dir    string
	Stdin  []byte
	Stdout io.Writer // written while the command runs; nil discards
	Stderr io.Writer

	MayExit bool // a daemon may exit by itself with an error
}

// Run runs a command and returns its standard output. If the command fails, the error is an
// *ExitError with the end of its standard error. When ctx ends, the command is killed.
func (m *Machine) Run(ctx context.Context, argv ...string) (string, error) {
	var out bytes.Buffer
	err := m.Do(ctx, Command{Argv: argv, Stdout: &out})
	return out.String(), err
}

// Shell runs a script with the guest's shell and returns its standard output. The script
// stops at the first command that fails; the error then shows the commands up to that one.
func (m *Machine) Shell(ctx context.Context, script string) (string, error) {
	var out bytes.Buffer
	err := m.Do(ctx, Command{Argv: []string{"sh", "-eux"}, Stdin: []byte(script), Stdout: &out})
	return out.String(), err
}

// Do runs a command.
func (m *Machine) Do(ctx context.Context, c Command) error {
	var tail tailWriter
	stderr := io.Writer(&tail)
	if c.Stderr != nil {
		stderr = io.MultiWriter(&tail, c.Stderr)
	}
	r, err := m.request(ctx, guest.Request{Op: guest.OpRun, Argv: c.Argv, Env: c.Env, Dir: c.Dir, Data: c.Stdin}, c.Stdout, stderr)
	if err != nil {
		return fmt.Errorf("run %q on %s: %w", strings.Join(c.Argv, " "), m.name, err)
	}
	if r.Code != 0 {
		return &ExitError{Machine: m.name, Argv: c.Argv, Code: r.Code, Stderr: tail.String()}
	}
	return nil
}

// request sends one request to the current boot.
func (m *Machine) request(ctx context.Context, r guest.Request, stdout, stderr io.Writer) (guest.Reply, error) {
	b, err := m.current()
	if err != nil {
		return guest.Reply{}, err
	}
	done, err := b.control.do(ctx, r, stdout, stderr)
	if errors.Is(err, errGone) {
		return done, b.goneError()
	}
	return done, err
}

// writeChunk is how much of a file one request carries.
const writeChunk = 256 << 10

// WriteFile writes a file in the guest and creates its directories.
func (m *Machine) WriteFile(ctx context.Context, path string, data []byte, mode fs.FileMode) error {
	for first := true; first || len(data) > 0; first = false {
		n := min(len(data), writeChunk)
		r := guest.Request{Op: guest.OpWrite, Path: path, Data: data[:n], Mode: mode, Append: !first}
		if _, err := m.request(ctx, r, nil, nil); err != nil {
			return fmt.Errorf("write %s on %s: %w", path, m.name, err)
		}
		data = data[n:]
	}
	return nil
}

// Push copies a file of this machine into the guest, with its mode.
func (m *Machine) Push(ctx context.Context, local, path string) error {
	info, err := os.Stat(local)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(local)
	if err != nil {
		return err
	}
	return m.WriteFile(ctx, path, data, info.Mode().Perm())
}

// ReadFile reads a file of the guest, also one of /proc or /sys. A missing file
// is fs.ErrNotExist.
func (m *Machine) ReadFile(ctx context.Context, path string) ([]byte, error) {
	var out bytes.Buffer
	if _, err := m.request(ctx, guest.Request{Op: guest.OpRead, Path: path}, &out, nil); err != nil {
		return nil, fmt.Errorf("read %s on %s: %w", path, m.name, err)
	}
	return out.Bytes(), nil
}

// Sync flushes the guest's page cache to its drives.
func (m *Machine) Sync(ctx context.Context) error {
	_, err := m.request(ctx, guest.Request{Op: guest.OpSync}, nil, nil)
	return err
}

// ClockOffset returns how far the guest's wall clock is ahead of this process's, and the
// largest error of that: half of the shortest of several round trips. Subtract the offset
// from a guest's times to order them among those of other machines.
func (m *Machine) ClockOffset(ctx context.Context) (offset, within time.Duration, err error) {
	b, err := m.current()
	if err != nil {
		return 0, 0, err
	}
	return b.clockOffset(ctx)
}

// SetClock sets the guest's wall clock.
func (m *Machine) SetClock(ctx context.Context, now time.Time) error {
	_, err := m.request(ctx, guest.Request{Op: guest.OpSet, Time: now.UnixNano()}, nil, nil)
	return err
}

// Console returns the last lines that the machine printed.
func (m *Machine) Console() string {
	b, err := m.current()
	if err != nil {
		return ""
	}
	return b.console.text()
}

// logFile opens a log of the machine; boots are appended to one another.
func (m *Machine) logFile(name string) (*os.File, error) {
	path := filepath.Join(m.cluster.logs, m.name+"-"+name+".log")
	return os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
}

// tailWriter keeps the end of what is written.
type tailWriter struct{ buf []byte }

func (w *tailWriter) Write(p []byte) (int, error) {
	const most = 4 << 10
	w.buf = append(w.buf, p...)
	if len(w.buf) > most {
		w.buf = append(w.buf[:0], w.buf[len(w.buf)-most:]...)
	}
	return len(p), nil
}

func (w *tailWriter) String() string { return strings.TrimSpace(string(w.buf)) }

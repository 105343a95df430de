// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// TB is the part of testing.TB that a cluster needs. Programs that are not tests implement
// it themselves.
type TB interface {
	Helper()
	Name() string
	Context() context.Context
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
	Failed() bool
	Cleanup(func())
}

// bootLimit is the time from QEMU's start to the greeting of the guest's init. Under TCG,
// with other machines booting on the same few cores, a boot takes some tens of seconds at
// worst.
const bootLimit = 180 * time.Second

// Cluster is a set of machines and the networks between them. It lives as long as the test.
type Cluster struct {
	t       TB
	image   Image
	kvm     bool
	tsc     uint64 // kHz; 0 if the guests measure it themselves
	logs    string // directory
	drives  string // directory
	allowed []*regexp.Regexp

	mu       sync.Mutex
	machines []*Machine
	networks []*Network
	closing  bool
}

// clusterOptions is what Options change.
type clusterOptions struct {
	kernel  string
	mtu     int
	seed    uint64
	allowed []*regexp.Regexp
}

// Option is an option of a cluster.
type Option func(*clusterOptions)

// WithKernel chooses the kernel, "6.1" or "6.12", instead of WEFT_KERNEL's.
func WithKernel(version string) Option { return func(o *clusterOptions) { o.kernel = version } }

// WithMTU sets the largest packet of the cluster's networks (default 9000).
func WithMTU(mtu int) Option { return func(o *clusterOptions) { o.mtu = mtu } }

// WithSeed seeds the random loss of frames.
func WithSeed(seed uint64) Option { return func(o *clusterOptions) { o.seed = seed } }

// AllowKernel marks console lines that match a pattern as expected, so that they do not
// fail the test.
func AllowKernel(pattern string) Option {
	return func(o *clusterOptions) { o.allowed = append(o.allowed, regexp.MustCompile(pattern)) }
}

// Available returns the reason why machines cannot run here, or nil.
func Available() error {
	if _, err := lookProgram(qemuProgram); err != nil {
		return fmt.Errorf("%w; install qemu-system-x86", err)
	}
	return nil
}

// Require skips a test where machines cannot run. In CI, and if WEFT_VM=1 asks for
// machines, it fails the test instead: a skip must not hide a regression.
func Require(t TB) {
	t.Helper()
	if os.Getenv("WEFT_VM") == "0" {
		t.Skipf("WEFT_VM=0")
	}
	err := Available()
	if err == nil {
		return
	}
	if os.Getenv("CI") != "" || os.Getenv("WEFT_VM") == "1" {
		t.Fatalf("virtual machines are required here: %v", err)
	}
	t.Skipf("no virtual machines: %v", err)
}

// NewCluster prepares a cluster for a test and closes it at the test's end. It skips the
// test where machines cannot run (see Require).
func NewCluster(t TB, options ...Option) *Cluster {
	t.Helper()
	Require(t)
	o := clusterOptions{kernel: KernelVersion(), mtu: 9000, seed: 1}
	for _, option := range options {
		option(&o)
	}
	c, err := newCluster(t, o)
	if err != nil {
		t.Fatalf("prepare virtual machines: %v", err)
	}
	t.Cleanup(c.close)
	return c
}

// KernelVersion is the version in WEFT_KERNEL, or the default.
func KernelVersion() string {
	if v := os.Getenv("WEFT_KERNEL"); v != "" {
		return v
	}
	return DefaultKernel
}

func newCluster(t TB, o clusterOptions) (*Cluster, error) {
	image, err := BuildImage(t.Context(), o.kernel)
	if err != nil {
		return nil, err
	}
	logs, err := logDir(t.Name())
	if err != nil {
		return nil, err
	}
	drives, err := makeDrivesDir()
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		t: t, image: image, kvm: kvmWorks(), logs: logs, drives: drives,
		allowed: o.allowed,
	}
	if !c.kvm {
		c.tsc = tscKHz()
	}
	c.networks = []*Network{newNetwork("net0", 0, o.mtu, o.seed)}
	t.Logf("kernel %s, %s; logs in %s", image.Kernel.Release, acceleration(c.kvm), logs)
	return c, nil
}

// logDir makes a directory for the logs of a test.
func logDir(test string) (string, error) {
	name := strings.NewReplacer("/", "_", " ", "_").Replace(test) + "-"
	base := os.Getenv("WEFT_VM_LOGS")
	if base == "" {
		base = filepath.Join(os.TempDir(), "weft-vm")
	}
	if err := os.MkdirAll(base, 0o755); err != nil {
		return "", err
	}
	return os.MkdirTemp(base, name)
}

// Network is the network of all machines.
func (c *Cluster) Network() *Network { return c.networks[0] }

// AddNetwork adds another network; machines join it with On.
func (c *Cluster) AddNetwork(name string) *Network {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := newNetwork(name, len(c.networks), c.networks[0].mtu, uint64(len(c.networks)))
	c.networks = append(c.networks, n)
	return n
}

// Logs is the directory with the logs of all machines.
func (c *Cluster) Logs() string { return c.logs }

// Machine defines a machine and its drives, for Boot to boot. The first machine has the
// address 10.77.0.1, the next 10.77.0.2, and so on.
func (c *Cluster) Machine(name string, options ...MachineOption) *Machine {
	c.t.Helper()
	m, err := newMachine(c, name, options)
	if err != nil {
		c.t.Fatalf("machine %s: %v", name, err)
	}
	c.mu.Lock()
	c.machines = append(c.machines, m)
	c.mu.Unlock()
	return m
}

// Start defines a machine and boots it.
func (c *Cluster) Start(name string, options ...MachineOption) *Machine {
	c.t.Helper()
	m := c.Machine(name, options...)
	c.Boot(c.t.Context(), m)
	return m
}

// Boot boots machines in parallel and returns when all are ready. If one fails, it ends the
// test.
func (c *Cluster) Boot(ctx context.Context, machines ...*Machine) {
	c.t.Helper()
	begin := time.Now()
	var all errgroup.Group
	for _, m := range machines {
		all.Go(func() error { return m.Boot(ctx) })
	}
	if err := all.Wait(); err != nil {
		c.t.Fatalf("%v", err)
	}
	c.t.Logf("%d machines booted in %.1f s", len(machines), time.Since(begin).Seconds())
}

// fail reports a failure that no caller waits for: a dead machine, an oops.
func (c *Cluster) fail(format string, args ...any) {
	c.mu.Lock()
	closing := c.closing
	c.mu.Unlock()
	if !closing {
		c.t.Errorf(format, args...)
	}
}

// stoppedDrive matches the line that a kernel prints when an emulated drive does not answer.
var stoppedDrive = regexp.MustCompile(`nvme nvme\d+: I/O .*timeout, (aborting|reset)`)

// awaitStoppedDrives gives the machines' kernels the time to say that a drive does not answer: they
// wait for 30 s, and a test may have failed before.
func awaitStoppedDrives(machines []*Machine) {
	for range 35 {
		if slices.ContainsFunc(machines, func(m *Machine) bool { return stoppedDrive.MatchString(m.Console()) }) {
			return
		}
		time.Sleep(time.Second)
	}
}

// noteStoppedDrive tells e2e/fault/vm that this test failed while a drive of QEMU had stopped
// for at least the 30 s that kernels wait.
func (c *Cluster) noteStoppedDrive(machine, line string) {
	c.t.Logf("QEMU's drive of %s has stopped answering: %s", machine, line)
	name := os.Getenv("WEFT_VM_STOPPED")
	if name == "" {
		return
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err == nil {
		test, _, _ := strings.Cut(c.t.Name(), "/")
		_, err = fmt.Fprintln(f, test)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		c.t.Errorf("note that a drive has stopped: %v", err)
	}
}

// close kills the machines and removes the files that are no longer needed.
func (c *Cluster) close() {
	c.mu.Lock()
	c.closing = true
	machines := c.machines
	c.mu.Unlock()
	if c.t.Failed() {
		awaitStoppedDrives(machines)
	}
	for _, m := range machines {
		if c.t.Failed() {
			console := m.Console()
			c.t.Logf("the end of %s's console:\n%s", m.name, console)
			if line := stoppedDrive.FindString(console); line != "" {
				c.noteStoppedDrive(m.name, line)
			}
		}
		m.Kill()
	}
	var errs error
	for _, m := range machines {
		for _, d := range m.drives {
			if d.cache != nil {
				errs = errors.Join(errs, d.cache.close())
			}
		}
	}
	for _, n := range c.networks {
		n.close()
	}
	keep := os.Getenv("WEFT_VM_KEEP") != ""
	if c.t.Failed() || keep {
		c.t.Logf("logs of the machines are in %s", c.logs)
	}
	if !keep {
		errs = errors.Join(errs, os.RemoveAll(c.drives))
	}
	if !keep && !c.t.Failed() {
		errs = errors.Join(errs, os.RemoveAll(c.logs))
	}
	if errs != nil {
		c.t.Errorf("remove the machines' files: %v", errs)
	}
}

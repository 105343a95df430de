// SPDX-License-Identifier: Apache-2.0

// Package testbed is a Weft cluster in virtual machines, for the scenarios, the
// demonstration and the benchmark:
//
//	m1 m2 …   volmgr, its store on a disk that survives boots; most clusters have one
//	t1 t2 …   target agents, each with NVMe drives, in racks r1, r2, …
//	c1 c2 …   initiator agents: the clients
//
// Commands go to the volume manager with the weft program of the machine that
// the test runs on, as an operator would type them.
package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

// managerPort is volmgr's port in its machine.
const managerPort = 4480

// snapshotHold is more than hosts hold I/O for a snapshot elsewhere: what takes milliseconds there takes
// hundreds of them under emulation.
const snapshotHold = "15s"

// managerStore is where volmgr keeps its store there.
const managerStore = "/var/lib/weft/volmgr"

// Options describe a cluster. The zero value is three targets with one drive of 2 GiB each,
// and one client.
type Options struct {
	Managers  int // by default as many as WEFT_MANAGERS says, or one
	Targets   int
	Clients   int
	DriveSize string
	Drives    int // per target
	// Caches gives the drives a volatile write cache; see protectDrives.
	Caches bool
	// LosesCaches: with Caches, a machine that is killed loses what its drives had not written. Otherwise the caches are
	// announced, and lose nothing.
	LosesCaches bool
	// ClientPorts are TCP ports of the clients that this machine can reach; see
	// vm.Machine.Forwarded.
	ClientPorts []int
	// TargetDisk is the size of a disk with a file system, at /var/lib/weft of each target, which then has
	// loop devices, too; empty: none. Its file is sparse.
	TargetDisk string
	// TargetFlags are more flags of the target agents, and TargetEnv is added to their environment.
	TargetFlags, TargetEnv []string
	// RoCE gives targets and clients a second network, Bed.RoCE, with RDMA in software, and
	// each target a portal on it, of rail "roce". Clients prefer that rail. The portal of the first
	// network is of rail "tcp".
	RoCE bool
	// Rails gives targets and clients a second network, Bed.Rail, and each target a second portal, on
	// it, of rail "b". Clients prefer rail "a", the first network.
	Rails bool
	// Closed makes a cluster as an operator does: its members join with tokens, and nobody else is
	// answered. Otherwise everybody speaks plain TCP.
	Closed bool
}

// Bed is a running cluster.
type Bed struct {
	T        vm.TB
	Cluster  *vm.Cluster
	Manager  *vm.Machine   // the first manager
	Managers []*vm.Machine // all of them
	Targets  []*vm.Machine
	Clients  []*vm.Machine
	API      pb.ManagerClient // of the manager that leads
	RoCE     *vm.Network      // see Options.RoCE; nil without
	Rail     *vm.Network      // see Options.Rails; nil without

	weft        string               // path of weft on this machine
	stores      map[*vm.Machine]bool // whether the manager of a machine has a store
	caches      bool
	targetFlags []string
	targetEnv   []string
	daemons     map[*vm.Machine]*vm.Daemon
	datapaths   map[*vm.Machine]string // set by Datapath
	closed      bool
	config      string // where the operator of a closed cluster is logged in
}

// Draw defines the machines of a cluster without booting them.
func Draw(t vm.TB, o Options, options ...vm.Option) *Bed {
	if o.Managers == 0 {
		o.Managers = managersByDefault(t)
	}
	if o.Targets == 0 {
		o.Targets = 3
	}
	if o.Clients == 0 {
		o.Clients = 1
	}
	if o.DriveSize == "" {
		o.DriveSize = "2GiB"
	}
	if o.Drives == 0 {
		o.Drives = 1
	}
	b := &Bed{T: t, Cluster: vm.NewCluster(t, options...), caches: o.Caches, targetFlags: o.TargetFlags, targetEnv: o.TargetEnv, closed: o.Closed, stores: map[*vm.Machine]bool{}, daemons: map[*vm.Machine]*vm.Daemon{}, datapaths: map[*vm.Machine]string{}}
	for i := range o.Managers {
		b.Managers = append(b.Managers, b.Cluster.Machine(fmt.Sprintf("m%d", i+1), vm.StateDisk(), vm.Forward(managerPort), vm.Memory(320)))
	}
	b.Manager = b.Managers[0]
	var onSecond []vm.MachineOption
	if o.RoCE {
		b.RoCE = b.Cluster.AddNetwork("roce")
		onSecond = append(onSecond, vm.RoCE(b.RoCE))
	}
	if o.Rails {
		b.Rail = b.Cluster.AddNetwork("rail")
		onSecond = append(onSecond, vm.On(b.Rail))
	}
	for i := range o.Targets {
		machine := append([]vm.MachineOption{vm.Modules("nvmet-tcp", "dm-mod")}, onSecond...)
		if o.TargetDisk != "" {
			machine = append(machine, vm.StateDiskOf(o.TargetDisk), vm.Modules("loop"))
		}
		for d := range o.Drives {
			nvme := vm.NVMe
			if o.LosesCaches {
				nvme = vm.VolatileNVMe
			}
			machine = append(machine, nvme(o.DriveSize, fmt.Sprintf("T%dD%d", i+1, d+1)))
		}
		b.Targets = append(b.Targets, b.Cluster.Machine(fmt.Sprintf("t%d", i+1), machine...))
	}
	for i := range o.Clients {
		machine := append([]vm.MachineOption{vm.StateDisk(), vm.Memory(448), vm.Modules(clientModules()...)}, onSecond...)
		for _, port := range o.ClientPorts {
			machine = append(machine, vm.Forward(port))
		}
		b.Clients = append(b.Clients, b.Cluster.Machine(fmt.Sprintf("c%d", i+1), machine...))
	}
	b.weft = b.build()
	return b
}

// clientModules are the kernel modules that clients need for both data paths. Debian's 6.1
// has no ublk.
func clientModules() []string {
	modules := []string{"nvme-tcp", "dm-mirror", "loop", "tcp_diag", "fuse"}
	if vm.KernelVersion() != "6.1" {
		modules = append(modules, "ublk_drv")
	}
	return modules
}

// Start defines and boots a cluster, starts its daemons, adds every drive and waits for the clients.
func Start(t vm.TB, o Options, options ...vm.Option) *Bed {
	b := Draw(t, o, options...)
	b.Up(b.machines()...)
	b.AddDrives()
	for _, c := range b.Clients {
		b.waitOnline(c, true)
	}
	return b
}

func (b *Bed) machines() []*vm.Machine {
	return slices.Concat(b.Managers, b.Targets, b.Clients)
}

// build builds the weft program for this machine, in bin/ of the module. The linker runs only
// if the program that is there is not the same already.
func (b *Bed) build() string {
	root, err := vm.ModuleRoot(b.T.Context())
	if err != nil {
		b.T.Fatalf("build weft: %v", err)
	}
	program := filepath.Join(root, "bin", "e2e", "weft")
	cmd := exec.Command("go", "build", "-o", program, "weft.dev/weft/cmd/weft")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.T.Fatalf("build weft: %v\n%s", err, out)
	}
	return program
}

// Up boots machines in parallel and starts or restarts their daemons.
func (b *Bed) Up(machines ...*vm.Machine) {
	b.Cluster.Boot(b.T.Context(), machines...)
	for _, m := range machines {
		b.protectDrives(m)
		b.initStore(m)
		b.StartDaemon(m)
	}
	if b.API == nil {
		b.dial()
		b.AwaitVotes()
	}
}

// protectDrives makes the NVMe drives behave as server drives do: without a volatile write
// cache. QEMU's drives always announce one, though their completed writes survive
// Machine.Kill. With a cache, dm-mirror's log is flushed through the legs, and a leg that
// dies during such a flush is copied in full when it returns.
func (b *Bed) protectDrives(m *vm.Machine) {
	if m.Name()[0] != 't' || b.caches {
		return
	}
	if out, err := m.Shell(b.T.Context(), `for d in /sys/block/nvme*n1; do echo "write through" > $d/queue/write_cache; done`); err != nil {
		b.T.Fatalf("%v\n%s", err, out)
	}
}

func (b *Bed) dial() {
	creds := insecure.NewCredentials()
	if b.closed {
		creds = b.logIn()
	}
	conn, err := managers.Connect(b.ManagerAddr(), func(address string) (*grpc.ClientConn, error) {
		return grpc.NewClient("passthrough:///"+b.forwarded(address), grpc.WithTransportCredentials(creds))
	})
	if err != nil {
		b.T.Fatalf("dial volmgr: %v", err)
	}
	b.T.Cleanup(func() { conn.Close() })
	b.API = pages.Client(conn)
	b.Eventually(time.Minute, "volmgr answers", func(ctx context.Context) error {
		_, err := b.API.GetStatus(ctx, &pb.GetStatusRequest{})
		return err
	})
}

// Daemon returns the daemon of a machine.
func (b *Bed) Daemon(m *vm.Machine) *vm.Daemon { return b.daemons[m] }

// Datapath switches the agent of a machine to the data path "kernel" or "user". A running
// agent is stopped first, as an operator would do it. When Datapath returns, the manager
// knows the new data path.
func (b *Bed) Datapath(m *vm.Machine, path string) {
	b.T.Helper()
	b.datapaths[m] = path
	if d := b.daemons[m]; d != nil {
		if err := d.Stop(b.T.Context()); err != nil {
			b.T.Fatalf("stop the agent of %s: %v", m.Name(), err)
		}
	}
	b.waitOnline(m, false)
	b.StartDaemon(m)
	b.waitOnline(m, true)
}

func (b *Bed) waitOnline(m *vm.Machine, want bool) {
	b.T.Helper()
	b.Eventually(time.Minute, fmt.Sprintf("the agent of %s is online: %v", m.Name(), want), func(ctx context.Context) error {
		nodes, err := b.API.ListNodes(ctx, &pb.ListNodesRequest{})
		if err != nil {
			return err
		}
		for _, n := range nodes.Nodes {
			if n.Name == m.Name() && (n.Target.GetOnline() || n.Initiator.GetOnline()) == want {
				return nil
			}
		}
		return fmt.Errorf("it is not")
	})
}

// StartDaemon starts a machine's daemon; after a boot it starts it again.
func (b *Bed) StartDaemon(m *vm.Machine) *vm.Daemon {
	argv := append(b.daemonArgs(m), b.admit(m)...)
	c := vm.Command{Argv: append([]string{"weft"}, argv...)}
	if argv[0] == "target" {
		c.Env = b.targetEnv
	}
	d, err := m.StartDaemon(b.T.Context(), argv[0], c)
	if err != nil {
		b.T.Fatalf("start %s on %s: %v", argv[0], m.Name(), err)
	}
	b.daemons[m] = d
	return d
}

func (b *Bed) daemonArgs(m *vm.Machine) (argv []string) {
	manager := b.ManagerAddr()
	switch m.Name()[0] {
	case 'm':
		return []string{"volmgr", "--snapshot-hold", snapshotHold, "--data-dir", managerStore, "--listen", fmt.Sprintf(":%d", managerPort), "--address", managerAddr(m)}
	case 't':
		argv = []string{"target", "--node", m.Name(), "--manager", manager, "--label", "rack=r" + m.Name()[1:]}
		argv = append(append(argv, b.portals(m)...), b.targetFlags...)
	default:
		argv = []string{"initiator", "--node", m.Name(), "--manager", manager, "--state-dir", "/var/lib/weft/initiator", "--run-dir", "/run/weft/initiator"}
	}
	if m.Name()[0] == 'c' && b.RoCE != nil {
		argv = append(argv, "--label", "rail=roce")
	}
	if m.Name()[0] == 'c' && b.Rail != nil {
		argv = append(argv, "--label", "rail=a")
	}
	if path := b.datapaths[m]; path != "" {
		argv = append(argv, "--datapath", path)
	}
	return argv
}

// portals are the options for the portals of a target.
func (b *Bed) portals(m *vm.Machine) []string {
	switch {
	case b.RoCE != nil:
		return []string{"--portal", "tcp://" + m.Addr() + "#tcp", "--portal", "rdma://" + m.AddrOn(b.RoCE) + "#roce"}
	case b.Rail != nil:
		return []string{"--portal", "tcp://" + m.Addr() + "#a", "--portal", "tcp://" + m.AddrOn(b.Rail) + "#b"}
	}
	return []string{"--portal", "tcp://" + m.Addr()}
}

// AddDrives adds every drive of every target and waits until all are ready.
func (b *Bed) AddDrives() {
	for _, t := range b.Targets {
		b.AddDrivesOf(t)
	}
	b.Eventually(time.Minute, "all drives are ready", func(ctx context.Context) error { return operator.DrivesReady(ctx, b.API) })
}

// AddDrivesOf adds every NVMe drive of a target.
func (b *Bed) AddDrivesOf(t *vm.Machine) {
	out, err := t.Shell(b.T.Context(), "ls -d /dev/nvme?n1")
	if err != nil {
		b.T.Fatalf("find the drives of %s: %v", t.Name(), err)
	}
	for device := range strings.FieldsSeq(out) {
		b.Eventually(time.Minute, "drive "+device+" of "+t.Name()+" is added", func(context.Context) error {
			_, err := b.Try("drive", "add", t.Name(), device)
			return err
		})
	}
}

func (b *Bed) operator() operator.Operator {
	return operator.Operator{Program: b.weft, Manager: b.Leader().Forwarded(managerPort), Config: b.config}
}

// Try runs a weft command and returns its standard output. If the command fails, the error
// is an *operator.CommandError.
func (b *Bed) Try(args ...string) (string, error) {
	return b.operator().Try(b.T.Context(), args...)
}

// Weft runs a weft command that must succeed.
func (b *Bed) Weft(args ...string) string {
	b.T.Helper()
	out, err := b.Try(args...)
	if err != nil {
		b.T.Fatalf("%v\n%s", err, b.State())
	}
	return out
}

// State is the output that an operator would look at first when something is wrong.
func (b *Bed) State() string {
	var out strings.Builder
	out.WriteString(b.operator().State(b.T.Context()))
	volumes, _ := b.API.ListVolumes(b.T.Context(), &pb.ListVolumesRequest{})
	for _, v := range volumes.GetVolumes() {
		text, _ := b.Try("explain", "volume", v.Name)
		fmt.Fprintf(&out, "$ weft explain volume %s\n%s", v.Name, text)
	}
	return out.String()
}

// Eventually repeats check until it returns nil, for at most the given time.
func (b *Bed) Eventually(atMost time.Duration, what string, check func(context.Context) error) {
	b.T.Helper()
	ctx, cancel := context.WithTimeout(b.T.Context(), atMost)
	defer cancel()
	for tick := time.NewTicker(100 * time.Millisecond); ; {
		err := check(ctx)
		if err == nil {
			tick.Stop()
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			state := ""
			if b.API != nil {
				state = b.State()
			}
			b.T.Fatalf("waited %v until %s: %v\n%s", atMost, what, err, state)
		}
	}
}

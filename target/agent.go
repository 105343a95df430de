// SPDX-License-Identifier: Apache-2.0

// Package target is the agent of a machine that has drives. It adds drives, carves the legs of
// volumes out of them, and exports the legs over NVMe-oF, through the kernel or from user space, as
// the volume manager asks.
//
//	           wanted state                      orders      jobs: labels, zeroing,
//	volume  ----------------->  +------------+  --------->   device mapper, names
//	manager                     |  makePlan  |
//	        <-----------------  +------------+  --------->   nvmet.Tree: exports
//	           report, each         ^   |        nvmet.Diff
//	           second               |   v problems, admissions
//	                            observed: drives' labels, device mapper,
//	                            names, nvmet
//
// The agent keeps no state of its own: all state is on the drives' labels and in the kernel. It
// observes, plans (plan.go, pure), applies (apply.go), reports, and starts over; start, restart and
// retry are one code path. It changes nothing until it has heard from the manager, so exports
// outlive the agent and the manager.
//
// A leg is a device-mapper device over its extents, named <dev>/weft/leg/<id>; it is exported once
// it is zeroed and its label records the epoch of the export.
//
// Admission is the fence. To admit an epoch, the agent removes every export of the volume with an
// older epoch, which waits for the I/O that came through it. It then records the epoch on the
// labels, and only then reports it. Each report is read back from the labels and the kernel, never
// from memory. A drain that hangs is reported as a problem; it delays that volume alone.
//
// Where there is no nvmet, package userspace stands in for the kernel: see [Datapath]. All of the
// above holds there too, except that exports end with the process. So such an agent asks hosts to
// leave its exports before it stops: see goodbye.go. If another process of the agent takes over at
// once, hosts stay: see handover.go.
//
// Calls that can hang in the kernel run in goroutines of their own, so the report goes out every
// second regardless.
package target

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/support"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/discovery"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/userspace"
)

// The agent's timing.
const (
	reportEvery = time.Second
	lookEvery   = time.Second // unless an event triggers it earlier
	scanEvery   = 10 * time.Second
	scanFor     = 8 * time.Second // a device that takes longer is skipped
	settle      = 300 * time.Millisecond
	// patience is how long the agent waits for one nvmet step before it goes on with the others.
	patience = 2 * time.Second
	// closeFor is how long the agent waits at the end for I/O on exports served in user space.
	closeFor = 5 * time.Second
)

// Config is what an agent is told at start; everything else it learns from the volume manager, from
// the labels on the drives and from the kernel.
type Config struct {
	Node    block.NodeName
	Labels  map[string]string // failure domains
	Portals []block.Portal    // where the node offers its legs
	Manager pb.AgentsClient
	Next    func() // makes Manager switch to another one; nil: there is only one
	Version string
	Log     *slog.Logger // nil discards

	Root   string // holds sys, proc and dev; empty means "/"
	Newest string // file that keeps the newest order acted on; empty means one in <Root>/dev/weft

	// Support returns more of what support bundles hold of this machine, and nothing secret; nil:
	// nothing.
	Support func(context.Context) []support.File

	// Discovery is the TCP port at which the addresses of Portals answer discovery for the whole cluster;
	// 0: none does.
	Discovery uint16

	HealthEvery time.Duration // between two readings of a drive's health; 0 means package target's HealthEvery

	// HandsOver: the process can start its next one, and end Run with ErrHandOver. The manager is told.
	HandsOver bool

	// Goodbye is called when the agent is asked to stop: do the node's exports end with it? Then
	// hosts leave them first. Nil: they do not, or it is not told.
	Goodbye func(context.Context) bool

	Datapath  Datapath // empty means Kernel
	Files     []string // User: regular files used as drives; absolute paths
	FilesOnly bool     // User: leave the machine's block devices alone
	Rehearsal bool     // FilesOnly: nobody knows of what it serves, so it does not matter what the kernel exports

	// Listen opens a portal. Medium wraps a drive's data when it is opened; Calls and Label stand
	// between the drive's data or label and the kernel. User only; nil means the machine's own.
	Listen func(block.Portal) (net.Listener, error)
	// Dial connects to another target; nil means the machine's own.
	Dial   func(ctx context.Context, network, address string) (net.Conn, error)
	Medium func(path string, data block.Device) block.Device
	Calls  func(path string, kernel userspace.Calls) userspace.Calls
	Label  func(path string, m drive.Medium) drive.Medium
}

// Datapath says who serves the legs.
type Datapath string

// The data paths. Drives, labels and exports look the same in both.
const (
	Kernel Datapath = "kernel" // nvmet and device-mapper: exports outlive the agent
	User   Datapath = "user"   // the agent's process: exports end with it
)

// legDir is the directory of the legs' stable names; in user space only their paths name it.
func (c Config) legDir() string { return filepath.Join(c.Root, "dev/weft/leg") }

// Agent reconciles one node with the state that the volume manager wants.
type Agent struct {
	config Config
	log    *slog.Logger
	kernel kernel
	// leaving: the agent works in the data path of an earlier agent until nothing is exported
	// there.
	leaving atomic.Bool
	// lingers: an order is still carried out. The locks stay until the process has ended.
	lingers atomic.Bool
	drives  <-chan struct{} // closed when all drives are that Run had open; nil before its end
	// counting reads the figures of the present data path; nil until it serves.
	counting atomic.Pointer[counting]
	// newest is the newest order acted on; Run reads it.
	newest *authority.Note

	wake   chan struct{} // something may have changed
	rescan chan struct{} // a device may have come or gone
	parted chan struct{} // an agent that is stopping need not serve on

	mu      sync.Mutex
	wanted  *pb.TargetWanted // nil until the first word from the manager
	other   string           // the cluster of a manager that is not obeyed; empty if it is obeyed
	behind  string           // why the last manager is not obeyed: another has replaced it; empty if it is obeyed
	report  *pb.TargetReport // nil until the first observation
	changed chan struct{}    // closed when report is replaced
	zeroed  map[block.LegID]progress

	heard    bool // the stream to the manager is open, and has carried a wanted state
	stopping bool // reports say so
	allStop  bool // and that the kernel's exports end, too
	beside   bool // the process exports something beside the kernel

	// See handover.go.
	estate  Estate            // of the previous process, and then for the next one
	settled chan struct{}     // closed once the exports of the previous process are there again
	letIn   func()            // lets hosts in then; nil: there is nothing to do
	asked   userspace.Sockets // at which the previous process answered discovery
}

// kernel is everything that the agent touches; tests have their own.
type kernel struct {
	hardware hardware
	mapper   func() (mapper, error)
	names    naming
	exports  func() (exporter, error)
	counting *counting // nil: nothing is counted
	watch    func(ctx context.Context, changed func()) error
	close    func(context.Context) error // at the end
	// before returns the data path of an earlier agent, and whether exports are left in it. Nil in
	// the kernel's own data path.
	before   func() (k kernel, serves bool, err error)
	readOnly bool // supports read-only exports
	// integrity: it keeps legs with checksums.
	integrity bool
	thin      bool // serves mapped legs
	// process has the exports of this process, beside the kernel's: see process.go. Nil: there are none.
	process func() (exporter, error)
	// rows maps in the kernel what nobody writes of that which the process serves otherwise. Nil: nothing is.
	rows *userspace.Rows
	// paths says how many controllers a host may have of the exports that are made from now on.
	// Nil where that has no limit, in the kernel alone.
	paths func(map[block.NQN]int)
	// keep notes what outlives the exports, and losses what the drives have lost, for the next process;
	// adopt takes that over from the previous one, and settle lets hosts in. Nil in the kernel, where
	// the exports go on.
	keep   func(*Estate) error
	losses func() map[block.DriveID]uint32
	adopt  func(Estate) error
	settle func()
	// lists serves the lists of writes to the legs; nil, or a nil result: none are kept apart from the
	// exports.
	lists func() *lists
	// refusals tells of hosts that did not prove their identity. Nil where nobody counts them, in
	// the kernel.
	refusals func() *pb.Refusals
}

// exporter is the part of nvmet that the agent uses; *nvmet.Tree.
type exporter interface {
	Read(context.Context) (nvmet.Config, error)
	Apply(context.Context, []nvmet.Step, time.Duration) (int, []nvmet.Failure)
	Busy(block.NQN) bool
	Authenticates() (bool, error)
}

// New checks the configuration. It touches nothing.
func New(c Config) (*Agent, error) {
	if _, err := block.ParseNodeName(string(c.Node)); err != nil {
		return nil, fmt.Errorf("target agent: %w", err)
	}
	if c.Manager == nil {
		return nil, errors.New("target agent: Manager: missing")
	}
	ports := nvmet.Config{}
	for _, p := range c.Portals {
		ports.Ports = append(ports.Ports, nvmet.Port{Portal: p})
	}
	if err := ports.Check(); err != nil {
		return nil, fmt.Errorf("target agent: Portals: %w", err)
	}
	if i := slices.IndexFunc(c.Portals, func(p block.Portal) bool { return p.Transport == block.RDMA }); i >= 0 && c.Datapath == User {
		return nil, fmt.Errorf("target agent: Portals: %s: the user-space data path has no RDMA", c.Portals[i])
	}
	if c.Root == "" {
		c.Root = "/"
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	wake := make(chan struct{}, 1)
	k, err := c.kernel(func() { poke(wake) })
	if err != nil {
		return nil, fmt.Errorf("target agent: %w", err)
	}
	return &Agent{
		config: c, log: c.Log, kernel: k, newest: new(authority.Note),
		wake: wake, rescan: make(chan struct{}, 1), parted: make(chan struct{}, 1),
		changed: make(chan struct{}), zeroed: map[block.LegID]progress{}, settled: closed,
	}, nil
}

// closed is a channel that is closed.
var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// Run works until ctx ends, and a little longer if there is a goodbye to say. The kernel's exports
// stay as they are; those served by this process are withdrawn before Run returns. If ctx ends with
// ErrHandOver, the next process makes them again: see Estate.
func (a *Agent) Run(ctx context.Context) error {
	held, err := a.config.lock(ctx)
	if err != nil {
		return fmt.Errorf("target agent: %w", err)
	}
	defer func() {
		if !a.lingers.Load() {
			held.Release()
		}
	}()
	if err := a.newest.Load(a.config.newestFile(held != nil)); err != nil {
		return fmt.Errorf("target agent: %w", err)
	}
	base, err := a.base()
	if err != nil {
		return fmt.Errorf("target agent: %w", err)
	}
	ctx, end := a.untilGoodbye(ctx)
	defer end()
	if err := a.succeed(ctx, base); err != nil {
		return fmt.Errorf("target agent: %w", err)
	}
	return a.serve(ctx, base)
}

// errLeft ends the agent's work in the kernel's data path once nothing is exported there.
var errLeft = errors.New("nothing is exported there any more")

// succeed serves in the data path of an earlier agent for as long as that exports anything. It
// reconciles those exports as usual: the wanted ones stay, the others are removed. If both data
// paths served at once, there would be no fence.
func (a *Agent) succeed(ctx context.Context, base *pb.TargetReport) error {
	if a.kernel.before == nil {
		return nil
	}
	own := a.kernel
	defer func() { a.kernel = own; a.leaving.Store(false) }()
	for {
		old, serves, err := own.before()
		if err != nil || !serves {
			return err
		}
		a.log.Warn("the kernel still has exports of an earlier agent: it serves them until they are no longer wanted", "then", a.config.Datapath)
		a.kernel = old
		a.leaving.Store(true)
		if err := a.serve(ctx, base); !errors.Is(err, errLeft) {
			return err
		}
		a.mu.Lock()
		a.report, a.zeroed = nil, map[block.LegID]progress{}
		a.mu.Unlock()
	}
}

// serve runs the agent in one data path.
func (a *Agent) serve(ctx context.Context, base *pb.TargetReport) error {
	drives := newOpenDrives(a.kernel.hardware, a.log)
	defer func() { a.drives = drives.closeAll(endsWithin(ctx)) }()
	found := discovery.New(a.config.discovery(a.takeDiscovery(), a.log))
	defer func() { a.close(ctx, drives, found) }()
	g, ctx := errgroup.WithContext(ctx)
	health := newMonitor(a.kernel.hardware, a.config.HealthEvery)
	a.counting.Store(a.kernel.counting)
	g.Go(func() error { return a.reconcile(ctx, base, drives, health, found) })
	g.Go(func() error { return health.run(ctx, drives) })
	g.Go(func() error { return a.inventory(ctx, drives) })
	g.Go(func() error { return a.converse(ctx) })
	g.Go(func() error { a.sendFigures(ctx); return nil })
	g.Go(func() error { a.answerSupport(ctx, drives); return nil })
	g.Go(func() error { return a.watch(ctx) })
	return g.Wait()
}

// endsWithin is how long the end of exports, or of drives, is awaited. serving is the context that has ended.
func endsWithin(serving context.Context) time.Duration {
	if handsOver(serving) {
		return handOverFor
	}
	return closeFor
}

// close ends the exports and discovery. serving is the context that has ended.
func (a *Agent) close(serving context.Context, drives *openDrives, found *discovery.Controller) {
	if handsOver(serving) {
		a.leave(drives, found)
	}
	found.Close()
	ctx, cancel := context.WithTimeout(context.Background(), endsWithin(serving))
	defer cancel()
	if err := a.kernel.close(ctx); err != nil {
		a.log.Error("exports not closed; their drives stay locked until this process ends", "err", err)
	}
}

// Lingers reports whether Run has left an order that is still carried out. The locks of the node then
// stay until the process has ended.
func (a *Agent) Lingers() bool { return a.lingers.Load() }

// AwaitDrives waits, after Run, until its drives have ended their last flushes, or limit has passed. A process
// that ends before does not note that one has failed, for the next one, which cannot open the drive before.
func (a *Agent) AwaitDrives(limit time.Duration) {
	if a.drives != nil {
		within(a.drives, limit)
	}
}

// base returns the part of the report that does not change.
func (a *Agent) base() (*pb.TargetReport, error) {
	r := &pb.TargetReport{
		Node: string(a.config.Node), Labels: maps.Clone(a.config.Labels), Version: a.config.Version, Level: uint32(block.KnownLevel),
		Scale: parts.Understood(), HandsOver: a.config.HandsOver,
	}
	for field, file := range map[*string]string{&r.BootId: "random/boot_id", &r.Kernel: "osrelease"} {
		text, err := os.ReadFile(filepath.Join(a.config.Root, "proc/sys/kernel", file))
		if err != nil {
			return nil, err
		}
		*field = strings.TrimSpace(string(text))
	}
	r.Portals = pbPortals(a.config.Portals)
	return r, nil
}

func portalMessage(p block.Portal) *pb.Portal {
	m := &pb.Portal{Transport: pb.Transport_TRANSPORT_TCP, Address: p.Address, Port: uint32(p.Port), Rail: p.Rail}
	if p.Transport == block.RDMA {
		m.Transport = pb.Transport_TRANSPORT_RDMA
	}
	return m
}

// poke signals a channel of capacity one, unless a signal is already pending.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// inventory scans the devices when the kernel reports a change, and now and then in case an event
// was missed.
func (a *Agent) inventory(ctx context.Context, drives *openDrives) error {
	timer := beat.NewTicker(scanEvery)
	defer timer.Stop()
	a.takeDrives(ctx, drives)
	a.awaitExports(ctx) // hosts wait for them, and a scan takes processors
	for {
		a.scan(ctx, drives)
		poke(a.wake)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		case <-a.rescan:
			// Events come in bursts.
			if !sleep(ctx, settle) {
				return context.Cause(ctx)
			}
			drain(a.rescan)
		}
	}
}

func (a *Agent) scan(ctx context.Context, drives *openDrives) {
	ctx, cancel := context.WithTimeout(ctx, scanFor)
	defer cancel()
	if err := drives.refresh(ctx); err != nil && ctx.Err() == nil {
		a.log.Warn("inventory incomplete", "err", err)
	}
}

func drain(c chan struct{}) {
	select {
	case <-c:
	default:
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// watch subscribes to the kernel's device events. Without them the inventory is slower, but no less
// correct.
func (a *Agent) watch(ctx context.Context) error {
	err := a.kernel.watch(ctx, func() { poke(a.rescan) })
	if ctx.Err() == nil {
		a.log.Warn("no device events from the kernel; scanning instead", "every", scanEvery, "err", err)
		<-ctx.Done()
	}
	return context.Cause(ctx)
}

// reconcile runs the loop that makes all decisions.
func (a *Agent) reconcile(ctx context.Context, base *pb.TargetReport, drives *openDrives, health *monitor, found *discovery.Controller) error {
	r := newReconciler(a, base, drives, health)
	defer r.closeLists()
	r.discovery = found
	timer := beat.NewTicker(lookEvery)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			if handsOver(ctx) {
				a.lingers.Store(!r.jobs.rest(a.wake, handOverFor))
			}
			return context.Cause(ctx)
		case <-timer.C:
		case <-a.wake:
		}
		for range 10 { // a round that changed something is followed by another
			if ctx.Err() != nil || !r.round(ctx) {
				break
			}
		}
		if r.left {
			return errLeft
		}
	}
}

// progress is up to where a leg is zeroed or copied, and how much was written to it for a copy.
type progress struct{ upTo, copied block.Size }

func (a *Agent) setProgress(id block.LegID, done progress) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.zeroed[id] = done
}

// publish replaces the report if it differs, and wakes those who wait for a new one. A published
// report is never changed.
func (a *Agent) publish(r *pb.TargetReport) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.publishLocked(r)
}

func (a *Agent) publishLocked(r *pb.TargetReport) {
	a.sayStoppingLocked(r)
	a.report = r
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *Agent) currentWanted() *pb.TargetWanted {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wanted
}

func (c Config) kernel(hungry func()) (kernel, error) {
	switch {
	case c.Datapath == User:
		return userKernel(c, hungry)
	case c.Datapath != "" && c.Datapath != Kernel:
		return kernel{}, fmt.Errorf("datapath %q: must be %q or %q", c.Datapath, Kernel, User)
	case len(c.Files) > 0 || c.FilesOnly:
		return kernel{}, fmt.Errorf("files: only the data path %q takes files for drives", User)
	}
	return kernelAndProcess(c, hungry)
}

// realKernel opens its parts on first use, and retries as long as one is missing: a module may be
// loaded later.
func realKernel(c Config) kernel {
	return kernel{
		hardware: newNodeDevices(c.Root),
		mapper: func() (mapper, error) {
			m, err := dm.Open()
			if errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("%w: load the module dm-mod", err)
			}
			return m, err
		},
		exports: func() (exporter, error) {
			t, err := nvmet.Open(filepath.Join(c.Root, "sys/kernel/config/nvmet"))
			if errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("%w: mount configfs and load the modules nvmet and nvmet-tcp", err)
			}
			return t, err
		},
		names:    names{c.legDir()},
		counting: kernelCounting(c.Root, names{c.legDir()}),
		watch:    watchDevices,
		close:    func(context.Context) error { return nil },
		lists:    func() *lists { return openLists(c) },
	}
}

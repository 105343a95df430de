// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/initiator/fsfreeze"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/support"
)

// Datapath says how volumes are built.
type Datapath string

// The data paths. Volumes and their legs are the same on both.
const (
	Kernel Datapath = "kernel" // NVMe host and device-mapper: volumes outlive the agent
	User   Datapath = "user"   // this process: volumes end with it; package userspace
)

// leastPatience is the shortest patience with a target: no path could move before.
const leastPatience = 300 * time.Millisecond

// railLabel is the label of a node with the network rail that it prefers.
const railLabel = "rail"

// Config configures an agent. Node, Manager and Version are required, and so is BootID except
// on the data path User; everything else has a default.
type Config struct {
	Node    block.NodeName
	Labels  map[string]string // failure domains of this machine, and the rail that it prefers
	Version string
	Kernel  string // uname -r, for people
	BootID  string // /proc/sys/kernel/random/boot_id

	// Near are networks of targets that this machine prefers where its rail decides nothing.
	Near []netip.Prefix
	// Networks lists the networks near to a GPU, by its number or PCI address, for attachments that name one; nil: it
	// finds none. It is called again and again, from several goroutines.
	Networks func(gpu string) ([]netip.Prefix, error)

	Manager pb.AgentsClient
	Next    func() // makes Manager use another manager, if there are several; nil: it cannot

	StateDir string // keeps the host id, the cluster's id, and which legs are in sync; /var/lib/weft/initiator
	RunDir   string // logs of degraded columns; on a tmpfs; /run/weft/initiator
	DevDir   string // holds device nodes, and weft/<volume>; /dev
	SysDir   string // /sys

	Window         time.Duration // how long a leg may be silent before it is lost; 2 s
	Lease          time.Duration // how long a lost leg may stay unrecorded before reads stop too; 8 s
	TargetPatience time.Duration // how long a target may answer nothing, and accept no connection, before its legs are lost; see package userspace
	FailOver       time.Duration // how long a path may be silent before it moves to another portal; see package userspace
	Probe          time.Duration // interval of probe reads; 500 ms
	IOTimeout      time.Duration // io_timeout of paths; 5 s
	IOQueues       int           // per connection; min(4, CPUs)

	// Clock is the lease clock; nil means time.Now plus the time that the machine was
	// suspended.
	Clock func() time.Time

	Datapath    Datapath      // empty means Kernel
	BlockDevice blockdev.Kind // User: the kind of block device; empty means the best available
	// ResumeWithin is how long the I/O of a process that ended waits for the next one. User; 0: it
	// fails at once. Holder is the command that keeps devices meanwhile, see [blockdev.Hold].
	ResumeWithin time.Duration
	Holder       []string
	Export       userspace.Export // User: makes devices instead of package blockdev; nil means blockdev does
	Dial         userspace.Dial   // User: connects to targets. Kernel: asks them for lists of writes. Nil means by the machine's network

	// Support returns more of what support bundles hold of this machine, and nothing secret; nil:
	// nothing.
	Support func(context.Context) []support.File

	Freezes fsfreeze.Kernel // how file systems are frozen; nil means by this machine's kernel

	Log *slog.Logger // nil discards
}

func (c Config) withDefaults() Config {
	c.StateDir = cmp.Or(c.StateDir, "/var/lib/weft/initiator")
	c.RunDir = cmp.Or(c.RunDir, "/run/weft/initiator")
	c.DevDir = cmp.Or(c.DevDir, "/dev")
	c.SysDir = cmp.Or(c.SysDir, "/sys")
	c.Window = cmp.Or(c.Window, 2*time.Second)
	c.Lease = cmp.Or(c.Lease, 8*time.Second)
	c.Probe = cmp.Or(c.Probe, 500*time.Millisecond)
	c.IOTimeout = cmp.Or(c.IOTimeout, 5*time.Second)
	c.IOQueues = cmp.Or(c.IOQueues, min(4, runtime.NumCPU()))
	if c.Clock == nil {
		c.Clock = leaseClock
	}
	if c.Freezes == nil {
		c.Freezes = fsfreeze.Linux()
	}
	c.Datapath = cmp.Or(c.Datapath, Kernel)
	if c.Datapath == User {
		c.BootID = bootOfProcess()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) check() error {
	if _, err := block.ParseNodeName(string(c.Node)); err != nil {
		return err
	}
	switch {
	case c.Manager == nil:
		return errors.New("manager: missing")
	case c.BootID == "":
		return errors.New("boot id: missing")
	case c.Datapath != Kernel && c.Datapath != User:
		return fmt.Errorf("data path %q: must be %s or %s", c.Datapath, Kernel, User)
	case c.Lease < c.Window:
		return fmt.Errorf("lease %v: shorter than the window of %v", c.Lease, c.Window)
	case c.TargetPatience != 0 && (c.TargetPatience < leastPatience || c.TargetPatience > c.Window):
		return fmt.Errorf("target patience %v: must be %v to %v", c.TargetPatience, leastPatience, c.Window)
	}
	return nil
}

// Agent keeps the attachments of one machine. It is also a prometheus.Collector.
type Agent struct {
	cfg  Config
	log  *slog.Logger
	path dataPath // nil: Run opens it
	// healer is the id of this process, for volumes that it heals. healing has the volumes that it
	// heals beside a path that makes a device for each volume; nil: path heals, or nothing does.
	healer  string
	healing *userspace.Path
	// evidence is nil until Run has opened it.
	evidence *evidence.Book
	names    *keeper.Names
	freezer  *fsfreeze.Freezer
	// newest is the newest order acted on; Run loads it.
	newest *authority.Note
	wanted chan *pb.InitiatorWanted
	news   chan struct{}
	linked atomic.Bool // the manager has answered on the present stream
	near   *nearby

	mu       sync.Mutex
	identity block.Host
	cluster  allegiance
	keepers  map[block.VolumeID]volumeKeeper
	latest   uint64                         // generation of the last wanted state
	listed   map[block.VolumeID]block.Epoch // volumes in that state
	since    map[string]time.Time           // when each problem was first reported, by its text
	counts   counts
}

// open opens the data path.
func (a *Agent) open() (dataPath, error) {
	if a.cfg.Datapath == User {
		return openUserPath(a)
	}
	path, err := openKernelPath(a)
	if err == nil {
		a.healing = userspace.New(a.userspace())
	}
	return path, err
}

// New checks cfg and makes an agent; it touches nothing else. Run does the work.
func New(cfg Config) (*Agent, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("initiator config: %w", err)
	}
	newest := new(authority.Note)
	cfg.Manager = checkedAgents{cfg.Manager, newest, &numbers{}}
	return &Agent{
		cfg: cfg, log: cfg.Log, newest: newest,
		healer: bootOfProcess(), wanted: make(chan *pb.InitiatorWanted), news: make(chan struct{}, 1), near: newNearby(cfg.Networks),
		evidence: evidence.New(filepath.Join(cfg.StateDir, "evidence"), cfg.Log),
		names:    keeper.NewNames(filepath.Join(cfg.StateDir, "names")),
		freezer:  fsfreeze.New(cfg.Freezes, cfg.RunDir, []string{cfg.StateDir}, cfg.Log),
		keepers:  map[block.VolumeID]volumeKeeper{}, since: map[string]time.Time{},
	}, nil
}

func (a *Agent) host() block.Host {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.identity
}

// problemLocked reports something that makes no progress, and since when it has been reported.
func (a *Agent) problemLocked(object, doing, cause string) *pb.Problem {
	key := object + doing + cause
	if len(a.since) > 1000 { // old texts
		clear(a.since)
	}
	if a.since[key].IsZero() {
		a.since[key] = time.Now()
	}
	return &pb.Problem{Object: object, Doing: doing, Cause: cause, Since: timestamppb.New(a.since[key])}
}

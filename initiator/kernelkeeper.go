// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/pace"
)

// How long calls into the kernel may take before they are left behind.
const (
	callTimeout    = 5 * time.Second
	connectTimeout = 15 * time.Second
	partWithin     = 2 * time.Second  // a target that answers ends a connection within 0.3 s
	movingFor      = 6 * time.Second  // the kernel connects, and finds the namespaces, in the middle of a move
	noticeTimeout  = 10 * time.Second // within it, keep-alives or the time limit of I/O end a silent connection
)

// capabilities are those of device-mapper and the kernel's NVMe host.
var capabilities = volume.Capabilities{Tables: true, Outlives: true, KnowsUsers: true, Multipath: true, Moves: true}

// kernelKeeper keeps one volume on the kernel's data path: it observes (observe.go) and carries
// out (apply.go) what package initiator/volume decides. Calls that may hang in the kernel go
// through await.
type kernelKeeper struct {
	*keeper.Keeper
	volume block.VolumeID
	agent  *Agent
	path   *kernelPath
	kernel *kernel
	log    *slog.Logger

	// Owned by the keeper's goroutine.
	memory   *memory
	links    []volume.Link // the last wanted ones, which tell what to look at
	columns  int
	pulses   map[block.LegID]*keeper.Pulse
	reached  map[volume.Path]*reach
	portals  *keeper.Portals
	fast     map[string]bool        // controllers whose I/O fails once the kernel has noticed that the connection is gone
	silent   map[string]bool        // controllers whose outage is counted
	moving   map[block.NQN]pathMove // subsystems whose path moves: see settle
	promises map[string]*promise    // by controller
	watched  map[string]bool
	changes  map[int]*change // by column: those that have not returned
	seen     *seen           // the last look
	top      dm.State
	suspends bool // the device is being suspended in the kernel
	lists    listing
	draining sync.WaitGroup // suspends for checkpoints that have not returned, and repairs that have the volume to themselves
	drains   atomic.Bool    // the device is suspended for one, and for nothing else
	scrub    *keeper.Scrub  // the last one; nil: none
	repair   *repair        // what is to have the volume to itself; nil: nothing
	repairs  time.Time      // since when a repair has the volume to itself, as far as was seen; zero: none has

	discardsOff  bool      // no discard of users can begin
	noDiscards   bool      // and none is under way
	discardsOn   int       // grows while some may begin
	discardsNext time.Time // they are not changed before

	compares atomic.Pointer[toCompare] // never nil

	// Of the copies ahead, all together.
	began  time.Time // the zero of their clock
	pace   pace.Background
	rate   pace.Limiter
	aheads sync.WaitGroup

	counted atomic.Pointer[counted] // nil: no device
}

// reach is the state of connecting a path.
type reach struct {
	keeper.Attempts
	connecting bool
}

func newKernelKeeper(a *Agent, path *kernelPath, v block.VolumeID) *kernelKeeper {
	k := &kernelKeeper{
		volume: v, agent: a, path: path, kernel: path.kernel,
		pulses: map[block.LegID]*keeper.Pulse{}, reached: map[volume.Path]*reach{}, fast: map[string]bool{}, silent: map[string]bool{}, moving: map[block.NQN]pathMove{}, promises: map[string]*promise{}, watched: map[string]bool{},
		changes: map[int]*change{}, lists: newListing(a.cfg.Dial, a.cfg.Log),
	}
	k.compares.Store(nothingToCompare)
	k.began, k.pace.Counts = time.Now(), k.users
	can := capabilities
	can.Rail, can.Near = a.cfg.Labels[railLabel], a.cfg.Near
	k.Keeper = keeper.New(keeper.Config{
		Node: a.cfg.Node, Manager: a.cfg.Manager, Linked: a.linked.Load, Capabilities: can,
		Limits: volume.Limits{
			Window: a.cfg.Window, Lease: a.cfg.Lease, Mute: a.patience(),
			FailOver: cmp.Or(a.cfg.FailOver, userspace.FailOver), Moving: movingFor,
			Connect: volume.ConnectPatience, Retry: volume.RetryLast,
		},
		Evidence: a.evidence, Names: a.names, Freezer: a.freezer, Meter: meter{a}, Changed: a.changed, Log: a.cfg.Log,
	}, v, k)
	k.log, k.portals = k.Log, keeper.NewPortals(keeper.Reach(a.cfg.Dial), k.Tell)
	k.remember()
	return k
}

// Run keeps the volume until ctx ends. The connections beside targets end with it.
func (k *kernelKeeper) Run(ctx context.Context) {
	defer k.lists.pool.Close()
	k.Keeper.Run(ctx)
	k.endDrain()
	k.endAhead()
}

// remember reads the notes of an earlier agent.
func (k *kernelKeeper) remember() {
	mem, _, err := k.kernel.notes(k.volume)
	if err != nil {
		k.log.Warn("notes are unusable; resyncs will copy everything", "err", err)
	}
	k.memory = newMemory(mem.Memory, time.Now())
	maps.Copy(k.memory.Slots, mem.Slots)
	maps.Copy(k.memory.Behind, mem.Behind)
	k.links = mem.links()
	for _, l := range k.links { // their logs may be the only remains
		k.columns = max(k.columns, l.Column+1)
	}
}

// links are the legs in the tables at their last change: they are looked at until the manager
// has said what it wants.
func (m *memory) links() (all []volume.Link) {
	for _, slots := range []map[string]slot{m.Slots, m.Behind} { // one of the latter may have joined just before the agent ended
		for key, s := range slots {
			l := volume.Link{Leg: s.Leg, NQN: s.NQN, NSID: s.NSID, UUID: s.UUID}
			if _, err := fmt.Sscanf(key, slotFormat, &l.Column, &l.Copy); err == nil && !l.UUID.IsZero() {
				all = append(all, l)
			}
		}
	}
	return all
}

// Observe implements keeper.Path.
func (k *kernelKeeper) Observe(ctx context.Context, w *volume.Wanted) (*volume.Seen, error) {
	if w != nil {
		k.links, k.columns = w.Links, w.Layout.Stripes
	}
	s, err := k.observe(ctx)
	if err != nil {
		return nil, err
	}
	k.adopt(w, s)
	k.keepAhead(w, s)
	k.describe(w, s)
	s.Whole, s.Scrub = k.wholeBecause(), k.scrub.Seen()
	k.publish(ctx, w, s)
	k.publishCounted(w, s)
	k.publishComparable(w, s)
	k.letRepair(ctx, s)
	k.keepDiscards(ctx, w, s)
	k.seen = s
	return &s.Seen, nil
}

// Memory implements keeper.Path.
func (k *kernelKeeper) Memory() *volume.Memory { return &k.memory.Memory }

// Kept is the wanted state as far as the tables and the notes tell it.
func (k *kernelKeeper) Kept() *volume.Wanted {
	return &volume.Wanted{
		Layout: block.Layout{Stripes: len(k.seen.columns), Copies: block.MaxCopies}, Links: k.links, ReadOnly: k.seen.ReadOnly,
	}
}

// Device implements keeper.Path.
func (k *kernelKeeper) Device() (path, number string, size block.Size) {
	if !k.seen.Device.Named {
		return "", "", 0
	}
	path, _ = k.kernel.nameOf(k.top.Number)
	return path, k.top.Number.String(), k.seen.Device.Size
}

// adopt decides which grant the stack belongs to. It takes the notes' epoch, or else the epoch
// of the legs under the stack; if there is no stack, it takes the wanted epoch.
func (k *kernelKeeper) adopt(w *volume.Wanted, s *seen) {
	stack := s.Device.Exists || slices.ContainsFunc(s.columns, func(c columnSeen) bool { return len(c.devices) > 0 })
	if stack && k.memory.Epoch == 0 {
		for n := range s.controllers {
			if _, e, _, _, err := block.ParseSubsystemNQN(n); err == nil && e >= k.memory.Epoch {
				k.memory.Epoch, k.memory.Grant = e, n.Grant()
			}
		}
	}
	if !stack && w != nil && !k.memory.Of(w) {
		var over *volume.Over
		if noted, ok, err := k.kernel.notes(k.volume); err == nil && ok && noted.Of(w) {
			over = noted.Over
		}
		k.memory = newMemory(volume.Granted(w, over), s.Now)
		k.Forget()
	}
}

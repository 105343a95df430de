// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

const (
	callTimeout    = 5 * time.Second
	connectTimeout = 4 * time.Second
	exportTimeout  = 30 * time.Second
	stuckIO        = 10 * time.Second

	// refusedFor is for how long all portals of a target refuse connections before its legs are
	// lost. A process that is started again at once is back sooner; one that is not costs a
	// rebuild of what was written meanwhile, and its writers would have waited for it.
	refusedFor = 300 * time.Millisecond

	keepAliveEvery = 250 * time.Millisecond
	askEvery       = 100 * time.Millisecond // while I/O waits
	watchEvery     = 50 * time.Millisecond  // a path that does not answer is looked at
)

// capabilities are those of the engine and of this process's connections.
var capabilities = volume.Capabilities{KnowsFlushed: true, Withholds: true, Paces: true, Moves: true, Hears: true, Transports: []block.Transport{block.TCP}}

// Keeper keeps one volume: it observes (observe.go) and carries out (apply.go) what package
// initiator/volume decides. Calls that may wait for somebody else go through await.
type Keeper struct {
	*keeper.Keeper
	volume block.VolumeID
	path   *Path
	cfg    Config
	log    *slog.Logger

	// Owned by the keeper's goroutine.
	memory  *memory
	stack   *stack // nil: no volume
	conns   map[volume.Path]*reach
	devices map[block.LegID]device
	pulses  map[block.LegID]*keeper.Pulse
	tries   map[volume.Path]keeper.Attempts
	portals *keeper.Portals
	again   *time.Timer // see watch
	lists   *lists.Pool

	counted atomic.Pointer[counted] // nil: no volume
}

func newKeeper(p *Path, v block.VolumeID) *Keeper {
	k := &Keeper{
		volume: v, path: p, cfg: p.cfg,
		memory: newMemory(volume.Memory{}, time.Time{}),
		conns:  map[volume.Path]*reach{}, devices: map[block.LegID]device{}, pulses: map[block.LegID]*keeper.Pulse{},
		tries: map[volume.Path]keeper.Attempts{},
		lists: &lists.Pool{Dial: p.cfg.Dial, Log: p.cfg.Log},
	}
	k.Keeper = keeper.New(keeper.Config{
		Node: p.cfg.Node, Manager: p.cfg.Manager, Linked: p.cfg.Linked, Capabilities: p.capabilities(), Limits: p.limits(),
		Evidence: p.cfg.Evidence, Names: p.cfg.Names, Freezer: p.cfg.Freezer, Meter: p.cfg.Meter, Changed: p.cfg.Changed, Log: p.cfg.Log,
	}, v, k)
	k.log, k.portals = k.Log, keeper.NewPortals(p.reachable, k.Tell)
	return k
}

func (p *Path) capabilities() volume.Capabilities {
	c := capabilities
	c.Rail, c.Near = p.cfg.Rail, p.cfg.Near
	return c
}

func (p *Path) limits() volume.Limits {
	return volume.Limits{
		Window: p.cfg.Window, Lease: p.cfg.Lease, Mute: p.cfg.TargetPatience, Refused: refusedFor, FailOver: p.cfg.FailOver, Quiesce: volume.Quiesce,
		Stuck: stuckIO, Moving: changingFor, Connect: volume.ConnectPatience, Retry: volume.RetryLast,
	}
}

// changingFor is how long a leg may be silent while it changes hands.
const changingFor = 6 * time.Second

// Left reports whether nothing is left that could still be detached cleanly.
func (k *Keeper) Left() bool {
	return k.stack == nil && len(k.conns) == 0 || k.stack != nil && k.stack.open
}

// GiveUp removes whatever is left; those who wait for it get errors. A device that survives this process
// is left to the next one.
func (k *Keeper) GiveUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	left := k.leaveDevice() // before anything is cut: that would be answered with errors
	for _, path := range slices.SortedFunc(maps.Keys(k.conns), volume.Path.Compare) {
		k.cut(path)
	}
	k.lists.Close()
	if k.stack == nil {
		return
	}
	k.log.Warn("volume given up; its copies will be made equal", "open", k.stack.open, "left_to_the_next_process", left)
	if err := k.stack.abort(ctx, k.stack.device); err != nil {
		k.log.Warn("device not removed", "err", err)
	}
}

// leaveDevice leaves the device, if there is one, to the next process; it reports whether that can take
// it over.
func (k *Keeper) leaveDevice() bool {
	if k.stack == nil || k.memory.Over != nil { // an epoch that was given up has failed its device
		return false
	}
	device, ok := k.stack.device.(survivor)
	if !ok || !device.Survives() {
		return false
	}
	device.Leave()
	k.stack.device = nil
	return true
}

// Observe implements keeper.Path.
func (k *Keeper) Observe(_ context.Context, w *volume.Wanted) (*volume.Seen, error) {
	if w != nil && k.stack == nil && !k.memory.Of(w) {
		k.memory = newMemory(volume.Granted(w, k.path.over(k.volume, w.Epoch)), time.Now())
		k.Forget()
	}
	k.publishCounted()
	k.lists.Keep(func(n block.NQN) bool { _, r := k.connectionTo(n); return r != nil })
	s := k.observe(w)
	k.extendLease(w, s)
	return s, nil
}

// Memory implements keeper.Path.
func (k *Keeper) Memory() *volume.Memory { return &k.memory.Memory }

// Kept implements keeper.Path.
func (k *Keeper) Kept() *volume.Wanted {
	if k.stack == nil {
		return nil
	}
	return k.stack.wanted
}

// Device implements keeper.Path.
func (k *Keeper) Device() (path, number string, size block.Size) {
	if k.stack == nil || k.stack.device == nil {
		return "", "", 0
	}
	d := k.stack.device
	return d.Path(), d.Number(), k.stack.size
}

// extendLease allows reads of the volume for as long as the answers of its legs permit.
func (k *Keeper) extendLease(w *volume.Wanted, s *volume.Seen) {
	if k.stack == nil {
		return
	}
	if w != nil && k.memory.Of(w) {
		k.stack.wanted = w
	}
	k.stack.lease.extend(s.Clock.Add(volume.LeaseLeft(k.stack.wanted, &k.memory.Memory, s, k.path.limits(), capabilities)))
}

// await runs f on its own goroutine, until its limit at most.
func (k *Keeper) await(ctx context.Context, what string, limit time.Duration, f func(context.Context) error, finish func(error) error) error {
	return k.Await(ctx, keeper.Call{What: what, Limit: limit}, f, finish)
}

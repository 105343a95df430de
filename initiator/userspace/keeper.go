// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

const (
	callTimeout     = 5 * time.Second
	connectTimeout  = 4 * time.Second
	exportTimeout   = 30 * time.Second
	lookInterval    = 200 * time.Millisecond
	recordTimeout   = 2 * time.Second
	retryInterval   = 500 * time.Millisecond
	connectPatience = 10 * time.Second
	stuckIO         = 10 * time.Second

	// patience is how long a keeper waits for a call while the volume serves: all
	// that it does in one turn must end well before the manager's lease does.
	patience = 250 * time.Millisecond

	// leavePatience is how long a process that is told to end tries to let a volume
	// go clean.
	leavePatience = 4 * time.Second
)

// Keeper keeps one volume: one goroutine that looks, plans and does. Calls that
// can wait for somebody have goroutines of their own and answer through events.
type Keeper struct {
	volume block.VolumeID
	path   *Path
	cfg    Config
	log    *slog.Logger
	limits limits

	wake   chan struct{}
	events chan func() // run by the keeper's goroutine
	done   chan struct{}

	// Owned by the keeper's goroutine.
	memory   *memory
	stack    *stack // nil: no volume
	conns    map[block.NQN]*reach
	devices  map[block.LegID]device
	pulses   map[block.LegID]*attachment.Pulse
	tries    map[block.NQN]try
	busy     map[string]bool // calls left behind
	leaving  bool            // the process ends
	said     string
	retry    time.Time // no record before
	recorded string    // what the manager last answered to a record
	losses   map[block.LegID]*loss

	mu         sync.Mutex
	known      bool // something has been heard from the manager
	wanted     *attachment.Wanted
	wantedErr  string
	generation uint64
	state      attachment.State
	idle       bool
}

func newKeeper(p *Path, v block.VolumeID) *Keeper {
	return &Keeper{
		volume: v, path: p, cfg: p.cfg, log: p.cfg.Log.With("volume", v.String()),
		limits: limits{window: p.cfg.Window, lease: p.cfg.Lease, stuck: stuckIO, connect: connectPatience},
		wake:   make(chan struct{}, 1), events: make(chan func(), 16), done: make(chan struct{}),
		memory: newMemory(0, time.Time{}),
		conns:  map[block.NQN]*reach{}, devices: map[block.LegID]device{}, pulses: map[block.LegID]*attachment.Pulse{},
		tries: map[block.NQN]try{}, busy: map[string]bool{}, losses: map[block.LegID]*loss{},
	}
}

// Want tells the keeper what is wanted: nil if the volume is not. With a problem,
// what is wanted can not be acted on, and what is stays.
func (k *Keeper) Want(w *attachment.Wanted, problem string, generation uint64) {
	k.mu.Lock()
	k.known, k.wanted, k.wantedErr, k.generation = true, w, problem, generation
	k.mu.Unlock()
	k.Poke()
}

// Poke has the keeper look soon.
func (k *Keeper) Poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// State is how the volume was when the keeper last looked.
func (k *Keeper) State() attachment.State {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.state
	s.Idle = k.idle && k.wanted == nil && k.known
	return s
}

// tell hands the outcome of a call that was apart to the keeper.
func (k *Keeper) tell(event func()) {
	select {
	case k.events <- event:
	case <-k.done:
	}
}

// Run keeps the volume until ctx ends. Then it lets the volume go: clean if
// nobody has the device open and the legs answer, with errors for its users if not.
func (k *Keeper) Run(ctx context.Context) {
	// What the keeper began is ended by it, not by the end of ctx.
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer close(k.done)
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	ends, deadline := ctx.Done(), (<-chan time.Time)(nil)
	for quick := 0; ; {
		if k.turn(inner) && quick < 16 {
			quick++
			continue
		}
		quick = 0
		if k.leaving && k.left() {
			break
		}
		select {
		case <-ends:
			ends, k.leaving, deadline = nil, true, time.After(leavePatience)
		case <-deadline:
			k.giveUp(inner)
			return
		case <-k.wake:
		case <-ticker.C:
		case event := <-k.events:
			event()
		}
	}
	k.giveUp(inner)
}

// left reports whether nothing more can be let go clean.
func (k *Keeper) left() bool {
	return k.stack == nil && len(k.conns) == 0 || k.stack != nil && k.stack.open
}

// giveUp ends whatever there still is, with errors for those who wait for it.
func (k *Keeper) giveUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for _, n := range slices.Sorted(maps.Keys(k.conns)) {
		k.cut(n)
	}
	if k.stack == nil {
		return
	}
	k.log.Warn("volume given up; its copies will be made equal", "open", k.stack.open)
	if err := k.stack.abort(ctx, k.stack.device); err != nil {
		k.log.Warn("take the device away", "err", err)
	}
}

// turn looks, plans and does; it reports whether looking again at once is worth while.
func (k *Keeper) turn(ctx context.Context) (again bool) {
	for len(k.events) > 0 {
		(<-k.events)()
	}
	k.mu.Lock()
	w, known, generation, problem := k.wanted, k.known, k.generation, k.wantedErr
	k.mu.Unlock()
	if k.leaving && w != nil {
		w = w.Leaving()
	}
	if w != nil && k.stack == nil && k.memory.epoch != w.Epoch {
		k.memory = newMemory(w.Epoch, time.Now())
		clear(k.losses)
	}
	s := k.look(w)
	if !known || problem != "" {
		k.hold(ctx, s, problem, generation)
		return false
	}
	orders, v := plan(w, k.memory, s, k.limits)
	did, failed := k.doAll(ctx, w, s, orders)
	v.notes = append(v.notes, failed...)
	if v.phase != pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING && len(v.waiting) == 0 {
		v.waiting = append(v.waiting, failed...)
	}
	k.publish(w, s, v, generation)
	return did
}

// hold keeps the lease while nothing may be changed.
func (k *Keeper) hold(ctx context.Context, s *seen, problem string, generation uint64) {
	v := verdict{phase: pb.AttachmentPhase_ATTACHMENT_PHASE_CONNECTING}
	if k.stack != nil {
		orders, waiting := guard(k.stack.wanted, k.memory, s, k.limits)
		_, failed := k.doAll(ctx, k.stack.wanted, s, orders)
		v.waiting, v.notes = waiting, failed
		if s.device.exists {
			v.phase = pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
		}
		if s.volume.suspended {
			v.phase = pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED
		}
	}
	if problem != "" {
		v.waiting = append(v.waiting, problem)
	}
	k.publish(nil, s, v, generation)
}

// ---- what others see ----

func (k *Keeper) publish(w *attachment.Wanted, s *seen, v verdict, generation uint64) {
	r := &pb.AttachmentReport{
		VolumeId: k.volume.String(), Epoch: uint64(k.memory.epoch), Phase: v.phase,
		WaitingFor: strings.Join(v.waiting, "; "), ResyncDoneBytes: uint64(v.done), ResyncTotalBytes: uint64(v.total),
	}
	if k.stack != nil && k.stack.device != nil {
		r.Device = k.stack.device.Path()
	}
	if w != nil {
		for i := range w.Links {
			r.Legs = append(r.Legs, k.linkReport(s, &w.Links[i]))
		}
	}
	if said := fmt.Sprint(v.phase, v.waiting); said != k.said {
		k.said = said
		k.log.Info("attachment", "phase", strings.ToLower(strings.TrimPrefix(v.phase.String(), "ATTACHMENT_PHASE_")), "waiting_for", r.WaitingFor)
	}
	now := attachment.State{
		Acted: generation, Notes: append(v.notes, slices.Sorted(maps.Keys(k.busy))...),
		Left: k.leaving && v.phase == pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN,
	}
	idle := w == nil && k.stack == nil && len(k.conns) == 0 && k.memory.epoch == 0 && len(k.busy) == 0
	if !idle && r.Epoch != 0 {
		now.Report = r
	}
	k.mu.Lock()
	was := k.state
	k.state, k.idle = now, idle
	k.mu.Unlock()
	if was.Report.GetPhase() != r.Phase || was.Report.GetWaitingFor() != r.WaitingFor || was.Report.GetDevice() != r.Device || was.Acted != generation {
		k.cfg.Changed()
	}
}

func (k *Keeper) linkReport(s *seen, l *attachment.Link) *pb.LegLink {
	seen, conn := s.legs[l.Leg], s.conns[l.NQN]
	r := &pb.LegLink{LegId: l.Leg.String(), Revision: l.Revision, Error: seen.err}
	switch {
	case seen.live && seen.silent.IsZero():
		r.State = "live"
	case !conn.made:
		r.State = "absent"
		r.Error = conn.err
	case !seen.silent.IsZero() && s.now.Sub(seen.silent) > k.limits.window:
		r.State = "lost"
	default:
		r.State = "connecting"
	}
	return r
}

// ---- calls that may wait ----

// errLater says that an order was not due.
var errLater = errors.New("later")

// apart does f on a goroutine of its own and then, on the keeper's, finish with
// its outcome. It waits for f as long as its patience lasts; after that f is left
// behind, and finish comes when f has returned. Meanwhile the keeper keeps the
// lease, and the same is not tried again.
func (k *Keeper) apart(ctx context.Context, what string, limit time.Duration, f func(context.Context) error, finish func(error) error) error {
	if k.busy[what] {
		return errLater
	}
	k.busy[what] = true
	result := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		result <- f(ctx)
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-result:
		delete(k.busy, what)
		return finish(err)
	case <-timer.C:
	}
	go func() {
		err := <-result
		k.tell(func() {
			delete(k.busy, what)
			if err := finish(err); err != nil && !errors.Is(err, errLater) {
				k.log.Warn("call has returned after all", "call", what, "err", err)
			}
		})
	}()
	return errLater
}

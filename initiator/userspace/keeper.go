// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

const (
	callTimeout    = 5 * time.Second
	connectTimeout = 4 * time.Second
	exportTimeout  = 30 * time.Second
	stuckIO        = 10 * time.Second

	// leavePatience is how long a process that is told to end tries to let a volume
	// go clean.
	leavePatience = 4 * time.Second
)

// Keeper keeps one volume: one goroutine that looks, plans and does. Calls that
// can wait for somebody have goroutines of their own and answer through events.
type Keeper struct {
	*attachment.Inbox
	volume block.VolumeID
	path   *Path
	cfg    Config
	log    *slog.Logger
	limits limits

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
	recorder *attachment.Recorder

	noted     evidence.Note // which legs are in sync, as the disk has it
	noteError string        // why it names too many
	noteAgain time.Time     // no note before

	mu    sync.Mutex
	state attachment.State
	idle  bool
}

func newKeeper(p *Path, v block.VolumeID) *Keeper {
	k := &Keeper{
		volume: v, path: p, cfg: p.cfg, log: p.cfg.Log.With("volume", v.String()),
		limits: limits{window: p.cfg.Window, lease: p.cfg.Lease, stuck: stuckIO, connect: attachment.ConnectPatience},
		Inbox:  attachment.NewInbox(),
		memory: newMemory(0, time.Time{}),
		conns:  map[block.NQN]*reach{}, devices: map[block.LegID]device{}, pulses: map[block.LegID]*attachment.Pulse{},
		tries: map[block.NQN]try{}, busy: map[string]bool{},
	}
	if k.cfg.Evidence != nil {
		k.noted = k.cfg.Evidence.Of(v)
	}
	k.recorder = attachment.NewRecorder(k.cfg.Node, v, k.cfg.Manager, k.cfg.Meter, k.log)
	return k
}

// State is how the volume was when the keeper last looked.
func (k *Keeper) State() attachment.State {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.state
	s.Idle = k.idle && k.Unwanted()
	return s
}

// Run keeps the volume until ctx ends. Then it lets the volume go: clean if
// nobody has the device open and the legs answer, with errors for its users if not.
func (k *Keeper) Run(ctx context.Context) {
	// What the keeper began is ended by it, not by the end of ctx.
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer k.End()
	ticker := time.NewTicker(attachment.LookInterval)
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
		case <-k.Woken():
		case <-ticker.C:
		case event := <-k.Events():
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
		k.log.Warn("remove the device", "err", err)
	}
}

// turn looks, plans and does; it reports whether looking again at once is worth while.
func (k *Keeper) turn(ctx context.Context) (again bool) {
	k.Drain()
	told := k.Told()
	w, generation := told.Wanted, told.Generation
	if k.leaving && w != nil {
		w = w.Leaving()
	}
	if w != nil && k.stack == nil && !k.memory.of(w) {
		k.memory = newMemory(w.Epoch, time.Now())
		k.memory.grant = w.Grant
		k.memory.over = k.path.over(k.volume, w.Epoch)
		k.recorder.Forget()
	}
	s := k.look(w)
	k.extendLease(w, s)
	if !told.Known || told.Problem != "" {
		k.hold(ctx, s, told.Problem, generation)
		return false
	}
	orders, v := plan(w, k.memory, s, k.limits)
	did, failed := k.doAll(ctx, w, s, orders)
	v.Failed(failed)
	k.publish(w, s, v, generation)
	return did
}

// extendLease lets the volume be read for as long as the answers of its legs allow.
func (k *Keeper) extendLease(w *attachment.Wanted, s *seen) {
	if k.stack == nil {
		return
	}
	if w != nil && k.memory.of(w) {
		k.stack.wanted = w
	}
	k.stack.lease.extend(s.clock.Add(leaseLeft(k.stack.wanted, k.memory, s, k.limits)))
}

// hold keeps the lease while nothing may be changed.
func (k *Keeper) hold(ctx context.Context, s *seen, problem string, generation uint64) {
	v := attachment.Verdict{Phase: pb.AttachmentPhase_ATTACHMENT_PHASE_CONNECTING}
	if k.stack != nil {
		orders, waiting := guard(k.stack.wanted, k.memory, s, k.limits)
		_, failed := k.doAll(ctx, k.stack.wanted, s, orders)
		v.Waiting, v.Notes = waiting, failed
		if s.device.exists {
			v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
		}
		if s.volume.suspended {
			v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED
		}
	}
	if problem != "" {
		v.Waiting = append(v.Waiting, problem)
	}
	k.publish(nil, s, v, generation)
}

// ---- what others see ----

func (k *Keeper) publish(w *attachment.Wanted, s *seen, v attachment.Verdict, generation uint64) {
	r := v.Report(k.volume, k.memory.epoch, k.memory.grant)
	if k.stack != nil && k.stack.device != nil {
		d := k.stack.device
		r.Device, r.DeviceNumber, r.SizeBytes = d.Path(), d.Number(), uint64(k.stack.size)
	}
	if w != nil {
		for i := range w.Links {
			r.Legs = append(r.Legs, k.linkReport(s, &w.Links[i]))
		}
	}
	if said := fmt.Sprint(v.Phase, v.Waiting); said != k.said {
		k.said = said
		k.log.Info("attachment", "phase", attachment.PhaseName(v.Phase), "waiting_for", r.WaitingFor)
	}
	now := attachment.State{
		Acted: generation, Notes: append(v.Notes, slices.Sorted(maps.Keys(k.busy))...),
		Left: k.leaving && v.Phase == pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN,
	}
	idle := w == nil && k.stack == nil && len(k.conns) == 0 && k.memory.epoch == 0 && len(k.busy) == 0
	if !idle && r.Epoch != 0 {
		now.Report = r
	}
	k.mu.Lock()
	was := k.state
	k.state, k.idle = now, idle
	k.mu.Unlock()
	if was.Acted != generation || attachment.News(was.Report, r) {
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
	timer := time.NewTimer(attachment.Patience)
	defer timer.Stop()
	select {
	case err := <-result:
		delete(k.busy, what)
		return finish(err)
	case <-timer.C:
	}
	go func() {
		err := <-result
		k.Tell(func() {
			delete(k.busy, what)
			if err := finish(err); err != nil && !errors.Is(err, errLater) {
				k.log.Warn("call has returned after all", "call", what, "err", err)
			}
		})
	}()
	return errLater
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
)

// How long calls into the kernel may take before they are left behind.
const (
	callTimeout    = 5 * time.Second
	connectTimeout = 15 * time.Second
	lastPatience   = time.Second // before the agent ends
)

// kernelKeeper keeps one volume on the data path of the kernel: one goroutine that
// looks (look.go), plans (plan.go) and does (do.go). Calls that can stay in the
// kernel have goroutines of their own and answer through events.
type kernelKeeper struct {
	*attachment.Inbox
	volume block.VolumeID
	agent  *Agent
	path   *kernelPath
	m      *machine
	log    *slog.Logger
	limits limits

	// Owned by the keeper's goroutine.
	memory   *memory
	links    []attachment.Link // the last ones wanted, to know what to look at
	columns  int
	copies   int
	pulses   map[block.LegID]*attachment.Pulse
	reached  map[block.NQN]*reach
	watched  map[string]bool
	busy     map[string]bool      // calls left behind
	over     map[int]*atomic.Bool // by column: has a change that is under way stop
	top      dm.State
	suspends bool // a suspend of the device is in the kernel
	said     string
	recorder *attachment.Recorder

	noted     evidence.Note // which legs are in sync, as the disk has it
	noteError string        // why it names too many
	noteAgain time.Time     // no note before

	mu     sync.Mutex
	acted  uint64 // the generation that the last turn began with
	idle   bool
	report *pb.AttachmentReport
	notes  []string
}

// reach is how connecting to a subsystem goes.
type reach struct {
	connecting bool
	attempts   int
	next       time.Time
	err        string
}

func newKernelKeeper(a *Agent, path *kernelPath, v block.VolumeID) *kernelKeeper {
	k := &kernelKeeper{
		volume: v, agent: a, path: path, m: path.machine,
		log:    a.cfg.Log.With("volume", v.String()),
		limits: limits{window: a.cfg.Window, lease: a.cfg.Lease, connect: attachment.ConnectPatience},
		Inbox:  attachment.NewInbox(),
		pulses: map[block.LegID]*attachment.Pulse{}, reached: map[block.NQN]*reach{}, watched: map[string]bool{},
		busy: map[string]bool{}, over: map[int]*atomic.Bool{},
	}
	k.noted = a.evidence.Of(v)
	k.recorder = attachment.NewRecorder(a.cfg.Node, v, a.cfg.Manager, meter{a}, k.log)
	k.remember()
	return k
}

// remember reads the notes of an earlier run.
func (k *kernelKeeper) remember() {
	mem, _, err := k.m.notes(k.volume)
	if err != nil {
		k.log.Warn("notes are unusable; resyncs will copy everything", "err", err)
	}
	k.memory = &mem
	k.memory.prepare(time.Now())
	k.links = mem.links()
	for _, l := range k.links { // whose logs may be all that is left of them
		k.columns = max(k.columns, l.Column+1)
	}
}

// links are the legs that the tables had when they were last changed: what to
// look at until the manager has said what it wants.
func (m *memory) links() (all []attachment.Link) {
	for key, s := range m.Slots {
		l := attachment.Link{Leg: s.Leg, NQN: s.NQN, NSID: s.NSID, UUID: s.UUID}
		if _, err := fmt.Sscanf(key, slotFormat, &l.Column, &l.Copy); err == nil && !l.UUID.IsZero() {
			all = append(all, l)
		}
	}
	return all
}

func (m *memory) prepare(now time.Time) {
	if m.Slots == nil {
		m.Slots = map[string]slot{}
	}
	m.since = now
	m.records = attachment.NewRecords()
	m.refreshed = map[int]time.Time{}
}

// Run keeps the volume until ctx ends, and leaves it as it is then.
func (k *kernelKeeper) Run(ctx context.Context) {
	defer k.End()
	ticker := time.NewTicker(attachment.LookInterval)
	defer ticker.Stop()
	quick := 0
	for ctx.Err() == nil {
		if k.turn(ctx) && quick < 16 {
			quick++
			continue
		}
		quick = 0
		select {
		case <-ctx.Done():
		case <-k.Woken():
		case <-ticker.C:
		case event := <-k.Events():
			event()
		}
	}
}

// turn looks, plans and does; it reports whether looking again at once is worth while.
func (k *kernelKeeper) turn(ctx context.Context) (again bool) {
	k.Drain()
	told := k.Told()
	w, generation := told.Wanted, told.Generation
	if w != nil {
		k.links, k.columns, k.copies = w.Links, w.Layout.Stripes, w.Layout.Copies
	}
	s, err := k.look(ctx)
	if err != nil {
		k.publish(w, nil, attachment.Verdict{Phase: k.phase(), Waiting: []string{err.Error()}}, generation)
		return false
	}
	k.adopt(w, s)
	if !told.Known || told.Problem != "" {
		v := k.asItIs(s, told.Problem)
		held := &attachment.Wanted{Layout: block.Layout{Stripes: len(s.columns), Copies: block.MaxCopies}, Links: k.links, ReadOnly: s.top.readOnly}
		orders, waiting := guard(held, k.memory, s, k.limits)
		_, failed := k.doAll(ctx, held, s, orders)
		v.Waiting, v.Notes = append(v.Waiting, waiting...), append(v.Notes, failed...)
		k.publish(w, s, v, generation)
		return false
	}
	orders, v := plan(w, k.memory, s, k.limits)
	did, failed := k.doAll(ctx, w, s, orders)
	v.Failed(failed)
	k.publish(w, s, v, generation)
	return did
}

// adopt decides which grant the stack is of: what the notes say, else what the
// legs under it say, else, if there is none, the one that is wanted.
func (k *kernelKeeper) adopt(w *attachment.Wanted, s *seen) {
	stack := s.top.exists || slices.ContainsFunc(s.columns, func(c columnSeen) bool { return len(c.devices) > 0 })
	if stack && k.memory.Epoch == 0 {
		for n := range s.controllers {
			if _, e, _, _, err := block.ParseSubsystemNQN(n); err == nil && e >= k.memory.Epoch {
				k.memory.Epoch, k.memory.Grant = e, n.Grant()
			}
		}
	}
	if !stack && w != nil && !k.memory.of(w) {
		k.memory = &memory{Epoch: w.Epoch, Grant: w.Grant}
		if noted, ok, err := k.m.notes(k.volume); err == nil && ok && noted.of(w) {
			k.memory.Over, k.memory.Gone = noted.Over, noted.Over != nil
		}
		k.memory.prepare(s.now)
		k.recorder.Forget()
	}
}

// asItIs is the verdict while nothing may be changed.
func (k *kernelKeeper) asItIs(s *seen, problem string) attachment.Verdict {
	v := attachment.Verdict{Phase: pb.AttachmentPhase_ATTACHMENT_PHASE_CONNECTING}
	if problem != "" {
		v.Waiting = []string{problem}
	}
	switch {
	case s.top.exists && s.top.suspended:
		v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED
	case s.top.exists && s.top.exposed:
		v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
	}
	return v
}

// State is keeper's.
func (k *kernelKeeper) State() attachment.State {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := attachment.State{Notes: k.notes, Acted: k.acted, Idle: k.idle && k.Unwanted()}
	if !k.idle && k.report.GetEpoch() != 0 {
		s.Report = k.report
	}
	return s
}

func (k *kernelKeeper) phase() pb.AttachmentPhase {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.report.GetPhase()
}

func (k *kernelKeeper) publish(w *attachment.Wanted, s *seen, v attachment.Verdict, generation uint64) {
	r := v.Report(k.volume, k.memory.Epoch, k.memory.Grant)
	if s != nil && s.top.exposed {
		r.Device, _ = k.m.nameOf(k.top.Number)
		r.DeviceNumber, r.SizeBytes = k.top.Number.String(), uint64(s.top.size)
	}
	if s != nil && w != nil {
		for i := range w.Links {
			r.Legs = append(r.Legs, k.linkReport(s, &w.Links[i]))
		}
	}
	said := fmt.Sprint(v.Phase, v.Waiting)
	if said != k.said {
		k.said = said
		k.log.Info("attachment", "phase", attachment.PhaseName(v.Phase), "waiting_for", r.WaitingFor)
	}
	notes := append(v.Notes, slices.Sorted(maps.Keys(k.busy))...)
	idle := w == nil && s != nil && !s.top.exists && len(s.controllers) == 0 && k.memory.Epoch == 0 && len(k.busy) == 0 &&
		!slices.ContainsFunc(s.columns, func(c columnSeen) bool { return len(c.devices) > 0 })

	k.mu.Lock()
	changed := k.acted != generation || attachment.News(k.report, r)
	k.report, k.notes, k.idle, k.acted = r, notes, idle, generation
	k.mu.Unlock()
	if changed {
		k.agent.changed()
	}
}

func (k *kernelKeeper) linkReport(s *seen, l *attachment.Link) *pb.LegLink {
	seen := s.legs[l.Leg]
	r := &pb.LegLink{LegId: l.Leg.String(), Revision: l.Revision, Device: seen.name, Error: seen.err}
	switch {
	case seen.live && seen.silent.IsZero():
		r.State = "live"
	case seen.device == "" && len(s.controllers[l.NQN]) == 0:
		r.State = "absent"
		r.Error = s.refused[l.NQN]
	case !seen.silent.IsZero() && s.now.Sub(seen.silent) > k.limits.window && seen.device != "":
		r.State = "lost"
	default:
		r.State = "connecting"
	}
	return r
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/initiator/fsfreeze"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Path is a data path, for one volume: it observes the volume and carries out orders. Its
// methods are called on the keeper's goroutine and must not wait for long: slow calls go
// through [Keeper.Await].
type Path interface {
	// Observe finds what exists of the volume; w is the wanted state, nil if the volume is not
	// wanted or its wanted state is not known.
	Observe(ctx context.Context, w *volume.Wanted) (*volume.Seen, error)

	// Apply carries out an order. RecordStale, WriteNote and those to file systems never reach it: the
	// keeper does them itself. A GiveUp is in the memory already, and the path only has to keep it. After a Forget
	// the memory is what Memory.Ended left of it. Apply returns volume.ErrLater for an order that
	// is not due or is under way.
	Apply(ctx context.Context, w *volume.Wanted, o volume.Order) error

	// Memory returns the memory of the volume. Observe and Apply may replace it.
	Memory() *volume.Memory

	// Kept is the last wanted state of the volume that is here, nil if there is none. The
	// keeper holds on to it while the wanted state is not known.
	Kept() *volume.Wanted

	// Device is the device that users open, for the report; all empty if there is none.
	Device() (path, number string, size block.Size)
}

// Mortal is a Path whose volume ends with this process.
type Mortal interface {
	// Left reports whether nothing is left that could still be detached cleanly.
	Left() bool

	// GiveUp removes whatever is left; those who wait for it get errors.
	GiveUp(ctx context.Context)
}

// leavePatience is how long a process that is told to stop tries to detach a volume cleanly.
const leavePatience = 4 * time.Second

// Config configures a Keeper; every field but Evidence, Names and Freezer is required.
type Config struct {
	Node         block.NodeName
	Manager      pb.AgentsClient
	Linked       func() bool // whether the manager has answered on the agent's stream; nil: always
	Limits       volume.Limits
	Capabilities volume.Capabilities
	Evidence     *evidence.Book // notes which legs are in sync; nil: no notes
	Names        *Names         // the names of devices; nil: no notes
	Freezer      Freezer        // nil: file systems cannot be frozen
	Meter        Meter
	Changed      func() // called after State has changed
	Log          *slog.Logger
}

// Keeper runs one volume: one goroutine that observes, plans, applies and reports, over and over.
// Calls that may wait for somebody else run on goroutines of their own and deliver their
// results as events.
type Keeper struct {
	*Inbox
	*Recorder
	Volume block.VolumeID
	Log    *slog.Logger
	cfg    Config
	path   Path

	// Owned by the keeper's goroutine.
	busy      map[string]bool // calls left behind
	leaving   bool            // the process is shutting down
	phase     volume.Phase    // the last one published
	said      string
	noted     evidence.Note               // the legs in sync, as noted on disk
	noteError string                      // why the note names too many
	noteAgain time.Time                   // when the next note may be tried
	freezes   map[string]*fsfreeze.Freeze // by hold

	mu    sync.Mutex
	state State
	idle  bool
}

// New makes the Keeper of a volume; Run does the work.
func New(cfg Config, v block.VolumeID, path Path) *Keeper {
	k := &Keeper{
		Inbox: NewInbox(), Volume: v, Log: cfg.Log.With("volume", v.String()), cfg: cfg, path: path, busy: map[string]bool{},
		freezes: map[string]*fsfreeze.Freeze{},
	}
	k.Recorder = NewRecorder(cfg.Node, v, cfg.Manager, cfg.Meter, k.Log)
	if cfg.Evidence != nil {
		k.noted = cfg.Evidence.Of(v)
	}
	return k
}

// State is the volume as the keeper last saw it. It may be called at any time.
func (k *Keeper) State() State {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.state
	s.Idle = k.idle && k.Unwanted()
	return s
}

// Run keeps the volume until ctx ends, and then leaves it as it is. A volume that ends with
// this process is detached first: cleanly if nobody has the device open and the legs answer,
// otherwise with errors for its users.
func (k *Keeper) Run(ctx context.Context) {
	defer k.End()
	defer k.keepFreezes(nil)
	mortal, isMortal := k.path.(Mortal)
	inner := ctx
	if isMortal { // the keeper ends its own calls; the end of ctx must not
		var cancel context.CancelFunc
		inner, cancel = context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer mortal.GiveUp(inner)
	}
	ticker := beat.NewTicker(LookInterval)
	defer ticker.Stop()
	ends, deadline := ctx.Done(), (<-chan time.Time)(nil)
	for quick := 0; isMortal || ctx.Err() == nil; {
		if k.turn(inner) && quick < 16 {
			quick++
			continue
		}
		quick = 0
		if k.leaving && mortal.Left() {
			return
		}
		for news := false; !news; {
			news = true
			select {
			case <-ends:
				ends, k.leaving, deadline = nil, true, time.After(leavePatience)
			case <-deadline:
				return
			case <-k.Woken():
			case <-ticker.C:
			case event := <-k.Events():
				news = event()
			}
		}
	}
}

// turn observes, plans and applies; it reports whether another look at once is worthwhile.
func (k *Keeper) turn(ctx context.Context) (again bool) {
	k.Drain()
	last := k.Last()
	w := last.Wanted
	if k.leaving && w != nil {
		w = w.Leaving()
	}
	s, err := k.path.Observe(ctx, w)
	if err != nil {
		k.publish(w, nil, volume.Verdict{Phase: k.phase, Waiting: []string{err.Error()}}, last.Generation)
		return false
	}
	s.RecordError, s.Noted, s.NoteError = k.Refusal(), k.noted, k.noteError
	s.Linked, s.Freezes = k.linked(), k.freezesSeen()
	m := k.path.Memory()
	if !last.Known || last.Problem != "" {
		kept := k.path.Kept()
		orders, v := volume.Guard(kept, m, s, k.cfg.Limits, k.cfg.Capabilities)
		if last.Problem != "" {
			v.Waiting = append(v.Waiting, last.Problem)
		}
		_, failed := k.doAll(ctx, kept, s, orders)
		v.Notes = append(v.Notes, failed...)
		k.publish(w, s, v, last.Generation)
		return false
	}
	m.KeepHolds(w)
	k.keepFreezes(w)
	orders, v := volume.Plan(w, m, s, k.cfg.Limits, k.cfg.Capabilities)
	did, failed := k.doAll(ctx, w, s, orders)
	v.Failed(failed)
	k.publish(w, s, v, last.Generation)
	return did
}

// linked reports whether the manager answers now, as far as this host knows.
func (k *Keeper) linked() bool { return k.cfg.Linked == nil || k.cfg.Linked() }

// doAll carries out orders in sequence. If one fails, those that rely on it are skipped.
func (k *Keeper) doAll(ctx context.Context, w *volume.Wanted, s *volume.Seen, orders []volume.Order) (did bool, failed []string) {
	for _, o := range orders {
		err := k.do(ctx, w, o)
		switch {
		case err == nil:
			did = did || !volume.Begins(o)
			k.Log.Debug("order done", "order", o.String())
			continue
		case !errors.Is(err, volume.ErrLater):
			failed = append(failed, fmt.Sprintf("%v: %v", o, err))
		}
		if !volume.Alone(o, s) {
			return false, failed
		}
	}
	return did && len(failed) == 0, failed
}

func (k *Keeper) do(ctx context.Context, w *volume.Wanted, o volume.Order) error {
	m := k.path.Memory()
	switch o := o.(type) {
	case volume.RecordStale:
		return k.ask(ctx, func() Request { return k.Stale(m.Epoch, m.Records, o.Legs) })
	case volume.FlushLegs:
		if !k.MayAsk() || !k.linked() { // for the record that comes after it
			return volume.ErrLater
		}
	case volume.WriteNote:
		return k.note(ctx, o.Note)
	case volume.SyncFileSystems:
		return k.syncFileSystems(o.Hold)
	case volume.FreezeFileSystems:
		return k.freezeFileSystems(o.Hold, o.Limit)
	case volume.GiveUp:
		return k.giveUp(ctx, w, o)
	case volume.Forget:
		return k.forget(ctx, w, o)
	}
	if err := k.path.Apply(ctx, w, o); err != nil {
		return err
	}
	m.Did(o, time.Now())
	return nil
}

// giveUp notes that this host gave up the epoch, before anything of it is removed.
func (k *Keeper) giveUp(ctx context.Context, w *volume.Wanted, o volume.GiveUp) error {
	m := k.path.Memory()
	m.Over = &o.Over
	if err := k.path.Apply(ctx, w, o); err != nil {
		m.Over = nil // so that the planner asks for it again
		return err
	}
	k.Log.Error("epoch given up", "epoch", m.Epoch, "why", o.Over.Why, "writes_lost", o.Over.WritesLost)
	return nil
}

// forget ends an epoch, and with it what is known of its losses and, once the volume is no longer
// wanted here, the need for its note. A detached volume loses the name of its device, too.
func (k *Keeper) forget(ctx context.Context, w *volume.Wanted, o volume.Forget) error {
	was := k.path.Memory()
	if err := k.path.Apply(ctx, w, o); err != nil {
		return err
	}
	k.Forget()
	if w == nil && k.cfg.Evidence != nil {
		k.cfg.Evidence.Leave(k.Volume, was.Gone && was.Clean)
	}
	if w != nil && w.Detach && !k.leaving {
		if err := k.cfg.Names.Drop(k.Volume); err != nil {
			k.Log.Warn("the volume may keep the other name of its device when it is attached again", "err", err)
		}
	}
	if m := k.path.Memory(); m.Gone && m.Over == nil {
		k.Log.Info("detached", "epoch", m.Epoch, "clean", m.Clean)
	}
	return nil
}

// RecordInSync tells the manager that legs have caught up; until it answers they count as
// stale.
func (k *Keeper) RecordInSync(ctx context.Context, o volume.RecordInSync) error {
	m := k.path.Memory()
	return k.ask(ctx, func() Request { return k.InSync(m.Epoch, m.Records, o.Legs) })
}

// MayAsk reports whether the manager can be asked for a record now.
func (k *Keeper) MayAsk() bool { return k.Due() && !k.busy[asking] }

const asking = "ask the volume manager for a record"

// ask asks the manager for a record. It makes one request at a time, so that answers arrive in
// the order of the records. The wait is bounded, because the lease may end
// meanwhile.
func (k *Keeper) ask(ctx context.Context, request func() Request) error {
	if !k.MayAsk() {
		return volume.ErrLater
	}
	r := request()
	return k.Await(ctx, Call{What: asking, Limit: RecordTimeout}, r.Send, r.Done)
}

// note writes down which legs are in sync, and returns when the note is durable. A disk that
// hangs is not waited for, because the lease may end meanwhile.
func (k *Keeper) note(ctx context.Context, n evidence.Note) error {
	book := k.cfg.Evidence
	if book == nil {
		k.noted = n
		return nil
	}
	if time.Now().Before(k.noteAgain) {
		return volume.ErrLater
	}
	write := func(context.Context) error { return book.Write(k.Volume, n) }
	return k.Await(ctx, Call{What: "note which legs are in sync"}, write, func(err error) error {
		k.noteError = ""
		if err != nil {
			k.noteError = err.Error()
		}
		if k.noted = book.Of(k.Volume); !k.noted.Equal(n) {
			k.noteAgain = time.Now().Add(evidence.Again)
		}
		return err
	})
}

// ---- what others see ----

func (k *Keeper) publish(w *volume.Wanted, s *volume.Seen, v volume.Verdict, generation uint64) {
	m := k.path.Memory()
	r := Report(v, k.Volume, m.Epoch, m.Grant)
	if s != nil {
		k.describe(r, w, s)
	}
	if said := fmt.Sprint(v.Phase, v.Waiting); said != k.said {
		k.said = said
		k.Log.Info("attachment", "phase", v.Phase, "waiting_for", r.WaitingFor)
	}
	k.phase = v.Phase
	now := State{
		Acted: generation, Notes: append(v.Notes, k.unreturned()...),
		Paths: v.Paths, Left: k.leaving && v.Phase == volume.DetachedClean,
	}
	idle := w == nil && s != nil && s.Empty() && m.Epoch == 0 && len(k.busy) == 0
	if !idle && r.Epoch != 0 {
		now.Report = r
	}
	k.mu.Lock()
	was := k.state
	k.state, k.idle = now, idle
	k.mu.Unlock()
	if now.news(was) {
		k.cfg.Changed()
	}
}

// describe adds to a report what was seen of the device and the legs.
func (k *Keeper) describe(r *pb.AttachmentReport, w *volume.Wanted, s *volume.Seen) {
	path, number, size := k.path.Device()
	r.Device, r.DeviceNumber, r.SizeBytes = path, number, uint64(size)
	r.InUse = &pb.InUse{}
	for _, leg := range s.InUse() {
		r.InUse.LegIds = append(r.InUse.LegIds, leg.String())
	}
	if w == nil {
		return
	}
	for i := range w.Links {
		r.Legs = append(r.Legs, k.linkReport(s, &w.Links[i]))
	}
}

func (k *Keeper) linkReport(s *volume.Seen, l *volume.Link) *pb.LegLink {
	state, why := s.Link(l, k.cfg.Limits.Window)
	return &pb.LegLink{LegId: l.Leg.String(), Revision: l.Revision, Device: s.Legs[l.Leg].Device, State: pb.Value[pb.LinkState](string(state)), Error: why}
}

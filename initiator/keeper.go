// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// How long calls into the kernel may take before they are left behind, and how
// often a keeper looks when nothing wakes it: the kernel tells of much, and
// nothing of a controller's state.
const (
	callTimeout     = 5 * time.Second
	connectTimeout  = 15 * time.Second
	lookInterval    = 200 * time.Millisecond
	recordTimeout   = 2 * time.Second
	retryInterval   = 500 * time.Millisecond
	connectPatience = 10 * time.Second

	// patience is how long a keeper waits for a call while the volume serves: all
	// that it does in one turn must end well before the manager's lease does.
	patience = 250 * time.Millisecond

	lastPatience = time.Second // with a call, before the agent ends
)

// kernelKeeper keeps one volume on the data path of the kernel: one goroutine that looks, plans and does. Calls that
// can stay in the kernel have goroutines of their own and answer through events.
type kernelKeeper struct {
	volume block.VolumeID
	agent  *Agent
	path   *kernelPath
	m      *machine
	log    *slog.Logger
	limits limits

	wake   chan struct{}
	events chan func() // run by the keeper's goroutine
	done   chan struct{}

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
	retry    time.Time // no record before
	recorded string    // what the manager last answered to a record
	losses   map[block.LegID]*loss

	mu         sync.Mutex
	known      bool // something has been heard from the manager
	wanted     *attachment.Wanted
	wantedErr  string
	generation uint64
	acted      uint64 // the generation that the last turn began with
	idle       bool
	report     *pb.AttachmentReport
	notes      []string
}

// reach is how connecting to a subsystem goes.
type reach struct {
	connecting bool
	attempts   int
	next       time.Time
	err        string
}

// loss is a leg's way out, for the breakdown of the stall.
type loss struct {
	column                    int
	since, detected, recorded time.Time
}

func newKernelKeeper(a *Agent, path *kernelPath, v block.VolumeID) *kernelKeeper {
	k := &kernelKeeper{
		volume: v, agent: a, path: path, m: path.machine,
		log:    a.cfg.Log.With("volume", v.String()),
		limits: limits{window: a.cfg.Window, lease: a.cfg.Lease, connect: connectPatience},
		wake:   make(chan struct{}, 1), events: make(chan func(), 16), done: make(chan struct{}),
		pulses: map[block.LegID]*attachment.Pulse{}, reached: map[block.NQN]*reach{}, watched: map[string]bool{},
		busy: map[string]bool{}, over: map[int]*atomic.Bool{}, losses: map[block.LegID]*loss{},
	}
	k.remember()
	return k
}

// remember reads the notes of an earlier run.
func (k *kernelKeeper) remember() {
	mem, _, err := k.m.notes(k.volume)
	if err != nil {
		k.log.Warn("notes are of no use; resyncs will copy everything", "err", err)
	}
	k.memory = &mem
	k.memory.prepare(time.Now())
	k.links = mem.links()
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

// Want is keeper's.
func (k *kernelKeeper) Want(w *attachment.Wanted, problem string, generation uint64) {
	k.mu.Lock()
	k.known, k.wanted, k.wantedErr, k.generation = true, w, problem, generation
	k.mu.Unlock()
	k.Poke()
}

// Poke is keeper's.
func (k *kernelKeeper) Poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// tell hands the outcome of a call that was apart to the keeper.
func (k *kernelKeeper) tell(event func()) {
	select {
	case k.events <- event:
	case <-k.done:
	}
}

// Run keeps the volume until ctx ends, and leaves it as it is then.
func (k *kernelKeeper) Run(ctx context.Context) {
	defer close(k.done)
	ticker := time.NewTicker(lookInterval)
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
		case <-k.wake:
		case <-ticker.C:
		case event := <-k.events:
			event()
		}
	}
}

// turn looks, plans and does; it reports whether looking again at once is worth while.
func (k *kernelKeeper) turn(ctx context.Context) (again bool) {
	for len(k.events) > 0 {
		(<-k.events)()
	}
	k.mu.Lock()
	w, known, generation, problem := k.wanted, k.known, k.generation, k.wantedErr
	k.mu.Unlock()
	if w != nil {
		k.links, k.columns, k.copies = w.Links, w.Layout.Stripes, w.Layout.Copies
	}
	s, err := k.look(ctx)
	if err != nil {
		k.publish(w, nil, verdict{phase: k.phase(), waiting: []string{err.Error()}}, generation)
		return false
	}
	k.adopt(w, s)
	if !known || problem != "" {
		v := k.asItIs(s, problem)
		held := &attachment.Wanted{Layout: block.Layout{Stripes: len(s.columns), Copies: block.MaxCopies}, Links: k.links}
		orders, waiting := guard(held, k.memory, s, k.limits)
		_, failed := k.doAll(ctx, held, s, orders)
		v.waiting, v.notes = append(v.waiting, waiting...), append(v.notes, failed...)
		k.publish(w, s, v, generation)
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

// adopt decides which epoch the stack is of: what the notes say, else what the
// legs under it say, else, if there is none, the one that is wanted.
func (k *kernelKeeper) adopt(w *attachment.Wanted, s *seen) {
	stack := s.top.exists || slices.ContainsFunc(s.columns, func(c columnSeen) bool { return len(c.devices) > 0 })
	if stack && k.memory.Epoch == 0 {
		for n := range s.controllers {
			if _, e, _, _, err := block.ParseSubsystemNQN(n); err == nil {
				k.memory.Epoch = max(k.memory.Epoch, e)
			}
		}
	}
	if !stack && w != nil && k.memory.Epoch != w.Epoch {
		k.memory = &memory{Epoch: w.Epoch}
		k.memory.prepare(s.now)
		k.losses = map[block.LegID]*loss{}
	}
}

// asItIs is the verdict while nothing may be changed.
func (k *kernelKeeper) asItIs(s *seen, problem string) verdict {
	v := verdict{phase: pb.AttachmentPhase_ATTACHMENT_PHASE_CONNECTING}
	if problem != "" {
		v.waiting = []string{problem}
	}
	switch {
	case s.top.exists && s.top.suspended:
		v.phase = pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED
	case s.top.exists && s.top.exposed:
		v.phase = pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
	}
	return v
}

// ---- looking ----

func (k *kernelKeeper) look(ctx context.Context) (*seen, error) {
	s := &seen{
		now: time.Now(), legs: map[block.LegID]legSeen{},
		controllers: map[block.NQN][]fabrics.Controller{},
		connecting:  map[block.NQN]bool{}, refused: map[block.NQN]string{},
		recordError: k.recorded,
	}
	all, err := k.m.host.Controllers()
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if v, _, _, _, err := block.ParseSubsystemNQN(c.NQN); err == nil && v == k.volume && c.HostNQN == k.agent.host().NQN {
			s.controllers[c.NQN] = append(s.controllers[c.NQN], c)
		}
	}
	for n, r := range k.reached {
		s.connecting[n] = r.connecting
		s.refused[n] = r.err
		if !r.connecting {
			delete(s.connecting, n)
		}
	}
	if err := k.lookAtDevices(ctx, s); err != nil {
		return nil, err
	}
	for i := range k.links {
		s.legs[k.links[i].Leg] = k.lookAtLeg(ctx, s, &k.links[i])
	}
	k.probe(s)
	return s, nil
}

func (k *kernelKeeper) lookAtDevices(ctx context.Context, s *seen) error {
	devices, err := k.m.dm.Devices(raid.TopUUID(k.volume))
	if err != nil {
		return err
	}
	k.top = dm.State{}
	for _, d := range devices {
		if d.Name == raid.TopName(k.volume) {
			k.top = d
		}
	}
	if k.top.Name != "" {
		s.top = topSeen{
			exists: k.top.Live, suspended: k.top.Suspended, suspending: k.suspends,
			failed: fails(k.top.Table), open: k.top.Open, exposed: k.m.exposed(k.top.Number),
		}
		if s.top.open > 0 && k.leaves() {
			s.top.users = k.m.users(k.top.Number)
		}
	}
	// There may be more than the wanted state tells: none may be known.
	for i := k.columns; i < block.MaxStripes && len(devices) > 0; i++ {
		if slices.ContainsFunc(devices, func(d dm.State) bool { return belongs(d.Name, raid.ColumnName(k.volume, i)) }) {
			k.columns = i + 1
		}
	}
	for i := range k.columns {
		c, err := k.lookAtColumn(i, devices)
		if err != nil {
			return err
		}
		s.columns = append(s.columns, c)
		for _, d := range c.devices {
			k.watch(ctx, d)
		}
	}
	return nil
}

// leaves reports whether the device is to be removed, so that it matters who
// has it open: to find out is much to read.
func (k *kernelKeeper) leaves() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.wanted == nil || k.wanted.Detach || k.wanted.Epoch != k.memory.Epoch
}

func belongs(name, column string) bool {
	return name == column || strings.HasPrefix(name, column+"-")
}

func fails(t dm.Table) bool {
	if len(t) == 0 {
		return false
	}
	return !slices.ContainsFunc(t, func(r dm.Row) bool { _, ok := r.Target.(dm.ErrorTarget); return !ok })
}

func (k *kernelKeeper) lookAtColumn(i int, devices []dm.State) (columnSeen, error) {
	c := columnSeen{name: raid.ColumnName(k.volume, i), health: map[dm.Ref]dm.Health{}}
	var of dm.State
	for _, d := range devices {
		if belongs(d.Name, c.name) {
			c.devices = append(c.devices, d)
		}
		if d.Name == c.name {
			of = d
		}
	}
	loop, ok, err := k.m.loops.Find(k.m.logFile(k.volume, i))
	if err != nil {
		return c, err
	}
	if ok {
		c.log = loop.Number.Ref()
	}
	if c.failed = fails(of.Table); c.failed {
		return c, nil
	}
	if c.Observed, err = raid.Observe(c.name, c.devices); err != nil {
		c.foreign = err.Error()
		return c, nil
	}
	return c, k.lookAtHealth(&c)
}

// lookAtHealth reads what the mirrors of a column have seen of the legs. A leg
// that is rebuilt stands in its mirror behind a device of ours.
func (k *kernelKeeper) lookAtHealth(c *columnSeen) error {
	names := map[dm.Ref]dm.State{}
	for _, d := range c.devices {
		names[d.Number.Ref()] = d
	}
	for _, d := range c.devices {
		if len(d.Table) != 1 || d.Table[0].Target.Type() != "mirror" {
			continue
		}
		status, err := k.m.dm.MirrorStatus(d.Name)
		if err != nil {
			return err
		}
		if d.Name == c.name {
			c.inSync, c.total = status.InSync, status.Total
		}
		for _, l := range status.Legs {
			device := l.Device
			if below, ours := names[device]; ours {
				device = ""
				if c.Kind == raid.ShapeRebuilding && strings.Contains(below.Name, "-back") {
					device = c.Back
				}
			}
			if was := c.health[device]; was == 0 || was == dm.Alive {
				c.health[device] = l.Health
			}
		}
	}
	return nil
}

func (k *kernelKeeper) lookAtLeg(ctx context.Context, s *seen, l *attachment.Link) legSeen {
	seen := legSeen{nqn: l.NQN}
	n, err := k.m.host.FindNamespace(l.NQN, l.NSID, l.UUID)
	live := err == nil && n.Live
	if err != nil && !errors.Is(err, fabrics.ErrNoNamespace) {
		seen.err = err.Error()
	}
	seen.device, seen.name = dm.Ref(n.Dev), n.Name
	if live {
		if err := k.prepare(ctx, n, l); err != nil {
			seen.err = err.Error()
		}
	}
	seen.live = live && seen.err == ""
	p := k.pulses[l.Leg]
	if p == nil || p.Device != string(seen.device) && seen.device != "" {
		p = &attachment.Pulse{Device: string(seen.device)}
		k.pulses[l.Leg] = p
	}
	seen.silent = p.Look(s.now, live, k.agent.cfg.Probe)
	seen.looks, seen.answers = p.Looks, p.Answers
	for _, c := range s.controllers[l.NQN] {
		seen.peerAnswers = seen.peerAnswers || k.path.answeredSince(c.Address, seen.silent)
	}
	return seen
}

// prepare makes a head fit for a table: its size is right, its flushes are as
// the drive needs them, and its commands are given up in time. Newer kernels
// freeze a queue to change it, and that waits for a silent target.
func (k *kernelKeeper) prepare(ctx context.Context, n fabrics.Namespace, l *attachment.Link) error {
	k.mu.Lock()
	w := k.wanted
	k.mu.Unlock()
	if w != nil {
		if need := w.Layout.LegSize(w.Size); n.Size < need {
			return fmt.Errorf("%s has %v, the leg must have %v", n.Name, n.Size, need)
		}
	}
	writeThrough := l.WriteThrough
	return k.apart(ctx, "prepare "+n.Name, patience, func() error {
		if writeThrough {
			if err := k.m.host.SetWriteThrough(n.Head); err != nil {
				return err
			}
		}
		for _, p := range n.Paths {
			if err := k.m.host.SetIOTimeout(p, k.agent.cfg.IOTimeout); err != nil {
				k.log.Debug("io timeout not set", "path", p.Name, "err", err)
			}
		}
		return nil
	}, func(err error) error { return err })
}

// probe starts the probes that are due.
func (k *kernelKeeper) probe(s *seen) {
	for leg, seen := range s.legs {
		p := k.pulses[leg]
		if !seen.live || !p.Due(s.now, k.agent.cfg.Probe) {
			continue
		}
		p.Probe(s.now)
		head := seen.head()
		addresses := s.controllers[seen.nqn]
		go func() {
			err := k.m.host.Probe(head)
			k.tell(func() {
				p.Answered(err)
				for _, c := range addresses {
					if err == nil {
						k.path.answers(c.Address)
					}
				}
			})
		}()
	}
}

// watch has the keeper woken by a device's events.
func (k *kernelKeeper) watch(ctx context.Context, d dm.State) {
	if k.watched[d.Name] || !d.Live {
		return
	}
	k.watched[d.Name] = true
	nr := d.EventNr
	go func() {
		defer k.tell(func() { delete(k.watched, d.Name) })
		for ctx.Err() == nil {
			info, err := k.m.dm.Wait(ctx, d.Name, nr)
			if err != nil {
				return
			}
			nr = info.EventNr
			k.Poke()
		}
	}()
}

// ---- doing ----

// errLater says that an order was not due.
var errLater = errors.New("later")

// doAll does orders in turn. After one that fails those that rely on it are
// left; columns do not rely on one another.
func (k *kernelKeeper) doAll(ctx context.Context, w *attachment.Wanted, s *seen, orders []order) (did bool, failed []string) {
	for _, o := range orders {
		err := k.do(ctx, w, s, o)
		switch {
		case err == nil:
			did = did || o.op != opConnect && o.op != opSuspend
			if o.op != opConnect {
				k.log.Debug("order done", "order", o.String())
			}
			continue
		case !errors.Is(err, errLater):
			failed = append(failed, fmt.Sprintf("%v: %v", o, err))
		}
		if o.op != opColumn && o.op != opLog && o.op != opRecovered && o.op != opConnect {
			return false, failed
		}
	}
	return did && len(failed) == 0, failed
}

func (k *kernelKeeper) do(ctx context.Context, w *attachment.Wanted, s *seen, o order) error {
	switch o.op {
	case opConnect:
		return k.connect(ctx, s, o)
	case opRecord:
		return k.recordStale(ctx, s, o)
	case opRecovered:
		return k.recordInSync(ctx, s, o)
	case opSuspend:
		return k.suspend(ctx)
	case opRelease:
		return k.release(ctx, s, o)
	case opColumn:
		return k.column(ctx, s, o)
	case opRemoveTop:
		if err := k.call(ctx, string(o.op), func() error { return k.m.dm.Remove(k.top.Name, false) }); err != nil {
			return err
		}
		k.memory.Clean = o.clean
		return k.m.note(k.volume, k.memory)
	case opForget:
		return k.forget(w)
	case opFailCol, opRemoveCol:
		if over := k.over[o.column]; over != nil {
			over.Store(true)
		}
	}
	return k.call(ctx, o.String(), func() error { return k.touch(w, s, o) })
}

// touch does the orders that are calls into the kernel and no more.
func (k *kernelKeeper) touch(w *attachment.Wanted, s *seen, o order) error {
	top := k.top
	switch o.op {
	case opLog:
		return k.m.makeLog(k.volume, o.column)
	case opTop:
		if err := k.flushEqualized(w, s); err != nil {
			return err
		}
		return k.m.makeTop(raid.Top(k.volume, w.Layout, w.Size), w.Layout.Copies > 1)
	case opExpose:
		d, err := k.m.device(raid.TopUUID(k.volume))
		if err != nil {
			return err
		}
		return k.m.expose(w.Name, d.Number)
	case opResume:
		return k.m.dm.Resume(top.Name, dm.UdevNormal)
	case opFlush:
		return k.m.flush(top.Number)
	case opHide:
		return k.m.hide(top.Number)
	case opFailTop:
		return k.m.fail(top)
	case opFailCol:
		return k.m.fail(lowestFirst(s.columns[o.column])...)
	case opRemoveCol:
		for _, d := range slices.Backward(lowestFirst(s.columns[o.column])) {
			if err := k.m.dm.Remove(d.Name, false); err != nil && !dm.NotFound(err) {
				return err
			}
		}
		return nil
	}
	panic("no such order: " + o.String())
}

// lowestFirst sorts a column's devices: the column itself uses all others.
func lowestFirst(c columnSeen) []dm.State {
	devices := slices.Clone(c.devices)
	slices.SortStableFunc(devices, func(a, b dm.State) int {
		switch {
		case a.Name == c.name && b.Name != c.name:
			return 1
		case b.Name == c.name && a.Name != c.name:
			return -1
		}
		return 0
	})
	return devices
}

// call does something that may stay in the kernel, and leaves it behind when it
// does: until it has returned the same is not tried again.
func (k *kernelKeeper) call(ctx context.Context, what string, f func() error) error {
	return k.apart(ctx, what, callTimeout, f, func(err error) error { return err })
}

// apart does f on a goroutine of its own and then, on the keeper's, finish with
// its outcome. It waits for f as long as its patience lasts; after that f is left
// behind, and finish comes when f has returned. Meanwhile the keeper keeps the
// lease and the other columns, and the same is not tried again.
func (k *kernelKeeper) apart(ctx context.Context, what string, patience time.Duration, f func() error, finish func(error) error) error {
	if k.busy[what] {
		return fmt.Errorf("%w: %s", fabrics.ErrBusy, what)
	}
	k.busy[what] = true
	result := make(chan error, 1)
	go func() { result <- f() }()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-result:
		delete(k.busy, what)
		return finish(err)
	case <-ctx.Done():
		// The process may end now, and a table must not be left suspended.
		select {
		case err := <-result:
			return finish(err)
		case <-time.After(lastPatience):
			return ctx.Err()
		}
	case <-timer.C:
	}
	began := time.Now().Add(-patience)
	k.log.Warn("call does not return yet", "call", what)
	go func() {
		err := <-result
		k.tell(func() {
			delete(k.busy, what)
			err := finish(err)
			k.log.Info("call has returned after all", "call", what, "after", time.Since(began), "err", err)
		})
	}()
	return fmt.Errorf("no answer for %v", patience)
}

func (k *kernelKeeper) connect(ctx context.Context, s *seen, o order) error {
	r := k.reached[o.nqn]
	if r == nil {
		r = &reach{}
		k.reached[o.nqn] = r
	}
	i := slices.IndexFunc(k.links, func(l attachment.Link) bool { return l.NQN == o.nqn })
	if r.connecting || s.now.Before(r.next) || i < 0 {
		return errLater
	}
	l := k.links[i]
	options := fabrics.Options{
		Portal: l.Portals[(l.Column+r.attempts)%len(l.Portals)], NQN: o.nqn, Host: k.agent.host(),
		IOQueues: k.agent.cfg.IOQueues, KeepAlive: k.agent.cfg.KeepAlive, ReconnectDelay: time.Second,
	}
	r.connecting = true
	go func() {
		ctx, cancel := context.WithTimeout(ctx, connectTimeout)
		defer cancel()
		_, err := k.m.host.Connect(ctx, options)
		k.tell(func() { k.connected(r, options, err) })
	}()
	return nil
}

func (k *kernelKeeper) connected(r *reach, o fabrics.Options, err error) {
	r.connecting = false
	if err == nil {
		*r = reach{}
		k.log.Info("connected", "nqn", o.NQN, "portal", o.Portal.String())
		return
	}
	r.next = time.Now().Add(min(2*time.Second, 200*time.Millisecond<<min(r.attempts, 4)))
	r.attempts++
	if r.err != err.Error() {
		k.log.Warn("connect", "nqn", o.NQN, "portal", o.Portal.String(), "err", err)
	}
	r.err = err.Error()
}

// suspend stops the device. The call returns when what is under way below has
// ended, which may be never; new I/O waits from the start.
func (k *kernelKeeper) suspend(ctx context.Context) error {
	if k.suspends {
		return errLater
	}
	k.suspends = true
	name := k.top.Name
	k.log.Warn("device suspended: a leg is silent and can not be recorded stale")
	go func() {
		err := k.m.dm.Suspend(name, true, true)
		k.tell(func() {
			k.suspends = false
			if err != nil && ctx.Err() == nil {
				k.log.Warn("suspend device", "err", err)
			}
		})
	}()
	return nil
}

// release deletes a subsystem's controllers, so that all I/O that waits on them
// fails, after cutting the connections of a silent target.
func (k *kernelKeeper) release(ctx context.Context, s *seen, o order) error {
	controllers := s.controllers[o.nqn]
	return k.apart(ctx, "release "+string(o.nqn), patience, func() error { return k.disconnect(ctx, controllers, o) }, func(err error) error {
		if err == nil {
			delete(k.reached, o.nqn)
		}
		return err
	})
}

func (k *kernelKeeper) disconnect(ctx context.Context, controllers []fabrics.Controller, o order) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for _, c := range controllers {
		if o.force && c.Transport == block.TCP {
			if _, err := k.m.host.DestroySockets(ctx, c.Portal()); err != nil {
				k.log.Warn("sockets not destroyed; releasing will take longer", "controller", c.Name, "err", err)
			}
			k.waitUntilNotLive(ctx, c)
		}
		if err := k.m.host.Disconnect(ctx, c); err != nil {
			return err
		}
		k.log.Info("disconnected", "nqn", o.nqn, "controller", c.Name, "forced", o.force)
	}
	return nil
}

// waitUntilNotLive gives the kernel the moment that it takes to notice that a
// controller's sockets are gone: deleting one that it believes live first tells
// the target so, and waits for its answer.
func (k *kernelKeeper) waitUntilNotLive(ctx context.Context, c fabrics.Controller) {
	for range 10 {
		all, err := k.m.host.Controllers()
		live := slices.ContainsFunc(all, func(now fabrics.Controller) bool { return now.Name == c.Name && now.State == fabrics.Live })
		if err != nil || !live {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// column does the steps of a column, and remembers what its copies are after. A
// step waits in its suspend for I/O below, which may be on a leg that is lost
// meanwhile: the keeper goes on, and has that leg released. The table then still
// becomes live. That does no harm: it keeps every promise, since no leg can have
// come into it, and what waits in it goes on by the next plan. Going back to the
// old one could do some: a rebuilding mirror whose leg has been recorded in sync
// must not be made live again with a dirty region.
func (k *kernelKeeper) column(ctx context.Context, s *seen, o order) error {
	what := columnCall(o.column)
	if k.busy[what] {
		return errLater
	}
	over, mem := new(atomic.Bool), k.memory
	k.over[o.column] = over
	if o.refresh {
		mem.refreshed[o.column] = s.now
	}
	return k.apart(ctx, what, patience, func() error { return k.changeColumn(o, over) }, func(err error) error {
		delete(k.over, o.column)
		if err != nil || k.memory != mem {
			return err
		}
		for copy, slot := range o.slots {
			mem.Slots[slotKey(o.column, copy)] = slot
		}
		mem.Gone, mem.Clean = false, false
		k.released(o.column)
		return k.m.note(k.volume, mem)
	})
}

func columnCall(column int) string { return fmt.Sprintf("%s %d", opColumn, column) }

// changeColumn stops between two steps when the column is over.
func (k *kernelKeeper) changeColumn(o order, over *atomic.Bool) error {
	for _, step := range o.steps {
		if over.Load() {
			return errLater
		}
		var err error
		if step.Log != nil {
			err = k.m.writeLog(k.volume, o.column, step.Log.Image)
		} else {
			err = k.m.dm.Do(*step.DM)
		}
		if err != nil {
			return err
		}
		k.log.Info("column changed", "column", o.column, "step", step.String())
	}
	return nil
}

// released notes that the writes which waited for lost legs of a column go on.
func (k *kernelKeeper) released(column int) {
	now := time.Now()
	for leg, l := range k.losses {
		if l.column != column || l.recorded.IsZero() {
			continue
		}
		stall := stall{detect: l.detected.Sub(l.since), record: l.recorded.Sub(l.detected), release: now.Sub(l.recorded)}
		k.log.Info("leg released", "leg", leg.String(), "column", column, "release", stall.release,
			"detect", stall.detect, "record", stall.record, "total", now.Sub(l.since))
		k.agent.stalled(stall)
		delete(k.losses, leg)
	}
}

// forget removes what the run directory holds of a volume, but for the outcome
// of a detach, which is asked for until the manager has it.
func (k *kernelKeeper) forget(w *attachment.Wanted) error {
	for i := range k.columns {
		if err := k.m.dropLog(k.volume, i); err != nil {
			return err
		}
	}
	clean := k.memory.Clean
	detached := w != nil && w.Detach && (k.memory.Epoch == w.Epoch || k.memory.Epoch == 0)
	if !detached {
		k.memory = &memory{}
		k.memory.prepare(time.Now())
		return remove(k.m.notesFile(k.volume))
	}
	k.memory = &memory{Epoch: w.Epoch, Gone: true, Clean: clean}
	k.memory.prepare(time.Now())
	k.log.Info("detached", "epoch", w.Epoch, "clean", clean)
	return k.m.note(k.volume, k.memory)
}

// ---- what others see ----

// State is keeper's.
func (k *kernelKeeper) State() attachment.State {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := attachment.State{Notes: k.notes, Acted: k.acted, Idle: k.idle && k.wanted == nil && k.known}
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

func (k *kernelKeeper) publish(w *attachment.Wanted, s *seen, v verdict, generation uint64) {
	r := &pb.AttachmentReport{
		VolumeId: k.volume.String(), Epoch: uint64(k.memory.Epoch), Phase: v.phase,
		WaitingFor: strings.Join(v.waiting, "; "), ResyncDoneBytes: uint64(v.done), ResyncTotalBytes: uint64(v.total),
	}
	if s != nil && s.top.exposed {
		r.Device, _ = k.m.nameOf(k.top.Number)
	}
	if s != nil && w != nil {
		for i := range w.Links {
			r.Legs = append(r.Legs, k.linkReport(s, &w.Links[i]))
		}
	}
	said := fmt.Sprint(v.phase, v.waiting)
	if said != k.said {
		k.said = said
		k.log.Info("attachment", "phase", phaseName(v.phase.String()), "waiting_for", r.WaitingFor)
	}
	notes := append(v.notes, slices.Sorted(maps.Keys(k.busy))...)
	idle := w == nil && s != nil && !s.top.exists && len(s.controllers) == 0 && k.memory.Epoch == 0 && len(k.busy) == 0 &&
		!slices.ContainsFunc(s.columns, func(c columnSeen) bool { return len(c.devices) > 0 })

	k.mu.Lock()
	changed := k.report.GetPhase() != r.Phase || k.report.GetWaitingFor() != r.WaitingFor || k.report.GetDevice() != r.Device || k.acted != generation
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

// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"errors"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
)

// looked is a host's observation of the targets and of its own connections.
type looked struct {
	host      int32
	sees      [targets]int32 // the exports for it that it reaches; see rig.visible
	linked    bool           // it has a stream to the manager
	asking    bool           // the manager has not answered its last call
	busy      uint8          // copies that have not answered a write
	unflushed uint8          // copies with data that a loss of their cache would take
}

// turned is the outcome of a host's turn: the host after it, and what it has done to the data path.
type turned struct {
	host int32
	effects
}

// effects are what a turn does beyond the host. Masks are of copies.
type effects struct {
	cut       uint8 // their connections have ended
	connected uint8 // they have new connections
	dropped   uint8 // they take no further part
	added     uint8 // they take part from now on
	earlier   uint8 // of these, those with earlier writes that this process has not flushed
	full      uint8 // of these, those that may miss more than is known
	renewed   uint8 // they go on under a new identity
	flushed   uint8 // their caches are on their drives, by a flush of the volume
	synced    uint8 // likewise, by a flush of them alone
	exposed   bool  // there is a device from now on
	gone      bool  // the volume has been taken apart
	call      int32 // a request to the manager
}

// How a turn ends early: the next one looks again.
var (
	errFailed = errors.New("failed")
	errEnough = errors.New("enough for one turn") // so that a crash may come right after this order
)

var limits = volume.Limits{
	Window: 2 * time.Second, Lease: 8 * time.Second, FailOver: 500 * time.Millisecond, Quiesce: volume.Quiesce,
	Stuck: 10 * time.Second, Connect: volume.ConnectPatience, Retry: volume.RetryLast,
}

var capabilities = volume.Capabilities{KnowsFlushed: true, Withholds: true, Transports: []block.Transport{block.TCP}}

// noon is the time in each turn: only ages matter.
var noon = time.Unix(1_000_000, 0)

// turn has a host look, plan and act. Equal turns are computed once.
func (r *rig) turn(in looked) turned {
	if t, known := r.turns[in]; known {
		return t
	}
	h := *r.hosts.at(in.host)
	t := actor{rig: r, in: in, host: &h}
	t.run()
	out := turned{r.host(h), t.effects}
	r.turns[in] = out
	return out
}

// actor is one turn under way. It never changes what a host's fields point to.
type actor struct {
	*rig
	in   looked
	host *host
	effects
}

func (t *actor) run() {
	h := t.host
	if !h.Known {
		return
	}
	t.begin()
	t.look()
	if h.Stack != nil && h.Wanted != nil && h.Memory.of(h.Wanted) {
		t.stack().Wanted = h.Wanted
	}
	s, m := t.seen(), h.memory(t.rig)
	orders, v := volume.Plan(h.Wanted, &m, s, limits, capabilities)
	for _, o := range orders {
		if err := t.do(s, o); err != nil && (err == errEnough || !volume.Alone(o, s)) {
			break
		}
	}
	t.publish(v)
}

// begin begins the memory of a new grant.
func (t *actor) begin() {
	h := t.host
	if h.Wanted == nil || h.Stack != nil || h.Memory.of(h.Wanted) {
		return
	}
	var over *volume.Over
	if o, ok := h.GivenUp[h.Wanted.Epoch]; ok {
		over = &o
	}
	h.Memory = newMemory(volume.Granted(h.Wanted, over))
}

func (m *memory) of(w *volume.Wanted) bool { return m.Epoch == w.Epoch && m.Grant == w.Grant }

// stack returns the host's stack for writing.
func (t *actor) stack() *stack {
	own := *t.host.Stack
	t.host.Stack = &own
	return &own
}

// memory is the host's memory as the planner wants it.
func (h *host) memory(r *rig) volume.Memory {
	m := volume.Memory{Epoch: h.Memory.Epoch, Grant: h.Memory.Grant, Clean: h.Memory.Clean, Gone: h.Memory.Gone, Over: h.Memory.Over, Used: h.Memory.Used}
	m.Begin(noon.Add(-time.Duration(h.Memory.Age) * tick))
	for i, revision := range h.Memory.Stale {
		m.Records.NoteStale(r.legs[i], revision)
	}
	for i, revision := range h.Memory.InSync {
		m.Records.NoteInSync(r.legs[i], revision)
	}
	for i, revision := range h.Memory.Asked {
		m.Records.NoteAsked(r.legs[i], revision)
	}
	for i, copies := range h.Memory.Secured {
		m.Secured[r.legs[i]] = volume.Secured{Copies: copies, At: noon}
	}
	return m
}

// kept is the wanted state by which the host looks at its volume.
func (h *host) kept() *volume.Wanted {
	if h.Wanted == nil && h.Stack != nil {
		return h.Stack.Wanted
	}
	return h.Wanted
}

// answers reports whether a leg answers under an identity.
func (t *actor) answers(i int, nqn block.NQN, id block.UUID) bool {
	return t.host.Conns[i] == nqn && slices.ContainsFunc(t.exports.at(t.in.sees[i]), func(x export) bool { return x.NQN == nqn && x.UUID == id })
}

// connectable reports whether a target answers for a subsystem.
func (t *actor) connectable(i int, nqn block.NQN) bool {
	return slices.ContainsFunc(t.exports.at(t.in.sees[i]), func(x export) bool { return x.NQN == nqn })
}

// look notes how the legs answer.
func (t *actor) look() {
	w := t.host.kept()
	for i := range t.Copies {
		p := &t.host.Pulses[i]
		l := linkAt(w, i)
		if l == nil {
			*p = pulse{Silent: -1, Heard: never} // it counts again only once it has answered
			continue
		}
		if p.Identity != l.UUID {
			*p = pulse{Identity: l.UUID, Silent: -1, Heard: p.Heard}
		}
		switch {
		case t.answers(i, l.NQN, l.UUID):
			p.Met, p.Silent, p.Heard = true, -1, 0
		case p.Silent < 0:
			p.Silent = 0
		}
	}
}

func linkAt(w *volume.Wanted, i int) *volume.Link {
	if w == nil {
		return nil
	}
	return w.At(0, i)
}

// seen returns the observation that the planner decides on.
func (t *actor) seen() *volume.Seen {
	h, w := t.host, t.host.kept()
	s := &volume.Seen{Now: noon, Clock: noon, Legs: map[block.LegID]volume.LegSeen{}, Noted: h.Note, Linked: t.in.linked}
	if h.Refused {
		s.RecordError = "refused"
	}
	for i := range t.Copies {
		if h.Conns[i] == "" {
			continue
		}
		state := volume.PathSilent
		if t.connectable(i, h.Conns[i]) {
			state = volume.PathLive
		}
		s.Paths = append(s.Paths, volume.PathSeen{Path: volume.Path{Subsystem: h.Conns[i], Portal: portalOf(i)}, State: state, Answered: true})
	}
	t.seeVolume(s)
	if w == nil {
		return s
	}
	for i := range t.Copies {
		if l := linkAt(w, i); l != nil {
			s.Legs[l.Leg] = h.seeLeg(i, l)
		}
	}
	return s
}

func (h *host) seeLeg(i int, l *volume.Link) volume.LegSeen {
	p := h.Pulses[i]
	path := volume.Path{Subsystem: l.NQN}
	if h.Conns[i] == l.NQN {
		path.Portal = portalOf(i)
	}
	way := volume.WaySeen{Path: path, Answers: p.Silent < 0 && p.Met, Heard: noon.Add(-time.Duration(p.Heard) * tick)}
	if p.Heard >= never {
		way.Heard = time.Time{}
	}
	if p.Silent >= 0 {
		way.Silent, way.Looks = noon.Add(-time.Duration(p.Silent)*tick), 3
	}
	return volume.LegSeen{Found: h.Conns[i] == l.NQN, Live: p.Silent < 0 && p.Met, Size: volumeSize, Ways: []volume.WaySeen{way}}
}

func (t *actor) seeVolume(s *volume.Seen) {
	h := t.host
	column := volume.ColumnSeen{Copies: make([]volume.CopySeen, t.layout.Slots())}
	st := h.Stack
	if st == nil {
		s.Columns = []volume.ColumnSeen{column}
		if h.Wanted == nil {
			s.Columns = nil
		}
		return
	}
	column.Exists, column.Built, column.Size, column.Equalizing = true, true, volumeSize, !st.Equal
	s.Size, s.Flushed, s.Copying, s.Holdable, s.Held, s.Quiet = volumeSize, st.Flushed, st.Equalizing, true, st.Held, t.in.busy == 0
	s.Waits = t.in.busy != 0
	for i := range t.Copies {
		c := t.seeCopy(i)
		if c.State == volume.InSync {
			column.Sources++
		}
		column.Copies[i] = c
	}
	s.Columns = []volume.ColumnSeen{column}
	s.Device = volume.DeviceSeen{Exists: st.Device, Named: st.Device, Size: volumeSize}
	if !st.Device {
		s.Device = volume.DeviceSeen{}
	}
}

func (t *actor) seeCopy(i int) volume.CopySeen {
	x := t.host.Stack.Slots[i]
	if x == (slot{}) {
		return volume.CopySeen{}
	}
	bit := uint8(1) << i
	c := volume.CopySeen{
		State: x.State, Leg: t.legs[i], Node: string(targetName(i)), Subsystem: x.NQN, Tracked: x.Tracked, Whole: x.Whole, LossCovered: x.Covered,
		Busy: t.in.busy&bit != 0, Unflushed: t.in.unflushed&bit != 0, Withheld: x.Withheld,
	}
	if l := linkAt(t.host.kept(), i); l != nil {
		c.Superseded, c.Reborn = l.Revision != x.Revision, l.Reborn > x.Revision
	}
	// A live target refuses what is sent to an identity that it does not have any more.
	if c.Busy && x.inUse() && t.connectable(i, x.NQN) && !t.answers(i, x.NQN, x.UUID) {
		c.Error = "write error"
	}
	return c
}

// ---- orders ----

// do carries out one order.
//
// Branches: one for each kind of order.
//
// Long: likewise.
func (t *actor) do(s *volume.Seen, o volume.Order) error {
	h := t.host
	switch o := o.(type) {
	case volume.Connect:
		return t.connect(o.Path)
	case volume.Cut:
		t.disconnect(o.Subsystem)
	case volume.Disconnect:
		t.disconnect(o.Subsystem)
	case volume.HoldIO:
		t.stack().Held = true
	case volume.ResumeIO:
		t.stack().Held = false
	case volume.RecordStale:
		in := cluster.RecordStale{Node: hostName(h.Index), Volume: t.volume, Epoch: h.Memory.Epoch, Revisions: map[block.LegID]uint64{}}
		for _, l := range o.Legs {
			in.Legs = append(in.Legs, l.Leg)
			in.Revisions[l.Leg] = l.Revision
		}
		return t.requestStale(in, o.Legs)
	case volume.FlushLegs:
		return t.flushLegs(o)
	case volume.Readmit:
		t.stack().Slots[o.Copy].Withheld = false
		h.Memory.Asked, h.Memory.Secured = maps.Clone(h.Memory.Asked), maps.Clone(h.Memory.Secured)
		delete(h.Memory.Asked, o.Copy)
		delete(h.Memory.Secured, o.Copy)
	case volume.RecordInSync:
		in := cluster.RecordInSync{Node: hostName(h.Index), Volume: t.volume, Epoch: h.Memory.Epoch}
		for _, l := range o.Legs {
			in.Legs = append(in.Legs, cluster.RebuiltLeg{Leg: l.Leg, Revision: l.Revision})
		}
		return t.request(in, o.Legs)
	case volume.WriteNote:
		h.Note = o.Note
		return errEnough
	case volume.Build:
		t.build(o)
	case volume.Equalize:
		t.stack().Equalizing = true
	case volume.Add:
		return t.add(o)
	case volume.Promote:
		t.stack().Slots[o.Copy].State = volume.InSync
	case volume.Renew:
		return t.renew(o)
	case volume.Drop:
		h.Memory.Secured = maps.Clone(h.Memory.Secured)
		for _, l := range o.Legs {
			x := &t.stack().Slots[l.Copy]
			x.State, x.Withheld = volume.Failed, false
			delete(h.Memory.Secured, l.Copy)
			t.dropped |= 1 << l.Copy
		}
		return errEnough
	case volume.MakeDevice:
		t.stack().Device = true
		t.stack().Flushed = false
		t.exposed = true
		return errEnough
	case volume.CloseDevice:
		return t.close(o)
	case volume.Flush:
		return t.flush()
	case volume.Dismantle:
		h.Memory.Clean = o.Clean
		t.end()
	case volume.Abort:
		t.end()
	case volume.GiveUp:
		h.Memory.Over = &o.Over
		h.GivenUp = map[block.Epoch]volume.Over{h.Memory.Epoch: o.Over}
	case volume.Forget:
		return t.forget(o)
	default:
		panic("explore: no such order: " + o.String())
	}
	return nil
}

func (t *actor) connect(p volume.Path) error {
	for i := range t.Copies {
		if portalOf(i) != p.Portal || !t.connectable(i, p.Subsystem) {
			continue
		}
		if t.host.Conns[i] != "" {
			return errFailed // the connection of an older epoch goes first
		}
		t.host.Conns[i] = p.Subsystem
		t.connected |= 1 << i
		return nil
	}
	return errFailed
}

func (t *actor) disconnect(nqn block.NQN) {
	for i := range t.Copies {
		if t.host.Conns[i] == nqn {
			t.host.Conns[i] = ""
			t.cut |= 1 << i
		}
	}
}

// mayAsk reports whether a call can be sent to the manager: one at a time.
func (t *actor) mayAsk() bool {
	return t.in.linked && !t.in.asking && t.call == 0 && !t.host.Pauses
}

func (t *actor) requestStale(in cluster.RecordStale, legs []volume.Change) error {
	if t.mayAsk() {
		t.host.Memory.Asked = maps.Clone(t.host.Memory.Asked)
		for _, l := range legs {
			t.host.Memory.Asked[t.copyOf(l.Leg)] = l.Revision
		}
	}
	return t.request(in, legs)
}

// flushLegs flushes legs before others are recorded stale.
func (t *actor) flushLegs(o volume.FlushLegs) error {
	if !t.mayAsk() {
		return errFailed
	}
	secured := maps.Clone(t.host.Memory.Secured)
	for _, l := range o.Without {
		t.stack().Slots[l.Copy].Withheld = true
		delete(secured, l.Copy)
	}
	t.host.Memory.Secured = secured
	for _, l := range o.Legs {
		link := t.host.Wanted.At(0, l.Copy)
		nqn, id := link.NQN, link.UUID
		if st := t.host.Stack; st != nil {
			nqn, id = st.Slots[l.Copy].NQN, st.Slots[l.Copy].UUID
		}
		if !t.answers(l.Copy, nqn, id) {
			return errFailed
		}
	}
	for _, l := range o.Legs {
		t.synced |= 1 << l.Copy
		for _, without := range o.Without {
			secured[without.Copy] = secured[without.Copy].With(l.Copy)
		}
	}
	return nil
}

// request sends a call to the manager. The orders that rely on it wait.
func (t *actor) request(in cluster.Input, legs []volume.Change) error {
	if !t.mayAsk() {
		return errFailed
	}
	t.call = t.callNumber(in, legs)
	return errFailed
}

func (t *actor) build(o volume.Build) {
	h := t.host
	st := &stack{Wanted: h.Wanted, Equal: !h.Wanted.Equalize}
	for _, l := range o.Legs {
		st.Slots[l.Copy] = slotOf(h.Wanted, l)
		st.Slots[l.Copy].State = volume.InSync
		st.Slots[l.Copy].Tracked = st.Equal
		st.Slots[l.Copy].Covered = t.Cached
		t.added |= 1 << l.Copy
		t.earlier |= 1 << l.Copy
	}
	h.Stack, h.Memory.Used = st, true
}

func slotOf(w *volume.Wanted, at volume.At) slot {
	l := w.At(at.Column, at.Copy)
	return slot{Revision: at.Revision, NQN: l.NQN, UUID: l.UUID}
}

func (t *actor) add(o volume.Add) error {
	h := t.host
	was, x := h.Stack.Slots[o.Copy], slotOf(h.Wanted, o.At)
	if !t.answers(o.Copy, x.NQN, x.UUID) {
		return errFailed
	}
	x.State, x.Tracked, x.Full, x.Whole, x.Covered = volume.Rebuilding, true, o.Full, was.Whole, t.Cached
	if link := h.Wanted.At(0, o.Copy); o.Full || link.CopyAll && link.CacheLost {
		x.Whole = o.Revision
	}
	if o.Full {
		t.full |= 1 << o.Copy
	}
	t.stack().Slots[o.Copy] = x
	t.added |= 1 << o.Copy
	return nil
}

func (t *actor) renew(o volume.Renew) error {
	was, x := t.host.Stack.Slots[o.Copy], slotOf(t.host.Wanted, o.At)
	if !t.answers(o.Copy, x.NQN, x.UUID) {
		return errFailed
	}
	x.State, x.Tracked, x.Full, x.Whole, x.Withheld, x.Covered = was.State, was.Tracked, was.Full, was.Whole, was.Withheld, was.Covered
	t.stack().Slots[o.Copy] = x
	t.renewed |= 1 << o.Copy
	return nil
}

func (t *actor) close(o volume.CloseDevice) error {
	if t.in.busy != 0 && !o.Force {
		return errFailed // its user waits for a write
	}
	t.stack().Device = false
	return errEnough
}

func (t *actor) flush() error {
	for i := range t.Copies {
		if x := &t.host.Stack.Slots[i]; x.inUse() && !t.answers(i, x.NQN, x.UUID) {
			return errFailed
		}
	}
	for i := range t.Copies {
		if t.host.Stack.Slots[i].inUse() {
			t.flushed |= 1 << i
		}
	}
	t.stack().Flushed = true
	return nil
}

func (t *actor) end() {
	t.host.Stack, t.gone = nil, true
}

func (t *actor) forget(o volume.Forget) error {
	h := t.host
	for i := range t.Copies {
		if h.Conns[i] != "" {
			return errFailed
		}
	}
	m := h.memory(t.rig)
	h.Memory = newMemory(m.Ended(h.Wanted, o.Clean))
	return nil
}

// publish makes the report of a turn.
func (t *actor) publish(v volume.Verdict) {
	h := t.host
	h.Acted = h.Generation
	h.Said = said{Epoch: h.Memory.Epoch, Grant: h.Memory.Grant, Phase: v.Phase, Waits: len(v.Waiting) > 0, GaveUp: v.GaveUp}
	if h.Stack != nil {
		for i := range t.Copies {
			if h.Stack.Slots[i].inUse() {
				h.Said.InUse |= 1 << i
			}
		}
	}
	if h.Memory.Epoch == 0 {
		h.Said = said{}
	}
}

// callNumber numbers a call. The revisions of lost legs are remembered beside it, because the
// answer counts for them.
func (r *rig) callNumber(in cluster.Input, legs []volume.Change) int32 {
	c := request{input: in, legs: map[int]uint64{}}
	for _, l := range legs {
		c.legs[r.copyOf(l.Leg)] = l.Revision
	}
	_, stale := in.(cluster.RecordStale)
	return r.calls.number(encode(noon, struct {
		Stale bool
		In    any
		Legs  map[int]uint64
	}{stale, in, maps.Clone(c.legs)}), c)
}

// request is a call to the manager.
type request struct {
	input cluster.Input
	legs  map[int]uint64 // the revisions of the legs that it is about
}

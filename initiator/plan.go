// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// This file decides. Given what is wanted of a volume, what is remembered and
// what one look at the machine has found, plan names the next steps, in an order
// in which each may be the last one that is done. It touches nothing.
//
// The phases of an attachment (pb.AttachmentPhase) are not stored anywhere; they
// are what plan sees:
//
//	            legs connected,                all copies equal,
//	            columns built                  device made
//	CONNECTING ──────────────► EQUALIZING ──────────────► SERVING ◄────► STALLED
//	     │                          │                        │   a leg is lost and its loss
//	     │         detach wanted, or the epoch is over       │   not (yet) recorded; lease
//	     └──────────────────────────┴───────► DETACHING ◄────┴──────┘   suspension
//	                                              │
//	                    the device was let go and │ every leg had all writes
//	                 DETACHED_UNCLEAN ◄───────────┴──────────► DETACHED_CLEAN

// op is what an order does.
type op string

const (
	opConnect   op = "connect"        // a controller of a subsystem
	opSuspend   op = "suspend-device" // all I/O waits
	opRecord    op = "record-stale"   // tell the manager, and wait until it is durable
	opRelease   op = "release"        // delete a subsystem's controllers: what waits on them fails
	opLog       op = "make-log"       // the RAM disk of a column's log
	opColumn    op = "column"         // bring a column's tables where they are wanted
	opRecovered op = "record-in-sync" // tell the manager that a leg has caught up
	opResume    op = "resume-device"
	opTop       op = "make-device"
	opExpose    op = "expose"
	opFlush     op = "flush-device" // what drives may hold in their caches
	opHide      op = "hide"
	opRemoveTop op = "remove-device"
	opFailTop   op = "fail-device" // all I/O on it fails from now on
	opFailCol   op = "fail-column"
	opRemoveCol op = "remove-column"
	opForget    op = "forget" // logs and notes in the run directory
)

// refreshInterval is how often a mirror is told to try its last leg again.
const refreshInterval = 5 * time.Second

// order is one step.
type order struct {
	op     op
	nqn    block.NQN // connect, release
	force  bool      // release: the target is silent, so destroy the sockets first
	legs   []legAt   // record-stale, record-in-sync
	column int       // make-log, column, fail-column, remove-column
	steps  []raid.Step
	slots  []slot // column: what its copies are when it is done
	clean  bool   // remove-device: every leg has every write

	refresh bool // column: the tables stay, their errors are forgotten
}

// legAt is a leg at a revision.
type legAt struct {
	leg      block.LegID
	revision uint64
	column   int
	copied   block.Size
	why      string
	since    time.Time // of its silence or error
}

// String prints an order for logs and tests.
func (o order) String() string {
	s := string(o.op)
	switch o.op {
	case opConnect, opRelease:
		s += " " + string(o.nqn)
	case opRecord, opRecovered:
		for _, l := range o.legs {
			s += fmt.Sprintf(" %s@%d", l.leg, l.revision)
		}
	case opLog, opColumn, opFailCol, opRemoveCol:
		s += fmt.Sprintf(" %d", o.column)
	}
	if o.force {
		s += " by force"
	}
	return s
}

// seen is what one look found.
type seen struct {
	now         time.Time
	legs        map[block.LegID]legSeen
	columns     []columnSeen
	top         topSeen
	controllers map[block.NQN][]fabrics.Controller // of this volume, whatever the epoch
	connecting  map[block.NQN]bool                 // a connect is in the kernel
	refused     map[block.NQN]string               // what the last connect answered
	recordError string                             // what the manager last answered to a record
}

// legSeen is a leg as its host sees it.
type legSeen struct {
	nqn         block.NQN
	device      dm.Ref    // of its head; empty if there is none
	name        string    // nvme0n1
	live        bool      // a controller is live, and the head is prepared for use
	silent      time.Time // since when it has not answered; zero if it does
	looks       int       // how often it was looked at since
	peerAnswers bool      // another leg behind the same portal has answered since
	answers     bool      // the last probe through the device was answered
	err         string
}

func (l legSeen) head() fabrics.Head { return fabrics.Head{Name: l.name, Dev: string(l.device)} }

// columnSeen is one column.
type columnSeen struct {
	raid.Observed
	name          string
	devices       []dm.State // finished or not
	failed        bool       // fails all I/O
	foreign       string     // why its tables can not be understood
	log           dm.Ref     // its log device, if there is one
	health        map[dm.Ref]dm.Health
	inSync, total uint64 // regions
}

func (c columnSeen) copying() bool {
	return (c.Kind == raid.ShapeEqualizing || c.Kind == raid.ShapeRebuilding) && c.inSync < c.total
}

func (c columnSeen) has(d dm.Ref) bool {
	return d != "" && (slices.Contains(c.Sources, d) || c.Kind == raid.ShapeRebuilding && c.Back == d)
}

// tracks reports whether the log of c may hold what a copy misses.
func (c columnSeen) tracks(copy int) bool {
	return (c.Kind == raid.ShapeTracked || c.Kind == raid.ShapeRebuilding) && c.Copy == copy
}

// topSeen is the volume's device.
type topSeen struct {
	exists     bool
	suspended  bool
	suspending bool // the kernel waits for I/O below
	failed     bool // fails all I/O
	open       int
	exposed    bool
	users      string // who has it open, for people
}

// memory is what the agent knows of a volume beyond what it sees. The exported
// part is kept in the run directory; without it a resync is a full one.
type memory struct {
	Epoch block.Epoch     `json:"epoch"`
	Slots map[string]slot `json:"slots"` // by slotKey
	// Clean: when the device was let go, every leg had every write.
	Clean bool `json:"clean,omitempty"`
	// Gone: the device was let go, and nothing is left of the stack.
	Gone bool `json:"gone,omitempty"`

	since   time.Time          // of the first look at this epoch
	records attachment.Records // what the manager has answered

	refreshed map[int]time.Time // by column: when its mirrors were last told to forget errors
}

// slot is one copy of a column as the tables last had it. A slot whose leg has
// left the tables says which leg the column's log is about.
type slot struct {
	Leg    block.LegID `json:"leg"`
	Device dm.Ref      `json:"device"`
	NQN    block.NQN   `json:"nqn"`
	NSID   uint32      `json:"nsid"`
	UUID   block.UUID  `json:"uuid"`
	Dirty  block.Size  `json:"dirty,omitempty"` // bytes to copy when its rebuild began
}

const slotFormat = "%d.%d"

func slotKey(column, copy int) string { return fmt.Sprintf(slotFormat, column, copy) }

func (m *memory) slot(column, copy int) slot { return m.Slots[slotKey(column, copy)] }

// limits are the times that decisions depend on.
type limits struct {
	window  time.Duration // of silence, after which a leg is lost
	lease   time.Duration // of silence, after which reads stop
	connect time.Duration // to wait for an in-sync leg while another one is there
}

// verdict is what the manager is told.
type verdict struct {
	phase   pb.AttachmentPhase
	waiting []string // what I/O, or the device, waits for
	notes   []string // what else does not go forward
	done    block.Size
	total   block.Size
}

// planner is one run of plan.
type planner struct {
	w       *attachment.Wanted
	m       *memory
	s       *seen
	l       limits
	members []member
	orders  []order
	v       verdict
}

func (p *planner) do(o order) { p.orders = append(p.orders, o) }

func (p *planner) wait(format string, args ...any) {
	p.v.waiting = append(p.v.waiting, fmt.Sprintf(format, args...))
}

func (p *planner) note(format string, args ...any) {
	p.v.notes = append(p.v.notes, fmt.Sprintf(format, args...))
}

// plan names the steps from what is seen to what is wanted; w is nil if the
// volume is not wanted here. An order that does not succeed ends its list: the
// ones after it may be right only because of it.
func plan(w *attachment.Wanted, m *memory, s *seen, l limits) ([]order, verdict) {
	p := &planner{w: w, m: m, s: s, l: l}
	switch {
	case w == nil || p.built() && m.Epoch != w.Epoch:
		p.tearDown()
	case w.Detach:
		p.letGo()
	default:
		p.serve()
	}
	return p.orders, p.v
}

func (p *planner) built() bool {
	return p.s.top.exists || slices.ContainsFunc(p.s.columns, func(c columnSeen) bool { return len(c.devices) > 0 })
}

// guard is plan for as long as it is not known what is wanted: I/O goes on as it
// is, within the lease.
func guard(w *attachment.Wanted, m *memory, s *seen, l limits) ([]order, []string) {
	p := &planner{w: w, m: m, s: s, l: l}
	p.findMembers()
	p.lease()
	return p.orders, p.v.waiting
}

// ---- serving ----

func (p *planner) serve() {
	p.connect()
	p.findMembers()
	p.lease()
	p.dropLost()
	ready := true
	for k := range p.s.columns {
		ready = p.column(k) && ready
	}
	p.device(ready)
	p.cleanUp()
	p.progress()
	p.v.phase = p.phase()
}

func (p *planner) phase() pb.AttachmentPhase {
	switch {
	case p.s.top.exists && len(p.v.waiting) > 0:
		return pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED
	case p.s.top.exists && p.s.top.exposed:
		return pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
	case slices.ContainsFunc(p.s.columns, func(c columnSeen) bool { return c.Kind == raid.ShapeEqualizing }):
		return pb.AttachmentPhase_ATTACHMENT_PHASE_EQUALIZING
	}
	return pb.AttachmentPhase_ATTACHMENT_PHASE_CONNECTING
}

func (p *planner) recordedStale(l *attachment.Link) bool { return p.m.records.Stale(l) }

func (p *planner) inSync(l *attachment.Link) bool { return p.m.records.InSync(l) }

// connect asks for a controller of each subsystem that a leg needs: also of one
// that was there, since some kernels drop a controller for good when a target
// that comes back is not complete yet.
func (p *planner) connect() {
	asked := map[block.NQN]bool{}
	for i := range p.w.Links {
		l := &p.w.Links[i]
		if p.recordedStale(l) || asked[l.NQN] || p.s.connecting[l.NQN] || p.usable(l.NQN) {
			continue
		}
		asked[l.NQN] = true
		p.do(order{op: opConnect, nqn: l.NQN})
	}
}

func (p *planner) usable(n block.NQN) bool {
	return slices.ContainsFunc(p.s.controllers[n], func(c fabrics.Controller) bool { return !c.Going() })
}

// member is a copy that is in a column's tables.
type member struct {
	attachment.Member
	copy   int
	device dm.Ref
	since  time.Time // of its silence or error
}

func (p *planner) findMembers() {
	for k, c := range p.s.columns {
		for copy := range p.w.Layout.Copies {
			if m, ok := p.member(k, copy, c); ok {
				p.members = append(p.members, m)
			}
		}
		p.keepOne(k)
	}
}

// member finds the copy in the tables: under the device that it had last, or,
// if that was not written down, under the one that it has.
func (p *planner) member(k, copy int, c columnSeen) (member, bool) {
	slot, l := p.m.slot(k, copy), p.w.At(k, copy)
	m := member{Member: attachment.Member{Column: k, Leg: slot.Leg, NQN: slot.NQN}, copy: copy, device: slot.Device}
	if l != nil && (!c.has(m.device) || c.has(p.s.legs[l.Leg].device)) {
		m.Leg, m.device, m.NQN = l.Leg, p.s.legs[l.Leg].device, l.NQN
	}
	if !c.has(m.device) {
		return m, false
	}
	if l != nil && l.Leg == m.Leg && !p.recordedStale(l) {
		m.Link = l
	}
	// A rebuilt leg that is recorded in sync is as good as the others from then
	// on, also if one of them is lost before the tables say so.
	m.Source = slices.Contains(c.Sources, m.device) || m.Link != nil && p.inSync(m.Link)
	p.judge(&m, c)
	return m, true
}

// judge says whether a member is lost, why, and whether its path may hold I/O.
func (p *planner) judge(m *member, c columnSeen) {
	l := p.s.legs[m.Leg]
	silence := p.silence(m.Leg)
	moved := l.device != "" && l.device != m.device
	m.since = p.s.now
	if silence > 0 {
		m.since = l.silent
	}
	m.Waiting = silence > 0 && !moved || m.Link == nil && !p.s.alive(m.NQN)
	switch health := c.health[m.device]; {
	case m.Link == nil:
		m.Lost = "recorded stale"
	case silence > p.l.window && l.looks >= 3:
		m.Lost = fmt.Sprintf("no answer for more than %v", p.l.window)
	case health != 0 && health != dm.Alive:
		m.Lost = fmt.Sprintf("device-mapper reports a %v", health)
	case moved:
		m.Lost = fmt.Sprintf("its device %s is gone", m.device)
	}
}

// silence is how long a leg has not answered.
func (p *planner) silence(leg block.LegID) time.Duration {
	since := p.s.legs[leg].silent
	if since.IsZero() {
		return 0
	}
	return max(p.s.now.Sub(since), 1)
}

// keepOne lets a leg with errors stay if every source of its column has some: the
// first one whose path answers. (No log is right about the others then.)
func (p *planner) keepOne(k int) {
	var first *member
	for i := range p.members {
		m := &p.members[i]
		if m.Column != k || !m.Source {
			continue
		}
		if m.Lost == "" {
			return
		}
		if first == nil && m.Link != nil && p.silence(m.Leg) == 0 && p.s.legs[m.Leg].live {
			first = m
		}
	}
	if first != nil {
		first.Lost = ""
	}
}

// dropLost marks the members that leave now, has them recorded, and has their
// I/O released. A leg without which its column could not go on stays: its I/O
// waits until it is back.
func (p *planner) dropLost() {
	all := make([]*attachment.Member, len(p.members))
	for i := range p.members {
		all[i] = &p.members[i].Member
	}
	attachment.Leave(all)
	var record []legAt
	var release []block.NQN
	for _, m := range p.members {
		switch {
		case m.Lost != "" && !m.Gone:
			p.wait("leg %s of column %d on %s: %s, and no other copy can stand in", m.Leg, m.Column, p.nodeOf(m), m.Lost)
		case !m.Gone:
			continue
		case m.Link != nil:
			record = append(record, legAt{leg: m.Leg, revision: m.Link.Revision, column: m.Column, why: m.Lost, since: m.since})
		}
		if m.Gone && m.Waiting && !slices.Contains(release, m.NQN) {
			release = append(release, m.NQN)
		}
	}
	if len(record) > 0 {
		p.do(order{op: opRecord, legs: record})
		if p.s.recordError != "" {
			p.wait("volume manager, to record that leg %s is stale: %s", record[0].leg, p.s.recordError)
		}
	}
	for _, n := range release {
		p.release(n)
	}
}

func (p *planner) nodeOf(m member) string {
	if l := p.w.At(m.Column, m.copy); l != nil && l.Leg == m.Leg {
		return l.Node
	}
	return "another node"
}

func (p *planner) release(n block.NQN) {
	if len(p.s.controllers[n]) > 0 {
		p.do(order{op: opRelease, nqn: n, force: p.s.mute(n)})
	}
}

// alive reports whether a subsystem has a live controller, or none at all: then
// nothing waits on it either.
func (s *seen) alive(n block.NQN) bool {
	return len(s.controllers[n]) == 0 ||
		slices.ContainsFunc(s.controllers[n], func(c fabrics.Controller) bool { return c.State == fabrics.Live })
}

// mute reports whether a subsystem's target seems to be silent as a whole while
// the kernel believes in a connection to it.
func (s *seen) mute(n block.NQN) bool {
	believes := slices.ContainsFunc(s.controllers[n], func(c fabrics.Controller) bool { return c.State == fabrics.Live })
	for _, l := range s.legs {
		if believes && l.nqn == n && !l.silent.IsZero() && !l.peerAnswers {
			return true
		}
	}
	return false
}

// lease stops the device when a leg has been silent for so long that another
// host may have been given the volume. It goes on when every leg that is left
// has answered: that one is not known to be silent is not enough, for an agent
// that has just begun knows nothing.
func (p *planner) lease() {
	out := slices.ContainsFunc(p.members, func(m member) bool { return m.Link != nil && p.silence(m.Leg) >= p.l.lease })
	switch top := p.s.top; {
	case !top.exists || top.suspending:
	case out && !top.suspended:
		p.do(order{op: opSuspend})
	case !top.suspended:
	case p.allAnswer():
		p.do(order{op: opResume})
	default:
		p.wait("all legs to answer: the device is suspended")
	}
}

// allAnswer reports whether every leg in the tables is one that answers.
func (p *planner) allAnswer() bool {
	for _, m := range p.members {
		if m.Link != nil && (p.silence(m.Leg) > 0 || !p.s.legs[m.Leg].answers) {
			return false
		}
	}
	for k, c := range p.s.columns {
		known := func(d dm.Ref) bool {
			return d == "" || slices.ContainsFunc(p.members, func(m member) bool { return m.Column == k && m.device == d })
		}
		if !known(c.Back) || slices.ContainsFunc(c.Sources, func(d dm.Ref) bool { return !known(d) }) {
			return false
		}
	}
	return true
}

// column has one column built or changed, and reports whether all its in-sync
// copies are in place and equal.
func (p *planner) column(k int) (ready bool) {
	c := p.s.columns[k]
	if c.foreign != "" {
		p.wait("a person: column %d: %s", k, c.foreign)
		return false
	}
	if p.w.Layout.Copies > 1 && c.log == "" {
		p.do(order{op: opLog, column: k})
		return false
	}
	want, slots, ok := p.wantColumn(k)
	if !ok {
		return false
	}
	steps, err := raid.Plan(c.devices, want)
	if err != nil {
		p.wait("a person: %v", err)
		return false
	}
	if len(steps) > 0 || !p.noted(k, slots) {
		p.do(order{op: opColumn, column: k, steps: steps, slots: slots})
		return false
	}
	if m := p.tried(k); m != nil {
		p.note("leg %s of column %d on %s: device-mapper reports a %v, and no other copy can stand in", m.Leg, k, p.nodeOf(*m), c.health[m.device])
		if p.s.now.Sub(p.m.refreshed[k]) >= refreshInterval {
			p.do(order{op: opColumn, column: k, steps: raid.Refresh(c.devices, want), slots: slots, refresh: true})
			return false
		}
	}
	p.recovered(k)
	return c.Kind != raid.ShapeEqualizing
}

// noted reports whether the slots of a column are remembered. They are not if
// an agent ended between a step and its note; a later loss would then be put
// down to the leg that had the slot before.
func (p *planner) noted(k int, slots []slot) bool {
	for copy, s := range slots {
		was := p.m.slot(k, copy)
		was.Dirty, s.Dirty = 0, 0
		if was != s {
			return false
		}
	}
	return true
}

// tried is the one leg of a column of an attached volume that stays in spite of
// its errors: its mirror has to be told to try it again, or it fails all I/O from
// then on. (With another source there the two might differ in what failed on both.)
func (p *planner) tried(k int) (last *member) {
	for i, m := range p.members {
		if m.Column != k || !m.Source {
			continue
		}
		if last != nil || m.Gone || m.Lost != "" {
			return nil
		}
		last = &p.members[i]
	}
	if last == nil || !p.s.top.exists {
		return nil
	}
	if h := p.s.columns[k].health[last.device]; h == 0 || h == dm.Alive {
		return nil
	}
	return last
}

// wantColumn says what each copy of a column should be; not ok if it can not be
// built yet.
func (p *planner) wantColumn(k int) (want raid.Column, slots []slot, ok bool) {
	c := p.s.columns[k]
	want = raid.NewColumn(p.w.Volume, k, p.w.Layout, p.w.Size, c.log)
	want.Legs = make([]raid.Leg, p.w.Layout.Copies)
	want.Equalize = p.w.Equalize && !p.s.top.exists && !(c.Kind == raid.ShapeEqualizing && c.inSync == c.total)
	slots = make([]slot, p.w.Layout.Copies)
	sources := 0
	for copy := range want.Legs {
		state, device := p.wantCopy(k, copy, c)
		if state == raid.InSync {
			sources++
		}
		want.Legs[copy] = raid.Leg{Device: device, State: state}
		slots[copy] = p.slotFor(k, copy, state, device)
	}
	p.followOne(k, &want, slots)
	complete := p.complete(k)
	if complete && sources == 0 {
		p.wait("a leg of column %d that is in sync", k)
	}
	return want, slots, complete && sources > 0
}

// followOne leaves one copy at most tracked or rebuilding, for a log is about
// one: the copy that comes back goes first, then the one that it is about.
func (p *planner) followOne(k int, want *raid.Column, slots []slot) {
	c := p.s.columns[k]
	best := -1
	rank := func(copy int) (n int) {
		if want.Legs[copy].State == raid.Rebuilding {
			n += 2
		}
		if c.tracks(copy) {
			n++
		}
		return n
	}
	for copy, l := range want.Legs {
		if (l.State == raid.Rebuilding || l.State == raid.Tracked) && (best < 0 || rank(copy) > rank(best)) {
			best = copy
		}
	}
	for copy, l := range want.Legs {
		if copy != best && (l.State == raid.Rebuilding || l.State == raid.Tracked) {
			want.Legs[copy], slots[copy] = raid.Leg{}, slot{}
		}
	}
	if best < 0 || want.Legs[best].State != raid.Rebuilding {
		return
	}
	l := p.w.At(k, best)
	want.Full = l.CopyAll || p.m.slot(k, best).Leg != l.Leg || !c.tracks(best)
	switch {
	case c.Kind == raid.ShapeRebuilding && c.Back == want.Legs[best].Device: // under way
	case want.Full:
		slots[best].Dirty = want.Size
	default:
		slots[best].Dirty = min(want.Size, block.Size(c.total-c.inSync)*c.Region)
	}
}

// wantCopy says what one copy should be, and on which device.
func (p *planner) wantCopy(k, copy int, c columnSeen) (raid.LegState, dm.Ref) {
	l, i := p.w.At(k, copy), p.memberAt(k, copy)
	if i < 0 {
		return p.wantOutside(k, copy, c)
	}
	m := p.members[i]
	trusted := p.s.top.exists && !p.untrusted(k)
	switch {
	case m.Gone && trusted:
		return raid.Tracked, m.device
	case m.Gone:
		return raid.Absent, ""
	case p.inSync(l):
		return raid.InSync, p.current(m)
	case m.Link != nil && !m.Source:
		return raid.Rebuilding, m.device
	}
	return raid.InSync, m.device // lost, and nothing can stand in: it stays
}

// untrusted reports whether a column keeps a leg that has had errors: what its
// log says of the others is then not all that they miss.
func (p *planner) untrusted(k int) bool {
	return slices.ContainsFunc(p.members, func(m member) bool {
		h := p.s.columns[k].health[m.device]
		return m.Column == k && m.Source && !m.Gone && h != 0 && h != dm.Alive
	})
}

// current is the device that a member is to be used through: a leg that stays
// as the only one may have come back under another.
func (p *planner) current(m member) dm.Ref {
	l := p.s.legs[m.Leg]
	others := slices.ContainsFunc(p.members, func(o member) bool {
		return o.Column == m.Column && o.Leg != m.Leg && o.Source && !o.Gone
	})
	if !others && m.Source && l.live && l.device != "" {
		return l.device
	}
	return m.device
}

// wantOutside is wantCopy for a copy that is not in the tables.
func (p *planner) wantOutside(k, copy int, c columnSeen) (raid.LegState, dm.Ref) {
	l := p.w.At(k, copy)
	sole := len(c.Sources) == 1 && !slices.ContainsFunc(p.members, func(m member) bool { return m.Column == k && m.Source })
	switch {
	case p.inSync(l) && (c.Kind == raid.ShapeNothing || sole) && p.s.legs[l.Leg].live:
		return raid.InSync, p.s.legs[l.Leg].device
	case l != nil && !p.inSync(l) && !p.recordedStale(l) && p.s.legs[l.Leg].live && p.s.top.exists:
		return raid.Rebuilding, p.s.legs[l.Leg].device
	case c.tracks(copy) && c.Kind != raid.ShapeNothing:
		return raid.Tracked, p.m.slot(k, copy).Device
	}
	return raid.Absent, ""
}

func (p *planner) memberAt(k, copy int) int {
	return slices.IndexFunc(p.members, func(m member) bool { return m.Column == k && m.copy == copy })
}

// slotFor is what is to be remembered of a copy.
func (p *planner) slotFor(k, copy int, state raid.LegState, device dm.Ref) slot {
	if state == raid.Absent {
		return slot{}
	}
	was, l := p.m.slot(k, copy), p.w.At(k, copy)
	if state == raid.Tracked || l == nil {
		return was
	}
	s := slot{Leg: l.Leg, Device: device, NQN: l.NQN, NSID: l.NSID, UUID: l.UUID}
	if state == raid.Rebuilding {
		s.Dirty = was.Dirty
	}
	return s
}

// complete reports whether every leg that is in sync by record is in the tables
// or can be put there. One that is not, and another copy is, is recorded stale:
// at once if the column is built, since it has missed writes.
func (p *planner) complete(k int) bool {
	c := p.s.columns[k]
	var record []legAt
	live, missing := 0, 0
	for copy := range p.w.Layout.Copies {
		l := p.w.At(k, copy)
		if !p.inSync(l) || p.memberAt(k, copy) >= 0 {
			continue
		}
		if seen := p.s.legs[l.Leg]; seen.live && (c.Kind == raid.ShapeNothing || len(c.Sources) == 1 && p.w.Layout.Copies == 1) {
			live++
			continue
		}
		missing++
		record = append(record, legAt{leg: l.Leg, revision: l.Revision, column: k, why: "can not be connected", since: p.m.since})
		if !p.s.top.exists {
			p.wait("leg %s of column %d on %s: %s", l.Leg, k, l.Node, p.trouble(l))
		}
	}
	if missing == 0 {
		return true
	}
	if c.Kind != raid.ShapeNothing {
		if slices.ContainsFunc(p.members, func(m member) bool { return m.Column == k && m.Source && !m.Gone && m.Lost == "" }) {
			p.do(order{op: opRecord, legs: record})
		}
		return true
	}
	if live > 0 && p.s.now.Sub(p.m.since) >= p.l.connect {
		p.do(order{op: opRecord, legs: record})
	}
	return false
}

// trouble says what keeps a leg from being live.
func (p *planner) trouble(l *attachment.Link) string {
	switch {
	case p.s.legs[l.Leg].err != "":
		return p.s.legs[l.Leg].err
	case p.s.refused[l.NQN] != "":
		return p.s.refused[l.NQN]
	}
	return "connecting"
}

// recovered has a leg recorded in sync when all its regions are.
func (p *planner) recovered(k int) {
	c := p.s.columns[k]
	if c.Kind != raid.ShapeRebuilding {
		return
	}
	i := p.memberAt(k, c.Copy)
	if i < 0 || c.total == 0 || c.inSync < c.total {
		return
	}
	m := p.members[i]
	l := p.s.legs[m.Leg]
	if m.Gone || m.Lost != "" || m.Link == nil || p.inSync(m.Link) || l.device != m.device || !l.silent.IsZero() {
		return
	}
	p.do(order{op: opRecovered, legs: []legAt{{leg: m.Leg, revision: m.Link.Revision, copied: p.m.slot(k, c.Copy).Dirty}}})
	if p.s.recordError != "" {
		p.note("record leg %s in sync: %s", m.Leg, p.s.recordError)
	}
}

// device makes the volume's device when all columns are there and equal, and
// gives it its name.
func (p *planner) device(ready bool) {
	switch {
	case !p.s.top.exists && ready:
		p.do(order{op: opTop})
		p.do(order{op: opExpose})
	case p.s.top.exists && !p.s.top.exposed && !p.w.Detach:
		p.do(order{op: opExpose})
	}
}

// cleanUp lets go of controllers that nothing uses.
func (p *planner) cleanUp() {
	for _, n := range p.subsystems() {
		wanted := slices.ContainsFunc(p.w.Links, func(l attachment.Link) bool { return l.NQN == n && !p.recordedStale(&l) })
		used := slices.ContainsFunc(p.members, func(m member) bool { return m.NQN == n })
		asked := slices.ContainsFunc(p.orders, func(o order) bool { return o.nqn == n })
		if !wanted && !used && !asked && p.usable(n) {
			p.release(n)
		}
	}
}

// subsystems lists what there are controllers of, in order.
func (p *planner) subsystems() []block.NQN { return slices.Sorted(maps.Keys(p.s.controllers)) }

func (p *planner) progress() {
	for k, c := range p.s.columns {
		if !c.copying() {
			continue
		}
		left := block.Size(c.total-c.inSync) * c.Region
		total := block.Size(c.total) * c.Region
		if c.Kind == raid.ShapeRebuilding {
			total = max(p.m.slot(k, c.Copy).Dirty, left)
		}
		p.v.total += total
		p.v.done += total - left
	}
}

// ---- letting go ----

// letGo removes the stack of a volume that nobody uses, after everything that
// was written has reached every leg.
func (p *planner) letGo() {
	if p.m.Gone && !p.built() && len(p.s.controllers) == 0 {
		p.v.phase = p.outcome()
		return
	}
	p.v.phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
	p.findMembers()
	switch {
	case p.s.top.exists && (p.s.top.open > 0 || !p.settled() && !p.hopeless()):
		p.members = nil
		p.serve()
		p.v.phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
		if p.s.top.open > 0 {
			p.wait("%s has it open", cmp.Or(p.s.top.users, "somebody"))
		}
	case p.s.top.exists:
		clean := p.settled()
		if clean {
			p.do(order{op: opFlush})
		}
		p.hide()
		p.do(order{op: opRemoveTop, clean: clean})
	default:
		p.removeRest(p.m.Clean && p.settled())
	}
}

func (p *planner) outcome() pb.AttachmentPhase {
	if p.m.Clean {
		return pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN
	}
	return pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_UNCLEAN
}

// settled reports whether every in-sync leg is in the tables, and well.
func (p *planner) settled() bool {
	for i := range p.w.Links {
		l := &p.w.Links[i]
		at := p.memberAt(l.Column, l.Copy)
		if !p.inSync(l) || !p.s.top.exists && len(p.s.columns[l.Column].devices) == 0 {
			continue
		}
		if at < 0 || p.members[at].Lost != "" || p.silence(l.Leg) > 0 {
			return false
		}
	}
	return !slices.ContainsFunc(p.members, func(m member) bool { return m.Source && m.Lost != "" })
}

// hopeless reports whether a leg has been silent for the whole lease.
func (p *planner) hopeless() bool {
	return slices.ContainsFunc(p.members, func(m member) bool { return p.silence(m.Leg) >= p.l.lease })
}

// removeRest removes what is below the device. If it is not well, whatever may
// still wait on the legs is made to fail first: a table is not let go before
// its I/O has ended.
func (p *planner) removeRest(well bool) {
	if !well {
		p.releaseAll()
	}
	for k, c := range p.s.columns {
		if len(c.devices) == 0 {
			continue
		}
		if !well && !c.failed {
			p.do(order{op: opFailCol, column: k})
		}
		p.do(order{op: opRemoveCol, column: k})
	}
	if well {
		p.releaseAll()
	}
	if len(p.s.connecting) > 0 {
		p.wait("a connect that is under way")
		return
	}
	p.do(order{op: opForget})
}

func (p *planner) releaseAll() {
	for _, n := range p.subsystems() {
		p.release(n)
	}
}

func (p *planner) hide() {
	if p.s.top.exposed {
		p.do(order{op: opHide})
	}
}

// tearDown takes away the stack of an attachment that is over: the targets let
// no write of it through any more. Whoever still has the device open gets errors.
func (p *planner) tearDown() {
	p.v.phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
	p.hide()
	top := p.s.top
	switch {
	case top.exists && top.open == 0:
		p.do(order{op: opRemoveTop})
	case top.exists && !top.failed:
		p.releaseAll()
		for k, c := range p.s.columns {
			if len(c.devices) > 0 && !c.failed {
				p.do(order{op: opFailCol, column: k})
			}
		}
		p.do(order{op: opFailTop})
	}
	if top.exists && top.open > 0 {
		p.wait("%s has the device of epoch %d open, which is over", cmp.Or(top.users, "somebody"), p.m.Epoch)
	}
	if top.exists && top.open > 0 && !top.failed {
		return
	}
	if p.built() && (!top.exists || top.failed || top.open == 0) {
		p.removeColumns()
	}
	if top.exists && top.open > 0 {
		return
	}
	p.releaseAll()
	if len(p.s.connecting) == 0 && (p.built() || p.m.Epoch != 0) {
		p.do(order{op: opForget})
	}
}

// removeColumns fails what may still wait and removes the columns.
func (p *planner) removeColumns() {
	p.releaseAll()
	for k, c := range p.s.columns {
		if len(c.devices) == 0 {
			continue
		}
		if !c.failed {
			p.do(order{op: opFailCol, column: k})
		}
		p.do(order{op: opRemoveCol, column: k})
	}
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// This file and those named plan_*.go decide, and touch nothing. Given what is
// wanted of a volume, what is remembered and what one look at the machine has
// found, plan names the next steps, in an order in which each may be the last one
// that is done.
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
	opNote      op = "note"           // durably, which legs hold every write
	opRelease   op = "release"        // delete a subsystem's controllers: what waits on them fails
	opLog       op = "make-log"       // the RAM disk of a column's log
	opColumn    op = "column"         // bring a column's tables where they are wanted
	opRecovered op = "record-in-sync" // tell the manager that a leg has caught up
	opResume    op = "resume-device"
	opTop       op = "make-device"
	opGrow      op = "grow-device"
	opExpose    op = "expose"
	opFlush     op = "flush-device" // what drives may hold in their caches
	opHide      op = "hide"
	opRemoveTop op = "remove-device"
	opFailTop   op = "fail-device" // all I/O on it fails from now on
	opFailCol   op = "fail-column"
	opRemoveCol op = "remove-column"
	opForget    op = "forget"  // logs and notes in the run directory
	opGiveUp    op = "give-up" // this epoch, for good
)

// refreshInterval is how often a mirror is told to try its last leg again.
const refreshInterval = 5 * time.Second

// order is one step.
type order struct {
	op     op
	nqn    block.NQN           // connect, release
	force  bool                // release: the target is silent, so destroy the sockets first
	legs   []attachment.Change // record-stale, record-in-sync
	column int                 // make-log, column, fail-column, remove-column
	steps  []raid.Step
	slots  []slot // column: what its copies are when it is done
	clean  bool   // remove-device: every leg has every write
	end    *over  // give-up

	refresh bool // column: the tables stay, their errors are forgotten
	note    evidence.Note
}

// String prints an order for logs and tests.
func (o order) String() string {
	s := string(o.op)
	switch o.op {
	case opConnect, opRelease:
		s += " " + string(o.nqn)
	case opRecord, opRecovered:
		for _, l := range o.legs {
			s += fmt.Sprintf(" %s@%d", l.Leg, l.Revision)
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
	clock       time.Time // now, on the clock of leases
	legs        map[block.LegID]legSeen
	columns     []columnSeen
	top         topSeen
	controllers map[block.NQN][]fabrics.Controller // of this volume, whatever the epoch
	connecting  map[block.NQN]bool                 // a connect is in the kernel
	refused     map[block.NQN]string               // what the last connect answered
	recordError string                             // what the manager last answered to a record
	noted       evidence.Note
	noteError   string // why a note that names too many legs still stands
}

// legSeen is a leg as its host sees it.
type legSeen struct {
	nqn         block.NQN
	device      dm.Ref // of its head; empty if there is none
	name        string // nvme0n1
	size        block.Size
	fit         bool      // a controller is live, and the head is prepared for use
	live        bool      // and it has answered
	heard       time.Time // start of the last probe that was answered, on the clock of leases
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
	foreign       string     // why its tables cannot be understood
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
	size       block.Size
	readOnly   bool
	open       int
	exposed    bool
	users      string // who has it open, for people
}

// memory is what the agent knows of a volume beyond what it sees. The exported
// part is kept in the run directory; without it a resync is a full one.
type memory struct {
	Epoch block.Epoch     `json:"epoch"`
	Grant uint64          `json:"grant,omitempty"`
	Slots map[string]slot `json:"slots"` // by slotKey
	// Clean: when the device was let go, every leg had every write.
	Clean bool `json:"clean,omitempty"`
	// Gone: the device was let go, and nothing is left of the stack.
	Gone bool `json:"gone,omitempty"`
	// Over: why it is not taken up again at this epoch; nil if it may be.
	Over *over `json:"over,omitempty"`

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

// of reports whether it is of the grant by which a volume is wanted.
func (m *memory) of(w *attachment.Wanted) bool { return m.Epoch == w.Epoch && m.Grant == w.Grant }

func (m *memory) slot(column, copy int) slot { return m.Slots[slotKey(column, copy)] }

// limits are the times that decisions depend on.
type limits struct {
	window  time.Duration // of silence, after which a leg is lost
	lease   time.Duration // of silence, after which reads stop
	connect time.Duration // to wait for an in-sync leg while another one is there
}

// planner is one run of plan.
type planner struct {
	w       *attachment.Wanted
	m       *memory
	s       *seen
	l       limits
	members []member
	orders  []order
	ends    *over // why the epoch is given up now
	v       attachment.Verdict
}

func (p *planner) do(o order) { p.orders = append(p.orders, o) }

// plan names the steps from what is seen to what is wanted; w is nil if the
// volume is not wanted here. An order that does not succeed ends its list: the
// ones after it may be right only because of it.
func plan(w *attachment.Wanted, m *memory, s *seen, l limits) ([]order, attachment.Verdict) {
	p := &planner{w: w, m: m, s: s, l: l}
	if p.built() && m.Over == nil {
		p.end()
	}
	switch {
	case w == nil || p.built() && !m.of(w) || p.over() != nil:
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
	return p.orders, p.v.Waiting
}

// ---- serving ----

func (p *planner) serve() {
	p.connect()
	p.findMembers()
	p.lease()
	p.dropLost()
	p.note()
	ready := true
	for k := range p.s.columns {
		ready = p.column(k) && ready
	}
	p.device(ready)
	p.growTop()
	p.noteMore()
	p.cleanUp()
	p.progress()
	p.v.Phase = p.phase()
}

// sources are the legs that hold every write, as far as the manager has recorded it.
func (p *planner) sources() evidence.Note {
	n := evidence.Note{Epoch: p.w.Epoch, Legs: map[block.LegID]uint64{}}
	for i := range p.w.Links {
		if l := &p.w.Links[i]; p.s.columns[l.Column].Kind == raid.ShapeNothing && p.inSync(l) {
			n.Legs[l.Leg] = l.Revision
		}
	}
	for _, m := range p.members {
		if m.Source && !m.Gone && m.Link != nil {
			n.Legs[m.Leg] = m.Link.Revision
		}
	}
	n.Whole = len(n.Legs) == p.w.Layout.Legs()
	return n
}

// notes reports whether a volume's legs are noted at all: with one copy, or where
// nobody writes, there is nothing to confuse.
func (p *planner) notes() bool { return p.w.Layout.Copies > 1 && !p.w.ReadOnly }

// note has it written down that legs are not in sync any more, before anything goes
// on without them: after a crash no note may name too many.
func (p *planner) note() {
	n := p.sources()
	if !p.notes() || p.s.noted.Within(n) || slices.ContainsFunc(p.orders, func(o order) bool { return o.op == opNote }) {
		return
	}
	p.do(order{op: opNote, note: n})
	if p.s.noteError != "" {
		p.v.Wait("this host's disk: %s", p.s.noteError)
	}
}

// noteMore has it written down that legs are in sync. Nothing waits for that.
func (p *planner) noteMore() {
	n := p.sources()
	if p.notes() && p.s.noted.Within(n) && !p.s.noted.Equal(n) {
		p.do(order{op: opNote, note: n})
	}
}

func (p *planner) phase() pb.AttachmentPhase {
	switch {
	case p.s.top.exists && len(p.v.Waiting) > 0:
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

// lease stops the device when the last answer of a leg is so old that another host
// may have been given the volume. What an agent has not heard itself is as old as
// can be: an earlier one may have died long ago, or this one have been frozen. The
// device goes on when every leg that is left has answered.
func (p *planner) lease() {
	switch top := p.s.top; {
	case !top.exists || top.suspending || top.failed:
	case p.w.ReadOnly && top.suspended:
		p.do(order{op: opResume})
	case p.w.ReadOnly: // nobody is let write to any leg before none of them can be read any more
	case !top.suspended && p.leaseOver():
		p.do(order{op: opSuspend})
	case !top.suspended:
	case p.allAnswer():
		p.do(order{op: opResume})
	default:
		p.v.Wait("all legs to answer; the device is suspended")
	}
}

// leaseOver reports whether a leg in the tables has not been heard for the lease.
func (p *planner) leaseOver() bool {
	return !p.allKnown() || slices.ContainsFunc(p.members, func(m member) bool {
		return m.Link != nil && p.s.clock.Sub(p.s.legs[m.Leg].heard) >= p.l.lease
	})
}

// allAnswer reports whether every leg in the tables is one that answers.
func (p *planner) allAnswer() bool {
	return !p.leaseOver() && !slices.ContainsFunc(p.members, func(m member) bool {
		return m.Link != nil && (p.silence(m.Leg) > 0 || !p.s.legs[m.Leg].answers)
	})
}

// allKnown reports whether it is known of each leg in the tables which one it is.
func (p *planner) allKnown() bool {
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
	// In sync is what the next host can build a volume of, of the size that is wanted.
	if short := p.short(m.Link); short != "" {
		p.v.Note("record leg %s in sync: %s", m.Leg, short)
		return
	}
	p.do(order{op: opRecovered, legs: []attachment.Change{{Leg: m.Leg, Revision: m.Link.Revision, Copied: p.m.slot(k, c.Copy).Dirty}}})
	if p.s.recordError != "" {
		p.v.Note("record leg %s in sync: %s", m.Leg, p.s.recordError)
	}
}

// device makes the volume's device when all columns are there and equal, and
// gives it its name.
func (p *planner) device(ready bool) {
	switch {
	case !p.s.top.exists && ready && !p.longEnough():
		p.v.Wait("all legs to have room for %v", p.w.Size)
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
		p.v.Total += total
		p.v.Done += total - left
	}
}

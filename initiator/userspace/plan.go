// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/engine"
)

// This file and those named plan_*.go decide. Given what is wanted of a volume,
// what is remembered and what one look has found, plan names the next steps, in an
// order in which each may be the last one that is done.
//
// The phases of an attachment are drawn in initiator/plan.go. Here they are:
//
//	CONNECTING   there is no volume yet: a leg in sync is not connected
//	EQUALIZING   the volume is there, and its copies are being made equal
//	SERVING      the device is there
//	STALLED      the device is there, and something holds its I/O
//	DETACHING    the device, the volume and the connections go, in this order

// op is what an order does.
type op string

const (
	opConnect    op = "connect"        // to a subsystem
	opSuspend    op = "suspend"        // all I/O of the volume waits
	opResume     op = "resume"         //
	opRecord     op = "record-stale"   // tell the manager, and wait until it is durable
	opNote       op = "note"           // durably, which legs hold every write
	opDrop       op = "drop"           // the volume goes on without legs
	opCut        op = "cut"            // end a connection at once: what waits on it fails
	opBuild      op = "build"          // the volume, of its legs in sync
	opEqualize   op = "equalize"       // begin to make its copies equal
	opAdd        op = "rebuild"        // begin to copy to a leg, or to read from one that nobody writes to
	opRecovered  op = "record-in-sync" // tell the manager that a leg has caught up
	opPromote    op = "promote"        // read from a leg
	opRenew      op = "renew"          // go on with a leg that has lost its cache, and nothing that counts
	opGiveUp     op = "give-up"        // this epoch, for good
	opExport     op = "export"         // make the device
	opGrow       op = "grow"           // the volume, to what is wanted
	opResize     op = "resize"         // the device, to the volume's size
	opClose      op = "close"          // take the device away, unless somebody has it open
	opFlush      op = "flush"          // what drives may hold in their caches
	opDismantle  op = "dismantle"      // the volume, which nobody uses
	opAbort      op = "abort"          // take device and volume away, with errors to who uses it
	opDisconnect op = "disconnect"     // a connection that nothing uses
	opForget     op = "forget"         // the epoch
)

// order is one step.
type order struct {
	op    op
	nqn   block.NQN // connect, cut, disconnect
	legs  []legAt
	clean bool       // dismantle, forget: every leg in sync has every write
	force bool       // close: with errors for what waits, since nothing will end that
	end   *pb.GaveUp // give-up
	note  evidence.Note
}

// place is where a leg belongs.
type place struct{ column, copy int }

// legAt is a leg in its place, at a revision.
type legAt struct {
	place
	leg      block.LegID
	revision uint64
	full     bool       // rebuild: copy everything
	copied   block.Size // record-in-sync
	why      string     // record-stale
	since    time.Time  // record-stale: of its silence or error
}

// changes are what the records of the order's legs are to say.
func (o order) changes() (all []attachment.Change) {
	for _, l := range o.legs {
		all = append(all, attachment.Change{Leg: l.leg, Revision: l.revision, Column: l.column, Copied: l.copied, Why: l.why, Since: l.since})
	}
	return all
}

// String prints an order for logs and tests.
func (o order) String() string {
	s := string(o.op)
	if o.nqn != "" {
		s += " " + string(o.nqn)
	}
	for _, l := range o.legs {
		s += fmt.Sprintf(" %s@%d", l.leg, l.revision)
		if l.full {
			s += " in full"
		}
	}
	if o.clean {
		s += " clean"
	}
	if o.force {
		s += " by force"
	}
	if o.end != nil {
		s += ": " + o.end.Why
	}
	return s
}

// seen is what one look found.
type seen struct {
	now         time.Time
	clock       time.Time               // now, on the clock of leases
	legs        map[block.LegID]legSeen // of those that are wanted, and of those in use
	conns       map[block.NQN]connSeen
	volume      volumeSeen
	device      deviceSeen
	recordError string // what the manager last answered to a record
	noted       evidence.Note
	noteError   string // why a note that names too many legs still stands
}

// legSeen is a leg as its host sees it.
type legSeen struct {
	live    bool // it is connected, fit to be used, and has answered
	size    block.Size
	silent  time.Time // since when it has not answered; zero if it does
	looks   int       // how often it was looked at since
	answers bool      // the last probe was answered
	heard   time.Time // start of the last probe that was answered, on the clock of leases
	err     string    // what is wrong with it
}

// connSeen is a connection, or the making of one.
type connSeen struct {
	made bool   // else it is being made
	live bool   // as far as it knows
	err  string // what hinders it
}

// volumeSeen is the engine's volume.
type volumeSeen struct {
	built      bool
	size       block.Size
	legs       [][]engine.LegStatus
	held       int
	suspended  bool
	equal      bool // its copies are
	equalizing bool
	equalized  engine.Progress
	flushed    bool // since the device was closed
}

// deviceSeen is the device node.
type deviceSeen struct {
	exists  bool
	size    block.Size
	ended   bool   // somebody else took it away
	refusal string // why it could not be closed when that was last tried
	open    bool   // namely because somebody has it open
}

// memory is what the keeper knows of an epoch beyond what it sees.
type memory struct {
	epoch   block.Epoch
	grant   uint64
	since   time.Time // of the first look at this epoch
	records attachment.Records
	slots   map[place]slot // which leg the engine has in each place
	used    bool           // a volume was built
	clean   bool           // gone: every leg in sync had every write
	gone    bool           // the volume was let go, and nothing is left of it
	over    *pb.GaveUp     // why it is not taken up again at this epoch; nil: it may be
}

func newMemory(epoch block.Epoch, now time.Time) *memory {
	return &memory{epoch: epoch, since: now, records: attachment.NewRecords(), slots: map[place]slot{}}
}

// of reports whether it is of the grant by which a volume is wanted.
func (m *memory) of(w *attachment.Wanted) bool { return m.epoch == w.Epoch && m.grant == w.Grant }

// slot is the leg that the engine has, or had last, in a place.
type slot struct {
	leg      block.LegID
	revision uint64
	node     string
	nqn      block.NQN
	tracked  bool       // the engine knows all that it may miss
	dirty    block.Size // what there was to copy when its rebuild began
}

// limits are the times that decisions depend on.
type limits struct {
	window  time.Duration // of silence, after which a leg is lost
	lease   time.Duration // of silence, after which reads stop
	stuck   time.Duration // one I/O may take, though the leg answers probes
	connect time.Duration // to wait for a leg in sync while another one is there
}

// planner is one run of plan.
type planner struct {
	w       *attachment.Wanted
	m       *memory
	s       *seen
	l       limits
	members []member
	orders  []order
	ends    *pb.GaveUp // why the epoch is given up now
	v       attachment.Verdict
}

func (p *planner) do(o order) { p.orders = append(p.orders, o) }

// plan names the steps from what is seen to what is wanted; w is nil if the
// volume is not wanted here. An order that does not succeed ends its list: the
// ones after it may be right only because of it.
func plan(w *attachment.Wanted, m *memory, s *seen, l limits) ([]order, attachment.Verdict) {
	p := &planner{w: w, m: m, s: s, l: l}
	if p.built() && m.over == nil {
		p.end()
	}
	switch {
	case w == nil || p.built() && !m.of(w) || p.over() != nil:
		p.tearDown()
	case w.Detach:
		p.letGo()
	default:
		p.serve()
		p.v.Phase = p.phase()
	}
	return p.orders, p.v
}

// guard is plan for as long as what is wanted cannot be read: I/O goes on as it
// is, within the lease.
func guard(w *attachment.Wanted, m *memory, s *seen, l limits) ([]order, []string) {
	p := &planner{w: w, m: m, s: s, l: l}
	p.findMembers()
	p.lease()
	return p.orders, p.v.Waiting
}

func (p *planner) built() bool { return p.s.volume.built || p.s.device.exists }

func (p *planner) status(at place) engine.LegStatus { return p.s.volume.legs[at.column][at.copy] }

// places are all that a volume has, by column and copy.
func (p *planner) places() (all []place) {
	for column := range p.w.Layout.Stripes {
		for copy := range p.w.Layout.Copies {
			all = append(all, place{column, copy})
		}
	}
	return all
}

func (p *planner) link(at place) *attachment.Link { return p.w.At(at.column, at.copy) }

// ---- serving ----

func (p *planner) serve() {
	p.connect()
	p.findMembers()
	p.lease()
	p.promote()
	p.dropLost()
	p.note()
	if p.s.volume.built {
		p.change()
		p.device()
		p.grow()
	} else {
		p.build()
	}
	p.noteMore()
	p.cleanUp()
	p.progress()
}

// inSync are the legs that hold every write, as far as the manager has recorded it.
func (p *planner) inSync() evidence.Note {
	n := evidence.Note{Epoch: p.w.Epoch, Legs: map[block.LegID]uint64{}}
	if !p.s.volume.built {
		for i := range p.w.Links {
			if l := &p.w.Links[i]; p.m.records.InSync(l) {
				n.Legs[l.Leg] = l.Revision
			}
		}
	}
	for _, m := range p.members {
		if p.s.volume.built && m.Source && !m.Gone && m.Link != nil {
			n.Legs[m.Leg] = m.Link.Revision
		}
	}
	n.Whole = len(n.Legs) == p.w.Layout.Legs()
	return n
}

// noted reports whether a volume's legs are noted at all: with one copy, or where
// nobody writes, there is nothing to confuse.
func (p *planner) noted() bool { return p.w.Layout.Copies > 1 && !p.w.ReadOnly }

// note has it written down that legs are not in sync any more, before anything goes
// on without them: after a crash no note may name too many.
func (p *planner) note() {
	n := p.inSync()
	if !p.noted() || p.s.noted.Within(n) || slices.ContainsFunc(p.orders, func(o order) bool { return o.op == opNote }) {
		return
	}
	p.do(order{op: opNote, note: n})
	if p.s.noteError != "" {
		p.v.Wait("this host's disk: %s", p.s.noteError)
	}
}

// noteMore has it written down that legs are in sync. Nothing waits for that.
func (p *planner) noteMore() {
	n := p.inSync()
	if p.noted() && p.s.noted.Within(n) && !p.s.noted.Equal(n) {
		p.do(order{op: opNote, note: n})
	}
}

func (p *planner) phase() pb.AttachmentPhase {
	switch {
	case p.s.device.exists && len(p.v.Waiting) > 0:
		return pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED
	case p.s.device.exists:
		return pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
	case p.s.volume.built && !p.s.volume.equal:
		return pb.AttachmentPhase_ATTACHMENT_PHASE_EQUALIZING
	}
	return pb.AttachmentPhase_ATTACHMENT_PHASE_CONNECTING
}

// connect asks for a connection to each subsystem that a leg needs.
func (p *planner) connect() {
	asked := map[block.NQN]bool{}
	for i := range p.w.Links {
		l := &p.w.Links[i]
		if _, there := p.s.conns[l.NQN]; there || asked[l.NQN] || p.m.records.Stale(l) {
			continue
		}
		asked[l.NQN] = true
		p.do(order{op: opConnect, nqn: l.NQN})
	}
}

// lease stops the volume when the last answer of a leg is so old that another host
// may have been given it. It goes on when every leg that is left has answered. Who
// only reads needs no lease: nobody is let write to any leg before none of them can
// be read any more.
func (p *planner) lease() {
	switch {
	case !p.s.volume.built || p.w.ReadOnly:
	case p.leaseLeft() <= 0 && !p.s.volume.suspended:
		p.do(order{op: opSuspend})
	case !p.s.volume.suspended:
	case p.allAnswer():
		p.do(order{op: opResume})
	default:
		p.v.Wait("all legs to answer; the volume is suspended")
	}
}

// leaseLeft is for how long the volume may be read if no leg answers any more.
func (p *planner) leaseLeft() time.Duration {
	left := p.l.lease
	for _, m := range p.members {
		if m.Link != nil {
			left = min(left, p.l.lease-p.s.clock.Sub(p.s.legs[m.Leg].heard))
		}
	}
	return left
}

// leaseLeft is what the planner's is, for the reads that complete between turns.
func leaseLeft(w *attachment.Wanted, m *memory, s *seen, l limits) time.Duration {
	p := &planner{w: w, m: m, s: s, l: l}
	p.findMembers()
	return p.leaseLeft()
}

// allAnswer reports whether every leg in use is one that answers.
func (p *planner) allAnswer() bool {
	return p.leaseLeft() > 0 && !slices.ContainsFunc(p.members, func(m member) bool {
		return m.Link == nil || p.silence(m.Leg) > 0 || !p.s.legs[m.Leg].answers
	})
}

// build makes the volume as soon as every leg in sync can be used, or those that
// cannot are recorded stale.
func (p *planner) build() {
	var legs []legAt
	complete := true
	for column := range p.w.Layout.Stripes {
		found, ok := p.gather(column)
		legs = append(legs, found...)
		complete = complete && ok
	}
	if complete {
		p.do(order{op: opBuild, legs: legs})
	}
}

// gather lists the legs of a column that are in sync and can be used; complete if
// no other is in sync.
func (p *planner) gather(column int) (live []legAt, complete bool) {
	var missing []legAt
	for copy := range p.w.Layout.Copies {
		at := place{column, copy}
		l := p.link(at)
		switch {
		case !p.m.records.InSync(l):
		case p.s.legs[l.Leg].live:
			live = append(live, legAt{place: at, leg: l.Leg, revision: l.Revision})
		default:
			missing = append(missing, legAt{place: at, leg: l.Leg, revision: l.Revision, why: "cannot be connected", since: p.m.since})
			p.v.Wait("leg %s of column %d on %s: %s", l.Leg, column, l.Node, p.trouble(l))
		}
	}
	switch {
	case len(live) == 0 && len(missing) == 0:
		p.v.Wait("a leg of column %d that is in sync", column)
	case len(live) == 0 || len(missing) == 0 || p.s.now.Sub(p.m.since) < p.l.connect:
	case p.w.ReadOnly:
		return live, true // the others join later
	default:
		p.record(missing)
	}
	return live, len(live) > 0 && len(missing) == 0
}

// trouble says what keeps a leg from being used.
func (p *planner) trouble(l *attachment.Link) string {
	switch {
	case p.s.legs[l.Leg].err != "":
		return p.s.legs[l.Leg].err
	case p.s.conns[l.NQN].err != "":
		return p.s.conns[l.NQN].err
	}
	return "connecting"
}

// change takes legs that come back into the volume, and has those recorded that
// have caught up.
func (p *planner) change() {
	for _, at := range p.places() {
		switch i := p.memberAt(at); {
		case i >= 0 && p.reborn(at) != nil:
			p.renew(p.members[i])
		case i >= 0:
			p.recovered(p.members[i])
		case p.m.records.InSync(p.link(at)) && !p.w.ReadOnly:
			p.missed(at)
		default:
			p.rejoin(at)
		}
	}
}

// missed has a leg recorded stale that is in sync by record, and not in use: it
// has missed writes.
func (p *planner) missed(at place) {
	l := p.link(at)
	good := func(m member) bool { return m.Column == at.column && m.Source && !m.Gone && m.Lost == "" }
	if slices.ContainsFunc(p.members, good) {
		p.record([]legAt{{place: at, leg: l.Leg, revision: l.Revision, why: "was not in use", since: p.s.now}})
	}
}

// rejoin begins the rebuild of a leg that is back.
func (p *planner) rejoin(at place) {
	l := p.link(at)
	if l == nil || p.m.records.Stale(l) || !p.s.volume.equal || p.w.Detach {
		return
	}
	switch short := p.short(l); {
	case p.s.legs[l.Leg].size > 0 && short != "":
		p.v.Note("rebuild leg %s of column %d on %s: %s", l.Leg, l.Column, l.Node, short)
		return
	case !p.s.legs[l.Leg].live:
		return
	}
	if p.w.ReadOnly && (!p.s.legs[l.Leg].answers || p.silence(l.Leg) > 0) {
		return // it was left because it did not answer
	}
	was := p.m.slots[at]
	full := l.CopyAll || was.leg != l.Leg || !was.tracked
	p.do(order{op: opAdd, legs: []legAt{{place: at, leg: l.Leg, revision: l.Revision, full: full}}})
}

// promote reads from legs that are recorded in sync: before others leave, as one
// of these may be the last of its column then.
func (p *planner) promote() {
	for _, m := range p.members {
		if m.state == engine.CaughtUp && m.Source && m.Lost == "" {
			p.do(order{op: opPromote, legs: []legAt{{place: m.place, leg: m.Leg, revision: m.Link.Revision}}})
		}
	}
}

// recovered has a leg that holds everything recorded in sync.
func (p *planner) recovered(m member) {
	if m.state != engine.CaughtUp || m.Source || m.Gone || m.Lost != "" || m.Link == nil || p.silence(m.Leg) > 0 {
		return
	}
	// In sync is what the next host can build a volume of, of the size that is wanted.
	if short := p.short(m.Link); short != "" {
		p.v.Note("record leg %s in sync: %s", m.Leg, short)
		return
	}
	l := legAt{place: m.place, leg: m.Leg, revision: m.Link.Revision, copied: p.m.slots[m.place].dirty}
	p.do(order{op: opRecovered, legs: []legAt{l}})
	if p.s.recordError != "" {
		p.v.Note("record leg %s in sync: %s", m.Leg, p.s.recordError)
	}
}

// device makes the device when all copies are equal.
func (p *planner) device() {
	switch v := p.s.volume; {
	case p.s.device.exists && p.s.device.ended:
		p.do(order{op: opClose})
	case p.s.device.exists || p.w.Detach:
	case v.equal:
		p.do(order{op: opExport})
	case !v.equalizing:
		p.do(order{op: opEqualize})
	}
}

// cleanUp lets go of connections that nothing uses.
func (p *planner) cleanUp() {
	for _, n := range slices.Sorted(maps.Keys(p.s.conns)) {
		wanted := slices.ContainsFunc(p.w.Links, func(l attachment.Link) bool { return l.NQN == n && !p.m.records.Stale(&l) })
		used := slices.ContainsFunc(p.members, func(m member) bool { return m.NQN == n })
		asked := slices.ContainsFunc(p.orders, func(o order) bool { return o.nqn == n })
		if !wanted && !used && !asked && p.s.conns[n].made {
			p.do(order{op: opDisconnect, nqn: n})
		}
	}
}

func (p *planner) progress() {
	v := p.s.volume
	if v.equalizing {
		p.v.Done, p.v.Total = p.v.Done+v.equalized.Done, p.v.Total+v.equalized.Total
	}
	for _, m := range p.members {
		if m.state == engine.Rebuilding {
			resync := p.status(m.place).Resync
			p.v.Done, p.v.Total = p.v.Done+resync.Done, p.v.Total+resync.Total
		}
	}
}

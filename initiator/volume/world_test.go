// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// The two kinds of data path, as far as the planner can tell them apart.
var ways = map[string]Capabilities{
	"tables": {Tables: true, Outlives: true, KnowsUsers: true, Multipath: true, Moves: true},
	"copies": {KnowsFlushed: true, Withholds: true, Transports: []block.Transport{block.TCP}},
}

var errDown = errors.New("does not answer")

// world is a volume with its targets, its manager and its host, for either kind of data path.
// It starts no goroutine: turn looks, plans and acts, and the test advances the time.
type world struct {
	caps    Capabilities
	now     time.Time
	layout  block.Layout
	wanted  *Wanted
	memory  *Memory
	away    bool          // the manager does not answer
	unheard bool          // the manager's answers to records are lost, and what it is asked comes late
	silent  map[int]bool  // nodes that do not answer
	hangs   map[int]bool  // nodes whose drives do not answer a flush
	leaves  map[int]bool  // nodes whose legs are to be left out
	since   map[int]since // by node
	paths   map[Path]bool // connected paths
	columns []ColumnSeen
	slots   map[Place]*leg
	named   bool
	device  bool
	open    bool
	held    bool
	freezes map[string]FreezeSeen
	quiet   bool // what was under way when I/O was held has ended
	flushed bool
	noted   Note
	refusal string // why the device could not be removed last time

	size       block.Size         // of the volume
	deviceSize block.Size         // of its device
	larger     map[int]block.Size // by node: the volume that its legs have room for; GiB if not listed
	equalizing bool               // the copies are being made equal

	unwanted bool // the manager does not want the volume here
	broke    bool // the device fails all I/O

	next    int // number of the next write
	wrote   []write
	verdict Verdict
	bad     []string // broken promises
}

// since is when a node last answered, and when its silence began.
type since struct {
	heard, silent time.Time
	looks         int
}

// leg is a leg as its drive and the manager's records have it.
type leg struct {
	id       block.LegID
	holds    map[int]bool // the writes on it, by number
	durable  map[int]bool // those that its drive's cache cannot lose
	inSync   bool         // recorded so
	away     bool         // recorded stale, and not listed for this host again
	revision uint64
	using    uint64 // the revision under which it is in use
	tracked  bool
	withheld bool // no write is acknowledged in which it takes part
	settling bool // copied to until the next turn
}

// write is a write that has begun.
type write struct {
	number int
	column int
	done   bool
}

func newWorld(caps Capabilities, stripes, copies int) *world {
	w := &world{
		caps: caps, now: time.Unix(1e9, 0), layout: block.Layout{Stripes: stripes, Copies: copies, Chunk: block.DefaultChunk},
		silent: map[int]bool{}, hangs: map[int]bool{}, leaves: map[int]bool{}, since: map[int]since{}, paths: map[Path]bool{}, slots: map[Place]*leg{}, memory: &Memory{},
		size: block.GiB, larger: map[int]block.Size{},
	}
	w.wanted = &Wanted{Name: "db1", Size: block.GiB, Layout: w.layout, Epoch: 1}
	for column := range stripes {
		w.columns = append(w.columns, ColumnSeen{Log: true})
		for copy := range w.layout.Slots() {
			w.slots[Place{column, copy}] = &leg{holds: map[int]bool{}}
			if copy < copies {
				w.slots[Place{column, copy}] = &leg{id: legID(column, copy), holds: map[int]bool{}, inSync: true}
			}
			w.columns[column].Copies = append(w.columns[column].Copies, CopySeen{})
		}
	}
	w.memory.Epoch = 1
	w.memory.Begin(w.now)
	w.link()
	return w
}

func legID(column, copy int) block.LegID {
	return block.LegID{UUID: block.UUIDFromRandom([16]byte{1, byte(column), byte(copy)})}
}

func portal(node int) block.Portal {
	return block.Portal{Transport: block.TCP, Address: fmt.Sprintf("192.0.2.%d", node+1), Port: 4420}
}

func (w *world) subsystem(node int) block.NQN { return block.NQN(fmt.Sprintf("nqn.t%d", node)) }

// link lists in the wanted state the legs that are not away.
func (w *world) link() {
	changed := *w.wanted
	changed.Links = nil
	for column := range w.layout.Stripes {
		for copy := range w.layout.Copies {
			if l := w.slots[Place{column, copy}]; !l.away {
				why := ""
				if w.leaves[copy] {
					why = "its target is about to stop"
				}
				changed.Links = append(changed.Links, Link{
					Leg: l.id, Column: column, Copy: copy, Rebuilding: !l.inSync, Revision: l.revision,
					Node: fmt.Sprintf("t%d", copy), NQN: w.subsystem(copy), Portals: []block.Portal{portal(copy)}, LeaveOut: why,
				})
			}
		}
	}
	w.wanted = &changed
}

// comeBack lists stale legs again whose nodes answer.
func (w *world) comeBack() {
	if w.away {
		return
	}
	for at, l := range w.slots {
		if l.away && !w.silent[at.Copy] {
			l.away, l.revision = false, l.revision+1
		}
	}
	w.link()
}

// look returns what the planner sees.
func (w *world) look() *Seen {
	s := &Seen{
		Now: w.now, Clock: w.now, Legs: map[block.LegID]LegSeen{}, ReadOnly: w.wanted.ReadOnly, Noted: w.noted,
		Linked: !w.away, Held: w.held, Quiet: w.quiet, Holdable: w.built(), Flushed: w.flushed, Freezes: w.freezes, Copying: w.caps.Tables || w.equalizing,
		Device: DeviceSeen{Exists: w.device, Named: w.named, Failed: w.broke, Size: w.deviceSize, Refusal: w.refusal, Open: w.open && (w.caps.KnowsUsers || w.refusal != "")},
	}
	if w.built() {
		s.Size = w.size
	}
	for _, path := range slices.SortedFunc(maps.Keys(w.paths), func(a, b Path) int { return int(a.Portal.Address[8]) - int(b.Portal.Address[8]) }) {
		s.Paths = append(s.Paths, PathSeen{Path: path, State: PathLive})
	}
	for node := range w.layout.Copies {
		t := w.since[node]
		path := Path{w.subsystem(node), portal(node)}
		switch answers := w.paths[path] && !w.silent[node]; {
		case answers:
			t.silent, t.looks, t.heard = time.Time{}, 0, w.now
		case t.silent.IsZero():
			t.silent = w.now
		default:
			t.looks++
		}
		w.since[node] = t
		for column := range w.layout.Stripes {
			s.Legs[legID(column, node)] = LegSeen{
				Live: !t.heard.IsZero() && w.paths[path] && t.silent.IsZero() && w.fits(column, node), Size: w.layout.LegSize(w.room(node)),
				Ways: []WaySeen{{Path: path, Silent: t.silent, Looks: t.looks, Answers: t.silent.IsZero(), Heard: t.heard}},
			}
		}
	}
	for column := range w.columns {
		c := w.columns[column]
		c.Copies = slices.Clone(c.Copies)
		c.Sources = 0
		for copy := range c.Copies {
			seen, l := &c.Copies[copy], w.slots[Place{column, copy}]
			if seen.State == InSync {
				c.Sources++
			}
			seen.Leg, seen.Subsystem, seen.Node = l.id, w.subsystem(copy), fmt.Sprintf("t%d", copy)
			seen.Tracked, seen.Superseded = l.tracked, l.using != l.revision
			seen.Withheld = l.withheld
			seen.Busy = seen.State != Absent && w.silent[copy] && w.paths[Path{w.subsystem(copy), portal(copy)}]
			if w.silent[copy] && !w.paths[Path{w.subsystem(copy), portal(copy)}] && seen.inUse() {
				seen.Error = "write error"
			}
		}
		if w.caps.Tables {
			c.Differs = func(want Column) (bool, error) { return w.differs(column, want), nil }
		}
		s.Columns = append(s.Columns, c)
	}
	return s
}

func (w *world) built() bool {
	return slices.ContainsFunc(w.columns, func(c ColumnSeen) bool { return c.Exists })
}

// room is the size of the volume that a node's legs have room for.
func (w *world) room(node int) block.Size { return max(block.GiB, w.larger[node]) }

// fits reports whether a node's leg is large enough to be used now.
func (w *world) fits(column, node int) bool {
	need := w.layout.LegSize(w.wanted.Size)
	if c := w.columns[column]; c.Built {
		need = min(need, c.Size)
	}
	return w.layout.LegSize(w.room(node)) >= need
}

func (w *world) differs(column int, want Column) bool {
	c := w.columns[column]
	if !c.Built || c.Size != want.Size || c.Equalizing && !want.Equalize {
		return true
	}
	for copy, to := range want.Copies {
		was := c.Copies[copy].State
		same := was == to.State || was == CaughtUp && to.State == Rebuilding
		if !same {
			return true
		}
	}
	return false
}

// turn looks, plans, and carries out the first n orders.
func (w *world) turn(n int) (did []string) {
	w.now = w.now.Add(200 * time.Millisecond)
	defer func(held bool) { w.quiet = held && w.held }(w.held)
	for at, l := range w.slots {
		if c := &w.columns[at.Column].Copies[at.Copy]; c.State == Rebuilding && !w.silent[at.Copy] {
			if l.settling = !l.settling; !l.settling && w.copyTo(at, l) {
				c.State = CaughtUp
			}
		}
	}
	w.equalize()
	s := w.look()
	limits := Limits{Window: 2 * time.Second, Lease: 8 * time.Second, Stuck: time.Minute, Connect: ConnectPatience, Retry: RetryLast}
	wanted := w.wanted
	if w.unwanted {
		wanted = nil
	}
	orders, v := Plan(wanted, w.memory, s, limits, w.caps)
	w.verdict = v
	for _, o := range orders {
		if n--; n < 0 {
			break
		}
		if err := w.do(s, o); err == nil {
			w.memory.Did(o, w.now)
			did = append(did, o.String())
		} else if !Alone(o, s) {
			break
		}
	}
	w.check()
	return did
}

// equalize copies a part of each column whose copies are being made equal.
func (w *world) equalize() {
	for k := range w.columns {
		c := &w.columns[k]
		copying := c.Equalizing && (w.caps.Tables || w.equalizing)
		for copy, seen := range c.Copies {
			copying = copying && (!seen.inUse() || w.reaches(copy))
		}
		if !copying {
			continue
		}
		c.Left -= min(c.Left, c.Size/4)
		c.Equalizing = c.Left > 0 || w.caps.Tables // a table says so until the column is changed
	}
}

// copyTo copies to a leg from a leg in sync that answers, if there is one.
func (w *world) copyTo(at Place, l *leg) bool {
	for copy, c := range w.columns[at.Column].Copies {
		if c.State == InSync && w.reaches(copy) {
			maps.Copy(l.holds, w.slots[Place{at.Column, copy}].holds)
			return w.reaches(at.Copy)
		}
	}
	return false
}

// reaches reports whether I/O sent to a node arrives.
func (w *world) reaches(node int) bool {
	return !w.silent[node] && w.paths[Path{w.subsystem(node), portal(node)}]
}

func (w *world) do(s *Seen, o Order) error {
	switch o := o.(type) {
	case Connect:
		if w.silent[int(o.Portal.Address[8]-'1')] {
			return errDown
		}
		w.paths[o.Path] = true
	case Cut:
		delete(w.paths, o.Path)
	case Disconnect:
		delete(w.paths, o.Path)
	case SyncFileSystems, FreezeFileSystems: // the test says how far they are
	case HoldIO:
		w.memory.HoldBegan(o, w.now)
		w.held, w.quiet = true, false
	case Readmit:
		w.slots[o.Place].withheld = false
	case FlushLegs:
		if w.away {
			return ErrLater
		}
		w.memory.WithholdFor(o)
		for _, at := range o.Without {
			w.slots[at.Place].withheld = w.caps.Withholds
		}
		for _, at := range o.Legs {
			if !w.reaches(at.Copy) || w.hangs[at.Copy] {
				return errDown
			}
			w.slots[at.Place].durable = maps.Clone(w.slots[at.Place].holds)
		}
		w.memory.Flushed(o, w.now)
	case ResumeIO:
		w.held = false
		for at, l := range w.slots {
			if c := w.columns[at.Column].Copies[at.Copy]; c.inUse() && (!w.reaches(at.Copy) || l.away) {
				w.broken("I/O goes on, and %v does not answer, or is recorded stale", at)
			}
		}
	case RecordStale, RecordInSync:
		return w.record(o)
	case WriteNote:
		w.noted = o.Note
	case SetColumn:
		return w.setColumn(o)
	case Build:
		w.size = w.wanted.Size
		for _, at := range o.Legs {
			w.put(at.Place, InSync)
			c := &w.columns[at.Column]
			c.Equalizing, c.Left = w.wanted.Equalize, c.Size
		}
	case Equalize:
		w.equalizing = true
	case Grow:
		w.size = w.wanted.Size
		for k := range w.columns {
			w.growColumn(k, w.layout.LegSize(w.size))
		}
	case GrowDevice:
		w.deviceSize = w.wanted.Size
		for _, c := range w.columns {
			if c.Size < w.layout.LegSize(w.deviceSize) {
				w.broken("the device grows to %v over a column of %v", w.deviceSize, c.Size)
			}
		}
	case Add:
		if !o.Full && !w.slots[o.Place].tracked {
			w.broken("%v is rebuilt in part, and nobody knows what it misses", o)
		}
		if w.wanted.ReadOnly {
			w.put(o.Place, InSync)
			break
		}
		w.put(o.Place, Rebuilding)
	case Promote:
		w.put(o.Place, InSync)
	case Drop:
		for _, at := range o.Legs {
			w.take(at.Place, true)
		}
	case MakeDevice:
		w.device, w.named, w.flushed, w.deviceSize = true, !w.caps.KnowsUsers, false, w.wanted.Size
		if slices.ContainsFunc(w.columns, func(c ColumnSeen) bool { return c.Equalizing }) {
			w.broken("the device is made before the copies are equal")
		}
	case NameDevice:
		w.named = true
	case HideDevice:
		w.named = false
	case CloseDevice:
		if w.open && !o.Force {
			w.refusal = "somebody has it open"
			return errDown
		}
		w.device, w.named, w.open, w.refusal, w.memory.Clean = false, false, false, "", o.Clean
	case Flush:
		w.flushed = true
	case Dismantle:
		w.memory.Clean = o.Clean
		w.end()
	case Abort, FailColumn:
		w.end()
		if _, all := o.(Abort); all {
			w.device, w.named, w.open = false, false, false
		}
	case RemoveColumn:
		w.end()
	case FailDevice:
		w.broke = true
	case GiveUp:
		w.memory.Over = &o.Over
	case Forget:
		if w.built() || len(w.paths) > 0 {
			w.broken("the epoch is forgotten, and something of it is here")
		}
		w.memory.Gone, w.memory.Clean = true, o.Clean
	default:
		w.broken("no such order: %v", o)
	}
	return nil
}

func (w *world) end() {
	for k := range w.columns {
		w.columns[k].Exists, w.columns[k].Built = false, false
		for copy := range w.columns[k].Copies {
			w.columns[k].Copies[copy].State = Absent
		}
	}
}

// record acts as the manager.
func (w *world) record(o Order) error {
	if w.away {
		return errDown
	}
	if stale, ok := o.(RecordStale); ok {
		if w.device {
			w.checkDurable(stale.Legs)
		}
		for _, c := range stale.Legs {
			w.memory.Records.NoteAsked(c.Leg, c.Revision)
		}
		if w.unheard {
			return errDown
		}
		for _, c := range stale.Legs {
			w.memory.Records.NoteStale(c.Leg, c.Revision)
			for _, l := range w.slots {
				if l.id == c.Leg {
					l.inSync, l.away = false, true
				}
			}
		}
	} else {
		for _, c := range o.(RecordInSync).Legs {
			w.memory.Records.NoteInSync(c.Leg, c.Revision)
			for _, l := range w.slots {
				if l.id == c.Leg && l.revision == c.Revision {
					l.inSync = true
				}
			}
		}
	}
	w.link()
	return nil
}

// setColumn fails while a leg that leaves may still answer.
func (w *world) setColumn(o SetColumn) error {
	for copy, to := range o.Want.Copies {
		at := Place{o.Column, copy}
		if was := w.columns[o.Column].Copies[copy].State; was != Absent && to.State == Absent && w.silent[copy] && w.paths[Path{w.subsystem(copy), portal(copy)}] {
			return ErrLater
		}
		if to.State == Rebuilding && !o.Want.Full && !w.slots[at].tracked {
			w.broken("%v is rebuilt in part, and nobody knows what it misses", at)
		}
	}
	c := &w.columns[o.Column]
	if o.Want.Equalize && !c.Built { // a mirror that is built is equal, or is being made so
		c.Equalizing, c.Left = true, o.Want.Size
	}
	c.Equalizing = c.Equalizing && o.Want.Equalize
	defer w.growColumn(o.Column, o.Want.Size)
	for copy, to := range o.Want.Copies {
		at := Place{o.Column, copy}
		was := w.columns[o.Column].Copies[copy].State
		switch {
		case to.State == Absent && was != Absent:
			w.take(at, to.Track)
		case to.State == Absent:
			w.slots[at].tracked = to.Track
		case was == CaughtUp && to.State == Rebuilding:
		default:
			w.put(at, to.State)
		}
	}
	return nil
}

func (w *world) put(at Place, state CopyState) {
	c := &w.columns[at.Column]
	if !c.Built {
		c.Size = w.layout.LegSize(w.wanted.Size)
	}
	c.Exists, c.Built = true, true
	l := w.slots[at]
	// A source that stays because no other copy can replace it has every write.
	if state == InSync && !l.inSync && c.Copies[at.Copy].State != InSync {
		w.broken("%v is read from, and not recorded in sync", at)
	}
	if c.Copies[at.Copy].State == Absent {
		l.using, l.tracked = l.revision, true
	}
	c.Copies[at.Copy].State = state
}

// growColumn fails the test if a leg in use has no room.
func (w *world) growColumn(k int, size block.Size) {
	for copy, seen := range w.columns[k].Copies {
		if seen.inUse() && size > w.layout.LegSize(w.room(copy)) {
			w.broken("column %d grows to %v, and leg %d of it has no room", k, size, copy)
		}
	}
	w.columns[k].Size = size
}

func (w *world) take(at Place, track bool) {
	l := w.slots[at]
	if l.inSync && !w.wanted.ReadOnly {
		w.broken("%v leaves, and counts as in sync", at)
	}
	if n := w.noted; slices.Contains(slices.Collect(maps.Keys(n.Legs)), l.id) && w.layout.Copies > 1 && !w.wanted.ReadOnly {
		w.broken("%v leaves, and this host's note still names it", at)
	}
	w.columns[at.Column].Copies[at.Copy].State, l.tracked, l.withheld = Absent, track, false
}

// begin starts a user's write to a column.
func (w *world) begin(column int) {
	if !w.device || !w.built() {
		return
	}
	w.next++
	w.wrote = append(w.wrote, write{number: w.next, column: column})
}

// complete delivers writes to the legs that answer, and acknowledges those that all legs in
// use have.
func (w *world) complete() {
	for i := range w.wrote {
		o := &w.wrote[i]
		if o.done || w.held || !w.columns[o.column].Built {
			continue
		}
		all := true
		for copy, c := range w.columns[o.column].Copies {
			l := w.slots[Place{o.column, copy}]
			if c.inUse() && w.reaches(copy) {
				l.holds[o.number] = true
			}
			all = all && (!c.inUse() || l.holds[o.number] && !l.withheld)
		}
		o.done = all
	}
}

// check fails the test unless every leg that counts as in sync has every acknowledged write.
func (w *world) check() {
	w.complete()
	for _, o := range w.wrote {
		for copy := range w.layout.Copies {
			if l := w.slots[Place{o.column, copy}]; o.done && l.inSync && !l.holds[o.number] {
				w.broken("write %d was acknowledged, and leg %d.%d counts as in sync and lacks it", o.number, o.column, copy)
			}
		}
	}
}

// checkDurable fails the test if legs in sync are recorded stale, and no other one of their column has
// every acknowledged write on its medium.
func (w *world) checkDurable(stale []Change) {
	for _, c := range stale {
		if !w.slots[w.placeOf(c.Leg)].inSync {
			continue
		}
		lacks := func(l *leg) bool {
			return slices.ContainsFunc(w.wrote, func(o write) bool { return o.column == c.Column && o.done && !l.durable[o.number] })
		}
		stays := func(l *leg) bool {
			return l.inSync && !slices.ContainsFunc(stale, func(c Change) bool { return c.Leg == l.id })
		}
		enough := false
		for copy := range w.layout.Copies {
			l := w.slots[Place{c.Column, copy}]
			enough = enough || stays(l) && !lacks(l)
		}
		if !enough {
			w.broken("leg %s of column %d is recorded stale, and the others may lose acknowledged writes with their caches", c.Leg, c.Column)
		}
	}
}

func (w *world) placeOf(id block.LegID) (at Place) {
	for at, l := range w.slots {
		if l.id == id {
			return at
		}
	}
	panic("no such leg: " + id.String())
}

func (w *world) broken(format string, args ...any) {
	w.bad = append(w.bad, fmt.Sprintf(format, args...))
}

// SPDX-License-Identifier: Apache-2.0

// Package cluster holds the state and the decisions of the volume manager: which nodes,
// drives, pools and volumes there are, which hosts may write each volume, and which copies
// are good. It decides and does nothing else:
//
//	API request, agent report, tick ──► State.Step(now, input)
//	                                        │
//	        error: refused, nothing changed ┤
//	                                        ▼
//	        Outcome: records to commit durably, then nodes to wake,
//	                 events to publish, and the answer for the caller
//
// There is no I/O, no clock and no randomness here: times and seeds come with
// the inputs, so the same inputs always give the same states. The caller uses a
// State from one goroutine, commits [Outcome].Records in one transaction, and
// answers only after that. If the commit fails, the State is ahead of the store and
// must be thrown away: [Load] the records again.
//
// The durable part of a State is in the records. The reported part is known only from
// the agents: which of them are online, what they admit, what their inventories hold,
// when a fence began. No record holds any of it, and after Load it is empty until the
// agents report.
//
// A volume is S columns of C legs. A leg that is [LegInSync] holds every acknowledged
// write. Every transition in this package keeps that true, and keeps at least one such
// leg in every column. Where the rules are:
//
//	attach.go  grants, fences, leases, detaching      sync.go   legs going stale and coming back
//	shared.go  volumes attached to several hosts      whatif.go what a loss would lead to
//	volume.go  creating and deleting                  drive.go  adding and evicting drives
//	expand.go  volumes that grow in use               wanted.go what the agents are told
//	explain.go why a volume is in its state           rebuild.go a lost store rebuilt from drive labels
//	stock.go   hosts without an agent                 term.go   managers that follow one another
//	replace.go legs that are made again elsewhere     upkeep.go draining, maintenance, moves, copies
//	trust.go   tokens, authorities and identities     space.go  what thin volumes take and may take
//	copying.go rebuilds, and detached volumes that a host heals
//	snapshot.go snapshots, groups of them, and clones
//	restore.go volumes that go back to a snapshot
//	snapshotcopies.go copies of snapshots that are made again
//
// What needs no State is in packages of its own, which work on values alone: evidence (which
// copies labels and hosts' notes prove good), placement (which drives take a volume's legs),
// image (where on a drive), event (the history), backoff (pauses between rebuilds), trust (tokens
// and authorities) and labelset (bounds of labels).
package cluster

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/backoff"
	"weft.dev/weft/volmgr/cow"
	"weft.dev/weft/volmgr/drivepolicy"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/keys"
	"weft.dev/weft/volmgr/trust"
)

// Times that decisions depend on.
const (
	// OnlineWithin: an agent is online if its stream is open and its last report is no older.
	OnlineWithin = 5 * time.Second
	// ClientLease: a host that loses a leg and cannot record that stops reading and writing
	// the volume within 8 s. The lease adds a margin of two seconds.
	ClientLease = 10 * time.Second
)

// Record is one key of the store. Nil Value means delete. The first letter of
// the key says what it holds: v volume, n node, d drive, p pool, e event, t token, a authority,
// i identity, u audit, m meta, s secret, l level, r policies for drives.
type Record struct {
	Key   string
	Value []byte
}

// Secret reports whether a record may be in no backup. Without it the cluster loses nothing: the
// next manager makes another master, and each volume that a restored store serves gets a new grant.
func (r Record) Secret() bool { return strings.HasPrefix(r.Key, "s/") }

// Input is something that happened: a request, a report or a tick. Each is declared beside
// its apply.
type Input interface {
	apply(*tx) (view, error)
}

// Outcome is what a step decided. None of it may be published before Records are durable.
type Outcome struct {
	Records []Record
	Wake    []block.NodeName // nodes whose wanted state may have changed
	// Changed lists, for each node of Wake, the volumes of which its wanted state may have
	// changed; nil if anything of it may have.
	Changed map[block.NodeName]map[block.VolumeID]bool
	Events  []event.Event
	Asked   *audit.Entry // who asked for this; nil: nobody, or it has no effect
	Result  any          // as the input's type says
}

// Seed is 32 random bytes that come with an input. Ids and choices are drawn from it, so
// the same input always has the same outcome.
type Seed [32]byte

// id draws the n-th identifier from a seed.
func (s Seed) id(n uint32) block.UUID {
	sum := sha256.Sum256(binary.BigEndian.AppendUint32(s[:], n))
	return block.UUIDFromRandom([16]byte(sum[:16]))
}

// schema is the version of the record format.
const schema = 1

type meta struct {
	Schema     int             `json:"schema"`
	ClusterID  block.ClusterID `json:"cluster_id"`
	Term       uint64          `json:"term,omitempty"` // see term.go
	Replaces   bool            `json:"replaces,omitempty"`
	Generation uint64          `json:"generation"` // grows with every step that commits something
	FirstEvent uint64          `json:"first_event"`
	NextEvent  uint64          `json:"next_event"`
	Audit      audit.Head      `json:"audit,omitzero"`
	BackedUp   time.Time       `json:"backed_up,omitzero"` // when the last backup was made
}

// State is everything that volmgr knows. Objects in the maps are never changed
// in place: a step clones what it changes and swaps it in when it has succeeded.
type State struct {
	by *cow.Writer // nil in a fork
	clock
	durable
	derived
	reported
	policy  Policy
	unheard bool // see Unheard
}

// clock is what the state knows of the time. It starts empty with the process.
type clock struct {
	now   time.Time // of the newest step
	began time.Time // of the first one since Load
	full  time.Time // until then makeRoom refuses without looking for an unused node

	lookedAway     time.Time // when noteAway last looked at volumes
	lookedSuspect  time.Time // when evacuateDrives last did
	lookedAtScrubs time.Time // when settleSchedules last did
	lookedAtSpace  time.Time // when noteFull last did
	lookedAtCopies time.Time // when noteCopies last did

	lookedRebalance time.Time // when settleRebalances last did
	lookedHealing   time.Time // when beginHealings last did
}

// durable is what the records hold: Load makes an equal value from them.
type durable struct {
	meta    meta
	level   block.Level // see term.go
	nodes   map[block.NodeName]*Node
	drives  map[block.DriveID]*Drive
	pools   map[string]*Pool
	volumes cow.Map[block.VolumeID, *Volume]
	events  event.Log
	audit   audit.Log
	master  keys.Master // of the keys of exports; see BeginTerm

	policies    *drivepolicy.Set            // never changed in place; nil: none
	tokens      map[string]*trust.Token     // by id
	authorities map[string]*trust.Authority // by hash
	holders     map[trust.Subject]*trust.Holder
}

// derived follows from durable. It is an index, so that a step need not search.
type derived struct {
	byName    cow.Sorted[block.VolumeID]
	drivesOn  map[block.NodeName]map[block.DriveID]bool
	driveIDs  []block.DriveID                    // in order; nil: to be sorted again
	onNode    cow.Map[block.NodeName, volumeSet] // with a leg or the attachment there
	inTree    cow.Map[block.UUID, volumeSet]     // with a leg in a tree that others may be in, by its id
	stocked   volumeSet                          // attached to a host without an agent
	onDrive   map[block.DriveID]map[block.LegID][]image.Extent
	extents   map[block.DriveID][]image.Extent   // the same by start: sorting them for each new leg takes too long
	used      cow.Map[block.DriveID, uint32]     // how many extents those are
	recorded  cow.Map[block.DriveID, block.Size] // the most that the legs' records can take of its label
	promised  cow.Map[block.DriveID, uint32]     // how many extents its legs take if they are written whole
	mappedOn  cow.Map[block.DriveID, uint32]     // how many mapped legs it has that take space as they are written
	snapshots cow.Map[block.VolumeID, int]       // how many snapshots a volume has, if any
	// takings are the snapshots of a volume that are being taken; the slices do not change.
	takings      cow.Map[block.VolumeID, []block.VolumeID]
	allSnapshots int                      // of all volumes
	fullLegs     map[block.LegID]bool     // of which an event says that their writes wait for space
	unsettled    map[block.VolumeID]bool  // volumes that time or a report may change
	fewer        map[block.VolumeID]bool  // snapshots with fewer legs than they are to have
	touched      map[block.DriveID]uint64 // when legs were last placed there or removed, as a count
	removed      map[block.DriveID]uint64 // the same, only of removed or moved ones
	touches      uint64
	fields       fields // also of what is reported: see field
	still        *still // what the last fork has of the maps that change seldom; nil: they have changed
}

// reported is what agents report and what this manager observed of it. No record holds
// any of it: after Load it is empty until they report.
type reported struct {
	targets       map[block.NodeName]*target
	initiators    map[block.NodeName]*initiator
	foreignAgents map[agentKey]foreignAgent
	fences        map[block.VolumeID]fence
	wellness
	trials backoff.Trials
	away   map[block.DriveID]time.Time // since when drives cannot be used
	// evacuations are what is known of suspect drives; a look replaces the map. See drive.go.
	evacuations map[block.DriveID]evacuation
	commonCause bool                    // they are all held back, since so many drives are suspect
	crowded     map[block.VolumeID]bool // volumes for whose next leg there was no room
	uncopied    map[columnOf]uncopied   // columns of snapshots that could not be copied
	// healings are of detached volumes that lack a copy; see copying.go.
	healings cow.Map[block.VolumeID, healing]
	stopping map[block.NodeName]stop // targets that say that they stop; see upkeep.go
	// asked are the legs in sync that a volume's host is asked to leave out, with the reasons; see
	// upkeep.go. The inner maps do not change.
	asked map[block.VolumeID]map[block.LegID]string
	// answered are requests of hosts, for steps alone.
	answered map[block.VolumeID]map[block.NodeName]answered
	// overSince is since when identities could be forgotten (see forgettable), for steps alone.
	overSince map[trust.Subject]time.Time
}

// volumeSet is a set of volumes.
type volumeSet = cow.Map[block.VolumeID, bool]

// agent is the stream side of a target or initiator agent.
type agent struct {
	session    uint64
	open       bool
	status     AgentStatus
	otherStore uint64 // reported generations up to this one are another store's; see outlast
	term       uint64 // the highest that it has acted on
}

type initiator struct {
	by *cow.Writer // may change it in place
	agent
	report      *InitiatorReport // the newest
	attachments map[block.VolumeID]AttachmentReport
}

// fence says when the first in-sync leg of a volume was reported fenced for an epoch.
type fence struct {
	epoch block.Epoch
	first time.Time
}

func empty() *State {
	return &State{
		by: new(cow.Writer),
		durable: durable{
			level:  block.FirstLevel,
			nodes:  map[block.NodeName]*Node{},
			drives: map[block.DriveID]*Drive{},
			pools:  map[string]*Pool{},

			tokens:      map[string]*trust.Token{},
			authorities: map[string]*trust.Authority{},
			holders:     map[trust.Subject]*trust.Holder{},
		},
		derived: derived{
			drivesOn:  map[block.NodeName]map[block.DriveID]bool{},
			onDrive:   map[block.DriveID]map[block.LegID][]image.Extent{},
			fullLegs:  map[block.LegID]bool{},
			extents:   map[block.DriveID][]image.Extent{},
			unsettled: map[block.VolumeID]bool{}, fewer: map[block.VolumeID]bool{},
			touched: map[block.DriveID]uint64{},
			removed: map[block.DriveID]uint64{},
		},
		reported: reported{
			targets:       map[block.NodeName]*target{},
			initiators:    map[block.NodeName]*initiator{},
			foreignAgents: map[agentKey]foreignAgent{},
			fences:        map[block.VolumeID]fence{},
			wellness:      newWellness(),
			away:          map[block.DriveID]time.Time{},
			crowded:       map[block.VolumeID]bool{},
			uncopied:      map[columnOf]uncopied{},
			stopping:      map[block.NodeName]stop{},
			asked:         map[block.VolumeID]map[block.LegID]string{},
			answered:      map[block.VolumeID]map[block.NodeName]answered{},
			overSince:     map[trust.Subject]time.Time{},
		},
	}
}

// New returns a cluster that has only the default pool, and the records that make it
// durable. It begins at the newest level.
func New(id block.ClusterID) (*State, []Record) {
	s := empty()
	s.meta = meta{Schema: schema, ClusterID: id, Generation: 1, FirstEvent: 1, NextEvent: 1}
	s.level = block.KnownLevel
	s.events = event.NewLog(nil, 1, 1)
	s.audit = audit.NewLog(nil, audit.Head{})
	s.pools[DefaultPool] = &Pool{Name: DefaultPool}
	return s, s.Records()
}

// Load rebuilds the state that the records describe. Their order does not matter.
func Load(records []Record) (*State, error) { return LoadKnowing(block.KnownLevel, records) }

// LoadKnowing is Load of a program that knows other levels.
func LoadKnowing(known block.Level, records []Record) (*State, error) {
	if _, err := CheckLevel(known, records...); err != nil {
		return nil, fmt.Errorf("load records: %w", err)
	}
	s := empty()
	var events []event.Event
	var entries []audit.Entry
	for _, r := range records {
		if err := s.load(r, &events, &entries); err != nil {
			return nil, fmt.Errorf("load record %q: %w", r.Key, err)
		}
	}
	if s.meta.Schema != schema {
		return nil, fmt.Errorf("load records: schema %d, this version reads %d", s.meta.Schema, schema)
	}
	for _, d := range s.drives {
		if s.nodes[d.Node] == nil {
			return nil, fmt.Errorf("load record %q: no record of its node %s", driveKey(d.ID), d.Node)
		}
	}
	s.events = event.NewLog(events, s.meta.FirstEvent, s.meta.NextEvent)
	s.audit = audit.NewLog(entries, s.meta.Audit)
	if _, ok := s.pools[DefaultPool]; !ok {
		s.pools[DefaultPool] = &Pool{Name: DefaultPool}
	}
	return s, nil
}

// load takes a record over.
//
// Branches: one for each kind of record.
func (s *State) load(r Record, events *[]event.Event, entries *[]audit.Entry) (err error) {
	kind, _, ok := strings.Cut(r.Key, "/")
	if !ok {
		return fmt.Errorf("no kind in the key")
	}
	s.level = max(s.level, kinds[kind]) // some versions before levels wrote kinds of the next one
	switch kind {
	case "v":
		v, err := decode[Volume](r.Value)
		if err != nil {
			return err
		}
		if err := v.check(); err != nil {
			return err
		}
		s.volumes.Set(s.by, v.ID, v)
		s.index(nil, v)
		return nil
	case "n":
		return loadInto(r, func(n *Node) { s.nodes[n.Name] = n })
	case "d":
		return loadInto(r, func(d *Drive) { s.drives[d.ID] = d; s.indexDrive(nil, d) })
	case "p":
		return loadInto(r, func(p *Pool) { s.pools[p.Name] = p })
	case "t":
		return loadInto(r, func(x *trust.Token) { s.tokens[x.ID] = x })
	case "a":
		return loadInto(r, func(x *trust.Authority) { s.authorities[x.Hash] = x })
	case "i":
		return loadInto(r, func(x *trust.Holder) { s.holders[x.Subject] = x })
	case "e":
		return loadInto(r, func(e *event.Event) { *events = append(*events, *e) })
	case "u":
		return loadInto(r, func(e *audit.Entry) { *entries = append(*entries, *e) })
	case "m":
		return loadInto(r, func(m *meta) { s.meta = *m })
	case "s":
		s.master, err = keys.Parse(r.Value)
		return err
	case "r":
		return loadInto(r, func(p *drivepolicy.Set) { s.policies = p })
	case "l":
		return loadInto(r, func(l *levelRecord) { s.level = max(s.level, l.Level) })
	}
	return fmt.Errorf("unknown kind %q", kind)
}

func loadInto[T any](r Record, keep func(*T)) error {
	x, err := decode[T](r.Value)
	if err == nil {
		keep(x)
	}
	return err
}

// decode refuses unknown fields: this version would drop them when it writes the record.
func decode[T any](value []byte) (*T, error) {
	d := json.NewDecoder(bytes.NewReader(value))
	d.DisallowUnknownFields()
	x := new(T)
	if err := d.Decode(x); err != nil {
		return nil, err
	}
	return x, nil
}

// Records returns the whole durable state as records, in key order.
func (s *State) Records() []Record { return s.records() }

func (d *durable) records() []Record {
	var all []Record
	for _, v := range d.volumes.All() {
		all = append(all, encode(volumeKey(v.ID), v))
	}
	for _, n := range d.nodes {
		all = append(all, encode(nodeKey(n.Name), n))
	}
	for _, x := range d.drives {
		all = append(all, encode(driveKey(x.ID), x))
	}
	for _, p := range d.pools {
		all = append(all, encode(poolKey(p.Name), p))
	}
	for _, x := range d.tokens {
		all = append(all, encode(tokenKey(x.ID), x))
	}
	for _, x := range d.authorities {
		all = append(all, encode(authorityKey(x.Hash), x))
	}
	for of, x := range d.holders {
		all = append(all, encode(holderKey(of), x))
	}
	for _, e := range d.events.All() {
		all = append(all, encode(eventKey(e.Seq), e))
	}
	for _, e := range d.audit.All() {
		all = append(all, encode(auditKey(e.Seq), e))
	}
	all = append(all, encode(metaKey, d.meta))
	if !d.master.IsZero() {
		all = append(all, masterRecord(d.master))
	}
	if !d.policies.Empty() {
		all = append(all, policyRecord(d.policies))
	}
	if d.level > block.FirstLevel {
		all = append(all, encode(LevelKey, levelRecord{d.level}))
	}
	slices.SortFunc(all, func(a, b Record) int { return cmp.Compare(a.Key, b.Key) })
	return all
}

const metaKey, masterKey, policyKey = "m/meta", "s/master", "r/drives"

// policyRecord is the one record of all policies for drives.
func policyRecord(p *drivepolicy.Set) Record {
	if p.Empty() {
		return Record{Key: policyKey}
	}
	return encode(policyKey, p)
}

func masterRecord(m keys.Master) Record { return Record{Key: masterKey, Value: m.Encode()} }

func volumeKey(id block.VolumeID) string { return "v/" + id.String() }
func nodeKey(name block.NodeName) string { return "n/" + string(name) }
func driveKey(id block.DriveID) string   { return "d/" + id.String() }
func poolKey(name string) string         { return "p/" + name }
func tokenKey(id string) string          { return "t/" + id }
func authorityKey(hash string) string    { return "a/" + hash }
func eventKey(seq uint64) string         { return fmt.Sprintf("e/%020d", seq) }
func auditKey(seq uint64) string         { return fmt.Sprintf("u/%020d", seq) }
func encode(key string, value any) Record {
	b, err := json.Marshal(value)
	if err != nil {
		panic(fmt.Sprintf("cluster: encode %s: %v", key, err)) // plain data of our own
	}
	return Record{Key: key, Value: b}
}

// ClusterID is the identity of the cluster.
func (s *State) ClusterID() block.ClusterID { return s.meta.ClusterID }

// Generation is the number of the newest commit.
func (s *State) Generation() uint64 { return s.meta.Generation }

// Fork returns the state as it is now, for readers: it does not change while s goes on, and
// any goroutine may read it. It can be read in every way, but not stepped. A fork costs some
// ten microseconds for each thousand nodes, however many volumes there are, and the next
// changes a little more.
func (s *State) Fork() *State {
	s.sortedDrives()
	if s.still == nil {
		s.still = &still{maps.Clone(s.nodes), maps.Clone(s.drives), maps.Clone(s.pools), maps.Clone(s.drivesOn), maps.Clone(s.tokens), maps.Clone(s.authorities), maps.Clone(s.holders)}
		for node, drives := range s.drivesOn {
			s.still.drivesOn[node] = maps.Clone(drives)
		}
	}
	f := *s
	s.by = new(cow.Writer)
	f.by, f.nodes, f.drives, f.pools, f.drivesOn = nil, s.still.nodes, s.still.drives, s.still.pools, s.still.drivesOn
	f.tokens, f.authorities, f.holders = s.still.tokens, s.still.authorities, s.still.holders
	f.reported = s.reported.visible()
	// Only steps use these, and they change in place.
	f.onDrive, f.extents, f.touched, f.removed, f.unsettled, f.fewer, f.fields, f.still, f.crowded = nil, nil, nil, nil, nil, nil, nil, nil, nil
	f.fullLegs = nil
	f.wellness = wellness{}
	return &f
}

// Unheard returns a fork of a state that agents do not report to, since another manager leads. It
// does not say how healthy volumes are.
func (s *State) Unheard() *State {
	f := s.Fork()
	f.unheard = true
	return f
}

// Copy returns a state that is equal to s and can be stepped: what is done to one does not show
// in the other. A search over all that may happen begins each branch with one (e2e/explore).
func (s *State) Copy() *State {
	c := *s
	s.by, c.by = new(cow.Writer), new(cow.Writer)
	c.fields, c.still, c.driveIDs = nil, nil, nil
	c.nodes, c.drives, c.pools = maps.Clone(s.nodes), maps.Clone(s.drives), maps.Clone(s.pools)
	c.tokens, c.authorities, c.holders = maps.Clone(s.tokens), maps.Clone(s.authorities), maps.Clone(s.holders)
	c.events = event.NewLog(slices.Clone(s.events.All()), s.events.First(), s.events.Next())
	c.audit = audit.NewLog(slices.Clone(s.audit.All()), s.audit.Head())
	c.drivesOn, c.onDrive = cloneEach(s.drivesOn), cloneEach(s.onDrive)
	c.extents = maps.Clone(s.extents)
	for drive, extents := range c.extents {
		c.extents[drive] = slices.Clone(extents)
	}
	c.fullLegs = maps.Clone(s.fullLegs)
	c.unsettled, c.fewer, c.touched, c.removed = maps.Clone(s.unsettled), maps.Clone(s.fewer), maps.Clone(s.touched), maps.Clone(s.removed)
	c.reported = s.reported.visible()
	c.answered, c.overSince = cloneEach(s.answered), maps.Clone(s.overSince)
	for node, on := range c.targets {
		own := *on
		own.compared, own.relabelled = maps.Clone(on.compared), maps.Clone(on.relabelled)
		c.targets[node] = &own
	}
	c.wellness, c.away, c.crowded, c.uncopied = s.wellness.clone(), maps.Clone(s.away), maps.Clone(s.crowded), maps.Clone(s.uncopied)
	return &c
}

// visible returns r with own copies of the maps that readers see.
func (r reported) visible() reported {
	r.targets, r.initiators = maps.Clone(r.targets), maps.Clone(r.initiators)
	r.foreignAgents, r.fences = maps.Clone(r.foreignAgents), maps.Clone(r.fences)
	r.stopping, r.asked, r.uncopied = maps.Clone(r.stopping), maps.Clone(r.asked), maps.Clone(r.uncopied)
	r.answered, r.overSince = nil, nil
	return r
}

// cloneEach clones a map of maps.
func cloneEach[A, B comparable, C any](m map[A]map[B]C) map[A]map[B]C {
	m = maps.Clone(m)
	for a, b := range m {
		m[a] = maps.Clone(b)
	}
	return m
}

// still holds copies of the maps that change only with the records of nodes, drives, pools,
// tokens, authorities and identities, so that forks can share them.
type still struct {
	nodes    map[block.NodeName]*Node
	drives   map[block.DriveID]*Drive
	pools    map[string]*Pool
	drivesOn map[block.NodeName]map[block.DriveID]bool

	tokens      map[string]*trust.Token
	authorities map[string]*trust.Authority
	holders     map[trust.Subject]*trust.Holder
}

// Step applies one input at the time now. An error means that the input was refused and
// that nothing has changed; it is always an *Error. Keep the monotonic reading in now:
// leases must not end because the clock was set.
func (s *State) Step(now time.Time, in Input) (Outcome, error) { return s.StepFor(now, in, nil) }

// StepFor is Step for an input that somebody has asked for. If it has an effect, who asked is in its
// records.
func (s *State) StepFor(now time.Time, in Input, asked *audit.Asked) (Outcome, error) {
	if s.by == nil {
		panic("cluster: a fork is stepped")
	}
	t := newTx(s, now)
	t.asked = asked
	if set := setBy(s.now, now); set.Abs() > clockSlack {
		t.retime(func(at time.Time) time.Time { return at.Add(set) })
	}
	result, err := in.apply(t)
	if err != nil {
		return Outcome{}, err
	}
	s.now = now
	if s.began.IsZero() {
		s.began = now
		t.rebase()
	}
	t.settle()
	out := t.commit()
	if result != nil {
		out.Result = result(s)
	}
	return out, nil
}

// clockSlack is how much a clock may be adjusted without anybody noticing.
const clockSlack = time.Second

// setBy is by how much the clock was set between two of its times: what it has gone on beside the time that has
// passed. It is zero if one of the two does not know that.
func setBy(before, now time.Time) time.Duration {
	return now.Round(0).Sub(before.Round(0)) - now.Sub(before)
}

// rebase makes the recorded times for which somebody waits times of this manager's clock: none is in the
// future. When that clock is set later, they are set with it: records have the time of day alone.
func (t *tx) rebase() {
	t.retime(func(at time.Time) time.Time { return t.now.UTC().Add(-max(0, t.now.Sub(at))) })
}

// retime changes the recorded times for which somebody waits.
func (t *tx) retime(change func(time.Time) time.Time) {
	here := func(at time.Time) time.Time {
		if at.IsZero() {
			return at
		}
		return change(at)
	}
	for id := range t.s.volumes.All() {
		v := t.peek(id)
		if v == nil {
			continue
		}
		if x := v.taking(); x != nil {
			next := *x
			next.Began, next.Since = here(x.Began), here(x.Since)
			t.volume(id).Snapshot = v.Snapshot.with(&next)
		}
		if x := v.Restoring; x != nil {
			next := *x
			next.Since = here(x.Since)
			t.volume(id).Restoring = &next
		}
		if x := v.Heal; x != nil {
			t.volume(id).Heal.Since = here(x.Since)
		}
		for i := range v.Legs {
			if x := v.Legs[i].Copying; x != nil {
				next := *x
				next.Began = here(x.Began)
				t.volume(id).Legs[i].Copying = &next
			}
		}
	}
}

// index removes old from the derived maps and adds new; either may be nil.
func (s *State) index(old, new *Volume) {
	s.touches++
	if old != nil {
		s.byName = s.byName.Delete(string(old.Name))
		s.stocked.Delete(s.by, old.ID)
		s.indexSnapshot(old, -1)
		delete(s.unsettled, old.ID)
		for _, n := range old.nodes() {
			on := s.onNode.Get(n)
			on.Delete(s.by, old.ID)
			s.onNode.Set(s.by, n, on)
		}
		for _, l := range old.Legs {
			if !keeps(new, &l) {
				s.removed[l.Drive] = s.touches
				s.extents[l.Drive] = image.Remove(s.extents[l.Drive], l.Extents)
			}
			s.used.Set(s.by, l.Drive, s.used.Get(l.Drive)-image.Count(s.onDrive[l.Drive][l.ID]))
			delete(s.onDrive[l.Drive], l.ID)
			s.recorded.Set(s.by, l.Drive, s.recorded.Get(l.Drive)-old.record(&l).Size())
			s.promised.Set(s.by, l.Drive, s.promised.Get(l.Drive)-old.legExtents(&l))
			if old.takesSpace(&l) {
				s.mappedOn.Set(s.by, l.Drive, s.mappedOn.Get(l.Drive)-1)
			}
			s.touched[l.Drive] = s.touches
			s.indexTree(old, &l, false)
		}
	}
	if new == nil {
		return
	}
	s.byName = s.byName.Set(string(new.Name), new.ID)
	s.indexSnapshot(new, 1)
	if new.unsettled() {
		s.unsettled[new.ID] = true
	}
	if new.stock() {
		s.stocked.Set(s.by, new.ID, true)
	}
	for _, n := range new.nodes() {
		on := s.onNode.Get(n)
		on.Set(s.by, new.ID, true)
		s.onNode.Set(s.by, n, on)
	}
	for _, l := range new.Legs {
		if !keeps(old, &l) {
			s.extents[l.Drive] = image.Insert(s.extents[l.Drive], l.Extents)
		}
		put(s.onDrive, l.Drive, l.ID, l.Extents)
		s.used.Set(s.by, l.Drive, s.used.Get(l.Drive)+image.Count(l.Extents))
		s.recorded.Set(s.by, l.Drive, s.recorded.Get(l.Drive)+new.record(&l).Size())
		s.promised.Set(s.by, l.Drive, s.promised.Get(l.Drive)+new.legExtents(&l))
		if new.takesSpace(&l) {
			s.mappedOn.Set(s.by, l.Drive, s.mappedOn.Get(l.Drive)+1)
		}
		s.touched[l.Drive] = s.touches
		s.indexTree(new, &l, true)
	}
}

// keeps reports whether v, which may be nil, has a leg with the same extents.
func keeps(v *Volume, l *Leg) bool {
	if v == nil {
		return false
	}
	same := v.leg(l.ID)
	return same != nil && same.Drive == l.Drive && slices.Equal(same.Extents, l.Extents)
}

// indexDrive is index for drives.
func (s *State) indexDrive(old, new *Drive) {
	if old != nil && new != nil {
		return // a drive keeps its node
	}
	s.driveIDs = nil
	if old != nil {
		delete(s.drivesOn[old.Node], old.ID)
	}
	if new != nil {
		put(s.drivesOn, new.Node, new.ID, true)
	}
}

// sortedDrives returns every drive's id, in order.
func (s *State) sortedDrives() []block.DriveID {
	if s.driveIDs == nil {
		s.driveIDs = sorted(s.drives)
	}
	return s.driveIDs
}

func put[A, B comparable, C any](m map[A]map[B]C, a A, b B, c C) {
	if m[a] == nil {
		m[a] = map[B]C{}
	}
	m[a][b] = c
}

// idOf returns the id of the volume of a name; zero if there is none.
func (s *State) idOf(name block.VolumeName) block.VolumeID {
	id, _ := s.byName.Find(string(name))
	return id
}

// anID is an identifier.
type anID interface {
	comparable
	~struct{ block.UUID }
}

// sorted returns the keys of m in order, so that a step is deterministic.
func sorted[K anID, V any](m map[K]V) []K { return sortedIDs(maps.Keys(m)) }

// sortedIDs returns ids in order.
func sortedIDs[K anID](all iter.Seq[K]) []K {
	return slices.SortedFunc(all, func(a, b K) int {
		x, y := struct{ block.UUID }(a).UUID, struct{ block.UUID }(b).UUID
		return bytes.Compare(x[:], y[:])
	})
}

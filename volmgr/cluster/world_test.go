// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// world is a small cluster in which anything may happen at any time: agents crash, links
// break, messages wait, the manager restarts. Hosts follow the protocol. They write a growing
// number to each register, so that an old value is easy to recognize. After each step check
// compares the contents of the legs with the acknowledged writes.
type world struct {
	stepped func(Input, Outcome) // nil, or called after each step

	rng   *rand.Rand
	state *State
	store map[string][]byte
	now   time.Time
	seeds int

	targets []*wTarget
	hosts   []*wHost
	// saidLast is each agent's newest report to the running manager.
	saidLast map[block.NodeName]Input
	reach    map[[2]block.NodeName]bool // host, target: false is cut
	calls    []wCall                    // records on their way to the manager
	writes   []*wCommand                // commands on their way to a leg

	value   map[block.LegID][registers]int // what the legs hold
	medium  map[block.LegID][registers]int // the part of it that survives a boot, in the mood caches
	lossy   map[block.LegID]bool           // the leg lost its cache and was not rebuilt since
	flushed map[wCell]int
	acked   map[wCell]int
	seen    map[wCell]int
	told    map[block.VolumeID]block.Size // the largest size that a host was told
	nextID  int

	mood            mood
	ackBeforeRecord bool        // a weakened host
	leavesUnflushed bool        // a weakened host: it leaves out legs without a flush of the copies that stay
	noFlush         bool        // a weakened host: a rebuild counts as complete while it is still in a cache
	leavesDirty     bool        // a weakened host: it reports a clean release with writes in flight
	goesOn          bool        // a weakened host: it continues with a leg that lost unflushed writes
	hardware        *hardware   // nil: drives do not fail
	moves           *movesWorld // nil: legs stay where they are
	heals           *healsWorld // nil: no host heals a volume
	seals           *sealsWorld // nil: no volume is sealed
	notesLate       bool        // a weakened host: it continues without a leg that its note still names
	losesStore      bool        // the manager's store is lost from time to time
	backup          []Record
	lostStores      int  // how often the store was lost
	decided         int  // columns of several copies whose in-sync set was proven then
	oldHosts        bool // hosts do not tell which legs they use
	healed          bool // no more faults, and no host shuts down
	leaves          int  // how often a host released a volume to shut down
	looks           int  // how often a host that shares a volume read
	shares          int  // how often a host that shares a volume wrote
	serves          int  // how often a host began to serve: shows that something happens in the histories
	expanded        int  // how often a host was told of a larger size
	renewed         int  // how often a host continued with a leg that lost its cache
	givenUp         int  // how often a host gave up a volume
	violation       string
}

// The last register is behind the first grown bytes of a volume.
const (
	registers = 3
	tail      = registers - 1
	grown     = block.GiB
)

// mood is the kind of fault that dominates a history.
type mood int

const (
	mixed    mood = iota
	flapping      // hosts lose and find targets
	split         // targets lose the manager while hosts continue, and volumes are moved
	caches        // drives have volatile caches, and machines lose power together
	sharing       // volumes are mostly shared, and targets lose the manager meanwhile
	moods
)

// relinks is the percentage of its turns in which a cut off agent finds the manager again.
var relinks = map[mood]int{mixed: 15, flapping: 50, split: 4, caches: 10, sharing: 4}

type wCell struct {
	volume   block.VolumeID
	column   int
	register int
}

// wAgent is the stream between an agent and the manager. Both directions are in order, and
// late.
type wAgent struct {
	up      bool
	linked  bool
	session uint64
	newest  order // the newest that it has acted on; it survives a boot
}

// order is the term and generation of a wanted state.
type order struct{ term, generation uint64 }

// takes reports whether an agent acts on an order. It does not if it has acted on a later one.
func (a *wAgent) takes(o order) bool {
	if o.term < a.newest.term || o.term == a.newest.term && o.generation < a.newest.generation {
		return false
	}
	a.newest = o
	return true
}

type wTarget struct {
	wAgent
	*simTarget
	cached bool // its drives may lose writes that were not flushed
	inbox  []TargetWanted
	outbox []TargetReport
}

type wHost struct {
	wAgent
	name    block.NodeName
	boot    int
	runs    int                              // processes of its agent, of which a boot may see several
	ending  bool                             // it is shutting down, and has released what it could
	notes   map[block.VolumeID]evidence.Note // on its disk: they survive a boot
	gen     uint64
	inbox   []InitiatorWanted
	outbox  []InitiatorReport
	volumes map[block.VolumeID]*wVolume
}

// wVolume is a volume as a host has it.
type wVolume struct {
	wanted  WantedAttachment
	serving bool
	release Phase
	gaveUp  GaveUp
	links   map[block.LegID]*wLink // in the table
	gone    map[block.LegID]uint64 // recorded stale up to this revision
	writes  map[wCell]*wWrite      // one at a time per register
	had     map[wCell]int          // what its device has acknowledged, or returned to a read
	durable map[wCell]int          // the part of that which was flushed
}

type wLink struct {
	WantedLink
	readable bool
	contact  time.Time
}

type wWrite struct {
	id   int
	need map[block.LegID]bool
	done map[block.LegID]bool
}

type wCommand struct {
	host    *wHost
	volume  block.VolumeID
	link    WantedLink
	epoch   block.Epoch
	grant   uint64
	cell    wCell
	write   *wWrite
	boot    string
	arrived bool
}

// wCall is a RecordStale or RecordInSync on its way to the manager.
type wCall struct {
	host *wHost
	boot int
	in   Input
}

func newWorld(seed uint64) *world {
	w := &world{
		rng: rand.New(rand.NewPCG(seed, 1)), store: map[string][]byte{}, now: t0,
		reach: map[[2]block.NodeName]bool{}, value: map[block.LegID][registers]int{},
		medium: map[block.LegID][registers]int{}, lossy: map[block.LegID]bool{}, flushed: map[wCell]int{},
		acked: map[wCell]int{}, seen: map[wCell]int{}, told: map[block.VolumeID]block.Size{}, seeds: int(seed) * 1000, mood: mood(seed) % moods,
		saidLast: map[block.NodeName]Input{},
	}
	state, records := New(testCluster())
	w.state = state
	keep(w.store, records)
	for i := range 3 {
		name := block.NodeName(fmt.Sprintf("t%d", i+1))
		t := &wTarget{simTarget: newSimTarget(name, map[string]string{"rack": fmt.Sprintf("r%d", i+1)}, 1536*block.MiB)}
		t.up, t.slow = true, true
		t.cached = w.mood == caches
		t.devices[0].VolatileCache = t.cached
		w.targets = append(w.targets, t)
	}
	for i := range 2 {
		h := &wHost{name: block.NodeName(fmt.Sprintf("c%d", i+1)), boot: 1, volumes: map[block.VolumeID]*wVolume{}, notes: map[block.VolumeID]evidence.Note{}}
		h.up = true
		w.hosts = append(w.hosts, h)
	}
	w.heal()
	for _, t := range w.targets {
		w.step(AddDrive{Node: t.name, Device: t.devices[0].Path, Seed: w.seed()})
	}
	w.settle(3)
	w.create("a")
	w.create("s")
	w.settle(3)
	w.step(Attach{Volume: "a", Node: "c1"})
	w.settle(3)
	return w
}

func (w *world) seed() Seed {
	w.seeds++
	return testSeed(w.seeds)
}

func (w *world) create(name block.VolumeName) {
	copies := 2 + w.rng.IntN(2)
	if name == "s" {
		copies = 1
	}
	w.step(CreateVolume{
		Name: name, Size: 512 * block.MiB, Stripes: 1 + w.rng.IntN(2), Copies: copies, Spread: "rack", Seed: w.seed(),
	})
}

// step gives the manager an input and sends the wanted states out.
func (w *world) step(in Input) error {
	before := map[block.LegID]Leg{}
	if v := w.state.volumes.Get(w.state.idOf("a")); v != nil && w.moves != nil {
		for _, l := range v.Legs {
			before[l.ID] = l
		}
	}
	var healed Volume
	if v := w.state.volumes.Get(w.state.idOf("a")); v != nil && w.heals != nil {
		healed = *v.clone()
	}
	said := w.repeats(in)
	out, err := w.state.Step(w.now, said)
	if v := w.state.volumes.Get(healed.ID); v != nil && w.heals != nil {
		w.violation = cmp.Or(w.violation, w.watchHealing(in, healed, v, out.Events))
		if err := v.check(); err != nil {
			w.violation = cmp.Or(w.violation, "I14: "+err.Error())
		}
	}
	if v := w.state.volumes.Get(w.state.idOf("a")); v != nil && w.moves != nil {
		w.violation = cmp.Or(w.violation, w.checkMove(before, v))
	}
	if is, ok := in.(TargetReported); ok && err == nil && w.violation == "" {
		w.violation = w.state.misheard(is)
	}
	w.violation = cmp.Or(w.violation, w.idle(in, out.Records))
	keep(w.store, out.Records)
	if w.stepped != nil {
		w.stepped(in, out)
	}
	if w.hardware != nil {
		w.watch(out.Events)
	}
	for _, name := range out.Wake {
		for _, t := range w.targets {
			if t.name == name && t.linked {
				t.inbox = append(t.inbox[:min(len(t.inbox), 1)], w.state.WantedTarget(name))
			}
		}
		for _, h := range w.hosts {
			if h.name == name && h.linked {
				h.inbox = append(h.inbox[:min(len(h.inbox), 1)], w.state.WantedInitiator(name))
			}
		}
	}
	return err
}

// idle finds a volume that is written although nothing of it has changed. Its agents would be told of a new
// state, and report that they have it, and if that leads to the same again, the manager never rests.
func (w *world) idle(in Input, records []Record) string {
	for _, r := range records {
		if was, known := w.store[r.Key]; known && strings.HasPrefix(r.Key, "v/") && bytes.Equal(was, r.Value) {
			return fmt.Sprintf("%T writes %s, which has not changed", in, r.Key)
		}
	}
	return ""
}

// repeats returns a report as an agent sends it: if it differs from the last one of its
// stream only in the generation, it becomes a repeat.
func (w *world) repeats(in Input) Input {
	switch in := in.(type) {
	case TargetReported:
		last, ok := w.saidLast[in.Report.Node].(TargetReported)
		w.saidLast[in.Report.Node] = in
		last.Report.Generation = in.Report.Generation
		if ok && reflect.DeepEqual(last, in) {
			return TargetRepeated{in.Session, in.Report.Node, in.Report.Generation}
		}
		if on := w.state.targets[in.Report.Node]; ok && last.Session == in.Session && on != nil && on.report != nil && on.session == in.Session {
			return in.since(&last.Report)
		}
	case InitiatorReported:
		last, ok := w.saidLast[in.Report.Node].(InitiatorReported)
		w.saidLast[in.Report.Node] = in
		last.Report.Generation = in.Report.Generation
		if ok && reflect.DeepEqual(last, in) {
			return InitiatorRepeated{in.Session, in.Report.Node, in.Report.Generation}
		}
	}
	return in
}

func (w *world) chance(percent int) bool { return w.rng.IntN(100) < percent }

func pick[T any](w *world, from []T) T { return from[w.rng.IntN(len(from))] }

// act does one random thing.
func (w *world) act() {
	if w.heals != nil && w.healActs() {
		return
	}
	if w.hardware != nil && w.hardwareActs() {
		return
	}
	if w.seals != nil && w.sealActs() {
		return
	}
	if w.losesStore && w.rng.IntN(250) == 0 {
		w.storeActs()
		return
	}
	if w.mood == sharing && w.chance(5) {
		w.operatorActs()
		return
	}
	switch n := w.rng.IntN(100); {
	case n < 8:
		w.pass(time.Duration(100+w.rng.IntN(1000)) * time.Millisecond)
	case n < 36:
		w.targetActs(pick(w, w.targets))
	case n < 50:
		w.hostActs(pick(w, w.hosts))
	case n < 84:
		w.dataActs(pick(w, w.hosts))
	case n < 93:
		w.callActs()
	case n < 97:
		w.operatorActs()
	default:
		w.faultActs()
	}
}

// pass lets time go by. A leg that is live until then has its contact at that moment.
func (w *world) pass(d time.Duration) {
	for _, h := range w.hosts {
		for _, v := range h.volumes {
			for _, l := range v.links {
				if w.live(h, l) {
					l.contact = w.now
				}
			}
		}
	}
	w.now = w.now.Add(d)
	w.step(Tick{})
}

func (w *world) target(name block.NodeName) *wTarget {
	return w.targets[slices.IndexFunc(w.targets, func(t *wTarget) bool { return t.name == name })]
}

// live reports whether a host can use a leg under the identity that it was told.
func (w *world) live(h *wHost, l *wLink) bool { return w.connects(h, l.WantedLink) }

func (w *world) connects(h *wHost, l WantedLink) bool {
	t := w.target(l.Node)
	return t.up && !w.cut(h, t) && t.serves(l)
}

func (w *world) cut(h *wHost, t *wTarget) bool { return w.reach[[2]block.NodeName{h.name, t.name}] }

func (w *world) targetActs(t *wTarget) {
	switch {
	case !t.up:
		t.up = w.chance(5)
	case !t.linked:
		if w.chance(relinks[w.mood]) {
			w.linkTarget(t)
		}
	case len(t.inbox) > 0 && w.chance(50):
		w.comply(t)
	case w.chance(5):
		t.zero()
	case len(t.outbox) > 0 && w.chance(80):
		r := t.outbox[0]
		if !w.chance(15) { // else it arrives twice
			t.outbox = t.outbox[1:]
		}
		w.step(TargetReported{Session: t.session, Report: r})
	case len(t.outbox) < 2:
		t.outbox = append(t.outbox, t.report())
	}
}

func (t *wTarget) report() TargetReport {
	r := t.simTarget.report()
	r.Highest = Term{testCluster(), t.newest.term}
	return r
}

// comply acts on the oldest wanted state and drops the commands that it fenced.
func (w *world) comply(t *wTarget) {
	if wanted := t.inbox[0]; t.takes(order{wanted.Term, wanted.Generation}) {
		t.comply(wanted)
		if t.inbox = t.inbox[1:]; wanted.MayStop && t.stopping && w.state.stopping[t.name].may {
			w.mayStop(t)
		}
	} else {
		t.inbox = t.inbox[1:]
	}
	w.writes = slices.DeleteFunc(w.writes, func(c *wCommand) bool {
		return c.link.Node == t.name && c.arrived && !t.serves(c.link)
	})
	if t.wrong != "" {
		w.violation = "I6: " + t.wrong
	}
}

func (w *world) linkTarget(t *wTarget) {
	t.session++
	t.linked, t.inbox, t.outbox = true, nil, nil
	w.step(TargetReported{Session: t.session, Report: t.report()})
	t.inbox = []TargetWanted{w.state.WantedTarget(t.name)}
}

func (w *world) linkHost(h *wHost) {
	h.session++
	h.linked, h.inbox, h.outbox = true, nil, nil
	w.step(InitiatorReported{h.session, w.hostReport(h)})
	h.inbox = []InitiatorWanted{w.state.WantedInitiator(h.name)}
}

func (w *world) hostActs(h *wHost) {
	switch {
	case h.ending && w.chance(10):
		w.crashHost(h)
		h.up = w.chance(50)
	case !h.up:
		h.up = w.chance(5)
	case !h.linked:
		if w.chance(relinks[w.mood]) {
			w.linkHost(h)
		}
	case len(h.inbox) > 0 && w.chance(50):
		w.obey(h, h.inbox[0])
		h.inbox = h.inbox[1:]
	case len(h.outbox) > 0 && w.chance(80):
		r := h.outbox[0]
		if !w.chance(15) {
			h.outbox = h.outbox[1:]
		}
		w.step(InitiatorReported{h.session, r})
	case len(h.outbox) < 2:
		h.outbox = append(h.outbox, w.hostReport(h))
	}
}

func (h *wHost) bootID() string { return fmt.Sprintf("%s-boot-%d", h.name, h.boot) }

// run is the process of the agent.
func (h *wHost) run() string { return fmt.Sprintf("%s-run-%d", h.bootID(), h.runs) }

func (w *world) hostReport(h *wHost) InitiatorReport {
	r := InitiatorReport{Node: h.name, BootID: h.bootID(), Highest: Term{testCluster(), h.newest.term}, Generation: h.gen, Host: hostOf(string(h.name))}
	if w.heals != nil {
		r.Heals = h.run()
	}
	for _, id := range sorted(h.volumes) {
		v := h.volumes[id]
		a := AttachmentReport{Volume: id, Epoch: v.wanted.Epoch, Grant: v.wanted.Grant, Phase: PhaseConnecting}
		switch {
		case v.release != "":
			a.Phase, a.GaveUp = v.release, v.gaveUp
		case v.serving && w.hardware != nil && (len(w.lost(h, v)) > 0 || len(w.wornLinks(v)) > 0):
			a.Phase = PhaseStalled
		case v.serving:
			a.Phase = PhaseServing
		}
		a.Tells = !w.oldHosts
		a.InUse = sorted(v.links)
		r.Attachments = append(r.Attachments, a)
	}
	for _, id := range sorted(h.notes) {
		r.Evidence = append(r.Evidence, h.notes[id])
	}
	return r
}

// note makes a host note which legs are in sync as far as it knows.
func (w *world) note(h *wHost, v *wVolume) {
	if v.readOnly() || v.wanted.Heal != "" {
		return
	}
	e := evidence.Note{Volume: v.wanted.Volume, Epoch: v.wanted.Epoch}
	for _, leg := range sorted(v.links) {
		if l := v.links[leg]; l.readable {
			e.Legs = append(e.Legs, evidence.NotedLeg{Leg: leg, Revision: l.Revision})
		}
	}
	h.notes[v.wanted.Volume] = e
}

// obey applies a wanted state: it drops volumes that are not wanted, begins new ones, and
// removes links that changed or are no longer listed from the tables.
func (w *world) obey(h *wHost, wanted InitiatorWanted) {
	if !h.takes(order{wanted.Term, wanted.Generation}) {
		return
	}
	h.gen = wanted.Generation
	listed := map[block.VolumeID]WantedAttachment{}
	for _, a := range wanted.Attachments {
		if a.BootID == h.bootID() && (a.Heal == "" || a.Heal == h.run()) {
			listed[a.Volume] = a
		}
	}
	for id, v := range h.volumes {
		if a, ok := listed[id]; !ok || a.Epoch != v.wanted.Epoch || a.Grant != v.wanted.Grant {
			if v.release == PhaseDetachedClean && !ok {
				delete(h.notes, id)
			}
			delete(h.volumes, id)
		}
	}
	w.forget(h)
	for _, id := range sorted(listed) {
		a := listed[id]
		v := h.volumes[id]
		if v == nil {
			v = &wVolume{
				links: map[block.LegID]*wLink{}, gone: map[block.LegID]uint64{}, writes: map[wCell]*wWrite{},
				had: map[wCell]int{}, durable: map[wCell]int{},
			}
			h.volumes[id] = v
		}
		if w.told[id] < a.Size {
			w.expanded++
			w.told[id] = a.Size
			w.violation = cmp.Or(w.violation, w.checkLabels()) // perhaps only this host knows the new size
		}
		v.wanted = a
		w.renew(h, v)
		for leg, l := range v.links {
			i := slices.IndexFunc(a.Legs, func(o WantedLink) bool { return o.Leg == leg && o.Revision == l.Revision })
			if i < 0 {
				w.drop(h, v, leg, l.Revision)
				continue
			}
			// The answer to RecordInSync may be lost; the wanted state tells the same.
			if !l.readable && a.Legs[i].State == LegInSync {
				l.readable = true
				w.note(h, v)
			}
		}
		if a.Detach {
			w.release(h, v)
		}
	}
}

// renew continues with legs that have lost their caches, if no unflushed data was
// acknowledged or read. Else the host gives up the volume.
func (w *world) renew(h *wHost, v *wVolume) {
	for _, id := range sorted(v.links) {
		l := v.links[id]
		i := slices.IndexFunc(v.wanted.Legs, func(o WantedLink) bool {
			return o.Leg == id && o.State == LegInSync && o.Reborn > l.Revision
		})
		if i < 0 {
			continue
		}
		if v.unflushed(l.Column) && !w.goesOn {
			w.giveUp(h, v, true)
			return
		}
		w.renewed++
		l.WantedLink = v.wanted.Legs[i]
		for _, x := range v.writes {
			delete(x.done, id) // the leg may have lost that write too
		}
		w.writes = slices.DeleteFunc(w.writes, func(c *wCommand) bool {
			return c.host == h && !c.arrived && c.link.Leg == id && c.link.Revision < l.Revision
		})
	}
}

func (v *wVolume) unflushed(column int) bool {
	for c, n := range v.had {
		if c.column == column && n > v.durable[c] {
			return true
		}
	}
	return false
}

// giveUp fails a volume's device. Commands that have arrived at targets may still be executed.
func (w *world) giveUp(h *wHost, v *wVolume, lost bool) {
	w.givenUp++
	v.release, v.gaveUp, v.serving = PhaseDetachedUnclean, GaveUp{Why: "it had to", WritesLost: lost}, false
	v.links, v.writes = map[block.LegID]*wLink{}, map[wCell]*wWrite{}
	w.forget(h)
}

// forget drops the commands that have not arrived and that the host no longer needs.
func (w *world) forget(h *wHost) {
	w.writes = slices.DeleteFunc(w.writes, func(c *wCommand) bool {
		if c.host != h || c.arrived {
			return false
		}
		v := h.volumes[c.volume]
		return v == nil || v.writes[c.cell] != c.write || !c.write.need[c.link.Leg]
	})
}

// drop removes a leg from the table for good: it is recorded stale.
func (w *world) drop(h *wHost, v *wVolume, leg block.LegID, revision uint64) {
	delete(v.links, leg)
	if v.serving && !w.notesLate {
		w.note(h, v)
	}
	v.gone[leg] = max(v.gone[leg], revision)
	for _, x := range v.writes {
		delete(x.need, leg)
	}
}

// release releases a volume, cleanly if every leg has every write. The host keeps reporting
// it.
func (w *world) release(h *wHost, v *wVolume) {
	switch {
	case v.release != "":
	case !v.serving:
		v.release = PhaseDetachedUnclean
	case v.readOnly():
		v.release, v.serving = PhaseDetachedClean, false
	case w.settled(h, v):
		w.flush(v)
		v.release, v.serving = PhaseDetachedClean, false
	}
	if v.release != "" {
		v.links = map[block.LegID]*wLink{}
	}
}

// dataActs makes one random step of the data path of a host.
func (w *world) dataActs(h *wHost) {
	if len(w.writes) > 0 && w.chance(40) {
		w.commandActs(w.rng.IntN(len(w.writes)))
		return
	}
	ids := sorted(h.volumes)
	if !h.up || len(ids) == 0 {
		return
	}
	v := h.volumes[pick(w, ids)]
	switch {
	case v.release != "":
	case !v.serving:
		w.build(h, v)
	default:
		w.serve(h, v)
	}
}

// build connects every wanted in-sync leg, or has those that it cannot reach recorded stale,
// makes the copies equal if asked, and serves.
func (w *world) build(h *wHost, v *wVolume) {
	links := map[block.LegID]*wLink{}
	for _, l := range v.wanted.Legs {
		if l.State != LegInSync || l.Revision <= v.gone[l.Leg] {
			continue
		}
		if !w.connects(h, l) {
			if v.readOnly() {
				continue // it joins later
			}
			if w.chance(20) {
				w.lose(h, v, l.Leg)
			}
			return
		}
		links[l.Leg] = &wLink{WantedLink: l, readable: true, contact: w.now}
	}
	for c := range v.wanted.Layout.Stripes {
		if !slices.ContainsFunc(slices.Collect(maps.Values(links)), func(l *wLink) bool { return l.Column == c }) {
			return
		}
	}
	first := map[int]block.LegID{}
	for _, l := range v.wanted.Legs {
		if _, ok := links[l.Leg]; !ok || !v.wanted.Equalize {
			continue
		}
		if source, ok := first[l.Column]; ok && w.worn(w.target(l.Node)) {
			w.lose(h, v, l.Leg)
			return
		} else if ok {
			w.copy(source, l.Leg)
		} else {
			first[l.Column] = l.Leg
		}
	}
	v.links, v.serving = links, true
	w.note(h, v)
	w.serves++
}

// copy makes one leg equal to another, and flushes it before it can count as such.
func (w *world) copy(from, to block.LegID) {
	w.value[to] = w.value[from]
	delete(w.lossy, to)
	if w.hardware != nil {
		delete(w.hardware.excused, to)
	}
	if !w.noFlush {
		w.medium[to] = w.value[to]
	}
}

func (w *world) lose(h *wHost, v *wVolume, legs ...block.LegID) {
	in := RecordStale{Node: h.name, Volume: v.wanted.Volume, Epoch: v.wanted.Epoch, Legs: legs, Reason: "lost"}
	if !w.oldHosts {
		in.Revisions = map[block.LegID]uint64{}
		for _, l := range v.wanted.Legs {
			if slices.Contains(legs, l.Leg) {
				in.Revisions[l.Leg] = l.Revision
			}
		}
	}
	w.calls = append(w.calls, wCall{h, h.boot, in})
}

// suspended reports whether a leg of the table was out of contact for longer than the host's
// own lease.
func (w *world) suspended(v *wVolume) bool {
	if v.readOnly() {
		return false // it has no lease
	}
	for _, l := range v.links {
		if w.now.Sub(l.contact) > 8*time.Second {
			return true
		}
	}
	return false
}

func (w *world) serve(h *wHost, v *wVolume) {
	for _, id := range sorted(v.links) { // a live controller renews the lease
		if l := v.links[id]; w.live(h, l) {
			l.contact = w.now
		}
	}
	if v.readOnly() {
		w.look(h, v)
		return
	}
	if !w.healed && v.wanted.Mode == AttachExclusive && w.rng.IntN(500) == 0 {
		w.giveUp(h, v, false) // as if it had released the device and the detach was then cancelled
		return
	}
	lost := w.lost(h, v)
	if w.hardware != nil {
		lost = append(lost, w.wornLinks(v)...)
	}
	if len(lost) > 0 && w.chance(30) {
		w.lose(h, v, pick(w, lost))
	}
	if v.wanted.Detach {
		w.release(h, v)
		w.finish(h, v)
		return
	}
	if legs := v.leavesOut(); len(legs) > 0 && len(lost) == 0 && !w.suspended(v) {
		w.leaveOut(h, v, legs)
		return
	}
	if !w.healed && (w.chance(2) || w.leavesDirty && len(v.writes) > 0 && w.chance(20)) {
		w.leave(h)
		return
	}
	if w.mood == caches && w.chance(30) && w.settled(h, v) {
		w.flush(v)
	}
	if v.wanted.Heal != "" { // it has no users
		w.rebuild(h, v)
		w.finish(h, v)
		return
	}
	switch w.rng.IntN(5) {
	case 0, 1:
		w.write(h, v)
	case 2:
		w.read(h, v)
	case 3, 4:
		w.rebuild(h, v)
	}
	w.finish(h, v)
}

// leavesOut are the legs that the host is asked to leave out, where another copy stays.
func (v *wVolume) leavesOut() (legs []block.LegID) {
	asked := map[block.LegID]bool{}
	for _, l := range v.wanted.Legs {
		asked[l.Leg] = l.LeaveOut != ""
	}
	for _, id := range sorted(v.links) {
		stays := func(o *wLink) bool { return o.Column == v.links[id].Column && o.readable && !asked[o.Leg] }
		if asked[id] && v.links[id].readable && slices.ContainsFunc(slices.Collect(maps.Values(v.links)), stays) {
			legs = append(legs, id)
		}
	}
	return legs
}

// leaveOut holds I/O, flushes, and has the legs recorded stale.
func (w *world) leaveOut(h *wHost, v *wVolume, legs []block.LegID) {
	if w.leavesUnflushed || w.settled(h, v) {
		if !w.leavesUnflushed {
			w.flush(v)
		}
		w.lose(h, v, legs...)
		in := w.calls[len(w.calls)-1].in.(RecordStale)
		in.Reasons = map[block.LegID]StaleReason{}
		for _, leg := range legs {
			in.Reasons[leg] = StaleReason{Word: leftOutReason, Text: "it is asked to"}
		}
		w.calls[len(w.calls)-1].in = in
	}
	w.finish(h, v)
}

func (v *wVolume) readOnly() bool { return v.wanted.Mode == AttachSharedReadOnly }

// look is serve for a read-only host: it leaves legs and returns to them without a record.
func (w *world) look(h *wHost, v *wVolume) {
	for _, l := range v.wanted.Legs {
		switch {
		case v.links[l.Leg] == nil && w.connects(h, l):
			v.links[l.Leg] = &wLink{WantedLink: l, readable: true, contact: w.now}
		case v.links[l.Leg] != nil && !w.live(h, v.links[l.Leg]) && len(v.links) > v.wanted.Layout.Stripes && w.chance(50):
			delete(v.links, l.Leg)
		}
	}
	switch {
	case v.wanted.Detach:
		w.release(h, v)
	case !w.healed && w.chance(2):
		w.leave(h)
	default:
		w.looks++
		w.read(h, v)
	}
}

// settled reports whether no write is in flight to a volume's legs, and all answer.
func (w *world) settled(h *wHost, v *wVolume) bool {
	return len(v.writes) == 0 && len(w.lost(h, v)) == 0 && !w.suspended(v)
}

// flush makes the contents of a volume's legs survive the loss of their caches.
func (w *world) flush(v *wVolume) {
	maps.Copy(v.durable, v.had)
	for leg, l := range v.links {
		if w.hardware == nil || !w.unflushed(l) {
			w.medium[leg] = w.value[leg]
		}
		for r := range registers {
			c := wCell{v.wanted.Volume, l.Column, r}
			w.flushed[c] = w.acked[c]
		}
	}
}

func (w *world) lost(h *wHost, v *wVolume) (legs []block.LegID) {
	for _, id := range sorted(v.links) {
		if !w.live(h, v.links[id]) {
			legs = append(legs, id)
		}
	}
	return legs
}

func (w *world) cell(v *wVolume) wCell {
	n := registers
	if v.wanted.Size < grown {
		n = tail
	}
	return wCell{v.wanted.Volume, w.rng.IntN(v.wanted.Layout.Stripes), w.rng.IntN(n)}
}

func (w *world) write(h *wHost, v *wVolume) {
	c := w.cell(v)
	if v.wanted.Mode == AttachSharedBlock { // each writer has a register of its own
		c.register = slices.Index(w.hosts, h)
		w.shares++
	}
	if v.writes[c] != nil || w.suspended(v) {
		return
	}
	w.nextID++
	x := &wWrite{id: w.nextID, need: map[block.LegID]bool{}, done: map[block.LegID]bool{}}
	for _, id := range sorted(v.links) {
		if l := v.links[id]; l.Column == c.column {
			x.need[id] = true
			w.writes = append(w.writes, &wCommand{host: h, volume: v.wanted.Volume, link: l.WantedLink, epoch: v.wanted.Epoch, grant: v.wanted.Grant, cell: c, write: x, boot: h.bootID()})
		}
	}
	v.writes[c] = x
}

// commandActs advances a command: it arrives at the target, or it is executed there, however
// late, as long as its export exists.
func (w *world) commandActs(i int) {
	c := w.writes[i]
	t := w.target(c.link.Node)
	switch {
	case !c.arrived && !w.cut(c.host, t) && t.up && t.serves(c.link):
		c.arrived = true
	case c.arrived && t.up:
		w.writes = slices.Delete(w.writes, i, i+1)
		if t.serves(c.link) && !w.worn(t) {
			w.checkWriter(c)
			w.put(c.link.Leg, c.cell.register, c.write.id)
			if !w.cut(c.host, t) && !w.chance(20) { // else the answer is lost
				c.write.done[c.link.Leg] = true
			}
		}
	}
}

// checkWriter finds writes of a host, or of an older boot of it, that was detached from a
// shared volume while others kept it. It may have been granted the volume again since.
func (w *world) checkWriter(c *wCommand) {
	v := w.state.volumes.Get(c.volume)
	if v == nil || len(v.Shared) == 0 || v.Epoch != c.epoch {
		return
	}
	if a := v.attachmentOf(c.host.name); a == nil || a.exported() && (a.BootID != c.boot || a.Grant != c.grant) {
		w.violation = fmt.Sprintf("I4: a write of %s at epoch %d lands after it was taken out", c.boot, c.epoch)
	}
}

func (w *world) put(leg block.LegID, register, id int) {
	x := w.value[leg]
	x[register] = id
	w.value[leg] = x
}

// finish repeats commands whose answers were lost, and acknowledges writes that
// every leg of the table has executed.
func (w *world) finish(h *wHost, v *wVolume) {
	for c, x := range v.writes {
		for leg := range x.need {
			inFlight := slices.ContainsFunc(w.writes, func(o *wCommand) bool { return o.write == x && o.link.Leg == leg })
			if l := v.links[leg]; l != nil && !x.done[leg] && !inFlight && w.live(h, l) && !w.worn(w.target(l.Node)) {
				w.put(leg, c.register, x.id)
				x.done[leg] = true
			}
		}
		done := 0
		for leg := range x.need {
			if x.done[leg] {
				done++
			}
		}
		if len(x.need) > 0 && (done == len(x.need) || w.ackBeforeRecord && done > 0) {
			if w.held(c) >= x.id { // else every leg has lost it again with its cache
				w.acked[c] = max(w.acked[c], x.id)
				v.had[c] = max(v.had[c], x.id)
			}
			delete(v.writes, c)
		}
	}
}

// held is the newest value of a register on a leg in sync.
func (w *world) held(c wCell) (newest int) {
	v := w.state.volumes.Get(c.volume)
	for i := 0; v != nil && i < len(v.Legs); i++ {
		if l := &v.Legs[i]; l.Column == c.column && l.State == LegInSync {
			newest = max(newest, w.value[l.ID][c.register])
		}
	}
	return newest
}

// read reads a register that is not being written, and remembers the value.
func (w *world) read(h *wHost, v *wVolume) {
	c := w.cell(v)
	if v.writes[c] != nil || w.suspended(v) {
		return
	}
	ids := sorted(v.links)
	if len(ids) == 0 { // only a weakened manager removes all legs
		return
	}
	id := pick(w, ids)
	if l := v.links[id]; l.readable && l.Column == c.column && w.live(h, l) {
		w.seen[c] = max(w.seen[c], w.value[id][c.register])
		v.had[c] = max(v.had[c], w.value[id][c.register])
	}
}

// rebuild copies a column to a rebuilding leg, and has copied legs recorded in sync.
func (w *world) rebuild(h *wHost, v *wVolume) {
	for _, l := range v.wanted.Legs {
		if l.State != LegRebuilding || l.Revision <= v.gone[l.Leg] {
			continue
		}
		if have := v.links[l.Leg]; have != nil {
			if !have.readable {
				w.calls = append(w.calls, wCall{h, h.boot, RecordInSync{Node: h.name, Volume: v.wanted.Volume, Epoch: v.wanted.Epoch, Legs: []RebuiltLeg{{Leg: l.Leg, Revision: l.Revision}}}})
			}
			continue
		}
		if w.worn(w.target(l.Node)) {
			w.lose(h, v, l.Leg)
			continue
		}
		if source := w.source(h, v, l.Column); source != nil && w.connects(h, l) {
			w.copy(source.Leg, l.Leg)
			v.links[l.Leg] = &wLink{WantedLink: l, contact: w.now}
			for c, x := range v.writes {
				if c.column == l.Column {
					x.need[l.Leg] = true // a write that was held back goes to it too
					delete(x.done, l.Leg)
				}
			}
		}
	}
}

// source returns a live readable leg of a column in which no write is in flight.
func (w *world) source(h *wHost, v *wVolume, column int) *wLink {
	for c := range v.writes {
		if c.column == column && w.hardware == nil {
			return nil
		}
	}
	for _, id := range sorted(v.links) {
		if l := v.links[id]; l.Column == column && l.readable && w.live(h, l) {
			return l
		}
	}
	return nil
}

// callActs takes a record call to the manager, sometimes twice, and its answer back.
func (w *world) callActs() {
	if len(w.calls) == 0 {
		return
	}
	i := w.rng.IntN(len(w.calls))
	c := w.calls[i]
	if !c.host.linked && w.chance(70) {
		return
	}
	if !w.chance(20) {
		w.calls = slices.Delete(w.calls, i, i+1)
	}
	rebuilt := w.rebuiltSince(c.in)
	err := w.step(c.in)
	for _, leg := range rebuilt {
		if l := w.state.volumes.Get(c.in.(RecordStale).Volume).leg(leg); l.State != LegInSync {
			w.violation = fmt.Sprintf("I3: a late request has taken out %v, which was rebuilt since", l)
		}
	}
	if in, stale := c.in.(RecordStale); err == nil && stale && w.hardware != nil {
		for column := range w.state.volumes.Get(in.Volume).Layout.Stripes {
			w.forgive(w.state.volumes.Get(in.Volume), column) // the leg that a host drops may be the last with that data
		}
	}
	if err != nil || !c.host.up || c.host.boot != c.boot || w.chance(20) {
		return
	}
	w.answered(c)
}

// rebuiltSince lists the legs of a call that were lost, recorded and rebuilt since it was made.
func (w *world) rebuiltSince(call Input) (legs []block.LegID) {
	in, ok := call.(RecordStale)
	if !ok || w.state.volumes.Get(in.Volume) == nil {
		return nil
	}
	for _, id := range in.Legs {
		l := w.state.volumes.Get(in.Volume).leg(id)
		if l != nil && l.State == LegInSync && in.Revisions[id] != 0 && l.Revision > in.Revisions[id] {
			legs = append(legs, id)
		}
	}
	return legs
}

func (w *world) answered(c wCall) {
	switch in := c.in.(type) {
	case RecordStale:
		if x := w.state.volumes.Get(in.Volume); x == nil || x.grantOf(in.Node) == nil || x.grantOf(in.Node).Epoch != in.Epoch {
			w.violation = fmt.Sprintf("I4: %s recorded at epoch %d without having the volume", in.Node, in.Epoch)
		}
		v := c.host.volumes[in.Volume]
		if v == nil || v.wanted.Epoch != in.Epoch {
			return
		}
		for _, leg := range in.Legs {
			// The answer is about the leg's revision in the request, or a later one.
			revision := uint64(0)
			for _, l := range v.wanted.Legs {
				if l.Leg == leg {
					revision = l.Revision
				}
			}
			if used := in.Revisions[leg]; used != 0 {
				revision = used
			}
			if l := v.links[leg]; l != nil && l.Revision > revision {
				continue // a repeated answer, and the leg is being rebuilt since
			}
			w.drop(c.host, v, leg, revision)
		}
	case RecordInSync:
		if v := c.host.volumes[in.Volume]; v != nil && v.wanted.Epoch == in.Epoch {
			for _, r := range in.Legs {
				if l := v.links[r.Leg]; l != nil && l.Revision == r.Revision {
					l.readable = true
					w.note(c.host, v)
				}
			}
		}
	}
}

func (w *world) operatorActs() {
	name := pick(w, []string{"a", "a", "a", "b", "s"})
	if w.mood == sharing {
		name = pick(w, []string{"a", "s"})
		if v := w.state.volumes.Get(w.state.idOf("a")); v.Attachment != nil && w.chance(50) {
			w.step(Detach{Volume: "a"}) // the writer releases it, so that others may read
			return
		}
	}
	host := pick(w, w.hosts)
	if w.moves != nil && w.chance(40) {
		w.moveActs()
		return
	}
	n := w.rng.IntN(19)
	if w.seals != nil && name == "a" && w.chance(80) && slices.Contains([]int{5, 6, 14, 15, 16}, n) {
		n = 4 // what is expanded, or detached by force, cannot be sealed
	}
	switch n {
	case 14, 15, 16:
		w.step(ExpandVolume{name, pick(w, []block.Size{768 * block.MiB, grown, grown, grown + 256*block.MiB})})
	case 0, 1, 2, 3, 12, 13:
		w.step(Attach{Volume: name, Node: host.name, Mode: w.mode(name)})
	case 4:
		w.step(Detach{Volume: name})
	case 5, 6: // a manual failover
		w.step(Detach{Volume: name, Force: true})
		w.step(Attach{Volume: name, Node: host.name, Mode: w.mode(name)})
	case 17, 18:
		w.step(Detach{Volume: name, Node: host.name, Force: w.chance(50)})
	case 7:
		if !host.up {
			w.step(ConfirmNodeDead{host.name})
		}
	case 8:
		if t := pick(w, w.targets); !t.up && w.hardware == nil { // else data that only its copy holds may be lost
			w.step(ConfirmNodeDead{t.name})
		}
	case 9, 10:
		w.create("b")
	case 11:
		w.step(DeleteVolume{"b"})
	}
}

// mode picks the mode in which a volume is attached.
func (w *world) mode(volume string) AttachMode {
	often := 10
	if w.mood == sharing {
		often = 80
	}
	switch {
	case !w.chance(often):
		return AttachExclusive
	case volume == "s" && w.chance(80):
		return AttachSharedBlock
	}
	return AttachSharedReadOnly
}

func (w *world) faultActs() {
	t, h := pick(w, w.targets), pick(w, w.hosts)
	if w.mood != mixed && w.chance(80) {
		w.moodActs(t, h)
		return
	}
	switch w.rng.IntN(14) {
	case 0:
		w.unlinkTarget(t)
	case 1:
		w.unlinkHost(h)
	case 2, 3:
		w.reach[[2]block.NodeName{h.name, t.name}] = true
	case 4, 5, 6:
		delete(w.reach, [2]block.NodeName{h.name, t.name})
	case 7:
		w.crashTarget(t)
	case 8, 9:
		t.up = true
	case 10:
		w.crashHost(h)
	case 11, 12:
		h.up = true
	case 13:
		w.restart()
	}
}

func (w *world) moodActs(t *wTarget, h *wHost) {
	path := [2]block.NodeName{h.name, t.name}
	switch {
	case w.mood == flapping && w.chance(30):
		w.reach[path] = true
	case w.mood == flapping:
		delete(w.reach, path)
	case (w.mood == split || w.mood == sharing) && w.chance(50):
		w.split(t)
	case w.mood == sharing:
		w.expel(h)
	case w.mood == caches && w.chance(50):
		w.rackCut()
	case w.mood == caches:
		w.powerCut()
	}
}

// split cuts a target and the host that has volume a from the manager, but not from each
// other, and moves the volume.
func (w *world) split(t *wTarget) {
	v := w.state.volumes.Get(w.state.idOf("a"))
	if w.mood == sharing && v.users() == "" {
		w.step(Attach{Volume: "a", Node: pick(w, w.hosts).name, Mode: AttachSharedReadOnly})
	}
	if !slices.ContainsFunc(v.attachments(), func(a *Attachment) bool { return a.State == Attached }) {
		return
	}
	for _, h := range w.hosts {
		switch {
		case v.attachmentOf(h.name) != nil:
			w.unlinkHost(h)
		case h.up && !h.linked:
			w.linkHost(h)
		}
	}
	w.unlinkTarget(t)
	w.step(Detach{Volume: "a", Force: true})
	for _, h := range w.hosts {
		if h.linked {
			w.step(Attach{Volume: "a", Node: h.name})
		}
	}
	if w.mood == sharing {
		w.lasts()
	}
}

// expel makes a host share volume s with others, leave it, or be detached while it is cut
// off and continues.
func (w *world) expel(h *wHost) {
	v := w.state.volumes.Get(w.state.idOf("s"))
	switch a := v.attachmentOf(h.name); {
	case a == nil && w.chance(50):
		w.step(Attach{Volume: "s", Node: h.name, Mode: AttachSharedBlock})
	case a == nil:
	case w.chance(50):
		w.unlinkHost(h)
		w.step(Detach{Volume: "s", Node: h.name, Force: true})
	case w.chance(50): // fenced, and granted it again: it may not have heard of either
		w.step(Detach{Volume: "s", Node: h.name, Force: true})
		w.lasts()
		w.step(Attach{Volume: "s", Node: h.name, Mode: AttachSharedBlock})
	default:
		w.step(Detach{Volume: "s", Node: h.name})
		w.step(Attach{Volume: "s", Node: h.name, Mode: AttachSharedBlock})
	}
}

// lasts keeps up a split for longer than a lease, while the linked targets act.
func (w *world) lasts() {
	for range 4 {
		for _, t := range w.targets {
			for t.up && t.linked && len(t.inbox) > 0 {
				w.comply(t)
			}
			if t.up && t.linked {
				w.step(TargetReported{Session: t.session, Report: t.report()})
			}
		}
		w.pass(4 * time.Second)
	}
}

// rackCut cuts the power of all targets and of nothing else. Most are back soon.
func (w *world) rackCut() {
	for _, t := range w.targets {
		w.crashTarget(t)
	}
	for _, t := range w.targets {
		if t.up = w.chance(90); t.up {
			w.linkTarget(t)
		}
	}
}

// powerCut cuts the power of some targets and hosts and, mostly, of the manager.
func (w *world) powerCut() {
	everywhere := w.chance(40)
	for _, t := range w.targets {
		if everywhere || w.chance(50) {
			w.crashTarget(t)
			t.up = w.chance(70)
		}
	}
	for _, h := range w.hosts {
		if w.chance(50) {
			w.crashHost(h)
			h.up = w.chance(70)
		}
	}
	if w.chance(80) {
		w.restart()
	}
}

// loseCache makes a target's legs lose what only their caches held. Writes that every in-sync
// leg has lost in this way are lost for good. That is no violation unless they were flushed.
func (w *world) loseCache(t *wTarget) {
	for _, id := range sortedIDs(w.state.volumes.Keys()) {
		v := w.state.volumes.Get(id)
		for _, l := range v.Legs {
			if l.Node == t.name {
				w.value[l.ID] = w.medium[l.ID]
				w.lossy[l.ID] = true
				if w.hardware != nil {
					w.hardware.excused[l.ID] = true
				}
			}
		}
		for c := range v.Layout.Stripes {
			w.forgive(v, c)
		}
	}
}

func (w *world) forgive(v *Volume, column int) {
	var legs []block.LegID
	for _, l := range v.Legs {
		if l.Column == column && l.State == LegInSync {
			legs = append(legs, l.ID)
		}
	}
	if len(legs) == 0 || slices.ContainsFunc(legs, func(id block.LegID) bool { return !w.lossy[id] && !w.gone(v.leg(id)) }) {
		return
	}
	for _, id := range legs {
		delete(w.lossy, id) // any of them may be the source of the others from now on
		for r := range registers {
			c := wCell{v.ID, column, r}
			w.acked[c] = min(w.acked[c], w.value[id][r])
			w.seen[c] = min(w.seen[c], w.value[id][r])
			if w.acked[c] < w.flushed[c] {
				w.violation = fmt.Sprintf("I1: all of %v lost their caches, and one has %d, %d was flushed", c, w.acked[c], w.flushed[c])
			}
		}
	}
}

func (w *world) unlinkTarget(t *wTarget) {
	t.linked, t.inbox, t.outbox = false, nil, nil
	if w.chance(50) { // else the manager notices only the silence
		w.step(TargetLost{t.session, t.name})
	}
}

func (w *world) unlinkHost(h *wHost) {
	h.linked, h.inbox, h.outbox = false, nil, nil
	if w.chance(50) {
		w.step(InitiatorLost{h.session, h.name})
	}
}

func (w *world) crashTarget(t *wTarget) {
	if !t.up {
		return
	}
	w.unlinkTarget(t)
	t.up = false
	t.reboot()
	if w.mood == caches && t.cached {
		w.loseCache(t)
	}
	w.powerCycled(t)
	w.writes = slices.DeleteFunc(w.writes, func(c *wCommand) bool { return c.link.Node == t.name && c.arrived })
}

// crashHost crashes a host. Commands that have arrived at targets may still be executed.
func (w *world) crashHost(h *wHost) {
	if !h.up {
		return
	}
	w.unlinkHost(h)
	h.up, h.ending = false, false
	h.boot++
	h.volumes = map[block.VolumeID]*wVolume{}
	w.writes = slices.DeleteFunc(w.writes, func(c *wCommand) bool { return c.host == h && !c.arrived })
}

// leave shuts a host down: it releases what it can, and reports that until it crashes.
func (w *world) leave(h *wHost) {
	if !h.up {
		return
	}
	h.ending = true
	for _, id := range sorted(h.volumes) {
		v := h.volumes[id]
		if !v.serving || v.release != "" || !v.readOnly() && !w.settled(h, v) && !w.leavesDirty {
			continue
		}
		if !v.readOnly() {
			w.flush(v)
		}
		v.release, v.serving, v.links = PhaseDetachedClean, false, map[block.LegID]*wLink{}
		w.leaves++
	}
}

// restart starts a new manager on the old one's store; all streams break.
func (w *world) restart() {
	var records []Record
	for _, key := range slices.Sorted(maps.Keys(w.store)) {
		records = append(records, Record{key, w.store[key]})
	}
	w.begin(records)
}

// begin starts a manager on records.
func (w *world) begin(records []Record) {
	s, err := Load(records)
	if err != nil {
		w.violation = fmt.Sprintf("load: %v", err)
		return
	}
	w.state = s
	w.state.SetPolicy(w.policy())
	clear(w.saidLast)
	w.store = map[string][]byte{}
	keep(w.store, records)
	w.step(BeginTerm{})
	for _, t := range w.targets {
		t.linked, t.inbox, t.outbox, t.outlived = false, nil, nil, w.lostStores > 0
	}
	for _, h := range w.hosts {
		h.linked, h.inbox, h.outbox = false, nil, nil
	}
}

// storeActs takes a backup, loses the store, or has an operator choose a copy where none was
// proven.
func (w *world) storeActs() {
	switch n := w.rng.IntN(10); {
	case n < 2:
		w.backup = w.state.Records()
	case n < 4:
		w.choose()
	case n < 7:
		w.restore()
	default:
		w.rebuildStore()
	}
}

// rebuildStore rebuilds the store from the drives, which must all be there, and from the
// hosts that are up.
func (w *world) rebuildStore() {
	var targets []TargetReport
	var hosts []InitiatorReport
	for _, t := range w.targets {
		if !t.up {
			return
		}
		r := t.report()
		r.ClusterID = testCluster()
		targets = append(targets, r)
	}
	for _, h := range w.hosts {
		if h.up {
			hosts = append(hosts, w.hostReport(h))
		}
	}
	s, text, err := newRebuild(targets, hosts).rebuild(w.now, targets, hosts)
	if err != nil || s.volumes.Get(s.idOf("a")) == nil || s.volumes.Get(s.idOf("s")) == nil {
		w.violation = fmt.Sprintf("I8: rebuilt without a or s: %v %s", err, text)
		return
	}
	for _, v := range s.volumes.All() {
		for c, n := range v.inSync() {
			if n > 0 && v.Layout.Copies > 1 && v.State == VolumeReady && len(v.Legs) > c {
				w.decided++
			}
		}
	}
	w.lostStores++
	w.begin(s.Records())
}

// restore restores the last backup, often one that was restored before.
func (w *world) restore() {
	if w.backup == nil {
		return
	}
	old, err := Load(w.backup)
	if err != nil || !slices.Equal(sortedIDs(old.volumes.Keys()), sortedIDs(w.state.volumes.Keys())) {
		w.backup = nil // of other volumes
		return
	}
	clock := w.now
	if w.chance(30) {
		clock = time.Unix(0, 0) // the clock was not set
	}
	records, err := Restored(clock, w.backup)
	if err != nil {
		w.violation = fmt.Sprintf("restore: %v", err)
		return
	}
	w.lostStores++
	w.begin(records)
}

// choose has an operator promote a leg of each column that has none in sync, when no host
// has the volume any more. The writes that it lacks are lost, which is no violation.
func (w *world) choose() {
	for _, id := range sortedIDs(w.state.volumes.Keys()) {
		v := w.state.volumes.Get(id)
		if v.State != VolumeReady || v.Restored || v.users() != "" || w.used(id) {
			continue
		}
		for c, n := range v.inSync() {
			var legs []block.LegID
			for _, l := range v.Legs {
				if l.Column == c && l.member() && w.target(l.Node).size(l.ID) >= v.Layout.LegSize(v.Size) { // else it is missing, or still growing
					legs = append(legs, l.ID)
				}
			}
			if n > 0 || len(legs) == 0 {
				continue
			}
			leg := pick(w, legs)
			if err := w.step(PromoteStaleLeg{Volume: id.String(), Leg: leg, AcceptDataLoss: true}); err != nil {
				w.violation = fmt.Sprintf("I7: nobody can choose a copy: %v", err)
			}
			for r := range registers {
				cell := wCell{id, c, r}
				w.acked[cell] = min(w.acked[cell], w.value[leg][r])
				w.seen[cell] = min(w.seen[cell], w.value[leg][r])
				w.flushed[cell] = min(w.flushed[cell], w.value[leg][r])
				if w.seals != nil && w.seals.holds != nil {
					w.seals.holds[cell] = w.value[leg][r]
				}
			}
		}
	}
}

// used reports whether a host still has a volume, whatever the manager thinks.
func (w *world) used(id block.VolumeID) bool {
	return slices.ContainsFunc(w.hosts, func(h *wHost) bool { return h.volumes[id] != nil && h.volumes[id].serving })
}

// check compares the world with the invariants of the design.
func (w *world) check() string {
	if w.violation != "" {
		return w.violation
	}
	for _, id := range sortedIDs(w.state.volumes.Keys()) {
		if v := w.state.volumes.Get(id); v.State == VolumeReady && !v.Restored { // a restored one is not judged yet
			if bad := w.checkVolume(v); bad != "" {
				return bad
			}
		}
	}
	if bad := cmp.Or(w.checkReaders(), w.checkSeal()); bad != "" {
		return bad
	}
	if w.chance(1) {
		return w.checkLabels()
	}
	return ""
}

// checkLabels rebuilds a store from the drives as they are now. It has to know every size
// that a host was told, with legs that have room for it.
func (w *world) checkLabels() string {
	var reports []TargetReport
	for _, t := range w.targets {
		r := t.report()
		r.ClusterID = testCluster()
		reports = append(reports, r)
	}
	s, text, err := Rebuild(w.now, reports, nil)
	if err != nil {
		return fmt.Sprintf("I8: %v", err)
	}
	for _, id := range sortedIDs(s.volumes.Keys()) {
		v, have := s.volumes.Get(id), w.state.volumes.Get(id)
		if have == nil || have.State != VolumeReady || have.Restored || v.State != VolumeReady {
			continue
		}
		if v.Size < w.told[id] || v.Size > have.planned() && w.lostStores == 0 { // an earlier store may have asked for more
			return fmt.Sprintf("I8: rebuilt %s has %v, it was %v, to be %v, and a host knows %v: %s", v.Name, v.Size, have.Size, have.planned(), w.told[id], text)
		}
		for _, l := range v.Legs {
			if t := w.target(l.Node); l.State == LegInSync && t.zeroed(l.ID) < v.Layout.LegSize(v.Size) {
				return fmt.Sprintf("I8: rebuilt %s has %v, and %v has %v", v.Name, v.Size, &l, t.zeroed(l.ID))
			}
		}
		if !slices.ContainsFunc(v.Legs, func(l Leg) bool {
			return l.member() && !l.Leave && int(image.Count(l.Extents)) < v.Layout.LegExtents(v.Size)
		}) {
			continue
		}
		return fmt.Sprintf("I8: rebuilt %s has a leg without room for %v: %s", v.Name, v.Size, text)
	}
	return ""
}

// hadMoves: an operator may have cancelled a move to the node of the leg that was to leave.
func (w *world) hadMoves() bool { return w.moves != nil }

func (w *world) checkVolume(v *Volume) string {
	for c, n := range v.inSync() {
		if n == 0 && w.lostStores == 0 {
			return fmt.Sprintf("I2: column %d of %s has no in-sync leg", c, v.Name)
		}
	}
	granted := v.open() && v.attachments()[0].Mode != AttachSharedReadOnly
	for _, l := range v.Legs {
		for _, o := range v.Legs {
			if l.ID != o.ID && l.Column == o.Column && l.Node == o.Node && l.member() && o.member() && w.state.leaving(&l) == "" && w.state.leaving(&o) == "" && !w.hadMoves() {
				return fmt.Sprintf("I5: %v and %v share a domain", &l, &o)
			}
		}
		if l.State != LegInSync {
			continue
		}
		if granted && w.target(l.Node).admitted[v.ID] < v.Epoch {
			return fmt.Sprintf("I4: %s granted at epoch %d, %v admits %d", v.Name, v.Epoch, &l, w.target(l.Node).admitted[v.ID])
		}
		size := w.target(l.Node).size(l.ID)
		if w.lostStores > 0 {
			size = w.target(l.Node).zeroed(l.ID) // its full size is mapped once the new manager wants it
		}
		if size < v.Layout.LegSize(v.Size) {
			return fmt.Sprintf("I10: %v is in sync with %v of a volume of %v", &l, size, v.Size)
		}
		if l.Suspect || w.unjudged(&l) || w.mood == caches && w.state.nodes[l.Node].TargetBoot != w.target(l.Node).bootID() {
			continue // its content is in doubt, or the manager does not know yet that it is
		}
		for r := range registers {
			if c := (wCell{v.ID, l.Column, r}); w.value[l.ID][r] < w.acked[c] {
				return fmt.Sprintf("I1: %v is in sync and holds %d in %v, acknowledged %d", &l, w.value[l.ID][r], c, w.acked[c])
			}
		}
	}
	return ""
}

// checkReaders finds hosts that could read older data than was acknowledged or, while they
// have the volume, than was read before.
func (w *world) checkReaders() string {
	for _, h := range w.hosts {
		for _, id := range sorted(h.volumes) {
			v := h.volumes[id]
			if !v.serving || w.suspended(v) {
				continue
			}
			for _, leg := range sorted(v.links) {
				l := v.links[leg]
				if t := w.target(l.Node); w.live(h, l) && t.zeroed(leg) < v.wanted.LegSize {
					return fmt.Sprintf("I6: %s has %v of %v, which has zeroes up to %v", h.name, v.wanted.LegSize, leg, t.zeroed(leg))
				}
				for r := range registers {
					c := wCell{id, l.Column, r}
					if !l.readable || !w.live(h, l) {
						continue
					}
					if w.value[leg][r] < v.had[c] && v.writes[c] == nil {
						return fmt.Sprintf("I9: %s goes on with its device of epoch %d and can read %d of %v from %v, it had %d", h.name, v.wanted.Epoch, w.value[leg][r], c, leg, v.had[c])
					}
					if w.value[leg][r] < w.seen[c] && v.writes[c] == nil && w.owns(h, v) {
						return fmt.Sprintf("I9: %s at epoch %d can read %d of %v from %v, %d was read before", h.name, v.wanted.Epoch, w.value[leg][r], c, leg, w.seen[c])
					}
					if w.value[leg][r] < w.acked[c] {
						return fmt.Sprintf("I3: %s at epoch %d can read %d of %v from %v, acknowledged %d", h.name, v.wanted.Epoch, w.value[leg][r], c, leg, w.acked[c])
					}
				}
			}
		}
	}
	return ""
}

// owns reports whether a host has the current grant.
func (w *world) owns(h *wHost, v *wVolume) bool {
	x := w.state.volumes.Get(v.wanted.Volume)
	return x != nil && x.attachmentOf(h.name) != nil && x.Epoch == v.wanted.Epoch
}

// heal repairs all links and starts all machines.
func (w *world) heal() {
	w.reach = map[[2]block.NodeName]bool{}
	for _, t := range w.targets {
		t.up = true
		w.linkTarget(t)
	}
	for _, h := range w.hosts {
		if h.ending {
			w.crashHost(h)
		}
		h.up = true
		w.linkHost(h)
	}
}

// settle runs rounds in which all agents do what is wanted.
func (w *world) settle(rounds int) {
	for range rounds {
		for _, t := range w.targets {
			for len(t.inbox) > 0 {
				w.comply(t)
			}
			t.zero()
			w.step(TargetReported{Session: t.session, Report: t.report()})
		}
		for _, h := range w.hosts {
			for len(h.inbox) > 0 {
				w.obey(h, h.inbox[0])
				h.inbox = h.inbox[1:]
			}
			for range 6 {
				w.dataActs(h)
			}
			w.step(InitiatorReported{h.session, w.hostReport(h)})
		}
		for range 3 {
			w.callActs()
		}
		w.pass(time.Second)
	}
}

// sharersWait reports a host that does not get a volume that it shares.
func (w *world) sharersWait() string {
	for _, name := range []string{"a", "s"} {
		v, err := w.state.Volume(name)
		for i := 0; err == nil && i < len(v.Shared); i++ {
			if a := &v.Shared[i]; a.State != Attached {
				return fmt.Sprintf("volume %s is %s to %s; waits for %s", name, a.State, a.Node, a.WaitingFor)
			}
		}
	}
	return ""
}

// recovered heals the world and reports what stays stuck after that.
func (w *world) recovered() string {
	w.healed = true
	w.heal()
	for round := range 40 {
		w.settle(10)
		if w.lostStores > 0 {
			w.choose()
		}
		if bad := w.check(); bad != "" {
			return bad
		}
		if w.hardware != nil {
			w.decide()
		}
		if waits := w.sharersWait(); waits != "" && round == 4 && w.hardware == nil {
			return "I7: stuck: " + waits
		} else if waits != "" && round < 4 && w.hardware == nil {
			continue
		}
		w.step(Detach{Volume: "s"})
		v := w.state.volumes.Get(w.state.idOf("a"))
		if v.sealed() && !v.Restored && !w.lacks(v) {
			return ""
		}
		if len(v.Shared) > 0 {
			w.step(Detach{Volume: "a"})
			continue
		}
		if v.Attachment == nil {
			w.step(Attach{Volume: "a", Node: "c1"})
			continue
		}
		if s := w.state.volumes.Get(w.state.idOf("s")); s != nil && s.users() != "" {
			continue
		}
		if v.Attachment.State == Attached && v.ExpandingTo == 0 && !w.lacks(v) {
			return ""
		}
	}
	e, _ := w.state.Explain("a")
	return fmt.Sprintf("I7: stuck: %s; waits %q", e.Summary, e.Waits)
}

// unzeroed weakens the targets: they use extents that they have not zeroed.
func (w *world) unzeroed() {
	for _, t := range w.targets {
		t.unzeroed = true
	}
}

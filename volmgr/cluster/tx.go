// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/cow"
	"weft.dev/weft/volmgr/drivepolicy"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/keys"
	"weft.dev/weft/volmgr/trust"
)

// tx is one step under way. It holds clones of the objects that it changes: commit swaps
// them into the state, and a refused input drops them.
type tx struct {
	s   *State
	now time.Time
	gen uint64 // the generation after a commit
	// term and replaces are those of meta after the step.
	term     uint64
	replaces bool
	level    block.Level // of the cluster after the step
	backedUp time.Time   // when the last backup was made
	// raised: the generation has to be committed even if nothing else has changed.
	raised bool
	master keys.Master // the one that the state gets; zero: it keeps its own

	volumes overlay[block.VolumeID, Volume]
	nodes   overlay[block.NodeName, Node]
	drives  overlay[block.DriveID, Drive]
	pools   overlay[string, Pool]
	tokens  overlay[string, trust.Token]
	events  []event.Event
	unsure  map[block.VolumeID]bool            // to settle before the commit
	retold  map[block.VolumeID]bool            // whose hosts are asked for something else
	carved  map[block.DriveID][][]image.Extent // that this step has given to legs
	changed map[block.NodeName]bool            // nodes whose targets may serve more or less than before
	spaces  map[block.DriveID]bool             // whose space to settle before the commit
	grafts  map[block.UUID][]block.VolumeID    // that get a leg in a tree in this step

	// policies are those of the state after the step.
	policies *drivepolicy.Set

	authorities overlay[string, trust.Authority]
	holders     overlay[trust.Subject, trust.Holder]
	asked       *audit.Asked // nil: nobody has
}

// view makes the answer to the caller from the state after the step.
type view func(*State) any

func newTx(s *State, now time.Time) *tx {
	return &tx{
		s: s, now: now, gen: s.meta.Generation + 1, term: s.meta.Term, replaces: s.meta.Replaces, level: s.level, backedUp: s.meta.BackedUp,
		volumes: overCow(s.by, &s.volumes, (*Volume).clone),
		nodes:   over(s.nodes, shallow[Node]),
		drives:  over(s.drives, shallow[Drive]),
		pools:   over(s.pools, shallow[Pool]),
		tokens:  over(s.tokens, shallow[trust.Token]),
		unsure:  map[block.VolumeID]bool{},
		retold:  map[block.VolumeID]bool{},
		carved:  map[block.DriveID][][]image.Extent{},
		changed: map[block.NodeName]bool{},
		spaces:  map[block.DriveID]bool{},
		grafts:  map[block.UUID][]block.VolumeID{},

		policies: s.policies,

		authorities: over(s.authorities, shallow[trust.Authority]),
		holders:     over(s.holders, shallow[trust.Holder]),
	}
}

// overlay is one map of the state as a step sees it: the changes of the step over the
// committed values, which are never changed in place.
type overlay[K comparable, V any] struct {
	below func(K) *V
	put   func(K, *V) // changes what is below; nil deletes
	upper map[K]*V    // nil means deleted
	clone func(*V) *V
}

func over[K comparable, V any](below map[K]*V, clone func(*V) *V) overlay[K, V] {
	put := func(key K, v *V) {
		if below[key] = v; v == nil {
			delete(below, key)
		}
	}
	return overlay[K, V]{func(key K) *V { return below[key] }, put, map[K]*V{}, clone}
}

// overCow is over for a map that can be copied.
func overCow[K comparable, V any](by *cow.Writer, below *cow.Map[K, *V], clone func(*V) *V) overlay[K, V] {
	put := func(key K, v *V) {
		if v == nil {
			below.Delete(by, key)
			return
		}
		below.Set(by, key, v)
	}
	return overlay[K, V]{below.Get, put, map[K]*V{}, clone}
}

// shallow clones a value whose maps and slices are never changed in place.
func shallow[V any](v *V) *V {
	c := *v
	return &c
}

// peek returns the value of key for reading only; nil if there is none.
func (o overlay[K, V]) peek(key K) *V {
	if v, ok := o.upper[key]; ok {
		return v
	}
	return o.below(key)
}

// edit is peek for writing.
func (o overlay[K, V]) edit(key K) *V {
	v, ok := o.upper[key]
	if below := o.below(key); !ok && below != nil {
		v = o.clone(below)
		o.upper[key] = v
	}
	return v
}

func (o overlay[K, V]) set(key K, v *V) { o.upper[key] = v }
func (o overlay[K, V]) drop(key K)      { o.upper[key] = nil }

// commit swaps in the change of key and returns its record.
func (o overlay[K, V]) commit(key K, record string) Record {
	v := o.upper[key]
	o.put(key, v)
	if v == nil {
		return Record{Key: record}
	}
	return encode(record, v)
}

func (t *tx) peek(id block.VolumeID) *Volume { return t.volumes.peek(id) }

// volume is peek for writing; the volume is settled before the commit.
func (t *tx) volume(id block.VolumeID) *Volume {
	t.unsure[id] = true
	return t.volumes.edit(id)
}

// node returns a node for writing, and creates it if there is none.
func (t *tx) node(name block.NodeName) *Node {
	if t.nodes.peek(name) == nil {
		t.nodes.set(name, &Node{Name: name})
	}
	return t.nodes.edit(name)
}

// settle makes the due transitions of every volume that this step touched.
func (t *tx) settle() {
	for _, id := range sorted(t.unsure) {
		if t.peek(id) != nil {
			t.settleVolume(id)
		}
	}
	t.settleSpace()
}

// settleNode marks the unsettled volumes with a leg or an attachment on a node.
func (t *tx) settleNode(name block.NodeName) {
	on := t.s.onNode.Get(name)
	if on.Len() < len(t.s.unsettled) {
		for id := range on.Keys() {
			if t.s.unsettled[id] {
				t.unsure[id] = true
			}
		}
		return
	}
	for id := range t.s.unsettled {
		if on.Has(id) {
			t.unsure[id] = true
		}
	}
}

// settleVolume makes every transition of one volume that its records and the agents'
// newest reports allow. It is idempotent.
func (t *tx) settleVolume(id block.VolumeID) {
	t.settleRestored(id)
	if t.peek(id).Restored {
		return
	}
	t.settleLonger(id)
	t.settleTaking(id)
	t.settleBases(id)
	t.settleCreating(id)
	t.settleDeleting(id)
	if t.peek(id) == nil {
		return
	}
	t.settleRestoring(id)
	t.settleFlattening(id)
	t.settleDraining(id)
	t.settleSuspects(id)
	t.settleFormerHosts(id)
	t.settleKept(id)
	t.settleShared(id)
	t.settleFence(id)
	t.settleGrant(id)
	t.settleGaveUp(id)
	t.settleAttached(id)
	t.settleStock(id)
	t.settleDetaching(id)
	t.settleLeft(id)
	t.settleExpanding(id)
	ask := t.settleLeftOut(id)
	t.settleCopies(id, ask)
	t.settleAsked(id, ask)
	t.settleCopying(id)
	t.settleScrub(id)
	t.settleHeals(id)
	t.settleHealing(id)
	t.settleRebuilds(id)
	t.settleProven(id) // last: agents are told of grants and legs as they are now
}

// commit swaps the clones into the state and returns what changed.
func (t *tx) commit() Outcome {
	s, wake := t.s, woken{}
	records := t.commitVolumes(wake)
	for _, id := range sorted(t.drives.upper) {
		d, old := t.drives.upper[id], s.drives[id]
		s.indexDrive(old, d)
		t.wakeFlushers(wake, old, d)
		for _, x := range []*Drive{d, old} {
			if x != nil {
				wake[x.Node] = nil
			}
		}
		records = append(records, t.drives.commit(id, driveKey(id)))
	}
	for _, name := range slices.Sorted(maps.Keys(t.nodes.upper)) {
		t.wakePeers(wake, s.nodes[name], t.nodes.upper[name])
		t.wakeDiscoverers(wake, s.nodes[name], t.nodes.upper[name])
		records = append(records, t.nodes.commit(name, nodeKey(name)))
	}
	for _, name := range slices.Sorted(maps.Keys(t.pools.upper)) {
		records = append(records, t.pools.commit(name, poolKey(name)))
	}
	if len(t.drives.upper)+len(t.nodes.upper)+len(t.pools.upper) > 0 {
		s.fields, s.still = nil, nil
	}
	if t.policies != s.policies {
		s.policies = t.policies
		records = append(records, policyRecord(s.policies))
	}
	records = append(records, t.commitTrust()...)
	t.noteHealth()
	t.wakeAsked(wake)
	t.wakeStopping(wake)
	records = append(records, t.commitEvents()...)
	var asked *audit.Entry
	if t.asked != nil && len(records) > 0 && t.may("u") {
		var more []Record
		asked, more = t.commitAudit()
		records = append(records, more...)
	}
	records = t.commitMeta(records)
	return Outcome{Records: records, Wake: slices.Sorted(maps.Keys(wake)), Changed: wake, Events: t.events, Asked: asked}
}

// commitVolumes is commit for volumes. A record that changes nothing is not written: it would be a new state
// that agents report to have, and if that leads to the same record again, the manager never rests.
func (t *tx) commitVolumes(wake woken) (records []Record) {
	s := t.s
	for _, id := range sorted(t.volumes.upper) {
		old, v := s.volumes.Get(id), t.volumes.upper[id]
		s.index(old, v)
		wake.users(old)
		wake.users(v)
		t.wakeOthers(wake, old, v)
		if !reflect.DeepEqual(old, v) {
			records = append(records, t.volumes.commit(id, volumeKey(id)))
		}
		if v == nil {
			delete(s.fences, id)
			maps.DeleteFunc(s.uncopied, func(c columnOf, _ uncopied) bool { return c.volume == id })
			delete(s.asked, id)
			delete(s.answered, id)
			for i := 0; old != nil && i < len(old.Legs); i++ {
				s.trials.Forget(s.by, old.Legs[i].ID)
			}
		}
	}
	return records
}

// wakeOthers wakes those that are told of another volume, or by another way, when v changes.
func (t *tx) wakeOthers(wake woken, old, v *Volume) {
	t.wakeDiscovery(wake, old, v)
	wakeHolders(wake, old, v)
	t.wakeBases(wake, old, v)
}

// commitMeta adds the cluster's level and numbers to the records of a step.
func (t *tx) commitMeta(records []Record) []Record {
	s := t.s
	if t.level != s.level {
		s.level = t.level
		records = append(records, encode(LevelKey, levelRecord{t.level}))
	}
	if len(records) > 0 || t.raised {
		s.meta.Generation, s.meta.Term, s.meta.Replaces, s.meta.BackedUp = t.gen, t.term, t.replaces, t.backedUp
		records = append(records, encode(metaKey, s.meta))
	}
	if err := checkKinds(s.level, records); err != nil {
		panic(fmt.Sprintf("cluster: %v", err)) // members that do not know it would diverge
	}
	return records
}

// event adds an event to the step. attributes alternate keys and values; empty values are
// left out.
func (t *tx) event(severity event.Severity, kind, object, text string, attributes ...string) uint64 {
	e := event.Event{
		Seq: t.s.events.Next() + uint64(len(t.events)), Time: t.now.UTC(),
		Severity: severity, Kind: kind, Object: object, Text: text,
	}
	for i := 0; i+1 < len(attributes); i += 2 {
		if attributes[i+1] == "" {
			continue
		}
		if e.Attributes == nil {
			e.Attributes = map[string]string{}
		}
		e.Attributes[attributes[i]] = attributes[i+1]
	}
	t.events = append(t.events, e)
	return e.Seq
}

func (t *tx) volumeEvent(v *Volume, severity event.Severity, kind, text string, attributes ...string) uint64 {
	attributes = append([]string{"volume", string(v.Name), "volume_id", v.ID.String()}, attributes...)
	return t.event(severity, kind, v.object(), text, attributes...)
}

// commitEvents adds the step's events and drops the oldest.
func (t *tx) commitEvents() []Record {
	var records []Record
	s := t.s
	for _, e := range t.events {
		records = append(records, encode(eventKey(e.Seq), e))
	}
	for _, seq := range s.events.Append(t.events) {
		records = append(records, Record{Key: eventKey(seq)})
	}
	s.meta.FirstEvent, s.meta.NextEvent = s.events.First(), s.events.Next()
	return records
}

// commitAudit adds who asked for the step, and drops the oldest entry.
func (t *tx) commitAudit() (*audit.Entry, []Record) {
	e := audit.Entry{Time: t.now.UTC(), Asked: *t.asked}
	if n := len(t.events); n > 0 {
		e.FirstEvent, e.LastEvent = t.events[0].Seq, t.events[n-1].Seq
	}
	e, dropped := t.s.audit.Append(e)
	records := []Record{encode(auditKey(e.Seq), e)}
	for _, seq := range dropped {
		records = append(records, Record{Key: auditKey(seq)})
	}
	t.s.meta.Audit = t.s.audit.Head()
	return &e, records
}

// wellness is what this manager has observed of the health of volumes. A volume is in neither of
// well and ill until it was seen healthy, or has legs that the records call stale: after a start its
// targets have not reported yet, and that is no news.
type wellness struct {
	served   map[block.VolumeID]bool      // volumes that can be served
	unserved map[block.VolumeID]time.Time // since when volumes that were served cannot be
	well     map[block.VolumeID]bool      // volumes that are healthy
	ill      map[block.VolumeID]time.Time // since when volumes are not
}

func newWellness() wellness {
	return wellness{map[block.VolumeID]bool{}, map[block.VolumeID]time.Time{}, map[block.VolumeID]bool{}, map[block.VolumeID]time.Time{}}
}

func (w wellness) clone() wellness {
	return wellness{maps.Clone(w.served), maps.Clone(w.unserved), maps.Clone(w.well), maps.Clone(w.ill)}
}

func (w wellness) forget(id block.VolumeID) {
	delete(w.served, id)
	delete(w.unserved, id)
	delete(w.well, id)
	delete(w.ill, id)
}

// mostNoted is how many volumes one step names that became healthy, and that became degraded. The
// loss of a target that has legs of all volumes must not push everything else out of the history.
const mostNoted = 16

// noteHealth writes an event when a volume becomes unavailable or degraded, and another with the
// duration when it is available or healthy again. The changes of the step must be in the state
// already. A volume that was never available since the manager started gets no event: its
// targets may not have reported yet.
func (t *tx) noteHealth() {
	s, check := t.s, map[block.VolumeID]bool{}
	for id := range t.volumes.upper {
		check[id] = true
	}
	for _, d := range t.drives.upper {
		if d != nil {
			t.changed[d.Node] = true
		}
	}
	for node := range t.changed {
		maps.Insert(check, s.onNode.Get(node).All())
	}
	noted := map[string]int{} // events by kind
	for _, id := range sorted(check) {
		v := s.volumes.Get(id)
		if v == nil || v.State != VolumeReady {
			s.forget(id)
			continue
		}
		health := s.health(v)
		t.noteWell(v, health, t.noteServed(v, health), noted)
	}
	for _, kind := range []string{event.VolumeDegraded, event.VolumeHealthy} {
		if more := noted[kind] - mostNoted; more > 0 {
			t.event(severities[kind], kind, "cluster", fmt.Sprintf("%d more volumes: `weft volume list`", more))
		}
	}
}

var severities = map[string]event.Severity{event.VolumeDegraded: event.Warning, event.VolumeHealthy: event.Info}

// noteServed notes whether a volume can be served, and reports whether that was news.
func (t *tx) noteServed(v *Volume, health Health) bool {
	s := t.s
	since, missing := s.unserved[v.ID]
	switch ok := health != Unavailable; {
	case ok && missing:
		delete(s.unserved, v.ID)
		s.served[v.ID] = true
		t.volumeEvent(v, event.Info, event.VolumeServed, fmt.Sprintf("it can be served again after %v", t.now.Sub(since).Round(time.Millisecond)))
		return true
	case ok:
		s.served[v.ID] = true
	case s.served[v.ID]:
		delete(s.served, v.ID)
		s.unserved[v.ID] = t.now
		t.volumeEvent(v, event.Warning, event.VolumeUnserved, s.unservedText(v))
		return true
	}
	return false
}

// noteWell notes whether a volume is healthy. If the step has an event already that says that it can
// be served, or cannot, there is no second one.
func (t *tx) noteWell(v *Volume, health Health, told bool, noted map[string]int) {
	s := t.s
	since, ill := s.ill[v.ID]
	kind, text := "", ""
	switch {
	case health == Healthy:
		delete(s.ill, v.ID)
		s.well[v.ID] = true
		if ill {
			kind, text = event.VolumeHealthy, fmt.Sprintf("it is healthy again after %v", t.now.Sub(since).Round(time.Millisecond))
		}
	case s.well[v.ID]:
		delete(s.well, v.ID)
		s.ill[v.ID] = t.now
		if health != Unavailable {
			kind, text = event.VolumeDegraded, s.degradedText(v)
		}
	case !ill:
		if since := staleSince(v); !since.IsZero() {
			s.ill[v.ID] = since
		}
	}
	if kind == "" || told {
		return
	}
	if noted[kind]++; noted[kind] <= mostNoted {
		t.volumeEvent(v, severities[kind], kind, text)
	}
}

// staleSince is when the first of a volume's stale legs became so; zero if there is none.
func staleSince(v *Volume) (first time.Time) {
	for i := range v.Legs {
		if l := &v.Legs[i]; l.member() && (l.State == LegStale || l.State == LegRebuilding) && (first.IsZero() || l.StaleSince.Before(first)) {
			first = l.StaleSince
		}
	}
	return first
}

// degradedText names the first column that lacks a copy, with the facts of its legs.
func (s *State) degradedText(v *Volume) string {
	column := max(0, slices.IndexFunc(s.conditions(v), func(c block.Condition) bool { return c != block.Whole }))
	facts, _ := s.columnFacts(v, column)
	return fmt.Sprintf("column %d: %s", column, facts)
}

// unservedText names the first column that cannot be served, with the facts of its legs.
func (s *State) unservedText(v *Volume) string {
	for c := range v.Layout.Stripes {
		if facts, served := s.columnFacts(v, c); !served {
			return fmt.Sprintf("column %d cannot be served: %s", c, facts)
		}
	}
	return "it cannot be served"
}

// woken are the nodes to wake and, for each, the volumes of which its wanted state may have
// changed; nil if anything of it may have.
type woken map[block.NodeName]map[block.VolumeID]bool

func (w woken) volume(node block.NodeName, id block.VolumeID) {
	all, there := w[node]
	if !there {
		all = map[block.VolumeID]bool{}
		w[node] = all
	}
	if all != nil {
		all[id] = true
	}
}

// head wakes a node of whose wanted state only what is about no volume may have changed.
func (w woken) head(node block.NodeName) {
	if _, there := w[node]; !there {
		w[node] = map[block.VolumeID]bool{}
	}
}

// users wakes the nodes with a leg of a volume or an attachment.
func (w woken) users(v *Volume) {
	if v == nil {
		return
	}
	for _, n := range v.nodes() {
		w.volume(n, v.ID)
	}
}

// hosts wakes the nodes that have a volume attached or heal it, or are about to.
func (w woken) hosts(v *Volume) {
	for _, a := range v.grants() {
		w.volume(a.Node, v.ID)
	}
}

// wakeFlushers wakes the hosts that are told whether a drive's legs need flushes.
func (t *tx) wakeFlushers(wake woken, old, new *Drive) {
	if old == nil || new == nil || old.VolatileCache == new.VolatileCache {
		return
	}
	for id := range t.s.onNode.Get(new.Node).Keys() {
		wake.hosts(t.s.volumes.Get(id))
	}
}

// wakePeers wakes the hosts that are told where a target listens.
func (t *tx) wakePeers(wake woken, old, new *Node) {
	if old == nil || new == nil {
		return
	}
	changed := old.TargetAuthenticates != new.TargetAuthenticates
	if changed {
		wake[new.Name] = nil // it may have to export something in another way
	}
	if !slices.Equal(old.ProcessPortals, new.ProcessPortals) {
		changed, wake[new.Name] = true, nil // so it may have to serve something in another place
	}
	if !changed && slices.Equal(old.Portals, new.Portals) {
		return
	}
	for id := range t.s.onNode.Get(new.Name).Keys() {
		v := t.s.volumes.Get(id)
		wake.hosts(v)
		if v.IsSnapshot() { // other targets may copy from there
			wake.users(v)
		}
		t.wakeDiscovery(wake, v, v)
	}
}

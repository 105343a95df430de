// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// tx is one step under way: clones of what it changes, swapped into the state
// by commit, forgotten if the input is refused. Nil in a map means deleted.
type tx struct {
	s   *State
	now time.Time
	gen uint64 // that a commit would have

	volumes map[block.VolumeID]*Volume
	nodes   map[block.NodeName]*Node
	drives  map[block.DriveID]*Drive
	pools   map[string]*Pool
	events  []Event
	unsure  map[block.VolumeID]bool // to settle before the commit
}

// view answers who asked, from the state after the step.
type view func(*State) any

func newTx(s *State, now time.Time) *tx {
	return &tx{
		s: s, now: now, gen: s.meta.Generation + 1,
		volumes: map[block.VolumeID]*Volume{},
		nodes:   map[block.NodeName]*Node{},
		drives:  map[block.DriveID]*Drive{},
		pools:   map[string]*Pool{},
		unsure:  map[block.VolumeID]bool{},
	}
}

// peek reads a volume as this step sees it; nil if there is none.
func (t *tx) peek(id block.VolumeID) *Volume {
	if v, ok := t.volumes[id]; ok {
		return v
	}
	return t.s.volumes[id]
}

// volume is peek for writing.
func (t *tx) volume(id block.VolumeID) *Volume {
	if v, ok := t.volumes[id]; ok {
		return v
	}
	v := t.s.volumes[id].clone()
	t.volumes[id] = v
	t.unsure[id] = true
	return v
}

func (t *tx) peekNode(name block.NodeName) *Node {
	if n, ok := t.nodes[name]; ok {
		return n
	}
	return t.s.nodes[name]
}

// node is peekNode for writing; a node that is not there yet is made.
func (t *tx) node(name block.NodeName) *Node {
	if n := t.nodes[name]; n != nil {
		return n
	}
	n := &Node{Name: name}
	if old := t.s.nodes[name]; old != nil {
		*n = *old
	}
	t.nodes[name] = n
	return n
}

func (t *tx) peekDrive(id block.DriveID) *Drive {
	if d, ok := t.drives[id]; ok {
		return d
	}
	return t.s.drives[id]
}

func (t *tx) drive(id block.DriveID) *Drive {
	if d, ok := t.drives[id]; ok {
		return d
	}
	d := *t.s.drives[id]
	t.drives[id] = &d
	return &d
}

// settle moves on every volume that this step touched.
func (t *tx) settle() {
	for _, id := range sorted(t.unsure) {
		if t.peek(id) != nil {
			t.settleVolume(id)
		}
	}
}

// settleNode marks the unsettled volumes that have to do with a node.
func (t *tx) settleNode(name block.NodeName) {
	on := t.s.onNode[name]
	if len(on) < len(t.s.unsettled) {
		for id := range on {
			if t.s.unsettled[id] {
				t.unsure[id] = true
			}
		}
		return
	}
	for id := range t.s.unsettled {
		if on[id] {
			t.unsure[id] = true
		}
	}
}

// settleVolume makes every transition of one volume that its records and the
// agents' newest reports allow. Doing it again changes nothing.
func (t *tx) settleVolume(id block.VolumeID) {
	t.settleRestored(id)
	if t.peek(id).Restored {
		return
	}
	t.settleCreating(id)
	t.settleDeleting(id)
	if t.peek(id) == nil {
		return
	}
	t.settleSuspects(id)
	t.settleGrant(id)
	t.settleAttached(id)
	t.settleDetaching(id)
	t.settleRebuilds(id)
}

// commit swaps the clones in and says what changed.
func (t *tx) commit() Outcome {
	s, wake := t.s, map[block.NodeName]bool{}
	var records []Record
	for _, id := range sorted(t.volumes) {
		old, v := s.volumes[id], t.volumes[id]
		s.index(old, v)
		wakeVolume(wake, old)
		wakeVolume(wake, v)
		records = append(records, change(s.volumes, id, v, volumeKey(id)))
		if v == nil {
			delete(s.fences, id)
		}
	}
	for _, id := range sorted(t.drives) {
		d, old := t.drives[id], s.drives[id]
		s.indexDrive(old, d)
		for _, x := range []*Drive{d, old} {
			if x != nil {
				wake[x.Node] = true
			}
		}
		records = append(records, change(s.drives, id, d, driveKey(id)))
	}
	for _, name := range slices.Sorted(maps.Keys(t.nodes)) {
		n := t.nodes[name]
		t.wakePeers(wake, s.nodes[name], n)
		records = append(records, change(s.nodes, name, n, nodeKey(name)))
	}
	for _, name := range slices.Sorted(maps.Keys(t.pools)) {
		records = append(records, change(s.pools, name, t.pools[name], poolKey(name)))
	}
	records = append(records, t.commitEvents()...)
	if len(records) > 0 {
		s.meta.Generation = t.gen
		records = append(records, encode(metaKey, s.meta))
	}
	return Outcome{Records: records, Wake: slices.Sorted(maps.Keys(wake)), Events: t.events}
}

func change[K comparable, V any](m map[K]*V, key K, value *V, record string) Record {
	if value == nil {
		delete(m, key)
		return Record{Key: record}
	}
	m[key] = value
	return encode(record, value)
}

func wakeVolume(wake map[block.NodeName]bool, v *Volume) {
	if v == nil {
		return
	}
	for _, n := range v.nodes() {
		wake[n] = true
	}
}

// wakePeers wakes the hosts that are told where a target listens.
func (t *tx) wakePeers(wake map[block.NodeName]bool, old, new *Node) {
	if old == nil || new == nil || slices.Equal(old.Portals, new.Portals) {
		return
	}
	for id := range t.s.onNode[new.Name] {
		if a := t.s.volumes[id].Attachment; a != nil {
			wake[a.Node] = true
		}
	}
}

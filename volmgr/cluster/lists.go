// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cow"
	"weft.dev/weft/volmgr/event"
)

// The lists of a cluster. Each is sorted by a key that does not change, so that a reader can
// continue after any key. Entries are made on demand.

// keySeparator occurs in no name and sorts before every character that does.
const keySeparator = "\x00"

// NodesAfter lists nodes by name, including nodes that are known only by a refused agent.
func (s *State) NodesAfter(after string) iter.Seq2[string, Node] {
	nodes := s.nodes
	if len(s.foreignAgents) > 0 {
		nodes = maps.Clone(nodes)
	}
	for key := range s.foreignAgents {
		if nodes[key.node] == nil {
			nodes[key.node] = &Node{Name: key.node}
		}
	}
	return inOrder(nodes, after, func(n *Node) string { return string(n.Name) }, s.nodeView)
}

// PoolsAfter lists pools by name.
func (s *State) PoolsAfter(after string) iter.Seq2[string, Pool] {
	return inOrder(s.pools, after, func(p *Pool) string { return p.Name }, s.poolView)
}

// VolumesAfter lists volumes by name.
func (s *State) VolumesAfter(after string) iter.Seq2[string, Volume] {
	return func(yield func(string, Volume) bool) {
		for name, id := range s.byName.After(after) {
			if !yield(name, s.volumeView(s.volumes.Get(id))) {
				return
			}
		}
	}
}

// DrivesAfter lists the drives of a node, or all if node is empty, by node and device.
func (s *State) DrivesAfter(node block.NodeName, after string) iter.Seq2[string, Drive] {
	drives := s.drives
	if node != "" {
		drives = map[block.DriveID]*Drive{}
		for id := range s.drivesOn[node] {
			drives[id] = s.drives[id]
		}
	}
	key := func(d *Drive) string {
		return strings.Join([]string{string(d.Node), d.Device, d.ID.String()}, keySeparator)
	}
	return inOrder(drives, after, key, s.driveView)
}

// DevicesAfter lists by path what a node's inventory found at its last report.
func (s *State) DevicesAfter(node block.NodeName, after string) (iter.Seq2[string, Device], error) {
	devices, err := s.Devices(node)
	if err != nil {
		return nil, err
	}
	byPath := map[string]*Device{}
	for i := range devices {
		byPath[devices[i].Path] = &devices[i]
	}
	return inOrder(byPath, after, func(d *Device) string { return d.Path }, func(d *Device) Device { return *d }), nil
}

// AttachmentsAfter lists the attachments of a node, or all if node is empty, by volume
// and node.
func (s *State) AttachmentsAfter(node block.NodeName, after string) iter.Seq2[string, Attachment] {
	first, _, _ := strings.Cut(after, keySeparator)
	return func(yield func(string, Attachment) bool) {
		for name, id := range s.volumesOf(node).From(first) {
			v := s.volumes.Get(id)
			all := v.attachments()
			slices.SortFunc(all, func(a, b *Attachment) int { return cmp.Compare(a.Node, b.Node) })
			for _, a := range all {
				key := name + keySeparator + string(a.Node)
				if (node == "" || a.Node == node) && key > after && !yield(key, s.attachmentView(v, a)) {
					return
				}
			}
		}
	}
}

// volumesOf is the volumes that may have an attachment to a node, or all, by name.
func (s *State) volumesOf(node block.NodeName) cow.Sorted[block.VolumeID] {
	if node == "" {
		return s.byName
	}
	var on cow.Sorted[block.VolumeID]
	for id := range s.onNode.Get(node).Keys() {
		on = on.Set(string(s.volumes.Get(id).Name), id)
	}
	return on
}

// Events lists the newest limit events (0 means 1000) after a sequence number, oldest
// first. If object is not empty, only events about it count.
func (s *State) Events(object string, after uint64, limit int) []event.Event {
	if limit <= 0 {
		limit = 1000
	}
	return s.events.Newest(object, after, limit)
}

// EventsFrom continues the history after a sequence number: at most limit events, oldest
// first, of object or, if that is empty, of all. seen is the number up to which events
// were examined, last that of the newest event. After 0 the history begins with the oldest
// event that is kept; after another number it is refused if events in between are gone.
func (s *State) EventsFrom(object string, after uint64, limit int) (found []event.Event, seen, last uint64, err error) {
	found, seen, ok := s.events.From(object, after, limit)
	if !ok {
		err = eventsGone(after+1, s.events.First())
	}
	return found, seen, s.events.Next() - 1, err
}

// eventsGone is the error for events that are not kept any more.
func eventsGone(from, first uint64) error {
	e := &Error{
		Kind: FailedPrecondition, Reason: ReasonEventsGone,
		Text: fmt.Sprintf("events %d to %d are gone: the newest %d are kept, from %d on", from, first-1, event.Max, first),
	}
	return e.hint("continue after %d, or list the events that are kept with `weft event list`", first-1).with("first_seq", fmt.Sprint(first))
}

// EventsAfter lists the events that Events finds, by their number. Each key also holds the
// end of the list, so that later pages leave out events that happen meanwhile.
func (s *State) EventsAfter(object string, seq uint64, limit int, after string) iter.Seq2[string, event.Event] {
	end := s.events.Next()
	found := s.Events(object, seq, limit)
	if n, _ := fmt.Sscanf(after, "%d to %d", &seq, &end); n == 2 {
		found = s.Events(object, seq, event.Max)
	}
	return func(yield func(string, event.Event) bool) {
		for _, e := range found {
			if e.Seq >= end || !yield(fmt.Sprintf("%d to %d", e.Seq, end), e) {
				return
			}
		}
	}
}

// values returns a whole list without its keys.
func values[T any](list iter.Seq2[string, T]) (all []T) {
	for _, v := range list {
		all = append(all, v)
	}
	return all
}

// inOrder lists the views of the values whose keys are after a key, sorted by key.
func inOrder[K comparable, V, T any](all map[K]*V, after string, key func(*V) string, view func(*V) T) iter.Seq2[string, T] {
	type entry struct {
		key   string
		value *V
	}
	var entries []entry
	for v := range maps.Values(all) {
		if k := key(v); k > after {
			entries = append(entries, entry{k, v})
		}
	}
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Compare(a.key, b.key) })
	return func(yield func(string, T) bool) {
		for _, e := range entries {
			if !yield(e.key, view(e.value)) {
				return
			}
		}
	}
}

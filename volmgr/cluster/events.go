// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// MaxEvents is how many events are kept; the oldest go first.
const MaxEvents = 10_000

// The kinds of events.
const (
	EventNodeJoined       = "node.joined"
	EventNodeRebooted     = "node.rebooted"
	EventNodeConfirmed    = "node.confirmed-dead"
	EventNodeRemoved      = "node.removed"
	EventTargetOnline     = "target.online"
	EventTargetOffline    = "target.offline"
	EventInitiatorOnline  = "initiator.online"
	EventInitiatorOffline = "initiator.offline"
	EventAgentRefused     = "agent.refused"    // it belongs to another cluster
	EventManagerReplaced  = "manager.replaced" // an agent follows a later one
	EventDriveAdded       = "drive.added"
	EventDriveReady       = "drive.ready"
	EventDriveMissing     = "drive.missing"
	EventDriveFailed      = "drive.failed"
	EventDriveLabeled     = "drive.labeled"
	EventDriveCache       = "drive.cache"    // it has a volatile cache now, or none any more
	EventDriveReturned    = "drive.returned" // data that only its cache held may be lost
	EventDriveRemoving    = "drive.removing"
	EventDriveRemoved     = "drive.removed"
	EventPoolCreated      = "pool.created"
	EventPoolDeleted      = "pool.deleted"
	EventVolumeCreating   = "volume.creating"
	EventVolumeReady      = "volume.ready"
	EventVolumeUpdated    = "volume.updated"
	EventVolumeFormatted  = "volume.formatted"
	EventVolumeExpanding  = "volume.expanding"
	EventVolumeExpanded   = "volume.expanded"
	EventVolumeDeleting   = "volume.deleting"
	EventVolumeDeleted    = "volume.deleted"
	EventGranting         = "volume.granting"
	EventGranted          = "volume.granted"
	EventAttached         = "volume.attached"
	EventDetaching        = "volume.detaching"
	EventVolumeUnserved   = "volume.unavailable"
	EventVolumeServed     = "volume.available"
	EventDetachCancelled  = "volume.detach-cancelled"
	EventDetached         = "volume.detached"
	EventLeft             = "volume.left"
	EventWritesLost       = "volume.writes-lost" // certainly or possibly: acknowledged but not flushed
	EventGaveUp           = "volume.gave-up"     // its host gave up the grant, and nothing is lost
	EventLegStale         = "leg.stale"
	EventLegEvicted       = "leg.evicted" // made stale by volmgr itself
	EventLegSuspect       = "leg.suspect" // in sync, but not served until a peer has reported
	EventLegBelieved      = "leg.believed"
	EventLegReborn        = "leg.reborn" // kept in sync though it may have lost cached writes; its host is told
	EventLegRebuilding    = "leg.rebuilding"
	EventLegInSync        = "leg.in-sync"
	EventLegPromoted      = "leg.promoted"
	EventStoreRebuilt     = "store.rebuilt"
	EventStoreRestored    = "store.restored"
	EventVolumeChecked    = "volume.checked" // restored from a backup, and now compared with the labels
)

// event adds an event to the step. attributes alternate keys and values; empty values are
// left out.
func (t *tx) event(severity Severity, kind, object, text string, attributes ...string) uint64 {
	e := Event{
		Seq: t.s.meta.NextEvent + uint64(len(t.events)), Time: t.now.UTC(),
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

func (t *tx) volumeEvent(v *Volume, severity Severity, kind, text string, attributes ...string) uint64 {
	attributes = append([]string{"volume", string(v.Name), "volume_id", v.ID.String()}, attributes...)
	return t.event(severity, kind, v.object(), text, attributes...)
}

// commitEvents adds the step's events and drops the oldest beyond MaxEvents.
func (t *tx) commitEvents() []Record {
	var records []Record
	m := &t.s.meta
	for _, e := range t.events {
		records = append(records, encode(eventKey(e.Seq), e))
	}
	t.s.events = append(t.s.events, t.events...)
	m.NextEvent += uint64(len(t.events))
	for m.NextEvent-m.FirstEvent > MaxEvents {
		records = append(records, Record{Key: eventKey(m.FirstEvent)})
		m.FirstEvent++
	}
	if extra := len(t.s.events) - MaxEvents; extra > 0 {
		t.s.events = t.s.events[extra:]
	}
	return records
}

// Events lists the newest limit events (0 means 1000) after a sequence number, oldest
// first. If object is not empty, only events about it count.
func (s *State) Events(object string, after uint64, limit int) []Event {
	if limit <= 0 {
		limit = 1000
	}
	var found []Event
	for _, e := range slices.Backward(s.events) {
		if e.Seq <= after || len(found) == limit {
			break
		}
		if object == "" || e.Object == object {
			found = append(found, e)
		}
	}
	slices.Reverse(found)
	return found
}

func nodeObject(name block.NodeName) string { return "node " + string(name) }

// EventsFrom continues the history after a sequence number: at most limit events, oldest
// first, of object or, if that is empty, of all. seen is the number up to which events
// were examined, last that of the newest event. After 0 the history begins with the oldest
// event that is kept; after another number it is refused if events in between are gone.
func (s *State) EventsFrom(object string, after uint64, limit int) (found []Event, seen, last uint64, err error) {
	last = s.meta.NextEvent - 1
	if after != 0 && after+1 < s.meta.FirstEvent {
		return nil, after, last, eventsGone(after+1, s.meta.FirstEvent)
	}
	seen = min(after, last)
	from, _ := slices.BinarySearchFunc(s.events, after+1, func(e Event, seq uint64) int { return cmp.Compare(e.Seq, seq) })
	for _, e := range s.events[from:] {
		if len(found) == limit {
			break
		}
		if seen = e.Seq; object == "" || e.Object == object {
			found = append(found, e)
		}
	}
	return found, seen, last, nil
}

// eventsGone is the error for events that are not kept any more.
func eventsGone(from, first uint64) error {
	e := &Error{
		Kind: FailedPrecondition, Reason: ReasonEventsGone,
		Text: fmt.Sprintf("events %d to %d are gone: the newest %d are kept, from %d on", from, first-1, MaxEvents, first),
	}
	return e.hint("go on after %d, or list what is there with `weft event list`", first-1).with("first_seq", fmt.Sprint(first))
}

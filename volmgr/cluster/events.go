// SPDX-License-Identifier: Apache-2.0

package cluster

import (
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
	EventDriveAdded       = "drive.added"
	EventDriveReady       = "drive.ready"
	EventDriveMissing     = "drive.missing"
	EventDriveFailed      = "drive.failed"
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
	EventDetached         = "volume.detached"
	EventLeft             = "volume.left"
	EventLegStale         = "leg.stale"
	EventLegEvicted       = "leg.evicted" // made stale by volmgr itself
	EventLegSuspect       = "leg.suspect" // in sync, but not served until a twin has reported
	EventLegBelieved      = "leg.believed"
	EventLegRebuilding    = "leg.rebuilding"
	EventLegInSync        = "leg.in-sync"
	EventLegPromoted      = "leg.promoted"
	EventStoreRebuilt     = "store.rebuilt"
	EventStoreRestored    = "store.restored"
	EventVolumeChecked    = "volume.checked" // restored, and compared with the labels
)

// event notes a fact. attributes are key, value, key, value; empty values are left out.
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

// commitEvents keeps the newest MaxEvents.
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

// Events lists events after a sequence number, oldest first: the newest limit of
// them (0 means 1000), and if object is not empty only those about it.
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

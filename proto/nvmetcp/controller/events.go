// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"

	"weft.dev/weft/proto/nvmetcp"
)

// event is something that Asynchronous Event Requests report to hosts. A process passes the values on to
// the next one (Passed): they stay.
type event uint8

const (
	eventNamespaces event = iota
	eventANA
	eventDiscovery
	eventReservation
	eventKinds
)

// wire is the event as the host reads it, and the feature bit that enables it.
var wire = [eventKinds]struct {
	nvmetcp.Event
	bit uint32 // of FeatureAsyncEvents; 0: always on
}{
	eventNamespaces:  {nvmetcp.Event{Type: nvmetcp.EventTypeNotice, Info: nvmetcp.NoticeNamespaces, Log: nvmetcp.LogChangedNamespaces}, nvmetcp.EventNamespaces},
	eventANA:         {nvmetcp.Event{Type: nvmetcp.EventTypeNotice, Info: nvmetcp.NoticeANA, Log: nvmetcp.LogANA}, nvmetcp.EventANA},
	eventDiscovery:   {nvmetcp.Event{Type: nvmetcp.EventTypeNotice, Info: nvmetcp.NoticeDiscovery, Log: nvmetcp.LogDiscovery}, nvmetcp.EventDiscovery},
	eventReservation: {nvmetcp.Event{Type: nvmetcp.EventTypeIO, Info: nvmetcp.IOReservationLog, Log: nvmetcp.LogReservations}, 0},
}

// maxEventRequests is AERL plus one.
const maxEventRequests = 4

// events is what a controller has to report. After the host has been told of an event, that
// kind is masked until the host reads the event's log page.
type events struct {
	requests []*request
	masked   [eventKinds]bool
	queued   []event

	changed []uint32 // NSIDs for LogChangedNamespaces
	tooMany bool
	notices []nvmetcp.ReservationNotice
	noticed uint64
}

// notify tells the host that e has happened.
func (a *association) notify(e event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.notifyLocked(e)
}

func (a *association) notifyLocked(e event) {
	if bit := wire[e].bit; bit != 0 && a.features.events&bit == 0 || a.events.masked[e] {
		return
	}
	a.events.masked[e] = true
	a.events.queued = append(a.events.queued, e)
	a.tellLocked()
}

// tellLocked answers event requests while there are both events and requests.
func (a *association) tellLocked() {
	ev := &a.events
	for len(ev.requests) > 0 && len(ev.queued) > 0 && !a.passing {
		r, e := ev.requests[0], ev.queued[0]
		ev.requests, ev.queued = ev.requests[1:], ev.queued[1:]
		r.result = uint64(wire[e].Encode())
		r.finish(nvmetcp.Success)
	}
}

// takeEventRequest keeps an Asynchronous Event Request until there is an event.
func (a *association) takeEventRequest(r *request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.events.requests) >= maxEventRequests {
		r.finish(nvmetcp.AsyncEventLimitExceeded | dnr)
		return
	}
	a.events.requests = append(a.events.requests, r)
	a.tellLocked()
}

func (a *association) abortEvent(cid uint16) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	i := slices.IndexFunc(a.events.requests, func(r *request) bool { return r.cmd.CID() == cid })
	if i < 0 {
		return false
	}
	r := a.events.requests[i]
	a.events.requests = slices.Delete(a.events.requests, i, i+1)
	r.finish(nvmetcp.AbortRequested)
	return true
}

// unmaskLocked allows e to be reported again, since its log is being read.
func (a *association) unmaskLocked(e event, retain bool) {
	if retain {
		return
	}
	a.events.masked[e] = false
	a.events.queued = slices.DeleteFunc(a.events.queued, func(q event) bool { return q == e })
}

// namespaceChanged records that a namespace was added, removed or changed.
func (a *association) namespaceChanged(nsid uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ev := &a.events
	if i, found := slices.BinarySearch(ev.changed, nsid); !found {
		if len(ev.changed) == 1024 {
			ev.tooMany = true
		} else {
			ev.changed = slices.Insert(ev.changed, i, nsid)
		}
	}
	a.notifyLocked(eventNamespaces)
}

// maxNotices limits the notices kept for a host that does not read its log.
const maxNotices = 64

// reservationChanged records an event of a namespace's reservation.
func (a *association) reservationChanged(nsid uint32, e nvmetcp.ReservationEvent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.features.reservationMask[nsid]&(1<<e) != 0 {
		return
	}
	if a.events.noticed++; a.events.noticed == 0 {
		a.events.noticed++
	}
	if len(a.events.notices) == maxNotices {
		a.events.notices = a.events.notices[1:]
	}
	a.events.notices = append(a.events.notices, nvmetcp.ReservationNotice{Count: a.events.noticed, Event: e, NSID: nsid})
	a.notifyLocked(eventReservation)
}

// resetLocked drops the state that a controller reset clears (Base, 3.7.2).
func (a *association) resetLocked() {
	for _, r := range a.events.requests {
		r.finish(nvmetcp.AbortRequested | dnr)
	}
	a.events = events{}
	a.features = newFeatures()
	a.writeThrough.Store(false)
}

// discoveryChangedLocked notifies the hosts that are connected to discovery.
func (t *Target) discoveryChangedLocked() {
	t.generation++
	for _, a := range t.discovery.associations {
		a.notify(eventDiscovery)
	}
}

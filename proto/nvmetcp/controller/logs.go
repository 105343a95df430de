// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"sync/atomic"

	"weft.dev/weft/proto/nvmetcp"
)

// counters are the SMART log's counters, for the whole subsystem.
type counters struct {
	read, written, reads, writes, mediaErrors atomic.Uint64
}

// logPage answers a Get Log Page command (Base, 5.16). It builds the whole page and sends
// the requested part.
func (c *conn) logPage(r *request) {
	g := nvmetcp.ParseGetLog(&r.cmd)
	if g.Length > uint64(c.t.cfg.MDTS) || g.IndexOffset || g.Offset%4 != 0 {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	c.answer(r, int(g.Length), func(r *request) {
		page, status := r.association().page(r, g)
		if status == nvmetcp.Success && g.Offset > uint64(len(page)) {
			status = nvmetcp.InvalidField | dnr
		}
		if status != nvmetcp.Success {
			r.finish(status)
			return
		}
		r.respond(page[g.Offset:])
	})
}

func (a *association) page(r *request, g nvmetcp.GetLog) ([]byte, nvmetcp.Status) {
	if a.sub.discovery != (g.ID == nvmetcp.LogDiscovery) && g.ID != nvmetcp.LogSupported {
		return nil, nvmetcp.InvalidLogPage | dnr
	}
	switch g.ID {
	case nvmetcp.LogSupported:
		return a.supportedLogs(), nvmetcp.Success
	case nvmetcp.LogErrors:
		return make([]byte, nvmetcp.ErrorEntrySize), nvmetcp.Success // one entry, empty
	case nvmetcp.LogSmart:
		return a.smart(g)
	case nvmetcp.LogFirmware:
		return nvmetcp.Firmware{Active: 1, Slots: [7]string{a.sub.cfg.Firmware}}.Append(nil), nvmetcp.Success
	case nvmetcp.LogChangedNamespaces:
		return a.changedNamespaces(g.RetainEvent), nvmetcp.Success
	case nvmetcp.LogEffects:
		return a.sub.effects(), nvmetcp.Success
	case nvmetcp.LogANA:
		return a.anaLog(g), nvmetcp.Success
	case nvmetcp.LogDiscovery:
		return a.discoveryLog(r.c, g.RetainEvent), nvmetcp.Success
	case nvmetcp.LogReservations:
		return a.reservationNotice(), nvmetcp.Success
	case nvmetcp.LogWritten:
		return a.writtenLog(g.NSID)
	}
	return nil, nvmetcp.InvalidLogPage | dnr
}

func (a *association) supportedLogs() []byte {
	var s nvmetcp.SupportedLogs
	s[nvmetcp.LogSupported] = 1
	if a.sub.discovery {
		s[nvmetcp.LogDiscovery] = 1
		return s.Append(nil)
	}
	for _, id := range []nvmetcp.LogID{nvmetcp.LogErrors, nvmetcp.LogSmart, nvmetcp.LogFirmware, nvmetcp.LogChangedNamespaces,
		nvmetcp.LogEffects, nvmetcp.LogANA, nvmetcp.LogReservations, nvmetcp.LogWritten} {
		s[id] = 1
	}
	return s.Append(nil)
}

// smart reports what a target knows: how much was read and written. Wear and temperature
// belong to the drives, which many subsystems may share; it reports 0 for them, and full
// spare.
func (a *association) smart(g nvmetcp.GetLog) ([]byte, nvmetcp.Status) {
	if g.NSID != nvmetcp.AllNamespaces && g.NSID != 0 {
		return nil, nvmetcp.InvalidField | dnr // LPA bit 0 is not set: no page per namespace
	}
	n := &a.sub.counters
	units := func(bytes uint64) uint64 { return (bytes/512 + 999) / 1000 }
	return nvmetcp.Smart{
		Spare: 100, SpareMinimum: 0, Temperature: 273 + 25,
		UnitsRead: units(n.read.Load()), UnitsWritten: units(n.written.Load()), Reads: n.reads.Load(), Writes: n.writes.Load(),
		MediaErrors: n.mediaErrors.Load(),
	}.Append(nil), nvmetcp.Success
}

func (a *association) changedNamespaces(retain bool) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	log := nvmetcp.ChangedNamespaces{IDs: a.events.changed, TooMany: a.events.tooMany}.Append(nil)
	if !retain {
		a.events.changed, a.events.tooMany = nil, false
	}
	a.unmaskLocked(eventNamespaces, retain)
	return log
}

// effects says that no command must run alone.
func (s *Subsystem) effects() []byte {
	var e nvmetcp.Effects
	for _, op := range []nvmetcp.Opcode{nvmetcp.AdminGetLogPage, nvmetcp.AdminIdentify, nvmetcp.AdminAbort, nvmetcp.AdminSetFeatures,
		nvmetcp.AdminGetFeatures, nvmetcp.AdminAsyncEvent, nvmetcp.AdminKeepAlive, nvmetcp.AdminCheckpoint, nvmetcp.AdminBehind,
		nvmetcp.AdminGetLBAStatus, nvmetcp.AdminGetDifferences} {
		e.Admin[op] = nvmetcp.EffectSupported
	}
	if s.cfg.Replace != nil {
		e.Admin[nvmetcp.AdminReplace] = nvmetcp.EffectSupported
	}
	for _, op := range []nvmetcp.Opcode{nvmetcp.IOFlush, nvmetcp.IORead, nvmetcp.IOCompare, nvmetcp.IOReservationRegister,
		nvmetcp.IOReservationAcquire, nvmetcp.IOReservationRelease, nvmetcp.IOReservationReport} {
		e.IO[op] = nvmetcp.EffectSupported
	}
	for _, op := range []nvmetcp.Opcode{nvmetcp.IOWrite, nvmetcp.IOWriteZeroes, nvmetcp.IODatasetManagement} {
		e.IO[op] = nvmetcp.EffectSupported | nvmetcp.EffectContent
	}
	return e.Append(nil)
}

// anaLogSize is the largest log that Identify lets a host expect: MNAN namespaces in
// ANAGRPMAX groups. Hosts that read in pieces, such as libnvme, read this far, and reading
// beyond a log's end is an error. The log is therefore padded to this size.
const anaLogSize = 16 + 32*maxANAGroups + 4*maxNamespaces

// anaLog unmasks the event first, so that a later change causes a new event.
func (a *association) anaLog(g nvmetcp.GetLog) []byte {
	a.mu.Lock()
	a.unmaskLocked(eventANA, g.RetainEvent)
	a.mu.Unlock()
	changes := a.sub.t.anaChanges.Load()
	log := nvmetcp.ANALog{Changes: changes}
	ids, members := a.sub.groups()
	for _, id := range ids {
		group := nvmetcp.ANAGroup{ID: id, Changes: changes, State: a.port.state(id)}
		if g.Specific&nvmetcp.ANAGroupsOnly == 0 {
			group.Namespaces = members[id]
		}
		log.Groups = append(log.Groups, group)
	}
	page := make([]byte, 0, anaLogSize)
	page = log.Append(page)
	return page[:max(len(page), anaLogSize)]
}

func (a *association) reservationNotice() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	var n nvmetcp.ReservationNotice
	if len(a.events.notices) > 0 {
		n = a.events.notices[0]
		a.events.notices = a.events.notices[1:]
		n.More = uint8(min(len(a.events.notices), 255))
	}
	a.unmaskLocked(eventReservation, false)
	if len(a.events.notices) > 0 {
		a.notifyLocked(eventReservation)
	}
	return n.Append(nil)
}

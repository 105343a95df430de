// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"
	"time"

	"weft.dev/weft/proto/nvmetcp"
)

// features are a controller's settings (Base, 5.27).
type features struct {
	plain           map[nvmetcp.FeatureID]uint32 // values that are stored but have no effect here
	events          uint32
	behavior        [512]byte
	reservationMask map[uint32]uint32 // by NSID
}

func newFeatures() features {
	return features{
		plain: map[nvmetcp.FeatureID]uint32{
			nvmetcp.FeatureArbitration: 0, nvmetcp.FeaturePowerManagement: 0, nvmetcp.FeatureTemperature: 0,
			nvmetcp.FeatureErrorRecovery: 0, nvmetcp.FeatureWriteAtomicity: 0,
		},
		reservationMask: map[uint32]uint32{},
	}
}

// supportedEvents is OAES: the events that a controller of s can report.
func (s *Subsystem) supportedEvents() uint32 {
	if s.discovery {
		return nvmetcp.EventDiscovery
	}
	return nvmetcp.EventNamespaces | nvmetcp.EventANA
}

// queues is the number of I/O queues that a controller may have.
func (t *Target) queues() nvmetcp.QueueCounts {
	n := uint32(t.cfg.MaxIOQueues)
	return nvmetcp.QueueCounts{Submission: n, Completion: n}
}

// The capabilities of a feature, returned by Get Features with SEL 3.
const (
	featureSaveable   = 1 << 0
	featureNamespaced = 1 << 1
	featureChangeable = 1 << 2
)

func (c *conn) getFeature(r *request, a *association) {
	f := nvmetcp.ParseFeature(&r.cmd)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sub.discovery && f.ID != nvmetcp.FeatureAsyncEvents && f.ID != nvmetcp.FeatureKeepAlive {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	value, data, capability, ok := a.featureLocked(f)
	switch {
	case !ok || f.Select > nvmetcp.SelectSupported:
		r.finish(nvmetcp.InvalidField | dnr)
		return
	case f.Select == nvmetcp.SelectSupported:
		r.result = uint64(capability)
	case f.Select == nvmetcp.SelectCurrent:
		r.result = uint64(value)
	default:
		r.result = uint64(a.defaultFeature(f.ID))
	}
	if data == nil || f.Select != nvmetcp.SelectCurrent {
		r.finish(nvmetcp.Success)
		return
	}
	if f.Length < uint32(len(data)) {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	c.answer(r, int(min(f.Length, pageSize)), func(r *request) { r.respond(data) })
}

// featureLocked returns a feature's value, its data structure if any, and its capabilities.
func (a *association) featureLocked(f nvmetcp.FeatureAccess) (value uint32, data []byte, capability uint32, ok bool) {
	if v, ok := a.features.plain[f.ID]; ok {
		return v, nil, featureChangeable, true
	}
	switch f.ID {
	case nvmetcp.FeatureVolatileWriteCache:
		return boolean(!a.writeThrough.Load()), nil, featureChangeable, true
	case nvmetcp.FeatureQueues:
		return a.sub.t.queues().Encode(), nil, featureChangeable, true
	case nvmetcp.FeatureAsyncEvents:
		return a.features.events, nil, featureChangeable, true
	case nvmetcp.FeatureKeepAlive:
		return uint32(a.kato / time.Millisecond), nil, featureChangeable, true
	case nvmetcp.FeatureHostBehavior:
		return 0, slices.Clone(a.features.behavior[:]), featureChangeable, true
	case nvmetcp.FeatureHostID:
		return 0, a.host.ID[:], 0, true
	case nvmetcp.FeatureReservationMask:
		return a.features.reservationMask[f.NSID], nil, featureChangeable | featureNamespaced, a.sub.namespace(f.NSID) != nil
	case nvmetcp.FeatureReservationPersists:
		return 0, nil, featureNamespaced, a.sub.namespace(f.NSID) != nil
	case nvmetcp.FeatureWriteProtect:
		ns := a.sub.namespace(f.NSID)
		if ns == nil {
			return 0, nil, 0, false
		}
		return boolean(ns.cfg.ReadOnly), nil, featureNamespaced, true
	}
	return 0, nil, 0, false
}

func (a *association) defaultFeature(id nvmetcp.FeatureID) uint32 {
	switch id {
	case nvmetcp.FeatureVolatileWriteCache:
		return 1
	case nvmetcp.FeatureQueues:
		return a.sub.t.queues().Encode()
	}
	return 0
}

func boolean(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

func (c *conn) setFeature(r *request, p *nvmetcp.PDU, a *association) error {
	f := nvmetcp.ParseFeature(&r.cmd)
	switch {
	case f.Save:
		r.finish(nvmetcp.FeatureNotSaveable | dnr)
		return nil
	case a.sub.discovery && f.ID != nvmetcp.FeatureAsyncEvents && f.ID != nvmetcp.FeatureKeepAlive:
		r.finish(nvmetcp.InvalidField | dnr)
		return nil
	case f.ID == nvmetcp.FeatureHostBehavior:
		return c.fetch(r, p, len(a.features.behavior), len(a.features.behavior), (*request).setBehavior)
	case f.ID == nvmetcp.FeatureKeepAlive:
		a.setKATO(time.Duration(f.Value) * time.Millisecond)
		r.finish(nvmetcp.Success)
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	r.finish(a.setFeatureLocked(r, f))
	return nil
}

func (a *association) setFeatureLocked(r *request, f nvmetcp.FeatureAccess) nvmetcp.Status {
	if _, ok := a.features.plain[f.ID]; ok {
		a.features.plain[f.ID] = f.Value
		return nvmetcp.Success
	}
	switch f.ID {
	case nvmetcp.FeatureQueues:
		want := nvmetcp.ParseQueueCounts(f.Value)
		if want.Submission == 65536 || want.Completion == 65536 || len(a.queues) > 1 {
			return nvmetcp.InvalidField | dnr
		}
		r.result = uint64(a.sub.t.queues().Encode())
	case nvmetcp.FeatureAsyncEvents:
		if f.Value&^(a.sub.supportedEvents()|0xff) != 0 {
			return nvmetcp.InvalidField | dnr
		}
		a.features.events = f.Value
	case nvmetcp.FeatureReservationMask:
		return a.maskReservationsLocked(f)
	case nvmetcp.FeatureVolatileWriteCache:
		a.writeThrough.Store(f.Value&1 == 0)
	case nvmetcp.FeatureHostID, nvmetcp.FeatureReservationPersists, nvmetcp.FeatureWriteProtect:
		return nvmetcp.FeatureNotChangeable | dnr
	default:
		return nvmetcp.InvalidField | dnr
	}
	return nvmetcp.Success
}

func (a *association) maskReservationsLocked(f nvmetcp.FeatureAccess) nvmetcp.Status {
	for _, ns := range a.sub.namespaces() {
		if f.NSID == ns.cfg.NSID || f.NSID == nvmetcp.AllNamespaces {
			a.features.reservationMask[ns.cfg.NSID] = f.Value
		}
	}
	if f.NSID != nvmetcp.AllNamespaces && a.sub.namespace(f.NSID) == nil {
		return nvmetcp.InvalidNamespace | dnr
	}
	return nvmetcp.Success
}

func (r *request) setBehavior() {
	a := r.association()
	a.mu.Lock()
	copy(a.features.behavior[:], r.data)
	a.mu.Unlock()
	r.finish(nvmetcp.Success)
}

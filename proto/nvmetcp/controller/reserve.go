// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/reservation"
)

// reservation starts a reservation command (NVM, 3.2.8 to 3.2.11).
func (c *conn) reservation(r *request, p *nvmetcp.PDU) error {
	switch r.cmd.Opcode() {
	case nvmetcp.IOReservationRegister:
		return c.fetch(r, p, nvmetcp.ReservationRegisterSize, nvmetcp.ReservationRegisterSize, (*request).register)
	case nvmetcp.IOReservationAcquire:
		return c.fetch(r, p, nvmetcp.ReservationAcquireSize, nvmetcp.ReservationAcquireSize, (*request).acquire)
	case nvmetcp.IOReservationRelease:
		return c.fetch(r, p, nvmetcp.ReservationReleaseSize, nvmetcp.ReservationReleaseSize, (*request).release)
	}
	report := nvmetcp.ParseReservationReport(&r.cmd)
	switch {
	case !report.Extended: // hosts over fabrics have 128-bit identifiers
		r.finish(nvmetcp.HostIDInconsistent | dnr)
	case report.Length > uint64(c.t.cfg.MDTS):
		r.finish(nvmetcp.InvalidField | dnr)
	default:
		c.answer(r, int(report.Length), (*request).report)
	}
	return nil
}

func (r *request) register() {
	cmd, err := nvmetcp.ParseReservationRegister(&r.cmd, r.data)
	if err != nil || cmd.Persist == nvmetcp.PersistOn {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	r.reserve(func(s *reservation.State, h reservation.Host) ([]reservation.Notice, error) {
		switch cmd.Action {
		case nvmetcp.RegisterKey:
			return nil, s.Register(h, cmd.New)
		case nvmetcp.UnregisterKey:
			return s.Unregister(h, cmd.Current, cmd.IgnoreKey)
		case nvmetcp.ReplaceKey:
			return nil, s.Replace(h, cmd.Current, cmd.New, cmd.IgnoreKey)
		}
		return nil, reservation.ErrInvalid
	})
}

func (r *request) release() {
	cmd, err := nvmetcp.ParseReservationRelease(&r.cmd, r.data)
	if err != nil || cmd.IgnoreKey {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	r.reserve(func(s *reservation.State, h reservation.Host) ([]reservation.Notice, error) {
		switch cmd.Action {
		case nvmetcp.Release:
			return s.Release(h, cmd.Current, reservation.Type(cmd.Type))
		case nvmetcp.Clear:
			return s.Clear(h, cmd.Current)
		}
		return nil, reservation.ErrInvalid
	})
}

// acquire executes Reservation Acquire. Preempt and Abort is answered only when the
// commands in the Device have left it, so that the preempted hosts' writes can no longer
// land.
func (r *request) acquire() {
	cmd, err := nvmetcp.ParseReservationAcquire(&r.cmd, r.data)
	if err != nil || cmd.IgnoreKey {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	preempt := func(s *reservation.State, h reservation.Host) ([]reservation.Notice, error) {
		_, notices, err := s.Preempt(h, cmd.Current, cmd.Preempt, reservation.Type(cmd.Type))
		return notices, err
	}
	switch cmd.Action {
	case nvmetcp.Acquire:
		r.reserve(func(s *reservation.State, h reservation.Host) ([]reservation.Notice, error) {
			return nil, s.Acquire(h, cmd.Current, reservation.Type(cmd.Type))
		})
	case nvmetcp.Preempt:
		r.reserve(preempt)
	case nvmetcp.PreemptAndAbort:
		status := r.change(preempt)
		if status != nvmetcp.Success {
			r.finish(status)
			return
		}
		go func() {
			r.ns.inflight.drain(context.Background())
			r.finish(nvmetcp.Success)
		}()
	default:
		r.finish(nvmetcp.InvalidField | dnr)
	}
}

type reservationChange func(*reservation.State, reservation.Host) ([]reservation.Notice, error)

func (r *request) reserve(change reservationChange) { r.finish(r.change(change)) }

// change applies a change to the namespace's reservations and notifies the hosts concerned.
func (r *request) change(change reservationChange) nvmetcp.Status {
	a, ns := r.association(), r.ns
	if a.dead.Load() || ns.gone.Load() {
		return nvmetcp.InvalidNamespace | dnr
	}
	ns.mu.Lock()
	notices, err := change(&ns.reserved, reservation.Host(a.host.ID))
	ns.held.Store(ns.reserved.Type() != reservation.None)
	ns.mu.Unlock()
	switch {
	case errors.Is(err, reservation.ErrConflict):
		return nvmetcp.ReservationConflict | dnr
	case err != nil:
		return nvmetcp.InvalidField | dnr
	}
	a.sub.tellReservation(ns.cfg.NSID, notices)
	return nvmetcp.Success
}

func (s *Subsystem) tellReservation(nsid uint32, notices []reservation.Notice) {
	if len(notices) == 0 {
		return
	}
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	for _, n := range notices {
		for _, a := range s.associations {
			if a.host.ID == block.UUID(n.Host) {
				a.reservationChanged(nsid, nvmetcp.ReservationEvent(n.Event))
			}
		}
	}
}

// report fills in the reservation status, with one entry per host. The controller id in it
// stands for all of a host's dynamic controllers.
func (r *request) report() {
	ns := r.ns
	ns.mu.Lock()
	status := nvmetcp.ReservationStatus{Generation: ns.reserved.Generation(), Type: nvmetcp.ReservationType(ns.reserved.Type())}
	for _, g := range ns.reserved.Registrants() {
		status.Registrants = append(status.Registrants, nvmetcp.Registrant{
			ControllerID: nvmetcp.DynamicController, Holder: ns.reserved.Holds(g.Host), HostID: block.UUID(g.Host), Key: g.Key,
		})
	}
	ns.mu.Unlock()
	r.respond(status.Append(nil, true))
}

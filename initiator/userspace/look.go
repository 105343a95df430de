// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/block"
)

// device is a leg as it was found behind a connection.
type device struct {
	block.Device
	connection connection
	nsid       uint32
	uuid       block.UUID
	durable    *atomic.Bool // its drive has no volatile cache
}

func (k *Keeper) look(w *attachment.Wanted) *seen {
	s := &seen{
		now: time.Now(), clock: k.cfg.Clock(), legs: map[block.LegID]legSeen{}, conns: map[block.NQN]connSeen{}, recordError: k.recorder.Refusal(),
		noted: k.noted, noteError: k.noteError,
	}
	for n, t := range k.tries {
		if k.conns[n] == nil && t.err != "" && time.Since(t.next) > time.Minute {
			delete(k.tries, n) // nobody tries any more
		}
	}
	for n, r := range k.conns {
		c := connSeen{made: r.connection != nil, err: k.tries[n].err}
		if c.made {
			live, err := r.connection.Live()
			if c.live = live; err != nil {
				c.err = err.Error()
			}
		}
		s.conns[n] = c
	}
	k.lookAtVolume(s)
	if w == nil && k.stack != nil {
		w = k.stack.wanted
	}
	if w == nil {
		clear(k.pulses)
		clear(k.devices)
		return s
	}
	for i := range w.Links {
		s.legs[w.Links[i].Leg] = k.lookAtLeg(s, w, &w.Links[i])
	}
	return s
}

func (k *Keeper) lookAtVolume(s *seen) {
	st := k.stack
	if st == nil {
		return
	}
	status := st.volume.Status()
	s.volume = volumeSeen{
		built: true, size: status.Size, legs: status.Legs, held: status.Held, suspended: status.Suspended,
		equal: st.equal, equalizing: st.equalizing, equalized: status.Equalized, flushed: st.flushed,
	}
	if st.device != nil {
		s.device = deviceSeen{exists: true, size: st.size, refusal: st.refusal, open: st.open}
		select {
		case <-st.device.Done():
			s.device.ended = true
		default:
		}
	}
}

func (k *Keeper) lookAtLeg(s *seen, w *attachment.Wanted, l *attachment.Link) legSeen {
	var seen legSeen
	d, err := k.find(l)
	switch {
	case err != nil:
		seen.err = err.Error()
	case d.Device == nil: // there is no connection
		seen.err = k.tries[l.NQN].err
	default:
		// What the volume needs that there is: one that is wanted larger serves on.
		size := w.Size
		if s.volume.built {
			size = min(size, s.volume.size)
		}
		seen.size = d.Geometry().Size
		if need := w.Layout.LegSize(size); seen.size < need {
			seen.err = attachment.TooSmall(seen.size, need)
		}
	}
	there := d.Device != nil && s.conns[l.NQN].live
	fit := there && seen.err == ""
	if !there && seen.err == "" {
		seen.err = s.conns[l.NQN].err
	}
	p := k.pulses[l.Leg].Of(l.UUID.String())
	k.pulses[l.Leg] = p
	seen.silent = p.Look(s.now, there, k.cfg.Probe)
	seen.live = fit && p.Met
	seen.looks, seen.answers, seen.heard = p.Looks, p.Answers, p.Heard
	if there && p.Due(s.now, k.cfg.Probe) {
		p.Probe(s.now, s.clock)
		k.probe(p, d)
	}
	return seen
}

// find finds the device of a leg; it has none if there is no connection.
func (k *Keeper) find(l *attachment.Link) (device, error) {
	r := k.conns[l.NQN]
	if r == nil || r.connection == nil {
		delete(k.devices, l.Leg)
		return device{}, nil
	}
	if d := k.devices[l.Leg]; d.connection == r.connection && d.nsid == l.NSID && d.uuid == l.UUID {
		d.durable.Store(l.WriteThrough)
		return d, nil
	}
	delete(k.devices, l.Leg)
	dev, err := r.connection.Namespace(l.NSID, l.UUID)
	if err != nil {
		return device{}, err
	}
	d := device{connection: r.connection, nsid: l.NSID, uuid: l.UUID, durable: new(atomic.Bool)}
	d.durable.Store(l.WriteThrough)
	d.Device = legDevice{dev, d.durable}
	k.devices[l.Leg] = d
	return d, nil
}

// probe reads from a leg, through all that its data goes through. A medium that
// cannot be read there is an answer: nobody else has been given the leg, and what
// its other blocks are worth the volume's own I/O will tell.
func (k *Keeper) probe(p *attachment.Pulse, d device) {
	go func() {
		err := block.ReadAt(d.Device, make([]byte, d.Geometry().BlockSize), 0)
		if errors.Is(err, block.ErrMedium) {
			err = nil
		}
		k.Tell(func() { p.Answered(err) })
	}()
}

// legDevice is a leg that may be on a drive that loses nothing with its power, though
// its target says that it may: what it has acknowledged needs no flush then.
type legDevice struct {
	block.Device
	durable *atomic.Bool // as the manager last said
}

func (d legDevice) Geometry() block.Geometry {
	g := d.Device.Geometry()
	g.VolatileCache = g.VolatileCache && !d.durable.Load()
	return g
}

func (d legDevice) Submit(io *block.IO) {
	if io.Op == block.OpFlush && d.durable.Load() {
		io.Complete(nil)
		return
	}
	d.Device.Submit(io)
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/engine"
)

// device is a leg as it was found behind a connection.
type device struct {
	block.Device
	connection connection
	nsid       uint32
	uuid       block.UUID
	trust      *trust
}

// trust says in which session of a connection the manager's word holds that a leg's drive has no
// volatile cache. The drive of a target that lost its power may have got one, and a host that is cut
// off from the manager does not hear of that: in each later session, the manager has to say it anew.
type trust struct {
	session atomic.Uint64 // 0: in none

	seen uint64         // the last session
	word *volume.Wanted // the manager's last word before that session
}

// look takes the manager's word.
func (t *trust) look(session uint64, w *volume.Wanted, durable bool) {
	if session != t.seen && session != 0 {
		if t.seen != 0 {
			t.word = w
		}
		t.seen = session
	}
	if durable && w != t.word {
		t.session.Store(t.seen)
	} else {
		t.session.Store(0)
	}
}

func (k *Keeper) observe(w *volume.Wanted) *volume.Seen {
	s := &volume.Seen{
		Now: time.Now(), Clock: k.cfg.Clock(), Legs: map[block.LegID]volume.LegSeen{},
	}
	k.observePaths(s)
	if w == nil && k.stack != nil {
		w = k.stack.wanted
	}
	k.observeVolume(s, w)
	if w == nil {
		clear(k.pulses)
		clear(k.devices)
		return s
	}
	for i := range w.Links {
		s.Legs[w.Links[i].Leg] = k.observeLeg(s, w, &w.Links[i])
	}
	return s
}

// observePaths finds the connections and the attempts to make some.
func (k *Keeper) observePaths(s *volume.Seen) {
	for path, t := range k.tries {
		switch {
		case k.conns[path] != nil:
		case t.Error != "" && time.Since(t.Next) > time.Minute:
			delete(k.tries, path) // there are no more attempts
		default:
			s.Paths = append(s.Paths, volume.PathSeen{Path: path, State: volume.PathRefused, Turns: t.Turns, Error: t.Error})
		}
	}
	for path, r := range k.conns {
		seen := volume.PathSeen{Path: path, State: volume.PathConnecting, Turns: k.tries[path].Turns, Error: k.tries[path].Error}
		if r.connection != nil {
			live, err := r.connection.Live()
			was := r.silence
			r.look(s.Now, live)
			if r.silence < was {
				k.log.Debug("path was silent", "path", path.String(), "silent", was)
			}
			k.watch(r)
			switch at := r.connection.Refused(); {
			case live:
				k.portals.Accepted(path.Subsystem)
			case at.After(k.portals.Tried(path)):
				k.portals.Refused(path, at)
			}
			seen.Silent, seen.Looks, seen.Answered, seen.Greeted = r.silent, r.looks, r.answered, r.greeted
			own, beside := r.connection.Replaces()
			seen.Replaces, seen.Stays, seen.Changes = own || beside, beside, r.isChanging(s.Now)
			seen.Moving = seen.Changes
			seen.State = volume.PathSilent
			if live {
				seen.State = volume.PathLive
			}
			if err != nil {
				seen.Error = err.Error()
			}
		}
		s.Paths = append(s.Paths, seen)
	}
	k.portals.See(s)
	slices.SortFunc(s.Paths, func(a, b volume.PathSeen) int { return a.Path.Compare(b.Path) })
}

func (k *Keeper) observeVolume(s *volume.Seen, w *volume.Wanted) {
	st := k.stack
	if st == nil {
		for range layoutOf(w).Stripes {
			s.Columns = append(s.Columns, volume.ColumnSeen{Copies: make([]volume.CopySeen, w.Layout.Slots())})
		}
		return
	}
	status := st.volume.Status()
	s.ReadOnly, s.Size, s.Flushed, s.Copying = st.wanted.ReadOnly, status.Size, st.flushed, st.equalizing
	s.Holdable, s.Held, s.Quiet, s.Waits = true, status.Suspended, atRest(status), status.Held > 0
	st.scrub = st.scrub.Wanted(w)
	s.Scrub, s.Heals, s.RebuildRate = st.scrub.Seen(), st.heals.seen(), st.rebuildRate
	if st.equalizing {
		s.Done, s.Total, s.Whole = status.Equalized.Done, status.Equalized.Total, st.whole
	}
	for column, legs := range status.Legs {
		c := volume.ColumnSeen{Exists: true, Built: true, Size: st.wanted.Layout.LegSize(status.Size), Equalizing: !st.equal}
		for copy, leg := range legs {
			seen := k.observeCopy(w, volume.Place{Column: column, Copy: copy}, leg)
			switch seen.State {
			case volume.InSync:
				c.Sources++
			case volume.Rebuilding:
				s.Done, s.Total = s.Done+leg.Resync.Done, s.Total+leg.Resync.Total
			}
			c.Copies = append(c.Copies, seen)
		}
		s.Columns = append(s.Columns, c)
	}
	if st.device != nil {
		s.Device = volume.DeviceSeen{Exists: true, Named: true, Size: st.size, Refusal: st.refusal, Open: st.open}
		select {
		case <-st.device.Done():
			s.Device.Ended = true
		default:
		}
	}
}

func layoutOf(w *volume.Wanted) block.Layout {
	if w == nil {
		return block.Layout{}
	}
	return w.Layout
}

var states = map[engine.State]volume.CopyState{
	engine.InSync: volume.InSync, engine.CaughtUp: volume.CaughtUp, engine.Rebuilding: volume.Rebuilding, engine.Dropped: volume.Failed,
}

// observeCopy describes the leg that the engine has, or last had, in a place.
func (k *Keeper) observeCopy(w *volume.Wanted, at volume.Place, status engine.LegStatus) volume.CopySeen {
	slot, known := k.memory.slots[at]
	if !known {
		return volume.CopySeen{}
	}
	seen := volume.CopySeen{
		State: states[status.State], Leg: slot.leg, Node: slot.node, Subsystem: slot.nqn, Tracked: slot.tracked, Dirty: slot.dirty, Whole: slot.whole, What: slot.what,
		Done: status.Resync.Done, Total: status.Resync.Total, Speed: status.Speed,
		LossCovered: slot.tracked && status.LossCovered,
		Busy:        status.Outstanding > 0, Oldest: status.Oldest, Unflushed: status.Unflushed, Withheld: status.Withheld, Full: status.Full > 0, Short: status.Short,
	}
	if status.State == engine.CaughtUp {
		seen.Dirty -= min(seen.Dirty, status.Skipped)
	}
	if l := w.At(at.Column, at.Copy); l != nil && l.Leg == slot.leg {
		seen.Superseded, seen.Reborn = l.Revision != slot.revision, l.Reborn > slot.revision
	}
	if status.Err != nil && status.State != engine.Rebuilding {
		seen.Error = status.Err.Error()
	}
	return seen
}

func (k *Keeper) observeLeg(s *volume.Seen, w *volume.Wanted, l *volume.Link) volume.LegSeen {
	var seen volume.LegSeen
	path, r := k.connectionTo(l.NQN)
	seen.Found = r != nil
	d, err := k.find(w, l)
	switch {
	case err != nil:
		seen.Error = err.Error()
	case d.Device != nil:
		// The leg must fit the volume as it is: a volume that is wanted larger keeps serving.
		size := w.Size
		if s.Built() {
			size = min(size, s.Size)
		}
		seen.Size = d.Geometry().Size
		if need := w.Layout.LegSize(size); seen.Size < need {
			seen.Error = volume.TooSmall(seen.Size, need)
		}
	}
	there := false
	if d.Device != nil {
		there, _ = r.connection.Live()
	}
	fit := there && seen.Error == ""
	if !there && seen.Error == "" {
		seen.Error = s.Refusal(l.NQN)
	}
	p := k.pulses[l.Leg].Of(l.UUID.String())
	k.pulses[l.Leg] = p
	way := volume.WaySeen{Path: path, Silent: p.Look(s.Now, there, k.cfg.Probe)}
	way.Looks, way.Answers, way.Heard = p.Looks, p.Answers, p.Heard
	k.listen(&way, r)
	seen.Live, seen.Ways = fit && p.Met, []volume.WaySeen{way}
	if there && p.Due(s.Now, k.cfg.Probe) {
		p.Probe(s.Now, s.Clock)
		k.probe(p, d)
	}
	return seen
}

// listen adds to a way whether its whole target is silent. Before half of a probe's interval has
// passed, that says nothing of the leg.
func (k *Keeper) listen(way *volume.WaySeen, r *reach) {
	if r == nil || r.asked < 3 || r.greeted {
		return
	}
	if way.Mute = r.mute; r.silence > k.cfg.Probe/2 {
		way.Silent, way.Looks = keeper.Earlier(way.Silent, r.mute), r.asked
	}
}

// connectionTo returns the connection to a subsystem, nil if there is none.
func (k *Keeper) connectionTo(n block.NQN) (volume.Path, *reach) {
	for path, r := range k.conns {
		if path.Subsystem == n && r.connection != nil {
			return path, r
		}
	}
	return volume.Path{Subsystem: n}, nil
}

// find returns the device of a leg, which is empty if there is no connection.
func (k *Keeper) find(w *volume.Wanted, l *volume.Link) (device, error) {
	_, r := k.connectionTo(l.NQN)
	if r == nil {
		delete(k.devices, l.Leg)
		return device{}, nil
	}
	if d := k.devices[l.Leg]; d.connection == r.connection && d.nsid == l.NSID && d.uuid == l.UUID {
		d.trust.look(r.connection.Session(), w, l.WriteThrough)
		return d, nil
	}
	delete(k.devices, l.Leg)
	dev, err := r.connection.Namespace(l.NSID, l.UUID)
	if err != nil {
		return device{}, err
	}
	d := device{connection: r.connection, nsid: l.NSID, uuid: l.UUID, trust: new(trust)}
	d.trust.look(r.connection.Session(), w, l.WriteThrough)
	d.Device = legDevice{dev, r.connection, d.trust, k.listsOfLeg(dev, l)}
	k.devices[l.Leg] = d
	return d, nil
}

// listsOfLeg is where to ask for the list of writes to a leg: its target, or what answers beside it.
func (k *Keeper) listsOfLeg(d block.Device, l *volume.Link) lists.Leg {
	own, ok := d.(lists.Leg)
	if !ok {
		return nil
	}
	return lists.Either(own, k.lists.Leg(k.beside(l)))
}

// beside is where something may answer beside the target of a leg.
func (k *Keeper) beside(l *volume.Link) lists.Where {
	w := lists.Where{Portals: l.Portals, Subsystem: l.NQN, Host: k.cfg.Host(), NSID: l.NSID, UUID: l.UUID}
	if !l.Keys.IsZero() {
		w.Host, w.Keys = l.Host, l.Keys
	}
	return w
}

// probe reads from a leg by the same route as its data. A medium error counts as an answer:
// nobody else has been given the leg, and the volume's own I/O will show which blocks are bad.
func (k *Keeper) probe(p *keeper.Pulse, d device) {
	go func() {
		err := block.ReadAt(d.Device, make([]byte, d.Geometry().BlockSize), 0)
		if errors.Is(err, block.ErrMedium) {
			err = nil
		}
		k.Tell(func() { p.Answered(err) })
	}()
}

// legDevice is a leg whose drive the manager may know to survive a power loss, although its
// target reports a volatile cache: acknowledged writes then need no flush.
type legDevice struct {
	block.Device
	connection connection
	trust      *trust
	lists      lists.Leg // nil: the device itself may know
}

// durable reports whether the drive is known to have no volatile cache.
func (d legDevice) durable() bool {
	session := d.trust.session.Load()
	return session != 0 && session == d.connection.Session()
}

func (d legDevice) Geometry() block.Geometry {
	g := d.Device.Geometry()
	g.VolatileCache = g.VolatileCache && !d.durable()
	return g
}

func (d legDevice) Submit(io *block.IO) {
	if io.Op == block.OpFlush && d.durable() {
		io.Complete(nil)
		return
	}
	d.Device.Submit(io)
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

func (k *kernelKeeper) look(ctx context.Context) (*seen, error) {
	s := &seen{
		now: time.Now(), clock: k.agent.cfg.Clock(), legs: map[block.LegID]legSeen{},
		controllers: map[block.NQN][]fabrics.Controller{},
		connecting:  map[block.NQN]bool{}, refused: map[block.NQN]string{},
		recordError: k.recorder.Refusal(), noted: k.noted, noteError: k.noteError,
	}
	all, err := k.m.host.Controllers()
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if v, _, _, _, err := block.ParseSubsystemNQN(c.NQN); err == nil && v == k.volume && c.HostNQN == k.agent.host().NQN {
			s.controllers[c.NQN] = append(s.controllers[c.NQN], c)
		}
	}
	for n, r := range k.reached {
		s.connecting[n] = r.connecting
		s.refused[n] = r.err
		if !r.connecting {
			delete(s.connecting, n)
		}
	}
	if err := k.lookAtDevices(ctx, s); err != nil {
		return nil, err
	}
	for i := range k.links {
		s.legs[k.links[i].Leg] = k.lookAtLeg(ctx, s, &k.links[i])
	}
	k.probe(s)
	return s, nil
}

func (k *kernelKeeper) lookAtDevices(ctx context.Context, s *seen) error {
	devices, err := k.m.dm.Devices(raid.TopUUID(k.volume))
	if err != nil {
		return err
	}
	k.top = dm.State{}
	for _, d := range devices {
		if d.Name == raid.TopName(k.volume) {
			k.top = d
		}
	}
	if k.top.Name != "" {
		s.top = topSeen{
			exists: k.top.Live, suspended: k.top.Suspended, suspending: k.suspends,
			failed: fails(k.top.Table), readOnly: k.top.ReadOnly, size: k.top.Table.Size(), open: k.top.Open, exposed: k.m.exposed(k.top.Number),
		}
		if s.top.open > 0 && k.leaves() {
			s.top.users = k.m.users(k.top.Number)
		}
	}
	// There may be more than the wanted state tells: none may be known.
	for i := k.columns; i < block.MaxStripes && len(devices) > 0; i++ {
		if slices.ContainsFunc(devices, func(d dm.State) bool { return belongs(d.Name, raid.ColumnName(k.volume, i)) }) {
			k.columns = i + 1
		}
	}
	for i := range k.columns {
		c, err := k.lookAtColumn(i, devices)
		if err != nil {
			return err
		}
		s.columns = append(s.columns, c)
		for _, d := range c.devices {
			k.watch(ctx, d)
		}
	}
	return nil
}

// leaves reports whether the device is to be removed, so that it matters who
// has it open: to find out is much to read.
func (k *kernelKeeper) leaves() bool {
	w := k.Told().Wanted
	return w == nil || w.Detach || !k.memory.of(w)
}

func belongs(name, column string) bool {
	return name == column || strings.HasPrefix(name, column+"-")
}

func fails(t dm.Table) bool {
	if len(t) == 0 {
		return false
	}
	return !slices.ContainsFunc(t, func(r dm.Row) bool { _, ok := r.Target.(dm.ErrorTarget); return !ok })
}

func (k *kernelKeeper) lookAtColumn(i int, devices []dm.State) (columnSeen, error) {
	c := columnSeen{name: raid.ColumnName(k.volume, i), health: map[dm.Ref]dm.Health{}}
	var of dm.State
	for _, d := range devices {
		if belongs(d.Name, c.name) {
			c.devices = append(c.devices, d)
		}
		if d.Name == c.name {
			of = d
		}
	}
	loop, ok, err := k.m.loops.Find(k.m.logFile(k.volume, i))
	if err != nil {
		return c, err
	}
	if ok {
		c.log = dm.RefTo(loop.Number)
	}
	if c.failed = fails(of.Table); c.failed {
		return c, nil
	}
	if c.Observed, err = raid.Observe(c.name, c.devices); err != nil {
		c.foreign = err.Error()
		return c, nil
	}
	return c, k.lookAtHealth(&c)
}

// lookAtHealth reads what the mirrors of a column have seen of the legs. A leg
// that is rebuilt stands in its mirror behind a device of ours.
func (k *kernelKeeper) lookAtHealth(c *columnSeen) error {
	names := map[dm.Ref]dm.State{}
	for _, d := range c.devices {
		names[dm.RefTo(d.Number)] = d
	}
	for _, d := range c.devices {
		if len(d.Table) != 1 || d.Table[0].Target.Type() != "mirror" {
			continue
		}
		status, err := k.m.dm.MirrorStatus(d.Name)
		if err != nil {
			return err
		}
		if d.Name == c.name {
			c.inSync, c.total = status.InSync, status.Total
		}
		for _, l := range status.Legs {
			device := l.Device
			if below, ours := names[device]; ours {
				device = ""
				if c.Kind == raid.ShapeRebuilding && strings.Contains(below.Name, "-back") {
					device = c.Back
				}
			}
			if was := c.health[device]; was == 0 || was == dm.Alive {
				c.health[device] = l.Health
			}
		}
	}
	return nil
}

func (k *kernelKeeper) lookAtLeg(ctx context.Context, s *seen, l *attachment.Link) legSeen {
	seen := legSeen{nqn: l.NQN}
	n, err := k.m.host.FindNamespace(l.NQN, l.NSID, l.UUID)
	live := err == nil && n.Live
	if err != nil && !errors.Is(err, fabrics.ErrNoNamespace) {
		seen.err = err.Error()
	}
	seen.device, seen.name, seen.size = dm.Ref(n.Dev), n.Name, n.Size
	if live {
		if err := k.prepare(ctx, n, l, k.need(s, l.Column)); err != nil {
			seen.err = err.Error()
		}
	}
	seen.fit = live && seen.err == ""
	p := k.pulses[l.Leg]
	if p == nil || seen.device != "" {
		p = p.Of(string(seen.device))
		k.pulses[l.Leg] = p
	}
	seen.silent = p.Look(s.now, live, k.agent.cfg.Probe)
	seen.live = seen.fit && p.Met
	seen.looks, seen.answers, seen.heard = p.Looks, p.Answers, p.Heard
	for _, c := range s.controllers[l.NQN] {
		seen.peerAnswers = seen.peerAnswers || k.path.answeredSince(c.Address, seen.silent)
	}
	return seen
}

// need is how large a leg has to be: for a column that is built, what that has. One
// that is wanted larger serves on.
func (k *kernelKeeper) need(s *seen, column int) block.Size {
	w := k.Told().Wanted
	if w == nil {
		return 0
	}
	need := w.Layout.LegSize(w.Size)
	if column < len(s.columns) && s.columns[column].Size > 0 {
		need = min(need, s.columns[column].Size)
	}
	return need
}

// prepare makes a head fit for a table: its size is right, its flushes are as
// the drive needs them, and its commands are given up in time. Newer kernels
// freeze a queue to change it, and that waits for a silent target.
func (k *kernelKeeper) prepare(ctx context.Context, n fabrics.Namespace, l *attachment.Link, need block.Size) error {
	if n.Size < need {
		return errors.New(attachment.TooSmall(n.Size, need))
	}
	writeThrough := l.WriteThrough
	return k.apart(ctx, "prepare "+n.Name, attachment.Patience, func() error {
		switch err := k.m.host.SetWriteThrough(n.Head, writeThrough); {
		case err != nil && writeThrough:
			return err
		case err != nil: // its target says that there is no cache
			k.log.Debug("flushes not asked for", "head", n.Name, "err", err)
		}
		for _, p := range n.Paths {
			if err := k.m.host.SetIOTimeout(p, k.agent.cfg.IOTimeout); err != nil {
				k.log.Debug("io timeout not set", "path", p.Name, "err", err)
			}
		}
		return nil
	}, func(err error) error { return err })
}

// probe starts the probes that are due.
func (k *kernelKeeper) probe(s *seen) {
	for leg, seen := range s.legs {
		p := k.pulses[leg]
		if !seen.fit || !p.Due(s.now, k.agent.cfg.Probe) {
			continue
		}
		p.Probe(s.now, s.clock)
		head := seen.head()
		addresses := s.controllers[seen.nqn]
		go func() {
			err := k.m.host.Probe(head)
			k.Tell(func() {
				p.Answered(err)
				for _, c := range addresses {
					if err == nil {
						k.path.answers(c.Address)
					}
				}
			})
		}()
	}
}

// watch has the keeper woken by a device's events.
func (k *kernelKeeper) watch(ctx context.Context, d dm.State) {
	if k.watched[d.Name] || !d.Live {
		return
	}
	k.watched[d.Name] = true
	nr := d.EventNr
	go func() {
		defer k.Tell(func() { delete(k.watched, d.Name) })
		for ctx.Err() == nil {
			info, err := k.m.dm.Wait(ctx, d.Name, nr)
			if err != nil {
				return
			}
			nr = info.EventNr
			k.Poke()
		}
	}()
}

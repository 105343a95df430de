// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// seen is the result of one look: the planner's view, and what this data path needs of it.
type seen struct {
	volume.Seen
	legs        map[block.LegID]legSeen
	columns     []columnSeen
	controllers map[block.NQN][]fabrics.Controller // of this volume, whatever the epoch
}

// legSeen is the multipath head of a leg.
type legSeen struct {
	nqn    block.NQN
	head   fabrics.Head
	device dm.Ref // the head's; empty if there is none
	fit    bool   // a controller is live, and the head is prepared
}

func (k *kernelKeeper) observe(ctx context.Context) (*seen, error) {
	s := &seen{legs: map[block.LegID]legSeen{}, controllers: map[block.NQN][]fabrics.Controller{}}
	s.Seen = volume.Seen{
		Now: time.Now(), Clock: k.agent.cfg.Clock(), Legs: map[block.LegID]volume.LegSeen{},
		Copying: true, // mirrors start to copy by themselves
	}
	id := k.volume.String()
	all, err := k.kernel.host.Controllers(func(n block.NQN) bool {
		if !strings.Contains(string(n), id) { // which is quicker: a host may have many
			return false
		}
		v, _, _, _, err := block.ParseSubsystemNQN(n)
		return err == nil && v == k.volume
	})
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if k.agent.host().Connects(c.NQN, c.HostNQN) {
			s.controllers[c.NQN] = append(s.controllers[c.NQN], c)
		}
	}
	k.observePaths(s)
	if err := k.observeDevices(ctx, s); err != nil {
		return nil, err
	}
	for i := range k.links {
		k.observeLeg(ctx, s, &k.links[i])
	}
	k.listen(s)
	k.settle(s)
	k.probe(s)
	return s, nil
}

// listen notes since when targets have answered nothing at all. The kernel does not show its keep-alives,
// so the questions are probes of legs, which wait for drives too. That is why the planner has it tried
// whether the target accepts connections, and what decides is that it does not.
func (k *kernelKeeper) listen(s *seen) {
	for i := range k.links {
		l := &k.links[i]
		leg, p := s.Legs[l.Leg], k.pulses[l.Leg]
		if p == nil {
			continue
		}
		since := p.Unanswered()
		for j := range leg.Ways {
			leg.Ways[j].Mute = since
		}
		for j := range s.Paths {
			path := &s.Paths[j]
			if path.Subsystem == l.NQN && (path.State == volume.PathLive || path.State == volume.PathSilent) {
				if path.Silent = keeper.Earlier(path.Silent, since); !path.Silent.IsZero() {
					path.Looks = volume.EnoughLooks // or the pulse would not say so
				}
			}
		}
	}
	k.portals.See(&s.Seen)
}

// observePaths finds the controllers, and the attempts to connect.
func (k *kernelKeeper) observePaths(s *seen) {
	there := map[string]bool{}
	for _, n := range slices.Sorted(maps.Keys(s.controllers)) {
		for _, c := range s.controllers[n] {
			there[c.Name] = true
			state := volume.PathSilent
			switch {
			case c.Going() && slices.ContainsFunc(s.controllers[n], func(o fabrics.Controller) bool { return !o.Going() && pathOf(o) == pathOf(c) }):
				continue // its successor counts
			case c.Going():
				state = volume.PathReleased
			case c.State == fabrics.Live:
				state = volume.PathLive
			}
			own, beside := k.replaces(c)
			move, moves := k.moving[n]
			s.Paths = append(s.Paths, volume.PathSeen{
				Path: pathOf(c), State: state, Lingers: c.Transport == block.RDMA, FailsFast: c.FailsFast,
				Moving: moves, Changes: move.changes, Answered: true, Replaces: own || beside, Stays: beside,
			})
		}
	}
	maps.DeleteFunc(k.promises, func(name string, _ *promise) bool { return !there[name] })
	for _, names := range []map[string]bool{k.fast, k.silent} {
		maps.DeleteFunc(names, func(name string, _ bool) bool { return !there[name] })
	}
	tried := slices.SortedFunc(maps.Keys(k.reached), volume.Path.Compare)
	for _, path := range tried {
		r, state := k.reached[path], volume.PathRefused
		if r.connecting {
			state = volume.PathConnecting
		}
		s.Paths = append(s.Paths, volume.PathSeen{Path: path, State: state, Turns: r.Turns, Error: r.Error})
	}
}

// promise is what a target says of itself when a controller has connected; see volume.PathSeen.Replaces.
type promise struct {
	asked    time.Time
	known    bool
	replaces bool

	keepAlive time.Duration // what the controller's timeout was set to; 0: it was not
}

// How often a target is asked that has not answered yet, and one that has: another program may serve it one day,
// under the same name. It is also asked when it is connected again.
const (
	promiseAgain = 10 * time.Second
	promiseLasts = time.Minute
)

// replaces reports whether a controller's target promises to end it before the host's next one is answered, or
// the agent beside it does: Linux's target says nothing of that.
func (k *kernelKeeper) replaces(c fabrics.Controller) (own, beside bool) {
	if c.Transport != block.TCP {
		return false, false
	}
	if p := k.promiseOf(c); p.replaces || !p.known {
		return p.replaces, false
	}
	b := k.beside(c.NQN)
	return false, b != nil && b.Replaces()
}

// promiseOf returns what a controller's target said last about itself. It has the target asked from time to time.
func (k *kernelKeeper) promiseOf(c fabrics.Controller) *promise {
	p := k.promises[c.Name]
	if p == nil {
		p = &promise{}
		k.promises[c.Name] = p
	}
	if c.State != fabrics.Live {
		p.asked = time.Time{} // the target may be another one when it is connected again
		return p
	}
	if since := time.Since(p.asked); since < promiseAgain || p.known && since < promiseLasts {
		return p
	}
	p.asked = time.Now()
	keepAlive := p.keepAlive
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		data := make([]byte, nvmetcp.IdentifySize)
		err := k.kernel.host.Admin(ctx, c, nvmetcp.Identify{CNS: nvmetcp.CNSController}.Command(), data)
		about, parse := nvmetcp.ParseController(data)
		if err := errors.Join(err, parse); err != nil {
			k.log.Debug("target not identified", "controller", c.Name, "err", err)
			return
		}
		k.Tell(func() { p.known, p.replaces = true, about.PerHost == 1 })
		if should := k.agent.keepAlive(c.Portal(), about.PerHost > 0); should != keepAlive && k.setKeepAlive(ctx, c, should) {
			k.Tell(func() { p.keepAlive = should })
		}
	}()
	return p
}

// setKeepAlive changes the keep-alive timeout of a controller at both ends: Linux takes it from the command, since 5.13,
// and keeps it when it connects again.
func (k *kernelKeeper) setKeepAlive(ctx context.Context, c fabrics.Controller, d time.Duration) bool {
	set := nvmetcp.FeatureAccess{ID: nvmetcp.FeatureKeepAlive, Value: uint32(d / time.Millisecond)}
	err := k.kernel.host.Admin(ctx, c, set.SetCommand(), nil)
	if err != nil {
		k.log.Debug("keep-alive timeout not set", "controller", c.Name, "err", err)
	}
	return err == nil
}

// pathOf returns the path of a controller.
func pathOf(c fabrics.Controller) volume.Path {
	return volume.Path{Subsystem: c.NQN, Portal: c.Portal()}
}

// controllersOf lists the controllers of a path: an old one may still be going.
func (s *seen) controllersOf(path volume.Path) (all []fabrics.Controller) {
	for _, c := range s.controllers[path.Subsystem] {
		if pathOf(c) == path {
			all = append(all, c)
		}
	}
	return all
}

func (k *kernelKeeper) observeDevices(ctx context.Context, s *seen) error {
	devices, err := k.kernel.dm.Devices(mirror.TopUUID(k.volume))
	if err != nil {
		return err
	}
	k.top = dm.State{}
	for _, d := range devices {
		if d.Name == mirror.TopName(k.volume) {
			k.top = d
		}
	}
	if k.top.Name != "" {
		d := volume.DeviceSeen{
			Exists: k.top.Live, Named: k.kernel.exposed(k.top.Number), Failed: fails(k.top.Table),
			Size: k.top.Table.Size(), Open: k.top.Open > 0,
		}
		if d.Open && k.leaves() {
			d.Users = k.kernel.users(k.top.Number)
		}
		s.Device, s.ReadOnly = d, k.top.ReadOnly
		s.Holdable, s.Held, s.Holding = d.Exists && !d.Failed, k.top.Suspended && !k.resumes(), k.suspends
		s.Quiet = s.Held // a suspend ends when the I/O under way has
	}
	// There may be more than the wanted state says, or that may not be known.
	for i := k.columns; i < block.MaxStripes && len(devices) > 0; i++ {
		if slices.ContainsFunc(devices, func(d dm.State) bool { return belongs(d.Name, mirror.ColumnName(k.volume, i)) }) {
			k.columns = i + 1
		}
	}
	for i := range k.columns {
		c, err := k.observeColumn(i, devices)
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

// leaves reports whether the device is to be removed. Only then is it worth finding out who
// has it open, which takes much reading.
func (k *kernelKeeper) leaves() bool {
	w := k.Last().Wanted
	return w == nil || w.Detach || !k.memory.Of(w)
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

func (k *kernelKeeper) observeColumn(i int, devices []dm.State) (columnSeen, error) {
	c := columnSeen{name: mirror.ColumnName(k.volume, i), health: map[dm.Ref]dm.Health{}}
	var of dm.State
	for _, d := range devices {
		if belongs(d.Name, c.name) {
			c.devices = append(c.devices, d)
		}
		if d.Name == c.name {
			of = d
		}
	}
	logs, err := k.logsOf(i)
	if err != nil {
		return c, err
	}
	c.logs = logs
	if c.failed = fails(of.Table); c.failed {
		return c, nil
	}
	if c.Observed, err = mirror.Observe(c.name, c.devices); err != nil {
		c.foreign = err.Error()
		return c, nil
	}
	if c.Log != "" && c.Log == c.spare.device {
		c.log, c.spare = c.spare, c.log
	}
	return c, k.observeHealth(&c)
}

// logsOf finds the logs of a column.
func (k *kernelKeeper) logsOf(column int) (l logs, err error) {
	files := k.kernel.logFiles(k.volume, column)
	for n, of := range []*logDevice{&l.log, &l.spare} {
		of.file = files[n]
		loop, ok, err := k.kernel.loops.Find(of.file)
		if err != nil {
			return l, err
		}
		if ok {
			of.device = dm.RefTo(loop.Number)
		}
	}
	return l, nil
}

// observeHealth reads the errors that the mirrors of a column report for their legs. The mirror
// uses a rebuilding leg through a device of ours.
func (k *kernelKeeper) observeHealth(c *columnSeen) error {
	names := map[dm.Ref]dm.State{}
	for _, d := range c.devices {
		names[dm.RefTo(d.Number)] = d
	}
	for _, d := range c.devices {
		if len(d.Table) != 1 || d.Table[0].Target.Type() != "mirror" {
			continue
		}
		status, err := k.kernel.dm.MirrorStatus(d.Name)
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
				if c.Kind == mirror.ShapeRebuilding && strings.Contains(below.Name, "-back") {
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

func (k *kernelKeeper) observeLeg(ctx context.Context, s *seen, l *volume.Link) {
	var leg volume.LegSeen
	n, err := k.kernel.host.FindNamespace(l.NQN, l.NSID, l.UUID)
	live := err == nil && n.Live
	if err != nil && !errors.Is(err, fabrics.ErrNoNamespace) {
		leg.Error = err.Error()
	}
	leg.Found, leg.Device, leg.Size = n.Dev != "", n.Name, n.Size
	if live {
		if err := k.prepare(ctx, n, l, k.need(s, l.Column)); err != nil {
			leg.Error = err.Error()
		}
	}
	seen := legSeen{nqn: l.NQN, head: n.Head, device: dm.Ref(n.Dev), fit: live && leg.Error == ""}
	p := k.pulses[l.Leg]
	if p == nil || seen.device != "" {
		p = p.Of(string(seen.device))
		k.pulses[l.Leg] = p
	}
	way := volume.WaySeen{Path: volume.Path{Subsystem: l.NQN}, Silent: p.Look(s.Now, live, k.agent.cfg.Probe)}
	way.Looks, way.Answers, way.Heard = p.Looks, p.Answers, p.Heard
	for _, c := range s.controllers[l.NQN] { // a probe may use any of them
		on := way
		on.Path, on.Peer = pathOf(c), k.path.answeredSince(c.Address, way.Silent)
		leg.Ways = append(leg.Ways, on)
	}
	if len(leg.Ways) == 0 {
		leg.Ways = []volume.WaySeen{way}
	}
	leg.Live = seen.fit && p.Met
	s.legs[l.Leg], s.Legs[l.Leg] = seen, leg
}

// need is the size that a leg must have: for a column that is built, the column's present
// size, because a volume that is wanted larger keeps serving.
func (k *kernelKeeper) need(s *seen, column int) block.Size {
	w := k.Last().Wanted
	if w == nil {
		return 0
	}
	need := w.Layout.LegSize(w.Size)
	if column < len(s.columns) && s.columns[column].Size > 0 {
		need = min(need, s.columns[column].Size)
	}
	return need
}

// prepare makes a head fit for a table: it checks the size, makes flushes match the drive, and
// limits the time of a command. Newer kernels freeze a queue to change it, which waits for a
// silent target.
func (k *kernelKeeper) prepare(ctx context.Context, n fabrics.Namespace, l *volume.Link, need block.Size) error {
	if n.Size < need {
		return errors.New(volume.TooSmall(n.Size, need))
	}
	writeThrough, paths, nqn := l.WriteThrough, l.Paths, l.NQN
	return k.await(ctx, "prepare "+n.Name, keeper.Patience, func() error {
		switch err := k.kernel.host.SetWriteThrough(n.Head, writeThrough); {
		case err != nil && writeThrough:
			return err
		case err != nil: // its target announces no cache anyway
			k.log.Debug("flushes not asked for", "head", n.Name, "err", err)
		}
		for _, p := range n.Paths {
			if err := k.kernel.host.SetIOTimeout(p, k.agent.cfg.IOTimeout); err != nil {
				k.log.Debug("io timeout not set", "path", p.Name, "err", err)
			}
		}
		if paths > 1 {
			if err := k.kernel.host.SpreadPaths(nqn); err != nil {
				k.log.Debug("the kernel chooses one path", "nqn", nqn, "err", err)
			}
		}
		return nil
	}, func(err error) error { return err })
}

// probe starts the probes that are due.
func (k *kernelKeeper) probe(s *seen) {
	for leg, seen := range s.legs {
		p := k.pulses[leg]
		if !seen.fit || !p.Due(s.Now, k.probeInterval(seen.nqn)) {
			continue
		}
		p.Probe(s.Now, s.Clock)
		head := seen.head
		live := slices.DeleteFunc(slices.Clone(s.controllers[seen.nqn]), func(c fabrics.Controller) bool { return c.State != fabrics.Live })
		answered := make(chan struct{})
		go k.lookOften(answered)
		go func() {
			err := k.kernel.host.Probe(head, k.agent.cfg.IOTimeout)
			close(answered)
			k.Mention(func() bool {
				if err == nil && len(live) == 1 { // else it may have been another one
					k.path.answers(live[0].Address)
				}
				return p.Answered(err)
			})
		}()
	}
}

// probeInterval is how often the legs of a subsystem are probed: at each look if their path can move to another
// portal, which takes no longer than to notice that it has to.
func (k *kernelKeeper) probeInterval(n block.NQN) time.Duration {
	if slices.ContainsFunc(k.links, func(l volume.Link) bool { return l.NQN == n && len(l.Portals) > 1 }) {
		return min(k.agent.cfg.Probe, keeper.LookInterval*3/4)
	}
	return k.agent.cfg.Probe
}

// While a probe is not answered, the keeper looks this often, for so long: a path that has fallen silent
// moves in time only if that is noticed soon.
const (
	lookSoon    = 50 * time.Millisecond
	lookSoonFor = 500 * time.Millisecond
)

func (k *kernelKeeper) lookOften(answered <-chan struct{}) {
	ticker := time.NewTicker(lookSoon)
	defer ticker.Stop()
	for range lookSoonFor / lookSoon {
		select {
		case <-answered:
			return
		case <-ticker.C:
			k.Poke()
		}
	}
}

// watch wakes the keeper on a device's events.
func (k *kernelKeeper) watch(ctx context.Context, d dm.State) {
	if k.watched[d.Name] || !d.Live {
		return
	}
	k.watched[d.Name] = true
	nr := d.EventNr
	go func() {
		defer k.Tell(func() { delete(k.watched, d.Name) })
		for ctx.Err() == nil {
			info, err := k.kernel.dm.Wait(ctx, d.Name, nr)
			if err != nil {
				return
			}
			nr = info.EventNr
			k.Poke()
		}
	}()
}

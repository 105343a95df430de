// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// Apply implements keeper.Path.
//
// Branches: one for each kind of order.
func (k *kernelKeeper) Apply(ctx context.Context, w *volume.Wanted, o volume.Order) error {
	s := k.seen
	switch o := o.(type) {
	case volume.Connect:
		return k.connect(ctx, s, o)
	case volume.Move:
		return k.move(ctx, s, o)
	case volume.Try:
		return k.portals.Try(ctx, o.Path)
	case volume.RecordInSync:
		return k.recordInSync(ctx, s, o)
	case volume.HoldIO:
		return k.suspend(ctx, s, o)
	case volume.FailFast:
		return k.failFast(ctx, s, o.Path, o.On)
	case volume.Cut:
		k.countOutage(s, o.Path, o.Mute)
		return k.release(ctx, s, o.Path, o.Mute, true)
	case volume.BreakDead:
		k.countOutage(s, o.Path, true)
		return k.breakDead(ctx, s, o.Path)
	case volume.Disconnect:
		return k.release(ctx, s, o.Path, o.Mute, false)
	case volume.SetColumn:
		if !s.Device.Exists && k.kernel.repairing(k.volume) { // the volume that was here before, by the column's name
			return errRepairing
		}
		k.unsettle(o.Column)
		k.beforeTable(w)
		return k.column(ctx, w, s, o)
	case volume.FlushLegs:
		return k.flushLegs(ctx, s, o)
	case volume.StartScrub, volume.StopScrub, volume.ProceedScrub, volume.SetScrubRate:
		return k.applyScrub(ctx, w, o)
	case volume.Readmit:
		return nil // nothing is withheld
	case volume.GrowDevice:
		return k.growTop(ctx, w, s)
	case volume.CloseDevice:
		if err := k.call(ctx, "remove-device", func() error { return k.kernel.dm.Remove(k.top.Name, false) }); err != nil {
			return err
		}
		k.memory.Clean = o.Clean
		return k.kernel.note(k.volume, k.memory)
	case volume.Forget:
		return k.forget(w, o.Clean)
	case volume.GiveUp:
		return k.kernel.note(k.volume, k.memory)
	case volume.FailColumn:
		k.stopChange(o.Column)
	case volume.RemoveColumn:
		k.stopChange(o.Column)
	}
	return k.call(ctx, o.String(), func() error { return k.touch(w, s, o) })
}

// stopChange makes a running change of a column end after its present step.
func (k *kernelKeeper) stopChange(column int) {
	k.lists.column(column).changes()
	if c := k.changes[column]; c != nil {
		c.over.Store(true)
	}
}

// touch carries out the orders that are simple calls into the kernel.
func (k *kernelKeeper) touch(w *volume.Wanted, s *seen, o volume.Order) error {
	top := k.top
	switch o := o.(type) {
	case volume.MakeLog:
		_, err := k.kernel.makeLog(s.columns[o.Column].log.file)
		return err
	case volume.MakeDevice:
		if err := k.flushEqualized(w, s); err != nil {
			return err
		}
		return k.kernel.makeTop(topOf(w), w.Layout.Copies > 1)
	case volume.NameDevice:
		d, err := k.kernel.device(mirror.TopUUID(k.volume))
		if err != nil {
			return err
		}
		return k.kernel.expose(k.volume, w.Name, d.Number)
	case volume.ResumeIO:
		err := k.kernel.dm.Resume(top.Name, dm.UdevNormal)
		k.drains.CompareAndSwap(true, err != nil)
		return err
	case volume.Flush:
		return k.kernel.flush(top.Number)
	case volume.HideDevice:
		return k.kernel.hide(top.Number)
	case volume.FailDevice:
		return k.kernel.fail(top)
	case volume.FailColumn:
		return k.kernel.fail(lowestFirst(s.columns[o.Column])...)
	case volume.RemoveColumn:
		for _, d := range slices.Backward(lowestFirst(s.columns[o.Column])) {
			if err := k.kernel.dm.Remove(d.Name, false); err != nil && !dm.NotFound(err) {
				return err
			}
		}
		return nil
	}
	panic("no such order: " + o.String())
}

// lowestFirst sorts a column's devices: the column itself uses all others.
func lowestFirst(c columnSeen) []dm.State {
	devices := slices.Clone(c.devices)
	slices.SortStableFunc(devices, func(a, b dm.State) int {
		switch {
		case a.Name == c.name && b.Name != c.name:
			return 1
		case b.Name == c.name && a.Name != c.name:
			return -1
		}
		return 0
	})
	return devices
}

// call makes a call that may hang in the kernel. If it does, the call is left behind, and the
// same call is not started again until it has returned.
func (k *kernelKeeper) call(ctx context.Context, what string, f func() error) error {
	return k.await(ctx, what, callTimeout, f, func(err error) error { return err })
}

// await runs f on its own goroutine, and waits for it with patience.
func (k *kernelKeeper) await(ctx context.Context, what string, patience time.Duration, f func() error, finish func(error) error) error {
	return k.Await(ctx, keeper.Call{What: what, Patience: patience}, func(context.Context) error { return f() }, finish)
}

// beforeTable has the kernel repeat writes for which a target has no space, for as long as it can.
func (k *kernelKeeper) beforeTable(w *volume.Wanted) {
	if !w.Thin {
		return
	}
	if err := k.kernel.host.RetryMost(); err != nil {
		k.log.Warn("a write that finds no space on a thin leg is repeated a few times only, and then the leg is given up", "err", err)
	}
}

func (k *kernelKeeper) connect(ctx context.Context, s *seen, o volume.Connect) error {
	return k.reach(ctx, s, o, func(ctx context.Context, options fabrics.Options) (fabrics.Controller, error) {
		return k.kernel.host.Connect(ctx, options)
	})
}

// reach makes a path with connect, unless that is under way, or failed a moment ago.
func (k *kernelKeeper) reach(ctx context.Context, s *seen, o volume.Connect, connect func(context.Context, fabrics.Options) (fabrics.Controller, error)) error {
	r := k.reached[o.Path]
	if r == nil {
		r = &reach{}
		k.reached[o.Path] = r
	}
	if r.connecting || s.Now.Before(r.Next) {
		return volume.ErrLater
	}
	options := fabrics.Options{
		Portal: o.Portal, NQN: o.Subsystem, Host: k.agent.host(),
		IOQueues: k.agent.cfg.IOQueues, KeepAlive: k.agent.keepAlive(o.Portal, false), ReconnectDelay: reconnectDelay(o.Portal),
	}
	if !o.Keys.IsZero() {
		var err error
		options.Host = o.Host
		if options.HostKey, options.ControllerKey, err = dhchap.NewKeys(o.Keys.Host.Reveal(), o.Keys.Controller.Reveal()); err != nil {
			return err
		}
	}
	r.connecting = true
	go func() {
		ctx, cancel := context.WithTimeout(ctx, connectTimeout)
		defer cancel()
		c, err := connect(ctx, options)
		k.Tell(func() {
			delete(k.fast, c.Name)
			delete(k.silent, c.Name)
			k.connected(o.Path, r, options, err)
		})
	}()
	return nil
}

// move connects to a target through another portal, and ends the path in use once the legs can be reached
// over the new one. Before the target answers, it ends that path's controller and waits until its commands
// have left the drives. Meanwhile the kernel holds the I/O, as at any loss of a connection.
func (k *kernelKeeper) move(ctx context.Context, s *seen, o volume.Move) error {
	links := slices.DeleteFunc(slices.Clone(k.links), func(l volume.Link) bool { return l.NQN != o.Subsystem })
	if _, moves := k.moving[o.Subsystem]; moves || len(links) == 0 {
		return volume.ErrLater
	}
	var old []ending
	for _, c := range s.controllersOf(o.Path) {
		old = append(old, ending{Controller: c})
	}
	beside := (*lists.Beside)(nil) // has the old controller ended; nil: the target does
	asks := o.By != block.SamePart
	if o.Stays || asks {
		if beside = k.beside(o.Subsystem); beside == nil {
			return volume.ErrLater
		}
	}
	to := volume.Connect{Path: volume.Path{Subsystem: o.Subsystem, Portal: o.To}, Keys: links[0].Keys, Host: links[0].Host}
	err := k.reach(ctx, s, to, func(ctx context.Context, options fabrics.Options) (fabrics.Controller, error) {
		next, err := k.moveTo(ctx, o, moving{links, old, beside}, options)
		k.Tell(func() { k.moved(o.Subsystem, err) })
		return next, err
	})
	if err != nil {
		return err
	}
	k.moving[o.Subsystem] = pathMove{changes: asks}
	k.log.Warn("path moves", "path", o.Path.String(), "to", o.To.String(), "silent", o.Silent)
	if o.Silent > 0 {
		k.countOutage(s, o.Path, true)
	}
	return nil
}

// pathMove is a move of a path that is under way, or whose legs have not answered since.
type pathMove struct {
	moved   time.Time // when the path had moved; zero: it has not yet
	changes bool      // the legs behind it change hands
}

// moving is a path that is to move.
type moving struct {
	links  []volume.Link // the legs behind the path
	old    []ending      // its controllers
	beside *lists.Beside // has them ended; nil: the target does
}

// moveTo connects to a target through another portal, and ends the older controllers. If that fails, the kernel goes
// on to try the old portal.
func (k *kernelKeeper) moveTo(ctx context.Context, o volume.Move, m moving, options fabrics.Options) (next fabrics.Controller, err error) {
	k.reconnectAfter(m.old, reconnectMoved(m.beside))
	if o.Silent > 0 { // or what is under way there waits until the kernel finds that out
		for _, c := range m.old {
			k.destroySockets(ctx, c.Controller)
		}
	}
	if m.beside != nil {
		err = k.replace(ctx, o, m.beside)
	}
	changed := o.By != block.SamePart && (err == nil || errors.Is(err, context.DeadlineExceeded)) // or may have
	if err == nil {
		next, err = k.kernel.host.Connect(ctx, options)
	}
	if err != nil || !k.awaitLegs(ctx, m.links, next) {
		if !changed { // else nothing is left at the old portal, and the kernel must not learn that from it
			k.reconnectAfter(m.old, reconnectDelay(o.Portal))
		}
		return next, err
	}
	if m.beside == nil { // else one can only be live if it has connected again, and is to go at once
		for _, c := range m.old {
			k.awaitChange(ctx, c.Controller, callTimeout, fabrics.Live) // the target has ended it
		}
	}
	if err := k.disconnect(ctx, m.old, false); err != nil { // then the planner asks for it
		k.log.Warn("the path that moved is still there", "path", o.Path.String(), "err", err)
	}
	return next, nil
}

// moved notes that a path has moved, or could not.
func (k *kernelKeeper) moved(n block.NQN, err error) {
	if err != nil {
		delete(k.moving, n)
		return
	}
	k.moving[n] = pathMove{moved: time.Now(), changes: k.moving[n].changes}
}

// settle ends the moves after which the legs have answered, or have had a leg's window for it. Until then they have
// been silent since before the move, and would be given up for what that took. After movingFor they are in any case.
func (k *kernelKeeper) settle(s *seen) {
	for n, move := range k.moving {
		since := s.Now.Sub(move.moved)
		waits := func(l volume.Link) bool { return l.NQN == n && s.Legs[l.Leg].Silence(s.Now) > since }
		if !move.moved.IsZero() && (since > k.agent.cfg.Window || !slices.ContainsFunc(k.links, waits)) {
			delete(k.moving, n)
		}
	}
}

// replace has the controller of a path that moves ended beside its target.
func (k *kernelKeeper) replace(ctx context.Context, o volume.Move, beside *lists.Beside) error {
	through := o.To
	if o.By != block.SamePart {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, volume.ChangeWithin)
		defer cancel()
		through = o.KernelPortal()
	}
	return beside.Replace(ctx, through, o.By)
}

// awaitLegs waits until the legs of a subsystem can be reached through a controller, and reports whether
// they can. A controller is live before the kernel has found its namespaces.
func (k *kernelKeeper) awaitLegs(ctx context.Context, links []volume.Link, c fabrics.Controller) bool {
	lacks := func(l volume.Link) bool {
		n, err := k.kernel.host.FindNamespace(l.NQN, l.NSID, l.UUID)
		return !errors.Is(err, fabrics.ErrNoNamespace) && !slices.ContainsFunc(n.Paths, func(p fabrics.Path) bool { return p.Controller == c.Name })
	}
	return poll(ctx, 20*time.Millisecond, func() bool { return !slices.ContainsFunc(links, lacks) })
}

// poll waits until is says so, and reports false if ctx ends first.
func poll(ctx context.Context, every time.Duration, is func() bool) bool {
	for !is() {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(every):
		}
	}
	return true
}

// keepAlive is the keep-alive timeout of a connection. It is so long that no keep-alive is under way, as a rule, when the
// agent breaks the connection: Debian's 6.1.0-56 fails the connection's I/O only when that has timed out, too. Linux sends
// one a quarter of the timeout after the last answer at the soonest (TBKAS: any command is a keep-alive).
//
// Beside a target in the kernel that is after the patience with a machine that is gone, and no longer, because such a
// target keeps the controller of a silent host for up to twice the timeout, and carries out what it has of that host.
// Beside a process, which does not, it is after the patience with one that is frozen and still accepts connections. Over
// RDMA probes and the time limit of I/O find the loss, which takes seconds.
func (a *Agent) keepAlive(p block.Portal, process bool) time.Duration {
	switch {
	case p.Transport == block.RDMA:
		return time.Minute
	case process:
		return keepAliveAfter(a.cfg.Window)
	}
	return keepAliveAfter(a.patience())
}

// keepAliveAfter is a timeout with which Linux sends a keep-alive only when a leg was given up after some patience: the
// agent takes up to half a second to look, and to have the loss recorded.
func keepAliveAfter(patience time.Duration) time.Duration {
	return (4*(patience+550*time.Millisecond) + time.Second - 1).Truncate(time.Second)
}

// patience is how long a target may answer nothing, and accept no connection.
func (a *Agent) patience() time.Duration {
	return min(cmp.Or(a.cfg.TargetPatience, userspace.TargetPatience), a.cfg.Window)
}

// reconnectDelay is how long the kernel waits between attempts to connect again. With RDMA an
// attempt at a silent target takes more than a minute, and the controller cannot be deleted until
// it ends: the first one begins only when the leg must have been found lost.
func reconnectDelay(p block.Portal) time.Duration {
	if p.Transport == block.RDMA {
		return 5 * time.Second
	}
	return time.Second
}

// reconnectMoved is how long the kernel waits before it connects the old controller of a path that moves: the
// target would end the new one. One that keeps old controllers would serve both, so there it is longer than a move
// may take.
func reconnectMoved(beside *lists.Beside) time.Duration {
	if beside != nil {
		return connectTimeout + 5*time.Second
	}
	return 5 * time.Second
}

func (k *kernelKeeper) reconnectAfter(all []ending, d time.Duration) {
	for _, c := range all {
		if err := k.kernel.host.SetReconnectDelay(c.Controller, d); err != nil {
			k.log.Warn("the delay of a controller's reconnects is not set", "controller", c.Name, "delay", d, "err", err)
		}
	}
}

func (k *kernelKeeper) connected(path volume.Path, r *reach, o fabrics.Options, err error) {
	r.connecting = false
	if err == nil {
		delete(k.reached, path)
		k.log.Info("connected", "nqn", o.NQN, "portal", o.Portal.String())
		return
	}
	answered := keeper.Refuses(err) || errors.Is(err, syscall.EIO) // for which the kernel reports each status that the target answers
	if r.Fail(err, answered) {
		k.log.Warn("connection failed", "nqn", o.NQN, "portal", o.Portal.String(), "err", err)
	}
}

// suspend holds the I/O of the device. The call returns when the I/O under way below has
// ended, which may be never; new I/O waits from the start.
func (k *kernelKeeper) suspend(ctx context.Context, s *seen, o volume.HoldIO) error {
	if k.memory.HoldBegan(o, s.Now) {
		// A later agent must not hold I/O for it anew.
		if err := k.kernel.note(k.volume, k.memory); err != nil {
			delete(k.memory.Holds, o.Hold)
			return err
		}
	}
	k.drains.Store(false) // it is held, or about to be, for this, too
	if k.suspends || s.Held {
		return volume.ErrLater
	}
	k.log.Warn("device suspended", "for", o.For())
	k.suspendTop(ctx, func() {})
	return nil
}

// suspendTop begins to suspend the device, and calls returned when that has ended.
func (k *kernelKeeper) suspendTop(ctx context.Context, returned func()) {
	k.suspends = true
	name := k.top.Name
	go func() {
		defer returned()
		err := k.kernel.dm.Suspend(name, true, true)
		k.Tell(func() {
			k.suspends = false
			if err != nil && ctx.Err() == nil {
				k.log.Warn("device not suspended", "err", err)
			}
		})
	}()
}

// ending is a controller that is to be deleted. If it fails fast, its I/O fails as soon as the
// kernel has noticed that its connection is gone, and then connects anew.
type ending struct {
	fabrics.Controller
	failsFast bool
	waits     bool // I/O waits until it has ended
}

// countOutage notes, once for each controller, that a path has fallen silent, so that another portal
// is tried first: the kernel would try this one for a minute, if it is one of RDMA, and connect to
// nobody else meanwhile.
func (k *kernelKeeper) countOutage(s *seen, path volume.Path, mute bool) {
	for _, c := range s.controllersOf(path) {
		if !c.Going() && (mute || c.State != fabrics.Live) && !k.silent[c.Name] {
			k.silent[c.Name] = true
			k.memory.FellSilent(volume.PathSeen{Path: path, Answered: true}, s.Now)
		}
	}
}

// release deletes a path's controllers, so that all I/O that waits on them fails. If the
// target is silent, it first cuts their connections; if I/O waits, it also does so when the target does
// not answer the end of a connection.
func (k *kernelKeeper) release(ctx context.Context, s *seen, path volume.Path, mute, waits bool) error {
	what := "release " + path.String()
	var all []ending
	for _, c := range s.controllersOf(path) {
		all = append(all, ending{c, k.fast[c.Name], waits})
	}
	return k.await(ctx, what, keeper.Patience, func() error { return k.disconnect(ctx, all, mute) }, func(err error) error {
		if err == nil {
			delete(k.reached, path)
		}
		return err
	})
}

// breakDead breaks the connections of one of several paths. The kernel sends again on the others what waits on it, and
// then tries to connect.
func (k *kernelKeeper) breakDead(ctx context.Context, s *seen, path volume.Path) error {
	if _, moves := k.moving[path.Subsystem]; moves {
		return volume.ErrLater
	}
	all := s.controllersOf(path)
	k.moving[path.Subsystem] = pathMove{}
	k.log.Warn("the connection of a dead path is broken, beside another path", "path", path.String())
	return k.await(ctx, "break "+path.String(), keeper.Patience, func() error {
		for _, c := range all {
			k.destroySockets(ctx, c)
			k.awaitChange(ctx, c, noticeTimeout, fabrics.Live, fabrics.Resetting)
		}
		return nil
	}, func(err error) error {
		k.moved(path.Subsystem, err)
		return err
	})
}

func (k *kernelKeeper) disconnect(ctx context.Context, all []ending, mute bool) error {
	for _, c := range all {
		if c.failsFast && (mute || c.State != fabrics.Live) && k.awaitChange(ctx, c.Controller, noticeTimeout, fabrics.Live, fabrics.Resetting) {
			k.letGo(ctx, c.Controller)
			continue
		}
		if err := k.delete(ctx, c, mute); err != nil {
			return err
		}
		k.log.Info("disconnected", "nqn", c.NQN, "controller", c.Name, "forced", mute)
	}
	return nil
}

// delete deletes a controller. If it deleted one that the kernel believes live, the kernel would
// first tell the target, and wait for an answer.
func (k *kernelKeeper) delete(ctx context.Context, e ending, mute bool) error {
	c := e.Controller
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if now, err := k.stateOf(c); err == nil && now != "" {
		c.State = now
	}
	tcp, connects := c.Transport == block.TCP, c.State == fabrics.Connecting
	if tcp && mute {
		k.destroySockets(ctx, c)
		k.awaitChange(ctx, c, 500*time.Millisecond, fabrics.Live)
		return k.kernel.host.Disconnect(ctx, c)
	}
	if tcp && e.waits && (connects || c.State == fabrics.Live) {
		// A target may die just after it has answered, or accept a connection and answer nothing. If the sockets
		// go before the I/O under way has run out of time (Config.IOTimeout), the kernel cannot ask the target any
		// more; else it would wait for a minute.
		late := time.AfterFunc(partWithin, func() {
			k.log.Warn("the target does not answer the end of a connection; its sockets are destroyed", "controller", c.Name)
			k.destroySockets(ctx, c)
		})
		defer late.Stop()
	}
	return k.kernel.host.Disconnect(ctx, c)
}

// destroySockets ends what waits for a silent target. While the kernel connects to it, only the sockets are destroyed
// whose loss the kernel notices then: on others an answer may come, and without them the kernel waits for a minute.
func (k *kernelKeeper) destroySockets(ctx context.Context, c fabrics.Controller) {
	destroy := k.kernel.host.DestroySockets
	if c.State == fabrics.Connecting {
		destroy = k.kernel.host.DestroyUnanswered
	}
	if _, err := destroy(ctx, c.Portal()); err != nil {
		k.log.Warn("sockets not destroyed; release will take longer", "controller", c.Name, "err", err)
	}
}

// failFast makes a path's I/O fail once the kernel has noticed that its connection is gone, or
// wait again. If the kernel has noticed that already, the controller goes now: it waits for a while
// before it connects, see reconnectDelay.
func (k *kernelKeeper) failFast(ctx context.Context, s *seen, path volume.Path, on bool) error {
	var errs error
	for _, c := range s.controllersOf(path) {
		if c.Going() {
			continue
		}
		late, err := k.kernel.host.SetFailFast(c, on)
		k.fast[c.Name] = on && err == nil && !late
		if on && late {
			k.letGo(ctx, c)
		}
		errs = errors.Join(errs, err)
	}
	return errs
}

// letGo begins to delete a controller. That may take a minute, and nothing waits for it here.
func (k *kernelKeeper) letGo(ctx context.Context, c fabrics.Controller) {
	if c.Going() {
		return
	}
	go func() {
		if err := k.kernel.host.Disconnect(ctx, c); !errors.Is(err, fabrics.ErrBusy) {
			k.log.Info("disconnected", "nqn", c.NQN, "controller", c.Name, "forced", true, "err", err)
		}
	}()
}

// awaitChange waits until a controller is no longer in any of these states, and reports whether it is.
func (k *kernelKeeper) awaitChange(ctx context.Context, c fabrics.Controller, patience time.Duration, states ...string) bool {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return poll(ctx, 50*time.Millisecond, func() bool {
		now, err := k.stateOf(c)
		return err == nil && !slices.Contains(states, now)
	})
}

// stateOf is the state of a controller now; empty if it has gone.
func (k *kernelKeeper) stateOf(c fabrics.Controller) (string, error) {
	all, err := k.kernel.host.Controllers(func(n block.NQN) bool { return n == c.NQN })
	for _, now := range all {
		if now.Name == c.Name {
			return now.State, err
		}
	}
	return "", err
}

// column carries out the steps of a column, and remembers its copies afterwards. Each step
// suspends a device and so waits for I/O below. If a leg with such I/O is lost meanwhile, the
// keeper continues and releases that leg, and the new table becomes live after all. That is
// safe: no leg can have been added by it, and the next plan releases what waits in it. Going
// back to the old table would not be safe: a rebuilding mirror whose leg has been recorded in
// sync must not become live again with a dirty region.
func (k *kernelKeeper) column(ctx context.Context, w *volume.Wanted, s *seen, o volume.SetColumn) error {
	what := o.String()
	switch {
	case k.Busy(what) && o.Retry:
		return volume.ErrLater
	case k.Busy(what):
		return k.unblock(ctx, w, s, o)
	}
	if err := k.readyToBuild(ctx, s, o); err != nil {
		return err
	}
	begin, steps, slots, err := k.planColumn(ctx, w, s, o)
	if err != nil {
		return err
	}
	logs := begin.logs(s.columns[o.Column].logs)
	c, mem := &change{}, k.memory
	k.changes[o.Column] = c
	k.lists.column(o.Column).changes()
	if o.Retry {
		mem.Retried[o.Column] = s.Now
	}
	return k.await(ctx, what, keeper.Patience, func() error { return k.changeColumn(o.Column, logs, steps, c) }, func(err error) error {
		delete(k.changes, o.Column)
		if err != nil || k.memory != mem {
			return err
		}
		k.memory.set(o.Column, slots, begin, block.Size(c.dirty.Load())*s.columns[o.Column].Region)
		if begin != nil && begin.lacked != nil {
			delete(k.lists.ahead, o.Column)
		}
		mem.Gone, mem.Clean = false, false
		k.ReleasedColumn(o.Column)
		return k.kernel.note(k.volume, mem)
	})
}

// planColumn returns the steps of a change, the column's copies afterwards, and how a copy begins with it.
func (k *kernelKeeper) planColumn(ctx context.Context, w *volume.Wanted, s *seen, o volume.SetColumn) (*copyBegin, []mirror.Step, []slot, error) {
	begin := k.beginCopy(ctx, w, s, o)
	delete(k.lists.awaits, o.Column)
	if begin.waiting() { // the column is changed without the leg meanwhile
		k.lists.awaits[o.Column] = awaits{k.link(o.Column, begin.copy).Leg, begin.waits, s.Now}
		o.Want.Copies = slices.Clone(o.Want.Copies)
		o.Want.Copies[begin.copy] = volume.Copy{Track: begin.begun}
	}
	// An error of the only leg in sync is cleared when another one joins, and I/O fails until then.
	clear := begin != nil && begin.waits == lastCopyToEnd && s.columns[o.Column].ill()
	steps, slots, err := k.stepsTo(w, s, o.Column, o.Want, o.Retry || clear, begin)
	switch {
	case err != nil:
		return nil, nil, nil, err
	case begin.waiting() && len(steps) == 0 && k.memory.has(o.Column, slots):
		return nil, nil, nil, volume.ErrLater
	}
	return begin, steps, slots, k.noteBegin(o.Column, begin, slots)
}

// unblock helps a change of a column that waits in the kernel for writes that an inner mirror
// holds for a leg that leaves.
func (k *kernelKeeper) unblock(ctx context.Context, w *volume.Wanted, s *seen, o volume.SetColumn) error {
	c, what := k.changes[o.Column], o.String()+", below"
	if c == nil || k.Busy(what) {
		return volume.ErrLater
	}
	want, _ := k.columnOf(w, s, o.Column, o.Want)
	steps, err := mirror.Release(s.columns[o.Column].devices, want)
	switch at := c.at.Load(); {
	case err != nil:
		return err
	case len(steps) == 0 || at == nil || *at == steps[0].DM.Device.Name:
		return volume.ErrLater
	}
	return k.await(ctx, what, keeper.Patience, func() error { return k.changeColumn(o.Column, s.columns[o.Column].logs, steps, &change{}) }, func(err error) error {
		return cmp.Or(err, volume.ErrLater)
	})
}

// change is a change of a column that is under way. It may be used from several goroutines.
type change struct {
	over atomic.Bool            // it ends after its present step
	at   atomic.Pointer[string] // the device of that step; nil for a log
	// dirty is how many regions the log has dirty to which something was added.
	dirty atomic.Uint64
}

// changeColumn stops between two steps when the change is over.
func (k *kernelKeeper) changeColumn(column int, logs logs, steps []mirror.Step, c *change) error {
	for _, step := range steps {
		if c.over.Load() {
			return volume.ErrLater
		}
		c.at.Store(nil)
		if step.DM != nil {
			c.at.Store(&step.DM.Device.Name)
		}
		var err error
		switch {
		case step.Log != nil:
			err = k.kernel.writeLog(logs.file(step.Log.Device), step.Log.Image)
		case step.LogTo > 0:
			of := step.DM.Device.Table[0].Target.(dm.Mirror).Log.Device
			err = k.kernel.dm.DoWith(*step.DM, func() error { return k.kernel.growLog(logs.file(of), step.LogTo) })
		case step.Lacked != nil:
			err = k.kernel.dm.DoWith(*step.DM, func() error {
				dirty, err := k.kernel.mergeLog(logs.spare.file, logs.log.file, *step.Lacked)
				c.dirty.Store(dirty)
				return err
			})
		default:
			err = k.kernel.dm.Do(*step.DM)
		}
		if err != nil {
			return err
		}
		k.log.Info("column changed", "column", column, "step", step.String())
	}
	return nil
}

const growDevice = "grow-device"

// growTop makes the volume's device as long as wanted. Like the change of a column it may wait
// for I/O below.
func (k *kernelKeeper) growTop(ctx context.Context, w *volume.Wanted, s *seen) error {
	if k.Busy(growDevice) {
		return volume.ErrLater
	}
	var mirrors []dm.State
	without := w.Layout.Copies > 1 && !mayDiscard(w, s)
	for _, c := range s.columns {
		for _, d := range c.devices {
			if without && d.Name == c.name {
				mirrors = append(mirrors, d)
			}
		}
	}
	top, want := k.top, topOf(w)
	return k.await(ctx, growDevice, keeper.Patience, func() error { return k.kernel.growTop(top, want, mirrors) }, func(err error) error {
		if err == nil {
			k.log.Info("device has grown", "from", top.Table.Size().String(), "to", w.Size.String())
		}
		return err
	})
}

// topOf returns the top device of a volume.
func topOf(w *volume.Wanted) dm.Device {
	top := mirror.Top(w.Volume, w.Layout, w.Size)
	top.ReadOnly, top.Count = w.ReadOnly, true
	return top
}

// forget removes a volume from the run directory, except for what remains of its epoch. That an
// epoch was given up outlives the keeper and the agent; the notes of another epoch replace it.
func (k *kernelKeeper) forget(w *volume.Wanted, clean bool) error {
	if err := k.kernel.forgetRepairs(k.volume); err != nil {
		return err
	}
	for i := range k.columns {
		for _, file := range k.kernel.logFiles(k.volume, i) {
			if err := k.kernel.dropLog(file); err != nil {
				return err
			}
		}
		k.kernel.unmarkAhead(k.volume, i) // the connections are gone, with what was sent
		if err := remove(k.kernel.behindFile(k.volume, i)); err != nil {
			return err
		}
	}
	was, now := k.memory, newMemory(k.memory.Ended(w, clean), time.Now())
	kept := now
	if was.Over != nil {
		kept = newMemory(volume.Memory{Epoch: was.Epoch, Gone: true, Over: was.Over}, time.Now())
	}
	if kept.Epoch == 0 {
		k.memory = now
		return remove(k.kernel.notesFile(k.volume))
	}
	if err := k.kernel.note(k.volume, kept); err != nil {
		return err
	}
	k.memory = now
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// errLater says that an order was not due.
var errLater = errors.New("later")

// doAll does orders in turn. After one that fails those that rely on it are
// left; columns do not rely on one another.
func (k *kernelKeeper) doAll(ctx context.Context, w *attachment.Wanted, s *seen, orders []order) (did bool, failed []string) {
	for _, o := range orders {
		err := k.do(ctx, w, s, o)
		switch {
		case err == nil:
			did = did || o.op != opConnect && o.op != opSuspend
			if o.op != opConnect {
				k.log.Debug("order done", "order", o.String())
			}
			continue
		case !errors.Is(err, errLater):
			failed = append(failed, fmt.Sprintf("%v: %v", o, err))
		}
		if o.op == opNote && s.noted.Within(o.note) {
			continue
		}
		if o.op != opColumn && o.op != opLog && o.op != opRecovered && o.op != opConnect && o.op != opGrow {
			return false, failed
		}
	}
	return did && len(failed) == 0, failed
}

func (k *kernelKeeper) do(ctx context.Context, w *attachment.Wanted, s *seen, o order) error {
	switch o.op {
	case opConnect:
		return k.connect(ctx, s, o)
	case opRecord:
		return k.recordStale(ctx, o)
	case opNote:
		return k.note(ctx, o.note)
	case opRecovered:
		return k.recordInSync(ctx, s, o)
	case opSuspend:
		return k.suspend(ctx)
	case opRelease:
		return k.release(ctx, s, o)
	case opColumn:
		return k.column(ctx, s, o)
	case opGrow:
		return k.growTop(ctx, w, s)
	case opRemoveTop:
		if err := k.call(ctx, string(o.op), func() error { return k.m.dm.Remove(k.top.Name, false) }); err != nil {
			return err
		}
		k.memory.Clean = o.clean
		return k.m.note(k.volume, k.memory)
	case opForget:
		return k.forget(w)
	case opGiveUp:
		k.log.Error("epoch given up", "epoch", k.memory.Epoch, "why", o.end.Why, "writes_lost", o.end.WritesLost)
		k.memory.Over = o.end
		return k.m.note(k.volume, k.memory)
	case opFailCol, opRemoveCol:
		if over := k.over[o.column]; over != nil {
			over.Store(true)
		}
	}
	return k.call(ctx, o.String(), func() error { return k.touch(w, s, o) })
}

// touch does the orders that are calls into the kernel and no more.
func (k *kernelKeeper) touch(w *attachment.Wanted, s *seen, o order) error {
	top := k.top
	switch o.op {
	case opLog:
		return k.m.makeLog(k.volume, o.column)
	case opTop:
		if err := k.flushEqualized(w, s); err != nil {
			return err
		}
		return k.m.makeTop(topOf(w), w.Layout.Copies > 1)
	case opExpose:
		d, err := k.m.device(raid.TopUUID(k.volume))
		if err != nil {
			return err
		}
		return k.m.expose(w.Name, d.Number)
	case opResume:
		return k.m.dm.Resume(top.Name, dm.UdevNormal)
	case opFlush:
		return k.m.flush(top.Number)
	case opHide:
		return k.m.hide(top.Number)
	case opFailTop:
		return k.m.fail(top)
	case opFailCol:
		return k.m.fail(lowestFirst(s.columns[o.column])...)
	case opRemoveCol:
		for _, d := range slices.Backward(lowestFirst(s.columns[o.column])) {
			if err := k.m.dm.Remove(d.Name, false); err != nil && !dm.NotFound(err) {
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

// call does something that may stay in the kernel, and leaves it behind when it
// does: until it has returned the same is not tried again.
func (k *kernelKeeper) call(ctx context.Context, what string, f func() error) error {
	return k.apart(ctx, what, callTimeout, f, func(err error) error { return err })
}

// apart does f on a goroutine of its own and then, on the keeper's, finish with
// its outcome. It waits for f as long as its patience lasts; after that f is left
// behind, and finish comes when f has returned. Meanwhile the keeper keeps the
// lease and the other columns, and the same is not tried again.
func (k *kernelKeeper) apart(ctx context.Context, what string, patience time.Duration, f func() error, finish func(error) error) error {
	if k.busy[what] {
		return fmt.Errorf("%w: %s", fabrics.ErrBusy, what)
	}
	k.busy[what] = true
	result := make(chan error, 1)
	go func() { result <- f() }()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-result:
		delete(k.busy, what)
		return finish(err)
	case <-ctx.Done():
		// The process may end now, and a table must not be left suspended.
		select {
		case err := <-result:
			return finish(err)
		case <-time.After(lastPatience):
			return ctx.Err()
		}
	case <-timer.C:
	}
	began := time.Now().Add(-patience)
	k.log.Warn("call has not returned yet", "call", what)
	go func() {
		err := <-result
		k.Tell(func() {
			delete(k.busy, what)
			err := finish(err)
			k.log.Info("call has returned after all", "call", what, "after", time.Since(began), "err", err)
		})
	}()
	return fmt.Errorf("no answer for %v", patience)
}

func (k *kernelKeeper) connect(ctx context.Context, s *seen, o order) error {
	r := k.reached[o.nqn]
	if r == nil {
		r = &reach{}
		k.reached[o.nqn] = r
	}
	i := slices.IndexFunc(k.links, func(l attachment.Link) bool { return l.NQN == o.nqn })
	if r.connecting || s.now.Before(r.next) || i < 0 {
		return errLater
	}
	l := k.links[i]
	options := fabrics.Options{
		Portal: l.Portals[(l.Column+r.attempts)%len(l.Portals)], NQN: o.nqn, Host: k.agent.host(),
		IOQueues: k.agent.cfg.IOQueues, KeepAlive: k.agent.cfg.KeepAlive, ReconnectDelay: time.Second,
	}
	r.connecting = true
	go func() {
		ctx, cancel := context.WithTimeout(ctx, connectTimeout)
		defer cancel()
		_, err := k.m.host.Connect(ctx, options)
		k.Tell(func() { k.connected(r, options, err) })
	}()
	return nil
}

func (k *kernelKeeper) connected(r *reach, o fabrics.Options, err error) {
	r.connecting = false
	if err == nil {
		*r = reach{}
		k.log.Info("connected", "nqn", o.NQN, "portal", o.Portal.String())
		return
	}
	r.next = time.Now().Add(min(2*time.Second, 200*time.Millisecond<<min(r.attempts, 4)))
	r.attempts++
	if r.err != err.Error() {
		k.log.Warn("connect", "nqn", o.NQN, "portal", o.Portal.String(), "err", err)
	}
	r.err = err.Error()
}

// suspend stops the device. The call returns when what is under way below has
// ended, which may be never; new I/O waits from the start.
func (k *kernelKeeper) suspend(ctx context.Context) error {
	if k.suspends {
		return errLater
	}
	k.suspends = true
	name := k.top.Name
	k.log.Warn("device suspended: a leg has not answered for the whole lease")
	go func() {
		err := k.m.dm.Suspend(name, true, true)
		k.Tell(func() {
			k.suspends = false
			if err != nil && ctx.Err() == nil {
				k.log.Warn("suspend device", "err", err)
			}
		})
	}()
	return nil
}

// release deletes a subsystem's controllers, so that all I/O that waits on them
// fails, after cutting the connections of a silent target.
func (k *kernelKeeper) release(ctx context.Context, s *seen, o order) error {
	controllers := s.controllers[o.nqn]
	return k.apart(ctx, "release "+string(o.nqn), attachment.Patience, func() error { return k.disconnect(ctx, controllers, o) }, func(err error) error {
		if err == nil {
			delete(k.reached, o.nqn)
		}
		return err
	})
}

func (k *kernelKeeper) disconnect(ctx context.Context, controllers []fabrics.Controller, o order) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for _, c := range controllers {
		if o.force && c.Transport == block.TCP {
			if _, err := k.m.host.DestroySockets(ctx, c.Portal()); err != nil {
				k.log.Warn("sockets not destroyed; release will take longer", "controller", c.Name, "err", err)
			}
			k.waitUntilNotLive(ctx, c)
		}
		if err := k.m.host.Disconnect(ctx, c); err != nil {
			return err
		}
		k.log.Info("disconnected", "nqn", o.nqn, "controller", c.Name, "forced", o.force)
	}
	return nil
}

// waitUntilNotLive gives the kernel the moment that it takes to notice that a
// controller's sockets are gone: deleting one that it believes live first tells
// the target so, and waits for its answer.
func (k *kernelKeeper) waitUntilNotLive(ctx context.Context, c fabrics.Controller) {
	for range 10 {
		all, err := k.m.host.Controllers()
		live := slices.ContainsFunc(all, func(now fabrics.Controller) bool { return now.Name == c.Name && now.State == fabrics.Live })
		if err != nil || !live {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// column does the steps of a column, and remembers what its copies are after. A
// step waits in its suspend for I/O below, which may be on a leg that is lost
// meanwhile: the keeper goes on, and has that leg released. The table then still
// becomes live. That does no harm: it keeps every promise, since no leg can have
// come into it, and what waits in it goes on by the next plan. Going back to the
// old one could do some: a rebuilding mirror whose leg has been recorded in sync
// must not be made live again with a dirty region.
func (k *kernelKeeper) column(ctx context.Context, s *seen, o order) error {
	what := columnCall(o.column)
	if k.busy[what] {
		return errLater
	}
	over, mem := new(atomic.Bool), k.memory
	k.over[o.column] = over
	if o.refresh {
		mem.refreshed[o.column] = s.now
	}
	return k.apart(ctx, what, attachment.Patience, func() error { return k.changeColumn(o, over) }, func(err error) error {
		delete(k.over, o.column)
		if err != nil || k.memory != mem {
			return err
		}
		for copy, slot := range o.slots {
			mem.Slots[slotKey(o.column, copy)] = slot
		}
		mem.Gone, mem.Clean = false, false
		k.recorder.ReleasedColumn(o.column)
		return k.m.note(k.volume, mem)
	})
}

func columnCall(column int) string { return fmt.Sprintf("%s %d", opColumn, column) }

// changeColumn stops between two steps when the column is over.
func (k *kernelKeeper) changeColumn(o order, over *atomic.Bool) error {
	for _, step := range o.steps {
		if over.Load() {
			return errLater
		}
		var err error
		switch {
		case step.Log != nil:
			err = k.m.writeLog(k.volume, o.column, step.Log.Image)
		case step.LogTo > 0:
			err = k.m.dm.DoWith(*step.DM, func() error { return k.m.growLog(k.volume, o.column, step.LogTo) })
		default:
			err = k.m.dm.Do(*step.DM)
		}
		if err != nil {
			return err
		}
		k.log.Info("column changed", "column", o.column, "step", step.String())
	}
	return nil
}

// growTop makes the volume's device as long as it is wanted. Like the change of a
// column it may wait for I/O below.
func (k *kernelKeeper) growTop(ctx context.Context, w *attachment.Wanted, s *seen) error {
	if k.busy[string(opGrow)] {
		return errLater
	}
	var mirrors []dm.State
	for _, c := range s.columns {
		for _, d := range c.devices {
			if d.Name == c.name && w.Layout.Copies > 1 {
				mirrors = append(mirrors, d)
			}
		}
	}
	top, want := k.top, topOf(w)
	return k.apart(ctx, string(opGrow), attachment.Patience, func() error { return k.m.growTop(top, want, mirrors) }, func(err error) error {
		if err == nil {
			k.log.Info("device has grown", "from", top.Table.Size().String(), "to", w.Size.String())
		}
		return err
	})
}

// topOf is the device of a volume.
func topOf(w *attachment.Wanted) dm.Device {
	top := raid.Top(w.Volume, w.Layout, w.Size)
	top.ReadOnly = w.ReadOnly
	return top
}

// forget removes what the run directory holds of a volume, but for the outcome
// of a detach, which is asked for until the manager has it, and for an epoch that was
// given up.
func (k *kernelKeeper) forget(w *attachment.Wanted) error {
	for i := range k.columns {
		if err := k.m.dropLog(k.volume, i); err != nil {
			return err
		}
	}
	if ended := k.memory.Over; ended != nil {
		return k.bury(w, ended)
	}
	clean := k.memory.Clean
	if w == nil {
		k.agent.evidence.Leave(k.volume, k.memory.Gone && clean)
	}
	detached := w != nil && w.Detach && (k.memory.of(w) || k.memory.Epoch == 0)
	if !detached {
		k.memory = &memory{}
		k.memory.prepare(time.Now())
		return remove(k.m.notesFile(k.volume))
	}
	k.memory = &memory{Epoch: w.Epoch, Grant: w.Grant, Gone: true, Clean: clean}
	k.memory.prepare(time.Now())
	k.log.Info("detached", "epoch", w.Epoch, "clean", clean)
	return k.m.note(k.volume, k.memory)
}

// bury forgets all of an epoch that was given up but that, which outlives the keeper
// and the agent. Another epoch's notes take its place.
func (k *kernelKeeper) bury(w *attachment.Wanted, why *over) error {
	grave := &memory{Epoch: k.memory.Epoch, Gone: true, Over: why}
	if err := k.m.note(k.volume, grave); err != nil {
		return err
	}
	if w == nil || w.Epoch != grave.Epoch {
		grave = &memory{}
	}
	grave.prepare(time.Now())
	k.memory = grave
	return nil
}

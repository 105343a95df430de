// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// dial connects to a subsystem.
type dial func(ctx context.Context, o dialOptions) (connection, error)

// dialOptions say where to connect, and as which host.
type dialOptions struct {
	portal    string // address:port
	subsystem block.NQN
	host      block.Host
	keys      block.Keys // what host and target prove to one another; zero: nothing
	ioQueues  int
	keepAlive time.Duration // its timeout
	every     time.Duration // its interval
	ask       time.Duration // its interval while I/O waits
	changed   func()        // called when Live or Namespace may have a new answer; must not block
	log       *slog.Logger
	digests   bool          // headers and data carry checksums
	beside    *lists.Beside // the agent beside the target
}

// connection is what a keeper uses of a connection. It reconnects by itself, forever, and I/O
// sent on it waits meanwhile.
type connection interface {
	// Live reports whether it is connected, and if not, why.
	Live() (bool, error)

	// Session is the number of the session that I/O uses now, which grows each time it is connected
	// anew; 0 while it is not connected.
	Session() uint64

	// Namespace finds a leg behind it; it does not wait.
	Namespace(nsid uint32, id block.UUID) (block.Device, error)

	// Rescan makes it look for its legs again: I/O sent to a leg that no longer exists fails.
	// It does not wait.
	Rescan()

	// Answered reports whether anything has come back since the last call.
	Answered() bool

	// Unanswered is when the target was asked something that nothing has come back since, also
	// while it is not connected; zero if there is nothing. Drives that hang do not matter.
	Unanswered() time.Time

	// Refused is when the portal refused the last attempt to connect; zero if it did not, or if
	// it is connected.
	Refused() time.Time

	// Replaces reports whether the host's older controller is drained before the next one is
	// answered: own, by its target, or beside, by the agent beside it.
	Replaces() (own, beside bool)

	// Move continues through another portal. It does not wait. I/O that was sent and is not
	// answered is sent again there, once the older controller is drained; or at once if the host
	// has waited for so long that the target must have ended it.
	Move(to block.Portal, waited bool)

	// Change has the target's subsystem change to another part, beside a portal of the kernel's. When it
	// returns nil the connection has ended, or will, and goes on there after a Move that has waited.
	Change(ctx context.Context, through block.Portal, by block.ServedBy) error

	// Cut ends it at once: pending I/O fails, and no more of it is sent.
	Cut()

	// Close ends an idle connection, and tells the target so.
	Close(ctx context.Context) error
}

// reach is a connection, possibly still being made.
type reach struct {
	connection connection // nil while connecting
	cancel     context.CancelFunc

	silence time.Duration // for how long nothing has come back, while the host looked
	mute    time.Time     // that long ago; zero: something has come back
	silent  time.Time     // the same, or since it was moved, if that is later
	moved   time.Time
	looked  time.Time // the last look
	looks   int       // since it has been silent
	asked   int       // since it has been mute
	watched bool      // it is looked at again after watchEvery

	live     bool // at the last look
	answered bool // it has been live since it was connected or moved
	closing  bool // it is being disconnected
	change   changeOfHands
	greeted  bool // while it is not live: something has come back since it was live or moved
}

// changeOfHands is the way of a connection to another part of its target.
type changeOfHands struct {
	asked bool      // the target is asked for it now
	next  time.Time // not before that it is asked again
	error string    // of the last time, which is logged once
	moved bool      // the last move of the connection was to such a part
}

// look notes whether anything has come back. Of the time between two looks, only as much counts as
// usually passes: a host that did not run for longer may not have taken the answer yet.
func (r *reach) look(now time.Time, live bool) {
	usual := keeper.LookInterval
	if r.watched {
		usual = 2 * watchEvery
	}
	last := r.looked
	r.looked = now
	lost := r.live && !live
	r.live, r.answered = live, r.answered || live
	heard, since := r.connection.Answered(), r.connection.Unanswered()
	if since.IsZero() && !live { // its target has begun to answer, and does not go on
		if since = r.mute; heard || since.IsZero() {
			since = now
		}
	}
	if heard || since.IsZero() {
		r.looks, r.asked, r.silence = 0, 0, 0
	}
	r.mute, r.silent = time.Time{}, time.Time{}
	if !since.IsZero() {
		r.looks, r.asked = r.looks+1, r.asked+1
		r.silence += min(now.Sub(later(since, last)), usual)
		r.mute = now.Add(-r.silence)
		r.silent = later(r.mute, r.moved)
	}
	r.greeted = !live && !lost && (heard || r.greeted) // what came before the loss does not count
}

// watch looks at a connection again soon if nothing comes back on it, until all is decided.
func (k *Keeper) watch(r *reach) {
	r.watched = r.silence > 0 && r.silence < 2*k.cfg.Window
	switch {
	case !r.watched:
	case k.again == nil:
		k.again = time.AfterFunc(watchEvery, k.Poke)
	default:
		k.again.Reset(watchEvery)
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// connect begins to make a connection. Where blocks have checksums, each header and all data on it carries one,
// too.
func (k *Keeper) connect(ctx context.Context, w *volume.Wanted, o volume.Connect) error {
	if time.Now().Before(k.tries[o.Path].Next) {
		return volume.ErrLater
	}
	options := dialOptions{
		portal: o.Portal.HostPort(), subsystem: o.Subsystem, host: k.cfg.Host(), ioQueues: k.cfg.IOQueues,
		keepAlive: k.cfg.KeepAlive, every: keepAliveEvery, ask: askEvery, changed: k.Poke, log: k.log, digests: w.Layout.Integrity,
	}
	if !o.Keys.IsZero() {
		options.host, options.keys = o.Host, o.Keys
	}
	for i := range w.Links {
		if l := &w.Links[i]; l.NQN == o.Subsystem {
			options.beside = k.lists.Beside(k.beside(l))
		}
	}
	limit := connectTimeout
	if o.Others {
		limit = connectTimeout / 4
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	r := &reach{cancel: cancel}
	k.conns[o.Path] = r
	go func() {
		c, err := k.path.dial(ctx, options)
		cancel()
		if !k.Tell(func() { k.connected(o.Path, r, c, err) }) && err == nil {
			c.Cut()
		}
	}()
	return nil
}

func (k *Keeper) connected(n volume.Path, r *reach, c connection, err error) {
	if err == nil && k.conns[n] != r { // cut in the meantime
		c.Cut()
		return
	}
	if err == nil {
		r.connection = c
		delete(k.tries, n)
		k.log.Info("connected", "nqn", n.Subsystem, "portal", n.Portal.String())
		return
	}
	if k.conns[n] == r {
		delete(k.conns, n)
	}
	t := k.tries[n]
	_, status := errors.AsType[nvmetcp.Status](err)
	if t.Fail(err, status || keeper.Refuses(err)) {
		k.log.Warn("connection failed", "nqn", n.Subsystem, "err", err)
	}
	k.tries[n] = t
}

// move continues a connection through another portal.
func (k *Keeper) move(o volume.Move) {
	r := k.conns[o.Path]
	if r == nil || r.connection == nil || r.closing {
		return
	}
	if o.By != block.SamePart {
		k.change(r, o)
		return
	}
	now := time.Now()
	if o.Silent > 0 {
		level := slog.LevelDebug // the next attempt of the same outage
		if o.Answered {
			level = slog.LevelWarn
		}
		k.log.Log(context.Background(), level, "path is silent; moving to another portal", "path", o.Path.String(), "to", o.To.String(), "silent", o.Silent.Round(time.Millisecond))
		k.memory.FellSilent(o.PathSeen, now)
	} else {
		k.log.Info("moving to the portal of choice", "path", o.Path.String(), "to", o.To.String())
	}
	k.rename(r, o, now)
	r.change.moved = false
	r.connection.Move(o.To, !o.Replaces)
}

// rename files a connection that moves under its new portal.
func (k *Keeper) rename(r *reach, o volume.Move, now time.Time) {
	delete(k.conns, o.Path)
	to := volume.Path{Subsystem: o.Subsystem, Portal: o.To}
	delete(k.tries, to)
	k.conns[to] = r
	r.moved, r.looks, r.live, r.answered, r.greeted = now, 0, false, false, false
}

// isChanging reports whether the connection changes to another part of its target: until that has answered, the
// connection has been made there, and the legs have answered on it, which have been silent since before.
func (r *reach) isChanging(now time.Time) bool {
	return r.change.asked || r.change.moved && now.Sub(r.moved) < changingFor
}

// change has a target's subsystem change to another part, and then continues the connection there. It goes on where
// it is until the target has answered.
func (k *Keeper) change(r *reach, o volume.Move) {
	if r.change.asked || time.Now().Before(r.change.next) {
		return
	}
	r.change.asked = true
	k.log.Info("the leg changes hands", "path", o.Path.String(), "to", o.To.String(), "by", o.By.String())
	go func() {
		err := r.connection.Change(context.Background(), o.KernelPortal(), o.By)
		k.Tell(func() {
			r.change.asked, r.change.next = false, time.Now().Add(keeper.RetryInterval)
			switch {
			case err != nil && err.Error() != r.change.error:
				r.change.error = err.Error()
				k.log.Warn("the leg has not changed hands", "path", o.Path.String(), "err", err)
			case err != nil: // again
			case k.conns[o.Path] == r && !r.closing:
				k.rename(r, o, time.Now())
				r.change.moved = true
				r.connection.Move(o.To, true)
			}
		})
	}()
}

// cut ends a connection at once.
func (k *Keeper) cut(n volume.Path) {
	r := k.conns[n]
	if r == nil {
		return
	}
	delete(k.conns, n)
	r.cancel()
	if r.connection != nil {
		r.connection.Cut()
		k.log.Info("connection cut", "nqn", n.Subsystem)
	}
}

// disconnect ends a connection that nothing uses.
func (k *Keeper) disconnect(ctx context.Context, n volume.Path) error {
	r := k.conns[n]
	if r == nil || r.connection == nil {
		return nil
	}
	r.closing = true // whatever is wanted meanwhile: it cannot be used again
	return k.await(ctx, "disconnect "+n.String(), callTimeout, r.connection.Close, func(err error) error {
		if err != nil {
			k.log.Debug("disconnect", "nqn", n.Subsystem, "err", err)
		}
		r.connection.Cut() // Close fails if the target does not answer
		if k.conns[n] == r {
			delete(k.conns, n)
		}
		return nil
	})
}

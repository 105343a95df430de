// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/block"
)

// dial connects to a subsystem.
type dial func(ctx context.Context, o dialOptions) (connection, error)

// dialOptions say where to, and as whom.
type dialOptions struct {
	portals   []string // address:port, to be tried in turn
	subsystem block.NQN
	host      block.Host
	ioQueues  int
	keepAlive time.Duration
	changed   func() // called when Live or Namespace may say something else; must not block
	log       *slog.Logger
}

// connection is what a keeper uses of a connection. One that breaks is made again
// by itself, for ever, and what it was sent waits.
type connection interface {
	// Live reports whether it stands, and if not why.
	Live() (bool, error)

	// Namespace finds a leg behind it; it does not wait.
	Namespace(nsid uint32, id block.UUID) (block.Device, error)

	// Rescan has it look which legs there are: what was sent to one that is there no
	// more is answered with an error. It does not wait.
	Rescan()

	// Cut ends it at once: what it was sent is answered with an error, and nothing
	// more of it is sent.
	Cut()

	// Close ends a connection that has nothing under way, and says so to the target.
	Close(ctx context.Context) error
}

// reach is a connection, or the making of one.
type reach struct {
	connection connection // nil while it is made
	cancel     context.CancelFunc
}

// try is how connecting to a subsystem went last.
type try struct {
	attempts int
	next     time.Time
	err      string
}

// connect begins to make a connection.
func (k *Keeper) connect(ctx context.Context, s *seen, w *attachment.Wanted, o order) error {
	t := k.tries[o.nqn]
	i := slices.IndexFunc(w.Links, func(l attachment.Link) bool { return l.NQN == o.nqn })
	if s.now.Before(t.next) || i < 0 {
		return errLater
	}
	portals, err := portalsOf(w.Links[i], t.attempts)
	if err != nil {
		t.err, t.next = err.Error(), s.now.Add(attachment.RetryInterval)
		k.tries[o.nqn] = t
		return errLater
	}
	options := dialOptions{
		portals: portals, subsystem: o.nqn, host: k.cfg.Host(),
		ioQueues: k.cfg.IOQueues, keepAlive: k.cfg.KeepAlive, changed: k.Poke, log: k.log,
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	r := &reach{cancel: cancel}
	k.conns[o.nqn] = r
	go func() {
		c, err := k.path.dial(ctx, options)
		cancel()
		if !k.Tell(func() { k.connected(o.nqn, r, c, err) }) && err == nil {
			c.Cut()
		}
	}()
	return nil
}

// portalsOf are a leg's portals, another one first for each column and attempt.
func portalsOf(l attachment.Link, attempt int) (all []string, err error) {
	for i := range l.Portals {
		p := l.Portals[(l.Column+attempt+i)%len(l.Portals)]
		if p.Transport == block.TCP {
			all = append(all, net.JoinHostPort(p.Address, strconv.Itoa(int(p.Port))))
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("node %s has no TCP portal, and this data path supports no other", l.Node)
	}
	return all, nil
}

func (k *Keeper) connected(n block.NQN, r *reach, c connection, err error) {
	if err == nil && k.conns[n] != r { // cut meanwhile
		c.Cut()
		return
	}
	if err == nil {
		r.connection = c
		delete(k.tries, n)
		k.log.Info("connected", "nqn", n)
		return
	}
	if k.conns[n] == r {
		delete(k.conns, n)
	}
	t := k.tries[n]
	t.next = time.Now().Add(min(2*time.Second, 200*time.Millisecond<<min(t.attempts, 4)))
	t.attempts++
	if t.err != err.Error() {
		k.log.Warn("connect", "nqn", n, "err", err)
	}
	t.err = err.Error()
	k.tries[n] = t
}

// cut ends a connection at once.
func (k *Keeper) cut(n block.NQN) {
	r := k.conns[n]
	if r == nil {
		return
	}
	delete(k.conns, n)
	r.cancel()
	if r.connection != nil {
		r.connection.Cut()
		k.log.Info("connection cut", "nqn", n)
	}
}

// disconnect ends a connection that nothing uses.
func (k *Keeper) disconnect(ctx context.Context, n block.NQN) error {
	r := k.conns[n]
	if r == nil || r.connection == nil {
		return nil
	}
	return k.apart(ctx, "disconnect "+string(n), callTimeout, r.connection.Close, func(err error) error {
		if err != nil {
			k.log.Debug("disconnect", "nqn", n, "err", err)
		}
		r.connection.Cut() // it has not ended if the target does not answer
		if k.conns[n] == r {
			delete(k.conns, n)
		}
		return nil
	})
}

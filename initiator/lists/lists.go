// SPDX-License-Identifier: Apache-2.0

// Package lists asks targets for their lists of writes, and takes checkpoints of them; see package
// raid/checkpoint. A target in user space answers on the connection that carries the leg's I/O. The
// kernel's target knows no such commands, so the agent beside it answers on a connection of its own, at
// the next port (block.Portal.Lists), to the same hosts with the same keys. [Pool] has these
// connections, and [Either] asks the one that answers.
package lists

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/raid/checkpoint"
)

// Leg is a leg whose writes are listed. Where they are not, the error is block.ErrUnsupported or an
// nvmetcp.Status.
type Leg interface {
	Checkpoint(ctx context.Context, commit bool, token uint64) error
	CheckpointBehind(ctx context.Context, commit bool, token uint64, behind nvmetcp.Behind) error
	Written(ctx context.Context) (nvmetcp.WrittenLog, error)
}

// None reports whether an error says that a target keeps no list.
func None(err error) bool {
	var status nvmetcp.Status
	return errors.Is(err, block.ErrUnsupported) || errors.As(err, &status)
}

// Of asks for the list of a leg.
func Of(ctx context.Context, leg Leg) (checkpoint.List, error) {
	l, err := leg.Written(ctx)
	if err != nil {
		return checkpoint.List{}, err
	}
	list := checkpoint.List{Committed: checkpoint.Token(l.Committed), Begun: checkpoint.Token(l.Begun), Region: block.Size(l.Region), Words: l.Regions}
	if l.Behind != nil {
		list.Behind = &checkpoint.Behind{Since: l.Behind.Since}
		for _, r := range l.Behind.Ranges {
			list.Behind.Ranges = append(list.Behind.Ranges, checkpoint.Range{Off: r[0], End: r[1]})
		}
	}
	return list, nil
}

// OfAll asks for the lists of several legs at once.
func OfAll(ctx context.Context, legs []Leg) ([]checkpoint.List, error) {
	lists, errs := make([]checkpoint.List, len(legs)), make(chan error, len(legs))
	for i, leg := range legs {
		go func() {
			var err error
			lists[i], err = Of(ctx, leg)
			errs <- err
		}()
	}
	var failed error
	for range legs {
		failed = errors.Join(failed, <-errs)
	}
	return lists, failed
}

// CopiesOn says what is copied to a leg of which the targets' lists say what it lacks, for people.
const CopiesOn = "what the host before had not copied yet, and what was written since"

var errNotBelieved = errors.New("what it has is not to be trusted")

// Lacks returns what a stale leg lacks, from its list and those of all legs in sync. believes reports whether what it has
// can be relied on apart from that, if all of it was copied to since a revision. An error means that it may lack
// everything.
func Lacks(leg checkpoint.List, inSync []checkpoint.List, believes func(since uint64) bool) (*checkpoint.Behind, error) {
	since := uint64(0)
	if leg.Behind != nil {
		since = leg.Behind.Since
	}
	if !believes(since) {
		return nil, errNotBelieved
	}
	ranges, err := checkpoint.Lacks(leg, inSync)
	if err != nil {
		return nil, err
	}
	return &checkpoint.Behind{Since: since, Ranges: ranges}, nil
}

// Behind says for the protocol what a leg lacks.
func Behind(since uint64, ranges []checkpoint.Range) nvmetcp.Behind {
	b := nvmetcp.Behind{Since: since}
	for _, r := range ranges {
		b.Ranges = append(b.Ranges, [2]int64{r.Off, r.End})
	}
	return b
}

// Either is a leg that first is asked about, and second where first keeps no list. Its methods may be
// called concurrently.
func Either(first, second Leg) Leg { return &either{first: first, second: second} }

type either struct {
	first, second Leg
	elsewhere     atomic.Bool // the second has answered, so the first need not be asked
}

func (e *either) ask(do func(Leg) error) error {
	if e.elsewhere.Load() {
		return do(e.second)
	}
	err := do(e.first)
	if err == nil || !None(err) {
		return err
	}
	switch other := do(e.second); {
	case other == nil:
		e.elsewhere.Store(true)
		return nil
	case errors.Is(other, syscall.ECONNREFUSED): // nobody keeps one
		return errors.Join(err, other)
	default:
		return other
	}
}

func (e *either) Checkpoint(ctx context.Context, commit bool, token uint64) error {
	return e.ask(func(l Leg) error { return l.Checkpoint(ctx, commit, token) })
}

func (e *either) CheckpointBehind(ctx context.Context, commit bool, token uint64, behind nvmetcp.Behind) error {
	return e.ask(func(l Leg) error { return l.CheckpointBehind(ctx, commit, token, behind) })
}

func (e *either) Written(ctx context.Context) (log nvmetcp.WrittenLog, err error) {
	err = e.ask(func(l Leg) error { log, err = l.Written(ctx); return err })
	return log, err
}

// Where says where a target answers for the lists of a subsystem, to whom, and about which leg.
type Where struct {
	Portals   []block.Portal // of the leg
	Subsystem block.NQN
	Host      block.Host
	Keys      block.Keys // what host and target prove to one another; zero: nothing
	NSID      uint32
	UUID      block.UUID
}

// Pool has a connection to each subsystem whose legs were asked about. Its methods may be called
// concurrently. The zero Pool is ready for use.
type Pool struct {
	Dial dialer // nil: the network
	Log  *slog.Logger

	mu     sync.Mutex
	conns  map[block.NQN]*conn
	closed bool
}

// connectTimeout is how long an attempt to connect may take. It goes on when whoever asked waits no more.
const connectTimeout = 15 * time.Second

// conn is a connection, or an attempt to make it.
type conn struct {
	mu         sync.Mutex
	making     chan struct{} // closed when the attempt under way has ended; nil: there is none
	giveUp     func()        // ends the attempt under way
	err        error         // of the last attempt
	controller *host.Controller
	closed     bool
}

// Leg returns the leg at a place. It connects when it is asked something, and stays connected.
func (p *Pool) Leg(w Where) Leg { return leg{p, w} }

// Keep closes the connections to all other subsystems.
func (p *Pool) Keep(wanted func(block.NQN) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n, c := range p.conns {
		if !wanted(n) {
			delete(p.conns, n)
			go c.close()
		}
	}
}

// Close closes all connections. Later calls of the pool's legs fail.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.conns {
		c.close()
	}
	p.conns = nil
}

// close closes the connection, or ends the attempt to make it.
func (c *conn) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.making != nil {
		c.giveUp()
	}
	if c.controller != nil {
		c.controller.Cut()
	}
}

func (p *Pool) to(n block.NQN) *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return &conn{closed: true}
	}
	if p.conns == nil {
		p.conns = map[block.NQN]*conn{}
	}
	if p.conns[n] == nil {
		p.conns[n] = &conn{}
	}
	return p.conns[n]
}

// connect returns the connection to a subsystem, which it may have to make first.
func (p *Pool) connect(ctx context.Context, w Where) (*host.Controller, error) {
	c := p.to(w.Subsystem)
	c.mu.Lock()
	if c.controller == nil && c.making == nil && !c.closed {
		c.making = make(chan struct{})
		var attempt context.Context
		attempt, c.giveUp = context.WithTimeout(context.Background(), connectTimeout)
		go c.make(attempt, p, w)
	}
	making := c.making
	c.mu.Unlock()
	if making != nil {
		select {
		case <-making:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, block.ErrGone
	case c.controller == nil:
		return nil, c.err
	}
	return c.controller, nil
}

// make makes the connection, and ends the attempt.
func (c *conn) make(ctx context.Context, p *Pool, w Where) {
	controller, err := p.dial(ctx, w)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.controller, c.err = controller, err; c.closed && controller != nil {
		controller.Cut()
	}
	close(c.making)
	c.making = nil
	c.giveUp()
}

func (p *Pool) dial(ctx context.Context, w Where) (*host.Controller, error) {
	config := host.Config{
		Subsystem: w.Subsystem, Host: w.Host, IOQueues: 1, QueueDepth: 2, ReconnectMax: time.Second, Dial: p.Dial, Log: p.Log,
	}
	for _, portal := range w.Portals {
		if at, ok := portal.Lists(); ok {
			config.Portals = append(config.Portals, at.HostPort())
		}
	}
	ctx, config.Dial = untilRefused(ctx, len(config.Portals), config.Dial)
	if !w.Keys.IsZero() {
		var err error
		if config.HostKey, config.ControllerKey, err = dhchap.NewKeys(w.Keys.Host.Reveal(), w.Keys.Controller.Reveal()); err != nil {
			return nil, err
		}
	}
	return host.Connect(ctx, config)
}

// untilRefused returns a context that ends when all n portals refuse connections in a row: the target keeps no
// lists, since it offers them before the kernel has the legs. Nobody need wait then until the attempt to connect is
// given up.
func untilRefused(ctx context.Context, n int, dial dialer) (context.Context, dialer) {
	ctx, giveUp := context.WithCancelCause(ctx)
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	refused := 0 // one portal is tried at a time
	return ctx, func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if !errors.Is(err, syscall.ECONNREFUSED) {
			refused = 0
		} else if refused++; refused >= n {
			giveUp(err)
		}
		return c, err
	}
}

type dialer = func(ctx context.Context, network, address string) (net.Conn, error)

// leg is one leg behind a connection of the pool.
type leg struct {
	pool *Pool
	Where
}

// namespace connects and finds the leg, of which the connection may not have heard yet.
func (l leg) namespace(ctx context.Context) (*host.Namespace, error) {
	c, err := l.pool.connect(ctx, l.Where)
	if err != nil {
		return nil, fmt.Errorf("ask for the list of writes of %s: %w", l.Subsystem, err)
	}
	for {
		n, err := c.Namespace(l.NSID, l.UUID)
		if err == nil {
			return n, nil
		}
		c.Rescan()
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("ask for the list of writes of %s: %w", l.Subsystem, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (l leg) Checkpoint(ctx context.Context, commit bool, token uint64) error {
	n, err := l.namespace(ctx)
	if err != nil {
		return err
	}
	return n.Checkpoint(ctx, commit, token)
}

func (l leg) CheckpointBehind(ctx context.Context, commit bool, token uint64, behind nvmetcp.Behind) error {
	n, err := l.namespace(ctx)
	if err != nil {
		return err
	}
	return n.CheckpointBehind(ctx, commit, token, behind)
}

func (l leg) Written(ctx context.Context) (nvmetcp.WrittenLog, error) {
	n, err := l.namespace(ctx)
	if err != nil {
		return nvmetcp.WrittenLog{}, err
	}
	return n.Written(ctx)
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// Controller is a connection to a controller of a subsystem. It reconnects whenever the
// connection is lost. All methods may be called by many goroutines.
type Controller struct {
	cfg          Config
	ctx          context.Context // ends at Cut
	cut          context.CancelFunc
	over         chan struct{} // run has returned
	session      atomic.Pointer[session]
	outstanding  atomic.Int64  // IOs that were submitted and have not completed
	usage        atomic.Int32  // see use
	stir         chan struct{} // the first IO after a rest; see use
	closing      atomic.Bool
	replaces     atomic.Bool // see Replaces
	replacer     atomic.Bool // see Replacer
	hearing      hearing
	drained      chan struct{}
	transactions atomic.Uint32 // of authentication

	mu         sync.Mutex
	held       list // IOs that wait for a session, or for their namespace to appear
	state      State
	portals    []string                // where to connect
	moved      context.CancelCauseFunc // ends the attempts to connect; nil: there are none
	replace    bool                    // before the next attempt, see Config.Replace
	namespaces []*Namespace
	found      []NamespaceInfo
	isCut      bool

	tellMu   sync.Mutex // orders OnState and OnNamespaces
	watchers []func()   // called for both
}

// Connect connects to a controller. It tries until it succeeds or ctx ends, and then
// returns the error of the last attempt. Later losses are repaired without the caller; see
// the package comment.
func Connect(ctx context.Context, cfg Config) (*Controller, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	c := &Controller{cfg: cfg, over: make(chan struct{}), drained: make(chan struct{}, 1), stir: make(chan struct{}, 1)}
	c.ctx, c.cut = context.WithCancel(context.Background())
	c.state, c.portals = State{Since: time.Now()}, cfg.Portals
	s, err := c.reach(ctx)
	if err != nil {
		c.cut()
		return nil, err
	}
	go c.run(s)
	return c, nil
}

// reach opens a session, until it succeeds or ctx ends.
func (c *Controller) reach(ctx context.Context) (*session, error) {
	for {
		trying, moved := context.WithCancelCause(ctx)
		c.mu.Lock()
		c.moved = moved
		portals := c.portals
		c.mu.Unlock()
		s, err := (*session)(nil), c.replaceOlder(trying)
		if err == nil {
			s, err = c.tryAll(trying, portals)
		}
		c.mu.Lock()
		c.moved = nil
		c.mu.Unlock()
		over := context.Cause(trying)
		moved(nil)
		if err == nil || !errors.Is(over, errMoved) {
			return s, err
		}
	}
}

// replaceOlder has the older controllers of this host ended if a move demands it: it tries until that has
// succeeded or ctx ends.
func (c *Controller) replaceOlder(ctx context.Context) error {
	for pause := c.cfg.ReconnectMin; ; pause = min(2*pause, c.cfg.ReconnectMax) {
		c.mu.Lock()
		due := c.replace
		c.mu.Unlock()
		if !due {
			return nil
		}
		err := c.cfg.Replace(ctx)
		if err == nil {
			c.mu.Lock()
			c.replace = false
			c.mu.Unlock()
			return nil
		}
		err = fmt.Errorf("have the older controllers of %s ended: %w", c.cfg.Subsystem, err)
		c.cfg.Log.Debug("connect attempt failed", "err", err)
		c.mu.Lock()
		c.state.Err = err
		c.mu.Unlock()
		c.tellState()
		if !sleep(ctx, pause) {
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// tryAll tries portal after portal until ctx ends.
func (c *Controller) tryAll(ctx context.Context, portals []string) (*session, error) {
	pause := c.cfg.ReconnectMin
	var last error
	for i := 0; ; i++ {
		c.mu.Lock()
		number := c.state.Session + 1
		c.mu.Unlock()
		c.hearing.ask()
		s, err := c.open(ctx, portals[i%len(portals)], number)
		if err == nil && !c.cfg.discovery {
			err = c.admit(ctx, s)
		}
		if err == nil {
			return s, nil
		}
		c.cfg.Log.Debug("connect attempt failed", "subsystem", c.cfg.Subsystem, "err", err)
		if ctx.Err() != nil {
			// The end of ctx says less about the cause than an earlier failure.
			if last == nil {
				last = err
			}
			return nil, errors.Join(last, context.Cause(ctx))
		}
		last = err
		c.mu.Lock()
		c.state.Err, c.state.Failed = err, time.Now()
		c.mu.Unlock()
		c.tellState()
		if (i+1)%len(portals) != 0 {
			continue
		}
		if !sleep(ctx, pause) {
			return nil, errors.Join(last, context.Cause(ctx))
		}
		pause = min(2*pause, c.cfg.ReconnectMax)
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// admit reads a new session's namespaces and lets IO use it, unless ctx has ended: the session
// may then lead through a portal that is no longer wanted.
func (c *Controller) admit(ctx context.Context, s *session) error {
	scan, cancel := context.WithTimeout(ctx, c.cfg.ConnectTimeout)
	defer cancel()
	found, err := s.scan(scan)
	if err != nil {
		s.fail(err)
		s.stop()
		return fmt.Errorf("scan the namespaces of %s: %w", c.cfg.Subsystem, s.err)
	}
	c.mu.Lock()
	if err := context.Cause(ctx); err != nil {
		c.mu.Unlock()
		s.fail(err)
		s.stop()
		return fmt.Errorf("connect to %s at %s: %w", c.cfg.Subsystem, s.portal, err)
	}
	c.matchLocked(found, true)
	held := list{}
	if !c.isCut {
		c.state = State{Phase: Live, Since: time.Now(), Portal: s.portal, Session: s.number}
		c.session.Store(s)
		held = c.held.take()
	}
	c.mu.Unlock()
	c.cfg.Log.Info("connected", "subsystem", c.cfg.Subsystem, "portal", s.portal, "controller", s.id, "session", s.number, "queues", len(s.io))
	c.tellState()
	c.tellNamespaces()
	for r := held.pop(); r != nil; r = held.pop() {
		c.route(r)
	}
	return nil
}

// run keeps the controller connected until it is cut.
func (c *Controller) run(s *session) {
	defer close(c.over)
	for {
		c.serve(s)
		c.lose(s)
		if c.ctx.Err() != nil {
			break
		}
		var err error
		if s, err = c.reach(c.ctx); err != nil {
			break
		}
	}
	c.mu.Lock()
	held := c.held.take()
	c.mu.Unlock()
	for r := held.pop(); r != nil; r = held.pop() {
		r.tell(block.ErrGone)
	}
	c.tellState()
}

// lose ends a session and keeps its unfinished IOs.
func (c *Controller) lose(s *session) {
	c.mu.Lock()
	c.session.Store(nil)
	if !c.isCut {
		c.state = State{Since: time.Now(), Portal: s.portal, Session: s.number, Err: s.err}
		c.cfg.Log.Warn("connection lost", "subsystem", c.cfg.Subsystem, "portal", s.portal, "session", s.number, "err", s.err)
	}
	c.mu.Unlock()
	c.tellState()
	unfinished := s.stop()
	c.mu.Lock()
	unfinished.append(c.held.take())
	var lost list
	for r := unfinished.pop(); r != nil; r = unfinished.pop() {
		if r.failed {
			lost.push(r)
		} else {
			c.held.push(r)
		}
	}
	c.mu.Unlock()
	for r := lost.pop(); r != nil; r = lost.pop() {
		if r.sent {
			r.tell(errLost)
		} else {
			r.tell(errUnsent)
		}
	}
}

// route sends an IO, or holds it until it can be sent.
func (c *Controller) route(r *request) {
	for {
		s := c.session.Load()
		refused := false
		if s != nil && r.space.present() {
			if s.submit(r) {
				return
			}
			refused = true
		}
		if c.hold(r, s, refused) {
			return
		}
	}
}

// hold keeps r for later, or completes it with an error if it can never be sent. It returns
// false if r may be routed again at once: the session or the namespace has changed.
func (c *Controller) hold(r *request, s *session, refused bool) bool {
	c.mu.Lock()
	var err error
	switch {
	case c.isCut:
		err = block.ErrGone
	case r.space.gone() != nil:
		err = r.space.gone()
	case c.session.Load() != s || s != nil && !refused && r.space.present():
		c.mu.Unlock()
		return false
	case r.failed:
		err = errUnsent
	default:
		c.held.push(r)
	}
	c.mu.Unlock()
	if err != nil {
		r.tell(err)
	}
	return true
}

// left counts a completed IO.
func (c *Controller) left() {
	if c.outstanding.Add(-1) == 0 && c.closing.Load() {
		select {
		case c.drained <- struct{}{}:
		default:
		}
	}
}

// State returns the current state.
func (c *Controller) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

func (c *Controller) tellState() {
	c.tellMu.Lock()
	defer c.tellMu.Unlock()
	if c.cfg.OnState != nil {
		c.cfg.OnState(c.State())
	}
	for _, f := range c.watchers {
		f()
	}
}

func (c *Controller) tellNamespaces() {
	c.tellMu.Lock()
	defer c.tellMu.Unlock()
	if c.cfg.OnNamespaces != nil {
		c.cfg.OnNamespaces()
	}
	for _, f := range c.watchers {
		f()
	}
}

// watch registers f, to be called after every change of the state or the namespaces.
func (c *Controller) watch(f func()) {
	c.tellMu.Lock()
	defer c.tellMu.Unlock()
	c.watchers = append(c.watchers, f)
}

// Cut ends the connection at once and for good. Outstanding IOs complete with
// [block.ErrGone]; whether the target executes those that have reached it is unknown. Cut
// does not wait: once Done is closed, nothing more is sent and every IO has completed.
func (c *Controller) Cut() {
	c.mu.Lock()
	if !c.isCut {
		c.isCut = true
		c.state = State{Phase: Closed, Since: time.Now(), Portal: c.state.Portal, Session: c.state.Session, Err: c.state.Err}
	}
	c.session.Store(nil)
	c.mu.Unlock()
	c.cut()
}

// Move ends the present session, or the attempts to open one, and continues through other
// portals. As after any loss of the connection, IOs wait meanwhile, and those in flight are sent
// again. That is safe if the controller says so, see Replaces, or with Config.Replace.
func (c *Controller) Move(portals ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.portals = nil
	for _, p := range portals {
		c.portals = append(c.portals, withPort(p))
	}
	c.replace = c.replace || c.cfg.Replace != nil && !c.replaces.Load()
	if c.moved != nil {
		c.moved(errMoved)
	}
	if s := c.session.Load(); s != nil {
		s.fail(errMoved)
	}
}

var errMoved = errors.New("the connection is moved to another portal")

// Replaces reports whether the target promises that a host has one controller of the subsystem:
// before it answers a host that connects again, through whatever portal, the commands of the
// host's older controller have left the devices. It is that of the last session.
func (c *Controller) Replaces() bool { return c.replaces.Load() }

// Replacer reports whether Replace can be called: the controller speaks for another target. It is that of
// the last session.
func (c *Controller) Replacer() bool { return c.replacer.Load() }

// Replace has the target for which the controller speaks end this host's controllers. After nil their
// commands have left the devices, and the host can connect there anew. If ctx ends first, it may happen
// later. by is the part of the node that is to serve the subsystem from then on, see nvmetcp.ReplaceCommand.
func (c *Controller) Replace(ctx context.Context, by block.ServedBy) error {
	s, cmd := c.session.Load(), nvmetcp.ReplaceCommand(by)
	if s == nil {
		return fmt.Errorf("replace the controllers of %s: %w", c.cfg.Subsystem, errLost)
	}
	if _, err := s.admin.do(ctx, cmd, nil); err != nil {
		return fmt.Errorf("replace the controllers of %s: %w", c.cfg.Subsystem, err)
	}
	return nil
}

// Session returns the number of the connection that I/O uses now: see State.Session. It is 0 while
// there is none.
func (c *Controller) Session() uint64 {
	if s := c.session.Load(); s != nil {
		return s.number
	}
	return 0
}

// Answered reports whether anything has been received since the last call, on any queue.
func (c *Controller) Answered() bool { return c.hearing.told.Swap(false) }

// Unanswered is when the controller was asked something that nothing at all has come back since:
// a keep alive, or an attempt to connect. It is zero if all is answered.
func (c *Controller) Unanswered() time.Time { return c.hearing.unanswered() }

// Rescan reads the controller's namespaces again, as after an event. It does not wait;
// OnNamespaces reports the result.
func (c *Controller) Rescan() {
	if s := c.session.Load(); s != nil {
		select {
		case s.scans <- struct{}{}:
		default: // a scan is due already
		}
	}
}

// Done is closed when the controller has been cut or closed and no IO is outstanding.
func (c *Controller) Done() <-chan struct{} { return c.over }

// Close refuses new IOs, waits for the outstanding ones, shuts the controller down and
// disconnects. If ctx ends first, Close cuts the connection and returns the cause.
func (c *Controller) Close(ctx context.Context) error {
	c.closing.Store(true)
	err := c.drain(ctx)
	if err == nil {
		if s := c.session.Load(); s != nil {
			s.shutdown(ctx)
		}
	}
	c.Cut()
	<-c.over
	return err
}

func (c *Controller) drain(ctx context.Context) error {
	for c.outstanding.Load() > 0 {
		select {
		case <-c.drained:
		case <-ctx.Done():
			return fmt.Errorf("close %s: %d IOs are under way: %w", c.cfg.Subsystem, c.outstanding.Load(), context.Cause(ctx))
		case <-c.over:
			return nil
		}
	}
	return nil
}

// shutdown tells the controller that the host is leaving. Errors do not matter: the
// connection is closed next.
func (s *session) shutdown(ctx context.Context) {
	for _, q := range s.io {
		if s.about.OFCS&nvmetcp.OFCSDisconnect != 0 {
			if _, err := q.do(ctx, nvmetcp.DisconnectCommand(), nil); err != nil {
				return
			}
		}
	}
	config := nvmetcp.Configuration{Enable: true, Shutdown: 1, SubmissionEntrySize: 6, CompletionEntrySize: 4}
	if err := s.setProperty(ctx, nvmetcp.PropertyCC, uint64(config.Encode())); err == nil {
		s.await(ctx, "to shut down", func(c nvmetcp.ControllerStatus) bool { return c.Shutdown == 2 }) //nolint:errcheck // as above
	}
}

var errKeepAlive = errors.New("keep alive not answered")

// errSlow is the reason for dropping a connection whose command takes too long.
var errSlow = errors.New("a command was not answered in time")

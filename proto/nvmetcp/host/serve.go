// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/nvmetcp"
)

// serve maintains a session until it ends or the controller is cut.
func (c *Controller) serve(s *session) {
	ctx, cancel := context.WithCancel(c.ctx)
	var tasks sync.WaitGroup
	tasks.Go(func() { s.attend(ctx) })
	if c.cfg.KATO > 0 {
		tasks.Go(func() { s.keepAlive(ctx) })
	}
	if c.cfg.CommandTimeout > 0 {
		tasks.Go(func() { s.watch(ctx) })
	}
	select {
	case <-s.dead:
	case <-c.ctx.Done():
		s.fail(context.Canceled)
	}
	cancel()
	tasks.Wait()
}

// How a controller is used, which decides how often keepAlive looks.
const (
	unused  int32 = iota // no IO was submitted since the last tick of keepAlive
	used                 // an IO was
	resting              // none was for long: the next one must wake keepAlive
)

// use notes that an IO is submitted. It is called for each one, so it mostly only looks.
func (c *Controller) use() {
	if c.usage.Load() != used && c.usage.Swap(used) == resting {
		select {
		case c.stir <- struct{}{}:
		default:
		}
	}
}

// rests reports whether no IO is under way, and none has been submitted between the last call and
// this one. The next one then writes to stir.
func (c *Controller) rests() bool {
	if c.usage.Load() == resting {
		return true
	}
	return c.usage.Swap(unused) == unused && c.outstanding.Load() == 0 && c.usage.CompareAndSwap(unused, resting)
}

// keepAlive sends Keep Alive at half of its timeout, or more often if Config says so. If those
// of a whole timeout are unanswered when the next one is due, the session ends.
func (s *session) keepAlive(ctx context.Context) {
	cfg := &s.c.cfg
	every := cfg.AskEvery
	s.c.usage.Store(used)
	ticker := beat.NewTicker(every)
	defer ticker.Stop()
	var sent, answered atomic.Uint32
	var idle, late time.Duration // since one was sent, and since one was sent that is not answered
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.c.stir:
			every = cfg.AskEvery
			ticker.Reset(every)
			continue
		case <-ticker.C:
		}
		if late += every; sent.Load() == answered.Load() {
			late = 0
		}
		if late >= cfg.KATO {
			s.fail(fmt.Errorf("%w within %v", errKeepAlive, cfg.KATO))
			return
		}
		idle += every
		if s.c.rests() && every != cfg.KeepAliveEvery {
			every = cfg.KeepAliveEvery
			ticker.Reset(every)
		}
		if idle < cfg.KeepAliveEvery && s.c.outstanding.Load() == 0 {
			continue
		}
		idle = 0
		var cmd nvmetcp.Command
		cmd.SetOpcode(nvmetcp.AdminKeepAlive)
		cmd.SetSGL(nvmetcp.Transport(0))
		sent.Add(1)
		s.c.hearing.ask()
		s.admin.submit(&request{cmd: cmd, done: func(_ *request, err error) {
			if err == nil {
				answered.Store(sent.Load())
			}
		}})
	}
}

// watch ends the session when a command takes too long. Each queue has a clock that counts
// eighths of the timeout, so that commands need not read the real clock.
func (s *session) watch(ctx context.Context) {
	ticker := beat.NewTicker(max(s.c.cfg.CommandTimeout/8, time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, q := range s.io {
			if q.late(8) {
				s.fail(fmt.Errorf("queue %d: %w, %v", q.id, errSlow, s.c.cfg.CommandTimeout))
			}
		}
	}
}

// late advances the clock and reports whether any command has been in flight for more than
// the given number of ticks.
func (q *queue) late(ticks uint32) bool {
	now := q.clock.Add(1)
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.slots {
		if r := q.slots[i].r; r != nil && now-r.tick > ticks {
			return true
		}
	}
	return false
}

// askForEvent keeps one Asynchronous Event Request outstanding.
func (s *session) askForEvent() {
	var cmd nvmetcp.Command
	cmd.SetOpcode(nvmetcp.AdminAsyncEvent)
	cmd.SetSGL(nvmetcp.Transport(0))
	s.admin.submit(&request{cmd: cmd, done: func(r *request, err error) {
		if err != nil {
			return // the connection is lost, or the controller has no events
		}
		select {
		case s.events <- nvmetcp.ParseEvent(r.result.DW0()):
		default: // so many are queued that everything is scanned anyway
		}
	}})
}

// attend handles events and scans.
func (s *session) attend(ctx context.Context) {
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case e := <-s.events:
			err = s.event(ctx, e)
			s.askForEvent()
		case <-s.scans:
			err = s.rescan(ctx)
		}
		if err != nil && ctx.Err() == nil {
			s.c.cfg.Log.Warn("namespaces not scanned after an event", "subsystem", s.c.cfg.Subsystem, "err", err)
		}
	}
}

// event handles one event. Reading its log page rearms the event.
func (s *session) event(ctx context.Context, e nvmetcp.Event) error {
	s.c.cfg.Log.Debug("event", "subsystem", s.c.cfg.Subsystem, "type", e.Type, "info", e.Info, "log", e.Log)
	switch {
	case e.Type == nvmetcp.EventTypeNotice && e.Info == nvmetcp.NoticeNamespaces:
		if _, err := s.log(ctx, nvmetcp.GetLog{ID: nvmetcp.LogChangedNamespaces, NSID: nvmetcp.AllNamespaces, Length: nvmetcp.ChangedNamespacesSize}); err != nil {
			return err
		}
		return s.rescan(ctx)
	case e.Type == nvmetcp.EventTypeNotice && e.Info == nvmetcp.NoticeANA:
		return s.rescan(ctx) // a scan reads the ANA log
	case e.Log != 0:
		_, err := s.log(ctx, nvmetcp.GetLog{ID: e.Log, NSID: nvmetcp.AllNamespaces, Length: nvmetcp.SmartSize})
		return err
	}
	return nil
}

// rescan scans the namespaces of a session in use.
func (s *session) rescan(ctx context.Context) error {
	found, err := s.scan(ctx)
	if err != nil {
		return err
	}
	c := s.c
	c.mu.Lock()
	if c.session.Load() != s {
		c.mu.Unlock()
		return nil
	}
	c.matchLocked(found, false)
	held := c.held.take()
	c.mu.Unlock()
	c.tellNamespaces()
	for r := held.pop(); r != nil; r = held.pop() {
		c.route(r)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// MultipathConfig configures [Multipath].
type MultipathConfig struct {
	// Quiesce is how long a write waits that was in flight on a lost path, before it is
	// sent over another one. Until then the write may still land through the lost path, and
	// undo a newer one. Quiesce must be longer than the targets take to disconnect a silent
	// host. The wait ends early if the lost path reconnects. Default: twice the longest
	// KATO of the paths.
	Quiesce time.Duration
}

// Paths is a [block.Device] over several controllers that serve one namespace. IO uses one
// path at a time, the best by its ANA state, and moves to another one when that path is
// lost or reports that it cannot serve. While no path serves, IO waits. When every
// controller has been cut or closed, IO fails.
type Paths struct {
	quiesce time.Duration
	pool    sync.Pool

	mu     sync.Mutex
	all    []*path
	active *path
	held   []*journey // wait for any path
	wake   *time.Timer
	wakeAt time.Time // when wake fires; zero: it is not set
}

// path is one of the paths. Its fields are guarded by Paths.mu.
type path struct {
	space   *Namespace
	suspect uint64 // session in which it refused to serve; 0: none
}

// journey is an IO on its way over one or more paths.
type journey struct {
	io      block.IO // the IO that the path gets
	whole   *block.IO
	over    *path
	session uint64    // of the path, at the time of sending
	after   time.Time // earliest time to send it over another path
}

// Multipath makes a device of the same namespace of several controllers. All must have the
// same UUID, NGUID and block size.
func Multipath(cfg MultipathConfig, spaces ...*Namespace) (*Paths, error) {
	if len(spaces) == 0 {
		return nil, errors.New("multipath: no path")
	}
	p := &Paths{quiesce: cfg.Quiesce}
	first := spaces[0].Info()
	if first.UUID.IsZero() && first.NGUID == [16]byte{} {
		return nil, fmt.Errorf("multipath: %v has neither UUID nor NGUID", spaces[0])
	}
	for _, n := range spaces {
		if i := n.Info(); i.UUID != first.UUID || i.NGUID != first.NGUID || i.shift != first.shift {
			return nil, fmt.Errorf("multipath: %v is not %v", n, spaces[0])
		}
		p.all = append(p.all, &path{space: n})
		if cfg.Quiesce == 0 {
			p.quiesce = max(p.quiesce, 2*n.controller.cfg.KATO)
		}
	}
	p.pool.New = func() any {
		j := new(journey)
		j.io.Done, j.io.Owner = p.arrived, j
		return j
	}
	for _, way := range p.all {
		way.space.controller.watch(func() { p.changed(way) })
	}
	return p, nil
}

// Geometry is that of the active path, with the smallest size that any usable path reports:
// after a namespace grows, the paths learn its size one after the other.
func (p *Paths) Geometry() block.Geometry {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.active == nil {
		return p.all[0].space.Geometry()
	}
	g := p.active.space.Geometry()
	for _, way := range p.all {
		if way.rank() < 3 {
			g.Size = min(g.Size, way.space.Geometry().Size)
		}
	}
	return g
}

// Active is the path that IO uses, or nil.
func (p *Paths) Active() *Namespace {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.chooseLocked() == nil {
		return nil
	}
	return p.active.space
}

// Submit starts an IO: see [block.Device].
func (p *Paths) Submit(io *block.IO) {
	j := p.pool.Get().(*journey)
	j.whole, j.over, j.after = io, nil, time.Time{}
	j.io.Op, j.io.FUA, j.io.Unmap, j.io.Off, j.io.Len, j.io.Data = io.Op, io.FUA, io.Unmap, io.Off, io.Len, io.Data
	p.send(j)
}

// send sends j over the best path, or keeps it until there is one.
func (p *Paths) send(j *journey) {
	p.mu.Lock()
	way := p.chooseLocked()
	switch {
	case way == nil && p.closedLocked():
		p.mu.Unlock()
		p.finish(j, block.ErrGone)
		return
	case way == nil || p.waitsLocked(j):
		p.held = append(p.held, j)
		p.mu.Unlock()
		return
	}
	j.over, j.session, j.after = way, way.session(), time.Time{}
	p.mu.Unlock()
	way.space.submit(&j.io, true)
}

// waitsLocked reports whether j must not be sent yet. If so, it sets the timer that tries j
// again.
func (p *Paths) waitsLocked(j *journey) bool {
	wait := time.Until(j.after)
	if wait <= 0 || waited(j) {
		return false
	}
	switch {
	case p.wake == nil:
		p.wake, p.wakeAt = time.AfterFunc(wait, p.again), j.after
	case p.wakeAt.IsZero() || j.after.Before(p.wakeAt):
		p.wake.Reset(wait)
		p.wakeAt = j.after
	}
	return true
}

// waited reports whether j's wait is over because the path that lost it has reconnected:
// its target drained the old commands before it let the host connect.
func waited(j *journey) bool {
	s := j.over.session()
	return s != 0 && s != j.session
}

// chooseLocked makes the best path the active one; nil if none serves.
func (p *Paths) chooseLocked() *path {
	best, rank := p.active, 3
	if best != nil {
		rank = best.rank()
	}
	for _, way := range p.all {
		if r := way.rank(); r < rank {
			best, rank = way, r
		}
	}
	p.active = best
	if rank == 3 {
		p.active = nil
	}
	return p.active
}

// session is the number of the path's session, or 0.
func (w *path) session() uint64 {
	if s := w.space.controller.session.Load(); s != nil {
		return s.number
	}
	return 0
}

// rank is how good a path is: 0 is best, 3 unusable.
func (w *path) rank() int {
	a := w.space.state.Load()
	if s := w.session(); s == 0 || s == w.suspect || !a.present {
		return 3
	}
	switch a.ANAState {
	case nvmetcp.ANAStateOptimized:
		return 0
	case nvmetcp.ANAStateNonOptimized:
		return 1
	}
	return 3
}

func (p *Paths) closedLocked() bool {
	for _, way := range p.all {
		if way.space.controller.ctx.Err() == nil && way.space.gone() == nil {
			return false
		}
	}
	return true
}

// changed is called when a path's state or namespaces changed.
func (p *Paths) changed(way *path) {
	p.mu.Lock()
	way.suspect = 0
	p.mu.Unlock()
	p.again()
}

// again tries to send everything that is held.
func (p *Paths) again() {
	p.mu.Lock()
	held := p.held
	p.held, p.wakeAt = nil, time.Time{}
	p.mu.Unlock()
	for _, j := range held {
		p.send(j)
	}
}

// arrived is called by a path that has finished with a journey.
func (p *Paths) arrived(io *block.IO) {
	j := io.Owner.(*journey)
	var status nvmetcp.Status
	switch err := io.Err; {
	case err == nil:
		p.finish(j, nil)
		return
	case errors.Is(err, errLost), errors.Is(err, block.ErrGone):
		if io.Op != block.OpRead && io.Op != block.OpMap {
			j.after = time.Now().Add(p.quiesce)
		}
	case errors.Is(err, errUnsent):
		p.avoid(j)
	case errors.As(err, &status) && status.IsPath():
		p.avoid(j)
		j.over.space.controller.Rescan() // reports when the path may be tried again
	default:
		p.finish(j, err)
		return
	}
	p.send(j)
}

// avoid keeps IO off the path that refused j, until the path changes.
func (p *Paths) avoid(j *journey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	j.over.suspect = j.session
}

func (p *Paths) finish(j *journey, err error) {
	io := j.whole
	j.whole, j.over, j.io.Data = nil, nil, nil
	p.pool.Put(j)
	io.Complete(err)
}

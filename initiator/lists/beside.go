// SPDX-License-Identifier: Apache-2.0

package lists

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/host"
)

// Beside is the agent beside the kernel's target of a subsystem. That target keeps the controller of a host
// that connects again, so a write that was delayed there could land after its retry on the new connection. The
// agent can have the host's controllers ended first. Its methods may be called concurrently.
type Beside struct {
	pool  *Pool
	where Where
	heard atomic.Bool

	mu       sync.Mutex
	asked    time.Time
	asking   bool
	promised bool
	reached  time.Time // when the agent was told to replace something that it still replaces
}

// workPatience is how long an agent that was reached is not asked for a sign of life: what it does waits for the
// drives, and on a busy machine for a processor.
const workPatience = time.Second

// askAgain is how often it is asked what the agent offers: it may be replaced by another version.
const askAgain = 10 * time.Second

// Beside returns what answers beside the target of a subsystem. Nothing is asked yet.
func (p *Pool) Beside(w Where) *Beside { return &Beside{pool: p, where: w} }

// Replaces reports whether the agent offers to end the host's controllers in the kernel, as far as is known. It
// does not wait: it has the agent asked from time to time.
func (b *Beside) Replaces() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.asking && (b.asked.IsZero() || time.Since(b.asked) >= askAgain) {
		b.asking = true
		go b.ask()
	}
	return b.promised
}

// ask asks what the agent offers. One that is not reached has not changed its mind.
func (b *Beside) ask() {
	ctx, cancel := context.WithTimeout(context.Background(), connectTimeout)
	defer cancel()
	c, err := b.pool.connected(ctx, b.where)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asking, b.asked = false, time.Now()
	switch {
	case err == nil:
		b.promised = c.Replacer()
	case errors.Is(err, syscall.ECONNREFUSED): // nobody listens
		b.promised = false
	}
}

// Replace has the host's controllers ended. When it returns nil, their commands have left the drives, and the host
// can connect to the part of the target that serves the subsystem from then on. The agent is asked beside a portal of
// the kernel's: the one to which the host is about to connect, since another one may be silent, or on which it is.
func (b *Beside) Replace(ctx context.Context, through block.Portal, by block.ServedBy) error {
	w := b.where
	w.Portals = append([]block.Portal{through}, slices.DeleteFunc(slices.Clone(w.Portals), func(p block.Portal) bool { return p.HostPort() == through.HostPort() })...)
	connect := b.pool.connectAnew
	if by != block.SamePart { // nothing is known to be silent
		connect = b.pool.connected
	}
	c, err := connect(ctx, w)
	if err != nil {
		return fmt.Errorf("ask beside the target of %s: %w", w.Subsystem, err)
	}
	b.heard.Store(true)
	b.works(time.Now())
	defer b.works(time.Time{})
	return c.Replace(ctx, by)
}

func (b *Beside) works(since time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reached = since
}

// Heard reports whether the agent has answered, when it was to replace something, since the last call. While it
// replaces something it counts as heard, for a second at most.
func (b *Beside) Heard() bool {
	b.mu.Lock()
	works := !b.reached.IsZero() && time.Since(b.reached) < workPatience
	b.mu.Unlock()
	return b.heard.Swap(false) || works
}

// connected is connect, and connectAnew if that connection was lost: is anybody still there?
func (p *Pool) connected(ctx context.Context, w Where) (*host.Controller, error) {
	c, err := p.connect(ctx, w)
	if err == nil && c.Session() == 0 {
		return p.connectAnew(ctx, w)
	}
	return c, err
}

// connectAnew is connect without the connection that there was, which may lead through a silent portal.
func (p *Pool) connectAnew(ctx context.Context, w Where) (*host.Controller, error) {
	p.mu.Lock()
	if old := p.conns[w.Subsystem]; old != nil {
		delete(p.conns, w.Subsystem)
		go old.close()
	}
	p.mu.Unlock()
	return p.connect(ctx, w)
}

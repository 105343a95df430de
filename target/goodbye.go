// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"
)

// An agent whose exports end when it stops says so first, and serves on until no host uses a leg
// here that it can do without:
//
//	stop asked ──► report: stopping ──► manager: legs stale ──► hosts leave them out
//	                                                                 │
//	exports end ◄────────────── wanted state: may stop ◄─────────────┘
//
// So no write waits for the stop. It is a courtesy, not a promise: after goodbyeFor, or when the
// stream to the manager ends, the agent stops all the same, and hosts notice that as they notice a
// crash.

// goodbyeFor bounds how long an agent that is asked to stop serves on.
const goodbyeFor = 3 * time.Second

// untilGoodbye returns a context that ends once ctx has ended and hosts were given the time to
// leave the exports, with the cause of ctx. If another process takes over, they need not leave.
func (a *Agent) untilGoodbye(ctx context.Context) (context.Context, context.CancelFunc) {
	serving, end := context.WithCancelCause(context.WithoutCancel(ctx))
	release := context.AfterFunc(ctx, func() {
		if !handsOver(ctx) {
			a.goodbye(serving)
		}
		end(context.Cause(ctx))
	})
	return serving, func() { release(); end(nil) }
}

// goodbye tells the manager that the exports are about to end, and returns when they may.
func (a *Agent) goodbye(ctx context.Context) {
	if a.config.Goodbye == nil || !a.config.Goodbye(ctx) || !a.part() {
		return
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, goodbyeFor)
	defer cancel()
	select {
	case <-a.parted:
	case <-ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.log.Info("hosts were asked to leave the exports", "left", a.wanted.GetMayStop(), "after", time.Since(began).Round(time.Millisecond))
}

// part has all reports from now on say that the agent is stopping. It returns false if there is
// no export that ends with it, or no manager to tell.
func (a *Agent) part() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.heard || a.leaving.Load() || len(a.report.GetExports()) == 0 {
		return false
	}
	a.stopping = true
	a.publishLocked(proto.CloneOf(a.report))
	return true
}

func (a *Agent) isStopping() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stopping
}

// conversing notes whether a manager is listening, and whether it says that the agent may stop. An
// agent that is stopping does not wait for another manager.
func (a *Agent) conversing(heard, mayStop bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.heard = heard; a.stopping && (mayStop || !heard) {
		poke(a.parted)
	}
}

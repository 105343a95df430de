// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/pb"
)

// An agent whose exports end when it stops says so first, and serves on until no host uses a leg
// here that it can do without. Where some are the kernel's, that concerns the others, unless the machine stops:
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
	if a.config.Goodbye == nil || !a.part(a.config.Goodbye(ctx)) {
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
// no export that ends with it, or no manager to tell. all: the kernel's exports end too.
func (a *Agent) part(all bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	all = all && !a.leaving.Load() // what is left in the kernel stays there
	ends := all && len(a.report.GetExports()) > 0 || a.beside
	if !a.heard || !ends {
		return false
	}
	a.stopping, a.allStop = true, all
	a.publishLocked(proto.CloneOf(a.report))
	return true
}

// sayStopping has a report say whether the agent is stopping. beside: the process exports something beside the
// kernel.
func (a *Agent) sayStopping(r *pb.TargetReport, beside bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.beside = beside
	a.sayStoppingLocked(r)
}

func (a *Agent) sayStoppingLocked(r *pb.TargetReport) {
	r.Stopping, r.ProcessStops = a.stopping && a.allStop, a.stopping && !a.allStop
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

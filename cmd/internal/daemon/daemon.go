// SPDX-License-Identifier: Apache-2.0

// Package daemon is the plumbing shared by all of Weft's daemons; operators' commands use its
// dialer too.
//
//	Run        starts the parts of a daemon and stops them in reverse order
//	Dial       a connection to the volume manager: TLS, keepalive, back-off
//	NewServer  a gRPC server with the same, health and metrics
//	Options    flags for logs and metrics
//	Watchdog   tells systemd that the daemon is alive
//	Successor  the next process of a daemon, to which it hands over
//
// It knows nothing of volumes. Only Run starts goroutines that outlive a call.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"weft.dev/weft/proto/beat"
)

// Part is something that runs until its context ends.
type Part struct {
	Name string
	Run  func(context.Context) error
}

// running is a part that Run has started.
type running struct {
	Part
	stop context.CancelFunc
	done chan struct{}
	err  error // valid once done is closed
}

// Run starts the parts and waits until ctx ends or one of them returns. Then it stops them one at a
// time, the last first: until a part has returned, it may rely on those before it. The result is
// nil if all stopped because they were told to, and wraps ErrHandOver if a part has returned that.
func Run(ctx context.Context, log *slog.Logger, parts ...Part) error {
	if name, err := os.Hostname(); err == nil {
		beat.Spread(name)
	}
	ended := make(chan *running, len(parts))
	var all []*running
	for _, p := range parts {
		// Each part is stopped in its turn, not by ctx.
		partCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
		r := &running{Part: p, stop: stop, done: make(chan struct{})}
		all = append(all, r)
		go func() {
			r.err = r.Run(partCtx)
			close(r.done)
			ended <- r
		}()
	}
	notify(log, "READY=1")
	var first *running
	select {
	case <-ctx.Done():
		log.Info("stopping")
	case first = <-ended:
		if errors.Is(first.err, ErrHandOver) {
			log.Info("handing over") // for systemd, the daemon goes on
			return stopAll(all, first)
		}
		log.Error("part ended, stopping", "part", first.Name, "err", first.err)
	}
	notify(log, "STOPPING=1")
	return stopAll(all, first)
}

func stopAll(all []*running, first *running) error {
	var errs []error
	if first != nil && first.err == nil {
		errs = append(errs, fmt.Errorf("%s: ended by itself", first.Name))
	}
	for _, r := range slices.Backward(all) {
		r.stop()
		<-r.done
		if r.err != nil && !errors.Is(r.err, context.Canceled) {
			errs = append(errs, fmt.Errorf("%s: %w", r.Name, r.err))
		}
	}
	return errors.Join(errs...)
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
)

type stream = *parts.Stream[*pb.TargetReport, *pb.TargetWanted]

// converse keeps a stream to the manager open, for ever. While there is none, the last wanted state
// stays valid.
func (a *Agent) converse(ctx context.Context) error {
	a.awaitSettled(ctx) // a report before that would lack exports
	var pauses managers.Pauses
	for {
		start := time.Now()
		err := a.talk(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		wait := pauses.After(start, time.Now(), rand.Float64())
		if other, refused := pb.OtherCluster(err); refused {
			a.obeyed(other, err.Error())
		} else if errors.Is(err, authority.ErrReplaced) {
			a.replaced(err)
		} else {
			a.log.Warn("stream to the manager ended", "again_in", wait, "err", err)
		}
		if !sleep(ctx, wait) {
			return context.Cause(ctx)
		}
	}
}

func (a *Agent) talk(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	open, err := a.config.Manager.Target(ctx)
	if err != nil {
		return fmt.Errorf("open stream: %w", err)
	}
	s := parts.Reporting(open)
	listened := make(chan struct{})
	go func() {
		defer close(listened)
		cancel(a.listen(s))
	}()
	err = a.tell(ctx, s)
	cancel(err)
	<-listened
	a.conversing(false, false)
	return err
}

// tell sends the report whenever it changes, and a sign of life each second.
func (a *Agent) tell(ctx context.Context, s stream) error {
	timer := beat.NewTicker(reportEvery)
	defer timer.Stop()
	for {
		report, changed := a.currentReport()
		if report != nil {
			if err := s.Send(report); err != nil {
				if errors.Is(err, io.EOF) { // the receiver sees the cause
					<-ctx.Done()
					return context.Cause(ctx)
				}
				return fmt.Errorf("send report: %w", err)
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		case <-changed:
		}
	}
}

func (a *Agent) currentReport() (*pb.TargetReport, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.report, a.changed
}

// listen stores the wanted states from the stream until it ends.
func (a *Agent) listen(s stream) error {
	for {
		w, err := s.Recv()
		if err != nil {
			return fmt.Errorf("receive the wanted state: %w", err)
		}
		if err := a.newest.Check(authority.OrderOf(w)); err != nil {
			return err // the last wanted state stays valid
		}
		a.mu.Lock()
		news := !proto.Equal(a.wanted, w)
		a.wanted, a.behind = w, ""
		a.mu.Unlock()
		a.conversing(true, w.GetMayStop())
		if news {
			a.log.Debug("wanted state", "generation", w.GetGeneration())
			poke(a.wake)
		}
	}
}

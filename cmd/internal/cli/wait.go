// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// PollEvery is how often a wait asks again. Its subject (zeroing, a resync) progresses without
// events, so the command has to poll.
const PollEvery = 500 * time.Millisecond

// RequestStands is the hint of a wait that ended early.
const RequestStands = "the request stands; repeat the command to keep waiting"

// Wait asks until nothing is left to wait for, and tells a person whenever the reason changes. The
// request is recorded, so a manager that goes away and comes back does not end the wait. stands is
// the hint if --timeout or Ctrl-C ends it early.
func Wait(ctx context.Context, out *Output, stands string, ask func(context.Context) (waitingFor string, err error)) error {
	tick := time.NewTicker(PollEvery)
	defer tick.Stop()
	said := ""
	for {
		waitingFor, err := ask(ctx)
		switch {
		case ctx.Err() != nil:
			return waitEnded(ctx, said, stands)
		case status.Code(err) == codes.Unavailable:
			waitingFor = status.Convert(err).Message()
		case err != nil:
			return err
		case waitingFor == "":
			return nil
		}
		if waitingFor != said {
			said = waitingFor
			out.Say("waiting for %s", said)
		}
		select {
		case <-ctx.Done():
			return waitEnded(ctx, said, stands)
		case <-tick.C:
		}
	}
}

// waitEnded distinguishes a wait that took too long from an interrupted one.
func waitEnded(ctx context.Context, waitingFor, stands string) error {
	if ctx.Err() == context.DeadlineExceeded {
		return timedOutError{waitingFor: waitingFor, hint: stands}
	}
	return interruptedError{waitingFor: waitingFor, hint: stands}
}

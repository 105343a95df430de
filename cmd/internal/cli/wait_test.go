// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// asked answers one text or error after another, then the last for ever.
func asked(answers ...any) func(context.Context) (string, error) {
	return func(context.Context) (string, error) {
		next := answers[0]
		if len(answers) > 1 {
			answers = answers[1:]
		}
		if err, ok := next.(error); ok {
			return "", err
		}
		return next.(string), nil
	}
}

func TestWaitTellsEachReasonOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var stderr bytes.Buffer
		out := &Output{Stdout: io.Discard, Stderr: &stderr, Now: time.Now}
		err := Wait(t.Context(), out, "", asked("node t1", "node t1", status.Error(codes.Unavailable, "volume manager at m1: gone"), "leg 3", ""))
		want := "weft: waiting for node t1\nweft: waiting for volume manager at m1: gone\nweft: waiting for leg 3\n"
		if err != nil || stderr.String() != want {
			t.Errorf("wait = %v, telling %q; want nil, telling %q", err, stderr.String(), want)
		}
	})
}

func TestWaitEndsByErrorTimeoutOrSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quiet := &Output{Format: FormatJSON, Stdout: io.Discard, Stderr: io.Discard, Now: time.Now}
		refused := status.Error(codes.FailedPrecondition, "no")
		if err := Wait(t.Context(), quiet, "", asked("node t1", refused)); !errors.Is(err, refused) {
			t.Errorf("wait = %v, want %v", err, refused)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		err := Wait(ctx, quiet, "", asked("node t1"))
		if timeout, ok := errors.AsType[timedOutError](err); !ok || timeout.waitingFor != "node t1" {
			t.Errorf("wait = %v, want timed out waiting for node t1", err)
		}
		stopped, stop := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { stop(ErrInterrupted) })
		err = Wait(stopped, quiet, "the detach goes on", asked("node t1"))
		if ExitCode(err) != ExitInterrupted {
			t.Errorf("wait = %v, want %v", err, ErrInterrupted)
		}
		want := Report{Error: "interrupted while waiting for node t1", Hints: []string{"the detach goes on"}, Code: ExitInterrupted}
		if got := NewReport(err); !cmp.Equal(got, want) {
			t.Errorf("newReport(%v) = %+v, want %+v", err, got, want)
		}
	})
}

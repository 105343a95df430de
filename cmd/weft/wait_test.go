// SPDX-License-Identifier: Apache-2.0

package main

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
		out := &output{stdout: io.Discard, stderr: &stderr, now: time.Now}
		err := wait(t.Context(), out, "", asked("node t1", "node t1", status.Error(codes.Unavailable, "volume manager at m1: gone"), "leg 3", ""))
		want := "weft: waiting for node t1\nweft: waiting for volume manager at m1: gone\nweft: waiting for leg 3\n"
		if err != nil || stderr.String() != want {
			t.Errorf("wait = %v, telling %q; want nil, telling %q", err, stderr.String(), want)
		}
	})
}

func TestWaitEndsByErrorTimeoutOrSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quiet := &output{format: formatJSON, stdout: io.Discard, stderr: io.Discard, now: time.Now}
		refused := status.Error(codes.FailedPrecondition, "no")
		if err := wait(t.Context(), quiet, "", asked("node t1", refused)); !errors.Is(err, refused) {
			t.Errorf("wait = %v, want %v", err, refused)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		err := wait(ctx, quiet, "", asked("node t1"))
		if timeout, ok := errors.AsType[timedOutError](err); !ok || timeout.waitingFor != "node t1" {
			t.Errorf("wait = %v, want timed out waiting for node t1", err)
		}
		stopped, stop := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { stop(errInterrupted) })
		err = wait(stopped, quiet, "the detach goes on", asked("node t1"))
		if exitCode(err) != exitInterrupted {
			t.Errorf("wait = %v, want %v", err, errInterrupted)
		}
		want := report{Error: "interrupted while waiting for node t1", Hints: []string{"the detach goes on"}, Code: exitInterrupted}
		if got := newReport(err); !cmp.Equal(got, want) {
			t.Errorf("newReport(%v) = %+v, want %+v", err, got, want)
		}
	})
}

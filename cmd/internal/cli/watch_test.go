// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestAScreenOfNoTerminalPrintsOneAfterAnother(t *testing.T) {
	var to bytes.Buffer
	s := NewScreen(&to)
	for _, text := range []string{"A\n1\n", "A\n2\n"} {
		if err := s.Show(text); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := to.String(), "A\n1\n\nA\n2\n"; got != want || s.IsTerminal() {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestATerminalShowsWhatFits(t *testing.T) {
	if got, want := inPlace("A\nB\nC\nD\n", 4, false), "\x1b[HA\x1b[K\nB\x1b[K\nC\x1b[K\n\x1b[J"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := inPlace("A", 4, true), "\x1b[2J\x1b[HA\x1b[K\x1b[J"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestARepeatedViewSurvivesErrorsButTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := errors.New("no answer")
		if err := Repeat(t.Context(), func(context.Context) error { return bad }, nil); !errors.Is(err, bad) {
			t.Errorf("Repeat = %v, want the first error", err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(9*time.Second, func() { cancel(ErrInterrupted) })
		calls, failed := 0, 0
		err := Repeat(ctx, func(context.Context) error {
			if calls++; calls == 3 {
				return bad
			}
			return nil
		}, func(error) { failed++ })
		if !errors.Is(err, ErrInterrupted) || calls != 5 || failed != 1 {
			t.Errorf("Repeat = %v after %d calls and %d errors; want it interrupted after 5 and 1", err, calls, failed)
		}
	})
}

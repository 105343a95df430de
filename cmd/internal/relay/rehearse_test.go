// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// A program that can serve, hand over and serve again is let through.
func TestAProgramRehearses(t *testing.T) {
	var log bytes.Buffer
	if err := rehearse(t.Context(), slog.New(slog.NewTextHandler(&log, nil))); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), "msg=rehearsed") {
		t.Errorf("it says:\n%s", log.String())
	}
}

// A program that acknowledges writes and does not keep them must not take over.
func TestAProgramThatLosesWritesIsFoundOut(t *testing.T) {
	s, err := setStage()
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	s.medium = func(_ string, data block.Device) block.Device { return forgetful{data} }
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.play(ctx); err == nil || !strings.Contains(err.Error(), "does not hold what was written") {
		t.Errorf("rehearsed with a drive that forgets: %v", err)
	}
}

// forgetful acknowledges writes and drops them.
type forgetful struct{ block.Device }

// Submit implements [block.Device].
func (f forgetful) Submit(io *block.IO) {
	if io.Op == block.OpWrite {
		io.Done(io)
		return
	}
	f.Device.Submit(io)
}

// Nor must one that cannot write.
func TestAProgramThatCannotWriteIsFoundOut(t *testing.T) {
	s, err := setStage()
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	s.medium = func(_ string, data block.Device) block.Device { return forbidden{data} }
	if err := s.play(t.Context()); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("rehearsed with a drive that cannot be written: %v", err)
	}
}

// forbidden fails writes.
type forbidden struct{ block.Device }

// Submit implements [block.Device].
func (f forbidden) Submit(io *block.IO) {
	if io.Op == block.OpWrite {
		io.Complete(syscall.EPERM)
		return
	}
	f.Device.Submit(io)
}

// One that does not serve at all is not waited for.
func TestARehearsalIsBounded(t *testing.T) {
	s, err := setStage()
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	s.listener.Close()
	late := errors.New("not in time")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, late)
	defer cancel()
	if err := s.play(ctx); !errors.Is(err, late) {
		t.Errorf("rehearsed where nobody listens: %v", err)
	}
}

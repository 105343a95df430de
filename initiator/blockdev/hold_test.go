// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// startHolder runs a holder in this process, for a run directory of its own.
func startHolder(t *testing.T) Options {
	t.Helper()
	dir, err := os.MkdirTemp("", "hold")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := do(func() error { return Hold(ctx, HoldOptions{RunDir: dir}) })
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	o, err := Options{Name: "db1", RunDir: dir, Resume: "token", ResumeWithin: time.Hour}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		c, err := connectHolder(dir)
		if err == nil {
			c.Close()
			return o
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// pipe returns the reading end of a pipe, and the writing end's descriptor.
func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// closed reports whether nobody has the other end of a pipe open any more.
func closed(t *testing.T, r *os.File) bool {
	t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	_, err := r.Read(make([]byte, 1))
	return errors.Is(err, io.EOF)
}

func TestAHolderKeepsWhatAProcessLeavesForItsTokenAlone(t *testing.T) {
	o := startHolder(t)
	r, w := pipe(t)
	h, err := holdDevice(t.Context(), o, []int{int(w.Fd())})
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	h.leave() // the process dies
	if closed(t, r) {
		t.Fatal("the holder did not keep the descriptor")
	}
	other := o
	other.Resume = "another"
	if fds, err := takeHeld(t.Context(), other); err == nil {
		closeAll(fds)
		t.Error("a device was given to a process with another token")
	}
	fds, err := takeHeld(t.Context(), o)
	if err != nil || len(fds) != 1 {
		t.Fatalf("taken: %v, %v", fds, err)
	}
	h, err = holdDevice(t.Context(), o, fds)
	serving.forget(fds...)
	closeAll(fds)
	if err != nil {
		t.Fatal(err)
	}
	if closed(t, r) {
		t.Error("the holder did not keep what the next process gave it")
	}
	h.drop(t.Context())
	if !closed(t, r) {
		t.Error("the holder keeps a device that is gone")
	}
}

func TestAHoldersTimeBeginsWithTheDeathAndEndsWithTheNextProcess(t *testing.T) {
	o := startHolder(t)
	o.ResumeWithin = 300 * time.Millisecond
	r, w := pipe(t)
	h, err := holdDevice(t.Context(), o, []int{int(w.Fd())})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * o.ResumeWithin)
	if closed(t, r) {
		t.Fatal("the time of a living process's device has ended")
	}
	h.leave()
	h, err = holdDevice(t.Context(), o, []int{int(w.Fd())})
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	time.Sleep(2 * o.ResumeWithin)
	if closed(t, r) {
		t.Fatal("the time of a device that was taken over went on")
	}
	h.leave()
	time.Sleep(2 * o.ResumeWithin)
	if !closed(t, r) {
		t.Error("a device that nobody took over is kept")
	}
}

func TestARunDirectoryHasOneHolder(t *testing.T) {
	o := startHolder(t)
	if err := Hold(t.Context(), HoldOptions{RunDir: o.RunDir}); err != nil {
		t.Error(err)
	}
	if c, err := connectHolder(o.RunDir); err != nil {
		t.Errorf("the first holder does not answer any more: %v", err)
	} else {
		c.Close()
	}
}

func TestAHolderAnswersWhatItDoesNotKnow(t *testing.T) {
	o := startHolder(t)
	c, err := connectHolder(o.RunDir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := callHolder(t.Context(), c, holdMessage{Do: "dance"}, nil); err == nil || errors.Is(err, net.ErrClosed) {
		t.Errorf("an unknown request = %v, want an answer that says so", err)
	}
}

func TestAHolderWithNothingToHoldEnds(t *testing.T) {
	dir := t.TempDir()
	ended := do(func() error { return Hold(t.Context(), HoldOptions{RunDir: dir, Linger: 50 * time.Millisecond}) })
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("an idle holder goes on")
	}
}

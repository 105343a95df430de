// SPDX-License-Identifier: Apache-2.0

// Package relay replaces a daemon's process by its next one, without an end of what it serves: see
// package daemon for how the two find each other, and package target for what is handed over.
//
// On SIGUSR2 the process starts the program that is installed now. Until that has taken over, this
// process goes on serving, or does so again:
//
//	the next process                        this process
//	-----------------------------------------------------------------------
//	does not start, or not in time          has never stopped
//	cannot serve, see rehearse.go           has never stopped
//	dies before it has taken over           takes over from itself
//	dies later                              has ended: systemd starts anew
package relay

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/target"
)

// Target is a target agent that may have taken over from a previous process, and hands over to the next
// one on SIGUSR2.
type Target struct {
	*target.Agent
	log      *slog.Logger
	program  string // where this one was at its start: another one may be there now
	serves   string // the data path
	signals  chan os.Signal
	previous *daemon.Predecessor // nil: an ordinary start
	next     *daemon.Successor   // nil: it does not hand over
	own      *target.Estate      // of this process, which no other one has taken; nil: there is none
}

// New returns a relay without an agent. From here on SIGUSR2 ends the process no more.
func New() (*Target, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	r := &Target{program: program, signals: make(chan os.Signal, 1)}
	signal.Notify(r.signals, syscall.SIGUSR2)
	r.previous, err = daemon.FindPredecessor()
	return r, err
}

// Followed reports whether systemd runs this process, and follows it to the next one.
func Followed() bool { return os.Getenv("NOTIFY_SOCKET") != "" && os.Getpid() != 1 }

// TakesOver reports whether another process serves until this one is ready.
func (r *Target) TakesOver() bool { return r.previous != nil }

// Datapath is the data path to choose: that of the previous process stays.
func (r *Target) Datapath(wish string) string {
	switch {
	case r.own != nil:
		return r.serves
	case r.previous != nil:
		return r.previous.Note
	}
	return wish
}

// With waits until the previous process has handed over, if there is one, and passes that on to a.
func (r *Target) With(ctx context.Context, a *target.Agent, datapath string, log *slog.Logger) (*Target, error) {
	r.Agent, r.serves, r.log = a, datapath, log
	switch {
	case r.own != nil:
		estate := *r.own
		r.own = nil
		return r, a.Inherit(estate)
	case r.previous == nil:
		return r, nil
	}
	if err := a.Prepare(ctx, r.previous.Draft); err != nil {
		return nil, err
	}
	if a.Serves(r.previous.Draft) {
		if err := rehearse(ctx, r.log); err != nil {
			return nil, err
		}
	}
	message, sockets, err := r.previous.Take(ctx)
	if err != nil {
		return nil, err
	}
	estate, err := target.Unpack(message, sockets)
	if err != nil {
		return nil, err
	}
	if err := a.Inherit(estate); err != nil {
		return nil, err
	}
	return r, r.previous.Accept()
}

// Run runs the agent. It returns daemon.ErrHandOver when everything is ready for the next process.
func (r *Target) Run(ctx context.Context) error {
	serving, end := context.WithCancelCause(ctx)
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		if r.await(serving) {
			end(target.ErrHandOver)
		}
	}()
	err := r.Agent.Run(serving)
	end(nil)
	<-waited
	switch {
	case errors.Is(context.Cause(serving), target.ErrHandOver):
		return daemon.ErrHandOver
	case r.next != nil: // it was stopped in the same moment
		r.next.Abandon()
	}
	return err
}

// await waits until the agent is to hand over and the next process is ready; it returns false if ctx
// ends.
func (r *Target) await(ctx context.Context) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-r.signals:
		}
		if os.Getpid() == 1 {
			r.log.Warn("not handed over: the container would end with its first process")
			continue
		}
		r.log.Info("asked to hand over: starting the next process")
		draft, err := r.rehearsedDraft(ctx)
		if err != nil {
			r.log.Error("not handed over; this process goes on", "err", err)
			continue
		}
		next, err := daemon.StartSuccessor(ctx, r.program, r.serves, draft)
		if err != nil {
			r.log.Error("not handed over; this process goes on", "err", err)
			continue
		}
		r.next = next
		return true
	}
}

// rehearsedDraft returns the draft of what is to be handed over, after a rehearsal if hosts will wait.
func (r *Target) rehearsedDraft(ctx context.Context) ([]byte, error) {
	draft, err := r.Draft()
	if err != nil || !r.Serves(draft) {
		return draft, err
	}
	if err := rehearse(ctx, r.log); err != nil { // to hand over takes longer the first time, too
		r.log.Warn("this process goes on, although it may not hand over well", "err", err)
	}
	return r.Draft()
}

// lastFlush is how long a drive's last flush keeps the process from its end, when another one serves already or
// nobody does. systemd and the kubelet end it earlier.
const lastFlush = 5 * time.Minute

// Serve runs agents: one, and after each handover that fails another one, which takes over from the
// one before it in this process.
func (r *Target) Serve(ctx context.Context, run func() error) error {
	defer func() {
		if r.Agent != nil { // it may have failed to start
			r.AwaitDrives(lastFlush)
		}
	}()
	for {
		err := run()
		if r.next == nil || !errors.Is(err, daemon.ErrHandOver) {
			return err
		}
		if err = r.end(ctx); err == nil || ctx.Err() != nil || r.Lingers() {
			return err
		}
		r.log.Error("not handed over; this process goes on", "err", err)
	}
}

// end passes what the agent has left on to the next process. After an error this process has it.
func (r *Target) end(ctx context.Context) error {
	next, estate := r.next, r.Estate()
	r.next, r.previous, r.own = nil, nil, &estate
	if ctx.Err() != nil { // stopped meanwhile
		next.Abandon()
		return estate.Close()
	}
	message, sockets, err := estate.Pack(next.Connections)
	if err != nil {
		next.Abandon()
		return err
	}
	defer target.CloseAll(sockets)
	if err := next.Give(r.log, message, sockets); err != nil {
		return err
	}
	return estate.Close()
}

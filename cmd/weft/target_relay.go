// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/target"
)

// relay is a target agent that may have taken over from a previous process, and hands over to the next
// one on SIGUSR2.
type relay struct {
	*target.Agent
	log      *slog.Logger
	serves   string // the data path
	signals  chan os.Signal
	previous *daemon.Predecessor // nil: an ordinary start
	next     *daemon.Successor   // nil: it does not hand over
}

func newRelay() (*relay, error) {
	r := &relay{signals: make(chan os.Signal, 1)}
	signal.Notify(r.signals, unix.SIGUSR2)
	var err error
	r.previous, err = daemon.FindPredecessor()
	return r, err
}

// handsOver reports whether systemd runs this process, and follows it to the next one.
func handsOver() bool { return os.Getenv("NOTIFY_SOCKET") != "" && os.Getpid() != 1 }

// datapath is the data path to choose: that of the previous process stays.
func (r *relay) datapath(wish string) string {
	if r.previous != nil {
		return r.previous.Note
	}
	return wish
}

// with waits until the previous process has handed over, if there is one, and passes that on to a.
func (r *relay) with(ctx context.Context, a *target.Agent, datapath string, log *slog.Logger) (*relay, error) {
	r.Agent, r.serves, r.log = a, datapath, log
	if r.previous == nil {
		return r, nil
	}
	message, sockets, err := r.previous.Take(ctx)
	if err != nil {
		return nil, err
	}
	estate, err := target.Unpack(message, sockets)
	if err != nil {
		return nil, err
	}
	return r, a.Inherit(estate)
}

// Run runs the agent. It returns daemon.ErrHandOver when everything is ready for the next process.
func (r *relay) Run(ctx context.Context) error {
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
func (r *relay) await(ctx context.Context) bool {
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
		next, err := daemon.StartSuccessor(ctx, r.serves)
		if err != nil {
			r.log.Error("not handed over; this process goes on", "err", err)
			continue
		}
		r.next = next
		return true
	}
}

// end passes what the agent has left on to the next process, if err says that it hands over.
func (r *relay) end(err error) error {
	if r.next == nil || !errors.Is(err, daemon.ErrHandOver) {
		return err
	}
	estate := r.Estate()
	defer estate.Close() //nolint:errcheck // the next process has the sockets
	message, sockets, err := estate.Pack()
	if err != nil {
		return err
	}
	defer target.CloseAll(sockets)
	return r.next.Give(r.log, message, sockets)
}

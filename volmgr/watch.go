// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/event"
)

// Bounds of watches of events. A watch holds its place in the history and a few events in
// flight, some 250 KiB with its stream.
const (
	watchesMost      = 256 // at once
	watchesMostOfOne = 32  // of one member, or of one connection of who is none
	watchBatch       = 64  // events that are taken from the history at a time
)

// watchPatience is how long a client may take to read an event.
const watchPatience = time.Minute

// reasonTooManyWatches is the reason when a watch is refused for their number.
const reasonTooManyWatches = "TOO_MANY_WATCHES"

// watches counts the open watches.
type watches struct {
	patience time.Duration

	mu  sync.Mutex
	all int
	of  map[string]int // by client
}

// open counts one more watch. The caller calls closeIt when the watch has ended.
func (w *watches) open(client string) (closeIt func(), err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.of[client] >= watchesMostOfOne:
		return nil, tooManyWatches("of this client", watchesMostOfOne)
	case w.all >= watchesMost:
		return nil, tooManyWatches("of this volume manager", watchesMost)
	}
	if w.of == nil {
		w.of = map[string]int{}
	}
	w.all++
	w.of[client]++
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.all--
		if w.of[client]--; w.of[client] == 0 {
			delete(w.of, client)
		}
	}, nil
}

func tooManyWatches(of string, most int) error {
	return &cluster.Error{Kind: cluster.ResourceExhausted, Reason: reasonTooManyWatches,
		Text: fmt.Sprintf("watch events: %d watches %s are open; no more are accepted", most, of),
		Hint: "end one or share one: a watch without an object receives all events"}
}

// watcher is the client that a watch counts for: a member of the cluster, or else a connection.
func watcher(ctx context.Context) string {
	if who, _ := access.From(ctx); who.Kind == access.Node || who.Kind == access.Person {
		return who.String()
	}
	if p, ok := peer.FromContext(ctx); ok {
		return p.Addr.String()
	}
	return ""
}

// WatchEvents sends the events after a sequence number, and then new ones as they happen.
func (m *Manager) WatchEvents(r *pb.WatchEventsRequest, stream grpc.ServerStreamingServer[pb.Event]) error {
	if err := checkRequest(r); err != nil {
		return toStatus(err)
	}
	closeIt, err := m.watches.open(watcher(stream.Context()))
	if err != nil {
		return toStatus(err)
	}
	defer closeIt()
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	// A client that does not read keeps Send waiting, until the stream ends.
	patience := m.watches.patience
	stuck := time.AfterFunc(patience, func() {
		cancel(status.Errorf(codes.Aborted, "no event was read for %v: watch again after the last event that was read", patience))
	})
	stuck.Stop()
	ended := make(chan error, 1)
	go func() {
		ended <- m.tellEvents(ctx, r, func(e event.Event) error {
			stuck.Reset(patience)
			defer stuck.Stop()
			return stream.Send(pbEvent(e))
		})
	}()
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-m.ended:
		err = ErrStopped
	}
	return toStatus(err)
}

// tellEvents passes events to tell until ctx ends. It takes a few of them at a time from the
// history and continues after the last one, so a slow client needs no queue of its own.
func (m *Manager) tellEvents(ctx context.Context, r *pb.WatchEventsRequest, tell func(event.Event) error) error {
	news := make(chan struct{}, 1)
	defer m.look(context.Background(), func() { delete(m.watchers, news) })
	for seen, last := r.AfterSeq, uint64(0); ; {
		var events []event.Event
		var gone error
		if err := m.look(ctx, func() {
			m.watchers[news] = true // again: a manager that has led before has forgotten it
			events, seen, last, gone = m.state.EventsFrom(r.Object, seen, watchBatch)
		}); err != nil {
			return err
		}
		if gone != nil {
			return gone
		}
		for _, e := range events {
			if err := tell(e); err != nil {
				return err
			}
		}
		if seen < last {
			continue
		}
		select {
		case <-news:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

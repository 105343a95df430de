// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/proto/pb"
)

// Times of what pages show by themselves.
const (
	lookEvery  = 2 * time.Second        // for what makes no event, such as the progress of a copy
	settle     = 250 * time.Millisecond // events come in bursts
	watchRetry = time.Second
)

// changes tells the streams of all tabs that something has happened.
type changes struct {
	mu      sync.Mutex
	waiting map[chan struct{}]bool
}

func newChanges() *changes { return &changes{waiting: map[chan struct{}]bool{}} }

// subscribe returns a channel that gets a value after each change, until end is called.
func (c *changes) subscribe() (changed <-chan struct{}, end func()) {
	ch := make(chan struct{}, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting[ch] = true
	return ch, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.waiting, ch)
	}
}

// tell tells all streams.
func (c *changes) tell() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for ch := range c.waiting {
		select {
		case ch <- struct{}{}:
		default: // it has not looked at the last one yet
		}
	}
}

// follow tells of the cluster's events until ctx ends.
func (c *changes) follow(ctx context.Context, api pb.ManagerClient) error {
	for {
		c.watch(ctx, api)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(watchRetry):
		}
	}
}

// watch tells of events until the manager ends the stream.
func (c *changes) watch(ctx context.Context, api pb.ManagerClient) {
	newest, err := api.ListEvents(ctx, &pb.ListEventsRequest{Limit: 1})
	if err != nil {
		return // the pages say so themselves
	}
	var seq uint64
	for _, e := range newest.GetEvents() {
		seq = e.GetSeq()
	}
	stream, err := api.WatchEvents(ctx, &pb.WatchEventsRequest{AfterSeq: seq})
	if err != nil {
		return
	}
	for {
		c.tell() // first for what happened while nobody watched
		if _, err := stream.Recv(); err != nil {
			return
		}
	}
}

// stream sends the live part of a page whenever it differs from what was sent, until the browser
// goes. It resumes by itself: what is sent is the state, not a change of it.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, p page) {
	changed, end := s.changes.subscribe()
	defer end()
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	last := r.Header.Get("Last-Event-ID")
	for {
		kind, text := s.liveOf(r, p)
		if id := kind + hashOf(text); id != last {
			last = id
			if writeEvent(w, kind, id, text) != nil {
				return
			}
		} else if _, err := fmt.Fprint(w, ": still here\n\n"); err != nil {
			return
		}
		if out.Flush() != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
		case <-changed:
			if !pause(r.Context(), settle) {
				return
			}
		}
		if s.sessions.of(r) != s {
			return
		}
	}
}

// liveOf returns the live part of a page as it is now, or why it is not known.
func (s *Server) liveOf(r *http.Request, p page) (kind, text string) {
	v, err := s.load(r, p)
	name := "live"
	if err != nil {
		kind, name = "trouble", "trouble"
		v = &view{Trouble: s.noticeOf(err, "")}
	} else {
		kind = "live"
	}
	var b strings.Builder
	if err := templates[p.name].ExecuteTemplate(&b, name, v); err != nil {
		s.config.Log.Error("render", "page", p.name, "err", err)
		return "trouble", "This page cannot be shown: see the console's log."
	}
	return kind, b.String()
}

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:8])
}

// writeEvent sends one server-sent event.
func writeEvent(w http.ResponseWriter, kind, id, text string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "event: %s\nid: %s\n", kind, id)
	for line := range strings.Lines(text) {
		b.WriteString("data: " + strings.TrimRight(line, "\r\n") + "\n")
	}
	b.WriteString("\n")
	_, err := w.Write([]byte(b.String()))
	return err
}

// pause waits, and reports whether ctx lasts.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"weft.dev/weft/proto/access"
)

// Config is what a console shows, and to whom.
type Config struct {
	Clients
	Who      access.Identity // as whom the clients call
	Managers string          // their addresses
	Version  string          // of this program
	Log      *slog.Logger
	Now      func() time.Time // nil: the clock
	Until    time.Time        // the clients' credential ends; zero: it is renewed
	Close    func() error     // ends the clients when the last session of this person ends; nil: they outlast it
}

// Server shows the cluster to one person.
type Server struct {
	config   Config
	read     *reader
	changes  *changes
	sessions *sessions // of its door
	left     func()    // ends Run
	gone     chan struct{}
}

// NewServer makes a server. Its Run has to run for pages to change by themselves.
func NewServer(c Config) *Server {
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{config: c, read: newReader(c.Clients, c.Now), changes: newChanges(), gone: make(chan struct{})}
	s.left = sync.OnceFunc(func() { close(s.gone) })
	return s
}

// Run follows the cluster's events until ctx ends, so that pages change when something happens.
func (s *Server) Run(ctx context.Context) error { return s.changes.follow(ctx, s.config.Manager) }

// runOwn is Run until the person has left, and ends the clients.
func (s *Server) runOwn(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-s.gone:
			stop()
		case <-ctx.Done():
		}
	}()
	s.Run(ctx) //nolint:errcheck // it ends with ctx
	if err := s.config.Close(); err != nil {
		s.config.Log.Warn("end the connections of a console's session", "err", err)
	}
}

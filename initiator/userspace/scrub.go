// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"sync"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/raid/engine"
)

// firstFindings is how many findings of a scrub are reported. All of them are logged and counted.
const firstFindings = 64

// scrub is a scrub of the engine's that the manager has asked for.
type scrub struct {
	want   volume.Scrub
	engine *engine.Scrub
	cancel context.CancelFunc

	mu      sync.Mutex
	running bool
	done    bool
	found   int
	first   []volume.ScrubFinding
}

// scrub starts or stops a scrub.
func (k *Keeper) scrub(ctx context.Context, o volume.Order) error {
	if start, ok := o.(volume.StartScrub); ok {
		k.startScrub(ctx, start.Scrub)
	} else if k.stack.scrub != nil {
		k.stack.scrub.cancel()
	}
	return nil
}

// startScrub begins to compare the copies of the volume.
func (k *Keeper) startScrub(ctx context.Context, want volume.Scrub) {
	st := k.stack
	s := &scrub{want: want, running: true}
	s.engine = st.volume.NewScrub(engine.ScrubConfig{Rate: want.Rate, Found: func(f engine.Finding) {
		k.log.Error("copies differ or cannot be read", "scrub", want.ID, "column", f.Column, "offset", f.Off, "length", f.Length, "equal", f.Copies, "unreadable", f.Unreadable)
		s.note(f)
		k.Poke()
	}})
	ctx, s.cancel = context.WithCancel(ctx)
	st.scrub = s
	k.log.Info("scrub begins", "scrub", want.ID, "rate", want.Rate)
	go func() {
		defer s.cancel()
		err := s.engine.Run(ctx)
		s.end(err)
		if err != nil && !errors.Is(err, context.Canceled) {
			k.log.Warn("scrub stopped", "scrub", want.ID, "err", err)
		}
		k.Poke()
	}()
}

func (s *scrub) note(f engine.Finding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.found++
	if len(s.first) < firstFindings {
		s.first = append(s.first, volume.ScrubFinding{Column: f.Column, Off: f.Off, Length: f.Length, Equal: f.Copies, Unreadable: f.Unreadable})
	}
}

func (s *scrub) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.done = false, err == nil
}

// seen describes the scrub; nil if there is none.
func (s *scrub) seen() *volume.ScrubSeen {
	if s == nil {
		return nil
	}
	done, alone := s.engine.Progress()
	s.mu.Lock()
	defer s.mu.Unlock()
	return &volume.ScrubSeen{
		ID: s.want.ID, Running: s.running, Done: s.done, Compared: done.Done, Total: done.Total, Alone: alone,
		Found: s.found, FirstFound: s.first[:len(s.first):len(s.first)],
	}
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"slices"
	"sync"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// firstFindings is how many findings of a scrub are reported. All of them are logged and counted.
const firstFindings = 64

// Comparer compares the copies of a volume in use, and repairs them if it can and is to. Its methods may be called
// from any goroutine.
type Comparer interface {
	// Run compares until everything was compared, or ctx ends.
	Run(ctx context.Context) error
	// Progress says how much of a copy of each column was compared, of how much, and for how much of that there
	// was nothing to compare.
	Progress() (done, total, alone block.Size)
	// Position is the place from which another scrub would go on.
	Position() volume.ScrubPosition
	SetRate(block.Size)
	// Asks reports whether it waits for Proceed: the manager has to record what it has found first.
	Asks() bool
	Proceed()
}

// Scrub is a scrub that the manager has asked for, and what it has found. The nil Scrub is none.
type Scrub struct {
	want     volume.Scrub
	run      string // its name
	comparer Comparer
	cancel   context.CancelFunc
	log      *slog.Logger
	poke     func()

	mu       sync.Mutex
	rate     block.Size
	running  bool
	done     bool
	found    int
	settled  int
	repaired int
	first    []volume.ScrubFinding
}

// StartScrub begins to compare the copies of the volume, with what comparer makes; that calls Found and Settled of
// the scrub it is given.
func (k *Keeper) StartScrub(ctx context.Context, want volume.Scrub, comparer func(*Scrub) Comparer) *Scrub {
	s := &Scrub{want: want, run: rand.Text(), rate: want.Rate, running: true, log: k.Log.With("scrub", want.ID), poke: k.Poke}
	s.comparer = comparer(s)
	ctx, s.cancel = context.WithCancel(ctx)
	s.log.Info("scrub begins", "rate", want.Rate, "repair", want.Repair, "column", want.Begin.Column, "offset", want.Begin.Off)
	go func() {
		defer s.cancel()
		err := s.comparer.Run(ctx)
		s.end(err)
		if err != nil && !errors.Is(err, context.Canceled) {
			s.log.Warn("scrub stopped", "err", err)
		}
		s.poke()
	}()
	return s
}

// Apply carries out an order for a scrub that has begun.
func (s *Scrub) Apply(o volume.Order) {
	switch o := o.(type) {
	case volume.StopScrub:
		s.Stop()
	case volume.ProceedScrub:
		s.comparer.Proceed()
	case volume.SetScrubRate:
		s.comparer.SetRate(o.Rate)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.rate = o.Rate
	}
}

// Stop ends the scrub.
func (s *Scrub) Stop() {
	if s != nil {
		s.cancel()
	}
}

// Wanted is s, or nil if s has ended and the manager wants no scrub: another host may go on with it, and what was
// found here would be told twice.
func (s *Scrub) Wanted(w *volume.Wanted) *Scrub {
	if s == nil || w == nil || w.Scrub != nil {
		return s
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running {
		return s
	}
	return nil
}

// Found notes what a comparison has found.
func (s *Scrub) Found(f volume.ScrubFinding) {
	s.log.Error("copies differ or cannot be read", "column", f.Column, "offset", f.Off, "length", f.Length, "equal", f.Equal, "unreadable", f.Unreadable)
	s.mu.Lock()
	s.found++
	if len(s.first) < firstFindings {
		s.first = append(s.first, f)
	}
	s.mu.Unlock()
	s.poke()
}

// Settled notes what became of the next finding.
func (s *Scrub) Settled(f volume.ScrubFinding, o volume.ScrubOutcome, err error) {
	s.log.Warn("repair of a range ended", "column", f.Column, "offset", f.Off, "length", f.Length, "right", f.Right, "outcome", o, "err", err)
	s.mu.Lock()
	if s.settled < len(s.first) {
		f := s.first[s.settled]
		f.Outcome = o
		if err != nil {
			f.Error = err.Error()
		}
		s.first = slices.Clone(s.first) // reports have the old one
		s.first[s.settled] = f
	}
	s.settled++
	if o == volume.ScrubRepaired || o == volume.ScrubGone {
		s.repaired++
	}
	s.mu.Unlock()
	s.poke()
}

func (s *Scrub) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.done = false, err == nil
}

// Seen describes the scrub; nil if there is none.
func (s *Scrub) Seen() *volume.ScrubSeen {
	if s == nil {
		return nil
	}
	done, total, alone := s.comparer.Progress()
	s.mu.Lock()
	defer s.mu.Unlock()
	return &volume.ScrubSeen{
		ID: s.want.ID, Running: s.running, Done: s.done, Compared: done, Total: total, Alone: alone,
		Found: s.found, FirstFound: s.first[:len(s.first):len(s.first)],
		Run: s.run, Rate: s.rate, Repairs: s.want.Repair, Asks: s.comparer.Asks(), Position: s.comparer.Position(),
		Settled: s.settled, Repaired: s.repaired,
	}
}

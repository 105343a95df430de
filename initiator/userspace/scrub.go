// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"sync"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/engine"
)

// firstFindings is how many findings of a scrub are reported. All of them are logged and counted.
const firstFindings = 64

// scrub is a scrub of the engine's that the manager has asked for.
type scrub struct {
	want   volume.Scrub
	run    string // its name
	engine *engine.Scrub
	cancel context.CancelFunc

	mu       sync.Mutex
	rate     block.Size
	running  bool
	done     bool
	found    int
	settled  int
	repaired int
	first    []volume.ScrubFinding
}

// scrub starts or stops a scrub, or tells it what has changed.
func (k *Keeper) scrub(ctx context.Context, o volume.Order) error {
	s := k.stack.scrub
	if start, ok := o.(volume.StartScrub); ok {
		k.startScrub(ctx, start.Scrub)
		return nil
	}
	switch o := o.(type) {
	case volume.StopScrub:
		s.stop()
	case volume.ProceedScrub:
		s.engine.Proceed()
	case volume.SetScrubRate:
		s.engine.SetRate(o.Rate)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.rate = o.Rate
	}
	return nil
}

// stop ends the scrub; nil is none.
func (s *scrub) stop() {
	if s != nil {
		s.cancel()
	}
}

// startScrub begins to compare the copies of the volume.
func (k *Keeper) startScrub(ctx context.Context, want volume.Scrub) {
	st := k.stack
	s := &scrub{want: want, run: rand.Text(), rate: want.Rate, running: true}
	config := engine.ScrubConfig{Rate: want.Rate, From: engine.ScrubPosition(want.Begin), Found: func(f engine.Finding) {
		k.log.Error("copies differ or cannot be read", "scrub", want.ID, "column", f.Column, "offset", f.Off, "length", f.Length, "equal", f.Copies, "unreadable", f.Unreadable)
		s.note(f)
		k.Poke()
	}}
	if want.Repair {
		config.Repair = &engine.Repair{Named: named(want.From, st.wanted.Layout.Stripes), Ask: true, Ended: func(f engine.Finding, o engine.Outcome, err error) {
			k.log.Warn("repair of a range ended", "scrub", want.ID, "column", f.Column, "offset", f.Off, "length", f.Length, "right", f.Right, "outcome", o.String(), "err", err)
			s.settle(o, err)
			k.Poke()
		}}
	}
	s.engine = st.volume.NewScrub(config)
	ctx, s.cancel = context.WithCancel(ctx)
	st.scrub = s
	k.log.Info("scrub begins", "scrub", want.ID, "rate", want.Rate, "repair", want.Repair, "column", want.Begin.Column, "offset", want.Begin.Off)
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
		s.first = append(s.first, volume.ScrubFinding{Column: f.Column, Off: f.Off, Length: f.Length, Equal: f.Copies, Unreadable: f.Unreadable, Right: f.Right})
	}
}

// named are the copies that an operator has named, by column; -1: none.
func named(places []volume.Place, columns int) []int {
	all := slices.Repeat([]int{-1}, columns)
	for _, at := range places {
		all[at.Column] = at.Copy
	}
	return all
}

// outcomes are the words of pb.ScrubOutcome.
var outcomes = map[engine.Outcome]volume.ScrubOutcome{
	engine.NotKnown: "not_known", engine.Repaired: "repaired", engine.Gone: "gone", engine.NotRepaired: "not_repaired",
}

// settle notes what became of the next finding.
func (s *scrub) settle(o engine.Outcome, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settled < len(s.first) {
		f := s.first[s.settled]
		f.Outcome = outcomes[o]
		if err != nil {
			f.Error = err.Error()
		}
		s.first = slices.Clone(s.first) // reports have the old one
		s.first[s.settled] = f
	}
	s.settled++
	if o == engine.Repaired || o == engine.Gone {
		s.repaired++
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
		Run: s.run, Rate: s.rate, Repairs: s.want.Repair, Asks: s.engine.Asks(), Position: volume.ScrubPosition(s.engine.Position()),
		Settled: s.settled, Repaired: s.repaired,
	}
}

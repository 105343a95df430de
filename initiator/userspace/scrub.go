// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/engine"
)

// comparer is a scrub of the engine's.
type comparer struct{ *engine.Scrub }

func (c comparer) Progress() (done, total, alone block.Size) {
	p, alone := c.Scrub.Progress()
	return p.Done, p.Total, alone
}

func (c comparer) Position() volume.ScrubPosition { return volume.ScrubPosition(c.Scrub.Position()) }

// scrub starts or stops a scrub, or tells it what has changed.
func (k *Keeper) scrub(ctx context.Context, o volume.Order) error {
	st := k.stack
	start, ok := o.(volume.StartScrub)
	if !ok {
		st.scrub.Apply(o)
		return nil
	}
	st.scrub = k.StartScrub(ctx, start.Scrub, func(s *keeper.Scrub) keeper.Comparer {
		config := engine.ScrubConfig{Rate: start.Rate, From: engine.ScrubPosition(start.Begin), Found: func(f engine.Finding) { s.Found(finding(f)) }}
		if start.Repair {
			config.Repair = &engine.Repair{Named: start.Named(st.wanted.Layout.Stripes), Ask: true, Ended: func(f engine.Finding, o engine.Outcome, err error) {
				s.Settled(finding(f), outcomes[o], err)
			}}
		}
		return comparer{st.volume.NewScrub(config)}
	})
	return nil
}

func finding(f engine.Finding) volume.ScrubFinding {
	return volume.ScrubFinding{Column: f.Column, Off: f.Off, Length: f.Length, Equal: f.Copies, Unreadable: f.Unreadable, Right: f.Right}
}

var outcomes = map[engine.Outcome]volume.ScrubOutcome{
	engine.NotKnown: volume.ScrubNotKnown, engine.Repaired: volume.ScrubRepaired, engine.Gone: volume.ScrubGone, engine.NotRepaired: volume.ScrubNotRepaired,
}

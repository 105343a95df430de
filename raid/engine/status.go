// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"weft.dev/weft/proto/block"
)

// Status returns the status of the volume. It is cheap enough to call ten times a second.
func (v *Volume) Status() Status {
	s := Status{Size: block.Size(v.size.Load()), InFlight: int(v.active.Load())}
	var held int64
	for k := range v.columns {
		c := &v.columns[k]
		c.lock()
		s.Legs = append(s.Legs, c.status(&s, &held))
		s.Suspended = s.Suspended || c.suspended
		s.Equalizing = s.Equalizing || c.equalizing
		c.unlock()
	}
	if held > 0 {
		s.HeldFor = time.Duration(v.clock.now() - held)
	}
	q := v.equalizer.Load()
	s.Equalized = q.progress()
	q.addTo(&s)
	return s
}

// status returns the status of the column's legs. It adds the column's held IO to s, and
// sets held to the time of the first of it if that is earlier. The column is locked.
func (c *column) status(s *Status, held *int64) []LegStatus {
	legs := make([]LegStatus, len(c.legs))
	now := c.v.clock.now()
	for i := range c.shards {
		for _, x := range c.shards[i].spans {
			x.p.addTo(s, held)
			for copy := range legs {
				switch on := &x.p.legs[copy]; on.state {
				case partOut:
					legs[copy].Oldest = max(legs[copy].Oldest, time.Duration(now-on.at))
				case partFailed:
					legs[copy].Failed++
					if on.full {
						legs[copy].Full++
					}
				}
			}
		}
	}
	for copy := range legs {
		l, leg := &c.legs[copy], &legs[copy]
		leg.State, leg.Err, leg.Outstanding, leg.Withheld = l.state, l.err, int(l.out.Load()), l.withheld
		leg.Unflushed, leg.Skipped = l.unflushed(), block.Size(l.skipped.Load())
		leg.LossCovered = l.lossCovered()
		leg.Regions = c.v.plan.regions(int64(s.Size))
		if l.missed != nil && l.state < CaughtUp {
			leg.Dirty = l.missed.len()
		}
		leg.Short = l.starved != 0
		if l.state == Rebuilding {
			region := block.Size(1) << c.v.plan.region
			leg.Resync.Total = block.Size(l.total) * region
			leg.Resync.Done = leg.Resync.Total - min(leg.Resync.Total, block.Size(leg.Dirty)*region)
			leg.Speed = l.rebuild.lately()
		}
	}
	return legs
}

// addTo counts an extent IO in the status of its volume; see column.status.
func (p *extentIO) addTo(s *Status, held *int64) {
	if p.kind == kindWrite && p.phase == phaseStarted {
		s.Begun++
	}
	if p.held == 0 {
		return
	}
	s.Held++
	if *held == 0 || p.held < *held {
		*held = p.held
	}
}

// lately is how much a rebuild copies in a second; nil copies nothing. It takes no lock: shards are
// locked, and whoever has locked mu may wait for these.
func (r *rebuild) lately() block.Size {
	if r == nil {
		return 0
	}
	return r.speed.Lately()
}

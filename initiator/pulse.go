// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"time"

	"weft.dev/weft/raid/dm"
)

// pulse is how a leg answers on one device. Three things are silence: no live
// controller, a probe that is out for longer than the interval of probes, and
// probes that fail.
type pulse struct {
	device  dm.Ref
	dark    time.Time // since when no controller is live
	failing time.Time // start of the first of the probes that failed
	started time.Time // of the last probe
	running bool
	answers bool // the last probe did
	looks   int
}

// look notes what the controllers say, and returns since when the leg is silent.
func (p *pulse) look(now time.Time, live bool, interval time.Duration) (silent time.Time) {
	switch {
	case live:
		p.dark = time.Time{}
	case p.dark.IsZero():
		p.dark = now
	}
	silent = earliest(p.dark, p.failing)
	if p.running && now.Sub(p.started) > interval {
		silent = earliest(silent, p.started)
	}
	p.looks++
	if silent.IsZero() {
		p.looks = 0
	}
	return silent
}

// due reports whether it is time for a probe.
func (p *pulse) due(now time.Time, interval time.Duration) bool {
	return !p.running && now.Sub(p.started) >= interval
}

func (p *pulse) probe(now time.Time) { p.running, p.started = true, now }

// answered notes the outcome of the probe that is out.
func (p *pulse) answered(err error) {
	p.running, p.answers = false, err == nil
	switch {
	case err == nil:
		p.failing = time.Time{}
	case p.failing.IsZero():
		p.failing = p.started
	}
}

// earliest is the earlier of two times that may be zero.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

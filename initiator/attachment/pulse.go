// SPDX-License-Identifier: Apache-2.0

package attachment

import "time"

// Pulse is how a leg answers on one device. Three things are silence: no live
// controller, a probe that is out for longer than the interval of probes, and
// probes that fail.
type Pulse struct {
	Device  string    // the one that was looked at
	Met     bool      // it has answered a probe
	Heard   time.Time // start of the last probe that the leg answered, on the clock of leases; zero: of none
	sent    time.Time // start of the last probe, on that clock
	dark    time.Time // since when no controller is live
	failing time.Time // start of the first of the probes that failed
	started time.Time // of the last probe
	running bool
	Answers bool // the last probe did
	Looks   int  // how often it was looked at since it fell silent
}

// Of is p if it is of the device that the leg is reached through now, else a new one
// of that device. When the leg was last heard does not depend on its device.
func (p *Pulse) Of(device string) *Pulse {
	switch {
	case p == nil:
		return &Pulse{Device: device}
	case p.Device != device:
		return &Pulse{Device: device, Heard: p.Heard}
	}
	return p
}

// Look notes what the controllers say, and returns since when the leg is silent.
func (p *Pulse) Look(now time.Time, live bool, interval time.Duration) (silent time.Time) {
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
	p.Looks++
	if silent.IsZero() {
		p.Looks = 0
	}
	return silent
}

// Due reports whether it is time for a probe.
func (p *Pulse) Due(now time.Time, interval time.Duration) bool {
	return !p.running && now.Sub(p.started) >= interval
}

// Probe notes that a probe goes out; clock is now on the clock of leases.
func (p *Pulse) Probe(now, clock time.Time) { p.running, p.started, p.sent = true, now, clock }

// Answered notes the outcome of the probe that is out.
func (p *Pulse) Answered(err error) {
	p.running, p.Answers = false, err == nil
	switch {
	case err == nil:
		p.failing, p.Met, p.Heard = time.Time{}, true, p.sent
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

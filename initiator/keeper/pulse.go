// SPDX-License-Identifier: Apache-2.0

package keeper

import "time"

// Pulse tracks whether a leg answers on one device. It counts as silent while no controller is
// live, while a probe has been out for longer than the probe interval, and while probes fail.
type Pulse struct {
	Device  string    // the device looked at
	Met     bool      // it has answered a probe
	Heard   time.Time // when the last answered probe was sent, on the lease clock; zero if none was
	sent    time.Time // when the last probe was sent, on that clock
	dark    time.Time // since when no controller has been live
	failing time.Time // when the first of the failed probes was sent
	started time.Time // when the last probe was sent
	running bool
	Answers bool // the last probe was answered
	Looks   int  // looks since it fell silent
	asked   int  // looks since it has not answered what it was asked last
}

// Of returns p if the leg is still reached through device, otherwise a new Pulse of device.
// The time when the leg was last heard is kept, since it does not depend on the device.
func (p *Pulse) Of(device string) *Pulse {
	switch {
	case p == nil:
		return &Pulse{Device: device}
	case p.Device != device:
		return &Pulse{Device: device, Heard: p.Heard}
	}
	return p
}

// Look notes whether a controller is live, and returns since when the leg has been silent.
func (p *Pulse) Look(now time.Time, live bool, interval time.Duration) (silent time.Time) {
	switch {
	case live:
		p.dark = time.Time{}
	case p.dark.IsZero():
		p.dark = now
	}
	silent = Earlier(p.dark, p.failing)
	if p.running && now.Sub(p.started) > interval {
		silent = Earlier(silent, p.started)
	}
	p.Looks++
	if silent.IsZero() {
		p.Looks = 0
	}
	p.asked++
	if p.unanswered().IsZero() {
		p.asked = 0
	}
	return silent
}

// Unanswered returns since when the leg has answered nothing at all, not even with an error: since its last
// probe was sent, or no controller has been live. It is zero if the leg owes no answer, or if there were
// less than three looks since then: a host that was frozen cannot tell.
func (p *Pulse) Unanswered() time.Time {
	if p.asked < 3 {
		return time.Time{}
	}
	return p.unanswered()
}

func (p *Pulse) unanswered() time.Time {
	if p.running {
		return Earlier(p.dark, p.started)
	}
	return p.dark
}

// Due reports whether it is time for a probe.
func (p *Pulse) Due(now time.Time, interval time.Duration) bool {
	return !p.running && now.Sub(p.started) >= interval
}

// Probe notes that a probe is sent; clock is the time on the lease clock.
func (p *Pulse) Probe(now, clock time.Time) { p.running, p.started, p.sent = true, now, clock }

// Answered notes the outcome of the pending probe, and reports whether that is news: no answer of a leg that
// answers is.
func (p *Pulse) Answered(err error) (news bool) {
	news = err != nil || !p.Met || !p.Answers || p.Looks > 0 || p.asked >= 3
	p.running, p.Answers = false, err == nil
	switch {
	case err == nil:
		p.failing, p.Met, p.Heard = time.Time{}, true, p.sent
	case p.failing.IsZero():
		p.failing = p.started
	}
	return news
}

// Earlier is the earlier of two times that may be zero.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

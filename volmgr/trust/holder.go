// SPDX-License-Identifier: Apache-2.0

package trust

import "time"

// Holder is an identity that has got certificates. Its certificates that were issued until Bound
// are revoked.
//
//	issued ──┬──────────────┬─── Bound ───┬──► time
//	         refused        revoked       joined again: accepted
//
// A certificate says when it was issued, by the clock of the manager that signed it. So the bound is
// ClockMargin later than the clock of the manager that revokes, and whoever joins again gets a
// certificate that says a time after the bound.
type Holder struct {
	Subject Subject   `json:"subject"`
	Joined  time.Time `json:"joined,omitzero"`
	Issued  time.Time `json:"issued,omitzero"` // of its newest certificate
	Revoked time.Time `json:"revoked,omitzero"`
	Bound   time.Time `json:"bound,omitzero"` // in whole seconds, as certificates have their times
}

// Bounds of certificates.
const (
	// CertificateLife is how long one is good.
	CertificateLife = 7 * 24 * time.Hour
	// ClockMargin is how far the clocks of two managers may be apart without a revoked certificate
	// being accepted.
	ClockMargin = 10 * time.Minute
)

// Issue returns the holder with a certificate that is issued now, and the time that it says.
func (h Holder) Issue(now time.Time) (Holder, time.Time) {
	at := now.UTC()
	if h.refuses(at) {
		at = h.Bound.Add(time.Second)
	}
	h.Issued = at
	return h, at
}

// refuses reports whether a certificate that was issued at a time is revoked.
func (h Holder) refuses(issued time.Time) bool { return Refuses(h.Bound, issued) }

// Refuses reports whether a certificate that was issued at a time is revoked by a bound; a bound of
// zero revokes none.
func Refuses(bound, issued time.Time) bool {
	return !bound.IsZero() && !issued.Truncate(time.Second).After(bound)
}

// Out reports whether every certificate of the holder is revoked.
func (h Holder) Out() bool { return h.refuses(h.Issued) }

// ManagerRole is the role of managers, which sign certificates for themselves: a bound in time does
// not shut one out. All of its certificates are refused until a token lets it in again.
const ManagerRole = "manager"

func (h Holder) shutOut() bool { return h.Subject.Role == ManagerRole && !h.Subject.Person && h.Out() }

// always is later than all times of certificates.
var always = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// RefusedUntil is the time of issue until which the holder's certificates are refused; zero: none is.
func (h Holder) RefusedUntil() time.Time {
	if h.shutOut() {
		return always
	}
	return h.Bound
}

// LetIn returns the holder when a token has let it in.
func (h Holder) LetIn(now time.Time) Holder {
	if h.shutOut() {
		h = Holder{Subject: h.Subject}
	}
	h.Joined = now.UTC()
	return h
}

// Revoke returns the holder after all its certificates were revoked.
func (h Holder) Revoke(now time.Time) Holder {
	bound := now.UTC().Add(ClockMargin)
	if h.Issued.After(bound) { // it has joined again since a revocation of just now
		bound = h.Issued
	}
	h.Revoked, h.Bound = now.UTC(), bound.Truncate(time.Second).Add(time.Second)
	return h
}

// Ends is when the newest certificate ends; zero if none is known.
func (h Holder) Ends() time.Time {
	if h.Issued.IsZero() {
		return h.Issued
	}
	return h.Issued.Add(CertificateLife)
}

// Over reports whether the holder can be forgotten: each of its certificates has ended, and so has
// each that was revoked, at every clock. A manager that was removed is remembered.
func (h Holder) Over(now time.Time) bool {
	if h.shutOut() {
		return false
	}
	last := h.Issued
	if h.Bound.After(last) {
		last = h.Bound
	}
	return now.After(last.Add(CertificateLife + margin))
}

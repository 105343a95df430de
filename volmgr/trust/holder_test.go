// SPDX-License-Identifier: Apache-2.0

package trust

import (
	"math/rand/v2"
	"testing"
	"time"
)

// In any history of joins, renewals and revocations at managers whose clocks are apart by at most
// ClockMargin: no certificate that was issued before a revocation is accepted after it, and each
// that is issued after the last one is accepted at once.
func TestARevocationEndsWhatWasIssuedBefore(t *testing.T) {
	for seed := range uint64(500) {
		random := rand.New(rand.NewPCG(seed, 1))
		h, now := Holder{Subject: Subject{Name: "t1", Role: "target"}}, begin
		var revoked, good []time.Time
		for range 60 {
			now = now.Add(time.Duration(random.Int64N(int64(3 * time.Minute))))
			clock := now.Add(time.Duration(random.Int64N(int64(ClockMargin))))
			if random.IntN(3) > 0 {
				var at time.Time
				h, at = h.Issue(clock)
				good = append(good, at.Truncate(time.Second)) // as a certificate has it
			} else {
				h = h.Revoke(clock)
				revoked, good = append(revoked, good...), nil
			}
			for _, at := range revoked {
				if !Refuses(h.Bound, at) {
					t.Fatalf("seed %d: issued at %v and revoked since, it is accepted: the bound is %v", seed, at, h.Bound)
				}
			}
			for _, at := range good {
				if Refuses(h.Bound, at) {
					t.Fatalf("seed %d: issued at %v after the last revocation, it is refused: the bound is %v", seed, at, h.Bound)
				}
			}
			if h.Out() != (len(good) == 0) && len(revoked)+len(good) > 0 {
				t.Fatalf("seed %d: Out = %v with %d certificates that are good", seed, h.Out(), len(good))
			}
			if h.Over(h.Bound.Add(CertificateLife)) || h.Over(h.Issued.Add(CertificateLife)) {
				t.Fatalf("seed %d: forgotten while a certificate has not ended: %+v", seed, h)
			}
		}
		if !h.Over(now.Add(30 * 24 * time.Hour)) {
			t.Fatalf("seed %d: never forgotten: %+v", seed, h)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package backoff

import (
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cow"
)

func TestThePauseDoublesUpToAMinute(t *testing.T) {
	for failures, want := range map[int]time.Duration{
		0: 0, 1: 0, 2: time.Second, 3: 2 * time.Second, 7: 32 * time.Second, 8: time.Minute, 1000: time.Minute,
	} {
		if got := Pause(failures); got != want {
			t.Errorf("Pause(%d) = %v, want %v", failures, got, want)
		}
	}
}

func TestALossSoonAfterARebuildIsItsFailure(t *testing.T) {
	trials, w, leg, now := Trials{}, new(cow.Writer), block.LegID{}, time.Unix(1000, 0)
	if trials.Fresh(leg, now) {
		t.Error("a leg that was never rebuilt counts as fresh")
	}
	trials.Lost(w, leg, now)
	trials.Rebuilt(w, leg, now.Add(time.Second))
	if !trials.LostAt(leg).IsZero() {
		t.Error("a rebuilt leg counts as lost")
	}
	if !trials.Fresh(leg, now.Add(time.Minute)) || trials.Fresh(leg, now.Add(2*time.Minute)) {
		t.Error("a leg is fresh for a minute after its rebuild, no longer")
	}
}

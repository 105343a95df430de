// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// own is a leg in a tree of its own.
func own(n byte) block.LegID { return block.LegID{UUID: block.UUIDFromRandom([16]byte{100 + n})} }

// Legs that are prepared at the same time cost one write of the label, except that those of one tree follow one another.
// One that cannot be recorded is not in the way of the others.
func TestLegsArePreparedTogether(t *testing.T) {
	for name, test := range map[string]struct {
		late   bool   // one is for an earlier revision
		writes uint64 // of the label
	}{
		"all are there": {false, 2},
		"one is late":   {true, 3},
	} {
		p := newPlanted(t)
		p.stop(t)
		must(t, p.disk.Update(func(l *drive.Label) error {
			var err error
			for n := range byte(2) {
				err = errors.Join(err, l.PutLeg(&pb.LegLabel{
					LegId: own(n).String(), TreeId: own(n).String(), Image: pb.ImageKind_IMAGE_KIND_MAPPED, Revision: 1, Volume: &pb.VolumeLabel{VolumeId: own(n).String()},
				}))
			}
			return err
		}))
		p.carve(t, monday, tuesday)
		before := p.disk.Label().Generation
		p.disk.held.trees.turn <- struct{}{}
		prepare := func(id block.LegID, revision uint64, from Origin) chan error {
			done := make(chan error, 1)
			go func() { done <- p.disk.Prepare(id, revision, block.GiB, from) }()
			return done
		}
		var all []chan error
		for n := range byte(2) {
			revision := uint64(1)
			if test.late && n == 1 {
				revision = 0
			}
			all = append(all, prepare(own(n), revision, Origin{}))
		}
		all = append(all, prepare(monday, 1, Origin{}), prepare(tuesday, 1, Origin{}))
		for wait := true; wait; time.Sleep(time.Millisecond) {
			p.disk.held.trees.mu.Lock()
			wait = len(p.disk.held.trees.prepare) < len(all)
			p.disk.held.trees.mu.Unlock()
		}
		<-p.disk.held.trees.turn
		for n, done := range all {
			if err := <-done; (err != nil) != (test.late && n == 1) {
				t.Errorf("%s: leg %d: %v", name, n, err)
			}
		}
		label := p.disk.Label()
		for n, id := range []block.LegID{own(0), own(1), monday, tuesday} {
			if done := label.Leg(id).GetZeroed(); done != (!test.late || n != 1) {
				t.Errorf("%s: leg %d is recorded as prepared: %v", name, n, done)
			}
		}
		if got := label.Generation - before; got != test.writes {
			t.Errorf("%s: the label was written %d times, want %d", name, got, test.writes)
		}
		if n := len(p.disk.held.trees.prepare); n > 0 {
			t.Errorf("%s: %d legs are still waited for", name, n)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// An order to leave a leg as it is (the manager's store was lost, and the volume is not going back again yet)
// that is carried out late must not pass for the way back at the next revision.
func TestALateOrderDoesNotEndTheWayBackAtALaterRevision(t *testing.T) {
	p := newPlain(t)
	write := func(c byte, at int64) { must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{c}, 4096), at<<20)) }
	write('a', 0)
	must(t, p.disk.Plant(leg, leg.String(), plainSize))
	p.swap(t)
	p.carve(t, monday)
	must(t, p.prepare(monday, plainSize, freezeOf(leg)))
	write('x', 0)
	must(t, p.disk.Update(func(l *drive.Label) error { return l.Unprepared(leg) })) // before the store was lost

	turn := p.disk.held.trees.turn
	turn <- struct{}{} // a tree of the drive is being opened
	done := make(chan error)
	revision := p.disk.Label().Leg(leg).GetRevision()
	go func() { done <- p.disk.Prepare(leg, revision, plainSize, Origin{}) }() // Again, not Switching
	time.Sleep(50 * time.Millisecond)
	// Meanwhile the manager has seen the label of the volume, and switches: target.tools.putLeg.
	must(t, p.disk.Update(func(l *drive.Label) error {
		r := l.Leg(leg)
		if err := l.PutLeg(&pb.LegLabel{
			LegId: leg.String(), Extents: r.Extents, Image: r.Image, TreeId: r.TreeId, Revision: r.Revision + 1, Zeroed: true, Volume: r.Volume,
		}); err != nil {
			return err
		}
		return l.Unprepared(leg)
	}))
	<-turn
	if err := <-done; err == nil {
		t.Error("an order for an earlier revision is done")
	}
	b := make([]byte, 4096)
	must(t, block.ReadAt(p.leg, b, 0))
	if r := p.disk.Label().Leg(leg); drive.Ready(r) && b[0] != 'a' {
		t.Errorf("revision %d counts as back at the snapshot, and holds %c, not a", r.Revision, b[0])
	}
	p.end(t)
}

// The same for a mapped leg.
func TestALateOrderDoesNotEndTheWayBackOfAMappedLeg(t *testing.T) {
	p := newPlanted(t)
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{'a'}, 4096), 0))
	p.carve(t, monday)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{'x'}, 4096), 0))
	must(t, p.disk.Update(func(l *drive.Label) error { return l.Unprepared(leg) }))
	turn := p.disk.held.trees.turn
	turn <- struct{}{}
	done := make(chan error)
	revision := p.disk.Label().Leg(leg).GetRevision()
	go func() { done <- p.disk.Prepare(leg, revision, block.GiB, Origin{}) }()
	time.Sleep(50 * time.Millisecond)
	must(t, p.disk.Update(func(l *drive.Label) error {
		r := l.Leg(leg)
		if err := l.PutLeg(&pb.LegLabel{LegId: leg.String(), Image: r.Image, TreeId: r.TreeId, Revision: r.Revision + 1, Volume: r.Volume}); err != nil {
			return err
		}
		return l.Unprepared(leg)
	}))
	<-turn
	if err := <-done; err == nil {
		t.Error("an order for an earlier revision is done")
	}
	b := make([]byte, 4096)
	must(t, block.ReadAt(p.leg, b, 0))
	if r := p.disk.Label().Leg(leg); drive.Ready(r) && b[0] != 'a' {
		t.Errorf("revision %d counts as back at the snapshot, and holds %c, not a", r.Revision, b[0])
	}
	p.end(t)
}

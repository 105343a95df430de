// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/image"
)

// A leg of a snapshot is not moved by name: a new leg would be of zeroes.
func TestALegOfASnapshotIsNotMovedByName(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	err := w.step(MoveLeg{Volume: "db1@mon", Column: 0, Copy: 0})
	if err == nil || !strings.Contains(err.Error(), "only when they have to leave theirs") {
		t.Errorf("answer: %v", err)
	}
	if legs := w.volume("db1@mon").Legs; len(legs) != 2 || legs[0].Leave {
		t.Errorf("its legs are now %v", legs)
	}
}

// A leg of a snapshot that is blank and is not being copied, as an earlier manager recorded it for a move, is given
// up, also if another leg cannot be reached, and the leg that was to move stays. Nobody is told to attach the
// snapshot for that.
func TestABlankLegOfASnapshotIsGivenUp(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	tx := newTx(w.s, w.now)
	v := tx.volume(w.volume("db1@mon").ID)
	used := map[block.DriveID]bool{v.Legs[0].Drive: true, v.Legs[1].Drive: true}
	var other *Drive
	for _, d := range w.s.drives {
		if !used[d.ID] {
			other = d
		}
	}
	v.Legs[0].Leave = true
	blank := Leg{
		ID: block.LegID{UUID: block.UUID{77}}, Copy: v.freeSlot(0), Place: v.nextPlace(), Drive: other.ID, Node: other.Node, Image: image.Image{Kind: image.Mapped},
		State: LegStale, Revision: 1, CopyAll: true, CopyAllSince: 1, Blank: true, Reason: "it is new and has no data yet",
	}
	v.Placed, v.Legs = blank.Place, append(v.Legs, blank)
	v.sortLegs()
	if why := w.s.rebuildWaitsFor(v, v.leg(blank.ID)); why == "" || strings.Contains(why, "attached") {
		t.Errorf("it waits for %q", why)
	}
	tx.unsure[v.ID] = true
	tx.commit()
	tx = newTx(w.s, w.now)
	on := w.s.targets[v.Legs[0].Node]
	on.status.Online = false
	tx.settleColumn(v.ID, 0, map[block.LegID]string{})
	on.status.Online = true
	if l := tx.peek(v.ID).leg(blank.ID); l.Retired == 0 {
		t.Errorf("while another leg cannot be reached it is %+v", l)
	}
	for range 30 {
		w.now = w.now.Add(time.Minute)
		w.look(3)
	}
	v = w.bothCopies("db1@mon", block.DriveID{})
	if v.leg(blank.ID) != nil || v.Legs[0].Leave || v.Legs[1].Leave {
		t.Errorf("its legs are now %+v", v.Legs)
	}
}

// A volume cannot go back to a snapshot if its legs and the snapshot's share drives, but no tree. That is said.
func TestAVolumeWhoseLegsWereMadeAgainSharesNothingWithItsSnapshot(t *testing.T) {
	w := newSnapWorldOf(t, 1, false)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	for range 3 {
		for _, l := range w.volume("db1").Legs {
			if !l.Based {
				continue
			}
			w.must(DrainDrive{Drive: l.Drive})
			w.look(40, "db1")
			w.must(DrainDrive{Drive: l.Drive, Cancel: true})
			w.look(4, "db1")
			break
		}
	}
	w.must(Detach{Volume: "db1", Node: "c1"})
	w.settle()
	if w.volume("db1").Legs[0].Drive != w.volume("db1@mon").Legs[0].Drive {
		t.Fatal("they do not share a drive")
	}
	err := w.step(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"})
	if err == nil || !strings.Contains(err.Error(), "each in a tree of its own") {
		t.Errorf("answer: %v", err)
	}
}

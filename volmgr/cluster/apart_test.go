// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"strings"
	"testing"
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

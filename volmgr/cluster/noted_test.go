// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

func TestFullMark(t *testing.T) {
	for _, test := range []struct {
		before         int
		used, capacity block.Size
		want           int
	}{
		{0, 0, 0, 0}, {0, 84, 100, 0}, {0, 85, 100, 85}, {0, 94, 100, 85}, {0, 95, 100, 95}, {0, 100, 100, 95},
		{85, 84, 100, 85}, {85, 80, 100, 85}, {85, 79, 100, 0}, {85, 95, 100, 95},
		{95, 94, 100, 95}, {95, 90, 100, 95}, {95, 89, 100, 85}, {95, 80, 100, 85}, {95, 79, 100, 0}, {95, 0, 0, 0},
	} {
		if got := fullMark(test.before, test.used, test.capacity); got != test.want {
			t.Errorf("fullMark(%d, %d, %d) = %d, want %d", test.before, test.used, test.capacity, got, test.want)
		}
	}
}

// kindsOf counts the events of a step by kind and object.
func kindsOf(events []event.Event) map[string]int {
	count := map[string]int{}
	for _, e := range events {
		object, _, _ := strings.Cut(e.Object, " ")
		count[e.Kind+" "+object]++
	}
	return count
}

// A drive and its pool that fill up are an event at each mark, once, also if another manager goes on
// with the records; and one when there is room again.
func TestADriveThatFillsIsAnEventOnce(t *testing.T) {
	s := grid(1, 1, 1, fixed(100))
	now := t0
	look := func(s *State, want string) {
		t.Helper()
		now = now.Add(fullLook)
		for _, on := range s.targets {
			on.status.Seen = now
		}
		out, err := s.Step(now, Tick{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range out.Events {
			got = append(got, fmt.Sprintf("%s %s %s", e.Kind, e.Severity, e.Text))
		}
		if text := strings.Join(got, "; "); text != want {
			t.Errorf("%q, want %q", text, want)
		}
	}
	use := func(extents int) {
		t.Helper()
		in := CreateVolume{Name: block.VolumeName(fmt.Sprintf("v%d", extents)), Size: block.Size(extents) * block.ExtentSize, Stripes: 1, Copies: 1, Seed: testSeed(extents)}
		if _, err := s.Step(now, in); err != nil {
			t.Fatal(err)
		}
	}
	look(s, "")
	use(84)
	look(s, "")
	use(2)
	const at86 = "legs take 86%: 21.5GiB of 25GiB"
	look(s, "drive.nearly-full WARNING "+at86+"; pool.nearly-full WARNING "+at86)
	look(s, "")
	next, err := Load(s.Records())
	if err != nil {
		t.Fatal(err)
	}
	look(next, "")
	use(10)
	const at96 = "legs take 96%: 24GiB of 25GiB"
	look(s, "drive.nearly-full ERROR "+at96+"; pool.nearly-full ERROR "+at96)
	for _, d := range s.drives {
		d.Extents = 200 // as if another one had been added to the pool
	}
	look(s, "drive.room INFO legs take 48%: 24GiB of 50GiB; pool.room INFO legs take 48%: 24GiB of 50GiB")
}

// A target that has legs of all volumes goes away and returns: the history names some volumes, and
// counts the others.
func TestTheLossOfATargetDoesNotFillTheHistory(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{"target t1 drives=20GiB", "target t2 drives=20GiB"} {
		s.run(line)
	}
	const volumes = 40
	for i := range volumes {
		s.run(fmt.Sprintf("create v%d size=256MiB stripes=1 copies=2", i))
	}
	s.run("comply")
	count := func(line string) map[string]int {
		t.Helper()
		before := s.state.events.Next() - 1
		s.run(line)
		events, _, _ := s.state.events.From("", before, event.Max)
		return kindsOf(events)
	}
	lost, back := count("wait 20s t1"), count("wait 1s t1 t2")
	if lost["volume.degraded volume"] != mostNoted || lost["volume.degraded cluster"] != 1 {
		t.Errorf("a target is lost: %v, want %d events of volumes and one of the cluster", lost, mostNoted)
	}
	if back["volume.healthy volume"] != mostNoted || back["volume.healthy cluster"] != 1 {
		t.Errorf("it is back: %v, want %d events of volumes and one of the cluster", back, mostNoted)
	}
}

// When the last backup was made outlasts the manager.
func TestTheLastBackupIsRecorded(t *testing.T) {
	s := grid(1, 1, 1, fixed(100))
	if at := s.BackedUp(); !at.IsZero() {
		t.Errorf("a new store was backed up at %v", at)
	}
	if _, err := s.Step(t0, NoteBackup{Size: block.MiB}); err != nil {
		t.Fatal(err)
	}
	next, err := Load(s.Records())
	if err != nil {
		t.Fatal(err)
	}
	if !next.BackedUp().Equal(t0) {
		t.Errorf("BackedUp() = %v, want %v", next.BackedUp(), t0)
	}
}

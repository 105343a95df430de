// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// freeze takes snapshots of frozen file systems, called db1@mon and so on.
func (w *snapWorld) freeze(of ...string) error {
	in := CreateSnapshots{Seed: w.seed(), Freeze: true}
	for _, v := range of {
		in.Snapshots = append(in.Snapshots, NewSnapshot{Volume: v, Name: "mon"})
	}
	return w.step(in)
}

func TestHostsFreezeFileSystems(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.mustBe(w.freeze("db1", "db2"))
	w.settle()
	for _, name := range []string{"db1@mon", "db2@mon"} {
		if v := w.volume(name); v == nil || v.State != VolumeReady || !v.Snapshot.FSFrozen || !v.label().Snapshot.FSFrozen {
			t.Errorf("%s is %+v, want it taken of frozen file systems, and its label to say so", name, v)
		}
	}
	for name, h := range w.hosts {
		prepare := slices.IndexFunc(h.told, func(x WantedHold) bool { return x.Freeze && x.Prepare })
		hold := slices.IndexFunc(h.told, func(x WantedHold) bool { return x.Freeze && !x.Prepare })
		if prepare < 0 || hold < prepare {
			t.Errorf("%s was told %+v, want to prepare, and then to hold", name, h.told)
		}
		h.told = nil
	}
	w.mustBe(w.freeze("db1", "db2")) // is done already
	w.must(CreateSnapshots{Seed: w.seed(), Snapshots: []NewSnapshot{{Volume: "db1", Name: "tue"}}})
	w.settle()
	if v := w.volume("db1@tue"); v.State != VolumeReady || v.Snapshot.FSFrozen || slices.ContainsFunc(w.hosts["c1"].told, func(x WantedHold) bool { return x.Freeze || x.Prepare }) {
		t.Errorf("one that was taken without it is %+v, and its host was told %+v", v, w.hosts["c1"].told)
	}
	var refusal *Error
	if err := w.step(CreateSnapshots{Seed: w.seed(), Freeze: true, Snapshots: []NewSnapshot{{Volume: "db1", Name: "tue"}}}); !errors.As(err, &refusal) || refusal.Kind != AlreadyExists {
		t.Errorf("the same name, frozen: %v, want a refusal", err)
	}
}

func (w *snapWorld) mustBe(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// A host that cannot freeze what it has mounted fails all that are taken at the same moment, at once, and
// says why.
func TestAFileSystemThatCannotBeFrozenFailsTheSnapshot(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.hosts["c2"].cannot = "no file system on it is mounted on this host"
	w.mustBe(w.freeze("db1", "db2"))
	for range 10 {
		w.now = w.now.Add(20 * time.Millisecond)
		for _, x := range w.targets {
			w.targetActs(x)
		}
		for _, h := range w.hosts {
			w.hostActs(h)
		}
	}
	for _, name := range []string{"db1@mon", "db2@mon"} {
		if v := w.volume(name); v != nil && (v.State != VolumeDeleting || !strings.Contains(v.Failed, "host c2") || !strings.Contains(v.Failed, w.hosts["c2"].cannot)) {
			t.Errorf("%s is %s: %q", name, v.State, v.Failed)
		}
	}
	w.settle()
	if v := w.volume("db1@mon"); v != nil {
		t.Errorf("it is %+v, want it gone", v)
	}
}

func TestAHostThatCannotFreeze(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.hosts["c1"].old = true
	w.settle()
	var refusal *Error
	if err := w.freeze("db1"); !errors.As(err, &refusal) || refusal.Kind != Unimplemented || !strings.Contains(refusal.Text, "c1") {
		t.Errorf("of the volume of an old host: %v, want a refusal that names it", err)
	}
	w.mustBe(w.freeze("db2"))
	w.settle()
	if v := w.volume("db2@mon"); v.State != VolumeReady {
		t.Errorf("of another: %s", v.State)
	}
	// One that was downgraded meanwhile is not told what it would do otherwise.
	w.hosts["c1"].old = false
	w.settle()
	w.mustBe(w.freeze("db1"))
	w.hosts["c1"].old = true
	w.hostActs(w.hosts["c1"])
	w.hosts["c1"].told = nil
	w.settle()
	if told := w.hosts["c1"].told; len(told) > 0 {
		t.Errorf("an old host was told %+v", told)
	}
}

// I/O that is held over a file system that is not frozen makes no snapshot of a frozen one.
func TestIOHeldWithoutAFreezeIsNoHold(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.hosts["c1"].thaws = true
	w.mustBe(w.freeze("db1"))
	for range 20 {
		w.settle()
		if v := w.volume("db1@mon"); v != nil && v.State == VolumeReady {
			t.Fatalf("it is %+v", v)
		}
	}
	if v := w.volume("db1@mon"); v != nil {
		t.Errorf("after all attempts it is %+v", v.Snapshot)
	}
}

// While a host writes out much, nothing is held, and the snapshot waits for longer than for targets.
func TestASnapshotWaitsForFileSystemsToBeWritten(t *testing.T) {
	w := newSnapWorld(t, 1)
	held := w.hosts["c1"].volumes
	w.mustBe(w.freeze("db1"))
	w.hostsAreSilent(syncFor - time.Second)
	if v := w.volume("db1@mon"); v.State != VolumeCreating || v.taking().Attempt != 1 || v.taking().Phase != Preparing {
		t.Errorf("it is %s, %+v", v.State, v.taking())
	}
	if w.hosts["c1"].volumes = held; w.s.explainText("db1@mon") == "" {
		t.Error("nothing says what it waits for")
	}
	w.settle()
	if v := w.volume("db1@mon"); v.State != VolumeReady {
		t.Errorf("in the end it is %s: %q", v.State, v.Failed)
	}
}

// hostsAreSilent lets time pass in which only targets act.
func (w *snapWorld) hostsAreSilent(d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(time.Second)
		for _, x := range w.targets {
			w.targetActs(x)
		}
		for _, h := range w.hosts {
			r := w.hostReport(h)
			for i := range r.Attachments {
				for id := range r.Attachments[i].Holds {
					r.Attachments[i].Holds[id] = HoldPending
				}
			}
			w.must(InitiatorReported{1, r})
		}
		w.must(Tick{})
	}
}

func (s *State) explainText(name string) string {
	e := Explanation{}
	s.explainSnapshot(&e, s.volumes.Get(s.idOf("db1@mon")))
	return strings.Join(e.Waits, "; ")
}

// The copies of a volume that its last host released cleanly hold unmounted file systems.
func TestAVolumeWithoutAHostIsFrozen(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.must(Detach{Volume: "db1", Node: "c1"})
	w.settle()
	w.mustBe(w.freeze("db1"))
	w.settle()
	if v := w.volume("db1@mon"); v == nil || v.State != VolumeReady || !v.Snapshot.FSFrozen {
		t.Errorf("it is %+v", v)
	}
}

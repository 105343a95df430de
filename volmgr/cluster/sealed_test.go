// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
)

// detachedInOrder detaches db1 of labelled from c1, which has written all.
var detachedInOrder = []string{"detach db1", "release c1 db1", "comply"}

// sealedScript is labelled with db1 sealed, and the labels of its legs say so.
func sealedScript(t *testing.T, more ...string) (*script, func(nodes ...string) []TargetReport) {
	s, reports := labelled(t, append(slices.Clone(detachedInOrder), append([]string{"seal db1", "comply"}, more...)...)...)
	if !s.db1().sealed() {
		t.Fatal("db1 is not sealed")
	}
	return s, reports
}

// onlyRead fails the test if a host can be given the volume for writing, or none can be given it for reading.
func onlyRead(t *testing.T, s *State, now time.Time) {
	t.Helper()
	for _, mode := range []AttachMode{AttachExclusive, AttachSharedBlock} {
		if _, err := s.Step(now, Attach{Volume: "db1", Node: "c1", Mode: mode}); !isReason(err, ReasonReadOnly) {
			t.Errorf("attach %s = %v, want READ_ONLY", mode, err)
		}
	}
	if _, err := s.Step(now, Attach{Volume: "db1", Node: "c1"}); err != nil {
		t.Errorf("attach for reading: %v", err)
	}
	if v := s.volumes.Get(s.idOf("db1")); len(v.Shared) != 1 || v.Shared[0].Mode != AttachSharedReadOnly {
		t.Errorf("it is attached as %+v and %+v", v.Attachment, v.Shared)
	}
}

// A store that is rebuilt from the drives knows what was sealed.
func TestASealIsOnTheDrives(t *testing.T) {
	s, reports := sealedScript(t)
	all := reports("t1", "t2", "t3")
	state, text := rebuilt(t, all)
	v := state.volumes.Get(state.idOf("db1"))
	if !v.sealed() || !v.Sealed.Equal(s.db1().Sealed) || !v.Clean || len(v.Labels) > 0 {
		t.Fatalf("rebuilt as %+v: %s", v, text)
	}
	for _, r := range all {
		if _, err := state.Step(t0, TargetReported{Session: 1, Report: r}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := state.Step(t0, InitiatorReported{1, s.hostReport("c1")}); err != nil {
		t.Fatal(err)
	}
	onlyRead(t, state, t0)
}

func TestALabelSaysThatAVolumeIsSealed(t *testing.T) {
	for name, c := range map[string]struct {
		labels map[string]string
		want   time.Time
	}{
		"not sealed":             {map[string]string{"tier": "gold"}, time.Time{}},
		"sealed":                 {map[string]string{"tier": "gold", sealedLabel: "2026-11-21T13:00:00Z"}, t0.Add(time.Hour)},
		"a date of another form": {map[string]string{sealedLabel: "yesterday"}, t0},
	} {
		if got := sealedBy(evidence.VolumeLabel{Labels: c.labels, Created: t0.UnixNano()}); !got.Equal(c.want) {
			t.Errorf("%s: sealed at %v, want %v", name, got, c.want)
		}
	}
}

// A backup from before the seal does not break it: the labels are newer.
func TestASealOutlivesAnOlderBackup(t *testing.T) {
	s, reports := labelled(t, detachedInOrder...)
	backup := s.state.Records()
	for _, line := range []string{"seal db1", "comply"} {
		s.run(line)
	}
	records, err := Restored(t0, backup)
	if err != nil {
		t.Fatal(err)
	}
	state, err := Load(records)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, name := range []string{"t1", "t2", "t3"} {
			r := reports(name)[0]
			r.Generation = state.Generation()
			if _, err := state.Step(t0, TargetReported{Session: 1, Report: r}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := state.Step(t0, InitiatorReported{1, s.hostReport("c1")}); err != nil {
			t.Fatal(err)
		}
	}
	v := state.volumes.Get(state.idOf("db1"))
	if v.Restored || !v.sealed() || !v.Clean {
		t.Fatalf("restored as %+v", v)
	}
	onlyRead(t, state, t0)
}

// What may still be written, or may differ, is not sealed.
func TestWhatCannotBeSealed(t *testing.T) {
	for name, c := range map[string]struct {
		before []string
		reason string
		hint   string
	}{
		"attached for writing":        {nil, ReasonAttached, "weft detach db1"},
		"detaching":                   {[]string{"detach db1"}, ReasonAttached, "weft detach db1"},
		"detached by force":           {[]string{"detach db1 force", "comply"}, ReasonAttached, "weft attach db1"},
		"not released in order":       {[]string{"detach db1", "release c1 db1 unclean", "comply"}, ReasonCopiesDiffer, "weft attach db1"},
		"its host booted in a detach": {[]string{"detach db1", "reboot c1", "comply"}, ReasonCopiesDiffer, "weft attach db1"},
		"being expanded":              {append(slices.Clone(detachedInOrder), "expand db1 size=2GiB"), ReasonNotReady, "weft explain volume db1"},
		"a file system half made":     {append([]string{"update db1 formatted=formatting_ext4"}, detachedInOrder...), ReasonNotReady, "--formatted none"},
		"being deleted":               {append(slices.Clone(detachedInOrder), "delete db1"), ReasonNotReady, ""},
	} {
		s, _ := labelled(t, c.before...)
		_, err := s.state.Step(s.now, SealVolume{"db1"})
		refused := &Error{}
		if !errors.As(err, &refused) || refused.Reason != c.reason || !strings.Contains(refused.Hint, c.hint) || s.db1().sealed() {
			t.Errorf("%s: %v (hint %q), want %s and %q", name, err, refused.Hint, c.reason, c.hint)
		}
	}
	s, _ := labelled(t, detachedInOrder...)
	s.state.level = sealLevel - 1
	if _, err := s.state.Step(s.now, SealVolume{"db1"}); !isReason(err, ReasonOldParts) {
		t.Errorf("seal at level %d = %v", sealLevel-1, err)
	}
	if _, err := s.state.Step(s.now, SealVolume{"db9"}); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("seal of no volume = %v", err)
	}
}

// No host begins to make a file system on a sealed volume.
func TestASealedVolumeIsNotFormatted(t *testing.T) {
	s, _ := sealedScript(t)
	for _, formatted := range []string{NotFormatted, Formatting + "ext4"} {
		if _, err := s.state.Step(s.now, UpdateVolume{Volume: "db1", Formatted: formatted}); !isReason(err, ReasonReadOnly) {
			t.Errorf("%s: %v, want READ_ONLY", formatted, err)
		}
	}
}

// Hosts that only read may have the volume while it is sealed, and keep it.
func TestReadersKeepAVolumeThatIsSealed(t *testing.T) {
	s, _ := labelled(t, append(slices.Clone(detachedInOrder), "attach db1 c1 mode=SHARED_READ_ONLY", "comply", "serve c1 db1", "seal db1")...)
	v := s.db1()
	if !v.sealed() || len(v.Shared) != 1 || v.Shared[0].State != Attached {
		t.Errorf("it is %+v", v)
	}
}

// A sealed volume that lacks a copy is healed while no host has it, and stays equal: it can be shared again
// although nobody could have made it equal. What it waits for is never a writer.
func TestASealedVolumeIsHealed(t *testing.T) {
	s := healedScript(t, "")
	for _, line := range []string{"seal db1", "comply"} {
		s.run(line)
	}
	host := s.copies()
	l := s.db1().legAt(0, 1)
	s.run(fmt.Sprintf("in-sync %s db1 0.1", host))
	s.run("comply")
	s.run("release " + host + " db1")
	if v := s.db1(); v.leg(l.ID).State != LegInSync || !v.sealed() || !v.Clean {
		t.Fatalf("not healed: %s", s.run("explain db1"))
	}
	s.run("comply")
	onlyRead(t, s.state, s.now)

	s = healedScript(t, "")
	for _, line := range []string{"seal db1", "comply", "attach db1 c1", "comply", "serve c1 db1"} {
		s.run(line)
	}
	if text := s.run("explain db1"); !strings.Contains(text, "to be detached, so that a host can heal it") || strings.Contains(text, "alone") {
		t.Errorf("a sealed volume that is read, and lacks a copy, waits for a writer:\n%s", text)
	}
	s.run("detach db1")
	s.run("release c1 db1")
	s.run("heal-after 0s")
	if text := s.run("explain db1"); !strings.Contains(text, "--heal-after") || strings.Contains(text, "the volume to be attached") {
		t.Errorf("a sealed volume that nobody heals waits for a writer:\n%s", text)
	}
}

// A copy that an operator chose is all that there is: the volume can be read on.
func TestASealedVolumeIsPromotedAndRead(t *testing.T) {
	s, _ := sealedScript(t)
	v := s.db1()
	c := v.clone()
	for i := range c.Legs {
		c.Legs[i].State = LegStale
	}
	s.state.volumes.Set(s.state.by, v.ID, c)
	s.state.index(v, c)
	if _, err := s.state.Step(s.now, PromoteStaleLeg{Volume: "db1", Leg: v.Legs[0].ID, AcceptDataLoss: true}); err != nil {
		t.Fatal(err)
	}
	if v := s.db1(); !v.Clean || !v.equal() {
		t.Errorf("nobody can make its copies equal, and it is %+v", v)
	}
}

// A record of a sealed volume that a host may write is refused.
func TestASealedVolumeThatIsWrittenIsNotLoaded(t *testing.T) {
	s, _ := sealedScript(t, "attach db1 c1", "comply")
	v := s.db1().clone()
	if err := v.check(); err != nil {
		t.Fatal(err)
	}
	a := v.Shared[0]
	a.Mode = AttachExclusive
	v.Shared, v.Attachment = nil, &a
	if err := v.check(); err == nil {
		t.Error("check says nothing")
	}
}

// A version of a sealed volume is a clone of a snapshot of it, and can be written. The volume itself cannot
// go back to a snapshot.
func TestAVersionOfASealedVolume(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.must(SealVolume{"db1"})
	w.settle()
	if err := w.take("v2", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	if v := w.volume("db1@v2"); v.State != VolumeReady || v.sealed() {
		t.Fatalf("the snapshot is %+v", v)
	}
	w.must(CreateVolume{Name: "v2", From: "db1@v2", Seed: w.seed()})
	w.settle()
	if v := w.volume("v2"); v.State != VolumeReady || v.sealed() || v.Formatted != w.volume("db1").Formatted {
		t.Errorf("the version is %+v", v)
	}
	w.must(Attach{Volume: "v2", Node: "c2"})
	if err := w.step(RestoreVolume{Volume: "db1", Snapshot: "db1@v2"}); !isReason(err, ReasonReadOnly) {
		t.Errorf("a sealed volume goes back to a snapshot: %v", err)
	}
	w.must(DeleteVolume{Volume: "db1"})
}

// sealedWith is a sealed, detached volume of two copies on three targets, with a host that can heal.
func sealedWith(t *testing.T) *script {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB", "target t2 drives=4GiB", "target t3 drives=4GiB", "host c1", "host c2", "heals c2",
		"create db1 size=1GiB copies=2", "comply", "attach db1 c1", "comply", "serve c1 db1", "comply",
		"detach db1", "release c1 db1", "comply", "seal db1", "comply", "heal-after 10s",
	} {
		s.run(line)
	}
	if !s.db1().sealed() {
		t.Fatal("not sealed")
	}
	return s
}

// A node that is lost takes a copy of a sealed volume with it: the copy is made again on another node.
func TestASealedVolumeGetsBackACopyThatWasLostAfterTheSeal(t *testing.T) {
	for _, how := range []string{"confirmed dead", "evicted", "away", "read meanwhile"} {
		t.Run(how, func(t *testing.T) {
			s := sealedWith(t)
			dead := s.at(1)
			var alive []string
			for _, n := range []string{"t1", "t2", "t3"} {
				if n != dead {
					alive = append(alive, n)
				}
			}
			wait := "wait 20s " + strings.Join(alive, " ") + " c1 c2"
			s.run(wait) // dead is silent: offline
			switch how {
			case "confirmed dead", "read meanwhile":
				t.Log(s.run("confirm-dead " + dead))
			case "evicted":
				t.Log(s.step(EvictDrive{Drive: s.db1().legAt(0, 1).Drive}))
			case "away":
				s.state.SetPolicy(Policy{HealAfter: 10 * time.Second, ReplaceAfter: 30 * time.Second})
			}
			if how == "read meanwhile" { // the readers are detached for the time of the copy, as the docs say
				s.run("attach db1 c1")
				s.run("comply " + strings.Join(alive, " "))
				s.run("serve c1 db1")
				s.run(wait)
				s.run("detach db1")
				s.run("release c1 db1")
			}
			for range 40 {
				s.run(wait)
				s.run("comply " + strings.Join(alive, " "))
				lost, h := s.db1().legAt(0, 1), s.db1().Heal
				if h == nil || h.State == Granting {
					continue
				}
				if lost.State != LegStale || lost.StaleAt == 0 || h.Epoch != s.db1().Epoch {
					t.Errorf("%v was not left out: %+v", lost, lost)
				}
				return
			}
			t.Errorf("nobody makes the lost copy again:\n%s", s.run("explain db1"))
		})
	}
}

// A leg of a sealed volume that is away for a short time stays in sync, and so does one from which a host may
// still read.
func TestASealedVolumeWaitsForACopyThatMayComeBack(t *testing.T) {
	for _, how := range []string{"away", "read"} {
		s := sealedWith(t)
		lost := s.at(1)
		alive := slices.DeleteFunc([]string{"t1", "t2", "t3"}, func(n string) bool { return n == lost })
		if how == "read" {
			for _, line := range []string{"attach db1 c1", "comply", "serve c1 db1"} {
				s.run(line)
			}
		}
		s.run("wait 20s " + strings.Join(alive, " ") + " c2")
		if how == "read" { // c1 does not release it
			s.step(EvictDrive{Drive: s.db1().legAt(0, 1).Drive})
			s.run("detach db1 force")
		} else {
			s.step(MoveLeg{Volume: "db1", Copy: 1})
		}
		for range 5 {
			s.run("wait 20s " + strings.Join(alive, " ") + " c2")
			s.run("comply " + strings.Join(alive, " "))
		}
		if l := s.db1().legAt(0, 1); l.State != LegInSync || s.db1().Heal != nil && s.db1().Heal.State != Granting {
			t.Errorf("%s: %v is left out:\n%s", how, l, s.run("explain db1"))
		}
	}
}

// A scrub of a sealed volume does not wait for a reader that is gone or cannot compare, if another one can.
func TestAReaderThatCannotCompareDoesNotHoldUpAScrub(t *testing.T) {
	s := sealedWith(t)
	for _, line := range []string{"attach db1 c1", "comply", "serve c1 db1", "attach db1 c2", "comply", "serve c2 db1", "can-scrub c2"} {
		s.run(line)
	}
	s.run("scrub db1")
	s.run("wait 60s t1 t2 t3 c2") // c1 is off
	if text := s.run("wanted-scrub c2"); strings.Contains(text, "none") {
		t.Errorf("c2 can compare the copies and is not asked to, while c1 is offline and cannot:\n%s", s.run("explain db1"))
	}
}

// If the reader that compares is lost, another one goes on.
func TestAnotherReaderTakesOverAScrub(t *testing.T) {
	s := sealedWith(t)
	for _, line := range []string{"attach db1 c1", "comply", "serve c1 db1", "attach db1 c2", "comply", "serve c2 db1", "can-scrub c1", "can-scrub c2", "scrub db1"} {
		s.run(line)
	}
	if text := s.run("wanted-scrub c1"); strings.Contains(text, "none") {
		t.Fatalf("c1 was there first, and is not asked to compare:\n%s", s.run("explain db1"))
	}
	s.run("wait 150s t1 t2 t3 c2") // c1 is off
	if text := s.run("wanted-scrub c2"); strings.Contains(text, "none") {
		t.Errorf("c1 is offline, and c2 is not asked to go on:\n%s", s.run("explain db1"))
	}
}

// A repair that was under way when the volume was detached does not go on on hosts that only read.
func TestARepairThatWasUnderWayEndsWithTheSeal(t *testing.T) {
	s, _ := labelled(t, append([]string{"can-scrub c1", "scrub db1 repair"}, append(slices.Clone(detachedInOrder), "seal db1", "comply", "attach db1 c1", "comply", "serve c1 db1")...)...)
	if c := s.db1().Scrub; c == nil || !s.db1().sealed() || c.wanted() || !c.Stopped {
		t.Fatalf("the repair goes on, or there is no seal: %+v", c)
	}
	if w := s.state.wantedScrub(s.db1(), &s.db1().Shared[0]); w != nil && w.Repair {
		t.Errorf("a host that only reads is told to repair: %+v", w)
	}
	if out := s.run("scrub db1 repair"); !strings.Contains(out, "READ_ONLY") {
		t.Errorf("scrub --repair of a sealed volume says %q", out)
	}
}

// The advice for a sealed volume can be followed.
func TestNothingOffersARepairOfASealedVolume(t *testing.T) {
	s := sealedWith(t)
	c := s.db1().clone()
	c.Heals = &Heals{Run: "r", Count: 1, NotRepaired: 1, Last: s.now}
	s.state.volumes.Set(s.state.by, c.ID, c)
	if text := s.run("explain db1"); strings.Contains(text, "--repair") {
		t.Errorf("explain offers a repair, which is refused:\n%s", text)
	}
}

// What a scrub has found is counted once, also if the host that compared before goes on.
func TestAReaderThatComparesAgainCountsNothingTwice(t *testing.T) {
	s := sealedWith(t)
	for _, line := range []string{"attach db1 c1", "comply", "serve c1 db1", "attach db1 c2", "comply", "serve c2 db1", "can-scrub c1", "can-scrub c2", "scrub db1"} {
		s.run(line)
	}
	s.run("scrubbed c1 db1 found=2 at=256MiB run=r1")
	c1 := s.hosts["c1"].scrub
	s.step(Detach{Volume: "db1", Node: "c1"}) // c1 does not hear of it, and goes on
	s.run("scrubbed c2 db1 found=1 at=512MiB run=r2")
	if n := s.db1().Scrub.Found; n != 3 {
		t.Fatalf("found %d: %s", n, s.run("wanted-scrub c2"))
	}
	s.step(CancelDetach{Volume: "db1", Node: "c1"})
	s.hosts["c1"].scrub = c1
	s.run("serve c1 db1")
	s.run("serve c1 db1")
	if n := s.db1().Scrub.Found; n != 3 {
		t.Errorf("two ranges and one are %d, at %v", n, s.db1().Scrub.Position)
	}
}

// A sealed volume that was forgotten and written since is not clean because an old label says that it is sealed.
func TestAnOldSealDoesNotMakeCopiesEqual(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB", "target t2 drives=4GiB", "target t3 drives=4GiB", "host c1",
		"create db1 size=1GiB copies=3", "comply", "attach db1 c1", "comply", "serve c1 db1", "comply",
		"detach db1", "release c1 db1", "comply", "seal db1", "comply t1",
	} {
		s.run(line)
	}
	all := s.reports("t1", "t2", "t3")
	// t1 was lost, the store too, and the seal with them. The volume was written, and detached by force.
	v := s.db1()
	var sealed block.LegID
	for _, l := range v.Legs {
		if l.Node == "t1" {
			sealed = l.ID
		}
	}
	for i := range all {
		for d := range all[i].Drives {
			for l := range all[i].Drives[d].Legs {
				label := &all[i].Drives[d].Legs[l]
				if label.Leg == sealed {
					if label.Volume.Labels[sealedLabel] == "" {
						t.Fatal("t1 does not say that it is sealed")
					}
					continue
				}
				label.Volume.Labels = nil
				label.Volume.Generation += epochJump
				label.Volume.Epoch += epochJump
				label.AdmittedEpoch = label.Volume.Epoch
				label.Volume.Clean, label.Volume.Quiet = false, true
				label.Volume.InSync = slices.DeleteFunc(slices.Clone(label.Volume.InSync), func(id block.LegID) bool { return id == sealed })
				label.Volume.Others = []block.LegID{sealed}
			}
		}
	}
	state, text := rebuilt(t, all)
	got := state.volumes.Get(state.idOf("db1"))
	if inSync := legsIn(got.inSync()); inSync != 2 {
		t.Fatalf("%d legs in sync: %s", inSync, text)
	}
	if got.Clean {
		t.Errorf("the newest labels say that its copies may differ, and it counts as clean, sealed %v:\n%s", got.Sealed, text)
	}
}

// What is sealed is not written by a manager that does not know seals.
func TestARestoredSealHasItsLevel(t *testing.T) {
	s, reports := labelled(t, detachedInOrder...)
	s.state.level = sealLevel - 1
	backup := s.state.Records()
	s.state.level = block.KnownLevel
	s.run("seal db1")
	s.run("comply")
	records, err := Restored(t0, backup)
	if err != nil {
		t.Fatal(err)
	}
	state, err := Load(records)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, name := range []string{"t1", "t2", "t3"} {
			r := reports(name)[0]
			r.Generation = state.Generation()
			if _, err := state.Step(t0, TargetReported{Session: 1, Report: r}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if v := state.volumes.Get(state.idOf("db1")); v.sealed() && state.Level() < sealLevel {
		t.Errorf("sealed at level %d: a manager of that level drops the seal from the record and has the volume written", state.Level())
	}
}

// ---- random histories ----

// sealsWorld is what a history knows of volume a, once that is sealed.
type sealsWorld struct {
	sealed   int
	holds    map[wCell]int // what each register held then
	labelled bool          // the labels of all legs in sync say that it is sealed
}

// seals has an operator seal volume a in the middle of a history.
func seals(w *world) {
	w.seals = &sealsWorld{}
	w.stepped = func(in Input, _ Outcome) { w.watchSeal(in) }
}

func (w *world) sealActs() bool {
	v := w.state.volumes.Get(w.state.idOf("a"))
	switch {
	case v == nil || v.sealed():
		return false
	case v.users() == "" && (v.Clean || w.chance(5)) && w.chance(40):
		w.step(SealVolume{"a"})
	case v.users() != "" && w.rng.IntN(200) == 0:
		w.step(Detach{Volume: "a"})
	default:
		return false
	}
	return true
}

// watchSeal checks a step by what it made of volume a.
func (w *world) watchSeal(in Input) {
	x, v := w.seals, w.state.volumes.Get(w.state.idOf("a"))
	switch _, seal := in.(SealVolume); {
	case v == nil:
	case seal && v.sealed() && x.holds == nil:
		x.sealed++
		x.holds = map[wCell]int{}
		for _, l := range v.Legs {
			for r := range registers {
				if l.State == LegInSync {
					x.holds[wCell{v.ID, l.Column, r}] = w.value[l.ID][r]
				}
			}
		}
	case v.sealed():
		if err := v.check(); err != nil {
			w.violation = "I15: " + err.Error()
		}
	}
}

// checkSeal reports a sealed volume whose copies in sync do not hold what they did when it was sealed, or that
// is not sealed any more although a label said that it is.
func (w *world) checkSeal() string {
	x, v := w.seals, w.state.volumes.Get(w.state.idOf("a"))
	if x == nil || x.holds == nil || v == nil || v.Restored || v.State != VolumeReady {
		return ""
	}
	if !v.sealed() {
		if x.labelled {
			return fmt.Sprintf("I15: %s was sealed, and is not any more", v.Name)
		}
		x.holds = nil // the store was lost before a label said so
		return ""
	}
	all := true
	for _, l := range v.Legs {
		if d := w.target(l.Node).drives[l.Drive]; l.State == LegInSync && (d == nil || d.labels[l.ID].Volume.Labels[sealedLabel] == "") {
			all = false
		}
		for r := range registers {
			c := wCell{v.ID, l.Column, r}
			if l.State == LegInSync && w.value[l.ID][r] != x.holds[c] {
				return fmt.Sprintf("I15: %v is in sync and holds %d in %v, sealed with %d", &l, w.value[l.ID][r], c, x.holds[c])
			}
		}
	}
	x.labelled = x.labelled || all
	return ""
}

// The copies in sync of a sealed volume always hold what the volume held when it was sealed. Agents may be
// late, and the store may be lost.
func TestRandomHistoriesOfSealedVolumes(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]place{
		"seals":       {setting: func(w *world) { heals(w); seals(w) }},
		"moves":       {setting: func(w *world) { moves(w); heals(w); seals(w) }},
		"lost stores": {setting: func(w *world) { losesStore(w); heals(w); seals(w) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seeds := *histories / 4
			if testing.Short() {
				seeds = min(seeds, 10)
			}
			sealed, healed := 0, 0
			for seed := range seeds {
				bad, w := history(seed, p.setting)
				if bad != "" {
					t.Fatal(bad)
				}
				sealed, healed = sealed+w.seals.sealed, healed+w.heals.healed
			}
			if n := int(seeds); sealed < max(1, n/20) {
				t.Errorf("%d histories sealed %d volumes, want more", n, sealed)
			}
			t.Logf("%d histories sealed %d volumes, and healed %d legs", seeds, sealed, healed)
		})
	}
}

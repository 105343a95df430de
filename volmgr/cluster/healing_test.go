// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// heals makes hosts heal detached volumes, soon after they are detached, and operators detach
// volumes more often than otherwise.
func heals(w *world) {
	w.heals = &healsWorld{}
	w.state.SetPolicy(w.policy())
	for _, h := range w.hosts {
		w.linkHost(h)
	}
}

// healsWorld counts what happens to volume a in a history of healings.
type healsWorld struct {
	begun, healed, ended     int
	taken, crashed, restarts int
}

// watchHealing checks a step by what it made of volume a.
func (w *world) watchHealing(in Input, before Volume, v *Volume, events []event.Event) string {
	x := w.heals
	was, now := before.Heal, v.Heal
	switch {
	case was == nil && now != nil:
		x.begun++
		if before.Epoch >= now.Epoch {
			return fmt.Sprintf("I14: healing begins at epoch %d, which was over at %d", now.Epoch, before.Epoch)
		}
	case was != nil && now == nil:
		x.ended++
		if _, attach := in.(Attach); attach {
			x.taken++
		}
		if slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.State == LegRebuilding }) {
			return "I14: healing has ended, and a leg is still copied to"
		}
	}
	if was != nil && before.Clean && !v.Clean && now != nil {
		return "I14: a volume that was detached cleanly is healed, and no longer counts as clean"
	}
	begins := was != nil && was.State == Granting // then a sealed volume is left by a leg that is lost for good
	if now != nil && before.Epoch == v.Epoch && was != nil && !(v.sealed() && begins) {
		for _, l := range before.Legs {
			if now := v.leg(l.ID); l.State == LegInSync && now != nil && now.State != LegInSync && now.Retired == 0 && !now.Suspect && !l.Suspect {
				return fmt.Sprintf("I14: %v was in sync and is %s in a volume that is only healed", &l, now.State)
			}
		}
	}
	if was != nil {
		for _, l := range v.Legs {
			if old := before.leg(l.ID); old != nil && old.State == LegRebuilding && l.State == LegInSync {
				x.healed++
			}
		}
	}
	return ""
}

// healActs are what a history of healings has more of: volumes are detached, hosts that heal die, their
// agents start again without a boot, and users want the volume.
func (w *world) healActs() bool {
	v := w.state.volumes.Get(w.state.idOf("a"))
	if v == nil || !w.chance(6) {
		return false
	}
	switch h := v.Heal; {
	case v.Attachment != nil && w.chance(40):
		w.step(Detach{Volume: "a", Force: w.chance(30)})
	case v.Attachment != nil: // so that it loses a leg
		path := [2]block.NodeName{v.Attachment.Node, pick(w, w.targets).name}
		w.reach[path] = !w.reach[path]
	case h == nil && w.state.unhealable(v) == "":
		w.pass(2 * time.Second)
	case h == nil || w.chance(50):
		return false
	case w.chance(30):
		w.step(Attach{Volume: "a", Node: pick(w, w.hosts).name})
	case w.chance(40):
		host := w.hosts[slices.IndexFunc(w.hosts, func(x *wHost) bool { return x.name == h.Node })]
		if w.heals.crashed++; w.chance(50) {
			w.crashHost(host)
			return true
		}
		w.heals.restarts++
		host.runs++ // a new process, and the same boot: what was under way on its way stays so
		for id, x := range host.volumes {
			if x.wanted.Heal != "" {
				delete(host.volumes, id)
			}
		}
		if host.linked {
			w.linkHost(host)
		}
	case w.chance(30):
		w.step(ExpandVolume{"a", grown})
	default:
		w.restart()
	}
	return true
}

func TestRandomHistoriesOfHealing(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]place{
		"heals":       {setting: heals},
		"moves":       {setting: func(w *world) { moves(w); heals(w) }},
		"copies":      {setting: func(w *world) { moves(w); w.moves.copies = true; heals(w) }},
		"lost stores": {setting: func(w *world) { losesStore(w); heals(w) }},
		"bad drives":  {setting: func(w *world) { withHardware(w); heals(w) }, in: caches},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seeds := *histories / 4
			if testing.Short() {
				seeds = min(seeds, 10)
			}
			var sum healsWorld
			served := 0
			for seed := range seeds {
				if p.in != mixed {
					seed = seed*uint64(moods) + uint64(p.in)
				}
				bad, w := history(seed, p.setting)
				if bad != "" {
					t.Fatal(bad)
				}
				x := w.heals
				sum.begun, sum.ended, sum.healed, sum.taken, sum.crashed, sum.restarts = sum.begun+x.begun, sum.ended+x.ended, sum.healed+x.healed, sum.taken+x.taken, sum.crashed+x.crashed, sum.restarts+x.restarts
				served += w.serves
			}
			did := fmt.Sprintf("%d histories began %d healings and ended %d of them, %d by an attach; %d legs were healed, %d hosts died or started again (%d) meanwhile; served %d times", seeds, sum.begun, sum.ended, sum.taken, sum.healed, sum.crashed, sum.restarts, served)
			// A volume that was not detached cleanly takes two healings until a leg is healed.
			if n := int(seeds); sum.begun < n || sum.taken < n/4 || sum.healed < n/10 || sum.crashed < n/20 || served < n {
				t.Errorf("%s, want more", did)
			}
			t.Log(did)
		})
	}
}

// healed returns a script with volume db1, of two copies on t1 and t2 of which leg 0.1 is stale, that was
// detached from c1, cleanly or by force, and hosts c2 and c3, which can heal.
func healedScript(t *testing.T, force string) *script {
	s := newScript(t)
	for _, line := range []string{
		"target t1 rack=r1 drives=4GiB volatile", "target t2 rack=r2 drives=4GiB volatile", "target t3 rack=r3 drives=4GiB volatile", "host c1", "host c2", "host c3", "heals c2", "heals c3",
		"create db1 size=1GiB copies=2 spread=rack", "comply", "attach db1 c1", "comply", "serve c1 db1",
		"stale c1 db1 0.1", "comply", "detach db1 " + force, "heal-after 10s",
	} {
		s.run(line)
	}
	if force == "" {
		s.run("release c1 db1")
	} else {
		delete(s.hosts["c1"].phase, "db1")
	}
	s.run("comply")
	return s
}

// at is the node of a leg.
func (s *script) at(copy int) string { return string(s.db1().legAt(0, copy).Node) }

func (s *script) db1() *Volume { return s.state.volumes.Get(s.state.idOf("db1")) }

// begins waits until a host heals the volume, and returns its name.
func (s *script) begins() string {
	s.t.Helper()
	s.run("wait 14s t1 t2 t3 c1 c2 c3")
	if s.db1().Heal == nil {
		s.t.Fatalf("nobody heals it: %s", s.run("explain db1"))
	}
	return string(s.db1().Heal.Node)
}

// equalizes has the host that heals the volume first make its copies equal, and release it.
func (s *script) equalizes() {
	s.t.Helper()
	host := s.begins()
	s.run("comply")
	s.run("serve " + host + " db1")
	s.run("release " + host + " db1")
	if v := s.db1(); v.Heal != nil || !v.Clean {
		s.t.Fatalf("clean %v, healed by %+v", v.Clean, v.Heal)
	}
}

// copies has the host copy to leg 0.1, and returns its name. The volume is clean by then.
func (s *script) copies() string {
	s.t.Helper()
	if !s.db1().Clean {
		s.equalizes()
	}
	host := s.begins()
	s.run("comply")
	s.run("serve " + host + " db1")
	s.run("comply")
	s.run("serve " + host + " db1")
	if l := s.db1().legAt(0, 1); l.State != LegRebuilding {
		s.t.Fatalf("%v is %s: %s", l, l.State, s.run("explain db1"))
	}
	return host
}

func TestAHealerRecordsNoGoodLeg(t *testing.T) {
	s := healedScript(t, "")
	host := s.copies()
	if out := s.run("in-sync " + host + " db1 0.1"); s.db1().legAt(0, 1).State != LegInSync {
		t.Fatalf("the copy is not recorded: %s", out)
	}
	if out := s.run("stale " + host + " db1 0.0"); s.db1().legAt(0, 0).State != LegInSync {
		t.Errorf("a leg in sync of a volume that nobody writes is stale: %s", out)
	}
}

func TestHealingWaitsForEveryFence(t *testing.T) {
	s := healedScript(t, "force")
	s.run("heal-after 1000h")
	for _, line := range []string{"attach db1 c1", "comply", "serve c1 db1", "comply", "serve c1 db1", "in-sync c1 db1 0.1", "update db1 copies=3", "comply", "serve c1 db1"} {
		s.run(line)
	}
	delete(s.hosts["c1"].phase, "db1")
	s.run("detach db1 force")
	s.run("heal-after 10s")
	s.run("comply")
	if n := len(s.db1().column(0)); n != 3 {
		t.Fatalf("there are %d legs", n)
	}
	s.begins()
	for _, name := range []string{"t1", "t2", "t3"} {
		if name != s.at(1) {
			s.run("comply " + name)
		}
	}
	if h := s.db1().Heal; h == nil || h.State != Granting {
		t.Errorf("it is handed out, and a leg's target has not fenced the host before: %+v", h)
	}
	s.run("comply")
	if h := s.db1().Heal; h == nil || h.State != Granted || !h.Equalize {
		t.Errorf("it is not handed out to be made equal: %+v", h)
	}
}

// Which targets demand a proof of the host that heals a volume is settled when it gets the volume: they cannot
// begin to demand it when it is connected.
func TestTheProofIsSettledWhenAHostGetsAVolumeToHeal(t *testing.T) {
	s := healedScript(t, "")
	for _, line := range []string{"term", "able t1 yes", "able t2 yes", "able t3 yes", "able c2 yes", "able c3 yes"} {
		s.run(line)
	}
	s.begins()
	for i := 0; s.db1().Heal.State == Granting; i++ {
		if i == 30 {
			t.Fatalf("nobody gets it: %s", s.run("explain db1"))
		}
		s.run(fmt.Sprintf("comply t%d", i%3+1)) // one report at a time
	}
	h := s.db1().Heal
	for _, l := range s.db1().Legs {
		if _, settled := h.Proven.At[l.Node]; !h.Proven.By || !settled {
			t.Errorf("host %s is to connect to %s, and it is open whether that demands a proof: %+v", h.Node, l.Node, h.Proven)
		}
	}
}

// A user gets the volume as if it was not healed: no target is waited for but those that have legs in
// sync, also if the host that heals it and the target of the leg that is copied to do not answer.
func TestAUserEndsHealingAtOnce(t *testing.T) {
	for name, x := range map[string]struct {
		force  string
		begins func(*script) string
	}{
		"while it copies":                 {"", (*script).copies},
		"while it makes the copies equal": {"force", (*script).begins},
		"after it did":                    {"force", (*script).copies},
	} {
		t.Run(name, func(t *testing.T) {
			s := healedScript(t, x.force)
			host := x.begins(s)
			s.run("comply")
			was := s.db1()
			s.run("attach db1 c1")
			if v := s.db1(); v.Heal != nil || v.Epoch != was.Epoch+1 || v.legAt(0, 1).State != LegStale || v.Clean != was.Clean {
				t.Errorf("healed by %+v at epoch %d, before %d; %v is %s; clean %v, before %v", v.Heal, v.Epoch, was.Epoch, v.legAt(0, 1), v.legAt(0, 1).State, v.Clean, was.Clean)
			}
			s.run("comply " + s.at(0))
			if a := s.db1().Attachment; a.State != Granted || a.Equalize == was.Clean {
				t.Errorf("it is %s, to be made equal: %v", a.State, a.Equalize)
			}
			if out := s.run("in-sync " + host + " db1 0.1 epoch=" + fmt.Sprint(was.Epoch)); s.db1().legAt(0, 1).State != LegStale {
				t.Errorf("the host that healed it has its copy recorded: %s", out)
			}
			for _, x := range s.state.WantedTarget(block.NodeName(s.at(0))).Exports {
				if x.Epoch != s.db1().Epoch {
					t.Errorf("epoch %d is exported", x.Epoch)
				}
			}
		})
	}
}

// The copy is in a cache when its target loses power: it may not count as begun.
func TestALegThatIsHealedLosesPower(t *testing.T) {
	s := healedScript(t, "")
	s.copies()
	s.run("reboot " + s.at(1))
	if l := s.db1().legAt(0, 1); l.State == LegRebuilding || !l.CopyAll {
		t.Errorf("%v is %s, and all of it is to be copied: %v", l, l.State, l.CopyAll)
	}
	if !s.db1().Clean {
		t.Error("the volume does not count as detached cleanly")
	}
	s.run("reboot " + s.at(0)) // its leg was flushed when the volume was detached
	if l := s.db1().legAt(0, 0); l.Suspect || l.State != LegInSync {
		t.Errorf("%v is %s, suspect: %v", l, l.State, l.Suspect)
	}
}

// What was made equal to a leg that loses its cache may be newer than what that has now.
func TestHealingEndsWhenItsSourceLosesItsCache(t *testing.T) {
	s := healedScript(t, "force")
	s.begins()
	s.run("comply")
	s.run("reboot " + s.at(0))
	if v := s.db1(); v.Heal != nil || v.Clean {
		t.Errorf("clean %v, healed by %+v", v.Clean, v.Heal)
	}
}

// The loss of one leg ends the healing, which changes another leg of the same target: that one is not lost
// twice.
func TestALegIsRecordedStaleOnceWhenItsTargetLosesPower(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{
		"target t1 rack=r1 drives=4GiB volatile", "target t2 rack=r2 drives=4GiB volatile", "host c1", "heals c1",
		"create db1 size=1GiB copies=2 stripes=2 spread=rack", "comply", "attach db1 c1", "comply", "serve c1 db1",
	} {
		s.run(line)
	}
	for _, line := range []string{"stale c1 db1 1.1", "comply", "detach db1", "heal-after 10s", "release c1 db1", "comply", "wait 14s t1 t2 c1", "comply", "serve c1 db1", "comply", "serve c1 db1"} {
		s.run(line)
	}
	v := s.db1().clone()
	lost := v.legAt(1, 1)
	if lost.State != LegRebuilding {
		t.Fatalf("%v is %s: %s", lost, lost.State, s.run("explain db1"))
	}
	v.Clean = false // as a volume that a manager of an earlier version began to heal
	s.state.volumes.Set(s.state.by, v.ID, v)
	was := lost.Revision
	s.run("reboot " + string(lost.Node))
	if v := s.db1(); v.Heal != nil || v.legAt(1, 1).State != LegStale || v.legAt(1, 1).Revision != was+1 {
		t.Errorf("healed by %+v; %v is %s at revision %d, before %d", v.Heal, v.legAt(1, 1), v.legAt(1, 1).State, v.legAt(1, 1).Revision, was)
	}
}

// A volume that was not detached cleanly is clean as soon as its copies are equal, and not only when all is
// copied: that can take hours, in which it could not be shared and no snapshot of it could be taken.
func TestAnUncleanVolumeIsCleanBeforeItIsCopied(t *testing.T) {
	s := healedScript(t, "force")
	host := s.begins()
	s.run("comply")
	s.run("equalize " + host + " db1")
	if h := s.db1().Heal; h == nil || h.State != Granted || !h.Equalize {
		t.Fatalf("it is healed by %+v", h)
	}
	s.run("serve " + host + " db1")
	s.run("comply")
	if v := s.db1(); v.Heal == nil || v.Heal.State != Detaching || v.legAt(0, 1).State != LegStale {
		t.Fatalf("healed by %+v, and %v is %s", v.Heal, v.legAt(0, 1), v.legAt(0, 1).State)
	}
	s.run("release " + host + " db1")
	if v := s.db1(); v.Heal != nil || !v.Clean || v.Holder != "" {
		t.Fatalf("healed by %+v, clean %v, held by %q", v.Heal, v.Clean, v.Holder)
	}
	s.run("wait 3s t1 t2 t3 c1 c2 c3") // it has waited once
	s.run("comply")
	if h := s.db1().Heal; h == nil || h.State != Granted || h.Equalize {
		t.Errorf("next it is healed by %+v", h)
	}
}

// One that is released, but not cleanly, is made equal once more.
func TestAHealerThatDoesNotReleaseCleanlyLeavesTheVolumeUnclean(t *testing.T) {
	s := healedScript(t, "force")
	host := s.begins()
	s.run("comply")
	s.run("serve " + host + " db1")
	s.run("release " + host + " db1 unclean")
	if v := s.db1(); v.Heal != nil || v.Clean {
		t.Fatalf("healed by %+v, clean %v", v.Heal, v.Clean)
	}
	s.begins()
	s.run("comply")
	if h := s.db1().Heal; h == nil || !h.Equalize {
		t.Errorf("next it is healed by %+v", h)
	}
}

// Only what fails is an attempt in vain: after that the volume waits, and it says for what.
func TestAUserWhoEndsHealingCostsNoAttempt(t *testing.T) {
	for name, x := range map[string]struct {
		end   []string
		fails bool
	}{
		"a user":           {end: []string{"attach db1 c1", "comply", "serve c1 db1", "wait 3s t1 t2 t3 c1 c2 c3", "detach db1", "release c1 db1", "comply"}},
		"an expansion":     {end: []string{"expand db1 size=2GiB", "comply"}},
		"another process":  {end: []string{"heals c2", "heals c3", "wait 1s t1 t2 t3 c1 c2 c3"}, fails: true},
		"a silent healer":  {end: []string{"wait 30s t1 t2 t3 c1"}, fails: true},
		"a lost good copy": {end: []string{"lost t1", "lost t2", "lost t3", "wait 20s c1 c2 c3"}, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := healedScript(t, "")
			s.copies()
			for _, line := range x.end {
				s.run(line)
			}
			if s.db1().Heal != nil {
				t.Fatalf("it is still healed by %+v", s.db1().Heal)
			}
			if n := s.state.healings.Get(s.db1().ID).failures; n != 0 != x.fails {
				t.Errorf("%d attempts failed", n)
			}
		})
	}
}

func TestAVolumeWhoseHealingFailedSaysWhenItGoesOn(t *testing.T) {
	s := healedScript(t, "")
	host := s.copies()
	s.run("heals " + host)
	s.run("wait 1s t1 t2 t3 c1 c2 c3")
	if text := s.run("explain db1"); !strings.Contains(text, "the next one begins after 20") || !strings.Contains(text, "1 attempt failed, the last one because the agent of host "+host+" has started again") {
		t.Errorf("it does not say so: %s", text)
	}
}

// Those whose attempts fail come after all others, however few copies they have.
func TestVolumesWhoseHealingFailsTakeNoTurns(t *testing.T) {
	s := healedScript(t, "")
	at := s.now
	var all []*Volume
	for i, failed := range []time.Time{at.Add(2 * time.Minute), {}, at.Add(time.Minute), {}} {
		v := &Volume{ID: block.VolumeID{UUID: block.UUID{byte(i)}}, Layout: block.Layout{Stripes: 1, Copies: 2}}
		s.state.healings.Set(s.state.by, v.ID, healing{since: at.Add(-time.Duration(i) * time.Second), failed: failed})
		all = append(all, v)
	}
	s.state.inTurn(all)
	var turns []byte
	for _, v := range all {
		turns = append(turns, v.ID.UUID[0])
	}
	if !slices.Equal(turns, []byte{3, 1, 2, 0}) {
		t.Errorf("in turn come %v", turns)
	}
}

// The host from which it was taken by force may hang, or have the old device in use: it heals only if no other
// host can.
func TestTheHostThatLostAVolumeHealsItLast(t *testing.T) {
	s := healedScript(t, "force")
	s.run("heals c1")
	if host := s.state.healer(s.db1(), nil, 2); host != "c1" {
		t.Errorf("third is %s", host)
	}
	busy := map[block.NodeName]bool{"c2": true, "c3": true}
	if host := s.state.healer(s.db1(), busy, 0); host != "c1" {
		t.Errorf("while the others heal, %q does", host)
	}
}

// Hosts heal over TCP. A volume that they cannot reach is not given to one, which would find that out in a
// minute, again and again.
func TestAVolumeThatNoHostReachesIsNotHealed(t *testing.T) {
	for name, copy := range map[string]int{"in sync": 0, "to copy to": 1} {
		t.Run(name, func(t *testing.T) {
			s := healedScript(t, "")
			s.targets[s.at(copy)].transport = block.RDMA
			s.run("wait 60s t1 t2 t3 c1 c2 c3")
			if s.db1().Epoch != 1 {
				t.Errorf("it is healed at epoch %d", s.db1().Epoch)
			}
			if text := s.run("explain db1"); !strings.Contains(text, "target "+s.at(copy)+", with leg 0."+fmt.Sprint(copy)) || !strings.Contains(text, "has no TCP portal") {
				t.Errorf("it does not say why: %s", text)
			}
			s.targets[s.at(copy)].transport = block.TCP
			s.begins()
		})
	}
}

// A manager that leads, and is told that detached volumes are not healed, ends the healing that another one
// has begun, in order.
func TestHealingIsTurnedOff(t *testing.T) {
	s := healedScript(t, "")
	host := s.copies()
	s.run("heal-after 0s")
	s.run("wait 1s t1 t2 t3 c1 c2 c3")
	if h := s.db1().Heal; h == nil || h.State != Detaching {
		t.Fatalf("it is healed by %+v", h)
	}
	s.run("release " + host + " db1")
	s.run("wait 60s t1 t2 t3 c1 c2 c3")
	if v := s.db1(); v.Heal != nil || !v.Clean {
		t.Errorf("clean %v, healed by %+v", v.Clean, v.Heal)
	}
}

func TestAHealerThatStartsAgainIsFenced(t *testing.T) {
	s := healedScript(t, "")
	host, epoch := s.copies(), s.db1().Epoch
	s.run("heals " + host)
	s.run("wait 1s t1 t2 t3 c1 c2 c3")
	if v := s.db1(); v.Heal != nil || v.Epoch == epoch {
		t.Errorf("at epoch %d, healed by %+v", v.Epoch, v.Heal)
	}
	if s.run("wait 60s t1 t2 t3 c1 c2 c3"); s.db1().Heal == nil || string(s.db1().Heal.Node) == host {
		t.Errorf("after a minute it is healed by %+v, want another host", s.db1().Heal)
	}
}

func TestNothingIsHealedThatIsChanging(t *testing.T) {
	s := healedScript(t, "")
	id := s.db1().ID
	s.state.takings.Set(s.state.by, id, []block.VolumeID{id})
	if s.run("wait 60s t1 t2 t3 c1 c2 c3"); s.db1().Heal != nil {
		t.Error("it is healed while a snapshot of it is taken")
	}
	s.state.takings.Delete(s.state.by, id)
	s.copies()
	s.run("expand db1 size=2GiB")
	if v := s.db1(); v.Heal != nil || v.ExpandingTo == 0 {
		t.Errorf("it is expanded, and healed by %+v", v.Heal)
	}
}

func TestHealingWaitsForItsLevel(t *testing.T) {
	s := healedScript(t, "")
	s.state.level = healLevel - 1
	s.store[LevelKey] = encode(LevelKey, levelRecord{s.state.level}).Value
	if s.run("wait 60s t1 t2 t3 c1 c2 c3"); s.db1().Heal != nil {
		t.Error("it is healed at a level of which older managers know nothing")
	}
}

// A drained host lets go in order, and another one goes on. One that does not is fenced.
func TestADrainedHostLetsGo(t *testing.T) {
	s := healedScript(t, "")
	host := s.copies()
	s.run("maintain " + host + " for=1h")
	s.run("wait 1s t1 t2 t3 c1 c2 c3")
	if h := s.db1().Heal; h == nil || h.State != Detaching || s.db1().users() != "" {
		t.Fatalf("it is healed by %+v, used by %q", h, s.db1().users())
	}
	epoch := s.db1().Epoch
	if s.run("wait 12s t1 t2 t3 c1 c2 c3"); s.db1().Heal != nil || s.db1().Epoch == epoch {
		t.Errorf("12 s later, at epoch %d, it is healed by %+v", s.db1().Epoch, s.db1().Heal)
	}
	if s.run("wait 60s t1 t2 t3 c1 c2 c3"); s.db1().Heal == nil || string(s.db1().Heal.Node) == host {
		t.Errorf("after a minute it is healed by %+v, want another host", s.db1().Heal)
	}
}

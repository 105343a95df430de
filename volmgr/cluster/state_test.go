// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

func TestAReportThatSaysNothingNewCommitsNothing(t *testing.T) {
	s, _ := labelled(t)
	for _, target := range s.targets {
		out, err := s.state.Step(s.now, TargetReported{Session: s.session, Report: target.report()})
		if err != nil || len(out.Records) > 0 || len(out.Wake) > 0 {
			t.Errorf("Step(same report of %s) = %d records, wake %v, %v; want nothing", target.name, len(out.Records), out.Wake, err)
		}
	}
	out, err := s.state.Step(s.now, Tick{})
	if err != nil || len(out.Records) > 0 {
		t.Errorf("Step(Tick) = %d records, %v; want nothing", len(out.Records), err)
	}
}

func TestAnOlderStreamCanNotSpeakAfterANewerOne(t *testing.T) {
	s, _ := labelled(t)
	t1 := s.targets["t1"]
	s.state.Step(s.now, TargetReported{Session: 7, Report: t1.report()})
	old := t1.report()
	old.BootID = "an older boot"
	for _, in := range []Input{TargetReported{Session: 3, Report: old}, TargetLost{3, "t1"}} {
		out, err := s.state.Step(s.now, in)
		n, _ := s.state.Node("t1")
		if err != nil || len(out.Events) > 0 || !n.Target.Online || n.Target.BootID != t1.bootID() {
			t.Errorf("Step(%T of an older stream) = %v, %v; node %+v; want it ignored", in, out.Events, err, n.Target)
		}
	}
	s.state.Step(s.now, TargetLost{7, "t1"})
	if n, _ := s.state.Node("t1"); n.Target.Online {
		t.Error("the newest stream closed and the target is still online")
	}
}

func TestAnAgentIsSilentSinceItsLastReport(t *testing.T) {
	s, _ := labelled(t)
	t1 := s.targets["t1"]
	s.state.Step(s.now, TargetReported{Session: s.session, Report: t1.report()})
	later := s.now.Add(OnlineWithin)
	s.state.Step(later, Tick{})
	if n, _ := s.state.Node("t1"); !n.Target.Online || n.Target.Silent != 0 {
		t.Errorf("within the time = %+v, want it online and not silent", n.Target)
	}
	s.state.Step(later, TargetLost{s.session, "t1"})
	if n, _ := s.state.Node("t1"); n.Target.Online || n.Target.Silent != OnlineWithin {
		t.Errorf("with its stream closed = %+v, want it silent for %v", n.Target, OnlineWithin)
	}
}

func TestOldEventsGoFirst(t *testing.T) {
	t.Parallel()
	s, records := New(testCluster())
	store := map[string][]byte{}
	keep(store, records)
	for i := range event.Max/2 + 50 {
		for _, in := range []Input{CreatePool{Name: fmt.Sprintf("p%d", i)}, DeletePool{Name: fmt.Sprintf("p%d", i)}} {
			out, err := s.Step(t0, in)
			if err != nil {
				t.Fatal(err)
			}
			keep(store, out.Records)
		}
	}
	events := s.Events("", 0, 2*event.Max)
	if len(events) != event.Max || events[0].Seq != 101 || events[event.Max-1].Seq != event.Max+100 {
		t.Fatalf("Events = %d from %d to %d, want the newest %d", len(events), events[0].Seq, events[len(events)-1].Seq, event.Max)
	}
	again := loadStore(t, store)
	if got := again.Events("pool p7", 0, 0); len(got) != 0 {
		t.Errorf("Events(pool p7) = %v, want them gone", got)
	}
	if got := again.Events("", event.Max+98, 0); len(got) != 2 || got[0].Object != got[1].Object {
		t.Errorf("Events(after %d) = %v, want the last two, oldest first", event.Max+98, got)
	}
}

func TestTheLeaseRunsByTheMonotonicClock(t *testing.T) {
	s, _ := labelled(t, "lost t1", "lost t2", "lost t3", "detach db1 force", "attach db1 c1")
	now := time.Now()
	v, _ := s.state.Volume("db1")
	one := s.targets[string(v.Legs[0].Node)]
	one.comply(s.state.WantedTarget(one.name))
	s.state.Step(now, TargetReported{Session: s.session, Report: one.report()})
	// attach is refused without a target online, so ask again now that one is online.
	if _, err := s.state.Step(now, Attach{Volume: "db1", Node: "c1"}); err != nil {
		t.Fatal(err)
	}
	one.comply(s.state.WantedTarget(one.name))
	s.state.Step(now, TargetReported{Session: s.session, Report: one.report()})
	for _, c := range []struct {
		after time.Duration
		want  AttachmentState
	}{{ClientLease - time.Millisecond, Granting}, {ClientLease, Granted}} {
		s.state.Step(now.Add(c.after), TargetReported{Session: s.session, Report: one.report()})
		if v, _ := s.state.Volume("db1"); v.Attachment.State != c.want {
			t.Errorf("%v after the first fence the attachment is %s, want %s", c.after, v.Attachment.State, c.want)
		}
	}
}

func TestEveryRefusalIsAnErrorOfThisPackage(t *testing.T) {
	s, _ := labelled(t)
	id := block.VolumeID{UUID: block.UUID{1}}
	for _, in := range []Input{
		SetNodeLabels{Node: "x"}, ConfirmNodeDead{"x"}, RemoveNode{"t1"}, AddDrive{Node: "x"}, DrainDrive{}, MoveLeg{Volume: "x"}, CordonNode{Node: "x"}, MaintainNode{Node: "t1"},
		CreatePool{}, DeletePool{DefaultPool}, CreateVolume{}, DeleteVolume{"db1"}, PromoteStaleLeg{Volume: "x"}, Attach{Volume: "x"}, AddHost{}, AddHost{Node: "h1"}, Detach{Volume: "x"},
		TargetReported{}, InitiatorReported{}, RecordStale{Volume: id}, RecordInSync{Volume: id},
	} {
		before := s.state.Generation()
		_, err := s.state.Step(s.now, in)
		var e *Error
		if !errors.As(err, &e) || e.Kind == 0 || e.Text == "" {
			t.Errorf("Step(%T) = %v, want an *Error with a kind and a text", in, err)
		}
		if s.state.Generation() != before {
			t.Errorf("Step(%T) was refused and moved the generation", in)
		}
	}
}

// FuzzLoad: Load accepts or refuses any content of a store, and every query works on a
// state that it accepts.
func FuzzLoad(f *testing.F) {
	w := newWorld(1)
	for _, r := range w.state.Records() {
		f.Add(r.Key, r.Value)
	}
	f.Add("v/x", []byte(`{"layout":{"Stripes":1,"Copies":1,"Chunk":4096},"legs":[{"column":0,"state":"REBUILDING"}]}`))
	base := w.state.Records()
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		s, err := Load(append(base[:len(base):len(base)], Record{key, value}))
		if err != nil {
			return
		}
		s.Status()
		for _, v := range s.Volumes() {
			if _, err := s.Explain(v.ID.String()); err != nil {
				t.Errorf("Explain(%v) = %v", v.ID, err)
			}
		}
		for _, n := range s.Nodes() {
			s.WantedTarget(n.Name)
			s.WantedInitiator(n.Name)
		}
	})
}

// The records on disk outlive this version. A change of their form fails here: it needs a
// new schema number and a way to read the old form.
func TestRecordsKeepTheirForm(t *testing.T) {
	s, _ := labelled(t, "label t1 rack=r1", "pool gold class=gold", "stale c1 db1 0.1")
	var b strings.Builder
	for _, r := range s.state.Records() {
		if !strings.HasPrefix(r.Key, "e/") || strings.HasSuffix(r.Key, "1") {
			fmt.Fprintf(&b, "%s %s\n", r.Key, r.Value)
		}
	}
	const file = "testdata/records.golden"
	if *rewrite {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	var records []Record
	for line := range strings.Lines(string(want)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		records = append(records, Record{key, []byte(value)})
	}
	if _, err := Load(records); err != nil {
		t.Errorf("Load(%s) = %v", file, err)
	}
}

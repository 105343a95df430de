// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// scrub db1 [stop|pause|resume|repair] [rate=1MiB] [from=0.1,1.0] asks for a scrub.
func (s *script) scrub(a args) string {
	in := ScrubVolume{
		Volume: a.word(0), Stop: a.has("stop"), Pause: a.has("pause"), Resume: a.has("resume"), Repair: a.has("repair"),
		Rate: s.size(a.options["rate"]), Seed: s.seed(),
	}
	for _, leg := range strings.FieldsFunc(a.options["from"], func(r rune) bool { return r == ',' }) {
		var l ScrubLeg
		fmt.Sscanf(leg, "%d.%d", &l.Column, &l.Copy)
		in.From = append(in.From, l)
	}
	return s.step(in)
}

// scrub-every db1 168h [rate=50MiB] sets a volume's schedule.
func (s *script) scrubEvery(a args) string {
	every, err := time.ParseDuration(a.word(1))
	if err != nil {
		s.t.Fatal(err)
	}
	rate := s.size(a.options["rate"])
	return s.step(UpdateVolume{Volume: a.word(0), ScrubEvery: &every, ScrubRate: &rate})
}

// wantedScrub c1 shows what a host is to scrub.
func (s *script) wantedScrub(a args) (out string) {
	for _, w := range s.state.WantedInitiator(a.node(0)).Attachments {
		if c := w.Scrub; c != nil {
			out += fmt.Sprintf("%s: rate %v, repair %v, %s named, from %d:%v, run %q recorded %d\n", w.VolumeName, c.Rate, c.Repair, legList(c.From), c.Begin.Column, c.Begin.Off, c.Run, c.Recorded)
		}
	}
	if out == "" {
		return "none\n"
	}
	return out
}

// scrubbed c1 db1 found=2 at=512MiB [done] [run=r1] [settled=2] lets a host report on the wanted
// scrub; "other": on another one. With "repairs", a copy is right; without "known" none is known to
// be.
func (s *script) scrubbed(a args) string {
	v := s.state.volumes.Get(s.state.idOf(block.VolumeName(a.word(1))))
	at := s.size(a.options["at"])
	r := &ScrubReport{
		ID: v.Scrub.ID, Run: a.options["run"], Done: a.has("done"), Repairs: a.has("repairs"), Compared: at, Total: v.Layout.LegSize(v.Size),
		ScrubCounts: ScrubCounts{Found: a.number("found", 0), Settled: a.number("settled", 0)},
	}
	if r.Run != "" {
		r.Position.Off = at
	}
	if a.has("other") {
		r.ID = "another"
	}
	for i := range r.Found {
		f := ScrubFinding{Off: block.Size(i) * block.MiB, Length: 4 * block.KiB, Equal: [][]int{{0}, {1}}, Right: -1}
		if i > 0 {
			f.Equal, f.Unreadable, f.Right = [][]int{{0}}, []int{1}, 0
		}
		if a.has("known") {
			f.Right = 1
		}
		switch {
		case i >= r.Settled:
		case f.Right < 0:
			f.Outcome = ScrubNotKnown
		default:
			f.Outcome = ScrubRepaired
			r.Repaired++
		}
		r.Findings = append(r.Findings, f)
	}
	s.hosts[a.word(0)].scrub, s.hosts[a.word(0)].scrubs = r, true
	return s.reportHost(a.word(0))
}

// A host refuses a volume whose scrub begins where there is nothing, so such a place is not
// recorded.
func TestAScrubIsNotRecordedToBeWhereItCannotBe(t *testing.T) {
	for what, c := range map[string]struct {
		at   ScrubPosition
		want ScrubPosition
	}{
		"a place":             {ScrubPosition{0, 8 * block.KiB}, ScrubPosition{0, 8 * block.KiB}},
		"the end":             {ScrubPosition{0, block.GiB}, ScrubPosition{0, block.GiB}},
		"behind the end":      {ScrubPosition{0, block.GiB + 4*block.KiB}, ScrubPosition{}},
		"no such column":      {ScrubPosition{1, 0}, ScrubPosition{}},
		"before the first":    {ScrubPosition{-1, 0}, ScrubPosition{}},
		"in a block's middle": {ScrubPosition{0, 512}, ScrubPosition{}},
	} {
		s := newScript(t)
		for _, line := range []string{
			"target t1 drives=4GiB", "target t2 drives=4GiB", "create db1 size=1GiB stripes=1", "comply", "host c1", "attach db1 c1", "comply", "serve c1 db1",
			"scrub db1", "scrubbed c1 db1 at=4KiB run=r1",
		} {
			s.run(line)
		}
		s.hosts["c1"].scrub.Position = c.at
		s.reportHost("c1")
		s.run("scrub db1 pause")
		if got := s.state.volumes.Get(s.state.idOf("db1")).Scrub.Position; got != c.want {
			t.Errorf("%s: recorded is %+v, want %+v", what, got, c.want)
		}
	}
}

// A repair may need space where a copy has none, and all of the volume's I/O waits for it on some hosts.
func TestNothingIsRepairedWhileALegHasNoSpace(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB", "target t2 drives=4GiB", "create db1 size=1GiB stripes=1", "comply", "host c1", "attach db1 c1", "comply", "serve c1 db1",
		"scrub db1 repair from=0.1", "scrubbed c1 db1 found=1 at=4KiB run=r1 repairs known",
	} {
		s.run(line)
	}
	const waits = "scrub: space on leg 0.0 on t1, before it repairs what it has found"
	for _, full := range []bool{false, true, false} {
		s.state.fullLegs[s.state.volumes.Get(s.state.idOf("db1")).Legs[0].ID] = full
		want := map[bool]string{false: "recorded 1", true: "recorded 0"}[full]
		if got := s.run("wanted-scrub c1"); !strings.Contains(got, want) {
			t.Errorf("a leg is full: %v; the host is told %q", full, got)
		}
		if got := s.run("explain db1"); strings.Contains(got, waits) != full {
			t.Errorf("a leg is full: %v; explain says\n%s", full, got)
		}
	}
}

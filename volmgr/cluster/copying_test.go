// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// copied c1 db1 0.1 done=1GiB total=2GiB [speed=100MiB] [what=all] [waits=space] lets a host report on the rebuild of a leg.
func (s *script) copied(a args) string {
	var column, copy int
	fmt.Sscanf(a.word(2), "%d.%d", &column, &copy)
	l := s.state.volumes.Get(s.state.idOf(block.VolumeName(a.word(1)))).legAt(column, copy)
	s.hosts[a.word(0)].copies = []CopyReport{{l.ID, s.size(a.options["done"]), s.size(a.options["total"]), s.size(a.options["speed"]), a.options["what"], a.options["waits"]}}
	return s.reportHost(a.word(0))
}

// rebuild-rate db1 500MiB sets the rate of a volume's rebuilds.
func (s *script) rebuildRate(a args) string {
	rate := s.size(a.word(1))
	return s.step(UpdateVolume{Volume: a.word(0), RebuildRate: &rate})
}

// rebuilds db1 shows its rebuilds, and what its host is told of how to copy.
func (s *script) rebuilds(a args) string {
	var b strings.Builder
	v, err := s.state.Volume(a.word(0))
	if err != nil {
		return printError(err)
	}
	for _, r := range v.Rebuilds {
		fmt.Fprintf(&b, "%d.%d on %s", r.Column, r.Copy, r.Node)
		if r.Replaces != "" {
			fmt.Fprintf(&b, " for %s", r.Replaces)
		}
		switch {
		case r.Ended.IsZero():
			fmt.Fprintf(&b, ": %s\n", r)
		default:
			fmt.Fprintf(&b, ": %v of %v in %v%s\n", r.Done, r.Total, r.Ended.Sub(r.Began), because(r.Failed))
		}
	}
	for _, w := range s.state.WantedInitiator(v.Attachment.Node).Attachments {
		for _, l := range w.Legs {
			if w.Volume == v.ID && l.State == LegRebuilding {
				fmt.Fprintf(&b, "wanted: leg %d.%d revision %d, copy all %v since %d%s, at %v\n", l.Column, l.Copy, l.Revision, l.CopyAll, l.CopyAllSince, without(l), w.RebuildRate)
			}
		}
	}
	return b.String()
}

func TestARecordKeepsTheLastRebuilds(t *testing.T) {
	x := &tx{s: empty(), now: t0}
	v := &Volume{}
	for i := range 3 * mostPastRebuilds {
		l := &Leg{ID: block.LegID{UUID: testSeed(i).id(0)}, Column: i % 2}
		x.now = t0.Add(time.Duration(i) * time.Second)
		x.beginRebuild(v, l)
		if i == 1 || i == 3*mostPastRebuilds-1 {
			continue // it stays under way
		}
		x.endRebuild(v, l.ID, block.GiB, "")
	}
	var underWay, ended int
	for i, r := range v.Rebuilds {
		if r.Ended.IsZero() {
			underWay++
		} else {
			ended++
		}
		if i > 0 && r.Began.After(v.Rebuilds[i-1].Began) {
			t.Errorf("rebuild %d began after the one before it in the list", i)
		}
	}
	if underWay != 2 || ended != mostPastRebuilds-1 {
		t.Errorf("%d under way and %d ended, want all 2 and the last %d", underWay, ended, mostPastRebuilds-1)
	}
}

func TestTheTimeLeftIsThatOfTheRecentSpeed(t *testing.T) {
	for _, c := range []struct {
		report CopyReport
		after  time.Duration
		want   string
	}{
		{CopyReport{Done: 10 * block.GiB, Total: 40 * block.GiB, Speed: 100 * block.MiB}, time.Minute, "10GiB of 40GiB, 25%, 100MiB a second, 5m7s left"},
		{CopyReport{Done: 10 * block.GiB, Total: 40 * block.GiB}, 100 * time.Second, "10GiB of 40GiB, 25%, 102.4MiB a second, 5m0s left"}, // the average
		{CopyReport{Done: 10 * block.GiB, Total: 40 * block.GiB}, 0, "10GiB of 40GiB, 25%"},
		{CopyReport{Total: 40 * block.GiB}, time.Minute, "0B of 40GiB, 0%"},
		{CopyReport{Done: 41 * block.GiB, Total: 40 * block.GiB, Speed: block.GiB}, time.Minute, "40GiB of 40GiB, 100%, 1GiB a second, 0s left"},
		{CopyReport{}, time.Minute, ""},
	} {
		r := LegRebuild{Began: t0}
		if r.progress(c.report, t0.Add(c.after)); r.String() != c.want {
			t.Errorf("%+v after %v: %q, want %q", c.report, c.after, r, c.want)
		}
	}
}

// without says since when all of a leg is to be copied by a host that tracks what it has not flushed.
func without(l WantedLink) string {
	switch {
	case !l.CacheLost:
		return ""
	case l.AllSince == 0:
		return ", or what it lost with its cache"
	}
	return fmt.Sprintf(", or since %d and what it lost with its cache", l.AllSince)
}

// TestALossOfItsCacheCountsBesideOtherReasonsToCopyALeg: what a stale leg lacks for another reason, all
// of it lacks, whatever its host has tracked.
func TestALossOfItsCacheCountsBesideOtherReasonsToCopyALeg(t *testing.T) {
	type all struct {
		CopyAll      bool
		CopyAllSince uint64
		CacheLost    bool
		AllSince     uint64
	}
	for name, c := range map[string]struct {
		leg  Leg
		then func(*Leg)
		want all
	}{
		"a leg that was in sync":              {Leg{Revision: 3}, (*Leg).copyUnflushed, all{true, 3, true, 0}},
		"again":                               {Leg{Revision: 4, CopyAll: true, CopyAllSince: 3, CacheLost: true}, (*Leg).copyUnflushed, all{true, 4, true, 0}},
		"a new leg":                           {Leg{Revision: 4, CopyAll: true, CopyAllSince: 1}, (*Leg).copyUnflushed, all{true, 4, true, 1}},
		"a new leg, again":                    {Leg{Revision: 5, CopyAll: true, CopyAllSince: 4, CacheLost: true, AllSince: 1}, (*Leg).copyUnflushed, all{true, 5, true, 1}},
		"of an older manager":                 {Leg{Revision: 4, CopyAll: true}, (*Leg).copyUnflushed, all{true, 4, false, 0}},
		"another reason comes after the loss": {Leg{Revision: 5, CopyAll: true, CopyAllSince: 4, CacheLost: true, AllSince: 1}, (*Leg).copyAll, all{true, 5, false, 0}},
		"in sync":                             {Leg{Revision: 5, CopyAll: true, CopyAllSince: 4, CacheLost: true, AllSince: 1}, (*Leg).good, all{}},
	} {
		l := c.leg
		if c.then(&l); (all{l.CopyAll, l.CopyAllSince, l.CacheLost, l.AllSince}) != c.want {
			t.Errorf("%s: %+v, want %+v", name, l, c.want)
		}
	}
}

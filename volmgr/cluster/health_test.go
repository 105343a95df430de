// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/health"
)

// health t1 nvme0n1 warning=4 spare=8 media=5 ios=200 ms=90 gives a drive's target a reading of
// it: bits of the critical warning, per cent of spare with a threshold of 10, media errors, and
// the reads and writes of a minute with their mean time. "unread": its log does not answer.
func (s *script) health(a args) string {
	t := s.targets[a.word(0)]
	r := health.Reading{Time: s.now, IOs: uint64(a.number("ios", 0)), Latency: time.Duration(a.number("ms", 0)) * time.Millisecond}
	if r.Unread = "it does not answer"; !a.has("unread") {
		r.Unread, r.Smart = "", &health.Smart{
			Warning: uint8(a.number("warning", 0)), Celsius: 40, Spare: a.number("spare", 100), SpareThreshold: 10,
			MediaErrors: uint64(a.number("media", 0)),
		}
	}
	for i, dev := range t.devices {
		if dev.Path == "/dev/"+a.word(1) {
			t.devices[i].Health = &r
		}
	}
	return s.reportTarget(t)
}

// Half of a large cluster's drives are suspect: they get no legs, whether few drives are looked
// at for a volume or all of them.
func TestNoLegIsPlacedOnASuspectDrive(t *testing.T) {
	s := grid(5, 8, 5, fixed(100))
	odd := false
	for _, id := range s.sortedDrives() {
		if odd = !odd; odd {
			s.drives[id].Signs = health.Record{Warnings: "its reliability is degraded"}
		}
	}
	for i := range 100 {
		in := CreateVolume{Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: block.GiB, Copies: 2, Stripes: 1 + i%4, Seed: testSeed(i)}
		if _, err := s.Step(t0, in); err != nil {
			t.Fatal(err)
		}
	}
	for _, v := range s.volumes.All() {
		for _, l := range v.Legs {
			if why := s.drives[l.Drive].Suspect(); why != "" {
				t.Errorf("%v of %s is on a drive that is suspect: %s", &l, v.Name, why)
			}
		}
	}
	suspect := 0
	for _, d := range s.Drives("") {
		if d.State == DriveSuspect {
			suspect++
		}
	}
	if suspect != 100 {
		t.Errorf("%d drives of 200 are shown as suspect, want 100", suspect)
	}
}

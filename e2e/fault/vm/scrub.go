// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/pb"
)

const (
	unused   = span << 20 / 2   // an offset in each leg of two columns, behind whatever is written
	scrubbed = 10 * time.Minute // under emulation, beside the writes, half a MiB is compared in a second
)

// rotten is a byte that has changed on a drive.
type rotten struct {
	column uint32
	at     int // in each leg
	events int // of the volume, until it did
}

// rot changes a byte on a drive, and begins a scrub that repairs it. The scrub is told which copy is right.
func (l *life) rot() *rotten {
	column, copy := l.rand.Uint32N(2), l.rand.Uint32N(2)
	at := unused + l.rand.IntN(plainSize<<20/2-unused)
	l.say("byte %d of leg %d.%d changes", at, column, copy)
	l.onLeg(column, copy, fmt.Sprintf("printf x | dd of=$leg bs=1 seek=%d conv=notrunc && sync", at))
	l.rotten++
	l.Weft("volume", "scrub", volume, "--repair", "--from", fmt.Sprintf("%d.%d", column, 1-copy))
	return &rotten{column, at, len(l.Events("volume " + volume))}
}

// mend waits until the scrub has ended, and has another one repair what faults have kept it from. The rotten copy may
// have been made anew meanwhile, or, if legs were lost, have been the source of another one.
func (l *life) mend(r *rotten) {
	first := l.scrubEnds()
	again := []string{"volume", "scrub", volume, "--repair"}
	for _, p := range first.GetFrom() {
		again = append(again, "--from", fmt.Sprintf("%d.%d", p.Column, p.Copy))
	}
	l.Weft(again...)
	s := l.scrubEnds()
	if s.GetStopped() || s.GetDoneBytes() != s.GetTotalBytes() || s.GetFound() > 1 || s.GetFound() != s.GetRepaired() {
		l.T.Fatalf("a byte has changed, all has healed, and a scrub ended as %v; beside the faults, as %v\n%s", s, first, l.State())
	}
	l.mended += int(first.GetRepaired() + s.GetRepaired())
	lost := slices.ContainsFunc(l.Events("volume " + volume)[r.events:], func(e *pb.Event) bool { return e.Kind == "leg.stale" })
	for copy := range uint32(2) {
		out := l.onLeg(r.column, copy, fmt.Sprintf("dd if=$leg bs=4096 skip=%d count=1 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c", r.at/4096))
		if n := strings.TrimSpace(out); n != "0" && !lost {
			l.T.Fatalf("no leg was lost, and %s bytes that a drive had changed are on copy %d of column %d\n%s", n, copy, r.column, l.State())
		}
	}
}

// onLeg runs a script on the target that holds a copy; $leg is its device there.
func (l *life) onLeg(column, copy uint32, script string) string {
	legs := l.Volume(volume).GetLegs()
	i := slices.IndexFunc(legs, func(g *pb.Leg) bool { return g.Column == column && g.Copy == copy })
	ctx, cancel := context.WithTimeout(l.T.Context(), time.Minute)
	defer cancel()
	out, err := l.Holder(volume, column, copy).Shell(ctx, fmt.Sprintf("leg=/dev/weft/leg/%s; %s", legs[i].GetId(), script))
	l.must(err, "use a leg on its target")
	return out
}

// scrubEnds waits for the end of the scrub.
func (l *life) scrubEnds() (s *pb.VolumeScrub) {
	l.Eventually(scrubbed, "the scrub ends", func(ctx context.Context) error {
		v, err := l.API.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
		if s = v.GetScrub(); err == nil && s.GetEnded() == nil {
			err = fmt.Errorf("it is at %d of %d bytes", s.GetDoneBytes(), s.GetTotalBytes())
		}
		return err
	})
	return s
}

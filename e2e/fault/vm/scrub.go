// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/pb"
)

const (
	size     = 256              // MiB of the volume, which has two columns
	unused   = span << 20       // an offset in each leg, behind whatever is written
	scrubbed = 10 * time.Minute // under emulation, copies are compared at some MiB a second
)

// rot changes a byte on a drive, and begins a scrub that repairs it. The scrub is told which copy is right.
func (l *life) rot() {
	column, copy := l.rand.Uint32N(2), l.rand.Uint32N(2)
	legs := l.Volume(volume).GetLegs()
	i := slices.IndexFunc(legs, func(g *pb.Leg) bool { return g.Column == column && g.Copy == copy })
	at := unused + l.rand.IntN(size<<20/2-unused)
	l.say("byte %d of leg %d.%d changes", at, column, copy)
	ctx, cancel := context.WithTimeout(l.T.Context(), time.Minute)
	defer cancel()
	_, err := l.Holder(volume, column, copy).Shell(ctx, fmt.Sprintf("printf x | dd of=/dev/weft/leg/%s bs=1 seek=%d conv=notrunc && sync", legs[i].GetId(), at))
	l.must(err, "change a byte")
	l.rotten++
	l.Weft("volume", "scrub", volume, "--repair", "--from", fmt.Sprintf("%d.%d", column, 1-copy))
}

// mend waits until the scrub has ended, and has another one repair what faults have kept it from. The rotten copy may
// have been made anew meanwhile, or have been the source of another one.
func (l *life) mend() {
	first := l.scrubEnds()
	again := []string{"volume", "scrub", volume, "--repair"}
	for _, p := range first.GetFrom() {
		again = append(again, "--from", fmt.Sprintf("%d.%d", p.Column, p.Copy))
	}
	l.Weft(again...)
	s := l.scrubEnds()
	if s.GetFound() > 1 || s.GetFound() != s.GetRepaired() {
		l.T.Fatalf("a byte has changed, all has healed, and a scrub ended as %v; beside the faults, as %v\n%s", s, first, l.State())
	}
	l.mended += int(first.GetRepaired() + s.GetRepaired())
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

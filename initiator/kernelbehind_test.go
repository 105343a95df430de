// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// anew is what the tables do when the log of the first column begins anew.
const anew = "reload c0: mirror keep_log t0 c0-lost1"

// span is a run of regions.
func span(from, to uint64) (all []uint64) {
	for r := from; r < to; r++ {
		all = append(all, r)
	}
	return all
}

// wasAway runs f on a host to which a leg has come back that missed what was written in the regions 0 to 63, at one
// region a second.
func wasAway(t *testing.T, f func(w *world, b *overwrites)) {
	t.Helper()
	in(t, 1, 2, func(w *world) {
		b := &overwrites{}
		w.ahead = b.write(w)
		for r := range int64(64) {
			w.bytes["t0"][r*region+7] = byte(1 + r)
		}
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(region) })
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.write(0, span(0, 64)...)
		w.took()
		w.returns(1)
		time.Sleep(3 * time.Second)
		f(w, b)
	})
}

// The kernel copies what the log has as fast as it can, so the log begins anew, and the agent copies what it had.
func TestWhatALegMissedThatWasAwayIsCopiedAtTheVolumesRate(t *testing.T) {
	wasAway(t, func(w *world, b *overwrites) {
		w.expect("its log begins anew", "connect t1", anew)
		w.write(0, 50, 200)
		time.Sleep(20 * time.Second)
		if got := b.took(); len(got) < 15 || len(got) > 30 {
			t.Errorf("after 23 s, regions %v were copied at one in a second", got)
		}
		if c := w.attachment().GetCopies(); len(c) != 1 || c[0].TotalBytes != uint64(64*region) || c[0].DoneBytes < uint64(15*region) {
			t.Errorf("of the copy it is said %v, want a part of 16 MiB", c)
		}
		time.Sleep(55 * time.Second)
		w.expect("it joins when the rest is small", slices.Concat([]string{"flush t1"}, joined)...)
		if got := b.took(); slices.Contains(got, 50) || slices.Contains(got, 200) || !slices.Contains(got, 63) {
			t.Errorf("at last, regions %v were copied, want those up to 63, but not where users have written", got)
		}
		if got, want := w.dirty(), []uint64{50, 200}; !slices.Equal(got, want) {
			t.Errorf("regions %v are copied by the kernel, want %v", got, want)
		}
		if !w.memory().slot(0, 1).same(slotOf(w, 1)) || len(w.memory().Behind) > 0 {
			t.Errorf("noted: %+v", w.memory())
		}
	})
}

// memory is what the agent has noted.
func (w *world) memory() *memory {
	mem, ok, err := (&kernel{runDir: w.dir + "/run"}).notes(w.volume)
	if err != nil || !ok {
		w.t.Fatalf("notes: %v, %v", ok, err)
	}
	return &mem
}

func slotOf(w *world, copy int) slot { return w.memory().Slots[slotKey(0, copy)] }

// While users write less than is copied, the rest is copied by the agent again and again, until it is small. If they
// write as much, it ends.
func TestTheRestIsCopiedUntilItIsSmall(t *testing.T) {
	for name, test := range map[string]struct {
		users [][]uint64 // written during the first copy, the second and so on
		left  []uint64
	}{
		"little":         {[][]uint64{span(100, 120)}, span(100, 120)},
		"some":           {[][]uint64{span(100, 140), span(200, 210)}, span(200, 210)},
		"less and less":  {[][]uint64{span(100, 148), span(100, 136), span(200, 201)}, span(200, 201)},
		"as much as all": {[][]uint64{span(100, 160)}, span(100, 160)},
	} {
		wasAway(t, func(w *world, b *overwrites) {
			w.took()
			for _, regions := range test.users {
				w.write(0, regions...)
				for range 200 {
					time.Sleep(time.Second)
					if got := w.took(); slices.Contains(got, anew) || slices.Contains(got, joined[1]) {
						break
					}
				}
			}
			time.Sleep(10 * time.Second)
			if got := w.dirty(); !slices.Equal(got, test.left) {
				t.Errorf("%s: regions %v are copied by the kernel, want %v", name, got, test.left)
			}
		})
	}
}

// Whenever an agent ends, the next one knows what the leg lacks: from the log in use, the one before and the file beside
// them.
func TestAnAgentGoesOnWithACopyWhoseLogHasBegunAnew(t *testing.T) {
	for name, stops := range map[string][]time.Duration{
		"as it begins":     {0},
		"again and again":  {30 * time.Second, 10 * time.Second},
		"in the next copy": {80 * time.Second},
		"never":            nil,
	} {
		wasAway(t, func(w *world, b *overwrites) {
			w.write(0, span(100, 140)...)
			for _, after := range stops {
				time.Sleep(after)
				w.stop()
				w.write(0, 220)
				w.stop = w.start()
			}
			time.Sleep(2 * time.Minute)
			if got := w.took(); !slices.Contains(got, joined[1]) {
				t.Errorf("%s: the leg has not joined: %q", name, got)
			}
			has := append(b.took(), w.dirty()...)
			for _, r := range slices.Concat(span(0, 64), span(100, 140), span(220, 221)) {
				if r == 220 && stops == nil {
					break
				}
				if !slices.Contains(has, r) {
					t.Errorf("%s: region %d is neither copied nor to be copied: %v", name, r, has)
				}
			}
			if got := w.dirty(); len(got) > 32 {
				t.Errorf("%s: regions %v are copied by the kernel", name, got)
			}
		})
	}
}

// That the leg lacks more than the log in use has is noted before that begins.
func TestAnAgentThatEndsAsTheLogBeginsAnewLosesNothing(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		b := &overwrites{}
		w.ahead = b.write(w)
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.write(0, span(0, 64)...)
		w.took()
		hang := make(chan struct{})
		w.hang = map[string]chan struct{}{"c0": hang}
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(region) })
		w.returns(1)
		time.Sleep(3 * time.Second)
		w.stop()
		close(hang)
		time.Sleep(time.Second)
		w.hang = nil
		w.expect("the log has begun anew", "connect t1", anew)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = 0 })
		w.stop = w.start()
		time.Sleep(20 * time.Second)
		if has := append(b.took(), w.dirty()...); !slices.Equal(slices.Sorted(slices.Values(has)), span(0, 64)) {
			t.Errorf("regions %v are copied, want 0 to 63", has)
		}
	})
}

// An agent of an earlier version would take the log in use for all that the leg lacks.
func TestAnEarlierAgentDoesNotKnowALegWhoseLogHasBegunAnew(t *testing.T) {
	wasAway(t, func(w *world, b *overwrites) {
		if s, ok := w.memory().Slots[slotKey(0, 1)]; ok {
			t.Errorf("it finds %+v", s)
		}
	})
}

// If a file cannot be read, all of the leg is copied.
func TestWhatIsNotKnownAnyMoreIsCopied(t *testing.T) {
	for _, file := range []string{".log.behind", ".log"} {
		wasAway(t, func(w *world, b *overwrites) {
			w.stop()
			k := &kernel{runDir: w.dir + "/run"}
			if err := os.WriteFile(strings.TrimSuffix(k.logFiles(w.volume, 0)[0], ".log")+file, []byte("lost"), 0o600); err != nil {
				t.Fatal(err)
			}
			b.took()
			w.took()
			w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = 0 })
			w.stop = w.start()
			time.Sleep(30 * time.Second)
			all := append(b.took(), w.dirty()...)
			if slices.Sort(all); len(slices.Compact(all)) < 256 {
				t.Errorf("without %s, %d regions are copied, want all", file, len(all))
			}
		})
	}
}

// If the leg goes away in the middle, what is left is known when it comes back.
func TestALegGoesAndComesBackWhileItIsCopiedTo(t *testing.T) {
	wasAway(t, func(w *world, b *overwrites) {
		time.Sleep(27 * time.Second)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Legs = all.Attachments[0].Legs[:1] })
		time.Sleep(10 * time.Second)
		w.write(0, 230)
		first := b.took()
		w.took()
		w.comesBack(0, 1, 2)
		time.Sleep(60 * time.Second)
		second := b.took()
		if len(first)+len(second) > 64+12 || len(first) < 20 {
			t.Errorf("before, regions %v were copied, and then %v: it began from the start", first, second)
		}
		if got, want := w.dirty(), []uint64{230}; !slices.Equal(got, want) {
			t.Errorf("regions %v are copied by the kernel, want %v", got, want)
		}
	})
}

// What could not be read stays known when the log begins anew, and the kernel deals with it.
func TestWhatIsLeftOfOneCopyIsKeptForTheNext(t *testing.T) {
	wasAway(t, func(w *world, b *overwrites) {
		b.mu.Lock()
		b.before = func(region uint64) error {
			if region == 40 {
				return block.ErrMedium
			}
			return nil
		}
		b.mu.Unlock()
		w.write(0, span(100, 140)...)
		time.Sleep(3 * time.Minute)
		if got, want := w.dirty(), []uint64{40}; !slices.Equal(got, want) {
			t.Errorf("regions %v are copied by the kernel, want %v", got, want)
		}
	})
}

// A kernel without pass-through commands, or a leg that fails them, has the kernel copy it all.
func TestWhatCannotBeCopiedAheadIsCopiedByTheKernel(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		b := &overwrites{before: func(uint64) error { return errors.ErrUnsupported }}
		w.ahead = b.write(w)
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.write(0, span(0, 256)...)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(block.MiB) })
		w.took()
		w.returns(1)
		time.Sleep(5 * time.Second)
		w.expect("a log, and it joins", slices.Concat([]string{"connect t1", anew}, joined)...)
		if image := w.logOf(); !image.AllDirty() {
			t.Errorf("%d regions are copied, want all", image.CountDirty())
		}
	})
}

// A file that cannot be written leaves what is known where it is.
func TestWhatCannotBeKeptIsNotForgotten(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		b := &overwrites{}
		w.ahead = b.write(w)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(region) })
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.write(0, span(0, 64)...)
		w.endsIn("c0", func() { w.returns(1) }) // as the log begins anew
		w.write(0, span(100, 140)...)
		k := &kernel{runDir: w.dir + "/run"}
		if err := os.Mkdir(k.behindFile(w.volume, 0)+".new", 0o700); err != nil { // so that it cannot be written
			t.Fatal(err)
		}
		lacks := mirror.CleanLog(w.logOf().Regions())
		w.endsIn("c0", func() { // as the leg joins
			w.stop = w.start()
			time.Sleep(3 * time.Second)
			for _, file := range []string{k.behindFile(w.volume, 0), k.logFiles(w.volume, 0)[0], k.logFiles(w.volume, 0)[1]} {
				image, err := k.readLog(file, lacks.Regions())
				if err == nil {
					lacks, err = lacks.Merge(image)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		})
		for r := range uint64(64) {
			if !lacks.Dirty(r) {
				t.Errorf("region %d is in no file", r)
			}
		}
	})
}

// endsIn has the agent end while a change of a device hangs, which returns then.
func (w *world) endsIn(device string, change func()) {
	hang := make(chan struct{})
	hangs := func(m map[string]chan struct{}) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.hang = m
	}
	hangs(map[string]chan struct{}{device: hang})
	change()
	time.Sleep(3 * time.Second)
	w.stop()
	close(hang)
	time.Sleep(time.Second)
	hangs(nil)
}

// What is kept is of one leg.
func TestAnotherLegInTheSamePlaceDoesNotOverwriteWhatIsKept(t *testing.T) {
	wasAway(t, func(w *world, b *overwrites) {
		gone := func(all *pb.InitiatorWanted) { all.Attachments[0].Legs = all.Attachments[0].Legs[:1] }
		time.Sleep(10 * time.Second)
		w.change(gone)
		time.Sleep(10 * time.Second)
		first := b.took()
		other, id := w.back(0, 1, 1), legID(3, 1)
		other.LegId, other.Nsid, other.Uuid = id.String(), 99, block.NamespaceUUID(id, block.Epoch(w.epoch), 1).String()
		other.CopyAll, other.CopyAllSince = true, 1
		w.wants(other)
		time.Sleep(time.Minute)
		w.change(gone)
		time.Sleep(10 * time.Second)
		b.took()
		w.comesBack(0, 1, 2)
		time.Sleep(6 * time.Minute)
		has := slices.Concat(first, b.took(), w.dirty())
		for _, r := range span(0, 64) {
			if !slices.Contains(has, r) {
				t.Errorf("region %d is neither copied to the first leg nor to be copied", r)
			}
		}
	})
}

// What it missed at the second time is copied at the volume's rate, too.
func TestALegThatGoesAwayAgainIsCopiedToAtTheVolumesRate(t *testing.T) {
	wasAway(t, func(w *world, b *overwrites) {
		time.Sleep(27 * time.Second)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Legs = all.Attachments[0].Legs[:1] })
		time.Sleep(10 * time.Second)
		w.write(0, span(64, 256)...)
		w.comesBack(0, 1, 2)
		time.Sleep(5 * time.Minute)
		if got := w.took(); !slices.Contains(got, joined[1]) || len(w.dirty()) > 0 {
			t.Errorf("regions %v are copied by the kernel; %q", w.dirty(), got)
		}
	})
}

// A leg of which nobody would believe what is noted joins when all was copied once.
func TestACopyOfAllEnds(t *testing.T) {
	alone(t, false, func(w *world) {
		w.ahead = (&overwrites{}).write(w)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(4 * region) })
		w.joins(1, 0) // since when is not known
		for range 10 {
			w.write(0, span(100, 140)...)
			time.Sleep(10 * time.Second)
			if slices.Contains(w.took(), joined[1]) {
				return
			}
		}
		t.Errorf("the leg has not joined: %v", w.attachment().GetCopies())
	})
}

// What is copied again counts once.
func TestACopyThatBeginsAgainSaysHowMuchThereIs(t *testing.T) {
	lacksOne(t, 3, false, func(w *world) {
		w.ahead = func(string, int64, int64) error { return nil }
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(4 * region) })
		l := w.back(0, 2, 1)
		l.CopyAll, l.CopyAllSince = true, 1
		w.wants(l)
		time.Sleep(40 * time.Second)
		w.fallSilent("t1") // so the column changes
		time.Sleep(10 * time.Second)
		if c := w.attachment().GetCopies(); len(c) != 1 || c[0].TotalBytes > uint64(256*region) || c[0].DoneBytes == 0 {
			t.Errorf("of a leg of 64 MiB it is said %v", c)
		}
	})
}

// An agent that begins without a manager knows a leg that has joined just before the last one ended.
func TestALegThatHasJoinedAsTheAgentEndsIsKnown(t *testing.T) {
	wasAway(t, func(w *world, b *overwrites) {
		w.write(0, span(100, 120)...)
		w.endsIn("c0", func() { time.Sleep(90 * time.Second) })
		w.mu.Lock()
		w.managers = false
		w.mu.Unlock()
		w.took()
		w.stop = w.start()
		time.Sleep(time.Second)
		if got := w.took(); slices.Contains(got, "suspend top") && !slices.Contains(got, "resume top") {
			t.Errorf("I/O is held: %q", got)
		}
	})
}

func TestHowMuchIsLeftToTheKernelFollowsTheRate(t *testing.T) {
	for rate, want := range map[block.Size]block.Size{0: restMost, block.MiB: restLeast, 100 * block.MiB: 100 * block.MiB, block.GiB: restMost} {
		if got := rest(rate); got != want {
			t.Errorf("at %v a second, %v are left, want %v", rate, got, want)
		}
	}
}

// A slot says whether the log in use has all that its leg lacks, wherever it is noted.
func TestASlotIsNotedInOnePlace(t *testing.T) {
	m := newMemory(volume.Memory{}, time.Now())
	s := slot{Leg: legID(0, 1), Device: dm.Ref("259:1")}
	more := s
	more.More = true
	for _, now := range []slot{s, more, more, s, {}} {
		m.setSlot(0, 1, now)
		if got := m.slot(0, 1); got != now || len(m.Slots)+len(m.Behind) != 1 {
			t.Errorf("%+v is noted as %+v, in %v and %v", now, got, m.Slots, m.Behind)
		}
	}
}

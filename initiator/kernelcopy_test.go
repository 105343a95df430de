// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// alone runs f on a host that serves a volume of two copies of which one is there.
func alone(t *testing.T, thin bool, f func(w *world)) {
	t.Helper()
	lacksOne(t, 2, thin, f)
}

// lacksOne runs f on a host that serves a volume of so many copies, of which the last one is not there.
func lacksOne(t *testing.T, copies int, thin bool, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, copies)
		w.equal = false
		w.attach()
		w.change(func(all *pb.InitiatorWanted) {
			a := all.Attachments[0]
			a.Thin, a.Legs = thin, a.Legs[:copies-1]
		})
		w.stop = w.start()
		w.until(serving)
		w.took()
		f(w)
	})
}

// joins has the manager list a leg, all of which is to be copied since a revision.
func (w *world) joins(revision, since uint64) {
	l := w.back(0, 1, revision)
	l.CopyAll, l.CopyAllSince = true, since
	w.wants(l)
	time.Sleep(3 * time.Second)
}

// dirty lists the regions that the mirror is to copy.
func (w *world) dirty() (all []uint64) {
	image := w.logOf()
	for r := range image.Regions() {
		if image.Dirty(r) {
			all = append(all, r)
		}
	}
	return all
}

// copied has the mirror copy everything but some regions.
func (w *world) copied(but ...uint64) {
	image := mirror.CleanLog(w.logOf().Regions())
	for _, r := range but {
		image.Mark(r)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.find(mirror.ColumnName(w.volume, 0)).Table[0].Target.(dm.Mirror)
	if err := w.putLog(m.Log.Device, image); err != nil {
		w.t.Fatal(err)
	}
}

const region = int64(256 * block.KiB) // of a leg of 64 MiB

var (
	tracked = []string{"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1"}
	joined  = []string{"create c0-back1: linear", "reload c0: mirror t0 c0-back1", "remove c0-lost1"}
)

// Its log begins before its targets are asked: else a write in between would be in neither.
func TestToAThinLegOnlyIsCopiedWhatHoldsData(t *testing.T) {
	alone(t, true, func(w *world) {
		w.data = func(_ context.Context, node string) ([]block.Range, error) {
			w.write(0, 200) // by users, meanwhile
			if node == "t0" {
				return []block.Range{{Off: 0, End: 4 * region}, {Off: 9*region - 1, End: 9*region + 1}}, nil
			}
			return []block.Range{{Off: 128 * region, End: 128*region + 1}}, nil
		}
		w.joins(1, 1)
		w.expect("a leg joins", slices.Concat([]string{"connect t1"}, tracked, joined)...)
		if got, want := w.dirty(), []uint64{0, 1, 2, 3, 8, 9, 128, 200}; !slices.Equal(got, want) {
			t.Errorf("regions %v are copied, want %v", got, want)
		}
		c := w.attachment().Copies
		if len(c) != 1 || c[0].TotalBytes != uint64(8*region) || !strings.HasPrefix(c[0].What, "what holds data, because ") {
			t.Errorf("of the copy it is said %v, want 2 MiB, and what they are", c)
		}
		w.finishResync()
		time.Sleep(3 * time.Second)
		if got := w.took(); !slices.Contains(got, "record-in-sync c0.1@1 copied 2MiB") {
			t.Errorf("after the copy: %q", got)
		}
	})
}

func TestAThinLegIsCopiedWholeIfATargetDoesNotKnowWhereItHasData(t *testing.T) {
	for name, of := range map[string]func(node string) error{
		"none knows":                       func(string) error { return nvmetcp.InvalidOpcode | nvmetcp.DNR },
		"that of the leg does not know":    func(node string) error { return map[string]error{"t1": nvmetcp.InvalidOpcode}[node] },
		"that of the source has no answer": func(node string) error { return map[string]error{"t0": errors.New("no answer")}[node] },
	} {
		alone(t, true, func(w *world) {
			w.data = func(_ context.Context, node string) ([]block.Range, error) { return nil, of(node) }
			w.joins(1, 1)
			if image := w.logOf(); !image.AllDirty() {
				t.Errorf("%s: %d of %d regions are copied, want all", name, image.CountDirty(), image.Regions())
			}
		})
	}
}

// An agent may end between the beginning of the log and the answer. The log alone does not say what the leg lacks, and
// a slot of the leg in the notes, if only from an earlier life, would say that it does.
func TestALogThatBeganCleanIsNotBelievedByTheNextAgent(t *testing.T) {
	for name, test := range map[string]struct{ forget, early bool }{
		"with notes": {}, "without": {forget: true}, "ended before it could note that": {early: true},
	} {
		alone(t, true, func(w *world) {
			w.stop()
			k := &kernel{runDir: w.dir + "/run"}
			mem, ok, err := k.notes(w.volume)
			if !ok || err != nil {
				t.Fatalf("notes: %v, %v", ok, err)
			}
			mem.Slots[slotKey(0, 1)] = slot{Leg: legID(0, 1), Device: "259:999", NQN: w.nqn("t1"), NSID: 2, Whole: 1}
			if err := k.note(w.volume, &mem); err != nil {
				t.Fatal(err)
			}
			w.data = func(ctx context.Context, _ string) ([]block.Range, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			w.stop = w.start()
			time.Sleep(3 * time.Second)
			w.took()
			hang := make(chan struct{})
			if test.early {
				w.hang = map[string]chan struct{}{"c0": hang}
			}
			w.joins(1, 1)
			if test.early {
				w.stop()
				close(hang)
				time.Sleep(time.Second)
				w.hang = nil
			}
			w.expect(name+": the log has begun", slices.Concat([]string{"connect t1"}, tracked)...)
			w.write(0, 5)
			w.stop()
			w.write(0, 6)
			if mem, _, err = k.notes(w.volume); err != nil || !mem.slot(0, 1).Leg.IsZero() {
				t.Errorf("%s: the notes have a slot of the leg: %v, %v", name, mem.slot(0, 1), err)
			}
			if test.forget {
				if err := os.Remove(k.notesFile(w.volume)); err != nil {
					t.Fatal(err)
				}
			}
			w.data = func(context.Context, string) ([]block.Range, error) {
				w.write(0, 7)
				return []block.Range{{Off: 0, End: 1}}, nil
			}
			w.stop = w.start()
			time.Sleep(5 * time.Second)
			if got, want := w.dirty(), []uint64{0, 5, 6, 7}; !slices.Equal(got, want) {
				t.Errorf("%s: regions %v are copied, want %v", name, got, want)
			}
		})
	}
}

// If the tables change between question and answer, the log may have begun anew: writes from before are in neither.
func TestAnAnswerIsForTheLogThatWasThere(t *testing.T) {
	alone(t, true, func(w *world) {
		var asked atomic.Int32
		answer := make(chan struct{})
		w.data = func(context.Context, string) ([]block.Range, error) {
			if asked.Add(1) == 1 {
				<-answer
			}
			return []block.Range{{Off: 0, End: 1}}, nil
		}
		w.joins(1, 1)
		w.write(0, 5)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Legs = all.Attachments[0].Legs[:1] })
		time.Sleep(3 * time.Second)
		w.joins(2, 1)
		close(answer)
		time.Sleep(3 * time.Second)
		if got, want := w.dirty(), []uint64{0, 5}; asked.Load() < 3 || !slices.Equal(got, want) {
			t.Errorf("regions %v are copied after %d questions, want %v, and that each leg is asked again", got, asked.Load(), want)
		}
	})
}

// lists gives each target a list of writes.
func (w *world) lists(of map[string]nvmetcp.WrittenLog) {
	for node, log := range of {
		words := make([]uint64, checkpoint.Words(block.GiB))
		copy(words, log.Regions)
		log.Region, log.Words, log.Regions = uint64(checkpoint.Region), uint64(len(words)), words
		of[node] = log
	}
	w.listed = func(node string, cmd nvmetcp.Command, data []byte) error {
		if cmd.Opcode() == nvmetcp.AdminGetLogPage {
			off := uint64(cmd.CDW(12)) | uint64(cmd.CDW(13))<<32
			if all := of[node].Append(nil); off < uint64(len(all)) {
				copy(data, all[off:])
			}
		}
		return nil
	}
}

// The host before has told the leg what it lacked, and the targets have listed what was written since.
func TestWhatAnotherHostHasCopiedIsNotCopiedAgain(t *testing.T) {
	behind := &nvmetcp.Behind{Since: 7, Ranges: [][2]int64{{4 * region, 6 * region}}}
	for name, test := range map[string]struct {
		leg, source nvmetcp.WrittenLog
		since       uint64 // all of it is to be copied; 0: it is only stale
		want        []uint64
	}{
		"a copy goes on":                    {nvmetcp.WrittenLog{Committed: 5, Behind: behind}, nvmetcp.WrittenLog{Committed: 5, Regions: []uint64{1 << 32}}, 7, []uint64{4, 5, 8}},
		"it was told first":                 {nvmetcp.WrittenLog{Committed: 6, Behind: behind}, nvmetcp.WrittenLog{Committed: 5, Begun: 6}, 7, []uint64{4, 5}},
		"a leg that missed writes":          {nvmetcp.WrittenLog{Committed: 5, Regions: []uint64{1}}, nvmetcp.WrittenLog{Committed: 5, Regions: []uint64{1 << 32}}, 0, []uint64{0, 8}},
		"it has lost data since":            {nvmetcp.WrittenLog{Committed: 5, Behind: behind}, nvmetcp.WrittenLog{Committed: 5}, 8, nil},
		"another checkpoint":                {nvmetcp.WrittenLog{Committed: 4, Behind: behind}, nvmetcp.WrittenLog{Committed: 5}, 7, nil},
		"the leg's target has restarted":    {nvmetcp.WrittenLog{}, nvmetcp.WrittenLog{Committed: 5}, 0, nil},
		"the source's target has restarted": {nvmetcp.WrittenLog{Committed: 5, Behind: behind}, nvmetcp.WrittenLog{}, 7, nil},
	} {
		alone(t, false, func(w *world) {
			w.lists(map[string]nvmetcp.WrittenLog{"t1": test.leg, "t0": test.source})
			l := w.back(0, 1, 9)
			l.CopyAll, l.CopyAllSince = test.since > 0, test.since
			w.wants(l)
			time.Sleep(3 * time.Second)
			if test.want == nil {
				w.expect(name, slices.Concat([]string{"connect t1"}, tracked, joined)...)
				if image := w.logOf(); !image.AllDirty() {
					t.Errorf("%s: %d of %d regions are copied, want all", name, image.CountDirty(), image.Regions())
				}
				return
			}
			w.expect(name, slices.Concat([]string{"connect t1"}, tracked, joined)...)
			if got := w.dirty(); !slices.Equal(got, test.want) {
				t.Errorf("%s: regions %v are copied, want %v", name, got, test.want)
			}
			for _, c := range w.attachment().GetCopies() {
				if c.WaitingFor != "" {
					t.Errorf("%s: the copy goes on, and waits for %s", name, c.WaitingFor)
				}
			}
		})
	}
}

// Once a copy of all of a leg has begun, the log knows what is left, also while the leg is away.
func TestACopyOfALegGoesOnWhenItsTargetIsBack(t *testing.T) {
	for since, goesOn := range map[uint64]bool{1: true, 2: false} { // or it has lost data meanwhile
		alone(t, false, func(w *world) {
			w.joins(1, 1)
			w.expect("a copy begins", slices.Concat([]string{"connect t1"}, tracked, joined)...)
			w.copied(7, 100)
			w.stop() // the kernel goes on, and the next agent knows what the log has
			w.stop = w.start()
			time.Sleep(3 * time.Second)
			w.fallSilent("t1")
			time.Sleep(4 * time.Second)
			w.write(0, 9)
			w.answer("t1")
			w.took()
			w.joins(2, since)
			got, want := w.dirty(), []uint64{7, 9, 100}
			if slices.Equal(got, want) != goesOn || !goesOn && !w.logOf().AllDirty() {
				t.Errorf("all of it is to be copied since revision %d: %d regions are copied, want %v: %v", since, len(got), want, goesOn)
			}
		})
	}
}

// Nothing but the leg waits for the answer: if another one is lost meanwhile, writes go on without it as soon as ever.
func TestALegIsLostWhileTargetsAreAskedAboutAnother(t *testing.T) {
	for name, thin := range map[string]bool{"thin": true, "not thin": false} {
		lacksOne(t, 3, thin, func(w *world) {
			answer := make(chan struct{})
			defer close(answer)
			w.data = func(ctx context.Context, _ string) ([]block.Range, error) {
				select {
				case <-answer:
				case <-ctx.Done():
				}
				return nil, nvmetcp.InvalidOpcode
			}
			l := w.back(0, 2, 1)
			l.CopyAll, l.CopyAllSince = true, 1
			w.wants(l)
			time.Sleep(2 * time.Second)
			w.took()
			if all := w.attachment().GetCopies(); thin && (len(all) != 1 || all[0].LegId != l.LegId || all[0].WaitingFor != targetsToSay) {
				t.Errorf("%s: of its copies it tells %v", name, all)
			}
			w.fallSilent("t1")
			time.Sleep(4 * time.Second)
			if got := w.took(); !slices.ContainsFunc(got, func(did string) bool { return strings.HasPrefix(did, "reload") }) {
				t.Errorf("%s: 4 s after the loss: %q", name, got)
			}
			w.answer("t1")
		})
	}
}

// The next host believes what a new leg has only if it knows since when all of it was copied.
func TestANewLegIsToldSinceWhenAllOfItIsCopied(t *testing.T) {
	var told nvmetcp.Behind // guarded by the world's mutex
	alone(t, false, func(w *world) {
		w.nothingIsWritten()
		w.committed(func(node string, behind []byte) {
			if node == "t1" {
				told, _ = nvmetcp.ParseBehind(behind)
			}
		})
		w.joins(5, 3)
		w.copied(7, 8)
		time.Sleep(20 * time.Second)
		w.mu.Lock()
		defer w.mu.Unlock()
		if want := [][2]int64{{7 * region, 9 * region}}; told.Since != 5 || !slices.Equal(told.Ranges, want) {
			t.Errorf("the leg was told that it lacks %v since revision %d, want %v since 5", told.Ranges, told.Since, want)
		}
	})
}

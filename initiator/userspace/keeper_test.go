// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

func TestAttachConnectsBuildsAndExports(t *testing.T) {
	in(t, 2, 2, func(w *world) {
		r := w.until(serving)
		w.expect("attach", "connect t0", "connect t1", "export db1")
		if r.Device != "/dev/weft/db1" {
			t.Errorf("reported device = %q, want /dev/weft/db1", r.Device)
		}
		time.Sleep(10 * time.Second)
		w.expect("nothing more to do")
	})
}

// crashed makes the copies of a volume differ, with the manager aware of it.
func crashed(w *world) {
	w.legs[legID(0, 0)].data[8192] = 7
	w.wanted.Equalize = true
}

func TestUncleanVolumesAreEqualizedBeforeTheyAreExported(t *testing.T) {
	from(t, 1, 2, crashed, func(w *world) {
		w.until(serving)
		w.expect("attach", "connect t0", "connect t1", "export db1")
		if a, b := w.holds(0, 0, 8192), w.holds(0, 1, 8192); a != b {
			t.Errorf("copies hold %d and %d when the device is there", a, b)
		}
	})
}

func TestWhileCopiesAreMadeEqualThereIsNoDevice(t *testing.T) {
	from(t, 1, 2, func(w *world) {
		crashed(w)
		for _, l := range w.legs { // an error would keep it from ending
			l.bad = errors.New("internal error")
		}
		w.refused = refusal("LAST_LEG")
	}, func(w *world) {
		w.until(equalizing)
		time.Sleep(3 * time.Second)
		if r := w.report(); w.device != nil || r.Device != "" || r.Phase != equalizing {
			t.Errorf("before the copies are equal: %v", r)
		}
		w.mu.Lock()
		for _, l := range w.legs {
			l.bad = nil
		}
		w.mu.Unlock()
		w.refuse(nil)
		w.until(serving)
	})
}

func TestALegThatIsLostWhileCopiesAreMadeEqualIsCopiedInFull(t *testing.T) {
	from(t, 1, 2, func(w *world) {
		crashed(w)
		w.legs[legID(0, 1)].bad = block.ErrMedium
	}, func(w *world) {
		w.until(serving)
		w.expect("without it", "connect t0", "connect t1", "record-stale c0.1", "disconnect t1", "export db1")
		w.mu.Lock()
		w.legs[legID(0, 1)].bad = nil
		w.mu.Unlock()
		w.comesBack(0, 1, 1)
		time.Sleep(time.Second)
		w.expect("back", "connect t1", "record-in-sync c0.1")
		if a, b := w.holds(0, 0, 8192), w.holds(0, 1, 8192); a != b {
			t.Errorf("copies hold %d and %d after the rebuild", a, b)
		}
	})
}

func TestAWriteThatALegLacksIsHeldUntilItsLossIsDurable(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.deafen()
		w.fallSilent("t1")
		done := w.write(4096, 1)
		time.Sleep(5 * time.Second)
		if !pending(done) {
			t.Fatal("a write that a leg lacks was answered before the leg was recorded stale")
		}
		w.expect("nothing is done without the record")
		if r := w.report(); r.Phase != stalled || r.WaitingFor == "" {
			t.Errorf("reported %v waiting for %q, want STALLED, and what for", r.Phase, r.WaitingFor)
		}
		w.hear()
		if err := <-done; err != nil {
			t.Errorf("write = %v after the record", err)
		}
		w.expect("then it is dropped", "record-stale c0.1", "cut t1")
		w.until(serving)
	})
}

func TestASilentTargetStallsAWriteForLessThanASecond(t *testing.T) {
	served(t, 2, 2, func(w *world) {
		began := time.Now()
		w.fallSilent("t1")
		done := w.write(0, 1)
		if err := <-done; err != nil {
			t.Fatalf("write = %v", err)
		}
		if took := time.Since(began); took < 700*time.Millisecond || took >= time.Second {
			t.Errorf("the write took %v, want the patience of 0.7 s, and less than a second", took)
		}
		w.expect("both legs of the target leave", "record-stale c0.1 c1.1", "cut t1")
	})
}

// A drive may be busy for longer than a target is silent: its legs keep the patience of 2 s.
func TestALegWhoseTargetAnswersStallsAWriteForTheWindow(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		began := time.Now()
		w.mu.Lock()
		w.gone[w.wanted.At(0, 1).UUID] = true // I/O to the leg is not answered
		w.mu.Unlock()
		if err := <-w.write(4096, 1); err != nil {
			t.Fatalf("write = %v", err)
		}
		if took := time.Since(began); took < 2*time.Second || took > 3*time.Second {
			t.Errorf("the write took %v, want the window of 2 s, and less than 3 s", took)
		}
	})
}

// A target whose machine accepts connections is there, however little of the processors it gets.
func TestASilentTargetThatAcceptsConnectionsStallsAWriteForTheWindow(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		began := time.Now()
		w.mu.Lock()
		w.nodes["t1"].slow = true
		w.mu.Unlock()
		w.fallSilent("t1")
		if err := <-w.write(0, 1); err != nil {
			t.Fatalf("write = %v", err)
		}
		if took := time.Since(began); took < 2*time.Second || took > 3*time.Second {
			t.Errorf("the write took %v, want the window of 2 s, and less than 3 s", took)
		}
	})
}

// kill ends the process of a target: its connections close, and its portals refuse others.
func (w *world) kill(node string, killed bool) {
	w.mu.Lock()
	w.nodes[node].killed = killed
	w.mu.Unlock()
	w.keeper.Poke()
	if !killed {
		w.answer(node)
	}
}

func TestAKilledTargetIsLeftSoonerThanASilentOne(t *testing.T) {
	for _, rails := range []int{1, 2} {
		from(t, 1, 2, func(w *world) {
			for i := range w.wanted.Links {
				w.wanted.Links[i].Portals = portalsOf(w.wanted.Links[i].Node, []string{"", "-b"}[:rails]...)
			}
		}, func(w *world) {
			w.until(serving)
			w.took()
			began := time.Now()
			w.kill("t1", true)
			if err := <-w.write(0, 1); err != nil {
				t.Fatalf("write = %v", err)
			}
			if took := time.Since(began); took < refusedFor || took > refusedFor+200*time.Millisecond {
				t.Errorf("%d rails: the write took %v, want %v and little more", rails, took, refusedFor)
			}
			did := w.took()
			if record := slices.Index(did, "record-stale c0.1"); record < 0 || slices.Index(did, "cut t1") < record {
				t.Errorf("%d rails: it did %q, want the leg recorded stale before it is cut", rails, did)
			}
		})
	}
}

// A target whose process is started again at once loses nothing, however often.
func TestATargetThatIsBackAtOnceIsNotLeft(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		for range 5 {
			w.kill("t1", true)
			done := w.write(0, 1)
			time.Sleep(refusedFor - 50*time.Millisecond)
			w.kill("t1", false)
			if err := <-done; err != nil {
				t.Errorf("write = %v", err)
			}
			time.Sleep(500 * time.Millisecond) // refusals count for longer than that
		}
		w.expect("five restarts")
	})
}

// If all targets fall silent at once, the host's network is more likely to blame than each of them:
// no copy is left before its window.
func TestNoCopyIsLeftEarlyIfAllTargetsAreSilent(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		for range 3 {
			w.fallSilent("t1")
			time.Sleep(100 * time.Millisecond)
			w.fallSilent("t0")
			done := w.write(0, 1)
			time.Sleep(1500 * time.Millisecond)
			w.answer("t0")
			w.answer("t1")
			if err := <-done; err != nil {
				t.Errorf("write = %v", err)
			}
			time.Sleep(time.Second)
		}
		w.expect("three outages of all targets")
	})
}

// The last copy is waited for, however its target is missing.
func TestTheLastCopyOfAColumnStaysAlthoughItsTargetRefuses(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.kill("t1", true)
		time.Sleep(time.Second)
		w.expect("one is lost", "record-stale c0.1", "cut t1")
		w.kill("t0", true)
		done := w.write(0, 1)
		time.Sleep(6 * time.Second)
		w.expect("nothing can be dropped")
		if !pending(done) {
			t.Fatal("a write was acknowledged without a copy")
		}
		w.kill("t0", false)
		if err := <-done; err != nil {
			t.Errorf("write = %v after the last copy came back", err)
		}
	})
}

func TestShortSilenceIsForgotten(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		for range 5 {
			w.fallSilent("t1")
			done := w.write(0, 1)
			time.Sleep(600 * time.Millisecond)
			w.answer("t1")
			if err := <-done; err != nil {
				t.Errorf("write = %v", err)
			}
			time.Sleep(time.Second)
		}
		w.expect("five short silences")
	})
}

func TestAWriteErrorDropsALegAndKeepsItsConnectionForTheOthers(t *testing.T) {
	served(t, 2, 2, func(w *world) {
		w.mu.Lock()
		w.legs[legID(0, 1)].err = block.ErrMedium
		w.mu.Unlock()
		if err := <-w.write(0, 1); err != nil {
			t.Errorf("write = %v, want it on the other copy", err)
		}
		time.Sleep(time.Second)
		w.expect("the leg leaves", "record-stale c0.1")
		w.until(serving)
	})
}

func TestTheLastCopyOfAColumnStays(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(3 * time.Second)
		w.expect("one is lost", "record-stale c0.1", "cut t1")
		w.fallSilent("t0")
		done := w.write(0, 1)
		time.Sleep(6 * time.Second)
		w.expect("nothing can be dropped")
		r := w.report()
		if !pending(done) || r.Phase != stalled || !strings.Contains(r.WaitingFor, "no other copy can replace it") {
			t.Errorf("%v, waiting for %q; want STALLED, with the reason, and the write held", r.Phase, r.WaitingFor)
		}
		w.answer("t0")
		if err := <-done; err != nil {
			t.Errorf("write = %v after the last copy came back", err)
		}
		w.until(serving)
	})
}

// TestACopyThatStaysForTheSakeOfAnotherColumnSaysSo: both columns have a copy on t1, and for
// column 1 it is the last one.
func TestACopyThatStaysForTheSakeOfAnotherColumnSaysSo(t *testing.T) {
	served(t, 2, 2, func(w *world) {
		w.mu.Lock()
		w.legs[legID(1, 0)].err = errors.New("internal error")
		w.mu.Unlock()
		done := w.write(int64(block.DefaultChunk), 1)
		time.Sleep(time.Second)
		w.expect("column 1 has one copy left", "record-stale c1.0")
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		r := w.report()
		last := legID(1, 1).String()
		if !strings.Contains(r.WaitingFor, "leg "+legID(0, 1).String()+" of column 0 on t1: no answer for more than 2s, and its connection carries leg "+last) ||
			!strings.Contains(r.WaitingFor, "leg "+last+" of column 1 on t1: no answer for more than 2s, and no other copy can replace it") {
			t.Errorf("waiting for %q; want the reason of each column", r.WaitingFor)
		}
		w.answer("t1")
		if err := <-done; err != nil {
			t.Errorf("write = %v", err)
		}
	})
}

// TestALastCopyThatTakesNoWritesIsReplaced: while t1 is away for a moment, the drive of t0
// wears out and becomes read-only. Writes are held, and t1 receives everything, including the
// held writes; then t0 leaves.
func TestALastCopyThatTakesNoWritesIsReplaced(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		if err := <-w.write(2<<20, 1); err != nil {
			t.Fatal(err)
		}
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.expect("t1 is away", "record-stale c0.1", "cut t1")
		w.mu.Lock()
		w.legs[legID(0, 0)].err = errors.New("the drive is read-only")
		w.mu.Unlock()
		held := []<-chan error{w.write(1<<20, 7), w.write(1<<20+512, 8), w.write(3<<20, 9)}
		if r := w.until(stalled); !strings.Contains(r.WaitingFor, "the drive is read-only") {
			t.Errorf("waiting for %q, want the error of the drive", r.WaitingFor)
		}
		w.answer("t1")
		w.comesBack(0, 1, 1)
		time.Sleep(10 * time.Second)
		for _, done := range held {
			if pending(done) {
				t.Fatalf("10 s after t1 is back a write is held, waiting for %q", w.report().WaitingFor)
			}
			if err := <-done; err != nil {
				t.Errorf("write = %v", err)
			}
		}
		w.until(serving)
		w.expect("t1 is back", "connect t1", "record-in-sync c0.1", "record-stale c0.0", "disconnect t0")
		for at, want := range map[int64]byte{2 << 20: 1, 1 << 20: 7, 1<<20 + 512: 8, 3 << 20: 9} {
			if got := w.holds(0, 1, at); got != want {
				t.Errorf("t1 holds %d at %d, want %d", got, at, want)
			}
		}
		if got, err := w.read(1 << 20); got != 7 || err != nil {
			t.Errorf("read = %d, %v; want 7", got, err)
		}
	})
}

func TestErrorsOfTheLastCopyAreTriedAgain(t *testing.T) {
	served(t, 1, 1, func(w *world) {
		w.mu.Lock()
		w.legs[legID(0, 0)].err = errors.New("internal error")
		w.mu.Unlock()
		done := w.write(0, 1)
		if r := w.until(stalled); !strings.Contains(r.WaitingFor, "internal error") {
			t.Errorf("waiting for %q, want the leg's error", r.WaitingFor)
		}
		w.mu.Lock()
		w.legs[legID(0, 0)].err = nil
		w.mu.Unlock()
		if err := <-done; err != nil {
			t.Errorf("write = %v", err)
		}
		w.until(serving)
		w.expect("nothing was given up")
	})
}

func TestALegWithABadBlockWhereItIsProbedServesOn(t *testing.T) {
	served(t, 1, 1, func(w *world) {
		w.mu.Lock()
		w.legs[legID(0, 0)].head = block.ErrMedium
		w.legs[legID(0, 0)].data[4096] = 7
		w.mu.Unlock()
		time.Sleep(20 * time.Second) // longer than the lease
		read := make(chan byte, 1)
		go func() {
			got, err := w.read(4096)
			if err != nil {
				t.Error(err)
			}
			read <- got
		}()
		synctest.Wait()
		if r := w.report(); r.Phase != serving || len(read) == 0 || <-read != 7 {
			t.Errorf("reported %v, read answered: %v", r, len(read) > 0)
		}
	})
}

func TestALegThatComesBackIsCopiedToRecordedAndThenReadFrom(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		if err := <-w.write(2<<20, 5); err != nil {
			t.Fatalf("write = %v", err)
		}
		w.expect("loss", "record-stale c0.1", "cut t1")
		w.mu.Lock()
		w.legs[legID(0, 1)].data[0] = 9 // not written since, so it must not be copied
		w.mu.Unlock()
		w.answer("t1")
		w.deafen()
		w.comesBack(0, 1, 1)
		time.Sleep(time.Second)
		w.expect("back", "connect t1")
		if got := w.holds(0, 1, 2<<20); got != 5 {
			t.Errorf("the leg holds %d where it missed a write of 5", got)
		}
		if got := w.holds(0, 1, 0); got != 9 {
			t.Error("a region that the leg did not miss was copied")
		}
		w.mu.Lock()
		w.legs[legID(0, 1)].data[2<<20] = 77 // a read of this leg would return it
		w.mu.Unlock()
		for range 20 {
			if got, err := w.read(2 << 20); got != 5 || err != nil {
				t.Fatalf("read = %d, %v, from a leg that is not recorded in sync", got, err)
			}
		}
		w.mu.Lock()
		w.legs[legID(0, 1)].data[2<<20] = 5
		w.mu.Unlock()
		w.hear()
		time.Sleep(time.Second)
		w.expect("recorded", "record-in-sync c0.1")
		w.fallSilent("t0") // now the rebuilt leg can replace it
		if err := <-w.write(0, 6); err != nil {
			t.Errorf("write = %v", err)
		}
		w.expect("the other copy leaves", "record-stale c0.0", "cut t0")
	})
}

// TestALegWhoseRecoveryIsRecordedStandsInAtOnce loses the manager's answer to a record in
// sync; the other copy is gone by the time the answer arrives again.
func TestALegWhoseRecoveryIsRecordedStandsInAtOnce(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		if err := <-w.write(0, 1); err != nil {
			t.Fatal(err)
		}
		w.answer("t1")
		w.deafen()
		w.comesBack(0, 1, 1)
		time.Sleep(time.Second)
		w.want(func(x *volume.Wanted) {
			x.Links = x.Links[1:]
			x.Links[0].Rebuilding = false
		})
		w.fallSilent("t0")
		time.Sleep(time.Second)
		done := w.write(0, 2)
		time.Sleep(time.Second)
		if pending(done) {
			t.Fatalf("a write waits for a leg that the manager has recorded stale: %s", w.report().GetWaitingFor())
		}
		if got := w.holds(0, 1, 0); got != 2 {
			t.Errorf("the leg that is left holds %d", got)
		}
		w.hear()
	})
}

func TestALegThatMayLackMoreThanIsKnownIsCopiedInFull(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.mu.Lock()
		w.legs[legID(0, 1)].data[3<<20] = 9
		w.mu.Unlock()
		w.answer("t1")
		w.want(func(x *volume.Wanted) { x.Links = x.Links[:1] })
		w.comesBack(0, 1, 1)
		w.want(func(x *volume.Wanted) { x.Links[1].CopyAll = true })
		time.Sleep(time.Second)
		if got := w.holds(0, 1, 3<<20); got != 0 {
			t.Errorf("the leg holds %d where it lost a write, want it copied", got)
		}
	})
}

// TestAfterALossOfItsCacheALegIsCopiedByWhatItMayLack: what it missed, and what was not flushed, if this
// host has tracked that.
func TestAfterALossOfItsCacheALegIsCopiedByWhatItMayLack(t *testing.T) {
	const flushed, cached, missed = 1 << 20, 2 << 20, 5 << 19
	for name, c := range map[string]struct {
		noCache bool // the manager said that the drive has no cache
		since   uint64
		whole   bool
	}{
		"tracked":               {},
		"not tracked":           {noCache: true, whole: true},
		"new, and never copied": {since: 1, whole: true},
	} {
		t.Run(name, func(t *testing.T) {
			first := func(w *world) { w.wanted.Links[1].WriteThrough = c.noCache }
			from(t, 1, 2, first, func(w *world) {
				w.until(serving)
				write := func(at int64) {
					if err := <-w.write(at, 7); err != nil {
						t.Fatal(err)
					}
				}
				write(flushed)
				if err := block.Flush(w.keeper.stack.volume); err != nil {
					t.Fatal(err)
				}
				write(cached)
				w.losePower("t1")
				if got := w.holds(0, 1, cached); got != 0 && !c.noCache {
					t.Fatalf("the leg holds %d, so it has lost nothing", got)
				}
				time.Sleep(4 * time.Second) // the host drops it
				write(missed)
				w.mu.Lock()
				w.legs[legID(0, 1)].data[3<<20] = 9 // a mark on what it does not lack
				w.mu.Unlock()
				w.want(func(x *volume.Wanted) { x.Links = x.Links[:1] })
				w.comesBack(0, 1, 1)
				w.want(func(x *volume.Wanted) {
					l := &x.Links[1]
					l.CopyAll, l.CopyAllSince, l.CacheLost, l.AllSince = true, 1, true, c.since
				})
				time.Sleep(2 * time.Second)
				for _, at := range []int64{flushed, cached, missed} {
					if got := w.holds(0, 1, at); got != 7 {
						t.Errorf("the leg holds %d at %d, want 7", got, at)
					}
				}
				if got := w.holds(0, 1, 3<<20); (got == 0) != c.whole {
					t.Errorf("the mark is %d; all was copied: %v", got, got == 0)
				}
			})
		})
	}
}

func TestWithoutAManagerReadsStopWhenTheLeaseIsOver(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.deafen()
		w.fallSilent("t1")
		time.Sleep(7 * time.Second)
		if _, err := w.read(0); err != nil {
			t.Fatalf("read within the lease = %v", err)
		}
		time.Sleep(2 * time.Second)
		read := make(chan error, 1)
		go func() { _, err := w.read(0); read <- err }()
		time.Sleep(20 * time.Second)
		if !pending(read) {
			t.Fatal("a read was answered after the lease: another host may have written")
		}
		if r := w.report(); r.Phase != stalled || !strings.Contains(r.WaitingFor, "all legs to answer; the volume is suspended") {
			t.Errorf("%v, waiting for %q; want it suspended, and that said", r.Phase, r.WaitingFor)
		}
		w.hear()
		if err := <-read; err != nil {
			t.Errorf("read = %v after the record", err)
		}
		w.until(serving)
	})
}

// Reads go on as soon as all legs answer. Writes wait until the manager has said whether it has
// recorded the leg: they would be lost if it has, and the other leg then loses its drive's cache.
func TestAfterTheLeaseReadsGoOnWhenAllLegsAnswer(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.deafen()
		w.fallSilent("t1")
		time.Sleep(10700 * time.Millisecond) // between two requests for a record
		w.answer("t1")
		time.Sleep(2 * time.Second)
		if _, err := w.read(0); err != nil {
			t.Errorf("read = %v", err)
		}
		write := w.write(0, 1)
		time.Sleep(5 * time.Second)
		if !pending(write) {
			t.Error("the manager may have recorded a leg, and a write is acknowledged that the other one may lose")
		}
		w.hear()
		if err := <-write; err != nil {
			t.Errorf("write = %v", err)
		}
		w.until(serving)
	})
}

func TestARefusedRecordIsReportedAndTriedAgain(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.refuse(refusal("EPOCH_SUPERSEDED"))
		w.fallSilent("t1")
		if r := w.until(stalled); !strings.Contains(r.WaitingFor, "EPOCH_SUPERSEDED") {
			time.Sleep(time.Second)
			if r := w.report(); !strings.Contains(r.WaitingFor, "EPOCH_SUPERSEDED") {
				t.Errorf("waiting for %q, want the manager's reason", r.WaitingFor)
			}
		}
		w.expect("not without the record")
		w.refuse(nil)
		w.until(serving)
		w.expect("granted", "record-stale c0.1", "cut t1")
	})
}

func TestALegThatIsNotThereAtFirstIsWaitedForThenRecorded(t *testing.T) {
	from(t, 1, 2, func(w *world) { w.nodes["t1"].down = true }, func(w *world) {
		time.Sleep(8 * time.Second)
		if r := w.report(); r.Phase != connecting || !strings.Contains(r.WaitingFor, "connection refused") {
			t.Errorf("%v, waiting for %q; want CONNECTING, and the cause", r.Phase, r.WaitingFor)
		}
		w.until(serving)
		w.expect("without it", "connect t0", "record-stale c0.1", "export db1")
	})
}

func TestDetachRefusesWhileOpenThenFlushesAndLetsGoClean(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.opened("the file system on /mnt")
		w.want(func(x *volume.Wanted) { x.Detach = true })
		time.Sleep(3 * time.Second)
		if r := w.report(); r.Phase != detaching || !strings.Contains(r.WaitingFor, "/mnt") {
			t.Errorf("%v, waiting for %q; want DETACHING, and who has it open", r.Phase, r.WaitingFor)
		}
		if err := <-w.write(0, 1); err != nil {
			t.Errorf("write while it is open = %v", err)
		}
		w.opened("")
		w.until(clean)
		w.expect("let go", "close", "disconnect t0", "disconnect t1")
		for _, l := range w.legs {
			if l.cached {
				t.Errorf("let go clean, and leg %s has not been flushed: without its power it would differ", l.name)
			}
		}
		time.Sleep(time.Minute)
		if r := w.report(); r.GetPhase() != clean {
			t.Errorf("a minute later %v, want it said until the manager has it", r)
		}
		w.keeper.Want(nil, "", 2)
		time.Sleep(time.Second)
		if s := w.keeper.State(); !s.Idle {
			t.Errorf("state %+v, want idle", s)
		}
	})
}

func TestDetachWithALegThatCanNotBeRecordedIsNotClean(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.deafen()
		w.fallSilent("t1")
		done := w.write(0, 1)
		time.Sleep(time.Second)
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(unclean)
		if err := <-done; err == nil {
			t.Error("a write that a leg lacks was acknowledged on the way out")
		}
		w.hear()
	})
}

func TestDetachOfADegradedVolumeIsClean(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		if err := <-w.write(0, 1); err != nil {
			t.Fatalf("write = %v", err)
		}
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(clean)
	})
}

func TestAVolumeThatIsNoLongerWantedIsTakenFromItsUsers(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.opened("a process")
		w.fallSilent("t1")
		done := w.write(0, 1)
		w.keeper.Want(nil, "", 2)
		if err := <-done; err == nil {
			t.Error("a write of an attachment that is over was acknowledged")
		}
		time.Sleep(time.Second)
		w.expect("taken away", "cut t0", "cut t1", "close by force")
		if s := w.keeper.State(); !s.Idle {
			t.Errorf("state %+v, want idle", s)
		}
	})
}

func TestANewEpochReplacesTheOldOne(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.opened("a process")
		w.want(func(x *volume.Wanted) {
			x.Epoch = 2
			w.wanted = x
			x.Links = []volume.Link{w.link(0, 0), w.link(0, 1)}
		})
		synctest.Wait()
		w.until(serving)
		w.expect("replaced", "cut t0", "cut t1", "close by force", "connect t0", "connect t1", "export db1")
		if r := w.report(); r.Epoch != 2 {
			t.Errorf("epoch %d is served, want 2", r.Epoch)
		}
	})
}

func TestAnEndingProcessLetsGoWhatNobodyHasOpen(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		if err := <-w.write(0, 1); err != nil {
			t.Fatal(err)
		}
		w.stop()
		<-w.ended
		w.expect("let go", "close", "disconnect t0", "disconnect t1")
		if s := w.keeper.State(); !s.Left || s.Report.GetPhase() != clean || s.Report.GetEpoch() != 1 {
			t.Errorf("state %+v, want it left, and reported clean", s)
		}
	})
}

func TestAnEndingProcessTakesAnOpenDeviceFromItsUsers(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.opened("a process")
		w.stop()
		<-w.ended
		if s := w.keeper.State(); s.Left || s.Report.GetPhase() == clean {
			t.Errorf("state %+v, want it not said to be clean", s)
		}
		w.expect("cut", "cut t0", "cut t1", "close by force")
	})
}

func TestAnEndingProcessLeavesAnOpenDeviceThatSurvivesToTheNextOne(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.opened("a process")
		w.mu.Lock()
		w.device.resume = "token"
		w.mu.Unlock()
		w.stop()
		<-w.ended
		w.expect("left before anything else is answered", "leave the device", "cut t0", "cut t1")
		if s := w.keeper.State(); s.Left || s.Report.GetPhase() == clean {
			t.Errorf("state %+v, want it not said to be clean", s)
		}
	})
}

func TestADeviceMayGoOnOnlyForTheSameHostAndContent(t *testing.T) {
	own := volume.Wanted{Volume: block.VolumeID{UUID: block.UUIDFromRandom([16]byte{9})}, Epoch: 7, SinceEpoch: 3}
	token := resumeToken(&own)
	again := own
	again.Epoch = 9
	if token == "" || resumeToken(&again) != token {
		t.Errorf("tokens of two processes that have the volume since the same epoch: %q, %q", token, resumeToken(&again))
	}
	for what, change := range map[string]func(*volume.Wanted){
		"another host had it":  func(w *volume.Wanted) { w.SinceEpoch = 9 },
		"writes may be lost":   func(w *volume.Wanted) { w.SinceEpoch = 0 },
		"hosts share it":       func(w *volume.Wanted) { w.Grant = 12 },
		"it is another volume": func(w *volume.Wanted) { w.Volume = block.VolumeID{} },
	} {
		other := again
		change(&other)
		if resumeToken(&other) == token {
			t.Errorf("%s, and the device may go on", what)
		}
	}
}

func TestARebuildThatFailsEndsItsRevision(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		if err := <-w.write(0, 1); err != nil {
			t.Fatal(err)
		}
		w.took()
		w.answer("t1")
		w.mu.Lock()
		w.legs[legID(0, 1)].err = block.ErrMedium
		w.mu.Unlock()
		w.comesBack(0, 1, 1)
		time.Sleep(2 * time.Second)
		w.expect("given up", "connect t1", "record-stale c0.1", "disconnect t1")
		w.mu.Lock()
		w.legs[legID(0, 1)].err = nil
		w.mu.Unlock()
		w.comesBack(0, 1, 2)
		time.Sleep(2 * time.Second)
		w.expect("and again", "connect t1", "record-in-sync c0.1")
	})
}

func TestADeviceThatSomebodyTookAwayIsMadeAgain(t *testing.T) {
	served(t, 1, 1, func(w *world) {
		d := w.device
		w.did("somebody takes it")
		d.once.Do(func() { close(d.done) })
		time.Sleep(time.Second)
		w.expect("made again", "somebody takes it", "export db1")
	})
}

// While a device is being detached, somebody else removes it: it is closed only once.
func TestADeviceThatSomebodyTookAwayIsLetGo(t *testing.T) {
	served(t, 1, 1, func(w *world) {
		d := w.device
		w.opened("mkfs")
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(detaching)
		w.opened("")
		d.once.Do(func() { close(d.done) })
		w.until(clean)
	})
}

// deafen makes the manager stop answering until hear.
func (w *world) deafen() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deaf = make(chan struct{})
}

func (w *world) hear() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.deaf)
	w.deaf = nil
}

func (w *world) refuse(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused = err
}

// Flushes are skipped only for drives that need none, also when that changes while the volume
// is in use.
func TestADriveThatGetsAVolatileCacheIsFlushedAtOnce(t *testing.T) {
	durable := func(copies ...bool) func(*volume.Wanted) {
		return func(x *volume.Wanted) {
			for i := range x.Links {
				x.Links[i].WriteThrough = copies[i]
			}
		}
	}
	from(t, 1, 2, func(w *world) { durable(true, true)(w.wanted) }, func(w *world) {
		w.until(serving)
		flushes := func(when string, want ...int) {
			t.Helper()
			for copy := range want {
				w.legs[legID(0, copy)].flushes = 0
			}
			if err := <-w.write(0, 1); err != nil {
				t.Fatal(err)
			}
			if err := block.Flush(w.device.volume); err != nil {
				t.Fatal(err)
			}
			for copy, n := range want {
				if got := w.legs[legID(0, copy)].flushes; got != n {
					t.Errorf("%s: copy %d was flushed %d times, want %d", when, copy, got, n)
				}
			}
		}
		flushes("without caches", 0, 0)
		w.want(durable(true, false))
		time.Sleep(time.Second)
		flushes("with one", 0, 1)
		w.want(durable(true, true))
		time.Sleep(time.Second)
		flushes("without caches again", 0, 0)
		// The target of copy 1 was away. Its drive may have got a cache, and the manager has not said anything
		// since.
		w.mu.Lock()
		for _, c := range w.nodes["t1"].conns {
			c.again++
		}
		w.mu.Unlock()
		flushes("connected anew, before the host has looked", 0, 1)
		time.Sleep(time.Second)
		flushes("connected anew", 0, 1)
		w.want(durable(true, true))
		time.Sleep(time.Second)
		flushes("said anew", 0, 0)
	})
}

// noting gives the host a disk.
func noting(dir string) func(*world) {
	return func(w *world) {
		book := evidence.New(dir, slog.New(slog.DiscardHandler))
		book.Open()
		w.keeper.path.cfg.Evidence = book
		w.keeper = w.keeper.path.Keeper(w.volume)
	}
}

// onDisk lists the legs that the host would find noted after a restart.
func (w *world) onDisk(dir string) (names []string) {
	book := evidence.New(dir, slog.New(slog.DiscardHandler))
	book.Open()
	for leg := range book.Of(w.volume).Legs {
		names = append(names, w.legs[leg].name)
	}
	slices.Sort(names)
	return names
}

// The host's note never names a leg that lacks an acknowledged write, and soon names all the
// others.
func TestAHostNotesWhichLegsAreInSync(t *testing.T) {
	dir := t.TempDir()
	from(t, 1, 2, noting(dir), func(w *world) {
		w.until(serving)
		if got := w.onDisk(dir); !slices.Equal(got, []string{"c0.0", "c0.1"}) {
			t.Errorf("noted when the device is there: %v, want both legs", got)
		}
		w.fallSilent("t1")
		if err := <-w.write(4096, 1); err != nil {
			t.Fatal(err)
		}
		if got := w.onDisk(dir); !slices.Equal(got, []string{"c0.0"}) {
			t.Errorf("noted when a write that c0.1 lacks is acknowledged: %v, want c0.0 alone", got)
		}
		w.answer("t1")
		w.comesBack(0, 1, 1)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if got := w.onDisk(dir); !slices.Equal(got, []string{"c0.0", "c0.1"}) {
			t.Errorf("noted after the rebuild: %v, want both legs", got)
		}
	})
}

// A note names too many legs and can neither be replaced nor removed: writes that one of those
// legs lacks are held.
func TestAWriteWaitsForTheNoteOfALoss(t *testing.T) {
	dir := t.TempDir()
	from(t, 1, 2, noting(dir), func(w *world) {
		w.until(serving)
		file := filepath.Join(dir, w.volume.String()+".json")
		text, err := os.ReadFile(file)
		if err := errors.Join(err, os.Remove(file), os.MkdirAll(filepath.Join(file, "stuck"), 0o700)); err != nil {
			t.Fatal(err)
		}
		w.fallSilent("t1")
		done := w.write(4096, 1)
		time.Sleep(7 * time.Second)
		if !pending(done) {
			t.Fatal("a write that a leg lacks was acknowledged, and the host's note still names that leg")
		}
		if r := w.report(); r.Phase != stalled || !strings.Contains(r.WaitingFor, "this host's disk") {
			t.Errorf("reported %v waiting for %q, want STALLED, and the disk", r.Phase, r.WaitingFor)
		}
		if err := errors.Join(os.RemoveAll(file), os.WriteFile(file, text, 0o600)); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Errorf("write = %v when the disk is well again", err)
		}
		if got := w.onDisk(dir); !slices.Equal(got, []string{"c0.0"}) {
			t.Errorf("noted: %v, want c0.0 alone", got)
		}
	})
}

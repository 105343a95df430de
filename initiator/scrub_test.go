// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
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

// holds has a node's legs hold b at an offset.
func (w *world) holds(node string, off int64, b byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.bytes[node][off] = b
}

// inflight has the kernel say that the device has so many writes under way.
func (w *world) inflight(writes int) {
	w.t.Helper()
	dir := filepath.Join(w.dir, "sys/dev/block", w.topNumber())
	for name, text := range map[string]string{"queue/iostats": "1\n", "stat": " 12 0 96 3 40 0 320 532 0 292 532\n", "inflight": fmt.Sprintf("%8d %8d\n", 0, writes)} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			w.t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
}

// topNumber is the number of the volume's device.
func (w *world) topNumber() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range w.devices {
		if d.Name == mirror.TopName(w.volume) {
			return d.Number.String()
		}
	}
	w.t.Fatal("there is no device")
	return ""
}

func (w *world) scrub(s *pb.Scrub) {
	w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Scrub = s })
}

// findings are the findings of a report, for comparisons.
func findings(r *pb.ScrubReport) (all []string) {
	for _, f := range r.GetFindings() {
		all = append(all, fmt.Sprintf("column %d, %d at %d, %d groups, %s %s", f.Column, f.Length, f.Offset, len(f.Equal), f.Outcome, f.Error))
	}
	return all
}

func TestTheCopiesBelowTheTablesAreCompared(t *testing.T) {
	in(t, 2, 2, func(w *world) {
		w.inflight(0)
		w.holds("t0", 1<<20+5, 7)
		w.holds("t1", 1<<20+5, 7)
		w.holds("t1", 5<<20+8191, 1) // of either column
		w.scrub(&pb.Scrub{Id: "s1"})
		time.Sleep(time.Minute)
		r := w.attachment().GetScrub()
		if got, want := findings(r), []string{"column 0, 4096 at 5246976, 2 groups, SCRUB_OUTCOME_UNSPECIFIED ", "column 1, 4096 at 5246976, 2 groups, SCRUB_OUTCOME_UNSPECIFIED "}; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("found %q, want %q", got, want)
		}
		if !r.GetDone() || r.GetFound() != 2 || r.GetDoneBytes() != uint64(64*block.MiB) || r.GetTotalBytes() != r.GetDoneBytes() || r.GetAloneBytes() != 0 {
			t.Errorf("scrub %v, want it done, with both columns compared", r)
		}
		if !w.attachment().GetScrubs() {
			t.Error("the host does not say that it can compare copies")
		}
		w.scrub(nil)
		time.Sleep(time.Second)
		w.expect("nothing is done to the tables")
		if r := w.attachment().GetScrub(); r != nil {
			t.Errorf("without a wanted scrub there is %v", r)
		}
	})
}

// differs runs f on a host of a volume of two copies, of which one block differs, and on which nobody writes.
func differs(t *testing.T, f func(w *world)) {
	t.Helper()
	in(t, 1, 2, func(w *world) {
		w.inflight(0)
		w.holds("t0", 8200, 7)
		f(w)
	})
}

// repairs has the copies of a volume of one column compared and repaired, after what is found was recorded.
func (w *world) repairs(from ...*pb.Place) {
	w.scrub(&pb.Scrub{Id: "s1", Repair: true, From: from})
	time.Sleep(time.Minute)
	w.expect("nothing is repaired before the manager has recorded what was found")
	r := w.attachment().GetScrub()
	if r.GetFound() != 1 || r.GetDone() {
		w.t.Fatalf("scrub %v, want it to wait with one finding", r)
	}
	w.scrub(&pb.Scrub{Id: "s1", Repair: true, From: from, Run: r.GetRun(), Recorded: r.GetFound()})
}

// ended checks what became of the only finding, and why if that is not empty.
func (w *world) ended(want pb.ScrubOutcome, why string) {
	w.t.Helper()
	r := w.attachment().GetScrub()
	if f := r.GetFindings(); len(f) != 1 || f[0].GetOutcome() != want || !strings.Contains(f[0].GetError(), why) || !r.GetDone() || r.GetSettled() != 1 {
		w.t.Errorf("scrub %v, want one range that is %v: %s", r, want, why)
	}
}

// holdsNow checks what a node's legs hold at an offset.
func (w *world) holdsNow(node string, off int64, want byte) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if got := w.bytes[node][off]; got != want {
		w.t.Errorf("%s holds %d at %d, want %d", node, got, off, want)
	}
}

func TestWhatDiffersIsRepairedWhileIOIsHeld(t *testing.T) {
	differs(t, func(w *world) {
		w.holds("t1", 8200, 1)
		w.repairs(&pb.Place{Copy: 1})
		w.until(serving)
		time.Sleep(time.Minute)
		w.expect("repair", "suspend top", "write c0: 4096 at 8192", "resume top")
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_REPAIRED, "")
		w.holdsNow("t0", 8200, 1)
	})
}

func TestOfTwoCopiesNoneIsKnownToBeRight(t *testing.T) {
	differs(t, func(w *world) {
		w.scrub(&pb.Scrub{Id: "s1", Repair: true})
		time.Sleep(time.Minute)
		w.expect("nothing is written")
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_NOT_KNOWN, "")
	})
}

func TestTwoOfThreeCopiesAreRight(t *testing.T) {
	in(t, 1, 3, func(w *world) {
		w.inflight(0)
		w.holds("t2", 8200, 7)
		w.repairs()
		time.Sleep(time.Minute)
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_REPAIRED, "")
		w.holdsNow("t2", 8200, 0)
	})
}

// What users write between the comparison and the repair stays.
func TestARepairKeepsWhatWasWrittenSince(t *testing.T) {
	differs(t, func(w *world) {
		w.holds("t0", 8300, 3)
		w.holds("t1", 8300, 3)
		w.mu.Lock()
		w.suspended = func() { w.bytes["t0"][8300], w.bytes["t1"][8300] = 4, 4 }
		w.mu.Unlock()
		w.repairs(&pb.Place{Copy: 1})
		time.Sleep(time.Minute)
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_REPAIRED, "")
		w.holdsNow("t0", 8200, 0)
		w.holdsNow("t0", 8300, 4)
		w.holdsNow("t1", 8300, 4)
	})
}

func TestWhatIsEqualByThenIsNotWritten(t *testing.T) {
	differs(t, func(w *world) {
		w.mu.Lock()
		w.suspended = func() { w.bytes["t0"][8200] = 0 }
		w.mu.Unlock()
		w.repairs(&pb.Place{Copy: 1})
		time.Sleep(time.Minute)
		w.expect("held, and not written", "suspend top", "resume top")
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_GONE, "")
	})
}

// A leg that does not take the write leaves, as after a write of users. Until then the write waits, and I/O is held.
func TestALegIsLostDuringARepair(t *testing.T) {
	in(t, 1, 3, func(w *world) {
		w.inflight(0)
		w.holds("t2", 8200, 7)
		w.mu.Lock()
		w.written = func() { w.silent["t1"] = make(chan struct{}) }
		w.mu.Unlock()
		w.repairs()
		time.Sleep(time.Minute)
		h := w.took()
		at := func(what string) int {
			return slices.IndexFunc(h, func(s string) bool { return strings.HasPrefix(s, what) })
		}
		if !(at("suspend top") >= 0 && at("suspend top") < at("record-stale c0.1") && at("record-stale c0.1") < at("reload c0") && at("reload c0") < at("write c0") && at("write c0") < at("resume top")) {
			t.Errorf("the calls were %q", h)
		}
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_NOT_REPAIRED, "")
		w.holdsNow("t2", 8200, 0)
		w.until(serving)
	})
}

// Nothing is repaired while a write of users waits, as for space: all other I/O would wait with it.
func TestARepairDoesNotBeginWhileAWriteWaits(t *testing.T) {
	differs(t, func(w *world) {
		w.scrub(&pb.Scrub{Id: "s1", Repair: true, From: []*pb.Place{{Copy: 1}}})
		time.Sleep(time.Minute)
		r := w.attachment().GetScrub()
		w.inflight(1)
		w.scrub(&pb.Scrub{Id: "s1", Repair: true, From: []*pb.Place{{Copy: 1}}, Run: r.GetRun(), Recorded: 1})
		time.Sleep(10 * time.Second)
		w.expect("a write waits")
		w.inflight(0)
		time.Sleep(time.Minute)
		w.expect("it does not wait any more", "suspend top", "write c0: 4096 at 8192", "resume top")
	})
}

// A write that a leg has failed is held, and one copy has it: nothing is repaired then.
func TestNothingIsRepairedWhileALegHasFailed(t *testing.T) {
	in(t, 1, 3, func(w *world) {
		w.inflight(0)
		w.holds("t2", 8200, 7)
		w.mu.Lock()
		w.recordless = true
		w.suspended = func() { w.health[w.refOf("t1")] = dm.WriteError }
		w.mu.Unlock()
		w.repairs()
		time.Sleep(20 * time.Second)
		if h := w.took(); slices.ContainsFunc(h, func(s string) bool { return strings.HasPrefix(s, "write ") }) {
			t.Errorf("the calls were %q", h)
		}
		w.mu.Lock()
		w.recordless = false
		w.mu.Unlock()
		time.Sleep(time.Minute)
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_NOT_KNOWN, "") // of two that are left
	})
}

// A write of a repair that has not ended is in the way of the next scrub's, and of the tables of the next grant.
func TestARepairThatHangsIsWaitedFor(t *testing.T) {
	differs(t, func(w *world) {
		hangs := make(chan struct{})
		w.mu.Lock()
		w.written = func() {
			w.mu.Unlock()
			<-hangs
			w.mu.Lock()
		}
		w.mu.Unlock()
		w.repairs(&pb.Place{Copy: 1})
		time.Sleep(10 * time.Second)
		w.expect("the write hangs", "suspend top")
		if waits := w.attachment().GetWaitingFor(); waits != "the end of a repair of copies that differ" {
			t.Errorf("the volume waits for %q", waits)
		}
		w.scrub(&pb.Scrub{Id: "s2", Repair: true, From: []*pb.Place{{Copy: 1}}})
		time.Sleep(30 * time.Second)
		if r := w.attachment().GetScrub(); r != nil {
			t.Errorf("meanwhile another scrub begins: %v", r)
		}
		w.expect("another scrub is wanted")
		w.reborn(0, 1) // which ends the grant
		time.Sleep(5 * time.Second)
		w.closeDevice()
		w.until(unclean)
		w.empty()
		w.took()
		w.nextEpoch()
		time.Sleep(10 * time.Second)
		if h := w.took(); slices.ContainsFunc(h, func(s string) bool { return strings.HasPrefix(s, "create ") }) {
			t.Errorf("with an old write under way, the next grant begins: %q", h)
		}
		close(hangs)
		w.until(serving)
	})
}

// hangs has the next write of a repair wait until it is let go.
func (w *world) hangs() (begun, letGo chan struct{}) {
	begun, letGo = make(chan struct{}), make(chan struct{})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.written = func() {
		close(begun)
		w.mu.Unlock()
		<-letGo
		w.mu.Lock()
	}
	return begun, letGo
}

// A write in the kernel outlives the agent that has begun it.
func TestTheNextAgentWaitsForARepair(t *testing.T) {
	differs(t, func(w *world) {
		begun, letGo := w.hangs()
		w.repairs(&pb.Place{Copy: 1})
		<-begun
		w.stop()
		w.start()
		time.Sleep(10 * time.Second)
		w.expect("the write has not returned", "suspend top")
		if waits := w.attachment().GetWaitingFor(); waits != "the end of a repair of copies that differ" {
			t.Errorf("the volume waits for %q", waits)
		}
		close(letGo)
		time.Sleep(2 * time.Second)
		w.expect("it has", "write c0: 4096 at 8192", "resume top")
		w.until(serving)
	})
}

func TestARepairDoesNotWriteAfterItsAgentHasEnded(t *testing.T) {
	differs(t, func(w *world) {
		begun := make(chan struct{})
		w.mu.Lock()
		w.reading = func() {
			close(begun)
			w.mu.Unlock()
			time.Sleep(time.Second)
			w.mu.Lock()
		}
		w.mu.Unlock()
		w.repairs(&pb.Place{Copy: 1})
		<-begun
		w.stop()
		w.start()
		time.Sleep(20 * time.Second)
		w.holdsNow("t0", 8200, 7)
		w.until(serving)
	})
}

// While users wait, a read must not take long: a drive may try for seconds.
func TestARepairGivesUpWhatIsReadSlowly(t *testing.T) {
	differs(t, func(w *world) {
		w.mu.Lock()
		w.reading = func() {
			w.mu.Unlock()
			time.Sleep(3 * time.Second)
			w.mu.Lock()
		}
		w.mu.Unlock()
		w.repairs(&pb.Place{Copy: 1})
		time.Sleep(time.Minute)
		w.expect("it is tried again", "suspend top", "resume top", "suspend top", "write c0: 4096 at 8192", "resume top")
	})
}

func TestAnAgentThatStopsResumesNothingBeyondTheLease(t *testing.T) {
	differs(t, func(w *world) {
		begun, letGo := w.hangs()
		w.repairs(&pb.Place{Copy: 1})
		<-begun
		w.cutOff()
		w.fence("t1")
		time.Sleep(20 * time.Second)
		time.AfterFunc(time.Second, func() { close(letGo) })
		w.took()
		w.stop()
		if h := w.took(); slices.Contains(h, "resume top") {
			t.Errorf("beyond the lease, an agent that stops resumes I/O: %q", h)
		}
	})
}

// A snapshot's hold is the snapshot's alone.
func TestARepairWaitsForTheEndOfAHold(t *testing.T) {
	differs(t, func(w *world) {
		w.scrub(&pb.Scrub{Id: "s1", Repair: true, From: []*pb.Place{{Copy: 1}}})
		time.Sleep(time.Minute)
		r := w.attachment().GetScrub()
		w.hold("h1", 5*time.Second)
		time.Sleep(time.Second)
		w.scrub(&pb.Scrub{Id: "s1", Repair: true, From: []*pb.Place{{Copy: 1}}, Run: r.GetRun(), Recorded: 1})
		time.Sleep(2 * time.Second)
		w.holdIs("with a repair that waits", pb.HoldState_HOLD_STATE_HELD)
		w.expect("within the limit", "suspend top")
		time.Sleep(time.Minute)
		w.expect("after it", "resume top", "suspend top", "write c0: 4096 at 8192", "resume top")
	})
}

// A snapshot is not taken of copies of which one is being written.
func TestAHoldWaitsForTheEndOfARepair(t *testing.T) {
	differs(t, func(w *world) {
		begun, letGo := w.hangs()
		w.repairs(&pb.Place{Copy: 1})
		<-begun
		w.hold("h1", 30*time.Second)
		time.Sleep(5 * time.Second)
		w.holdIs("while a repair writes", pb.HoldState_HOLD_STATE_PENDING)
		close(letGo)
		time.Sleep(2 * time.Second)
		w.holdIs("when it has ended", pb.HoldState_HOLD_STATE_HELD)
	})
}

// The copy that the operator has named cannot be read any more: that does not make the other one right.
func TestARepairWritesOnlyWhatWasToldToBeRight(t *testing.T) {
	differs(t, func(w *world) {
		w.mu.Lock()
		w.suspended = func() { w.medium = "t0" }
		w.mu.Unlock()
		w.repairs(&pb.Place{Copy: 0})
		time.Sleep(time.Minute)
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_NOT_KNOWN, "")
		w.holdsNow("t0", 8200, 7)
	})
}

func TestWhatCannotBeReadIsRepaired(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.inflight(0)
		w.mu.Lock()
		w.medium = "t1"
		w.written = func() { w.medium = "" }
		w.mu.Unlock()
		w.repairs()
		time.Sleep(time.Minute)
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_REPAIRED, "")
	})
}

func TestARepairIsTriedAgainWhenALegDoesNotAnswer(t *testing.T) {
	differs(t, func(w *world) {
		w.mu.Lock()
		w.suspended = func() { w.silent["t1"] = make(chan struct{}) }
		w.mu.Unlock()
		time.AfterFunc(time.Minute+1500*time.Millisecond, func() { w.answer("t1") })
		w.repairs(&pb.Place{Copy: 1})
		time.Sleep(time.Minute)
		w.ended(pb.ScrubOutcome_SCRUB_OUTCOME_REPAIRED, "")
	})
}

// An agent that stops waits for a repair, and then lets I/O go on.
func TestAnAgentThatStopsEndsItsRepair(t *testing.T) {
	differs(t, func(w *world) {
		begun, letGo := w.hangs()
		w.repairs(&pb.Place{Copy: 1})
		<-begun
		time.AfterFunc(time.Second, func() { close(letGo) })
		w.stop()
		w.expect("the agent has stopped", "suspend top", "write c0: 4096 at 8192", "resume top")
		w.start()
		w.until(serving)
	})
}

// A host gives up a leg that falls silent. From then on the scrub has one copy, and nothing to compare it with.
func TestAScrubGoesOnWithoutALegThatIsLost(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.inflight(0)
		w.holds("t1", 60<<20, 1)
		w.scrub(&pb.Scrub{Id: "s1", BytesPerSecond: uint64(4 * block.MiB)})
		time.Sleep(5 * time.Second)
		w.fallSilent("t1")
		time.Sleep(time.Minute)
		r := w.attachment().GetScrub()
		if !r.GetDone() || r.GetFound() != 0 || r.GetAloneBytes() == 0 || r.GetAloneBytes() >= uint64(60*block.MiB) {
			t.Errorf("scrub %v, want it done, the rest of it alone", r)
		}
	})
}

func TestAScrubEndsWithItsDevice(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.scrub(&pb.Scrub{Id: "s1", BytesPerSecond: uint64(block.MiB)})
		time.Sleep(5 * time.Second)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		w.until(clean)
	})
}

// A write may wait for hours for space on one copy, while the other one has it.
func TestAWriteThatWaitsIsNotADifference(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.inflight(1)
		w.holds("t1", 4096, 1)
		w.scrub(&pb.Scrub{Id: "s1"})
		time.Sleep(3 * time.Minute)
		if r := w.attachment().GetScrub(); !r.GetDone() || r.GetFound() != 0 || r.GetAloneBytes() != 4096 {
			t.Errorf("scrub %v, want it done, and one block not compared", r)
		}
	})
}

// A device that is given up ends its scrub; the next one begins anew, and is not taken for done.
func TestAScrubDoesNotEndWithAFailedDevice(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.inflight(0)
		w.holds("t1", 60<<20, 1)
		w.scrub(&pb.Scrub{Id: "s1", BytesPerSecond: uint64(4 * block.MiB)})
		time.Sleep(3 * time.Second)
		run := w.attachment().GetScrub().GetRun()
		w.opened()
		w.reborn(0, 1)
		time.Sleep(5 * time.Second)
		w.closeDevice()
		w.until(unclean)
		w.empty()
		w.nextEpoch()
		w.scrub(&pb.Scrub{Id: "s1", BytesPerSecond: uint64(4 * block.MiB)})
		w.until(serving)
		w.inflight(0)
		for range 5 {
			time.Sleep(time.Second)
			if r := w.attachment().GetScrub(); r.GetDone() || r.GetRun() == run {
				t.Fatalf("in the next epoch the scrub is %v", r)
			}
		}
		time.Sleep(time.Minute)
		if r := w.attachment().GetScrub(); !r.GetDone() || r.GetFound() != 1 || r.GetDoneBytes() != r.GetTotalBytes() {
			t.Errorf("scrub %v, want it done, with the block that differs", r)
		}
	})
}

func TestWhetherWritesAreCountedIsKnown(t *testing.T) {
	const never, reads, writes = " 0 0 0 0 0 0 0 0 0 0 0", " 12 0 96 3 0 0 0 0 0 0 0", " 0 0 0 0 40 0 320 532 0 292 532"
	for what, c := range map[string]struct {
		release, iostats, stat string
		want                   bool
	}{
		"switched on":                            {"6.12.8-amd64", "1", never, true},
		"said to be off, but reads are counted":  {"6.1.0-57-amd64", "0", reads, true},
		"said to be off, but writes are counted": {"6.1.0-57-amd64", "0", writes, true},
		"switched off":                           {"6.1.0-57-amd64", "0", never, false},
		"switched off after some writes":         {"6.12.8-amd64", "0", writes, false},
		"not said":                               {"6.12.8-amd64", "", "", false},
		"of an unknown kernel":                   {"", "0", writes, false},
	} {
		k := &kernel{sysDir: t.TempDir()}
		number := block.DeviceNumber{Major: 253, Minor: 7}
		for name, text := range map[string]string{"queue/iostats": c.iostats, "stat": c.stat} {
			path := filepath.Join(k.sysDir, "dev/block/253:7", name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text+"\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if got := k.countsIO(number, c.release); got != c.want {
			t.Errorf("%s: %v", what, got)
		}
	}
}

// A device that somebody has wiped while it was in use is not compared, and nothing else happens.
func TestAWipedDeviceIsNotCompared(t *testing.T) {
	for _, running := range []bool{false, true} {
		in(t, 1, 2, func(w *world) {
			w.inflight(0)
			if running {
				w.scrub(&pb.Scrub{Id: "s1", BytesPerSecond: uint64(block.MiB)})
				time.Sleep(2 * time.Second)
			}
			w.opened()
			w.mu.Lock()
			for i, d := range w.devices {
				if d.Name == mirror.TopName(w.volume) {
					w.devices[i].Table = dm.Whole(d.Table.Size(), dm.ErrorTarget{})
				}
			}
			w.mu.Unlock()
			time.Sleep(2 * time.Second)
			w.scrub(&pb.Scrub{Id: "s1", BytesPerSecond: uint64(block.MiB)})
			time.Sleep(10 * time.Second)
			if r := w.attachment().GetScrub(); r != nil {
				t.Errorf("running before: %v; scrub %v", running, r)
			}
		})
	}
}

// While the tables of a column change, a write may be released that one copy has not got.
func TestAColumnThatChangesIsNotSettled(t *testing.T) {
	w := &volume.Wanted{Scrub: &volume.Scrub{}, Layout: block.Layout{Stripes: 2, Copies: 2, Chunk: block.DefaultChunk}}
	k := &kernelKeeper{agent: &Agent{}, kernel: &kernel{sysDir: t.TempDir()}, memory: newMemory(volume.Granted(w, nil), time.Now()), changes: map[int]*change{}}
	look := func() []bool {
		k.publishComparable(w, &seen{Seen: volume.Seen{Device: volume.DeviceSeen{Exists: true}, Columns: make([]volume.ColumnSeen, 2)}, columns: make([]columnSeen, 2)})
		return k.compares.Load().settled
	}
	if got := look(); !slices.Equal(got, []bool{true, true}) {
		t.Errorf("settled: %v", got)
	}
	k.unsettle(1)
	if got := k.compares.Load().settled; !slices.Equal(got, []bool{true, false}) {
		t.Errorf("when column 1 is about to change, settled: %v", got)
	}
	k.changes[0] = &change{}
	if got := look(); !slices.Equal(got, []bool{false, true}) {
		t.Errorf("while column 0 changes, settled: %v", got)
	}
}

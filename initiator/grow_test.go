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
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// ---- the world grows ----

// wantLarger doubles the wanted size of the volume.
func (w *world) wantLarger() {
	w.change(func(all *pb.InitiatorWanted) {
		a := all.Attachments[0]
		a.SizeBytes = uint64(2 * w.size)
		a.LegSizeBytes = uint64(w.layout.LegSize(2 * w.size))
	})
}

// growLegs makes a target's namespaces, present and future, large enough for twice the
// volume's size.
func (w *world) growLegs(targets ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.grown == nil {
		w.grown = map[string]bool{}
	}
	for _, target := range targets {
		w.grown[target] = true
		for i := range w.heads {
			if w.heads[i].node == target {
				w.heads[i].Size = w.layout.LegSize(2 * w.size)
			}
		}
	}
}

// tooShort reports whether a table maps beyond the end of a device; the kernel refuses to load
// such a table.
func (w *world) tooShort(t dm.Table) bool {
	for _, r := range t {
		need := r.Length
		switch target := r.Target.(type) {
		case dm.Linear:
			need += target.Offset
		case dm.Striped:
			need /= block.Size(len(target.Legs))
		case dm.Mirror:
			t := dm.Whole(1, dm.Mirror{Legs: target.Legs}) // without the log's device
			if w.shorter(t.Refs(), need) {
				return true
			}
			continue
		}
		if w.shorter((dm.Table{r}).Refs(), need) {
			return true
		}
	}
	return false
}

func (w *world) shorter(refs []dm.Ref, need block.Size) bool {
	for _, ref := range refs {
		if d := w.find(string(ref)); d != nil && d.Table.Size() < need {
			return true
		}
		for _, h := range w.heads {
			if dm.Ref(h.Dev) == ref && h.Size < need {
				return true
			}
		}
	}
	return false
}

func (w *world) discardsOf(d dm.State) string {
	return filepath.Join(w.dir, "sys/block", fmt.Sprintf("dm-%d", d.Number.Minor), "queue/discard_max_bytes")
}

// takeLimits applies what a new table does to a device's limits: they become those of the
// devices below, overriding what was written to them.
func (w *world) takeLimits(d dm.State) error {
	limit := "4096"
	if short(d.Name) == "top" {
		for _, ref := range d.Table.Refs() {
			if below, err := os.ReadFile(w.discardsOf(*w.find(string(ref)))); err != nil || string(below) == "0" {
				limit = "0"
			}
		}
		if w.open > 0 && limit != "0" && w.layout.Copies > 1 {
			w.t.Error("a mirrored volume that is in use has discards")
		}
	}
	most, unit := "2199023255040", "16384"
	if limit == "0" {
		most = "0"
	}
	if w.forgets && short(d.Name) == "top" {
		w.forgets, unit = false, "0"
	}
	queue := filepath.Dir(w.discardsOf(d))
	return errors.Join(os.WriteFile(w.discardsOf(d), []byte(limit), 0o600),
		os.WriteFile(filepath.Join(queue, "discard_max_hw_bytes"), []byte(most+"\n"), 0o600),
		os.WriteFile(filepath.Join(queue, "discard_granularity"), []byte(unit+"\n"), 0o600))
}

// problem reports whether the agent reports a problem with these texts.
func (w *world) problem(texts ...string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.reports[len(w.reports)-1].Problems {
		all := true
		for _, t := range texts {
			all = all && strings.Contains(p.Cause, t)
		}
		if all {
			return true
		}
	}
	return false
}

func (w *world) topSize() block.Size {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.find(mirror.TopName(w.volume)).Table.Size()
}

// ---- tests ----

func TestAVolumeGrowsFromTheLegsUp(t *testing.T) {
	in(t, 2, 2, func(w *world) {
		w.open = 1
		number := w.find(mirror.TopName(w.volume)).Number.String()
		if a := w.attachment(); a.SizeBytes != uint64(w.size) || a.DeviceNumber != number {
			t.Errorf("reported %d bytes, device %q; want %d, %q", a.SizeBytes, a.DeviceNumber, w.size, number)
		}
		w.wantLarger()
		w.growLegs("t0")
		time.Sleep(5 * time.Second)
		w.expect("not all legs have grown")
		if a := w.attachment(); a.Phase != serving || a.SizeBytes != uint64(w.size) || !w.problem("grow to 128MiB", "column 1", "on t1", "has 32MiB", "must have 64MiB") {
			t.Errorf("while a leg is too small: %v; want it serving at the old size, and the leg named", a)
		}
		w.growLegs("t1")
		time.Sleep(2 * time.Second)
		w.expect("all have grown", "resize c0: mirror t0 t1", "resize c1: mirror t0 t1", "resize top: striped")
		if a := w.attachment(); a.Phase != serving || a.SizeBytes != uint64(2*w.size) || a.DeviceNumber != number {
			t.Errorf("reported %v; want it serving with %d bytes as %s", a, 2*w.size, number)
		}
		if b, err := os.ReadFile(w.discardsOf(*w.find(mirror.TopName(w.volume)))); err != nil || string(b) != "0" {
			t.Errorf("discards of the device are %q, %v; want none", b, err)
		}
		time.Sleep(10 * time.Second)
		w.expect("nothing more to do")
	})
}

// TestAnAgentThatIsCutWhileAVolumeGrowsGoesOn stops the agent after each of the changes.
func TestAnAgentThatIsCutWhileAVolumeGrowsGoesOn(t *testing.T) {
	for done := range 3 {
		in(t, 2, 2, func(w *world) {
			left := done
			w.dying = func() bool { left--; return left >= 0 }
			w.wantLarger()
			w.growLegs("t0", "t1")
			time.Sleep(2 * time.Second)
			if w.topSize() != w.size || w.attachment().SizeBytes != uint64(w.size) {
				t.Errorf("after %d changes the device has %v, and %d are reported; want %v", done, w.topSize(), w.attachment().SizeBytes, w.size)
			}
			w.stop()
			w.dying = nil
			w.took()
			stop := w.start()
			time.Sleep(2 * time.Second)
			all := []string{"resize c0: mirror t0 t1", "resize c1: mirror t0 t1", "resize top: striped"}
			beside := func(did string) bool { return did == "suspend top" || did == "resume top" } // until all legs have answered
			if got := strings.Join(slices.DeleteFunc(w.took(), beside), "; "); got != strings.Join(all[done:], "; ") {
				t.Errorf("after %d changes the next agent did %s", done, got)
			}
			if a := w.attachment(); a.GetPhase() != serving || a.GetSizeBytes() != uint64(2*w.size) {
				t.Errorf("then it is %v", a)
			}
			stop()
		})
	}
}

func TestWhatALostLegMissesIsKeptWhileAVolumeGrows(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.took()
		w.write(0, 3, 5)
		w.wantLarger()
		w.growLegs("t0")
		time.Sleep(2 * time.Second)
		w.expect("the rest grows", "resize c0-lost1: error", "resize c0: mirror keep_log t0 c0-lost1", "resize top: linear")
		w.mu.Lock()
		image, err := w.getLog(dm.RefTo(w.loops[0].Number))
		w.mu.Unlock()
		if err != nil || image.Regions() != 512 || image.CountDirty() != 2 || !image.Dirty(3) || !image.Dirty(5) {
			t.Errorf("the log has %d regions, %d dirty, %v; want 512 with 3 and 5, as before", image.Regions(), image.CountDirty(), err)
		}
		w.answer("t1")
		w.comesBack(0, 1, 1)
		time.Sleep(5 * time.Second)
		w.expect("back as small as it was", "connect t1")
		if !w.problem("rebuild leg", "on t1", "has 64MiB", "must have 128MiB") && !w.problem("has 64MiB, the leg must have 128MiB") && !linkSays(w.attachment(), "has 64MiB") {
			t.Errorf("nothing says why the leg is not rebuilt: %v", w.attachment())
		}
		w.growLegs("t1")
		time.Sleep(2 * time.Second)
		w.expect("and large enough",
			"create c0-back1: linear", "reload c0: mirror t0 c0-back1", "remove c0-lost1",
			"flush t1", "record-in-sync c0.1@1 copied 512KiB", "reload c0: mirror t0 t1", "remove c0-back1")
	})
}

func linkSays(a *pb.AttachmentReport, text string) bool {
	for _, l := range a.GetLegs() {
		if strings.Contains(l.GetError(), text) {
			return true
		}
	}
	return false
}

// TestALegThatIsRebuiltMustHaveGrownBeforeItIsInSync: the next host would need its room.
func TestALegThatIsRebuiltMustHaveGrownBeforeItIsInSync(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.beginRebuild(3)
		w.wantLarger()
		w.growLegs("t0")
		time.Sleep(2 * time.Second)
		w.expect("one is too small")
		w.finishResync()
		time.Sleep(2 * time.Second)
		w.expect("and not in sync, though it has everything")
		if !w.problem("record leg", "has 64MiB", "must have 128MiB") || !w.problem("grow to 128MiB", "column 0") {
			t.Errorf("what is in the way is not told: %v", w.attachment())
		}
		w.growLegs("t1")
		time.Sleep(2 * time.Second)
		w.expect("large enough: it joins, and then all grows",
			"flush t1", "record-in-sync c0.1@1 copied 256KiB", "reload c0: mirror t0 t1", "remove c0-back1",
			"resize c0: mirror t0 t1", "resize top: linear")
	})
}

// TestARebuildGoesOnWhileAVolumeGrows: the new space need not be copied.
func TestARebuildGoesOnWhileAVolumeGrows(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.beginRebuild(3, 4)
		w.growLegs("t0", "t1")
		w.wantLarger()
		time.Sleep(2 * time.Second)
		w.expect("it grows", "resize c0-back1: linear", "resize c0: mirror t0 c0-back1", "resize top: linear")
		if a := w.attachment(); a.ResyncTotalBytes != uint64(512*block.KiB) || a.SizeBytes != uint64(2*w.size) {
			t.Errorf("reported %v; want 512 KiB to copy, as before, and the new size", a)
		}
		w.finishResync()
		time.Sleep(2 * time.Second)
		w.expect("and is over", "flush t1", "record-in-sync c0.1@1 copied 512KiB", "reload c0: mirror t0 t1", "remove c0-back1")
	})
}

func TestADeviceThatIsStoppedDoesNotGoOnBecauseItGrows(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.growLegs("t0", "t1")
		w.recordless = true
		w.fallSilent("t1")
		time.Sleep(12 * time.Second)
		w.took()
		w.wantLarger()
		time.Sleep(5 * time.Second)
		w.expect("the lease is over: nothing moves", "flush t0")
		if w.topSize() != w.size {
			t.Errorf("a device that was stopped has grown to %v", w.topSize())
		}
		w.answer("t1")
		time.Sleep(3 * time.Second)
		w.expect("all legs answer", "resize c0: mirror t0 t1", "resume top", "resize top: linear")
	})
}

// TestAnAgentThatBeginsDoesNotLetAStoppedDeviceGoOn: a new agent has seen neither a silence
// nor an answer yet.
func TestAnAgentThatBeginsDoesNotLetAStoppedDeviceGoOn(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.growLegs("t0", "t1")
		one := true
		w.dying = func() bool { was := one; one = false; return was }
		w.wantLarger()
		time.Sleep(time.Second)
		w.stop()
		w.fallSilent("t0")
		w.fallSilent("t1")
		w.mu.Lock()
		w.dying, w.find(mirror.TopName(w.volume)).Suspended = nil, true
		w.mu.Unlock()
		w.took()
		stop := w.start()
		time.Sleep(2 * time.Second)
		w.expect("nothing is known of the legs")
		w.answer("t0")
		w.answer("t1")
		time.Sleep(2 * time.Second)
		w.expect("they answer", "resume top", "resize top: linear")
		stop()
	})
}

func TestAVolumeThatGrowsWhileItsCopiesAreMadeEqualGetsItsDeviceThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.equal = false
		w.attach()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Equalize = true })
		w.start()
		w.until(pb.AttachmentPhase_ATTACHMENT_PHASE_EQUALIZING)
		w.wantLarger()
		time.Sleep(time.Second)
		w.finishResync()
		time.Sleep(2 * time.Second)
		w.expect("equal, and too small", "connect t0", "connect t1", "create c0: mirror t0 t1", "reload c0: mirror t0 t1")
		if a := w.attachment(); a.GetDevice() != "" || !strings.Contains(a.GetWaitingFor(), "room for 128MiB") {
			t.Errorf("with legs that are too small: %v", a)
		}
		w.growLegs("t0", "t1")
		if a := w.until(serving); a.SizeBytes != uint64(2*w.size) {
			t.Errorf("reported %d bytes, want %d", a.SizeBytes, 2*w.size)
		}
		w.expect("large enough", "resize c0: mirror t0 t1", "flush t0", "flush t1", "create top: linear")
	})
}

func TestAVolumeOfOneCopyGrows(t *testing.T) {
	in(t, 2, 1, func(w *world) {
		w.wantLarger()
		w.growLegs("t0")
		time.Sleep(2 * time.Second)
		w.expect("both legs", "resize c0: linear", "resize c1: linear", "resize top: striped")
	})
}

// TestAVolumeThatIsWantedLargerBeforeItIsBuiltIsMadeSo, but not before its legs are larger.
func TestAVolumeThatIsWantedLargerBeforeItIsBuiltIsMadeSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.attach()
		w.wantLarger()
		w.start()
		time.Sleep(2 * time.Second)
		if a := w.attachment(); a.GetDevice() != "" || a.GetSizeBytes() != 0 || a.GetDeviceNumber() != "" || !linkSays(a, "must have 128MiB") {
			t.Errorf("with legs that are too small: %v", a)
		}
		w.growLegs("t0", "t1")
		if a := w.until(serving); a.SizeBytes != uint64(2*w.size) {
			t.Errorf("reported %d bytes, want %d", a.SizeBytes, 2*w.size)
		}
	})
}

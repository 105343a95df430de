// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// wantLarger doubles the wanted size of the volume.
func (w *world) wantLarger() {
	w.want(func(x *volume.Wanted) { x.Size = 2 * volumeSize })
}

// growLeg makes the target of a leg extend it to twice the volume's size.
func (w *world) growLeg(column, copy int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.legs[legID(column, copy)]
	size := int(w.wanted.Layout.LegSize(2 * volumeSize))
	l.data = append(l.data, make([]byte, size-len(l.data))...)
}

// noted reports whether the keeper's notes contain these texts.
func (w *world) noted(texts ...string) bool {
	synctest.Wait()
	for _, n := range w.keeper.State().Notes {
		all := true
		for _, t := range texts {
			all = all && strings.Contains(n, t)
		}
		if all {
			return true
		}
	}
	return false
}

func TestAVolumeGrowsWhenAllLegsInUseHaveRoom(t *testing.T) {
	served(t, 2, 2, func(w *world) {
		const end = int64(2*volumeSize - 512)
		if r := w.report(); r.SizeBytes != uint64(volumeSize) || r.DeviceNumber != "7:4" {
			t.Errorf("reported %d bytes, device %q; want %d and 7:4", r.SizeBytes, r.DeviceNumber, volumeSize)
		}
		w.wantLarger()
		w.growLeg(0, 0)
		w.growLeg(0, 1)
		w.growLeg(1, 1)
		time.Sleep(5 * time.Second)
		w.expect("not all legs have grown")
		if r := w.report(); r.Phase != serving || r.SizeBytes != uint64(volumeSize) || !w.noted("grow to 8MiB", "column 1 on t0", "has 2MiB", "must have 4MiB") {
			t.Errorf("while a leg is too small: %v with %d bytes, notes %q; want it serving at the old size, and the leg named", r.Phase, r.SizeBytes, w.keeper.State().Notes)
		}
		if err := errors.Join(<-w.write(0, 1), <-w.write(int64(volumeSize-512), 2)); err != nil {
			t.Errorf("I/O at the old size: %v", err)
		}
		if err := <-w.write(end, 1); !errors.Is(err, block.ErrRange) {
			t.Errorf("write beyond the old size = %v", err)
		}
		w.growLeg(1, 0)
		time.Sleep(time.Second)
		w.expect("all have grown", "resize to 8MiB")
		if r := w.report(); r.Phase != serving || r.SizeBytes != uint64(2*volumeSize) {
			t.Errorf("reported %v with %d bytes, want it serving with %d", r.Phase, r.SizeBytes, 2*volumeSize)
		}
		if err := <-w.write(end, 3); err != nil {
			t.Errorf("write to the new end = %v", err)
		}
		for at, want := range map[int64]byte{0: 1, int64(volumeSize - 512): 2, end: 3, int64(volumeSize): 0} {
			if got, err := w.read(at); got != want || err != nil {
				t.Errorf("byte %d = %d, %v; want %d", at, got, err, want)
			}
		}
		if a, b := w.holds(1, 0, 4<<20-512), w.holds(1, 1, 4<<20-512); a != 3 || b != 3 {
			t.Errorf("the copies hold %d and %d at the new end, want 3", a, b)
		}
		time.Sleep(10 * time.Second)
		w.expect("nothing more to do")
	})
}

func TestALegThatIsLostDoesNotKeepAVolumeFromGrowing(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.wantLarger()
		w.growLeg(0, 0)
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.expect("it is recorded stale, and the rest grows", "record-stale c0.1", "cut t1", "resize to 8MiB")
		if err := <-w.write(int64(2*volumeSize-512), 3); err != nil {
			t.Fatal(err)
		}
		w.answer("t1")
		w.comesBack(0, 1, 1)
		time.Sleep(5 * time.Second)
		w.expect("back as small as it was", "connect t1")
		if !w.noted("rebuild leg", "on t1", "has 4MiB", "must have 8MiB") {
			t.Errorf("notes are %q, want why the leg is not rebuilt", w.keeper.State().Notes)
		}
		w.growLeg(0, 1)
		time.Sleep(2 * time.Second)
		w.expect("and large enough", "record-in-sync c0.1")
		if got := w.holds(0, 1, int64(2*volumeSize-512)); got != 3 {
			t.Errorf("the rebuilt leg holds %d in the new part, want 3", got)
		}
	})
}

// TestALegThatIsRebuiltMustHaveGrownBeforeItIsInSync: the next host would need its room.
func TestALegThatIsRebuiltMustHaveGrownBeforeItIsInSync(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		if err := <-w.write(8192, 5); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		w.expect("lost", "record-stale c0.1", "cut t1")
		w.answer("t1")
		w.refuse(refusal("BUSY"))
		w.comesBack(0, 1, 1)
		time.Sleep(2 * time.Second)
		w.expect("rebuilt and not recorded", "connect t1")
		w.wantLarger()
		w.growLeg(0, 0)
		w.refuse(nil)
		time.Sleep(5 * time.Second)
		w.expect("too small to be in sync")
		if !w.noted("record leg", "has 4MiB", "must have 8MiB") || !w.noted("grow to 8MiB") {
			t.Errorf("notes are %q, want what is in the way", w.keeper.State().Notes)
		}
		w.growLeg(0, 1)
		time.Sleep(2 * time.Second)
		w.expect("large enough", "record-in-sync c0.1", "resize to 8MiB")
		if got := w.holds(0, 1, 8192); got != 5 {
			t.Errorf("the rebuilt leg holds %d, want 5", got)
		}
	})
}

func TestADeviceThatDoesNotGrowIsTriedAgain(t *testing.T) {
	served(t, 1, 1, func(w *world) {
		w.mu.Lock()
		w.device.refuse = errors.New("no such ioctl")
		w.mu.Unlock()
		w.wantLarger()
		w.growLeg(0, 0)
		time.Sleep(2 * time.Second)
		if r := w.report(); r.SizeBytes != uint64(volumeSize) || r.Phase != serving || !w.noted("no such ioctl") {
			t.Errorf("%v with %d bytes, notes %q; want it serving at the old size, and the reason", r.Phase, r.SizeBytes, w.keeper.State().Notes)
		}
		w.mu.Lock()
		w.device.refuse = nil
		w.mu.Unlock()
		time.Sleep(time.Second)
		w.expect("then it grows", "resize to 8MiB")
		if r := w.report(); r.SizeBytes != uint64(2*volumeSize) {
			t.Errorf("reported %d bytes, want %d", r.SizeBytes, 2*volumeSize)
		}
	})
}

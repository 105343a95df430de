// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// testSize has 4 extents, and an end that is no multiple of 1 MiB.
const testSize = 2*areaSize + 4*block.ExtentSize + 68*512

var (
	cluster1 = block.ClusterID{UUID: block.UUID{1, 1}}
	cluster2 = block.ClusterID{UUID: block.UUID{1, 2}}
	drive1   = block.DriveID{UUID: block.UUID{2, 1}}
	drive2   = block.DriveID{UUID: block.UUID{2, 2}}
)

func legID(n byte) block.LegID       { return block.LegID{UUID: block.UUID{3, n}} }
func volumeID(n byte) block.VolumeID { return block.VolumeID{UUID: block.UUID{4, n}} }

// leg is a record of leg n of volume v.
func leg(n, v byte, extents ...*pb.Extent) *pb.LegLabel {
	return &pb.LegLabel{LegId: legID(n).String(), Column: uint32(n), Extents: extents, Revision: 1, Volume: volume(v, 1, 1)}
}

func volume(v byte, epoch, generation uint64) *pb.VolumeLabel {
	return &pb.VolumeLabel{
		VolumeId: volumeID(v).String(), Name: fmt.Sprintf("db%d", v), SizeBytes: 1 << 30, Pool: "default",
		Layout: &pb.Layout{Stripes: 2, Copies: 1, ChunkBytes: 1 << 17}, Labels: map[string]string{"a": "1", "b": "2", "c": "3"},
		Epoch: epoch, Generation: generation, InSyncLegs: []string{legID(1).String(), legID(2).String()},
	}
}

func run(start, count uint32) *pb.Extent { return &pb.Extent{Start: start, Count: count} }

func formatted(t *testing.T) *memory {
	t.Helper()
	m := newMemory(testSize)
	if err := Format(m, cluster1, drive1, ""); err != nil {
		t.Fatal(err)
	}
	return m
}

func mustOpen(t *testing.T, m Medium) *Drive {
	t.Helper()
	d, err := Open(m, cluster1)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsPutOnADriveIsThereWhenItIsOpenedAgain(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(leg(2, 1, run(3, 1), run(0, 1))))
	must(t, d.PutLeg(leg(1, 1, run(1, 1))))
	must(t, d.Admit(volumeID(1), 7))
	must(t, d.SetVolume(volume(1, 7, 2)))
	again := mustOpen(t, m.clone())
	if diff := cmp.Diff(d.Label(), again.Label(), protocmp.Transform(), cmp.AllowUnexported(Label{})); diff != "" {
		t.Errorf("label after a second open (-want +got):\n%s", diff)
	}
	want := leg(2, 1, run(3, 1), run(0, 1))
	want.AdmittedEpoch, want.Volume = 7, volume(1, 7, 2)
	if diff := cmp.Diff(want, again.Label().Leg(legID(2)), protocmp.Transform()); diff != "" {
		t.Errorf("leg 2 (-want +got):\n%s", diff)
	}
	if got := again.ID(); got != drive1 {
		t.Errorf("ID() = %v, want %v", got, drive1)
	}
	must(t, again.RemoveLeg(legID(2)))
	must(t, again.PutLeg(leg(3, 2, run(0, 1))))
	if got := again.Label().Leg(legID(2)); got != nil {
		t.Errorf("Leg(2) after it was removed = %v, want none", got)
	}
}

func TestAnUpdateThatChangesNothingWritesNothing(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(leg(1, 1, run(0, 1))))
	before := m.writes
	must(t, d.PutLeg(leg(1, 1, run(0, 1))))
	must(t, d.Admit(volumeID(9), 3))
	must(t, d.RemoveLeg(legID(9)))
	refused := errors.New("no")
	if err := d.Update(func(*Label) error { return refused }); !errors.Is(err, refused) {
		t.Errorf("Update = %v, want %v", err, refused)
	}
	if m.writes != before {
		t.Errorf("%d sectors were written, want none", m.writes-before)
	}
}

func TestWhatALabelMayNotBecomeIsRefused(t *testing.T) {
	older := func(change func(*pb.LegLabel)) *pb.LegLabel {
		l := leg(1, 1, run(0, 2))
		l.Volume = volume(1, 5, 5)
		l.Revision = 5
		change(l)
		return l
	}
	for name, test := range map[string]struct {
		record *pb.LegLabel
		want   string
	}{
		"overlap":           {leg(2, 1, run(1, 1)), "extent 1 is taken by leg " + legID(1).String()},
		"overlap of itself": {leg(2, 1, run(2, 1), run(2, 1)), "extent 2 is taken"},
		"beyond the end":    {leg(2, 1, run(3, 2)), "the drive has 4"},
		"wraps around":      {leg(2, 1, run(3, 1<<32-1)), "the drive has 4"},
		"empty run":         {leg(2, 1, run(3, 0)), "the drive has 4"},
		"no extents":        {leg(2, 1), "no extents"},
		"no leg id":         {&pb.LegLabel{Volume: volume(1, 1, 1), Extents: []*pb.Extent{run(3, 1)}}, "parse uuid"},
		"no volume":         {&pb.LegLabel{LegId: legID(2).String(), Extents: []*pb.Extent{run(3, 1)}}, "its volume"},
		"other extents":     {older(func(l *pb.LegLabel) { l.Extents = []*pb.Extent{run(0, 1)} }), "its extents do not begin"},
		"other volume":      {older(func(l *pb.LegLabel) { l.Volume.VolumeId = volumeID(2).String() }), "it belongs to volume"},
		"older revision":    {older(func(l *pb.LegLabel) { l.Revision = 4 }), "revision 4 is older than 5"},
		"older epoch":       {older(func(l *pb.LegLabel) { l.Volume.Epoch = 4 }), "epoch 4, generation 5 is older"},
		"older generation":  {older(func(l *pb.LegLabel) { l.Volume.Generation = 4 }), "epoch 5, generation 4 is older"},
	} {
		t.Run(name, func(t *testing.T) {
			m := formatted(t)
			d := mustOpen(t, m)
			must(t, d.PutLeg(older(func(*pb.LegLabel) {})))
			before := m.writes
			err := d.PutLeg(test.record)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("PutLeg = %v, want an error with %q", err, test.want)
			}
			if m.writes != before {
				t.Error("something was written all the same")
			}
		})
	}
	d := mustOpen(t, formatted(t))
	must(t, d.PutLeg(older(func(*pb.LegLabel) {})))
	if err := d.SetVolume(volume(1, 5, 4)); err == nil {
		t.Error("SetVolume of an older generation succeeded")
	}
	if err := d.Update(func(l *Label) error { l.Drive = drive2; return nil }); err == nil {
		t.Error("Update changed the drive's id")
	}
}

func TestWhatWasReachedStaysReached(t *testing.T) {
	d := mustOpen(t, formatted(t))
	first := leg(1, 1, run(0, 1))
	first.Zeroed = true
	must(t, d.PutLeg(first))
	must(t, d.Admit(volumeID(1), 7))
	must(t, d.Admit(volumeID(1), 6))
	must(t, d.PutLeg(leg(1, 1, run(0, 1))))
	must(t, d.PutLeg(leg(2, 1, run(1, 1))))
	l := d.Label()
	if got := l.Leg(legID(1)); !got.Zeroed || got.AdmittedEpoch != 7 {
		t.Errorf("leg 1: zeroed %v, admitted %d; want true, 7", got.Zeroed, got.AdmittedEpoch)
	}
	if got := l.Leg(legID(2)); got.Zeroed || got.AdmittedEpoch != 7 {
		t.Errorf("leg 2: zeroed %v, admitted %d; want false, 7 like the volume's other leg", got.Zeroed, got.AdmittedEpoch)
	}
}

func TestZeroingALegErasesItOnceAndNothingElse(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	for i := range 4 {
		m.damage(int64(firstExtent)+int64(i)*int64(block.ExtentSize), "old")
	}
	must(t, d.PutLeg(leg(1, 1, run(2, 1), run(0, 1))))
	var told []block.Size
	must(t, d.ZeroLeg(t.Context(), legID(1), func(n block.Size) { told = append(told, n) }))
	for i, want := range []bool{true, false, true, false} {
		b := make([]byte, 3)
		_, err := m.ReadAt(b, int64(firstExtent)+int64(i)*int64(block.ExtentSize))
		if err != nil || allZero(b) != want {
			t.Errorf("extent %d: zero %v, %v; want %v", i, allZero(b), err, want)
		}
	}
	if diff := cmp.Diff([]block.Size{block.ExtentSize, 2 * block.ExtentSize}, told); diff != "" {
		t.Errorf("progress (-want +got):\n%s", diff)
	}
	if !d.Label().Leg(legID(1)).Zeroed {
		t.Error("the leg is not recorded as zeroed")
	}
	m.damage(int64(firstExtent), "new")
	must(t, d.ZeroLeg(t.Context(), legID(1), nil))
	if b := make([]byte, 3); true {
		if _, err := m.ReadAt(b, int64(firstExtent)); err != nil || string(b) != "new" {
			t.Errorf("after a second ZeroLeg the leg holds %q, %v; want %q", b, err, "new")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must(t, d.PutLeg(leg(2, 1, run(3, 1))))
	if err := d.ZeroLeg(ctx, legID(2), nil); !errors.Is(err, context.Canceled) || d.Label().Leg(legID(2)).Zeroed {
		t.Errorf("ZeroLeg when cancelled = %v, zeroed %v", err, d.Label().Leg(legID(2)).Zeroed)
	}
	if err := d.ZeroLeg(t.Context(), legID(9), nil); err == nil {
		t.Error("ZeroLeg of a leg that is not there succeeded")
	}
}

func TestALegThatIsBeingZeroedStays(t *testing.T) {
	d := mustOpen(t, formatted(t))
	must(t, d.PutLeg(leg(1, 1, run(0, 1), run(2, 1))))
	must(t, d.ZeroLeg(t.Context(), legID(1), func(block.Size) {
		if err := d.RemoveLeg(legID(1)); !errors.Is(err, ErrZeroing) {
			t.Errorf("RemoveLeg meanwhile = %v, want %v", err, ErrZeroing)
		}
		if err := d.ZeroLeg(t.Context(), legID(1), nil); !errors.Is(err, ErrZeroing) {
			t.Errorf("a second ZeroLeg meanwhile = %v, want %v", err, ErrZeroing)
		}
		must(t, d.Admit(volumeID(1), 3)) // other changes go on
	}))
	must(t, d.RemoveLeg(legID(1)))
}

func TestNothingOfALongerLabelIsLeftBehindAShorterOne(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	long := leg(1, 1, run(0, 1))
	for at := range 10 { // at one of these it is where ISO 9660 has its magic
		long.Volume.Labels[fmt.Sprint(at)] = strings.Repeat("CD001", 2000)
	}
	must(t, d.PutLeg(long))
	must(t, d.Admit(volumeID(1), 1))
	must(t, d.RemoveLeg(legID(1)))
	must(t, d.PutLeg(leg(2, 1, run(0, 1))))
	for _, slot := range readCopies(m, testSize) {
		rest := make([]byte, labelMax-copyUnit)
		if _, err := m.ReadAt(rest, int64(slot.offset+copyUnit)); err != nil || !allZero(rest) {
			t.Errorf("slot at %v: something is left behind the label, %v", slot.offset, err)
		}
	}
}

// history is a list of changes that produces each kind of label once.
var history = []func(*Label) error{
	func(l *Label) error { return l.PutLeg(leg(1, 1, run(0, 1))) },
	func(l *Label) error { return l.PutLeg(leg(2, 2, run(2, 2))) },
	func(l *Label) error { l.Admit(volumeID(1), 1); return nil },
	func(l *Label) error { return l.SetVolume(volume(2, 2, 2)) },
	func(l *Label) error { // two blocks of 4 KiB
		long := volume(1, 2, 2)
		long.Labels["long"] = strings.Repeat("x", 5000)
		return l.SetVolume(long)
	},
	func(l *Label) error { return l.RemoveLeg(legID(2)) },
	func(l *Label) error { return l.PutLeg(leg(3, 3, run(1, 1))) },
}

func TestACutAnywhereLeavesTheOldLabelOrTheNew(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	m := formatted(t)
	states := 0
	for step, change := range history {
		before := mustOpen(t, m.clone()).Label()
		whole := m.clone()
		d := mustOpen(t, whole)
		must(t, d.Update(change))
		after := d.Label()
		for cutAt := 1; cutAt <= whole.writes; cutAt++ {
			cut := m.clone()
			cut.cutAt = cutAt
			if err := mustOpen(t, cut).Update(change); !errors.Is(err, errCut) {
				t.Fatalf("step %d, cut at sector %d: Update = %v, want %v", step, cutAt, err, errCut)
			}
			for i, left := range cut.afterCut(random) {
				states++
				again := mustOpen(t, left)
				if l := again.Label(); !l.equal(before) && !l.equal(after) {
					t.Fatalf("step %d, cut at sector %d, medium %d: label is neither the old nor the new", step, cutAt, i)
				}
				must(t, again.Update(change))
				if l, err := ReadLabel(left.clone(), testSize); err != nil || !l.equal(after) {
					t.Fatalf("step %d, cut at sector %d, medium %d: the update cannot be repeated: %v", step, cutAt, i, err)
				}
			}
		}
		m = whole.clone()
	}
	t.Logf("%d media", states)
}

func TestASecondCutInTheRepairLeavesAGoodLabelToo(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(3, 4))
	for range 40 {
		m := formatted(t)
		before := mustOpen(t, m).Label()
		seen := before.Generation // must never be lost again
		for step, tries := 0, 0; step < len(history) && tries < 100; tries++ {
			m = m.clone()
			m.cutAt = random.IntN([]int{2, 20, 50}[random.IntN(3)]) + 1
			d := mustOpen(t, m)
			want := before.clone()
			must(t, history[step](want))
			must(t, want.settle())
			if err := d.Update(history[step]); err == nil {
				step++
				before = want
				m = m.clone()
				continue
			}
			media := m.afterCut(random)
			m = media[random.IntN(len(media))]
			l := mustOpen(t, m).Label()
			if !l.equal(before) && !l.equal(want) || l.Generation < seen {
				t.Fatalf("step %d: label is neither the old nor the new, or generation %d after %d was seen", step, l.Generation, seen)
			}
			seen = l.Generation
		}
	}
}

func TestAFailedWriteIsMadeGoodByTheNext(t *testing.T) {
	for i, slot := range slotOffsets(testSize) {
		m := formatted(t)
		d := mustOpen(t, m)
		m.failAt = int64(slot) + 1 // any byte of its first sector
		failed := 0
		for n := range byte(3) {
			if err := d.PutLeg(leg(n, 1, run(uint32(n), 1))); err != nil {
				failed++
				m.failAt = 0
				must(t, d.PutLeg(leg(n, 1, run(uint32(n), 1))))
			}
		}
		if failed != 1 {
			t.Errorf("slot %d: %d writes failed, want 1", i, failed)
		}
		if got := mustOpen(t, m.clone()).Label(); !got.equal(d.Label()) || len(got.Legs) != 3 {
			t.Errorf("slot %d: %d legs are there, want 3", i, len(got.Legs))
		}
	}
}

func TestALabelSurvivesDamageToAllCopiesButOneOfTheNewest(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	for _, change := range history {
		must(t, d.Update(change))
	}
	want := d.Label()
	for keep, slot := range readCopies(m, testSize) {
		if slot.label.Generation != want.Generation {
			continue
		}
		for name, spoil := range map[string]func(*memory, int64){
			"header":   func(m *memory, at int64) { m.damage(at+30, "\xff\xff") },
			"payload":  func(m *memory, at int64) { m.damage(at+600, "\xff\xff") },
			"magic":    func(m *memory, at int64) { m.damage(at, "\xff\xff") },
			"unread":   func(m *memory, at int64) { m.badRead[at/sector] = true },
			"all zero": func(m *memory, at int64) { m.damage(at, strings.Repeat("\x00", 512)) },
		} {
			left := m.clone()
			for i, offset := range slotOffsets(testSize) {
				if i != keep {
					spoil(left, int64(offset))
				}
			}
			again := mustOpen(t, left)
			if !again.Label().equal(want) {
				t.Errorf("%s, only copy %d good: not the label that was written", name, keep)
			}
			left.badRead = map[int64]bool{}
			must(t, again.Admit(volumeID(1), 99))
			must(t, again.Admit(volumeID(1), 100))
			for i, slot := range readCopies(left, testSize) {
				if slot.label == nil {
					t.Errorf("%s: copy %d is not repaired by two writes: %v", name, i, slot.err)
				}
			}
		}
	}
}

func TestALabelThatCanNotBeUsedIsNamedAndNotWritten(t *testing.T) {
	spoil := func(m *memory, offset int64, text string) {
		for _, slot := range slotOffsets(testSize) {
			m.damage(int64(slot)+offset, text)
		}
	}
	for name, test := range map[string]struct {
		spoil func(*memory) *memory
		want  error
		sigs  string
	}{
		"blank":           {func(*memory) *memory { return newMemory(testSize) }, ErrNoLabel, ""},
		"too small":       {func(*memory) *memory { return newMemory(block.MiB) }, ErrNoLabel, ""},
		"corrupt header":  {func(m *memory) *memory { spoil(m, 40, "\xff\xff"); return m }, ErrCorrupt, "weft drive (corrupt)"},
		"corrupt payload": {func(m *memory) *memory { spoil(m, 520, "\xff\xff"); return m }, ErrCorrupt, "weft drive (corrupt)"},
		"unreadable": {func(m *memory) *memory {
			for _, slot := range slotOffsets(testSize) {
				m.badRead[int64(slot)/sector+1] = true
			}
			return m
		}, errBad, ""},
		"newer format": {func(m *memory) *memory { newerVersion(m, slotSize); return m }, ErrNewer, "weft drive (newer format)"},
		"newer entry":  {func(m *memory) *memory { newerEntry(m, slotSize); return m }, ErrNewer, "weft drive (newer format)"},
		"grown":        {func(m *memory) *memory { m.size += block.GiB; return m }, ErrOtherSize, Name(cluster1, drive1)},
		"truncated":    {func(m *memory) *memory { m.size -= 512; return m }, ErrOtherSize, Name(cluster1, drive1)},
		"with a file system": {func(m *memory) *memory {
			m.damage(0, "XFSB")
			return m
		}, ErrOverwritten, Name(cluster1, drive1) + ", xfs"},
		"with an md superblock behind the first copy": {func(m *memory) *memory {
			m.damage(4096, "\xfc\x4e\x2b\xa9\x01")
			return m
		}, ErrOverwritten, Name(cluster1, drive1) + ", linux_raid_member"},
		"with a backup gpt": {func(m *memory) *memory {
			m.damage(int64(m.size)-512, "EFI PART")
			return m
		}, ErrOverwritten, Name(cluster1, drive1) + ", gpt"},
	} {
		t.Run(name, func(t *testing.T) {
			m := formatted(t)
			d := mustOpen(t, m)
			must(t, d.PutLeg(leg(1, 1, run(0, 1))))
			must(t, d.Admit(volumeID(1), 1))
			m = test.spoil(m)
			before := m.writes
			if _, err := Open(m, cluster1); !errors.Is(err, test.want) {
				t.Errorf("Open = %v, want %v", err, test.want)
			}
			if _, err := Resume(m); !errors.Is(err, test.want) && (test.want != ErrOverwritten || err != nil) {
				t.Errorf("Resume = %v, want %v", err, test.want)
			}
			if !errors.Is(test.want, errBad) {
				sigs, err := Signatures(m, m.size)
				if got := strings.Join(sigs, ", "); got != test.sigs || err != nil {
					t.Errorf("Signatures = %q, %v; want %q", got, err, test.sigs)
				}
			}
			if test.want != ErrNoLabel {
				if err := Format(m, cluster1, drive1, "data"); err == nil {
					t.Error("Format wrote over it without its name")
				}
			}
			if m.writes != before {
				t.Error("something was written")
			}
		})
	}
}

// newerVersion makes the copy in a slot one of the next version, with a good checksum.
func newerVersion(m *memory, slot block.Size) {
	b := make([]byte, headerSize)
	if _, err := m.ReadAt(b, int64(slot)); err != nil {
		panic(err)
	}
	setVersion(b, formatVersion+1)
	m.damage(int64(slot), string(b))
}

func TestADriveOfAnotherClusterIsNotOpened(t *testing.T) {
	m := formatted(t)
	if _, err := Open(m, cluster2); !errors.Is(err, ErrOtherCluster) || !strings.Contains(err.Error(), cluster1.String()) {
		t.Errorf("Open = %v, want %v that names it", err, ErrOtherCluster)
	}
	if d, err := Open(m, block.ClusterID{}); err != nil || d.Label().Cluster != cluster1 {
		t.Errorf("Open for any cluster = %v", err)
	}
	if err := Format(m, cluster2, drive2, ""); err == nil {
		t.Error("Format took another cluster's drive without force")
	}
	must(t, Format(m, cluster2, drive2, Name(cluster1, drive1)))
	if d, err := Open(m, cluster2); err != nil || d.ID() != drive2 {
		t.Errorf("Open after a forced format = %v", err)
	}
}

func TestALabelThatSomebodyElseChangedIsNotWritten(t *testing.T) {
	m := formatted(t)
	one, two := mustOpen(t, m), mustOpen(t, m)
	must(t, one.PutLeg(leg(1, 1, run(0, 1))))
	if err := two.PutLeg(leg(2, 1, run(0, 1))); !errors.Is(err, ErrOverwritten) {
		t.Errorf("PutLeg = %v, want %v", err, ErrOverwritten)
	}
	if got := mustOpen(t, m).Label(); !got.equal(one.Label()) {
		t.Error("the label is not the one that was written first")
	}
}

func TestFormatErasesOnlyWhatItsForceNames(t *testing.T) {
	for _, test := range []struct {
		force string
		ok    bool
	}{{"", false}, {"xfs", false}, {`gpt, xfs "data", x`, false}, {`gpt, xfs "data"`, true}} {
		m := newMemory(testSize)
		m.damage(0, "XFSB")
		m.damage(108, "data")
		m.damage(int64(m.size)-512, "EFI PART")
		before := m.writes
		err := Format(m, cluster1, drive1, test.force)
		if (err == nil) != test.ok {
			t.Errorf("Format(force %q) = %v, want success %v", test.force, err, test.ok)
		}
		if err != nil && m.writes != before {
			t.Errorf("Format(force %q) wrote before it refused", test.force)
		}
		if err == nil {
			if sigs, err := Signatures(m, testSize); err != nil || !cmp.Equal(sigs, []string{Name(cluster1, drive1)}) {
				t.Errorf("Signatures after format = %q, %v", sigs, err)
			}
		}
	}
}

func TestFormatIsRepeatable(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(leg(1, 1, run(0, 1))))
	writes := m.writes
	must(t, Format(m, cluster1, drive1, ""))
	if m.writes != writes {
		t.Error("a second format of the same drive wrote to it")
	}
	if err := Format(m, cluster1, drive2, ""); err == nil {
		t.Error("Format took a drive that is another one")
	}
	if err := Format(newMemory(MinSize-512), cluster1, drive1, ""); err == nil {
		t.Error("Format took a device without room for an extent")
	}
}

func TestAFormatThatWasCutCanBeRepeated(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(5, 6))
	foreign := func() *memory {
		m := newMemory(testSize)
		m.damage(0, "XFSB")
		m.damage(65536+64, "_BHRfS_M")
		m.damage(int64(m.size)-512, "EFI PART")
		m.damage(int64(areaSize), "in the first extent")
		return m
	}
	old := foreign()
	must(t, Format(old, cluster2, drive2, "btrfs, gpt, xfs"))
	for name, start := range map[string]*memory{"foreign": foreign(), "other cluster": old, "blank": newMemory(testSize)} {
		sigs, err := Signatures(start, testSize)
		must(t, err)
		force := strings.Join(sigs, ", ")
		whole := start.clone()
		must(t, Format(whole, cluster1, drive1, force))
		for cutAt := 1; cutAt <= whole.writes; cutAt++ {
			cut := start.clone()
			cut.cutAt = cutAt
			if err := Format(cut, cluster1, drive1, force); !errors.Is(err, errCut) {
				t.Fatalf("%s: Format cut at %d = %v", name, cutAt, err)
			}
			for i, left := range cut.afterCut(random) {
				if _, err := Open(left.clone(), cluster1); err == nil {
					sigs, err := Signatures(left, testSize)
					if err != nil || len(sigs) != 1 {
						t.Fatalf("%s, cut at %d, medium %d: opens with %q, %v", name, cutAt, i, sigs, err)
					}
				}
				if err := Format(left, cluster1, drive1, force); err != nil {
					t.Fatalf("%s, cut at %d, medium %d: second Format = %v", name, cutAt, i, err)
				}
				if _, err := ReadLabel(left.clone(), testSize); err != nil {
					t.Fatalf("%s, cut at %d, medium %d: after the second Format: %v", name, cutAt, i, err)
				}
			}
		}
	}
}

func TestAnErasedDriveIsBlank(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(leg(1, 1, run(0, 1))))
	if err := d.Erase(); err == nil {
		t.Error("Erase of a drive with a leg succeeded")
	}
	must(t, d.RemoveLeg(legID(1)))
	must(t, d.Erase())
	if sigs, err := Signatures(m, testSize); len(sigs) != 0 || err != nil {
		t.Errorf("Signatures after Erase = %q, %v; want none", sigs, err)
	}
	if err := d.PutLeg(leg(1, 1, run(0, 1))); err == nil {
		t.Error("PutLeg on an erased drive succeeded")
	}
}

func TestACutEraseNeverBringsAnOldLabelBack(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	m := formatted(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(leg(1, 1, run(0, 1))))
	must(t, d.RemoveLeg(legID(1)))
	want := d.Label().Generation
	whole := m.clone()
	must(t, mustOpen(t, whole).Erase())
	for cutAt := 1; cutAt <= whole.writes; cutAt++ {
		cut := m.clone()
		cut.cutAt = cutAt
		if err := mustOpen(t, cut).Erase(); !errors.Is(err, errCut) {
			t.Fatalf("Erase cut at %d = %v", cutAt, err)
		}
		for i, left := range cut.afterCut(random) {
			l, err := ReadLabel(left, testSize)
			switch {
			case err == nil && l.Generation == want:
				must(t, mustOpen(t, left).Erase())
			case errors.Is(err, ErrNoLabel):
			case errors.Is(err, ErrCorrupt) && cutAt == whole.writes: // inside the very last sector
			default:
				t.Errorf("cut at %d, medium %d: ReadLabel = %v, %v; want generation %d or none", cutAt, i, l, err, want)
			}
		}
	}
}

func TestALabelReadFromTheCacheIsMadeDurableBeforeItIsBelieved(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(leg(1, 1, run(0, 1))))
	must(t, d.Admit(volumeID(1), 5))
	// The writer is killed between its write and its flush.
	c := readCopies(m, testSize)
	next := d.Label()
	next.Admit(volumeID(1), 6)
	next.Generation++
	b, err := encode(next)
	must(t, err)
	_, err = m.WriteAt(b, int64(spare(c[:2]).offset))
	must(t, err)
	seen := mustOpen(t, m).Label().Leg(legID(1)).AdmittedEpoch
	if got := mustOpen(t, m.clone()).Label().Leg(legID(1)).AdmittedEpoch; got < seen {
		t.Errorf("epoch %d after a power cut, %d had been seen before", got, seen)
	}
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/engine"
)

const region = int64(checkpoint.Region)

// listedDev is a leg whose target lists what is written.
type listedDev struct {
	*fakeDev
	l *fakeLeg
}

func (d listedDev) Submit(io *block.IO) {
	if io.Op != block.OpRead && io.Op != block.OpFlush {
		d.l.list.Mark(io.Off, io.Len)
	}
	d.fakeDev.Submit(io)
}

func (d listedDev) Checkpoint(_ context.Context, commit bool, token uint64) error {
	return d.checkpoint(commit, token, nil)
}

func (d listedDev) CheckpointBehind(_ context.Context, commit bool, token uint64, behind nvmetcp.Behind) error {
	b := &checkpoint.Behind{Since: behind.Since}
	for _, r := range behind.Ranges {
		b.Ranges = append(b.Ranges, checkpoint.Range{Off: r[0], End: r[1]})
	}
	return d.checkpoint(commit, token, b)
}

func (d listedDev) checkpoint(commit bool, token uint64, behind *checkpoint.Behind) error {
	d.c.w.mu.Lock()
	err := d.l.listErr
	d.c.w.mu.Unlock()
	switch {
	case err != nil:
		return err
	case commit:
		return d.l.list.Commit(checkpoint.Token(token), behind)
	}
	d.l.list.Begin(checkpoint.Token(token), behind != nil)
	return nil
}

func (d listedDev) Written(context.Context) (nvmetcp.WrittenLog, error) {
	d.c.w.mu.Lock()
	err := d.l.listErr
	d.c.w.mu.Unlock()
	l := d.l.list.List()
	log := nvmetcp.WrittenLog{Committed: uint64(l.Committed), Begun: uint64(l.Begun), Region: uint64(l.Region), Words: uint64(len(l.Words)), Regions: l.Words}
	if l.Behind != nil {
		log.Behind = &nvmetcp.Behind{Since: l.Behind.Since}
		for _, r := range l.Behind.Ranges {
			log.Behind.Ranges = append(log.Behind.Ranges, [2]int64{r.Off, r.End})
		}
	}
	return log, err
}

// listAll has the targets of both copies list what is written to them, as after a checkpoint.
func listAll(w *world) {
	for copy := range 2 {
		l := w.legs[legID(0, copy)]
		l.list = checkpoint.NewTracker(volumeSize)
		l.list.Begin(1, false)
		if err := l.list.Commit(1, nil); err != nil {
			w.t.Fatal(err)
		}
	}
}

// crashedListed makes the copies differ in region 3, which the second leg lists, and in region
// 9, which none does.
func crashedListed(w *world) {
	listAll(w)
	l := w.legs[legID(0, 1)]
	l.data[3*region+5], l.data[9*region] = 7, 7
	l.list.Mark(3*region+5, 1)
	w.wanted.Equalize = true
}

func TestAfterACrashOnlyTheListedRegionsAreCompared(t *testing.T) {
	from(t, 1, 2, crashedListed, func(w *world) {
		w.until(serving)
		if a, b := w.holds(0, 0, 3*region+5), w.holds(0, 1, 3*region+5); a != b {
			t.Errorf("in a listed region copies hold %d and %d", a, b)
		}
		if a, b := w.holds(0, 0, 9*region), w.holds(0, 1, 9*region); a == b {
			t.Error("regions that no leg lists were compared")
		}
	})
}

// wholly requires that all was compared, although the targets list something, and that the
// host says why.
func wholly(t *testing.T, why string, first func(w *world)) {
	t.Helper()
	from(t, 1, 2, func(w *world) {
		crashedListed(w)
		first(w)
		w.legs[legID(0, 0)].slow = time.Second
	}, func(w *world) {
		said := ""
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			r := w.report()
			if said = max(said, r.WaitingFor); r.Phase == serving {
				break
			}
		}
		if !strings.Contains(said, "all of the copies to be compared") || !strings.Contains(said, why) {
			t.Errorf("the host waited for %q, want the reason %q", said, why)
		}
		w.until(serving)
		if a, b := w.holds(0, 0, 9*region), w.holds(0, 1, 9*region); a != b {
			t.Errorf("copies hold %d and %d when the device is there", a, b)
		}
	})
}

func TestCopiesAreComparedWholeIfAListIsMissing(t *testing.T) {
	t.Run("a target without lists", func(t *testing.T) {
		wholly(t, "keeps no list", func(w *world) { w.legs[legID(0, 0)].list = nil })
	})
	t.Run("a target that has started since", func(t *testing.T) {
		wholly(t, "started since", func(w *world) { w.legs[legID(0, 0)].list = checkpoint.NewTracker(volumeSize) })
	})
	t.Run("lists of two checkpoints", func(t *testing.T) {
		wholly(t, "different checkpoints", func(w *world) {
			w.legs[legID(0, 0)].list.Begin(2, false)
			if err := w.legs[legID(0, 0)].list.Commit(2, nil); err != nil {
				t.Fatal(err)
			}
		})
	})
	t.Run("a target that does not answer for long", func(t *testing.T) {
		wholly(t, "no answer", func(w *world) { w.legs[legID(0, 1)].listErr = errors.New("no answer") })
	})
}

func TestATargetIsAskedAgainForItsList(t *testing.T) {
	from(t, 1, 2, func(w *world) {
		crashedListed(w)
		w.legs[legID(0, 1)].listErr = errors.New("no answer")
	}, func(w *world) {
		w.until(equalizing)
		time.Sleep(100 * time.Millisecond)
		w.mu.Lock()
		w.legs[legID(0, 1)].listErr = nil
		w.mu.Unlock()
		w.until(serving)
		if a, b := w.holds(0, 0, 9*region), w.holds(0, 1, 9*region); a == b {
			t.Error("copies were compared whole although the target answered at last")
		}
	})
}

func TestCheckpointsKeepTheListsShort(t *testing.T) {
	from(t, 1, 2, listAll, func(w *world) {
		w.until(serving)
		for i := range int64(10) {
			time.Sleep(299 * time.Millisecond)
			if err := <-w.write((20+i)*region, 1); err != nil {
				t.Fatal(err)
			}
		}
		a, b := w.legs[legID(0, 0)].list.List(), w.legs[legID(0, 1)].list.List()
		if n, err := checkpoint.Unequal([]checkpoint.List{a, b}); err != nil || len(n) != 1 || n[0].Off < 23*region {
			t.Errorf("while writing, copies may differ in %v, %v; want the last regions", n, err)
		}
		time.Sleep(3 * time.Second)
		a, b = w.legs[legID(0, 0)].list.List(), w.legs[legID(0, 1)].list.List()
		if n, err := checkpoint.Unequal([]checkpoint.List{a, b}); err != nil || len(n) > 0 {
			t.Errorf("after the last write, copies may differ in %v, %v; want nowhere", n, err)
		}
		if a.Committed == 1 || a.Committed != b.Committed {
			t.Errorf("the checkpoints of the legs are %d and %d", a.Committed, b.Committed)
		}
	})
}

func TestNoCheckpointIsTakenBeforeTheCopiesAreEqual(t *testing.T) {
	from(t, 1, 2, func(w *world) {
		crashedListed(w)
		w.legs[legID(0, 0)].bad = errors.New("internal error")
		w.refused = refusal("LAST_LEG")
	}, func(w *world) {
		w.until(equalizing)
		time.Sleep(5 * time.Second)
		before := w.legs[legID(0, 1)].list.List()
		if before.Committed != 1 || before.Begun != 0 {
			t.Errorf("while copies are unequal, checkpoints %d and %d were taken", before.Committed, before.Begun)
		}
		w.mu.Lock()
		w.legs[legID(0, 0)].bad = nil
		w.mu.Unlock()
		w.refuse(nil)
		w.until(serving)
	})
}

func TestUnwrappingFindsTheTargetsList(t *testing.T) {
	d := listedDev{}
	for _, wrapped := range []block.Device{d, legDevice{Device: d}, device{Device: legDevice{Device: d}}} {
		if got, err := trackingOf(wrapped); err != nil || !reflect.DeepEqual(got, d) {
			t.Errorf("trackingOf(%T) = %v, %v", wrapped, got, err)
		}
	}
	if _, err := trackingOf(nil); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("trackingOf(nil): %v, want %v", err, block.ErrUnsupported)
	}
}

func TestWhatIsReadToMakeCopiesEqualIsCounted(t *testing.T) {
	known := engine.Part{Known: true, Ranges: []checkpoint.Range{{Off: 0, End: 4096}, {Off: 8192, End: 16384}}}
	for _, c := range []struct {
		parts []engine.Part
		want  int64
	}{
		{nil, 2 << 20},
		{[]engine.Part{known, {Known: true}}, 12288},
		{[]engine.Part{known, {}}, 1<<20 + 12288},
	} {
		if got := toRead(c.parts, 2, 2<<20); got != c.want {
			t.Errorf("of %v: %d bytes, want %d", c.parts, got, c.want)
		}
	}
}

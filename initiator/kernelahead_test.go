// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
)

// overwrites notes which regions of a leg are written beside the tables.
type overwrites struct {
	mu      sync.Mutex
	regions []uint64
	before  func(region uint64) error
}

func (b *overwrites) write(w *world) func(node string, off, n int64) error {
	return func(node string, off, n int64) error {
		if node != "t1" {
			w.t.Errorf("%d bytes at %d are written to %s", n, off, node)
		}
		r := uint64(off / region)
		b.mu.Lock()
		before := b.before
		b.mu.Unlock()
		if before != nil {
			if err := before(r); err != nil {
				return err
			}
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if !slices.Contains(b.regions, r) {
			b.regions = append(b.regions, r)
		}
		return nil
	}
}

func (b *overwrites) took() []uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := slices.Sorted(slices.Values(b.regions))
	b.regions = nil
	return all
}

// copiesAhead runs f on a host to which a leg has come back that lacks what is in the regions 10 to 19, at one region a
// second.
func copiesAhead(t *testing.T, f func(w *world, b *overwrites)) {
	t.Helper()
	alone(t, true, func(w *world) {
		b := &overwrites{}
		w.data = hasData
		w.ahead = b.write(w)
		for r := range int64(10) {
			w.bytes["t0"][(10+r)*region+7] = byte(1 + r)
		}
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(region) })
		f(w, b)
	})
}

func hasData(_ context.Context, node string) ([]block.Range, error) {
	if node == "t0" {
		return []block.Range{{Off: 10 * region, End: 20 * region}}, nil
	}
	return nil, nil
}

// What users write meanwhile is not on the leg, and the kernel copies it. Where they have written before the copy came
// there, it would be copied twice.
func TestALegIsCopiedToBeforeItJoinsAtTheVolumesRate(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		w.joins(1, 1)
		w.expect("its log has begun", slices.Concat([]string{"connect t1"}, tracked)...)
		w.write(0, 10, 18, 200)
		c := w.attachment().GetCopies()
		if len(c) != 1 || c[0].TotalBytes != uint64(10*region) || c[0].DoneBytes == 0 || c[0].DoneBytes > uint64(7*region) || c[0].WaitingFor != "" || !strings.HasPrefix(c[0].What, "what holds data") {
			t.Errorf("of the copy it is said %v, want a part of 2.5 MiB", c)
		}
		w.expect("the leg waits")
		time.Sleep(12 * time.Second)
		w.expect("the leg joins", slices.Concat([]string{"flush t1"}, joined)...)
		if got, want := b.took(), []uint64{10, 11, 12, 13, 14, 15, 16, 17, 19}; !slices.Equal(got, want) {
			t.Errorf("regions %v were copied before, want %v", got, want)
		}
		if got, want := w.dirty(), []uint64{10, 18, 200}; !slices.Equal(got, want) {
			t.Errorf("regions %v are copied by the kernel, want %v", got, want)
		}
		for r := range int64(10) {
			if at := (10+r)*region + 7; w.bytes["t1"][at] != byte(1+r) && r != 8 {
				t.Errorf("at %d the leg has %d, want %d", at, w.bytes["t1"][at], 1+r)
			}
		}
		if c := w.attachment().GetCopies(); len(c) != 1 || c[0].TotalBytes != uint64(12*region) {
			t.Errorf("of the rest it is said %v, want 3 MiB in all", c)
		}
	})
}

func TestTheRateOfACopyAheadCanChange(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(region / 8) })
		w.joins(1, 1)
		time.Sleep(20 * time.Second)
		if got := b.took(); len(got) > 7 {
			t.Errorf("regions %v were copied at an eighth of one in a second", got)
		}
		w.took()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = 0 })
		time.Sleep(40 * time.Second) // the pauses that have begun
		w.mu.Lock()
		defer w.mu.Unlock()
		if !slices.Contains(w.history, joined[1]) {
			t.Errorf("when it has no limit any more: %q", w.history)
		}
	})
}

// The kernel copies what this could not.
func TestAnErrorEndsACopyAhead(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		b.before = func(region uint64) error {
			if region == 15 {
				return nvmetcp.InternalError
			}
			return nil
		}
		w.joins(1, 1)
		time.Sleep(20 * time.Second)
		dirty := w.dirty()
		if !slices.Contains(dirty, 15) || len(dirty) == 10 && len(b.took()) < 3 {
			t.Errorf("regions %v are copied by the kernel, want 15 and those after it", dirty)
		}
	})
}

// A write beside the tables that has not returned would overwrite what users write after the leg has joined.
func TestALegJoinsOnlyWhenNothingIsWrittenBesideTheTables(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		hang, begun := make(chan struct{}), make(chan struct{}, 100)
		b.before = func(region uint64) error {
			if region == 12 {
				begun <- struct{}{}
				<-hang
				return errors.New("no answer")
			}
			return nil
		}
		w.joins(1, 1)
		<-begun
		w.took()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Legs = all.Attachments[0].Legs[:1] })
		time.Sleep(3 * time.Second)
		b.mu.Lock()
		b.before = nil
		b.mu.Unlock()
		w.took()
		w.joins(2, 1)
		time.Sleep(10 * time.Second)
		if got := w.took(); slices.Contains(got, joined[1]) {
			t.Errorf("while a write of the copy before is under way: %q", got)
		}
		close(hang)
		time.Sleep(30 * time.Second)
		if got := w.took(); !slices.Contains(got, joined[1]) {
			t.Errorf("after it has ended: %q", got)
		}
	})
}

// The kernel carries out what a killed agent has sent, for as long as it waits for an answer.
func TestALegWaitsForWritesOfAnAgentThatWasKilled(t *testing.T) {
	for name, killed := range map[string]bool{"killed": true, "ended": false} {
		copiesAhead(t, func(w *world, b *overwrites) {
			w.joins(1, 1)
			w.stop()
			k := &kernel{runDir: w.dir + "/run"}
			if k.markedAhead(w.volume, 0) {
				t.Errorf("%s: the file is there after the agent has ended", name)
			}
			if killed {
				if err := k.markAhead(w.volume, 0); err != nil {
					t.Fatal(err)
				}
			}
			w.took()
			b.took()
			w.ahead = nil // so that the leg joins at once
			w.stop = w.start()
			time.Sleep(5 * time.Second)
			if got := slices.Contains(w.took(), joined[1]); got == killed {
				t.Errorf("%s: 5 s after the next one has begun, the leg has joined: %v", name, got)
			}
			time.Sleep(5 * time.Second)
			if got := slices.Contains(w.took(), joined[1]); got != killed {
				t.Errorf("%s: 10 s after the next one has begun, the leg has joined since: %v", name, got)
			}
			if _, err := os.Stat(k.aheadFile(w.volume, 0)); err == nil {
				t.Errorf("%s: the file is left", name)
			}
		})
	}
}

func TestACopyAheadEndsWithTheAttachment(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		w.joins(1, 1)
		b.took()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		time.Sleep(10 * time.Second)
		if got := b.took(); len(got) > 4 {
			t.Errorf("regions %v were copied after the detach", got)
		}
		if all, err := os.ReadDir(w.dir + "/run"); err != nil || slices.ContainsFunc(all, func(e os.DirEntry) bool { return strings.HasSuffix(e.Name(), ".ahead") }) {
			t.Errorf("of the copy there is left %v, %v", all, err)
		}
	})
}

// If the leg's target goes away and comes back, the copy goes on where it was, as far as its target was told.
func TestACheckpointTellsALegWhatIsNotCopiedAhead(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		var told nvmetcp.Behind // guarded by the world's mutex
		w.nothingIsWritten()
		w.committed(func(node string, behind []byte) {
			if node == "t1" {
				told, _ = nvmetcp.ParseBehind(behind)
			}
		})
		b.before = func(region uint64) error {
			if region == 19 {
				time.Sleep(5 * time.Minute)
			}
			return nil
		}
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = 0 })
		w.joins(5, 3)
		w.write(0, 12, 100)
		time.Sleep(time.Minute)
		w.mu.Lock()
		if want := [][2]int64{{12 * region, 13 * region}, {19 * region, 20 * region}, {100 * region, 101 * region}}; told.Since != 5 || !slices.EqualFunc(told.Ranges, want, func(a, b [2]int64) bool { return a == b }) {
			t.Errorf("the leg was told that it lacks %v since revision %d, want %v since 5", told.Ranges, told.Since, want)
		}
		w.mu.Unlock()
		time.Sleep(5 * time.Minute)
		if got, want := w.dirty(), []uint64{12, 100}; !slices.Equal(got, want) {
			t.Errorf("regions %v are copied by the kernel, want %v", got, want)
		}
	})
}

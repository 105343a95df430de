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

// What it has copied so far counts; the kernel copies what this could not.
func TestAnErrorEndsACopyAhead(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		b.before = func(region uint64) error {
			if region == 15 {
				return nvmetcp.InternalError
			}
			return nil
		}
		w.joins(1, 1)
		time.Sleep(2 * time.Minute)
		if got, want := w.dirty(), []uint64{15}; !slices.Equal(got, want) {
			t.Errorf("regions %v are copied by the kernel, want %v", got, want)
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

// If the leg that is to be copied to is another attempt, what it lacks is asked for again, and the earlier copy counts no
// more.
func TestACopyAheadIsOfTheLastAnswer(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		w.joins(1, 1)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Legs = all.Attachments[0].Legs[:1] })
		time.Sleep(6 * time.Second) // pauses of the rate, and a look
		b.took()
		time.Sleep(10 * time.Second)
		if got := b.took(); len(got) > 0 {
			t.Errorf("regions %v were copied to a leg that is not wanted", got)
		}
		w.mu.Lock()
		w.data = func(_ context.Context, node string) ([]block.Range, error) {
			return map[string][]block.Range{"t0": {{Off: 30 * region, End: 32 * region}}}[node], nil
		}
		w.mu.Unlock()
		w.took()
		w.joins(2, 1)
		time.Sleep(10 * time.Second)
		if got, want := b.took(), []uint64{30, 31}; !slices.Equal(got, want) {
			t.Errorf("regions %v were copied, want %v", got, want)
		}
		if got := w.took(); !slices.Contains(got, joined[1]) {
			t.Errorf("the leg has not joined: %q", got)
		}
	})
}

// So does one for which there is nothing to copy ahead.
func TestALegWhoseLogHasAllWaitsForWritesOfAnAgentThatWasKilled(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.write(0, 3, 4)
		k := &kernel{runDir: w.dir + "/run"}
		if err := k.markAhead(w.volume, 0); err != nil {
			t.Fatal(err)
		}
		w.took()
		w.returns(1)
		time.Sleep(4 * time.Second)
		w.expect("while a write may be under way", "connect t1")
		if c := w.attachment().GetCopies(); len(c) != 1 || c[0].WaitingFor != lastCopyToEnd {
			t.Errorf("of the copy it is said %v, want what it waits for", c)
		}
		time.Sleep(5 * time.Second)
		w.expect("after that", joined...)
	})
}

// What a copy waits for is told, also if it is a write that does not return.
func TestACopyThatWaitsForAnEarlierOneSaysSo(t *testing.T) {
	copiesAhead(t, func(w *world, b *overwrites) {
		hang := make(chan struct{})
		b.before = func(uint64) error {
			<-hang
			return errors.New("no answer")
		}
		w.joins(1, 1)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Legs = all.Attachments[0].Legs[:1] })
		time.Sleep(3 * time.Second)
		w.joins(2, 1)
		if c := w.attachment().GetCopies(); len(c) != 1 || c[0].WaitingFor != lastCopyToEnd {
			t.Errorf("of the copy it is said %v, want what it waits for", c)
		}
		close(hang)
		time.Sleep(time.Minute)
	})
}

// The lists of the legs in sync have what was discarded while a leg was away, and its log has not. A checkpoint would
// have them forget it.
func TestDiscardsAreKnownUntilALegThatIsCopiedToAheadHasThem(t *testing.T) {
	for name, knows := range map[string]bool{"in the list": true, "nobody knew, so all was copied": false} {
		served(t, true, func(w *world) {
			b := &overwrites{}
			w.ahead = b.write(w)
			committed := w.listsUntilACheckpoint(b, knows)
			w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = uint64(region / 4) })
			w.discarded("3")
			w.goesAndReturns(1, 5)
			time.Sleep(80 * time.Second)
			w.stop()
			w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].RebuildBytesPerSecond = 0 })
			w.stop = w.start()
			time.Sleep(30 * time.Second)
			if !slices.Contains(w.took(), joined[1]) {
				t.Errorf("%s: the leg has not joined", name)
			}
			has := append(b.took(), w.dirty()...)
			for r := uint64(10); r < 40; r++ {
				if !slices.Contains(has, r) {
					t.Errorf("%s (a checkpoint was committed: %v): region %d is neither copied nor to be copied: %v", name, committed(), r, has)
					break
				}
			}
		})
	}
}

// listsUntilACheckpoint has the leg in sync list the regions 10 to 39, if it knows, until a checkpoint is committed there
// after something was copied.
func (w *world) listsUntilACheckpoint(b *overwrites, knows bool) (was func() bool) {
	committed := false
	w.nothingIsWritten()
	w.mu.Lock()
	defer w.mu.Unlock()
	words := make([]uint64, 16)
	for i := 40; i < 160; i++ {
		words[i/64] |= 1 << (i % 64)
	}
	w.lists(map[string]nvmetcp.WrittenLog{"t0": {Committed: 5, Regions: words}, "t1": {}})
	full := w.listed
	w.lists(map[string]nvmetcp.WrittenLog{"t0": {Committed: 6}, "t1": {}})
	empty := w.listed
	w.listed = func(node string, cmd nvmetcp.Command, data []byte) error {
		switch {
		case cmd.Opcode() != nvmetcp.AdminGetLogPage:
			b.mu.Lock()
			defer b.mu.Unlock()
			committed = committed || nvmetcp.ParseCheckpoint(&cmd).Commit && node == "t0" && len(b.regions) > 0
			return nil
		case committed:
			return empty(node, cmd, data)
		case knows:
			return full(node, cmd, data)
		}
		return nvmetcp.InvalidOpcode | nvmetcp.DNR
	}
	w.data = func(_ context.Context, node string) ([]block.Range, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		switch {
		case !knows && !committed:
			return nil, errors.New("not known")
		case node == "t1":
			return []block.Range{{Off: 10 * region, End: 40 * region}}, nil
		}
		return nil, nil
	}
	return func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return committed
	}
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm/mirror"
)

// discards checks whether the device takes discards.
func (w *world) discards(when string, want bool) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	b, err := os.ReadFile(w.discardsOf(*w.find(mirror.TopName(w.volume))))
	if got := strings.TrimSpace(string(b)) != "0"; err != nil || got != want {
		w.t.Errorf("%s: the device takes discards: %v, %v; want %v", when, got, err, want)
	}
}

// served runs f on a host that serves a volume of two copies, all in sync.
func served(t *testing.T, thin bool, f func(w *world)) {
	in(t, 1, 2, func(w *world) {
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Thin = thin })
		w.inflight(0)
		time.Sleep(time.Second)
		f(w)
	})
}

// discarded has the kernel say that users have discarded so often.
func (w *world) discarded(times string) {
	w.t.Helper()
	file := filepath.Join(w.dir, "sys/dev/block", w.topNumber(), "stat")
	if err := os.WriteFile(file, []byte(" 12 0 96 3 40 0 320 532 0 292 532 "+times+" 0 0 0\n"), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func TestThinMirrorsTakeDiscardsUnlessALegIsCopiedTo(t *testing.T) {
	served(t, false, func(w *world) { w.discards("not thin", false) })
	served(t, true, func(w *world) {
		w.discards("all legs are in sync", true)
		w.fallSilent("t1")
		time.Sleep(10 * time.Second)
		w.discards("a leg is away", false)
		w.took()
		w.returns(1)
		time.Sleep(10 * time.Second)
		w.discards("a leg is copied to", false)
		h := w.took()
		if held, joins := slices.Index(h, "suspend top"), slices.Index(h, "create c0-back1: linear"); held < 0 || held > joins {
			t.Errorf("discards may be under way when the leg joins: %q", h)
		}
		w.finishResync()
		time.Sleep(10 * time.Second)
		w.discards("it is in sync again", true)
		w.stop()
		w.start()
		time.Sleep(5 * time.Second)
		w.discards("another agent has begun", true)
	})
}

// Linux 6.12 does not let a table discard for which that was switched off once.
func TestATableThatCannotDiscardAnyMoreIsLoadedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, 2)
		w.forgets = true
		w.attach().Thin = true
		w.stop = w.start()
		w.until(serving)
		time.Sleep(10 * time.Second)
		w.discards("the device is made", true)
		reloads := slices.DeleteFunc(w.took(), func(s string) bool { return s != "reload top: striped" })
		if len(reloads) != 1 {
			t.Errorf("the table was loaded again %d times, want once", len(reloads))
		}
	})
}

func TestAVolumeTakesDiscardsAfterItHasGrown(t *testing.T) {
	served(t, true, func(w *world) {
		w.growLegs("t0", "t1")
		w.wantLarger()
		time.Sleep(20 * time.Second)
		w.discards("it has grown", true)
	})
}

// An answer from before discards were on again does not have them.
func TestTargetsAreAskedAgainIfThereWereDiscardsSince(t *testing.T) {
	served(t, true, func(w *world) {
		log, hold := uint64(0), make(chan struct{})
		w.mu.Lock()
		w.listed = func(node string, cmd nvmetcp.Command, data []byte) error {
			save := w.listed
			w.lists(map[string]nvmetcp.WrittenLog{"t0": {Committed: 5, Regions: []uint64{log}}, "t1": {}})
			l := w.listed
			w.listed = save
			return l(node, cmd, data)
		}
		w.mu.Unlock()
		w.data = func(context.Context, string) ([]block.Range, error) {
			<-hold
			return []block.Range{{Off: 0, End: 256 * region}}, nil
		}
		w.discarded("3")
		w.goesAndReturns(1, 5)
		time.Sleep(5 * time.Second)
		w.mu.Lock()
		file := w.discardsOf(*w.find(mirror.TopName(w.volume)))
		log = 1 << 40
		w.mu.Unlock()
		if err := os.WriteFile(file, []byte("1048576\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		close(hold)
		time.Sleep(10 * time.Second)
		if got, want := w.dirty(), []uint64{5, 10}; !slices.Equal(got, want) {
			t.Errorf("regions %v are copied, want %v", got, want)
		}
	})
}

// A discard that begins and ends while the kernel's counts are added up may hide a write.
func TestADiscardIsNoRest(t *testing.T) {
	k, n := &kernel{sysDir: t.TempDir()}, block.DeviceNumber{Major: 253, Minor: 1}
	dir := filepath.Join(k.sysDir, "dev/block", n.String())
	put := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o600); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(os.MkdirAll(dir, 0o755), unix.Mkfifo(filepath.Join(dir, "inflight"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for discards, want := range map[string]bool{"3": true, "4": false} {
		put("stat", "12 0 96 3 40 0 320 532 0 292 532 3 0 0 0")
		go func() {
			f, err := os.OpenFile(filepath.Join(dir, "inflight"), os.O_WRONLY, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			put("stat", "12 0 96 3 40 0 320 532 0 292 532 "+discards+" 0 0 0")
			if _, err := f.WriteString("0 0\n"); err != nil {
				t.Error(err)
			}
		}()
		if got := k.rests(n); got != want {
			t.Errorf("with %s discards: it rests: %v", discards, got)
		}
	}
}

// An operator may bound how much is discarded at a time.
func TestABoundOfDiscardsStays(t *testing.T) {
	served(t, true, func(w *world) {
		w.mu.Lock()
		file := w.discardsOf(*w.find(mirror.TopName(w.volume)))
		w.mu.Unlock()
		if err := os.WriteFile(file, []byte("1024\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if b, err := os.ReadFile(file); err != nil || string(b) != "1024\n" {
			t.Errorf("the bound is %q, %v", b, err)
		}
	})
}

// Discards are not in dm-mirror's log. Those that a leg has missed are in the lists of the other legs.
func TestWhatWasDiscardedWhileALegWasAwayIsCopied(t *testing.T) {
	unknown := errors.New("no list")
	for name, test := range map[string]struct {
		discards string
		list     error
		data     error
		want     []uint64 // regions that are copied; nil: all
	}{
		"nothing was discarded":          {discards: "0", want: []uint64{5}},
		"in the list, and a leg has it":  {discards: "3", want: []uint64{5, 10}},
		"no list: where there is data":   {discards: "3", list: unknown, want: []uint64{5, 10, 11, 40}},
		"no list, and no answer to that": {discards: "3", list: unknown, data: unknown},
	} {
		served(t, true, func(w *world) {
			off := true
			w.mu.Lock()
			w.lists(map[string]nvmetcp.WrittenLog{"t0": {Committed: 5, Regions: []uint64{0xff << 36}}, "t1": {}}) // that of t1 has restarted
			list := w.listed
			w.listed = func(node string, cmd nvmetcp.Command, data []byte) error {
				b, _ := os.ReadFile(w.discardsOf(*w.find(mirror.TopName(w.volume))))
				if off = off && string(b) == "0"; test.list != nil {
					return nvmetcp.InvalidOpcode | nvmetcp.DNR
				}
				return list(node, cmd, data)
			}
			w.mu.Unlock()
			w.data = func(_ context.Context, node string) ([]block.Range, error) {
				if node == "t1" { // still
					return []block.Range{{Off: 10 * region, End: 12 * region}}, test.data
				}
				return []block.Range{{Off: 40 * region, End: 41 * region}}, test.data
			}
			w.discarded(test.discards)
			w.goesAndReturns(1, 5)
			time.Sleep(time.Minute)
			image := w.logOf()
			if got := w.dirty(); test.want == nil && !image.AllDirty() || test.want != nil && !slices.Equal(got, test.want) {
				t.Errorf("%s: regions %v are copied, want %v", name, got, test.want)
			}
			if !off {
				t.Errorf("%s: targets were asked while users could discard", name)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/nvmet/memfs"
)

// replacing runs f on a target in the kernel that exports two volumes. ask has the export of the first one replaced.
func replacing(t *testing.T, f func(t *testing.T, w *world, ask func() error)) {
	t.Helper()
	in(t, Kernel, func(t *testing.T, w *world) {
		w.more = []block.Portal{{Transport: block.TCP, Address: "192.0.2.2", Port: 4420}}
		w.targets.Drain = w.nvmet.drain
		w.targets.Listen = w.nvmet.listen
		var last *lists
		w.lists = func() *lists {
			l, err := newLists(&marker{lists: map[block.DeviceNumber]*checkpoint.Tracker{}}, w.root+"/dev/weft/leg", noNetwork, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			last = l
			return l
		}
		w.run()
		w.manager.set(want().drive(1).drive(2).volume(1, 1, 1).volume(2, 2, 1).TargetWanted)
		w.until("both exports ready", exportsReady(2))
		f(t, w, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			return last.replace(ctx, firstExport, block.SamePart)
		})
	})
}

// noNetwork is that of a world in virtual time.
func noNetwork(block.Portal) (net.Listener, error) { return nil, unix.ENETDOWN }

// nvmetTroubles makes nvmet wait or fail where a test wants that.
type nvmetTroubles struct {
	mu      sync.Mutex
	holds   chan struct{}   // drains wait until it is closed; nil: they do not
	gone    map[string]bool // addresses that this machine does not have
	drained []string
}

func (n *nvmetTroubles) set(change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change()
}

func (n *nvmetTroubles) drain(subsystem string) {
	n.mu.Lock()
	holds := n.holds
	n.drained = append(n.drained, subsystem)
	n.mu.Unlock()
	if holds != nil {
		<-holds
	}
}

func (n *nvmetTroubles) listen(p memfs.Port) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone[p.Portal.Address] {
		return unix.EADDRNOTAVAIL
	}
	return nil
}

// hold has drains wait, until release.
func (n *nvmetTroubles) hold() (release func()) {
	free := make(chan struct{})
	n.set(func() { n.holds = free })
	return func() {
		n.set(func() { n.holds = nil })
		close(free)
	}
}

var firstExport = block.SubsystemNQN(volumeID(1), 1, host, "t1")

// exportOf is the export of a volume as it is in nvmet, which has it at all portals.
func exportOf(t *testing.T, w *world, n block.NQN) nvmet.Subsystem {
	t.Helper()
	got := w.exported()
	s, ok := got.Subsystem(n)
	if !ok || !got.Linked(n) || len(s.Namespaces) != 1 || !s.Namespaces[0].Enabled {
		t.Fatalf("export %s is %+v, want it there and complete", n, s)
	}
	return s
}

// A successor gives its controllers other ids: a host refuses to connect if it still has one with the same id.
func TestAnExportIsReplacedByOneWithOtherControllerIDs(t *testing.T) {
	replacing(t, func(t *testing.T, w *world, ask func() error) {
		first, other := exportOf(t, w, firstExport), exportOf(t, w, block.SubsystemNQN(volumeID(2), 1, host, "t1"))
		last := first.IDs()
		for i, want := range []nvmet.ControllerIDs{nvmet.HighIDs, nvmet.LowIDs, nvmet.HighIDs} {
			if err := ask(); err != nil {
				t.Fatal(err)
			}
			next := exportOf(t, w, firstExport)
			if got := next.IDs(); got != want || got == last {
				t.Errorf("after replacement %d its controllers get ids %v, want %v", i, got, want)
			}
			last = next.IDs()
			next.CntlidMin, next.CntlidMax = first.CntlidMin, first.CntlidMax
			if !slices.Equal(next.Namespaces, first.Namespaces) || next.Serial != first.Serial || !slices.Equal(next.AllowedHosts, first.AllowedHosts) {
				t.Errorf("its successor is %+v, want %+v", next, first)
			}
		}
		w.nvmet.set(func() {
			if !slices.Equal(w.nvmet.drained, slices.Repeat([]string{string(firstExport)}, 3)) {
				t.Errorf("drained: %v, want the first export, three times", w.nvmet.drained)
			}
		})
		if got := exportOf(t, w, other.NQN); got.IDs() != other.IDs() {
			t.Errorf("the other export is %+v, want it as it was", got)
		}
		w.stop()
		w.run()
		time.Sleep(10 * time.Second)
		if got := exportOf(t, w, firstExport).IDs(); got != last {
			t.Errorf("a new agent has made the ids %v, want %v as they were", got, last)
		}
	})
}

// The answer means that nothing of the old controllers is left in the drives. Who asks again meanwhile gets the same
// answer.
func TestAReplacementIsAnsweredOnceTheOldExportIsDrained(t *testing.T) {
	replacing(t, func(t *testing.T, w *world, ask func() error) {
		release := w.nvmet.hold()
		if err := ask(); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("while a write is in the drive the answer is %v, want none", err)
		}
		again := make(chan error, 1)
		go func() { again <- ask() }()
		time.Sleep(time.Second)
		if len(again) > 0 {
			t.Errorf("the second answer is %v, want none either", <-again)
		}
		release()
		if err := <-again; err != nil {
			t.Error(err)
		}
		if got := exportOf(t, w, firstExport).IDs(); got != nvmet.HighIDs {
			t.Errorf("its controllers get ids %v, want those after one replacement", got)
		}
	})
}

// A network of the target fails together with its address. The export cannot be offered there again, but at the
// other portal.
func TestAnExportIsReplacedThoughOnePortalHasNoAddress(t *testing.T) {
	for _, gone := range []string{"192.0.2.1", "192.0.2.2"} {
		replacing(t, func(t *testing.T, w *world, ask func() error) {
			w.nvmet.set(func() { w.nvmet.gone = map[string]bool{gone: true} })
			if err := ask(); err != nil {
				t.Errorf("without address %s: %v", gone, err)
			}
			exportOf(t, w, firstExport)
			w.nvmet.set(func() { w.nvmet.gone = nil })
			time.Sleep(10 * time.Second)
			for _, p := range w.exported().Ports {
				if !slices.Contains(p.Subsystems, nvmet.LinkTo(firstExport)) {
					t.Errorf("with its address back, portal %v does not offer the export", p.Portal)
				}
			}
		})
	}
}

// For the manager an export that is being replaced is there: it takes one that is not for given up.
func TestAnExportThatIsBeingReplacedIsReported(t *testing.T) {
	replacing(t, func(t *testing.T, w *world, ask func() error) {
		exports := w.exported()
		s, _ := exports.Subsystem(firstExport)
		for replaced, want := range map[bool][]string{false: nil, true: {legID(1).String()}} {
			r, now := &pb.TargetReport{}, seen{exports: &nvmet.Config{}, busy: func(block.NQN) bool { return false }}
			if replaced {
				now.replacing = map[block.NQN]nvmet.Replacing{firstExport: {IDs: nvmet.HighIDs}}
			}
			fillReport(r, now, plan{exports: nvmet.Config{Subsystems: []nvmet.Subsystem{s}}}, w.root+"/dev/weft/leg", nil)
			var got []string
			for _, e := range r.GetExports() {
				got = append(got, e.GetLegIds()...)
				if e.GetReady() {
					t.Error("an export that is not there is ready")
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("being replaced: %v: the legs %v are reported as exported, want %v", replaced, got, want)
			}
		}
	})
}

// What could not be made again is not taken away.
func TestAnExportWhoseDriveCannotBeUsedIsNotReplaced(t *testing.T) {
	replacing(t, func(t *testing.T, w *world, ask func() error) {
		first := exportOf(t, w, firstExport)
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		m.set(func() { m.fail = unix.EIO })
		w.manager.set(want().drive(1).drive(2).volume(1, 1, 1).volume(2, 2, 1).leg(3, 1, 1, 0).TargetWanted) // its label is written
		w.until("the drive cannot be used", func(r *pb.TargetReport) bool {
			return slices.ContainsFunc(r.GetDrives(), func(d *pb.DriveReport) bool { return d.GetError() != "" })
		})
		if err := ask(); !errors.Is(err, nvmet.ErrNotReady) {
			t.Errorf("the answer is %v, want %v", err, nvmet.ErrNotReady)
		}
		if got := exportOf(t, w, firstExport); got.IDs() != first.IDs() {
			t.Errorf("the export is %+v, want it as it was", got)
		}
	})
}

func TestAnExportThatIsNotThereIsNotReplaced(t *testing.T) {
	replacing(t, func(t *testing.T, w *world, ask func() error) {
		w.manager.set(want().drive(1).drive(2).leg(1, 1, 1, 0).admit(1, 2).volume(2, 2, 1).TargetWanted)
		w.until("it is fenced", admitted(1, 2))
		if err := ask(); !errors.Is(err, nvmet.ErrNotExported) {
			t.Errorf("the answer is %v, want %v", err, nvmet.ErrNotExported)
		}
	})
}

// A host that is fenced meanwhile does not get its export back.
func TestAReplacementEndsWithAFence(t *testing.T) {
	replacing(t, func(t *testing.T, w *world, ask func() error) {
		release := w.nvmet.hold()
		answer := make(chan error, 1)
		go func() { answer <- ask() }()
		synctest.Wait()
		w.manager.set(want().drive(1).drive(2).leg(1, 1, 1, 0).admit(1, 2).volume(2, 2, 1).TargetWanted)
		time.Sleep(time.Second)
		release()
		w.until("it is fenced", admitted(1, 2))
		if err := <-answer; !errors.Is(err, nvmet.ErrNotExported) {
			t.Errorf("the answer is %v, want %v", err, nvmet.ErrNotExported)
		}
		if got := w.exported(); slices.ContainsFunc(got.Subsystems, func(s nvmet.Subsystem) bool { return s.NQN == firstExport }) {
			t.Error("the fenced host has its export back")
		}
	})
}

// An agent that dies in the middle of a replacement is followed by one that ends it.
func TestACrashDuringAReplacementIsMadeGood(t *testing.T) {
	for cut := 0; ; cut++ {
		crashed := false
		replacing(t, func(t *testing.T, w *world, ask func() error) {
			w.gate.mu.Lock()
			w.gate.left = cut
			w.gate.mu.Unlock()
			if err := ask(); err == nil {
				return
			}
			crashed = true
			w.stop()
			w.manager.forget()
			w.run()
			w.until("both exports ready", exportsReady(2))
			exportOf(t, w, firstExport)
			if err := ask(); err != nil {
				t.Errorf("cut at %d: after the crash: %v", cut, err)
			}
		})
		if !crashed || t.Failed() {
			t.Logf("%d operations", cut)
			break
		}
		if cut > 100 {
			t.Fatal("no end of operations")
		}
	}
}

// A host asks at the connection on which it asks for lists. That connection does not end when its export in the
// kernel gets other controller ids.
func TestHostsAskBesideTheKernelForAReplacement(t *testing.T) {
	w := newListedWorld(t)
	c := w.controllerOf(t, w.nqn)
	if c.Replacer() || c.Replace(t.Context(), block.SamePart) == nil {
		t.Error("where nothing can be replaced, it is offered or done")
	}
	c.Cut()
	asked := make(chan block.NQN, 1)
	answer := make(chan error, 1)
	w.lists.offer(func(_ context.Context, n block.NQN, _ block.ServedBy) error { asked <- n; return <-answer })
	w.serve()
	w.serve(w.nqn)
	c = w.controllerOf(t, w.nqn)
	if !c.Replacer() {
		t.Fatal("it is not offered")
	}
	answer <- nil
	if err := c.Replace(t.Context(), block.SamePart); err != nil || <-asked != w.nqn {
		t.Errorf("replace: %v", err)
	}
	answer <- errors.New("a drive hangs")
	if err := c.Replace(t.Context(), block.SamePart); err == nil || !strings.Contains(err.Error(), "internal error") {
		t.Errorf("replace that fails: %v, want an internal error", err)
	}
	<-asked
	w.ids = nvmet.HighIDs
	w.serve(w.nqn)
	answer <- nil
	if err := c.Replace(t.Context(), block.SamePart); err != nil {
		t.Errorf("with other ids in the kernel: %v", err)
	}
	if got := c.Session(); got != 1 {
		t.Errorf("with other ids in the kernel the connection is at session %d, want the first", got)
	}
}

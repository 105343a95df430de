// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/target/nvmet"
)

// hands is a target with a process beside its kernel, which exports one volume.
type hands struct {
	*world
	t     *testing.T
	lists *lists
}

// changingHands runs f on a target whose kernel exports a volume.
func changingHands(t *testing.T, f func(h *hands)) {
	t.Helper()
	in(t, besideKernel, func(t *testing.T, w *world) {
		h := &hands{world: w, t: t}
		w.targets.Drain = w.nvmet.drain
		w.lists = func() *lists {
			l, err := newLists(&marker{lists: map[block.DeviceNumber]*checkpoint.Tracker{}}, w.root+"/dev/weft/leg", noNetwork, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			h.lists = l
			return l
		}
		w.run()
		h.want(block.InKernel)
		w.until("the export", exportsReady(1))
		h.is("at first", block.InKernel)
		f(h)
	})
}

// want has the export served by one of the two.
func (h *hands) want(by block.ServedBy) {
	v := want().drive(1).volume(1, 1, 1)
	v.Legs[0].Process, v.Exports[0].Process = by == block.InProcess, by == block.InProcess
	h.manager.set(v.TargetWanted)
}

// ask has the export change hands, and returns where the answer comes.
func (h *hands) ask(by block.ServedBy, patience time.Duration) <-chan error {
	return h.askFor(firstExport, by, patience)
}

func (h *hands) askFor(n block.NQN, by block.ServedBy, patience time.Duration) <-chan error {
	answer := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(h.t.Context(), patience)
		defer cancel()
		answer <- h.lists.replace(ctx, n, by)
	}()
	return answer
}

// exporting is the export as it is, and by whom.
func (h *hands) exporting() (s nvmet.Subsystem, by block.ServedBy) {
	kernel, process := h.read(h.tree), h.exportedBeside()
	if s, there := kernel.Subsystem(firstExport); there {
		return s, block.InKernel
	}
	if s, there := process.Subsystem(firstExport); there {
		return s, block.InProcess
	}
	return nvmet.Subsystem{}, block.SamePart
}

func (h *hands) is(when string, want block.ServedBy) nvmet.Subsystem {
	h.t.Helper()
	s, by := h.exporting()
	if by != want || by != block.SamePart && (len(s.Namespaces) != 1 || !s.Namespaces[0].Enabled) {
		h.t.Fatalf("%s, the export is served by %v, as %+v; want %v", when, by, s, want)
	}
	return s
}

// A host that asks gets its answer when the export is there in the other part. Its controllers have other ids there,
// and what is in the drives has left them before.
func TestAnExportChangesHandsWhenItsHostAsks(t *testing.T) {
	changingHands(t, func(h *hands) {
		last := h.is("before", block.InKernel).IDs()
		for _, by := range []block.ServedBy{block.InProcess, block.InKernel, block.InProcess, block.InKernel} {
			h.want(by)
			time.Sleep(changeAfter / 2)
			if _, has := h.exporting(); has == by || has == block.SamePart {
				t.Fatalf("nobody has asked, and it is served by %v", has)
			}
			began := time.Now()
			if err := <-h.ask(by, changeAfter); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("it took %v", took)
			}
			next := h.is("after the answer", by).IDs()
			if next == last || !next.Successor() {
				t.Errorf("its controllers have ids %v, as before: %v", next, last)
			}
			last = next
			h.until("the report", exportsReady(1))
			if err := <-h.ask(by, changeAfter); err != nil || h.is("after another question", by).IDs() != last {
				t.Errorf("asked again: %v, ids %v; want it left as it is", err, h.is("", by).IDs())
			}
		}
	})
}

// The host may hear of the change before the target does.
func TestAHostMayAskBeforeTheTargetKnowsOfTheChange(t *testing.T) {
	changingHands(t, func(h *hands) {
		answer := h.ask(block.InProcess, time.Hour)
		time.Sleep(2 * changeAfter)
		h.is("before the target knows", block.InKernel)
		if len(answer) > 0 {
			t.Fatalf("answered %v", <-answer)
		}
		h.want(block.InProcess)
		time.Sleep(time.Second)
		if len(answer) == 0 {
			t.Fatal("the target knows, and has not answered")
		}
		h.is("after the answer", block.InProcess)
	})
}

// A host that does not ask may have lost its path, and look for the export where it is to be.
func TestAnExportDoesNotWaitForItsHostForEver(t *testing.T) {
	changingHands(t, func(h *hands) {
		h.want(block.InProcess)
		time.Sleep(changeAfter - time.Second)
		h.is("while the host has time", block.InKernel)
		time.Sleep(2 * time.Second)
		h.is("later", block.InProcess)
		// It may ask then, and after each answer that was lost.
		for range 2 {
			if !slices.Contains(h.lists.served(), firstExport) {
				t.Fatal("it finds nobody to ask beside the kernel")
			}
			if err := <-h.ask(block.InProcess, time.Minute); err != nil {
				t.Error(err)
			}
		}
		h.is("asked for", block.InProcess)
	})
}

// A leg is in one part as a whole: a host that asks keeps its export until the other hosts that have the leg have asked.
func TestExportsOfOneLegChangeHandsTogether(t *testing.T) {
	changingHands(t, func(h *hands) {
		second := block.HostFromID(block.UUID{77})
		other := block.SubsystemNQN(volumeID(1), 1, second, "t1")
		share := func(by block.ServedBy) *pb.TargetWanted {
			v := want().drive(1).volume(1, 1, 1)
			x := proto.CloneOf(v.Exports[0])
			x.Nqn, x.Host.Nqn = string(other), string(second.NQN)
			v.Exports = append(v.Exports, x)
			v.Legs[0].Process = by == block.InProcess
			for _, x := range v.Exports {
				x.Process = by == block.InProcess
			}
			return v.TargetWanted
		}
		h.manager.set(share(block.InKernel))
		h.until("both exports", exportsReady(2))
		h.manager.set(share(block.InProcess))
		first := h.ask(block.InProcess, time.Hour)
		time.Sleep(changeAfter / 2)
		h.is("the other host has not asked", block.InKernel)
		if err := errors.Join(<-h.askFor(other, block.InProcess, time.Minute), <-first); err != nil {
			t.Error(err)
		}
		h.is("both have asked", block.InProcess)
	})
}

// The path of a host may fail before it knows that its export is to change hands. It asks for another export, and gets
// the one that there is to be.
func TestAnExportThatIsToChangeHandsIsNotReplacedWhereItIs(t *testing.T) {
	changingHands(t, func(h *hands) {
		h.want(block.InProcess)
		time.Sleep(time.Second)
		if err := <-h.ask(block.SamePart, changeAfter); err != nil {
			t.Fatal(err)
		}
		h.is("after the answer", block.InProcess)
	})
}

// In between it is reported: the manager takes an export that is not there for one that was given up.
func TestAnExportIsReportedWhileItChangesHands(t *testing.T) {
	changingHands(t, func(h *hands) {
		gaps := 0
		h.manager.hears = func(r *pb.TargetReport) {
			if len(r.GetExports()) != 1 || !slices.Equal(r.GetExports()[0].GetLegIds(), []string{legID(1).String()}) {
				gaps++
			}
		}
		for _, by := range []block.ServedBy{block.InProcess, block.InKernel} {
			h.want(by)
			if err := <-h.ask(by, changeAfter); err != nil {
				t.Fatal(err)
			}
			h.until("the report", exportsReady(1))
		}
		if gaps > 0 {
			t.Errorf("%d reports are without the export", gaps)
		}
	})
}

// While the kernel waits for a drive, nothing is served by the process: an old write could land after a new one.
func TestAnExportBeginsInTheProcessAfterTheKernelHasLetGo(t *testing.T) {
	changingHands(t, func(h *hands) {
		release := h.nvmet.hold()
		h.want(block.InProcess)
		answer := h.ask(block.InProcess, time.Minute)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if process := h.exportedBeside(); len(answer) > 0 || len(process.Subsystems) > 0 {
			t.Errorf("while the kernel drains: %d answers, the process serves %v", len(answer), subsystems(process))
		}
		release()
		if err := <-answer; err != nil {
			t.Error(err)
		}
		h.is("drained", block.InProcess)
	})
}

// One that a fence ends while it changes hands does not come back.
func TestAFenceEndsAnExportThatChangesHands(t *testing.T) {
	changingHands(t, func(h *hands) {
		h.want(block.InProcess)
		answer := h.ask(block.InProcess, time.Minute)
		h.manager.set(want().drive(1).leg(1, 1, 1, 0).admit(1, 2).TargetWanted)
		h.until("epoch 2 to be admitted", admitted(1, 2))
		if err := <-answer; err != nil && !errors.Is(err, nvmet.ErrNotExported) {
			t.Errorf("answered %v", err)
		}
		time.Sleep(2 * changeAfter)
		h.is("fenced", block.SamePart)
	})
}

// TestAnAgentMayDieWhileALegChangesHands cuts an agent short after each of its operations.
func TestAnAgentMayDieWhileALegChangesHands(t *testing.T) {
	in := func(by block.ServedBy) *pb.TargetWanted {
		v := want().drive(1).volume(1, 1, 1)
		v.Legs[0].Process, v.Exports[0].Process = by == block.InProcess, by == block.InProcess
		return v.TargetWanted
	}
	crashAnywhere(t, besideKernel, []stage{
		{in(block.InKernel), exportsReady(1)},
		{in(block.InProcess), exportsReady(1)},
		{in(block.InKernel), exportsReady(1)},
		{want().drive(1).leg(1, 1, 1, 0).removed(1).TargetWanted, func(r *pb.TargetReport) bool { return len(r.GetExports()) == 0 && len(r.GetDrives()[0].GetLegs()) == 0 }},
	})
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
)

const (
	serving   = pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
	stalled   = pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED
	detaching = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
	clean     = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN
	unclean   = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_UNCLEAN
)

// in runs f with an attached volume in a synctest bubble. The bubble fails the test if it
// leaves a goroutine of the agent behind.
func in(t *testing.T, stripes, copies int, f func(w *world)) {
	t.Helper()
	from(t, stripes, copies, func(*world) {}, f)
}

// from is like in, but first changes the world before an agent starts.
func from(t *testing.T, stripes, copies int, first, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, stripes, copies)
		first(w)
		w.attach()
		w.stop = w.start()
		w.until(serving)
		w.took()
		f(w)
	})
}

func TestAttachConnectsMirrorsAndExposes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.attach()
		w.start()
		a := w.until(serving)
		w.expect("attach",
			"connect t0", "connect t1",
			"create c0: mirror t0 t1",
			"create top: linear")
		if want := filepath.Join(w.dir, "dev/weft/db1"); a.Device != want {
			t.Errorf("reported device = %q, want %q", a.Device, want)
		}
		if to, err := os.Readlink(filepath.Join(w.dir, "dev/weft/db1")); err != nil || to != linkTo(w.find("weft-"+w.volume.String()).Number) {
			t.Errorf("link = %q, %v; want it to lead to the device", to, err)
		}
		time.Sleep(10 * time.Second)
		w.expect("nothing more to do")
	})
}

// A target without space answers that a write may be repeated. The kernel would do that five times.
func TestTheKernelRepeatsWritesToThinLegs(t *testing.T) {
	for _, thin := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, 1, 2)
			w.attach().Thin = thin
			w.start()
			w.until(serving)
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.retries != thin {
				t.Errorf("thin %v: the kernel repeats as often as it can: %v", thin, w.retries)
			}
		})
	}
}

func TestUncleanVolumesAreEqualizedBeforeTheyAreExposed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.equal = false
		w.attach()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Equalize = true })
		w.start()
		w.until(pb.AttachmentPhase_ATTACHMENT_PHASE_EQUALIZING)
		time.Sleep(5 * time.Second)
		if a := w.attachment(); a.Device != "" || a.ResyncTotalBytes == 0 || a.ResyncDoneBytes == a.ResyncTotalBytes {
			t.Errorf("while copies are made equal: %v, want no device and a resync under way", a)
		}
		w.expect("equalizing", "connect t0", "connect t1", "create c0: mirror t0 t1")
		w.finishResync()
		w.until(serving)
		w.expect("equal", "reload c0: mirror t0 t1", "flush t0", "flush t1", "create top: linear")
	})
}

// A host has many volumes, and each of their legs is asked whether it answers.
func TestAHostLooksAtAVolumeFiveTimesASecondWhateverItsLegsAnswer(t *testing.T) {
	for stripes := range 3 {
		in(t, stripes+1, 2, func(w *world) {
			looks := func() int {
				w.mu.Lock()
				defer w.mu.Unlock()
				return w.looks
			}
			before := looks()
			time.Sleep(10 * time.Second)
			if n := looks() - before; n < 45 || n > 60 {
				t.Errorf("%d columns: %d looks in 10 s, want about 50", stripes+1, n)
			}
		})
	}
}

func TestSilentLegIsRecordedThenReleasedThenDropped(t *testing.T) {
	in(t, 2, 2, func(w *world) {
		w.stuck = true
		began := time.Now()
		w.fallSilent("t1")
		time.Sleep(1900 * time.Millisecond)
		w.expect("within the window nothing is done")
		time.Sleep(2 * time.Second)
		w.expect("loss",
			"flush t0", "record-stale c0.1 c1.1",
			"destroy-sockets t1", "disconnect t1",
			"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1",
			"create c1-lost1: error", "reload c1: mirror keep_log t0 c1-lost1")
		if a := w.until(serving); time.Since(began) > 6*time.Second {
			t.Errorf("serving again after %v: %v", time.Since(began), a)
		}
		w.answer("t1")
	})
}

// While the kernel connects to a target again, it does not notice that a socket is destroyed on which an answer is
// due, and waits for that answer for a minute.
func TestALegThatIsLostWhileTheKernelConnectsAgainKeepsItsSockets(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		hang := make(chan struct{})
		w.mu.Lock()
		w.stuck, w.firmly = true, map[string]chan struct{}{"t1": hang}
		w.mu.Unlock()
		w.fallSilent("t1")
		w.notice("t1")
		time.Sleep(4 * time.Second)
		w.expect("loss", "flush t0", "record-stale c0.1")
		time.Sleep(time.Second)
		w.expect("the kernel is still connecting", "destroy-unanswered t1")
		close(hang)
		time.Sleep(2 * time.Second)
		w.expect("the kernel goes on", "disconnect t1", "create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1")
		w.answer("t1")
	})
}

// A machine that accepts no connections is gone sooner than a leg that may only be slow.
func TestALegWhoseMachineIsGoneIsLostSooner(t *testing.T) {
	for at := range 5 { // of the interval of probes
		in(t, 1, 2, func(w *world) {
			w.stuck = true
			time.Sleep(time.Duration(at) * 110 * time.Millisecond)
			w.powerOff("t1")
			time.Sleep(600 * time.Millisecond)
			w.expect("for 0.6 s nothing is done")
			time.Sleep(900 * time.Millisecond)
			w.expect("loss", "flush t0", "record-stale c0.1", "destroy-sockets t1", "disconnect t1",
				"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1")
			w.answer("t1")
		})
	}
}

// With Linux 6.1, a keep-alive that is under way when a connection is broken holds the connection's I/O until it times
// out. Linux sends one a quarter of the timeout after the last answer, when the leg must have been found lost. A kernel
// target keeps what a silent host has sent for twice the timeout, so it is longer only for targets that do not.
func TestKeepAlivesGoOutOnlyWhenALegIsLost(t *testing.T) {
	for perHost, want := range map[bool][]time.Duration{true: {5 * time.Second, 11 * time.Second}, false: {5 * time.Second, 5 * time.Second}} {
		from(t, 1, 2, func(w *world) { w.perHost = perHost }, func(w *world) {
			time.Sleep(3 * time.Minute)
			w.mu.Lock()
			defer w.mu.Unlock()
			if len(w.keepAlives) != 2 {
				t.Errorf("%d connections, want one to each target", len(w.keepAlives))
			}
			for controller, got := range w.keepAlives {
				if !slices.Equal(got, want) {
					t.Errorf("the timeouts of %s, whose target replaces controllers: %v, were %v, want %v", controller, perHost, got, want)
				}
			}
		})
	}
}

// betweenRails runs f on a host that serves a volume of two copies, whose targets have two portals each. at is
// the address at which t1 is in use, and other that of its other portal.
func betweenRails(t *testing.T, perHost bool, f func(w *world, at, other string)) {
	t.Helper()
	betweenRailsFrom(t, func(w *world) { w.perHost = perHost }, f)
}

// betweenRailsFrom is like betweenRails, but first changes the world before an agent starts.
func betweenRailsFrom(t *testing.T, first func(w *world), f func(w *world, at, other string)) {
	t.Helper()
	at, other := "192.0.2.2", "198.51.100.2"
	from(t, 1, 2, func(w *world) { w.rails, w.stuck = true, true; first(w) }, func(w *world) {
		if w.ctrl[slices.IndexFunc(w.ctrl, func(c fabrics.Controller) bool { return c.NQN == w.nqn("t1") })].Address.Traddr == other {
			at, other = other, at
		}
		f(w, at, other)
	})
}

// cutAt cuts the network at an address, or mends it.
func (w *world) cutAt(address string, cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[address] = cut
}

// hangLegs makes reads of the legs of a target hang until the channel is closed.
func (w *world) hangLegs(node string) chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	hung := make(chan struct{})
	w.stuckLegs = map[uint32]chan struct{}{}
	for _, h := range w.heads {
		if h.node == node {
			w.stuckLegs[h.NSID] = hung
		}
	}
	return hung
}

// If one of a target's networks fails, its paths continue over another one, and no copy falls behind. They go
// back when that network has been well for a while.
func TestAPathMovesToAnotherNetwork(t *testing.T) {
	for when := range 5 { // of the interval of probes
		betweenRails(t, true, func(w *world, at, other string) {
			time.Sleep(time.Duration(when) * 110 * time.Millisecond)
			w.cutAt(at, true)
			time.Sleep(600 * time.Millisecond)
			w.expect("loss of a network", "destroy-sockets t1", "connect t1 at "+other, "disconnect t1 at "+at)
			w.cutAt(at, false)
			time.Sleep(8 * time.Second)
			w.expect("before its portal is trusted again, nothing is done")
			time.Sleep(10 * time.Second)
			w.expect("the network is well again", "connect t1 at "+at, "disconnect t1 at "+other)
			if a := w.attachment(); a.GetPhase() != serving {
				t.Errorf("after all that it is %v", a)
			}
		})
	}
}

// A target is slow, and its portals accept connections; then its network fails, before it has answered.
func TestAPathMovesAwayFromATargetThatWasSlow(t *testing.T) {
	for when := range 5 {
		betweenRails(t, true, func(w *world, at, other string) {
			hung := w.hangLegs("t1")
			time.Sleep(time.Duration(300+110*when) * time.Millisecond)
			w.expect("a slow target")
			w.cutAt(at, true)
			time.Sleep(800 * time.Millisecond)
			w.expect("loss of a network", "destroy-sockets t1", "connect t1 at "+other, "disconnect t1 at "+at)
			close(hung)
			time.Sleep(time.Second)
			if a := w.attachment(); a.GetPhase() != serving {
				t.Errorf("after all that it is %v", a)
			}
		})
	}
}

// A controller is live before its namespaces are found. If the old one went then, the leg's device would go too.
func TestThePathThatMovedStaysUntilTheLegsAreThere(t *testing.T) {
	betweenRails(t, true, func(w *world, at, other string) {
		w.scans = 400 * time.Millisecond
		w.cutAt(at, true)
		time.Sleep(2 * time.Second)
		w.expect("loss of a network", "destroy-sockets t1", "connect t1 at "+other, "disconnect t1 at "+at)
		if a := w.attachment(); a.GetPhase() != serving || len(w.heads) != 2 {
			t.Errorf("after that it is %v, and there are %d heads", a, len(w.heads))
		}
	})
}

// A move can take longer than a leg may be silent. The leg is not given up for that before it could answer over the
// new path.
func TestALegHasTimeToAnswerOverThePathThatMoved(t *testing.T) {
	betweenRails(t, true, func(w *world, at, other string) {
		w.scans = 2 * time.Second
		slow := w.hangLegs("t1")
		w.cutAt(at, true)
		time.Sleep(3500 * time.Millisecond)
		w.expect("loss of a network", "destroy-sockets t1", "connect t1 at "+other, "disconnect t1 at "+at)
		close(slow)
		time.Sleep(3 * time.Second)
		w.expect("the leg goes on")
		if a := w.attachment(); a.GetPhase() != serving {
			t.Errorf("after that it is %v", a)
		}
	})
}

// If it does not, it is given up: a path that moves again and again would keep writes waiting.
func TestALegThatDoesNotAnswerOverThePathThatMovedIsLost(t *testing.T) {
	betweenRails(t, true, func(w *world, at, _ string) {
		defer close(w.hangLegs("t1"))
		w.cutAt(at, true)
		time.Sleep(7 * time.Second)
		if got := w.took(); !slices.Contains(got, "record-stale c0.1") {
			t.Errorf("after 7 s: %q", got)
		}
	})
}

// Linux's target keeps the old controller, whose commands may still come: no path to it moves.
func TestAPathToATargetThatKeepsOldControllersDoesNotMove(t *testing.T) {
	betweenRails(t, false, func(w *world, at, other string) {
		w.cutAt(at, true)
		time.Sleep(1500 * time.Millisecond)
		w.expect("for 1.5 s nothing is done")
		time.Sleep(2 * time.Second)
		if got := w.took(); len(got) < 2 || got[1] != "record-stale c0.1" {
			t.Errorf("after 3.5 s: %q", got)
		}
	})
}

// A drive that hangs is no reason to move: the target would answer at no other portal before it goes on.
func TestAPathDoesNotMoveWhileADriveHangs(t *testing.T) {
	betweenRails(t, true, func(w *world, _, _ string) {
		w.fallSilent("t1")
		time.Sleep(1500 * time.Millisecond)
		w.expect("for 1.5 s nothing is done")
		w.answer("t1")
	})
}

// If both machines seem to be gone, this host's network is more likely to blame: neither is given up early.
func TestNoLegIsLostSoonerThanItsWindowIfNoneAnswers(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.stuck = true
		w.powerOff("t0")
		w.powerOff("t1")
		time.Sleep(1800 * time.Millisecond)
		w.expect("within the window nothing is done")
		w.answer("t0")
		w.answer("t1")
	})
}

// Over RDMA it is not tried whether a portal accepts connections.
func TestALegOverRDMAIsNotLostSooner(t *testing.T) {
	overRDMA(t, func(w *world) {
		w.hears(true)
		w.powerOff("t1")
		time.Sleep(1900 * time.Millisecond)
		w.expect("within the window nothing is done")
	}, pb.Transport_TRANSPORT_RDMA)
}

// A host that was frozen has not looked.
func TestAFrozenHostGivesNothingUpEarly(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.powerOff("t1")
		w.freeze(time.Second)
		w.answer("t1")
		time.Sleep(time.Second)
		w.expect("nothing is done")
	})
}

func TestShortSilenceIsForgotten(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		for range 5 {
			w.fallSilent("t1")
			time.Sleep(1800 * time.Millisecond)
			w.answer("t1")
			time.Sleep(time.Second)
		}
		w.expect("five short silences")
	})
}

func TestWriteErrorDropsALegWithoutCuttingItsConnection(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.mu.Lock()
		w.health[w.refOf("t1")] = 'D'
		w.eventLocked()
		w.mu.Unlock()
		time.Sleep(time.Second)
		w.expect("error of a drive",
			"flush t0", "record-stale c0.1",
			"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1",
			"disconnect t1") // nothing needs it any more
		w.until(serving)
	})
}

func TestNothingIsReleasedWhileTheManagerIsAway(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.mu.Lock()
		w.managers, w.stuck = false, true
		w.mu.Unlock()
		w.fallSilent("t1")
		time.Sleep(7 * time.Second)
		w.expect("before the lease ends")
		time.Sleep(2 * time.Second)
		w.expect("lease over: reads stop", "suspend top")
		time.Sleep(20 * time.Second)
		w.expect("still away")
		w.mu.Lock()
		w.managers = true
		w.mu.Unlock()
		time.Sleep(4 * time.Second)
		w.expect("manager back",
			"flush t0", "record-stale c0.1", "destroy-sockets t1", "disconnect t1",
			"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1",
			"resume top")
		w.until(serving)
		w.answer("t1")
	})
}

func TestStallSaysWhatItWaitsFor(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.fallSilent("t0")
		w.fallSilent("t1")
		a := w.until(stalled)
		if a.WaitingFor == "" {
			t.Error("a stalled volume waits for nothing")
		}
		time.Sleep(3 * time.Second)
		w.expect("no copy answers: nothing is recorded")
		w.answer("t0")
		time.Sleep(4 * time.Second)
		w.expect("one answers: the other is lost",
			"flush t0", "record-stale c0.1", "destroy-sockets t1", "disconnect t1",
			"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1")
		w.answer("t1")
	})
}

func TestSingleCopyWaitsForItsTarget(t *testing.T) {
	in(t, 2, 1, func(w *world) {
		w.fallSilent("t0")
		w.until(stalled)
		time.Sleep(20 * time.Second)
		w.expect("only the lease", "suspend top")
		w.answer("t0")
		w.until(serving)
		w.expect("back", "resume top")
	})
}

func TestReturningLegGetsWhatItMissed(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.write(0, 3, 4, 100)
		w.took()
		w.answer("t1")
		w.mu.Lock()
		w.equal = false
		w.mu.Unlock()
		w.comesBack(0, 1, 1)
		time.Sleep(2 * time.Second)
		w.expect("return", "connect t1",
			"create c0-back1: linear", "reload c0: mirror t0 c0-back1", "remove c0-lost1")
		a := w.attachment()
		if a.ResyncTotalBytes != 3*256<<10 || a.ResyncDoneBytes != 0 || a.Phase != serving {
			t.Errorf("during the resync: %v, want 768KiB to copy while serving", a)
		}
		w.finishResync()
		time.Sleep(2 * time.Second)
		w.expect("in sync", "flush t1", "record-in-sync c0.1@1 copied 768KiB",
			"reload c0: mirror t0 t1", "remove c0-back1")
	})
}

func TestLegThatTheLogKnowsNothingOfIsCopiedWhole(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.answer("t1")
		w.took()
		w.comesBack(0, 1, 1)
		w.change(func(all *pb.InitiatorWanted) {
			for _, l := range all.Attachments[0].Legs {
				l.CopyAll = true
			}
		})
		time.Sleep(4 * time.Second)
		w.expect("return", "connect t1",
			"create c0-back1: linear", "reload c0: mirror t0 c0-back1", "remove c0-lost1",
			"flush t1", "record-in-sync c0.1@1 copied 64MiB",
			"reload c0: mirror t0 t1", "remove c0-back1")
	})
}

func TestRebuildThatFailsGoesOnWhereItWas(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.beginRebuild(1, 2)
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.expect("lost again", "record-stale c0.1", "destroy-sockets t1", "disconnect t1",
			"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1", "remove c0-back1")
		w.write(0, 9)
		w.answer("t1")
		w.comesBack(0, 1, 2)
		time.Sleep(2 * time.Second)
		if a := w.attachment(); a.ResyncTotalBytes != 3*256<<10 {
			t.Errorf("second rebuild copies %d bytes, want the 3 regions of both", a.ResyncTotalBytes)
		}
		w.finishResync()
		time.Sleep(2 * time.Second)
		w.until(serving)
	})
}

func TestThirdCopyIsRebuiltBehindAMirrorOfTheOthers(t *testing.T) {
	in(t, 1, 3, func(w *world) {
		w.fallSilent("t2")
		time.Sleep(4 * time.Second)
		w.expect("loss", "flush t0", "flush t1", "record-stale c0.2", "destroy-sockets t2", "disconnect t2",
			"create c0-in: mirror t0 t1", "create c0-lost2: error", "reload c0: mirror keep_log c0-in c0-lost2")
		w.write(0, 1)
		w.answer("t2")
		w.comesBack(0, 2, 1)
		time.Sleep(4 * time.Second)
		w.expect("return", "connect t2", "create c0-back2: linear", "reload c0: mirror c0-in c0-back2", "remove c0-lost2",
			"flush t2", "record-in-sync c0.2@1 copied 256KiB", "reload c0: mirror t0 t1 t2", "remove c0-back2", "remove c0-in")
	})
}

func TestRebuiltLegStandsInAsSoonAsItIsRecorded(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.beginRebuild(1)
		w.mu.Lock()
		w.stuck = true
		w.mu.Unlock()
		// Everything is copied, and the other leg dies before the tables have switched: the
		// switch waits for I/O on it.
		w.fallSilent("t0")
		w.finishResync()
		time.Sleep(4 * time.Second)
		h := w.took()
		want := []string{
			"flush t1", "record-in-sync c0.1@1 copied 256KiB",
			"flush t1", "record-stale c0.0", "destroy-sockets t0", "disconnect t0",
			"reload c0: linear", "remove c0-back1",
			"create c0-lost0: error", "reload c0: mirror keep_log t1 c0-lost0",
		}
		if diff := cmp.Diff(want, h); diff != "" {
			t.Errorf("history (-want +got)\n%s", diff)
		}
		w.until(serving)
		w.answer("t0")
	})
}

// TestAMirrorBelowReleasesItsWritesWhileTheColumnAboveWaitsForThem: dm-mirror holds a write that
// failed on a leg until its own table is replaced, and the switch of the column above waits for
// that write.
func TestAMirrorBelowReleasesItsWritesWhileTheColumnAboveWaitsForThem(t *testing.T) {
	in(t, 1, 3, func(w *world) {
		w.fallSilent("t2")
		time.Sleep(4 * time.Second)
		w.write(0, 1)
		w.mu.Lock()
		w.equal = false
		w.mu.Unlock()
		w.answer("t2")
		w.comesBack(0, 2, 1)
		time.Sleep(3 * time.Second)
		w.took()
		hang := make(chan struct{})
		w.mu.Lock()
		w.hang = map[string]chan struct{}{"c0": hang}
		w.mu.Unlock()
		w.finishResync()
		time.Sleep(time.Second)
		w.expect("the switch of the column waits in the kernel", "flush t2", "record-in-sync c0.2@1 copied 256KiB")
		w.failDrive(0, 0)
		time.Sleep(4 * time.Second)
		w.expect("the mirror below drops the leg", "flush t1", "flush t2", "record-stale c0.0", "reload c0-in: linear", "disconnect t0")
		w.mu.Lock()
		delete(w.hang, "c0")
		w.mu.Unlock()
		close(hang)
		time.Sleep(4 * time.Second)
		w.expect("the switch returns", "reload c0: mirror dead t1 t2", "remove c0-back2", "remove c0-in",
			"create c0-in: mirror t1 t2", "create c0-lost0: error", "reload c0: mirror keep_log c0-in c0-lost0")
		w.until(serving)
	})
}

func TestRebuiltLegThatHangsInItsFlushIsNotRecordedInSyncButStale(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.beginRebuild(1)
		w.mu.Lock()
		w.stuck = true
		w.mu.Unlock()
		w.fallSilent("t1")
		w.finishResync()
		time.Sleep(10 * time.Second)
		w.expect("the leg hangs", "record-stale c0.1", "destroy-sockets t1", "disconnect t1",
			"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1", "remove c0-back1")
		w.answer("t1")
	})
}

func TestDetachWaitsForTheLastUser(t *testing.T) {
	in(t, 2, 2, func(w *world) {
		w.mu.Lock()
		w.open = 1
		w.mu.Unlock()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		a := w.until(detaching)
		time.Sleep(3 * time.Second)
		if a.WaitingFor == "" {
			t.Errorf("detach of an open device waits for nothing")
		}
		w.expect("still open")
		w.closeDevice()
		w.until(clean)
		w.expect("detach", "remove top", "remove c0", "remove c1", "disconnect t0", "disconnect t1")
		w.change(func(all *pb.InitiatorWanted) { all.Attachments = nil })
		time.Sleep(5 * time.Second)
		if a := w.attachment(); a != nil {
			t.Errorf("forgotten volume is reported: %v", a)
		}
		w.empty()
	})
}

func TestDetachOfWhatWasNeverThereIsUnclean(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.attach()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		w.start()
		w.until(unclean)
		w.expect("nothing was there")
	})
}

func TestDetachWithASilentLastLegIsUnclean(t *testing.T) {
	in(t, 1, 1, func(w *world) {
		w.fallSilent("t0")
		time.Sleep(1500 * time.Millisecond)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		w.until(unclean)
		w.empty()
		w.answer("t0")
	})
}

func TestOverEpochIsTornDownAndTheNextOneBuilt(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.mu.Lock()
		w.open, w.epoch = 1, 2
		w.mu.Unlock()
		w.attach()
		w.until(detaching)
		time.Sleep(2 * time.Second)
		if a := w.attachment(); a.Epoch != 1 || a.WaitingFor == "" {
			t.Errorf("report = %v, want epoch 1 to wait for its users", a)
		}
		w.expect("over", "disconnect t0", "disconnect t1", "fail c0", "fail top", "remove c0")
		w.closeDevice()
		if a := w.until(serving); a.Epoch != 2 {
			t.Errorf("epoch = %d, want 2", a.Epoch)
		}
		w.expect("anew", "remove top", "connect t0", "connect t1", "create c0: mirror t0 t1", "create top: linear")
	})
}

func TestAGrantToAnotherBootOrProcessIsNotActedOn(t *testing.T) {
	for name, grant := range map[string]func(*pb.WantedAttachment){
		"another boot":    func(a *pb.WantedAttachment) { a.BootId = "boot-0" },
		"another process": func(a *pb.WantedAttachment) { a.HealerId = "an earlier process" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, 2)
				w.attach()
				w.change(func(all *pb.InitiatorWanted) { grant(all.Attachments[0]) })
				w.start()
				time.Sleep(10 * time.Second)
				w.expect("not ours")
			})
		})
	}
}

// toldKeeper is a keeper that notes what it was told last, and says what it is told to.
type toldKeeper struct {
	want  *volume.Wanted
	state keeper.State
}

func (k *toldKeeper) Run(context.Context)                         {}
func (k *toldKeeper) Want(w *volume.Wanted, _ string, gen uint64) { k.want, k.state.Acted = w, gen }
func (k *toldKeeper) Poke()                                       {}
func (k *toldKeeper) State() keeper.State                         { return k.state }
func (k *toldKeeper) Figures() *keeper.Figures                    { return nil }

// On the kernel's path a volume is healed in this process, and one of the two keepers always lets go. The
// manager is told of the later epoch.
func TestAKernelHostHealsInItsProcess(t *testing.T) {
	attached, healing := &toldKeeper{}, &toldKeeper{}
	k := newHealedKeeper(attached, healing)
	if k.Want(&volume.Wanted{Epoch: 6}, "", 2); healing.state.Acted != 0 || k.State().Acted != 2 {
		t.Errorf("a volume that was never healed is kept in this process, too: acted on %d, of that %d", k.State().Acted, healing.state.Acted)
	}
	k.Want(&volume.Wanted{Epoch: 7, Heal: true}, "", 3)
	if attached.want != nil || healing.want == nil || k.State().Acted != 3 {
		t.Errorf("of a volume to heal, the kernel's path is told %+v and this process %+v; acted on %d", attached.want, healing.want, k.State().Acted)
	}
	healing.state.Report = &pb.AttachmentReport{Epoch: 7}
	if r := k.State().Report; r.GetEpoch() != 7 {
		t.Errorf("reported is %v", r)
	}
	k.Want(&volume.Wanted{Epoch: 8}, "", 4)
	attached.state.Report, attached.state.Idle = &pb.AttachmentReport{Epoch: 8}, true
	if attached.want == nil || healing.want != nil || k.State().Report.GetEpoch() != 8 || k.State().Idle {
		t.Errorf("of an attachment, the kernel's path is told %+v and this process %+v; the state is %+v", attached.want, healing.want, k.State())
	}
	healing.state.Acted = 2
	if k.State().Acted != 2 {
		t.Error("what one of them has not acted on counts as done")
	}
}

func TestVanishedControllersAreConnectedAgain(t *testing.T) {
	in(t, 1, 1, func(w *world) {
		w.vanish("t0")
		time.Sleep(3 * time.Second)
		w.expect("single copy", "connect t0", "reload c0: linear")
		w.until(serving)
	})
}

func TestRestartedAgentGoesOnWhereItWas(t *testing.T) {
	steps := map[string]func(w *world){
		"attached":     func(w *world) {},
		"leg silent":   func(w *world) { w.fallSilent("t1"); time.Sleep(time.Second) },
		"leg recorded": func(w *world) { w.fallSilent("t1"); time.Sleep(2200 * time.Millisecond) },
		"leg dropped":  func(w *world) { w.fallSilent("t1"); time.Sleep(4 * time.Second) },
		"leg coming back": func(w *world) {
			w.fallSilent("t1")
			time.Sleep(4 * time.Second)
			w.write(0, 5)
			w.answer("t1")
			w.comesBack(0, 1, 1)
		},
	}
	for name, step := range steps {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, 2)
				w.attach()
				stop := w.start()
				w.until(serving)
				step(w)
				stop()
				time.Sleep(time.Second)
				w.start()
				time.Sleep(4 * time.Second)
				w.answer("t1")
				if len(w.wanted.Attachments[0].Legs) == 1 {
					w.write(0, 7)
					w.comesBack(0, 1, 2)
				}
				time.Sleep(4 * time.Second)
				w.until(serving)
				if got, want := w.words(w.find("weft-"+w.volume.String()+"-c0").Table), "mirror t0 t1"; got != want {
					t.Errorf("column = %q, want %q\n%v", got, want, w.took())
				}
				for _, done := range w.took() {
					if done == "record-in-sync c0.1@2 copied 64MiB" {
						t.Errorf("the log was there, and everything was copied")
					}
				}
			})
		})
	}
}

func TestGarbageInTheNotesMeansAFullResync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.attach()
		stop := w.start()
		w.until(serving)
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		stop()
		if err := os.WriteFile(filepath.Join(w.dir, "run", w.volume.String()+".json"), []byte("{]"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.answer("t1")
		w.took()
		w.start()
		time.Sleep(time.Second)
		w.expect("a new agent", "suspend top", "resume top")
		w.comesBack(0, 1, 1)
		time.Sleep(4 * time.Second)
		w.expect("return", "connect t1",
			"create c0-back1: linear", "reload c0: mirror t0 c0-back1", "remove c0-lost1",
			"flush t1", "record-in-sync c0.1@1 copied 64MiB",
			"reload c0: mirror t0 t1", "remove c0-back1")
	})
}

func TestSuspendedDeviceStaysSoOverARestartUntilTheLegAnswers(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.stop()
		w.mu.Lock()
		w.stuck = true
		w.mu.Unlock()
		stop := w.start()
		time.Sleep(time.Second)
		w.took()
		w.mu.Lock()
		w.recordless = true
		w.mu.Unlock()
		w.fallSilent("t1")
		time.Sleep(12 * time.Second)
		w.expect("lease over", "flush t0", "suspend top", "flush t0")
		stop()
		w.start()
		time.Sleep(3 * time.Second)
		w.expect("the new agent has not heard of the leg either", "flush t0")
		w.answer("t1")
		time.Sleep(2 * time.Second)
		w.expect("the leg answers", "resume top")
	})
}

func TestLeaseEndsAlsoForAnAgentThatWasRestartedWithoutTheManager(t *testing.T) {
	for _, dies := range []string{"silent", "fenced"} {
		t.Run(dies, func(t *testing.T) {
			in(t, 2, 2, func(w *world) {
				w.stop()
				w.mu.Lock()
				w.managers, w.stuck = false, true
				w.mu.Unlock()
				w.start()
				time.Sleep(20 * time.Second)
				w.expect("all legs answer", "suspend top", "resume top")
				if dies == "silent" {
					w.fallSilent("t1")
				} else {
					w.vanish("t1")
				}
				time.Sleep(7 * time.Second)
				w.expect("before the lease ends")
				time.Sleep(2 * time.Second)
				w.expect("lease over: reads stop", "suspend top")
				w.answer("t1")
			})
		})
	}
}

func TestAttachToTargetsThatAreAllDownSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.down["t0"], w.down["t1"] = true, true
		w.attach()
		w.start()
		time.Sleep(5 * time.Second)
		if a := w.attachment(); a.GetWaitingFor() == "" {
			t.Errorf("report = %v, want it to say what is waited for", a)
		}
	})
}

// TestTheCopyThatIsRebuiltReplacesALastOneThatTakesNoWrites: it does so once the kernel has
// copied everything, which a held write may prevent (docs/limitations.md).
func TestTheCopyThatIsRebuiltReplacesALastOneThatTakesNoWrites(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.beginRebuild(1, 2)
		w.failDrive(0, 0)
		time.Sleep(7 * time.Second)
		w.expect("its mirror is told to try it again", "reload c0: mirror t0 c0-back1", "reload c0: mirror t0 c0-back1")
		if !w.problem("leg "+legID(0, 0).String(), "on t0", "device-mapper reports", "no other copy can replace it") {
			t.Error("nobody is told of the leg that keeps the rebuild from its end")
		}
		w.finishResync()
		time.Sleep(4 * time.Second)
		w.expect("all is copied", "flush t1", "record-in-sync c0.1@1 copied 512KiB", "flush t1", "record-stale c0.0",
			"reload c0: linear", "remove c0-back1", "create c0-lost0: error", "reload c0: mirror keep_log t1 c0-lost0", "disconnect t0")
	})
}

// failDrive makes the mirror of a column report an error of a copy.
func (w *world) failDrive(column, copy int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, h := range w.heads {
		if h.NSID == uint32(1+column*4+copy) {
			w.health[dm.Ref(h.Dev)] = dm.WriteError
		}
	}
	w.eventLocked()
}

func TestColumnThatDoesNotSuspendHoldsUpNoOther(t *testing.T) {
	in(t, 2, 2, func(w *world) {
		hang := make(chan struct{})
		w.mu.Lock()
		w.hang = map[string]chan struct{}{"c0": hang}
		w.mu.Unlock()
		w.failDrive(0, 1)
		time.Sleep(time.Second)
		w.expect("the switch of the first column waits in the kernel", "flush t0", "record-stale c0.1", "create c0-lost1: error")
		w.failDrive(1, 1)
		time.Sleep(time.Second)
		w.expect("the second goes on", "flush t0", "record-stale c1.1",
			"create c1-lost1: error", "reload c1: mirror keep_log t0 c1-lost1")
		time.Sleep(10 * time.Second)
		w.expect("nothing is tried twice")
		w.mu.Lock()
		delete(w.hang, "c0")
		w.mu.Unlock()
		close(hang)
		time.Sleep(time.Second)
		w.expect("the call returns", "reload c0: mirror keep_log t0 c0-lost1", "disconnect t1")
		// The result of a switch that completed late is remembered, too.
		w.comesBack(0, 1, 1)
		time.Sleep(4 * time.Second)
		w.expect("return", "connect t1", "create c0-back1: linear", "reload c0: mirror t0 c0-back1", "remove c0-lost1",
			"flush t1", "record-in-sync c0.1@1 copied 0B", "reload c0: mirror t0 t1", "remove c0-back1")
	})
}

func TestLeaseEndsInTimeWhileTheManagerDoesNotAnswer(t *testing.T) {
	for name, late := range map[string]time.Duration{"early": 0, "in between": 700 * time.Millisecond, "late": 1400 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			in(t, 1, 2, func(w *world) {
				w.mu.Lock()
				w.deaf, w.stuck = true, true
				w.mu.Unlock()
				time.Sleep(late)
				w.fallSilent("t1")
				time.Sleep(8*time.Second + 900*time.Millisecond) // a probe interval and a look
				got := w.took()
				if len(got) > 2 && got[2] == "flush t0" { // a flush counts for a second, and is made again
					got = got[:2]
				}
				if want := []string{"flush t0", "suspend top"}; !slices.Equal(got, want) {
					t.Errorf("lease over: history %q, want %q", got, want)
				}
			})
		})
	}
}

func TestConnectionThatDoesNotGoHoldsUpNoOther(t *testing.T) {
	in(t, 2, 2, func(w *world) {
		hang := make(chan struct{})
		w.mu.Lock()
		w.firmly = map[string]chan struct{}{"t1": hang}
		w.mu.Unlock()
		w.failDrive(0, 1)
		w.failDrive(1, 1)
		time.Sleep(4 * time.Second)
		w.took()
		w.fallSilent("t0") // the last leg of both columns
		time.Sleep(8*time.Second + 900*time.Millisecond)
		w.expect("lease over", "suspend top")
		w.answer("t0")
		close(hang)
	})
}

// A target may answer once more for one of its legs after the other has fallen silent, and then die. Then
// the kernel waits for its answer to the end of the connection.
func TestATargetThatDiesAfterItHasAnsweredIsCutAllTheSame(t *testing.T) {
	in(t, 2, 2, func(w *world) {
		hang, stuck := make(chan struct{}), make(chan struct{})
		w.mu.Lock()
		w.stuck = true
		w.firmly, w.stuckLegs = map[string]chan struct{}{"t1": hang}, map[uint32]chan struct{}{2: stuck}
		w.mu.Unlock()
		time.Sleep(4 * time.Second)
		w.expect("one leg is lost", "flush t0", "record-stale c0.1 c1.1")
		time.Sleep(time.Second)
		w.expect("no end of the connection", "destroy-sockets t1")
		close(hang)
		close(stuck)
		time.Sleep(2 * time.Second)
		w.expect("the kernel goes on", "disconnect t1",
			"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1",
			"create c1-lost1: error", "reload c1: mirror keep_log t0 c1-lost1")
	})
}

// overRDMA is like in, with portals of these transports, and a manager that answers nothing more.
func overRDMA(t *testing.T, f func(w *world), transports ...pb.Transport) {
	t.Helper()
	from(t, 1, 2, func(w *world) { w.transports = transports }, func(w *world) {
		w.hears(false)
		f(w)
		w.answer("t1")
	})
}

// hears makes the manager answer, or not.
func (w *world) hears(answers bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deaf = !answers
}

// A kernel that tries to connect to a silent target over RDMA deletes the controller only a minute
// later. Its I/O does not wait for that.
func TestAnRDMAConnectionThatIsGoneIsLetGo(t *testing.T) {
	overRDMA(t, func(w *world) {
		hang := make(chan struct{})
		w.mu.Lock()
		w.firmly = map[string]chan struct{}{"t1": hang}
		w.mu.Unlock()
		w.fallSilent("t1")
		time.Sleep(3 * time.Second)
		w.expect("before it is recorded", "fail-fast t1 true", "flush t0")
		w.notice("t1")
		time.Sleep(2 * time.Second)
		w.expect("not recorded yet")
		w.hears(true)
		time.Sleep(2 * time.Second)
		w.expect("recorded", "flush t0", "record-stale c0.1", "create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1")
		close(hang)
		time.Sleep(time.Second)
		w.expect("a minute later", "disconnect t1")
	}, pb.Transport_TRANSPORT_RDMA)
}

// If the kernel has noticed the loss before the agent, it soon tries to connect: the controller
// goes before that, and the mirror holds the writes until the record is made.
func TestAnRDMAConnectionGoesBeforeTheKernelTriesAgain(t *testing.T) {
	overRDMA(t, func(w *world) {
		w.fallSilent("t1")
		w.notice("t1")
		time.Sleep(3 * time.Second)
		before := w.took()
		slices.Sort(before[1:]) // the two are independent
		if diff := cmp.Diff([]string{"fail-fast t1 true", "disconnect t1", "flush t0"}, before); diff != "" {
			t.Errorf("before it is recorded: history (-want +got)\n%s", diff)
		}
		w.hears(true)
		time.Sleep(2 * time.Second)
		w.expect("recorded", "flush t0", "record-stale c0.1", "create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1")
	}, pb.Transport_TRANSPORT_RDMA)
}

// I/O over RDMA waits for a leg that answers again in time, and for one that has no substitute.
func TestAnRDMAConnectionFailsFastOnlyWhileAnotherLegServes(t *testing.T) {
	overRDMA(t, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(3 * time.Second)
		w.expect("lost", "fail-fast t1 true", "flush t0")
		w.answer("t1")
		time.Sleep(2 * time.Second)
		w.expect("back", "fail-fast t1 false")
		w.hears(true)
		w.fallSilent("t1")
		time.Sleep(15 * time.Second)
		w.took()
		w.fallSilent("t0")
		time.Sleep(5 * time.Second)
		w.expect("the last leg")
		w.answer("t0")
	}, pb.Transport_TRANSPORT_RDMA)
}

// A portal that has fallen silent is tried after the others.
func TestALegComesBackThroughAnotherPortal(t *testing.T) {
	overRDMA(t, func(w *world) {
		w.hears(true)
		w.fallSilent("t1")
		time.Sleep(5 * time.Second)
		w.took()
		w.mu.Lock()
		first := w.firstOver
		w.mu.Unlock()
		w.answer("t1")
		w.comesBack(0, 1, 1)
		time.Sleep(time.Second)
		again := "connect t1 over rdma"
		if first["t1"] == block.RDMA {
			again = "connect t1"
		}
		if took := w.took(); len(took) == 0 || took[0] != again {
			t.Errorf("after %s fell silent: %q, want %s first", first["t1"], took, again)
		}
	}, pb.Transport_TRANSPORT_TCP, pb.Transport_TRANSPORT_RDMA)
}

func TestLastLegIsTriedAgainAfterAnError(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.took()
		w.failDrive(0, 0)
		time.Sleep(time.Second)
		w.expect("once", "reload c0: mirror keep_log t0 c0-lost1")
		time.Sleep(5 * time.Second)
		w.expect("not more often than every 5 s", "reload c0: mirror keep_log t0 c0-lost1")
		w.mu.Lock()
		clear(w.health)
		w.mu.Unlock()
		time.Sleep(20 * time.Second)
		w.expect("it is well")
		w.until(serving)
		w.answer("t1")
	})
}

func TestQueueThatDoesNotFreezeHoldsUpNoOtherLeg(t *testing.T) {
	in(t, 1, 3, func(w *world) {
		thaw := make(chan struct{})
		w.mu.Lock()
		w.frozen = map[string]chan struct{}{"t1": thaw}
		w.mu.Unlock()
		time.Sleep(time.Second)
		w.fallSilent("t2")
		time.Sleep(4 * time.Second)
		w.expect("loss of another leg", "flush t0", "record-stale c0.2", "destroy-sockets t2", "disconnect t2",
			"create c0-in: mirror t0 t1", "create c0-lost2: error", "reload c0: mirror keep_log c0-in c0-lost2")
		w.answer("t2")
		close(thaw)
	})
}

func TestNotesThatAnAgentDidNotComeToWriteAreMadeUpFor(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.stop()
		notes := filepath.Join(w.dir, "run", w.volume.String()+".json")
		if err := os.Remove(notes); err != nil {
			t.Fatal(err)
		}
		w.start()
		time.Sleep(2 * time.Second)
		m := &kernel{runDir: filepath.Join(w.dir, "run")}
		mem, _, err := m.notes(w.volume)
		if got, want := mem.slot(0, 1).Leg, legID(0, 1); got != want || err != nil {
			t.Errorf("leg noted for copy 1 = %v, %v; want %v", got, err, want)
		}
		w.expect("nothing is changed", "suspend top", "resume top")
	})
}

func TestAgentThatEndsLeavesNoTableHalfSwitched(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		hang := make(chan struct{})
		w.mu.Lock()
		w.hang = map[string]chan struct{}{"c0": hang}
		w.mu.Unlock()
		w.failDrive(0, 1)
		time.Sleep(50 * time.Millisecond)
		time.AfterFunc(100*time.Millisecond, func() { close(hang) })
		w.stop()
		w.expect("at the end", "flush t0", "record-stale c0.1", "create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1")
	})
}

// noted lists the legs that the host's disk names as in sync.
func (w *world) noted() (names []string) {
	book := evidence.New(filepath.Join(w.dir, "state", "evidence"), slog.New(slog.DiscardHandler))
	book.Open()
	for leg := range book.Of(w.volume).Legs {
		names = append(names, legName(leg.String()))
	}
	slices.Sort(names)
	return names
}

func TestAHostNotesWhichLegsAreInSync(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		if got := w.noted(); !slices.Equal(got, []string{"c0.0", "c0.1"}) {
			t.Errorf("noted when the device is there: %v, want both legs", got)
		}
		file := filepath.Join(w.dir, "state", "evidence", w.volume.String()+".json")
		text, err := os.ReadFile(file)
		if err := errors.Join(err, os.Remove(file), os.MkdirAll(filepath.Join(file, "stuck"), 0o700)); err != nil {
			t.Fatal(err)
		}
		w.fallSilent("t1")
		time.Sleep(7 * time.Second)
		w.expect("nothing goes on before the note", "flush t0", "record-stale c0.1")
		if a := w.attachment(); !strings.Contains(a.WaitingFor, "this host's disk") {
			t.Errorf("waiting for %q, want the disk", a.WaitingFor)
		}
		if err := errors.Join(os.RemoveAll(file), os.WriteFile(file, text, 0o600)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(evidence.Again + 2*time.Second)
		w.expect("the disk is well again", "create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1", "disconnect t1")
		if got := w.noted(); !slices.Equal(got, []string{"c0.0"}) {
			t.Errorf("noted after the loss: %v, want c0.0 alone", got)
		}
		w.answer("t1")
		w.comesBack(0, 1, 1)
		time.Sleep(2 * time.Second)
		w.finishResync()
		time.Sleep(2 * time.Second)
		if got := w.noted(); !slices.Equal(got, []string{"c0.0", "c0.1"}) {
			t.Errorf("noted after the rebuild: %v, want both legs", got)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// railed is like served, with two portals for each target: t0 and t0-b.
func railed(t *testing.T, stripes, copies int, f func(w *world)) {
	t.Helper()
	from(t, stripes, copies, func(w *world) {
		for i := range w.wanted.Links {
			w.wanted.Links[i].Portals = portalsOf(w.wanted.Links[i].Node, "", "-b")
		}
	}, func(w *world) {
		w.until(serving)
		w.took()
		f(w)
	})
}

func portalsOf(node string, suffixes ...string) (all []block.Portal) {
	for _, s := range suffixes {
		all = append(all, block.Portal{Transport: block.TCP, Address: node + s, Port: 4420})
	}
	return all
}

// fails makes the rail of an active path silent, and reports that address.
func (w *world) fails(node string) string {
	at := w.activeAt(node)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes[node].rails[at] = true
	return at
}

func (w *world) activeAt(node string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.nodes[node].conns {
		if !c.cut {
			return c.at
		}
	}
	return ""
}

func (w *world) moves() (n int) {
	for _, did := range w.took() {
		if strings.HasPrefix(did, "move ") {
			n++
		}
	}
	return n
}

func TestASilentPathMovesToAnotherPortalWithoutARecord(t *testing.T) {
	railed(t, 1, 2, func(w *world) {
		was := w.fails("t0")
		done := w.write(4096, 7)
		time.Sleep(200 * time.Millisecond)
		if !pending(done) {
			t.Error("a write was acknowledged before a silent leg had it")
		}
		time.Sleep(400 * time.Millisecond) // the fake tells of its silence only when it is asked
		if pending(done) {
			t.Fatal("the write is not acknowledged within 0.6 s")
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if now := w.activeAt("t0"); now == was {
			t.Errorf("the path is still at %s", now)
		}
		if a, b := w.holds(0, 0, 4096), w.holds(0, 1, 4096); a != 7 || b != 7 {
			t.Errorf("the copies hold %d and %d, want 7 and 7", a, b)
		}
		time.Sleep(time.Minute)
		w.expect("in the minute after", "move to "+w.activeAt("t0"))
	})
}

func TestALegWhoseTargetIsSilentAtAllPortalsIsLostInTime(t *testing.T) {
	railed(t, 1, 2, func(w *world) {
		w.fallSilent("t0")
		done := w.write(4096, 7)
		time.Sleep(time.Second)
		if pending(done) {
			t.Fatal("the write is not acknowledged after a second")
		}
		if did := w.took(); !slices.Contains(did, "record-stale c0.0") || !slices.ContainsFunc(did, func(s string) bool { return strings.HasPrefix(s, "cut t0") }) {
			t.Errorf("it did %q, want the leg recorded stale and cut", did)
		}
	})
}

// A drive that hangs is no silent path: its target answers, at both portals alike.
func TestAPathWhoseTargetAnswersStays(t *testing.T) {
	railed(t, 1, 2, func(w *world) {
		w.mu.Lock()
		w.gone[w.wanted.At(0, 0).UUID] = true // I/O to the leg is not answered
		w.mu.Unlock()
		done := w.write(4096, 7)
		time.Sleep(3 * time.Second)
		if pending(done) {
			t.Fatal("the write is not acknowledged after the leg's window")
		}
		if w.moves() > 0 {
			t.Error("the path was moved")
		}
	})
}

// A target that keeps the host's old controller could still execute its writes: the path moves
// only after that controller must be gone, and until then the leg is lost as if it had one portal.
func TestAPathToATargetThatKeepsOldControllersMovesLate(t *testing.T) {
	railed(t, 1, 1, func(w *world) {
		w.mu.Lock()
		w.nodes["t0"].keeps = true
		w.mu.Unlock()
		w.fails("t0")
		done := w.write(4096, 7)
		time.Sleep(volume.Quiesce - time.Second)
		if !pending(done) || w.moves() > 0 {
			t.Error("the path was moved while the old controller may execute writes")
		}
		time.Sleep(2 * time.Second)
		if pending(done) || <-done != nil {
			t.Error("the write was not acknowledged through the other portal")
		}
	})
}

// The volume's only copy waits for its target, whichever portal that comes back at.
func TestTheLastCopyIsTriedAtEachOfItsPortals(t *testing.T) {
	railed(t, 1, 1, func(w *world) {
		at := w.activeAt("t0")
		w.fallSilent("t0")
		done := w.write(4096, 7)
		time.Sleep(20 * time.Second)
		w.mu.Lock()
		w.nodes["t0"].rails[at] = true
		w.mu.Unlock()
		w.answer("t0")
		time.Sleep(2 * time.Second)
		if pending(done) || <-done != nil {
			t.Error("the write was not acknowledged through the portal that works")
		}
	})
}

// A rail that is back is used again, after a while that doubles with each outage.
func TestAPathGoesBackToARailThatHasRecovered(t *testing.T) {
	railed(t, 1, 2, func(w *world) {
		home := w.activeAt("t0")
		back := func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.nodes["t0"].rails[home] = false
		}
		var away []time.Duration
		for range 3 {
			w.fails("t0")
			time.Sleep(2 * time.Second)
			back()
			began := time.Now()
			for w.activeAt("t0") != home {
				if time.Sleep(time.Second); time.Since(began) > 5*time.Minute {
					t.Fatalf("the path has not gone back; it was away for %v before", away)
				}
			}
			away = append(away, time.Since(began).Round(10*time.Second))
		}
		if want := []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second}; !slices.Equal(away, want) {
			t.Errorf("the path was away for %v, want %v", away, want)
		}
		for _, did := range w.took() {
			if !strings.HasPrefix(did, "move ") {
				t.Errorf("it did %q, want moves only", did)
			}
		}
	})
}

// A rail that stays down is not gone back to, and the operator is told while it is suspect.
func TestAPathDoesNotGoBackToARailThatIsDown(t *testing.T) {
	railed(t, 1, 2, func(w *world) {
		down := w.fails("t0")
		time.Sleep(2 * time.Second)
		if notes := w.keeper.State().Paths; !slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, down) && strings.Contains(n, "suspect") }) {
			t.Errorf("the suspects are %q, want %s", notes, down)
		}
		w.took()
		time.Sleep(5 * time.Minute)
		w.expect("while the rail was down")
	})
}

// An operator gives a target another portal, and takes the old one away.
func TestAPathFollowsThePortalsOfItsTarget(t *testing.T) {
	railed(t, 1, 2, func(w *world) {
		done := w.write(4096, 7)
		w.want(func(x *volume.Wanted) { x.Links[0].Portals = portalsOf("t0", "-c") })
		time.Sleep(10 * time.Second)
		if at := w.activeAt("t0"); at != "t0-c" {
			t.Errorf("the path is at %s, want t0-c", at)
		}
		if pending(done) || <-done != nil {
			t.Error("the write was not acknowledged")
		}
		w.expect("after the change", "move to t0-c")
	})
}

// atPort has a leg reached at the port of the part that serves it.
func atPort(l *volume.Link, port uint16) {
	for i := range l.Portals {
		l.Portals[i].Port = port
	}
}

// A leg of which a snapshot is to be taken changes from the kernel to the process of its target, and back later. The
// host follows it on the network on which it is, once the target has answered.
func TestAPathFollowsALegThatChangesHands(t *testing.T) {
	railed(t, 1, 2, func(w *world) {
		at := w.activeAt("t0")
		for _, c := range []struct {
			port uint16
			by   block.ServedBy
		}{{4422, block.InProcess}, {4420, block.InKernel}} {
			w.mu.Lock()
			w.changes = errors.New("not yet")
			w.mu.Unlock()
			done := w.write(4096, 7)
			w.want(func(x *volume.Wanted) { atPort(&x.Links[0], c.port) })
			asks := fmt.Sprintf("change to %v, asked beside %s:4420", c.by, at)
			time.Sleep(time.Minute)
			if got := slices.Compact(w.took()); !slices.Equal(got, []string{asks}) {
				t.Errorf("while the target refuses: %q, want %q", got, asks)
			}
			w.mu.Lock()
			w.changes = nil
			w.mu.Unlock()
			time.Sleep(time.Second)
			w.expect("after the change", asks, "move to "+at)
			if pending(done) || <-done != nil {
				t.Error("the write was not acknowledged")
			}
		}
		time.Sleep(time.Minute)
		w.expect("later")
	})
}

// A host that did not run, such as a virtual machine that was paused, may have answers that it has
// not taken yet: the pause counts as little.
func TestASilenceCountsOnlyWhileTheHostLooks(t *testing.T) {
	in(t, 1, 1, func(w *world) {
		w.until(serving)
		c := &fakeConn{w: w, node: "t0", at: "t0"}
		r := &reach{connection: c}
		r.look(time.Now(), true)
		w.fallSilent("t0")
		c.Unanswered()
		time.Sleep(3 * time.Second) // without a look
		for range 3 {
			r.look(time.Now(), true)
		}
		if d := time.Since(r.mute); d != keeper.LookInterval || !r.silent.Equal(r.mute) {
			t.Errorf("after a pause of 3 s the target counts as silent for %v, want the %v that pass without one", d, keeper.LookInterval)
		}
		r.watched = true
		for range 6 {
			time.Sleep(watchEvery)
			r.look(time.Now(), true)
		}
		if d := time.Since(r.mute); d != keeper.LookInterval+300*time.Millisecond {
			t.Errorf("0.3 s later it counts as silent for %v", d)
		}
		w.answer("t0")
		r.look(time.Now(), true)
		if !r.mute.IsZero() || !r.silent.IsZero() || r.looks+r.asked > 0 {
			t.Errorf("it has answered, and counts as silent for %v", time.Since(r.mute))
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"hash/crc32"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/pb"
)

// reading is like in, for a host that shares the volume read-only.
func reading(t *testing.T, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		a := w.attach()
		w.change(func(*pb.InitiatorWanted) { a.Mode = pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY })
		w.stop = w.start()
		w.until(serving)
		w.expect("attach", "connect t0", "connect t1", "create c0: "+w.mirror(), "create top: linear")
		for _, d := range w.devices {
			if !d.ReadOnly {
				t.Errorf("device %s is not read-only", d.Name)
			}
		}
		f(w)
	})
}

// mirror is the table of a column: each host prefers a copy of its own.
func (w *world) mirror() string {
	if crc32.ChecksumIEEE([]byte(w.identity().Short()))%2 == 1 {
		return "mirror t1 t0"
	}
	return "mirror t0 t1"
}

// none fails the test if the history contains one of the words.
func (w *world) none(words ...string) {
	w.t.Helper()
	for _, line := range w.took() {
		if slices.ContainsFunc(words, func(word string) bool { return strings.Contains(line, word) }) {
			w.t.Errorf("it did %q", line)
		}
	}
}

func TestWhoOnlyReadsLeavesALegAndComesBackByItself(t *testing.T) {
	reading(t, func(w *world) {
		w.stuck = true
		for _, name := range []string{"t0", "t1", "t0"} {
			w.fallSilent(name)
			time.Sleep(4 * time.Second)
			w.expect("without "+name, "destroy-sockets "+name, "disconnect "+name, "reload c0: linear")
			w.until(serving)
			w.answer(name)
			time.Sleep(5 * time.Second)
			w.expect(name+" is back", "connect "+name, "reload c0: "+w.mirror())
		}
	})
}

// A reader has no lease: no host may write until the reader can reach no leg any more.
func TestWhoOnlyReadsIsNotSuspended(t *testing.T) {
	reading(t, func(w *world) {
		w.stuck = true
		w.recordless = true
		w.fallSilent("t0")
		time.Sleep(10 * time.Second)
		w.fallSilent("t1")
		time.Sleep(30 * time.Second)
		w.none("suspend", "record")
		w.until(stalled)
		w.answer("t0")
		w.answer("t1")
		w.until(serving)
	})
}

func TestWhoOnlyReadsLetsGoWithoutAFlush(t *testing.T) {
	reading(t, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.took()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		w.until(clean)
		w.none("flush", "record")
		w.answer("t1")
		// Other hosts still have the epoch, so a host may return to it.
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = false })
		w.until(serving)
		w.expect("again", "connect t0", "connect t1", "create c0: "+w.mirror(), "create top: linear")
	})
}

func TestAnErrorOfALegThatIsOnlyReadIsForgiven(t *testing.T) {
	reading(t, func(w *world) {
		w.mu.Lock()
		w.health[w.refOf("t0")] = 'R'
		w.mu.Unlock()
		time.Sleep(7 * time.Second)
		w.expect("tried again at once, and after a while", "reload c0: "+w.mirror(), "reload c0: "+w.mirror())
		w.until(serving)
	})
}

func TestWhoOnlyReadsBeginsWithoutALegThatIsNotThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		a := w.attach()
		w.change(func(*pb.InitiatorWanted) { a.Mode = pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY })
		w.fallSilent("t1")
		w.stop = w.start()
		w.until(serving)
		w.none("record", "suspend", "t1")
		w.answer("t1")
		time.Sleep(10 * time.Second)
		w.expect("the other joins", "connect t1", "reload c0: "+w.mirror())
	})
}

// Several writers would all have to drop a lost copy together.
func TestOnlyVolumesOfOneCopyAreSharedForWriting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		a := w.attach()
		w.change(func(*pb.InitiatorWanted) { a.Mode = pb.AttachMode_ATTACH_MODE_SHARED_BLOCK })
		w.stop = w.start()
		time.Sleep(5 * time.Second)
		w.expect("nothing")
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, 1)
		a := w.attach()
		w.change(func(*pb.InitiatorWanted) { a.Mode = pb.AttachMode_ATTACH_MODE_SHARED_BLOCK })
		w.stop = w.start()
		w.until(serving)
		w.stop()
	})
}

// A host that was put out and let in again without noticing has a device of an old grant: the
// device ends although the epoch has not.
func TestADeviceEndsWithItsGrantThoughTheEpochStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 1)
		a := w.attach()
		w.change(func(*pb.InitiatorWanted) { a.Mode, a.Grant = pb.AttachMode_ATTACH_MODE_SHARED_BLOCK, 5 })
		w.stop = w.start()
		w.until(serving)
		w.took()
		w.change(func(*pb.InitiatorWanted) { a.Grant = 9 })
		time.Sleep(5 * time.Second)
		w.until(serving)
		w.expect("another grant", "remove top", "disconnect t0", "fail c0", "remove c0", "connect t0", "create c0: linear", "create top: linear")
		if r := w.attachment(); r.GetGrant() != 9 {
			t.Errorf("the report is about grant %d, want 9", r.GetGrant())
		}
		w.stop()
		w.took()
		w.stop = w.start() // the notes say by which grant it was built
		w.until(serving)
		time.Sleep(5 * time.Second)
		w.expect("the agent begins again", "suspend top", "resume top")
		w.stop()
	})
}
